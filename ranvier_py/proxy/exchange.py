"""One answer of a backend on its way: raw bytes in the backend's own framing, and where they end.

Rules: bytes go on as they arrived, in pieces as they arrived; bytes after the end of the message belong to nobody and
never leave; a body that ends too early raises. Clients of HTTP/1.0 do not know chunks: for them they are taken off.
Invariant: `complete` says that the message ended as its framing promised; only then can the connection serve again.
Cost: a microsecond per piece of a chunked body, less for one with a length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError
from ranvier_py.core.errors import UpstreamClosed, UpstreamGarbled
from ranvier_py.proxy.connection_pool import Connection
from ranvier_py.proxy.http_values import HttpResponseHead
from ranvier_py.proxy.response_reader import MarkingParser, chunk_parser


class Chunks(Protocol):
    """Follows a chunked body: `feed` says how many of these bytes belong to it, `done` that it has ended."""

    @property
    def done(self) -> bool: ...
    def feed(self, data: bytes) -> int: ...


class Exchange:
    """One answer on its way.

    Attributes:
        head: the final head.
        complete: the message ended properly; nothing more will be received.
        reused: whether the connection had served before.
        body_bytes: bytes of body handed out so far, framing included.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_left",
        "_pending",
        "_release",
        "_reusable",
        "body_bytes",
        "complete",
        "head",
    )

    def __init__(
        self,
        connection: Connection,
        head: HttpResponseHead,
        length: int,
        pending: bytes,
        chunks: Chunks | ChunkedReader | None,
        reusable: bool,
        release: Callable[[Connection, bool], None],
    ) -> None:
        self._connection: Connection | None = connection
        self._left = length
        self._pending = pending
        self._reusable = reusable
        self._chunks = chunks
        self._release = release
        self.head = head
        self.body_bytes = 0
        self.complete = False
        if head.framing == "none":
            self._ended(len(pending))
            self._pending = b""

    def mark_chunks(self) -> MarkingParser | None:
        """From the first byte of the body on, say where chunks begin and end; None where it has none."""
        if self._chunks is None or self.head.framing != "chunked":
            return None
        if not isinstance(self._chunks, MarkingParser):  # it has parsed the head, too
            self._chunks = chunk_parser()
        return self._chunks

    def take(self) -> bytes:
        """What of the body came with the head; b"" if nothing did. Never waits; once, before the first `receive`."""
        data, self._pending = self._pending, b""
        return self._advance(data) if data else data

    async def receive(self) -> bytes:
        """The next bytes of the body as they arrived; b"" at its end. Raises UpstreamClosed, UpstreamGarbled."""
        while not self.complete:
            if self._pending:
                data = self.take()
            else:
                assert self._connection is not None, "received from a released exchange"
                try:
                    data = await self._connection.transport.receive()
                except OSError as error:
                    raise UpstreamClosed(f"the backend broke off its answer: {error}") from error
                data = self._advance(data) if data else self._end_of_stream()
            if data:
                return data
        return b""

    def _advance(self, data: bytes) -> bytes:
        """Follow the framing through `data`; returns what may go on to the client."""
        chunks = self._chunks
        if chunks is not None:
            try:
                used = chunks.feed(data)
            except ChunkError as error:
                raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
            if chunks.done:
                self._ended(len(data) - used)
                data = data[:used]
            if isinstance(chunks, ChunkedReader):
                data = b"".join(chunks.payload or ())
                chunks.payload = []
        elif self.head.framing == "length":
            surplus = len(data) - self._left
            if surplus >= 0:
                data = data[: self._left]
                self._ended(surplus)
            self._left -= len(data)
        self.body_bytes += len(data)
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

    def release(self) -> None:
        """Give the connection back, or close it when the answer was not read to its end. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._release(connection, self.complete and self._reusable)
