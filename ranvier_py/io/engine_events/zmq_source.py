"""One event stream of an engine (vLLM, SGLang, or alike), received over ZeroMQ for a Stream that decides.

A publisher sends [topic, number, payload] to all subscribers; its replay socket answers [empty, first number] with
[empty, number, payload] or [empty, topic, number, payload] for each message that it still has, and ends with number -1.
This shell keeps a connection, hands in what comes, calls `tick`, and carries out AskReplay; every other effect goes to
`carried`. So does LoadReceived: SGLang's LoadStat, which comes on the same socket or on one of its own.

    with KvSockets() as sockets:                    # one for the node; raises NoZmq, which says what to install
        subscriber = KvSubscriber(sockets, publisher, stream, rng, carried)
        nursery.start_soon(subscriber.run)          # in a cancel scope: that ends it, and the engine sees one less
        subscriber.carry(stream.contradicted(now))  # effects of calls that others make

Rules: nothing that an engine sends raises; what is no such message is counted. `connected` and `disconnected` are
called in turn; after `run` it is disconnected. A question for replay has a connection of its own, so that no answer
belongs to another one.
Bounds: those of `SocketOptions`; a replay that exceeds them has failed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple, Protocol

import trio

from ranvier_py.core.engine_cache.gap_values import AskReplay
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, Room, SocketOptions
from ranvier_py.core.metrics import counter

log = logging.getLogger(__name__)

SEQ_BYTES = 8
SEQ_MAX = (1 << 63) - 1
END = b"\xff" * SEQ_BYTES  # -1
LOAD_MARK = b"\xa8LoadStat"  # as msgpack has it, behind one byte for the array
FAULT_PAUSE_S = 60.0  # between two tracebacks of a stream that raises: it is a bug, and every message may meet it
LOOK_S = 1.0  # `wake_at` is looked at that often at least
PAUSE_S = 0.001  # between two ticks that are due at once


class EventConnection(Protocol):
    """One connection, as `zmq_sockets` makes it."""

    async def run(
        self,
        took: Callable[[list[bytes]], object],
        up: Callable[[], object] = ...,
        turn: int = ...,
        first: Sequence[bytes] = ...,
    ) -> str: ...
    def close(self) -> None: ...


class EventSockets(Protocol):
    """Where connections come from; `turn` is held by the one that reads."""

    @property
    def turn(self) -> trio.CapacityLimiter: ...
    def subscriber(self, where: Endpoint, topics: Sequence[str], room: Room) -> EventConnection: ...
    def dealer(self, where: Endpoint, room: Room) -> EventConnection: ...


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


class SequencedStream(Protocol):
    """What decides (core/engine_cache/event_stream.py). Every call returns effects, in order; nothing in it waits."""

    def connected(self, now: float) -> Sequence[object]: ...
    def disconnected(self, now: float) -> Sequence[object]: ...
    def live(self, seq: int, payload: bytes, now: float) -> Sequence[object]: ...
    def replayed(self, ask: int, seq: int, payload: bytes, now: float) -> Sequence[object]: ...
    def replay_ended(self, ask: int, now: float) -> Sequence[object]: ...
    def replay_failed(self, ask: int, now: float) -> Sequence[object]: ...
    def tick(self, now: float) -> Sequence[object]: ...
    def wake_at(self) -> float | None: ...


class LoadReceived(NamedTuple):
    """SGLang's LoadStat as it came: EventDecoder reads it."""

    payload: bytes


class KvSubscriber:
    """Subscribes to one publisher for one stream. `carried` gets LoadReceived, and every effect but AskReplay."""

    def __init__(
        self,
        sockets: EventSockets,
        publisher: Publisher,
        stream: SequencedStream,
        rng: Random,
        carried: Callable[[object], object] = lambda _: None,
        *,
        options: SocketOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publisher` must say its hosts (`publishers.at_home`). `clock` is the one that the stream's others use."""
        self.publisher = publisher
        self.stream = stream
        self.options = options or SocketOptions()
        self.counters = SubscriberCounters()
        self._sockets = sockets
        self._rng = rng
        self._carried = carried
        self._clock = clock
        self.is_connected = False
        self.received_at: float | None = None
        self.why = ""
        self._faulted_at = -inf
        self._nursery: trio.Nursery | None = None
        self._asking: trio.CancelScope | None = None
        self._poked = trio.Event()
        self._asleep_until = inf

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Never raises for the sake of an engine or of the network."""
        publisher, load = self.publisher, self.publisher.load
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                subscriptions = [Subscription(publisher.events, self._topics(), self._take, self._up, self._down)]
                if load is not None:
                    subscriptions.append(Subscription(load, (publisher.load_topic,), self._take_load))
                for subscription in subscriptions:
                    nursery.start_soon(
                        LastingConnection(self._sockets, subscription, self.options, self.counters, self._rng).run
                    )
                nursery.start_soon(self._keep_time)
                task_status.started()
        finally:
            self._nursery = None
            self._down("stopped")

    def carry(self, effects: Iterable[object]) -> None:
        """Carry out what a call of the stream returned: for whoever calls it from elsewhere, too."""
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            if isinstance(effect, AskReplay):
                waiting.extend(self._ask(effect))
            else:
                self._carried(effect)
        wake_at = self.stream.wake_at()
        if wake_at is not None and wake_at < self._asleep_until:
            self._asleep_until = -inf
            self._poked.set()

    # --- the connection ---------------------------------------------------------------------------------------------

    def _topics(self) -> tuple[str, ...]:
        """All of them where the engine names none; else its own, and the one of LoadStat if that comes here."""
        topic, load_topic = self.publisher.topic, self.publisher.load_topic
        return (topic, load_topic) if topic and load_topic and self.publisher.load is None else (topic,)

    def _up(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.hand(self.stream.connected)

    def _down(self, why: str) -> None:
        self.why = why
        self._give_up_asking()
        if self.is_connected:
            self.is_connected = False
            self.hand(self.stream.disconnected)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self.counters.note_malformed("frames")
            return
        _, number, payload = frames
        if payload.startswith(LOAD_MARK, 1):
            self._take_load(frames)
            return
        seq = seq_of(number)
        if seq is None:
            self.counters.note_malformed("number")
            return
        self._up()  # who receives is connected
        self.counters.messages += 1
        self.counters.message_bytes += len(payload)
        self.received_at = self._clock()
        self.hand(self.stream.live, seq, payload)

    def _take_load(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or not frames[2].startswith(LOAD_MARK, 1):
            self.counters.note_malformed("load")
            return
        self.counters.loads += 1
        try:
            self._carried(LoadReceived(frames[2]))
        except Exception as error:
            self._fault(error)

    def hand(self, call: Callable[..., Sequence[object]], *arguments: object) -> None:
        """Call the stream, and carry out what it returns."""
        try:
            self.carry(call(*arguments, self._clock()))
        except Exception as error:
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        """The stream raised. That is a bug, and costs the message that it met."""
        self.counters.faults += 1
        now = self._clock()
        if now >= self._faulted_at + FAULT_PAUSE_S:
            self._faulted_at = now
            log.error(
                "event_stream.failed %s, %d so far",
                self.publisher.events.endpoint,
                self.counters.faults,
                exc_info=error,
            )

    # --- replay -----------------------------------------------------------------------------------------------------

    def _ask(self, effect: AskReplay) -> Sequence[object]:
        """Begin to ask; a question before it is given up. Returns what follows at once."""
        self.counters.replays += 1
        self._give_up_asking()
        if self.publisher.replay is None or self._nursery is None:
            self.counters.replays_failed += 1
            return self.stream.replay_failed(effect.ask, self._clock())
        self._asking = trio.CancelScope()
        self._nursery.start_soon(self._replay, effect, self.publisher.replay, self._asking)
        return ()

    def _give_up_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _replay(self, effect: AskReplay, where: Endpoint, scope: trio.CancelScope) -> None:
        answers = Answers(effect, scope, self)
        with scope:
            answers.wait()
            try:
                wire = self._sockets.dealer(where, self.options.replay_room)
            except OSError:
                answers.fail()
                return
            try:
                await wire.run(answers.take, first=(b"", effect.first.to_bytes(SEQ_BYTES, "big")))
                answers.fail()
            finally:
                wire.close()
        if self._asking is scope:
            answers.fail()  # its time is over

    # --- time -------------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        """Tick when the stream wants it."""
        while True:
            wake_at, now = self.stream.wake_at(), self._clock()
            if wake_at is not None and wake_at <= now:
                faults = self.counters.faults
                async with self._sockets.turn:
                    self.hand(self.stream.tick)
                await trio.sleep(PAUSE_S if faults == self.counters.faults else LOOK_S)
                continue
            self._asleep_until = min(now + LOOK_S, inf if wake_at is None else wake_at)
            with trio.move_on_after(self._asleep_until - now):
                await self._poked.wait()
            self._poked, self._asleep_until = trio.Event(), -inf


class Answers:
    """What the replay socket says to one question. The stream is called once, as it ended or failed."""

    def __init__(self, effect: AskReplay, scope: trio.CancelScope, subscriber: KvSubscriber) -> None:
        self.ask = effect.ask
        self._scope = scope
        self._subscriber = subscriber
        self._over_at = trio.current_time() + subscriber.options.replay_s_max
        self._bytes = 0
        self._is_done = False

    def wait(self) -> None:
        """From now on for as long as an engine may be silent."""
        self._scope.deadline = min(trio.current_time() + self._subscriber.options.replay_silence_s, self._over_at)

    def take(self, frames: list[bytes]) -> None:
        subscriber, counters = self._subscriber, self._subscriber.counters
        if self._is_done:
            return
        if len(frames) not in (3, 4) or frames[0]:
            counters.note_malformed("replay")
            return
        number, payload = frames[-2:]
        if number == END:
            self._end(subscriber.stream.replay_ended)
            return
        seq = seq_of(number)
        if seq is None:
            counters.note_malformed("number")
            return
        self.wait()
        self._bytes += len(payload)
        counters.replay_messages += 1
        if self._bytes > subscriber.options.replay_bytes_max:
            self.fail()
            return
        subscriber.hand(subscriber.stream.replayed, self.ask, seq, payload)

    def fail(self) -> None:
        if not self._is_done:
            self._subscriber.counters.replays_failed += 1
            self._end(self._subscriber.stream.replay_failed)

    def _end(self, call: Callable[[int, float], Sequence[object]]) -> None:
        self._is_done = True
        self._scope.cancel()
        self._subscriber.hand(call, self.ask)


def seq_of(number: bytes) -> int | None:
    """None: it is none that counts messages."""
    seq = int.from_bytes(number, "big") if len(number) == SEQ_BYTES else SEQ_MAX + 1
    return seq if seq <= SEQ_MAX else None


class Subscription(NamedTuple):
    """Where to listen, to what, and whom to tell."""

    where: Endpoint
    topics: Sequence[str]
    took: Callable[[list[bytes]], object]
    up: Callable[[], object] = lambda: None
    down: Callable[[str], object] = lambda _: None


class LastingConnection:
    """A connection to a socket that publishes, made again whenever it ends. `run` until cancelled; after that `down` is
    for whoever cancelled.

    Pauses double up to `retry_s_max`, with jitter, and begin anew after a connection that stood for `steady_s`. The
    addresses of a name take turns. `down` is called once for each connection, whether it ever stood or not.
    """

    def __init__(
        self,
        sockets: EventSockets,
        subscription: Subscription,
        options: SocketOptions,
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
            self._report(why, is_first=tries == 0)
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

    def _report(self, why: str, *, is_first: bool) -> None:
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
