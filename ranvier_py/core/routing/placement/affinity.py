"""`affinity` (the default): go where the prefix is, unless that backend is too busy.

Rule: a chat's own history goes to its deepest holder (`choose_own`), which is left where too much is ahead of a
newcomer, or no room, and `ttft` would be sooner elsewhere. A shared prefix (`choose_shared`) and a cold one
(`choose_cold`) go where `ttft` predicts the least time; a request without any prefix to one of the least loaded. The
table learns who served, not who was preferred. Source: Ranvier, «When your load balancer learns», and its code. Left
out of it: jump and modular hashing (rendezvous moves only a lost backend's keys), weights by GPU gauges (no Candidate
has them), cost budgets, priority groups. Reasons: only, affinity, diverted, common, cold, cold_diverted, no_prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from ranvier_py.core.ids import UNKNOWN, BackendId
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement import Candidate, Choice, Holder, Match, Policy
from ranvier_py.core.routing.placement.baselines import draw_least_loaded, held_tokens, least_loaded, relative_loads
from ranvier_py.core.routing.placement.ttft import COMMON_SHARE, Ttft, missing_at_holder

Floats = Sequence[float]

LIGHTEST = 8
"""So many of the least loaded backends are weighed, and so many of the holders that hold most: the best of eight that
have little to do is nearly as good as the best of all."""


@dataclass(frozen=True, slots=True)
class AffinityOptions(Options):
    """Twice the median is of Ranvier's document; the upper median, + 2, and that load 0 stays, are of its code.
    `divert_rule` least is its p2c strategy for hits: leave holders over `divert_floor` above the least load, whatever
    is known of rates."""

    load_aware: bool = option(True, "leave a holder, or a cold prefix's home, that is too busy; false: never")
    divert_rule: str = option(
        "median",
        "too busy means more ahead than divert_factor x the median; or divert_floor requests above the least load",
        one_of=("median", "least"),
    )
    divert_factor: float = option(2.0, "times the median that a holder may bear", least=1.0, most=1000.0)
    divert_floor: int = option(
        2, "requests above that before it is left; by the median only while no rate is known", most=1_000_000
    )
    median: str = option(
        "upper",
        "of an even number of loads: the upper one, the lower one, or the middle of both",
        one_of=("upper", "lower", "middle"),
    )
    placement_compatibility: str = option(
        "off",
        "ranvier: its document to the letter: no floor, load is requests alone, every match is followed, one home",
        one_of=("off", "ranvier"),
    )


class Affinity(Policy):
    """State: what `ttft` learned, and the rendezvous tables, which change no answer."""

    name = "affinity"
    # `depths_wanted` is 1: walking further up would cost each hit what few need

    def __init__(self, options: AffinityOptions | None = None) -> None:
        options = options or AffinityOptions()
        self.literal = options.placement_compatibility == "ranvier"
        self.options = replace(options, divert_floor=0) if self.literal else options
        self.wants_shared = self.options.load_aware and not self.literal
        self.by_time = Ttft()
        self.learner = self.by_time.learner
        self.rendezvous = self.by_time.rendezvous

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        if len(candidates) == 1:
            return Choice(candidates[0].id, "only", match.holders[0].tokens if match.holders else 0)
        if match.holders:
            choice = (self.choose_own if self.is_own(match) else self.choose_shared)(match, candidates, rng)
        elif match.home == UNKNOWN:
            choice = draw_least_loaded(match, candidates, rng, "no_prefix")
        elif self.wants_shared:
            choice = self.choose_cold(match, candidates, rng)
        else:  # by Ranvier's document, and where load does not matter, a cold prefix has one home
            choice = self.choose_home(match, candidates)
        self.by_time.chosen(match, choice)
        return choice

    def is_own(self, match: Match) -> bool:
        """Whether most of the prompt is a chat's own history, as its holder has it. Of a chat that has only begun most
        is what others have, too; that counts once predicted times decide."""
        if match.shared and self.wants_shared:
            return False
        own_tokens = match.holders[0].tokens - match.home_tokens
        return own_tokens >= COMMON_SHARE * match.prompt_tokens or not self.wants_shared or self.counts_requests

    def choose_own(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        """Choose the deepest holder, unless it is too busy."""
        position = self.preferred(match, candidates)
        holder = candidates[position]
        if self.options.load_aware and (holder.load or self.by_time.learner.decode_rates.uneven):
            divert = self.divert_by_requests if self.counts_requests else self.divert_by_time
            if diverted := divert(match, candidates, position, rng):
                return diverted
        return Choice(holder.id, "affinity", match.holders[0].tokens)

    @property
    def counts_requests(self) -> bool:
        """Whether a backend is too busy by its requests: where that is asked for, or no answer has shown any rate."""
        return self.literal or self.options.divert_rule == "least" or not self.by_time.has_rates

    def preferred(self, match: Match, candidates: Sequence[Candidate]) -> int:
        """Return the position of the deepest holder; ties by load, then by rendezvous order."""
        holders = match.holders
        if len(holders) == 1 or holders[1].tokens < holders[0].tokens:
            return position_of(holders[0].backend, candidates)
        tied = positions_of(deepest_of(holders), candidates)
        loads = relative_loads([candidates[position] for position in tied])
        return self.first(match, candidates, [tied[index] for index in least_loaded(loads)])

    def divert_by_requests(
        self, match: Match, candidates: Sequence[Candidate], position: int, rng: Random
    ) -> Choice | None:
        """Choose the least loaded backend if the holder has too many requests; ties: the least predicted time."""
        loads = relative_loads(candidates)
        if self.bears(candidates[position], loads[position], self.bearable(loads)):
            return None
        tied, holders = least_loaded(loads), match.more_holders()
        weighed = self.by_time.weigh(tied, match, holders, candidates)
        chosen = candidates[self.by_time.first(match.own, weighed, tied, rng)]
        return Choice(chosen.id, "diverted", held_tokens(holders, chosen))

    def divert_by_time(
        self, match: Match, candidates: Sequence[Candidate], position: int, rng: Random
    ) -> Choice | None:
        """Choose what `ttft` would if more than `divert_factor` x the median is ahead of a newcomer at the holder, or
        if that is full: where others are full as well, the median waits no less, and one with room would stay idle."""
        holder = candidates[position]
        loads = relative_loads(candidates)
        if missing_at_holder(match, holder) <= 0.0 and self.bears_newcomers(match, candidates, position, loads):
            return None
        holders = match.more_holders()
        among = self.lightest(match, loads, [position, *foremost(holders, candidates, loads)])
        weighed = self.by_time.weigh(among, match, holders, candidates)
        chosen = candidates[self.by_time.warm(match, weighed, holders, rng)[0]]
        if chosen is holder:
            return None
        return Choice(chosen.id, "diverted", held_tokens(holders, chosen))

    def bears_newcomers(self, match: Match, candidates: Sequence[Candidate], position: int, loads: Floats) -> bool:
        """Whether a newcomer waits no more than `divert_factor` x the median there, before its first token and in
        all. Asked only of a holder with room."""
        # without this one: among few engines its own queue would be half of the median
        others = [each for each in range(len(loads)) if each != position]
        if (
            not candidates[position].work.waiting
            and not self.by_time.learner.decode_rates.uneven
            and loads[position] <= median_of([loads[each] for each in others])
        ):
            return True  # no more decode there than elsewhere
        factor, median = self.options.divert_factor, self.options.median
        first_s, all_s = self.by_time.ahead_s(match, candidates[position], missing=0.0)
        # who is alone at a slow engine has nobody ahead, and still waits; what only might be faster leaves no holder
        all_s += self.by_time.slower_s(match, candidates, position)
        ahead_s = [self.ahead_s(match, candidates[each]) for each in near_the_median(others, loads)]
        return first_s <= factor * median_of([each[0] for each in ahead_s], median) and all_s <= factor * median_of(
            [each[1] for each in ahead_s], median
        )

    def ahead_s(self, match: Match, candidate: Candidate) -> tuple[float, float]:
        """Return the seconds that a request waits there for others' work before its first token, and in all."""
        return self.by_time.ahead_s(match, candidate, missing_at_holder(match, candidate))

    def choose_shared(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        """Choose by the predicted time, in which held tokens cost nothing: a system prompt, or a document with
        questions, gets further holders as soon as that pays. An idle holder of half the prompt is taken unweighed."""
        first = match.holders[0]
        much = 2 * first.tokens >= match.prompt_tokens and not self.by_time.uneven
        if much and candidates[position_of(first.backend, candidates)].load == 0:
            return Choice(first.backend, "affinity", first.tokens)
        holders = match.more_holders()
        among: Sequence[int] = range(len(candidates))
        if len(candidates) > LIGHTEST:
            loads = relative_loads(candidates)
            among = self.lightest(match, loads, foremost(holders, candidates, loads))
        position = self.by_time.warm(match, self.by_time.weigh(among, match, holders, candidates), holders, rng)[0]
        chosen, deepest = candidates[position], match.holders[0].tokens
        tokens = held_tokens(holders, chosen)
        return Choice(chosen.id, "affinity" if tokens == deepest else "common", tokens)

    def choose_cold(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        """Choose by the predicted time: one of the prefix's two homes, unless another backend is certainly better. So
        peers agree on two before any gossip, and a node that forgot finds again what engines still hold."""
        order = [] if match.own == match.home else self.rendezvous.order(match.home, candidates)
        homes = order[:2]  # none for a prompt of one message
        among = self.lightest(match, relative_loads(candidates), homes)
        position = self.by_time.cold(match, self.by_time.weigh(among, match, (), candidates), homes, rng)
        return Choice(candidates[position].id, "cold_diverted" if order and position not in homes else "cold", 0)

    def choose_home(self, match: Match, candidates: Sequence[Candidate]) -> Choice:
        """Choose the prefix's one home, or the least loaded backend if the home is too busy."""
        home = self.rendezvous.best(match.home, candidates)
        loads = relative_loads(candidates)
        if not self.options.load_aware or self.bears(candidates[home], loads[home], self.bearable(loads)):
            return Choice(candidates[home].id, "cold", 0)
        return Choice(candidates[self.first(match, candidates, least_loaded(loads))].id, "cold_diverted", 0)

    # --- load ---------------------------------------------------------------------------------------------------------

    def lightest(self, match: Match, loads: Floats, besides: Sequence[int]) -> list[int]:
        """Return the positions of the LIGHTEST least loaded backends, and those in `besides`."""
        if len(loads) <= LIGHTEST:
            return list(range(len(loads)))
        start = match.own % len(loads)  # each prompt looks at other ones of equally idle backends
        order = sorted([*range(start, len(loads)), *range(start)], key=loads.__getitem__)
        found = dict.fromkeys(order[:LIGHTEST])
        found.update(dict.fromkeys(besides))
        return list(found)

    def bears(self, candidate: Candidate, load: float, bearable: float) -> bool:
        """Whether a candidate is not too busy by requests. `load` is per unit of weight."""
        return load <= bearable + self.options.divert_floor / candidate.weight

    def bearable(self, loads: Floats) -> float:
        """Return the highest load per weight, without the floor, that is not too busy: never below the least load."""
        if self.options.divert_rule == "least":
            return min(loads)
        return self.options.divert_factor * median_of_all(loads, self.options.median)

    def first(self, match: Match, candidates: Sequence[Candidate], positions: Sequence[int]) -> int:
        """Return the one of these positions that is first in the rendezvous order of the prompt's first boundary."""
        if len(positions) == 1:
            return positions[0]
        return self.rendezvous.first(match.home, candidates, positions)

    # --- seeing -------------------------------------------------------------------------------------------------------

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        """As `ttft`, with the seconds of others' work ahead, which decide whether a holder is left."""
        found = self.by_time.terms(match, candidates)
        return [
            {**terms, "ahead_s": self.ahead_s(match, candidate)[1]}
            for terms, candidate in zip(found, candidates, strict=True)
        ]


def median_of(values: Floats, kind: str = "upper") -> float:
    """Return the median; of an even number the upper, the lower, or the middle of both."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if kind == "upper":
        return ordered[half]
    lower = ordered[(len(ordered) - 1) // 2]
    return lower if kind == "lower" else (lower + ordered[half]) / 2


def median_of_all(loads: Floats, kind: str = "upper") -> float:
    """Return the median; of two the lower one, since nothing exceeds twice the busier one's."""
    return min(loads) if len(loads) == 2 else median_of(loads, kind)


def near_the_median(positions: Sequence[int], loads: Floats) -> Sequence[int]:
    """Return these positions; of many, the three with about the median load, which stand for all."""
    if len(positions) < LIGHTEST:
        return positions
    half = len(positions) // 2
    return sorted(positions, key=loads.__getitem__)[half - 1 : half + 2]


def position_of(backend: BackendId, candidates: Sequence[Candidate]) -> int:
    for position, candidate in enumerate(candidates):
        if candidate.id == backend:
            return position
    raise AssertionError(f"holder {backend} is not a candidate")


def positions_of(holders: Sequence[Holder], candidates: Sequence[Candidate]) -> list[int]:
    """Return the positions of several holders in one pass: a shared prefix may be held by every candidate."""
    positions = {candidate.id: position for position, candidate in enumerate(candidates)}
    return [positions[holder.backend] for holder in holders]


def foremost(holders: Sequence[Holder], candidates: Sequence[Candidate], loads: Floats) -> list[int]:
    """Return the positions of the LIGHTEST holders that hold most, of equal ones the least loaded."""
    positions = positions_of(holders, candidates)
    if len(positions) <= LIGHTEST:
        return positions
    ranked = sorted([(-holder[1], loads[at], at) for holder, at in zip(holders, positions, strict=True)])
    return [at for _, _, at in ranked[:LIGHTEST]]


def deepest_of(holders: Sequence[Holder]) -> list[Holder]:
    return [holder for holder in holders if holder.tokens == holders[0].tokens]
