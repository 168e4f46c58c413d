"""Reads the chunked transfer coding (RFC 9112 7.1) as a strict state machine: bytes in, the end of the message out.

llhttp parses our heads; this reads the bodies, because it can say *where* a message ends, and an answer whose end is
not known leaks into the next one. Rule: sizes are 1-16 hex digits without sign, blank or prefix. Lines end in CRLF,
never in a bare CR or LF. Extensions and trailers are bounded and ignored.
Invariant: once `done`, nothing more is consumed; a reader that raised must not be used again (test_chunked.py).
"""

from __future__ import annotations

import re

LINE_BYTES_MAX = 4096
"""Longest size line (extensions) or trailer line. No engine sends either; Node.js allows 16 kB of extensions in all."""

TRAILER_LINES_MAX = 64
"""Trailer lines of one message: fewer than the fields of a head, since nobody needs more."""

SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\r\n\0]*)?\r\n")
NEXT_SIZE = re.compile(rb"\r\n([0-9A-Fa-f]{1,16})(?:;[^\r\n\0]*)?\r\n")
TRAILER = re.compile(rb"(?:([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[^\r\n\0]*)?\r\n")


class ChunkError(ValueError):
    """These bytes are not the chunked coding. The reader must not be used again."""


class ChunkedReader:
    """Follows one chunked message.

    Attributes:
        done: the message has ended, trailers included.
        total: bytes of payload announced so far, also those of the current chunk that did not arrive yet.
        payload: pieces of payload in order, when `keep` was asked for; the caller may take and clear them.
    """

    __slots__ = ("_held", "_left", "_pattern", "_trailers", "done", "payload", "total")

    def __init__(self, *, keep: bool = False) -> None:
        self.done = False
        self.total = 0
        self.payload: list[bytes] | None = [] if keep else None
        self._left = 0  # bytes of the current chunk that are still to come
        self._held = b""  # an unfinished line
        self._pattern = SIZE
        self._trailers = 0

    @property
    def came(self) -> int:
        """Bytes of payload that have arrived."""
        return self.total - self._left

    def feed(self, data: bytes) -> int:
        """Read on. Returns how many bytes of `data` belong to this message: all of them until `done`.

        Raises ChunkError.
        """
        if self.done:
            return 0
        held = len(self._held)
        if held:
            data = self._held + data
            self._held = b""
        return self._advance(data) - held

    def _advance(self, data: bytes) -> int:
        at, size = 0, len(data)
        while at < size:
            if self._left:
                at = self._read_payload(data, at)
                continue
            line = self._pattern.match(data, at)
            if line is None:
                self._hold(data[at : at + LINE_BYTES_MAX + 1])
                return size
            if line.end() - at > LINE_BYTES_MAX:
                raise ChunkError("a chunk's line is too long")
            at = line.end()
            if self._pattern is not TRAILER:
                self._begin_chunk(int(line[1], 16))
            elif line[1] is None:
                self.done = True
                return at
            else:
                self._count_trailer()
        return at

    def _begin_chunk(self, size: int) -> None:
        self._left = size
        self.total += size
        self._pattern = NEXT_SIZE if size else TRAILER

    def _read_payload(self, data: bytes, at: int) -> int:
        end = min(at + self._left, len(data))
        self._left -= end - at
        if self.payload is not None:
            self.payload.append(data[at:end])
        return end

    def _hold(self, line: bytes) -> None:
        start = 2 if self._pattern is NEXT_SIZE else 0  # the CRLF that ends the chunk before
        if len(line) > LINE_BYTES_MAX or b"\n" in line[start:] or not b"\r\n".startswith(line[:start]):
            raise ChunkError("malformed chunk")
        self._held = line

    def _count_trailer(self) -> None:
        self._trailers += 1
        if self._trailers > TRAILER_LINES_MAX:
            raise ChunkError("too many trailers")
