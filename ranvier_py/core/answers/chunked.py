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
END = re.compile(rb"\r\n")  # of a chunk
TRAILER = re.compile(rb"(?:([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[^\r\n\0]*)?\r\n")


class ChunkError(ValueError):
    """These bytes are not the chunked coding. The reader must not be used again."""


class ChunkedReader:
    """Follows one chunked message."""

    __slots__ = ("_held", "_left", "_pattern", "_trailers", "chunks", "done", "inside", "last", "spans", "total")

    def __init__(self) -> None:
        self.done = False  # the message has ended, trailers included
        self.total = 0  # bytes of payload announced so far, also those of the current chunk that did not arrive yet
        self.chunks = 0  # that have ended since this was set to 0
        self.spans: list[tuple[int, int]] = []  # where in the last piece its payload is
        self.last = b""  # the line of the last chunk, and what stood behind it in its piece; empty before
        self.inside = False  # whether the last piece ended within a chunk, or a line
        self._left = 0  # bytes of the current chunk that are still to come
        self._held = b""  # an unfinished line
        self._pattern = SIZE
        self._trailers = 0

    @property
    def came(self) -> int:
        """Bytes of payload that have arrived."""
        return self.total - self._left

    def feed(self, data: bytes) -> int:
        """Read on. Returns how many bytes of `data` are of this message: all until `done`. Raises ChunkError."""
        if self._pattern is SIZE and (line := SIZE.match(data)) is not None and not self._held:
            at, size = line.end(), len(data)
            if at + int(line[1], 16) == size - 2 > at and data.endswith(b"\r\n") and at <= LINE_BYTES_MAX:
                self.total += size - 2 - at  # one whole chunk, as engines send nearly all of a stream
                self.chunks += 1
                self.spans, self.inside = [(at, size - 2)], False
                return size
        self.spans = spans = []
        if self.done:
            return 0
        held = len(self._held)
        data, self._held = self._held + data, b""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._left:
                end = min(at + self._left, size)
                spans.append((at - held, end - held))
                self._left -= end - at
                at = end
                if not self._left and data.startswith(b"\r\n", at):
                    at += 2
                    self.chunks += 1
                    self._pattern = SIZE
            elif (line := self._pattern.match(data, at)) is not None:
                self._read_line(line, data)
                at = line.end()
            else:
                self._hold(data[at : at + LINE_BYTES_MAX + 1])
                at = size
        self.inside = bool(self._left or self._held) or self._pattern is not SIZE
        return at - held

    def payload(self, data: bytes) -> bytes:
        """Return the payload of the last piece, which was `data`."""
        return b"".join([data[start:end] for start, end in self.spans])

    def _read_line(self, line: re.Match[bytes], data: bytes) -> None:
        if line.end() - line.start() > LINE_BYTES_MAX:
            raise ChunkError("a chunk's line is too long")
        if self._pattern is END:
            self.chunks += 1
            self._pattern = SIZE
        elif self._pattern is SIZE:
            self._left = int(line[1], 16)
            self.total += self._left
            if not self._left:
                self.last = data[line.start() :]
            self._pattern = END if self._left else TRAILER
        elif line[1] is None:
            self.done = True
        else:
            self._trailers += 1
            if self._trailers > TRAILER_LINES_MAX:
                raise ChunkError("too many trailers")

    def _hold(self, line: bytes) -> None:
        is_odd = self._pattern is END and line != b"\r"
        if is_odd or len(line) > LINE_BYTES_MAX or b"\n" in line:
            raise ChunkError("malformed chunk")
        self._held = line


def unchunked(raw: bytes) -> bytes:
    """Return the payload of a complete chunked body. Raises ChunkError, a ValueError, if it is not one."""
    reader = ChunkedReader()
    reader.feed(raw)
    if not reader.done:
        raise ChunkError("the chunked body is not complete")
    return reader.payload(raw)
