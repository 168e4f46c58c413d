"""Reads the chunked transfer coding (RFC 9112 7.1) as a strict state machine: bytes in, the end of the message out.

llhttp parses our heads; this reads the bodies, because it can say *where* a message ends, and an answer whose end is
not known leaks into the next one. Rule: sizes are 1-16 hex digits without sign, blank or prefix. Lines end in CRLF,
never in a bare CR or LF. Extensions and trailers are bounded and ignored.
Invariant: once `done`, nothing more is consumed; a reader that raised must not be used again (test_chunked.py).
"""

from __future__ import annotations

import re
from functools import lru_cache

LINE_BYTES_MAX = 4096
"""Longest size line (extensions) or trailer line. No engine sends either; Node.js allows 16 kB of extensions in all."""

TRAILER_LINES_MAX = 64
"""Trailer lines of one message: fewer than the fields of a head, since nobody needs more."""

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
LAST_CHUNK = b"0\r\n\r\n"

SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;" + TOKEN + rb"(?:=(?:" + TOKEN + rb'|"[^"\\\r\n\0]*"))?)*\r\n')
DIGITS = re.compile(rb"[0-9A-Fa-f]{1,16}")
END = re.compile(rb"\r\n")  # of a chunk
TRAILER = re.compile(rb"(?:(" + TOKEN + rb"):[^\r\n\0]*)?\r\n")


class ChunkError(ValueError):
    """These bytes are not the chunked coding. The reader must not be used again."""


@lru_cache(1024)
def size_of(line: bytes) -> int:
    """Return the size that a line of plain digits gives its chunk; 0 for any other line."""
    return int(line, 16) if DIGITS.fullmatch(line) else 0


class ChunkedReader:
    """Follows one chunked message."""

    __slots__ = ("_held", "_pattern", "_trailers", "done", "inside", "last", "left", "spans", "total")

    def __init__(self) -> None:
        self.done = False  # the message has ended, trailers included
        self.total = 0  # bytes of payload announced so far, also those of the current chunk that did not arrive yet
        self.spans: list[tuple[int, int]] = []  # where in the last piece its payload is
        self.last = (
            b""  # the line of the last chunk, and what of the message stood behind it in its piece; empty before
        )
        self.inside = False  # whether the last piece ended within a chunk, or a line
        self.left = 0  # bytes of the current chunk that are still to come
        self._held = b""  # an unfinished line
        self._pattern = SIZE
        self._trailers = 0

    def feed(self, data: bytes) -> int:
        """Read on. Returns how many bytes of `data` are of this message: all until `done`. Raises ChunkError."""
        self.spans = spans = []
        held, at, find, begins = len(self._held), 0, data.find, data.startswith
        if self._pattern is SIZE and not held:  # whole chunks, as engines send nearly all of a stream
            while (line := find(b"\r\n", at, at + 18)) > 0 and (count := size_of(data[at:line])):
                end = line + 2 + count
                if not begins(b"\r\n", end):
                    break
                spans.append((line + 2, end))
                self.total += count
                at = end + 2
                if at == len(data):
                    self.inside = False
                    return at
        if self.done:
            return 0
        data, self._held = self._held + data, b""
        size = len(data)
        while at < size and not self.done:
            if self.left:
                end = min(at + self.left, size)
                spans.append((at - held, end - held))
                self.left -= end - at
                at = end
            elif (found := self._pattern.match(data, at)) is not None:
                self._read_line(found, data)
                at = found.end()
            else:
                self._hold(data[at : at + LINE_BYTES_MAX + 1])
                at = size
        self.inside = bool(self.left or self._held) or self._pattern is not SIZE
        if at < size:  # the rest is of the next message
            self.last = self.last[: at - size]
        return at - held

    def payload(self, data: bytes) -> bytes:
        """Return the payload of the last piece, which was `data`."""
        return b"".join([data[start:end] for start, end in self.spans])

    def _read_line(self, line: re.Match[bytes], data: bytes) -> None:
        if line.end() - line.start() > LINE_BYTES_MAX:
            raise ChunkError("a chunk's line is too long")
        if self._pattern is END:
            self._pattern = SIZE
        elif self._pattern is SIZE:
            self.left = int(line[1], 16)
            self.total += self.left
            if not self.left:
                self.last = data[line.start() :]
            self._pattern = END if self.left else TRAILER
        elif line[1] is None:
            self.done = True
        else:
            self._trailers += 1
            if self._trailers > TRAILER_LINES_MAX:
                raise ChunkError("too many trailers")

    def _hold(self, line: bytes) -> None:
        if len(line) > LINE_BYTES_MAX or b"\n" in line or (self._pattern is END and line != b"\r"):
            raise ChunkError("malformed chunk")
        self._held = line


def in_chunk(data: bytes) -> bytes:
    """Return data as a chunk; nothing for nothing, since an empty chunk is the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def payload_of(data: bytes) -> bytes:
    """Return the payload of a chunked body, of which the end may be missing; empty if it is malformed."""
    reader = ChunkedReader()
    try:
        reader.feed(data)
    except ChunkError:
        return b""
    return reader.payload(data)


def unchunked(raw: bytes) -> bytes:
    """Return the payload of a complete chunked body. Raises ChunkError, a ValueError, if it is not one."""
    reader = ChunkedReader()
    reader.feed(raw)
    if not reader.done:
        raise ChunkError("the chunked body is not complete")
    return reader.payload(raw)
