"""How fast backends get to first tokens, learned from those they gave. Pure, and without a constant of speed.

An engine computes prompts one after the other (or in shared steps, which takes as long together). So the time from one
first token to the next is what the second one cost: a fixed part, a part for each token that was computed, and a part
for each request that decodes beside it. The fixed part is another one for a request that came to an idle engine (the
way there, a step that was under way) than for one that had to queue (a place in the batch that had to become free).

All are fitted by least squares to what the whole fleet showed, older observations fading by a window, beside a few
assumed ones. Of one backend only one number is learned: how many times as long as the fleet's line says it takes. For
four of each a node among several sees too little, and chance in them sends requests about.

Attention reads what is before a token, so a token deep in a prompt takes longer than one at its beginning. How much
longer is learned of the fleet as well (`slope_of`), as soon as it can't be chance; what is to be computed is counted in
*weighed* tokens from then on: those that would take as long at a prompt's beginning. Until then, and for ever where
prompts are short, a token is a token.

Before anything is learned the fixed parts are 0 and a token takes a nominal time, so that predictions still rank
backends by the tokens they have to compute.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Candidate, Service

NOMINAL_S_PER_TOKEN = 1e-4
"""10,000 tokens/s, until something is known: only the order of predictions matters then, and that needs no rate."""

WINDOW = 200.0
"""Observations that count: a backend that gets slower is known within minutes, and chance averages out."""

BORROWED = 16.0
"""Observations that each assumption counts for: a backend is as fast as the fleet, requests that decode cost nothing,
and at first, what has nothing to compute takes no time. Work that a node can't see grows with the load, as decoding
does, and would else pass for its cost; and prompts that are all alike tell nothing of what a token takes."""

new = tuple.__new__
"""Makes a NamedTuple in half the time that its name takes: a decision needs dozens."""

SINGULAR = 1e-6  # share of a determinant below which two slopes can't be told apart
SLOPE_EVERY = 16  # observations between two looks at whether depth counts
SLOPE_MAX = 1e-3  # a token behind a thousand others takes twice as long: several times what any model shows
SLOPE_CERTAINTY = 10.0
"""Standard errors that the slope must be above 0. Queues make errors that are no chance of one request alone; fewer
would find a slope now and then in engines that have none."""
SLOPE_LOOKS = 16
"""So many looks in a row must find one, over more than the window: a cache that loses deep prefixes looks like a slope
until the counts in answers amend that."""

GAP_MAX_S = 600.0  # longer gaps are no service: an engine that hung, a node that slept


class Moments:
    """Sums over observations (tokens, their depths together, requests decoding, seconds), fading."""

    __slots__ = (
        *("count", "dd", "dy", "sum_d", "sum_t", "sum_y", "td", "tt", "ty"),
        *("aa", "ad", "ay", "sum_a", "ta", "yy"),
    )

    def __init__(self) -> None:
        self.count = 0.0
        self.sum_t = self.sum_d = self.sum_y = self.sum_a = 0.0
        self.tt = self.td = self.dd = self.ty = self.dy = 0.0  # of products
        self.ta = self.aa = self.ad = self.ay = self.yy = 0.0

    def fade(self, share: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * share)

    def add(self, tokens: float, decoding: float, seconds: float, weight: float = 1.0, depths: float = 0.0) -> None:
        """`depths`: of all these tokens together, see `depths_of`."""
        self.count += weight
        self.sum_t += weight * tokens
        self.sum_d += weight * decoding
        self.sum_y += weight * seconds
        self.tt += weight * tokens * tokens
        self.td += weight * tokens * decoding
        self.dd += weight * decoding * decoding
        self.ty += weight * tokens * seconds
        self.dy += weight * decoding * seconds
        self.yy += weight * seconds * seconds
        if depths:
            self.sum_a += weight * depths
            self.ta += weight * tokens * depths
            self.aa += weight * depths * depths
            self.ad += weight * decoding * depths
            self.ay += weight * depths * seconds

    def weighed(self, slope: float) -> Moments:
        """The same with tokens weighed by their depths."""
        if not slope:
            return self
        found = copy(self)
        found.sum_t = self.sum_t + slope * self.sum_a
        found.tt = self.tt + 2 * slope * self.ta + slope * slope * self.aa
        found.td = self.td + slope * self.ad
        found.ty = self.ty + slope * self.ay
        return found


class FittedLine(NamedTuple):
    """What is predicted with: seconds. Tokens are weighed ones."""

    per_token: float
    per_decoding: float  # for each request that decodes there: it shares the steps
    alone: float  # fixed part for a request that comes to a backend where nobody waits
    queued: float  # fixed part for each request in a queue

    def gap_s(self, tokens: float, decoding: float, *, queued: bool) -> float:
        """What it says of one request that has so many weighed tokens to compute."""
        return tokens * self.per_token + decoding * self.per_decoding + (self.queued if queued else self.alone)


class Ahead(NamedTuple):
    """What a request finds at a backend: others that wait for their first token, and others that have it."""

    tokens: int  # weighed, that the waiting ones have to compute
    waiting: int
    decoding: int
    since_progress_s: float  # since the first of the waiting ones became the first


NOMINAL = FittedLine(NOMINAL_S_PER_TOKEN, 0.0, 0.0, 0.0)


class Fleet:
    """All backends together: a line, and what it is wrong by."""

    def __init__(self) -> None:
        self._alone = Moments()
        self._queued = Moments()
        self._assumed = BORROWED  # observations with nothing to compute, that took no time
        self._line: FittedLine | None = NOMINAL
        self._seen = 0
        self._steep = 0  # looks in a row that found a slope
        self.error_s = 0.0  # what predictions of a gap are wrong by, on average
        self.slope = 0.0  # by which share of its time a token takes longer for each token before it

    @property
    def count(self) -> float:
        """Observations that still count."""
        return self._alone.count + self._queued.count

    @property
    def gap_s(self) -> float:
        """A gap on average."""
        return (self._alone.sum_y + self._queued.sum_y) / self.count if self.count else 0.0

    def observe(self, tokens: int, decoding: int, gap_s: float, *, queued: bool, depths: float = 0.0) -> None:
        """A first token came `gap_s` after the one before it (or after the request was sent)."""
        error_s = abs(gap_s - self.line().gap_s(tokens + self.slope * depths, decoding, queued=queued))
        self.error_s += (error_s - self.error_s) / min(self.count + 1.0, WINDOW)
        self._assumed *= 1.0 - 1.0 / WINDOW
        self._alone.fade(1.0 - 1.0 / WINDOW)
        self._queued.fade(1.0 - 1.0 / WINDOW)
        (self._queued if queued else self._alone).add(tokens, decoding, gap_s, depths=depths)
        self._seen += 1
        if self._seen % SLOPE_EVERY == 0:
            found = slope_of(self._alone, self._queued, self._assumed)
            self._steep = self._steep + 1 if found else 0
            self.slope = found if self._steep >= SLOPE_LOOKS else 0.0
        self._line = None

    def amend(self, service: Service, tokens: int) -> None:
        """What was observed had really computed so many tokens."""
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
    """One backend's: the fleet's, times a factor."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._line: FittedLine | None = None  # that the factor is of
        self._factor = 1.0
        self.tokens = self.depths = self.decoding = self.gaps_s = 0.0  # sums over observations, fading
        self.alone = self.queued = 0.0  # how many there were

    @property
    def per_token_s(self) -> float:
        """Of a weighed token."""
        return self.factor * self._fleet.line().per_token

    @property
    def factor(self) -> float:
        """How many times as long it takes as the fleet's line says."""
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
        """As the fleet's."""
        self.tokens += tokens - self.tokens / WINDOW
        self.depths += depths - self.depths / WINDOW
        self.decoding += decoding - self.decoding / WINDOW
        self.gaps_s += gap_s - self.gaps_s / WINDOW
        self.alone += (not queued) - self.alone / WINDOW
        self.queued += queued - self.queued / WINDOW
        self._line = None

    def amend(self, service: Service, tokens: int) -> None:
        """As the fleet's."""
        before, prompt_tokens = service.computed_tokens, service.prompt_tokens
        self.tokens = max(0.0, self.tokens + tokens - before)
        self.depths = max(0.0, self.depths + depths_of(tokens, prompt_tokens) - depths_of(before, prompt_tokens))
        self._line = None

    def predict(self, tokens: float, ahead: Ahead) -> tuple[float, float]:
        """Seconds until the turn of a request with so many weighed tokens to compute, and of its own prefill.

        Whoever waits ahead decodes while those behind it are computed, so each step is longer than the one before. What
        the first of them has got done since it became the first is taken off, up to its average share.
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
        return ahead_s - done_s + factor * line.queued + own_s, prefill_s


def fitted(alone: Moments, queued: Moments, assumed: float = 0.0) -> FittedLine:
    """Least squares with two slopes and two fixed parts, none of them negative.

    `assumed`: observations in each group that had nothing to compute and took no time, beside as many that decode.
    """
    tokens, seconds = alone.sum_t + queued.sum_t, alone.sum_y + queued.sum_y
    if tokens <= 0.0 or seconds <= 0.0:
        return NOMINAL
    tt = td = ty = dy = 0.0  # within the groups: the fixed parts take what is between them
    dd = BORROWED * ((alone.sum_d + queued.sum_d) / (alone.count + queued.count)) ** 2
    for group in (alone, queued):
        if group.count > 0.0:
            count = group.count + assumed
            tt += group.tt - group.sum_t**2 / count
            td += group.td - group.sum_t * group.sum_d / group.count
            dd += group.dd - group.sum_d**2 / group.count
            ty += group.ty - group.sum_t * group.sum_y / count
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
    return FittedLine(
        per_token, per_decoding, *(fixed(group, per_token, per_decoding, assumed) for group in (alone, queued))
    )


def depths_of(tokens: int, prompt_tokens: int) -> float:
    """Of the last `tokens` of a prompt: how many tokens are before each, all together."""
    return tokens * (max(prompt_tokens, tokens) - tokens / 2)


def slope_of(alone: Moments, queued: Moments, assumed: float) -> float:
    """By which share of its time a token takes longer for each token before it; 0 where that may be chance.

    Least squares with tokens and their depths, what decodes and fixed parts taken out first, against tokens alone: what
    the depths leave unexplained must be less by more than chance would make it.
    """
    tt = ta = aa = ty = ay = yy = td = ad = dy = 0.0
    dd = SINGULAR
    for group in (alone, queued):
        if group.count > 0.0:
            all_of, seen = group.count + assumed, group.count  # as in `fitted`
            tt += group.tt - group.sum_t**2 / all_of
            ta += group.ta - group.sum_t * group.sum_a / all_of
            aa += group.aa - group.sum_a**2 / all_of
            ty += group.ty - group.sum_t * group.sum_y / all_of
            ay += group.ay - group.sum_a * group.sum_y / all_of
            yy += group.yy - group.sum_y**2 / all_of
            td += group.td - group.sum_t * group.sum_d / seen
            ad += group.ad - group.sum_a * group.sum_d / seen
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
    """What the slopes leave, on average."""
    if group.count <= 0.0:
        return 0.0
    left_s = (group.sum_y - per_token * group.sum_t) / (group.count + assumed)
    return max(0.0, left_s - per_decoding * group.sum_d / group.count)


def ahead_of(work: Candidate, now: float) -> Ahead:
    """What a request would find at a backend."""
    waiting = work.waiting
    if not waiting:
        return new(Ahead, (0, 0, work.decoding, 0.0))
    return new(Ahead, (work.pending_tokens, waiting, work.decoding, now - work.progress_at))


class ServiceRates:
    """The service rates of all backends, and what they have in common. Bounded by the backends there can be.

    What is computed beside peers' requests does not count: how far those had come is not known.
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

    def work_of(self, held: int, prompt_tokens: int) -> int:
        """Weighed tokens that a backend has to compute which holds so much of a prompt."""
        tokens = max(0, prompt_tokens - held)
        slope = self.fleet.slope
        return round(tokens + slope * depths_of(tokens, prompt_tokens)) if slope else tokens

    def served(self, service: Service) -> None:
        """See `placement.Policy`."""
        if teaches(service):
            tokens, decoding, gap_s, queued = service.computed_tokens, service.decoding, service.gap_s, service.queued
            depths = depths_of(tokens, service.prompt_tokens)
            for each in (self.fleet, self[service.backend]):
                each.observe(tokens, decoding, gap_s, queued=queued, depths=depths)

    def corrected(self, service: Service, computed_tokens: int) -> None:
        """See `placement.Policy`."""
        if computed_tokens != service.computed_tokens and teaches(service):
            self.fleet.amend(service, computed_tokens)
            self[service.backend].amend(service, computed_tokens)


def teaches(service: Service) -> bool:
    return not service.peer_tokens and 0.0 <= service.gap_s <= GAP_MAX_S
