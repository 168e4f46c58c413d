"""Stores and removals of blocks that have our names, against a walk over all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.named_blocks import NamedBlocks
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.route_table import RouteTable, Trust

BLOCK = 16
PATHS = ((1, 2, 3, 4, 5), (1, 2, 13, 14), (21, 22, 23))
"""Prompts by the names of their blocks; two share a beginning."""

steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear", "look"]),
        st.sampled_from(PATHS),
        st.integers(0, 4),
        st.integers(1, 5),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_what_is_reported_sums_up_to_what_a_walk_finds(todo: list[tuple[str, tuple[int, ...], int, int]]) -> None:
    blocks = NamedBlocks(BLOCK)
    copies: dict[int, int] = {}
    received: dict[int, int] = {}

    def look() -> None:
        changes = blocks.changes()
        if changes.cleared:
            received.clear()
        for change in changes.changes:
            assert (change.fingerprint in received) is (change.tier is Tier.ABSENT)
            if change.tier is Tier.ABSENT:
                del received[change.fingerprint]
            else:
                received[change.fingerprint] = change.tokens

    for what, path, start, count in todo:
        if what == "store" and (start == 0 or all(copies.get(name) for name in path[:start])):
            blocks.stored(path[start : start + count], path[start - 1] if 0 < start <= len(path) else 0)
            for name in path[start : start + count]:
                copies[name] = copies.get(name, 0) + 1
        elif what == "remove":
            name = path[min(start, len(path) - 1)]
            blocks.removed(name)
            copies[name] = max(0, copies.get(name, 0) - 1)
        elif what == "clear":
            blocks.cleared()
            copies.clear()
        else:
            look()
    look()
    wanted = {
        name: BLOCK * (depth + 1)
        for path in PATHS
        for depth, name in enumerate(path)
        if all(copies.get(each) for each in path[: depth + 1])
    }
    assert received == wanted
    assert all(blocks.tier(name) is (Tier.GPU if name in wanted else Tier.ABSENT) for path in PATHS for name in path)
    for left in [name for name in copies for _ in range(copies[name])]:
        blocks.removed(left)
    assert not blocks._blocks, "what nobody holds is forgotten"


def test_a_block_that_went_and_came_back_between_two_looks_is_no_updates() -> None:
    blocks = NamedBlocks(BLOCK)
    blocks.stored((1, 2))
    assert len(blocks.changes().changes) == 2
    blocks.removed(2)
    blocks.stored((2,), 1)
    assert not blocks.changes().changes


def test_a_modelled_engine_is_known_exactly_by_the_table() -> None:
    routes, engine = RouteTable(capacity=100), BackendId(0)
    engine_caches, source, blocks = EngineCaches(routes, lambda _: 1), Source(engine, "replay"), NamedBlocks(BLOCK)
    engine_caches.open(source, blocks, 0.0)
    engine_caches.set_level(source, Level.EXACT, "it is a model", 0.0)
    blocks.stored((1, 2, 3, 4, 5))
    engine_caches.changed(source, blocks.changes(), 1.0)
    chain = [(80, 5, 0), (64, 4, 0), (32, 2, 0), (16, 1, 0)]
    assert routes.match(chain, [1], 2.0) == [Holder(engine, 64, Trust.CONFIRMED)]
    routes.learn(chain, engine, 1, Trust.LOCAL, 2.0)
    blocks.removed(4)
    engine_caches.changed(source, blocks.changes(), 3.0)
    assert routes.match(chain, [1], 3.0) == [Holder(engine, 32, Trust.CONFIRMED)]


def test_what_continues_an_unknown_block_is_left_out() -> None:
    blocks = NamedBlocks(BLOCK)
    blocks.stored((8, 9), 7)
    assert not blocks.changes().changes
