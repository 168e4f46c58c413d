"""Event batches that reporters push: each data-parallel rank of a worker is an EventStream, as if it were read here.

A reporter sends its engine's own messages with their numbers; the answer to a report asks for those that are missing.
Rules: a rank's stream begins with its first report, and again when the names of its model change, since they are part
of every fingerprint. The first report opens all ranks of its engine, else what an unread rank holds would be taken for
not held. A reporter silent for SILENT_S counts as disconnected; what several reporters of an engine send counts once.
Bounds: publishers.RANKS_MAX streams of each worker that is a backend. After TURN_S other tasks have their turn.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from ranvier_py.core.engine_cache.block_namespaces import Names, base_models
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.event_stream import EventStream, StreamEffect
from ranvier_py.core.engine_cache.gap_values import AskReplay, GapSettings, LevelChanged
from ranvier_py.core.engine_cache.sources.push_messages import EventReport, Structure, check_structure
from ranvier_py.core.errors import Forbidden, Unavailable
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backends import Backend
from ranvier_py.core.routing.router import Router
from ranvier_py.node.asked import Asked, object_of
from ranvier_py.node.part import Handler
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

CHANNEL = "push"
SILENT_S = 15.0  # three of a reporter's beats (BEAT_S)
LOOK_S = 0.5  # longest time between two ticks
TURN_S = 0.002
SETTINGS = GapSettings(peers=False, replay_pause_s=5.0)
"""A replay takes several reports, each of which may wait for a busy event loop."""


@dataclass(slots=True)
class PushedEventCounters:
    reports: int = counter("Reports of workers with batches of KV events.")
    messages: int = counter("Batches of KV events in workers' reports, repeated ones included.")
    replays: int = counter("Times that a reporter was asked to replay event batches.")
    silenced: int = counter("Streams of KV events ended because their reporter was silent for too long.")


class PushedStream:
    """The stream of one rank, and the open question to its reporter."""

    def __init__(self, stream: EventStream, model: str, now: float) -> None:
        self.stream, self.model, self.reported_at, self.connected = stream, model, now, False
        self.question: AskReplay | None = None  # not yet answered to its end

    def connect(self, connected: bool, now: float, *, anew: bool = False) -> Iterable[StreamEffect]:
        if connected is self.connected and not anew:
            return ()
        cut = self.stream.disconnected(now) if self.connected else []
        self.connected, self.question = connected, None
        return [*cut, *self.stream.connected(now)] if connected else cut


class PushedEvents:
    """The streams of all workers that push events."""

    def __init__(self, router: Router, engine_caches: EngineCaches, clock: Callable[[], float], faults: Faults) -> None:
        self.counters = PushedEventCounters()
        self._registry, self._faults, self._clock = router.registry, faults, clock
        self._hasher, self._namespace_of = router.hasher.plain(), router.reader.namespace_of
        self._engine_caches = engine_caches
        self._streams: dict[tuple[BackendId, int], PushedStream] = {}
        self.due = trio.Event()

    async def take(self, backend: Backend, report: EventReport) -> Mapping[str, Any]:
        """Take a report, and return its answer. Raises Unavailable while the model of the events is unknown."""
        now = self._clock()
        pushed = self._opened(backend, report, now)
        pushed.reported_at = now
        self.counters.reports += 1
        self.counters.messages += len(report.messages) + len(report.replayed)
        self._carry(pushed, pushed.connect(report.connected, now, anew=report.begins))
        stream = pushed.stream
        for seq, payload in report.replayed:
            self._carry(pushed, stream.replayed(report.ask, seq, payload, self._clock()))
            now = await self._turn(now)
        if report.ended:
            if pushed.question is not None and pushed.question.ask == report.ask:
                pushed.question = None
            self._carry(pushed, stream.replay_ended(report.ask, self._clock()))
        for seq, payload in report.messages:
            self._carry(pushed, stream.live(seq, payload, self._clock()))
            now = await self._turn(now)
        if report.connected and pushed.question is None and report.next > stream.machine.next_seq:
            self._carry(pushed, pushed.connect(True, self._clock(), anew=True))  # a report was lost
        self.due.set()
        return {"status": "ok", "replay": None if pushed.question is None else pushed.question._asdict()}

    def tick(self, now: float) -> float:
        """Do what is due. Returns the seconds until the next tick; `due` asks for an earlier one."""
        next_at = now + LOOK_S
        for key, pushed in list(self._streams.items()):
            with self._faults.caught("pushed_events"):  # a fault affects only its own stream
                next_at = min(next_at, self._tick_one(key, pushed, now) or next_at)
        return next_at - now

    def _tick_one(self, key: tuple[BackendId, int], pushed: PushedStream, now: float) -> float | None:
        """Tick one stream. Returns when it wants the next tick."""
        backend = self._registry.ids.current(key[0])
        if backend is None or pushed.stream.names.base != names_of(backend, pushed.model):
            self._close(key, now)
            return None
        if pushed.connected and now >= pushed.reported_at + SILENT_S:
            self.counters.silenced += 1
            self._carry(pushed, pushed.connect(False, now))
        if (wake_at := pushed.stream.wake_at()) is not None and wake_at <= now:
            self._carry(pushed, pushed.stream.tick(now))
            wake_at = pushed.stream.wake_at()
        return wake_at

    def forget(self, backend: BackendId) -> None:
        """Close the streams of a backend that was removed."""
        for key in [key for key in self._streams if key[0] == backend]:
            self._close(key, self._clock())

    def views(self) -> list[dict[str, Any]]:
        """Return a row for each rank of each worker, for the control port."""
        now = self._clock()
        return [
            {
                "backend": self._registry[backend].name,
                "source": pushed.stream.source.name,
                "level": pushed.stream.level.value,
                "connected": pushed.connected,
                "next": pushed.stream.machine.next_seq,
                "hashes": pushed.stream.residency.view().prefixes,
                "report_age_s": now - pushed.reported_at,
            }
            for (backend, _), pushed in self._streams.items()
        ]

    def __len__(self) -> int:
        return len(self._streams)

    def _opened(self, backend: Backend, report: EventReport, now: float) -> PushedStream:
        """Return this report's stream. Opens all ranks of its engine that the report names, and closes others."""
        for key in [key for key in self._streams if key[0] == backend.id]:
            if key[1] not in report.ranks or self._streams[key].model != report.model:
                self._close(key, now)
        for rank in report.ranks:
            if (backend.id, rank) in self._streams:
                continue
            names = names_of(backend, report.model)
            if not names:
                raise Unavailable(f"{backend.name}: of which model its events are is not known; name it, or wait")
            source = Source(backend.id, f"{CHANNEL}/{rank}")
            own = Names(self._hasher, self._namespace_of, names)
            stream = EventStream(source, self._engine_caches, self._hasher, own, settings=SETTINGS)
            stream.open(now)
            self._streams[backend.id, rank] = PushedStream(stream, report.model, now)
            log.info(event("engine_events.pushed", engine=backend.name, source=source.name))
        pushed = self._streams[backend.id, report.rank]
        self._carry(pushed, pushed.stream.measured(now, is_hybrid=backend.seen.hybrid))
        return pushed

    def _close(self, key: tuple[BackendId, int], now: float) -> None:
        self._streams.pop(key).stream.close(now)

    def _carry(self, pushed: PushedStream, effects: Iterable[StreamEffect]) -> None:
        for effect in effects:
            if isinstance(effect, AskReplay):
                self.counters.replays += 1
                pushed.question = effect
            elif isinstance(effect, LevelChanged):
                name = pushed.stream.source.name
                log.debug(event("engine_events.level", engine=name, cache_level=effect.level.value))

    async def _turn(self, began: float) -> float:
        """Let other tasks run if this turn has taken TURN_S. Returns when the present turn began."""
        if self._clock() < began + TURN_S:
            return began
        await trio.lowlevel.checkpoint()
        return self._clock()


def names_of(backend: Backend, model: str) -> tuple[str, ...]:
    """Return the names of the model of a worker's events, first the one that its reporter gave; () if unknown."""
    models = base_models(backend.catalog.cards, backend.catalog.models or ())
    names = models[0] if len(models) == 1 else ()
    return tuple(dict.fromkeys((model, *names))) if model else names


INLINE_BYTES_MAX = 32 * 1024
"""Larger bodies are parsed in a thread: parsing them takes longer than the hop to a thread."""

READERS_MAX = 2
"""Large bodies parsed at one time: more would compete with the event loop for its core."""


class ReportReader:
    """Reads the bodies of `/internal/*`. `backend_of` raises NotFound for a worker that is no backend.

    The routes need the control key, or a worker's own credential (`push_credentials`), which opens no other route and
    speaks for that worker alone. Bodies are bounded; what one would build is counted before it is parsed; nothing
    of it is logged. A credential of a worker that is no backend is refused before that.
    """

    def __init__(self, backend_of: Callable[[str], object]) -> None:
        self._backend_of = backend_of
        self._readers = trio.CapacityLimiter(READERS_MAX)

    def handler(
        self, read: Callable[[Mapping[str, Any]], Any], most: Structure, take: Callable[[Any], Awaitable[Any]]
    ) -> Handler:
        """Return what has a report taken. Raises BadRequest for its shape, NotFound, Forbidden for another worker's."""

        async def handle(asked: Asked) -> Any:
            if asked.worker is not None:
                self._backend_of(asked.worker)
            data = await asked.body()
            check_structure(data, most)
            if len(data) <= INLINE_BYTES_MAX:
                report = read(object_of(data))
            else:
                report = await trio.to_thread.run_sync(lambda: read(object_of(data)), limiter=self._readers)
            if asked.worker is not None and asked.worker != report.worker:
                raise Forbidden("worker_id: this credential is another worker's")
            return await take(report)

        return handle
