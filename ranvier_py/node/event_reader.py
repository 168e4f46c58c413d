"""One rank of an engine that is heard: its stream, its connection, and what both can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import trio

from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.sources.publishers import Publisher
from ranvier_py.core.metrics import Sample
from ranvier_py.io.engine_events.zmq_source import KvSubscriber

LOST_S = 10.0
"""Without a connection for so long, perhaps a peer can reach the publisher. An engine that starts anew takes longer."""

GAUGES = ("blocks", "parked", "prefixes", "entries", "unsettled")


@dataclass(slots=True)
class Reading:
    """See the module."""

    publisher: Publisher
    stream: EventStream
    subscriber: KvSubscriber
    scope: trio.CancelScope
    up_at: float  # when it was last connected, or begun

    async def run(self) -> None:
        """Until `stop`."""
        with self.scope:
            await self.subscriber.run()

    def stop(self, now: float) -> None:
        """The truth hears no more of it; its connection is closed by and by."""
        self.stream.close(now)
        self.scope.cancel()

    def is_lost(self, now: float) -> bool:
        """Whether there has been no connection for long."""
        if self.subscriber.view().is_connected:
            self.up_at = now
        return now > self.up_at + LOST_S

    # What it shows

    def view(self, now: float) -> dict[str, Any]:
        """All of it, as JSON has it."""
        connection = self.subscriber.view()
        return {
            "models": self.stream.names.base,
            "connection": {
                "endpoint": connection.endpoint,
                "connected": connection.is_connected,
                "heard_s": None if connection.heard_at is None else round(now - connection.heard_at, 1),
                "ended": connection.why,
                **self._connection_counts(),
            },
            "stream": self.stream.view(),
        }

    def totals(self) -> dict[str, int]:
        """What fits into one line."""
        counts, held = self.stream.machine.counts, self.stream.residency.view()
        return {
            "applied": counts.applied,
            "gaps": counts.gaps,
            "restarts": counts.restarts,
            "blocks": held.blocks,
            "prefixes": held.prefixes,
        }

    def samples(self, label: Mapping[str, str]) -> Iterator[Sample]:
        """For /metrics; `label` names the engine."""
        labels = {**label, "source": self.stream.source.name}
        held = asdict(self.stream.residency.view())
        for name in GAUGES:
            yield Sample(f"kv_{name}", "gauge", f"{name} of an engine's cache.", held[name], labels)
        for name, number in {**self.stream.counts(), **self._connection_counts()}.items():
            yield Sample(f"kv_{name}", "counter", f"{name.replace('_', ' ')} of KV events.", number, labels)

    def _connection_counts(self) -> dict[str, int]:
        """Counters of the connection; what was malformed as one number."""
        counts = asdict(self.subscriber.counts)
        return {**counts, "malformed": sum(counts["malformed"].values())}
