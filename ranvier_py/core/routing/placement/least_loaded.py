"""`least_loaded`: the backend with the fewest requests in flight per weight; ties are drawn.

Source: the textbook (nginx least_conn); a baseline, and the refuge of the other policies. Reads no match.
Cost: O(candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.routing.placement import Candidate, Choice, Match


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


class LeastLoaded:
    __slots__ = ()

    name = "least_loaded"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        chosen = candidates[rng.choice(least_loaded(relative_loads(candidates)))]
        return Choice(chosen.id, "least_loaded", held_tokens(match, chosen))
