"""Compares predicted with reported cached tokens, engine by engine, and corrects the routes of estimated engines.

Rule: counts are compared in usable tokens: whole blocks of the engine, without the block of the last prompt token,
which is always computed again. At level ESTIMATED an answer colder than predicted withdraws routes (`_correct`), and
routes that the engine has probably evicted are hidden (`tick`); when the limit moves, they return by themselves.
Hidden routes of an engine that was chosen anyway are looked up, too, so the module still learns what they would have
predicted. Distances are those at sending: tokens evicted while a request queues count against its prediction.
Bound: one BackendPredictions for each backend id; what was looked up of an attempt goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.calibration.biases import Bias, present
from ranvier_py.core.engine_cache.calibration.predictions import (
    BackendPredictions,
    BiasChange,
    CalibrationCounters,
    spans,
)
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import is_of_media
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.attempt import Attempt, Observer, UsedPrefix
from ranvier_py.core.routing.backends import Backend, Outcome
from ranvier_py.core.routing.capacity import EVERY_SECOND, CapacityEstimate
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.table import NO_DEPTHS

SAMPLES_PER_S_MAX = 32
"""Attempts per second whose routes are looked up: the look-ups stay below a thousandth of a core."""

WALKS_MAX = 2 * SAMPLES_PER_S_MAX
"""Prompts between two ticks whose uses are dated prefix by prefix; further ones are dated by their deepest one."""

FRESH_SHARE = 0.1
"""A prompt was used "moments ago" if the engine has since used no more than this share of its capacity."""

FRESH_TOKENS = 20_000
"""The same limit in tokens while the capacity is unknown: a tenth of the cache of a small engine."""

CHANGES_MAX = 256

EVENTS_TOKENS_MIN = 64
"""Smaller counts are no evidence against an engine's events: the prefix keys of a prompt can be that far apart."""

SMALL_SHARE = 0.7
"""Below this share of the reported capacity a learned one counts as small: our model is no more exact."""

NO_URL = ""
"""Stands for the URL of a backend that only peers have used so far, or wherever the URL does not matter."""

RENEW_SHARE = 0.25
"""Share of the capacity that an engine uses before the evidence of a running request is renewed."""


class Calibration(Observer):
    """Compares predictions with answers, and corrects the route table.

    Args:
        estimated: whether our routes of a backend are guesses; False where the backend's events are read.
        contradicted: called with a backend whose events are read when it answers cold to a prefix that they report.
        checkpoints: answers of the backends that it knows are compared with their checkpoint credit alone, and say
            nothing of the keys and values that those backends hold.
        judged: called with a backend after an answer that showed whether it reuses prefixes at all.
    """

    def __init__(
        self,
        routes: RouteTable,
        *,
        block_tokens: int = 16,
        estimated: Callable[[BackendId], bool] = lambda _: True,
        contradicted: Callable[[BackendId], object] = lambda _: None,
        checkpoints: Checkpoints | None = None,
        judged: Callable[[Backend], object] = lambda _: None,
    ) -> None:
        self.counters = CalibrationCounters()
        self._routes = routes
        self._block_tokens = block_tokens
        self._estimated = estimated
        self._contradicted = contradicted
        self._judged = judged
        self._hybrids = checkpoints.known if checkpoints is not None else {}
        self._backends: dict[BackendId, BackendPredictions] = {}
        self._fleet = CapacityEstimate()
        self.running: dict[Attempt, int] = {}  # between first token and end: in which second its prompt was used last
        self._second = -1
        self._sampled = 0  # attempts, in this second
        self._walked = 0  # prompts, since the last tick
        self._changes: list[BiasChange] = []
        routes.on_use = self._used

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        if attempt.prompt.kind == "opaque" or not attempt.prompt.end.messages:
            return
        if int(now) != self._second:
            self._second, self._sampled = int(now), 0
        if self._sampled >= SAMPLES_PER_S_MAX:
            self.counters.skipped += 1
            return
        self._sampled += 1
        known = self._known(attempt)
        if not known.estimated:
            return
        self.counters.sampled += 1
        found = self._routes.uses.evidence_of(attempt.prompt.end.chain(), attempt.target.id, attempt.generation)
        attempt.uses = [(tokens, second, known.clock.distance(second)) for tokens, second in found]

    def started(self, attempt: Attempt, now: float) -> None:
        if attempt.uses is not None:
            self.running[attempt] = int(now)

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        self.running.pop(attempt, None)
        if outcome is not Outcome.SUCCESS:
            attempt.uses = None  # its answer will not be read

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        uses, attempt.uses = attempt.uses or (), None
        if answer.prompt_tokens is None or attempt.prompt.kind == "opaque":
            return
        known = self._known(attempt)
        if end is attempt.prompt.end:  # else `end` was learned
            known.clock.add(answer.completion_tokens or 0, now)
        if attempt.prompt.counts_differ:
            return
        cached = answer.cached_tokens
        # older vLLM leaves zeros out
        if cached is None and attempt.reports_hits:
            cached = 0
        known.evidence.counted(cached)
        own = attempt.prompt.end
        if own.state is not None and attempt.prompt.kind == "chat":
            known.evidence.measured(answer.prompt_tokens - own.length)
        prefixes = usable_prefixes(known, uses, answer.prompt_tokens)
        if attempt.target.id not in self._hybrids and attempt.generation == attempt.target.generation:
            self._judge_reuse(known, attempt, prefixes, cached)
        if cached is None:
            known.counters.answers_silent += 1
            return
        if attempt.target.id in self._hybrids:
            compare_credit(known, attempt, answer.prompt_tokens, cached)
        else:
            self._correct(known, attempt, end, answer.prompt_tokens, cached, prefixes)

    def _correct(
        self,
        known: BackendPredictions,
        attempt: Attempt,
        end: Boundary,
        prompt_tokens: int,
        cached: int,
        prefixes: Sequence[UsedPrefix],
    ) -> None:
        """Compare an answer's count with the prediction: withdraw the routes below the shortest prefix that was missing
        if they are older than the request, learn how much is kept."""
        reports_hits = attempt.reports_hits
        held = known.usable(attempt.decision.matched_tokens, prompt_tokens)
        if held and not reports_hits:
            known.counters.answers_silent += 1
        else:
            self._compare(known, attempt, prompt_tokens, cached)
        estimated = self._estimated(attempt.target.id)
        if estimated:
            self._learn(known, prefixes, cached, reports_hits=reports_hits)
        elif max(held, cached) >= EVENTS_TOKENS_MIN:
            known.evidence.reported_by_events(cached, held)
        # zeros mean nothing before the first hit: some engines always count 0, or do so in one API alone
        gone = self._gone(known, attempt, end, prompt_tokens, cached) if reports_hits or not estimated else None
        # where no event could name the prefix, its level does not matter
        if gone is not None and (estimated or is_untold(gone)):
            if not reports_hits:
                return
            known.counters.refuted += 1
            self.counters.withdrawn += self._routes.refute(gone, attempt.target.id, int(attempt.sent_at))
        elif gone is not None and not cached:
            self._contradicted(attempt.target.id)

    def report(self, backend: BackendId, url: str, generation: int, reported: EngineMetrics) -> None:
        """Take the capacity and block size that an engine's metrics page reports."""
        known = self._at(backend, url, generation)
        known.reported = reported
        known.estimate.reported = reported.capacity_tokens
        self._know_largest()

    def tick(self, now: float) -> list[BiasChange]:
        """Hide too old routes and judge biases, once a second. Returns the biases that appeared or went since.

        The distance beyond which prefixes answer cold (`capacity`) becomes one second per engine, at or before which
        the table ignores evidence, and a maximum depth for each of the next ones: a match pays one or two look-ups.
        """
        self._walked = 0
        for attempt, used_at in self.running.items():
            self._renew(attempt, used_at, now)
        for backend, known in self._backends.items():
            known.estimated = self._estimated(backend)
            second, learned = self._hidden_to(backend, known), known.estimate.learned
            parted = known.estimated and learned != inf
            self._routes.hide(backend, second, known.clock.left_of(learned) if parted else NO_DEPTHS)
            self._judge(backend, known)
        changes, self._changes = self._changes, []
        return changes

    def forget(self, backend: BackendId) -> None:
        """Drop everything about a backend that was removed."""
        self._backends.pop(backend, None)
        self._know_largest()
        self._routes.hide(backend, -1)

    def backends(self) -> dict[BackendId, BackendPredictions]:
        """How well each backend is predicted, by id."""
        return dict(sorted(self._backends.items()))

    def lifetime_s(self, backend: BackendId, now: float) -> float | None:
        """Age in seconds beyond which the backend's routes are hidden now; None while there is no limit."""
        hidden = self._hidden_to(backend, self._backends[backend])
        return None if hidden < 0 else max(0.0, now - hidden)

    def _known(self, attempt: Attempt) -> BackendPredictions:
        target, generation = attempt.target, attempt.generation
        known = self._backends.get(target.id)
        if known is not None and known.generation == generation and known.url == target.url:
            return known
        return self._at(target.id, target.url, generation)

    def _at(self, backend: BackendId, url: str, generation: int) -> BackendPredictions:
        """Return what is known of a backend: begun anew at another URL, `begin` called for a later generation."""
        known = self._backends.get(backend)
        if known is None or (url != known.url and NO_URL not in (url, known.url)):
            estimate = CapacityEstimate(self._fleet)
            made = (url, generation, estimate, self._block_tokens, self._estimated(backend))
            known = self._backends[backend] = BackendPredictions(*made)
        elif known.generation < generation:
            known.begin(generation)
        known.url = url or known.url
        return known

    def _know_largest(self) -> None:
        reported = [known.estimate.reported for known in self._backends.values() if known.estimate.reported is not None]
        self._fleet.reported = max(reported, default=None)

    def _used(
        self,
        prompts: Sequence[Sequence[PrefixKey]],
        backend: BackendId,
        generation: int,
        second: int,
        tokens_below: int = 0,
    ) -> None:
        """Count the tokens of prompts that requests used, ours or peers', once each, and `tokens_below` new ones below.
        Called just before the prompts' routes are raised."""
        known = self._backends.get(backend)
        if known is None or known.generation < generation:
            if not self._estimated(backend):
                return
            known = self._at(backend, NO_URL, generation)
        if known.generation != generation or not known.estimated:
            return
        uses, place = self._routes.uses, (backend, generation, second)
        self._walked += len(prompts)
        if len(prompts) == 1 and self._walked > WALKS_MAX:
            new_tokens, before = uses.roughly_used_before(prompts[0], *place)
        else:
            new_tokens, before = uses.used_before(prompts, *place)
        used: float = tokens_below + new_tokens
        for earlier, tokens in before.items():
            used += known.clock.take(tokens, earlier)
        known.clock.add(used, second)

    def _renew(self, attempt: Attempt, used_at: int, now: float) -> None:
        known = self._known(attempt)
        limit = known.estimate.limit
        if (
            limit == inf
            or known.generation != attempt.generation
            or known.clock.distance(used_at) < RENEW_SHARE * limit
        ):
            return
        self.running[attempt] = second = int(now)
        uses = self._routes.uses
        key = uses.deepest_held(attempt.prompt.end.chain(), attempt.target.id, attempt.generation)
        if key is not None:
            self._used(((key,),), attempt.target.id, attempt.generation, second)
            uses.renew(key, attempt.target.id, attempt.generation, second)

    def _compare(self, known: BackendPredictions, attempt: Attempt, prompt_tokens: int, cached: int) -> None:
        predicted = known.usable(attempt.decision.matched_tokens, prompt_tokens)
        if cached:
            ours = min(attempt.decision.matched_tokens, prompt_tokens - 1) // self._block_tokens * self._block_tokens
            known.evidence.found(cached, ours)
        known.compare(predicted, cached)

    def _judge_reuse(
        self, known: BackendPredictions, attempt: Attempt, prefixes: Sequence[UsedPrefix], cached: int | None
    ) -> None:
        """Let an answer show whether the engine reuses prefixes, if it had served this prompt's a moment before."""
        if is_fresh(known, prefixes):
            attempt.target.reuse.answered(cached)
            self._judged(attempt.target)

    def _learn(
        self, known: BackendPredictions, prefixes: Sequence[UsedPrefix], cached: int, *, reports_hits: bool
    ) -> None:
        """Learn which prefixes of the prompt were still cached, each by the tokens used since that one's last use."""
        if not prefixes:
            return
        deepest = prefixes[0][0]
        if is_fresh(known, prefixes):
            known.evidence.used_again(cached, deepest)
        if not reports_hits:
            return
        for tokens, above, _, since in spans(prefixes):
            warm = min(max(cached, above), tokens)  # the engine had the prompt down to here
            if warm > above:
                known.estimate.observe(since + (above + warm) / 2, (warm - above) / deepest)
            if tokens > warm:
                known.estimate.observe(since + (warm + tokens) / 2, (warm - tokens) / deepest)
        known.estimate.counted()

    def _gone(
        self, known: BackendPredictions, attempt: Attempt, end: Boundary, prompt_tokens: int, cached: int
    ) -> PrefixKey | None:
        """Return the shortest prefix that was predicted but not found; None if all was found."""
        if known.usable(attempt.decision.matched_tokens, prompt_tokens) <= cached:
            return None
        gone, block = None, known.block_tokens
        first_tokens = (cached // block + 1) * block  # whoever had a prefix of so many would have reported more
        for key in end.chain():
            if key[0] < first_tokens:
                break
            if key[0] <= attempt.decision.matched_tokens:
                gone = key
        return gone

    def _hidden_to(self, backend: BackendId, known: BackendPredictions) -> int:
        limit = known.estimate.limit
        if not self._estimated(backend) or limit == inf:
            return -1
        if limit <= 0:
            return EVERY_SECOND
        return known.clock.second_before(limit)

    def _judge(self, backend: BackendId, known: BackendPredictions) -> None:
        strengths = known.evidence.strengths(self._block_tokens)
        learned, reported = known.estimate.learned, known.estimate.reported
        small = learned < (inf if reported is None else SMALL_SHARE * reported)
        strengths[Bias.SMALL_CACHE] = float(small and self._estimated(backend))
        if (hybrid := self._hybrids.get(backend)) is not None:
            strengths[Bias.PROFILE] = hybrid.confidence.doubt
        for bias, strength in strengths.items():
            before = bias in known.biases
            if present(before, strength) is before:
                continue
            if before:
                del known.biases[bias]
            else:
                known.biases[bias] = None
                self.counters.appeared += 1
            if len(self._changes) >= CHANGES_MAX:
                self._changes.pop(0)
                self.counters.changes_dropped += 1
            self._changes.append(BiasChange(backend, bias, not before, known.detail_of(bias)))


def usable_prefixes(known: BackendPredictions, uses: Sequence[UsedPrefix], prompt_tokens: int) -> Sequence[UsedPrefix]:
    """Return the prefixes of a prompt that the engine had used before, those too short for its blocks left out."""
    prefixes = [(known.usable(tokens, prompt_tokens), second, since) for tokens, second, since in uses]
    return [prefix for prefix in prefixes if prefix[0]]


def is_fresh(known: BackendPredictions, prefixes: Sequence[UsedPrefix]) -> bool:
    """Whether the engine had used these prefixes of a prompt moments ago."""
    return bool(prefixes) and prefixes[0][2] < FRESH_SHARE * min(known.estimate.limit, FRESH_TOKENS / FRESH_SHARE)


def compare_credit(known: BackendPredictions, attempt: Attempt, prompt_tokens: int, cached: int) -> None:
    """Compare an answer's count with the checkpoint that a hybrid model's backend was credited with."""
    credited = min(attempt.decision.matched_tokens, max(0, prompt_tokens - 1))
    if credited and not attempt.reports_hits:
        known.counters.answers_silent += 1
    else:
        known.compare(credited, cached)


def is_untold(key: PrefixKey) -> bool:
    """Whether no event can name this prefix: only its text fingerprint is known, or it has media."""
    return not key[1] or is_of_media(key[1])
