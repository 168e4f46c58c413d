"""HTTP messages as values, which the client's side, the backend's side and the pipeline exchange.

The fields of a head are evaluated once: the lines to pass on, and what the pipeline needs to know, are kept with the
head (`RequestFields`, `ResponseFields`), and are reused for every later head of the connection that is alike (`heads`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

from ranvier_py.core.clients.known_clients import NAMING_FIELDS, OTHER, SUB_AGENT_FIELDS, client_of, session_of
from ranvier_py.core.prompts.reserved_members import has_address
from ranvier_py.core.response_cache.cache_keys import forbids_sharing
from ranvier_py.core.routing.processes.ranks import RANK_FIELD
from ranvier_py.core.routing.retries import is_inference
from ranvier_py.core.tracing.trace_context import TRACE_FIELDS

Headers = list[tuple[bytes, bytes]]
"""Field lines as they arrived: original spelling, original order, duplicates kept."""

Fields = Sequence[tuple[bytes, bytes]]
"""Field lines to add: any sequence, also ()."""

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""RFC 9110 7.6.1: fields of one connection, never passed on. Nor are fields that `Connection` names."""

OF_THE_MESSAGE = frozenset(
    (b"content-length", b"transfer-encoding", b"host", b"content-encoding", b"content-type", b"content-range")
)
"""Fields that define where a message ends, who receives it and how to read its content. `Connection` may not name them:
without them it would be another message."""

CONTROL_KEY = b"x-ranvier-control-key"
"""Field by which an operator asks to see how his request was routed."""

WRITTEN_BY_US = frozenset((b"host", b"content-length", b"expect", CONTROL_KEY))
"""Request fields besides the hop-by-hop ones that are not passed on: we write our own, meet the expectation ourselves,
and keep the control key to ourselves."""

REQUEST_ID = b"x-request-id"
ROUTER_FIELDS = frozenset(
    (
        b"x-prefiller-host-port",
        b"x-prefiller-url",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
        b"x-data-parallel-host-port",
        RANK_FIELD,
    )
)
"""Fields by which routers say where an engine, or a process beside it, gets cached blocks from, or which rank computes:
vLLM's and llm-d's."""

LOCATING = frozenset((b"location", b"content-location", b"refresh", b"link"))
"""Fields of answers that may name a host (RFC 9110 10.2.2 and 8.7, RFC 8288)."""

PERSONAL = frozenset((b"set-cookie", b"set-cookie2"))
"""Fields of answers that only the client gets that asked."""

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class WaitPhase(Enum):
    """What a client connection waits for. It determines what a missed deadline means."""

    IDLE = "idle"  # no byte of the next request yet: closed without an answer
    HEADER = "header"  # 408
    BODY = "body"  # 408
    FIRST_BYTE = "first_byte"  # the backend has not begun to answer: 504
    STALL = "stall"  # the backend stopped in the middle of its answer: cut
    SEND = "send"  # the client does not read: cut
    WORK = "work"  # nothing, since we are working: no deadline


class RequestFields(NamedTuple):
    """What matters of a request's fields: the lines to pass on to a backend, and what the pipeline needs to know.
    `readable`: the body is not compressed; only an engine can read one that is. `multipart`: the body is a form.
    `cache_control`: all its directives. `session`: the client's name for its session, or for the one that began it.
    `client`: the client's name in `known_clients`. `upgrades`: it asks to become a WebSocket. `sub_agent`: it comes
    from a sub-agent that the session began. `reserved`: what only routers may set, which is not among the lines; a
    request id with an engine's address in it is one of them, and no id. `is_anthropic`: it names a version of their
    API. `origin`: of the page that a browser shows. `trace`: which trace it belongs to; not among the lines."""

    lines: bytes
    request_id: bytes | None
    authorized: bool
    readable: bool
    multipart: bool
    control_key: bytes | None
    cache_control: bytes
    session: bytes = b""
    client: str = OTHER
    upgrades: bool = False
    sub_agent: bool = False
    reserved: Fields = ()
    is_anthropic: bool = False
    origin: bytes = b""
    trace: Fields = ()

    @classmethod
    def of(cls, headers: Headers) -> RequestFields:
        dropped, reserved = dropped_fields(headers) | WRITTEN_BY_US, list[tuple[bytes, bytes]]()
        request_id = control_key = None
        authorized, readable, cache_control = False, True, b""
        kinds, lines, naming = set(), list[bytes](), dict[bytes, bytes]()
        wanted = set[bytes]()  # what the request names to change the protocol
        trace = list[tuple[bytes, bytes]]()
        for name, value in headers:
            key = name.lower()
            if key in ROUTER_FIELDS if key != REQUEST_ID else has_address(value.decode("latin-1")):
                reserved.append((name, value))
                continue
            if key in TRACE_FIELDS and key not in dropped:
                trace.append((name, value))
                continue
            if key not in dropped:
                lines += (name, b": ", value, b"\r\n")
            if key == REQUEST_ID and request_id is None:
                request_id = value
            elif key == b"authorization":
                authorized = True
            elif key == b"content-encoding":
                readable = False
            elif key == b"content-type":
                kinds.add(value.lower().startswith(b"multipart/"))
            elif key == CONTROL_KEY:
                control_key = value
            elif key == b"cache-control":
                cache_control += value + b","
            elif key in NAMING_FIELDS or key in (b"anthropic-version", b"origin"):
                naming[key] = value
            elif key == b"upgrade" or (key == b"connection" and b"upgrade" in options_of(value)):
                wanted.update((key,) if key == b"connection" else options_of(value))
        multipart = kinds == {True}
        upgrades = wanted >= {b"connection", b"websocket"}
        last = session_of(naming), client_of(naming), upgrades, not SUB_AGENT_FIELDS.isdisjoint(naming), reserved
        first = b"".join(lines), request_id, authorized, readable, multipart, control_key, cache_control
        return cls(*first, *last, b"anthropic-version" in naming, naming.get(b"origin", b""), trace)


NO_REQUEST_FIELDS = RequestFields(
    lines=b"", request_id=None, authorized=False, readable=True, multipart=False, control_key=None, cache_control=b""
)


class ResponseFields(NamedTuple):
    """What matters of an answer's head: the lines to pass on to the client, and what the pipeline needs to know.
    `lines` are the status line and the fields that do not belong to one connection. `readable`: the body is not
    compressed; a compressed one is relayed but not learned. `locates`: some fields may say where something is.
    `streams`: it is a stream of events. `kind`: its content type. `personal`: some fields are for one client alone.
    `private`: the engine wants nobody else to have it."""

    lines: bytes
    names_request: bool
    readable: bool
    locates: bool = False
    streams: bool = False
    kind: bytes = b""
    personal: bool = False
    private: bool = False

    @classmethod
    def of(cls, head: HttpResponseHead) -> ResponseFields:
        dropped = dropped_fields(head.headers)
        if head.framing == "chunked":  # the body is passed on in its chunks
            dropped -= {b"transfer-encoding"}
        elif head.status == 426:  # must name the protocol that it wants (RFC 9110 15.5.22)
            dropped -= {b"upgrade"}
        elif head.status == 204:  # has no body; a client that believes a length would wait for one
            dropped |= {b"content-length"}
        names_request, readable, locates, streams, personal = False, True, False, False, False
        kind = control = b""
        lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
        for name, value in head.headers:
            key = name.lower()
            locates |= key in LOCATING
            personal |= key in PERSONAL
            if key not in dropped:
                lines += (name, b": ", value, b"\r\n")
            if key == b"x-request-id":
                names_request = True
            elif key == b"content-encoding":
                readable = value.lower() == b"identity"
            elif key == b"content-type":
                kind, streams = kind or value, b"text/event-stream" in value.lower()
            elif key == b"cache-control":
                control += value + b","
        private = control != b"" and forbids_sharing(control)
        return cls(b"".join(lines), names_request, readable, locates, streams, kind, personal, private)


NO_RESPONSE_FIELDS = ResponseFields(b"", False, True)


CONNECTION_OPTIONS_MAX = 64
"""Commas in the Connection fields of a message: those of a whole head take milliseconds to read."""


def has_many_options(headers: Headers) -> bool:
    """Whether the Connection fields name more than anybody needs. Such a head is refused before it is read."""
    commas = sum([value.count(b",") for name, value in headers if len(name) == 10 and name.lower() == b"connection"])
    return commas > CONNECTION_OPTIONS_MAX


def names_the_message(connection: bytes) -> bool:
    """Whether a Connection field names fields that the message needs."""
    return not OF_THE_MESSAGE.isdisjoint(options_of(connection))


def options_of(connection: bytes) -> Sequence[bytes]:
    """Return the options of a Connection field, in lower case."""
    return [option.strip() for option in connection.lower().split(b",")]


def dropped_fields(headers: Headers) -> frozenset[bytes]:
    """Return the lower-case names of the fields that belong to one connection (RFC 9110 7.6.1)."""
    dropped = HOP_BY_HOP
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection":
            lowered = value.lower()
            if lowered not in (b"keep-alive", b"close"):
                dropped = dropped.union(options_of(lowered))
    return dropped


@dataclass(slots=True)
class HttpRequest:
    """One complete request, as parsed. `target` is in origin-form; `body` has no transfer coding any more. `fields` are
    what matters of `headers`, and `path` is the target without its query: made here unless both are known."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes = b""
    http_minor: int = 1
    keep_alive: bool = True
    fields: RequestFields = NO_REQUEST_FIELDS
    path: bytes = b""
    computes: bool = field(init=False)  # it asks for inference, so its outcome shows how well its engine is

    def __post_init__(self) -> None:
        if self.fields is NO_REQUEST_FIELDS:
            self.fields, self.path = RequestFields.of(self.headers), self.target.partition(b"?")[0]
        self.computes = is_inference(self.method, self.path)

    def direct(self, target: bytes) -> None:
        """Take another form of its target."""
        self.target, self.path = target, target.partition(b"?")[0]
        self.computes = is_inference(self.method, self.path)

    def with_body(self, body: bytes) -> HttpRequest:
        """Return the same request with another body."""
        known = self.http_minor, self.keep_alive, self.fields, self.path
        return HttpRequest(self.method, self.target, self.headers, body, *known)


NO_REQUEST = HttpRequest(b"", b"", [])
"""Stands for a request whose head was not read."""


@dataclass(slots=True)
class HttpResponseHead:
    """Status line and fields of a backend's answer; its body follows as raw bytes in the backend's own framing. Several
    answers may share one head, so it never changes. `framing` is how the body ends: "length", "chunked", "close" (with
    the connection) or "none"; "upgraded" if what follows is not HTTP. `fields` are made unless known."""

    status: int
    reason: bytes
    headers: Headers = field(default_factory=list)
    framing: str = "none"
    fields: ResponseFields = NO_RESPONSE_FIELDS

    def __post_init__(self) -> None:
        if self.fields is NO_RESPONSE_FIELDS:
            self.fields = ResponseFields.of(self)


def own_head(
    status: int, headers: Fields, content_type: bytes, body_bytes: int | None, more: bytes, *, close: bool
) -> bytes:
    """Return the head of an answer of our own, with its blank line. `body_bytes` is None for a body in chunks, `more`
    are whole lines."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b"")), more]
    lines += [b"%b: %b\r\n" % field for field in headers]
    if status not in (204, 304):
        length = b"transfer-encoding: chunked" if body_bytes is None else b"content-length: %d" % body_bytes
        lines.append(b"content-type: %b\r\n%b\r\n" % (content_type, length))
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


LIMIT_LINE = re.compile(rb"^(?:x|anthropic)-ratelimit-[^\r\n]*\r\n", re.IGNORECASE | re.MULTILINE)


def response_head(head: HttpResponseHead, extra: Fields, more: bytes = b"", *, close: bool) -> bytes:
    """Return a backend's head for the client: status and fields unaltered without hop-by-hop ones, then `more` lines
    and `extra`. `more` show what is left of limits: a provider's own, of the account that all share, would stand beside
    them. `transfer-encoding` stays if the body is passed on in its chunks. A body that ends with the connection gets
    `connection: close`."""
    lines = [head.fields.lines, more]
    if more and b"imit-" in lines[0]:  # in whatever case, and cheaper than the search
        lines[0] = LIMIT_LINE.sub(b"", lines[0])
    for name, value in extra:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"connection: close\r\n\r\n" if close or head.framing == "close" else b"\r\n")
    return b"".join(lines)
