"""Reads the events of a node's engines: the streams, their connections, and the engine caches that they feed.

For each engine that publishes KV events and that this node subscribes to (`StreamSharer`), it has one EventStream and
one KvSubscriber per data-parallel rank; `look` begins and ends streams. EngineCaches uses those of which this node is
the reader, not those of which it is the standby. A stream begins once its engine's model names are known, and again
when they change, since they are part of every fingerprint. A restart that a stream notices is reported to the registry.
Without pyzmq other nodes read the engines, or nobody does, as is logged. Bounds: publishers.RANKS_MAX streams each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from random import Random

import trio

from ranvier_py.core.engine_cache.block_namespaces import base_models, names_by_topic
from ranvier_py.core.engine_cache.engine_caches import LEVELS, EngineCaches, Source
from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.gap_values import AskPeer, Level, LevelChanged
from ranvier_py.core.engine_cache.peer_access import SnapshotAnswer, StreamSharer
from ranvier_py.core.engine_cache.peers.shared_streams import SharedStreams
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.engine_cache.sources.event_frames import BadBatch
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.backends import Backend
from ranvier_py.core.routing.processes.cache_counts import count_caches
from ranvier_py.core.routing.router import Router
from ranvier_py.io.engine_events.zmq_source import LoadReceived
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.node.engine_cache.event_reader import (
    KnownEngine,
    SubscribedStream,
    Subscriptions,
    generation_of,
    is_hybrid,
    is_several,
    name_of,
)
from ranvier_py.node.part import Part, log_transitions
from ranvier_py.supervision import PAUSE_S, PAUSE_S_MAX, Faults

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # between two looks at subscriptions, model names and peers' snapshots
IDLE_INTERVAL_S = 1.0  # while no engine publishes anything; a newly found publisher ends the wait
SWEEP_ROWS_MAX = 2000  # in one second, like the table's own sweep (node.py), which follows
AGAIN_S = 30.0  # after an engine could not be reached: then this node tries again, if nobody reads it
CHANNEL = "zmq"


class EngineEvents(Part):
    """See the module. `sharing` shares streams and snapshots with peers. A bug in one stream loses only its hits."""

    def __init__(
        self,
        router: Router,
        rng: Random,
        *,
        polled: EnginePoller | None = None,
        sharing: SharedStreams | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.engine_caches = EngineCaches(
            router.routes,
            partial(generation_of, router.registry),
            is_hybrid=partial(is_hybrid, router.registry),
            checkpoints=router.checkpoints,
            restarted=self._restarted,
            block_tokens=router.hasher.block_tokens,
        )
        self.sharing, self.shared = StreamSharer() if sharing is None else sharing, sharing is not None
        if sharing is not None:
            sharing.give, sharing.moved = self._snapshot, self.wake
        self.restarts_unbelieved = 0
        self.engines: dict[BackendId, KnownEngine] = {}
        self.streams: dict[BackendId, dict[int, SubscribedStream]] = {}  # by rank
        faults = faults or Faults()
        self.subscriptions = Subscriptions(self.engine_caches, router, rng, faults, peers=self.shared)
        self.router, self._registry, self._polled = router, router.registry, polled
        self._woken = trio.Event()

    def removed(self, backend: Backend) -> None:
        self.engines.pop(backend.id, None)
        self._end(backend.id)

    def _engine(self, id_: BackendId) -> KnownEngine:
        return self.engines.setdefault(id_, KnownEngine())

    def moved(self, backend: BackendId) -> None:
        """Read an engine's events anew: its name has another address, and connections of before lead to the old one."""
        self._end(backend)
        self.wake()

    def found(self, backend: BackendId, publishers: tuple[Publisher, ...]) -> None:
        """Take where an engine publishes its events, as far as that is known now; of a rank only its own."""
        if (known := self._registry.ids.current(backend)) is not None:
            if known.behind.rank is not None:
                publishers = tuple(each for each in publishers if each.rank == known.behind.rank)
            ranks = max(known.behind.ranks, len(publishers))
            log_transitions(count_caches(known, time.monotonic(), ranks=ranks))
        self._engine(backend).publishers = publishers
        self.wake()

    def contradicted(self, backend: BackendId) -> None:
        """Check whether an engine is still the same process, since its answers contradict what it is known to hold."""
        for one in self.streams.get(backend, {}).values():
            now = time.monotonic()
            one.subscriber.carry(one.stream.carry(one.stream.machine.contradicted(now), now))

    def received_at(self, backend: BackendId) -> float:
        """Return when the last event of an engine came; 0 if none did."""
        return max(
            [one.subscriber.state.received_at or 0.0 for one in self.streams.get(backend, {}).values()], default=0.0
        )

    def wake(self) -> None:
        """Look soon."""
        self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        async with self.subscriptions.running():
            task_status.started()
            await self.subscriptions.faults.keep("engine_events", self._keep_looking)

    async def _keep_looking(self) -> None:
        while True:
            busy = self.streams or any(each.publishers for each in self.engines.values())
            with trio.move_on_after(LOOK_INTERVAL_S if busy else IDLE_INTERVAL_S):
                await self._woken.wait()
            self._woken = trio.Event()
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Begin and end streams as wanted, and pass on what peers have sent.

        After a fault its engine is left alone for a while, which doubles while faults repeat.
        """
        caught = self.subscriptions.faults.caught
        publishing = {id_: engine.publishers for id_, engine in self.engines.items() if engine.publishers}
        self.sharing.streams({id_: [each.rank for each in found] for id_, found in publishing.items()}, now)
        for id_ in [*(one for one in self.streams if one not in publishing), *publishing]:
            engine = self._engine(id_)
            if now < engine.paused_until:
                continue
            engine.paused_until = now + doubled(PAUSE_S, engine.failures, PAUSE_S_MAX)
            engine.failures += 1
            with caught("engine_events"):
                self._look_at(id_, engine, now)
                engine.failures, engine.paused_until = 0, 0.0
        for answer in self.sharing.snapshots():
            with caught("engine_events"):
                self._offer(answer, now)

    def _look_at(self, id_: BackendId, engine: KnownEngine, now: float) -> None:
        backend, wanted = self._registry.ids.current(id_), dict[Publisher, tuple[str, ...]]()
        if engine.publishers and not (backend is not None and is_several(backend)):
            names = self._names(id_, engine)
            self.sharing.unable(id_, not self.subscriptions.can() or now < engine.lost_until, now)
            wanted = dict(zip(engine.publishers, names, strict=True)) if names and self.sharing.subscribes(id_) else {}
        self._follow(id_, engine, wanted, now)

    def _offer(self, answer: SnapshotAnswer, now: float) -> None:
        one = self.streams.get(answer.backend, {}).get(answer.rank)
        if one is not None:
            effects = one.stream.machine.snapshot_offered(answer.ask, answer.snapshot, now)
            one.subscriber.carry(one.stream.carry(effects, now))
            what = f"engine_events.snapshot_{'missing' if answer.snapshot is None else 'received'}"
            log.info(event(what, stream=self._label(one.stream.source)))

    def sweep(self, now: float) -> None:
        """Correct the route table, some rows at a time."""
        self.engine_caches.sweep(now, SWEEP_ROWS_MAX)

    def _restarted(self, backend: BackendId, why: str, now: float) -> int:
        known = self._registry[backend]
        if not self._engine(backend).restarts.allows(now):
            self.restarts_unbelieved += 1
            return known.generation
        log_transitions(self._registry.changes.restart_reported(known, 0.0, now, why))
        return known.generation

    def _names(self, id_: BackendId, engine: KnownEngine) -> tuple[tuple[str, ...], ...]:
        """Return the model names for each publisher; () if they are unknown, or it is unclear which model it serves."""
        backend, topics = self._registry.ids.current(id_), [publisher.topic for publisher in engine.publishers]
        if backend is None or backend.catalog.models is None:
            return ()
        models = base_models(backend.catalog.cards, backend.catalog.models)
        names, before = names_by_topic(models, topics), engine.unnamed
        engine.unnamed = None if names else models
        if engine.unnamed not in (None, before):
            log.warning(
                event("engine_events.ambiguous", engine=backend.name, models=["/".join(each) for each in models])
            )
        return names

    def _follow(
        self, id_: BackendId, engine: KnownEngine, publishers: Mapping[Publisher, tuple[str, ...]], now: float
    ) -> None:
        """Subscribe to these publishers of one engine, each under its names, and to no others."""
        streams = self.streams.setdefault(id_, {})  # has all running streams even if something raises below
        for rank, one in list(streams.items()):
            if publishers.get(one.publisher) != one.stream.names.base:
                self.subscriptions.stop(streams.pop(rank), self._label(one.stream.source), now)
        for publisher, names in publishers.items():
            if publisher.rank not in streams and self.subscriptions.can():
                source = Source(id_, f"{CHANNEL}/{publisher.rank}")
                streams[publisher.rank] = self.subscriptions.begin(source, names, publisher, self._carry, now)
                log.info(event("engine_events.started", stream=self._label(source), endpoint=publisher.events.endpoint))
        if not streams:
            del self.streams[id_]
            return
        reads = self.sharing.reads(id_)
        for one in streams.values():
            one.subscriber.carry(one.stream.measured(now, is_hybrid=is_hybrid(self._registry, id_)))
            if one.stream.is_open is not reads:
                log.info(
                    event(
                        "engine_events.read" if reads else "engine_events.stood_by",
                        stream=self._label(one.stream.source),
                    )
                )
                (one.stream.open if reads else one.stream.close)(now)
        if self.shared and any(one.is_lost(now) for one in streams.values()):
            engine.lost_until = now + AGAIN_S
        worst = max((one.stream.level for one in streams.values()), key=LEVELS.index)
        self.sharing.report(id_, worst, now)

    def _end(self, id_: BackendId) -> None:
        for one in self.streams.pop(id_, {}).values():
            self.subscriptions.stop(one, self._label(one.stream.source), time.monotonic())

    def _carry(self, stream: EventStream, effect: object) -> None:
        """Carry out what a subscriber does not do itself."""
        backend, name = stream.source
        if isinstance(effect, AskPeer):
            self.sharing.ask(backend, int(name.partition("/")[2]), effect.ask, time.monotonic())
        elif isinstance(effect, LevelChanged):
            if self._engine(backend).levels_logged.allows(time.monotonic()):
                log.info(
                    event(
                        "cache_level.changed",
                        stream=self._label(stream.source),
                        cache_level=effect.level.value,
                        why=effect.reason,
                    )
                )
            if effect.level is not Level.EXACT and self._polled is not None:
                self._polled.discover_soon(backend)  # it may be another process, with other ports
        elif isinstance(effect, LoadReceived):
            try:
                load = stream.decoder.decode(effect.payload).load
            except BadBatch:
                return
            if load is not None and self._polled is not None:
                self._polled.load_reported(backend, load)

    def _snapshot(self, backend: BackendId, rank: int) -> SnapshotWriter | None:
        """Return a snapshot for a peer, if the stream is known exactly."""
        one = self.streams.get(backend, {}).get(rank)
        return one.stream.snapshot() if one is not None else None

    def _label(self, source: Source) -> str:
        return f"{name_of(self._registry, source.backend)} {source.name}"

    def level(self, backend: BackendId) -> Level:
        """Return how well this engine is known here, or to the peer that reads it."""
        level = self.engine_caches.level(backend)
        if level is Level.ESTIMATED and backend in self.engines and self.engines[backend].publishers:
            level = self.sharing.level(backend) or level
        return level

    def state_block(self, backend: BackendId) -> int:
        """Return the tokens of the blocks at whose ends an engine's events have recurrent states; 0: they have none."""
        streams = (one.stream.residency for one in self.streams.get(backend, {}).values())
        return max((each.block_tokens for each in streams if each.has_states), default=0)
