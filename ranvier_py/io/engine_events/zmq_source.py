"""Receives one event stream of an engine (vLLM, SGLang, or alike) over ZeroMQ, for a Stream that decides what to do.

A publisher sends [topic, number, payload] to all subscribers; its replay socket answers [empty, first number] with
[empty, number, payload] or [empty, topic, number, payload] for each message that it still has, and ends with number
-1.
Rule: nothing that an engine sends raises; malformed messages are counted. Calls of `connected` and `disconnected`
alternate, and after `run` the stream is disconnected. Each question for replay has its own connection, so that no
answer can belong to another question. Bounds: those of `SocketOptions`; a replay that exceeds them has failed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import NamedTuple, Protocol

import trio

from ranvier_py.core.engine_cache.event_stream import EventStream
from ranvier_py.core.engine_cache.gap_values import AskReplay
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, Room, SocketOptions
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import counter
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

SEQ_BYTES = 8
SEQ_MAX = (1 << 63) - 1
END = b"\xff" * SEQ_BYTES  # -1
LOAD_MARK = b"\xa8LoadStat"  # in msgpack, after one byte for the array
LOOK_S = 1.0  # `wake_at` is read at least this often
PAUSE_S = 0.001  # between two ticks that are due immediately


@dataclass(slots=True)
class SubscriberCounters:
    connects: int = counter("Connections to publishers of KV events that were made.")
    failures: int = counter("Connections to publishers of KV events that were never made.")
    messages: int = counter("Messages received from publishers of KV events.")
    message_bytes: int = counter("Bytes of messages received from publishers of KV events.")
    loads: int = counter("Reports of an engine's load among its KV events.")
    replays: int = counter("Requests to engines to replay missed KV events.")
    replay_messages: int = counter("Messages with KV events that engines replayed.")
    replays_failed: int = counter("Requests to engines to replay KV events that got no answer.")
    malformed: dict[str, int] = counter(
        "Messages from publishers that have not the frames of KV events.", label="reason"
    )  # in our own words


Stream = EventStream | GapMachine
"""What decides: every call returns effects, in order, and none waits."""


class Sockets(Protocol):
    """What connects (zmq_sockets, which needs pyzmq), and the turn for all who do long work on the event loop."""

    turn: trio.CapacityLimiter

    async def connect(
        self,
        where: Endpoint,
        room: Room,
        took: Callable[[list[bytes]], object],
        *,
        topics: Sequence[str] = (),
        question: Sequence[bytes] = (),
        up: Callable[[], object] = lambda: None,
        turn: int = 0,
    ) -> str: ...


class LoadReceived(NamedTuple):
    """SGLang's LoadStat as received, on the same socket or one of its own; EventDecoder reads it."""

    payload: bytes


@dataclass(slots=True)
class SubscriberState:
    """How a subscription is doing. `why`: why it ended last."""

    is_connected: bool = False
    received_at: float | None = None
    why: str = ""


class KvSubscriber:
    """Subscribes to one publisher for one stream. `carried` gets LoadReceived, and every effect but AskReplay; effects
    of calls that others make of the stream go to `carry`. Cancelling `run` ends the subscription."""

    def __init__(  # noqa: PLR0913  # the last three are for tests and for the node
        self,
        sockets: Sockets,
        publisher: Publisher,
        stream: Stream,
        rng: Random,
        carried: Callable[[object], object] = lambda _: None,
        *,
        options: SocketOptions | None = None,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publisher` must have hosts (`publishers.at_home`). `clock` must be that of the stream's other callers."""
        self._faults = faults or Faults()
        self.publisher, self.stream = publisher, stream
        self.options = options or SocketOptions()
        self.counters = SubscriberCounters()
        self._sockets, self._rng, self._carried = sockets, rng, carried
        self._clock = clock
        self.state = SubscriberState()
        self._nursery: trio.Nursery | None = None
        self._asking: trio.CancelScope | None = None
        self._poked = trio.Event()
        self._asleep_until = inf

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Engines and the network raise nothing here."""
        publisher, load = self.publisher, self.publisher.load
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._subscribe, publisher.events, self._topics(), self._take, self._up, self._down)
                if load is not None:
                    nursery.start_soon(self._subscribe, load, (publisher.load_topic,), self._take_load)
                nursery.start_soon(self._keep_time)
                task_status.started()
        finally:
            self._nursery = None
            self._down("stopped")

    def carry(self, effects: Iterable[object]) -> None:
        """Carry out the effects that a call of the stream returned, whoever made the call."""
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

    def _topics(self) -> tuple[str, ...]:
        """Return the engine's topic, "" (all) if it names none; and LoadStat's, if that comes on the same socket."""
        topic, load_topic = self.publisher.topic, self.publisher.load_topic
        return (topic, load_topic) if topic and load_topic and self.publisher.load is None else (topic,)

    def _up(self) -> None:
        if not self.state.is_connected:
            self.state.is_connected = True
            self.hand(self.stream.connected)

    def _down(self, why: str) -> None:
        self.state.why = why
        self._give_up_asking()
        if self.state.is_connected:
            self.state.is_connected = False
            self.hand(self.stream.disconnected)

    async def _subscribe(
        self,
        where: Endpoint,
        topics: Sequence[str],
        took: Callable[[list[bytes]], object],
        up: Callable[[], object] = lambda: None,
        down: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Keep a connection to a socket that publishes, and make it again whenever it ends, until cancelled.

        Pauses double up to `retry_s_max`, with jitter, and are reset after a connection that lasted for `steady_s`. The
        addresses of a name take turns. `down` is called once for each connection, even if it was never established.
        """
        options, counters, stood_at = self.options, self.counters, inf

        def stands() -> None:
            nonlocal stood_at
            stood_at = trio.current_time()
            counters.connects += 1
            log.info(event("event_stream.connected", endpoint=where.endpoint))
            up()

        pause_s = options.retry_s
        for tries in count():
            stood_at = inf
            why = await self._sockets.connect(where, options.room, took, topics=topics, up=stands, turn=tries)
            if stood_at < inf:
                log.info(event("event_stream.disconnected", endpoint=where.endpoint, why=why))
            else:
                counters.failures += 1
                level = logging.DEBUG if tries else logging.WARNING
                log.log(level, event("event_stream.not_connected", endpoint=where.endpoint, why=why))
            if trio.current_time() >= stood_at + options.steady_s:
                pause_s = options.retry_s
            down(why)
            await trio.sleep(pause_s * (0.75 + 0.5 * self._rng.random()))
            pause_s = min(2 * pause_s, options.retry_s_max)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self.counters.malformed["frames"] += 1
            return
        _, number, payload = frames
        if payload.startswith(LOAD_MARK, 1):
            self._take_load(frames)
            return
        seq = seq_of(number)
        if seq is None:
            self.counters.malformed["number"] += 1
            return
        self._up()  # who receives is connected, even if `up` was not called yet
        self.counters.messages += 1
        self.counters.message_bytes += len(payload)
        self.state.received_at = self._clock()
        self.hand(self.stream.live, seq, payload)

    def _take_load(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or not frames[2].startswith(LOAD_MARK, 1):
            self.counters.malformed["load"] += 1
            return
        self.counters.loads += 1
        with self._faults.caught("event_stream"):
            self._carried(LoadReceived(frames[2]))

    def hand(self, call: Callable[..., Sequence[object]], *arguments: object) -> bool:
        """Call the stream and carry out its effects. Returns False if it raised: a bug, which loses that message."""
        try:
            self.carry(call(*arguments, self._clock()))
        except Exception as error:
            self._faults.note("event_stream", error)
            return False
        return True

    def _ask(self, effect: AskReplay) -> Sequence[object]:
        """Begin a replay, and give up one that is running. Returns the effects that follow at once."""
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
        """Give the stream each message of one replay, and at the end call it with the replay's success or failure."""
        options, counters, stream = self.options, self.counters, self.stream
        over_at = trio.current_time() + options.replay_s_max
        size_bytes, is_whole = 0, False

        def wait() -> None:
            """Let the engine be silent for `replay_silence_s` from now on, within the replay's limit."""
            scope.deadline = min(trio.current_time() + options.replay_silence_s, over_at)

        def take(frames: list[bytes]) -> None:
            nonlocal size_bytes, is_whole
            if scope.cancel_called:
                return
            if len(frames) not in (3, 4) or frames[0]:
                counters.malformed["replay"] += 1
                return
            number, payload = frames[-2:]
            seq = seq_of(number)
            if number == END:
                is_whole = True
            elif seq is None:
                counters.malformed["number"] += 1
                return
            else:
                size_bytes += len(payload)
                counters.replay_messages += 1
            if is_whole or size_bytes > options.replay_bytes_max:
                scope.cancel()
                return
            wait()
            self.hand(stream.replayed, effect.ask, seq, payload)

        with scope:
            wait()
            question = (b"", effect.first.to_bytes(SEQ_BYTES, "big"))
            await self._sockets.connect(where, options.replay_room, take, question=question)
        if self._asking is scope:  # and no other question replaced it
            counters.replays_failed += not is_whole
            self.hand(stream.replay_ended if is_whole else stream.replay_failed, effect.ask)

    async def _keep_time(self) -> None:
        """Tick whenever the stream wants it."""
        while True:
            wake_at, now = self.stream.wake_at(), self._clock()
            if wake_at is not None and wake_at <= now:
                async with self._sockets.turn:
                    is_well = self.hand(self.stream.tick)
                await trio.sleep(PAUSE_S if is_well else LOOK_S)
                continue
            self._asleep_until = min(now + LOOK_S, inf if wake_at is None else wake_at)
            with trio.move_on_after(self._asleep_until - now):
                await self._poked.wait()
            self._poked, self._asleep_until = trio.Event(), -inf


def seq_of(number: bytes) -> int | None:
    """Read a message's number; None if these bytes are none."""
    seq = int.from_bytes(number, "big") if len(number) == SEQ_BYTES else SEQ_MAX + 1
    return seq if seq <= SEQ_MAX else None
