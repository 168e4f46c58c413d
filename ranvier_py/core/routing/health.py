"""Whether a backend may be asked: its health says whether it is alive, its circuit breaker whether it serves.

Rule: health follows probes, and peers' reports (`condemn`): so many in a row decide. The circuit (`TRANSITIONS`)
follows requests for inference: ILL_STATUSES, time-outs and answers that broke off are faults; other refusals, and
clients that left, say nothing. What several backends fail is the request's own fault (`blame.suspects`). Invariant:
time-outs of probes alone end no pool, since whatever an engine sends is a sign of life (test_silence.py). Bound:
CIRCUIT_OPEN_GROWTH_MAX of the open time.
Source: the circuit of Ranvier (5 faults, 30 s); here 5xx count, and half-open admits one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from ranvier_py.core.options import Options, option, seconds


class Health(Enum):
    """The verdict of the probes. UNKNOWN (none yet) is as good as HEALTHY for placement."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Circuit(Enum):
    """The verdict of the requests. Only CLOSED and HALF_OPEN let a request through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # the open time is over and the trial is free
    TRIAL = "trial"  # the trial is in flight: no other request gets through


class Outcome(Enum):
    """How a dispatched request ended."""

    __hash__ = object.__hash__  # Enum's own is in Python, hence slow, and each request is counted by its outcome

    SUCCESS = "success"  # a complete answer below 400, to inference below 300: the engine did its work
    REFUSED = "refused"  # a complete answer that says no to this one request: neutral
    SERVER_ERROR = "server_error"  # a complete answer of ILL_STATUSES
    CONNECT_ERROR = "connect_error"  # no connection was made, so nothing was sent
    TIMEOUT = "timeout"  # no first byte, or a stall, past its deadline
    BROKEN = "broken"  # closed or garbled before the end of its answer
    OVERLOADED = "overloaded"  # a complete answer of an engine that has no room: neutral
    CANCELLED = "cancelled"  # the client went away: neutral
    NOT_SENT = "not_sent"  # this node lacked the means to send it, such as descriptors: neutral


class Event(Enum):
    """What a circuit reacts to."""

    PROBE_OK = "probe_ok"
    PROBE_FAILED = "probe_failed"
    DISPATCHED = "dispatched"
    SERVED = "served"
    FAULT = "fault"  # while the circuit is closed, only the one that completes the row of faults
    NEUTRAL = "neutral"
    WAITED = "waited"  # the open time, or the lease of a trial, is over
    RESTARTED = "restarted"


class Action(Enum):
    """What a transition does to the counters and timers."""

    NONE = "none"
    FORGIVE = "forgive"  # faults are 0, and the open time is the first one again
    PROBATION = "probation"  # the next fault opens the circuit: a probe only proves that the process answers
    START_OPEN = "start_open"  # begin the (grown) open time
    START_LEASE = "start_lease"  # a trial that does not end frees its place after one open time


TRANSITIONS: Mapping[tuple[Circuit, Event], tuple[Circuit, Action]] = {
    (Circuit.CLOSED, Event.SERVED): (Circuit.CLOSED, Action.FORGIVE),
    (Circuit.CLOSED, Event.FAULT): (Circuit.OPEN, Action.START_OPEN),
    (Circuit.CLOSED, Event.RESTARTED): (Circuit.CLOSED, Action.FORGIVE),
    (Circuit.OPEN, Event.WAITED): (Circuit.HALF_OPEN, Action.NONE),
    (Circuit.OPEN, Event.SERVED): (Circuit.HALF_OPEN, Action.NONE),  # an older request, or one sent as a last resort
    (Circuit.OPEN, Event.RESTARTED): (Circuit.CLOSED, Action.FORGIVE),
    (Circuit.HALF_OPEN, Event.DISPATCHED): (Circuit.TRIAL, Action.START_LEASE),
    (Circuit.HALF_OPEN, Event.SERVED): (Circuit.CLOSED, Action.FORGIVE),
    (Circuit.HALF_OPEN, Event.FAULT): (Circuit.OPEN, Action.START_OPEN),
    (Circuit.HALF_OPEN, Event.PROBE_OK): (Circuit.CLOSED, Action.PROBATION),
    (Circuit.HALF_OPEN, Event.PROBE_FAILED): (Circuit.OPEN, Action.START_OPEN),
    (Circuit.HALF_OPEN, Event.RESTARTED): (Circuit.CLOSED, Action.FORGIVE),
    (Circuit.TRIAL, Event.SERVED): (Circuit.CLOSED, Action.FORGIVE),
    (Circuit.TRIAL, Event.FAULT): (Circuit.OPEN, Action.START_OPEN),
    (Circuit.TRIAL, Event.NEUTRAL): (Circuit.HALF_OPEN, Action.NONE),
    (Circuit.TRIAL, Event.WAITED): (Circuit.HALF_OPEN, Action.NONE),
    (Circuit.TRIAL, Event.PROBE_OK): (Circuit.CLOSED, Action.PROBATION),
    (Circuit.TRIAL, Event.PROBE_FAILED): (Circuit.OPEN, Action.START_OPEN),
    (Circuit.TRIAL, Event.RESTARTED): (Circuit.CLOSED, Action.FORGIVE),
}
"""The whole state machine of the circuit: any other pair changes nothing."""

ILL_STATUSES = frozenset((500, 502, 503, 504, 520, 521, 522, 523, 524))
"""Answers by which an engine, or a proxy before it, says that it cannot serve: 520 to 524 are Cloudflare's for 502 and
504. Every other 5xx is about the request: 501 and 505 about its method and version, 507 and 508 about what it names.
SMG tries again on the first four alone, and 4xx in the count of its breakers have caused outages (sglang's issue
25811)."""

BUSY_STATUSES = frozenset((429, 529))
"""Too much of one client, or of all (Anthropic's): the engine is well. A 503 may mean the same (`blame.judgements`)."""

FAULTS = frozenset((Outcome.SERVER_ERROR, Outcome.CONNECT_ERROR, Outcome.TIMEOUT, Outcome.BROKEN))
NEVER_S = float("inf")

SEEN_FAULTS = 2
"""What a fault counts of which a client had a part, since nobody could mend it: no more than three clients see one."""

CIRCUIT_OPEN_GROWTH_MAX = 8
"""A circuit that opens again and again stays open for at most so many times the first open time."""


def outcome_of(status: int) -> Outcome:
    """Return how a request with a complete answer of this status ended."""
    if status < 400:
        return Outcome.SUCCESS
    if status in BUSY_STATUSES:
        return Outcome.OVERLOADED
    return Outcome.SERVER_ERROR if status in ILL_STATUSES else Outcome.REFUSED


@dataclass(frozen=True, slots=True)
class BackendLimits(Options):
    """Thresholds of health and circuit, and the size of the registry."""

    SECTION = "Backends"

    probe_failures_to_unhealthy: int = option(  # Ranvier's and SMG's documented value
        3, "Failed probes in a row that make a backend unhealthy.", least=1, key="probe_failures"
    )
    probe_successes_to_healthy: int = option(  # the same
        2, "Good probes in a row that make it healthy again.", least=1, key="probe_successes"
    )
    circuit_faults_to_open: int = option(  # Ranvier's
        5,
        "Failed requests in a row (500, 502, 503, 504, no answer, no connection) that open the circuit of a backend. "
        "An answer that fails behind its beginning counts twice. A 503 with Retry-After or of a full queue is no "
        "failure; nor does one count that other backends share.",
        least=1,
        key="circuit_failures",
    )
    circuit_open_s: float = seconds(  # Ranvier's; it doubles three times: a repaired engine is soon tried again
        30.0, "Time an open circuit waits before it lets one request try."
    )
    backends_max: int = option(4096, least=1, most=4096)  # BackendId is 12 bits in the route table


class VitalState(NamedTuple):
    """The part of a backend's vitals that the Registry watches for changes."""

    health: Health
    circuit: Circuit
    admits: bool
    silent: bool
    in_vain: bool


@dataclass(slots=True)
class Vitals:
    """Health and circuit of one backend with their counters. `now` is in seconds of any steady clock."""

    limits: BackendLimits
    health: Health = Health.UNKNOWN
    by_report: bool = False  # unhealthy only by peers' reports, so there is nothing to report to them
    circuit: Circuit = Circuit.CLOSED
    streak: int = 0  # of probes: above 0 successes in a row, below 0 failures in a row
    timeouts: int = 0  # of probes, in a row
    failing_since: float = 0.0  # when the first of the failures in a row was asked for
    failed_at: float = 0.0  # when the last of them, or a report, was taken in
    faults: int = 0  # of requests, in a row
    faults_since: int = 0  # of requests sent since the circuit opened, in a row
    openings: int = 0  # ever
    openings_in_a_row: int = 0  # since a request was last served
    wake_at: float = NEVER_S  # when WAITED is due, seconds
    causes: set[int] = field(default_factory=set)  # of the faults in a row that count once for equal requests

    def __repr__(self) -> str:
        return f"<Vitals {self.health.value}, {self.circuit.value}, streak {self.streak}, {self.faults} faults>"

    @property
    def admits(self) -> bool:
        """Whether a request may be sent."""
        return self.health is not Health.UNHEALTHY and self.circuit in (Circuit.CLOSED, Circuit.HALF_OPEN)

    def admits_then(self, now: float) -> bool:
        """Whether a request may be sent at that time, if nothing happens until then."""
        twin = replace(self, causes=set())
        twin.tick(now)
        return twin.admits

    @property
    def silent(self) -> bool:
        """Whether it is unhealthy by time-outs alone: asked if nobody else can be, and well again by any byte."""
        return self.health is Health.UNHEALTHY and self.timeouts >= self.limits.probe_failures_to_unhealthy

    @property
    def dead(self) -> bool:
        """Whether it is unhealthy, and not by time-outs alone."""
        return self.health is Health.UNHEALTHY and not self.silent

    @property
    def in_vain(self) -> bool:
        """Whether it was asked in spite of its open circuit, and failed as many more requests as had opened it."""
        return self.circuit is Circuit.OPEN and self.faults_since >= self.limits.circuit_faults_to_open

    @property
    def quiet(self) -> bool:
        """Whether one more served request would change nothing."""
        well = self.circuit is Circuit.CLOSED and self.health is not Health.UNHEALTHY
        return well and self.faults == 0 and self.openings_in_a_row == 0

    @property
    def state(self) -> VitalState:
        return VitalState(self.health, self.circuit, self.admits, self.silent, self.in_vain)

    def probe(
        self, ok: bool, now: float, *, began: float = 0.0, received_at: float = 0.0, timed_out: bool = False
    ) -> None:
        """Take in a probe that `began` then. `received_at`: when the last byte of anything came from the engine."""
        if ok:
            self.streak = max(self.streak, 0) + 1
            is_back = self.silent and not self.by_report
            if self.health is Health.UNKNOWN or is_back or self.streak >= self.limits.probe_successes_to_healthy:
                self.health, self.timeouts = Health.HEALTHY, 0
        else:
            self.by_report = False
            # a time-out is no refusal, the engine may be busy: what it sent since the row began ends the row
            is_row = self.streak < 0 and not (self.timeouts and timed_out and received_at > self.failing_since)
            if not is_row:
                self.streak, self.timeouts, self.failing_since = 0, 0, began
            self.failed_at = now
            self.streak -= 1
            self.timeouts = self.timeouts + 1 if timed_out else 0
            if -self.streak >= self.limits.probe_failures_to_unhealthy:
                self.health = Health.UNHEALTHY
        self.feed(Event.PROBE_OK if ok else Event.PROBE_FAILED, now)

    def revive(self) -> None:
        """Make it healthy, since it was silent and sent something."""
        self.health, self.streak, self.timeouts, self.by_report = Health.HEALTHY, 0, 0, False

    def end(
        self,
        outcome: Outcome,
        now: float,
        *,
        judged: bool = True,
        cause: int | None = None,
        was_seen: bool = False,
        sent_at: float = 0.0,
    ) -> None:
        """Take in how a request ended that was sent then. One that is not `judged` asked for no inference, or is judged
        later. Unless a trial fails, only the first of the faults in a row with one `cause` counts. `was_seen`: by a
        client."""
        # a failed connect would fail whatever was sent; an engine that knows no OPTIONS may serve chats well, and the
        # reverse
        if not judged and outcome is not Outcome.CONNECT_ERROR:
            self.feed(Event.NEUTRAL, now)
        elif outcome in FAULTS and self.circuit in (Circuit.CLOSED, Circuit.OPEN) and cause in self.causes:
            pass
        elif outcome in FAULTS:
            weight = SEEN_FAULTS if was_seen else 1
            self.faults += weight
            if self.circuit is Circuit.OPEN and sent_at >= self.wake_at - self.open_s:
                self.faults_since += weight
            if cause is not None and len(self.causes) < self.limits.circuit_faults_to_open:
                self.causes.add(cause)
            if self.faults >= self.limits.circuit_faults_to_open or self.circuit is not Circuit.CLOSED:
                self.feed(Event.FAULT, now)
        else:
            self.feed(Event.SERVED if outcome is Outcome.SUCCESS else Event.NEUTRAL, now)

    def tick(self, now: float) -> None:
        if now >= self.wake_at:
            self.feed(Event.WAITED, now)

    def hang(self, now: float) -> None:
        """Make it unhealthy as enough probes that timed out would."""
        limit = self.limits.probe_failures_to_unhealthy
        self.health, self.streak, self.timeouts, self.by_report = Health.UNHEALTHY, -limit, limit, False
        self.failed_at = now
        self.feed(Event.PROBE_FAILED, now)

    def doubt(self, now: float) -> None:
        """Have one more failed probe decide."""
        almost = self.limits.probe_failures_to_unhealthy - 1
        if almost > -self.streak:
            self.streak, self.timeouts, self.failing_since = -almost, almost, now

    def condemn(self, now: float) -> None:
        """Make it unhealthy as enough failed probes would, by time-outs unless one of this node was refused: peers do
        not say what they saw."""
        self.by_report = self.by_report or self.health is not Health.UNHEALTHY
        if self.timeouts == max(-self.streak, 0):
            self.timeouts = self.limits.probe_failures_to_unhealthy
        self.streak = -self.limits.probe_failures_to_unhealthy
        self.failed_at = now
        self.health = Health.UNHEALTHY
        self.feed(Event.PROBE_FAILED, now)

    def feed(self, event: Event, now: float) -> None:
        """Make one step of the circuit's state machine."""
        circuit, action = TRANSITIONS.get((self.circuit, event), (self.circuit, Action.NONE))
        if circuit is not self.circuit:
            self.circuit = circuit
            self.wake_at = NEVER_S
        if action is Action.FORGIVE:
            self.faults = self.openings_in_a_row = 0
            self.causes.clear()
        elif action is Action.PROBATION:
            self.faults = self.limits.circuit_faults_to_open - 1
        elif action is Action.START_OPEN:
            self.openings += 1
            self.openings_in_a_row += 1
            self.faults_since = 0
            self.wake_at = now + self.open_s
        elif action is Action.START_LEASE:
            self.wake_at = now + self.open_s

    @property
    def open_s(self) -> float:
        """The open time of the latest opening: doubled with each opening in a row, bounded."""
        doublings = min(max(self.openings_in_a_row - 1, 0), 32)  # 32: keeps the power a sane number
        return self.limits.circuit_open_s * min(2.0**doublings, CIRCUIT_OPEN_GROWTH_MAX)
