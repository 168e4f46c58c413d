"""One rank of an engine whose events this node receives: its stream, its connection, and their figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import trio

from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.io.engine_events.zmq_source import KvSubscriber
from ranvier_py.supervision import Faults

LOST_S = 10.0
"""After so long without a connection perhaps a peer can reach the publisher. An engine that restarts takes longer."""


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
        if self.subscriber.is_connected:
            self.up_at = now
        return now > self.up_at + LOST_S

    def view(self, now: float) -> dict[str, Any]:
        """Return all figures, for JSON."""
        subscriber = self.subscriber
        return {
            "models": self.stream.names.base,
            "connection": {
                "endpoint": self.publisher.events.endpoint,
                "connected": subscriber.is_connected,
                "received_s": None if subscriber.received_at is None else round(now - subscriber.received_at, 1),
                "ended": subscriber.why,
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
