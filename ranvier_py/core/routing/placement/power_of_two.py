"""`power_of_two`: draw two different backends, take the one with the lower load for its weight.

Source: Mitzenmacher, «The power of two choices», 2001. Nearly as even as `least_loaded`, without its herding when
load reports are old. Equal loads: the one drawn first. Reads no match. Cost: O(1) in the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.routing.placement import Candidate, Choice, Match
from ranvier_py.core.routing.placement.least_loaded import held_tokens


class PowerOfTwo:
    __slots__ = ()

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
