"""A simulated node's event streams of engines: the real streams and engine caches, on simulated connections.

It has the part of `ranvier_py.node.engine_cache.engine_event_parts`: `look` opens and closes the streams that this node
is to read by the peers' agreement, and carries snapshots; what it asks of the network waits in `take`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.simulation.sim_engine import NAMESPACE
from ranvier_py.core.engine_cache.block_namespaces import Names
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.event_stream import EventStream, StreamEffect
from ranvier_py.core.engine_cache.gap_values import AskPeer, AskReplay, GapSettings, Level
from ranvier_py.core.engine_cache.peer_access import StreamSharer
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.router import Router

SWEEP_ROWS = 200
"""Rows per look, which makes as many a second as a node sweeps."""


class Subscribed(NamedTuple):
    engine: int


class Unsubscribed(NamedTuple):
    engine: int


class ReplayRequested(NamedTuple):
    engine: int
    ask: int
    first: int


StreamRequest = Subscribed | Unsubscribed | ReplayRequested


def namespace_of(model: str, adapter: str, salt: str) -> Fingerprint:  # noqa: ARG001  # as PromptReader's
    return NAMESPACE


class NodeStreams:
    """The streams of one process. Engines are numbers; `ids` are the registry's ids, in the same order."""

    def __init__(self, router: Router, ids: Sequence[BackendId], sharing: StreamSharer) -> None:
        self.engine_caches = EngineCaches(router.routes, self._generation_of, restarted=self._restarted)
        self.sharing = sharing
        sharing.give = self._snapshot
        self.streams: dict[int, EventStream] = {}
        self.degraded = 0  # looks at which a stream was DEGRADED
        self._router = router
        self._registry: Registry = router.registry
        self._ids = ids
        self._requests: list[StreamRequest] = []

    def take(self) -> list[StreamRequest]:
        requests, self._requests = self._requests, []
        return requests

    def level(self, engine: int) -> Level | None:
        """Return the cache level of an engine; None: this node does not read its events."""
        stream = self.streams.get(engine)
        return stream.level if stream is not None and stream.is_open else None

    def claims(self, now: float) -> Iterator[tuple[int, int]]:
        """Yield (engine, token fingerprint) of all live claims. O(table)."""
        routes = self._router.routes
        routes.sweep(now, (), 0)  # ages count from the latest time that the table has seen
        for view in routes.subtree(0, limit=len(routes)):
            for holder in view.holders if view.token_fingerprint else ():
                if holder.generation == self._generation_of(holder.backend) and holder.age_s < routes.ttl_s:
                    yield self._ids.index(holder.backend), view.token_fingerprint

    def look(self, now: float) -> None:
        self.sharing.streams(dict.fromkeys(self._ids, (0,)), now)
        for engine, backend in enumerate(self._ids):
            self._follow(engine, backend, now)
        for answer in self.sharing.snapshots():
            engine = self._ids.index(answer.backend)
            stream = self.streams.get(engine)
            if stream is not None:
                effects = stream.machine.snapshot_offered(answer.ask, answer.snapshot, now)
                self._carry(engine, stream.carry(effects, now), now)
        self.engine_caches.sweep(now, SWEEP_ROWS)

    def _follow(self, engine: int, backend: BackendId, now: float) -> None:
        stream = self.streams.get(engine)
        if not self.sharing.subscribes(backend):
            if stream is not None:
                self.streams.pop(engine).close(now)
                self._requests.append(Unsubscribed(engine))
            return
        if stream is None:
            names = Names(self._router.hasher, namespace_of, ("m",))
            source = Source(backend, "zmq/0")
            stream = EventStream(source, self.engine_caches, self._router.hasher, names, settings=GapSettings())
            self.streams[engine] = stream
            self._requests.append(Subscribed(engine))
        (stream.open if self.sharing.reads(backend) else stream.close)(now)
        wake_at = stream.wake_at()
        if wake_at is not None and wake_at <= now:
            self._carry(engine, stream.tick(now), now)
        self.sharing.report(backend, stream.level, now)
        self.degraded += stream.is_open and stream.level is Level.DEGRADED

    # --- what wires bring -------------------------------------------------------------------------------------------

    def live(self, engine: int, seq: int, payload: bytes, now: float) -> None:
        stream = self.streams.get(engine)
        if stream is not None:
            self._carry(engine, stream.live(seq, payload, now), now)

    def wired(self, engine: int, what: str, now: float) -> None:
        """Tell a stream that it is `connected` or `disconnected` (`what`)."""
        stream = self.streams.get(engine)
        if stream is not None:
            self._carry(engine, getattr(stream, what)(now), now)

    def answered(self, ask: ReplayRequested, answers: Sequence[tuple[int, bytes]] | None, now: float) -> None:
        """Give a stream the answers to a replay. None: the publisher can't be reached."""
        stream = self.streams.get(ask.engine)
        if stream is None:
            return
        if answers is None:
            self._carry(ask.engine, stream.replay_failed(ask.ask, now), now)
            return
        for seq, payload in answers:
            self._carry(ask.engine, stream.replayed(ask.ask, seq, payload, now), now)
        self._carry(ask.engine, stream.replay_ended(ask.ask, now), now)

    def _carry(self, engine: int, effects: Sequence[StreamEffect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, AskReplay):
                self._requests.append(ReplayRequested(engine, effect.ask, effect.first))
            elif isinstance(effect, AskPeer):
                self.sharing.ask(self._ids[engine], 0, effect.ask, now)

    # --- what the truth asks ----------------------------------------------------------------------------------------

    def _generation_of(self, backend: BackendId) -> int:
        known = self._registry.ids.slots[backend]
        return -1 if known is None or known.removed else known.generation

    def _restarted(self, backend: BackendId, why: str, now: float) -> int:
        known = self._registry[backend]
        self._registry.changes.restart_reported(known, 0.0, now, why)
        return known.generation

    def _snapshot(self, backend: BackendId, rank: int) -> SnapshotWriter | None:  # noqa: ARG002
        stream = self.streams.get(self._ids.index(backend))
        return stream.snapshot() if stream is not None else None
