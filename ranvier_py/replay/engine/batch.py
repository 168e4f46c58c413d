"""Continuous batching: which tokens an engine computes in which step, under a token budget, as in vLLM's scheduler.

In a step each decoding request gets one token of the budget; the rest goes to the one prompt that is partly computed,
then to new requests in order of arrival. Consecutive steps between which no request finishes, is cancelled or is
admitted form one *leap*: its end is computed in closed form, and one counter (`steps`) gives every request's progress.

Rules: no request overtakes the head of the queue; a leap never passes an event, nor a change of the cache while a
request waits for blocks. Times equal those of single steps to the last bit: `every_token` changes only the reports.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from ranvier_py.replay.engine.block_cache import Job, Lease
from ranvier_py.replay.engine.engine_values import EngineEvent, EngineEventKind, EngineLimits
from ranvier_py.replay.hybrid.cache_models import PrefixCache

Due = tuple[int, int]
"""The step at which something is due, and the request's number: of equal steps the request admitted first is first."""


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """One admitted request."""

    number: int  # by order of admission
    request_id: str
    job: Job
    lease: Lease
    computed: int  # prompt tokens whose keys and values exist
    joined: int = 0  # the step from which on it decodes

    def copy(self) -> AdmittedRequest:
        return AdmittedRequest(
            number=self.number,
            request_id=self.request_id,
            job=self.job,
            lease=self.lease.copy(),
            computed=self.computed,
            joined=self.joined,
        )

    @property
    def finishes(self) -> int:
        """The step at whose end its last token is out. The first token came at the end of its prefill."""
        return self.joined + self.job.answer_tokens - 1


class EngineBatch:
    """The requests of one engine process, and its cache. `outbox` collects events; the driver empties it.

    Between calls `steps` steps are over. If `busy`, a leap is under way: at `ends_at`, `leap_to` steps will be over.
    """

    def __init__(self, limits: EngineLimits, cache: PrefixCache, *, every_token: bool) -> None:
        self.limits, self.cache, self.every_token = limits, cache, every_token
        self.outbox: list[EngineEvent] = []
        self.running: dict[str, AdmittedRequest] = {}  # by request id, in order of admission
        self.waiting: OrderedDict[str, Job] = OrderedDict()
        self.decoding: dict[int, AdmittedRequest] = {}  # by number: the running ones whose first token is out
        self.partial: AdmittedRequest | None = None  # the request whose prompt is partly computed
        self.prefills: list[tuple[AdmittedRequest, int]] = []  # those of the current step, with their tokens
        self.prefill_tokens = 0  # the sum of these tokens
        self.finishes: list[Due] = []  # heap; may contain cancelled requests, as `growths` may
        self.growths: list[Due] = []  # heap: after so many steps the request takes or fills a block
        self.steps = 0
        self.context_tokens = 0  # tokens that the decoding requests have computed, together
        self.busy = False
        self.began_at = 0.0
        self.ends_at = 0.0
        self.leap_to = 0
        self.phase_open = False  # a phase: consecutive steps in which the same requests decode and none is prefilled
        self.phase_at = 0.0
        self.phase_steps = 0
        self.phase_context = 0
        self.admitted = self.finished = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0

    def fork(self) -> EngineBatch:
        """Return a copy of all work, to play it forward without `every_token`. All totals but `admitted` begin at 0."""
        found = copy(self)
        found.cache, found.every_token, found.outbox = self.cache.copy(), False, []
        found.running = {name: request.copy() for name, request in self.running.items()}
        found.waiting = self.waiting.copy()
        found.decoding = {
            request.number: request for request in found.running.values() if request.number in self.decoding
        }
        found.partial = found.running[self.partial.request_id] if self.partial else None
        found.prefills = [
            (found.running[request.request_id], tokens)
            for request, tokens in self.prefills
            if self.running.get(request.request_id) is request
        ]
        found.finishes, found.growths = self.finishes.copy(), self.growths.copy()
        found.finished = found.prompt_tokens = found.cached_tokens = found.generated_tokens = 0
        return found

    @property
    def has_place(self) -> bool:
        return len(self.running) < self.limits.running_max

    @property
    def tokens_left(self) -> int:
        """Tokens that the current step has left of its budget."""
        return self.limits.step_tokens_max - len(self.decoding) - self.prefill_tokens

    # ---- what the driver does

    def catch_up(self, now: float) -> None:
        """Process all leaps and steps that end up to `now`, and begin the next."""
        while self.busy and self.ends_at <= now:
            self.go_on()
        if self.busy and self.leap_to > self.steps + 1:
            self._walk(self.steps_over(now))

    def go_on(self) -> None:
        """End the current step or leap, at its time, and begin the next."""
        at = self.ends_at
        self._end(at)
        self.begin(at)

    def submit(self, request_id: str, job: Job, now: float) -> None:
        """Queue a request. `catch_up(now)` must have been called."""
        first = not self.waiting
        self.waiting[request_id] = job
        if not self.busy:
            self.begin(now)
        elif first and self.has_place:
            self._cut()

    def cancel(self, request_id: str) -> bool:
        """Remove a request: its blocks are free at once. The current step ends as planned. Call `catch_up` before."""
        if self.waiting.pop(request_id, None) is not None:
            if self.waiting and self.has_place:
                self._cut()  # the next in the queue may need fewer blocks
            return True
        request = self.running.pop(request_id, None)
        if request is None:
            return False
        if self.partial is request:
            self.partial = None
        self._cut()
        if self.decoding.pop(request.number, None) is not None:
            self.context_tokens -= request.job.prompt_tokens + self.steps - request.joined
            self.phase_open = False
        self.cache.release(request.lease)
        return True

    # ---- steps

    def begin(self, now: float) -> None:
        """Begin the next step, or the next leap."""
        self._grow(self.steps)
        self.began_at = now
        self.prefills = []
        self.prefill_tokens = 0
        if self.partial is not None:
            self._prefill(self.partial)
        self.admit()

    def admit(self) -> None:
        """Admit waiting requests while the step has tokens, places and blocks for them; compute when the step ends. May
        be called again for the same step."""
        while self.waiting and self.has_place and self.tokens_left:
            request_id = next(iter(self.waiting))
            lease = self.cache.lease(self.waiting[request_id])
            if lease is None:
                break
            self._prefill(self._start(request_id, self.waiting.pop(request_id), lease))
        self.busy = bool(self.prefills or self.decoding)
        if self.prefills:
            self.phase_open = False
            self.leap_to = self.steps + 1
            depths = sum([depths_of(request.computed, tokens) for request, tokens in self.prefills])
            self.ends_at = self.began_at + prefill_s(self.limits, self.prefill_tokens, depths)
            if self.decoding:
                self.ends_at += decode_s(self.limits, len(self.decoding), self.context_tokens)
        elif self.decoding:
            self._leap()

    def time_at(self, steps: int) -> float:
        """Return when so many steps are over, within the current phase. Exact: the sums are of whole numbers."""
        limits, over, decoding = self.limits, steps - self.phase_steps, len(self.decoding)
        read = over * self.phase_context + decoding * (over * (over - 1) // 2)
        return self.phase_at + (
            over * (limits.decode_s + limits.decode_s_per_running * decoding) + limits.decode_s_per_context_token * read
        )

    def steps_over(self, now: float) -> int:
        """Return how many steps are over at `now`, which is within the current leap."""
        return self.steps + bisect_right(range(self.steps + 1, self.leap_to), now, key=self.time_at)

    def _start(self, request_id: str, job: Job, lease: Lease) -> AdmittedRequest:
        self.admitted += 1
        request = AdmittedRequest(self.admitted, request_id, job, lease, lease.hits * self.cache.block_size)
        self.running[request_id] = request
        self.prompt_tokens += job.prompt_tokens
        self.cached_tokens += request.computed
        self.outbox.append(EngineEvent(EngineEventKind.STARTED, request_id, self.began_at, 0, request.computed))
        return request

    def _prefill(self, request: AdmittedRequest) -> None:
        tokens = min(request.job.prompt_tokens - request.computed, self.tokens_left)
        self.cache.grow(request.lease, request.computed + tokens)
        self.prefills.append((request, tokens))
        self.prefill_tokens += tokens

    def _leap(self) -> None:
        """Begin a leap that ends at the next change: decode only."""
        if not self.phase_open:
            self.phase_open, self.phase_at = True, self.began_at
            self.phase_steps, self.phase_context = self.steps, self.context_tokens
        self.leap_to = self.finishes[0][0]
        if self.every_token:
            self.leap_to = self.steps + 1
        elif self.waiting and self.has_place and self.growths:
            self.leap_to = min(self.leap_to, self.growths[0][0])
        self.ends_at = self.time_at(self.leap_to)

    def _cut(self) -> None:
        """Shorten the leap: it ends with the current step."""
        if self.leap_to > self.steps + 1:
            self.leap_to = self.steps + 1
            self.ends_at = self.time_at(self.leap_to)

    def _walk(self, steps: int) -> None:
        """Advance to so many steps within a leap. None of them was the last of a request."""
        if steps > self.steps:
            tokens = (steps - self.steps) * len(self.decoding)
            self.generated_tokens += tokens
            self.context_tokens += tokens
            self.steps = steps
            self._grow(steps)

    def _grow(self, steps: int) -> None:
        """Take and name the blocks that decoding needs up to and including the step after the first `steps`."""
        growths = self.growths
        while growths and growths[0][0] <= steps:
            at, number = growths[0]
            request = self.decoding.get(number)
            if request is None:
                heappop(growths)
                continue
            self.cache.grow(request.lease, request.job.prompt_tokens + at - request.joined + 1)
            following = self._growth(request)
            if following < request.finishes:
                heapreplace(growths, (following, number))
            else:
                heappop(growths)

    def _growth(self, request: AdmittedRequest) -> int:
        """Return after how many steps the request needs another block, or fills one that has a name."""
        size, lease, job = self.cache.block_size, request.lease, request.job
        tokens = len(lease.blocks) * size
        if lease.stored < len(job.keys):
            tokens = min(tokens, (lease.stored + 1) * size - 1)
        return request.joined + tokens - job.prompt_tokens

    def _end(self, at: float) -> None:
        """End the leap: report tokens, in order of admission, and release the requests that are finished."""
        if self.leap_to > self.steps + 1:
            self._walk(self.leap_to - 1)
        self.steps = self.leap_to
        self.generated_tokens += len(self.decoding)
        self.context_tokens += len(self.decoding)
        if self.every_token:
            for request in self.decoding.values():
                self._report(EngineEventKind.TOKEN, request, at, self.steps - request.joined + 1)
        while self.finishes and self.finishes[0][0] <= self.steps:
            done = self.decoding.pop(heappop(self.finishes)[1], None)
            if done is not None:
                self.context_tokens -= done.job.tokens_computed
                self.phase_open = False
                self._finish(done, at)
        for request, tokens in self.prefills:
            if self.running.get(request.request_id) is request:  # or it was cancelled meanwhile
                self._computed(request, tokens, at)

    def _computed(self, request: AdmittedRequest, tokens: int, at: float) -> None:
        request.computed += tokens
        if request.computed < request.job.prompt_tokens:
            self.partial = request
            return
        if self.partial is request:
            self.partial = None
        self.generated_tokens += 1
        self._report(EngineEventKind.TOKEN, request, at, 1)
        if request.job.answer_tokens == 1:
            self._finish(request, at)
            return
        request.joined = self.steps
        self.decoding[request.number] = request
        self.context_tokens += request.computed
        heappush(self.finishes, (request.finishes, request.number))
        growth = self._growth(request)
        if growth < request.finishes:
            heappush(self.growths, (growth, request.number))

    def _finish(self, request: AdmittedRequest, at: float) -> None:
        del self.running[request.request_id]
        self.cache.release(request.lease)
        self.finished += 1
        self._report(EngineEventKind.FINISHED, request, at, request.job.answer_tokens)

    def _report(self, kind: EngineEventKind, request: AdmittedRequest, at: float, tokens: int) -> None:
        cached_tokens = request.lease.hits * self.cache.block_size
        self.outbox.append(EngineEvent(kind, request.request_id, at, tokens, cached_tokens))


def depths_of(before: int, tokens: int) -> float:
    """Return, summed over `tokens` tokens that follow `before` others, how many are before each. A multiple of 1/2."""
    return tokens * (before + tokens / 2)


def prefill_s(limits: EngineLimits, tokens: int, depths: float) -> float:
    """Return the seconds that a step takes for its prompt tokens; `depths` as from `depths_of`."""
    return tokens / limits.prefill_tokens_per_s + limits.prefill_s_per_depth * depths


def decode_s(limits: EngineLimits, decoding: int, context_tokens: int) -> float:
    """Return the seconds that a step takes for its decoding requests, of which there is at least one."""
    each = limits.decode_s_per_running * decoding
    return limits.decode_s + each + limits.decode_s_per_context_token * context_tokens
