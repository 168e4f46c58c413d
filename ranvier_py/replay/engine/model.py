"""Models an engine as a router sees it: a block cache with a clock. Pure: `now` comes in, events go out.

`EngineModel` follows vLLM's scheduler, except that blocks for the whole answer are promised at admission, so requests
are never preempted. `block_cache` is the cache, or one of `replay/hybrid` for models with recurrent layers. `batch`
computes the steps; `forecast` computes when a further request would get its first token.

Rules: deterministic; time never goes back; a cancelled request holds no blocks from that moment on.
"""

from __future__ import annotations

from ranvier_py.replay.engine.batch import EngineBatch
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.engine_values import (
    EngineEvent,
    EngineEventKind,
    EngineLimits,
    EngineStatistics,
    PromptTooLongError,
    QueueFullError,
)
from ranvier_py.replay.engine.forecast import Forecast
from ranvier_py.replay.hybrid.cache_models import make_cache


class EngineModel:
    """One engine in the caller's time. Each call with a `now` first advances the engine to it; `now` never goes back.

    `every_token`: report each answer token, not only each request's first. Nothing else depends on it.
    """

    def __init__(self, limits: EngineLimits, *, every_token: bool = False) -> None:
        self.limits, self.every_token = limits, every_token
        self._generation = 0
        self._now = 0.0
        self._start_process()

    def _start_process(self) -> None:
        limits = self.limits
        self.cache = make_cache(limits)
        self._generation += 1
        self._batch = EngineBatch(limits, self.cache, every_token=self.every_token)
        self._forecast = Forecast(self._batch)
        self._cancelled = 0

    # ---- work

    def submit(self, request_id: str, job: Job, now: float) -> None:
        """Queue a request. Raises PromptTooLongError, QueueFullError, or ValueError for an id that is in flight."""
        self._catch_up(now)
        if request_id in self._batch.running or request_id in self._batch.waiting:
            raise ValueError(f"request id {request_id!r} is in work already")
        if not self.cache.fits(job):
            raise PromptTooLongError(f"{job.tokens_computed} tokens do not fit into {self.limits.cache_tokens}")
        if self.waiting >= self.limits.waiting_max:
            raise QueueFullError(f"{self.waiting} requests wait already")
        self._batch.submit(request_id, job, now)
        self._forecast.submitted(request_id, job, now)

    def next_event_at(self) -> float | None:
        """Return when to call `advance` next, never before the last `now`; None while there is nothing to do."""
        if self._batch.outbox:
            return self._now
        return self._batch.ends_at if self._batch.busy else None

    def advance(self, now: float) -> list[EngineEvent]:
        """Return all events up to `now` that were not returned yet, in order of time."""
        self._catch_up(now)
        events, self._batch.outbox = self._batch.outbox, []
        return events

    def cancel(self, request_id: str, now: float) -> bool:
        """End a request: its blocks are free at once, what it computed can still be found. False if it is not known."""
        self._catch_up(now)
        found = self._batch.cancel(request_id)
        self._cancelled += found
        self._forecast.forget()
        return found

    def restart(self, now: float) -> None:
        """Start a new process: the cache is empty, totals are zero, and every request in flight is aborted."""
        self._catch_up(now)
        old = self._batch
        self._start_process()
        self.cache.clear()  # so that the events report it
        aborted = [EngineEvent(EngineEventKind.ABORTED, name, now, 0, 0) for name in (*old.running, *old.waiting)]
        self._batch.outbox = [*old.outbox, *aborted]

    def clear_cache(self, now: float) -> None:
        """Forget all prefixes. Requests in flight go on."""
        self._catch_up(now)
        self.cache.clear()
        self._forecast.forget()

    # ---- what an oracle may know

    @property
    def running(self) -> int:
        return len(self._batch.running)

    @property
    def waiting(self) -> int:
        return len(self._batch.waiting)

    @property
    def in_flight(self) -> int:
        """The number of running and waiting requests."""
        return self.running + self.waiting

    def accepts(self, job: Job) -> bool:
        """Whether `submit` would accept the job as of the last `now`."""
        return self.cache.fits(job) and self.waiting < self.limits.waiting_max

    def cached_tokens(self, job: Job, now: float) -> int:
        """Return how many leading prompt tokens of `job` the cache would reuse now, in whole blocks."""
        self._catch_up(now)
        return self.cache.hit_blocks(job) * self.limits.block_size

    def first_token_at(self, job: Job, now: float) -> float:
        """Return when `job` would get its first token if it were submitted now and no request followed; `inf`: refused.

        Has no visible effect. Exact, unless `forecast.STEPS_MAX` steps are not enough: then it is a lower bound, and
        `probes_cut` counts it.
        """
        self._catch_up(now)
        return self._forecast.first_token_at(job, now) if self.accepts(job) else float("inf")

    def first_token_not_before(self, job: Job, now: float) -> float:
        """Return a lower bound of `first_token_at`, at a fraction of its cost."""
        self._catch_up(now)
        return self._forecast.first_token_not_before(job, now) if self.accepts(job) else float("inf")

    @property
    def probes_cut(self) -> int:
        """Answers of `first_token_at` since the last restart that are only lower bounds."""
        return self._forecast.cut

    def statistics(self) -> EngineStatistics:
        """Return the statistics as of the last `now`."""
        batch = self._batch
        return EngineStatistics(
            running=self.running,
            waiting=self.waiting,
            used_blocks=self.cache.used_blocks,
            capacity_blocks=self.cache.capacity_blocks,
            found_blocks=self.cache.found_blocks,
            evicted_blocks=self.cache.evicted_blocks,
            generation=self._generation,
            started=batch.admitted,
            finished=batch.finished,
            cancelled=self._cancelled,
            prompt_tokens=batch.prompt_tokens,
            cached_tokens=batch.cached_tokens,
            generated_tokens=batch.generated_tokens,
        )

    def _catch_up(self, now: float) -> None:
        assert now >= self._now, "time goes back"
        if now != self._now or self._batch.ends_at <= now:  # else it has caught up already
            self._batch.catch_up(now)
            self._now = now
