"""Learns how much one engine's cache keeps, from which prefixes were still cached after how much use.

Rule: age is measured in tokens: a prefix is evicted by the distinct tokens that the engine has used since the prefix's
last use (the LRU stack distance, exact for a full cache). `StackClock` counts them, `CapacityEstimate` finds the
distance beyond which more answers were cold than warm. Faded outcomes limit nothing, so warm answers beyond a limit
that is too low, or time, lift it. An engine with few outcomes borrows the fleet's.
Bounds: SECONDS_MAX entries of the clock, BUCKETS distances.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf, log2

SECONDS_MAX = 4096
"""Entries of one clock, a power of two. When it is full, its older half is merged two by two. A TTL of an hour fits."""

PARTED_MAX = 64
"""Seconds for which a depth limit is given: the cache may hold part of each one's prompts, a whole prompt or more."""

FIRST_TOKENS = 256
STEPS_PER_DOUBLING = 8
BUCKETS = 8 * 28
"""Distances from 256 tokens to 2**36, in steps of 9 %: as sharp as the end of a modelled LRU cache shows."""

HALF_LIFE = 300.0
"""Answers after which an outcome counts half."""

GROWTH = 2 ** (1 / HALF_LIFE)

COLD_MIN = 2.0
"""Net weight of cold answers that makes a limit: two prompts. One may be chance; three lose a tenth of what is
recovered where cold answers are rare (caches of half the working set, tests/replay/test_calibration.py)."""

BORROWED = 40.0
"""Answers that a limit should rest on. An engine that has fewer borrows the missing weight from the fleet."""

RESCALE = 1e9

EVERY_SECOND = 1 << 40
"""Hides routes of any age: an engine that keeps nothing has none, not even those of this second."""


class StackClock:
    """Counts the tokens that one engine has used, by the second of their last use."""

    __slots__ = ("_latest", "_seconds", "_sums", "_tokens", "total")

    def __init__(self) -> None:
        self._seconds: list[int] = []
        self._latest = 0.0  # tokens of the last entry that `_sums` lacks: most are added there
        self._begin()

    def _begin(self) -> None:
        self._tokens = [0.0] * len(self._seconds)
        self._sums = [0.0] * (SECONDS_MAX + 1)  # of runs of `_tokens`: a Fenwick tree
        self.total = 0.0

    def add(self, tokens: float, now: float) -> None:
        """Count new tokens (at least 0) as used now. Late ones go to the entry in which `take` will look for them."""
        seconds, second = self._seconds, int(now)
        if seconds and seconds[-1] == second:
            self._tokens[-1] += tokens
            self._latest += tokens
            self.total += tokens
            return
        place = bisect_left(seconds, second)
        if place == len(seconds):
            self._settle()
            if place == SECONDS_MAX:
                self._thin()
                place = len(self._seconds)
            self._seconds.append(int(now))
            self._tokens.append(0.0)
        self._put(place, tokens)

    def take(self, tokens: float, second: int) -> float:
        """Remove tokens last used in that second, to be added anew. Returns how many were known and removed."""
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
        if not self._seconds or second >= self._seconds[-1]:
            return 0.0
        self._settle()
        return self.total - self._up_to(bisect_right(self._seconds, second))

    def second_before(self, distance: float) -> int:
        """The last second after which more than `distance` tokens were used; -1 if there is none."""
        self._settle()
        left, place, step = self.total - distance, 0, SECONDS_MAX
        while step:
            if place + step <= len(self._seconds) and self._sums[place + step] < left:
                place += step
                left -= self._sums[place]
            step //= 2
        return self._seconds[place - 1] if place else -1

    def left_of(self, distance: float) -> dict[int, int]:
        """For the first seconds after `second_before(distance)`: down to which depth prefixes are that near."""
        first = bisect_right(self._seconds, self.second_before(distance))
        left, found = distance - self.total + self._up_to(first), {}
        for place in range(first, min(first + PARTED_MAX, len(self._seconds))):
            left += self._tokens[place]
            found[self._seconds[place]] = int(left)
        return found

    def _up_to(self, place: int) -> float:
        """Sum of the tokens of the first `place` entries."""
        found = 0.0
        while place:
            found += self._sums[place]
            place &= place - 1
        return found

    def _settle(self) -> None:
        """Bring the sums up to date with what the last entry has got since."""
        if self._latest:
            tokens, self._latest = self._latest, 0.0
            self._add_to_sums(len(self._seconds) - 1, tokens)

    def _put(self, place: int, tokens: float) -> None:
        self._tokens[place] += tokens
        self.total += tokens
        self._add_to_sums(place, tokens)

    def _add_to_sums(self, place: int, tokens: float) -> None:
        place += 1
        while place <= SECONDS_MAX:
            self._sums[place] += tokens
            place += place & -place

    def _thin(self) -> None:
        """Merge each two entries of the older half into one, at the later second."""
        half, tokens = SECONDS_MAX // 2, self._tokens
        kept = [tokens[place] + tokens[place + 1] for place in range(0, half, 2)] + tokens[half:]
        self._seconds = self._seconds[1:half:2] + self._seconds[half:]
        self._begin()
        for place, each in enumerate(kept):
            self._put(place, each)


class CapacityEstimate:
    """Outcomes of one engine by distance. `reported`: the capacity on its metrics page, in tokens; None: unknown.

    Without a `fleet` it is the fleet's own estimate: it observes what each engine's does; `reported` is the largest.
    """

    def __init__(self, fleet: CapacityEstimate | None = None) -> None:
        self._fleet = fleet
        self._net = [0.0] * BUCKETS  # warm minus cold answers by distance
        self._count = 0.0  # weight of all answers
        self._unit = 1.0  # weight of the next outcome; grows, so that older ones count less
        self._limit: float | None = inf  # None: `_find` has to run again
        self._refit_at = 0  # `outcomes` of the fleet at which what we borrowed is stale
        self.outcomes = 0
        self.reported: int | None = None

    def observe(self, distance: float, share: float) -> None:
        """Note that a part of a prompt at this distance was cached (share of the prompt, 0 to 1), or not (0 to -1)."""
        self._net[bucket_of(distance)] += share * self._unit
        self._limit = None
        if self._fleet is not None:
            self._fleet.observe(distance, share)

    def counted(self) -> None:
        """Note that all parts of one answer were observed, and let older outcomes fade."""
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
        """The distance in tokens beyond which answers were cold; inf while there is no limit: without cold answers."""
        fleet = self._fleet
        if self._limit is None or (fleet is not None and fleet.outcomes >= self._refit_at):
            self._limit = self._find()
            self._refit_at = int(1.1 * fleet.outcomes) + 1 if fleet is not None else 0
        return self._limit

    @property
    def limit(self) -> float:
        """The distance in tokens beyond which routes are not believed: the lesser of learned and reported. Cold answers
        beyond what is reported are expected."""
        return min(self.learned, self._reported())

    def _reported(self) -> float:
        """The engine's own report; else the fleet's largest, unless answers were warm beyond it; else inf."""
        if self.reported is not None:
            return self.reported
        largest = self._fleet.reported if self._fleet is not None else None
        return inf if largest is None or self._is_warm_beyond(largest) else largest

    def _is_warm_beyond(self, distance: float) -> bool:
        """Whether answers show that the engine holds more than this."""
        return sum(self._net[bucket_of(distance) + 1 :]) >= COLD_MIN * self._unit

    def _find(self) -> float:
        """Find the limit: within the reported capacity if cold answers there show one, else at it or beyond."""
        nets, reported = self._with_borrowed(), self._reported()
        if reported == inf:
            return limit_of(nets)
        within = limit_of(nets[: bucket_of(reported)])
        return within if within < inf else max(reported, limit_of(nets))

    def _with_borrowed(self) -> list[float]:
        """Warm minus cold answers by distance, with what the fleet lends."""
        fleet, missing = self._fleet, BORROWED - self._count / self._unit
        own = [net / self._unit for net in self._net]
        if fleet is None or missing <= 0.0 or not fleet._count:
            return own
        share = min(1.0 / fleet._unit, missing / fleet._count)
        return [net + share * theirs for net, theirs in zip(own, fleet._net, strict=True)]


def limit_of(nets: Sequence[float]) -> float:
    """The farthest distance at which summed warm minus cold is greatest; inf if too few beyond it are cold."""
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
    """The upper end of a bucket, in tokens; 0 for place -1, before the first bucket."""
    return FIRST_TOKENS * 2 ** (place / STEPS_PER_DOUBLING) if place >= 0 else 0.0
