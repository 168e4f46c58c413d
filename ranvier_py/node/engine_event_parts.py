"""What makes a node hear its engines: event streams, their connections and the truth that they end in.

For each engine that publishes KV events (the poller finds where) and that this node is to read (`Sharing`), one
EventStream and one KvSubscriber for each data-parallel rank. `look` compares what is heard with what is to be heard,
ten times a second, and begins and ends accordingly; it also carries copies from and to peers.

Rules: a stream begins once the engine's model names are known, and begins anew when they change, for they are in every
fingerprint. A restart that a stream notices is the registry's business, as one that a probe notices. Start-up never
waits for any of this, and no request does. Without pyzmq, engines are heard by others, or not at all; the log says so.
Bounds: one stream for each rank that an engine names, at most publishers.RANKS_MAX. Cost: 2 us for each engine and
look.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any

import trio

from ranvier_py.control.metric_list import plain_samples
from ranvier_py.core.engine_cache.block_namespaces import Names, base_models, names_by_topic
from ranvier_py.core.engine_cache.engine_caches import LEVELS, EngineCaches, EngineCacheView, Source
from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.gap_values import AskPeer, GapSettings, Level, LevelChanged
from ranvier_py.core.engine_cache.peer_access import Sharing, Unshared
from ranvier_py.core.engine_cache.quota import Quota
from ranvier_py.core.engine_cache.snapshot import Original, Place
from ranvier_py.core.engine_cache.sources.event_values import EngineLoad
from ranvier_py.core.engine_cache.sources.events import BadBatch
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.engine_cache.takeover import Takeovers
from ranvier_py.core.gossip.peer.reader_sync import SharedStreams
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample
from ranvier_py.core.routing.backends import Backend, Transition
from ranvier_py.core.routing.router import Router
from ranvier_py.io.engine_events.zmq_source import KvSockets, KvSubscriber, LoadHeard, NoZmq
from ranvier_py.node.event_reader import Reading

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # for owners, names and peers' copies to be followed
IDLE_INTERVAL_S = 1.0  # while no engine publishes anything; whoever finds one pokes
SWEEP_ROWS_MAX = 2000  # a second, as many as the table's own sweep (node.py), which follows
AGAIN_S = 30.0  # after an engine could not be heard: this node would try again, if nobody has it
CHANNEL = "zmq"
FAULTS_TOLD_MAX = 10  # with a traceback; the counter goes on

RESTARTS_MAX, RESTART_S = 10, 6.0
"""Restarts that one engine's events may tell of, at once and each so often. Who tells of more lies: then it costs no
epoch, which peers count, and forgives the engine nothing."""

LEVELS_TOLD_MAX, LEVEL_TOLD_S = 20, 10.0
"""Lines of the log on one engine's level, likewise."""


class EngineEvents:
    """See the module.

    Args:
        log_transitions: what the registry makes of restarts that streams notice.
    """

    def __init__(
        self,
        router: Router,
        rng: Random,
        log_transitions: Callable[[Sequence[Transition]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_caches = EngineCaches(
            router.routes,
            self._generation_of,
            restarted=self._restarted,
            block_tokens=router.hasher.block_tokens,
        )
        self.sharing: Sharing = Unshared()
        self.shared = False
        self.faults = 0  # exceptions of ours
        self.restarts_unbelieved = 0
        self._restarts: dict[BackendId, Quota] = {}
        self._levels: dict[BackendId, Quota] = {}
        self.load_reported: Callable[[BackendId, EngineLoad], object] = lambda *_: None  # whoever counts loads sets it
        self.discover_soon: Callable[[BackendId], object] = lambda _: None  # whoever looks for publishers sets it
        self._hasher = router.hasher.plain()
        self._namespace_of = router.reader.namespace_of
        self._registry = router.registry
        self._rng = rng
        self._log_transitions = log_transitions
        self._clock = clock
        self._found: dict[BackendId, tuple[Publisher, ...]] = {}
        self._readings: dict[BackendId, dict[int, Reading]] = {}
        self._takeovers = Takeovers(self.sharing, self._hasher)
        self._unnamed: dict[BackendId, tuple[tuple[str, ...], ...]] = {}  # whose events can't be read, and their models
        self._lost: dict[BackendId, float] = {}  # not to be tried before then: somebody else may reach it
        self._sockets: KvSockets | None = None
        self._trouble = ""
        self._nursery: trio.Nursery | None = None
        self._poked = trio.Event()

    def share(self, sharing: SharedStreams) -> None:
        """There are peers, who may have copies. To be called before `run`."""
        self.sharing, self.shared = sharing, True
        self._takeovers.sharing = sharing
        sharing.give, sharing.moved = self._original, self.poke

    # What is told

    def forget(self, backend: BackendId) -> None:
        """It was removed."""
        self._found.pop(backend, None)
        self._unnamed.pop(backend, None)
        self._lost.pop(backend, None)
        self._takeovers.forget(backend)
        self._restarts.pop(backend, None)
        self._levels.pop(backend, None)
        self._end(backend)

    def found(self, backend: BackendId, publishers: tuple[Publisher, ...]) -> None:
        """Where an engine publishes its events, as far as it is known now."""
        self._found[backend] = publishers
        self.poke()

    def contradicted(self, backend: BackendId) -> None:
        """An engine's answers do not fit what it is known to hold: ask it whether it is still the same."""
        for reading in self._readings.get(backend, {}).values():
            reading.subscriber.carry(reading.stream.contradicted(self._clock()))

    def poke(self) -> None:
        """Look soon."""
        self._poked.set()

    # Time

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while True:
                    busy = self._readings or any(self._found.values())
                    with trio.move_on_after(LOOK_INTERVAL_S if busy else IDLE_INTERVAL_S):
                        await self._poked.wait()
                    self._poked = trio.Event()
                    self._guarded(self.look)
        finally:
            self._nursery = None
            if self._sockets is not None:
                self._sockets.close()

    def look(self, now: float) -> None:
        """Begin and end what is to be heard by this node; hand on what peers have brought."""
        publishing = {id_: self._names(id_) for id_, publishers in self._found.items() if publishers}
        self.sharing.streams({id_: [each.rank for each in self._found[id_]] for id_ in publishing}, now)
        for id_ in [one for one in self._readings if one not in publishing]:
            self._end(id_)
        for id_, names in publishing.items():
            self.sharing.unable(id_, not self._can() or now < self._lost.get(id_, now), now)
            wanted = dict(zip(self._found[id_], names, strict=True)) if names and self.sharing.owns(id_) else {}
            self._follow(id_, wanted, now)
        for came in self.sharing.copies():
            reading = self._readings.get(came.backend, {}).get(came.rank)
            if reading is None:
                continue
            stream, ask = reading.stream, came.ask
            copy = came.copy
            effects = stream.copy_offered(ask, copy, now) if copy is not None else stream.copy_failed(ask, now)
            reading.subscriber.carry(effects)
            log.info("kv.copy %s %s", self._label(stream.source), "came" if copy is not None else "none")

    def sweep(self, now: float) -> None:
        """Put the route table right, a little at a time. To be called each second."""
        self._guarded(lambda _: self.engine_caches.sweep(now, SWEEP_ROWS_MAX))

    def _guarded(self, call: Callable[[float], object]) -> None:
        """A bug of ours here costs hits, not the node."""
        try:
            call(self._clock())
        except Exception:
            self.faults += 1
            if self.faults <= FAULTS_TOLD_MAX:
                log.error("kv.fault %d so far", self.faults, exc_info=True)

    # Inside

    def _generation_of(self, backend: BackendId) -> int:
        slots = self._registry.slots
        known = slots[backend] if 0 <= backend < len(slots) else None
        return -1 if known is None or known.removed else known.generation

    def _restarted(self, backend: BackendId, why: str, now: float) -> int:
        known = self._registry[backend]
        if not self._restarts.setdefault(backend, Quota(RESTARTS_MAX, RESTART_S)).allows(now):
            self.restarts_unbelieved += 1
            return known.generation
        self._log_transitions(self._registry.restart_reported(known, 0.0, now, why))
        return known.generation

    def _backend(self, id_: BackendId) -> Backend | None:
        slots = self._registry.slots
        known = slots[id_] if 0 <= id_ < len(slots) else None
        return None if known is None or known.removed else known

    def _names(self, id_: BackendId) -> tuple[tuple[str, ...], ...]:
        """The names under which each of its publishers is read. Empty: they are not known, or not of which model."""
        backend, topics = self._backend(id_), [publisher.topic for publisher in self._found[id_]]
        if backend is None or backend.models is None:
            return ()
        models = base_models(backend.cards) or tuple([(name,) for name in backend.models])
        names = names_by_topic(models, topics)
        if names:
            self._unnamed.pop(id_, None)
        elif self._unnamed.get(id_) != models:
            self._unnamed[id_] = models
            several = ", ".join(map("/".join, models)) or "none"
            log.warning("kv.unnamed %s serves %s; its events do not say of which they are", backend.name, several)
        return names

    def _follow(self, id_: BackendId, publishers: Mapping[Publisher, tuple[str, ...]], now: float) -> None:
        """Hear these publishers of one engine, each under its names, and no others."""
        readings = self._readings.pop(id_, {})
        for rank, reading in list(readings.items()):
            if publishers.get(reading.publisher) != reading.stream.names.base:
                self._stop(readings.pop(rank), now)
        if not publishers:
            self._takeovers.forget(id_)
        for publisher, names in publishers.items():
            if publisher.rank in readings or self._sockets is None:
                continue
            if self._takeovers.ready(id_, publisher.rank, now):
                readings[publisher.rank] = self._begin(id_, names, publisher, now)
            else:
                self.poke()
        if readings:
            self._readings[id_] = readings
            if self.shared and any(reading.is_lost(now) for reading in readings.values()):
                self._lost[id_] = now + AGAIN_S
            worst = max((reading.stream.level for reading in readings.values()), key=LEVELS.index)
            self.sharing.said(id_, worst, now)

    def _can(self) -> bool:
        """Whether this node can hear anything."""
        if self._sockets is None and not self._trouble and self._nursery is not None:
            try:
                self._sockets = KvSockets()
            except NoZmq as error:
                self._trouble = str(error)
                log.warning("kv.deaf %s", error)
        return self._sockets is not None

    def _begin(self, id_: BackendId, base: tuple[str, ...], publisher: Publisher, now: float) -> Reading:
        assert self._sockets is not None
        assert self._nursery is not None
        source = Source(id_, f"{CHANNEL}/{publisher.rank}")
        names = Names(self._hasher, self._namespace_of, base)
        settings = GapSettings(replay=publisher.replay is not None, peers=self.shared)
        stream = EventStream(source, self.engine_caches, self._hasher, names, settings=settings)
        told = partial(self._told, stream)
        subscriber = KvSubscriber(self._sockets, publisher, stream, self._rng, told, clock=self._clock)
        reading = Reading(publisher, stream, subscriber, trio.CancelScope(), now)
        stream.open(now)
        copy = self._takeovers.take(id_, publisher.rank)
        if copy is not None:
            stream.resume(copy, now)
        self._nursery.start_soon(reading.run)
        how = "" if copy is None else f", after message {copy.seq}"
        log.info("kv.reading %s at %s%s", self._label(source), publisher.events.endpoint, how)
        return reading

    def _stop(self, reading: Reading, now: float) -> None:
        reading.stop(now)
        log.info("kv.left %s", self._label(reading.stream.source))

    def _end(self, id_: BackendId) -> None:
        for reading in self._readings.pop(id_, {}).values():
            self._stop(reading, self._clock())

    def _told(self, stream: EventStream, effect: object) -> None:
        """What a subscriber leaves to others."""
        backend, name = stream.source
        if isinstance(effect, AskPeer):
            self.sharing.ask(backend, int(name.partition("/")[2]), effect.ask, self._clock())
        elif isinstance(effect, LevelChanged):
            if self._levels.setdefault(backend, Quota(LEVELS_TOLD_MAX, LEVEL_TOLD_S)).allows(self._clock()):
                log.info("kv.level %s %s: %s", self._label(stream.source), effect.level.value, effect.reason)
            if effect.level is not Level.EXACT:
                self.discover_soon(backend)  # it may be another process, with other ports
        elif isinstance(effect, LoadHeard):
            try:
                load = stream.decoder.decode(effect.payload).load
            except BadBatch:
                return
            if load is not None:
                self.load_reported(backend, load)

    def _original(self, backend: BackendId, rank: int, since: Place | None) -> Original | None:
        """For a peer: the state of a stream that is known exactly, and where it stands; or what changed there."""
        reading = self._readings.get(backend, {}).get(rank)
        return reading.stream.original(since) if reading is not None else None

    def _label(self, source: Source) -> str:
        return f"{self._name(source.backend)} {source.name}"

    def _name(self, id_: BackendId) -> str:
        backend = self._backend(id_)
        return backend.name if backend is not None else f"#{id_}"

    # What it shows

    def level(self, backend: BackendId) -> Level:
        """How well this engine is known here, or to the peer who reads it and tells us."""
        level = self.engine_caches.level(backend)
        if level is Level.ESTIMATED and self._found.get(backend):
            level = self.sharing.level(backend) or level
        return level

    def view(self) -> dict[str, Any]:
        """For the control port: a line for each engine, and all of each source."""
        now = self._clock()
        return {
            "trouble": self._trouble,
            "faults": self.faults,
            "counts": asdict(self.engine_caches.counts),
            "engines": [self._line(backend) for backend in self._registry],
            "sources": [self._source_view(view, now) for view in self.engine_caches.views(now)],
        }

    def _line(self, backend: Backend) -> dict[str, Any]:
        publishers = self._found.get(backend.id, ())
        return {
            "name": backend.name,
            "level": self.level(backend.id).value,
            "streams": len(publishers),
            "read_here": backend.id in self._readings,
            **self._totals(backend.id),
            "why": "; ".join([each for each in (self._reason(backend), self._note(backend)) if each]),
        }

    def _reason(self, backend: Backend) -> str:
        """Where the level of an engine comes from."""
        for reading in self._readings.get(backend.id, {}).values():
            connection = reading.subscriber.view()
            if not connection.is_connected:
                return f"not connected: {connection.why or 'not yet'}"
        told = self.engine_caches.reason(backend.id)
        return told or ("" if self._found.get(backend.id) else "it tells no events")

    def _note(self, backend: Backend) -> str:
        """Why an engine that tells its events is not heard here, or of less use than it could be."""
        if not self._found.get(backend.id):
            return ""
        for reading in self._readings.get(backend.id, {}).values():
            size = reading.stream.residency.block_tokens
            return f"block_size_tokens should be {size}, as it has" if size > self._hasher.block_tokens else ""
        if backend.id in self._unnamed or backend.models is None:
            return "not one base model: " + (", ".join(backend.models) if backend.models else "none is known")
        if backend.id in self._lost:
            return "not to be reached from here"
        return self._trouble or "a peer's to read"

    def _source_view(self, view: EngineCacheView, now: float) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "backend": self._name(view.source.backend),
            "source": view.source.name,
            "level": view.level.value,
            "reason": view.reason,
            "since_s": round(view.level_age_s, 1),
            "changed_s": None if view.changed_age_s is None else round(view.changed_age_s, 1),
            "changes": view.changes,
            "cleared": view.cleared,
        }
        readings = self._readings.get(view.source.backend, {}).values()
        reading = next((one for one in readings if one.stream.source == view.source), None)
        return {**shown, **reading.view(now)} if reading is not None else shown

    def samples(self) -> Iterator[Sample]:
        """For /metrics."""
        yield from plain_samples("engine_cache", self.engine_caches.counts, ())
        unnamed = len(self._unnamed)
        yield Sample(
            "engine_cache_unnamed", "gauge", "Engines whose events do not say of which base model they are.", unnamed
        )
        yield Sample("engine_cache_faults", "counter", "Exceptions of the engine truth, each a bug.", self.faults)
        help_text = "Restarts that events told of more often than engines can restart."
        yield Sample("truth_restarts_unbelieved", "counter", help_text, self.restarts_unbelieved)
        for backend in self._registry:
            label = {"backend": backend.name}
            level = self.level(backend.id).value
            help_text = "1 for the level at which the engine's cache is known."
            yield Sample("engine_cache_level", "gauge", help_text, 1, {**label, "level": level})
            for reading in self._readings.get(backend.id, {}).values():
                yield from reading.samples(label)

    def _totals(self, backend: BackendId) -> Mapping[str, int]:
        totals: Counter[str] = Counter(applied=0, gaps=0, restarts=0, blocks=0, prefixes=0)
        for reading in self._readings.get(backend, {}).values():
            totals.update(reading.totals())
        return totals
