"""What an engine is to a router: a block cache with a clock. Pure: `now` comes in, events go out.

`EngineModel` follows vLLM's scheduler: continuous batching in steps under a token budget, chunked prefill that running
requests share, FIFO admission, a limit on running requests. It answers when the first token of a request is out, when
it is finished, and how many of its prompt tokens were cached. The cache itself is `block_cache`.

Rules: deterministic, no chance anywhere; time never goes back; nobody overtakes the head of the queue; a cancelled
request holds nothing from that moment on.
It differs from vLLM in one thing: blocks for the whole answer are promised at admission, so nothing is ever preempted.
Cost: about 1 us per generated token. Knows nothing of HTTP, text, or the router; the simulator drives it as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ranvier_py.replay.engine.block_cache import BlockCache, Job, Lease


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can do. Speeds may be `inf` (instant); `decode_s` may be 0."""

    cache_tokens: int = 200_000
    block_size: int = 16
    prefill_tokens_per_s: float = 20_000.0  # an 8B model on one large accelerator: 10,000 to 40,000
    decode_s: float = 0.010  # one step that samples tokens
    decode_s_per_running: float = 0.0  # added to that step for each decoding request
    running_max: int = 32  # vLLM's max_num_seqs
    waiting_max: int = 10_000  # beyond it a request is refused; a real queue of that length is minutes long
    step_tokens_max: int = 2048  # vLLM's max_num_batched_tokens: how long a prefill may hold up the others' decoding
    cache_events_max: int = 0  # undrained cache events; 0 records none

    def __post_init__(self) -> None:
        sizes = (self.cache_tokens // max(self.block_size, 1), self.running_max, self.step_tokens_max, self.waiting_max)
        if min(sizes) < 1 or self.prefill_tokens_per_s <= 0 or min(self.decode_s, self.decode_s_per_running) < 0:
            raise ValueError("engine sizes and speeds must be positive, times not negative")


class EngineEventKind(Enum):
    STARTED = "started"  # left the queue; `cached_tokens` is known from here on
    TOKEN = "token"  # noqa: S105 - one answer token is out; the first one when `tokens` == 1
    FINISHED = "finished"  # follows its last TOKEN
    ABORTED = "aborted"  # by a restart


class EngineEvent(NamedTuple):
    """`tokens`: answer tokens out so far. `cached_tokens`: prompt tokens that were not computed."""

    kind: EngineEventKind
    request_id: str
    at: float
    tokens: int
    cached_tokens: int


class EngineError(Exception):
    """The engine refuses a request. Nothing changed."""


class PromptTooLongError(EngineError):
    """The request needs more blocks than the engine has."""


class QueueFullError(EngineError):
    """The queue is at `waiting_max`."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Gauges of this moment, and totals since the last restart."""

    running: int
    waiting: int
    used_blocks: int
    capacity_blocks: int
    found_blocks: int
    evicted_blocks: int
    boots: int  # 1 at first: the boot epoch
    started: int
    finished: int
    cancelled: int
    prompt_tokens: int  # of started requests: queries of the prefix cache
    cached_tokens: int  # of these, found: its hits
    generated_tokens: int


class Running:
    """One admitted request: how far it is."""

    __slots__ = ("computed", "job", "lease", "out", "request_id")

    def __init__(self, request_id: str, job: Job, lease: Lease, computed: int) -> None:
        self.request_id = request_id
        self.job = job
        self.lease = lease
        self.computed = computed  # tokens whose KV exists
        self.out = 0  # answer tokens out

    def wanted(self) -> int:
        """Tokens it would compute in the next step: the rest of its prompt, then one at a time."""
        return max(1, self.job.prompt_tokens - self.computed)


class EngineModel:
    """One engine in the caller's time. Deterministic; every call first catches up to `now`, which must not go back."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._boots = 0
        self._now = 0.0
        self._events: list[EngineEvent] = []
        self._boot()

    def _boot(self) -> None:
        limits = self.limits
        self.cache = BlockCache(
            limits.cache_tokens // limits.block_size, limits.block_size, events_max=limits.cache_events_max
        )
        self._boots += 1
        self._running: dict[str, Running] = {}
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._step: list[tuple[Running, int]] = []  # what is being computed: request and its number of tokens
        self._step_ends_at = 0.0
        self._started = self._finished = self._cancelled = 0
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    def submit(self, request_id: str, job: Job, now: float) -> None:
        """Queue a request. Raises PromptTooLongError, QueueFullError, or ValueError for an id that is still in work."""
        self._catch_up(now)
        if request_id in self._running or request_id in self._waiting:
            raise ValueError(f"request id {request_id!r} is in work already")
        if job.tokens_computed > self.cache.capacity_blocks * self.cache.block_size:
            raise PromptTooLongError(f"{job.tokens_computed} tokens do not fit into {self.limits.cache_tokens}")
        if len(self._waiting) >= self.limits.waiting_max:
            raise QueueFullError(f"{len(self._waiting)} requests wait already")
        self._waiting[request_id] = job
        if not self._step:
            self._schedule(now)

    def next_event_at(self) -> float | None:
        """When to call `advance` next, None while there is nothing to do. Never before the last `now`."""
        if self._events:
            return self._now
        return self._step_ends_at if self._step else None

    def advance(self, now: float) -> list[EngineEvent]:
        """Everything that happened up to `now` and was not returned yet, in order of time."""
        self._catch_up(now)
        events, self._events = self._events, []
        return events

    def cancel(self, request_id: str, now: float) -> bool:
        """The client went away: its blocks are free at once, what it computed stays findable. False if not in work."""
        self._catch_up(now)
        request = self._running.pop(request_id, None)
        if request is not None:
            self.cache.release(request.lease)
        elif self._waiting.pop(request_id, None) is None:
            return False
        self._cancelled += 1
        return True

    def restart(self, now: float) -> None:
        """A new process: empty cache, totals at zero, every request in work aborted."""
        self._catch_up(now)
        aborted = [*self._running, *self._waiting]
        self._boot()
        self.cache.clear()  # says so to whoever follows the events
        self._events.extend(EngineEvent(EngineEventKind.ABORTED, name, now, 0, 0) for name in aborted)

    def clear_cache(self, now: float) -> None:
        """Forget all prefixes; requests in work go on."""
        self._catch_up(now)
        self.cache.clear()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self.cache.used_blocks,
            capacity_blocks=self.cache.capacity_blocks,
            found_blocks=self.cache.found_blocks,
            evicted_blocks=self.cache.evicted_blocks,
            boots=self._boots,
            started=self._started,
            finished=self._finished,
            cancelled=self._cancelled,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _catch_up(self, now: float) -> None:
        assert now >= self._now, "time goes back"
        while self._step and self._step_ends_at <= now:
            ended_at = self._step_ends_at
            self._finish_step(ended_at)
            self._schedule(ended_at)
        self._now = now

    def _schedule(self, now: float) -> None:
        """Begin the next step: requests in order of admission share the token budget, then new ones are admitted."""
        budget, prefill, decoding = self.limits.step_tokens_max, 0, 0
        step: list[tuple[Running, int]] = []
        running = list(self._running.values())
        while budget and (request := self._next(running, len(step), now)):
            tokens = min(request.wanted(), budget)
            if request.out:
                decoding += 1
            else:
                prefill += tokens
            self.cache.grow(request.lease, request.computed + tokens)
            step.append((request, tokens))
            budget -= tokens
        decode_s = self.limits.decode_s + self.limits.decode_s_per_running * decoding if decoding else 0.0
        self._step = step
        self._step_ends_at = now + prefill / self.limits.prefill_tokens_per_s + decode_s

    def _next(self, running: list[Running], index: int, now: float) -> Running | None:
        """The running request at `index`, or the head of the queue if it may enter. Nobody overtakes the head."""
        if index < len(running):
            return running[index]
        if not self._waiting or len(self._running) >= self.limits.running_max:
            return None
        request_id = next(iter(self._waiting))
        job = self._waiting[request_id]
        lease = self.cache.lease(job)
        if lease is None:
            return None
        del self._waiting[request_id]
        request = self._running[request_id] = Running(request_id, job, lease, lease.hits * self.cache.block_size)
        self._started += 1
        self._prompt_tokens += job.prompt_tokens
        self._cached_tokens += request.computed
        self._events.append(EngineEvent(EngineEventKind.STARTED, request_id, now, 0, request.computed))
        return request

    def _finish_step(self, at: float) -> None:
        for request, tokens in self._step:
            if self._running.get(request.request_id) is not request:
                continue  # cancelled while the step ran
            request.computed += tokens
            if request.computed >= request.job.prompt_tokens:
                self._emit(request, at)
        self._step = []

    def _emit(self, request: Running, at: float) -> None:
        request.out += 1
        self._generated_tokens += 1
        cached = request.lease.hits * self.cache.block_size
        self._events.append(EngineEvent(EngineEventKind.TOKEN, request.request_id, at, request.out, cached))
        if request.out == request.job.answer_tokens:
            del self._running[request.request_id]
            self.cache.release(request.lease)
            self._finished += 1
            self._events.append(EngineEvent(EngineEventKind.FINISHED, request.request_id, at, request.out, cached))
