"""The router's own error, engine by engine: what was predicted to be cached against what the answer says was.

An Observer of flights. Each answer with counts is compared with its prediction, in tokens that the engine could have
used: whole blocks of its own, and never the block with the last prompt token, which is always computed again. From
these come precision (of the predicted tokens, how many were cached), recall (of the cached, how many were predicted),
a histogram of the error, and the evidence of `biases`.

It corrects what it can, for engines whose caches nobody tells us (level ESTIMATED). A prefix that answered cold is
withdrawn with what hangs below it (`core/routes/outcomes`), and no other. And claims that are older than the cache is
large are *faded*: `capacity` learns beyond how many tokens computed since their last use prefixes answer cold; each
tick turns that distance into one second per engine, up to which the route table takes evidence for too old. So a match
pays one test of an empty dict, or one look into it, and nothing is searched or swept; when the limit moves, faded
claims come back by themselves.

Rules: faded claims are looked up too when their engine was chosen anyway, so what they would have been is still
learned. Distances are those at departure, where claims are believed or not: what a queue pushes out before a request's
turn comes counts against them. At most SAMPLES_PER_S_MAX flights a second are looked up. An engine that told cached
tokens once means 0 where it leaves them out (vLLM does).
Bound: one ledger for each backend id, FLIGHTS_MAX samples. Cost: 5 us for an answer, 15 us more for a sampled flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier_py.core.backends import Outcome
from ranvier_py.core.flight import Flight
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.ids import BackendId
from ranvier_py.core.kv.biases import Bias, Evidence, present
from ranvier_py.core.kv.calibration_values import (
    ERROR_BUCKETS_TOKENS,
    BiasChange,
    CalibrationCounts,
    CalibrationView,
    Told,
)
from ranvier_py.core.kv.capacity import CapacityEstimate, StackClock
from ranvier_py.core.prompt import Boundary
from ranvier_py.core.routes import RouteTable
from ranvier_py.core.routes.outcomes import evidence_of, refute
from ranvier_py.core.stream import Answer

Part = tuple[int, float]
"""A depth of a prompt, and how many tokens its engine had computed since its claim down to there had evidence."""

SAMPLES_PER_S_MAX = 32
"""Look-ups of claims, 20 us each: below a thousandth of a core."""

FLIGHTS_MAX = 4096
"""Samples kept until their answer comes; beyond, the oldest is forgotten: its answer was lost."""

FRESH_SHARE = 0.1
"""A prompt was there «moments ago» if no more than this share of the capacity was computed since."""

FRESH_TOKENS = 20_000
"""... or so many tokens, while no capacity is known: a tenth of the cache of a small engine."""

CHANGES_MAX = 256

SMALL_SHARE = 0.7
"""A learned capacity below this share of what the engine tells is smaller than thought: our model is no more exact."""


class Ledger:
    """One backend, for as long as it is at one URL."""

    __slots__ = (
        "answers",
        "biases",
        "cached_tokens",
        "clock",
        "epoch",
        "error",
        "estimate",
        "evidence",
        "predicted_tokens",
        "refuted",
        "right_tokens",
        "silent",
        "tells_cached",
        "told",
        "url",
    )

    def __init__(self, url: str, epoch: int) -> None:
        self.url = url
        self.epoch = epoch
        self.estimate = CapacityEstimate()
        self.error = Histogram(ERROR_BUCKETS_TOKENS, "tokens")
        self.answers = self.silent = self.refuted = 0
        self.predicted_tokens = self.cached_tokens = self.right_tokens = 0
        self.biases: dict[Bias, None] = {}
        self.told = Told(None, None)
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """It is another process: what it held and how it counts is to be seen anew. How large it is stays learned."""
        self.epoch = epoch
        self.clock = StackClock()
        self.evidence = Evidence()
        self.tells_cached = False

    def block_tokens(self, ours: int) -> int:
        return self.told.block_tokens or max(ours, self.evidence.step_tokens)


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
        self._samples: dict[int, tuple[float, Sequence[Part]]] = {}  # by identity, which may come twice
        self._second = -1
        self._sampled = 0  # in this second
        self._changes: list[BiasChange] = []

    # --- flights ----------------------------------------------------------------------------------------------------

    def departed(self, flight: Flight, now: float) -> None:
        if flight.prompt.kind == "opaque" or not flight.prompt.end.messages:
            return
        if int(now) != self._second:
            self._second, self._sampled = int(now), 0
        if self._sampled >= SAMPLES_PER_S_MAX:
            self.counts.skipped += 1
            return
        self._sampled += 1
        if not self._estimated(flight.backend):
            return
        self.counts.sampled += 1
        found = evidence_of(self._routes, flight.prompt.end.stops(), flight.backend, flight.epoch)
        clock = self._ledger(flight).clock
        self._samples[id(flight)] = (flight.departed_at, [(tokens, clock.distance(second)) for tokens, second in found])
        if len(self._samples) > FLIGHTS_MAX:
            del self._samples[next(iter(self._samples))]

    def started(self, flight: Flight, now: float) -> None:
        if flight.prompt.kind != "opaque":
            self._ledger(flight).clock.add(flight.computed_tokens, now)

    def landed(self, flight: Flight, outcome: Outcome, now: float) -> None:  # noqa: ARG002  # an Observer is told
        if outcome is not Outcome.SUCCESS:
            self._samples.pop(id(flight), None)  # its answer will not be read

    def answered(self, flight: Flight, end: Boundary, answer: Answer, now: float) -> None:
        departed_at, sample = self._samples.pop(id(flight), (0.0, ()))
        if departed_at != flight.departed_at:
            sample = ()
        if answer.prompt_tokens is None or flight.prompt.kind == "opaque":
            return
        ledger = self._ledger(flight)
        cached = answer.cached_tokens
        ledger.tells_cached |= cached is not None
        if cached is None and ledger.tells_cached:
            cached = 0
        ledger.evidence.counted(cached)
        own = flight.prompt.end
        if own.state is not None and flight.prompt.kind == "chat":
            ledger.evidence.measured(answer.prompt_tokens - own.length)
        computed = answer.prompt_tokens - (cached or 0)
        ledger.clock.add(max(0, computed - flight.computed_tokens) + (answer.completion_tokens or 0), now)
        if cached is None:
            ledger.silent += 1
            return
        self._compare(ledger, flight, answer.prompt_tokens, cached)
        if self._estimated(flight.backend):
            self._learn(ledger, sample, answer.prompt_tokens, cached)
            self._refute(ledger, flight, end, answer.prompt_tokens, cached)
        elif not cached and self._usable(ledger, flight.decision.matched_tokens, answer.prompt_tokens):
            self._contradicted(flight.backend)

    # --- beside them ------------------------------------------------------------------------------------------------

    def told(self, backend: BackendId, url: str, epoch: int, told: Told) -> None:
        """What an engine says of its own cache."""
        ledger = self._ledgers.get(backend)
        if ledger is None or ledger.url != url:
            ledger = self._ledgers[backend] = Ledger(url, epoch)
        ledger.told = told
        ledger.estimate.told = told.capacity_tokens

    def tick(self) -> list[BiasChange]:
        """Let too old claims fade, and name biases. Once a second. Returns what appeared or went since the last one."""
        for backend, ledger in self._ledgers.items():
            self._routes.fade(backend, self._faded_to(backend, ledger))
            self._judge(backend, ledger)
        changes, self._changes = self._changes, []
        return changes

    def forget(self, backend: BackendId) -> None:
        """The backend was removed."""
        self._ledgers.pop(backend, None)
        self._routes.fade(backend, -1)

    def views(self, now: float) -> list[CalibrationView]:
        return [self._view(backend, ledger, now) for backend, ledger in sorted(self._ledgers.items())]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _ledger(self, flight: Flight) -> Ledger:
        ledger = self._ledgers.get(flight.backend)
        if ledger is None or ledger.url != flight.url:
            ledger = self._ledgers[flight.backend] = Ledger(flight.url, flight.epoch)
        elif ledger.epoch < flight.epoch:
            ledger.begin(flight.epoch)
        return ledger

    def _usable(self, ledger: Ledger, tokens: int, prompt_tokens: int) -> int:
        """Of that many tokens of a prompt, how many its engine could take from a cache."""
        block = ledger.block_tokens(self._block_tokens)
        return min(tokens, max(0, prompt_tokens - 1)) // block * block

    def _compare(self, ledger: Ledger, flight: Flight, prompt_tokens: int, cached: int) -> None:
        predicted = self._usable(ledger, flight.decision.matched_tokens, prompt_tokens)
        if cached:
            ours = min(flight.decision.matched_tokens, prompt_tokens - 1) // self._block_tokens * self._block_tokens
            ledger.evidence.found(cached, ours)
        ledger.answers += 1
        ledger.predicted_tokens += predicted
        ledger.cached_tokens += cached
        ledger.right_tokens += min(predicted, cached)
        ledger.error.observe(cached - predicted)

    def _learn(self, ledger: Ledger, sample: Sequence[Part], prompt_tokens: int, cached: int) -> None:
        """Which parts of the prompt were there, by how much had been computed since each was last used."""
        parts = [(self._usable(ledger, tokens, prompt_tokens), distance) for tokens, distance in sample]
        parts = [(tokens, distance) for tokens, distance in parts if tokens]
        if not parts:
            return
        deepest, oldest = parts[0]
        estimate = ledger.estimate
        for place, (tokens, distance) in enumerate(parts):
            above = parts[place + 1][0] if place + 1 < len(parts) else 0
            if tokens > above:
                warm = min(max(cached - above, 0), tokens - above)
                estimate.observe(distance, warm / deepest, (tokens - above - warm) / deepest)
        estimate.counted()
        if oldest < FRESH_SHARE * min(estimate.limit, FRESH_TOKENS / FRESH_SHARE):
            ledger.evidence.used_again(cached, deepest)

    def _refute(self, ledger: Ledger, flight: Flight, end: Boundary, prompt_tokens: int, cached: int) -> None:
        """The shortest prefix that was believed to be there and was not: forget what hangs below it."""
        if self._usable(ledger, flight.decision.matched_tokens, prompt_tokens) <= cached:
            return
        refuted = None
        for stop in end.stops():
            if stop[0] > flight.decision.matched_tokens:
                continue
            if self._usable(ledger, stop[0], prompt_tokens) <= cached:
                break
            refuted = stop
        if refuted is not None:
            withdrawn = refute(self._routes, refuted, flight.backend, int(flight.departed_at))
            ledger.refuted += 1
            self.counts.refuted += withdrawn

    def _faded_to(self, backend: BackendId, ledger: Ledger) -> int:
        limit = ledger.estimate.limit
        if not self._estimated(backend) or limit == float("inf"):
            return -1
        return ledger.clock.second_before(limit)

    def _judge(self, backend: BackendId, ledger: Ledger) -> None:
        strengths = ledger.evidence.strengths(self._block_tokens)
        learned, told = ledger.estimate.learned, ledger.told.capacity_tokens
        small = learned < (float("inf") if told is None else SMALL_SHARE * told)
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
        learned, faded = ledger.estimate.learned, self._faded_to(backend, ledger)
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
            capacity_learned_tokens=None if learned == float("inf") else int(learned),
            lifetime_s=None if faded < 0 else now - faded,
            refuted=ledger.refuted,
            biases=tuple(ledger.biases),
        )


def detail_of(bias: Bias, ledger: Ledger) -> str:
    """What a reader of the log needs beside the name."""
    if bias in (Bias.HYBRID, Bias.BLOCK_SIZE):
        return f"hits at multiples of {ledger.evidence.step_tokens} tokens"
    if bias is Bias.SMALL_CACHE:
        told = ledger.told.capacity_tokens
        return f"keeps about {ledger.estimate.learned:.0f} tokens" + (f", tells {told}" if told else "")
    if bias is Bias.TEMPLATE:
        return f"its prompts have {ledger.evidence.offset_tokens} tokens more than ours, or another number"
    return ""
