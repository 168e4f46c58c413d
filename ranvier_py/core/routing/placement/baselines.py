"""The baseline policies `least_loaded`, `power_of_two`, `random` and `round_robin`, and helpers of all policies.

No baseline reads the match to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Candidate, Choice, Holder, Match, Policy


def relative_loads(candidates: Sequence[Candidate]) -> list[float]:
    """Return the requests in flight per unit of weight, in the order of the candidates."""
    return [candidate.load / candidate.weight for candidate in candidates]


def least_loaded(loads: Sequence[float]) -> list[int]:
    """Return the positions of all that have the least load. Never empty."""
    least = min(loads)
    return [position for position, load in enumerate(loads) if load == least]


def held_tokens(holders: Sequence[Holder], candidate: Candidate) -> int:
    """Return how many tokens of the prompt this backend is believed to hold."""
    for holder in holders:
        if holder.backend == candidate.id:
            return holder.tokens
    return 0


def mean_load(candidates: Sequence[Candidate], coming: int = 0) -> float:
    """Return the mean load per unit of weight over all candidates, with so many `coming` requests added."""
    return (sum([one.load for one in candidates]) + coming) / sum([one.weight for one in candidates])


def draw_least_loaded(match: Match, candidates: Sequence[Candidate], rng: Random, reason: str) -> Choice:
    """Draw one of the least loaded candidates: what other policies fall back on."""
    chosen = candidates[rng.choice(least_loaded(relative_loads(candidates)))]
    return Choice(chosen.id, reason, held_tokens(match.holders, chosen))


class LeastLoaded(Policy):
    """The backend with the fewest requests in flight per weight; ties are drawn (nginx's least_conn)."""

    name = "least_loaded"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        return draw_least_loaded(match, candidates, rng, self.name)


class PowerOfTwo(Policy):
    """Draws two different backends and takes the one with the lower load per weight; the first of equals.

    Source: Mitzenmacher, «The power of two choices», 2001. Nearly as even as `least_loaded`, without its herding when
    load reports are old.
    """

    name = "power_of_two"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        first = rng.randrange(len(candidates))
        chosen = candidates[first]
        if len(candidates) > 1:
            second = rng.randrange(len(candidates) - 1)
            other = candidates[second + (second >= first)]
            if other.load / other.weight < chosen.load / chosen.weight:
                chosen = other
        return Choice(chosen.id, "power_of_two", held_tokens(match.holders, chosen))


class WeightedRandom(Policy):
    """Draws a backend in proportion to the weights: what Ranvier's «round_robin» really does."""

    name = "random"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        chosen = rng.choices(candidates, [candidate.weight for candidate in candidates])[0]
        return Choice(chosen.id, "random", held_tokens(match.holders, chosen))


class RoundRobin(Policy):
    """Takes each backend in turn, as often as its weight asks, evenly spread (nginx's smooth form).

    Each candidate's credit grows by its weight; the one with the most is chosen and pays the sum of all weights. A
    backend outside the pool neither gains nor pays. State: one number for each BackendId ever seen, at most 4096.
    """

    name = "round_robin"
    depths_wanted = 0

    def __init__(self) -> None:
        self.credit: dict[BackendId, float] = {}

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:  # noqa: ARG002
        credit = self.credit
        total = 0.0
        for candidate in candidates:
            credit[candidate.id] = credit.get(candidate.id, 0.0) + candidate.weight
            total += candidate.weight
        chosen = max(candidates, key=lambda candidate: credit[candidate.id])  # the first of equals
        credit[chosen.id] -= total
        return Choice(chosen.id, "round_robin", held_tokens(match.holders, chosen))

    def forget(self, backend: BackendId) -> None:
        self.credit.pop(backend, None)
