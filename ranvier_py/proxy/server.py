"""The public port: HTTP/1.1 on trio sockets, one request at a time per connection, with a number for every limit.

Each connection is one task, which runs the steps of `conversation`. Connections above the limit get a 503. After any
failure `accept` is called again: at once if only one connection was lost, else after a pause.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import trio
from trio.lowlevel import wait_readable

from ranvier_py.core.errors import ClientGone, NodeBusy, NodeCut, RanvierError
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client, ConnectionOver, ServerCounters, Watchdog
from ranvier_py.proxy.conversation import Conversations, Handler
from ranvier_py.proxy.driver import Driver, Readiness
from ranvier_py.proxy.heads import ServerLimits
from ranvier_py.proxy.http_values import WaitPhase
from ranvier_py.proxy.transport import PlainTransport, TlsTransport, listen
from ranvier_py.supervision import Faults

logger = logging.getLogger(__name__)

LOST_IN_QUEUE = frozenset((errno.ECONNABORTED, errno.EPROTO, errno.EINTR))
"""Errors of accept about one connection, which has left the queue. After others it may still be in the queue."""

ACCEPT_PAUSE_S = 0.1
"""Pause after accept failed for lack of descriptors or memory; trio.serve_listeners waits as long."""

WARNING_GAP_S = 1.0
"""Least time between two log lines about clients that can't be let in; the counters count them all."""

ACCEPT_BATCH = 64
"""Connections accepted before other tasks run again. A full node accepts one for each that it closes."""

REFUSALS_MAX = 64
"""Connections above the limit that get a 503 at the same time; more are closed without an answer."""


class DataServer:
    """Serves one address. `report` is called with each request that is refused before the handler got it. `readiness`
    waits for sockets, also those of other parts, and `watchdog` watches deadlines; both run while this serves.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        *,
        tls: ssl.SSLContext | None = None,
        report: Callable[[RequestSummary], object] | None = None,
        ids: Iterator[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults or Faults()
        self.tls = tls  # may be replaced, for connections accepted from then on
        self.counters = ServerCounters()
        self.conversations = Conversations(handler, limits, self.counters, report, ids)
        self._clients: dict[int, Client] = {}
        self._closed = trio.lowlevel.ParkingLot()  # unparked whenever a connection has closed
        self._refusing = 0
        self._listeners: list[socket.socket] = []
        self._accepting = trio.CancelScope()
        self._stopped = trio.Event()
        self.watchdog = Watchdog(limits.tick_s, clock)
        self._warn_at = -math.inf
        self._unreported = 0
        self.readiness = Readiness(self._faults)

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
                watchers.start_soon(self._faults.keep, "watchdog", self.watchdog.tick)
                watchers.start_soon(self._faults.keep, "readiness", self.readiness.run)
                async with trio.open_nursery() as connections:
                    with self._accepting:
                        async with trio.open_nursery() as acceptors:
                            for listener in listeners:
                                acceptors.start_soon(self._faults.keep, "accept", self._accept, listener, connections)
                            task_status.started([listener.getsockname()[:2] for listener in listeners])
                watchers.cancel_scope.cancel()
        finally:
            self._close_listeners()
            self.readiness.close()
            self._stopped.set()

    async def drain(self, deadline_s: float) -> None:
        """Stop accepting, finish running requests, cut those left after `deadline_s`; return when all are closed."""
        self.conversations.draining = True
        self._accepting.cancel()
        self._close_listeners()
        for client in list(self._clients.values()):
            client.must_close = True
            if client.phase is WaitPhase.IDLE:
                client.interrupt(ConnectionOver())
        with trio.move_on_after(deadline_s):
            await self._stopped.wait()
        for client in list(self._clients.values()):
            client.interrupt(NodeCut("the node is shutting down"))
        await self._stopped.wait()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            trio.lowlevel.notify_closing(listener)
            listener.close()
        self._listeners.clear()

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        while True:
            await wait_readable(listener)
            if self._is_full:
                await self._displace()
            try:
                for _ in range(ACCEPT_BATCH):
                    sock, address = listener.accept()
                    self._admit(sock, address, connections)
                    if self._is_full:
                        break
            except BlockingIOError:
                pass
            except OSError as error:
                self._not_let_in("accept", str(error))
                if error.errno not in LOST_IN_QUEUE:
                    await trio.sleep(ACCEPT_PAUSE_S)

    def _admit(self, sock: socket.socket, address: tuple[Any, ...], connections: trio.Nursery) -> None:
        self.counters.accepted += 1
        if not self._is_full:
            watch = self.readiness.watch(sock.fileno(), readable=self.tls is None)
            transport = TlsTransport(sock, self.tls, watch=watch) if self.tls else PlainTransport(sock, watch)
            client = self._client(transport, f"{address[0]}:{address[1]}")
            watch.hung_up = client.hang_up
            client.driver = Driver(self.conversations.steps(client))
            self._clients[client.fd] = client
            self.counters.connections += 1
            self.watchdog.watch(client)
            connections.start_soon(self._faults.once, "connection", self._run, client, client.driver)
            return
        self._not_let_in("connections", f"{self.conversations.limits.connections_max} are open")
        if self.tls or self._refusing >= REFUSALS_MAX:
            sock.close()
            return
        self._refusing += 1
        connections.start_soon(self._faults.once, "refusal", self._refuse, self._client(PlainTransport(sock), ""))

    @property
    def is_open(self) -> bool:
        """Whether clients can connect."""
        return bool(self._listeners)

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self.conversations.limits.connections_max

    async def _displace(self) -> None:
        """Close the connection that has waited longest for a request, if there is one. Afterwards its descriptor is
        free, unless closing takes longer than the pause."""
        idle = self.conversations.idle
        if not idle:
            return
        idle.pop(next(iter(idle))).interrupt(ConnectionOver())
        self.counters.displaced += 1
        with trio.move_on_after(ACCEPT_PAUSE_S):
            await self._closed.park()

    def _not_let_in(self, kind: str, why: str) -> None:
        """Count a client that is not let in, and warn of all since the last warning."""
        self.counters.refused[kind] += 1
        self._unreported += 1
        now = self.watchdog.clock()
        if now >= self._warn_at:
            logger.warning(event("connections.refused", refused=self._unreported, why=why))
            self._warn_at, self._unreported = now + WARNING_GAP_S, 0

    def _client(self, transport: PlainTransport, peer: str) -> Client:
        return Client(
            transport, peer, self.conversations.limits, self.watchdog, self.counters, cors=self.conversations.cors
        )

    async def _refuse(self, client: Client) -> None:
        try:
            client.must_close = True
            with contextlib.suppress(ClientGone, OSError):
                client.respond_error(NodeBusy("too many connections"))
                await client.linger()
        finally:
            self._refusing -= 1
            client.transport.close()

    async def _run(self, client: Client, driver: Driver[bool]) -> None:
        whole = False
        try:
            whole = await driver.run()
        except (ClientGone, OSError):
            self.counters.client_gone += 1
        except RanvierError as error:  # after the answer's first byte; the request's log line has the error
            self.counters.errors[error.code] += 1
        finally:
            self._forget(client, whole)

    def _forget(self, client: Client, whole: bool) -> None:
        self.watchdog.forget(client)
        del self._clients[client.fd]
        client.driver = None  # since it refers to the client
        if client.last_head is not None:
            client.last_head.close()
        self.counters.connections -= 1
        if whole:
            client.transport.close()
        else:
            self.counters.cut += client.started
            client.transport.abort()
        self._closed.unpark_all()
