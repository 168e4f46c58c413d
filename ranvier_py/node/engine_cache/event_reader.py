"""Streams of engines' events that this node receives, one for each rank, and what is known of each engine besides."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from ranvier_py.core.engine_cache.block_namespaces import Names
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.gap_values import GapCounters, GapSettings
from ranvier_py.core.engine_cache.quota import Quota
from ranvier_py.core.engine_cache.residency_values import ResidencyCounters, ResidencyView
from ranvier_py.core.engine_cache.sources.events import DecoderCounters
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.errors import NoZmq
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, declared, samples
from ranvier_py.core.routing.backends import Backend, Registry
from ranvier_py.core.routing.router import Router
from ranvier_py.io.engine_events.zmq_source import KvSubscriber, SubscriberCounters
from ranvier_py.supervision import Faults

if TYPE_CHECKING:
    from ranvier_py.io.engine_events.zmq_sockets import KvSockets

log = logging.getLogger(__name__)

Carry = Callable[[EventStream, object], None]

LOST_S = 10.0
"""After so long without a connection perhaps a peer can reach the publisher. An engine that restarts takes longer."""


RESTARTS_MAX, RESTART_S = 10, 6.0
"""Restarts of one engine that its events may show: so many at once, then one in so many seconds. Further ones are not
believed: they begin no generation, which peers would count, and forgive the engine nothing."""

LEVELS_LOGGED_MAX, LEVEL_LOGGED_S = 20, 10.0
"""Log lines about one engine's level: so many at once, then one in so many seconds."""


@dataclass(slots=True)
class KnownEngine:
    """What is known of one engine besides its streams."""

    publishers: tuple[Publisher, ...] = ()
    unnamed: tuple[tuple[str, ...], ...] | None = None  # its models, if its events do not say which of them they are of
    lost_until: float = 0.0  # not to be tried before then, since a peer may reach it
    failures: int = 0  # faults in a row
    paused_until: float = 0.0  # no look before then, after a fault
    restarts: Quota = field(default_factory=lambda: Quota(RESTARTS_MAX, RESTART_S))
    levels_logged: Quota = field(default_factory=lambda: Quota(LEVELS_LOGGED_MAX, LEVEL_LOGGED_S))


@dataclass(slots=True)
class SubscribedStream:
    """See the module."""

    publisher: Publisher
    stream: EventStream
    subscriber: KvSubscriber
    scope: trio.CancelScope
    up_at: float  # when it was last seen connected; before that, when it was begun

    async def run(self, faults: Faults) -> None:
        """Run until `stop`."""
        with self.scope:
            await faults.keep("event_subscriber", self.subscriber.run)

    def stop(self, now: float) -> None:
        """Close the stream now; its connection ends soon."""
        self.scope.cancel()
        self.stream.close(now)

    def is_lost(self, now: float) -> bool:
        """Whether there has been no connection for LOST_S."""
        if self.subscriber.state.is_connected:
            self.up_at = now
        return now > self.up_at + LOST_S

    def view(self, now: float) -> dict[str, Any]:
        """Return all figures, for JSON."""
        subscriber = self.subscriber
        return {
            "models": self.stream.names.base,
            "connection": {
                "endpoint": self.publisher.events.endpoint,
                "connected": subscriber.state.is_connected,
                "received_s": None
                if subscriber.state.received_at is None
                else round(now - subscriber.state.received_at, 1),
                "ended": subscriber.state.why,
                **asdict(subscriber.counters),
            },
            "stream": self.stream.view(),
        }

    def line(self) -> dict[str, int]:
        """Return the figures that fit into one line."""
        counters, held = self.stream.machine.counters, self.stream.residency.view()
        return {
            "applied": counters.applied,
            "gaps": counters.gaps,
            "restarts": counters.restarts,
            "blocks": held.blocks,
            "prefixes": held.prefixes,
        }

    def metrics(self, label: Mapping[str, str]) -> Iterator[Sample]:
        """Yield the metrics; `label` names the engine."""
        labels = {**label, "source": self.stream.source.name}
        yield from samples("engine_cache", self.stream.residency.view(), labels)
        yield from samples("engine_blocks", self.stream.residency.counters, labels)
        yield from samples("event_stream", self.stream.machine.counters, labels)
        yield from samples("event_decoder", self.stream.decoder.counters, labels)
        yield from samples("event_connection", self.subscriber.counters, labels)


def declared_streams() -> Iterator[Sample]:
    """Yield the families of streams, of which there may be none."""
    for part, counters in (
        ("engine_cache", ResidencyView),
        ("engine_blocks", ResidencyCounters),
        ("event_stream", GapCounters),
        ("event_decoder", DecoderCounters),
        ("event_connection", SubscriberCounters),
    ):
        yield from declared(part, counters, "backend", "source")


class Subscriptions:
    """Begins and stops the streams of one node. `peers`: whether they have snapshots; `trouble`: why none can begin."""

    def __init__(
        self,
        caches: EngineCaches,
        router: Router,
        rng: Random,
        faults: Faults,
        *,
        peers: bool,
    ) -> None:
        self.faults, self._rng, self._caches, self._peers = faults, rng, caches, peers
        self._hasher, self._namespace_of = router.hasher.plain(), router.reader.namespace_of
        self._sockets: KvSockets | None = None
        self.trouble = ""
        self.nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Streams begin, and their connections last, while this is open."""
        try:
            async with trio.open_nursery() as self.nursery:
                yield
        finally:
            self.nursery = None
            if self._sockets is not None:
                self._sockets.close()

    def can(self) -> bool:
        """Whether this node can receive events at all."""
        if self._sockets is None and not self.trouble and self.nursery is not None:
            from ranvier_py.io.engine_events.zmq_sockets import KvSockets  # noqa: PLC0415  # few nodes receive events

            try:
                self._sockets = KvSockets()
            except NoZmq as error:
                self.trouble = str(error)
                log.warning(event("engine_events.unavailable", why=str(error)))
        return self._sockets is not None

    def begin(
        self, source: Source, base: tuple[str, ...], publisher: Publisher, carry: Carry, now: float
    ) -> SubscribedStream:
        """Begin a stream of a model with these names; `carry` gets what its subscriber does not do itself."""
        assert self._sockets is not None
        assert self.nursery is not None
        names = Names(self._hasher, self._namespace_of, base)
        settings = GapSettings(replay=publisher.replay is not None, peers=self._peers)
        stream = EventStream(source, self._caches, self._hasher, names, settings=settings)
        made = (self._sockets, publisher, stream, self._rng, partial(carry, stream))
        subscriber = KvSubscriber(*made, faults=self.faults)
        one = SubscribedStream(publisher, stream, subscriber, trio.CancelScope(), now)
        self.nursery.start_soon(one.run, self.faults)
        return one

    def stop(self, one: SubscribedStream, label: str, now: float) -> None:
        with self.faults.caught("engine_events"):
            one.stop(now)
        log.info(event("engine_events.stopped", stream=label))


def generation_of(registry: Registry, id_: BackendId) -> int:
    backend = registry.ids.current(id_)
    return -1 if backend is None else backend.generation


def is_hybrid(registry: Registry, id_: BackendId) -> bool:
    backend = registry.ids.current(id_)
    return backend is not None and backend.seen.hybrid


def is_several(backend: Backend) -> bool:
    """Whether several processes answer behind its URL: what one of them reports says nothing of the others. Or it is
    placed as its ranks, whose events are read for themselves."""
    return backend.behind.processes > 1 or bool(backend.behind.as_ranks)


def name_of(registry: Registry, id_: BackendId) -> str:
    backend = registry.ids.current(id_)
    return backend.name if backend is not None else f"#{id_}"
