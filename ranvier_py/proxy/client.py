"""One client connection as the pipeline uses it, and the watchdog of all connections' deadlines.

Rule: arming a deadline only sets attributes; the watchdog notices a missed one and raises an error where the steps of
the connection wait. Sending never waits: bytes that the client has no room for are kept, and the sender must await
`flush` before it makes more. The time that flushes wait counts within a window, and only `send_bytes_min` bytes taken
begin a new one: so a byte now and then gains no time, and a silent engine costs none. Invariants: `started` is set
before the first byte of an answer leaves, so nobody answers twice; a connection is watched exactly while its socket is
open; who sends or reads slowly holds it for a bounded time (test_progress.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import trio

from ranvier_py.core.errors import ClientGone, ClientTooSlow, RanvierError, RequestTimeout, UpstreamTimeout
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.proxy.admission.seen_head import SeenHead
from ranvier_py.proxy.answers.cors import Cors
from ranvier_py.proxy.answers.renamed_answer import RenamedAnswer
from ranvier_py.proxy.driver import Driver
from ranvier_py.proxy.error_answers import api_of, error_response
from ranvier_py.proxy.heads import RequestHead, ServerLimits
from ranvier_py.proxy.http_values import (
    NO_REQUEST,
    Fields,
    HttpRequest,
    HttpResponseHead,
    WaitPhase,
    own_head,
    response_head,
)
from ranvier_py.proxy.transport import PlainTransport

LINGER_S = 2.0
"""How long we still read after an error answer: closing with unread bytes makes the kernel send RST, which may overtake
the answer (RFC 9112 9.6). nginx waits 5 s (lingering_timeout); a client still sending after 2 s ignores the answer."""

DEADLINE = attrgetter("deadline")


@dataclass(slots=True)
class ServerCounters:
    """Counters of the public port."""

    connections: int = gauge("Connections of clients that are open now.")
    in_flight: int = gauge("Requests in flight, from their complete head to the end of their answer.")
    in_flight_bytes: int = gauge("Bytes in memory of the bodies of requests in flight.")
    accepted: int = counter("Connections accepted from clients on the public port.")
    refused: dict[str, int] = counter("Connections and requests refused, by the limit that was reached.", label="kind")
    displaced: int = counter("Connections closed while they waited for a request, to let others in.")
    requests: int = counter("Requests read from clients on the public port.")
    request_bytes: int = counter("Bytes of the bodies of clients' requests.")
    response_bytes: int = counter("Bytes of answers sent to clients.")
    timeouts: dict[str, int] = counter("Deadlines that clients missed, by what was waited for.", label="kind")
    errors: dict[str, int] = counter("Errors answered or cut off by the node, by code.", label="kind")
    cut: int = counter("Answers that could not be finished.")
    client_gone: int = counter("Clients that left before their answer was complete.")


class ConnectionOver(Exception):
    """The connection ends without an answer."""


MISSED: dict[WaitPhase, tuple[type[Exception], str]] = {
    WaitPhase.IDLE: (ConnectionOver, "no further request came"),
    WaitPhase.HEADER: (RequestTimeout, "the request took too long to arrive"),
    WaitPhase.BODY: (RequestTimeout, "the request took too long to arrive"),
    WaitPhase.FIRST_BYTE: (UpstreamTimeout, "the backend did not begin to answer in time"),
    WaitPhase.STALL: (UpstreamTimeout, "the backend stopped in the middle of its answer"),
    WaitPhase.SEND: (ClientTooSlow, "the client takes its answer too slowly"),
}
"""The error that a missed deadline raises, by what was waited for."""


@dataclass(slots=True, eq=False, repr=False)  # no repr, since it would show keys
class Client:
    """A connection, and the answer that is being sent on it."""

    transport: PlainTransport
    peer: str  # remote address, for the log
    limits: ServerLimits
    watchdog: Watchdog
    counters: ServerCounters
    fd: int = field(init=False)
    driver: Driver[bool] | None = None  # runs its steps, once the server has begun them
    phase: WaitPhase = WaitPhase.IDLE  # what is waited for
    deadline: float = math.inf  # of that wait, in the watchdog's time
    request_id: bytes = b""  # of the current request, once its head is read; answers of our own carry it
    started: bool = False  # a byte of the current answer was sent
    must_close: bool = False  # the connection ends after this answer; a handler may set it
    ahead: bytes = b""  # bytes after the current request that are already here
    last_head: RequestHead | None = None  # of the request before this one; the next is mostly the same
    seen_head: SeenHead | None = None  # who sent it, if the node asks for that
    renamed: RenamedAnswer | None = None  # what names models in the answer as its client does, if it is to
    handling: bool = False  # a handler works on its request, and is interrupted if the client hangs up
    gone: bool = False  # the client hung up
    outlasts: Callable[[], bool] | None = None  # asked when it hangs up: whether its request goes on, for others
    unsent: memoryview | None = None  # the part of the answer that the client had no room for
    window_s: float = 0.0  # how long flushes may still wait in this window …
    window_bytes: int = 0  # … which ends well once so many more bytes are taken
    limit_lines: Callable[[], bytes] | None = None  # of the head of the current answer, if its key has limits
    body_bytes: int = 0  # of the current request's body, as far as it has arrived
    cors: Cors = field(default_factory=Cors)  # the server's

    def __post_init__(self) -> None:
        self.fd = self.transport.fd

    @property
    def request(self) -> HttpRequest:
        """The current request, as far as its head was read."""
        return self.last_head.request if self.last_head is not None else NO_REQUEST

    def arm(self, phase: WaitPhase, seconds: float) -> None:
        """Wait for `phase` from now on, for at most so many seconds."""
        self.phase = phase
        self.deadline = self.watchdog.clock() + seconds
        self.watchdog.armed = True

    def arm_until(self, phase: WaitPhase, deadline: float) -> None:
        """Wait for `phase` until this moment of the watchdog's time."""
        self.phase = phase
        self.deadline = deadline
        self.watchdog.armed = True

    def work(self) -> None:
        """Set no deadline, since from now on we work and wait for nobody."""
        self.phase = WaitPhase.WORK
        self.deadline = math.inf

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes) -> None:
        """Send pieces of the answer. Raises ClientGone."""
        self.started = True
        if self.renamed is not None and self.renamed.is_on:
            if not (data := self.renamed.more(b"".join(parts))):
                return
            parts = (data,)
        self.write(parts)

    def relay_head(self, head: HttpResponseHead, extra: Fields = (), body: bytes = b"") -> None:
        """Begin a backend's answer: its head with our fields, and the first bytes of its body. Raises ClientGone."""
        if head.framing == "close":
            self.must_close = True
        self.started = True  # also if all of it is held: nobody may begin another answer
        lines = b"" if self.limit_lines is None else self.limit_lines()
        if self.renamed is not None and self.renamed.takes(head):
            if data := self.renamed.begin(head, extra, body, lines, close=self.must_close):
                self.write((data,))
        else:
            self.write((response_head(head, extra, lines, close=self.must_close), body))

    def respond(
        self,
        status: int,
        body: bytes,
        headers: Fields = (),
        content_type: bytes = b"application/json",
        *,
        chunked: bool = False,
    ) -> None:
        """Send an answer of our own; a `chunked` body has its chunks already. HEAD gets the head. Raises ClientGone."""
        if self.request_id:
            headers = (*headers, (b"x-request-id", self.request_id))
        request = self.request
        if request.fields.origin:
            headers = (*headers, *self.cors.fields(request.fields.origin))
        lines = b"" if self.limit_lines is None else self.limit_lines()
        head = own_head(status, headers, content_type, None if chunked else len(body), lines, close=self.must_close)
        self.send(head, b"" if request.method == b"HEAD" or status in (204, 304) else body)

    def respond_error(self, error: RanvierError) -> None:
        status, headers, body = error_response(error, api_of(self.request))
        self.respond(status, body, headers)

    def write(self, parts: Sequence[bytes]) -> None:
        """Send bytes that are not part of the answer, such as an interim response. Raises ClientGone."""
        if self.unsent is not None:
            self.unsent = memoryview(b"".join((self.unsent, *parts)))
            return
        try:
            sent = self.transport.send_now(parts)
        except OSError as error:
            raise ClientGone(f"sending failed: {error}") from error
        self.counters.response_bytes += sent
        self.window_bytes -= sent
        if sent != sum(map(len, parts)):
            self.unsent = memoryview(b"".join(parts))[sent:]

    def send_unsent(self) -> bool:
        """Send of the unsent bytes what the client takes now. Returns whether it took all. Raises ClientGone."""
        if self.unsent is not None:
            try:
                sent = self.transport.send_now((self.unsent,))  # type: ignore[arg-type]  # any buffer will do
            except OSError as error:
                raise ClientGone(f"sending failed: {error}") from error
            self.counters.response_bytes += sent
            self.window_bytes -= sent
            self.unsent = self.unsent[sent:] or None
        return self.unsent is None

    async def flush(self) -> None:
        """Wait until the client has taken the unsent bytes. Raises ClientGone."""
        if self.unsent is None:
            return
        phase, armed = self.phase, self.deadline
        began = self.watchdog.clock()
        self._renew_window()
        self.arm_until(WaitPhase.SEND, began + self.window_s)
        try:
            await self.transport.send_rest(self.unsent, self._sent)
        except OSError as error:
            raise ClientGone(f"sending failed: {error}") from error
        self.unsent = None
        ended = self.watchdog.clock()
        self.window_s = self.deadline - ended
        self.arm_until(phase, armed + (ended - began))

    def _sent(self, count: int) -> None:
        self.counters.response_bytes += count
        self.window_bytes -= count
        if self._renew_window():
            self.arm(WaitPhase.SEND, self.window_s)

    def _renew_window(self) -> bool:
        """Begin the next window if enough was taken in this one. Returns whether it did."""
        if self.window_bytes > 0:
            return False
        self.window_s, self.window_bytes = self.limits.send_window_s, self.limits.send_bytes_min
        return True

    async def linger(self) -> None:
        """End our side, and read on for LINGER_S, so that the peer can still read the answer."""
        await self.flush()
        self.work()
        self.transport.end()
        with trio.move_on_after(LINGER_S):
            while await self.transport.receive():
                pass

    # --- how it ends ------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Interrupt the steps, because the armed deadline was missed."""
        error, words = MISSED[self.phase]
        self.counters.timeouts[self.phase.value] += 1
        self.interrupt(error(words))

    def hang_up(self) -> None:
        """Note that the peer has closed, and interrupt its handler unless the request goes on for others."""
        self.gone = True
        if self.handling and not (self.outlasts is not None and self.outlasts()):
            self.interrupt(ClientGone("the client closed the connection"))

    def interrupt(self, error: Exception) -> None:
        """Raise this error where the steps of the connection wait."""
        self.deadline = math.inf
        if self.driver is not None:
            self.driver.interrupt(error)


class Watchdog:
    """Watches the deadlines of a server's connections, so that a request needs no timer and no task of its own.

    `clock` returns steady seconds, in which all deadlines are given. One task wakes every `tick_s`, and examines the
    connections only if a deadline was `armed` since it last did, or one is due.
    """

    def __init__(self, tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tick_s = tick_s  # how late a missed deadline may be noticed
        self.clock = clock
        self.ticks = 0  # how often it has woken, for tests
        self.armed = False
        self._watched: dict[int, Client] = {}
        self._later: dict[int, tuple[float, Callable[[], object]]] = {}  # one call at most for each that is watched
        self._occupied = trio.Event()

    def watch(self, client: Client) -> None:
        self._watched[client.fd] = client
        self._occupied.set()

    def forget(self, client: Client) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._watched.pop(client.fd, None)
        self.call_off(client)

    def call_at(self, client: Client, at: float, call: Callable[[], object]) -> None:
        """Have this called at that time, and nothing else that was to be called for this client."""
        self._later[client.fd] = at, call

    def call_off(self, client: Client) -> None:
        self._later.pop(client.fd, None)

    def _make_calls(self, now: float) -> None:
        for fd, later in [each for each in self._later.items() if each[1][0] <= now]:
            if self._later.get(fd) is later:
                del self._later[fd]
                later[1]()

    async def tick(self) -> None:
        """Expire the connections whose deadline has passed, for ever."""
        earliest, self.armed = math.inf, True  # after a fault, deadlines armed before it still count
        while True:
            if not self._watched:
                self._occupied = trio.Event()
                await self._occupied.wait()
            await trio.sleep(self.tick_s)
            self.ticks += 1
            now = self.clock()
            if self._later:
                self._make_calls(now)
            if not self.armed and now < earliest:
                continue
            self.armed = False
            earliest = min(map(DEADLINE, self._watched.values()), default=math.inf)
            if now > earliest:
                earliest = now
                for client in [each for each in self._watched.values() if each.deadline < now]:
                    client.expire()
