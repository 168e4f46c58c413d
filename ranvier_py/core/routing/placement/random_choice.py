"""`random`: chance decides, in proportion to the weights.

Source: the textbook; what Ranvier's «round_robin» really is. The baseline that shows what affinity is worth. Reads no
match. Cost: O(candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.routing.placement import Candidate, Choice, Match
from ranvier_py.core.routing.placement.least_loaded import held_tokens


class WeightedRandom:
    __slots__ = ()

    name = "random"
    depths_wanted = 0

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        chosen = rng.choices(candidates, [candidate.weight for candidate in candidates])[0]
        return Choice(chosen.id, "random", held_tokens(match, chosen))
