"""`ttft`, ours: the backend with the least predicted time to the first token, and the least harm to the others.

Rule. For each candidate, in seconds:

    own     what waits there, at the backend's own rate, + the tokens of this prompt that it does not hold
    others  each request that will come behind this one waits while it is computed, and a little each that decodes.
            In a steady state as many arrive during a wait as are waiting: the mean of those there and those anywhere,
            since placement evens queues out

The least sum wins. Where it is not the deepest holder, it must win by more than what predictions are usually wrong by
(`error_s`, learned), or chats would move about for nothing. Ties: the fewest requests in flight, the first in
rendezvous order of the prompt itself. What everybody holds gives nobody an advantage, since all terms are differences
of work; where a holder saves no more than chance, and less than half of the prompt, that is so little too (`common`).

A prefix that nobody is known to hold has two homes, the first in its rendezvous order; the better of them takes it
unless another is better by more than `error_s`. So nodes agree on two before any gossip.

A prefix gets a second holder as soon as the first one's queue costs more than computing it again (`moved`); and
earlier, on purpose, as soon as those who asked for it within the last minute have waited longer, at its best holder
than elsewhere on average, than one prefill costs and those who wait there (`spread`). Chance makes queues too: n
differences that mean nothing add up to the root of the sum of their squares, and only what is beyond that counts. What
a chat waits is counted for the first message as well, which it shares with other chats: else these would all begin, and
so stay, where the first of them was. The claim of who has moved is the lease against flapping: coming back costs
nothing.

There is no constant of speed: rates are learned (`service_rate`), and before that the tokens to compute decide.
Source: none has it; the inequality is Preble's and Dynamo's (queue + uncached prefill), the learned rates, the harm to
others and the deliberate copies are ours. Reasons: only, warm, common, moved, spread, cold, no_prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import exp, sqrt
from random import Random
from typing import NamedTuple

from ranvier_py.core.ids import UNKNOWN, Fingerprint
from ranvier_py.core.routing.placement import ALL_HOLDERS, Candidate, Choice, Match, Policy, Service
from ranvier_py.core.routing.placement.affinity import COMMON_SHARE, COMMON_SLACK_TOKENS
from ranvier_py.core.routing.placement.rendezvous import Rendezvous
from ranvier_py.core.routing.service_rate import ServiceRates, ahead_of

TIE_SHARE = 0.05
"""Sums within a twentieth of the least are equal. Two idle engines of one kind differ by chance alone, and whoever
always follows chance fills one cache and leaves the others empty."""

OTHERS_SHARE = 0.03
"""Of the harm to those that decode: it is one delay among the dozens of tokens of an answer. All of it would send
prompts where few decode and not where little waits, which costs the Mooncake trace a tenth of its p90."""


def mean_waiting(candidates: Sequence[Candidate]) -> float:
    return sum(candidate.waiting for candidate in candidates) / len(candidates)


def mean_queue_s(costs: Sequence[Cost], marks: Sequence[bool], wanted: bool) -> float:
    among = positions(marks, wanted)
    return sum(costs[position].queue_s for position in among) / len(among)


def positions(marks: Sequence[bool], wanted: bool) -> list[int]:
    return [position for position, mark in enumerate(marks) if mark is wanted]


LOSSES_S = 60.0  # over which waits are counted: long enough for a sum, short enough to forget what nobody wants now
LOSSES_MAX = 4096  # prefixes whose waits are known; the one that was not asked for longest is forgotten


class Cost(NamedTuple):
    """Of one candidate, seconds."""

    queue_s: float
    prefill_s: float
    others_s: float

    @property
    def sum_s(self) -> float:
        return self.queue_s + self.prefill_s + self.others_s


class Ttft(Policy):
    """State: the service rates, and what was lost for want of second holders."""

    name = "ttft"
    depths_wanted = ALL_HOLDERS

    def __init__(self) -> None:
        self.service_rates = ServiceRates()
        self.losses = Losses()
        self.rendezvous = Rendezvous()

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        held = {holder.backend: holder.tokens for holder in match.holders}
        if len(candidates) == 1:
            return Choice(candidates[0].id, "only", held.get(candidates[0].id, 0))
        mean = mean_waiting(candidates)
        costs = [self.cost(candidate, match, held.get(candidate.id, 0), mean) for candidate in candidates]
        sums = [cost.sum_s for cost in costs]
        best = self.first(match.own, candidates, sums, range(len(candidates)), rng)
        if match.holders:
            position, reason = self.warm(match, candidates, costs, sums, best)
        elif match.home != UNKNOWN:
            position, reason = self.cold(match, candidates, sums, best, rng), "cold"
        else:
            position, reason = best, "no_prefix"
        return Choice(candidates[position].id, reason, held.get(candidates[position].id, 0))

    def warm(
        self, match: Match, candidates: Sequence[Candidate], costs: Sequence[Cost], sums: Sequence[float], best: int
    ) -> tuple[int, str]:
        """Position and reason for a prefix that somebody holds."""
        deepest = match.holders[0].tokens
        deep = {holder.backend for holder in match.holders if holder.tokens == deepest}
        holds = [candidate.id in deep for candidate in candidates]
        home = best if holds[best] else min(positions(holds, True), key=sums.__getitem__)
        if not holds[best]:
            error_s, stake_s = self.service_rates.fleet.error_s, costs[best].prefill_s - costs[home].prefill_s
            if stake_s <= error_s and stake_s < COMMON_SHARE * costs[best].prefill_s:
                return best, "common"
            if sums[home] - sums[best] > error_s:
                return best, "moved"
        if not all(holds):
            copy = min(positions(holds, False), key=sums.__getitem__)
            if self.pays(match, candidates, costs, home, copy, holds):
                return copy, "spread"
        return home, "warm"

    def cold(self, match: Match, candidates: Sequence[Candidate], sums: Sequence[float], best: int, rng: Random) -> int:
        """Position for a prefix that nobody is known to hold: the better of its two homes, unless `best` is certainly
        better. A prompt of one message shares its home with nobody."""
        if match.own == match.home:
            return best
        homes = self.rendezvous.order(match.home, candidates)[:2]
        home = self.first(match.home, candidates, sums, homes, rng)
        return home if sums[home] - sums[best] <= self.service_rates.fleet.error_s else best

    def pays(
        self,
        match: Match,
        candidates: Sequence[Candidate],
        costs: Sequence[Cost],
        home: int,
        copy: int,
        holds: Sequence[bool],
    ) -> bool:
        """Count what this request loses at its best holder, and say whether a copy has become worth its prefill."""
        queue_s, deepest = costs[home].queue_s, match.holders[0].tokens
        prefix = match.home
        if deepest > match.home_tokens + COMMON_SLACK_TOKENS:
            prefix = match.deepest
            held = {holder.backend for holder in match.holders}
            nothing = [candidate.id not in held for candidate in candidates]
            if any(nothing):
                self.losses.add(match.home, match.at, queue_s - mean_queue_s(costs, nothing, True))
        lost_s = self.losses.add(prefix, match.at, queue_s - mean_queue_s(costs, holds, False))
        if lost_s <= deepest * self.service_rates[candidates[copy].id].per_token_s * (1 + candidates[copy].waiting):
            return False
        self.losses.forget(prefix)
        return True

    def cost(self, candidate: Candidate, match: Match, held_tokens: int, mean: float = 0.0) -> Cost:
        computed_tokens = max(0, match.prompt_tokens - held_tokens)
        queue_s, prefill_s = self.service_rates[candidate.id].predict(computed_tokens, ahead_of(candidate, match.at))
        others = OTHERS_SHARE * candidate.decoding + (candidate.waiting + mean) / 2
        return Cost(queue_s, prefill_s, others * prefill_s)

    def first(
        self,
        key: Fingerprint,
        candidates: Sequence[Candidate],
        sums: Sequence[float],
        among: Sequence[int],
        rng: Random,
    ) -> int:
        """The one `among` these positions with the least sum. Sums that hardly differ are told apart by requests in
        flight for the weight, then by rendezvous of the key, which spreads prompts over the caches."""
        tied_s = (1.0 + TIE_SHARE) * min(sums[position] for position in among)
        tied = [position for position in among if sums[position] <= tied_s]
        if len(tied) == 1:
            return tied[0]
        loads = [candidates[position].load / candidates[position].weight for position in tied]
        lightest = min(loads)
        tied = [position for position, load in zip(tied, loads, strict=True) if load == lightest]
        if key == UNKNOWN:
            return rng.choice(tied)
        scores = self.rendezvous.scores(key, candidates)
        return max(tied, key=scores.__getitem__)

    # --- learning -----------------------------------------------------------------------------------------------------

    def served(self, service: Service) -> None:
        self.service_rates.served(service)

    def corrected(self, service: Service, computed_tokens: int) -> None:
        self.service_rates.corrected(service, computed_tokens)

    # --- seeing -------------------------------------------------------------------------------------------------------

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        """Seconds of each term, and the rate they were made with."""
        held = {holder.backend: holder.tokens for holder in match.holders}
        found = []
        for candidate in candidates:
            cost = self.cost(candidate, match, held.get(candidate.id, 0), mean_waiting(candidates))
            per_token_s = self.service_rates[candidate.id].per_token_s
            found.append({**cost._asdict(), "sum_s": cost.sum_s, "tokens_per_s": 1.0 / per_token_s})
        return found


class Loss(NamedTuple):
    """Of one prefix: sums that fade."""

    sum_s: float
    squares: float
    at: float  # of the latest


class Losses:
    """What those who asked for a prefix within about a minute waited longer at its best holder than they would have
    elsewhere."""

    def __init__(self) -> None:
        self.known: OrderedDict[Fingerprint, Loss] = OrderedDict()
        self.forgotten = 0

    def __copy__(self) -> Losses:
        twin = Losses()
        twin.known, twin.forgotten = self.known.copy(), self.forgotten
        return twin

    def add(self, prefix: Fingerprint, at: float, lost_s: float) -> float:
        """Count one more. Returns by how much the sum is more than chance would have made it, in seconds."""
        before = self.known.pop(prefix, None) or Loss(0.0, 0.0, at)
        share = exp(-max(0.0, at - before.at) / LOSSES_S)
        loss = Loss(share * before.sum_s + lost_s, share * before.squares + lost_s * lost_s, at)
        self.known[prefix] = loss
        if len(self.known) > LOSSES_MAX:
            self.known.popitem(last=False)
            self.forgotten += 1
        return loss.sum_s - sqrt(loss.squares)

    def forget(self, prefix: Fingerprint) -> None:
        """It has another holder now."""
        self.known.pop(prefix, None)
