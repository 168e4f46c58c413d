"""What benchmarks/residency feeds: streams of full caches, and a node that ends up with what the engine holds."""

from __future__ import annotations

from benchmarks.residency.residency_node import PARTS, apply_streams
from benchmarks.residency.residency_streams import make_streams
from ranvier_py.core.engine_cache.sources.event_values import Tier

CAPACITY_BLOCKS = 1024


def test_a_full_cache_removes_a_block_for_each_that_it_stores() -> None:
    """Else the benchmark measures something cheaper than it says."""
    streams = make_streams(CAPACITY_BLOCKS, 600, 1)
    assert streams.blocks >= 600
    assert abs(streams.blocks - streams.removed) < streams.blocks // 10
    assert streams.events > streams.removed


def test_the_node_holds_what_the_engine_does_and_reports_the_route_table() -> None:
    streams = make_streams(CAPACITY_BLOCKS, 600, 2)
    node, blocks, spent = apply_streams([streams], 2, engine_caches=True)
    assert blocks == 2 * streams.blocks
    assert len(spent) == len(PARTS)
    assert all(took > 0 for took in spent)
    for engine in node.engines:
        counts, view = engine.residency.counters, engine.residency.view()
        assert counts.removed_unknown == counts.opaque == engine.decoder.counters.unread == 0
        assert 0 < view.blocks <= CAPACITY_BLOCKS
        assert sum(engine.residency.copies(Tier.GPU).values()) == counts.stored - counts.removed
    assert node.engine_caches is not None
    assert 0 < len(node.routes) <= node.engine_caches.counters.confirmed
