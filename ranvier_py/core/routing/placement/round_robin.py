"""`round_robin`: each backend in its turn; with unequal weights, each as often as its weight says, well spread.

Source: the textbook; the smooth weighted form is nginx's. Each candidate gains its weight, the richest is chosen and
pays the sum of all. With equal weights this is plain rotation in the order of the candidates. A backend that is left
out of a pool (draining, tried already, another model) neither gains nor pays. Reads no match.

State: one number per BackendId ever seen, at most 4096. Cost: O(candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Candidate, Choice, Match
from ranvier_py.core.routing.placement.least_loaded import held_tokens


class RoundRobin:
    __slots__ = ("credit",)

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

    def __copy__(self) -> RoundRobin:
        """With credits of its own: a dry run must not take anybody's turn."""
        twin = RoundRobin()
        twin.credit = dict(self.credit)
        return twin
