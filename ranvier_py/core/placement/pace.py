"""Pace: how fast one backend gets to first tokens, learned from those it gave. Pure, and never told a constant.

An engine computes prompts one after the other (or in shared steps, which takes as long together). So the time from one
first token to the next is, for the request that got the second, what it cost: `gap = fixed + computed_tokens * rate`.
The fixed part is another one for a request that came to an idle engine (the way there, a step that was under way) than
for one that had to queue (a place in the batch that had to become free). Both and the slope are fitted by least
squares, older observations fading by a window; a backend that has shown little borrows from all the others.

Before anything is learned the fixed parts are 0 and a token takes a nominal time, so that predictions still rank
backends by the tokens they have to compute.
Cost: about 2 us for an observation, 0.3 us for a prediction.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.placement import Service

NOMINAL_S_PER_TOKEN = 1e-4
"""10,000 tokens/s, until something is known: only the order of predictions matters then, and that needs no rate."""

WINDOW = 200.0
"""Observations that count: a backend that gets slower is known within minutes, and chance averages out."""

BORROWED = 8.0
"""Observations of the whole fleet that a backend's own are mixed with: an engine like the others needs none of its
own, and one that differs has shown it after as many."""

GAP_MAX_S = 600.0  # longer gaps are no service: an engine that hung, a node that slept


class Moments:
    """Sums over observations (tokens, seconds), fading."""

    __slots__ = ("count", "seconds", "tokens", "tokens_seconds", "tokens_tokens")

    def __init__(self) -> None:
        self.count = 0.0
        self.tokens = 0.0
        self.seconds = 0.0
        self.tokens_tokens = 0.0
        self.tokens_seconds = 0.0

    def fade(self, share: float) -> None:
        self.count *= share
        self.tokens *= share
        self.seconds *= share
        self.tokens_tokens *= share
        self.tokens_seconds *= share

    def add(self, tokens: float, seconds: float, weight: float = 1.0) -> None:
        self.count += weight
        self.tokens += weight * tokens
        self.seconds += weight * seconds
        self.tokens_tokens += weight * tokens * tokens
        self.tokens_seconds += weight * tokens * seconds

    def plus(self, other: Moments, share: float) -> Moments:
        """These and a share of the others'."""
        both = Moments()
        both.count = self.count + share * other.count
        both.tokens = self.tokens + share * other.tokens
        both.seconds = self.seconds + share * other.seconds
        both.tokens_tokens = self.tokens_tokens + share * other.tokens_tokens
        both.tokens_seconds = self.tokens_seconds + share * other.tokens_seconds
        return both


class Line(NamedTuple):
    """What is predicted with: seconds."""

    per_token: float
    alone: float  # fixed part for a request that comes to an idle backend
    queued: float  # fixed part for each request in a queue


class Prediction(NamedTuple):
    """Seconds to the first token."""

    queue_s: float  # until its turn comes
    prefill_s: float  # its own


NOMINAL = Line(NOMINAL_S_PER_TOKEN, 0.0, 0.0)


class Pace:
    """One backend's, or with no `fleet` that of all backends together."""

    __slots__ = ("_alone", "_fleet", "_line", "_queued", "error_s")

    def __init__(self, fleet: Pace | None = None) -> None:
        self._fleet = fleet
        self._alone = Moments()
        self._queued = Moments()
        self._line: Line | None = None
        self.error_s = 0.0  # what predictions of a gap are wrong by, on average

    @property
    def count(self) -> float:
        """Observations that still count."""
        return self._alone.count + self._queued.count

    def observe(self, tokens: int, gap_s: float, *, queued: bool) -> None:
        """A first token came `gap_s` after the one before it (or after the request's departure)."""
        if not 0.0 <= gap_s <= GAP_MAX_S:
            return
        line = self.line()
        error_s = abs(gap_s - tokens * line.per_token - (line.queued if queued else line.alone))
        self.error_s += (error_s - self.error_s) / min(self.count + 1.0, WINDOW)
        self._alone.fade(1.0 - 1.0 / WINDOW)
        self._queued.fade(1.0 - 1.0 / WINDOW)
        (self._queued if queued else self._alone).add(tokens, gap_s)
        self._line = None

    def amend(self, before: int, tokens: int, gap_s: float, *, queued: bool) -> None:
        """What was observed with `before` tokens had really computed `tokens`."""
        moments = self._queued if queued else self._alone
        if 0.0 <= gap_s <= GAP_MAX_S and moments.count > 1.0:
            moments.add(before, gap_s, -1.0)
            moments.add(tokens, gap_s)
            self._line = None

    def line(self) -> Line:
        """The fit. The fleet's part of it is as old as the last observation of this backend."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def predict(self, tokens: int, ahead_tokens: int, waiting: int, since_progress_s: float) -> Prediction:
        """Of a request with so many tokens to compute, behind `waiting` others that have `ahead_tokens` of them left.

        What the first of the others has got done since it became the first is taken off, up to its average share.
        """
        line = self.line()
        prefill_s = line.per_token * tokens
        if not waiting:
            return Prediction(line.alone, prefill_s)
        ahead_s = ahead_tokens * line.per_token + waiting * line.queued
        done_s = min(max(0.0, since_progress_s), ahead_s / waiting)
        return Prediction(ahead_s - done_s + line.queued, prefill_s)

    def _fit(self) -> Line:
        alone, queued, fleet = self._alone, self._queued, self._fleet
        if fleet is not None and fleet.count:
            share = min(1.0, BORROWED / fleet.count)
            alone, queued = alone.plus(fleet._alone, share), queued.plus(fleet._queued, share)
        return fitted(alone, queued)


def fitted(alone: Moments, queued: Moments) -> Line:
    """Least squares with one slope and two fixed parts, none of them negative."""
    spread = varied = 0.0
    for group in (alone, queued):
        if group.count > 0.0:
            spread += group.tokens_tokens - group.tokens**2 / group.count
            varied += group.tokens_seconds - group.tokens * group.seconds / group.count
    tokens, seconds = alone.tokens + queued.tokens, alone.seconds + queued.seconds
    if tokens <= 0.0:
        return NOMINAL
    steepest = seconds / tokens  # all time to the tokens, none to the fixed parts
    slope = varied / spread if spread > 0.0 else inf
    slope = min(slope, steepest) if slope > 0.0 else steepest
    return Line(slope, fixed_part(alone, slope), fixed_part(queued, slope))


def fixed_part(group: Moments, slope: float) -> float:
    return max(0.0, (group.seconds - slope * group.tokens) / group.count) if group.count > 0.0 else 0.0


class Paces:
    """The paces of all backends, and what they have in common. Bounded by the backends there can be."""

    __slots__ = ("by_backend", "fleet")

    def __init__(self) -> None:
        self.fleet = Pace()
        self.by_backend: dict[BackendId, Pace] = {}

    def __getitem__(self, backend: BackendId) -> Pace:
        pace = self.by_backend.get(backend)
        if pace is None:
            pace = self.by_backend[backend] = Pace(self.fleet)
        return pace

    def served(self, service: Service) -> None:
        """See `placement.Watches`."""
        for pace in (self.fleet, self[service.backend]):
            pace.observe(service.computed_tokens, service.gap_s, queued=service.queued)

    def corrected(self, service: Service, computed_tokens: int) -> None:
        """See `placement.Watches`."""
        if computed_tokens != service.computed_tokens:
            for pace in (self.fleet, self[service.backend]):
                pace.amend(service.computed_tokens, computed_tokens, service.gap_s, queued=service.queued)
