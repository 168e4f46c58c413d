"""What the public port takes, what it refuses, and that no bytes can harm it."""

from __future__ import annotations

import gc
import json
import os

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.conversation import awaiting
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest
from tests.examples import examples
from tests.proxy.wire import GET, Wire, chunk, echo, post, serving

SMALL = ServerLimits(tick_s=0.01, header_bytes_max=2000, headers_max=20, body_bytes_max=1024)

HOST = b"host: h\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"

MALFORMED = {
    "garbage": (b"\x01\x02\x03 what is this\r\n\r\n", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 32, 400),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "HTTP/2.0 in the line": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 400),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 400),
    "an unknown method": (b"FROB / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    "an absolute target without a host": (b"GET http:///v1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "an absolute target of another scheme": (b"GET ftp://h/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a bare word as target": (b"GET v1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a blank in the target": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a control byte in the target": (b"GET /a\x01b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "CONNECT": (b"CONNECT h:443 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "TRACE": (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "a NUL in a value": (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\0c\r\n\r\n", 400),
    "a NUL in a name": (b"GET / HTTP/1.1\r\n" + HOST + b"a\0b: c\r\n\r\n", 400),
    "a folded line": (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n c\r\n\r\n", 400),
    "a folded line by tab": (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n\tc\r\n\r\n", 400),
    "a blank before the colon": (b"GET / HTTP/1.1\r\nhost : h\r\n\r\n", 400),
    "a line without a colon": (b"GET / HTTP/1.1\r\n" + HOST + b"abc\r\n\r\n", 400),
    "a nameless field": (b"GET / HTTP/1.1\r\n" + HOST + b": x\r\n\r\n", 400),
    "bare LF": (b"GET / HTTP/1.1\nhost: h\n\n", 400),
    "bare CR in a value": (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\rc\r\n\r\n", 400),
    "lengths that differ": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
    "lengths that agree": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1\r\ncontent-length: 1\r\n\r\na", 400),
    "a list of lengths": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1, 1\r\n\r\na", 400),
    "a negative length": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: -1\r\n\r\n", 400),
    "a signed length": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: +1\r\n\r\na", 400),
    "a hex length": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 0x1\r\n\r\na", 400),
    "an empty length": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length:\r\n\r\n", 400),
    "a length beyond counting": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: " + b"9" * 30 + b"\r\n\r\n", 400),
    "length then coding": (CHUNKED[:-2] + b"content-length: 3\r\n\r\n0\r\n\r\n", 400),
    "coding then length": (
        b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "an unknown coding": (b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip\r\n\r\n", 400),
    "two codings": (b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (CHUNKED[:-2] + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a hidden coding": (b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a length that belongs to the connection": (
        b"POST / HTTP/1.1\r\n" + HOST + b"connection: close, Content-Length\r\ncontent-length: 1\r\n\r\na",
        400,
    ),
    "a coding that belongs to the connection": (CHUNKED[:-2] + b"connection: transfer-encoding\r\n\r\n0\r\n\r\n", 400),
    "a host that belongs to the connection": (b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Host\r\n\r\n", 400),
    "a list of codings with nothing behind its comma": (
        CHUNKED.replace(b"chunked", b"chunked,") + b"0\r\n\r\n",
        400,
    ),
    "a coding with a parameter": (CHUNKED.replace(b"chunked", b"chunked;q=1") + b"0\r\n\r\n", 400),
    "a list of lengths with nothing behind its comma": (
        b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1,\r\n\r\na",
        400,
    ),
    "a length on a folded line": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length:\r\n 1\r\n\r\na", 400),
    "lengths of two spellings": (
        b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1\r\nContent-Length: 1\r\n\r\na",
        400,
    ),
    "codings of two spellings": (CHUNKED[:-2] + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 400),
    "a chunk size that is none": (CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n", 400),
    "a signed chunk size": (CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n", 400),
    "a prefixed chunk size": (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
    "an underscored chunk size": (CHUNKED + b"0_3\r\nabc\r\n0\r\n\r\n", 400),
    "a chunk that is too long": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "a chunk that is too short": (CHUNKED + b"3\r\nab\r\n0\r\n\r\n", 400),
    "a chunk ended by LF": (CHUNKED + b"3\nabc\n0\n\n", 400),
    "a trailer that is none": (CHUNKED + b"0\r\nno colon\r\n\r\n", 400),
    "too many trailers": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 100 + b"\r\n", 400),
    "an endless chunk extension": (CHUNKED + b"3;" + b"x" * 5000 + b"\r\nabc\r\n", 400),
    "an unknown expectation": (b"POST / HTTP/1.1\r\n" + HOST + b"expect: more\r\ncontent-length: 1\r\n\r\na", 417),
    "a header that is too long": (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 3000 + b"\r\n\r\n", 431),
    "an endless header": (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 3000, 431),
    "too many fields": (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 30 + b"\r\n", 431),
    "a body that is too long": (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1025\r\n\r\n", 413),
    "chunks that are too long": (CHUNKED + b"401\r\n", 413),
    "chunks that add up": (CHUNKED + (chunk(b"x" * 300)) * 4, 413),
}


async def test_every_refusal_is_reported_with_its_status_and_what_is_known_of_the_request() -> None:
    reported: list[RequestSummary] = []
    async with serving(echo, SMALL, report=reported.append) as (_, port):
        for data, status in MALFORMED.values():
            reported.clear()
            async with await Wire.connect(port) as wire:
                await wire.send(data)
                code = json.loads((await wire.response())[2])["error"]["code"]
                assert [(each.status, each.outcome) for each in reported] == [(status, code)], data
        reported.clear()
        async with await Wire.connect(port) as wire:
            await wire.send(post(b"", target=b"/v1/files?key=hidden").replace(b"length: 0", b"length: 9999"))
            assert (await wire.response())[0] == 413
        async with await Wire.connect(port) as wire:
            await wire.send(GET)
            assert (await wire.response())[0] == 200
    assert [(each.method, each.path, each.status) for each in reported] == [("POST", "/v1/files", 413)]


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_request_gets_a_4xx_and_the_connection_ends(case: str) -> None:
    data, status = MALFORMED[case]
    async with serving(echo, SMALL) as (server, port):
        async with await Wire.connect(port) as wire:
            await wire.send(data)
            got, headers, body = await wire.response()
            error = json.loads(body)["error"]
            assert (got, headers["connection"]) == (status, "close")
            assert error["type"] == "invalid_request_error"
            assert error["param"] is None
            assert error["message"]
            assert await wire.ended()
        async with await Wire.connect(port) as wire:
            await wire.send(GET)
            assert (await wire.response())[0] == 200
        assert server.counters.requests == 1


ACCEPTED = {
    "a body with its length": (post(b"abc", target=b"/x"), b"POST /x abc"),
    "no body": (GET, b"GET / "),
    "chunks": (CHUNKED + chunk(b"ab") + chunk(b"c") + b"0\r\n\r\n", b"POST / abc"),
    "chunks with extensions and trailers": (CHUNKED + b"3;a=b\r\nabc\r\n0;z\r\nx: y\r\n\r\n", b"POST / abc"),
    "no chunk at all": (CHUNKED + b"0\r\n\r\n", b"POST / "),
    "a large hex size": (CHUNKED + b"0000003\r\nabc\r\n000\r\n\r\n", b"POST / abc"),
    "empty lines first": (b"\r\n\r\n" + GET, b"GET / "),
    "an upgrade, which is not followed": (GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", b"GET / "),
    "an asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", b"OPTIONS * "),
    "an absolute target": (b"GET http://h:80/a?b=/c HTTP/1.1\r\n" + HOST + b"\r\n", b"GET /a?b=/c "),
    "an absolute target without a path": (b"GET HTTP://h?a HTTP/1.1\r\n" + HOST + b"\r\n", b"GET /?a "),
    "an absolute asterisk": (b"OPTIONS http://h HTTP/1.1\r\n" + HOST + b"\r\n", b"OPTIONS * "),
    "fields spelled anyhow": (b"POST / HTTP/1.1\r\nHOST: h\r\nCoNtEnT-lEnGtH: 2\r\n\r\nhi", b"POST / hi"),
    "a body of the largest size": (post(b"x" * 1024, target=b"/"), b"POST / " + b"x" * 1024),
}


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize("case", ACCEPTED)
async def test_a_good_request_is_understood_in_whatever_pieces_it_comes(case: str, step: int) -> None:
    data, expected = ACCEPTED[case]
    async with serving(echo, SMALL) as (_, port), await Wire.connect(port) as wire:
        for _ in range(2):  # keep-alive: the second finds nothing left of the first
            for start in range(0, len(data), step):
                await wire.send(data[start : start + step])
            status, headers, body = await wire.response()
            assert (status, body) == (200, expected)
            assert "connection" not in headers


async def test_a_head_like_the_one_before_brings_a_length_of_its_own() -> None:
    async with serving(echo, SMALL) as (_, port), await Wire.connect(port) as wire:
        for body in (b"a", b"bcd", b"", b"e" * 1000, b"f"):
            await wire.send(post(body, b"x: y", target=b"/"))
            assert (await wire.response())[2] == b"POST / " + body


@pytest.mark.parametrize(
    ("length", "status"), [(b"+1", 400), (b"1, 1", 400), (b"", 400), (b"9" * 30, 400), (b"1025", 413)]
)
async def test_a_head_like_the_one_before_is_refused_for_its_length_as_ever(length: bytes, status: int) -> None:
    async with serving(echo, SMALL) as (_, port), await Wire.connect(port) as wire:
        await wire.send(post(b"a"))
        assert (await wire.response())[0] == 200
        await wire.send(post(b"a").replace(b"content-length: 1", b"content-length: " + length))
        assert (await wire.response())[0] == status


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(echo, SMALL) as (_, port), await Wire.connect(port) as wire:
        targets = [b"/%d" % number for number in range(200)]
        await wire.send(b"".join(post(b"b", target=target) for target in targets))
        for target in targets:
            assert (await wire.response())[2] == b"POST " + target + b" b"


async def test_a_request_pipelined_behind_chunks_is_not_lost() -> None:
    async with serving(echo, SMALL) as (_, port), await Wire.connect(port) as wire:
        await wire.send(CHUNKED + chunk(b"a") + b"0\r\nt: u\r\n\r\n" + GET)
        assert (await wire.response())[2] == b"POST / a"
        assert (await wire.response())[2] == b"GET / "


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.0\r\n\r\n", GET[:-2] + b"connection: close\r\n\r\n", GET[:-2] + b"Connection: x, Close\r\n\r\n"],
)
async def test_a_client_that_wants_the_connection_closed_gets_it_closed(data: bytes) -> None:
    async with serving(echo) as (_, port), await Wire.connect(port) as wire:
        await wire.send(data + GET)
        status, headers, _ = await wire.response()
        assert (status, headers["connection"]) == (200, "close")
        assert await wire.ended()


async def test_head_has_the_head_of_get_and_no_body() -> None:
    async with serving(echo) as (_, port), await Wire.connect(port) as wire:
        await wire.send(b"HEAD /x HTTP/1.1\r\nhost: h\r\n\r\n" + GET)
        status, headers, _ = await wire.response(bodiless=True)
        assert (status, headers["content-length"]) == (200, str(len("HEAD /x ")))
        assert (await wire.response())[2] == b"GET / "


async def test_a_client_that_expects_a_100_gets_it_before_it_sends_the_body() -> None:
    async with serving(echo) as (_, port), await Wire.connect(port) as wire:
        await wire.send(post(b"", b"Expect: 100-continue").replace(b"length: 0", b"length: 3"))
        assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(b"abc")
        assert (await wire.response())[2].endswith(b" abc")


async def test_nobody_is_asked_to_go_on_with_a_body_that_is_too_long() -> None:
    async with serving(echo, SMALL) as (_, port), await Wire.connect(port) as wire:
        await wire.send(post(b"", b"expect: 100-continue").replace(b"length: 0", b"length: 3000"))
        assert (await wire.response())[0] == 413


async def test_a_large_body_arrives_whole() -> None:
    seen: list[bytes] = []

    @awaiting
    async def keep(request: HttpRequest, client: Client) -> None:
        seen.append(request.body)
        client.respond(200, b"{}")

    body = os.urandom(5_000_000)
    async with serving(keep) as (server, port), await Wire.connect(port) as wire:
        await wire.send(post(body))
        assert (await wire.response())[0] == 200
        await wire.send(CHUNKED + b"".join(chunk(body[at : at + 50_000]) for at in range(0, len(body), 50_000)))
        await wire.send(b"0\r\n\r\n")
        assert (await wire.response())[0] == 200
        assert seen == [body, body]
        assert server.counters.request_bytes == 2 * len(body)


FRAGMENTS = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n",
        b"POST /v1/x HTTP/1.1\r\n",
        b"HTTP/1.0\r\n",
        HOST,
        b"content-length: 5\r\n",
        b"transfer-encoding: chunked\r\n",
        b"expect: 100-continue\r\n",
        b"connection: close\r\n",
        b"\r\n",
        b"\r\n\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"hello",
        GET,
    ]
)
STREAMS = st.lists(st.one_of(FRAGMENTS, st.binary(max_size=20)), max_size=12)


def test_no_bytes_crash_the_server_or_leave_anything_behind() -> None:
    """Arbitrary and half-valid streams, many in one server; then a good request, and no descriptor more than before."""

    async def feed(streams: list[list[bytes]]) -> None:
        async with serving(echo, SMALL) as (server, port):
            for stream in streams:
                async with await Wire.connect(port) as wire:
                    try:
                        for piece in stream:
                            await wire.send(piece)
                        await wire.stream.send_eof()
                        await wire.rest()
                    except trio.BrokenResourceError:
                        pass
            async with await Wire.connect(port) as wire:
                await wire.send(GET)
                assert (await wire.response())[0] == 200
            assert "internal_error" not in server.counters.errors

    @settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
    @given(st.lists(STREAMS, max_size=10))
    def check(streams: list[list[bytes]]) -> None:
        trio.run(feed, streams)

    check()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    check()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
