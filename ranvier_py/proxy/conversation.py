"""The steps of one connection of the public port: read a request, pass it to the handler, read the next one.

Rule: bodies are read completely and lose their transfer coding; what the handler sends leaves at once. If the framing
of a request is lost, the client gets a 4xx and the connection ends. An answer that can't be finished ends in RST,
never in something that looks complete. Requests that are refused before any handler are reported here. Invariants:
`in_flight` counts requests from their complete head to the end of their answer, `in_flight_bytes` the bytes of their
bodies here; neither exceeds its limit. A connection that waits keeps no body and no large head; no byte of the next
request is taken for this one (test_server_bodies.py, test_server_requests.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from trio.lowlevel import checkpoint

from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError
from ranvier_py.core.errors import (
    BadRequest,
    BodyTooLarge,
    ClientGone,
    HeaderTooLarge,
    NodeBusy,
    RanvierError,
    UpstreamTimeout,
)
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.core.tracing.trace_context import RequestTrace
from ranvier_py.proxy.answers.cors import Cors
from ranvier_py.proxy.client import Client, ConnectionOver, ServerCounters
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.heads import RequestHead, ServerLimits
from ranvier_py.proxy.http_values import HttpRequest, WaitPhase
from ranvier_py.proxy.transport import RECEIVE_BYTES, TlsTransport, received

logger = logging.getLogger(__name__)

Handler = Callable[[HttpRequest, Client], Steps[None]]
"""Answers one request and returns, or raises a RanvierError, which becomes the answer if nothing was sent yet and cuts
the connection otherwise. A missed deadline, a client that left and the end of a drain are raised where it waits."""

READ_BYTES_MAX = 262_144
"""One read of a long body: with a quarter of a megabyte a 200 kB chat takes two or three reads."""

SKIPPED_BYTES_MAX = 65_536
"""The longest body that is read on after a refusal: a new connection costs more than this."""

TURN_BYTES_MAX = 1024 * 1024
"""Bytes to read of a body that keeps arriving before other tasks have their turn."""

JOINED_BYTES_MAX = 4 * 1024 * 1024
# A longer body grows in one buffer while it arrives: joining 64 MiB at its end takes 70 ms, nearly all of it for pages
# that the kernel must clear.

BODY_SHARE = 32
"""A window must bring this part of the bytes that are here: a client that occupies much of the room for bodies has to
send much all the time. A steady line brings its body within so many windows, however slow it is."""

PIECES_MAX = 64  # pieces that wait to be joined: a client may send two bytes at a time, and each such piece takes 43


def awaiting(handle: Callable[[HttpRequest, Client], Awaitable[None]]) -> Handler:
    """Make a handler of a coroutine, for servers that need not be quick. The coroutine must flush what it sends."""

    def steps(request: HttpRequest, client: Client) -> Steps[None]:
        yield partial(handle, request, client)

    return steps


class Conversations:
    """Handler, limits and admission of all connections of one server. `limits` may be replaced. `ids`: for
    requests that come without one; without these, answers of our own name no request."""

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        counters: ServerCounters,
        report: Callable[[RequestSummary], object] | None,
        ids: Iterator[bytes] | None,
    ) -> None:
        self._handler, self._ids, self._report = handler, ids, report
        self.limits = limits
        self.by_head: Callable[[HttpRequest, Client], object] | None = None
        # Called before a body is read; raises a RanvierError if its head is reason enough to refuse it.
        self.before_body: Callable[[HttpRequest, Client], object] | None = None  # the same, if the body is yet to come
        self.denied: Callable[[Client, RanvierError], object] | None = None  # called with who may not ask
        self.refused: Callable[[HttpRequest, Client, RanvierError], RequestTrace] | None = None  # traces them
        self.cors = Cors()
        self._counters = counters
        self.draining = False  # no connection takes a further request
        self.idle: dict[int, Client] = {}  # those that wait for one, by descriptor, who has waited longest first

    def steps(self, client: Client) -> Steps[bool]:
        """Serve request after request. Returns True if the connection may be closed normally."""
        data = b""
        try:
            if isinstance(client.transport, TlsTransport):
                client.arm(WaitPhase.HEADER, self.limits.header_s)
                yield client.transport.handshake
            while not client.must_close:
                client.started = False
                client.request_id = b""
                client.must_close = self.draining
                if not data:
                    if client.last_head is not None and client.last_head.is_large:
                        client.last_head = None
                    client.arm(WaitPhase.IDLE, self.limits.idle_s)
                    self.idle[client.fd] = client
                    try:
                        data = yield from received(client.transport)
                    finally:
                        self.idle.pop(client.fd, None)
                    if not data:
                        return True
                data = yield from self._serve_one(client, data)
                if client.unsent is not None:
                    yield client.flush
                if data:  # pipelined: let others have their turn
                    yield checkpoint
        except ConnectionOver:
            pass
        except RanvierError as error:  # framing is lost, or time is up
            if isinstance(error, ClientGone) or client.started:
                raise
            client.must_close = True
            self._refuse(client, error)
            yield client.linger
        return True

    def _serve_one(self, client: Client, data: bytes) -> Steps[bytes]:
        """Read one request that begins in `data`, and answer it. Returns the bytes after it. Raises RanvierError if
        framing is lost or time is up; the caller answers and closes."""
        limits, counters = self.limits, self._counters
        head = client.last_head
        end = data.find(b"\r\n\r\n") + 4
        if head is None or end > limits.header_bytes_max or not head.again(data[:end], limits):
            head = client.last_head = RequestHead()
            if end < 4 or end > limits.header_bytes_max or data[0] in b"\r\n":
                data, end = yield from self._read_head(client, head, data)
            else:
                head.feed(data[:end])
            head.finish(data[:end], limits)
        request = head.request
        if not request.keep_alive:
            client.must_close = True
        self._name(client, request)
        rest = end + head.length
        whole = end <= rest <= len(data)
        try:
            if self.by_head is not None:
                self.by_head(request, client)
            self._check(head.length)
        except RanvierError as refusal:
            if not whole and (head.waits or not 0 < head.length <= SKIPPED_BYTES_MAX):
                raise
            self._refuse(client, refusal)
            if not whole:
                yield from self._skip(client, rest - len(data))
            return data[rest:]
        counters.in_flight += 1
        try:
            if whole:
                counters.in_flight_bytes += head.length  # `_check` found room for it
                client.body_bytes = head.length
                request.body = data[end:rest]
                client.ahead = data = data[rest:]
            else:
                if self.before_body is not None:
                    self.before_body(request, client)
                request.body, data = yield from self._read_body(client, head, data[end:])
                client.ahead = data
            yield from self._handle(client, request)
        finally:
            request.body = client.ahead = b""  # since `client.last_head` keeps the request
            counters.in_flight_bytes -= client.body_bytes
            client.body_bytes = 0
            counters.in_flight -= 1
        return data

    def _skip(self, client: Client, count: int) -> Steps[None]:
        """Read the rest of a body whose request is answered and keep none of it: the connection can take the next one.
        Many clients send a head and its body apart, and each refusal would cost them a connection."""
        if client.unsent is not None:
            yield client.flush
        client.arm(WaitPhase.IDLE, self.limits.header_s)
        while count:
            data = yield from received(client.transport, min(count, READ_BYTES_MAX))
            if not data:
                raise ConnectionOver
            count -= len(data)

    def _handle(self, client: Client, request: HttpRequest) -> Steps[None]:
        """Run the handler, and answer errors that it raises before it answered. Raises what must end the connection."""
        counters = self._counters
        counters.requests += 1
        counters.request_bytes += len(request.body)
        if client.gone:
            raise ClientGone("the client closed the connection")
        client.work()
        client.handling = True
        try:
            yield from self._handler(request, client)
            if not client.started:
                raise AssertionError("the handler did not answer")
            if client.unsent is not None:
                yield client.flush
        except RanvierError as error:
            if isinstance(error, ClientGone) or client.started:
                raise
            client.must_close |= isinstance(error, UpstreamTimeout)
            self._answer_error(client, error)
        except Exception:
            logger.exception(event("request.failed", client=client.peer))
            if client.started:
                raise
            client.must_close, client.limit_lines = True, None  # what failed may be what these lines are made of
            self._answer_error(client, RanvierError("internal error"))
        finally:
            client.handling = False

    def _answer_error(self, client: Client, error: RanvierError) -> None:
        self._counters.errors[error.code] += 1
        if not client.request_id:
            self._name(client, client.request)
        client.respond_error(error)
        if self.denied is not None and error.status in (401, 403):
            self.denied(client, error)

    def _name(self, client: Client, request: HttpRequest) -> None:
        if self._ids is not None:
            client.request_id = request.fields.request_id or next(self._ids)

    def _refuse(self, client: Client, error: RanvierError) -> None:
        """Answer a request that no handler got, and report it."""
        self._answer_error(client, error)
        request = client.request
        trace = self.refused(request, client, error) if self.refused is not None and request.method else None
        if self._report is not None:
            method, path = request.method.decode("latin-1"), request.path.decode("latin-1")
            seen, who = client.seen_head, ("", "")
            if seen is not None and seen.identity is not None and seen.fields is request.fields:
                who = seen.identity.key_id, seen.identity.tenant.name
            known, found = client.request_id.decode("latin-1"), (error.status, error.code)
            address = client.peer if seen is None else seen.client or client.peer
            summary = RequestSummary(known, method, path, *found, key_id=who[0], tenant=who[1], client=address)
            if trace is not None:
                summary = summary._replace(trace_id=trace.trace_id, span_id=trace.span_id)
            self._report(summary)

    # --- admission --------------------------------------------------------------------------------------------------

    def _check(self, length: int) -> None:
        """Raise NodeBusy if there are too many requests, or no room for a body whose length is known. Room is not
        reserved: a few clients could otherwise occupy all of it by announcing bodies that never come."""
        if self._counters.in_flight >= self.limits.in_flight_max:
            self._counters.refused["in_flight"] += 1
            raise NodeBusy("too many requests at once")
        if length > 0:
            self._check_room(length)

    def _keep(self, client: Client, count: int) -> None:
        """Count so many more bytes of this client's body as in memory. Raises NodeBusy."""
        self._check_room(count)
        self._counters.in_flight_bytes += count
        client.body_bytes += count

    def _check_room(self, count: int) -> None:
        if self._counters.in_flight_bytes + count > self.limits.in_flight_bytes_max:
            self._counters.refused["in_flight_bytes"] += 1
            raise NodeBusy("too many bytes of requests at once")

    # --- requests that come in pieces -------------------------------------------------------------------------------

    def _read_head(self, client: Client, head: RequestHead, data: bytes) -> Steps[tuple[bytes, int]]:
        """Read on a head in several pieces, or after empty lines (RFC 9112 2.2). Returns all bytes, and where it ends.
        All pieces share one deadline. Raises RequestError, ClientGone."""
        limits = self.limits
        client.arm(WaitPhase.HEADER, limits.header_s)
        fed = 0
        while True:
            if not fed:
                data = data.lstrip(b"\r\n")
            found = data.find(b"\r\n\r\n", max(0, fed - 3))
            end = len(data) if found < 0 else found + 4
            if end > limits.header_bytes_max:
                raise HeaderTooLarge(f"the header is larger than {limits.header_bytes_max} bytes")
            head.feed(data[fed:end])
            fed = end
            if found >= 0:
                return data, end
            more = yield from received(client.transport)
            if not more:
                raise BadRequest("the request ended in its header") if data else ClientGone("nothing came")
            data += more

    def _read_body(self, client: Client, head: RequestHead, data: bytes) -> Steps[tuple[bytes, bytes]]:
        """Read on a body of which only `data` is here. Returns all of it, and the bytes after it. Each window must
        bring its share or the body's end, and `body_s` the end. Raises RequestError, NodeBusy."""
        body = GrowingBody(client.watchdog.clock() + self.limits.body_s)
        self._begin_window(client, body)
        if head.waits and not data:
            client.write((b"HTTP/1.1 100 Continue\r\n\r\n",))
            if client.unsent is not None:
                yield client.flush
        if head.length < 0:
            return (yield from self._read_chunks(client, body, data))
        self._keep(client, len(data))
        body.add(data)
        while body.size < head.length:
            before = body.size
            piece = yield from self._read_piece(client, body, min(head.length - before, READ_BYTES_MAX))
            self._keep(client, len(piece))
            body.add(piece)
            if body.size // TURN_BYTES_MAX > before // TURN_BYTES_MAX:
                yield checkpoint
        return body.whole(), b""

    def _read_chunks(self, client: Client, body: GrowingBody, data: bytes) -> Steps[tuple[bytes, bytes]]:
        """Read a body in chunks, with other tasks between two pieces: 64 KiB may be 11,000 chunks."""
        reader = ChunkedReader()
        while True:
            try:
                used = reader.feed(data)
            except ChunkError as error:
                raise BadRequest(f"malformed request: {error}") from error
            if reader.total > self.limits.body_bytes_max:
                raise BodyTooLarge(f"the body is larger than {self.limits.body_bytes_max} bytes")
            self._keep(client, reader.total - reader.left - client.body_bytes)
            body.add(reader.payload(data))
            if reader.done:
                return body.whole(), data[used:]
            yield checkpoint
            data = yield from self._read_piece(client, body, RECEIVE_BYTES)

    def _read_piece(self, client: Client, body: GrowingBody, bytes_max: int) -> Steps[bytes]:
        """Return the next piece of a body, without a wait if it is here. Raises BadRequest at the end of the stream."""
        data = client.transport.receive_now(bytes_max)
        if data is None:
            data = yield from received(client.transport, bytes_max)
        if not data:
            raise BadRequest("the request ended in its body")
        body.window_bytes -= len(data)
        if body.window_bytes <= 0:
            self._begin_window(client, body)
        return data

    def _begin_window(self, client: Client, body: GrowingBody) -> None:
        limits = self.limits
        client.arm_until(WaitPhase.BODY, min(client.watchdog.clock() + limits.body_window_s, body.until))
        body.window_bytes = max(limits.body_bytes_min, client.body_bytes // BODY_SHARE)


class GrowingBody:
    """A body that grows piece by piece. No step copies all of a large one, however many and small its pieces are."""

    __slots__ = ("_pieces", "_start", "size", "until", "window_bytes")

    def __init__(self, until: float) -> None:
        self.until = until  # when all of it must have arrived, in the watchdog's time
        self.window_bytes = 0  # still to arrive in this window
        self.size = 0
        self._start = bytearray()  # the beginning of a body of many pieces or many bytes
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.size += len(piece)
        if self.size > JOINED_BYTES_MAX or len(self._pieces) > PIECES_MAX:
            for each in self._pieces:
                self._start += each
            self._pieces.clear()

    def whole(self) -> bytes:
        """Return all of the body, as a bytearray if it is large. Call this once."""
        if self.size > JOINED_BYTES_MAX:
            return self._start  # type: ignore[return-value]  # as good as bytes for who reads them
        return b"".join((self._start, *self._pieces))
