"""The byte transport under both directions of the data plane: a plain non-blocking socket, or trio's TLS stream.

Rules: the `_now` calls never wait. Before `receive_now` there is something to wait for, `readable`, so that others have
their turn and the wait can be interrupted. A transport belongs to one task, or to the steps of one connection.
Invariant: `close` and `abort` are synchronous and may be called twice: safe in a `finally` under cancellation.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import trio
from trio.lowlevel import wait_readable, wait_writable

from ranvier_py.proxy.driver import Steps, Wait
from ranvier_py.proxy.readiness import Watch

RECEIVE_BYTES = 65536
"""One read: as large as a typical chat, below glibc's mmap threshold (128 kB), so the buffer is recycled."""

LISTEN_BACKLOG = 1024
"""Connections the kernel holds while we are busy; Linux cuts it to net.core.somaxconn (4096 by default)."""

TLS_SEND_BYTES = 16_384
"""One send of an encrypted answer, after which its progress is known: the plain text of one record (RFC 8446 5.1)."""

ABORT = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST

Progress = Callable[[int], None]
"""Gets how many bytes just left, whenever some did."""


class PlainTransport:
    """A non-blocking TCP socket, and what waits for it: `readiness` where it is watched, trio elsewhere.

    Takes both over. `readable` is what to wait for before `receive_now`.
    """

    __slots__ = ("_recv", "_sendmsg", "_sock", "fd", "readable", "watch")

    readable: Wait

    def __init__(self, sock: socket.socket, watch: Watch | None = None) -> None:
        sock.setblocking(False)
        set_nodelay(sock)
        self._sock: socket.socket | trio.socket.SocketType = sock
        self._recv = sock.recv
        self._sendmsg = sock.sendmsg
        self.fd = sock.fileno()
        self.watch = watch
        self.readable = watch or partial(wait_readable, self.fd)

    async def receive(self) -> bytes:
        """The next bytes, waiting for them by trio; b"" when the peer has ended its side. Raises OSError."""
        while True:
            await self._wait()
            data = self.receive_now()
            if data is not None:  # None: the kernel dropped a segment with a bad checksum after waking us
                return data

    async def _wait(self) -> None:
        await wait_readable(self.fd)

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        """The next bytes if some are here, else None. Raises OSError."""
        try:
            data = self._recv(bytes_max)
        except BlockingIOError:
            data = None
        watch = self.watch
        if watch is not None:
            watch.ready = watch.ended or (data is not None and len(data) >= bytes_max)
        return data

    def send_now(self, parts: Sequence[bytes]) -> int:
        """Hand over as many bytes as fit without waiting. Raises OSError."""
        try:
            return self._sendmsg(parts)
        except BlockingIOError:
            return 0

    async def send_rest(self, rest: memoryview, progress: Progress) -> None:
        """Send all of `rest`, however long the peer takes. Raises OSError."""
        while rest:
            await wait_writable(self.fd)
            sent = self.send_now((rest,))  # type: ignore[arg-type]  # any buffer will do
            rest = rest[sent:]
            progress(sent)

    def end(self) -> None:
        """Have the peer know that nothing more comes, where that needs no wait."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self.fd >= 0:
            self.fd = -1
            if self.watch is not None:
                self.watch.close()
            self._sock.close()

    def abort(self) -> None:
        """Close so that the peer cannot take what it got for the whole."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self.close()


class TlsTransport(PlainTransport):
    """A TLS session over a non-blocking TCP socket, whose handshake the first call makes. Takes the socket over.

    What fails while it waits is raised by `receive_now`: who waits for two sides must know whose failure it was.
    """

    __slots__ = ("_failure", "_received", "_stream")

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(sock, watch)
        self._sock = wrapped = trio.socket.from_stdlib_socket(sock)
        self._received: bytes | None = None
        self._failure: OSError | None = None
        self.readable = self._wait
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

    async def _wait(self) -> None:
        if self._received or self._failure is not None:
            return
        try:
            with _mapped_errors():
                self._received = bytes(await self._stream.receive_some(RECEIVE_BYTES))
        except OSError as error:
            self._failure = error

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        data = self._received
        if data is None:
            if self._failure is not None:
                raise self._failure
            return None
        self._received = data[bytes_max:] or None
        return data[:bytes_max]

    def send_now(self, parts: Sequence[bytes]) -> int:  # noqa: ARG002  # TLS has to wait
        return 0

    async def send_rest(self, rest: memoryview, progress: Progress) -> None:
        for start in range(0, len(rest), TLS_SEND_BYTES):
            piece = rest[start : start + TLS_SEND_BYTES]
            with _mapped_errors():
                await self._stream.send_all(piece)
            progress(len(piece))

    def end(self) -> None:
        """Nothing: a close_notify would have to wait, and every message of ours says its own length."""


def received(transport: PlainTransport, bytes_max: int = RECEIVE_BYTES) -> Steps[bytes]:
    """Wait for the next bytes; b"" when the peer has ended its side. Raises OSError."""
    while True:
        yield transport.readable
        data = transport.receive_now(bytes_max)
        if data is not None:
            return data


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
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
