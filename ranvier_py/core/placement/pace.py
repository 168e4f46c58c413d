"""Pace: how fast one backend gets to first tokens, learned from those it gave. Pure, and never told a constant.

An engine computes prompts one after the other (or in shared steps, which takes as long together). So the time from one
first token to the next is what the second one cost: a fixed part, a part for each token that was computed, and a part
for each request that decodes beside it. The fixed part is another one for a request that came to an idle engine (the
way there, a step that was under way) than for one that had to queue (a place in the batch that had to become free). All
are fitted by least squares, older observations fading by a window; a backend that has shown little borrows from all
the others.

Before anything is learned the fixed parts are 0 and a token takes a nominal time, so that predictions still rank
backends by the tokens they have to compute.
Cost: about 2 us for an observation, 0.3 us for a prediction.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol

from ranvier_py.core.ids import BackendId
from ranvier_py.core.placement import Service

NOMINAL_S_PER_TOKEN = 1e-4
"""10,000 tokens/s, until something is known: only the order of predictions matters then, and that needs no rate."""

WINDOW = 200.0
"""Observations that count: a backend that gets slower is known within minutes, and chance averages out."""

BORROWED = 16.0
"""Observations that a fit should have: what a backend has not shown of them yet is borrowed from the whole fleet."""

SINGULAR = 1e-6  # share of a determinant below which two slopes can't be told apart
GAP_MAX_S = 600.0  # longer gaps are no service: an engine that hung, a node that slept


class Moments:
    """Sums over observations (tokens, requests decoding, seconds), fading."""

    __slots__ = ("count", "dd", "dy", "sum_d", "sum_t", "sum_y", "td", "tt", "ty")

    def __init__(self) -> None:
        self.count = 0.0
        self.sum_t = self.sum_d = self.sum_y = 0.0
        self.tt = self.td = self.dd = self.ty = self.dy = 0.0  # of products

    def fade(self, share: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * share)

    def add(self, tokens: float, decoding: float, seconds: float, weight: float = 1.0) -> None:
        self.count += weight
        self.sum_t += weight * tokens
        self.sum_d += weight * decoding
        self.sum_y += weight * seconds
        self.tt += weight * tokens * tokens
        self.td += weight * tokens * decoding
        self.dd += weight * decoding * decoding
        self.ty += weight * tokens * seconds
        self.dy += weight * decoding * seconds

    def plus(self, other: Moments, share: float) -> Moments:
        """These and a share of the others'."""
        both = Moments()
        for name in self.__slots__:
            setattr(both, name, getattr(self, name) + share * getattr(other, name))
        return both


class Line(NamedTuple):
    """What is predicted with: seconds."""

    per_token: float
    per_decoding: float  # for each request that decodes there: it shares the steps
    alone: float  # fixed part for a request that comes to a backend where nobody waits
    queued: float  # fixed part for each request in a queue


class Ahead(NamedTuple):
    """What a request finds at a backend: others that wait for their first token, and others that have it."""

    tokens: int  # that the waiting ones have to compute
    waiting: int
    decoding: int
    since_progress_s: float  # since the first of the waiting ones became the first


class Waiting(Protocol):
    """What has work, as `placement.Candidate` and `work.Work` do."""

    @property
    def pending_tokens(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def own_waiting(self) -> int: ...
    @property
    def decoding(self) -> int: ...
    @property
    def progress_at(self) -> float: ...


class Prediction(NamedTuple):
    """Seconds to the first token."""

    queue_s: float  # until its turn comes
    prefill_s: float  # its own


NOMINAL = Line(NOMINAL_S_PER_TOKEN, 0.0, 0.0, 0.0)


class Pace:
    """One backend's, or with no `fleet` that of all backends together."""

    __slots__ = ("_alone", "_fleet", "_line", "_queued", "_refit_at", "error_s", "observed")

    def __init__(self, fleet: Pace | None = None) -> None:
        self._fleet = fleet
        self._alone = Moments()
        self._queued = Moments()
        self._line: Line | None = None
        self._refit_at = 0.0  # observations of the fleet that make our part of them old
        self.observed = 0
        self.error_s = 0.0  # what predictions of a gap are wrong by, on average

    @property
    def count(self) -> float:
        """Observations that still count."""
        return self._alone.count + self._queued.count

    def observe(self, tokens: int, decoding: int, gap_s: float, *, queued: bool) -> None:
        """A first token came `gap_s` after the one before it (or after the request's departure)."""
        if not 0.0 <= gap_s <= GAP_MAX_S:
            return
        self.observed += 1
        line = self.line()
        expected_s = tokens * line.per_token + decoding * line.per_decoding + (line.queued if queued else line.alone)
        self.error_s += (abs(gap_s - expected_s) - self.error_s) / min(self.count + 1.0, WINDOW)
        self._alone.fade(1.0 - 1.0 / WINDOW)
        self._queued.fade(1.0 - 1.0 / WINDOW)
        (self._queued if queued else self._alone).add(tokens, decoding, gap_s)
        self._line = None

    def amend(self, before: int, tokens: int, decoding: int, gap_s: float, *, queued: bool) -> None:
        """What was observed with `before` tokens had really computed `tokens`."""
        moments = self._queued if queued else self._alone
        if 0.0 <= gap_s <= GAP_MAX_S and moments.count > 1.0:
            moments.add(before, decoding, gap_s, -1.0)
            moments.add(tokens, decoding, gap_s)
            self._line = None

    def line(self) -> Line:
        """The fit. The fleet's part in it may be a tenth of the fleet's observations behind."""
        fleet = self._fleet
        if self._line is None or (fleet is not None and fleet.observed >= self._refit_at):
            self._line = self._fit()
            self._refit_at = 1.1 * fleet.observed + 1.0 if fleet is not None else inf
        return self._line

    def predict(self, tokens: int, ahead: Ahead) -> Prediction:
        """Of a request with so many tokens to compute.

        What the first of those ahead has got done since it became the first is taken off, up to its average share.
        """
        line = self.line()
        prefill_s = line.per_token * tokens
        steps_s = line.per_decoding * ahead.decoding
        if not ahead.waiting:
            return Prediction(line.alone + steps_s, prefill_s)
        each_s = line.queued + steps_s
        ahead_s = ahead.tokens * line.per_token + ahead.waiting * each_s
        done_s = min(max(0.0, ahead.since_progress_s), ahead_s / ahead.waiting)
        return Prediction(ahead_s - done_s + each_s, prefill_s)

    def _fit(self) -> Line:
        alone, queued, fleet = self._alone, self._queued, self._fleet
        missing = BORROWED - self.count
        if fleet is not None and fleet.count and missing > 0.0:
            share = min(1.0, missing / fleet.count)
            alone, queued = alone.plus(fleet._alone, share), queued.plus(fleet._queued, share)
        return fitted(alone, queued)


def fitted(alone: Moments, queued: Moments) -> Line:
    """Least squares with two slopes and two fixed parts, none of them negative."""
    tokens, seconds = alone.sum_t + queued.sum_t, alone.sum_y + queued.sum_y
    if tokens <= 0.0:
        return NOMINAL
    tt = td = dd = ty = dy = 0.0  # within the groups: the fixed parts take what is between them
    for group in (alone, queued):
        if group.count > 0.0:
            tt += group.tt - group.sum_t**2 / group.count
            td += group.td - group.sum_t * group.sum_d / group.count
            dd += group.dd - group.sum_d**2 / group.count
            ty += group.ty - group.sum_t * group.sum_y / group.count
            dy += group.dy - group.sum_d * group.sum_y / group.count
    steepest = seconds / tokens  # all time to the tokens, none to anything else
    determinant = tt * dd - td * td
    per_token = per_decoding = 0.0
    if determinant > SINGULAR * tt * dd:
        per_token = (ty * dd - dy * td) / determinant
        per_decoding = (dy * tt - ty * td) / determinant
    if per_decoding <= 0.0 or per_token <= 0.0:  # what decodes seems to help, or tells nothing: leave it out
        per_token, per_decoding = (ty / tt if tt > 0.0 else steepest), 0.0
    if not 0.0 < per_token <= steepest:
        per_token, per_decoding = steepest, 0.0
    return Line(per_token, per_decoding, fixed(alone, per_token, per_decoding), fixed(queued, per_token, per_decoding))


def fixed(group: Moments, per_token: float, per_decoding: float) -> float:
    """What the slopes leave, on average."""
    if group.count <= 0.0:
        return 0.0
    return max(0.0, (group.sum_y - per_token * group.sum_t - per_decoding * group.sum_d) / group.count)


def ahead_of(work: Waiting, now: float) -> Ahead:
    """What a request would find at a backend."""
    since_s = now - work.progress_at if work.own_waiting else 0.0  # nothing is known of the progress of peers' requests
    return Ahead(work.pending_tokens, work.waiting, work.decoding, since_s)


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
        """See `placement.Watches`.

        What peers had waiting there was computed first, as far as it is known. Between two first tokens of ours an
        unknown part of it was: such gaps teach nothing.
        """
        pace, tokens = self[service.backend], service.computed_tokens + service.peer_tokens
        if not (service.queued and service.peer_tokens):
            for each in (self.fleet, pace):
                each.observe(tokens, service.decoding, service.gap_s, queued=service.queued)

    def corrected(self, service: Service, computed_tokens: int) -> None:
        """See `placement.Watches`."""
        if computed_tokens != service.computed_tokens and not (service.queued and service.peer_tokens):
            before, after = (tokens + service.peer_tokens for tokens in (service.computed_tokens, computed_tokens))
            for pace in (self.fleet, self[service.backend]):
                pace.amend(before, after, service.decoding, service.gap_s, queued=service.queued)
