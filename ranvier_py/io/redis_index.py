"""The shared index's connection to Redis: one connection, one thread at a time, never on the path of a request.

The client of redis-py waits, so it works in a thread: a job's commands go out as one pipeline, its replies come back
together. What to send and what a reply means is core/engine_cache/prefix_index/shared_index.py's matter.

Rules: a job that takes longer than its deadline has failed, its connection is cut from here, and the thread ends with
it; until then there is no other. Nothing is tried again behind the shared index's back. The address may hold a
password: it is shown without, and errors are by their kind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import trio

from ranvier_py.core.addresses import checked_host, without_secrets
from ranvier_py.core.engine_cache.prefix_index.shared_index import RedisJob, SharedIndex
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.options import Options, option, seconds

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError:  # the extra is not installed
    redis = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PREPARE_S = 0.005
"""Longest wait of a request for an answer: the document's bound of a GET (CR29). Then what is known here decides."""

PREFIX_CHARACTERS_MAX = 60


@dataclass(frozen=True, slots=True)
class RedisOptions(Options):
    """A job has `timeout_s`, a connection `connect_s` before that."""

    prefix: str = option(
        "ranvier:kvidx:", "Begins every key in Redis; all nodes need the same.", key="kv_redis_prefix", section="Index"
    )
    timeout_s: float = seconds(  # CR33
        1.0, "A round trip to Redis that takes longer means that it is away.", key="kv_redis_timeout_s", section="Index"
    )
    connect_s: float = seconds(  # CR12
        3.0, "Longest wait for a connection to Redis.", key="kv_redis_connect_timeout_s", section="Index"
    )

    def contradictions(self) -> list[str]:
        if not 1 <= len(self.prefix) <= PREFIX_CHARACTERS_MAX or not all("!" <= each <= "~" for each in self.prefix):
            return [f"prefix: must be 1 to {PREFIX_CHARACTERS_MAX} visible ASCII characters"]
        if any(each in "*?[]\\^" for each in self.prefix):
            return ["prefix: must not hold any of * ? [ ] ^ or a backslash, which are patterns to Redis"]
        return []


class RedisLink:
    """Does the jobs of a shared index for ever.

    Raises ConfigError where redis-py is missing or the URL is none; the message does not show it.
    """

    def __init__(self, shared: SharedIndex, url: str, options: RedisOptions) -> None:
        if redis is None:
            raise ConfigError(['kv_index_backend: "redis" needs ranvier-py[redis]'])
        self.job_s = Histogram(LATENCY_BUCKETS_S)
        self.shared = shared
        self._url = url
        self._options = options
        self._client: Any = self._connect()  # refuses a bad address now
        self._one = trio.CapacityLimiter(1)  # thread, even when one was abandoned
        self._due, self._answered = trio.Event(), trio.Event()
        shared.poke = self.poke
        self.place = without_secrets(url)

    async def run(self) -> None:
        """For ever."""
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
            self._cut()

    def poke(self) -> None:
        """Look soon whether there is a job."""
        self._due.set()

    async def prepare(self, prefix: str, deadline_s: float = PREPARE_S) -> None:
        """Have what others wrote of this prefix, if Redis answers in time."""
        with trio.move_on_after(deadline_s):
            while self.shared.prepare(prefix, time.monotonic()):
                await self._answered.wait()

    def view(self) -> Mapping[str, Any]:
        """Of /admin/kv-index/stats."""
        shared = self.shared
        return {
            "server": self.place,
            "fallback_active": not shared.sharing,
            "last_error": shared.trouble,
            "generation": shared.generation,
            "waiting": shared.waiting,
            "jobs": self.job_s.count,
            "errors": dict(shared.errors),
            **values(shared.counters),
        }

    def samples(self) -> Iterator[Sample]:
        shared = self.shared
        away = int(not shared.sharing)
        yield Sample("kv_index_fallback_active", "gauge", "Whether the shared index is done without.", away)
        yield Sample("kv_index_shared_waiting", "gauge", "Entries that are to be written to Redis.", shared.waiting)
        yield Sample("kv_index_redis_latency_seconds", "histogram", "Time of one round trip to Redis.", self.job_s)
        for kind, count in shared.errors.items():
            yield Sample("kv_index_redis_errors", "counter", "Round trips to Redis that failed.", count, {"type": kind})
        yield from samples("kv_index_shared", shared.counters)

    async def _do(self, job: RedisJob) -> None:
        shared, limits = self.shared, self._options
        deadline_s = limits.timeout_s + (limits.connect_s if job.is_hello else 0.0)
        began, kind, why = time.monotonic(), "", ""
        try:
            if self._client is None:
                self._client = self._connect()
            with trio.fail_after(deadline_s):
                replies = await trio.to_thread.run_sync(
                    work, self._client, job, abandon_on_cancel=True, limiter=self._one
                )
        except (trio.TooSlowError, redis.TimeoutError):
            kind, why = "timeout", f"no answer within {deadline_s:g} s"
        except (redis.ConnectionError, OSError) as error:
            kind, why = "connection", reason_of(error)
        except Exception as error:  # a server that is no Redis may have redis-py raise anything
            kind, why = "other", reason_of(error)
        now = time.monotonic()
        if kind:
            shared.failed(job, kind, why, now)
        else:
            self.job_s.observe(now - began)
        if kind or not shared.done(job, replies, now):
            self._cut()

    def _connect(self) -> Any:
        limits = self._options
        try:
            place = urlsplit(self._url)
            if place.scheme != "unix":
                checked_host(place.hostname or "localhost")
            return redis.Redis.from_url(
                self._url,
                socket_connect_timeout=limits.connect_s,
                socket_timeout=limits.timeout_s,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                ["kv_redis_url: must be like redis://:PASSWORD@HOST:6379, rediss:// or unix:///SOCKET"]
            ) from error

    def _cut(self) -> None:
        """Close the connection, whoever waits for it."""
        client, self._client = self._client, None
        if client is not None:
            client.connection_pool.disconnect()

    def _log(self, was_sharing: bool, trouble: str) -> None:
        shared = self.shared
        if shared.sharing and not was_sharing:
            log.info("kv_index.shared %s generation %s", self.place, shared.generation)
        elif shared.trouble and shared.trouble != trouble:
            log.warning("kv_index.alone %s: %s", self.place, shared.trouble)


def work(client: Any, job: RedisJob) -> list[object]:
    """All replies, errors among them. In a thread. Raises what redis-py does."""
    pipeline = client.pipeline(transaction=False)
    for command in job.commands:
        pipeline.execute_command(*command)
    replies: list[object] = pipeline.execute(raise_on_error=False)
    return replies


def reason_of(error: Exception) -> str:
    """By kind and, where the system says it, by reason; never what Redis wrote, which may repeat a secret."""
    cause = error.__cause__ or error.__context__
    reason = next((each.strerror for each in (error, cause) if isinstance(each, OSError) and each.strerror), "")
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"
