"""What calibration knows of one backend.

Bound: one BackendPredictions of fixed size for each backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ranvier_py.core.engine_cache.calibration.biases import Bias, Evidence
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Histogram, counter, histogram
from ranvier_py.core.routing.attempt import UsedPrefix
from ranvier_py.core.routing.capacity import CapacityEstimate, StackClock

ERROR_BUCKETS_TOKENS = (
    *(-65_536, -16_384, -4096, -1024, -256, -64, -1),
    *(0, 64, 256, 1024, 4096, 16_384, 65_536),
)
"""Cached minus predicted tokens. Negative: the prediction was too high; positive: the engine held more than we knew.
The bucket up to 0 holds exact predictions."""


class BiasChange(NamedTuple):
    """A bias that appeared or went, for the log."""

    backend: BackendId
    bias: Bias
    appeared: bool
    detail: str


@dataclass(slots=True)
class CalibrationCounters:
    sampled: int = counter("Attempts whose routes were looked up for the learned capacity.")
    skipped: int = counter("Attempts whose routes were not looked up for the learned capacity, to keep the cost small.")
    withdrawn: int = counter("Routes withdrawn because an answer was cold.")
    appeared: int = counter("Times that predictions for a backend became wrong in one way.")
    changes_dropped: int = counter("Changes of biases dropped because the log did not take them in time.")


@dataclass(slots=True)
class PredictionCounters:
    """What answers have shown since the backend has its URL."""

    answers: int = counter("Answers that said how many prompt tokens were cached.")
    answers_silent: int = counter("Answers that did not say how many prompt tokens were cached.")
    predicted_tokens: int = counter("Prompt tokens predicted as cached and usable, of answers with counts.")
    cached_tokens: int = counter("Prompt tokens that were cached by the engine's own count.")
    right_tokens: int = counter("Prompt tokens that were both predicted as cached and cached.")
    refuted: int = counter("Prefixes withdrawn because an answer was cold.")
    error_tokens: Histogram = histogram("Cached minus predicted tokens of one answer.", ERROR_BUCKETS_TOKENS)


@dataclass(slots=True)
class BackendPredictions:
    """How well one backend is predicted, for as long as it keeps one URL.

    All counts are of usable tokens: whole blocks of the engine, without the block of the last prompt token.
    """

    url: str
    generation: int
    estimate: CapacityEstimate
    our_block_tokens: int
    estimated: bool = True  # our routes of it are guesses: no events are read, as of the last tick
    counters: PredictionCounters = field(default_factory=PredictionCounters)
    biases: dict[Bias, None] = field(default_factory=dict)
    reported: EngineMetrics = field(default_factory=EngineMetrics)
    clock: StackClock = field(default_factory=StackClock)
    evidence: Evidence = field(default_factory=Evidence)

    def begin(self, generation: int) -> None:
        """Forget what the old process held and how it counts; keep the learned capacity."""
        self.generation = generation
        self.clock, self.evidence = StackClock(), Evidence()

    def compare(self, predicted: int, cached: int) -> None:
        """Count one answer: `predicted` tokens were expected, `cached` tokens were reported."""
        counters = self.counters
        counters.answers += 1
        counters.predicted_tokens += predicted
        counters.cached_tokens += cached
        counters.right_tokens += min(predicted, cached)
        counters.error_tokens.observe(cached - predicted)

    @property
    def block_tokens(self) -> int:
        """Tokens of the engine's block, as reported; else our block size or the learned step, the larger."""
        return self.reported.block_tokens or max(self.our_block_tokens, self.evidence.step_tokens)

    @property
    def precision(self) -> float | None:
        """Share of the predicted tokens that was cached; None while nothing was predicted."""
        counters = self.counters
        return counters.right_tokens / counters.predicted_tokens if counters.predicted_tokens else None

    @property
    def recall(self) -> float | None:
        """Share of the cached tokens that was predicted; None while nothing was cached."""
        counters = self.counters
        return counters.right_tokens / counters.cached_tokens if counters.cached_tokens else None

    @property
    def capacity_learned_tokens(self) -> int | None:
        """The learned capacity; None while answers have shown no limit."""
        return None if self.estimate.learned == inf else int(self.estimate.learned)

    def usable(self, tokens: int, prompt_tokens: int) -> int:
        """How many of the first `tokens` of a prompt the engine could take from its cache."""
        block = self.block_tokens
        return min(tokens, max(0, prompt_tokens - 1)) // block * block

    def detail_of(self, bias: Bias) -> str:
        """What the log adds to the name of a bias."""
        if bias in (Bias.HYBRID, Bias.BLOCK_SIZE):
            return f"hits at multiples of {self.evidence.step_tokens} tokens"
        if bias is Bias.SMALL_CACHE:
            reported = self.estimate.reported
            return f"keeps about {self.estimate.learned:.0f} tokens" + (f", reports {reported}" if reported else "")
        if bias is Bias.PROFILE:
            return "it reuses less than half of what its cache profile promises: does kv_profile name another?"
        if bias is Bias.EVENTS:
            return f"{self.evidence.far_share:.0%} of its answers don't fit them: are they another engine's?"
        if bias is Bias.TEMPLATE:
            more = self.evidence.offset_tokens
            words = f"{abs(more)} tokens {'more' if more > 0 else 'fewer'} than ours"
            return f"its prompts have {words}, or another number"
        return ""


def spans(prefixes: Sequence[UsedPrefix]) -> Iterator[tuple[int, int, int, float]]:
    """Yield each prefix with the depth at which the next shorter one ends: (to, from, second, used since)."""
    for place, (tokens, second, since) in enumerate(prefixes):
        above = prefixes[place + 1][0] if place + 1 < len(prefixes) else 0
        if tokens > above:
            yield tokens, above, second, since
