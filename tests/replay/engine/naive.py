"""The engine once more, without any cleverness: one step after the other, every request looked at in each. And what a
model or a cache does when nothing comes beside."""

from __future__ import annotations

from copy import deepcopy

from ranvier_py.replay.engine.block_cache import BlockCache, Job, Lease
from ranvier_py.replay.engine.engine_values import EngineEvent, EngineEventKind, EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.hybrid.cache_models import PrefixCache


def served(cache: PrefixCache, job: Job) -> int:
    """One request from begin to end with nothing beside it. Returns its hit in blocks."""
    lease = cache.lease(job)
    assert lease is not None
    cache.grow(lease, job.prompt_tokens)
    cache.grow(lease, job.tokens_computed)
    cache.release(lease)
    cache.check()
    return lease.hits


def to_the_end(model: EngineModel) -> list[EngineEvent]:
    """What the model does until it has nothing to do."""
    events: list[EngineEvent] = []
    while (at := model.next_event_at()) is not None:
        events += model.advance(at)
    return events


def happens_at(model: EngineModel, work: Job, now: float) -> float:
    """When its first token comes if it is submitted now and nothing else comes."""
    other = deepcopy(model)
    other.advance(now)
    other.submit("probe", work, now)
    return next(event.at for event in to_the_end(other) if event.request_id == "probe" and event.tokens == 1)


class Serving:
    def __init__(self, request_id: str, job: Job, lease: Lease, computed: int) -> None:
        self.request_id, self.job, self.lease, self.computed = request_id, job, lease, computed
        self.cached, self.out = computed, 0


class NaiveEngine:
    """submit, cancel, clear and run_to; `events` grows. Times are exact where all speeds are powers of two."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.cache = BlockCache(limits.cache_tokens // limits.block_size, limits.block_size)
        self.running: dict[str, Serving] = {}
        self.waiting: dict[str, Job] = {}
        self.step: list[tuple[Serving, int]] = []
        self.ends_at = 0.0
        self.events: list[EngineEvent] = []

    def submit(self, request_id: str, job: Job, now: float) -> None:
        self.run_to(now)
        self.waiting[request_id] = job
        if not self.step:
            self.begin(now)

    def cancel(self, request_id: str, now: float) -> None:
        self.run_to(now)
        request = self.running.pop(request_id, None)
        if request:
            self.cache.release(request.lease)
        self.waiting.pop(request_id, None)

    def run_to(self, now: float) -> None:
        while self.step and self.ends_at <= now:
            self.end()
            self.begin(self.ends_at)

    def begin(self, now: float) -> None:
        limits, budget, prefill, decoding, context = self.limits, self.limits.step_tokens_max, 0, 0, 0
        self.step = []
        depths: list[float] = []  # of each token that is computed of a prompt
        for request in self.running.values():
            tokens = min(budget, max(1, request.job.prompt_tokens - request.computed))
            if request.out:
                decoding += 1
                context += request.computed
            else:
                prefill += tokens
                depths += [request.computed + at + 0.5 for at in range(tokens)]
            budget -= self.compute(request, tokens)
        while budget and self.waiting and len(self.running) < limits.running_max:
            request_id, job = next(iter(self.waiting.items()))
            lease = self.cache.lease(job)
            if lease is None:
                break
            del self.waiting[request_id]
            request = self.running[request_id] = Serving(request_id, job, lease, lease.hits * limits.block_size)
            self.send(EngineEventKind.STARTED, request, now)
            tokens = min(budget, job.prompt_tokens - request.computed)
            prefill += tokens
            depths += [request.computed + at + 0.5 for at in range(tokens)]
            budget -= self.compute(request, tokens)
        self.ends_at = now + (prefill / limits.prefill_tokens_per_s + limits.prefill_s_per_depth * sum(depths))
        if decoding:
            self.ends_at += limits.decode_s + limits.decode_s_per_running * decoding
            self.ends_at += limits.decode_s_per_context_token * context

    def compute(self, request: Serving, tokens: int) -> int:
        if tokens:
            self.cache.grow(request.lease, request.computed + tokens)
            self.step.append((request, tokens))
        return tokens

    def end(self) -> None:
        for request, tokens in self.step:
            if self.running.get(request.request_id) is not request:
                continue
            request.computed += tokens
            if request.computed >= request.job.prompt_tokens:
                request.out += 1
                self.send(EngineEventKind.TOKEN, request, self.ends_at)
            if request.out == request.job.answer_tokens:
                del self.running[request.request_id]
                self.cache.release(request.lease)
                self.send(EngineEventKind.FINISHED, request, self.ends_at)

    def send(self, kind: EngineEventKind, request: Serving, at: float) -> None:
        self.events.append(EngineEvent(kind, request.request_id, at, request.out, request.cached))
