"""The byte transport of both sides of the data plane: a plain non-blocking socket, or a TLS session over one.

Rules: the `_now` calls never wait. Wait for `readable` before `receive_now`, so that others have their turn. A
transport belongs to one task, or to one connection's steps.
Invariant: `close` and `abort` never wait and may be called twice: safe in a `finally` (test_driver.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from functools import partial

import trio
from trio.lowlevel import checkpoint, wait_readable, wait_writable

from ranvier_py.proxy.driver import Steps, Wait, Watch

RECEIVE_BYTES = 65536
"""Bytes of one read: as large as a typical chat, below glibc's mmap threshold (128 kB), so the buffer is reused."""

LISTEN_BACKLOG = 1024
"""Connections that the kernel holds while we are busy; Linux cuts it to net.core.somaxconn (4096 by default)."""

TLS_RECORD_BYTES = 16_384
"""Plain bytes encrypted before we look at how many left: those of one record (RFC 8446 5.1)."""

TLS_TURN_BYTES = 4 * TLS_RECORD_BYTES
"""Most plain bytes that are encrypted in one turn of the event loop."""

TLS_HELD_BYTES_MAX = 4 * TLS_RECORD_BYTES
"""Most unsent encrypted bytes: a record, and replies that reading calls for (RFC 8446 4.6.3). More is an error."""

ABORT = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST

Progress = Callable[[int], None]
"""Called with the number of bytes whenever some have left."""


class PlainTransport:
    """A non-blocking TCP socket, which this owns. `readable` is what to wait for before `receive_now`. With a `watch`,
    `readiness` waits for the socket; otherwise trio does."""

    __slots__ = ("_recv", "_sendmsg", "_sock", "fd", "readable", "watch")

    readable: Wait

    def __init__(self, sock: socket.socket, watch: Watch | None = None) -> None:
        sock.setblocking(False)
        set_nodelay(sock)
        self._sock = sock
        self._recv = sock.recv
        self._sendmsg = sock.sendmsg
        self.fd = sock.fileno()
        self.watch = watch
        self.readable = watch or partial(wait_readable, self.fd)

    @property
    def holds_more(self) -> bool:
        """Whether bytes from the peer may be here that the socket does not show as readable."""
        return False

    async def receive(self) -> bytes:
        """Wait with trio for the next bytes; b"" if the peer has ended its side. Raises OSError."""
        while True:
            await self._wait()
            data = self.receive_now()
            if data is not None:  # None: the kernel dropped a bad segment after it woke us
                return data

    async def _wait(self) -> None:
        await wait_readable(self.fd)

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        """Return the next bytes if some are here, else None. Raises OSError."""
        try:
            data = self._recv(bytes_max)
            may_go_on = len(data) == bytes_max
        except BlockingIOError:
            data, may_go_on = None, False
        if self.watch is not None:
            self.watch.ready = may_go_on or self.watch.ended
        return data

    def send_now(self, parts: Sequence[bytes]) -> int:
        """Give the kernel as many bytes as it takes now. Returns how many. Raises OSError."""
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
        """Signal the end of our side to the peer, as far as that needs no wait."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self.fd >= 0:
            self.fd = -1
            if self.watch is not None:
                self.watch.close()
            self._sock.close()

    def abort(self) -> None:
        """Close so that the peer can't take what it received for the whole."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            PlainTransport.close(self)  # without a close_notify, even with TLS


PLAIN_HTTP = (
    b'{"error":{"message":"this port speaks TLS: use https://","type":"invalid_request_error","param":null,'
    b'"code":"tls_required"}}'
)
PLAIN_HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    % (len(PLAIN_HTTP), PLAIN_HTTP)
)
"""What a client gets that speaks HTTP to a port of TLS."""


PLAIN_LINGER_S = 1.0


def is_plain_http(error: BaseException | None) -> bool:
    """Whether a handshake failed because a request in plain HTTP came instead, as OpenSSL recognises it."""
    return isinstance(error, ssl.SSLError) and error.reason in ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")


class TlsTransport(PlainTransport):
    """A TLS session over a non-blocking TCP socket, which this owns. Call `handshake` first. The session is in memory,
    so waits concern only the socket: one task may send while another one reads, and a wait that is cancelled breaks
    nothing. Bytes that `send_now` has encrypted count as sent once all of them have left, so a caller for whom fewer
    counted than it offered must offer the rest again before anything else."""

    __slots__ = ("_encrypted", "_encrypted_from", "_holds_more", "_incoming", "_outgoing", "_session")

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(sock, watch)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._encrypted = bytearray()  # encrypted bytes that have not left
        self._encrypted_from = 0  # plain bytes of the last offer that are encrypted but not counted as sent
        self._holds_more = False
        self.readable = self._wait

    async def handshake(self) -> None:
        """Complete the handshake. Raises OSError (ssl.SSLError is one)."""
        is_over = False
        while not is_over:
            try:
                self._session.do_handshake()
                is_over = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    if is_plain_http(error):
                        await self._refuse_plain_http()
                    else:
                        self._flushed()  # sends the alert that names the error
                raise
            while not self._flushed():
                await wait_writable(self.fd)
            if not is_over:
                await wait_readable(self.fd)
                self._take_in()
        self._holds_more = self._incoming.pending > 0

    async def _refuse_plain_http(self) -> None:
        """Answer in plain HTTP, and read what still comes: unread bytes would make the kernel discard the answer."""
        super().send_now((PLAIN_HTTP_ANSWER,))
        PlainTransport.end(self)
        with trio.move_on_after(PLAIN_LINGER_S):
            while super().receive_now() != b"":
                await wait_readable(self.fd)

    @property
    def holds_more(self) -> bool:
        return self._holds_more

    async def _wait(self) -> None:
        if self._holds_more:
            await checkpoint()
        else:
            await wait_readable(self.fd)

    def receive_now(self, bytes_max: int = RECEIVE_BYTES) -> bytes | None:
        data = self._decrypted(bytes_max)
        if data is None and self._take_in():
            data = self._decrypted(bytes_max)
        if self._outgoing.pending and not self._flushed() and len(self._encrypted) > TLS_HELD_BYTES_MAX:
            raise ConnectionError("the peer takes nothing of what it calls for")
        return data

    def _take_in(self) -> bool:
        """Move what the socket has into the session. Returns whether that was something, or an end."""
        data = super().receive_now()
        if data:
            self._incoming.write(data)
        elif data is not None:
            self._incoming.write_eof()
        return data is not None

    def _decrypted(self, bytes_max: int) -> bytes | None:
        try:
            data = self._session.read(bytes_max)
        except ssl.SSLWantReadError:
            self._holds_more = False
            return None
        except ssl.SSLEOFError:  # many peers end without close_notify; HTTP's framing shows whether all came
            data = b""
        except ssl.SSLZeroReturnError:  # the peer's close_notify, after ours
            data = b""
        self._holds_more = self._session.pending() > 0 or self._incoming.pending > 0
        return data

    def send_now(self, parts: Sequence[bytes]) -> int:
        if not self._flushed():
            return 0
        offered = memoryview(b"".join(part[:TLS_TURN_BYTES] for part in parts))[:TLS_TURN_BYTES]
        sent, self._encrypted_from = self._encrypted_from, 0
        while sent < len(offered):
            count = self._session.write(offered[sent : sent + TLS_RECORD_BYTES])
            if not self._flushed():
                self._encrypted_from = count
                break
            sent += count
        return sent

    def _flushed(self) -> bool:
        """Send encrypted bytes as far as the kernel takes them. Returns whether all have left. Raises OSError."""
        if self._outgoing.pending:
            self._encrypted += self._outgoing.read()
        if self._encrypted:
            sent = super().send_now((self._encrypted,))  # type: ignore[arg-type]  # any buffer will do
            del self._encrypted[:sent]
        return not self._encrypted

    def end(self) -> None:
        """Send a close_notify, without which the peer can't tell the end of an answer from a cut. What has arrived is
        dropped: unwrap also reads, and nothing can be received any more if it finds data."""
        with contextlib.suppress(OSError):
            while self._decrypted(RECEIVE_BYTES):
                pass
        with contextlib.suppress(OSError):  # unwrap raises if the peer has not ended, too
            self._session.unwrap()
        with contextlib.suppress(OSError):
            self._flushed()

    def close(self) -> None:
        if self.fd >= 0:
            self.end()
        super().close()


def received(transport: PlainTransport, bytes_max: int = RECEIVE_BYTES) -> Steps[bytes]:
    """Wait for the next bytes; b"" if the peer has ended its side. Raises OSError."""
    while True:
        yield transport.readable
        data = transport.receive_now(bytes_max)
        if data is not None:
            return data


def set_nodelay(sock: socket.socket) -> None:
    """Send small pieces at once: a streamed token must not wait for the acknowledgement of the one before."""
    with contextlib.suppress(OSError):  # not a TCP socket
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def listen(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Return bound, listening, non-blocking sockets for every address of `host`. Raises OSError. With port 0 the kernel
    picks one, and every address gets the same."""
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
