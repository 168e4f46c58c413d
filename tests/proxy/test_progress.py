"""Clients that hardly send and clients that hardly read: who gets how much time, and by what it is bought."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import trio

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest, WaitPhase
from ranvier_py.proxy.server import DataServer
from tests.node.node_lab import BETWEEN_LOOKS_S, chat, lab
from tests.proxy.wire import GET, STREAM_HEAD, Clock, Scripted, Wire, chunk, echo, post, serving, tls_contexts

WINDOW_S = 20.0
LENGTH = 60_000
BODIES = ServerLimits(
    tick_s=0.01,
    body_window_s=WINDOW_S,
    body_bytes_min=1000,
    body_bytes_max=LENGTH,
    body_s=30 * WINDOW_S,
    in_flight_bytes_max=16 * LENGTH - 1,  # all but the last byte of sixteen leave no room for another
)
CHUNKED = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"


async def until_kept(server: DataServer, count: int) -> None:
    """Until so many bytes of bodies are here; `serving` has a deadline."""
    while server.counters.in_flight_bytes != count:
        await trio.lowlevel.checkpoint()


async def past_a_tick(server: DataServer) -> None:
    """Until the server has looked at its deadlines with the time that it is now."""
    enough = server.watchdog.ticks + 2
    while server.watchdog.ticks < enough:  # noqa: ASYNC110  # ticks announce nothing
        await trio.sleep(BETWEEN_LOOKS_S / 4)


# --- who sends --------------------------------------------------------------------------------------------------------


async def test_sixteen_clients_that_keep_the_last_byte_lock_nobody_out_beyond_two_windows() -> None:
    clock = Clock()
    body = b"x" * LENGTH
    async with serving(echo, BODIES, clock=clock) as (server, port), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await Wire.connect(port)) for _ in range(16)]
        for client in clients:
            await client.send(post(body)[:-1])
        await until_kept(server, 16 * (LENGTH - 1))
        other = await stack.enter_async_context(await Wire.connect(port))
        await other.send(post(body))
        assert (await other.response())[0] == 503
        clock.now = 2 * WINDOW_S
        for client in clients:
            assert (await client.response())[0] == 408
        await until_kept(server, 0)
        await other.send(post(body))
        assert (await other.response())[0] == 200
        assert server.counters.timeouts == {"body": 16}


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_brings_enough_in_each_window_may_take_any_number_of_them(chunked: bool) -> None:
    clock = Clock()
    async with serving(echo, BODIES, clock=clock) as (server, port), await Wire.connect(port) as client:
        await client.send(CHUNKED if chunked else post(b"x" * 10_000)[:-10_000])
        came = 0
        for _ in range(10):
            await client.send(chunk(b"x" * 1000) if chunked else b"x" * 1000)
            came += 1000
            await until_kept(server, came)
            clock.now += 0.9 * WINDOW_S
            await past_a_tick(server)
            if came == 9000 and not chunked:  # the last may be less than a window's share
                break
        await client.send(chunk(b"") if chunked else b"x" * 1000)
        assert (await client.response())[0] == 200
        assert server.counters.timeouts == {}


@pytest.mark.parametrize("chunked", [False, True])
async def test_what_came_in_one_window_buys_no_time_in_the_next(chunked: bool) -> None:
    """50 kB at once, then 10 bytes in each window: a rate over the whole body would let it go on."""
    clock = Clock()
    async with serving(echo, BODIES, clock=clock) as (server, port), await Wire.connect(port) as client:
        await client.send(CHUNKED + chunk(b"x" * 50_000) if chunked else post(b"x" * LENGTH)[: 50_000 - LENGTH])
        await until_kept(server, 50_000)
        for part in (1, 2):
            clock.now += 0.9 * WINDOW_S
            await past_a_tick(server)
            if part == 1:
                await client.send(chunk(b"x" * 10) if chunked else b"x" * 10)
                await until_kept(server, 50_010)
        assert (await client.response())[0] == 408
        assert server.counters.timeouts == {"body": 1}


async def test_a_body_that_comes_at_the_least_rate_holds_memory_for_a_bounded_time() -> None:
    clock = Clock()
    async with serving(echo, BODIES, clock=clock) as (server, port), await Wire.connect(port) as client:
        await client.send(post(b"x" * LENGTH)[:-LENGTH])
        came = windows = 0
        while not server.counters.timeouts:
            await client.send(b"x" * 1000)
            came += 1000
            while server.counters.in_flight_bytes != came and not server.counters.timeouts:
                await trio.lowlevel.checkpoint()
            clock.now += 0.9 * WINDOW_S
            windows += 1
            await past_a_tick(server)
        assert (await client.response())[0] == 408
        assert windows == 34  # 30 / 0.9, of the 60 that it would take


async def test_who_holds_much_memory_must_send_much() -> None:
    """All but the last part at once, and then the least rate: that is too little for so much."""
    limits = replace(BODIES, body_bytes_min=100)
    clock = Clock()
    async with serving(echo, limits, clock=clock) as (server, port), await Wire.connect(port) as client:
        await client.send(post(b"x" * LENGTH)[: 50_000 - LENGTH])
        await until_kept(server, 50_000)
        came = 50_000
        for step in (50_000 // 32, 100, 100):  # enough for the first window, which began with it, and then too little
            clock.now += 0.9 * WINDOW_S
            await past_a_tick(server)
            if not server.counters.timeouts:
                await client.send(b"x" * step)
                came += step
                await until_kept(server, came)
        assert (await client.response())[0] == 408


# --- who reads --------------------------------------------------------------------------------------------------------

READERS = ServerLimits(tick_s=0.01, send_window_s=30.0, send_bytes_min=10_000_000)  # several times what sockets keep


class Endless:
    """A handler that sends as much as is taken, and remembers that it ended."""

    def __init__(self) -> None:
        self.ended = trio.Event()

    def __call__(self, request: HttpRequest, client: Client) -> Steps[None]:
        try:
            while True:
                client.send(b"x" * 65_536)
                yield client.flush
        finally:
            self.ended.set()


async def take(client: Wire, server: DataServer, at_least: int) -> None:
    """Read until the server got rid of so much more."""
    enough = server.counters.response_bytes + at_least
    while server.counters.response_bytes < enough:
        with trio.move_on_after(0.01):
            await client.stream.receive_some(4096)


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_takes_a_little_now_and_then_is_cut_off(tls: bool) -> None:
    clock, endless = Clock(), Endless()
    server_context, context = tls_contexts() if tls else (None, None)
    async with serving(endless, READERS, tls=server_context, clock=clock) as (server, port):
        async with await Wire.connect(port, receive_buffer=4096) as client:
            if context is not None:
                client.stream = trio.SSLStream(client.stream, context, server_hostname="127.0.0.1")  # type: ignore[assignment]
            await client.send(GET)
            for _ in range(3):
                await take(client, server, 1)
                clock.now += 14.0
            with trio.fail_after(5):
                await endless.ended.wait()
        assert server.counters.timeouts == {"send": 1}
        assert server.counters.response_bytes < READERS.send_bytes_min


async def test_a_client_that_takes_enough_in_each_window_gets_everything() -> None:
    clock, endless = Clock(), Endless()
    async with serving(endless, READERS, clock=clock) as (server, port), await Wire.connect(port) as client:
        await client.send(GET)
        for _ in range(5):
            await take(client, server, READERS.send_bytes_min)
            clock.now += 29.0
            await past_a_tick(server)
        assert server.counters.timeouts == {}
        assert not endless.ended.is_set()


async def test_time_in_which_the_engine_is_waited_for_is_nobodys_fault() -> None:
    """Each piece has to be waited for a little by us, and for 100 s by the client."""
    clock = Clock()
    tokens = [trio.Event() for _ in range(5)]
    body = b"x" * 3_000_000  # more than the sockets take

    def slow(request: HttpRequest, client: Client) -> Steps[None]:
        client.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(tokens) * len(body)))
        for token in tokens:
            client.arm(WaitPhase.STALL, 1000.0)
            yield token.wait
            client.send(body)
            yield client.flush

    limits = ServerLimits(tick_s=0.01, send_window_s=30.0, send_bytes_min=10**9)
    async with serving(slow, limits, clock=clock) as (server, port), await Wire.connect(port) as client:
        await client.send(GET)
        await client.until(b"\r\n\r\n")
        for token in tokens:
            clock.now += 100.0
            await past_a_tick(server)
            token.set()
            await client.exactly(len(body))
        assert server.counters.timeouts == {}


async def test_the_log_has_that_it_was_the_client_who_was_too_slow(logged: list[RequestSummary]) -> None:
    engine = Scripted(STREAM_HEAD, *[chunk(b"x" * 1_000_000)] * 20)
    async with (
        lab(engine, send_window_s=0.2) as node,
        await Wire.connect(node.address[1], receive_buffer=4096) as client,
    ):
        await client.send(post(chat(stream=True)))
        while not logged:  # noqa: ASYNC110  # once the window is over
            await trio.sleep(BETWEEN_LOOKS_S)
    assert [line.outcome for line in logged] == ["client_too_slow"]
