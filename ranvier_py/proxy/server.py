"""The public port: HTTP/1.1 on trio sockets, one request at a time per connection, every limit with a number.

One connection is one task: read a request, hand it to the handler, read the next. Bodies are read whole and lose their
transfer coding; what the handler sends leaves at once. Where framing is lost the client gets a 4xx and the connection
ends; an answer that cannot be finished ends in RST, never in something that looks whole. Requests that need no wait but
their backend's take the short path (`short_way`), while the task waits.

A handler either returns, having answered; or raises a RanvierError, which becomes the answer while nothing was sent and
cuts the connection afterwards; or is cancelled by a missed deadline or a client that left: see `Client.verdict`.
Invariant: a connection that waits for its next request keeps no body; `admission` has the others.
Cost: a request that arrives in one piece takes one wait, one read, one parse and one slice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from trio.lowlevel import wait_readable

from ranvier_py.core.errors import ClientGone, NodeBusy, RanvierError
from ranvier_py.proxy.admission import Admission
from ranvier_py.proxy.client_connection import Client
from ranvier_py.proxy.client_deadlines import Watchdog
from ranvier_py.proxy.error_answers import api_of, error_response
from ranvier_py.proxy.http_values import HttpRequest, Phase
from ranvier_py.proxy.readiness import Readiness
from ranvier_py.proxy.request_reader import RequestHead, ServerLimits, read_body, read_head
from ranvier_py.proxy.server_counters import Counters, ServerStatistics
from ranvier_py.proxy.short_path import Shortcuts, ShortWay
from ranvier_py.proxy.transport import PlainTransport, TlsTransport, WatchedTransport, listen

__all__ = ["Client", "DataServer", "Handler", "ServerLimits", "ServerStatistics", "error_response"]

logger = logging.getLogger(__name__)

Handler = Callable[[HttpRequest, Client], Awaitable[None]]

IDLE, HEADER = Phase.IDLE, Phase.HEADER

OUT_OF_CAPACITY = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
ACCEPT_PAUSE_S = 0.1
"""Pause after accept failed for want of descriptors or memory; trio.serve_listeners waits as long."""

ACCEPT_BATCH = 64
"""Connections taken before other tasks run again."""

REFUSALS_MAX = 64
"""Connections over the limit that are being told so at once; more are closed without a word."""

INTERNAL_ERROR = b'{"error":{"message":"internal error","type":"api_error","param":null,"code":"internal_error"}}'


def _count(table: dict[str, int], key: str) -> None:
    table[key] = table.get(key, 0) + 1


class DataServer:
    """Serves one address.

    Args:
        handler: answers one request; see the module's contract.
        tls: certificate and key; None for plain HTTP.
        short_way: serves what it can of the handler's requests without a task.

    `readiness` is what waits for sockets, those of others as well; it runs while this serves.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        *,
        tls: ssl.SSLContext | None = None,
        short_way: ShortWay | None = None,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._tls = tls
        self._counters = Counters()
        self._clients: dict[int, Client] = {}
        self._refusing = 0
        self._admission = Admission(limits, self._counters)
        self._listeners: list[socket.socket] = []
        self._accepting = trio.CancelScope()
        self._stopped = trio.Event()
        self._watchdog = Watchdog(limits.tick_s)
        self._shortcuts = Shortcuts(short_way, self._admission, self._answered) if short_way else None
        self.readiness = Readiness()

    def statistics(self) -> ServerStatistics:
        counters = self._counters
        return ServerStatistics(
            connections=len(self._clients),
            in_flight=self._admission.in_flight,
            in_flight_bytes=self._admission.in_flight_bytes,
            accepted=counters.accepted,
            refused=dict(counters.refused),
            requests=counters.requests,
            request_bytes=counters.request_bytes,
            response_bytes=counters.response_bytes + sum(client.bytes_sent for client in self._clients.values()),
            timeouts=dict(counters.timeouts),
            errors=dict(counters.errors),
            cut=counters.cut,
            client_gone=counters.client_gone,
        )

    # --- serving ----------------------------------------------------------------------------------------------------

    async def serve(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until drained. Reports the bound (host, port) pairs. Raises OSError if it cannot bind."""
        self._listeners = listeners = await listen(host, port, reuse_port=reuse_port)
        try:
            async with trio.open_nursery() as watchers:
                watchers.start_soon(self._watchdog.tick)
                watchers.start_soon(self.readiness.run)
                async with trio.open_nursery() as connections:
                    with self._accepting:
                        async with trio.open_nursery() as acceptors:
                            for listener in listeners:
                                acceptors.start_soon(self._accept, listener, connections)
                            task_status.started([listener.getsockname()[:2] for listener in listeners])
                watchers.cancel_scope.cancel()
        finally:
            self._close_listeners()
            self.readiness.close()
            self._stopped.set()

    async def drain(self, deadline_s: float) -> None:
        """Stop accepting, finish running requests, cut what is left after `deadline_s`; returns when all is closed."""
        self._admission.draining = True
        self._accepting.cancel()
        self._close_listeners()
        for client in list(self._clients.values()):
            client.must_close = True
            if client.phase is IDLE:
                client.cancel(None)
        with trio.move_on_after(deadline_s):
            await self._stopped.wait()
        for client in list(self._clients.values()):
            client.cancel(NodeBusy("the node is shutting down"))
        await self._stopped.wait()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            trio.lowlevel.notify_closing(listener)
            listener.close()
        self._listeners.clear()

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        while True:
            await wait_readable(listener)
            try:
                for _ in range(ACCEPT_BATCH):
                    sock, address = listener.accept()
                    self._admit(sock, address, connections)
            except BlockingIOError:
                pass
            except OSError as error:
                _count(self._counters.refused, "accept")
                if error.errno in OUT_OF_CAPACITY:
                    logger.warning("accept.failed error=%s pause_s=%s", error, ACCEPT_PAUSE_S)
                    await trio.sleep(ACCEPT_PAUSE_S)

    def _admit(self, sock: socket.socket, address: tuple[Any, ...], connections: trio.Nursery) -> None:
        self._counters.accepted += 1
        if len(self._clients) < self._limits.connections_max:
            watch = self.readiness.watch(sock.fileno(), readable=self._tls is None)
            transport = TlsTransport(sock, self._tls, watch=watch) if self._tls else WatchedTransport(sock, watch)
            peer = f"{address[0]}:{address[1]}"
            client = Client(transport, peer, self._limits.send_s, self._watchdog.alarm)
            watch.hung_up = client.hang_up
            self._clients[client.fd] = client
            self._watchdog.watch(client)
            connections.start_soon(self._run, client)
            return
        _count(self._counters.refused, "connections")
        if self._tls or self._refusing >= REFUSALS_MAX:
            sock.close()
            return
        self._refusing += 1
        connections.start_soon(
            self._refuse, Client(PlainTransport(sock), "", self._limits.send_s, self._watchdog.alarm)
        )

    async def _refuse(self, client: Client) -> None:
        try:
            client.must_close = True
            with contextlib.suppress(ClientGone, OSError):
                await client.respond_error(NodeBusy("too many connections"))
                await client.linger()
        finally:
            self._refusing -= 1
            client.transport.close()

    # --- one connection ---------------------------------------------------------------------------------------------

    async def _run(self, client: Client) -> None:
        whole = False
        try:
            with client.scope:
                whole = await self._converse(client)
            if client.scope.cancelled_caught:
                whole = await self._conclude(client)
        except (ClientGone, OSError):
            self._counters.client_gone += 1
        except RanvierError as error:  # after the first byte; the request's own log line tells it
            _count(self._counters.errors, error.code)
        except Exception:
            logger.exception("connection.failed peer=%s", client.peer)
        finally:
            self._forget(client, whole)

    def _forget(self, client: Client, whole: bool) -> None:
        self._watchdog.forget(client)
        del self._clients[client.fd]
        self._counters.response_bytes += client.bytes_sent
        if whole:
            client.transport.close()
        else:
            self._counters.cut += client.started
            client.transport.abort()

    async def _conclude(self, client: Client) -> bool:
        """The connection was cancelled: say why, if anything can still be said. True if it may end in peace."""
        if client.missed is not None:
            _count(self._counters.timeouts, client.missed.value)
        verdict = client.verdict
        if verdict is None:
            return True
        if isinstance(verdict, ClientGone):
            raise verdict
        if client.started:
            return False
        client.must_close = True
        with trio.move_on_after(self._limits.send_s):
            await self._answer_error(client, verdict)
            await client.linger()
        return True

    async def _converse(self, client: Client) -> bool:
        """Request after request. True if the connection may be closed in peace."""
        client.arm(HEADER if self._tls else IDLE, self._limits.header_s if self._tls else self._limits.idle_s)
        if isinstance(client.transport, TlsTransport):
            await client.transport.handshake()
        data = b""
        while True:
            client.started = client.head_only = False
            client.must_close = self._admission.draining
            if not data:
                client.arm(IDLE, self._limits.idle_s)
                transport = client.transport
                if self._shortcuts is not None and isinstance(transport, WatchedTransport):
                    data = await self._shortcuts.next(client, transport)
                else:
                    data = await transport.receive()
                if not data:
                    return True
            try:
                data = await self._serve_one(client, data)
            except RanvierError as error:
                if isinstance(error, ClientGone) or client.started:
                    raise
                client.must_close = True
                await self._answer_error(client, error)
                await client.linger()
                return True
            if client.must_close:
                return True
            if data:  # pipelined: let others have their turn
                await trio.lowlevel.checkpoint()

    async def _serve_one(self, client: Client, data: bytes) -> bytes:
        """Read one request that begins in `data`, and answer it. Returns the bytes after it.

        A RanvierError means that framing is lost; the caller answers and closes.
        """
        head = client.last_head
        end = data.find(b"\r\n\r\n") + 4
        if head is None or not head.again(data[:end], self._limits):
            head = RequestHead()
            if end < 4 or end > self._limits.header_bytes_max or data[0] in b"\r\n":
                data, end = await read_head(client, self._limits, head, data)
            else:
                head.feed(data[:end])
            head.finish(data[:end], self._limits)
            client.last_head = head
        request = head.request
        client.api = api_of(request.target)
        client.request_id = b""
        client.head_only = request.method == b"HEAD"
        rest = end + head.length
        whole = end <= rest <= len(data)
        try:
            self._admission.check(head.length)
        except NodeBusy as busy:
            if not whole:
                raise
            await self._answer_error(client, busy)
            return data[rest:]
        self._admission.in_flight += 1
        try:
            if whole:
                self._admission.keep(client, head.length)
                request.body = data[end:rest]
                data = data[rest:]
            else:
                request.body, data = await read_body(client, self._limits, head, data[end:], self._admission.keep)
            await self._handle(client, request)
        finally:
            request.body = b""  # `client.last_head` keeps the request
            self._admission.ended(client)
        return data

    async def _handle(self, client: Client, request: HttpRequest) -> None:
        counters = self._counters
        counters.requests += 1
        counters.request_bytes += len(request.body)
        if client.gone:
            raise ClientGone("the client closed the connection")
        if not request.keep_alive:
            client.must_close = True
        client.work()
        client.handling = True
        try:
            await self._answered(client, self._handler(request, client))
        finally:
            client.handling = False

    async def _answered(self, client: Client, handling: Awaitable[None]) -> None:
        """Wait for a handler, and answer where it fails before it did. Raises what must end the connection."""
        counters = self._counters
        try:
            await handling
            if not client.started:
                raise AssertionError("the handler did not answer")
        except RanvierError as error:
            if isinstance(error, ClientGone) or client.started:
                raise
            await self._answer_error(client, error)
        except Exception:
            logger.exception("request.failed peer=%s", client.peer)
            if client.started:
                raise
            client.must_close = True
            _count(counters.errors, "internal_error")
            await client.respond(500, INTERNAL_ERROR)

    async def _answer_error(self, client: Client, error: RanvierError) -> None:
        _count(self._counters.errors, error.code)
        await client.respond_error(error)
