"""The way to the backends and back, on real sockets, through a real server."""

from __future__ import annotations

import errno
import socket
import struct
from functools import partial

import pytest
import trio

from ranvier_py.core.errors import (
    ConnectFailed,
    NodeExhausted,
    UpstreamClosed,
    UpstreamError,
    UpstreamGarbled,
    words_of,
)
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.connection_pool import BackendAddress, UpstreamLimits
from ranvier_py.proxy.conversation import awaiting
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.upstream import Exchange, Upstream, is_interim
from tests.proxy.wire import (
    CHUNKED_HEAD,
    GET,
    TEST_S,
    Proxy,
    Wire,
    answer,
    backend,
    chunk,
    post,
    proxying,
    run,
    serving,
    tls_contexts,
)

LIMITS = UpstreamLimits(header_bytes_max=4000)


def request(body: bytes = b"", method: bytes = b"POST", minor: int = 1, target: bytes = b"/v1/x") -> HttpRequest:
    return HttpRequest(method, target, [(b"Host", b"h")], body, minor)


def all_of(exchange: Exchange) -> Steps[bytes]:
    body = exchange.take()
    while not exchange.complete:
        yield exchange.readable
        body += exchange.receive() or b""
    return body


def answering(*answers: bytes, close: bool = False):  # type: ignore[no-untyped-def]
    """A backend that gives these answers in turn on each connection, then waits, or closes."""

    async def script(wire: Wire) -> None:
        for each in answers:
            await wire.request()
            await wire.send(each)
        if not close:
            await wire.more()

    return script


def noting(seen: list[tuple[bytes, bytes]], reply: bytes = answer(b"ok")):  # type: ignore[no-untyped-def]
    """A backend that notes what it is asked."""

    async def script(wire: Wire) -> None:
        while (request := await wire.next_request()) is not None:
            seen.append(request)
            await wire.send(reply)

    return script


async def asked(
    *answers: bytes, close: bool = False, method: bytes = b"POST", minor: int = 1
) -> tuple[Exchange, bytes]:
    """What one exchange with such a backend gives: the answer and its body."""
    upstream = Upstream(LIMITS)
    failure: UpstreamError | None = None
    with trio.fail_after(TEST_S):
        async with backend(answering(*answers, close=close)) as found:
            try:
                exchange = await run(upstream.open(found.address, request(method=method, minor=minor)))
                try:
                    body = await run(all_of(exchange))
                finally:
                    exchange.release()
            except UpstreamError as error:  # kept, as a nursery would wrap it
                failure = error
    upstream.close()
    assert upstream.counters.open == 0
    if failure is not None:
        raise failure
    return exchange, body


# --- unaltered --------------------------------------------------------------------------------------------------------


async def test_what_the_client_states_reaches_the_backend_but_for_what_is_between_it_and_us() -> None:
    seen: list[tuple[bytes, bytes]] = []
    async with proxying(noting(seen)) as (proxy, _, port), await Wire.connect(port) as wire:
        fields = [b"AuthoriZation: Bearer KEY", b"X-Odd: a, b", b"x-odd: c", b"Accept-Encoding: gzip"]
        hop = [
            b"Connection: keep-alive, X-Mine",
            b"X-Mine: 1",
            b"Keep-Alive: 5",
            b"TE: trailers",
            b"Expect: 100-continue",
        ]
        await wire.send(post(b'{"a": 1}', *fields, *hop, target=b"/v1/chat/completions?q=1"))
        await wire.response()
        head, body = seen[0]
        authority = str(proxy.address).removeprefix("http://").encode()
        lines = head.strip().split(b"\r\n")
        assert lines[0] == b"POST /v1/chat/completions?q=1 HTTP/1.1"
        assert sorted(lines[1:]) == sorted([b"host: " + authority, b"content-length: 8", *fields])
        assert body == b'{"a": 1}'


async def test_chunks_of_the_client_reach_the_backend_with_a_length() -> None:
    seen: list[tuple[bytes, bytes]] = []
    async with proxying(noting(seen)) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(
            b"POST / HTTP/1.1\r\nhost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"ab") + chunk(b"c")
        )
        await wire.send(b"0\r\nx: y\r\n\r\n")
        await wire.response()
        assert b"content-length: 3\r\n" in seen[0][0]
        assert b"transfer-encoding" not in seen[0][0].lower()
        assert seen[0][1] == b"abc"


async def test_get_and_head_state_no_length() -> None:
    seen: list[tuple[bytes, bytes]] = []
    async with proxying(noting(seen, answer(b""))) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(GET + GET.replace(b"GET", b"HEAD"))
        await wire.response()
        await wire.response(bodiless=True)
        assert [head.split(b" ")[0] for head, _ in seen] == [b"GET", b"HEAD"]
        assert not any(b"content-length" in head for head, _ in seen)


@pytest.mark.parametrize("status", [b"200 OK", b"418 I'm a Teapot, \xe9", b"500 ", b"429 Too Many Requests"])
async def test_what_the_backend_states_reaches_the_client_byte_for_byte(status: bytes) -> None:
    fields = [b"Server: uvicorn", b"X-Twice: 1", b"x-twice: 2", b"Retry-After: 7", b"content-type: text/plain"]
    reply = answer(b"\x00\xff\r\n\r\nbody", *fields, b"Connection: Keep-Alive, x-hop", b"x-hop: 1", status=status)
    async with proxying(answering(reply)) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        head = await wire.until(b"\r\n\r\n")
        expected = [b"HTTP/1.1 " + status, b"content-length: 10", *fields, b"x-ranvier-backend: b0"]
        assert head.strip().split(b"\r\n") == expected
        assert await wire.exactly(10) == b"\x00\xff\r\n\r\nbody"


async def test_a_chunked_answer_keeps_its_chunks_and_trailers() -> None:
    body = chunk(b"data: 1\n\n") + b"3;ext=1\r\nabc\r\n" + b"0\r\nx-trailer: y\r\n\r\n"
    async with proxying(answering(CHUNKED_HEAD + body, answer(b"next"))) as (_, found, port):
        async with await Wire.connect(port) as wire:
            await wire.send(GET)
            assert b"transfer-encoding: chunked\r\n" in await wire.until(b"\r\n\r\n")
            assert await wire.exactly(len(body)) == body
            await wire.send(GET)
            assert (await wire.response())[2] == b"next"
        assert found.connections == 1


async def test_a_chunk_or_half_of_it_leaves_as_soon_as_it_arrives() -> None:
    """The backend sends the next piece only when the client has the one before: whoever buffers, waits for ever."""
    pieces = [CHUNKED_HEAD, chunk(b"one"), chunk(b"two"), b"6\r\nabc", b"def\r\n", b"0\r\n\r\n"]
    received = [trio.Event() for _ in pieces]

    async def script(wire: Wire) -> None:
        await wire.request()
        for piece, event in zip(pieces, received, strict=True):
            await wire.send(piece)
            await event.wait()

    async with proxying(script) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        for piece, event in zip(pieces, received, strict=True):
            await wire.until(piece[-4:])
            event.set()


# --- framings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "reply", "framing", "body"),
    [
        (b"GET", answer(b"abc"), "length", b"abc"),
        (b"GET", answer(b""), "none", b""),
        (b"GET", CHUNKED_HEAD + chunk(b"a") + b"0\r\n\r\n", "chunked", b"1\r\na\r\n0\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", "none", b""),
        (b"HEAD", CHUNKED_HEAD, "none", b""),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n", "none", b""),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n", "none", b""),
        (b"POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\na: b\r\n\r\n" + answer(b"abc"), "length", b"abc"),
    ],
)
async def test_a_body_ends_where_its_framing_states(method: bytes, reply: bytes, framing: str, body: bytes) -> None:
    exchange, got = await asked(reply, method=method)
    assert (exchange.head.framing, got, exchange.complete) == (framing, body, True)


async def test_a_body_without_a_length_ends_with_the_connection_on_both_sides() -> None:
    async with (
        proxying(answering(b"HTTP/1.1 200 OK\r\n\r\nabc", close=True)) as (_, _, port),
        await Wire.connect(port) as wire,
    ):
        await wire.send(GET)
        status, headers, _ = await wire.response()
        assert (status, headers["connection"]) == (200, "close")
        assert await wire.rest() == b"abc"


async def test_an_answer_that_has_no_body_by_its_status_brings_no_length_of_one() -> None:
    """Who believes the length would take the next answer for this one's body."""
    async with proxying(answering(answer(b"hello", status=b"204 No Content"), answer(b"next"))) as (_, found, port):
        async with await Wire.connect(port) as wire:
            await wire.send(GET)
            status, headers, _ = await wire.response(bodiless=True)
            assert (status, headers) == (204, {"x-ranvier-backend": "b0"})
            await wire.send(GET)
            await wire.until(b"\r\n\r\n")
        assert found.connections == 2


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    reply = CHUNKED_HEAD + chunk(b"ab") + chunk(b"c") + b"0\r\n\r\n"
    async with proxying(answering(reply)) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(b"GET / HTTP/1.0\r\n\r\n")
        _, headers, _ = await wire.response()
        assert "transfer-encoding" not in headers
        assert headers["connection"] == "close"
        assert await wire.rest() == b"abc"


GARBLED = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "lengths that differ": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    "two codings": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked last but one": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": CHUNKED_HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, then another coding": CHUNKED_HEAD[:-2] + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    "a coding with nothing behind its comma": CHUNKED_HEAD.replace(b"chunked", b"chunked,") + b"0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED_HEAD.replace(b"/1.1", b"/1.0") + b"0\r\n\r\n",
    "lengths that agree": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nContent-Length: 2\r\n\r\nab",
    "a list of lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nab",
    "a length that belongs to the connection": answer(b"ab", b"Connection: content-length"),
    "a coding that belongs to the connection": CHUNKED_HEAD[:-2] + b"connection: Transfer-Encoding\r\n\r\n0\r\n\r\n",
    "an encoding that belongs to the connection": answer(b"ab", b"connection: close, content-encoding"),
    "a folded length": b"HTTP/1.1 200 OK\r\ncontent-length:\r\n 2\r\n\r\nab",
    "a status that is none": answer(b"", status=b"099 X"),
    "a status beyond all": answer(b"", status=b"600 X"),
    "a control character in the reason": answer(b"", status=b"200 a\x08b"),
    "HTTP/2.0": answer(b"").replace(b"/1.1", b"/2.0"),
    "another protocol's line": answer(b"").replace(b"HTTP/1.1", b"RTSP/1.0"),
    "a NUL": b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
    "a folded line": b"HTTP/1.1 200 OK\r\na: b\r\n c\r\n\r\n",
    "a bad chunk": CHUNKED_HEAD + b"xyz\r\n",
    "a head too large": b"HTTP/1.1 200 OK\r\na: " + b"b" * 5000 + b"\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\na: " + b"b" * 5000,
    "interim answers only": b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
}


@pytest.mark.parametrize("case", GARBLED)
async def test_an_answer_that_is_not_http_is_reported_as_such(case: str) -> None:
    with pytest.raises(UpstreamGarbled):
        await asked(GARBLED[case])


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_what_is_garbled_is_a_502_and_its_connection_is_not_used_again(method: bytes) -> None:
    two_codings = CHUNKED_HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n"
    async with proxying(answering(two_codings, answer(b"wrong"))) as (proxy, found, port):
        async with await Wire.connect(port) as wire:
            for _ in range(2):
                await wire.send(GET.replace(b"GET", method))
                status, headers, _ = await wire.response(bodiless=method == b"HEAD")
                assert (status, headers["content-type"]) == (502, "application/json")
        assert (found.connections, proxy.upstream.counters.pooled) == (2, 0)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200", answer(b"abcdef")[:-1], CHUNKED_HEAD + b"3\r\nabc\r\n"])
async def test_a_backend_that_closes_too_early_is_reported_as_such(reply: bytes) -> None:
    with pytest.raises(UpstreamClosed):
        await asked(reply, close=True)


@pytest.mark.parametrize(
    "reply", [answer(b"x" * 100)[:-50], CHUNKED_HEAD + b"9\r\nabc", CHUNKED_HEAD + b"3\r\nabc\r\n"]
)
async def test_a_backend_that_closes_in_mid_body_cuts_the_client(reply: bytes) -> None:
    async with proxying(answering(reply, close=True)) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        assert await wire.cut()


async def test_a_backend_that_closes_before_it_answers_is_a_502() -> None:
    async with proxying(answering(b"", close=True)) as (proxy, _, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(GET)
            assert (await wire.response())[0] == 502
        assert proxy.upstream.counters.replaced == 0


# --- early answers, refusals, cancellation ----------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
async def test_an_answer_that_comes_before_the_request_was_read_is_passed_on(tls: bool) -> None:
    """The backend never reads the 8 MB that it refuses; nobody may wait for that."""

    async def script(wire: Wire) -> None:
        await wire.until(b"\r\n\r\n")
        await wire.send(answer(b"too long", status=b"413 No"))
        await done.wait()

    done = trio.Event()
    async with proxying(script, tls=tls) as (_, found, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(post(b"x" * 8_000_000))
            assert (await wire.response())[::2] == (413, b"too long")
        done.set()
        assert found.connections == 2


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "parts",
    [[b"HTTP/1.1 102 Processing\r\n\r\n"], [b"HTTP/1.1 1", b"00 Continue\r\n\r\nHTTP/1.1 103 Hints\r\n\r", b"\n"]],
)
async def test_an_interim_answer_does_not_keep_the_rest_of_the_request_from_the_backend(
    parts: list[bytes], tls: bool
) -> None:
    async def script(wire: Wire) -> None:
        while wire.buffer or await wire.more():
            await wire.until(b"\r\n\r\n")
            left = 8_000_000 - len(wire.buffer)
            for part in (*parts, b""):
                await wire.send(part)
                wire.buffer = b""
                least = left - 1_000_000 if part else 0
                while left > least:
                    left -= len(await wire.stream.receive_some(1 << 20))
            await wire.send(answer(b"done"))

    async with proxying(script, tls=tls) as (_, found, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(post(b"x" * 8_000_000))
            assert (await wire.response())[::2] == (200, b"done")
        assert found.connections == 1


@pytest.mark.parametrize(
    ("early", "is_so"),
    [
        (b"", True),
        (b"HTT", True),
        (b"HTTP/1.1 10", True),
        (b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\nHTTP/1.1 100", True),
        (b"HTTP/1.1 101", False),
        (b"HTTP/1.1 4", False),
        (b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", False),
        (b"nonsense", False),
    ],
)
def test_what_comes_early_is_interim_until_something_else_begins(early: bytes, is_so: bool) -> None:
    assert is_interim(early) == is_so


async def test_an_answer_that_comes_before_a_reset_is_passed_on_or_reported() -> None:
    async with proxying(answers_early) as (_, _, port), await Wire.connect(port) as wire:
        await wire.send(post(b"x" * 8_000_000))
        assert (await wire.response())[0] in (413, 502)


async def answers_early(wire: Wire) -> None:
    await wire.until(b"\r\n\r\n")
    await wire.send(answer(b"too long", status=b"413 No"))


async def test_a_large_request_arrives_whole() -> None:
    body, seen = bytes(range(256)) * 20_000, []

    async def script(wire: Wire) -> None:
        while True:
            head = await wire.until(b"\r\n\r\n")
            parts = [wire.buffer]
            wire.buffer = b""
            while sum(map(len, parts)) < len(body):
                parts.append(await wire.stream.receive_some(1 << 20))
            seen.append((head[:4], b"".join(parts) == body))
            await wire.send(answer(b"ok"))

    async with proxying(script) as (_, found, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(post(body))
            assert (await wire.response())[0] == 200
        assert seen == [(b"POST", True)] * 2
        assert found.connections == 1


async def test_a_backend_that_is_not_there_is_reported_as_such() -> None:
    async with backend(answering()) as found:
        pass
    upstream = Upstream(LIMITS)
    for address, words in ((found.address, "refused"), (BackendAddress("http", "no such host.invalid", 80), "known")):
        with pytest.raises(ConnectFailed) as caught:
            await run(upstream.open(address, request()))
        assert words in words_of(caught.value)
    assert (upstream.counters.connect_failures, upstream.counters.exhausted) == (2, 0)


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ([errno.EMFILE], NodeExhausted),
        ([errno.EADDRNOTAVAIL, errno.EADDRNOTAVAIL], NodeExhausted),
        ([errno.ENOBUFS], NodeExhausted),
        ([errno.EADDRNOTAVAIL, errno.ECONNREFUSED], ConnectFailed),  # no IPv6 here, and nobody there
        ([errno.EHOSTUNREACH], ConnectFailed),
    ],
)
async def test_what_this_node_lacks_is_no_failure_of_a_backend(
    numbers: list[int], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lacking(*_: object) -> None:
        failures = [OSError(number, "no") for number in numbers]
        cause = failures[0] if len(failures) == 1 else BaseExceptionGroup("several", failures)
        raise OSError("all attempts to connect to h:1 failed") from cause

    monkeypatch.setattr(trio, "open_tcp_stream", lacking)
    upstream = Upstream(LIMITS)
    with pytest.raises(error):
        await run(upstream.open(BackendAddress("http", "127.0.0.1", 1), request()))
    assert upstream.counters.exhausted == (error is NodeExhausted)


async def test_a_backend_that_does_not_take_the_connection_is_given_up(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", silence)
    with pytest.raises(ConnectFailed, match=r"within 5 s"):
        await run(Upstream(LIMITS).open(BackendAddress("http", "127.0.0.1", 1), request()))


async def test_a_client_that_does_not_read_holds_no_memory() -> None:
    """What nobody reads stays with the backend: it can send no more than the socket buffers on the way take."""
    sent = 0
    piece = chunk(b"x" * 60_000)

    async def script(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        await wire.send(CHUNKED_HEAD)
        while True:
            await wire.send(piece)
            sent += len(piece)

    async with (
        proxying(script, ServerLimits(tick_s=0.01, send_window_s=0.2)) as (_, _, port),
        await Wire.connect(port, receive_buffer=4096) as wire,
    ):
        await wire.send(GET)
        await wire.until(b"\r\n\r\n")
        before = -1
        while before < sent:
            before = sent
            with trio.move_on_after(0.05):
                await trio.sleep_forever()
        assert sent < 40_000_000
        assert await wire.cut()  # and in the end it is cut off


# --- addresses and TLS ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "authority", "text"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://engine/", "engine", "http://engine"),
        ("https://Engine:443/a/b/", "engine", "https://engine/a/b"),
        ("http://[::1]:8000", "[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_is_read_from_a_url(url: str, authority: str, text: str) -> None:
    address = BackendAddress.parse(url)
    assert (address.authority, str(address)) == (authority, text)
    assert BackendAddress.parse(text) == address


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "ftp://x", "http://", "http://u@x", "http://x?y", "http://x:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        BackendAddress.parse(url)


async def test_a_path_prefix_precedes_the_target() -> None:
    seen: list[tuple[bytes, bytes]] = []
    upstream = Upstream(LIMITS)
    async with backend(noting(seen)) as found:
        exchange = await run(
            upstream.open(BackendAddress.parse(f"{found.address}/base"), request(), [(b"x-request-id", b"7")])
        )
        exchange.release()
        assert seen[0][0].startswith(b"POST /base/v1/x HTTP/1.1\r\n")
        assert b"\r\nx-request-id: 7\r\n" in seen[0][0]


async def test_a_backend_can_speak_tls_and_must_prove_its_name() -> None:
    context, trusting = tls_contexts()

    @awaiting
    async def engine(request: HttpRequest, client: Client) -> None:
        client.respond(200, request.body)

    body = b"x" * 300_000
    async with serving(engine, tls=context) as (_, port):
        address = BackendAddress("https", "127.0.0.1", port)
        proxy = Proxy(address)
        proxy.upstream = Upstream(LIMITS, tls=trusting)
        async with serving(proxy) as (_, front), await Wire.connect(front) as wire:
            for _ in range(2):
                await wire.send(post(body))
                assert (await wire.response())[2] == body
            assert proxy.upstream.counters.reuses == 1
        proxy.upstream.close()
        with pytest.raises(ConnectFailed) as caught:
            await run(Upstream(LIMITS).open(address, request()))
        assert "certificate verify failed" in words_of(caught.value)
        assert "certificate" not in str(caught.value), "its words may name hosts, and the client is told the rest"


async def test_a_tls_backend_that_breaks_off_its_answer_is_to_blame_for_it() -> None:
    context, trusting = tls_contexts()
    seen = trio.Event()

    async def broken_off(stream: trio.SocketStream) -> None:
        secured = trio.SSLStream(stream, context, server_side=True)
        await secured.receive_some()
        await secured.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await seen.wait()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()

    def whole(upstream: Upstream, address: BackendAddress) -> Steps[None]:
        exchange = yield from upstream.open(address, request())
        seen.set()
        try:
            while not exchange.complete:
                yield exchange.readable
                exchange.receive()
        finally:
            exchange.release()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(partial(trio.serve_listeners, broken_off, [listener]))
        address = BackendAddress("https", "127.0.0.1", listener.socket.getsockname()[1])
        with pytest.raises(UpstreamClosed, match="broke off its answer"):
            await run(whole(Upstream(LIMITS, tls=trusting), address))
        nursery.cancel_scope.cancel()
