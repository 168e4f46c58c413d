"""One client connection, as the pipeline sees it.

Rules: a deadline is armed by three attribute writes; the watchdog finds out when it was missed and cancels `scope`. The
first cause wins and stays in `verdict`, where a handler that is being cancelled may read why. Sending blocks only while
the client is slow, under a deadline of its own that every accepted byte renews, and holds no more than was passed in.
Invariant: `started` is set before the first byte of an answer leaves, so nobody answers twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from ranvier_py.core.errors import ClientGone, RanvierError, RequestTimeout, UpstreamTimeout
from ranvier_py.proxy.client_deadlines import Alarm
from ranvier_py.proxy.error_answers import JSON, Fields, error_response, own_head, response_head
from ranvier_py.proxy.http_values import HttpResponseHead, Phase
from ranvier_py.proxy.transport import Transport

if TYPE_CHECKING:
    from ranvier_py.proxy.request_reader import RequestHead

SEND = Phase.SEND

LINGER_S = 2.0
"""How long we read on after an error answer: closing with unread bytes makes the kernel send RST, which may overtake
the answer (RFC 9112 9.6). nginx waits 5 s (lingering_timeout); who is still sending after 2 s has not looked."""


class Client:
    """A connection and the answer under way on it.

    Attributes:
        peer: remote address, for the log.
        started: a byte of the current answer was sent.
        must_close: the connection ends after this answer; a handler may set it.
        verdict: why the connection was cancelled; None if it was not, or was told to end without a word.
        api: whose error shape it expects: "openai" or "anthropic".
        last_head: of the request before this one; the next is mostly the same.
        request_id: of the current request, as soon as a handler has named it; our own answers carry it.
        body_bytes: of the current request's body, as far as it is here.
        going: what a handler has begun without the connection's task; None if nothing.
        unsent: of the answer, what the client had no room for; None if nothing.
    """

    __slots__ = (
        "_alarm",
        "api",
        "body_bytes",
        "bytes_sent",
        "deadline",
        "fd",
        "going",
        "gone",
        "handling",
        "head_only",
        "last_head",
        "missed",
        "must_close",
        "peer",
        "phase",
        "request_id",
        "scope",
        "send_s",
        "started",
        "transport",
        "unsent",
        "verdict",
    )

    def __init__(self, transport: Transport, peer: str, send_s: float, alarm: Alarm) -> None:
        self._alarm = alarm
        self.transport = transport
        self.fd = transport.fd
        self.peer = peer
        self.send_s = send_s
        self.scope = trio.CancelScope()
        self.phase = Phase.IDLE
        self.deadline = math.inf
        self.api = "openai"
        self.request_id = b""
        self.started = False
        self.must_close = False
        self.head_only = False
        self.last_head: RequestHead | None = None
        self.handling = False
        self.gone = False
        self.missed: Phase | None = None
        self.verdict: RanvierError | None = None
        self.going: Any = None
        self.unsent: memoryview | None = None
        self.bytes_sent = 0
        self.body_bytes = 0

    def arm(self, phase: Phase, seconds: float) -> None:
        """From now on wait for `phase`, at most so long."""
        self.phase = phase
        self.deadline = time.monotonic() + seconds
        self._alarm.armed = True

    def arm_until(self, phase: Phase, deadline: float) -> None:
        """The same with a point in monotonic time."""
        self.phase = phase
        self.deadline = deadline
        self._alarm.armed = True

    def work(self) -> None:
        """From now on it is our turn: no deadline."""
        self.phase = Phase.WORK
        self.deadline = math.inf

    async def send(self, *parts: bytes) -> None:
        """Send pieces of the answer, uncopied. Waits while the client is slow. Raises ClientGone."""
        self.started = True
        await self.write(parts)

    async def relay_head(self, head: HttpResponseHead, extra: Fields = (), body: bytes = b"") -> None:
        """Begin a backend's answer: its head with our fields, and what of its body is here. Raises ClientGone."""
        if head.framing == "close":
            self.must_close = True
        await self.send(response_head(head, extra, close=self.must_close), body)

    def relay_at_once(self, head: HttpResponseHead, extra: Fields = (), body: bytes = b"") -> bool:
        """The same without waiting: False when the client is slow, and `flush` has to send the rest."""
        if head.framing == "close":
            self.must_close = True
        self.started = True
        return self.write_at_once((response_head(head, extra, close=self.must_close), body))

    async def write(self, parts: Sequence[bytes]) -> None:
        """Send bytes that are not the answer yet (an interim response). Raises ClientGone."""
        if not self.write_at_once(parts):
            await self.flush()

    def write_at_once(self, parts: Sequence[bytes]) -> bool:
        """The same without waiting: whether that was all. Raises ClientGone."""
        try:
            sent = self.transport.send_now(parts)
        except OSError as error:
            raise ClientGone(f"sending failed: {error}") from error
        self.bytes_sent += sent
        if sent == sum(map(len, parts)):
            return True
        self.unsent = memoryview(b"".join(parts))[sent:]
        return False

    async def flush(self) -> None:
        """Send what the client had no room for. Raises ClientGone."""
        rest, self.unsent = self.unsent, None
        if rest is None:
            return
        phase, armed = self.phase, self.deadline
        began = time.monotonic()
        self.arm(SEND, self.send_s)
        try:
            await self.transport.send_rest(rest, self._sent)
        except OSError as error:
            raise ClientGone(f"sending failed: {error}") from error
        self.arm_until(phase, armed + (time.monotonic() - began))

    def _sent(self, count: int) -> None:
        self.bytes_sent += count
        self.arm(SEND, self.send_s)

    async def respond(self, status: int, body: bytes, headers: Fields = (), content_type: bytes = JSON) -> None:
        """Send a whole answer of our own. HEAD gets its head only. Raises ClientGone."""
        if self.request_id:
            headers = (*headers, (b"x-request-id", self.request_id))
        head = own_head(status, headers, content_type, len(body), close=self.must_close)
        await self.send(head, b"" if self.head_only or status in (204, 304) else body)

    async def respond_error(self, error: RanvierError) -> None:
        status, headers, body = error_response(error, self.api)
        await self.respond(status, body, headers)

    # --- how it ends ------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """The armed deadline was missed."""
        self.missed = self.phase
        verdict: RanvierError | None = None
        if self.phase in (Phase.HEADER, Phase.BODY):
            verdict = RequestTimeout("the request took too long to arrive")
        elif self.phase is Phase.FIRST_BYTE:
            verdict = UpstreamTimeout("the backend did not begin to answer in time")
        elif self.phase is Phase.STALL:
            verdict = UpstreamTimeout("the backend stopped in the middle of its answer")
        elif self.phase is SEND:
            verdict = ClientGone("the client does not read")
        self.cancel(verdict)

    def hang_up(self) -> None:
        """The peer closed; whoever works for it may stop."""
        self.gone = True
        if self.handling:
            self.cancel(ClientGone("the client closed the connection"))

    def cancel(self, verdict: RanvierError | None) -> None:
        """End the connection's task. The first verdict stands."""
        self.deadline = math.inf
        if not self.scope.cancel_called:
            self.verdict = verdict
            self.scope.cancel()

    async def linger(self) -> None:
        """Close so that the peer can still read our last words."""
        self.transport.end()
        with trio.move_on_after(LINGER_S):
            while await self.transport.receive():
                pass
