"""Pooled HTTP/1.1 connections to the backends.

One exchange is one request and one answer on one connection: `open` sends the request and reads the head of the answer,
`receive` gives the body's bytes as they arrived, in the backend's own framing, `release` puts the connection back if
the answer was complete and nothing followed it, and closes it otherwise: closing is how a backend learns that its work
is no longer wanted. Only what was asked for is read, so a client that does not read holds one piece, not a queue.

Rules: a pooled connection that shows bytes or an end before it is used again is closed; one that dies before the first
byte of an answer is replaced once, silently, as the backend had closed it already; everything else is the caller's to
retry. Answers are parsed strictly and end exactly where they say.
Invariant: a connection is in the pool or in one exchange, never both.
Cost: on a pooled connection one poll, one sendmsg, one wait and one recv; no timer (the client's watchdog holds it).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Callable, Sequence

import httptools
import trio

from ranvier_py.core.chunked import ChunkedReader
from ranvier_py.core.errors import ConnectFailed, UpstreamClosed, UpstreamGarbled
from ranvier_py.core.http import Headers, HttpRequest, HttpResponseHead
from ranvier_py.edge.answers import Fields, dropped_fields, response_head
from ranvier_py.edge.exchange import Exchange
from ranvier_py.edge.pool import Address, Connection, Counters, Pool, UpstreamLimits, UpstreamStatistics
from ranvier_py.edge.transport import PlainTransport, TlsTransport, Transport

__all__ = ["Address", "Exchange", "Upstream", "UpstreamLimits", "UpstreamStatistics", "response_head"]

REQUEST_DROPPED = (b"host", b"content-length", b"expect")
"""Fields that we write ourselves, besides the hop-by-hop ones. An expectation was ours to meet."""

BODILESS = (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
"""Methods whose requests carry no content-length when their body is empty (RFC 9110 8.6)."""

EMPTY_LINE = b"\r\n\r\n"

INTERIM_MAX = 16
"""Interim (1xx) answers read before the final one; a backend that sends more is not going to answer."""


class ResponseParser:
    """Parses one response head and follows its chunks; the callbacks are httptools'.

    llhttp does not tell where in its input a message ended. A chunked one ends right after an empty line, so it is fed
    up to each empty line in turn: one call for a piece that has none, as the pieces of an event stream do.

    Attributes:
        done: the chunked message has ended.
    """

    __slots__ = ("_complete", "_headers", "_parser", "_reason", "_split", "done", "reusable")

    def __init__(self) -> None:
        self.done = False
        self._split = False  # the piece before ended within what may be an empty line
        self._headers: Headers = []
        self._reason = b""
        self._complete = False
        self.reusable = False
        self._parser = httptools.HttpResponseParser(self)

    def on_status(self, part: bytes) -> None:
        self._reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._complete = True
        self.reusable = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self.done = True

    def feed(self, data: bytes) -> int:
        """Follow the chunks. Returns how many bytes belong to this message: all until `done`.

        Raises UpstreamGarbled.
        """
        try:
            at = self._feed_split(data) if self._split else 0
            while not self.done and at < len(data):
                found = data.find(EMPTY_LINE, max(0, at - 2))
                end = len(data) if found < 0 else found + 4
                self._parser.feed_data(data[at:end])
                at = end
        except httptools.HttpParserError as error:
            raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
        self._split = data[-1:] in (b"\r", b"\n")
        return at

    def _feed_split(self, data: bytes) -> int:
        """An empty line may have begun in the piece before: its end is looked for byte by byte."""
        for at in range(min(3, len(data))):
            self._parser.feed_data(data[at : at + 1])
            if self.done:
                return at + 1
        return min(3, len(data))

    def parse(self, data: bytes, method: bytes) -> tuple[HttpResponseHead, int]:
        """The head that `data` is, and the length of its body where it has one. Raises UpstreamGarbled."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise UpstreamGarbled("the backend wants another protocol") from error
        except httptools.HttpParserError as error:
            raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
        if not self._complete or b"\r\n " in data or b"\r\n\t" in data:
            raise UpstreamGarbled("the backend's answer has a malformed head")
        self.done = False  # that was said of the head alone
        status = self._parser.get_status_code()
        framing, length = self._framing(status, method)
        return HttpResponseHead(status, self._reason, self._headers, framing), length

    def _framing(self, status: int, method: bytes) -> tuple[str, int]:
        if status < 200 or status in (204, 304) or method == b"HEAD":
            return "none", 0
        framing, length = "close", 0
        for name, value in self._headers:
            key = name.lower()
            if key == b"transfer-encoding":
                if value.lower() != b"chunked":  # we did not offer to take another
                    raise UpstreamGarbled("the backend uses an unknown transfer coding")
                return "chunked", 0
            if key == b"content-length":
                framing, length = "length", int(value)
        return ("none" if framing == "length" and length == 0 else framing), length


class Upstream:
    """The connections to all backends of a node.

    Args:
        tls: for https backends; None verifies against the system's authorities.
    """

    def __init__(
        self,
        limits: UpstreamLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._tls = tls
        self._pools: dict[Address, Pool] = {}
        self._counters = Counters()
        self._closed = False

    def statistics(self) -> UpstreamStatistics:
        counters = self._counters
        return UpstreamStatistics(
            open=counters.open,
            pooled=sum(len(pool.idle) for pool in self._pools.values()),
            connects=counters.connects,
            connect_failures=counters.connect_failures,
            reuses=counters.reuses,
            stale=counters.stale,
            replaced=counters.replaced,
            surplus=counters.surplus,
            dropped=counters.dropped,
        )

    async def open(self, address: Address, request: HttpRequest, extra: Fields = ()) -> Exchange:
        """Send the request, return once the head of the answer is here. `extra` fields are added to the request.

        Raises ConnectFailed, UpstreamClosed, UpstreamGarbled. The time limit is the caller's.
        """
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = Pool(address, self._counters)
        parts = (request_head(pool, request, extra), request.body)
        connection = pool.take()
        if connection is not None:
            try:
                return await self._exchange(connection, parts, request)
            except UpstreamClosed:
                self._counters.stale += 1
                if connection.answered:
                    raise
                self._counters.replaced += 1
        return await self._exchange(await self._connect(pool), parts, request)

    def forget(self, address: Address) -> None:
        """The backend was removed: close its unused connections; those in use close when they are released."""
        pool = self._pools.pop(address, None)
        if pool is not None:
            pool.prune(float("inf"))

    def prune(self) -> None:
        """Close what was not used for `idle_s`. Cheap; call it now and then."""
        before = self._clock() - self._limits.idle_s
        for pool in self._pools.values():
            pool.prune(before)

    async def aclose(self) -> None:
        """Close all unused connections, and each of the others when it is released."""
        self._closed = True
        for address in list(self._pools):
            self.forget(address)
        await trio.lowlevel.checkpoint()

    # --- one exchange -----------------------------------------------------------------------------------------------

    async def _exchange(self, connection: Connection, parts: Sequence[bytes], request: HttpRequest) -> Exchange:
        try:
            sent_all = await self._send(connection, parts)
            parser, head, length, rest = await self._read_head(connection, request.method)
        except BaseException:
            connection.close()
            raise
        unchunk = request.http_minor == 0 and head.framing == "chunked"
        chunks = (ChunkedReader(keep=True) if unchunk else parser) if head.framing == "chunked" else None
        return Exchange(connection, head, length, rest, chunks, parser.reusable and sent_all, self._release)

    async def _send(self, connection: Connection, parts: Sequence[bytes]) -> bool:
        """Send the request. False if the backend answered before it had all of it."""
        transport = connection.transport
        try:
            sent = transport.send_now(parts)
            if sent != sum(map(len, parts)):
                return await self._send_rest(connection, memoryview(b"".join(parts))[sent:])
        except OSError as error:  # it may have answered before it closed
            if connection.quiet():
                raise UpstreamClosed(f"the backend closed the connection: {error}") from error
            return False
        return True

    async def _send_rest(self, connection: Connection, rest: memoryview) -> bool:
        """Send on while listening: a backend that refuses early need not read the rest."""
        if isinstance(connection.transport, TlsTransport):  # one task may not read and write it at once
            await connection.transport.send_rest(rest, _ignore)
            return True
        whole = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_readable, connection.transport.fd, nursery.cancel_scope)
            with contextlib.suppress(OSError):  # what it said before it closed is still to be read
                await connection.transport.send_rest(rest, _ignore)
                whole = True
            nursery.cancel_scope.cancel()
        return whole

    async def _read_head(
        self, connection: Connection, method: bytes
    ) -> tuple[ResponseParser, HttpResponseHead, int, bytes]:
        """The final head, what it says of the length, and the bytes after it."""
        data = b""
        for _ in range(INTERIM_MAX):
            end = data.find(b"\r\n\r\n") + 4
            while end < 4:
                if len(data) > self._limits.header_bytes_max:
                    raise UpstreamGarbled("the backend's answer has too large a head")
                data += await self._receive(connection)
                end = data.find(b"\r\n\r\n") + 4
            if end > self._limits.header_bytes_max:
                raise UpstreamGarbled("the backend's answer has too large a head")
            parser = ResponseParser()
            head, length = parser.parse(data[:end], method)
            data = data[end:]
            if head.status >= 200:
                return parser, head, length, data
            if head.status == 101:
                raise UpstreamGarbled("the backend wants another protocol")
        raise UpstreamGarbled("the backend sends interim answers only")

    async def _receive(self, connection: Connection) -> bytes:
        try:
            data = await connection.transport.receive()
        except OSError as error:
            raise UpstreamClosed(f"the backend closed the connection: {error}") from error
        if not data:
            raise UpstreamClosed("the backend closed the connection before it answered")
        connection.answered = True
        return data

    async def _connect(self, pool: Pool) -> Connection:
        address = pool.address
        self._counters.connects += 1
        try:
            with trio.fail_after(self._limits.connect_s):
                stream = await trio.open_tcp_stream(address.host, address.port)
                transport = await self._transport(stream, address)
        except (OSError, trio.TooSlowError) as error:
            self._counters.connect_failures += 1
            words = str(error) or f"no connection within {self._limits.connect_s} s"
            raise ConnectFailed(f"cannot connect to the backend: {words}") from error
        self._counters.open += 1
        return Connection(transport, pool)

    async def _transport(self, stream: trio.SocketStream, address: Address) -> Transport:
        sock = socket.socket(fileno=stream.socket.detach())
        if address.scheme == "http":
            return PlainTransport(sock)
        transport = TlsTransport(sock, self._tls or _default_tls(), address.host)
        try:
            await transport.handshake()
        except BaseException:
            transport.close()
            raise
        return transport

    def _release(self, connection: Connection, good: bool) -> None:
        pool = connection.pool
        if good and not self._closed and self._pools.get(pool.address) is pool:
            pool.put(connection, self._clock(), self._limits)
        else:
            connection.close()


async def _cancel_when_readable(fd: int, scope: trio.CancelScope) -> None:
    await trio.lowlevel.wait_readable(fd)
    scope.cancel()


def _ignore(_count: int) -> None:
    pass


@functools.cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def request_head(pool: Pool, request: HttpRequest, extra: Fields) -> bytes:
    """The head that the backend gets: our framing, its own host, every field that is the client's to say."""
    lines = [request.method, b" ", pool.prefix, request.target, pool.host_line]
    dropped = dropped_fields(request.headers)
    for name, value in request.headers:
        key = name.lower()
        if key not in dropped and key not in REQUEST_DROPPED:
            lines += (name, b": ", value, b"\r\n")
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    if request.body or request.method not in BODILESS:
        lines.append(b"content-length: %d\r\n\r\n" % len(request.body))
    else:
        lines.append(b"\r\n")
    return b"".join(lines)
