"""How many bytes of bodies the public port keeps at once, whoever sends them and however slowly."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import trio

from ranvier_py.core.errors import NodeBusy
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.conversation import SKIPPED_BYTES_MAX, awaiting
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.server import DataServer
from tests.proxy.wire import GET, Wire, chunk, post, serving

ROOM = ServerLimits(tick_s=0.01, body_bytes_max=1024, in_flight_bytes_max=1500)
CHUNKED = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"


class Held:
    """A handler that answers the bodies of "w" when told, and everything else at once with its length."""

    def __init__(self) -> None:
        self.go_on = trio.Event()

    def __call__(self, request: HttpRequest, client: Client) -> Steps[None]:
        if request.body[:1] == b"w":
            yield self.go_on.wait
        client.respond(200, b"%d" % len(request.body))


async def until(server: DataServer, condition: Callable[[int], bool]) -> None:
    """Until the bytes that the server keeps are as they should be; the fixture has a deadline."""
    while not condition(server.counters.in_flight_bytes):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_whose_body_finds_no_room_is_asked_to_come_back(chunked: bool) -> None:
    held = Held()
    async with serving(held, ROOM) as (server, port):
        async with await Wire.connect(port) as first, await Wire.connect(port) as second:
            await first.send(post(b"w" * 1000))
            await until(server, lambda count: count == 1000)
            await second.send(CHUNKED + chunk(b"x" * 600) if chunked else post(b"x" * 600))
            status, headers, body = await second.response()
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"] == {
                "message": "too many bytes of requests at once",
                "type": "server_error",
                "param": None,
                "code": "node_busy",
            }
            assert server.counters.refused == {"in_flight_bytes": 1}
            held.go_on.set()
            assert (await first.response())[2] == b"1000"
            if chunked:  # its framing is lost
                assert headers["connection"] == "close"
                assert await second.ended()
            else:
                await second.send(post(b"x" * 600))
                assert (await second.response())[2] == b"600"
        await until(server, lambda count: count == 0)


async def test_requests_that_fit_and_those_without_a_body_pass_beside_a_large_one() -> None:
    held = Held()
    async with serving(held, ROOM) as (server, port):
        async with await Wire.connect(port) as first, await Wire.connect(port) as second:
            await first.send(post(b"w" * 1000))
            await until(server, lambda count: count == 1000)
            for request, length in ((post(b"x" * 500), b"500"), (GET, b"0"), (CHUNKED + chunk(b"x" * 400), b"400")):
                await second.send(request + (chunk(b"") if request.startswith(CHUNKED) else b""))
                assert (await second.response())[2] == length
            held.go_on.set()
            await first.response()
        assert server.counters.refused == {}


async def test_what_is_announced_takes_no_room_before_it_is_sent() -> None:
    """Else a few clients could announce the largest bodies, send one byte a minute, and shut out all others."""
    async with (
        serving(Held(), ROOM) as (server, port),
        await Wire.connect(port) as slow,
        await Wire.connect(port) as other,
    ):
        await slow.send(post(b"x" * 1000)[:-999])
        await until(server, lambda count: count == 1)
        await other.send(post(b"x" * 1000))
        assert (await other.response())[0] == 200
        await slow.send(b"x" * 999)
        assert (await slow.response())[2] == b"1000"


async def test_of_two_bodies_that_grow_beyond_the_room_the_one_that_crosses_it_goes() -> None:
    async with serving(Held(), ROOM) as (server, port):
        async with await Wire.connect(port) as first, await Wire.connect(port) as second:
            for wire in (first, second):  # while there is room for either
                await wire.send(post(b"x" * 1000)[:-900])
            await until(server, lambda count: count == 200)
            for wire in (first, second):
                await wire.send(b"x" * 600)
            await until(server, lambda count: count == 1400)
            await second.send(b"x" * 299)
            status, headers, _ = await second.response()
            assert (status, headers["connection"]) == (503, "close")
            await until(server, lambda count: count == 700)
            await first.send(b"x" * 300)
            assert (await first.response())[2] == b"1000"
        assert server.counters.refused == {"in_flight_bytes": 1}


@pytest.mark.parametrize("request_bytes", [post(b"x" * 900)[:-1], CHUNKED + chunk(b"x" * 700)])
async def test_a_client_that_leaves_in_its_body_leaves_no_bytes_behind(request_bytes: bytes) -> None:
    async with serving(Held(), ROOM) as (server, port):
        async with await Wire.connect(port) as client:
            await client.send(request_bytes)
            await until(server, lambda count: count >= 700)
        await until(server, lambda count: count == 0)


async def test_a_connection_that_waits_for_its_next_request_keeps_no_body() -> None:
    """Ten thousand idle connections would keep their last bodies, uncounted."""
    requests: list[HttpRequest] = []

    @awaiting
    async def remember(request: HttpRequest, client: Client) -> None:
        requests.append(request)
        client.respond(200, b"")

    async with serving(remember, ROOM) as (server, port), await Wire.connect(port) as client:
        await client.send(post(b"x" * 900))
        await client.response()
        await until(server, lambda count: count == 0)
        assert [request.body for request in requests] == [b""]


async def until_idle(server: DataServer) -> Client:
    """The only client, as soon as it has no request."""
    while not server.conversations.idle:
        await trio.lowlevel.checkpoint()
    return next(iter(server.conversations.idle.values()))


async def test_a_connection_that_waits_for_its_next_request_keeps_nothing_of_what_came_behind_one() -> None:
    async with serving(Held()) as (server, port), await Wire.connect(port) as client:
        await client.send(GET + post(b"x" * 60_000)[:-10_000])
        await client.response()
        await client.send(b"x" * 10_000)
        assert (await client.response())[2] == b"60000"
        assert (await until_idle(server)).ahead == b""


async def test_a_connection_that_waits_for_its_next_request_keeps_no_large_head_of_the_last() -> None:
    async with serving(Held()) as (server, port), await Wire.connect(port) as client:
        for size, is_kept in ((200, True), (60_000, False), (200, True)):
            await client.send(b"GET / HTTP/1.1\r\nhost: h\r\nx-padding: %b\r\n\r\n" % (b"a" * size))
            assert (await client.response())[0] == 200
            assert ((await until_idle(server)).last_head is not None) == is_kept


def refused(request: HttpRequest, client: Client) -> None:
    if request.path == b"/refused":
        raise NodeBusy("not now")


@pytest.mark.parametrize("count", [1, 600, SKIPPED_BYTES_MAX])
async def test_a_request_refused_by_its_head_keeps_its_connection_though_its_body_comes_later(count: int) -> None:
    """The answer does not wait for the body, which is read and not kept."""
    async with serving(Held()) as (server, port), await Wire.connect(port) as wire:
        server.conversations.by_head = refused
        request = post(b"x" * count).replace(b"/v1/chat/completions", b"/refused")
        for _ in range(2):
            await wire.send(request[:-count])
            status, headers, _ = await wire.response()
            assert (status, headers.get("connection")) == (503, None)
            await wire.send(request[-count:])
        assert server.counters.in_flight_bytes == 0
        await wire.send(post(b"xyz"))
        assert (await wire.response())[2] == b"3"


@pytest.mark.parametrize("head", [b"content-length: %d" % (SKIPPED_BYTES_MAX + 1), b"transfer-encoding: chunked"])
async def test_a_refusal_ends_the_connection_of_a_body_that_is_long_or_of_no_known_length(head: bytes) -> None:
    async with serving(Held()) as (server, port), await Wire.connect(port) as wire:
        server.conversations.by_head = refused
        await wire.send(b"POST /refused HTTP/1.1\r\nhost: h\r\n%b\r\n\r\n" % head)
        status, headers, _ = await wire.response()
        assert (status, headers["connection"]) == (503, "close")
        assert await wire.ended()


async def test_a_refused_body_that_never_comes_holds_its_connection_no_longer_than_a_head_may() -> None:
    limits = ServerLimits(tick_s=0.01, header_s=0.05)
    async with serving(Held(), limits) as (server, port), await Wire.connect(port) as wire:
        server.conversations.by_head = refused
        await wire.send(b"POST /refused HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nxx")
        assert (await wire.response())[0] == 503
        assert await wire.ended()
