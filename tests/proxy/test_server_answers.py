"""How answers end: errors, deadlines, clients that leave or do not read, limits, drain, TLS."""

from __future__ import annotations

import errno
import json
import random
import socket
import time
from contextlib import AsyncExitStack
from functools import partial

import httpx
import pytest
import trio

from ranvier_py.core.errors import ClientGone, ConfigError, NoBackend, NotFound, RanvierError, UpstreamClosed
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client, Watchdog
from ranvier_py.proxy.conversation import Handler, awaiting
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.error_answers import error_response
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest, HttpResponseHead, WaitPhase
from ranvier_py.proxy.server import DataServer
from tests.proxy.wire import GET, Wire, echo, post, serving, tls_contexts

QUICK = ServerLimits(tick_s=0.01, idle_s=0.1, header_s=0.1, body_window_s=0.1, send_window_s=0.1)


class Held:
    """A handler that begins to answer when told, and remembers how it ended."""

    def __init__(self, phase: WaitPhase = WaitPhase.WORK, seconds: float = 60.0, first: bytes = b"") -> None:
        self.phase, self.seconds, self.first = phase, seconds, first
        self.running = 0
        self.entered = trio.Event()
        self.go_on = trio.Event()
        self.left = trio.Event()
        self.error: RanvierError | None = None

    def __call__(self, request: HttpRequest, client: Client) -> Steps[None]:
        self.running += 1
        self.entered.set()
        try:
            if self.first:
                client.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", self.first)
            client.arm(self.phase, self.seconds)
            yield self.go_on.wait
            client.respond(200, b"done")
        except RanvierError as error:
            self.error = error
            raise
        finally:
            self.left.set()


# --- errors -----------------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Handler:
    @awaiting
    async def fail(request: HttpRequest, client: Client) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (NotFound("no such model"), 404, "not_found", "invalid_request_error"),
        (NoBackend("nobody"), 503, "no_backend", "server_error"),
        (UpstreamClosed("gone"), 502, "upstream_closed", "server_error"),
    ],
)
async def test_an_error_of_the_handler_becomes_an_answer_and_the_connection_stays(
    error: RanvierError, status: int, code: str, kind: str
) -> None:
    async with serving(failing(error)) as (server, port), await Wire.connect(port) as wire:
        for _ in range(2):
            await wire.send(post(b"{}"))
            got, headers, body = await wire.response()
            assert got == status
            assert json.loads(body)["error"] == {"message": str(error), "type": kind, "param": None, "code": code}
            assert headers.get("retry-after") == ("1" if status == 503 else None)
        assert server.counters.errors == {code: 2}


async def test_anthropic_clients_get_errors_in_their_shape() -> None:
    async with serving(failing(NotFound("no such model"))) as (_, port), await Wire.connect(port) as wire:
        await wire.send(post(b"{}", target=b"/v1/messages?beta=true"))
        status, _, body = await wire.response()
        assert status == 404
        assert json.loads(body) == {"type": "error", "error": {"type": "not_found_error", "message": "no such model"}}


def test_every_error_has_a_status_and_a_body() -> None:
    def tree(kind: type[RanvierError]) -> list[type[RanvierError]]:
        return [kind, *(each for sub in kind.__subclasses__() for each in tree(sub))]

    for kind in tree(RanvierError):
        error = kind(["x"]) if kind.__name__ == "ConfigError" else kind("x")  # type: ignore[arg-type]
        for api in ("openai", "anthropic"):
            status, _, body = error_response(error, api)
            assert 400 <= status < 600
            assert json.loads(body)["error"]["message"] == "x"


@pytest.mark.parametrize("crash", [True, False])
async def test_a_handler_that_crashes_or_forgets_to_answer_is_a_500(
    crash: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @awaiting
    async def broken(request: HttpRequest, client: Client) -> None:
        if crash:
            client.limit_lines = lambda: b"%d" % (1 // 0)  # the same bug may be met as the head of the answer is made
            raise ZeroDivisionError("secret detail")

    async with serving(broken) as (_, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        status, headers, body = await wire.response()
        assert (status, headers["connection"]) == (500, "close")
        assert b"secret" not in body
        assert await wire.ended()
    assert "request.failed" in caplog.text


@pytest.mark.parametrize("error", [UpstreamClosed("gone"), ZeroDivisionError()])
async def test_an_answer_that_cannot_be_finished_ends_in_a_reset(error: Exception) -> None:
    @awaiting
    async def half(request: HttpRequest, client: Client) -> None:
        client.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"half")
        raise error

    async with serving(half) as (server, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        assert await wire.cut()
        assert wire.buffer.endswith(b"half") or wire.buffer == b""  # a reset may overtake what was sent
    assert server.counters.cut == 1


# --- deadlines --------------------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with serving(echo, QUICK) as (server, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        await wire.response()
        assert await wire.ended()
        assert server.counters.timeouts == {"idle": 1}


@pytest.mark.parametrize(
    ("data", "phase"),
    [
        (b"GET / HT", "header"),
        (b"\r\n", "header"),
        (post(b"").replace(b"length: 0", b"length: 9") + b"some", "body"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n9\r\nsome", "body"),
    ],
)
async def test_a_client_that_stalls_in_its_request_gets_a_408(data: bytes, phase: str) -> None:
    reported: list[RequestSummary] = []
    async with (
        serving(echo, QUICK, report=reported.append) as (server, port),
        await Wire.connect(port) as wire,
    ):
        await wire.send(data)
        status, headers, _ = await wire.response()
        assert (status, headers["connection"]) == (408, "close")
        assert await wire.ended()
        assert server.counters.timeouts == {phase: 1}
    assert [(each.status, each.outcome) for each in reported] == [(408, "request_timeout")]


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\na: ", post(b"").replace(b"length: 0", b"length: 900")])
async def test_a_client_that_drips_byte_by_byte_is_cut_off_all_the_same(start: bytes) -> None:
    async with serving(echo, QUICK) as (_, port), await Wire.connect(port) as wire:
        await wire.send(start)
        async with trio.open_nursery() as nursery:

            async def drip() -> None:
                while True:
                    await trio.lowlevel.checkpoint()
                    with trio.move_on_after(0.02):
                        await trio.sleep_forever()
                    await wire.send(b"x")

            nursery.start_soon(drip)
            assert (await wire.response())[0] == 408
            nursery.cancel_scope.cancel()


async def test_a_backend_that_does_not_begin_is_a_504() -> None:
    held = Held(WaitPhase.FIRST_BYTE, 0.05)
    async with serving(held, QUICK) as (server, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        status, _, body = await wire.response()
        assert (status, json.loads(body)["error"]["code"]) == (504, "upstream_timeout")
        assert await wire.ended()
        assert server.counters.timeouts == {"first_byte": 1}


async def test_a_backend_that_stalls_in_its_answer_means_a_reset() -> None:
    held = Held(WaitPhase.STALL, 0.05, first=b"x")
    async with serving(held, QUICK) as (server, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        assert await wire.cut()
        assert server.counters.timeouts == {"stall": 1}


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    outcome: list[BaseException] = []

    @awaiting
    async def endless(request: HttpRequest, client: Client) -> None:
        client.started = True
        try:
            while True:
                client.send(b"x" * 65536)
                await client.flush()
        except BaseException as error:
            outcome.append(error)
            raise

    async with serving(endless, QUICK) as (server, port), await Wire.connect(port, receive_buffer=4096) as wire:
        await wire.send(GET)
        while not outcome:
            with trio.move_on_after(0.02):
                await trio.sleep_forever()
        assert isinstance(outcome[0], trio.Cancelled)
        assert server.counters.timeouts == {"send": 1}
        assert await wire.cut()


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    body = bytes(range(256)) * 8_000

    @awaiting
    async def large(request: HttpRequest, client: Client) -> None:
        client.respond(200, body)

    async with serving(large, ServerLimits(tick_s=0.01)) as (server, port):
        async with await Wire.connect(port, receive_buffer=65536) as wire:
            await wire.send(GET * 2)
            for _ in range(2):
                assert (await wire.response())[2] == body
        assert server.counters.timeouts == {}


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [b"", b"some of it"])
async def test_a_client_that_leaves_cancels_its_request_within_100_ms(first: bytes) -> None:
    held = Held(first=first)
    async with serving(held) as (server, port):
        wire = await Wire.connect(port)
        await wire.send(GET)
        await held.entered.wait()
        if first:
            await wire.until(first)
        left_at = time.monotonic()
        await wire.aclose()
        await held.left.wait()
        assert time.monotonic() - left_at < 0.1
        assert isinstance(held.error, ClientGone)
    assert server.counters.client_gone == 1


async def test_a_client_that_sends_more_is_not_taken_for_one_that_left() -> None:
    held = Held()
    async with serving(held) as (_, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        await held.entered.wait()
        await wire.send(GET)
        with trio.move_on_after(0.1):
            await held.left.wait()
        assert not held.left.is_set()
        held.go_on.set()
        for _ in range(2):
            assert (await wire.response())[2] == b"done"
        assert held.running == 2


async def test_a_connection_that_ends_between_requests_is_no_failure() -> None:
    async with serving(echo) as (server, port):
        async with await Wire.connect(port) as wire:
            await wire.send(GET)
            await wire.response()
        async with await Wire.connect(port):
            pass
    assert (server.counters.client_gone, server.counters.cut) == (0, 0)


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_clients_beyond_the_limit_of_connections_are_asked_to_come_back_while_none_is_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Held()
    async with serving(held, ServerLimits(tick_s=0.01, connections_max=1)) as (server, port):
        async with await Wire.connect(port) as first:
            await first.send(GET)
            await held.entered.wait()
            async with await Wire.connect(port) as second:
                await second.send(GET)
                status, headers, body = await second.response()
                assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
                assert json.loads(body)["error"]["code"] == "node_busy"
                assert await second.ended()
            assert "connections.refused 1: 1 are open" in caplog.text
            held.go_on.set()
            assert (await first.response())[0] == 200
        assert server.counters.refused == {"connections": 1}


async def test_a_full_node_closes_who_has_waited_longest_for_a_request_to_let_another_in() -> None:
    async with serving(echo, ServerLimits(tick_s=0.01, connections_max=3)) as (server, port), AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(await Wire.connect(port)) for _ in range(3)]
        for wire in (*wires, wires[0]):  # so the second has waited longest
            await wire.send(GET)
            assert (await wire.response())[0] == 200
        last = await stack.enter_async_context(await Wire.connect(port))
        await last.send(GET)
        assert (await last.response())[0] == 200
        assert await wires[1].ended()
        for wire in (wires[0], wires[2]):
            await wire.send(GET)
            assert (await wire.response())[0] == 200
        assert (server.counters.displaced, server.counters.refused) == (1, {})


async def test_clients_that_wait_for_ever_keep_no_number_of_others_out() -> None:
    """Each of many takes the place of one that asked for nothing, and none of them is refused."""
    async with serving(echo, ServerLimits(tick_s=0.01, connections_max=4)) as (server, port), AsyncExitStack() as stack:
        for _ in range(40):
            wire = await stack.enter_async_context(await Wire.connect(port))
            await wire.send(GET)
            assert (await wire.response())[0] == 200
        assert (server.counters.displaced, server.counters.refused) == (36, {})
        assert server.counters.connections <= 5


@pytest.mark.parametrize("last", [b"connection: close", b"HTTP/1.0"])
async def test_a_busy_node_closes_the_connection_of_a_client_that_wants_no_other_answer(last: bytes) -> None:
    held = Held()
    async with (
        serving(held, ServerLimits(tick_s=0.01, in_flight_max=1)) as (_, port),
        await Wire.connect(port) as first,
        await Wire.connect(port) as second,
    ):
        await first.send(GET)
        await held.entered.wait()
        await second.send(GET.replace(b"HTTP/1.1", last) if last == b"HTTP/1.0" else post(b"", last))
        status, headers, _ = await second.response()
        assert (status, headers["connection"]) == (503, "close")
        assert await second.ended()
        held.go_on.set()
        assert (await first.response())[0] == 200


@pytest.mark.parametrize("whole", [True, False])
async def test_clients_beyond_the_limit_of_requests_are_asked_to_come_back(whole: bool) -> None:
    held, reported = Held(), list[RequestSummary]()
    async with serving(held, ServerLimits(tick_s=0.01, in_flight_max=1), report=reported.append) as (server, port):
        async with await Wire.connect(port) as first, await Wire.connect(port) as second:
            await first.send(GET)
            await held.entered.wait()
            await second.send(post(b"abc")[: None if whole else -1])
            status, headers, _ = await second.response()
            assert (status, headers["retry-after"]) == (503, "1")
            held.go_on.set()
            assert (await first.response())[0] == 200
            await second.send((b"" if whole else b"c") + GET)  # framing is not lost, so the connection lives
            assert (await second.response())[0] == 200
        assert server.counters.refused == {"in_flight": 1}
    assert [(each.method, each.status, each.outcome) for each in reported] == [("POST", 503, "node_busy")]


async def test_a_node_out_of_descriptors_waits_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE, errno.EPERM]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(0), "no")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    async with serving(echo) as (server, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        assert (await wire.response())[0] == 200
        assert server.counters.refused == {"accept": 4}
    assert caplog.text.count("connections.refused") == 1, "the pauses are shorter than a warning's gap"


async def test_two_nodes_share_a_port() -> None:
    first, second = DataServer(echo, QUICK), DataServer(echo, QUICK)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(partial(first.serve, "127.0.0.1", 0, reuse_port=True))
            again = await nursery.start(partial(second.serve, "127.0.0.1", bound[0][1], reuse_port=True))
            assert bound == again
            await first.drain(0)
            async with await Wire.connect(bound[0][1]) as wire:
                await wire.send(GET)
                assert (await wire.response())[0] == 200
            await second.drain(0)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="send_window_s"):
        ServerLimits(send_window_s=0)


# --- drain ------------------------------------------------------------------------------------------------------------


async def test_drain_lets_running_requests_finish_and_closes_idle_connections_at_once() -> None:
    held = Held()
    async with serving(held) as (server, port), await Wire.connect(port) as busy, await Wire.connect(port) as idle:
        await busy.send(GET + GET)
        await held.entered.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.drain, 60.0)
            assert await idle.ended()
            with pytest.raises(OSError, match="refused"):
                await Wire.connect(port)
            held.go_on.set()
            status, headers, body = await busy.response()
            assert (status, headers["connection"], body) == (200, "close", b"done")
            assert await busy.ended()
        assert held.running == 1


@pytest.mark.parametrize("first", [b"", b"some of it"])
async def test_drain_cuts_what_is_left_at_its_deadline(first: bytes) -> None:
    held = Held(first=first)
    async with serving(held) as (server, port), await Wire.connect(port) as wire:
        await wire.send(GET)
        await held.entered.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.drain, 0.05)
            if first:
                assert await wire.cut()
            else:
                assert (await wire.response())[0] == 503
                assert await wire.ended()
                await wire.aclose()


# --- TLS --------------------------------------------------------------------------------------------------------------


async def test_https_is_served_when_there_is_a_certificate() -> None:
    server_context, context = tls_contexts()
    body = b"x" * 300_000
    async with (
        serving(echo, tls=server_context) as (_, port),
        httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context) as client,
    ):
        for _ in range(2):
            response = await client.post("/v1/x", content=body)
            assert response.content == b"POST /v1/x " + body


async def test_a_tls_client_that_has_little_room_gets_every_byte_once_and_in_order() -> None:
    server_context, context = tls_contexts()
    body = random.Random(7).randbytes(8_000_000)

    def large(request: HttpRequest, client: Client) -> Steps[None]:
        client.respond(200, b"")
        for at in range(0, len(body), 10_000):  # until a record finds room for a part of it, or for none
            client.send(body[at : at + 10_000])
            if client.unsent is not None:
                yield client.flush

    async with serving(large, tls=server_context) as (_, port), await Wire.connect(port, receive_buffer=4096) as wire:
        wire.stream = trio.SSLStream(wire.stream, context, server_hostname="127.0.0.1")  # type: ignore[assignment]
        await wire.send(GET)
        await wire.until(b"\r\n\r\n")
        received = [wire.buffer]
        while sum(map(len, received)) < len(body):
            received.append(await wire.stream.receive_some())
    assert b"".join(received) == body


async def test_an_answer_that_ends_with_its_tls_connection_differs_from_one_that_is_cut_off() -> None:
    server_context, context = tls_contexts()

    def until_close(request: HttpRequest, client: Client) -> Steps[None]:
        client.relay_head(HttpResponseHead(200, b"OK", framing="close"), (), b"all")
        if request.target == b"/cut":
            raise UpstreamClosed("the backend broke off")
        yield trio.lowlevel.checkpoint

    async with serving(until_close, tls=server_context) as (_, port):
        for target, is_whole in ((b"/", True), (b"/cut", False)):
            async with await Wire.connect(port) as wire:
                wire.stream = trio.SSLStream(wire.stream, context, server_hostname="127.0.0.1")  # type: ignore[assignment]
                await wire.send(GET.replace(b"/", target, 1))
                assert await wire.cut() is not is_whole


async def test_a_tls_client_that_still_sends_gets_the_refusal_and_a_clean_end() -> None:
    server_context, context = tls_contexts()
    head = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (1 << 40)
    async with serving(echo, tls=server_context) as (server, port):
        async with await Wire.connect(port) as wire:
            wire.stream = trio.SSLStream(wire.stream, context, server_hostname="127.0.0.1")  # type: ignore[assignment]
            await wire.send(head + bytes(60_000))
            for _ in range(20):
                await trio.sleep(0.01)
                await wire.send(bytes(60_000))
            assert (await wire.response())[0] == 413
            assert await wire.rest() == b""
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert server.counters.connections == 0
        assert (server.counters.cut, server.counters.client_gone) == (0, 0)


async def test_plain_text_on_a_tls_port_is_named_and_ends_and_harms_nobody() -> None:
    server_context, _ = tls_contexts()
    async with serving(echo, QUICK, tls=server_context) as (server, port):
        async with await Wire.connect(port) as wire:
            await wire.send(GET)
            assert b"this port speaks TLS" in await wire.until(b"}}")
            await wire.cut()
        async with await Wire.connect(port) as wire:
            await wire.send(b"neither one nor the other\r\n\r\n")
            await wire.cut()
        async with await Wire.connect(port) as silent:  # a handshake that never comes is given up
            await silent.cut()
        assert server.counters.connections == 0


async def test_a_tls_client_that_leaves_cancels_its_request() -> None:
    server_context, context = tls_contexts()
    held = Held()
    async with serving(held, tls=server_context) as (_, port):
        stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", port, ssl_context=context)
        await stream.send_all(GET)
        await held.entered.wait()
        await trio.aclose_forcefully(stream)
        await held.left.wait()
        assert isinstance(held.error, ClientGone)


# --- the watchdog -----------------------------------------------------------------------------------------------------


async def test_nothing_ticks_while_nobody_is_connected(autojump_clock: trio.testing.MockClock) -> None:
    watchdog = Watchdog(0.25)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watchdog.tick)
        await trio.sleep(100)
        assert watchdog.ticks == 0
        nursery.cancel_scope.cancel()
