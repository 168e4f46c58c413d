"""How much one engine's cache really keeps, learned from how old what it still had was.

Age is counted in tokens, not seconds: the different tokens that an engine has used since a prefix was last used there
are what pushes it out (the LRU stack distance, exact for a full cache). `StackClock` keeps them by the second of their
last use. Of what was used in one second the deepest part goes first, so the distance of a prefix is its depth more than
that of its second. `CapacityEstimate` puts each outcome, warm or cold, at its distance, and finds the one beyond which
more answers were cold than warm.

Rules: old outcomes fade, each to a half after HALF_LIFE further ones; what has faded limits nothing, so a limit that is
too low is lifted by warm answers beyond it or by time. Without cold answers there is no limit. An engine that has shown
little borrows from all the others. A capacity that the engine itself reports is never exceeded, and less is believed
only for cold answers within it: those beyond are as they should be. One that reports none is taken to be no larger than
the largest that does, unless answers show otherwise.
Bounds: SECONDS_MAX entries of the clock, BUCKETS distances.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf, log2

SECONDS_MAX = 4096
"""Entries of one clock, a power of two; when it is full, the older half becomes half as many. A TTL of an hour fits."""

PARTED_MAX = 64
"""Seconds of whose prompts a cache may hold a part: each has a whole prompt or more."""

FIRST_TOKENS = 256
STEPS_PER_DOUBLING = 8
BUCKETS = 8 * 28
"""Distances from 256 tokens to 2**36, in steps of 9 %: as sharp as the end of a modelled LRU cache shows."""

HALF_LIFE = 300.0
"""Answers after which an outcome counts half."""

GROWTH = 2 ** (1 / HALF_LIFE)

COLD_MIN = 2.0
"""Net weight of cold answers beyond a limit that makes it one: two whole prompts. One may be chance; three cost a tenth
of what is recovered where cold answers are rare (caches of half the working set, tests/replay/test_calibration.py)."""

BORROWED = 40.0
"""Answers that a limit should rest on: what one engine has not shown of them yet is borrowed from the fleet."""

RESCALE = 1e9


class StackClock:
    """Tokens that one engine has used, each by the second of its last use."""

    __slots__ = ("_seconds", "_sums", "_tokens", "total")

    def __init__(self) -> None:
        self._seconds: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._tokens = [0.0] * len(self._seconds)
        self._sums = [0.0] * (SECONDS_MAX + 1)  # of runs of these: Fenwick's tree
        self.total = 0.0

    def add(self, tokens: float, now: float) -> None:
        """So many are used that were not there, at least 0. What comes late counts where `take` looks for it."""
        place = bisect_left(self._seconds, int(now))
        if place == len(self._seconds):
            if place == SECONDS_MAX:
                self._thin()
                place = len(self._seconds)
            self._seconds.append(int(now))
            self._tokens.append(0.0)
        self._put(place, tokens)

    def take(self, tokens: float, second: int) -> float:
        """So many, last used in that second, are used again: they are to be added anew. Returns how many were known."""
        place = bisect_left(self._seconds, second)
        if place == len(self._seconds):
            return 0.0
        known = min(tokens, self._tokens[place])
        if known <= 0.0:
            return 0.0
        self._put(place, -known)
        return known

    def distance(self, second: int) -> float:
        """Tokens used after that second."""
        return self.total - self._up_to(bisect_right(self._seconds, second))

    def second_before(self, distance: float) -> int:
        """The last second after which more than this was used; -1: there is none."""
        left, place, step = self.total - distance, 0, SECONDS_MAX
        while step:
            if place + step <= len(self._seconds) and self._sums[place + step] < left:
                place += step
                left -= self._sums[place]
            step //= 2
        return self._seconds[place - 1] if place else -1

    def left_of(self, distance: float) -> dict[int, int]:
        """For the first seconds after that one: how deep a prefix of that second may be to be within the distance."""
        first = bisect_right(self._seconds, self.second_before(distance))
        left, found = distance - self.total + self._up_to(first), {}
        for place in range(first, min(first + PARTED_MAX, len(self._seconds))):
            left += self._tokens[place]
            found[self._seconds[place]] = int(left)
        return found

    def _up_to(self, place: int) -> float:
        """Tokens of so many seconds."""
        found = 0.0
        while place:
            found += self._sums[place]
            place &= place - 1
        return found

    def _put(self, place: int, tokens: float) -> None:
        self._tokens[place] += tokens
        self.total += tokens
        place += 1
        while place <= SECONDS_MAX:
            self._sums[place] += tokens
            place += place & -place

    def _thin(self) -> None:
        """Of the older half, two entries become one, at the later second."""
        half, tokens = SECONDS_MAX // 2, self._tokens
        kept = [tokens[place] + tokens[place + 1] for place in range(0, half, 2)] + tokens[half:]
        self._seconds = self._seconds[1:half:2] + self._seconds[half:]
        self._begin()
        for place, each in enumerate(kept):
            self._put(place, each)


class CapacityEstimate:
    """Outcomes by distance. `reported`: what the engine can hold by its own page, in tokens; None: unknown.

    With no `fleet` it is that of all engines together, which sees what each of them does; `reported` is the largest's.
    """

    def __init__(self, fleet: CapacityEstimate | None = None) -> None:
        self._fleet = fleet
        self._net = [0.0] * BUCKETS  # warm minus cold answers by distance
        self._count = 0.0  # weight of all answers
        self._unit = 1.0  # weight of the next outcome; grows, so that older ones count less
        self._limit: float | None = inf  # None: to be found again
        self._refit_at = 0  # outcomes of the fleet that make our part of them old
        self.outcomes = 0
        self.reported: int | None = None

    def observe(self, distance: float, share: float) -> None:
        """A part of a prompt at this distance was found (`share` of the prompt, 0 to 1), or not (0 to -1)."""
        self._net[bucket_of(distance)] += share * self._unit
        self._limit = None
        if self._fleet is not None:
            self._fleet.observe(distance, share)

    def counted(self) -> None:
        """One whole answer was observed."""
        self.outcomes += 1
        self._count += self._unit
        self._unit *= GROWTH
        if self._unit > RESCALE:
            self._net = [weight / self._unit for weight in self._net]
            self._count /= self._unit
            self._unit = 1.0
        if self._fleet is not None:
            self._fleet.counted()

    @property
    def learned(self) -> float:
        """The distance beyond which answers were cold, in tokens; inf while there is none."""
        fleet = self._fleet
        if self._limit is None or (fleet is not None and fleet.outcomes >= self._refit_at):
            self._limit = self._find()
            self._refit_at = int(1.1 * fleet.outcomes) + 1 if fleet is not None else 0
        return self._limit

    @property
    def limit(self) -> float:
        """The distance beyond which routes are not to be believed."""
        return min(self.learned, self._reported())

    def _reported(self) -> float:
        """What it holds at most by its own page or by the others'; inf where neither says so."""
        if self.reported is not None:
            return self.reported
        largest = self._fleet.reported if self._fleet is not None else None
        return inf if largest is None or self._is_warm_beyond(largest) else largest

    def _is_warm_beyond(self, distance: float) -> bool:
        """Whether answers show that it holds more than that."""
        return sum(self._net[bucket_of(distance) + 1 :]) >= COLD_MIN * self._unit

    def _find(self) -> float:
        """Within what is reported, if cold answers there show it; else beyond."""
        nets, reported = self._with_borrowed(), self._reported()
        if reported == inf:
            return limit_of(nets)
        within = limit_of(nets[: bucket_of(reported)])
        return within if within < inf else max(reported, limit_of(nets))

    def _with_borrowed(self) -> list[float]:
        """Warm minus cold answers by distance, with what is borrowed."""
        fleet, missing = self._fleet, BORROWED - self._count / self._unit
        own = [net / self._unit for net in self._net]
        if fleet is None or missing <= 0.0 or not fleet._count:
            return own
        share = min(1.0 / fleet._unit, missing / fleet._count)
        return [net + share * theirs for net, theirs in zip(own, fleet._net, strict=True)]


def limit_of(nets: Sequence[float]) -> float:
    """Where warm minus cold answers up to there are the most; the farthest such place. inf: too few are cold beyond."""
    best, best_place, total = 0.0, -1, 0.0
    for place, net in enumerate(nets):
        total += net
        if total >= best:
            best, best_place = total, place
    return inf if best - total < COLD_MIN else edge_of(best_place)


def bucket_of(distance: float) -> int:
    if distance < FIRST_TOKENS:
        return 0
    return min(BUCKETS - 1, int(log2(distance / FIRST_TOKENS) * STEPS_PER_DOUBLING) + 1)


def edge_of(place: int) -> float:
    """The upper end of a bucket, in tokens; 0 before the first."""
    return FIRST_TOKENS * 2 ** (place / STEPS_PER_DOUBLING) if place >= 0 else 0.0
