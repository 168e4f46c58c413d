"""What calibration knows of one engine, and of one attempt there: its books.

Bound: one ledger for each backend, of fixed size; a sample has one part for each age of a prompt's claims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ranvier_py.core.engine_cache.calibration.biases import Bias, Evidence
from ranvier_py.core.engine_cache.calibration.calibration_values import ERROR_BUCKETS_TOKENS, Told
from ranvier_py.core.engine_cache.calibration.capacity import CapacityEstimate, StackClock
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.routing.attempt import Attempt

Part = tuple[int, int, float]
"""A depth of a prompt, the second of its claim's evidence, and how many tokens its engine had used since then."""


class Sample:
    """What was looked up of one attempt."""

    __slots__ = ("parts", "running", "sent_at", "used_at")

    def __init__(self, sent_at: float, parts: Sequence[Part]) -> None:
        self.sent_at = sent_at
        self.parts = parts  # deepest first
        self.used_at = -1  # second in which its prompt counts as used; -1 before its first token
        self.running: Attempt | None = None  # between first token and landing


class Ledger:
    """One backend, for as long as it is at one URL."""

    __slots__ = (
        "answers",
        "biases",
        "cached_tokens",
        "clock",
        "error",
        "estimate",
        "evidence",
        "generation",
        "predicted_tokens",
        "refuted",
        "right_tokens",
        "silent",
        "tells_cached",
        "told",
        "url",
    )

    def __init__(self, url: str, generation: int, fleet: CapacityEstimate) -> None:
        self.url = url
        self.generation = generation
        self.estimate = CapacityEstimate(fleet)
        self.error = Histogram(ERROR_BUCKETS_TOKENS, "tokens")
        self.answers = self.silent = self.refuted = 0
        self.predicted_tokens = self.cached_tokens = self.right_tokens = 0
        self.biases: dict[Bias, None] = {}
        self.told = Told(None, None)
        self.begin(generation)

    def begin(self, generation: int) -> None:
        """It is another process: what it held and how it counts is to be seen anew. How large it is stays learned."""
        self.generation = generation
        self.clock = StackClock()
        self.evidence = Evidence()
        self.tells_cached = False

    def block_tokens(self, ours: int) -> int:
        return self.told.block_tokens or max(ours, self.evidence.step_tokens)


def spans(parts: Sequence[Part]) -> Iterator[tuple[int, int, int, float]]:
    """Each part with the depth above it: (down to, from, second, used since)."""
    for place, (tokens, second, since) in enumerate(parts):
        above = parts[place + 1][0] if place + 1 < len(parts) else 0
        if tokens > above:
            yield tokens, above, second, since


def detail_of(bias: Bias, ledger: Ledger) -> str:
    """What a reader of the log needs beside the name."""
    if bias in (Bias.HYBRID, Bias.BLOCK_SIZE):
        return f"hits at multiples of {ledger.evidence.step_tokens} tokens"
    if bias is Bias.SMALL_CACHE:
        told = ledger.told.capacity_tokens
        return f"keeps about {ledger.estimate.learned:.0f} tokens" + (f", tells {told}" if told else "")
    if bias is Bias.EVENTS:
        return f"{ledger.evidence.far_share:.0%} of its answers don't fit them: are they another engine's?"
    if bias is Bias.TEMPLATE:
        return f"its prompts have {ledger.evidence.offset_tokens} tokens more than ours, or another number"
    return ""
