"""One client connection, as the pipeline sees it, and who watches its deadlines.

Rules: a deadline is armed by attribute writes; the watchdog finds out when it was missed, and the steps of the
connection get an error where they wait. Sending never waits: what the client has no room for is kept, and `flush` is to
be waited for before more is made. It holds no more than was passed in. The time that flushes wait adds up to a window,
which only ends well: when enough bytes were taken. So a byte now and then buys no time, and an engine's silence costs
none.
Invariant: `started` is set before the first byte of an answer leaves, so nobody answers twice. A connection is watched
exactly while its socket is open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import trio

from ranvier_py.core.errors import ClientGone, ClientTooSlow, RanvierError, RequestTimeout, UpstreamTimeout
from ranvier_py.core.metrics import counter, gauge, increment
from ranvier_py.proxy.driver import Driver
from ranvier_py.proxy.error_answers import JSON, error_response, own_head, response_head
from ranvier_py.proxy.http_values import Fields, HttpResponseHead, WaitPhase
from ranvier_py.proxy.request_reader import RequestHead, ServerLimits
from ranvier_py.proxy.transport import PlainTransport

LINGER_S = 2.0
"""How long we read on after an error answer: closing with unread bytes makes the kernel send RST, which may overtake
the answer (RFC 9112 9.6). nginx waits 5 s (lingering_timeout); who is still sending after 2 s has not looked."""

DEADLINE = attrgetter("deadline")


@dataclass(slots=True)
class ServerCounters:
    """What the public port counts."""

    connections: int = gauge("Open connections of clients.")
    in_flight: int = gauge("Requests in flight, from their complete head to the end of their answer.")
    in_flight_bytes: int = gauge("Bytes in memory of the bodies of requests in flight.")
    accepted: int = counter("Connections accepted.")
    refused: dict[str, int] = counter("Connections and requests refused, by the limit that was reached.", label="kind")
    displaced: int = counter("Connections closed while they waited for a request, to let others in.")
    requests: int = counter("Requests read.")
    request_bytes: int = counter("Bytes of their bodies.")
    response_bytes: int = counter("Bytes sent to clients.")
    timeouts: dict[str, int] = counter("Missed deadlines, by what was waited for.", label="kind")
    errors: dict[str, int] = counter("Errors answered or cut off by the node, by code.", label="kind")
    cut: int = counter("Answers that could not be finished.")
    client_gone: int = counter("Clients that left before their answer was complete.")


class ConnectionOver(Exception):
    """The connection ends without a word."""


MISSED: dict[WaitPhase, tuple[type[Exception], str]] = {
    WaitPhase.IDLE: (ConnectionOver, "no further request came"),
    WaitPhase.HEADER: (RequestTimeout, "the request took too long to arrive"),
    WaitPhase.BODY: (RequestTimeout, "the request took too long to arrive"),
    WaitPhase.FIRST_BYTE: (UpstreamTimeout, "the backend did not begin to answer in time"),
    WaitPhase.STALL: (UpstreamTimeout, "the backend stopped in the middle of its answer"),
    WaitPhase.SEND: (ClientTooSlow, "the client takes its answer too slowly"),
}
"""What a missed deadline means."""


@dataclass(slots=True, eq=False, repr=False)  # it knows keys
class Client:
    """A connection and the answer under way on it."""

    transport: PlainTransport
    peer: str  # remote address, for the log
    limits: ServerLimits
    watchdog: Watchdog
    counters: ServerCounters
    fd: int = field(init=False)
    driver: Driver[bool] | None = None  # runs its steps, once the server has begun with them
    phase: WaitPhase = WaitPhase.IDLE  # what is waited for
    deadline: float = math.inf  # and until when
    api: str = "openai"  # whose error shape it expects, or "anthropic"
    request_id: bytes = b""  # of the current request, once a handler has named it; our own answers carry it
    started: bool = False  # a byte of the current answer was sent
    must_close: bool = False  # the connection ends after this answer; a handler may set it
    head_only: bool = False
    ahead: bytes = b""  # what came behind the current request already
    last_head: RequestHead | None = None  # of the request before this one; the next is mostly the same
    handling: bool = False  # a handler is at work for it, which ends when the client hangs up
    gone: bool = False  # the client hung up
    outlasts: Callable[[], bool] | None = None  # asked when it hangs up: whether its request goes on, for others
    unsent: memoryview | None = None  # of the answer, what the client had no room for
    window_s: float = 0.0  # that flushes may still wait in this window …
    window_bytes: int = 0  # … until so many bytes more were taken
    body_bytes: int = 0  # of the current request's body, as far as it is here
    body_window_bytes: int = 0  # of it, still to come in this window
    body_until: float = math.inf  # when all of it must be here, in the watchdog's time

    def __post_init__(self) -> None:
        self.fd = self.transport.fd

    def arm(self, phase: WaitPhase, seconds: float) -> None:
        """From now on wait for `phase`, at most so long."""
        self.arm_until(phase, self.watchdog.clock() + seconds)

    def arm_until(self, phase: WaitPhase, deadline: float) -> None:
        """The same with a point in the watchdog's time."""
        self.phase = phase
        self.deadline = deadline
        self.watchdog.armed = True

    def work(self) -> None:
        """From now on it is our turn: no deadline."""
        self.phase = WaitPhase.WORK
        self.deadline = math.inf

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes) -> None:
        """Send pieces of the answer. Raises ClientGone."""
        self.started = True
        self.write(parts)

    def relay_head(self, head: HttpResponseHead, extra: Fields = (), body: bytes = b"") -> None:
        """Begin a backend's answer: its head with our fields, and what of its body is here. Raises ClientGone."""
        if head.framing == "close":
            self.must_close = True
        self.send(response_head(head, extra, close=self.must_close), body)

    def respond(
        self,
        status: int,
        body: bytes,
        headers: Fields = (),
        content_type: bytes = JSON,
        *,
        chunked: bool = False,
    ) -> None:
        """Send a whole answer of our own, or a body that is in chunks. HEAD gets its head only. Raises ClientGone."""
        if self.request_id:
            headers = (*headers, (b"x-request-id", self.request_id))
        head = own_head(status, headers, content_type, None if chunked else len(body), close=self.must_close)
        self.send(head, b"" if self.head_only or status in (204, 304) else body)

    def respond_error(self, error: RanvierError) -> None:
        status, headers, body = error_response(error, self.api)
        self.respond(status, body, headers)

    def write(self, parts: Sequence[bytes]) -> None:
        """Send bytes that are not the answer yet (an interim response). Raises ClientGone."""
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

    async def flush(self) -> None:
        """Send what the client had no room for. Raises ClientGone."""
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
        """Begin the next window if enough was taken in this one."""
        if self.window_bytes > 0:
            return False
        self.window_s, self.window_bytes = self.limits.send_window_s, self.limits.send_bytes_min
        return True

    async def linger(self) -> None:
        """Close so that the peer can still read our last words."""
        await self.flush()
        self.work()
        self.transport.end()
        with trio.move_on_after(LINGER_S):
            while await self.transport.receive():
                pass

    # --- how it ends ------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """The armed deadline was missed."""
        error, words = MISSED[self.phase]
        increment(self.counters.timeouts, self.phase.value)
        self.interrupt(error(words))

    def hang_up(self) -> None:
        """The peer closed; whoever works for it may stop."""
        self.gone = True
        if self.handling and not (self.outlasts is not None and self.outlasts()):
            self.interrupt(ClientGone("the client closed the connection"))

    def interrupt(self, error: Exception) -> None:
        """Raise this where the steps of the connection wait."""
        self.deadline = math.inf
        if self.driver is not None:
            self.driver.interrupt(error)


class Watchdog:
    """Watches the deadlines of a server's connections, so that a request costs no timer and no task of its own.

    `clock` gives steady seconds, in which all deadlines are. One task looks at every connection a few times a second,
    and only if a deadline was armed since or is due.

    Attributes:
        armed: set by whoever arms a deadline.
        ticks: how often it has looked, for tests.
    """

    def __init__(self, tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.tick_s = tick_s  # how late a missed deadline may be noticed
        self.clock = clock
        self.ticks = 0
        self.armed = False
        self._watched: dict[int, Client] = {}
        self._occupied = trio.Event()

    def watch(self, client: Client) -> None:
        self._watched[client.fd] = client
        self._occupied.set()

    def forget(self, client: Client) -> None:
        """Before its socket is closed."""
        self._watched.pop(client.fd, None)

    async def tick(self) -> None:
        """Expire what is late, for ever."""
        earliest, self.armed = math.inf, True  # who waited when a fault ended it is looked at again
        while True:
            if not self._watched:
                self._occupied = trio.Event()
                await self._occupied.wait()
            await trio.sleep(self.tick_s)
            self.ticks += 1
            now = self.clock()
            if not self.armed and now < earliest:
                continue
            self.armed = False
            earliest = min(map(DEADLINE, self._watched.values()), default=math.inf)
            if now > earliest:
                earliest = now
                for client in [each for each in self._watched.values() if each.deadline < now]:
                    client.expire()
