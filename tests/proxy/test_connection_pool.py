"""Connections to backends that wait for their next use, and what becomes of a request whose connection had died."""

from __future__ import annotations

import socket

import pytest
import trio

from ranvier_py.core.errors import UpstreamClosed
from ranvier_py.proxy.connection_pool import UpstreamLimits
from ranvier_py.proxy.upstream import Upstream
from tests.proxy.test_upstream import LIMITS, all_of, answering, request
from tests.proxy.wire import CHUNKED_HEAD, GET, TEST_S, Wire, answer, backend, chunk, post, proxying, run


async def test_a_connection_serves_again_and_the_last_used_first() -> None:
    async with proxying(answering(*[answer(b"x")] * 10)) as (proxy, found, port), await Wire.connect(port) as wire:
        for _ in range(10):
            await wire.send(GET)
            await wire.response()
        assert found.connections == 1
        assert proxy.upstream.counters.reuses == 9


@pytest.mark.parametrize("reply", [answer(b"x", b"Connection: close"), answer(b"x").replace(b"/1.1", b"/1.0")])
async def test_a_connection_that_the_backend_wants_closed_serves_no_more(reply: bytes) -> None:
    async with proxying(answering(reply)) as (_, found, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(GET)
            _, headers, body = await wire.response()
            assert body == b"x"
            assert "connection" not in headers  # the client's connection is another matter
        assert found.connections == 2


@pytest.mark.parametrize("surplus", [b"\r\n", b"x", answer(b"stray")])
@pytest.mark.parametrize("first", [answer(b"x"), CHUNKED_HEAD + chunk(b"x") + b"0\r\n\r\n", b"HTTP/1.1 204 N\r\n\r\n"])
async def test_bytes_after_an_answer_never_reach_anybody(first: bytes, surplus: bytes) -> None:
    async with proxying(answering(first + surplus, answer(b"wrong"))) as (proxy, found, port):
        async with await Wire.connect(port) as wire:
            for _ in range(2):
                await wire.send(GET)
                status, _, body = await wire.response()
                assert (status, body) == (204, b"") if b"204" in first else (200, b"x")
                assert wire.buffer == b""
        assert found.connections == 2
        assert proxy.upstream.counters.surplus == 2


async def test_bytes_that_come_later_never_reach_anybody_either() -> None:
    stray = trio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer(b"x"))
        if found.connections == 1:
            await stray.wait()
            await wire.send(answer(b"stray"))
            sent.set()
        await wire.more()

    sent = trio.Event()
    async with proxying(script) as (proxy, found, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        await wire.response()
        stray.set()
        await sent.wait()
        await wire.send(GET)
        assert (await wire.response())[2] == b"x"
        assert (found.connections, proxy.upstream.counters.stale) == (2, 1)


async def test_bytes_in_a_tls_record_behind_the_answers_never_reach_anybody_either() -> None:
    """They come with it, so the socket shows nothing of them any more."""

    async def script(wire: Wire) -> None:
        sock = wire.stream.transport_stream  # type: ignore[attr-defined]  # of a stream of TLS
        while await wire.next_request() is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            await wire.send(answer(b"x"))
            await wire.send(answer(b"stray"))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    async with proxying(script, tls=True) as (proxy, found, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(GET)
            assert (await wire.response())[2] == b"x"
        assert (found.connections, proxy.upstream.counters.stale) == (2, 1)


async def test_a_tls_connection_serves_again() -> None:
    async with proxying(answering(*[answer(b"x")] * 3), tls=True) as (proxy, found, port):
        async with await Wire.connect(port) as wire:
            for _ in range(3):
                await wire.send(post(b"x"))
                await wire.response()
        assert (found.connections, proxy.upstream.counters.reuses) == (1, 2)


async def test_a_pooled_connection_that_was_closed_is_replaced_silently() -> None:
    closed = trio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer(b"x"))
        await wire.aclose()
        closed.set()

    async with proxying(script) as (proxy, found, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        await wire.response()
        await closed.wait()
        await wire.send(GET)
        assert (await wire.response())[2] == b"x"
        assert (found.connections, proxy.upstream.counters.stale) == (2, 1)


async def test_a_pooled_connection_that_dies_at_the_next_request_is_replaced_once() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        if found.connections < 3:
            await wire.send(answer(b"x"))
            await wire.request()  # … and closes without a word

    async with proxying(script) as (proxy, found, port), await Wire.connect(port) as wire:
        await wire.send(post(b"{}"))
        assert (await wire.response())[0] == 200
        await wire.send(post(b"{}"))  # the first connection dies, a second answers
        assert (await wire.response())[0] == 200
        assert proxy.upstream.counters.replaced == 1
        await wire.send(post(b"{}"))  # the second dies, and so does the third, which is fresh: told
        assert (await wire.response())[0] == 502
        assert (found.connections, proxy.upstream.counters.replaced) == (3, 2)


@pytest.mark.parametrize(
    ("target", "dies_after_s", "asked_again"),
    [
        (b"/v1/completions", 0.1, True),
        (b"/v1/completions", 5.0, False),  # the backend may have begun
        (b"/v1/files", 0.1, False),  # it may have been read
    ],
)
async def test_a_pooled_connection_is_replaced_only_if_it_dies_at_once_under_what_may_be_sent_twice(
    target: bytes, dies_after_s: float, asked_again: bool
) -> None:
    now, seen = 0.0, 0
    failure: UpstreamClosed | None = None

    async def script(wire: Wire) -> None:
        nonlocal now, seen
        while await wire.next_request():
            seen += 1
            if seen == 2:
                now += dies_after_s
                return
            await wire.send(answer(b"x"))

    upstream = Upstream(LIMITS, clock=lambda: now)
    with trio.fail_after(TEST_S):
        async with backend(script) as found:
            for _ in range(2):
                try:
                    exchange = await run(upstream.open(found.address, request(target=target)))
                    await run(all_of(exchange))
                    exchange.release()
                except UpstreamClosed as error:
                    failure = error
            upstream.close()
    assert (failure is None) is asked_again
    assert (seen, found.connections) == ((3, 2) if asked_again else (2, 1))
    assert upstream.counters.replaced == int(asked_again)


async def test_a_pooled_connection_that_dies_in_its_answer_is_not_asked_again() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(answer(b"x"))
        await wire.request()
        await wire.send(b"HTTP/1.1 2")

    async with proxying(script) as (_, found, port), await Wire.connect(port) as wire:
        await wire.send(GET + GET)
        assert [(await wire.response())[0] for _ in range(2)] == [200, 502]
        assert found.connections == 1


async def test_the_pool_is_bounded_and_forgets() -> None:
    now = 0.0
    upstream = Upstream(UpstreamLimits(pooled_max=2, idle_s=10), clock=lambda: now)
    with trio.fail_after(TEST_S):
        async with backend(answering(answer(b"x"))) as found:

            async def use(count: int) -> None:
                exchanges = [await run(upstream.open(found.address, request())) for _ in range(count)]
                for exchange in exchanges:
                    await run(all_of(exchange))
                    exchange.release()
                    exchange.release()

            await use(3)
            assert (upstream.counters.pooled, upstream.counters.dropped) == (2, 1)
            now = 20.0
            upstream.prune()
            assert (upstream.counters.pooled, upstream.counters.open) == (0, 0)
            await use(1)
            upstream.forget(found.address)
            assert upstream.counters.open == 0
            upstream.close()
