"""Reads the head of an answer, and follows its chunks.

llhttp parses strictly. Engines send the same head again and again, so each connection remembers its last one: the next
head that differs only in the digits of its content-length (proxy/http_values.py, `HeadShape`) is not parsed. Rules: a
head is remembered only if its meaning depends on nothing else: a final one with a body, not an answer to HEAD. All
answers with a remembered head share it, so it never changes.
Invariant: a remembered head reads as a parser would read it (test_response_reader.py).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import httptools

from ranvier_py.core.errors import UpstreamGarbled
from ranvier_py.proxy.http_values import (
    Headers,
    HeadShape,
    HttpResponseHead,
    ResponseFields,
    has_many_options,
    names_the_message,
)

EMPTY_LINE = b"\r\n\r\n"

FIRST_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9](?: [\t -~\x80-\xff]*)?\r\n")
"""RFC 9112 4. llhttp also accepts other protocols, statuses without a meaning, and control characters."""

CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
"""Brings a new parser to the state in which the chunks of any answer begin."""


class FramedHead(NamedTuple):
    """A head, the length of its body if that has one, whether the connection can serve again afterwards, and the parser
    that follows its chunks."""

    head: HttpResponseHead
    length: int
    reusable: bool
    chunks: ResponseParser | None


class KnownHead:
    """The last head of a connection, with its reading."""

    __slots__ = ("_lines", "_reading", "_shape")

    def __init__(self, reading: FramedHead, shape: HeadShape, lines: HeadShape) -> None:
        self._reading = reading
        self._shape = shape
        self._lines = lines

    @classmethod
    def of(cls, data: bytes, reading: FramedHead) -> KnownHead | None:
        """Remember a head; None if it must be parsed each time."""
        shape, lines = HeadShape.of(data), HeadShape.of(reading.head.fields.lines)
        has_length = reading.head.framing == "length"
        if reading.head.framing not in ("length", "chunked") or not (
            has_length is bool(shape.after) is bool(lines.after)
        ):
            return None
        return cls(reading, shape, lines)

    def again(self, data: bytes) -> FramedHead | None:
        """Return the reading of `data` if it is this head except for the digits of its length; else None."""
        digits = self._shape.digits_of(data)
        if digits is None:
            return None
        head, length, reusable, _ = self._reading
        if head.framing == "chunked":
            return FramedHead(head, 0, reusable, chunk_parser())
        if int(digits) == length:
            return self._reading
        return self._with_length(digits) if int(digits) else None  # an empty body has another framing

    def _with_length(self, digits: bytes) -> FramedHead:
        head = self._reading.head
        headers = [(name, digits if name.lower() == b"content-length" else value) for name, value in head.headers]
        lines = b"%b%b%b" % (self._lines.before, digits, self._lines.after)
        fields = ResponseFields(lines, head.fields.names_request, head.fields.readable)
        known = HttpResponseHead(head.status, head.reason, headers, head.framing, fields)
        return FramedHead(known, int(digits), self._reading.reusable, None)


def chunk_parser() -> ResponseParser:
    """Return a parser that is ready for the first chunk of a body."""
    parser = ResponseParser()
    parser.parse(CHUNKED_HEAD, b"POST")
    return parser


class ResponseParser:
    """Parses one response head and follows its chunks; the callbacks are httptools'.

    llhttp does not report where in its input a message ended. A chunked message ends right after an empty line, so the
    parser is fed up to each empty line: in one call for a piece without any, like most pieces of an event stream.

    Attributes:
        done: the chunked message has ended.
        inside: the last piece ended inside a chunk.
        chunks: how many chunks have ended since this was set to 0.
    """

    __slots__ = ("_complete", "_headers", "_parser", "_reason", "_reusable", "_split", "chunks", "done", "inside")

    def __init__(self) -> None:
        self.done = self.inside = False
        self.chunks = 0
        self._split = False  # the last piece ended within what may be an empty line
        self._headers: Headers = []
        self._reason = b""
        self._complete = False
        self._reusable = False
        self._parser: Any = httptools.HttpResponseParser(self)  # None once closed

    def close(self) -> None:
        """Drop the parser. It and this object refer to each other, which only a garbage collection would resolve."""
        self._parser = None

    def on_status(self, part: bytes) -> None:
        self._reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._complete = True
        self._reusable = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self.inside = True

    def on_chunk_complete(self) -> None:
        self.inside = False
        self.chunks += 1

    def on_message_complete(self) -> None:
        self.done = True

    def feed(self, data: bytes) -> int:
        """Follow the chunks. Returns how many bytes belong to this message: all of them until `done`.

        Raises UpstreamGarbled.
        """
        try:
            at = self._feed_split(data) if self._split else 0
            while not self.done and at < len(data):
                found = data.find(EMPTY_LINE, max(0, at - 2))
                end = len(data) if found < 0 else found + 4
                self._parser.feed_data(data[at:end])
                at = end
        except httptools.HttpParserError as error:
            raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
        self._split = data[-1:] in (b"\r", b"\n")
        return at

    def _feed_split(self, data: bytes) -> int:
        """Feed single bytes, since an empty line may have begun in the last piece. Returns how many were used."""
        for at in range(min(3, len(data))):
            self._parser.feed_data(data[at : at + 1])
            if self.done:
                return at + 1
        return min(3, len(data))

    def read_head(self, data: bytes, method: bytes) -> FramedHead:
        """Read the head `data`; this parser then follows its chunks, if it has any. Raises UpstreamGarbled."""
        try:
            reading = self.parse(data, method)
        except UpstreamGarbled:
            self.close()
            raise
        if reading.chunks is None:
            self.close()
        return reading

    def parse(self, data: bytes, method: bytes) -> FramedHead:
        """Read the head `data`, and keep the parser open in any case. Raises UpstreamGarbled."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the caller decides whether it asked for that
            pass
        except httptools.HttpParserError as error:
            raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
        if not self._complete or b"\r\n " in data or b"\r\n\t" in data or FIRST_LINE.match(data) is None:
            raise UpstreamGarbled("the backend's answer has a malformed head")
        self.done = False  # it may be set for a head without its body
        status = self._parser.get_status_code()
        if has_many_options(self._headers):
            raise UpstreamGarbled("the backend's connection names too many options")
        framing, length = self._framing(status, method)
        head = HttpResponseHead(status, self._reason, self._headers, framing)
        return FramedHead(head, length, self._reusable, self if framing == "chunked" else None)

    def _framing(self, status: int, method: bytes) -> tuple[str, int]:
        framing, length = "close", 0
        for name, value in self._headers:
            key = name.lower()
            if key == b"transfer-encoding":
                # one line and one coding, since we did not offer others; HTTP/1.0 has none (RFC 9112 6.1)
                if framing != "close" or value.lower() != b"chunked" or self._parser.get_http_version() != "1.1":
                    raise UpstreamGarbled("the backend uses an unknown transfer coding")
                framing = "chunked"
            elif key == b"content-length":
                framing, length = "length", int(value)
            elif key == b"connection" and names_the_message(value):
                raise UpstreamGarbled("the backend's connection names a field that is not the connection's")
        if status == 101:
            return "upgraded", 0
        if status < 200 or status in (204, 304) or method == b"HEAD" or (framing == "length" and length == 0):
            return "none", 0
        return framing, length
