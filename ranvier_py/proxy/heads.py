"""Reads the heads of requests and answers: with llhttp, or without parsing if a head is like the last one.

llhttp parses strictly. Clients and engines send the same head again and again, so each connection remembers its last
one: the next that differs only in the digits of its content-length (`HeadShape`) is not parsed. Rules: an answer's head
is remembered only if its meaning depends on nothing else: a final one with a body, not an answer to HEAD. All answers
with a remembered head share it, so it never changes.
Invariant: a remembered head reads as a parser would read it (test_heads.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import httptools

from ranvier_py.core.errors import (
    BadRequest,
    BodyTooLarge,
    ExpectationFailed,
    HeaderTooLarge,
    MethodNotAllowed,
    UpstreamGarbled,
)
from ranvier_py.core.options import Options, option, seconds
from ranvier_py.proxy.admission.request_target import canonical_target, origin_form
from ranvier_py.proxy.http_values import (
    NO_REQUEST,
    Headers,
    HttpRequest,
    HttpResponseHead,
    has_many_options,
    names_the_message,
)

KEPT_HEAD_BYTES_MAX = 8192
"""Longest request head that is kept for the next one, in about three copies: bearer tokens and traces need less."""

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})\r\n", re.IGNORECASE)

FIRST_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9](?: [\t -~\x80-\xff]*)?\r\n")
"""RFC 9112 4. llhttp also accepts other protocols, statuses without a meaning, and control characters."""


class HeadShape(NamedTuple):
    """A head without the digits of its content-length: the bytes before and after them, or all bytes and none."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, head: bytes) -> HeadShape:
        """Return the shape of a head that a strict parser accepted, which has at most one content-length line."""
        found = CONTENT_LENGTH.search(head)
        return cls(head, b"") if found is None else cls(head[: found.start(1)], head[found.end(1) :])

    def digits_of(self, head: bytes) -> bytes | None:
        """Return the digits of a head of this shape, b"" if the shape has none; None if the head is another one."""
        before, after = self
        if not after:
            return b"" if head == before else None
        if not head.startswith(before):
            return None
        digits = head[len(before) :].removesuffix(after)  # other ends are no digits
        return digits if digits.isdigit() and len(digits) <= 18 else None


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerLimits(Options):
    """Bounds of the public port."""

    SECTION = "Limits"

    header_s: float = seconds(10.0, "A request's header must be complete in this time.", key="header_timeout_s")
    body_window_s: float = seconds(  # Apache's mod_reqtimeout looks at bodies over 20 s, too
        20.0,
        "While a body arrives, it must bring body_bytes_min and a 32nd of what is here of it in each such time, "
        "or its end: 408 otherwise.",
    )
    body_bytes_min: int = option(  # 5 kB/s: less than any line but GPRS brings
        100_000, "Least that a body brings in each body_window_s.", least=1
    )
    body_s: float = seconds(  # 64 MiB at 1 Mbit/s; at the least rate alone they would be in memory for hours
        600.0, "A whole body must be here in this time: 408 otherwise.", key="body_timeout_s"
    )
    idle_s: float = seconds(  # nginx's keepalive_timeout
        75.0, "A connection without a request is closed after this.", key="idle_timeout_s"
    )
    send_window_s: float = seconds(  # a phone that changes its cell is back by then
        30.0,
        "While something waits to be sent to a client, it must take send_bytes_min, or all, in each such time, or "
        "is cut off. Time in which an engine is waited for does not count.",
    )
    send_bytes_min: int = option(  # 0.5 kB/s, Apache's least rate for slow clients: speech is 0.6 as an event stream
        16_384, "Least that a client takes in each send_window_s.", least=1
    )
    header_bytes_max: int = option(  # Envoy's max_request_headers_kb is 60; bearer tokens and traces need more than 8
        65_536, "Largest request header: 431 above.", least=1024
    )
    body_bytes_max: int = option(  # 1 M tokens of text are 4 MB; images in base64 take the rest
        64 * 2**20, "Largest request body: 413 above.", least=1024
    )
    connections_max: int = option(  # of about 20 kB each
        10_000,
        "Client connections at once. Above, who has waited longest for a request is closed; 503 if nobody waits.",
        least=1,
    )
    in_flight_max: int = option(4096, "Requests that are served at once; further ones get 503.", least=1)
    in_flight_bytes_max: int = option(  # 4096 chats of 256 kB, 60 k tokens each, or 16 of the largest bodies
        2**30,
        "Bodies of all requests at once, each kept until its answer ends; 503 above. At least body_bytes_max. With "
        "several workers, of each.",
        least=1024,
    )
    headers_max: int = option(100, least=1)  # Envoy's and Apache's (LimitRequestFields) default
    tick_s: float = seconds(0.25)  # a missed deadline may be noticed so much later


class RequestHead:
    """Parses one request head; the callbacks are httptools'."""

    __slots__ = (
        *("_complete", "_length_at", "_parser", "_shape", "_target"),
        *("headers", "is_large", "length", "request", "waits"),
    )

    def __init__(self) -> None:
        self.headers: Headers = []
        self.length = 0  # bytes of the body; -1 for chunks
        self.waits = self.is_large = False  # for a 100 before it sends the body; not to be kept after its request
        self.request = NO_REQUEST  # without its body, once the head is complete
        self._shape: HeadShape | None = None  # set by `finish`
        self._target = b""
        self._length_at = 0  # index of the content-length in `headers`, if there is one
        self._complete = False
        self._parser: Any = httptools.HttpRequestParser(self)  # None once closed

    def close(self) -> None:
        """Drop the parser. It and this object refer to each other, which only a garbage collection would resolve."""
        self._parser = None

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._complete = True

    def feed(self, data: bytes) -> None:
        """Parse more bytes. Raises BadRequest."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # CONNECT, or an upgrade that we may ignore (RFC 9110 7.8)
            pass
        except httptools.HttpParserError as error:
            raise BadRequest(f"malformed request: {error}") from error

    def finish(self, head: bytes, limits: ServerLimits) -> HttpRequest:
        """Complete the request once all of `head` was fed. Raises RequestError."""
        self.is_large = len(head) > KEPT_HEAD_BYTES_MAX
        if not self._complete or b"\r\n " in head or b"\r\n\t" in head:
            raise BadRequest("malformed request head")
        line_end = head.find(b"\r\n")
        version = head[line_end - 8 : line_end]
        if version not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise BadRequest("only HTTP/1.1 and HTTP/1.0 are served here")
        minor = version[7] - 48
        too_many = len(self.headers) > limits.headers_max  # to read what they mean would take long
        many_options = not too_many and has_many_options(self.headers)
        headers = [] if too_many or many_options else self.headers
        self.request = HttpRequest(
            method=self._parser.get_method(),
            target=self._target,
            headers=headers,
            body=b"",
            http_minor=minor,
            keep_alive=minor == 1,
        )
        if too_many:
            raise HeaderTooLarge(f"more than {limits.headers_max} header fields")
        if many_options:
            raise BadRequest("connection names too many options")
        self._read_fields(minor)
        self._check_line()
        if self.length > limits.body_bytes_max:
            raise BodyTooLarge(f"the body is larger than {limits.body_bytes_max} bytes")
        self._shape = HeadShape.of(head)
        self.close()
        return self.request

    def again(self, head: bytes, limits: ServerLimits) -> bool:
        """Whether `head` is the finished one except for its length; if so, `request` and `length` are of this head from
        now on. A client sends the same head with each of its requests, so most heads are not parsed."""
        digits = self._shape.digits_of(head) if self._shape is not None else None
        if digits is None:
            return False
        if digits and int(digits) != self.length:
            if int(digits) > limits.body_bytes_max:
                return False
            self.length = int(digits)
            self.headers[self._length_at] = (self.headers[self._length_at][0], digits)
        elif self.length > limits.body_bytes_max:  # the limit has changed
            return False
        return True

    def _check_line(self) -> None:
        request = self.request
        if request.method in (b"CONNECT", b"TRACE"):
            raise MethodNotAllowed(f"{request.method.decode()} is not served here")
        if request.target[:7].lower() == b"http://":  # absolute-form, as to a proxy: RFC 9112 3.2.2
            request.target = origin_form(request.target, request.method)
        if request.target[:1] != b"/" and not (request.target == b"*" and request.method == b"OPTIONS"):
            raise BadRequest("the request target must be a path")
        request.direct(canonical_target(request.target))

    def _read_fields(self, minor: int) -> None:
        hosts = 0
        for place, (name, value) in enumerate(self.headers):
            key = name.lower()
            if key == b"content-length":
                self._length_at = place
                self._read_length(value)
            elif key == b"host":
                hosts += 1
            elif key == b"connection":
                self._read_connection(value)
            elif key == b"transfer-encoding":
                self._read_coding(value, minor)
            elif key == b"expect":
                self._read_expectation(value, minor)
        if hosts != 1 and (minor or hosts):
            raise BadRequest("the request must have exactly one Host header")

    def _read_length(self, value: bytes) -> None:
        if not value.isdigit() or len(value) > 18:
            raise BadRequest("malformed content-length")
        self.length = int(value)

    def _read_coding(self, value: bytes, minor: int) -> None:
        if value.lower() != b"chunked" or self.length or not minor:
            raise BadRequest("the only transfer coding served here is chunked")
        self.length = -1

    def _read_connection(self, value: bytes) -> None:
        if names_the_message(value):
            raise BadRequest("connection names a field that is not the connection's")
        if b"close" in [option.strip() for option in value.lower().split(b",")]:
            self.request.keep_alive = False

    def _read_expectation(self, value: bytes, minor: int) -> None:
        if value.lower() != b"100-continue":
            raise ExpectationFailed("the only expectation served here is 100-continue")
        self.waits = minor == 1


# --- answers ----------------------------------------------------------------------------------------------------------


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
