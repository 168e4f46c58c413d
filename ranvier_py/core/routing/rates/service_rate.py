"""Service rates: predicts when backends give first tokens, learned from those that they gave. Pure; no fixed speed.

Rule: an engine computes prompts one after the other, so the time between two first tokens is the cost of the second
prompt: a fixed part, a part for each computed token, and one for each request that decodes beside it. All are fitted
by least squares to what the whole fleet showed, older observations fading, and to a few assumed ones. Of each backend
one number is learned: how many times as long it takes as the fleet's line says. A node among several sees too little
of each to learn all, and errors of chance would move requests. Bound: the backends.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Service
from ranvier_py.core.routing.rates.moments import Moments
from ranvier_py.core.routing.rates.work import Work

NOMINAL_S_PER_TOKEN = 1e-4
"""10,000 tokens/s until something is learned: only the order of predictions matters then, and that needs no rate."""

WINDOW = 200.0
"""Number of observations that count: enough to average chance out, few enough to notice a slower backend in minutes."""

BORROWED = 16.0
"""How many observations each assumption counts for: a backend is as fast as the fleet, decoding requests cost nothing,
and at first, a prompt with nothing to compute takes no time. Work that a node can't see grows with load, as decoding
does, and would else be counted as decoding's cost; and prompts of one length alone don't show what a token takes."""

new = tuple.__new__
"""Builds a NamedTuple in half the time that calling its class takes: a decision needs dozens."""

SINGULAR = 1e-6  # share of a determinant below which two slopes can't be told apart
SLOPE_EVERY = 16  # observations between two looks at whether depth counts
SLOPE_MAX = 1e-3  # a token behind a thousand others takes twice as long: several times what any model shows
SLOPE_CERTAINTY = 10.0
"""How many standard errors above 0 the slope must be. Queues make errors that several requests share, so fewer would
sometimes find a slope in engines that have none."""
SLOPE_LOOKS = 16
"""How many looks in a row must find a slope, over more than the window: a cache that loses deep prefixes looks like a
slope until the counts in answers amend that."""

GAP_MAX_S = 600.0  # longer gaps are no service: an engine that hung, a node that slept


class FittedLine(NamedTuple):
    """The fitted costs in seconds, with which predictions are made. Tokens are weighed ones: as many as would take as
    long at a prompt's beginning. The fixed part differs between a request that came to an idle engine (the network, a
    step in progress) and one that queued (until a place in the batch was free)."""

    per_token: float
    per_decoding: float  # for each request that decodes there, which shares the steps
    alone: float  # fixed part of a request that comes to a backend where none waits
    queued: float  # fixed part of each request in a queue

    def gap_s(self, tokens: float, decoding: float, *, queued: bool) -> float:
        """Predict the gap before the first token of one request with so many weighed tokens to compute."""
        return tokens * self.per_token + decoding * self.per_decoding + (self.queued if queued else self.alone)


class Ahead(NamedTuple):
    """What a request finds ahead of it at a backend: requests that wait for a first token, and those that have it."""

    tokens: int  # weighed, to be computed for the waiting ones
    waiting: int
    decoding: int
    since_progress_s: float  # since the first of the waiting ones became the first


NOMINAL = FittedLine(NOMINAL_S_PER_TOKEN, 0.0, 0.0, 0.0)


class Fleet:
    """All backends together: the fitted line, its usual error, and the slope."""

    def __init__(self) -> None:
        self._alone = Moments()
        self._queued = Moments()
        self._assumed = BORROWED  # assumed observations with nothing to compute that took no time
        self._line: FittedLine | None = NOMINAL
        self._seen = 0
        self._steep = 0  # looks in a row that found a slope
        self.error_s = 0.0  # mean absolute error of predicted gaps
        self.slope = 0.0  # the share of its time by which each earlier token makes a token slower

    @property
    def count(self) -> float:
        """How many observations still count."""
        return self._alone.count + self._queued.count

    @property
    def gap_s(self) -> float:
        """The mean gap."""
        count = self._alone.count + self._queued.count
        return (self._alone.sum_y + self._queued.sum_y) / count if count else 0.0

    def observe(self, tokens: int, decoding: int, gap_s: float, *, queued: bool, depths: float = 0.0) -> None:
        """Learn from a first token that came `gap_s` after the one before it (or after its request was sent)."""
        error_s = abs(gap_s - self.line().gap_s(tokens + self.slope * depths, decoding, queued=queued))
        self.error_s += (error_s - self.error_s) / min(self.count + 1.0, WINDOW)
        keep = 1.0 - 1.0 / WINDOW
        self._assumed *= keep
        self._alone.fade(keep)
        self._queued.fade(keep)
        (self._queued if queued else self._alone).add(tokens, decoding, gap_s, depths=depths)
        self._seen += 1
        if self._seen % SLOPE_EVERY == 0:
            found = slope_of(self._alone, self._queued, self._assumed)
            self._steep = self._steep + 1 if found else 0
            self.slope = found if self._steep >= SLOPE_LOOKS else 0.0
        self._line = None

    def assume(self, per_token_s: float) -> None:
        """Take what a token costs from elsewhere, as long as no first token has shown it."""
        self._line = FittedLine(per_token_s, 0.0, 0.0, 0.0)

    def amend(self, service: Service, tokens: int) -> None:
        """Correct an observation whose backend had really computed so many tokens."""
        moments = self._queued if service.queued else self._alone
        if moments.count > 1.0:
            before, decoding, gap_s = service.computed_tokens, service.decoding, service.gap_s
            moments.add(before, decoding, gap_s, -1.0, depths_of(before, service.prompt_tokens))
            moments.add(tokens, decoding, gap_s, depths=depths_of(tokens, service.prompt_tokens))
            self._line = None

    def line(self) -> FittedLine:
        if self._line is None:
            slope = self.slope
            self._line = fitted(self._alone.weighed(slope), self._queued.weighed(slope), self._assumed)
        return self._line


class ServiceRate:
    """One backend's service rate: the fleet's line, times a factor."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._line: FittedLine | None = None  # the fleet's line that `_factor` was computed for
        self._factor = 1.0
        self.tokens = self.depths = self.decoding = self.gaps_s = 0.0  # fading sums over observations
        self.alone = self.queued = 0.0  # fading counts of observations

    @property
    def per_token_s(self) -> float:
        """Seconds for a weighed token."""
        return self.factor * self._fleet.line().per_token

    @property
    def factor(self) -> float:
        """How many times as long this backend takes as the fleet's line says."""
        line = self._fleet.line()
        if line is not self._line:
            tokens = self.tokens + self._fleet.slope * self.depths
            predicted_s = tokens * line.per_token + self.decoding * line.per_decoding
            predicted_s += self.alone * line.alone + self.queued * line.queued
            borrowed_s = BORROWED * self._fleet.gap_s
            self._factor = (self.gaps_s + borrowed_s) / (predicted_s + borrowed_s) if borrowed_s > 0.0 else 1.0
            self._line = line
        return self._factor

    def observe(self, tokens: int, decoding: int, gap_s: float, *, queued: bool, depths: float = 0.0) -> None:
        """Learn from a first token, as `Fleet.observe` does."""
        self.tokens += tokens - self.tokens / WINDOW
        self.depths += depths - self.depths / WINDOW
        self.decoding += decoding - self.decoding / WINDOW
        self.gaps_s += gap_s - self.gaps_s / WINDOW
        self.alone += (not queued) - self.alone / WINDOW
        self.queued += queued - self.queued / WINDOW
        self._line = None

    def amend(self, service: Service, tokens: int) -> None:
        """Correct an observation, as `Fleet.amend` does."""
        before, prompt_tokens = service.computed_tokens, service.prompt_tokens
        self.tokens = max(0.0, self.tokens + tokens - before)
        self.depths = max(0.0, self.depths + depths_of(tokens, prompt_tokens) - depths_of(before, prompt_tokens))
        self._line = None

    def predict(self, tokens: float, ahead: Ahead) -> tuple[float, float]:
        """Return the seconds until the turn of a request with so many weighed tokens, and those of its own prefill.

        A request ahead decodes while those behind it are computed, so each of these takes longer than the one before.
        The time since the first of them became the first is taken off, up to its average share.
        """
        line = self._fleet.line()
        ahead_tokens, waiting, ahead_decoding, since_progress_s = ahead
        factor = self._factor if line is self._line else self.factor
        prefill_s = factor * line.per_token * tokens
        own_s = factor * line.per_decoding * (ahead_decoding + waiting)
        if not waiting:
            return factor * line.alone + own_s, prefill_s
        decoding = ahead_decoding + (waiting - 1) / 2  # beside one of those ahead, on average
        each_s = factor * (line.queued + line.per_decoding * decoding)
        ahead_s = factor * line.per_token * ahead_tokens + waiting * each_s
        done_s = min(max(0.0, since_progress_s), ahead_s / waiting)
        late_s = max(0.0, since_progress_s - ahead_s)  # the first of them waits for a place, and who knows how long yet
        return ahead_s - done_s + late_s + factor * line.queued + own_s, prefill_s


def fitted(alone: Moments, queued: Moments, assumed: float = 0.0) -> FittedLine:
    """Fit two slopes and two fixed parts by least squares, none of them negative.

    `assumed`: observations added to each group: nothing to compute, no time taken, decoding as in the group's mean.
    """
    tokens, seconds = alone.sum_t + queued.sum_t, alone.sum_y + queued.sum_y
    if tokens <= 0.0 or seconds <= 0.0:
        return NOMINAL
    tt = td = ty = dy = 0.0  # within groups: fixed parts take the differences between them
    dd = BORROWED * ((alone.sum_d + queued.sum_d) / (alone.count + queued.count)) ** 2
    for group in (alone, queued):
        if group.count > 0.0:
            count = group.count + assumed
            tt += group.tt - group.sum_t**2 / count
            td += group.td - group.sum_t * group.sum_d / group.count
            dd += group.dd - group.sum_d**2 / group.count
            ty += group.ty - group.sum_t * group.sum_y / count
            dy += group.dy - group.sum_d * group.sum_y / group.count
    steepest = seconds / tokens  # the tokens take all of the time
    determinant = tt * dd - td * td
    per_token = per_decoding = 0.0
    if determinant > SINGULAR * tt * dd:
        per_token = (ty * dd - dy * td) / determinant
        per_decoding = (dy * tt - ty * td) / determinant
    if per_decoding <= 0.0 or per_token <= 0.0:  # decoding seems to help, or can't be told apart: leave it out
        per_token, per_decoding = (ty / tt if tt > 0.0 else steepest), 0.0
    if not 0.0 < per_token <= steepest:
        per_token, per_decoding = steepest, 0.0
    fixed_s = [fixed(group, per_token, per_decoding, assumed) for group in (alone, queued)]
    return FittedLine(per_token, per_decoding, *fixed_s)


def depths_of(tokens: int, prompt_tokens: int) -> float:
    """Return the sum, over the last `tokens` tokens of a prompt, of how many tokens are before each."""
    return tokens * (max(prompt_tokens, tokens) - tokens / 2)


def slope_of(alone: Moments, queued: Moments, assumed: float) -> float:
    """Return the share of its time by which each earlier token, which attention reads, makes a token slower; 0 where
    that may be chance.

    Compares least squares by tokens and their depths with those by tokens alone, decoding and fixed parts taken out
    first: the depths must explain more of the rest than chance would.
    """
    tt = ta = aa = ty = ay = yy = td = ad = dy = 0.0
    dd = SINGULAR
    for group in (alone, queued):
        if group.count > 0.0:
            all_of, seen = group.count + assumed, group.count  # as in `fitted`
            of_depths, by_tokens, squares, by_decoding, by_seconds = group.depths
            tt += group.tt - group.sum_t**2 / all_of
            ta += by_tokens - group.sum_t * of_depths / all_of
            aa += squares - of_depths**2 / all_of
            ty += group.ty - group.sum_t * group.sum_y / all_of
            ay += by_seconds - of_depths * group.sum_y / all_of
            yy += group.yy - group.sum_y**2 / all_of
            td += group.td - group.sum_t * group.sum_d / seen
            ad += by_decoding - of_depths * group.sum_d / seen
            dy += group.dy - group.sum_d * group.sum_y / seen
            dd += group.dd - group.sum_d**2 / seen
    if dy > 0.0:
        tt, ta, aa = tt - td * td / dd, ta - td * ad / dd, aa - ad * ad / dd
        ty, ay, yy = ty - td * dy / dd, ay - ad * dy / dd, yy - dy * dy / dd
    determinant = tt * aa - ta * ta
    if tt <= 0.0 or aa <= 0.0 or determinant <= SINGULAR * tt * aa:
        return 0.0
    per_depth, per_token = (ay * tt - ty * ta) / determinant, (ty * aa - ay * ta) / determinant
    explained = per_depth * per_depth * determinant / tt
    left = max(0.0, yy - ty * ty / tt - explained)
    degrees = alone.count + queued.count - 4.0
    if per_depth <= 0.0 or degrees <= 0.0 or explained * degrees <= SLOPE_CERTAINTY**2 * left:
        return 0.0
    return min(SLOPE_MAX, per_depth / per_token) if per_token > 0.0 else SLOPE_MAX


def fixed(group: Moments, per_token: float, per_decoding: float, assumed: float) -> float:
    """Return the mean time that the slopes leave unexplained, at least 0."""
    if group.count <= 0.0:
        return 0.0
    left_s = (group.sum_y - per_token * group.sum_t) / (group.count + assumed)
    return max(0.0, left_s - per_decoding * group.sum_d / group.count)


def ahead_of(work: Work, now: float) -> Ahead:
    """Return what a request would find ahead of it at a backend."""
    waiting = work.waiting
    if not waiting:
        return new(Ahead, (0, 0, work.decoding, 0.0))
    return new(Ahead, (work.pending_tokens, waiting, work.decoding, now - work.progress_at))


class ServiceRates:
    """The service rates of all backends, and the fleet's line. Bounded by how many backends there can be.

    Prompts that were computed behind peers' requests are not learned from: how far those had come is not known.
    """

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.by_backend: dict[BackendId, ServiceRate] = {}

    def __copy__(self) -> ServiceRates:
        twin = ServiceRates()
        twin.fleet, twin.by_backend = deepcopy((self.fleet, self.by_backend))
        return twin

    def __getitem__(self, backend: BackendId) -> ServiceRate:
        rate = self.by_backend.get(backend)
        if rate is None:
            rate = self.by_backend[backend] = ServiceRate(self.fleet)
        return rate

    def forget(self, backend: BackendId) -> None:
        """Forget the rate of the backend that had this id before. What it showed of the fleet fades by itself."""
        self.by_backend.pop(backend, None)

    def work_of(self, held: int, prompt_tokens: int) -> int:
        """Return the weighed tokens that a backend that holds `held` tokens of a prompt has to compute."""
        tokens = max(0, prompt_tokens - held)
        slope = self.fleet.slope
        return round(tokens + slope * depths_of(tokens, prompt_tokens)) if slope else tokens

    def served(self, service: Service) -> None:
        """See `placement.Policy`."""
        if teaches(service):
            tokens, decoding, queued = service.computed_tokens, service.decoding, service.queued
            depths = depths_of(tokens, service.prompt_tokens)
            gap_s = self._of_service(service, tokens + self.fleet.slope * depths)
            for each in (self.fleet, self[service.backend]):
                each.observe(tokens, decoding, gap_s, queued=queued, depths=depths)

    def _of_service(self, service: Service, tokens: float) -> float:
        """Return the part of a gap that counts. If another request ended in it, this one may have waited for its place
        in the batch or in the cache, which says nothing of rates: then what exceeds twice the prediction is left out,
        as far as it was before that end. Half of the gaps would have to be like that to mislead."""
        gap_s = service.gap_s
        if gap_s <= service.since_end_s or self.fleet.count < BORROWED:
            return gap_s
        line = self.fleet.line()
        expected_s = self[service.backend].factor * line.gap_s(tokens, service.decoding, queued=service.queued)
        return min(gap_s, max(2.0 * expected_s, service.since_end_s))

    def corrected(self, service: Service, computed_tokens: int) -> None:
        """See `placement.Policy`."""
        if computed_tokens != service.computed_tokens and teaches(service):
            self.fleet.amend(service, computed_tokens)
            self[service.backend].amend(service, computed_tokens)


def teaches(service: Service) -> bool:
    return not service.peer_tokens and 0.0 <= service.gap_s <= GAP_MAX_S
