"""Samples -> the text that Prometheus reads.

Metrics are pulled: whoever asks gets what is true now, from a list of samples made for this answer. There is no
registry that outlives it, so many nodes fit in one process. Names get the prefix `ranvier_`, counters the suffix
`_total`. The format is the classic text one, or OpenMetrics where the client's Accept header asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any, cast

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ranvier_py.core.histogram import Histogram
from ranvier_py.core.metrics import Sample

PREFIX = "ranvier_"


class Samples(Collector):
    """A collector of one answer's samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """The families in the order of their first sample."""
        families: dict[str, list[Sample]] = {}
        for sample in self._samples:
            families.setdefault(sample.name, []).append(sample)
        yield from map(family, families.values())


def family(samples: Sequence[Sample]) -> Metric:
    """All series of one name."""
    first = samples[0]
    assert all((sample.kind, sample.help) == (first.kind, first.help) for sample in samples), (
        f"two kinds of {first.name}"
    )
    metric = Metric(PREFIX + first.name, first.help, first.kind)
    for sample in samples:
        for suffix, labels, value in series(sample):
            metric.add_sample(metric.name + suffix, labels, value)
    return metric


def series(sample: Sample) -> Iterable[tuple[str, dict[str, str], float]]:
    """(suffix of the name, labels, value) of each line of a sample."""
    labels = dict(sample.labels)
    if not isinstance(sample.value, Histogram):
        assert sample.kind != "histogram", f"{sample.name} is a histogram and has a plain value"
        return [("_total" if sample.kind == "counter" else "", labels, sample.value)]
    assert sample.kind == "histogram", f"{sample.name} is no histogram and has one"
    histogram = sample.value
    lines = [("_bucket", {**labels, "le": le(bound)}, float(n)) for bound, n in histogram.cumulative()]
    return [*lines, ("_count", labels, float(histogram.count)), ("_sum", labels, histogram.sum)]


def le(bound: float) -> str:
    return "+Inf" if bound == inf else repr(float(bound))


def render(samples: Sequence[Sample], accept: str = "") -> tuple[bytes, str]:
    """(body, content type) for a client with this Accept header."""
    encode, content_type = choose_encoder(accept)
    return encode(cast("Any", Samples(samples))), content_type  # of a registry it asks no more than to collect
