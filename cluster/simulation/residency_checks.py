"""What must come about where engines tell what they hold: who reads them, and whether all nodes know the truth.

    L9   once all is quiet each engine's events are read by one node, and known exactly, where the scenario asks for it
    L10  of what nodes believe at the end no more is wrong, and of what engines hold no more is unknown, than it allows
Claims count at depths that have tokens; what engines hold counts at the depths that prompts were asked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.simulation.invariants import Invariants
from cluster.simulation.sim_host import SimHost
from cluster.simulation.world import World
from ranvier_py.core.engine_cache.gap_values import Level


class SimResidencies:
    """Of one run; nothing where no engine publishes."""

    def __init__(self, world: World, invariants: Invariants) -> None:
        self.world = world
        self.invariants = invariants
        self.expect = world.scenario.expect

    def end(self) -> None:
        """All that is asked of the end. Raises Violated."""
        streams, expect, fail = self.world.streams, self.expect, self.invariants.fail
        if streams is None:
            return
        for engine in self.world.engines:
            readers = streams.readers(engine.number)
            names = tuple(host.index for host in readers)
            if expect.one_reader and len(readers) != 1:
                fail("L9", names, f"the events of engine {engine.number} are read by {len(readers)} nodes")
            if expect.exact and Level.EXACT not in [level_of(host, engine.number) for host in readers]:
                levels = [str(level_of(host, engine.number)) for host in readers]
                fail("L9", names, f"nobody knows engine {engine.number} exactly: {levels}")
        wrong, unknown = self.wrong(), self.unknown()
        if expect.wrong_share_max is not None and wrong > expect.wrong_share_max:
            fail("L10", (), f"{wrong:.4f} of all claims are wrong, bound {expect.wrong_share_max:g}")
        if expect.unknown_share_max is not None and unknown > expect.unknown_share_max:
            fail("L10", (), f"{unknown:.4f} of what is held is unknown, bound {expect.unknown_share_max:g}")

    def wrong(self) -> float:
        """Share of the claims of all nodes on what the engine does not hold."""
        claims = [(engine, name) for host in self.world.live() for engine, name in self._claims(host)]
        false = sum(not self.world.engines[engine].holds(name) for engine, name in claims)
        return round(false / len(claims), 4) if claims else 0.0

    def unknown(self) -> float:
        """Share of what engines hold, at the depths of prompts, of which a node does not know."""
        words, count, missing = self.world.clients.words, 0, 0
        names = list(words.keys) if words is not None else []
        held = [(engine.number, name) for engine in self.world.engines for name in names if engine.holds(name)]
        for host in self.world.live():
            for engine, name in held:
                count += 1
                missing += host.node is None or not host.node.holds(name, engine, self.world.heap.now)
        return round(missing / count, 4) if count else 0.0

    def measures(self) -> dict[str, Any]:
        """What came out."""
        streams = self.world.streams
        if streams is None:
            return {}
        levels = [level_of(host, one.number) for one in self.world.engines for host in streams.readers(one.number)]
        return {
            "kv_messages": sum(kv.published for kv in streams.kvs),
            "kv_readers": len(levels),
            "kv_readers_most": streams.most_readers,
            "kv_exact": levels.count(Level.EXACT),
            "kv_wrong_share": self.wrong(),
            "kv_unknown_share": self.unknown(),
        }

    def _claims(self, host: SimHost) -> Iterator[tuple[int, int]]:
        engine_caches = host.node.engine_caches if host.node is not None else None
        return engine_caches.claims(self.world.heap.now) if engine_caches is not None else iter(())


def level_of(host: SimHost, engine: int) -> Level | None:
    engine_caches = host.node.engine_caches if host.node is not None else None
    return engine_caches.level(engine) if engine_caches is not None else None
