"""The unused connections to each backend, and what every request to it begins with.

Rules: last used, first taken; what shows bytes or an end before its next use is closed; too many or too old ones are
closed, oldest first.
Invariant: a connection is in the pool or in one exchange, never both.
Cost: taking one is a poll(2) on its own poll object, 1 µs; a table of all would cost a scan.
"""

from __future__ import annotations

import select
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from ranvier_py.core.options import Options, option, seconds
from ranvier_py.proxy.response_reader import KnownHead
from ranvier_py.proxy.transport import Transport


class Address(NamedTuple):
    """Where a backend listens. `path_prefix` precedes every target; it is empty or begins with a slash."""

    scheme: str
    host: str
    port: int
    path_prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """`http://host:port/prefix` as an address. Raises ValueError with a sentence for the operator."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{url!r}: a backend's URL begins with http:// or https://")
        if not parts.hostname:
            raise ValueError(f"{url!r}: a backend's URL names a host")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"{url!r}: a backend's URL has no query, fragment or user")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port as the Host field has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path_prefix}"


@dataclass(frozen=True, slots=True)
class UpstreamLimits(Options):
    """Bounds of the connections to each backend."""

    connect_s: float = seconds(
        5.0, "Longest wait for a connection to a backend.", key="connect_timeout_s", section="Limits"
    )
    idle_s: float = seconds(60.0)  # longer unused: closed. Engines close earlier (uvicorn after 5 s), seen at once
    pooled_max: int = option(512, least=1)  # unused connections kept per backend; the oldest go first
    header_bytes_max: int = option(65_536, least=1)  # of an answer


@dataclass(frozen=True, slots=True)
class UpstreamStatistics:
    """A snapshot: gauges, then totals since the start."""

    open: int  # connections, pooled and in use
    pooled: int
    connects: int
    connect_failures: int
    reuses: int
    stale: int  # pooled connections found dead before or at their next use
    replaced: int  # requests sent again on a fresh connection because the pooled one had died
    surplus: int  # answers followed by bytes that belong to nothing
    dropped: int  # good connections closed because the pool was full


@dataclass(slots=True)
class Counters:
    """See UpstreamStatistics."""

    open: int = 0
    connects: int = 0
    connect_failures: int = 0
    reuses: int = 0
    stale: int = 0
    replaced: int = 0
    surplus: int = 0
    dropped: int = 0


class Connection:
    """One connection to a backend."""

    __slots__ = ("_poll", "answered", "idle_since", "known_head", "pool", "reused", "transport")

    def __init__(self, transport: Transport, pool: Pool) -> None:
        self.transport = transport
        self.pool = pool
        self.reused = False
        self.answered = False  # a byte of the current answer came
        self.idle_since = 0.0
        self.known_head: KnownHead | None = None
        self._poll = select.poll()
        self._poll.register(transport.fd, select.POLLIN)

    def quiet(self) -> bool:
        """Whether neither bytes nor an end have come: an unused connection that shows either is of no use."""
        return not self._poll.poll(0)

    def close(self) -> None:
        if self.transport.fd >= 0:
            self.transport.close()
            self.pool.counters.open -= 1


class Pool:
    """The unused connections of one address, most recently used last, and what every request to it begins with."""

    __slots__ = ("address", "counters", "forgotten", "host_line", "idle", "prefix")

    def __init__(self, address: Address, counters: Counters) -> None:
        self.address = address
        self.counters = counters
        self.forgotten = False  # the backend was removed: nothing is put here any more
        self.prefix = address.path_prefix.encode()
        self.host_line = b" HTTP/1.1\r\nhost: " + address.authority.encode("ascii") + b"\r\n"
        self.idle: deque[Connection] = deque()

    def take(self) -> Connection | None:
        """A connection that seems alive, warmest first."""
        while self.idle:
            connection = self.idle.pop()
            if connection.quiet():
                self.counters.reuses += 1
                connection.reused = True
                connection.answered = False
                return connection
            self.counters.stale += 1
            connection.close()
        return None

    def put(self, connection: Connection, now: float, limits: UpstreamLimits) -> None:
        connection.idle_since = now
        self.idle.append(connection)
        self.prune(now - limits.idle_s)
        if len(self.idle) > limits.pooled_max:
            self.counters.dropped += 1
            self.idle.popleft().close()

    def prune(self, before: float) -> None:
        while self.idle and self.idle[0].idle_since < before:
            self.idle.popleft().close()
