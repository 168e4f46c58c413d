"""`ttft`: the backend with the least predicted time to the first token, and the least delay of other requests.

Rule. For each candidate, in seconds:

    own     the queue there, at the backend's own rate, + the prefill of the tokens that it does not hold
    others  each request that will come behind this one waits for its prefill, and each that decodes for a little of it.
            In a steady state as many arrive during a wait as are waiting: the mean of those waiting there and of those
            waiting anywhere, since placement evens queues out

The candidate with the least sum wins. Against the deepest holder it must win by more than the usual error of
predictions (`error_s`, learned), or chats would move about for nothing. Ties: the fewest requests in flight, then the
first in rendezvous order of the prompt itself. A prefix that all hold favours none, since all terms are differences of
work. Nor is a holder favoured that saves less than half of the prompt and no more than chance does (`common`).

A prefix that nobody is known to hold has two homes, the first in its rendezvous order; the better of them takes it
unless another is better by more than `error_s`. So nodes agree on two before any gossip.

A prefix gets a second holder as soon as the first one's queue costs more than computing it again (`moved`). It gets one
earlier, on purpose (`spread`), once the requests for it of the last minute have together waited at its best holder, in
excess of the average elsewhere, for longer than a copy costs: one prefill, and one more for each request that waits at
the new holder. Chance makes queues, too: n meaningless differences add up to the root of the sum of their squares, so
only what is beyond that counts. A chat's waits also count for the first message, which it shares with other chats: else
all these would begin, and so stay, where the first of them was. Flapping needs no other guard: both backends then hold
the prefix, so going back costs nothing.

No speed is a constant: rates are learned (`service_rate`), and how much longer a token takes deep in a prompt. Before
that the tokens to compute decide. Source: the inequality is Preble's and Dynamo's (queue + uncached prefill); learned
rates, the delay of others and deliberate copies are ours. Reasons: only, warm, common, moved, spread, cold, no_prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from math import exp, sqrt
from random import Random
from typing import NamedTuple

from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.routing.placement import ALL_HOLDERS, Candidate, Choice, Holder, Match, Policy, Service
from ranvier_py.core.routing.placement.baselines import held_tokens
from ranvier_py.core.routing.placement.rendezvous import Rendezvous
from ranvier_py.core.routing.service_rate import ServiceRates, ahead_of, new

COMMON_SHARE = 0.5
"""A holder that saves at least this share of the prompt's prefill is worth following, however many share the match."""

COMMON_SLACK_TOKENS = 32
"""Two blocks beyond the first boundary may be common to all chats of an application: role markers, and the words that
every first question begins with."""

TIE_SHARE = 0.05
"""Sums within a twentieth of the least count as equal. Two idle engines of one kind differ only by chance, and a policy
that always follows chance fills one cache and leaves the others empty."""

OTHERS_SHARE = 0.03
"""Share of a prefill that counts as the delay of each decoding request: it delays one of an answer's dozens of tokens.
All of it would send prompts where few decode rather than where little waits, which makes the Mooncake trace's p90 a
tenth worse."""


LOSSES_S = 60.0  # waits fade over this time: long enough for a sum, short enough to forget what nobody wants now
LOSSES_MAX = 4096  # prefixes whose waits are kept; the one that was asked for longest ago is forgotten


class Weighed(NamedTuple):
    """What a request would cost at each backend that is weighed, in seconds, by position among the candidates."""

    candidates: Sequence[Candidate]
    held: Mapping[BackendId, int]  # tokens of the prompt
    queue_s: Mapping[int, float]
    prefill_s: Mapping[int, float]
    others_s: Mapping[int, float]
    sum_s: Mapping[int, float]

    def best_of(self, among: Iterable[int]) -> int:
        return min(among, key=self.sum_s.__getitem__)

    def mean_queue_s(self, among: Sequence[int]) -> float:
        return sum([self.queue_s[position] for position in among]) / len(among)


class Ttft(Policy):
    """State: the service rates, and the time lost for want of second holders."""

    name = "ttft"
    depths_wanted = ALL_HOLDERS

    def __init__(self) -> None:
        self.service_rates = ServiceRates()
        self.losses = Losses()
        self.rendezvous = Rendezvous()

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        holders = match.holders
        if len(candidates) == 1:
            return Choice(candidates[0].id, "only", held_tokens(match.holders, candidates[0]))
        weighed = self.weigh(range(len(candidates)), match, holders, candidates)
        if holders:
            position, reason = self.warm(match, weighed, holders, rng)
        elif match.home == UNKNOWN:
            position, reason = self.first(match.own, weighed, weighed.sum_s, rng), "no_prefix"
        else:
            homes = [] if match.own == match.home else self.rendezvous.order(match.home, candidates)[:2]
            position, reason = self.cold(match, weighed, homes, rng), "cold"
        return Choice(candidates[position].id, reason, weighed.held.get(candidates[position].id, 0))

    def warm(self, match: Match, weighed: Weighed, holders: Sequence[Holder], rng: Random) -> tuple[int, str]:
        """Choose the position, with its reason, for a prefix that at least one backend holds."""
        candidates, sums, prefill_s = weighed.candidates, weighed.sum_s, weighed.prefill_s
        best = self.first(match.own, weighed, sums, rng)
        deepest = holders[0].tokens
        deep = {holder.backend for holder in holders if holder.tokens == deepest}
        holding = {position for position in sums if candidates[position].id in deep}
        if not holding:
            return best, "moved"
        home = best if best in holding else weighed.best_of(holding)
        if best != home:
            error_s, whole_s = self.service_rates.fleet.error_s, prefill_s[best]
            stake_s = whole_s - prefill_s[home]
            if stake_s <= max(error_s, TIE_SHARE * whole_s) and stake_s < COMMON_SHARE * whole_s:
                return best, "common"
            if sums[home] - sums[best] > error_s:
                return best, "moved"
        copy = self.copy_of(match, weighed, home, deepest, holding)
        return (home, "warm") if copy is None else (copy, "spread")

    def cold(self, match: Match, weighed: Weighed, homes: Sequence[int], rng: Random) -> int:
        """Choose the position for a prefix that nobody is known to hold: the better of its homes, unless another is
        certainly better. Without `homes`, as for a prompt of one message, the best of all."""
        sums, error_s = weighed.sum_s, self.service_rates.fleet.error_s
        home = self.first(match.home, weighed, homes, rng) if homes else None
        if home is not None and sums[home] - min(sums.values()) <= error_s:
            return home
        best = self.first(match.own, weighed, sums, rng)
        return best if home is None or sums[home] - sums[best] > error_s else home

    def copy_of(self, match: Match, weighed: Weighed, home: int, deepest: int, holding: Container[int]) -> int | None:
        """Count the time that this request loses at its best holder. Returns the position to copy the prefix to, once
        the time lost is worth the prefill; None: not yet."""
        candidates, queue_s, losses = weighed.candidates, weighed.queue_s[home], self.losses
        others = [position for position in weighed.sum_s if position not in holding]
        if not others:
            return None
        prefix = match.home
        if deepest > match.home_tokens + COMMON_SLACK_TOKENS:
            prefix = match.deepest
            nowhere = [position for position in others if candidates[position].id not in weighed.held]
            if nowhere:
                losses.add(match.home, match.at, queue_s - weighed.mean_queue_s(nowhere))
        lost_s = losses.add(prefix, match.at, queue_s - weighed.mean_queue_s(others))
        if lost_s <= 0.0:
            return None
        copy = weighed.best_of(others)
        backend = candidates[copy]
        anew_s = self.service_rates.work_of(0, deepest) * self.service_rates[backend.id].per_token_s
        if lost_s <= anew_s * (1 + backend.waiting):
            return None
        losses.forget(prefix)
        return copy

    def waits(self, match: Match, holder: Candidate, tokens: float) -> None:
        """Count for the first message, which chats share, how much longer a request waits at its holder than it would
        where `tokens` wait to be computed. The request goes to the holder whatever that costs."""
        rate = self.service_rates[holder.id]
        queue_s, _ = rate.predict(0, ahead_of(holder, match.at))
        self.losses.add(match.home, match.at, queue_s - tokens * rate.per_token_s)

    def weigh(
        self, among: Sequence[int], match: Match, holders: Sequence[Holder], candidates: Sequence[Candidate]
    ) -> Weighed:
        """Compute what the prompt would cost at each of these positions. One flat loop, since there may be dozens."""
        held = {holder.backend: holder.tokens for holder in holders}
        rates, prompt_tokens, slope = self.service_rates, match.prompt_tokens, self.service_rates.fleet.slope
        mean = sum([candidates[position].waiting for position in among]) / len(among)
        queues: dict[int, float] = {}
        prefills: dict[int, float] = {}
        others: dict[int, float] = {}
        sums: dict[int, float] = {}
        for position in among:
            candidate = candidates[position]
            backend = candidate.id
            tokens: float = max(0, prompt_tokens - held.get(backend, 0))
            if slope:
                tokens += slope * tokens * (prompt_tokens - tokens / 2)
            ahead = ahead_of(candidate, match.at)
            queue_s, prefill_s = rates[backend].predict(tokens, ahead)
            others_s = (OTHERS_SHARE * ahead[2] + (ahead[1] + mean) / 2) * prefill_s
            queues[position], prefills[position], others[position] = queue_s, prefill_s, others_s
            sums[position] = queue_s + prefill_s + others_s
        return new(Weighed, (candidates, held, queues, prefills, others, sums))

    def first(self, key: Fingerprint, weighed: Weighed, among: Iterable[int], rng: Random) -> int:
        """Return the one `among` these positions with the least sum. Between sums that hardly differ the requests in
        flight per weight decide, then the rendezvous order of the key, which spreads prompts over the caches."""
        candidates, sums = weighed.candidates, weighed.sum_s
        tied_s = (1.0 + TIE_SHARE) * min([sums[position] for position in among])
        tied = [position for position in among if sums[position] <= tied_s]
        if len(tied) == 1:
            return tied[0]
        loads = [candidates[position].load / candidates[position].weight for position in tied]
        lightest = min(loads)
        tied = [position for position, load in zip(tied, loads, strict=True) if load == lightest]
        if key == UNKNOWN:
            return rng.choice(tied)
        if len(tied) == 1:
            return tied[0]
        scores = self.rendezvous.scores(key, candidates)
        return max(tied, key=scores.__getitem__)

    # --- learning -----------------------------------------------------------------------------------------------------

    def work_of(self, held: int, prompt_tokens: int) -> int:
        return self.service_rates.work_of(held, prompt_tokens)

    def served(self, service: Service) -> None:
        self.service_rates.served(service)

    def corrected(self, service: Service, computed_tokens: int) -> None:
        self.service_rates.corrected(service, computed_tokens)

    def forget(self, backend: BackendId) -> None:
        self.service_rates.forget(backend)

    # --- seeing -------------------------------------------------------------------------------------------------------

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        """Return the seconds of each term, and the rate that they were computed with."""
        weighed = self.weigh(range(len(candidates)), match, match.holders, candidates)
        found = []
        for position, candidate in enumerate(candidates):
            parts = {name: getattr(weighed, name)[position] for name in ("queue_s", "prefill_s", "others_s", "sum_s")}
            found.append({**parts, "tokens_per_s": 1.0 / self.service_rates[candidate.id].per_token_s})
        return found


class Loss(NamedTuple):
    """The fading sums of what requests for one prefix lost, in seconds, and of its squares."""

    sum_s: float
    squares: float
    at: float  # of the latest


class Losses:
    """By prefix: how much longer the requests of about the last minute waited at its best holder than they would have
    elsewhere."""

    def __init__(self) -> None:
        self.known: OrderedDict[Fingerprint, Loss] = OrderedDict()
        self.forgotten = 0

    def __copy__(self) -> Losses:
        twin = Losses()
        twin.known, twin.forgotten = self.known.copy(), self.forgotten
        return twin

    def add(self, prefix: Fingerprint, at: float, lost_s: float) -> float:
        """Count one more request's loss. Returns by how many seconds the sum exceeds what chance would make it."""
        if not lost_s and prefix not in self.known:  # nobody waits, as mostly: keep the prefixes that do lose
            return 0.0
        before = self.known.pop(prefix, None) or Loss(0.0, 0.0, at)
        share = exp(-max(0.0, at - before.at) / LOSSES_S)
        loss = Loss(share * before.sum_s + lost_s, share * before.squares + lost_s * lost_s, at)
        self.known[prefix] = loss
        if len(self.known) > LOSSES_MAX:
            self.known.popitem(last=False)
            self.forgotten += 1
        return loss.sum_s - sqrt(loss.squares)

    def forget(self, prefix: Fingerprint) -> None:
        """Forget the losses of a prefix, which has another holder now."""
        self.known.pop(prefix, None)
