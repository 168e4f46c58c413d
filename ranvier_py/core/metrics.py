"""Numbers for metrics and status, declared where they are counted and rendered elsewhere.

A component counts in one mutable dataclass whose fields are made by `counter`, `gauge` and `histogram`. `samples` reads
them on request; `values` returns the same numbers as JSON. A histogram counts how many values fall into each range, in
fixed memory: bounds are inclusive upper bounds, ascending, and one more bucket without a bound takes the rest. Series
that come with requests stand in a `Family`, of LINES_MAX lines at most; what has no room there counts as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal, NamedTuple

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""One millisecond (our own overhead) to ten minutes (as long as clients wait), about 2.3 times apart."""


OTHER = "other"
LINES_MAX = 10_000
"""Of one family in one answer: as many as a server of metrics is glad to take of one metric of one process."""


class Exemplar(NamedTuple):
    """One request that fell into a bucket. `at`: seconds since 1970."""

    trace_id: str
    value: float
    at: float


class Histogram:
    """Counts by bucket. `counts[i]` are observations in (bounds[i-1], bounds[i]]; the last one is above all bounds.

    Raises ValueError for bounds that are not finite or do not ascend.
    """

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or any(not abs(bound) < inf for bound in bounds):
            raise ValueError("a histogram needs finite bounds")
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError("bounds of a histogram must ascend")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # by bucket, the latest one of each

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value. NaN has no bucket: it is a bug of the caller, and would spoil the sum for ever."""
        assert value == value, "NaN observed"  # noqa: PLR0124  # the cheapest test for NaN
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float], traces: Sequence[str] = (), at: float = 0.0) -> None:
        """Count several values at once. `traces`: the trace of each, "" for none; `at`: the time of day."""
        buckets = list(map(partial(bisect_left, self.bounds), values))
        for bucket, count in Counter(buckets).items():
            self.counts[bucket] += count
        self.sum += sum(values)
        if any(traces):
            known = zip(buckets, traces, values, strict=True)
            self.exemplars |= {bucket: Exemplar(trace, value, at) for bucket, trace, value in known if trace}

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound, observations up to it) for every bucket; the last bound is infinity."""
        return list(zip((*self.bounds, inf), accumulate(self.counts), strict=True))

    def quantile(self, share: float) -> float:
        """Estimate the value below which this share (0 to 1) of the observations lies; NaN while there are none.

        Interpolates linearly inside a bucket. The first bucket starts at 0, or at its bound if that is negative; values
        above all bounds count as the highest bound.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError("a share is between 0 and 1")
        if self.count == 0:
            return float("nan")
        rank = share * self.count
        below = 0
        low = min(0.0, self.bounds[0])
        for bound, inside in zip(self.bounds, self.counts, strict=False):
            if inside and below + inside >= rank:
                return low + (bound - low) * max(0.0, rank - below) / inside
            below += inside
            low = bound
        return self.bounds[-1]

    def __repr__(self) -> str:
        median, tail = self.quantile(0.5), self.quantile(0.99)
        return f"<Histogram {self.count} observed, p50 {median:.4g} p99 {tail:.4g}>"


Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One time series at this moment.

    `name` ends with its unit and has neither our prefix nor `_total`: "requests", "first_token_seconds". All samples of
    one name have the same kind and help, and differ in their labels. Label values come from short lists, because each
    new one is a new time series for ever. Without a value there is no series yet, and of `labels` only the names count.
    """

    name: str
    kind: Kind
    help: str
    value: float | Histogram | None
    labels: Mapping[str, str] = field(default_factory=dict)


def counter(help_text: str, *, label: str = "") -> Any:
    """Declare a number that only grows. With `label`: a dict of such numbers, one for each value of that label."""
    return _declared("counter", help_text, label)


def gauge(help_text: str, *, label: str = "") -> Any:
    """Declare a number that rises and falls. With `label`: a dict of such numbers, one for each value of that label."""
    return _declared("gauge", help_text, label)


def histogram(help_text: str, bounds: Sequence[float]) -> Any:
    return field(default_factory=lambda: Histogram(bounds), metadata={"kind": "histogram", "help": help_text})


class LabelledCounts(dict[str, int]):
    """Numbers by the values of a label: those that were not counted yet are 0."""

    def __missing__(self, key: str) -> int:
        return 0


def _declared(kind: Kind, help_text: str, label: str) -> Any:
    metadata = {"kind": kind, "help": help_text, "label": label}
    return field(default_factory=LabelledCounts, metadata=metadata) if label else field(default=0, metadata=metadata)


class Family:
    """The series of one name that come with requests, by the values of their labels.

    Beyond LINES_MAX lines a new one counts under `other`, but for the labels `kept`. `spilled`: how often that was.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        *,
        bounds: Sequence[float] | None = None,
        kept: Sequence[str] = (),
    ) -> None:
        """With `bounds` each series is a histogram, else a number that only grows."""
        self.name, self.help, self.labels, self.bounds = name, help_text, tuple(labels), bounds
        self.kind: Kind = "counter" if bounds is None else "histogram"
        self.rows_max = LINES_MAX if bounds is None else LINES_MAX // (len(bounds) + 3)  # and +Inf, count and sum
        self.rows: dict[tuple[str, ...], Any] = {}
        self.spilled = 0
        self._kept = [label in kept for label in self.labels]

    def add(self, key: tuple[str, ...], count: float) -> None:
        """Add to a counter. `key`: the values of the labels, in their order."""
        key = self._room(key)
        self.rows[key] = self.rows.get(key, 0) + count

    def histogram(self, *key: str) -> Histogram:
        assert self.bounds is not None, f"{self.name} is a counter"
        key = self._room(key)
        if (row := self.rows.get(key)) is None:
            row = self.rows[key] = Histogram(self.bounds)
        assert isinstance(row, Histogram)
        return row

    def _room(self, key: tuple[str, ...]) -> tuple[str, ...]:
        if key in self.rows or len(self.rows) < self.rows_max:
            return key
        self.spilled += 1
        return tuple(value if kept else OTHER for value, kept in zip(key, self._kept, strict=True))

    def forget(self, label: str, value: str) -> None:
        """Drop the series of what has gone: a backend."""
        at = self.labels.index(label)
        self.rows = {key: row for key, row in self.rows.items() if key[at] != value}

    def samples(self) -> Iterator[Sample]:
        if not self.rows:
            yield Sample(self.name, self.kind, self.help, None, dict.fromkeys(self.labels, ""))
        for key, row in self.rows.items():
            yield Sample(self.name, self.kind, self.help, row, dict(zip(self.labels, key, strict=True)))


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
            if not value:
                yield Sample(name, kind, help_text, None, {**labels, each.metadata["label"]: ""})
            for key, number in value.items():
                yield Sample(name, kind, help_text, number, {**labels, each.metadata["label"]: str(key)})
        else:
            yield Sample(name, kind, help_text, value, labels)


def declared(part: str, counters: type, *labels: str) -> Iterator[Sample]:
    """Yield the families of a dataclass of which there may be none yet, without series. `labels`: those of each."""
    for each in fields(counters):
        if each.metadata:
            own = [label] if (label := each.metadata.get("label")) else []
            name, names = f"{part}_{each.name}", dict.fromkeys([*labels, *own], "")
            yield Sample(name, each.metadata["kind"], each.metadata["help"], None, names)


def values(counters: Any) -> dict[str, Any]:
    """Return the declared numbers as JSON."""
    found = {each.name: getattr(counters, each.name) for each in fields(counters) if each.metadata}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}
