"""`ttft`: the backend with the least predicted time to the first token, and the least delay of other requests.

Rule: each candidate costs seconds of queue, of prefill, of others' delay (also by what it evicts of theirs), and of
decoding (`weigh`); the least sum wins. A holder is left only for more than the usual error of predictions (`warm`), a
prefix in demand gets a second one on purpose (`copy_of`), and one that nobody holds goes to one of two homes (`cold`).
All rates are learned from answers; before that the tokens to compute decide.
Source: the inequality is Preble's and Dynamo's (queue + uncached prefill); learned rates, the delay of others and
deliberate copies are ours. Reasons: only, warm, common, moved, spread, cold, no_prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import copy
from math import ceil, sqrt
from random import Random
from typing import NamedTuple

from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.routing.placement import (
    ALL_HOLDERS,
    Candidate,
    Choice,
    Holder,
    Match,
    Policy,
    PolicyLearner,
    Service,
)
from ranvier_py.core.routing.placement.rendezvous import Rendezvous
from ranvier_py.core.routing.rates.decode_rate import UNEVEN, Decoded, DecodeRates
from ranvier_py.core.routing.rates.evictions import NOTHING, Evictions, RecentTokens
from ranvier_py.core.routing.rates.moments import kept
from ranvier_py.core.routing.rates.service_rate import BORROWED, ServiceRates, ahead_of, new
from ranvier_py.core.routing.rates.work import REQUEST_TOKENS

COMMON_SHARE = 0.5
"""A holder that saves at least this share of the prompt's prefill is worth following, however many share the match."""

COMMON_SLACK_TOKENS = 32
"""Two blocks beyond the first boundary may be common to all chats of an application: role markers, and the words that
every first question begins with."""

TIE_SHARE = 0.05
"""Sums within a twentieth of the least count as equal. Two idle engines of one kind differ only by chance, and a policy
that always follows chance fills one cache and leaves the others empty."""

DECODE_SHARE = 0.25
"""What a second of decoding counts, of this request's or of others', beside one before a first token. A client waits
for both the first token and the last: a second before the first delays both, and is felt, while one of decoding is
spread over an answer. Half or twice as much moves p90s by a few per cent, first tokens against last ones."""

OTHERS_SHARE = 0.03
"""Share of a prefill that counts as the delay of each request that decodes where it is computed, beside what any place
would cost. All of it would send prompts where few decode rather than where little waits."""

LOSSES_S = 240.0  # waits fade over this time: a copy that pays within minutes pays; 60 or 1,000 change little
LOSSES_MAX = 4096  # prefixes whose waits are kept; the one that was asked for longest ago is forgotten

TERMS = ("queue_s", "prefill_s", "others_s", "decode_s", "sum_s")


class Weighed(NamedTuple):
    """What a request would cost at each backend that is weighed, in seconds, by position among the candidates."""

    candidates: Sequence[Candidate]
    held: Mapping[BackendId, int]  # tokens of the prompt
    queue_s: Mapping[int, float]
    prefill_s: Mapping[int, float]
    others_s: Mapping[int, float]
    decode_s: Mapping[int, float]
    sum_s: Mapping[int, float]

    def best_of(self, among: Iterable[int]) -> int:
        return min(among, key=self.sum_s.__getitem__)

    def excess_s(self, position: int, others: Sequence[int]) -> tuple[float, float]:
        """Return by how much longer a request waits there than at these others, on average, and decodes."""
        queue_s = self.queue_s[position] - sum([self.queue_s[other] for other in others]) / len(others)
        decode_s = self.decode_s[position] - sum([self.decode_s[other] for other in others]) / len(others)
        return queue_s, decode_s


class TimeLearner(PolicyLearner):
    """Learns how fast backends compute prompts and decode, and what they evict."""

    def __init__(self) -> None:
        self.service_rates = ServiceRates()
        self.decode_rates = DecodeRates()
        self.evictions = Evictions()
        self.recent = RecentTokens()

    def __copy__(self) -> TimeLearner:
        twin = TimeLearner()
        vars(twin).update({name: copy(value) for name, value in vars(self).items()})
        return twin

    def work_of(self, held: int, prompt_tokens: int) -> int:
        return self.service_rates.work_of(held, prompt_tokens)

    def predicted_s(self, candidate: Candidate, tokens: int, now: float) -> float:
        ahead = ahead_of(candidate.work, now)._replace(since_progress_s=0.0)
        return sum(self.service_rates[candidate.id].predict(tokens, ahead))

    def served(self, service: Service) -> None:
        self.service_rates.served(service)
        if not self.decode_rates.count:
            self.decode_rates.assume(self.service_rates.fleet.line().per_token)

    def counted(
        self, backend: BackendId, believed_tokens: int, computed_tokens: int, service: Service | None = None
    ) -> None:
        self.decode_rates.counted(abs(computed_tokens - believed_tokens))
        if (again := computed_tokens - believed_tokens) > 0:
            self.evictions.add(backend, again, again, 0.0)
        if service is not None:
            self.service_rates.corrected(service, computed_tokens)

    def decoded(self, decoded: Decoded) -> None:
        fleet = self.service_rates.fleet
        known = self.service_rates[decoded.backend].per_token_s if fleet.count else None
        self.decode_rates.observe(decoded, known)
        if known is None:
            fleet.assume(self.decode_rates.per_token_s)

    def expected_at(self, candidate: Candidate, work_tokens: int, now: float) -> float:
        return now + sum(self.service_rates[candidate.id].predict(work_tokens, ahead_of(candidate.work, now)))

    def forget(self, backend: BackendId) -> None:
        self.service_rates.forget(backend)
        self.decode_rates.forget(backend)
        self.evictions.forget(backend)
        self.recent.forget(backend)


class Ttft(Policy):
    """State: the service rates, and the time lost for want of second holders."""

    name = "ttft"
    depths_wanted = ALL_HOLDERS
    wants_shared = True
    learner: TimeLearner

    def __init__(self) -> None:
        self.learner = TimeLearner()
        self.losses = Losses()
        self.rendezvous = Rendezvous()

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, match: Match, candidates: Sequence[Candidate], rng: Random) -> Choice:
        holders = match.holders
        if len(candidates) == 1:
            return Choice(candidates[0].id, "only", holders[0].tokens if holders else 0)
        weighed = self.weigh(range(len(candidates)), match, holders, candidates)
        if holders:
            position, reason = self.warm(match, weighed, holders, rng)
        elif match.home == UNKNOWN:
            position, reason = self.first(match.own, weighed, weighed.sum_s, rng), "no_prefix"
        else:
            # two homes, so that nodes agree on two before any gossip
            homes = [] if match.own == match.home else self.rendezvous.order(match.home, candidates)[:2]
            position, reason = self.cold(match, weighed, homes, rng), "cold"
        choice = Choice(candidates[position].id, reason, weighed.held.get(candidates[position].id, 0))
        self.chosen(match, choice)
        return choice

    def warm(self, match: Match, weighed: Weighed, holders: Sequence[Holder], rng: Random) -> tuple[int, str]:
        """Choose the position, with its reason, for a prefix that at least one backend holds. Moving needs no other
        guard against flapping: both hold the prefix then, so going back costs nothing."""
        candidates, sums, prefill_s = weighed.candidates, weighed.sum_s, weighed.prefill_s
        best = self.first(match.own, weighed, sums, rng)
        deepest = holders[0].tokens
        deep = {holder.backend for holder in holders if holder.tokens == deepest}
        holding = {position for position in sums if candidates[position].id in deep}
        if not holding:
            return best, "moved"
        home = best if best in holding else weighed.best_of(holding)
        if best != home:
            error_s, whole_s = self.error_s, prefill_s[best]
            stake_s = whole_s - prefill_s[home]
            # saves less than half of the prompt, and no more than chance does: no reason to follow the holder
            if stake_s <= max(error_s, TIE_SHARE * whole_s) and stake_s <= COMMON_SHARE * whole_s:
                return best, "common"
            # by more than the usual error, or chats would move about for nothing
            if sums[home] - sums[best] > error_s:
                return best, "moved"
        copy = self.copy_of(match, weighed, home, deepest, holding)
        return (home, "warm") if copy is None else (copy, "spread")

    def cold(self, match: Match, weighed: Weighed, homes: Sequence[int], rng: Random) -> int:
        """Choose the position for a prefix that nobody is known to hold: the better of its homes, unless another is
        certainly better. Without `homes`, as for a prompt of one message, the best of all."""
        sums, error_s = weighed.sum_s, self.error_s
        home = self.first(match.home, weighed, homes, rng) if homes else None
        if home is not None and sums[home] - min(sums.values()) <= error_s:
            return home
        best = self.first(match.own, weighed, sums, rng)
        return best if home is None or sums[home] - sums[best] > error_s else home

    def copy_of(self, match: Match, weighed: Weighed, home: int, deepest: int, holding: Container[int]) -> int | None:
        """Count the time that this request loses at its best holder. Returns the position to copy the prefix to, once
        the time lost in the last minutes is worth the copy; None: not yet."""
        candidates, losses = weighed.candidates, self.losses
        others = [position for position in weighed.sum_s if position not in holding]
        if not others:
            return None
        prefix, holder = match.home, candidates[home]
        lasts_s = match.answer_tokens * self.learner.decode_rates.token_s(holder.work.own.contexts)
        queue_s, decode_s = weighed.excess_s(home, others)
        if deepest > match.home_tokens + COMMON_SLACK_TOKENS:
            prefix = match.deepest
            # waits count for the opening, too: else all chats with it would begin, and stay, where the first was
            nowhere = [position for position in others if candidates[position].id not in weighed.held]
            if nowhere:
                more_s, longer_s = (queue_s, decode_s) if nowhere == others else weighed.excess_s(home, nowhere)
                losses.add(match.home, match.at, more_s + self.share_of(match.home, match, holder, lasts_s) * longer_s)
        lost_s = losses.add(prefix, match.at, queue_s + self.share_of(prefix, match, holder, lasts_s) * decode_s)
        if lost_s <= 0.0:
            return None
        copy = weighed.best_of(others)
        backend = candidates[copy]
        anew_s = self.learner.service_rates.work_of(0, deepest) * self.learner.service_rates[backend.id].per_token_s
        # a copy costs a prefill with what it evicts, another for each that waits there, a share for each that decodes
        waits = backend.work.waiting + DECODE_SHARE * backend.load
        if lost_s <= anew_s * (self.learner.evictions.price(backend.id) + waits):
            return None
        losses.forget(prefix)
        return copy

    def share_of(self, prefix: Fingerprint, match: Match, holder: Candidate, lasts_s: float) -> float:
        """Return which share of the requests at its holder have this prefix, if they come at the rate of the last
        minutes and decode for so long, as this one will. Decoding costs count by it: a copy takes no others away."""
        return min(1.0, self.losses.running(prefix, match.at, lasts_s) / max(1, holder.load))

    @property
    def uneven(self) -> bool:
        """Whether a backend is, or might be, much faster than others: idle ones are not equal then."""
        return self.learner.decode_rates.uneven or self.learner.decode_rates.looks

    @property
    def has_rates(self) -> bool:
        """Whether rates rest on more that answers have shown than on what is assumed."""
        return self.learner.service_rates.fleet.count + self.learner.decode_rates.count > BORROWED

    @property
    def error_s(self) -> float:
        """The mean error of predictions: of first tokens or, where all answers are whole, of these and of what engines
        count that they computed."""
        fleet, decode = self.learner.service_rates.fleet, self.learner.decode_rates
        return fleet.error_s if fleet.count else decode.prefill_error_s + DECODE_SHARE * decode.answer_error_s

    def slower_s(self, match: Match, candidates: Sequence[Candidate], position: int) -> float:
        """Return by how many seconds an answer takes longer there than at the fastest candidate; 0 where that may be
        chance."""
        factor = self.learner.decode_rates.factor
        least = min([factor(candidate.id) for candidate in candidates])
        if not self.learner.decode_rates.uneven or factor(candidates[position].id) < UNEVEN * least:
            return 0.0
        answer_s = match.answer_tokens * self.learner.decode_rates.per_answer_token_s
        return DECODE_SHARE * (factor(candidates[position].id) - least) * answer_s

    def ahead_s(self, match: Match, candidate: Candidate, missing: float) -> tuple[float, float]:
        """Return the seconds that a request waits there for others' work before its first token, and in all. `missing`:
        see `missing_at_holder`."""
        queue_s, _ = self.learner.service_rates[candidate.id].predict(0, ahead_of(candidate.work, match.at))
        many, own = candidate.load, candidate.work.own
        context = REQUEST_TOKENS + match.prompt_tokens + match.answer_tokens / 2
        contexts = own.contexts + (many - own.decoding) * context + context * many
        decode = self.learner.decode_rates
        decode_s = decode.factor(candidate.id) * decode.per_context_s * match.answer_tokens * contexts
        full_s = self.full_s(match, missing, decode.factor(candidate.id), contexts)
        return queue_s + full_s, queue_s + full_s + DECODE_SHARE * decode_s

    def full_s(self, match: Match, missing: float, factor: float, contexts: float) -> float:
        """Return the seconds that a request waits until others' ends have left it a place and room in the cache: the
        share of them that is missing, of the time that answers of its length take."""
        if missing <= 0.0:
            return 0.0
        return missing * factor * match.answer_tokens * self.learner.decode_rates.token_s(contexts)

    def weigh(
        self, among: Sequence[int], match: Match, holders: Sequence[Holder], candidates: Sequence[Candidate]
    ) -> Weighed:
        """Compute what the prompt would cost at each of these positions. One flat loop, since there may be dozens."""
        held = {holder.backend: holder.tokens for holder in holders}
        rates, decode, prompt_tokens = self.learner.service_rates, self.learner.decode_rates, match.prompt_tokens
        slope = rates.fleet.slope
        weighed = [candidates[position] for position in among]
        waiting = load = 0
        for candidate in weighed:
            waiting += candidate.work.waiting
            load += candidate.load
        # as many requests come during a wait as are waiting: there or, since placement evens queues out, anywhere
        mean = waiting / len(weighed)
        # a cold prompt must be computed somewhere: it delays what decodes on average, what decodes just there little
        mean_load = load / len(weighed)
        decode_weight = DECODE_SHARE * match.answer_tokens
        context = REQUEST_TOKENS + prompt_tokens + match.answer_tokens / 2
        factors = [decode.factor(candidate.id) for candidate in weighed]
        least = min(factors)
        recent, whole_tokens = self.learner.recent.known, prompt_tokens + match.answer_tokens
        price = self.learner.evictions.price if self.learner.evictions.seen else None
        typical: float | None = None
        queues: dict[int, float] = {}
        prefills: dict[int, float] = {}
        others: dict[int, float] = {}
        decodes: dict[int, float] = {}
        sums: dict[int, float] = {}
        for position, candidate, factor in zip(among, weighed, factors, strict=True):
            backend = candidate.id
            has = held.get(backend, 0)
            tokens: float = prompt_tokens - has if has < prompt_tokens else 0
            if slope:
                tokens += slope * tokens * (prompt_tokens - tokens / 2)
            work = candidate.work
            ahead = ahead_of(work, match.at)
            queue_s, prefill_s = rates[backend].predict(tokens, ahead)
            others_s = (DECODE_SHARE * mean_load + OTHERS_SHARE * ahead[2] + (ahead[1] + mean) / 2) * prefill_s
            many, own, room = candidate.load, work.own, work.room
            contexts = own.contexts + (many - own.decoding) * context
            if room.cache_tokens or room.places:
                typical = typical_memory(match, weighed) if typical is None else typical
                missing = missing_share(match, candidate, has, typical)
                queue_s += self.full_s(match, missing, factor, contexts)
                if room.cache_tokens and recent.get(backend, NOTHING)[0] + whole_tokens > room.cache_tokens:
                    others_s += self.evicted(match, candidate, has) * rates[backend].per_token_s
            # beyond the fastest backend's: steps read the contexts of all that decode there, and theirs read this one
            decode_s = decode_weight * (
                (factor - least) * decode.per_answer_token_s
                + factor * decode.per_context_s * (contexts + context * (1 + many))
            )
            queues[position], prefills[position], others[position] = queue_s, prefill_s, others_s
            decodes[position] = decode_s
            sums[position] = queue_s + (price(backend) if price else 1.0) * prefill_s + others_s + decode_s
        return new(Weighed, (candidates, held, queues, prefills, others, decodes, sums))

    def evicted(self, match: Match, candidate: Candidate, held: int) -> float:
        """Return how many tokens of chats that went on there lately a request evicts: they will be computed again."""
        fresh, size = match.prompt_tokens - held + match.answer_tokens, candidate.work.room.cache_tokens or 0
        return self.learner.recent.evicted_by(candidate.id, fresh, match.own_tokens(held), size, match.at)

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
        return self.rendezvous.highest(key, candidates, tied)

    def chosen(self, match: Match, choice: Choice) -> None:
        """Learn what the chosen backend has to compute, and what another one had to evict."""
        fresh = max(0, match.prompt_tokens - choice.tokens)
        self.learner.evictions.add(choice.backend, fresh, 0, match.at)
        self.learner.recent.add(choice.backend, fresh + match.answer_tokens, match.own_tokens(choice.tokens), match.at)
        if match.evicted:
            self.learner.evictions.add(match.evicted[0], 0, match.evicted[1], match.at)

    # --- seeing -------------------------------------------------------------------------------------------------------

    def terms(self, match: Match, candidates: Sequence[Candidate]) -> Sequence[Mapping[str, float]]:
        """Return the seconds of each term, and the rate that they were computed with."""
        weighed = self.weigh(range(len(candidates)), match, match.holders, candidates)
        found = []
        for position, candidate in enumerate(candidates):
            parts = {name: getattr(weighed, name)[position] for name in TERMS}
            found.append({**parts, "tokens_per_s": 1.0 / self.learner.service_rates[candidate.id].per_token_s})
        return found


def typical_memory(match: Match, candidates: Sequence[Candidate]) -> float:
    """Return the tokens of cache that a request takes until its end: the mean of this node's own that run or wait at
    these backends; as many as this one where there are none."""
    own = [candidate.work.own for candidate in candidates]
    count = sum([each.inflight for each in own])
    return sum([each.memory for each in own]) / count if count else match.memory(0)


def missing_at_holder(match: Match, candidate: Candidate) -> float:
    """Return what is missing, as `missing_share`, at a backend that holds the whole prompt, judged by itself alone."""
    room = candidate.work.room
    if not room.cache_tokens and not room.places:  # neither is known
        return 0.0
    return missing_share(match, candidate, match.prompt_tokens, typical_memory(match, (candidate,)))


def missing_share(match: Match, candidate: Candidate, held: int, typical: float) -> float:
    """Return which share of its cache, or of the requests that it runs at once, must be left by others before this
    request can run there, 0 or less if none; 0 where neither is known. `typical`: see `typical_memory`.

    Of the cache counts what is missing for certain. How long answers become is not known, and lengths of n answers,
    which vary as much as they are long, add up to the root of n times one more or less."""
    own, room = candidate.work.own, candidate.work.room
    places, size = room.places, room.cache_tokens
    missing = (candidate.load + 1 - places) / places if places else 0.0
    if size:
        # peers do not say what theirs take; were it as much as this one takes, long prompts would find all engines full
        of_peers = (candidate.load - own.inflight) * typical
        of_others = own.memory + of_peers
        excess = of_others + match.memory(held) - sqrt(candidate.load) * match.answer_tokens - size
        if excess > 0.0 and of_others > 0.0:
            # room comes free by whole requests: of two long ones that fill a cache one must end, however little lacks
            each = of_others / candidate.load
            excess = ceil(excess / each) * each
        missing = max(missing, excess / size)
    return missing


class Loss(NamedTuple):
    """Fading sums over the requests for one prefix: seconds that they lost, their squares, and how many they are."""

    sum_s: float
    squares: float
    requests: float
    at: float  # of the latest
    since: float  # of the first


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
        sum_s, squares, requests, before, since = self.known.pop(prefix, (0.0, 0.0, 0.0, at, at))
        share = kept(before, at, LOSSES_S)
        sum_s, squares = share * sum_s + lost_s, share * squares + lost_s * lost_s
        self.known[prefix] = new(Loss, (sum_s, squares, share * requests + 1.0, at, since))
        if len(self.known) > LOSSES_MAX:
            self.known.popitem(last=False)
            self.forgotten += 1
        # chance makes queues, too: n meaningless differences add up to the root of the sum of their squares
        return sum_s - sqrt(squares)

    def running(self, prefix: Fingerprint, at: float, lasts_s: float) -> float:
        """Return how many requests for this prefix run at a time, with one that comes now, if each lasts so long."""
        loss = self.known.get(prefix)
        if loss is None:
            return 1.0
        count = kept(loss.at, at, LOSSES_S) * loss.requests + 1.0
        span_s = min(LOSSES_S, at - loss.since)
        return min(count, lasts_s * count / span_s) if span_s > 0.0 else count

    def forget(self, prefix: Fingerprint) -> None:
        """Forget the losses of a prefix, which has another holder now."""
        self.known.pop(prefix, None)
