"""Event streams of Continuum's shape, from real servers on loopback."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import httpx
import pytest
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Message, Ping, Request, TextMessage

from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, Verb
from ranvier_py.core.engine_cache.sources.server_events import EVENT_BYTES_MAX, SourceOptions
from ranvier_py.io.engine_events import sse_source as kv_sse
from ranvier_py.io.engine_events.sse_source import (
    LOG_LINES_MAX,
    REASON_CHARACTERS_MAX,
    REST,
    SLICE_BYTES,
    EventSource,
)
from tests.io.engine_events.kv_fakes import until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
EVENT = b'event: cache_created\ndata: {"prefix_hash":"ab","token_count":64}\n\n'
CREATED = IndexEvent(Verb.CREATED, "ab", 64)

Serve = Callable[[trio.SocketStream, int], Awaitable[object]]
"""(connection, its number from 0)"""


@dataclass
class Received:
    work: Callable[[], object]
    events: list[IndexEvent] = field(default_factory=list)
    begun: int = 0
    source: EventSource = field(init=False)

    def take(self, events: Sequence[IndexEvent]) -> None:
        self.work()
        self.events += events

    def start(self) -> None:
        self.begun += 1


@asynccontextmanager
async def listening(
    serve: Serve,
    scheme: str = "http",
    *,
    key: str = "",
    idle_s: float = 60.0,
    reconnect_s: float = 0.01,
    work: Callable[[], object] = lambda: None,
) -> AsyncIterator[Received]:
    """A source that reads what `serve` sends on each connection; `work` is done with each batch of events."""
    numbers = iter(range(1_000_000))

    async def handle(stream: trio.SocketStream) -> None:
        with trio.move_on_after(10):
            with suppress(trio.BrokenResourceError):
                await serve(stream, next(numbers))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, handle, 0)
        port = listeners[0].socket.getsockname()[1]
        received = Received(work)
        received.source = EventSource(
            f"{scheme}://127.0.0.1:{port}/v1/kv_events?x=1",
            SourceOptions(reconnect_s=reconnect_s, idle_s=idle_s),
            received=received.take,
            started=received.start,
            rng=Random(1),
            key=lambda: key,
        )
        nursery.start_soon(received.source.run)
        yield received
        nursery.cancel_scope.cancel()


async def request_of(stream: trio.SocketStream) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some(4096)
    return data


async def test_events_are_received_as_they_come() -> None:
    requests: list[bytes] = []

    async def serve(stream: trio.SocketStream, number: int) -> None:
        requests.append(await request_of(stream))
        await stream.send_all(HEAD + EVENT[:20])
        await stream.send_all(EVENT[20:] + EVENT)
        await trio.sleep_forever()

    async with listening(serve, key="secret") as received:
        await until(lambda: len(received.events) == 2)
        assert received.events == [CREATED] * 2
        state = received.source.state
        assert state.connected
        assert (state.received, state.dropped, state.reconnects) == (2, 0, 0)
        assert state.last_event_at is not None
    assert b"GET /v1/kv_events?x=1 HTTP/1.1" in requests[0]
    assert b"authorization: bearer secret" in requests[0].lower()


async def test_a_stream_that_ends_is_connected_again_and_reports_that_it_begins_anew() -> None:
    async def serve(stream: trio.SocketStream, number: int) -> None:
        await request_of(stream)
        await stream.send_all(HEAD + EVENT)

    async with listening(serve) as received:
        await until(lambda: received.begun >= 3)
        assert received.source.state.reconnects >= 2
        assert len(received.events) >= 2


@pytest.mark.parametrize(("scheme", "reads"), [("http", 0), ("ws", 0), ("wss", 1)])
async def test_certificates_are_read_once_beside_the_event_loop_and_only_where_they_are_needed(
    scheme: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, readers, made = threading.get_ident(), [], ssl.create_default_context

    def read(*arguments: object, **options: object) -> ssl.SSLContext:
        readers.append(threading.get_ident())
        return made(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl, "create_default_context", read)

    async def serve(stream: trio.SocketStream, number: int) -> None:
        """Ends each connection."""

    async with listening(serve, scheme) as received:
        await until(lambda: received.source.state.reconnects >= 3)
    assert len(readers) == reads
    assert loop not in readers


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"garbage\r\n\r\n",
        b"garbage" * 5000 + b"\r\n\r\n",
        b"",
        HEAD + b"data: " + b"x" * (EVENT_BYTES_MAX + 100),
        HEAD + b"\xff\x00" * 1000,
    ],
)
async def test_cr33_whatever_comes_the_source_goes_on(answer: bytes) -> None:
    async def serve(stream: trio.SocketStream, number: int) -> None:
        await request_of(stream)
        await stream.send_all(answer if number == 0 else HEAD + EVENT)
        if number:
            await trio.sleep_forever()

    async with listening(serve) as received:
        await until(lambda: received.events == [CREATED])
        assert received.source.state.reconnects >= 1
        assert 0 < len(received.source.state.last_error) <= REASON_CHARACTERS_MAX


async def test_a_silent_stream_is_given_up() -> None:
    async def serve(stream: trio.SocketStream, number: int) -> None:
        await request_of(stream)
        await stream.send_all(HEAD)
        await trio.sleep_forever()

    async with listening(serve, idle_s=0.05) as received:
        await until(lambda: received.begun >= 2)


async def test_waits_double_up_to_a_minute_and_start_again_after_an_event(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """CR15, CX17: each wait is a random part of 1, 2, 4 … 60 s."""
    waits: list[float] = []
    source = EventSource(
        "http://nowhere.invalid/", SourceOptions(), received=lambda _: None, started=lambda: None, rng=Random(1)
    )

    def fail(**_: object) -> None:
        waits.append(trio.current_time())
        if len(waits) == 12:
            source.state.received += 1
        raise httpx.ConnectError("no")

    monkeypatch.setattr(httpx, "AsyncClient", fail)
    with trio.move_on_after(600):
        await source.run()
    gaps = [later - earlier for earlier, later in pairwise(waits)]
    for number, gap in enumerate(gaps[:11]):
        assert 0 <= gap <= min(60, 2**number) + 1e-6
    assert max(gaps[5:11]) > 8
    assert gaps[11] <= 1 + 1e-6


@dataclass
class Frames:
    """The server's side of a WebSocket."""

    stream: trio.SocketStream
    connection: WSConnection = field(default_factory=lambda: WSConnection(ConnectionType.SERVER))

    async def accept(self) -> Request:
        while True:
            self.connection.receive_data(await self.stream.receive_some(4096))
            for event in self.connection.events():
                if isinstance(event, Request):
                    await self.stream.send_all(self.connection.send(AcceptConnection()))
                    return event

    async def announce(self, message: Message | Ping) -> None:
        await self.stream.send_all(self.connection.send(message))


async def test_cx29_frames_of_a_websocket_are_events() -> None:
    async def serve(stream: trio.SocketStream, number: int) -> None:
        frames = Frames(stream)
        request = await frames.accept()
        assert request.target == "/v1/kv_events?x=1"
        await frames.announce(Ping(b"are you there"))
        await frames.announce(TextMessage('{"event":"cache_cre', message_finished=False))
        await frames.announce(TextMessage('ated","prefix_hash":"ab","token_count":64}'))
        await frames.announce(TextMessage("not json"))
        assert (await stream.receive_some(100))[0] == 0x8A  # the pong
        await trio.sleep_forever()

    async with listening(serve, "ws") as received:
        await until(lambda: received.source.state.received == 2)
        assert received.events == [CREATED]
        assert received.source.state.dropped == 1
        assert received.begun == 1


@pytest.mark.parametrize("answer", [b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n", b"garbage\r\n\r\n", b""])
async def test_a_websocket_that_is_refused_is_tried_again(answer: bytes) -> None:
    async def serve(stream: trio.SocketStream, number: int) -> None:
        if number == 0:
            await request_of(stream)
            await stream.send_all(answer)
            return
        frames = Frames(stream)
        await frames.accept()
        await frames.announce(TextMessage("x" * (EVENT_BYTES_MAX + 1)) if number == 1 else TextMessage("{}"))
        await trio.sleep_forever()

    async with listening(serve, "ws") as received:
        await until(lambda: received.source.state.dropped == 1)
        assert received.source.state.reconnects >= 2


@pytest.mark.parametrize("media_type", ["text/html", "application/json; charset=utf-8", ""])
async def test_what_is_no_stream_of_events_is_reported_and_not_read(media_type: str) -> None:
    """The address of a page, or of the engine itself, is a usual mistake."""

    async def serve(stream: trio.SocketStream, number: int) -> None:
        await request_of(stream)
        await stream.send_all(HEAD.replace(b"text/event-stream", media_type.encode()) + EVENT)
        await trio.sleep_forever()

    async with listening(serve) as received:
        await until(lambda: received.source.state.reconnects >= 2)
        assert "is no text/event-stream" in received.source.state.last_error
        assert media_type[:15] in received.source.state.last_error
        assert not received.events
        assert not received.begun


async def test_who_sends_without_end_has_a_third_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only work moves: after each slice comes a rest twice as long."""
    now, rests = [0.0], []
    many = EVENT * (10 * SLICE_BYTES // len(EVENT))

    async def serve(stream: trio.SocketStream, number: int) -> None:
        await request_of(stream)
        await stream.send_all(HEAD + many)
        await trio.sleep_forever()

    def work() -> None:
        now[0] += 0.001

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await trio.lowlevel.checkpoint()

    async with listening(serve, work=work) as received:
        monkeypatch.setattr(kv_sse, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(kv_sse, "trio", SimpleNamespace(**{**vars(trio), "sleep": rest}))
        await until(lambda: len(received.events) == many.count(b"data: "))
        assert len(rests) >= 10
        assert sum(rests) == pytest.approx(REST * now[0])


async def test_who_sends_frames_without_a_message_rests_after_each_slice_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests: list[float] = []

    async def serve(stream: trio.SocketStream, number: int) -> None:
        frames = Frames(stream)
        await frames.accept()
        await stream.send_all(frames.connection.send(Ping()) * 20_000)
        await trio.sleep_forever()

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(kv_sse, "trio", SimpleNamespace(**{**vars(trio), "sleep": rest}))
    async with listening(serve, "ws") as received:
        await until(lambda: len(rests) >= 40_000 / SLICE_BYTES)
        assert received.source.state.reconnects == 0


async def test_a_stream_that_comes_and_goes_is_not_reported_of_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def serve(stream: trio.SocketStream, number: int) -> None:
        await request_of(stream)
        await stream.send_all(HEAD + EVENT)

    async with listening(serve, reconnect_s=0.001) as received:
        await until(lambda: received.begun >= LOG_LINES_MAX)
        assert sum(record.message.startswith("kv_index.") for record in caplog.records) == LOG_LINES_MAX
