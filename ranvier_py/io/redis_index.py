"""Carries the shared index's jobs to Redis, one at a time, never on the path of a request.

core/engine_cache/prefix_index/shared_index.py decides what to send and what a reply means; io/redis_pool.py connects.
Rule: nothing is retried unless the shared index asks again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from ranvier_py.core.engine_cache.prefix_index.shared_index import RedisJob, SharedIndex
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Histogram, Sample, samples, values
from ranvier_py.core.options import Options, option, seconds
from ranvier_py.core.redis_commands import RedisCommands, RedisFailure, prefix_problems

log = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PREPARE_S = 0.005
"""Longest wait of a request for Redis: the document's bound of a GET (CR29). After it, the local index decides."""


@dataclass(frozen=True, slots=True)
class RedisOptions(Options):
    """A job has `timeout_s`, plus `connect_s` if it may have to connect."""

    SECTION = "Index"
    PREFIX = "kv_redis_"

    prefix: str = option("ranvier:kvidx:", "Begins every key in Redis; all nodes need the same.")
    timeout_s: float = seconds(  # CR33
        1.0, "A round trip to Redis that takes longer means that it is away."
    )
    connect_s: float = seconds(  # CR12
        3.0, "Longest wait for a connection to Redis.", key="kv_redis_connect_timeout_s"
    )

    def contradictions(self) -> list[str]:
        return prefix_problems("prefix", self.prefix)


class RedisLink:
    """Does the jobs of one shared index."""

    def __init__(self, shared: SharedIndex, commands: RedisCommands) -> None:
        self.job_s = Histogram(LATENCY_BUCKETS_S)
        self.shared, self._commands = shared, commands
        self._due, self._answered = trio.Event(), trio.Event()
        shared.poke = self.poke

    async def run(self) -> None:
        """Run for ever."""
        shared = self.shared
        try:
            while True:
                job = shared.next_job(time.monotonic())
                if job is None:
                    with trio.move_on_after(shared.wait_s(time.monotonic())):
                        await self._due.wait()
                    self._due = trio.Event()
                    continue
                was_sharing, trouble = shared.sharing, shared.trouble
                await self._do(job)
                self._log(was_sharing, trouble)
                self._answered.set()
                self._answered = trio.Event()
        finally:
            self._commands.close_idle()

    def poke(self) -> None:
        """Look soon for a job."""
        self._due.set()

    async def prepare(self, prefix: str, deadline_s: float = PREPARE_S) -> None:
        """Wait until other nodes' entries for this prefix are known here, or until the deadline."""
        with trio.move_on_after(deadline_s):
            while self.shared.prepare(prefix, time.monotonic()):
                await self._answered.wait()

    def view(self) -> Mapping[str, Any]:
        """Return the part of /admin/kv-index/stats."""
        shared = self.shared
        return {
            "server": self._commands.place,
            "fallback_active": not shared.sharing,
            "last_error": shared.trouble,
            "generation": shared.generation,
            "waiting": shared.waiting,
            "jobs": self.job_s.count,
            "errors": dict(shared.errors),
            **values(shared.counters),
        }

    def metrics(self) -> Iterator[Sample]:
        shared = self.shared
        away = int(not shared.sharing)
        yield Sample(
            "kv_index_fallback_active", "gauge", "1 while the prefix index goes without Redis, which is away.", away
        )
        yield Sample(
            "kv_index_shared_waiting",
            "gauge",
            "Entries of the prefix index that wait to be written to Redis.",
            shared.waiting,
        )
        yield Sample(
            "kv_index_redis_latency_seconds",
            "histogram",
            "Seconds of the prefix index's round trips to Redis.",
            self.job_s,
        )
        for kind, count in shared.errors.items():
            yield Sample(
                "kv_index_redis_errors",
                "counter",
                "Round trips of the prefix index to Redis that failed.",
                count,
                {"type": kind},
            )
        yield from samples("kv_index_shared", shared.counters)

    async def _do(self, job: RedisJob) -> None:
        shared, began = self.shared, time.monotonic()
        replies = await self._commands.send(job.commands, connects=job.is_hello)
        now = time.monotonic()
        if isinstance(replies, RedisFailure):
            shared.failed(job, replies.kind, replies.why, now)
            return
        self.job_s.observe(now - began)
        if not shared.done(job, replies, now):
            self._commands.close_idle()

    def _log(self, was_sharing: bool, trouble: str) -> None:
        shared = self.shared
        if shared.sharing and not was_sharing:
            log.info(event("kv_index.shared", store=self._commands.place, generation=shared.generation))
        elif shared.trouble and shared.trouble != trouble:
            log.warning(event("kv_index.alone", store=self._commands.place, why=shared.trouble))
