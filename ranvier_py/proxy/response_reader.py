"""Reads the head of an answer.

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
    has_many_options,
    names_the_message,
)

FIRST_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9](?: [\t -~\x80-\xff]*)?\r\n")
"""RFC 9112 4. llhttp also accepts other protocols, statuses without a meaning, and control characters."""


class FramedHead(NamedTuple):
    """A head, the length of its body if that has one, and whether the connection can serve again afterwards."""

    head: HttpResponseHead
    length: int
    reusable: bool


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
        if self._reading.head.framing == "chunked" or int(digits) == self._reading.length:
            return self._reading
        return self._with_length(digits) if int(digits) else None  # an empty body has another framing

    def _with_length(self, digits: bytes) -> FramedHead:
        head = self._reading.head
        headers = [(name, digits if name.lower() == b"content-length" else value) for name, value in head.headers]
        lines = b"%b%b%b" % (self._lines.before, digits, self._lines.after)
        fields = head.fields._replace(lines=lines)
        known = HttpResponseHead(head.status, head.reason, headers, head.framing, fields)
        return FramedHead(known, int(digits), self._reading.reusable)


class ResponseParser:
    """Parses one response head; the callbacks are httptools'."""

    __slots__ = ("_complete", "_headers", "_parser", "_reason", "_reusable")

    def __init__(self) -> None:
        self._headers: Headers = []
        self._reason = b""
        self._complete = False
        self._reusable = False
        self._parser: Any = httptools.HttpResponseParser(self)  # None once closed

    def on_status(self, part: bytes) -> None:
        self._reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._complete = True
        self._reusable = self._parser.should_keep_alive()

    def read_head(self, data: bytes, method: bytes) -> FramedHead:
        """Read the head `data`, once. Raises UpstreamGarbled."""
        try:
            return self._read(data, method)
        finally:
            self._parser = None  # it and this object refer to each other, which only a garbage collection would resolve

    def _read(self, data: bytes, method: bytes) -> FramedHead:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the caller decides whether it asked for that
            pass
        except httptools.HttpParserError as error:
            raise UpstreamGarbled(f"the backend's answer is not HTTP: {error}") from error
        if not self._complete or b"\r\n " in data or b"\r\n\t" in data or FIRST_LINE.match(data) is None:
            raise UpstreamGarbled("the backend's answer has a malformed head")
        status = self._parser.get_status_code()
        if has_many_options(self._headers):
            raise UpstreamGarbled("the backend's connection names too many options")
        framing, length = self._framing(status, method)
        head = HttpResponseHead(status, self._reason, self._headers, framing)
        return FramedHead(head, length, self._reusable)

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
