"""A subscriber against engines that send garbage, too much, or nothing: it goes on, within its bounds."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random

import pytest
import trio
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.kv_publisher import KvEndpoints, KvPublisher
from ranvier_py.core.engine_cache.gap_values import AskReplay, GapSettings, Level
from ranvier_py.core.engine_cache.gaps import GapMachine
from ranvier_py.core.engine_cache.sources.publishers import Endpoint, Publisher, Room, SocketOptions
from ranvier_py.io.engine_events.zmq_sockets import FRAME_BYTES_MAX, FRAMES_MAX, TURN_S, KvSockets
from ranvier_py.io.engine_events.zmq_source import KvSubscriber
from tests.examples import examples
from tests.io.engine_events.kv_fakes import (
    Received,
    at,
    connected,
    connections_to,
    publisher_of,
    publishing,
    reading,
    until,
)

ROOT = Path(__file__).parents[3]
NUMBER = struct.Struct(">Q")
FRAMES = st.lists(
    st.binary(max_size=24) | st.integers(0, 2**64 - 1).map(NUMBER.pack) | st.just(b"\xff" * 8) | st.just(b""),
    min_size=1,
    max_size=10,
)


async def still_received(source: KvPublisher, received: Received) -> None:
    """A good message comes through, whatever was before it."""
    payload = b"good %d" % source.published
    number = source.publish(payload)
    await until(lambda: (number, payload) in received.applied)


@settings(max_examples=examples(20))
@given(st.lists(FRAMES, min_size=1, max_size=15))
def test_any_frames_may_come_over_the_wire(live: list[list[bytes]]) -> None:
    async def main() -> None:
        async with connected() as (source, received):
            for frames in live:
                source.send(*frames)
            numbered = b"\x00" * 7 + b"\x07"
            source.send(b"", numbered, b"from nowhere")
            counts = received.counters
            await until(lambda: counts.messages + sum(counts.malformed.values()) + counts.loads > len(live))
            assert received.faults == {}

    trio.run(main)


@settings(max_examples=examples(12))
@given(st.lists(FRAMES, max_size=12), st.booleans())
def test_any_answer_to_a_question_ends_it(answers: list[list[bytes]], ends: bool) -> None:
    """A question without an end would leave the stream in repair for ever."""

    async def main() -> None:
        end = [[b"", b"\xff" * 8, b""]] if ends else []
        async with publishing(KvEndpoints()) as source, answering([*answers, *end]) as replay:
            place = publisher_of(source)._replace(replay=replay)
            options = SocketOptions(retry_s=0.02, replay_silence_s=0.1)
            patient = GapSettings(peers=False, replay_timeout_s=60.0, replay_pause_s=60.0)
            async with reading(place, options, patient) as received:
                await until(lambda: Level.REPAIRING in received.levels and received.level is not Level.REPAIRING)
                assert received.faults == {}

    trio.run(main)


@asynccontextmanager
async def answering(answers: Sequence[Sequence[bytes]]) -> AsyncIterator[Endpoint]:
    """A replay socket that says this to every question."""

    async def answer() -> None:
        while True:
            while router.poll(0):
                who, *_ = router.recv_multipart()
                for frames in answers:
                    router.send_multipart([who, *frames], zmq.NOBLOCK)
            await trio.sleep(0.002)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 100_000)
        router.bind("tcp://127.0.0.1:0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            yield at(router.getsockopt_string(zmq.LAST_ENDPOINT))
            nursery.cancel_scope.cancel()


GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


@asynccontextmanager
async def speaking(speak: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[Publisher]:
    """A server that is no publisher, or an odd one."""

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await speak(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        yield Publisher(0, Endpoint("127.0.0.1", port))
        nursery.cancel_scope.cancel()


@settings(max_examples=examples(30))
@given(st.sampled_from([b"", GREETING, GREETING + READY]), st.lists(st.binary(max_size=300), max_size=5))
def test_any_bytes_end_the_connection_or_are_passed_over(before: bytes, chunks: list[bytes]) -> None:
    async def main() -> None:
        async def speak(stream: trio.SocketStream) -> None:
            await stream.send_all(before)
            for chunk in chunks:
                await stream.send_all(chunk)

        async with speaking(speak) as place, reading(place) as received:
            await until(lambda: received.counters.failures + received.counters.connects >= 2)
            assert received.faults == {}

    trio.run(main)


async def test_a_server_that_sends_nothing_is_no_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier_py.io.engine_events.zmq_sockets.CONNECT_S", 0.1)

    async def speak(_: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with speaking(speak) as place, reading(place) as received:
        await until(lambda: received.counters.failures >= 2)
        assert received.subscriber.state.why in ("no answer in time", "no ZeroMQ there")


async def test_a_name_that_is_not_found_is_tried_again() -> None:
    async with reading(Publisher(0, Endpoint("nowhere.invalid", 1))) as received:
        await until(lambda: received.counters.failures >= 2)


async def test_a_message_that_is_too_large_costs_the_connection() -> None:
    async with connected() as (source, received):
        source.send(b"", NUMBER.pack(0), bytes(FRAME_BYTES_MAX + 1))
        await until(lambda: received.counters.connects == 2)
        await still_received(source, received)
        assert received.counters.message_bytes < 1000


async def test_a_message_of_many_parts_is_counted_and_its_parts_are_dropped() -> None:
    async with connected() as (source, received):
        source.send(b"", *[b"x" * 100] * 50_000)
        await until(lambda: received.counters.malformed.get("frames") == 1)
        await still_received(source, received)
    assert FRAMES_MAX < 50_000


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not say how much came")
async def test_a_message_without_an_end_costs_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would keep its parts until the last one comes, which it never does."""
    monkeypatch.setattr("ranvier_py.io.engine_events.zmq_sockets.GUARD_INTERVAL_S", 0.02)
    part = b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)  # one more follows
    sent = 0

    async def speak(stream: trio.SocketStream) -> None:
        nonlocal sent
        await stream.send_all(GREETING + READY)
        for _ in range(8000):  # half a gigabyte
            await stream.send_all(part)
            sent += len(part)

    options = SocketOptions(retry_s=1.0, room=Room(64, 8 << 20))
    async with speaking(speak) as place, reading(place, options) as received:
        await until(lambda: received.subscriber.state.why == "too much at once")
        assert 8 << 20 <= sent < 400 << 20
        assert received.counters.messages == 0


async def test_a_long_stream_that_is_read_never_seems_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed over is counted with its heads: a drift would cost a good connection some day."""
    monkeypatch.setattr("ranvier_py.io.engine_events.zmq_sockets.GUARD_INTERVAL_S", 0.01)
    options = SocketOptions(room=Room(64, 100_000))
    async with publishing(KvEndpoints()) as source, reading(publisher_of(source), options) as received:
        await until(lambda: received.subscriber.state.is_connected)
        for number in range(400):
            source.publish(bytes(number * 10))
            await until(lambda: received.counters.messages == number + 1)  # noqa: B023
        await trio.sleep(0.05)
        assert received.counters.message_bytes == 798_000
        assert received.counters.connects == 1


async def test_without_room_for_sockets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier_py.io.engine_events.zmq_sockets.SOCKETS_MAX", 4)
    async with publishing(KvEndpoints()) as source:
        with closing(KvSockets()) as sockets:
            received = [Received(sockets, publisher_of(source)) for _ in range(3)]
            async with trio.open_nursery() as nursery:
                for each in received:
                    nursery.start_soon(each.subscriber.run)
                await until(lambda: sum(each.counters.failures for each in received) >= 3)
                await until(lambda: any(each.subscriber.state.is_connected for each in received))
                source.publish(b"0")
                await until(lambda: any(each.seqs == [0] for each in received))
                nursery.cancel_scope.cancel()


async def test_what_we_can_not_take_waits_with_the_engine() -> None:
    """Nothing is read here while a thousand large messages are sent; then the engine dies."""
    options = SocketOptions(retry_s=10.0, room=Room(8, 1 << 30))
    source = KvPublisher(KvEndpoints())
    async with reading(publisher_of(source), options) as received:
        await until(lambda: received.subscriber.state.is_connected)
        for _ in range(1000):
            source.publish(bytes(64 * 1024))
        time.sleep(0.3)  # not trio's: libzmq takes all that it may meanwhile  # noqa: ASYNC251
        source.close()
        await until(lambda: not received.subscriber.state.is_connected)
        assert 8 <= received.counters.messages < 500, "the rest is in the buffers of TCP"


async def test_the_loop_is_held_for_a_turn_at_most_however_many_flood() -> None:
    """Requests would wait for the messages of every engine."""
    spent_s, taken, most = TURN_S / 10, 0, 0

    def busy(*_: object) -> None:
        nonlocal taken
        taken += 1
        over = time.perf_counter() + spent_s
        while time.perf_counter() < over:
            pass

    with closing(KvSockets()) as sockets:
        sources = [KvPublisher(KvEndpoints()) for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for source in sources:
                subscriber = KvSubscriber(sockets, publisher_of(source), GapMachine(), Random(1))
                subscriber.hand = busy  # type: ignore[method-assign]
                nursery.start_soon(subscriber.run)
                await until(lambda: subscriber.state.is_connected)  # noqa: B023
            for source in sources:
                for _ in range(400):
                    source.publish(b"")
            with trio.fail_after(30):
                while taken < 1200:
                    before = taken
                    await trio.lowlevel.checkpoint()
                    most = max(most, taken - before)
            nursery.cancel_scope.cancel()
        for source in sources:
            source.close()
    assert 1 <= most <= 2 * 11, "one turn before us in our round of the loop, and one behind us in the last"


async def test_an_answer_without_an_end_is_cut() -> None:
    options = SocketOptions(retry_s=0.02, replay_bytes_max=100_000)
    answers = [[b"", NUMBER.pack(number), bytes(10_000)] for number in range(1000)]
    async with (
        publishing(KvEndpoints()) as source,
        answering(answers) as replay,
        reading(publisher_of(source)._replace(replay=replay), options) as received,
    ):
        await until(lambda: received.counters.replays_failed)
        assert received.counters.replay_messages <= 11


async def test_an_answer_that_drips_is_cut() -> None:
    """Each message keeps it alive, but not for ever."""
    options = SocketOptions(retry_s=0.02, replay_silence_s=5.0, replay_s_max=0.1)
    async with (
        publishing(KvEndpoints()) as source,
        answering([[b"", NUMBER.pack(0), b"x"]]) as replay,
        reading(publisher_of(source)._replace(replay=replay), options) as received,
    ):
        await until(lambda: received.counters.replays_failed)
        assert received.seqs == [0]


async def test_a_new_question_ends_the_one_before() -> None:
    async with (
        publishing(KvEndpoints()) as source,
        answering([]) as replay,
        reading(publisher_of(source)._replace(replay=replay)) as received,
    ):
        await until(lambda: connections_to(replay.endpoint) == 1)
        for ask in range(100, 120):
            received.subscriber.carry([AskReplay(ask, 0)])
        await until(lambda: connections_to(replay.endpoint) == 1)
        assert received.counters.replays == 21
        assert received.counters.replays_failed == 0, "who asks again does not wait for the old answer"


async def test_an_engine_that_hangs_up_at_once_is_not_called_in_a_hurry() -> None:
    """Its greeting succeeds, so libzmq itself would come back every tenth of a second."""

    async def speak(stream: trio.SocketStream) -> None:
        await stream.send_all(GREETING + READY)
        await trio.sleep(0.01)
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with speaking(speak) as place, reading(place, SocketOptions(retry_s=0.05, retry_s_max=10.0)) as received:
        await trio.sleep(0.8)
        counts = received.counters
        assert 2 <= counts.connects + counts.failures <= 6
