"""The byte transport under both directions of the data plane: a plain non-blocking socket, or trio's TLS stream.

Rules: every `receive` waits, so a relay that loops on it always lets other tasks run and can always be cancelled; the
`_now` calls never wait. trio's own socket calls take a trip through the scheduler even when they need not wait; these
do not, which is worth a third of a request's time. A transport belongs to one task.
Invariant: `close` and `abort` are synchronous and may be called twice: safe in a `finally` under cancellation.
Cost: one epoll_ctl and one recv per received piece, one sendmsg per piece sent.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from trio.lowlevel import wait_readable, wait_writable

from ranvier_py.proxy.readiness import Watch

RECEIVE_BYTES = 65536
"""One read: as large as a typical chat, below glibc's mmap threshold (128 kB), so the buffer is recycled."""

LISTEN_BACKLOG = 1024
"""Connections the kernel holds while we are busy; Linux cuts it to net.core.somaxconn (4096 by default)."""

ABORT = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST

Progress = Callable[[int], None]
"""Told how many bytes just left, whenever some did."""


class Transport(Protocol):
    """What the server and the upstream need of a connection."""

    @property
    def fd(self) -> int: ...

    @property
    def watch(self) -> Watch | None:
        """What tells of it where `readiness` waits for it."""

    async def receive(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        """The next bytes; b"" when the peer has ended its side. Raises OSError."""

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        """The next bytes if some are here, else None. Raises OSError."""

    def send_now(self, parts: Sequence[bytes]) -> int:
        """Hand over as many bytes as fit without waiting. Raises OSError."""

    async def send_rest(self, rest: memoryview, progress: Progress) -> None:
        """Send all of `rest`, however long the peer takes. Raises OSError."""

    def end(self) -> None:
        """Tell the peer that nothing more comes, where the transport can say so without waiting."""

    def close(self) -> None: ...

    def abort(self) -> None:
        """Close so that the peer cannot take what it got for the whole."""


class SocketOwner:
    """How all transports end: at once, without waiting, as often as one likes. Takes socket and watch over."""

    __slots__ = ("_sock", "fd", "watch")

    def __init__(self, sock: socket.socket | trio.socket.SocketType, watch: Watch | None = None) -> None:
        self._sock = sock
        self.watch = watch
        self.fd = sock.fileno()

    def close(self) -> None:
        if self.fd >= 0:
            self.fd = -1
            if self.watch is not None:
                self.watch.close()
            self._sock.close()

    def abort(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self.close()


class PlainTransport(SocketOwner):
    """A non-blocking TCP socket. Takes it over."""

    __slots__ = ("_recv", "_sendmsg", "_shutdown")

    def __init__(self, sock: socket.socket, watch: Watch | None = None) -> None:
        sock.setblocking(False)
        set_nodelay(sock)
        super().__init__(sock, watch)
        self._recv = sock.recv
        self._sendmsg = sock.sendmsg
        self._shutdown = sock.shutdown

    async def receive(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        while True:
            await wait_readable(self.fd)
            try:
                return self._recv(bytes_max)
            except BlockingIOError:  # the kernel dropped a segment with a bad checksum after waking us
                continue

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        try:
            return self._recv(bytes_max)
        except BlockingIOError:
            return None

    def send_now(self, parts: Sequence[bytes]) -> int:
        try:
            return self._sendmsg(parts)
        except BlockingIOError:
            return 0

    async def send_rest(self, rest: memoryview, progress: Progress) -> None:
        while rest:
            await wait_writable(self.fd)
            sent = self.send_now((rest,))  # type: ignore[arg-type]  # any buffer will do
            rest = rest[sent:]
            progress(sent)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._shutdown(socket.SHUT_WR)


class WatchedTransport(PlainTransport):
    """The same, but `readiness` waits for it: that costs no system call for each wait."""

    __slots__ = ("_read", "_unread", "_wait")

    watch: Watch

    def __init__(self, sock: socket.socket, watch: Watch) -> None:
        super().__init__(sock, watch)
        self._wait = watch.wait
        self._read = watch.read
        self._unread = b""

    async def receive(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        while True:
            await self._wait()
            data = self.receive_now(bytes_max)
            if data is not None:
                return data

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        try:
            data = self._recv(bytes_max)
        except BlockingIOError:
            self._read(all_of_it=True)
            return None
        self._read(all_of_it=len(data) < bytes_max)
        return data

    def unread(self, data: bytes) -> None:
        """Give back what was read last: it comes again with the next call."""
        self._unread = data


class TlsTransport(SocketOwner):
    """A TLS session over a non-blocking TCP socket, whose handshake the first call makes. Takes the socket over."""

    __slots__ = ("_stream",)

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        sock.setblocking(False)
        set_nodelay(sock)
        wrapped = trio.socket.from_stdlib_socket(sock)
        super().__init__(wrapped, watch)
        self._stream = trio.SSLStream(
            trio.SocketStream(wrapped),
            context,
            server_hostname=server_hostname,
            server_side=server_hostname is None,
            https_compatible=True,  # peers close without close_notify; our framing says what is complete
        )

    async def handshake(self) -> None:
        """Raises OSError (ssl.SSLError is one)."""
        with _mapped_errors():
            await self._stream.do_handshake()

    async def receive(self, bytes_max: int = RECEIVE_BYTES) -> bytes:
        with _mapped_errors():
            return bytes(await self._stream.receive_some(bytes_max))

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:  # noqa: ARG002  # the Protocol's
        return None

    def send_now(self, parts: Sequence[bytes]) -> int:  # noqa: ARG002  # the Protocol's
        return 0

    async def send_rest(self, rest: memoryview, progress: Progress) -> None:
        for start in range(0, len(rest), RECEIVE_BYTES):
            piece = rest[start : start + RECEIVE_BYTES]
            with _mapped_errors():
                await self._stream.send_all(piece)
            progress(len(piece))

    def end(self) -> None:
        """Nothing: a close_notify would have to wait, and every message of ours says its own length."""


@contextlib.contextmanager
def _mapped_errors():  # type: ignore[no-untyped-def]
    """trio's names for a broken connection, as the OSError that a plain socket would raise."""
    try:
        yield
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise ConnectionError(str(error.__cause__ or error)) from error


def set_nodelay(sock: socket.socket) -> None:
    """Send small pieces at once: a streamed token must not wait for the acknowledgement of the one before."""
    with contextlib.suppress(OSError):  # not a TCP socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def listen(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Bound, listening, non-blocking sockets for every address of `host`. Raises OSError.

    With port 0 the kernel picks one, and every address gets the same.
    """
    found = await trio.socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            listeners.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = listeners[0].getsockname()[1] if port == 0 and len(listeners) > 1 else address[1]
            sock.bind((address[0], chosen, *address[2:]))
            sock.listen(LISTEN_BACKLOG)
    except BaseException:
        for sock in listeners:
            sock.close()
        raise
    return listeners
