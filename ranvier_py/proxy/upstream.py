"""Pooled HTTP/1.1 connections to the backends.

Rule: one exchange is one request and one answer on one connection. Bytes are read only when asked for, so a client
that does not read holds one piece, not a queue. A pooled connection that shows bytes or an end before it is used again
is closed. One that dies as soon as it is used, without a byte of an answer, is replaced once, silently, if the request
may be sent again; the caller decides about all other retries. Answers end exactly where their framing says; bytes
after that are never passed on. Bounds: those of each pool.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import trio

from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError, payload_of
from ranvier_py.core.errors import ConnectFailed, NodeExhausted, UpstreamClosed, UpstreamGarbled, is_exhaustion
from ranvier_py.core.routing.retries import may_repeat
from ranvier_py.proxy.connection_pool import (
    BackendAddress,
    Connection,
    ConnectionPool,
    UpstreamCounters,
    UpstreamLimits,
)
from ranvier_py.proxy.driver import Readiness, Steps
from ranvier_py.proxy.heads import FramedHead
from ranvier_py.proxy.http_values import NO_RESPONSE_FIELDS, Fields, HttpRequest, HttpResponseHead
from ranvier_py.proxy.spread import connect
from ranvier_py.proxy.transport import PlainTransport, TlsTransport

BODILESS = (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
"""Methods whose requests carry no content-length when their body is empty (RFC 9110 8.6)."""

DEAD_WITHIN_S = 1.0
"""A connection that the backend had closed before answers a request with a reset one round trip later: a third of a
second around the world, the rest is for a busy event loop. A backend that takes longer may have begun to work."""

UPGRADE: Fields = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
"""The fields that ask for a WebSocket, and that agree to one (RFC 6455 4)."""

INTERIM_MAX = 16
"""Most interim (1xx) answers before the final one; a backend that sends more is not going to answer."""


class Upstream:
    """The connections to all backends of a node. Without `tls`, https backends are verified against the system's
    authorities."""

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
        self.readiness: Readiness | None = None  # waits for the sockets of new connections instead of trio
        self._pools: dict[BackendAddress, ConnectionPool] = {}
        self.counters = UpstreamCounters()

    @property
    def limits(self) -> UpstreamLimits:
        return self._limits

    @limits.setter
    def limits(self, limits: UpstreamLimits) -> None:
        """Set the limits of every pool from now on."""
        self._limits = limits
        for pool in self._pools.values():
            pool.limits = limits

    def open(
        self,
        address: BackendAddress,
        request: HttpRequest,
        extra: Fields = (),
        sent: Callable[[], object] = lambda: None,
    ) -> Steps[Exchange]:
        """Send the request with `extra` fields, and return once the head of the answer is here. `sent` is called once,
        when nothing is left to do before the first wait. The time limit is the caller's. Raises NodeExhausted,
        ConnectFailed, UpstreamClosed, UpstreamGarbled."""
        pool = self._pool(address)
        parts = (request_head(pool, request, extra), request.body)
        connection = pool.take()
        if connection is None:
            sent()
        else:
            try:
                return (yield from self._ask(connection, request, parts, sent))
            except UpstreamClosed:
                if connection.answered or self._clock() - connection.used_at > DEAD_WITHIN_S:
                    raise
                self.counters.stale += 1
                if not may_repeat(request.method, request.path, request.body):
                    raise
                self.counters.replaced += 1
        connection = yield partial(self._connect, pool)
        return (yield from self._ask(connection, request, parts, lambda: None))

    def upgrade(self, address: BackendAddress, request: HttpRequest, extra: Fields) -> Steps[Exchange]:
        """Do the same with a request for a WebSocket, on a new connection. A 101 agrees to it."""
        pool = self._pool(address)
        connection = yield partial(self._connect, pool)
        parts = (request_head(pool, request, (*extra, *UPGRADE)), b"")
        return (yield from self._ask(connection, request, parts, lambda: None, upgrades=True))

    def _pool(self, address: BackendAddress) -> ConnectionPool:
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = ConnectionPool(address, self._limits, self.counters, self._clock)
        return pool

    def trust(self, tls: ssl.SSLContext | None) -> None:
        """Use this context for https backends. Connections made with another one serve no further request."""
        self._tls = tls
        for address in self._pools:
            if address.scheme == "https":
                self.renew(address)

    def keep(self, host: str, addresses: Collection[str]) -> None:
        """Take the addresses that a host's name has now; connections to others serve no further request."""
        for pool in self._pools.values():
            if pool.address.host == host:
                pool.keep(addresses)

    def renew(self, address: BackendAddress) -> None:
        """Use no connection to this backend any further: another process answers now."""
        if (pool := self._pools.get(address)) is not None:
            pool.renew()

    def forget(self, address: BackendAddress) -> None:
        """Close a removed backend's unused connections; those in use are closed when they are released."""
        pool = self._pools.pop(address, None)
        if pool is not None:
            pool.forgotten = True
            pool.prune(float("inf"))

    def prune(self) -> None:
        """Close connections that were unused for `idle_s`. Cheap; call it now and then."""
        before = self._clock() - self._limits.idle_s
        for pool in self._pools.values():
            pool.prune(before)

    def _close_unused(self) -> None:
        for pool in self._pools.values():
            pool.prune(float("inf"))

    def close(self) -> None:
        """Close all unused connections; the others are closed when they are released."""
        for address in list(self._pools):
            self.forget(address)

    def _ask(
        self,
        connection: Connection,
        request: HttpRequest,
        parts: tuple[bytes, bytes],
        sent: Callable[[], object],
        *,
        upgrades: bool = False,
    ) -> Steps[Exchange]:
        rest = connection.send(parts)
        whole, early = rest is None, b""  # whether all is sent, and what was answered meanwhile
        try:
            sent()
            if rest:
                whole, early = yield partial(send_rest, connection, rest)
            if not (whole or early) and connection.quiet():  # else it may have answered before it closed
                raise UpstreamClosed("the backend closed the connection")
            reading, data = yield from self._read_head(connection, request.method, early)
            if reading.head.status == 101 and not (upgrades and is_websocket(reading.head)):
                raise UpstreamGarbled("the backend wants another protocol")
        except BaseException:
            connection.close()
            raise
        return Exchange(connection, reading, data, whole=whole, dechunked=request.http_minor == 0)

    def _read_head(self, connection: Connection, method: bytes, data: bytes) -> Steps[tuple[FramedHead, bytes]]:
        """Return the final head, and the bytes after it. `data` has arrived already."""
        transport, bytes_max = connection.transport, self._limits.header_bytes_max
        for _ in range(INTERIM_MAX):
            while (end := data.find(b"\r\n\r\n") + 4) < 4 and len(data) <= bytes_max:
                try:
                    yield transport.readable
                    more = transport.receive_now()
                except OSError as error:
                    raise UpstreamClosed(f"the backend closed the connection: {error}") from error
                if more:
                    connection.answered = True
                    data += more
                elif more is not None:
                    raise UpstreamClosed("the backend closed the connection before it answered")
            if not 4 <= end <= bytes_max:
                raise UpstreamGarbled("the backend's answer has too large a head")
            reading = connection.read_head(data[:end], method)
            data = data[end:]
            status = reading.head.status
            if status >= 200 or status == 101:
                return reading, data
        raise UpstreamGarbled("the backend sends interim answers only")

    async def _connect(self, pool: ConnectionPool) -> Connection:
        address, processes = pool.address, pool.processes
        self.counters.connects += 1
        pool.turn += 1
        try:
            with trio.fail_after(self._limits.connect_s):
                stream = await connect(address.host, address.port, pool.turn)
                destination = pool.destination(peer_of(stream), processes)
                transport = await self._transport(stream, address)
        except trio.TooSlowError as error:
            self.counters.connect_failures += 1
            raise ConnectFailed(f"no connection to the backend within {self._limits.connect_s:g} s") from error
        except OSError as error:
            self.counters.connect_failures += 1
            if is_exhaustion(error):
                self.counters.exhausted += 1
                self._close_unused()
                raise NodeExhausted("this node cannot make another connection just now") from error
            raise ConnectFailed("cannot connect to the backend") from error  # the reason names hosts: only for the log
        self.counters.open += 1
        return Connection(transport, pool, destination)

    async def _transport(self, stream: trio.SocketStream, address: BackendAddress) -> PlainTransport:
        sock = socket.socket(fileno=stream.socket.detach())
        if address.scheme == "http":
            return PlainTransport(sock, self.readiness.watch(sock.fileno()) if self.readiness is not None else None)
        transport = TlsTransport(sock, self._tls or _default_tls(), address.tls_name or address.host)
        try:
            await transport.handshake()
        except BaseException:
            transport.close()
            raise
        return transport


class Exchange:
    """One answer being received: raw bytes in the backend's own framing (`dechunked`, for an HTTP/1.0 client: without
    that of chunks), and where they end. `head` is the last."""

    __slots__ = (
        *("_chunks", "_connection", "_left", "_pending", "_put_back", "_reusable"),
        *("chunks", "complete", "head", "readable", "transport"),
    )

    def __init__(
        self, connection: Connection, reading: FramedHead, pending: bytes, *, whole: bool, dechunked: bool
    ) -> None:
        self.head, self._left, reusable = reading
        self._connection: Connection | None = connection
        self.transport = connection.transport  # closed by `release`
        self.readable = connection.transport.readable  # what to wait for before `receive`
        self._pending = pending
        self._put_back = b""  # what was taken and is to be taken again
        self._reusable = reusable and whole
        self._chunks = self.chunks = ChunkedReader() if self.head.framing == "chunked" else None
        self.complete = False  # it ended as its framing promised; only then can the connection serve again
        if dechunked:
            self.unframe()
        if self.head.framing == "none":
            self._ended(len(pending))
            self._pending = b""

    def unframe(self) -> None:
        """Pass on the payload of chunks alone from now on."""
        if self.chunks is not None:
            self.chunks = None
            self.head = replace(self.head, framing="close", fields=NO_RESPONSE_FIELDS)

    def take(self) -> bytes:
        """Return the part of the body that came with the head. Call once, before `receive`. Raises UpstreamGarbled."""
        if self._put_back:
            data, self._put_back = self._put_back, b""
            return data
        data, self._pending = self._pending, b""
        return self._advance(data) if data else data

    def payload(self) -> bytes:
        """Take that part, without the frames of chunks."""
        data = self.take()
        return data if self.chunks is None else payload_of(data)

    def put_back(self, data: bytes) -> None:
        """Have the next `take` return these bytes, which are all that was taken and received; also after `release`."""
        self._put_back = data

    def receive(self) -> bytes | None:
        """Return the next bytes of the body; None if none are here. Raises UpstreamClosed, UpstreamGarbled."""
        try:
            data = self.transport.receive_now()
        except OSError as error:
            raise UpstreamClosed(f"the backend broke off its answer: {error}") from error
        return self._advance(data) if data else data if data is None else self._end_of_stream()

    def release(self) -> None:
        """Give the connection back, or close it if the answer was not read to its end, which ends the backend's work.
        May be called twice."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self.complete and self._reusable:
            connection.pool.put(connection)
        else:
            connection.close()

    def _advance(self, data: bytes) -> bytes:
        """Follow the framing through `data`; return what to pass on to the client."""
        chunks = self._chunks
        if chunks is not None:
            try:
                used = chunks.feed(data)
            except ChunkError as error:
                raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
            if chunks.done:
                self._ended(len(data) - used)
                data = data[:used]
            if self.head.framing == "close":
                data = chunks.payload(data)
        elif self.head.framing == "length":
            surplus = len(data) - self._left
            if surplus >= 0:
                data = data[: self._left]
                self._ended(surplus)
            self._left -= len(data)
        return data

    def _end_of_stream(self) -> bytes:
        self._reusable = False
        if self.head.framing != "close" or self._chunks is not None:
            raise UpstreamClosed("the backend closed the connection in the middle of its answer")
        self.complete = True
        return b""

    def _ended(self, surplus: int) -> None:
        self.complete = True
        if surplus:
            self._reusable = False
            if self._connection is not None:
                self._connection.pool.counters.surplus += 1


def is_websocket(head: HttpResponseHead) -> bool:
    """Whether a 101 agrees to what UPGRADE asks for."""
    return any(name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in head.headers)


def peer_of(stream: trio.SocketStream) -> str:
    """Return the address at the other end, without the interface of a link-local one. Raises OSError."""
    return str(stream.socket.getpeername()[0]).partition("%")[0]


async def send_rest(connection: Connection, rest: memoryview) -> tuple[bool, bytes]:
    """Send the rest of a request while listening, since a backend that refuses early need not read it. Returns whether
    it took everything, and what it answered meanwhile."""
    whole, early = False, bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_listen, connection, early, nursery.cancel_scope)
        with contextlib.suppress(OSError):  # what it answered before it closed is still to be read
            await connection.transport.send_rest(rest, _ignore)
            whole = True
        nursery.cancel_scope.cancel()
    return whole, bytes(early)


async def _listen(connection: Connection, early: bytearray, sending: trio.CancelScope) -> None:
    """Collect what is answered; cancel sending at more than interim answers, or at the end of the connection."""
    with contextlib.suppress(OSError):  # it is raised again when the head is read
        while is_interim(early) and len(early) <= connection.pool.limits.header_bytes_max:
            data = await connection.transport.receive()
            if not data:
                break
            connection.answered = True
            early += data
    sending.cancel()


def is_interim(data: bytes | bytearray) -> bool:
    """Whether these are only interim answers, the last one perhaps incomplete. No interim answer makes the rest of the
    request unwanted (RFC 9110 15.2), except a change of protocols."""
    heads = data.split(b"\r\n\r\n")
    return all(b"HTTP/1.1 1".startswith(head[:10]) and head[10:12] != b"01" for head in heads)


def _ignore(_count: int) -> None:
    pass


@functools.cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def request_head(pool: ConnectionPool, request: HttpRequest, extra: Fields) -> bytes:
    """Return the head for the backend: our framing, its own host, and all fields that the client may set."""
    lines = [request.method, b" ", pool.prefix, request.target, pool.host_line, request.fields.lines]
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    if request.body or request.method not in BODILESS:
        lines.append(b"content-length: %d\r\n\r\n" % len(request.body))
    else:
        lines.append(b"\r\n")
    return b"".join(lines)
