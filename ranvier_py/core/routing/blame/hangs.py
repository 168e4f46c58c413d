"""When an engine hangs, and whether another one has room for the requests that wait there. Pure.

Rule: requests in flight and no byte of anything for a quarter of `hang_s` make a suspicion, and a probe at once. It
hangs when none came for `hang_s`, or twice the predicted time of the work known there if that is longer, and a probe
asked for within that time has failed: unstreamed answers send nothing until their end, so an engine that answers probes
does not hang. Invariant: what waits there moves once at most, only to healthy engines with room (test_hang_rules.py,
test_hangs.py).
Bound: FEW, or a quarter of its load, that moved to an engine may wait there at a time; more follow as they are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.backend import Backend

SUSPICION_SHARE = 0.25
"""Of `hang_s`: two of eight seconds. A probe takes three at most, so one or two fit into the rest."""

PREDICTED_FACTOR = 2.0  # a prediction may be wrong by as much
FEW = 4  # requests that an idle engine takes at once: they begin together in one batch of any engine
LOAD_SHARE = 4  # a busy one takes one for so many


class Silence(Enum):
    FINE = "fine"
    SUSPECTED = "suspected"  # probe it now
    HANGS = "hangs"


@dataclass(slots=True)
class HangCounters:
    """What happened since the start."""

    suspicions: int = counter("Looks at engines with requests in flight from which nothing came: probed at once.")
    found: int = counter("Times that an engine was found to hang.")
    moved: int = counter("Requests without a first event that were placed again, away from an engine that hangs.")
    without_room: int = counter("Looks at requests left at an engine that hangs, since no other had room.")


class Hangs:
    """Judges silences, and hands out room. `now` is in seconds of any steady clock."""

    def __init__(self, hang_s: float) -> None:
        self.hang_s = hang_s
        self.counters = HangCounters()

    def quiet(self, backends: Iterable[Backend], now: float) -> list[Backend]:
        """Return those with requests in flight from which nothing came lately."""
        before = now - SUSPICION_SHARE * self.hang_s
        return [each for each in backends if each.work.own.inflight and each.seen.received_at <= before]

    def judge(self, backend: Backend, sent_at: float, predicted_s: Callable[[], float], now: float) -> Silence:
        """Judge a backend. `sent_at`: of the oldest request that is in flight there."""
        since = max(sent_at, backend.seen.received_at)
        if now - since < SUSPICION_SHARE * self.hang_s:
            return Silence.FINE
        probe, vitals = backend.seen.last_probe, backend.vitals
        has_failed = probe is not None and vitals.streak < 0 and vitals.failed_at - probe.latency_s >= since
        if has_failed and now - since >= max(self.hang_s, PREDICTED_FACTOR * predicted_s()):
            return Silence.HANGS
        self.counters.suspicions += 1
        return Silence.SUSPECTED

    def has_room(self, backend: Backend, moved: int, reported_waiting: int, predicted_s: float, now: float) -> bool:
        """Whether one more request may move there. `moved`: those that did, and still wait for a first byte;
        `reported_waiting`: in its queue, as it says; `predicted_s`: until it would begin."""
        if backend.draining or not backend.vitals.admits or reported_waiting or predicted_s > self.hang_s:
            return False
        # a stream there has waited for its first token for longer than a suspicion takes
        if backend.work.waiting and now - backend.work.progress_at > SUSPICION_SHARE * self.hang_s:
            return False
        return moved < max(FEW, (backend.load - moved) // LOAD_SHARE)
