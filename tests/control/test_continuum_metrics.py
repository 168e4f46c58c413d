"""The metrics of Continuum Router's document by its own names, so that its queries find them."""

from __future__ import annotations

import json
import re

import trio

from ranvier_py.control.exposition import CONTINUUM, render
from ranvier_py.core.metrics import Sample
from tests.node.node_lab import DEADLINE_S, MODEL, Lab, opened, turn

LABELS = {
    "continuum_prefix_routing_requests_total": {"strategy"},
    "continuum_prefix_routing_backend_distribution": {"backend"},
    "continuum_prefix_routing_prefix_cardinality": set(),
    "continuum_response_cache_requests_total": {"result"},
    "continuum_response_cache_entries": set(),
    "continuum_response_cache_size_bytes": set(),
    "continuum_response_cache_evictions_total": set(),
    "continuum_response_cache_hit_rate": set(),
    "continuum_cache_backend_type": {"backend"},
    "continuum_kv_event_received_total": {"backend"},
    "continuum_kv_event_processed_total": {"backend"},
    "continuum_kv_event_dropped_total": {"backend"},
    "continuum_kv_consumer_connected": {"backend"},
    "continuum_kv_consumer_reconnects_total": {"backend"},
    "continuum_kv_index_entries": set(),
    "continuum_kv_index_events_total": {"backend", "type"},
    "continuum_kv_index_query_latency_seconds_bucket": {"le"},
    "continuum_kv_index_routing_decisions_total": {"decision"},
    "continuum_kv_index_overlap_score_bucket": {"le"},
    "continuum_kv_index_event_source_status": {"backend", "status"},
}  # fmt: skip
"""The document's tables, but for tier 3."""


async def page_of(names: str) -> str:
    """The metrics of a node with all of this, after an answer that was cached."""
    async with opened(Lab, 2, DEADLINE_S) as place:
        events = await place.listen(hang)
        backends = [f"{url},name=vllm-{n},kv_index={events}/{n}" for n, url in enumerate(place.engines)]
        settings = {"backend": backends, "policy": "kv_score", "response_cache": True, "metric_names": names}
        node = await place.start(**settings)
        for _ in range(2):
            body = {"model": MODEL, "messages": turn("hello"), "max_tokens": 4, "temperature": 0}
            await node.http.post(f"{node.url}/v1/chat/completions", content=json.dumps(body))
        return (await node.http.get(f"{node.control}/metrics")).text


async def hang(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def test_cr22_the_documents_metrics_have_its_names_and_labels() -> None:
    page = await page_of("continuum")
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"(?m)^(continuum_\w+)(?:\{(.*)\})? ", page):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    assert {name: found.get(name) for name in LABELS} == LABELS
    for line in (
        'continuum_response_cache_requests_total{result="hit"} 1.0',
        'continuum_response_cache_requests_total{result="miss"} 1.0',
        'continuum_response_cache_requests_total{result="skip"} 0.0',
        "continuum_response_cache_hit_rate 0.5",
        'continuum_cache_backend_type{backend="memory"} 1.0',
    ):
        assert line in page
    assert "ranvier_kv_" not in page
    assert "ranvier_decisions_total" in page, "what the document has not keeps our names"


async def test_without_the_option_every_name_is_ours() -> None:
    page = await page_of("ranvier")
    assert "continuum_" not in page
    assert {name.replace("continuum_", "ranvier_") for name in LABELS} <= set(re.findall(r"(?m)^(\w+)", page))


def test_a_name_that_the_document_lacks_keeps_our_prefix() -> None:
    samples = [Sample("kv_index_entries", "gauge", "Pairs.", 1), Sample("kv_index_other", "gauge", "Other.", 1)]
    page = render(samples, names="continuum")[0].decode()
    assert "\ncontinuum_kv_index_entries 1.0\n" in page
    assert "\nranvier_kv_index_other 1.0\n" in page
    assert all(name == name.lower() for name in CONTINUUM)
