"""Numbers of a frozen dataclass as samples, where they are not declared as counters yet. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from ranvier_py.core.histogram import Histogram
from ranvier_py.core.metrics import Sample


def plain_samples(part: str, statistics: Any, gauges: tuple[str, ...]) -> Iterator[Sample]:
    """One sample for each number of a frozen statistics value; what is counted by a key gets the key as label."""
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        kind: Literal["gauge", "counter"] = "gauge" if field.name in gauges else "counter"
        name = f"{part}_{field.name}"
        help_text = f"{field.name.replace('_', ' ')} of the {part}."
        if is_dataclass(value) and not isinstance(value, type):
            value = {inner.name: getattr(value, inner.name) for inner in fields(value)}
        if isinstance(value, Mapping):
            for key, number in value.items():
                yield Sample(name, kind, help_text, number, {"kind": str(key)})
        elif isinstance(value, Histogram):
            yield Sample(name, "histogram", help_text, value)
        elif isinstance(value, int | float):
            yield Sample(name, kind, help_text, value)
