"""A connection to a socket that publishes, made again whenever it ends: at first soon, then later and later.

Rules: pauses double up to `retry_s_max`, with jitter, and begin anew after a connection that stood for `steady_s`. The
addresses of a name take turns. `down` is called once for each connection, whether it ever stood or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import trio

from ranvier_py.core.engine_cache.sources.publishers import Endpoint
from ranvier_py.core.metrics import counter
from ranvier_py.io.engine_events.zmq_sockets import KvSockets, Room

log = logging.getLogger(__name__)


ROOM = Room(64, 128 << 20)
"""What finds none waits with the engine, which keeps 100,000 messages for each listener."""

REPLAY_ROOM = Room(20_000, 256 << 20)
"""Twice vLLM's buffer: an engine drops answers that find none."""


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine is heard. All times in seconds."""

    retry_s: float = 0.2  # first pause before another connection
    retry_s_max: float = 5.0  # an engine needs longer than that to start
    steady_s: float = 5.0
    room: Room = ROOM
    replay_room: Room = REPLAY_ROOM
    replay_bytes_max: int = 256 << 20  # of one answer
    replay_silence_s: float = 10.0
    replay_s_max: float = 120.0


@dataclass(slots=True)
class SubscriberCounters:
    connects: int = counter("Connections to publishers that stood.")
    failures: int = counter("Connections that never stood.")
    messages: int = counter("Messages received.")
    message_bytes: int = counter("Bytes of messages received.")
    loads: int = counter("Reports of an engine's load.")
    replays: int = counter("Questions to replay sockets.")
    replay_messages: int = counter("Messages replayed.")
    replays_failed: int = counter("Questions to replay sockets without an answer.")
    faults: int = counter("Exceptions of streams, each a bug.")
    malformed: dict[str, int] = counter("Messages that were none.", label="reason")  # as a field

    def note_malformed(self, reason: str) -> None:
        """One more, for a reason in our words."""
        self.malformed[reason] = self.malformed.get(reason, 0) + 1


class Subscription(NamedTuple):
    """Where to listen, to what, and whom to tell."""

    where: Endpoint
    topics: Sequence[str]
    took: Callable[[list[bytes]], object]
    up: Callable[[], object] = lambda: None
    down: Callable[[str], object] = lambda _: None


class LastingConnection:
    """Keeps one connection. `run` until cancelled; after that `down` is for whoever cancelled."""

    def __init__(
        self,
        sockets: KvSockets,
        subscription: Subscription,
        options: Options,
        counters: SubscriberCounters,
        rng: Random,
    ) -> None:
        self._sockets = sockets
        self._subscription = subscription
        self._options = options
        self._counters = counters
        self._rng = rng
        self._stood_at: float | None = None

    async def run(self) -> None:
        """Never raises for the sake of the network."""
        options, subscription = self._options, self._subscription
        pause_s, tries = options.retry_s, 0
        while True:
            why = await self._once(tries)
            self._tell(why, is_first=tries == 0)
            if self._stood_at is not None and trio.current_time() >= self._stood_at + options.steady_s:
                pause_s = options.retry_s
            subscription.down(why)
            tries += 1
            await trio.sleep(pause_s * (0.75 + 0.5 * self._rng.random()))
            pause_s = min(2 * pause_s, options.retry_s_max)

    async def _once(self, tries: int) -> str:
        """One connection, from beginning to end. Returns why it ended."""
        self._stood_at = None
        subscription = self._subscription
        try:
            wire = self._sockets.subscriber(subscription.where, subscription.topics, self._options.room)
        except OSError as error:
            return error.strerror or "no socket"
        try:
            return await wire.run(subscription.took, self._up, tries)
        finally:
            wire.close()

    def _up(self) -> None:
        self._stood_at = trio.current_time()
        self._counters.connects += 1
        log.info("event_stream.connected %s", self._subscription.where.endpoint)
        self._subscription.up()

    def _tell(self, why: str, *, is_first: bool) -> None:
        endpoint = self._subscription.where.endpoint
        if self._stood_at is not None:
            log.info("event_stream.disconnected %s: %s; trying again", endpoint, why)
            return
        self._counters.failures += 1
        log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "event_stream.not_connected %s: %s; trying on",
            endpoint,
            why,
        )
