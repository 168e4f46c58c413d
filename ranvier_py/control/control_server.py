"""Serves an ASGI application with hypercorn on trio, such that nothing delays the end of the process.

hypercorn sends inside a shield without a deadline, so one client that stops reading keeps its `serve` from ending
(hypercorn 0.18, trio/tcp_server.py). Here every send has a deadline, and connections left after the grace period are
cut by closing their sockets. Rules: connections are bounded; the oldest is cut for a new one. Each carries one request,
since after an answer quart-trio cancels the task in which hypercorn would start the idle timer. Upgrades are not
followed. A header must be complete within the idle time. There is no access log: it would copy the environment.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

import h11
import hypercorn
import trio
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from ranvier_py.config.control_settings import ControlSettings
from ranvier_py.core.addresses import spelled
from ranvier_py.core.log_events import event
from ranvier_py.proxy.transport import PLAIN_HTTP_ANSWER, is_plain_http
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)

ControlStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]

CONNECTIONS_MAX = 256
"""Scrapers, probes and people. For one more the oldest is cut, so that idle connections keep nobody out."""

LINGER_S = 2.0  # as on the public port
LINGER_BYTES = 1 << 16

ACCEPT_PAUSE_S = 0.1  # after a failed accept, mostly for lack of descriptors; trio.serve_listeners waits as long


async def serve_app(
    app: Any,
    settings: ControlSettings,
    *,
    shutdown: trio.Event,
    faults: Faults | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `shutdown` is set or the task cancelled, then end within `close_grace_s`, whatever clients do.

    Reports the URL it listens on through `task_status`. Raises OSError if the address can't be bound.
    """
    listeners = await trio.open_tcp_listeners(settings.port, host=settings.host)
    connections = Connections(app, settings, faults or Faults())
    async with trio.open_nursery() as handlers:
        try:
            with ExitStack() as open_listeners:
                async with trio.open_nursery() as accepting:
                    for each in listeners:
                        open_listeners.callback(each.socket.close)
                        accept = partial(connections.accept, each, handlers)
                        accepting.start_soon(connections.faults.keep, "control_accept", accept)
                    scheme = "http" if settings.tls is None else "https"
                    task_status.started(f"{scheme}://{spelled(listeners[0].socket.getsockname()[:2])}")
                    await shutdown.wait()
                    accepting.cancel_scope.cancel()
            await connections.wait_closed()
        finally:
            connections.abort()
            handlers.cancel_scope.cancel()


class Connections:
    """The open connections of one control port. hypercorn's own `serve` can't close those that it shields."""

    def __init__(self, app: Any, limits: ControlSettings, faults: Faults) -> None:
        self.faults = faults
        self._config = hypercorn.Config()
        self._config.accesslog = None
        self._config.errorlog = log
        self._config.keep_alive_max_requests = 0
        self._config.keep_alive_timeout = limits.idle_timeout_s
        self._app = wrap_app(app, limits.body_bytes_max, "asgi")
        self._context = WorkerContext(None)
        self._limits = limits
        self._cut = 0
        self._open: dict[DeadlineStream, None] = {}
        self._all_closed = trio.Event()

    async def accept(self, listener: trio.SocketListener, handlers: trio.Nursery) -> None:
        """Take connections, until cancelled."""
        while True:
            try:
                accepted = await listener.accept()
            except OSError as error:
                log.warning(event("control.accept_failed", why=str(error)))
                await trio.sleep(ACCEPT_PAUSE_S)
            else:
                handlers.start_soon(self.faults.once, "control_connection", self.handle, accepted)

    async def handle(self, accepted: trio.SocketStream) -> None:
        """Serve one connection, from accept to close. Once hypercorn closes it, all its tasks are cancelled."""
        scope, tls = trio.CancelScope(), self._limits.tls
        bytes_of: ControlStream = accepted
        if tls is not None:
            bytes_of = trio.SSLStream(accepted, tls, server_side=True, https_compatible=True)
        stream = DeadlineStream(bytes_of, self._limits.send_timeout_s, on_close=scope.cancel)
        self._make_place()
        self._open[stream] = None
        server = PlainServer(self._app, self._config, self._context, ConnectionState({}), cast("Any", stream))
        try:
            with scope, suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                if isinstance(bytes_of, trio.SSLStream):
                    with trio.move_on_after(self._limits.idle_timeout_s) as limit:
                        await handshake(bytes_of, accepted)
                    if limit.cancelled_caught:
                        return
                await server
            if server.has_more_to_come:
                await linger(accepted)
        finally:
            self._open.pop(stream, None)
            accepted.socket.close()  # the kernel still delivers what was sent
            if not self._open:
                self._all_closed.set()

    def _make_place(self) -> None:
        """Cut the oldest connection if there are too many."""
        if len(self._open) < CONNECTIONS_MAX:
            return
        oldest = next(iter(self._open))
        del self._open[oldest]
        oldest.cut()
        self._cut += 1
        if self._cut & (self._cut - 1) == 0:  # 1, 2, 4 …: a flood gets a few lines
            log.warning(event("control.cut", cut=self._cut, most=CONNECTIONS_MAX))

    async def wait_closed(self) -> None:
        """Close idle connections, and wait for answers under way, at most `close_grace_s`."""
        self._all_closed = trio.Event()
        await self._context.terminated.set()
        if self._open:
            with trio.move_on_after(self._limits.close_grace_s):
                await self._all_closed.wait()

    def abort(self) -> None:
        """Close the sockets themselves, which ends even a shielded send."""
        for stream in list(self._open):
            stream.abort()


async def handshake(session: trio.SSLStream[trio.SocketStream], accepted: trio.SocketStream) -> None:
    """Begin a TLS session. Raises BrokenResourceError; who speaks plain HTTP is answered before."""
    try:
        await session.do_handshake()
    except trio.BrokenResourceError as error:
        if is_plain_http(error.__cause__):
            await accepted.send_all(PLAIN_HTTP_ANSWER)
            await linger(accepted)
        raise


async def linger(stream: trio.SocketStream) -> None:
    """Read what the client still sends: closing with unread bytes would make the kernel discard our answer."""
    with trio.move_on_after(LINGER_S), suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        stream.socket.shutdown(socket.SHUT_WR)
        while await stream.receive_some(LINGER_BYTES):
            pass


class PlainServer(TCPServer):
    """hypercorn's connection, limited to HTTP/1.1 whatever protocol the client asks for."""

    @property
    def has_more_to_come(self) -> bool:
        """Whether it was answered before its request was complete."""
        plain: Any = getattr(self, "protocol", None)
        return plain is not None and plain.connection.their_state in (h11.SEND_BODY, h11.ERROR)

    async def run(self) -> None:
        try:
            here, there = self.stream.socket.getsockname()[:2], self.stream.socket.getpeername()[:2]
            async with TaskGroup() as group:
                self._task_group = group
                state = ConnectionState(self.state)
                plain = PlainProtocol(
                    self.app, self.config, self.context, group, state, False, there, here, self.protocol_send
                )
                self.protocol = cast("Any", plain)
                await self.idle_task.restart(group, self._idle_timeout)
                await self._read_data()
        except OSError:  # the client is gone
            pass
        finally:
            await self._close()


class PlainProtocol(H11Protocol):
    """hypercorn's HTTP/1.1, which ignores a request to upgrade, as HTTP allows."""

    async def _check_protocol(self, event: Any) -> None:
        """Do nothing: hypercorn would change to HTTP/2 here."""

    async def _create_stream(self, request: Any) -> None:
        kept = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"upgrade"]
        plain = type(request)(
            method=request.method, target=request.target, headers=kept, http_version=request.http_version
        )
        await super()._create_stream(plain)


class DeadlineStream:
    """A stream whose sends have a deadline, even inside hypercorn's shield."""

    def __init__(
        self, stream: ControlStream, send_timeout_s: float, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.stream, self._on_close = stream, on_close
        self.socket = (stream if isinstance(stream, trio.SocketStream) else stream.transport_stream).socket
        self._send_timeout_s = send_timeout_s

    async def send_all(self, data: bytes) -> None:
        """Send all. Raises BrokenResourceError if the peer does not take it in time; the connection is closed then."""
        try:
            with trio.fail_after(self._send_timeout_s):
                await self.stream.send_all(data)
        except trio.TooSlowError as error:
            self.abort()
            raise trio.BrokenResourceError("the client does not read") from error
        except trio.BusyResourceError as error:  # hypercorn is closing it because of what the client has sent meanwhile
            raise trio.BrokenResourceError("the connection ends") from error

    async def receive_some(self, bytes_max: int) -> bytes | bytearray:
        return await self.stream.receive_some(bytes_max)

    async def send_eof(self) -> None:
        self._on_close()
        if isinstance(self.stream, trio.SocketStream):
            await self.stream.send_eof()

    async def aclose(self) -> None:
        """Tell the owner that hypercorn is done; the owner closes the socket."""
        self._on_close()

    def cut(self) -> None:
        """Close now, and end all tasks that serve it."""
        self.abort()
        self._on_close()

    def abort(self) -> None:
        """Close now. The kernel drops unsent bytes, too, instead of keeping them for a reader."""
        if self.socket.fileno() >= 0:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()
