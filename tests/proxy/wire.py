"""Raw sockets for the data plane's tests: a client that says exactly what it is told, and backends made of a script."""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import repeat
from typing import Any, Self

import trio
import trustme

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.connection_pool import BackendAddress, UpstreamLimits
from ranvier_py.proxy.conversation import Handler, awaiting
from ranvier_py.proxy.driver import Driver, Result, Steps
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import HttpRequest, WaitPhase
from ranvier_py.proxy.server import DataServer
from ranvier_py.proxy.upstream import Upstream

TEST_S = 10.0
"""No test waits longer for anything."""

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the machine's certificates takes as long as a node's start

GET = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


def post(body: bytes, *fields: bytes, target: bytes = b"/v1/chat/completions", method: bytes = b"POST") -> bytes:
    lines = [b"%b %b HTTP/1.1" % (method, target), b"host: h", b"content-length: %d" % len(body), *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answer(body: bytes, *fields: bytes, status: bytes | int = b"200 OK") -> bytes:
    line = b"HTTP/1.1 %d Own" % status if isinstance(status, int) else b"HTTP/1.1 " + status
    return b"\r\n".join([line, b"content-length: %d" % len(body), *fields]) + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server on 127.0.0.1, and of a client that trusts it."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


class Wire:
    """One end of a connection, with a memory of what was received and not yet looked at."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.buffer = self.seen = b""  # what was received and not yet looked at; all that was received

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int = 0) -> Wire:
        sock = trio.socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        return cls(trio.SocketStream(sock))

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def more(self) -> bool:
        data = await self.stream.receive_some(65536)
        self.buffer += data
        self.seen += data
        return bool(data)

    async def until(self, token: bytes) -> bytes:
        while token not in self.buffer:
            assert await self.more(), f"ended before {token!r}: {self.buffer!r}"
        head, _, self.buffer = self.buffer.partition(token)
        return head + token

    async def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            assert await self.more(), f"ended after {len(self.buffer)} of {count} bytes"
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    async def rest(self) -> bytes:
        """All up to a clean end."""
        while await self.more():
            pass
        data, self.buffer = self.buffer, b""
        return data

    async def response(self, *, bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
        head = (await self.until(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = b""
        if not bodiless and "content-length" in headers:
            body = await self.exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await self.until(b"\r\n"), 16):
                body += (await self.exactly(size + 2))[:-2]
            assert await self.exactly(2) == b"\r\n"
        return int(first.split()[1]), headers, body

    async def request(self) -> tuple[bytes, bytes]:
        """As a backend: head and body of one request with a length."""
        head = await self.until(b"\r\n\r\n")
        length = head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
        return head, await self.exactly(int(length or 0))

    async def next_request(self) -> tuple[bytes, bytes] | None:
        """The same; None when the other side has no more."""
        return await self.request() if self.buffer or await self.more() else None

    async def ended(self) -> bool:
        """Whether the other side has closed, cleanly and without another byte."""
        return not self.buffer and not await self.more()

    async def cut(self) -> bool:
        """Whether the connection ends in a reset, whatever came before."""
        try:
            await self.rest()
        except trio.BrokenResourceError:
            return True
        return False

    async def aclose(self) -> None:
        await self.stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            await self.stream.aclose()


class Clock:
    """Time that passes when a test has it pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(
    handler: Handler,
    limits: ServerLimits | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    report: Callable[[RequestSummary], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[DataServer, int]]:
    """A server on a free port; drained at the end, so that a task that does not end fails the test."""
    server = DataServer(handler, limits or ServerLimits(tick_s=0.01), tls=tls, report=report, clock=clock)
    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(partial(server.serve, "127.0.0.1", 0))
            yield server, bound[0][1]
            await server.drain(0)
            assert server.counters.connections == server.counters.in_flight == 0


@asynccontextmanager
async def backend(
    script: Callable[[Wire], Awaitable[object]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Backend]:
    """A backend whose every connection runs `script`, and is closed when that returns."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    found = Backend(BackendAddress("https" if tls else "http", "127.0.0.1", port))

    async def run(stream: Any) -> None:
        found.connections += 1
        if tls is not None:
            stream = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        try:
            async with Wire(stream) as wire:
                await script(wire)
        except (trio.BrokenResourceError, AssertionError):
            found.broken += 1

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_listeners, run, listeners))
        yield found
        nursery.cancel_scope.cancel()


class Backend:
    def __init__(self, address: BackendAddress) -> None:
        self.address = address
        self.connections = 0
        self.broken = 0


class Proxy:
    """The least that a pipeline does."""

    def __init__(
        self, address: BackendAddress, limits: UpstreamLimits | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.upstream = Upstream(limits or UpstreamLimits(), tls=tls)
        self.address = address
        self.extra = ((b"x-ranvier-backend", b"b0"),)
        self.first_byte_s = self.stall_s = 5.0

    def __call__(self, request: HttpRequest, client: Client) -> Steps[None]:
        client.arm(WaitPhase.FIRST_BYTE, self.first_byte_s)
        exchange = yield from self.upstream.open(self.address, request)
        try:
            client.relay_head(exchange.head, self.extra, exchange.take())
            while not exchange.complete:
                yield client.flush
                client.arm(WaitPhase.STALL, self.stall_s)
                yield exchange.readable
                client.send(exchange.receive() or b"")
        finally:
            exchange.release()


@asynccontextmanager
async def proxying(
    script: Callable[[Wire], Awaitable[object]],
    limits: ServerLimits | None = None,
    *,
    tls: bool = False,
) -> AsyncIterator[tuple[Proxy, Backend, int]]:
    """A scripted backend behind a server: proxy, backend, and the server's port. `tls`: between the two."""
    contexts = tls_contexts() if tls else (None, None)
    async with backend(script, contexts[0]) as found:
        proxy = Proxy(found.address, None, contexts[1])
        async with serving(proxy, limits) as (_, port):
            yield proxy, found, port
        proxy.upstream.close()
        assert proxy.upstream.counters.open == 0


async def run(steps: Steps[Result]) -> Result:
    """Steps without a connection of a client."""
    return await Driver(steps).run()


@awaiting
async def echo(request: HttpRequest, client: Client) -> None:
    """A handler that answers with what it understood."""
    client.respond(200, request.method + b" " + request.target + b" " + request.body, (), b"text/plain")


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Every new one of this process fails with EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- backends that follow a script ------------------------------------------------------------------------------------

HANG, CLOSE, RESET = "hang", "close", "reset"
Step = bytes | str | trio.Event


class Scripted:
    """A backend that answers every POST by the same steps, and probes as a healthy engine does.

    Attributes:
        turns: the steps of the next request, of the one after it …; backends may share it.
        page: what every GET gets.
        asked, left: the node sent a request; it hung up.
    """

    def __init__(self, *script: Step, turns: Iterator[Sequence[Step]] | None = None, page: bytes = b"{}") -> None:
        self.turns = turns or repeat(script)
        self.page = page
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.asked = trio.Event()
        self.left = trio.Event()

    async def serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):  # a node that gives up leaves an answer unread
            async with Wire(stream) as wire:
                while (request := await wire.next_request()) is not None:
                    head, body = request
                    if head.startswith(b"GET ") and not head.startswith(b"GET /v1/files"):
                        await wire.send(answer(self.page))
                        continue
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.asked.set()
                    if not await self.play(wire):
                        return

    def script(self) -> Sequence[Step]:
        """What the present request gets."""
        return next(self.turns)

    @property
    def good(self) -> Sequence[Step]:
        """What serves the present request."""
        return [STREAM_HEAD, ROLE, TOKEN, END] if json.loads(self.bodies[-1]).get("stream") else [GOOD]

    async def play(self, wire: Wire) -> bool:
        """Whether the connection lives on."""
        for step in self.script():
            if isinstance(step, bytes):
                await wire.send(step)
            elif isinstance(step, trio.Event):
                await step.wait()
            elif step == HANG:
                await wire.more()  # until the node hangs up
                self.left.set()
                return False
            else:
                if step == RESET:
                    wire.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
        return True


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(fields: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def delta(text: str, finish: str | None = None) -> bytes:
    """An event that has what those of all APIs have, so that it may answer any request."""
    choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": finish}
    generated = {"text": text, "meta_info": {"finish_reason": {"type": finish} if finish else None}}
    part = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}
    return event({**part, "choices": [choice], **generated})


ROLE = delta("")
TOKEN = delta("word")
END = delta("", "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "text": "hi", "finish_reason": "stop"}
WORDS = {"text": "hi", "choices": [CHOICE], "content": [{"type": "text", "text": "hi"}]}
ITEM = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
GOOD = answer(json.dumps({**WORDS, "output": [ITEM], "data": [{"index": 0, "embedding": [0.5]}]}).encode())
"""What whole answers of all APIs have."""
