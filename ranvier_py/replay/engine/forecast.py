"""Forecasts when a request would get its first token if it came now and none after it. The engine is not changed.

If no request waits and no other can change which blocks it would reuse, the answer is the sum of a few steps. Otherwise
a copy of the batch is played forward to the first step with an empty queue, a free place and tokens left. The copy is
kept: it is valid until a request is cancelled, the cache is cleared or its time has come. Submitted requests join it.

Invariant: the forecast equals what `EngineBatch` does, to the last bit (test_batch.py).
"""

from __future__ import annotations

from heapq import heappop, heappush

from ranvier_py.replay.engine.batch import AdmittedRequest, Due, EngineBatch, decode_s, depths_of, prefill_s
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.engine_values import EngineEventKind, EngineLimits

STEPS_MAX = 20_000
"""Leaps and steps that a copy is played for one answer: enough for some thousand waiting requests."""

PEERS_MAX = 64
"""A lower bound compares the prompt with at most so many requests in flight; with more it assumes a cached prompt."""

ROUNDING_S = 1e-6  # far more than the rounding errors of summed step times

PROBE = "\0probe"  # no client's request id

Prefill = tuple[int, AdmittedRequest]
"""Prompt tokens yet to be computed, and the request to which they belong."""


class Forecast:
    """Forecasts for one batch. `cut` counts the answers that were given up at `STEPS_MAX`."""

    def __init__(self, batch: EngineBatch) -> None:
        self.cut = 0
        self._batch = batch
        self._ahead: EngineBatch | None = None  # a copy, at the beginning of a future step
        self._joined = False  # a request was submitted to the copy since it was played forward

    def forget(self) -> None:
        """Drop the copy, after a change that it does not know."""
        self._ahead = None

    def submitted(self, request_id: str, job: Job, now: float) -> None:
        """Add a request that was submitted to the batch to the copy, too."""
        ahead = self._ahead_of(now)
        if ahead is not None:
            ahead.waiting[request_id] = job
            self._joined = True

    def first_token_at(self, job: Job, now: float) -> float:
        """As `EngineModel.first_token_at`. The batch has caught up with `now`, and would accept the job."""
        batch = self._batch
        if self._ahead_of(now) is None and not batch.waiting and batch.has_place:
            found = self._undisturbed(job, now)
            if found is None:
                copy = batch.fork()
                copy.submit(PROBE, job, now)
                return self._played(copy)
            return found
        ahead = self._play_ahead()
        if not is_open(ahead):
            return ahead.ends_at
        if ahead.cache.has_room(job):
            uncached = job.prompt_tokens - ahead.cache.hit_blocks(job) * ahead.cache.block_size
            pending = [(tokens, request) for request, tokens in ahead.prefills]
            return summed(ahead, ahead.began_at, ahead.steps, pending, job, uncached)
        copy = ahead.fork()
        copy.waiting[PROBE] = job
        copy.admit()
        return self._played(copy)

    def first_token_not_before(self, job: Job, now: float) -> float:
        """As `EngineModel.first_token_not_before`."""
        batch, ahead = self._batch, self._ahead_of(now)
        if ahead is not None and not self._joined:
            return ahead.began_at
        rest = sum(tokens for tokens, _ in self._pending())
        uncached = 1
        if len(batch.running) + len(batch.waiting) <= PEERS_MAX and not self._others_name(job):
            uncached = job.prompt_tokens - batch.cache.hit_blocks(job) * batch.cache.block_size
        at = step_ends_at(batch) if batch.busy else now
        return max(now, at + (rest + uncached) / batch.limits.prefill_tokens_per_s - ROUNDING_S)

    def _ahead_of(self, now: float) -> EngineBatch | None:
        """Return the copy, or None if its time has come."""
        if self._ahead is not None and now >= self._ahead.began_at:
            self._ahead = None
        return self._ahead

    def _play_ahead(self) -> EngineBatch:
        """Return the copy, played to the step that the next request could join, or to STEPS_MAX."""
        ahead = self._ahead
        if ahead is None:
            ahead = self._ahead = self._batch.fork()
            ahead.go_on()
        elif self._joined:
            ahead.admit()
        self._joined = False
        steps = 0
        while not is_open(ahead):
            ahead.outbox.clear()
            if steps == STEPS_MAX:
                self.cut += 1
                break
            ahead.go_on()
            steps += 1
        return ahead

    def _played(self, copy: EngineBatch) -> float:
        """Play until the probe's first token, and return when it comes; at STEPS_MAX, a lower bound."""
        for _ in range(STEPS_MAX):
            copy.outbox.clear()
            copy.go_on()
            for event in copy.outbox:
                if event.request_id == PROBE and event.kind is EngineEventKind.TOKEN:
                    return event.at
        self.cut += 1
        return copy.ends_at

    def _undisturbed(self, job: Job, now: float) -> float | None:
        """For an empty queue and a free place, return the answer; None without room, or if hits could still change."""
        batch, cache = self._batch, self._batch.cache
        if not cache.has_room(job):
            return None
        blocks = cache.hit_blocks(job)
        uncached = job.prompt_tokens - blocks * cache.block_size
        if not batch.busy:
            return summed(batch, now, batch.steps, [], job, uncached)
        pending = self._pending()
        if self._others_name(job) or not cache.outlives(job, blocks, self._taken_before(pending)):
            return None
        return summed(batch, step_ends_at(batch), batch.steps + 1, pending, job, uncached)

    def _pending(self) -> list[Prefill]:
        """Return, in order, what is left of running prompts when the current step ends; 0 if nothing is."""
        running = self._batch.running
        return [
            (request.job.prompt_tokens - request.computed - tokens, request)
            for request, tokens in self._batch.prefills
            if running.get(request.request_id) is request  # or it was cancelled
        ]

    def _others_name(self, job: Job) -> bool:
        """Whether a request in flight may store the first block of this prompt that the cache lacks."""
        batch = self._batch
        depth, keys = batch.cache.hit_blocks(job), job.keys
        if depth >= (job.prompt_tokens - 1) // batch.cache.block_size or depth >= len(keys):
            return False
        key = keys[depth]
        running = [request.job.keys for request in batch.running.values()]
        return any(
            len(others) > depth and others[depth] == key
            for others in [*running, *(waiting.keys for waiting in batch.waiting.values())]
        )

    def _taken_before(self, pending: list[Prefill]) -> int:
        """Return an upper bound of the blocks that are taken before a request that came now would be admitted."""
        batch, size = self._batch, self._batch.cache.block_size
        tokens = sum(rest for rest, _ in pending)
        steps = 2 + tokens // (batch.limits.step_tokens_max - len(batch.running))
        return -(-tokens // size) + len(pending) + len(batch.running) * (1 + steps // size)


def is_open(batch: EngineBatch) -> bool:
    """Whether a request could be admitted to the step that has just begun, if it had blocks."""
    return not batch.waiting and batch.has_place and batch.tokens_left > 0


def step_ends_at(batch: EngineBatch) -> float:
    """Return when the current step ends, even if it is part of a leap."""
    return batch.ends_at if batch.leap_to == batch.steps + 1 else batch.time_at(batch.steps + 1)


def summed(batch: EngineBatch, at: float, steps: int, pending: list[Prefill], job: Job, uncached: int) -> float:
    """Return when the last `uncached` tokens of a prompt are computed, after those of `pending`, in steps from `at` on.

    `steps` is `batch.steps`, or one more: then `at` is the end of the current step. No other request is admitted.
    """
    limits: EngineLimits = batch.limits
    decoding = DecodeForecast(batch)
    if steps > batch.steps:
        decoding.step([request for rest, request in pending if not rest])
        pending = [(rest, request) for rest, request in pending if rest]
    while True:
        left, prefill, depths = limits.step_tokens_max - decoding.count, 0, 0.0
        ready: list[AdmittedRequest] = []
        while pending and left:
            rest, request = pending.pop(0)
            tokens = min(rest, left)
            left -= tokens
            prefill += tokens
            depths += depths_of(request.job.prompt_tokens - rest, tokens)
            if tokens < rest:
                pending.insert(0, (rest - tokens, request))
            else:
                ready.append(request)
        tokens = min(uncached, left)
        depths += depths_of(job.prompt_tokens - uncached, tokens)
        uncached -= tokens
        at += prefill_s(limits, prefill + tokens, depths)
        if decoding.count:
            at += decode_s(limits, decoding.count, decoding.context)
        if not uncached:
            return at
        decoding.step(ready)


class DecodeForecast:
    """Follows the number of decoding requests and their context step by step, without changing the batch."""

    def __init__(self, batch: EngineBatch) -> None:
        self.count = len(batch.decoding)
        self.context = batch.context_tokens
        self._steps = batch.steps
        self._requests = batch.decoding
        self._joined: dict[int, AdmittedRequest] = {}
        self._finishes: list[Due] = batch.finishes.copy()

    def step(self, ready: list[AdmittedRequest]) -> None:
        """End a step: requests that got their last token leave, those in `ready`, which got their first one, join."""
        self._steps += 1
        self.context += self.count
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._steps:
            number = heappop(finishes)[1]
            request = self._requests.get(number) or self._joined.get(number)
            if request is not None:
                self.count -= 1
                self.context -= request.job.tokens_computed
        for request in ready:
            if request.job.answer_tokens > 1:
                self.count += 1
                self.context += request.job.prompt_tokens
                self._joined[request.number] = request
                heappush(finishes, (self._steps + request.job.answer_tokens - 1, request.number))
