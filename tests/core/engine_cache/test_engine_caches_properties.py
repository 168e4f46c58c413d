"""After any history, and a whole sweep at EXACT, the table says of an engine what it holds: no more, no less."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.engine_caches import GRACE_S, EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, Tier
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import is_anchor
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import Trust
from tests.builders.route_tables import route_table
from tests.core.engine_cache.model import SIZE, Model, fingerprint, hasher, namespace_of
from tests.examples import examples

ENGINE, OTHER = BackendId(0), BackendId(1)
STREAM = Source(ENGINE, "zmq/0")
PATHS = [[0] * 20, [0, 0, 0, 1] * 5, [0] * 9 + [1] * 11, [1, 0] * 3]
"""Prompts, each number a block of 16 equal tokens; some share their beginnings."""

actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "store", "offload", "remove", "remove", "learn", "learn", "restart", "settle", "sweep"]
        ),
        st.integers(0, 3),
        st.integers(1, 20),
        st.integers(0, 5),
    ),
    max_size=40,
)


def tokens(path: list[int]) -> list[int]:
    return [bit for bit in path for _ in range(SIZE)]


class World:
    """An engine, its residency, and the table that follows it."""

    def __init__(self, width: int, capacity: int) -> None:
        self.now = 10.0
        self.width = width  # blocks of ours in one of the engine's
        self.generations = [0, 0]
        self.routes = route_table(capacity=capacity, ttl_s=1e6)
        self.routes.outgoing.collect()
        self.engine_caches = EngineCaches(
            self.routes, lambda backend: self.generations[backend], restarted=self.restarted
        )
        self.model, self.residency = Model(), Residency(hasher(), namespace_of)
        self.engine_caches.open(STREAM, self.residency, self.now)
        self.engine_caches.set_level(STREAM, Level.EXACT, "", self.now)

    def restarted(self, backend: BackendId, _why: str, _now: float) -> int:
        self.generations[backend] += 1
        return self.generations[backend]

    def do(self, what: str, path: list[int], depth: int, number: int) -> None:
        self.now += 1.0
        path = path[:depth]
        if what in ("store", "offload"):
            self.store(path, "CPU" if what == "offload" else None)
        elif what == "remove":
            self.remove(path)
        elif what == "learn":
            backend, trust = (ENGINE, OTHER)[number % 2], (Trust.LOCAL, Trust.REMOTE)[number // 2 % 2]
            self.routes.learn(self.chain(path, number), backend, self.generations[backend], trust, self.now)
        elif what == "restart":
            self.model.copies.clear()
            self.residency.clear()
        elif what == "settle":
            self.settle(1 + 10 * number)
        else:
            self.engine_caches.sweep(self.now, 3 * number)

    def keys(self, path: list[int]) -> list[int]:
        return [int("1" + "".join(map(str, path[: end + self.width])), 2) for end in self.starts(path)]

    def starts(self, path: list[int]) -> range:
        return range(0, len(path) - self.width + 1, self.width)

    def store(self, path: list[int], medium: str | None) -> None:
        """What is not there of it."""
        keys = self.keys(path)
        tier = Tier.CPU if medium else Tier.GPU
        first = next((place for place, key in enumerate(keys) if not self.model.copies.get((key, tier))), len(keys))
        new = keys[first:]
        if not new:
            return
        data = array("I", tokens(path[first * self.width : len(keys) * self.width])).tobytes()
        event = BlocksStored(
            hashes=tuple(new),
            parent=keys[first - 1] if first else None,
            token_bytes=data,
            block_tokens=SIZE * self.width,
            medium=medium,
            extra_keys=((),),  # its start is told, on whichever tier
        )
        self.model.apply(event)
        self.residency.apply(event)

    def remove(self, path: list[int]) -> None:
        for key in self.keys(path)[-1:]:
            for tier in (Tier.GPU, Tier.CPU):
                if self.model.copies.get((key, tier)):
                    event = BlocksRemoved(hashes=(key,), medium="CPU" if tier is Tier.CPU else None)
                    self.model.apply(event)
                    self.residency.apply(event)

    def chain(self, path: list[int], number: int) -> list[PrefixKey]:
        """A chat whose messages end at every so many blocks, tokenized; deepest first."""
        step = 3 + number
        found: list[PrefixKey] = []
        for depth in range(len(path), 0, -1):
            name = fingerprint(tokens(path[:depth]))
            if depth % step == 0 or depth == len(path):
                found.append((depth * SIZE, name, name ^ step))
            elif is_anchor(depth):
                found.append((depth * SIZE, name, 0))
        return found

    def settle(self, steps: int = 100) -> Changes:
        changes = self.residency.settle(steps)
        self.engine_caches.changed(STREAM, changes, self.now)
        return changes

    def sent(self) -> dict[int, tuple[bool, int]]:
        """Live claims of the engine at rows with tokens: CONFIRMED or not, and whether below the GPU."""
        found = {}
        for view in self.routes.subtree(0, limit=len(self.routes)):
            key = (view.tokens, view.token_fingerprint, 0)
            holders = self.routes.match([key], self.generations, self.now, touch=False) if key[1] else ()
            for holder in holders:
                if holder.backend == ENGINE:
                    found[key[1]] = (holder.trust == Trust.CONFIRMED, holder.tier)
        return found

    def heal(self) -> None:
        """Everything has arrived, the grace is over, and the sweeps came round."""
        while not self.settle().complete:
            pass
        self.now += GRACE_S + 2.0
        for _ in range(2):
            self.engine_caches.sweep(self.now, 10_000)
            self.routes.sweep(self.now, self.generations, 10_000)


@settings(max_examples=examples(120))
@given(st.sampled_from([1, 2]), actions)
def test_after_a_whole_sweep_the_table_has_what_the_engine_holds(
    width: int, todo: list[tuple[str, int, int, int]]
) -> None:
    world = World(width, 10_000)
    for what, path, depth, number in todo:
        world.do(what, PATHS[path], depth, number)
    world.heal()
    held = world.model.tiers()
    depths = {fingerprint(tokens(path[:depth])): depth for path in PATHS for depth in range(1, len(path) + 1)}
    rows = {name for name in depths if world.routes.prefix_key_of(name) is not None}
    wanted = {name for name in held if name in rows or is_anchor(depths[name])}
    assert world.sent() == {name: (True, int(held[name] is not Tier.GPU)) for name in wanted}


@settings(max_examples=examples(60))
@given(actions)
def test_a_table_that_evicts_has_nothing_that_is_not_held(todo: list[tuple[str, int, int, int]]) -> None:
    world = World(1, 12)
    for what, path, depth, number in todo:
        world.do(what, PATHS[path], depth, number)
        rows, claims = world.routes.rows, world.routes.claims
        assert all(rows.parent[row] >= 0 for row in claims.lowered), "a tier of a row that is gone"
    world.heal()
    held = world.model.tiers()
    assert all(world.sent()[name] == (True, int(held.get(Fingerprint(name)) is not Tier.GPU)) for name in world.sent())
    assert world.sent().keys() <= held.keys()
