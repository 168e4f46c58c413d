"""`affinity` (the default): go where the prefix is, unless that backend is too busy.

Rule: the deepest holder; among equally deep ones the least loaded, then the first in rendezvous order. It is too busy
when its load exceeds `divert_factor` (2) x the median + `divert_floor` (2); then the least loaded backend takes the
request and computes the prefix anew (ties: the deepest holder, then rendezvous order). A prefix that nobody holds
goes to the less loaded of the first two in its rendezvous order, or if that is too busy to the next that is not: so
peers agree on two before any gossip, and a node that forgot finds again what engines still hold. A prompt of one
message shares that with nobody: it goes to the least loaded (ties: rendezvous order). One home alone costs unshared
prompts half of their p90 (benchmarks/policies.py). No prefix at all: the least loaded, ties drawn.

What all chats of one application share is no affinity. A match that ends with the first boundary (the system prompt)
and covers less than half of the prompt says where the application runs, not where this chat is: following it would pile
every new document onto the engines that hold a few blocks of instructions. Such a prompt goes to the least loaded
backend (ties: rendezvous by its own fingerprint). Ranvier has no such rule; on documents with questions it is the
difference between a third and most of the possible hits (benchmarks/hit_rate.py).

The median is the upper one over all candidates; of two candidates, where nothing could ever exceed twice the busier
one, the lower one. The floor is in requests and keeps idle clusters from flapping. Loads are compared per unit of
weight. At least half of the candidates are at or below the median, so someone always is not too busy. Who served is
learned, not who was preferred, so a hot prefix gains a second holder by being diverted.

Source: Ranvier, «When your load balancer learns» (twice the median), and its code (upper median, + 2, load 0 stays).
Left out of it: jump and modular hashing (rendezvous moves no key but those of a lost backend), weights of GPU gauges
(no Candidate has them), cost budgets, priority groups, and what is the route table's business.
Reasons: only, affinity, diverted, common, cold, cold_diverted, no_prefix. Cost: a hit on a holder with load <= floor
reads nothing else; else O(candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ranvier_py.core.ids import UNKNOWN, BackendId
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Holder, Match, Policy
from ranvier_py.core.routing.placement.baselines import draw_least_loaded, held_tokens, least_loaded, relative_loads
from ranvier_py.core.routing.placement.rendezvous import Rendezvous

COMMON_SHARE = 0.5
"""A match of at least this share of the prompt is worth following, whoever else shares it."""

COMMON_SLACK_TOKENS = 32
"""Two blocks beyond the first boundary: role markers, and words that every first question of an application begins
with."""


@dataclass(frozen=True, slots=True)
class AffinityOptions(Options):
    """`divert_rule` least is what Ranvier's p2c strategy does to a hit: leave it for one with `divert_floor` fewer."""

    load_aware: bool = option(True, "leave a holder, or a cold prefix's home, that is too busy; false: never")
    divert_rule: str = option(
        "median",
        "too busy means more than divert_floor above: divert_factor x the median, or the least load",
        one_of=("median", "least"),
    )
    divert_factor: float = option(2.0, "times the median that a holder may bear", least=1.0, most=1000.0)
    divert_floor: int = option(2, "requests above that before it is left", most=1_000_000)
    median: str = option(
        "upper",
        "of an even number of loads: the upper one, the lower one, or the middle of both",
        one_of=("upper", "lower", "middle"),
    )
    common_share: float = option(
        COMMON_SHARE,
        "share of the prompt from which a match on the first message alone is followed; 0: always",
        most=1.0,
    )
    common_slack_tokens: int = option(
        COMMON_SLACK_TOKENS, "tokens beyond the first message that still are the first message alone", most=1_000_000
    )


class Affinity(Policy):
    """State: none but the rendezvous tables, which change no answer."""

    name = "affinity"
    # of all depths the deepest alone: walking further up would cost each hit what few need

    def __init__(self, options: AffinityOptions | None = None) -> None:
        self.options = options or AffinityOptions()
        self.rendezvous = Rendezvous()

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        if len(candidates) == 1:
            return Choice(candidates[0].id, "only", held_tokens(match, candidates[0]))
        if match.holders:
            common = self.is_common(match)
            return self.choose_common(match, candidates) if common else self.choose_warm(match, candidates)
        if match.home == UNKNOWN:
            return draw_least_loaded(match, candidates, rng, "no_prefix")
        return self.choose_cold(match, candidates)

    def is_common(self, match: Match) -> bool:
        """Whether the deepest match is no more than what every chat of the application has."""
        deepest, options = match.holders[0].tokens, self.options
        above = deepest > match.home_tokens + options.common_slack_tokens
        return not above and deepest < options.common_share * match.prompt_tokens

    def choose_warm(self, match: Match, candidates: Sequence[Candidate]) -> Choice:
        deepest = match.holders[0]
        position = self.preferred(match, candidates)
        holder = candidates[position]
        if holder.load > self.options.divert_floor and self.options.load_aware:  # at the floor nothing can be too busy
            loads = relative_loads(candidates)
            if not self.bears(holder, loads[position], self.bearable(loads)):
                return self.divert(match, candidates, loads)
        return Choice(holder.id, "affinity", deepest.tokens)

    def preferred(self, match: Match, candidates: Sequence[Candidate]) -> int:
        """Position of the deepest holder; ties by load, then rendezvous."""
        holders = match.holders
        if len(holders) == 1 or holders[1].tokens < holders[0].tokens:
            return position_of(holders[0].backend, candidates)
        tied = positions_of(deepest_of(holders), candidates)
        loads = relative_loads([candidates[position] for position in tied])
        return self.first(match, candidates, [tied[index] for index in least_loaded(loads)])

    def divert(self, match: Match, candidates: Sequence[Candidate], loads: Sequence[float]) -> Choice:
        tied = least_loaded(loads)
        among = {candidates[position].id for position in tied}
        warm = [holder for holder in match.holders if holder.backend in among]
        if warm:
            tied = positions_of(deepest_of(warm), candidates)
        chosen = candidates[self.first(match, candidates, tied)]
        return Choice(chosen.id, "diverted", warm[0].tokens if warm else 0)

    def choose_common(self, match: Match, candidates: Sequence[Candidate]) -> Choice:
        tied = least_loaded(relative_loads(candidates))
        position = tied[0]
        if len(tied) > 1:
            scores = self.rendezvous.scores(match.own, candidates)
            position = max(tied, key=scores.__getitem__)
        return Choice(candidates[position].id, "common", held_tokens(match, candidates[position]))

    def choose_cold(self, match: Match, candidates: Sequence[Candidate]) -> Choice:
        scores = self.rendezvous.scores(match.home, candidates)
        best = int(scores.argmax())
        home = candidates[best]
        if home.load == 0 or not self.options.load_aware:  # nobody is less loaded
            return Choice(home.id, "cold", 0)
        loads = relative_loads(candidates)
        if match.own == match.home:
            return Choice(candidates[max(least_loaded(loads), key=scores.__getitem__)].id, "cold", 0)
        scores[best] = 0
        second = int(scores.argmax())
        preferred = second if loads[second] < loads[best] else best
        bearable = self.bearable(loads)
        if self.bears(candidates[preferred], loads[preferred], bearable):
            return Choice(candidates[preferred].id, "cold", 0)
        for position in self.rendezvous.order(match.home, candidates):
            if self.bears(candidates[position], loads[position], bearable):
                return Choice(candidates[position].id, "cold_diverted", 0)
        raise AssertionError("nobody at or below the median")

    def bears(self, candidate: Candidate, load: float, bearable: float) -> bool:
        """Whether it is not too busy. `load` is for its weight."""
        return load <= bearable + self.options.divert_floor / candidate.weight

    def bearable(self, loads: Sequence[float]) -> float:
        """The highest load per weight, floor apart, at which nobody is too busy yet: never below the least of them."""
        if self.options.divert_rule == "least":
            return min(loads)
        return self.options.divert_factor * median_of(loads, self.options.median)

    def first(self, match: Match, candidates: Sequence[Candidate], positions: list[int]) -> int:
        """The one of `positions` that comes first in rendezvous order."""
        if len(positions) == 1:
            return positions[0]
        return self.rendezvous.first(match.home, candidates, positions)


def median_of(loads: Sequence[float], kind: str = "upper") -> float:
    """Of an even number the upper, the lower, or the middle of both; of two always the lower, see above."""
    ordered = sorted(loads)
    half = len(ordered) // 2
    if len(ordered) == 2:
        return ordered[0]
    if kind == "upper":
        return ordered[half]
    lower = ordered[(len(ordered) - 1) // 2]
    return lower if kind == "lower" else (lower + ordered[half]) / 2


def position_of(backend: BackendId, candidates: Sequence[Candidate]) -> int:
    for position, candidate in enumerate(candidates):
        if candidate.id == backend:
            return position
    raise AssertionError(f"holder {backend} is not a candidate")


def positions_of(backends: Sequence[BackendId], candidates: Sequence[Candidate]) -> list[int]:
    """The same for several, in one pass: a shared prefix can have as many holders as there are candidates."""
    positions = {candidate.id: position for position, candidate in enumerate(candidates)}
    return [positions[backend] for backend in backends]


def deepest_of(holders: Sequence[Holder]) -> list[BackendId]:
    deepest = holders[0].tokens
    return [holder.backend for holder in holders if holder.tokens == deepest]
