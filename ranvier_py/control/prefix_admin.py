"""Continuum Router's tier 1 in its own terms: the decisions of the ring, in its JSON and as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ranvier_py.core.metrics import Sample
from ranvier_py.core.routing.placement.kv_score import ring_of
from ranvier_py.core.routing.router import Router
from ranvier_py.node.node import Node

STRATEGIES = ("prefix_hash", "overflow", "fallback")


def prefix_routing_view(node: Node) -> Mapping[str, Any]:
    """Answer GET /admin/prefix-routing/stats."""
    router = node.router
    ring = ring_of(router.policy)
    if ring is None:
        return {"enabled": False}
    decisions = {name: router.counters.decisions.get(name, 0) for name in STRATEGIES}
    total = sum(decisions.values())
    return {
        "enabled": True,
        "config": {
            "max_prefix_length": router.policy.opening_bytes,
            "prefix_source": router.policy.opening_source,
            "load_factor_epsilon": ring.options.load_factor_epsilon,
            "virtual_nodes": ring.options.virtual_nodes,
            "anthropic_cache_control_injection": node.config.anthropic_cache_control,
        },
        "routing_decisions": {
            "total": total,
            **decisions,
            "overflow_rate": f"{decisions['overflow'] / max(1, total):.4f}",
        },
        "backend_distribution": [
            {"backend": each.name, "in_flight_requests": each.inflight} for each in router.registry
        ],
        "unique_prefixes": ring.prefixes.estimate(),
    }


def prefix_routing_samples(router: Router) -> Iterator[Sample]:
    ring = ring_of(router.policy)
    if ring is None:
        return
    for name in STRATEGIES:
        count, labels = router.counters.decisions.get(name, 0), {"strategy": name}
        yield Sample(
            "prefix_routing_requests", "counter", "Placements by the policy chwbl, by strategy.", count, labels
        )
    words = "Requests in flight at each backend under prefix routing."
    for each in router.registry:
        yield Sample("prefix_routing_backend_distribution", "gauge", words, each.inflight, {"backend": each.name})
    words = "About how many different openings of prompts came."
    yield Sample("prefix_routing_prefix_cardinality", "gauge", words, ring.prefixes.estimate())
