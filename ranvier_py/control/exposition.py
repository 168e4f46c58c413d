"""Renders samples as the text that Prometheus reads.

Metrics are pulled: each answer is made from a list of samples taken for it. No registry outlives the answer, so many
nodes fit in one process. Names get the prefix `ranvier_`, counters the suffix `_total`. On request, metrics of
Continuum Router's document get its prefix, so that queries for it work. The format is the classic text format, or
OpenMetrics if the client's Accept header asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any, cast

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from ranvier_py.core.metrics import Histogram, Sample

PREFIX, CONTINUUM_PREFIX = "ranvier_", "continuum_"

CONTINUUM = frozenset(
    """
    prefix_routing_requests prefix_routing_backend_distribution prefix_routing_prefix_cardinality
    response_cache_requests response_cache_entries response_cache_size_bytes response_cache_evictions
    response_cache_hit_rate cache_backend_type cache_redis_connections_active cache_redis_connections_idle
    cache_redis_latency_seconds cache_redis_errors cache_fallback_active
    kv_event_received kv_event_processed kv_event_dropped kv_consumer_connected kv_consumer_reconnects
    kv_index_entries kv_index_events kv_index_query_latency_seconds kv_index_routing_decisions kv_index_overlap_score
    kv_index_event_source_status
    """.split()  # noqa: SIM905  # by section
)
"""Names of samples that the document defines (CR22)."""


class Samples(Collector):
    """A collector of one answer's samples."""

    def __init__(self, samples: Sequence[Sample], names: str, process: Iterable[Metric]) -> None:
        self._samples, self._names, self._process = samples, names, process

    def collect(self) -> Iterator[Metric]:
        """Yield the families in the order of their first sample."""
        families: dict[str, list[Sample]] = {}
        for sample in self._samples:
            families.setdefault(sample.name, []).append(sample)
        for name, found in families.items():
            yield family(found, CONTINUUM_PREFIX if self._names == "continuum" and name in CONTINUUM else PREFIX)
        yield from self._process


def family(samples: Sequence[Sample], prefix: str) -> Metric:
    """Return the family of all series of one name."""
    first = samples[0]
    assert all((sample.kind, sample.help) == (first.kind, first.help) for sample in samples), (
        f"two kinds of {first.name}"
    )
    metric = Metric(prefix + first.name, first.help, first.kind)
    for sample in samples:
        if sample.value is not None:
            for suffix, labels, value, exemplar in series(sample):
                metric.add_sample(metric.name + suffix, labels, value, exemplar=exemplar)
    return metric


def series(sample: Sample) -> Iterable[tuple[str, dict[str, str], float, Exemplar | None]]:
    """Return (suffix of the name, labels, value, exemplar) of each line of a sample."""
    labels, histogram = dict(sample.labels), sample.value
    if not isinstance(histogram, Histogram):
        assert sample.kind != "histogram", f"{sample.name} is a histogram and has a plain value"
        assert histogram is not None, f"{sample.name} has no series yet"
        return [("_total" if sample.kind == "counter" else "", labels, histogram, None)]
    assert sample.kind == "histogram", f"{sample.name} is no histogram and has one"
    lines = [
        ("_bucket", {**labels, "le": le(bound)}, float(count), exemplar_of(histogram, bucket))
        for bucket, (bound, count) in enumerate(histogram.cumulative())
    ]
    if histogram.bounds[0] < 0:  # its sum may fall, which OpenMetrics forbids, and a count there is only beside a sum
        return lines
    return [*lines, ("_count", labels, float(histogram.count), None), ("_sum", labels, histogram.sum, None)]


def exemplar_of(histogram: Histogram, bucket: int) -> Exemplar | None:
    """Return a request of this bucket, which only OpenMetrics shows."""
    found = histogram.exemplars.get(bucket)
    return None if found is None else Exemplar({"trace_id": found.trace_id}, found.value, found.at)


def le(bound: float) -> str:
    return "+Inf" if bound == inf else repr(float(bound))


def of_process() -> Iterable[Metric]:
    """Return `process_*` of this process: processor time, memory, descriptors, its start."""
    return ProcessCollector(registry=None).collect()


def render(
    samples: Sequence[Sample], accept: str = "", names: str = "ranvier", process: Iterable[Metric] = ()
) -> tuple[bytes, str]:
    """Return (body, content type) for a client with this Accept header; `names` is the key `metric_names`."""
    encode, content_type = choose_encoder(accept)
    return encode(cast("Any", Samples(samples, names, process))), content_type  # it calls only `collect` of a registry
