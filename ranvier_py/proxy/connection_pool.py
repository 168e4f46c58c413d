"""Unused connections to each backend, and the bytes that every request to it begins with.

Rules: the connection used last is taken first. One that shows bytes or an end before its next use is closed. Those too
many or too old are closed. A connection belongs to a `Destination`, one process at one address as far as is known: once
that is over, it finishes its answer and is closed.
Invariants: a connection is in the pool or in one exchange, never both; no request begins on one to an address that the
name has lost, or to an earlier process (test_connection_pool.py, test_moving_names.py).
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ranvier_py.core.addresses import DEFAULT_PORTS, checked_url
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.options import Options, option, seconds
from ranvier_py.core.routing.processes.ranks import rank_of, without_rank
from ranvier_py.proxy.heads import FramedHead, KnownHead, ResponseParser
from ranvier_py.proxy.transport import PlainTransport


class BackendAddress(NamedTuple):
    """Where a backend listens. `path_prefix` precedes every target; it is empty or begins with a slash. `tls_name`: the
    name that its certificate must have, if that is not its host."""

    scheme: str
    host: str
    port: int
    path_prefix: str = ""
    tls_name: str = ""

    @classmethod
    def parse(cls, url: str) -> BackendAddress:
        """Parse `http://host:port/prefix`, without a rank. Raises ValueError with a sentence for the operator."""
        parts = checked_url(url if rank_of(url) is None else without_rank(url), ("http", "https"))
        if parts.query or parts.fragment or parts.username:
            raise ValueError("a backend's URL has no query, user, or fragment but its rank")
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        return cls(parts.scheme, parts.hostname or "", port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port as the Host field has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path_prefix}"


class BackendAddresses(dict[str, BackendAddress]):
    """Where backends listen, by URL: as it was noted when each was added; of one removed meanwhile as its URL says."""

    def __missing__(self, url: str) -> BackendAddress:
        return BackendAddress.parse(url)


@dataclass(frozen=True, slots=True)
class UpstreamLimits(Options):
    """Bounds of the connections to each backend."""

    SECTION = "Limits"

    connect_s: float = seconds(5.0, "Longest wait for a connection to a backend.", key="connect_timeout_s")
    idle_s: float = seconds(60.0)  # longer unused: closed. Engines close earlier (uvicorn after 5 s), seen at once
    pooled_max: int = option(512, least=1)  # unused connections kept per backend; the oldest are closed first
    open_max: int = option(1 << 20, least=1)  # connections to all backends; above, none is kept unused
    header_bytes_max: int = option(65_536, least=1)  # of an answer


@dataclass(slots=True)
class UpstreamCounters:
    """Counters of the connections to backends."""

    open: int = gauge("Connections to backends, pooled and in use.")
    pooled: int = gauge("Connections to backends that wait for their next use.")
    connects: int = counter("Connections to backends that were tried.")
    connect_failures: int = counter("Connections to backends that could not be made.")
    exhausted: int = counter("Connections to backends not made for want of a descriptor, port or memory of this node.")
    reuses: int = counter("Requests sent to backends on a pooled connection.")
    stale: int = counter("Pooled connections found dead before their next use, or as soon as it was sent.")
    replaced: int = counter("Requests sent again on a fresh connection because the pooled one had died.")
    surplus: int = counter("Answers of backends followed by bytes that belong to nothing.")
    dropped: int = counter("Good connections to backends closed because the pool was full, or too many were open.")
    outdated: int = counter("Good connections closed because the backend's name or process had changed meanwhile.")


FRESH_S = 1.0
"""A connection that was used within this time is not looked at by a system call of its own: engines close those that
wait for longer, uvicorn after 5 s, and events show it."""


@dataclass(slots=True, eq=False)
class Destination:
    """What connections lead to: an address of a backend, and the process that was there when they were made."""

    address: str
    current: bool = True  # False: its connections serve no further request


class Connection:
    """One connection to a backend."""

    __slots__ = ("_poll", "answered", "destination", "known_head", "pool", "transport", "used_at")

    def __init__(self, transport: PlainTransport, pool: ConnectionPool, destination: Destination) -> None:
        self.transport = transport
        self.pool = pool
        self.destination = destination
        self.answered = False  # a byte of the current answer has arrived
        self.used_at = 0.0  # when it was last taken or put back
        self.known_head: KnownHead | None = None
        self._poll = select.poll()
        self._poll.register(transport.fd, select.POLLIN)

    def quiet(self) -> bool:
        """Whether neither bytes nor an end have arrived: an unused connection with either is of no use."""
        return not self.transport.holds_more and not self._poll.poll(0)

    def seems_alive(self, now: float) -> bool:
        """Whether an unused connection is quiet, as far as events have shown it if it was used a moment ago."""
        watch = self.transport.watch
        return self.quiet() if watch is None or now - self.used_at > FRESH_S else not watch.ready

    def send(self, parts: tuple[bytes, bytes]) -> memoryview | None:
        """Send head and body as far as the kernel takes them. Returns the rest: None if all left, empty if broken."""
        head, body = parts
        try:
            count = self.transport.send_now(parts)
        except OSError:
            return memoryview(b"")
        within = count - len(head)
        if within == len(body):
            return None
        return memoryview(body)[within:] if within >= 0 else memoryview(head[count:] + body)

    def read_head(self, data: bytes, method: bytes) -> FramedHead:
        """Read the head of an answer. Raises UpstreamGarbled."""
        known = self.known_head
        reading = known.again(data) if known is not None and method != b"HEAD" else None
        if reading is None:
            reading = ResponseParser().read_head(data, method)
            self.known_head = KnownHead.of(data, reading)
        return reading

    def close(self) -> None:
        if self.transport.fd >= 0:
            self.transport.close()
            self.pool.counters.open -= 1


@dataclass(slots=True, eq=False)
class ConnectionPool:
    """One backend address's unused connections, most recently used last, and what each request to it begins with."""

    address: BackendAddress
    limits: UpstreamLimits
    counters: UpstreamCounters
    clock: Callable[[], float]
    forgotten: bool = False  # the backend was removed: returned connections are closed
    idle: deque[Connection] = field(default_factory=deque)
    destinations: dict[str, Destination] = field(default_factory=dict)  # current ones, by address
    processes: int = 0  # grows with each process that is known to have come
    turn: int = -1  # of the addresses of the name, see `spread`
    prefix: bytes = field(init=False)
    host_line: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = self.address.path_prefix.encode()
        self.host_line = b" HTTP/1.1\r\nhost: " + self.address.authority.encode("ascii") + b"\r\n"

    def take(self) -> Connection | None:
        """Return the connection used last that still seems alive, or None."""
        now, counters = self.clock(), self.counters
        while self.idle:
            connection = self.idle.pop()
            counters.pooled -= 1
            if connection.seems_alive(now):
                counters.reuses += 1
                connection.answered, connection.used_at = False, now
                return connection
            counters.stale += 1
            connection.close()
        return None

    def destination(self, address: str, processes: int) -> Destination:
        """Return the destination of a connection that was just made; `processes` as it was before that began."""
        if processes != self.processes:
            return Destination(address, current=False)
        return self.destinations.setdefault(address, Destination(address))

    def keep(self, addresses: Collection[str]) -> None:
        """Use no further connections to other addresses than these. The rest finish their answers and are closed."""
        self._leave([each for each in self.destinations.values() if each.address not in addresses])

    def renew(self) -> None:
        """Use no connection any further that was made, or begun, before now: another process answers."""
        self.processes += 1
        self._leave(list(self.destinations.values()))

    def _leave(self, destinations: Sequence[Destination]) -> None:
        if not destinations:
            return
        for each in destinations:
            each.current = False
            del self.destinations[each.address]
        kept = [connection for connection in self.idle if connection.destination.current]
        for connection in self.idle:
            if not connection.destination.current:
                self._outdated(connection)
        self.counters.pooled -= len(self.idle) - len(kept)
        self.idle = deque(kept)

    def _outdated(self, connection: Connection) -> None:
        self.counters.outdated += 1
        connection.close()

    def put(self, connection: Connection) -> None:
        """Keep a connection whose answer was complete, unless its destination is outdated, there are too many, or the
        backend was removed."""
        if self.forgotten:
            connection.close()
            return
        if not connection.destination.current:
            self._outdated(connection)
            return
        if self.counters.open > self.limits.open_max:
            self.counters.dropped += 1
            connection.close()
            return
        idle = self.idle
        connection.used_at = now = self.clock()
        idle.append(connection)
        self.counters.pooled += 1
        if now - idle[0].used_at > self.limits.idle_s:
            self.prune(now - self.limits.idle_s)
        if len(idle) > self.limits.pooled_max:
            self.counters.dropped += 1
            self._close_oldest()

    def prune(self, before: float) -> None:
        """Close the connections that were last used before then."""
        while self.idle and self.idle[0].used_at < before:
            self._close_oldest()

    def _close_oldest(self) -> None:
        self.counters.pooled -= 1
        self.idle.popleft().close()
