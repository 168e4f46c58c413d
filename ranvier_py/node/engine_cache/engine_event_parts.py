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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any

import trio

from ranvier_py.core.engine_cache.block_namespaces import Names, base_models, names_by_topic
from ranvier_py.core.engine_cache.engine_caches import LEVELS, EngineCaches, Source, SourceState
from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.gap_values import AskPeer, GapSettings, Level, LevelChanged
from ranvier_py.core.engine_cache.peer_access import SnapshotAnswer, StreamSharer
from ranvier_py.core.engine_cache.peers.shared_streams import SharedStreams
from ranvier_py.core.engine_cache.quota import Quota
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.engine_cache.sources.event_frames import BadBatch
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.errors import NoZmq
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.backends import Backend
from ranvier_py.core.routing.processes.cache_counts import count_caches
from ranvier_py.core.routing.router import Router
from ranvier_py.io.engine_events.zmq_sockets import KvSockets
from ranvier_py.io.engine_events.zmq_source import KvSubscriber, LoadReceived
from ranvier_py.io.engine_poller import EnginePoller
from ranvier_py.node.engine_cache.event_reader import SubscribedStream
from ranvier_py.node.part import Handler, Part, log_transitions
from ranvier_py.supervision import PAUSE_S, PAUSE_S_MAX, Faults

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # between two looks at subscriptions, model names and peers' snapshots
IDLE_INTERVAL_S = 1.0  # while no engine publishes anything; a newly found publisher ends the wait
SWEEP_ROWS_MAX = 2000  # in one second, like the table's own sweep (node.py), which follows
AGAIN_S = 30.0  # after an engine could not be reached: then this node tries again, if nobody reads it
CHANNEL = "zmq"

RESTARTS_MAX, RESTART_S = 10, 6.0
"""Restarts of one engine that its events may show: so many at once, then one in so many seconds. Further ones are not
believed: they begin no generation, which peers would count, and forgive the engine nothing."""

LEVELS_LOGGED_MAX, LEVEL_LOGGED_S = 20, 10.0
"""Log lines about one engine's level: so many at once, then one in so many seconds."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_caches = EngineCaches(
            router.routes,
            self._generation_of,
            is_hybrid=self._is_hybrid,
            checkpoints=router.checkpoints,
            restarted=self._restarted,
            block_tokens=router.hasher.block_tokens,
        )
        self.sharing, self.shared = StreamSharer() if sharing is None else sharing, sharing is not None
        if sharing is not None:
            sharing.give, sharing.moved = self._snapshot, self.wake
        self.restarts_unbelieved = 0
        self._restarts: dict[BackendId, Quota] = {}
        self._levels: dict[BackendId, Quota] = {}
        self._polled, self._rng, self._clock = polled, rng, clock
        self._faults = faults or Faults()
        self._hasher, self._namespace_of = router.hasher.plain(), router.reader.namespace_of
        self._registry, self._checkpoints = router.registry, router.checkpoints
        self._found: dict[BackendId, tuple[Publisher, ...]] = {}
        self.streams: dict[BackendId, dict[int, SubscribedStream]] = {}  # by rank
        self._unnamed: dict[BackendId, tuple[tuple[str, ...], ...]] = {}  # unreadable backends, with their models
        self._lost: dict[BackendId, float] = {}  # not to be tried before then, since a peer may reach it
        self._failed: dict[BackendId, tuple[int, float]] = {}  # faults in a row, and no look before then
        self._sockets: KvSockets | None = None
        self._trouble = ""
        self._nursery: trio.Nursery | None = None
        self._woken = trio.Event()

    def removed(self, backend: Backend) -> None:
        for table in (self._found, self._unnamed, self._lost, self._failed, self._restarts, self._levels):
            table.pop(backend.id, None)
        self._end(backend.id)

    def moved(self, backend: BackendId) -> None:
        """Read an engine's events anew: its name has another address, and connections of before lead to the old one."""
        self._end(backend)
        self.wake()

    def found(self, backend: BackendId, publishers: tuple[Publisher, ...]) -> None:
        """Take where an engine publishes its events, as far as that is known now; of a rank only its own."""
        if (known := self._registry.current(backend)) is not None:
            if known.rank is not None:
                publishers = tuple(each for each in publishers if each.rank == known.rank)
            ranks = max(known.ranks, len(publishers))
            log_transitions(count_caches(known, self._clock(), ranks=ranks))
        self._found[backend] = publishers
        self.wake()

    def contradicted(self, backend: BackendId) -> None:
        """Check whether an engine is still the same process, since its answers contradict what it is known to hold."""
        for one in self.streams.get(backend, {}).values():
            one.subscriber.carry(one.stream.contradicted(self._clock()))

    def received_at(self, backend: BackendId) -> float:
        """Return when the last event of an engine came; 0 if none did."""
        return max([one.subscriber.received_at or 0.0 for one in self.streams.get(backend, {}).values()], default=0.0)

    def wake(self) -> None:
        """Look soon."""
        self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await self._faults.keep("engine_events", self._keep_looking)
        finally:
            self._nursery = None
            if self._sockets is not None:
                self._sockets.close()

    async def _keep_looking(self) -> None:
        while True:
            busy = self.streams or any(self._found.values())
            with trio.move_on_after(LOOK_INTERVAL_S if busy else IDLE_INTERVAL_S):
                await self._woken.wait()
            self._woken = trio.Event()
            self.look(self._clock())

    def look(self, now: float) -> None:
        """Begin and end streams as wanted, and pass on what peers have sent.

        After a fault its engine is left alone for a while, which doubles while faults repeat.
        """
        publishing = [id_ for id_, publishers in self._found.items() if publishers]
        self.sharing.streams({id_: [each.rank for each in self._found[id_]] for id_ in publishing}, now)
        for id_ in [*(one for one in self.streams if one not in publishing), *publishing]:
            failures, until = self._failed.get(id_, (0, now))
            if now < until:
                continue
            self._failed[id_] = failures + 1, now + doubled(PAUSE_S, failures, PAUSE_S_MAX)
            with self._faults.caught("engine_events"):
                self._look_at(id_, now)
                del self._failed[id_]
        for answer in self.sharing.snapshots():
            with self._faults.caught("engine_events"):
                self._offer(answer, now)

    def _look_at(self, id_: BackendId, now: float) -> None:
        found = self._found.get(id_, ())
        if self._is_several(id_):
            found = ()
        wanted: dict[Publisher, tuple[str, ...]] = {}
        if found:
            names = self._names(id_)
            self.sharing.unable(id_, not self._can() or now < self._lost.get(id_, now), now)
            wanted = dict(zip(found, names, strict=True)) if names and self.sharing.subscribes(id_) else {}
        self._follow(id_, wanted, now)

    def _offer(self, answer: SnapshotAnswer, now: float) -> None:
        one = self.streams.get(answer.backend, {}).get(answer.rank)
        if one is not None:
            one.subscriber.carry(one.stream.snapshot_offered(answer.ask, answer.snapshot, now))
            what = "missing" if answer.snapshot is None else "received"
            log.info("engine_events.snapshot_%s %s", what, self._label(one.stream.source))

    def sweep(self, now: float) -> None:
        """Correct the route table, some rows at a time."""
        self.engine_caches.sweep(now, SWEEP_ROWS_MAX)

    def _generation_of(self, id_: BackendId) -> int:
        backend = self._registry.current(id_)
        return -1 if backend is None else backend.generation

    def _is_several(self, id_: BackendId) -> bool:
        """Whether several processes answer behind its URL: what one of them reports says nothing of the others. Or it
        is placed as its ranks, whose events are read for themselves."""
        backend = self._registry.current(id_)
        return backend is not None and (backend.processes > 1 or bool(backend.as_ranks))

    def _is_hybrid(self, id_: BackendId) -> bool:
        backend = self._registry.current(id_)
        return backend is not None and backend.hybrid

    def _restarted(self, backend: BackendId, why: str, now: float) -> int:
        known = self._registry[backend]
        if not self._restarts.setdefault(backend, Quota(RESTARTS_MAX, RESTART_S)).allows(now):
            self.restarts_unbelieved += 1
            return known.generation
        log_transitions(self._registry.restart_reported(known, 0.0, now, why))
        return known.generation

    def _names(self, id_: BackendId) -> tuple[tuple[str, ...], ...]:
        """Return the model names for each publisher; () if they are unknown, or it is unclear which model it serves."""
        backend, topics = self._registry.current(id_), [publisher.topic for publisher in self._found[id_]]
        if backend is None or backend.models is None:
            return ()
        models = base_models(backend.cards, backend.models)
        names = names_by_topic(models, topics)
        if names:
            self._unnamed.pop(id_, None)
        elif self._unnamed.get(id_) != models:
            self._unnamed[id_] = models
            several = ", ".join(map("/".join, models)) or "none"
            log.warning(
                "engine_events.ambiguous %s serves several base models (%s); its KV events do not say whose they are",
                backend.name,
                several,
            )
        return names

    def _follow(self, id_: BackendId, publishers: Mapping[Publisher, tuple[str, ...]], now: float) -> None:
        """Subscribe to these publishers of one engine, each under its names, and to no others."""
        streams = self.streams.setdefault(id_, {})  # has all running streams even if something raises below
        for rank, one in list(streams.items()):
            if publishers.get(one.publisher) != one.stream.names.base:
                self._stop(streams.pop(rank), now)
        for publisher, names in publishers.items():
            if publisher.rank not in streams and self._sockets is not None:
                streams[publisher.rank] = self._begin(id_, names, publisher, now)
        if not streams:
            del self.streams[id_]
            return
        reads = self.sharing.reads(id_)
        for one in streams.values():
            one.subscriber.carry(one.stream.measured(now, is_hybrid=self._is_hybrid(id_)))
            if one.stream.is_open is not reads:
                log.info("engine_events.%s %s", "read" if reads else "stood_by", self._label(one.stream.source))
                (one.stream.open if reads else one.stream.close)(now)
        if self.shared and any(one.is_lost(now) for one in streams.values()):
            self._lost[id_] = now + AGAIN_S
        worst = max((one.stream.level for one in streams.values()), key=LEVELS.index)
        self.sharing.report(id_, worst, now)

    def _can(self) -> bool:
        """Whether this node can receive events at all."""
        if self._sockets is None and not self._trouble and self._nursery is not None:
            try:
                self._sockets = KvSockets()
            except NoZmq as error:
                self._trouble = str(error)
                log.warning("engine_events.unavailable %s", error)
        return self._sockets is not None

    def _begin(self, id_: BackendId, base: tuple[str, ...], publisher: Publisher, now: float) -> SubscribedStream:
        assert self._sockets is not None
        assert self._nursery is not None
        source = Source(id_, f"{CHANNEL}/{publisher.rank}")
        names = Names(self._hasher, self._namespace_of, base)
        settings = GapSettings(replay=publisher.replay is not None, peers=self.shared)
        stream = EventStream(source, self.engine_caches, self._hasher, names, settings=settings)
        carry = partial(self._carry, stream)
        subscriber = KvSubscriber(
            self._sockets, publisher, stream, self._rng, carry, faults=self._faults, clock=self._clock
        )
        one = SubscribedStream(publisher, stream, subscriber, trio.CancelScope(), now)
        self._nursery.start_soon(one.run, self._faults)
        log.info("engine_events.started %s at %s", self._label(source), publisher.events.endpoint)
        return one

    def _stop(self, one: SubscribedStream, now: float) -> None:
        with self._faults.caught("engine_events"):
            one.stop(now)
        log.info("engine_events.stopped %s", self._label(one.stream.source))

    def _end(self, id_: BackendId) -> None:
        for one in self.streams.pop(id_, {}).values():
            self._stop(one, self._clock())

    def _carry(self, stream: EventStream, effect: object) -> None:
        """Carry out what a subscriber does not do itself."""
        backend, name = stream.source
        if isinstance(effect, AskPeer):
            self.sharing.ask(backend, int(name.partition("/")[2]), effect.ask, self._clock())
        elif isinstance(effect, LevelChanged):
            if self._levels.setdefault(backend, Quota(LEVELS_LOGGED_MAX, LEVEL_LOGGED_S)).allows(self._clock()):
                log.info("cache_level.changed %s %s: %s", self._label(stream.source), effect.level.value, effect.reason)
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
        return f"{self._name(source.backend)} {source.name}"

    def _name(self, id_: BackendId) -> str:
        backend = self._registry.current(id_)
        return backend.name if backend is not None else f"#{id_}"

    def level(self, backend: BackendId) -> Level:
        """Return how well this engine is known here, or to the peer that reads it."""
        level = self.engine_caches.level(backend)
        if level is Level.ESTIMATED and self._found.get(backend):
            level = self.sharing.level(backend) or level
        return level

    def state_block(self, backend: BackendId) -> int:
        """Return the tokens of the blocks at whose ends an engine's events have recurrent states; 0: they have none."""
        streams = (one.stream.residency for one in self.streams.get(backend, {}).values())
        return max((each.block_tokens for each in streams if each.has_states), default=0)

    def view(self) -> dict[str, Any]:
        """Return a line for each engine, and all of each source, for the control port."""
        now = self._clock()
        standby = [one for ranks in self.streams.values() for one in ranks.values() if not one.stream.is_open]
        return {
            "trouble": self._trouble,
            "counts": asdict(self.engine_caches.counters),
            "engines": [self._line(backend) for backend in self._registry],
            "sources": [self._source_view(state, now) for state in self.engine_caches.sources()],
            "standby": [{**self._names_of(one.stream.source), **one.view(now)} for one in standby],
        }

    def _line(self, backend: Backend) -> dict[str, Any]:
        totals = Counter(applied=0, gaps=0, restarts=0, blocks=0, prefixes=0)
        streams = self.streams.get(backend.id, {}).values()
        for one in streams:
            totals.update(one.line())
        role = "" if not streams else "reader" if any(one.stream.is_open for one in streams) else "standby"
        return {
            "name": backend.name,
            "level": self.level(backend.id).value,
            "profile": self._checkpoints.profile(backend.id).label,
            "streams": len(self._found.get(backend.id, ())),
            "role": role,
            **totals,
            "why": "; ".join([each for each in (self._reason(backend), self._note(backend)) if each]),
        }

    def _reason(self, backend: Backend) -> str:
        """Return why an engine has its level."""
        for one in self.streams.get(backend.id, {}).values():
            if not one.subscriber.is_connected:
                return f"not connected: {one.subscriber.why or 'not yet'}"
        reason = self.engine_caches.reason(backend.id)
        return reason or ("" if self._found.get(backend.id) else "it publishes no events")

    def _note(self, backend: Backend) -> str:
        """Return why an engine that publishes events is not read here, or is of less use than it could be."""
        if not self._found.get(backend.id):
            return ""
        if backend.as_ranks:
            return "its ranks are backends of their own, which have its events"
        if backend.processes > 1:
            return "several processes answer there, and the events are those of one"
        for one in self.streams.get(backend.id, {}).values():
            size = one.stream.residency.block_tokens
            return f"block_size_tokens should be {size}, as it has" if size > self._hasher.block_tokens else ""
        if backend.id in self._unnamed or backend.models is None:
            return "not one base model: " + (", ".join(backend.models) if backend.models else "none is known")
        if backend.id in self._lost:
            return "not to be reached from here"
        return self._trouble or "a peer's to read"

    def _names_of(self, source: Source) -> dict[str, str]:
        return {"backend": self._name(source.backend), "source": source.name}

    def _source_view(self, state: SourceState, now: float) -> dict[str, Any]:
        shown = {
            **self._names_of(state.source),
            "level": state.level.value,
            "reason": state.reason,
            "since_s": round(now - state.since, 1),
            "changed_s": None if state.changed_at is None else round(now - state.changed_at, 1),
            "changes": state.changes,
            "cleared": state.cleared,
        }
        streams = self.streams.get(state.source.backend, {}).values()
        one = next((one for one in streams if one.stream.source == state.source), None)
        return {**shown, **one.view(now)} if one is not None else shown

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/engine-cache": lambda _: self.view()}

    def metrics(self) -> Iterator[Sample]:
        yield from samples("engine_cache", self.engine_caches.counters, {})
        help_text = "Engines whose KV events do not say which of several base models each is of."
        yield Sample("engine_events_ambiguous", "gauge", help_text, len(self._unnamed))
        help_text = "Restarts that events showed more often than engines can restart."
        yield Sample("engine_events_restarts_unbelieved", "counter", help_text, self.restarts_unbelieved)
        for backend in self._registry:
            label = {"backend": backend.name}
            level = self.level(backend.id).value
            help_text = "1 for the level at which the engine's cache is known."
            yield Sample("engine_cache_level", "gauge", help_text, 1, {**label, "level": level})
            for one in self.streams.get(backend.id, {}).values():
                yield from one.metrics(label)
