"""Numbers for metrics and status, declared where they are counted and rendered elsewhere.

A component counts in one mutable dataclass whose fields are made by `counter`, `gauge` and `histogram`. `samples` reads
them on request; `values` returns the same numbers as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ranvier_py.core.histogram import Histogram

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One time series at this moment.

    `name` ends with its unit and has neither our prefix nor `_total`: "requests", "first_token_seconds". All samples of
    one name have the same kind and help, and differ in their labels. Label values come from short lists, because each
    new one is a new time series for ever.
    """

    name: str
    kind: Kind
    help: str
    value: float | Histogram
    labels: Mapping[str, str] = field(default_factory=dict)


def counter(help_text: str, *, label: str = "") -> Any:
    """Declare a number that only grows. With `label`: a dict of such numbers, one for each value of that label."""
    return _declared("counter", help_text, label)


def gauge(help_text: str, *, label: str = "") -> Any:
    """Declare a number that rises and falls. With `label`: a dict of such numbers, one for each value of that label."""
    return _declared("gauge", help_text, label)


def histogram(help_text: str, bounds: Sequence[float]) -> Any:
    return field(default_factory=lambda: Histogram(bounds), metadata={"kind": "histogram", "help": help_text})


def _declared(kind: Kind, help_text: str, label: str) -> Any:
    metadata = {"kind": kind, "help": help_text, "label": label}
    return field(default_factory=dict, metadata=metadata) if label else field(default=0, metadata=metadata)


def increment(counts: dict[str, int], key: str) -> None:
    """Add one to a counter with a label."""
    counts[key] = counts.get(key, 0) + 1


def samples(part: str, counters: Any, labels: Mapping[str, str] = {}) -> Iterator[Sample]:  # only read
    """Yield one sample for each declared field of a dataclass, or for each key of a field with a label.

    Names begin with `part`, if there is one.
    """
    for each in fields(counters):
        if not each.metadata:
            continue
        name = f"{part}_{each.name}" if part else each.name
        kind, help_text = each.metadata["kind"], each.metadata["help"]
        value = getattr(counters, each.name)
        if isinstance(value, Mapping):
            for key, number in value.items():
                yield Sample(name, kind, help_text, number, {**labels, each.metadata["label"]: str(key)})
        else:
            yield Sample(name, kind, help_text, value, labels)


def values(counters: Any) -> dict[str, Any]:
    """Return the declared numbers as JSON."""
    found = {each.name: getattr(counters, each.name) for each in fields(counters) if each.metadata}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}
