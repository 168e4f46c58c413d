"""The router's own error, engine by engine: what was predicted to be cached against what the answer says was.

An Observer of attempts. Each answer with counts is compared with its prediction, in tokens that the engine could have
used: whole blocks of its own, and never the block with the last prompt token, which is always computed again. From
these come precision (of the predicted tokens, how many were cached), recall (of the cached, how many were predicted),
a histogram of the error, and the evidence of `biases`.

It corrects what it can, for engines whose caches nobody tells us (level ESTIMATED). A prefix that answered cold is
withdrawn with what hangs below it (`core/routing/route_table/outcomes`), and no other; at any level if no events could
tell of it. And claims that are older than the cache is large are *faded*: `capacity` learns beyond how many tokens
used since their last use prefixes answer cold; each tick turns that distance into one second per engine, up to which
the route table takes evidence for too old, and a depth for each of the next seconds. So a match pays one test of an
empty dict, or one or two looks into it, and nothing is searched or swept; when the limit moves, faded claims come back
by themselves.

What a request uses again is young again, and stays young while it runs: then nothing pushes it out. What requests of
peers used counts as it is heard of.

Rules: faded claims are looked up too when their engine was chosen anyway, so what they would have been is still
learned. Distances are those at departure, where claims are believed or not: what a queue pushes out before a request's
turn comes counts against them. At most SAMPLES_PER_S_MAX attempts a second are looked up; of others only what they had
computed is known. An engine that told cached tokens once means 0 where it leaves them out (vLLM does).
Bound: one ledger for each backend id, FLIGHTS_MAX samples. Cost: 5 us for an answer, 25 us more for a sampled attempt,
5 us for a route update of a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.engine_cache.calibration.backend_statistics import Ledger, Part, Sample, detail_of, spans
from ranvier_py.core.engine_cache.calibration.biases import Bias, present
from ranvier_py.core.engine_cache.calibration.calibration_values import (
    BiasChange,
    CalibrationCounts,
    CalibrationView,
    Told,
)
from ranvier_py.core.engine_cache.calibration.capacity import CapacityEstimate
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import is_of_media
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.table import NO_DEPTHS

SAMPLES_PER_S_MAX = 32
"""Look-ups of claims, 20 us each: below a thousandth of a core."""

ATTEMPTS_MAX = 4096
"""Samples kept until their answer comes; beyond, the oldest is forgotten: its answer was lost."""

FRESH_SHARE = 0.1
"""A prompt was there «moments ago» if no more than this share of the capacity was used since."""

FRESH_TOKENS = 20_000
"""... or so many tokens, while no capacity is known: a tenth of the cache of a small engine."""

CHANGES_MAX = 256

EVENTS_TOKENS_MIN = 64
"""Fewer are no evidence against an engine's events: stops are that far apart."""

SMALL_SHARE = 0.7
"""A learned capacity below this share of what the engine tells is smaller than thought: our model is no more exact."""


RENEW_SHARE = 0.25
"""Of the capacity: when so much was used since a running request's last evidence, it is renewed."""


class Calibration:
    """Compares and corrects.

    Args:
        estimated: whether what this backend holds is our own guess; False where its events tell.
        contradicted: told when such a one answers cold to what its events said it has.
    """

    def __init__(
        self,
        routes: RouteTable,
        *,
        block_tokens: int = 16,
        estimated: Callable[[BackendId], bool] = lambda _: True,
        contradicted: Callable[[BackendId], object] = lambda _: None,
    ) -> None:
        self.counts = CalibrationCounts()
        self._routes = routes
        self._block_tokens = block_tokens
        self._estimated = estimated
        self._contradicted = contradicted
        self._ledgers: dict[BackendId, Ledger] = {}
        self._fleet = CapacityEstimate()
        self._samples: dict[int, Sample] = {}  # by identity of the attempt, which may come twice
        self._second = -1
        self._sampled = 0  # in this second
        self._changes: list[BiasChange] = []
        routes.remote_use = self._heard

    # --- attempts ----------------------------------------------------------------------------------------------------

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        if attempt.prompt.kind == "opaque" or not attempt.prompt.end.messages:
            return
        if int(now) != self._second:
            self._second, self._sampled = int(now), 0
        if self._sampled >= SAMPLES_PER_S_MAX:
            self.counts.skipped += 1
            return
        self._sampled += 1
        if not self._estimated(attempt.backend):
            return
        self.counts.sampled += 1
        found = self._routes.uses.evidence_of(attempt.prompt.end.chain(), attempt.backend, attempt.generation)
        clock = self._ledger(attempt).clock
        parts = [(tokens, second, clock.distance(second)) for tokens, second in found]
        self._samples[id(attempt)] = Sample(attempt.sent_at, parts)
        if len(self._samples) > ATTEMPTS_MAX:
            del self._samples[next(iter(self._samples))]

    def started(self, attempt: Attempt, now: float) -> None:
        if attempt.prompt.kind == "opaque":
            return
        clock, sample = self._ledger(attempt).clock, self._sample(attempt)
        if sample is None:
            clock.add(attempt.computed_tokens, now)
            return
        sample.used_at, sample.running = int(now), attempt
        for tokens, above, second, _ in spans(sample.parts):
            clock.take(tokens - above, second)
        clock.add(attempt.prompt.tokens, now)  # all of it is in use, whatever was known of it

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:  # noqa: ARG002  # an Observer is told
        sample = self._sample(attempt)
        if sample is not None:
            sample.running = None
            if outcome is not Outcome.SUCCESS:
                del self._samples[id(attempt)]  # its answer will not be read

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        sample = self._sample(attempt)
        if sample is not None:
            del self._samples[id(attempt)]
        if answer.prompt_tokens is None or attempt.prompt.kind == "opaque":
            return
        ledger = self._ledger(attempt)
        cached = answer.cached_tokens
        ledger.tells_cached |= cached is not None
        if cached is None and ledger.tells_cached:
            cached = 0
        ledger.evidence.counted(cached)
        own = attempt.prompt.end
        if own.state is not None and attempt.prompt.kind == "chat":
            ledger.evidence.measured(answer.prompt_tokens - own.length)
        self._note_used(ledger, attempt, sample, answer, cached or 0, now)
        if cached is None:
            ledger.silent += 1
            return
        self._compare(ledger, attempt, answer.prompt_tokens, cached)
        estimated = self._estimated(attempt.backend)
        if estimated:
            self._learn(ledger, sample.parts if sample is not None else (), answer.prompt_tokens, cached)
        else:
            held = self._usable(ledger, attempt.decision.matched_tokens, answer.prompt_tokens)
            if max(held, cached) >= EVENTS_TOKENS_MIN:
                ledger.evidence.told_by_events(cached, held)
        gone = self._gone(ledger, attempt, end, answer.prompt_tokens, cached)
        if gone is not None and (estimated or is_untold(gone)):
            ledger.refuted += 1
            self.counts.refuted += self._routes.refute(gone, attempt.backend, int(attempt.sent_at))
        elif gone is not None and not cached:
            self._contradicted(attempt.backend)

    # --- beside them ------------------------------------------------------------------------------------------------

    def told(self, backend: BackendId, url: str, generation: int, told: Told) -> None:
        """What an engine says of its own cache."""
        ledger = self._ledgers.get(backend)
        if ledger is None or ledger.url != url:
            ledger = self._ledgers[backend] = Ledger(url, generation, self._fleet)
        ledger.told = told
        ledger.estimate.told = told.capacity_tokens
        self._know_largest()

    def tick(self, now: float) -> list[BiasChange]:
        """Let too old claims fade, and name biases. Once a second. Returns what appeared or went since the last one."""
        for sample in self._samples.values():
            if sample.running is not None:
                self._renew(sample, sample.running, now)
        for backend, ledger in self._ledgers.items():
            second, learned = self._hidden_to(backend, ledger), ledger.estimate.learned
            parted = self._estimated(backend) and learned != inf
            self._routes.hide(backend, second, ledger.clock.left_of(learned) if parted else NO_DEPTHS)
            self._judge(backend, ledger)
        changes, self._changes = self._changes, []
        return changes

    def forget(self, backend: BackendId) -> None:
        """The backend was removed."""
        self._ledgers.pop(backend, None)
        self._know_largest()
        self._routes.hide(backend, -1)

    def views(self, now: float) -> list[CalibrationView]:
        return [self._view(backend, ledger, now) for backend, ledger in sorted(self._ledgers.items())]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _ledger(self, attempt: Attempt) -> Ledger:
        ledger = self._ledgers.get(attempt.backend)
        if ledger is None or ledger.url != attempt.url:
            ledger = self._ledgers[attempt.backend] = Ledger(attempt.url, attempt.generation, self._fleet)
        elif ledger.generation < attempt.generation:
            ledger.begin(attempt.generation)
        return ledger

    def _know_largest(self) -> None:
        told = [ledger.estimate.told for ledger in self._ledgers.values() if ledger.estimate.told is not None]
        self._fleet.told = max(told, default=None)

    def _sample(self, attempt: Attempt) -> Sample | None:
        sample = self._samples.get(id(attempt))
        return sample if sample is not None and sample.sent_at == attempt.sent_at else None

    def _heard(self, prompts: Iterable[Sequence[PrefixKey]], backend: BackendId, generation: int, second: int) -> None:
        """Peers' requests used these prompts; their claims are about to be raised."""
        ledger = self._ledgers.get(backend)
        if ledger is None or ledger.generation != generation or not self._estimated(backend):
            return
        new_tokens, before = self._routes.uses.used_before(prompts, backend, generation, second)
        again = sum([ledger.clock.take(tokens, earlier) for earlier, tokens in before.items()])
        ledger.clock.add(new_tokens + again, second)

    def _note_used(
        self, ledger: Ledger, attempt: Attempt, sample: Sample | None, answer: Answer, cached: int, now: float
    ) -> None:
        """It ended: prompt and answer were in use until now."""
        clock = ledger.clock
        if sample is not None and sample.used_at >= 0:
            again = clock.take(attempt.prompt.tokens, sample.used_at)
        else:
            again = max(0, (answer.prompt_tokens or 0) - cached - attempt.computed_tokens)
        clock.add(again + (answer.completion_tokens or 0), now)

    def _renew(self, sample: Sample, attempt: Attempt, now: float) -> None:
        ledger = self._ledger(attempt)
        limit = ledger.estimate.limit
        if (
            limit == inf
            or ledger.generation != attempt.generation
            or ledger.clock.distance(sample.used_at) < RENEW_SHARE * limit
        ):
            return
        self._routes.uses.renew(attempt.prompt.end.chain(), attempt.backend, attempt.generation, int(now))
        ledger.clock.add(ledger.clock.take(attempt.prompt.tokens, sample.used_at), now)
        sample.used_at = int(now)

    def _usable(self, ledger: Ledger, tokens: int, prompt_tokens: int) -> int:
        """Of that many tokens of a prompt, how many its engine could take from a cache."""
        block = ledger.block_tokens(self._block_tokens)
        return min(tokens, max(0, prompt_tokens - 1)) // block * block

    def _compare(self, ledger: Ledger, attempt: Attempt, prompt_tokens: int, cached: int) -> None:
        predicted = self._usable(ledger, attempt.decision.matched_tokens, prompt_tokens)
        if cached:
            ours = min(attempt.decision.matched_tokens, prompt_tokens - 1) // self._block_tokens * self._block_tokens
            ledger.evidence.found(cached, ours)
        ledger.answers += 1
        ledger.predicted_tokens += predicted
        ledger.cached_tokens += cached
        ledger.right_tokens += min(predicted, cached)
        ledger.error.observe(cached - predicted)

    def _learn(self, ledger: Ledger, sample: Sequence[Part], prompt_tokens: int, cached: int) -> None:
        """Which parts of the prompt were there, by how much had been used since each was last used."""
        parts = [(self._usable(ledger, tokens, prompt_tokens), second, since) for tokens, second, since in sample]
        parts = [part for part in parts if part[0]]
        if not parts:
            return
        deepest, _, oldest = parts[0]
        for tokens, above, _, since in spans(parts):
            warm = min(max(cached, above), tokens)  # down to here
            for estimate in (ledger.estimate, self._fleet):
                if warm > above:
                    estimate.observe(since + (above + warm) / 2, (warm - above) / deepest, 0.0)
                if tokens > warm:
                    estimate.observe(since + (warm + tokens) / 2, 0.0, (tokens - warm) / deepest)
        ledger.estimate.counted()
        self._fleet.counted()
        if oldest < FRESH_SHARE * min(ledger.estimate.limit, FRESH_TOKENS / FRESH_SHARE):
            ledger.evidence.used_again(cached, deepest)

    def _gone(
        self, ledger: Ledger, attempt: Attempt, end: Boundary, prompt_tokens: int, cached: int
    ) -> PrefixKey | None:
        """The shortest prefix that was believed to be there and was not."""
        if self._usable(ledger, attempt.decision.matched_tokens, prompt_tokens) <= cached:
            return None
        gone = None
        for key in end.chain():
            if key[0] > attempt.decision.matched_tokens:
                continue
            if self._usable(ledger, key[0], prompt_tokens) <= cached:
                break
            gone = key
        return gone

    def _hidden_to(self, backend: BackendId, ledger: Ledger) -> int:
        limit = ledger.estimate.limit
        if not self._estimated(backend) or limit == inf:
            return -1
        return ledger.clock.second_before(limit)

    def _judge(self, backend: BackendId, ledger: Ledger) -> None:
        strengths = ledger.evidence.strengths(self._block_tokens)
        learned, told = ledger.estimate.learned, ledger.told.capacity_tokens
        small = learned < (inf if told is None else SMALL_SHARE * told)
        strengths[Bias.SMALL_CACHE] = float(small and self._estimated(backend))
        for bias, strength in strengths.items():
            before = bias in ledger.biases
            if present(before, strength) is before:
                continue
            if before:
                del ledger.biases[bias]
            else:
                ledger.biases[bias] = None
                self.counts.appeared += 1
            if len(self._changes) >= CHANGES_MAX:
                self._changes.pop(0)
                self.counts.changes_dropped += 1
            self._changes.append(BiasChange(backend, bias, not before, detail_of(bias, ledger)))

    def _view(self, backend: BackendId, ledger: Ledger, now: float) -> CalibrationView:
        learned, hidden = ledger.estimate.learned, self._hidden_to(backend, ledger)
        return CalibrationView(
            backend=backend,
            answers=ledger.answers,
            answers_silent=ledger.silent,
            predicted_tokens=ledger.predicted_tokens,
            cached_tokens=ledger.cached_tokens,
            right_tokens=ledger.right_tokens,
            precision=ledger.right_tokens / ledger.predicted_tokens if ledger.predicted_tokens else None,
            recall=ledger.right_tokens / ledger.cached_tokens if ledger.cached_tokens else None,
            error=ledger.error,
            block_tokens=ledger.block_tokens(self._block_tokens),
            capacity_told_tokens=ledger.told.capacity_tokens,
            capacity_learned_tokens=None if learned == inf else int(learned),
            lifetime_s=None if hidden < 0 else now - hidden,
            refuted=ledger.refuted,
            biases=tuple(ledger.biases),
        )


def is_untold(key: PrefixKey) -> bool:
    """Whether no events could name this prefix: it is known by its text alone, or has media."""
    return not key[1] or is_of_media(key[1])
