"""What the public port counts: plain numbers, read at scrape time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by reason: connections, in_flight, in_flight_bytes, accept
    requests: int = 0  # handed to the handler
    request_bytes: int = 0  # of bodies
    response_bytes: int = 0
    timeouts: dict[str, int] = field(default_factory=dict)  # by phase
    errors: dict[str, int] = field(default_factory=dict)  # answers of ours, by code
    cut: int = 0  # answers that could not be finished
    client_gone: int = 0


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """A snapshot: gauges first, then totals since the start. See Counters."""

    connections: int
    in_flight: int
    in_flight_bytes: int
    accepted: int
    refused: dict[str, int]
    requests: int
    request_bytes: int
    response_bytes: int
    timeouts: dict[str, int]
    errors: dict[str, int]
    cut: int
    client_gone: int
