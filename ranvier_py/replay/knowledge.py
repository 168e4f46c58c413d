"""What the routers of a replay know of the engines' caches, beside what they have learned from requests.

`estimated`: nothing more. `calibrated`: what the counts in answers and the engines' own metrics teach, as each node
does for engines that publish no events. `events`: the engines publish what they store and drop; one node reads each
engine, and the others learn of it as peers do.

Two more are there to compare with. `attention`: of these events those of keys and values alone, which is what routers
read that do not know of states. `oracle`: routers see into the caches what each engine would reuse (`SeeingRouter`).

Rule: an event is read before the next request that any node places or sees answered; from there on it takes as long as
gossip does. Bound: `EVENTS_MAX` events of an engine between two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np

from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, CacheCleared
from ranvier_py.core.engine_cache.states import StateMoved
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.prompts.boundaries import TokenIds
from ranvier_py.core.prompts.fingerprint import TokenHasher, TokenState
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.router import Router
from ranvier_py.replay.engine.block_cache import CacheEvent, KeyRemoved, KeysStored, StateRemoved, StateStored
from ranvier_py.replay.engine.model import EngineModel

KnowledgeName = Literal["estimated", "calibrated", "events", "attention", "oracle"]
KNOWLEDGE: tuple[KnowledgeName, ...] = ("estimated", "calibrated", "events")
"""What nodes have."""

EVENTS_MAX = 1 << 20
"""More than one step of an engine can bring."""

TICK_S = 1.0  # as a node does
METRICS_S = 5.0  # as a node does by default
SWEEP_ROWS_MAX = 2000

NAME_TOKENS = 2
"""A name has the size of so many tokens."""

STATES = 1
"""The group of caches that keeps a hybrid model's states, behind that of attention."""

WITHOUT_BOUND = 1 << 62
"""Of what a model holds and of what is looked at at once: the model itself is bounded."""


def make_knowledge(
    name: KnowledgeName, routers: Sequence[Router], engines: Sequence[EngineModel], block_tokens: int
) -> Calibrated | EventReaders | None:
    """None: nothing more. `engines` must record their cache events where these are to be read."""
    if name == "calibrated":
        return Calibrated(routers, engines, block_tokens)
    if name in ("events", "attention"):
        return EventReaders(routers, engines, block_tokens, states=name == "events")
    return None


class Calibrated:
    """Each router learns from answers; what engines say of their size is read by one, in turn."""

    def __init__(self, routers: Sequence[Router], engines: Sequence[EngineModel], block_tokens: int) -> None:
        self._routers = routers
        self._engines = engines
        self.calibrations = [
            Calibration(router.routes, block_tokens=block_tokens, checkpoints=router.checkpoints) for router in routers
        ]
        self._ticked_at = self._looked_at = 0.0
        for router, calibration in zip(routers, self.calibrations, strict=True):
            router.observers += (calibration,)
        self._look_at_metrics()

    def look(self, now: float) -> Sequence[int]:
        """Take in what has come. Returns the nodes whose routes changed by it."""
        if now >= self._looked_at + METRICS_S:
            self._looked_at = now
            self._look_at_metrics()
        if now >= self._ticked_at + TICK_S:
            self._ticked_at = now
            for calibration in self.calibrations:
                calibration.tick(now)
        return ()

    def _look_at_metrics(self) -> None:
        for engine, model in enumerate(self._engines):
            node = engine % len(self._routers)
            known, limits = self._routers[node].registry[BackendId(engine)], model.limits
            reported = EngineMetrics(capacity_tokens=limits.cache_tokens, block_tokens=limits.block_size)
            self.calibrations[node].report(known.id, known.url, known.generation, reported)


class EventReaders:
    """Each engine's events are read by one node, in turn. `states`: those of a hybrid model's states, too."""

    def __init__(
        self, routers: Sequence[Router], engines: Sequence[EngineModel], block_tokens: int, *, states: bool = True
    ) -> None:
        self._caches = [engine_caches_of(router, block_tokens) for router in routers]
        self._engines = engines
        self._blocks = [NamedBlocks(block_tokens) for _ in engines]
        self._states = states
        self._swept_at = 0.0
        for engine, blocks in enumerate(self._blocks):
            source = Source(BackendId(engine), "events")
            caches = self._caches[self._reader(engine)]
            caches.open(source, blocks, 0.0)
            caches.set_level(source, Level.EXACT, "a model reports everything", 0.0)

    def look(self, now: float) -> Sequence[int]:
        touched: dict[int, None] = {}
        for engine, model in enumerate(self._engines):
            if model.cache.has_events and self._read(engine, now):
                touched[self._reader(engine)] = None
        if now >= self._swept_at + TICK_S:
            self._swept_at = now
            for node, caches in enumerate(self._caches):
                if caches.sweep(now, SWEEP_ROWS_MAX):
                    touched[node] = None
        return tuple(touched)

    def _reader(self, engine: int) -> int:
        return engine % len(self._caches)

    def _read(self, engine: int, now: float) -> bool:
        blocks = self._blocks[engine]
        for event in self._engines[engine].cache.drain_events():  # a new process has another cache
            if self._states or not isinstance(event, StateStored | StateRemoved):
                blocks.read(event)
        changes = blocks.changes()
        if changes.cleared or changes.changes or changes.states is not None:
            self._caches[self._reader(engine)].changed(Source(BackendId(engine), "events"), changes, now)
            return True
        return False


class NameHasher(TokenHasher):
    """Hashes nothing: what stands where the tokens of a block would is its fingerprint."""

    def __init__(self) -> None:
        super().__init__(b"", NAME_TOKENS)

    def every_block(self, jobs: Sequence[tuple[TokenState, int]], ids: TokenIds) -> tuple[list[int], list[Fingerprint]]:  # noqa: ARG002
        names: list[Fingerprint] = ids.view(np.uint64).tolist()
        return list(names), names


class NamedBlocks(Residency):
    """What a modelled engine holds, whose blocks are called by our fingerprints already."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(NameHasher(), lambda _: UNKNOWN, entries_max=WITHOUT_BOUND)
        self._block_tokens = block_tokens

    def read(self, event: CacheEvent) -> None:
        if isinstance(event, KeysStored | StateStored):
            names = np.array(event.keys, dtype=np.uint64).tobytes()
            stored = BlocksStored(event.keys, event.parent or None, names, NAME_TOKENS)
            if isinstance(event, StateStored):  # named by its last block alone, as vLLM does
                stored = stored._replace(hashes=event.keys[-1:], group=STATES, kind="mamba")
            self.apply(stored)
        elif isinstance(event, KeyRemoved | StateRemoved):
            self.apply(BlocksRemoved((event.key,), group=STATES if isinstance(event, StateRemoved) else 0))
        else:
            self.apply(CacheCleared())

    def changes(self) -> Changes:
        """All that changed since the last call."""
        found, size = self.settle(WITHOUT_BOUND), self._block_tokens
        deep = [each._replace(tokens=each.tokens // NAME_TOKENS * size) for each in found.changes]
        states = None if found.states is None else tuple(map(self._deep, found.states))
        return found._replace(changes=tuple(deep), states=states)

    def states(self) -> Iterator[StateMoved]:
        return map(self._deep, super().states())

    def _deep(self, state: StateMoved) -> StateMoved:
        return state._replace(position=state.position // NAME_TOKENS * self._block_tokens)


def engine_caches_of(router: Router, block_tokens: int) -> EngineCaches:
    registry = router.registry
    return EngineCaches(
        router.routes,
        lambda backend: registry[backend].generation,
        restarted=partial(restarted, registry),
        block_tokens=block_tokens,
        checkpoints=router.checkpoints,
    )


def restarted(registry: Registry, backend: BackendId, why: str, now: float) -> int:
    known = registry[backend]
    registry.restart_reported(known, 0.0, now, why)
    return known.generation
