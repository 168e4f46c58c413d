"""How much one engine's cache really keeps, learned from how old what it still had was.

Age is counted in tokens, not seconds: what an engine has computed since a prefix was last used there is what pushes it
out (the LRU stack distance; exact for a full cache but for blocks that are used again meanwhile). We see our own share
of that alone, which does no harm: the limit is learned in the same measure. `StackClock` keeps the tokens by second;
`CapacityEstimate` puts each outcome, warm or cold, at its distance, and finds the distance beyond which more answers
were cold than warm.

Rules: old outcomes fade, each to a half after HALF_LIFE further ones; what has faded limits nothing, so a limit that is
too low is lifted by warm answers beyond it or by time. Without cold answers there is no limit. A capacity that the
engine itself tells is never exceeded.
Bounds: SECONDS_MAX entries of the clock, BUCKETS distances. Cost: 1 us for a token count, 10 us for an outcome.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf, log2

SECONDS_MAX = 4096
"""Entries of one clock; beyond, the older half keeps every second one. A TTL of an hour fits without."""

FIRST_TOKENS = 256
STEPS_PER_DOUBLING = 4
BUCKETS = 4 * 28
"""Distances from 256 tokens to 2**36, in steps of 19 %: LRU is no more exact a model of engines."""

HALF_LIFE = 300.0
"""Answers after which an outcome counts half."""

GROWTH = 2 ** (1 / HALF_LIFE)

COLD_MIN = 2.0
"""Net weight of cold answers beyond a limit that makes it one: two whole prompts. One may be chance; three cost a tenth
of what is recovered where cold answers are rare (caches of half the working set, tests/replay/test_calibration.py)."""

RESCALE = 1e9


class StackClock:
    """Tokens computed by one engine, by second."""

    __slots__ = ("_cums", "_seconds", "total")

    def __init__(self) -> None:
        self._seconds: list[int] = []
        self._cums: list[float] = []  # total at the end of that second
        self.total = 0.0

    def add(self, tokens: float, now: float) -> None:
        """So many more were computed, at least 0. Time does not go back."""
        second = int(now)
        self.total += tokens
        if self._seconds and self._seconds[-1] >= second:
            self._cums[-1] = self.total
            return
        self._seconds.append(second)
        self._cums.append(self.total)
        if len(self._seconds) > SECONDS_MAX:
            half = SECONDS_MAX // 2
            self._seconds = self._seconds[1:half:2] + self._seconds[half:]
            self._cums = self._cums[1:half:2] + self._cums[half:]

    def distance(self, second: int) -> float:
        """Tokens computed since the middle of that second: evidence is kept by whole ones."""
        place = bisect_right(self._seconds, second)
        if not place:
            return self.total
        end = self._cums[place - 1]
        if self._seconds[place - 1] != second:
            return self.total - end
        return self.total - (end + (self._cums[place - 2] if place > 1 else 0.0)) / 2

    def second_before(self, distance: float) -> int:
        """The last second after which more than this was computed; -1: there is none."""
        place = bisect_left(self._cums, self.total - distance)
        return self._seconds[place - 1] if place else -1


class CapacityEstimate:
    """Outcomes by distance. `told`: what the engine says it can hold, in tokens; None while it says nothing."""

    __slots__ = ("_cold", "_limit", "_unit", "_warm", "cold_outcomes", "outcomes", "told")

    def __init__(self) -> None:
        self._warm = [0.0] * BUCKETS
        self._cold = [0.0] * BUCKETS
        self._unit = 1.0  # weight of the next outcome; grows, so that older ones count less
        self._limit: float | None = inf  # None: to be found again
        self.outcomes = 0
        self.cold_outcomes = 0.0
        self.told: int | None = None

    def observe(self, distance: float, warm: float, cold: float) -> None:
        """A part of a prompt, last used so many tokens ago, was found or not: shares of the prompt, 0 to 1."""
        place = bucket_of(distance)
        self._warm[place] += warm * self._unit
        self._cold[place] += cold * self._unit
        self.cold_outcomes += cold
        self._limit = None

    def counted(self) -> None:
        """One whole answer was observed."""
        self.outcomes += 1
        self._unit *= GROWTH
        if self._unit > RESCALE:
            self._warm = [weight / self._unit for weight in self._warm]
            self._cold = [weight / self._unit for weight in self._cold]
            self._unit = 1.0

    @property
    def learned(self) -> float:
        """The distance beyond which answers were cold, in tokens; inf while there is none."""
        if self._limit is None:
            self._limit = self._find()
        return self._limit

    @property
    def limit(self) -> float:
        """The distance beyond which claims are not to be believed."""
        return min(self.learned, inf if self.told is None else self.told)

    def _find(self) -> float:
        """Where warm minus cold answers up to there are the most; the farthest such place."""
        best, best_place, total = 0.0, -1, 0.0
        for place in range(BUCKETS):
            total += self._warm[place] - self._cold[place]
            if total >= best:
                best, best_place = total, place
        if (best - total) / self._unit < COLD_MIN:
            return inf
        return edge_of(best_place)


def bucket_of(distance: float) -> int:
    if distance < FIRST_TOKENS:
        return 0
    return min(BUCKETS - 1, int(log2(distance / FIRST_TOKENS) * STEPS_PER_DOUBLING) + 1)


def edge_of(place: int) -> float:
    """The upper end of a bucket, in tokens; 0 before the first."""
    return FIRST_TOKENS * 2 ** (place / STEPS_PER_DOUBLING) if place >= 0 else 0.0
