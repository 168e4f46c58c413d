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
from collections.abc import Callable
from dataclasses import replace

import trio

from ranvier_py.core.answers.chunked import ChunkedReader
from ranvier_py.core.errors import ConnectFailed, UpstreamClosed, UpstreamGarbled
from ranvier_py.proxy.connection_pool import Address, Connection, Counters, Pool, UpstreamLimits, UpstreamStatistics
from ranvier_py.proxy.error_answers import Fields
from ranvier_py.proxy.exchange import Chunks, Exchange
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.readiness import Readiness
from ranvier_py.proxy.response_reader import KnownHead, Reading, ResponseParser
from ranvier_py.proxy.transport import PlainTransport, TlsTransport, Transport, WatchedTransport

__all__ = ["Address", "Exchange", "Upstream", "UpstreamLimits", "UpstreamStatistics"]

BODILESS = (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
"""Methods whose requests carry no content-length when their body is empty (RFC 9110 8.6)."""

INTERIM_MAX = 16
"""Interim (1xx) answers read before the final one; a backend that sends more is not going to answer."""


class Upstream:
    """The connections to all backends of a node.

    Args:
        tls: for https backends; None verifies against the system's authorities.

    `readiness` may be set to what waits for sockets whenever this is used; without it trio does.
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
        self.readiness: Readiness | None = None
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
        return await self.finish(self.begin(address, request, extra))

    def begin(self, address: Address, request: HttpRequest, extra: Fields = ()) -> Sent:
        """The part of `open` that needs no wait: a pooled connection, and what of the request it takes at once."""
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = Pool(address, self._counters)
        sent = Sent(pool, request, (request_head(pool, request, extra), request.body))
        connection = pool.take()
        if connection is not None:
            sent.over(connection)
        return sent

    def answer_of(self, sent: Sent) -> Exchange | None:
        """What came for a request that `waits`, if that is the head of the answer; None: `finish` does the rest."""
        sent.when_answered(None)
        connection = sent.connection
        assert connection is not None, "it waits for nothing else"
        try:
            data = connection.transport.receive_now()
        except OSError:
            return None
        if not data:
            return None
        connection.answered = True
        sent.data = data
        end = data.find(b"\r\n\r\n") + 4
        if not 4 <= end <= self._limits.header_bytes_max:
            return None
        try:
            reading = read_head(connection, data[:end], sent.request.method)
        except UpstreamGarbled:
            return None
        if reading.head.status < 200:
            return None
        return self._exchange(sent, connection, reading, data[end:])

    async def finish(self, sent: Sent) -> Exchange:
        """The rest of `open`."""
        sent.when_answered(None)
        connection = sent.connection
        if connection is not None:
            try:
                return await self._answer(sent, connection)
            except UpstreamClosed:
                self._counters.stale += 1
                if connection.answered:
                    raise
                self._counters.replaced += 1
        connection = await self._connect(sent.pool)
        sent.over(connection)
        return await self._answer(sent, connection)

    def forget(self, address: Address) -> None:
        """The backend was removed: close its unused connections; those in use close when they are released."""
        pool = self._pools.pop(address, None)
        if pool is not None:
            pool.forgotten = True
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

    async def _answer(self, sent: Sent, connection: Connection) -> Exchange:
        try:
            await self._send_all(sent, connection)
            reading, rest = await self._read_head(connection, sent.request.method, sent.data)
        except BaseException:
            connection.close()
            raise
        return self._exchange(sent, connection, reading, rest)

    def _exchange(self, sent: Sent, connection: Connection, reading: Reading, rest: bytes) -> Exchange:
        head, length, reusable, parser = reading
        chunks: Chunks | None = parser
        if parser is not None and sent.request.http_minor == 0:  # clients of HTTP/1.0 know no chunks
            head, chunks = replace(head, framing="close", fields_read=None), ChunkedReader(keep=True)
        return Exchange(connection, head, length, rest, chunks, reusable and sent.whole, self._release)

    async def _send_all(self, sent: Sent, connection: Connection) -> None:
        """Send what is left. Not `whole` if the backend answered before it had all of it."""
        if sent.unsent is not None:
            with contextlib.suppress(OSError):
                sent.whole = await self._send_rest(connection, sent.unsent)
            sent.unsent = None
        if not sent.whole and connection.quiet():  # it may have answered before it closed
            raise UpstreamClosed("the backend closed the connection")

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

    async def _read_head(self, connection: Connection, method: bytes, data: bytes) -> tuple[Reading, bytes]:
        """The final head, and the bytes after it. `data` is what has come already."""
        for _ in range(INTERIM_MAX):
            end = data.find(b"\r\n\r\n") + 4
            while end < 4:
                if len(data) > self._limits.header_bytes_max:
                    raise UpstreamGarbled("the backend's answer has too large a head")
                data += await self._receive(connection)
                end = data.find(b"\r\n\r\n") + 4
            if end > self._limits.header_bytes_max:
                raise UpstreamGarbled("the backend's answer has too large a head")
            reading = read_head(connection, data[:end], method)
            data = data[end:]
            status = reading.head.status
            if status >= 200:
                return reading, data
            if status == 101:
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
            readiness = self.readiness
            return WatchedTransport(sock, readiness.watch(sock.fileno())) if readiness else PlainTransport(sock)
        transport = TlsTransport(sock, self._tls or _default_tls(), address.host)
        try:
            await transport.handshake()
        except BaseException:
            transport.close()
            raise
        return transport

    def _release(self, connection: Connection, good: bool) -> None:
        pool = connection.pool
        if good and not pool.forgotten and not self._closed:
            pool.put(connection, self._clock(), self._limits)
        else:
            connection.close()


class Sent:
    """A request on its way to a backend, before its answer.

    Attributes:
        connection: None where one has yet to be made.
        unsent: what the connection did not take at once.
        whole: nothing is known to have been refused.
        data: of the answer, as far as it was read.
    """

    __slots__ = ("connection", "data", "parts", "pool", "request", "unsent", "whole")

    def __init__(self, pool: Pool, request: HttpRequest, parts: tuple[bytes, bytes]) -> None:
        self.pool = pool
        self.request = request
        self.parts = parts
        self.connection: Connection | None = None
        self.unsent: memoryview | None = None
        self.whole = True
        self.data = b""

    def over(self, connection: Connection) -> None:
        """Send over this connection, as far as it takes it at once."""
        self.connection, self.unsent = connection, None
        try:
            count = connection.transport.send_now(self.parts)
        except OSError:
            self.whole = False
            return
        head, body = self.parts
        self.whole = count == len(head) + len(body)
        if not self.whole:
            within = count - len(head)
            self.unsent = memoryview(body)[within:] if within >= 0 else memoryview(head[count:] + body)

    @property
    def waits(self) -> bool:
        """Whether there is nothing to do but to wait for the answer, and somebody tells when it comes."""
        return self.whole and self.connection is not None and self.connection.transport.watch is not None

    def when_answered(self, call: Callable[[], bool] | None) -> None:
        """Have this called when something comes (`Watch.shortcut`); None: nothing."""
        watch = self.connection.transport.watch if self.connection is not None else None
        if watch is not None:
            watch.shortcut = call

    def close(self) -> None:
        """The answer is not wanted."""
        self.when_answered(None)
        if self.connection is not None:
            self.connection.close()


def read_head(connection: Connection, data: bytes, method: bytes) -> Reading:
    """What the head says. Raises UpstreamGarbled."""
    known = connection.known_head
    reading = known.again(data) if known is not None and method != b"HEAD" else None
    if reading is None:
        reading = ResponseParser().parse(data, method)
        connection.known_head = KnownHead.of(data, reading)
    return reading


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
    lines = [request.method, b" ", pool.prefix, request.target, pool.host_line, request.fields.lines]
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    if request.body or request.method not in BODILESS:
        lines.append(b"content-length: %d\r\n\r\n" % len(request.body))
    else:
        lines.append(b"\r\n")
    return b"".join(lines)
