"""What the routers of a replay know of the engines' caches, besides what they learn from requests.

Rule: an event is read before any node places the next request or handles the next finished one; after that it reaches
the other nodes by gossip, with its delay. Bound: `EVENTS_MAX` events of an engine between two reads.
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
"""estimated: nothing more. calibrated: the cached tokens in answers and the engines' metrics. events: the engines
publish what they store and drop; one node reads each engine and the others learn by gossip. For comparison, attention:
the events of keys and values alone; oracle: what each engine would reuse (`SeenHolders`)."""
KNOWLEDGE: tuple[KnowledgeName, ...] = ("estimated", "calibrated", "events")
"""The kinds of knowledge that real nodes can have."""

EVENTS_MAX = 1 << 20
"""Undrained cache events of one engine: more than one step of it can produce."""

TICK_S = 1.0  # as a node does
METRICS_S = 5.0  # as a node does by default
SWEEP_ROWS_MAX = 2000

NAME_TOKENS = 2
"""A block's 64-bit name stands where its token ids would be and fills so many 32-bit ids."""

STATES = 1
"""Group number, in block events, of a hybrid model's states. Group 0 is that of attention."""

WITHOUT_BOUND = 1 << 62
"""Limit for the entries of a residency and for one `settle`: no bound is needed, the engine model itself is bounded."""


def make_knowledge(
    name: KnowledgeName, routers: Sequence[Router], engines: Sequence[EngineModel], block_tokens: int
) -> Calibrated | EventReaders | None:
    """Return the source of knowledge by this name; None for `estimated` and `oracle`. For `events` and `attention` the
    engines must record their cache events."""
    if name == "calibrated":
        return Calibrated(routers, engines, block_tokens)
    if name in ("events", "attention"):
        return EventReaders(routers, engines, block_tokens, states=name == "events")
    return None


class Calibrated:
    """Each router learns from answers. The size of each engine's cache is read by one node, the engines in turn."""

    def __init__(self, routers: Sequence[Router], engines: Sequence[EngineModel], block_tokens: int) -> None:
        self._routers, self._engines = routers, engines
        self.calibrations = [
            Calibration(
                router.routes,
                block_tokens=block_tokens,
                checkpoints=router.checkpoints,
                judged=router.registry.changes.reconsider,
            )
            for router in routers
        ]
        self._ticked_at = self._looked_at = 0.0
        for router, calibration in zip(routers, self.calibrations, strict=True):
            router.observers += (calibration,)
        self._look_at_metrics()

    def look(self, now: float) -> Sequence[int]:
        """Read metrics and tick the calibrations when due. Returns the nodes whose routes changed, here none."""
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
            usage = model.cache.used_blocks / model.cache.capacity_blocks
            reported = EngineMetrics(capacity_tokens=limits.cache_tokens, block_tokens=limits.block_size)
            self.calibrations[node].report(known.id, known.url, known.generation, reported)
            for router in self._routers:
                backend = router.registry[known.id]
                backend.work.room.cache_tokens = limits.cache_tokens
                backend.work.queue_read(model.running, model.waiting, usage)


class EventReaders:
    """Each engine's events are read by one node, the engines in turn. `states`: those of hybrid models' states, too."""

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
        for event in self._engines[engine].cache.drain_events():  # `cache` is replaced at a restart, so do not keep it
            if self._states or not isinstance(event, StateStored | StateRemoved):
                blocks.read(event)
        changes = blocks.changes()
        if changes.cleared or changes.changes or changes.states is not None:
            self._caches[self._reader(engine)].changed(Source(BackendId(engine), "events"), changes, now)
            return True
        return False


class NameHasher(TokenHasher):
    """Hashes nothing: the token ids of a block are already its fingerprint, as two 32-bit halves."""

    def __init__(self) -> None:
        super().__init__(b"", NAME_TOKENS)

    def every_block(self, jobs: Sequence[tuple[TokenState, int]], ids: TokenIds) -> tuple[list[int], list[Fingerprint]]:  # noqa: ARG002
        names: list[Fingerprint] = ids.view(np.uint64).tolist()
        return list(names), names


class NamedBlocks(Residency):
    """The residency of a modelled engine, which names its blocks by our fingerprints already."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(NameHasher(), lambda _: UNKNOWN, entries_max=WITHOUT_BOUND)
        self._block_tokens = block_tokens

    def read(self, event: CacheEvent) -> None:
        if isinstance(event, KeysStored | StateStored):
            names = np.array(event.keys, dtype=np.uint64).tobytes()
            stored = BlocksStored(event.keys, event.parent or None, names, NAME_TOKENS)
            if isinstance(event, StateStored):  # the event has only the last block's hash, as vLLM's has
                stored = stored._replace(hashes=event.keys[-1:], group=STATES, kind="mamba")
            self.apply(stored)
        elif isinstance(event, KeyRemoved | StateRemoved):
            self.apply(BlocksRemoved((event.key,), group=STATES if isinstance(event, StateRemoved) else 0))
        else:
            self.apply(CacheCleared())

    def changes(self) -> Changes:
        """Return all changes since the last call, with depths in tokens of the engine's blocks."""
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
    registry.changes.restart_reported(known, 0.0, now, why)
    return known.generation
