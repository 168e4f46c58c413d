"""Baselines, and what the other policies share with them: `least_loaded`, `power_of_two`, `random`, `round_robin`.

None of them reads the match.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Candidate, Choice, Match, Policy


def relative_loads(candidates: Sequence[Candidate]) -> list[float]:
    """Requests in flight for one unit of weight, in the order of the candidates."""
    return [candidate.load / candidate.weight for candidate in candidates]


def least_loaded(loads: Sequence[float]) -> list[int]:
    """Positions of all that share the least load. Never empty."""
    least = min(loads)
    return [position for position, load in enumerate(loads) if load == least]


def held_tokens(match: Match, candidate: Candidate) -> int:
    """How much of the prompt this backend is believed to hold."""
    for holder in match.holders:
        if holder.backend == candidate.id:
            return holder.tokens
    return 0


def mean_load(candidates: Sequence[Candidate], coming: int = 0) -> float:
    """Requests for one unit of weight over all, with so many that come."""
    return (sum([one.load for one in candidates]) + coming) / sum([one.weight for one in candidates])


def draw_least_loaded(match: Match, candidates: Sequence[Candidate], rng: Random, reason: str) -> Choice:
    """Any of the least loaded: the refuge of other policies."""
    chosen = candidates[rng.choice(least_loaded(relative_loads(candidates)))]
    return Choice(chosen.id, reason, held_tokens(match, chosen))


class LeastLoaded(Policy):
    """The backend with the fewest requests in flight per weight; ties are drawn (nginx's least_conn)."""

    name = "least_loaded"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        return draw_least_loaded(match, candidates, rng, self.name)


class PowerOfTwo(Policy):
    """Draws two different backends and takes the one with the lower load for its weight; the first of equals.

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
        return Choice(chosen.id, "power_of_two", held_tokens(match, chosen))


class WeightedRandom(Policy):
    """Chance decides, in proportion to the weights: what Ranvier's «round_robin» really is."""

    name = "random"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        chosen = rng.choices(candidates, [candidate.weight for candidate in candidates])[0]
        return Choice(chosen.id, "random", held_tokens(match, chosen))


class RoundRobin(Policy):
    """Each backend in its turn; unequal weights are respected, well spread (nginx's smooth form).

    Each candidate gains its weight, the richest is chosen and pays the sum of all. Who is left out of a pool neither
    gains nor pays. State: one number for each BackendId ever seen, at most 4096.
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
        return Choice(chosen.id, "round_robin", held_tokens(match, chosen))
