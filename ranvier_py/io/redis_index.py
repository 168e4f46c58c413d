"""The shared index's connection to Redis: one connection, one thread at a time, never on the way of a request.

The client of redis-py waits, so it works in a thread: a job's calls go out as one pipeline, its replies come back
together. What to call and what a reply means is core/engine_cache/prefix_index/shared_index.py's matter. A connection
is made for a hello and never again behind its back: whoever lost it does not know what of his last job was done.

Rules: a job that takes longer than its deadline has failed, its connection is cut from here, and the thread ends with
it; until then there is no other. A reply may be as long as what comes within the deadline; scripts of ours keep theirs
below a megabyte. The address may hold a password: it is shown without, and errors are by their kind.
Cost: 0.2 ms a job and 5 us a call in the thread, most of it with the interpreter lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import trio

from ranvier_py.core.engine_cache.prefix_index.shared_index import Job, SharedIndex
from ranvier_py.core.engine_cache.prefix_index.shared_scripts import SCRIPTS
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.metrics import Sample

try:
    import redis
except ImportError:  # the extra is not installed
    redis = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PREPARE_S = 0.005
"""Longest wait of a request for an answer: the document's bound of a GET (CR29). Then what is known here decides."""

ERRORS = ("connection", "timeout", "other")  # kinds of them, as Continuum counts them

READ_BYTES = 65_536  # in one read of a socket


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """`prefix` begins every key. A job has `timeout_s`, a connection `connect_s` before that."""

    prefix: str = "ranvier:kvidx:"
    timeout_s: float = 1.0  # CR33
    connect_s: float = 3.0  # CR12


class Wire:
    """One connection; used in the thread, but for `cut`. It never connects twice."""

    def __init__(self, url: str, options: RedisOptions) -> None:
        self._prefix = options.prefix
        self._names: dict[str, Any] = {}  # of the scripts, as Redis calls them
        pool = redis.ConnectionPool.from_url(
            url,
            socket_connect_timeout=options.connect_s,
            socket_timeout=options.timeout_s,
            socket_read_size=READ_BYTES,
            protocol=2,
            retry=None,
            retry_on_timeout=False,
            health_check_interval=0,
        )
        self._connection: Any = pool.make_connection()

    def work(self, job: Job) -> tuple[list[object], float, float]:
        """All replies, and when the calls went out and the first reply was there. Raises what redis-py does."""
        connection = self._connection
        if not self._names:
            connection.connect()
            self._names = dict(
                zip(SCRIPTS, self._ask([("SCRIPT", "LOAD", text) for text in SCRIPTS.values()]), strict=True)
            )
        calls = [("EVALSHA", self._names[call.script], "1", self._prefix, *call.arguments) for call in job.calls]
        asked = time.monotonic()
        replies = self._ask(calls)
        return replies, asked, time.monotonic()

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[object]:
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        return [connection.read_response() for _ in commands]

    def cut(self) -> None:
        """Close it, whoever waits for it."""
        self._connection.disconnect()


class RedisLink:
    """Does the jobs of a shared index for ever.

    Raises ConfigError where redis-py is missing or the URL is none; the message does not show it.
    """

    def __init__(self, shared: SharedIndex, url: str, options: RedisOptions) -> None:
        if redis is None:
            raise ConfigError(['kv_index_backend: "redis" needs ranvier-py[redis]'])
        self.job_s = Histogram(LATENCY_BUCKETS_S)
        self._shared = shared
        self._url = url
        self._options = options
        self._wire: Wire | None = None
        self._one = trio.CapacityLimiter(1)  # thread, even when one was abandoned
        self._due, self._answered = trio.Event(), trio.Event()
        shared.poke = self._poke
        self._wire = self._new_wire()  # refuses a bad address now
        self.place = shown(url)

    async def run(self) -> None:
        """For ever."""
        shared = self._shared
        try:
            while True:
                job = shared.next_job(time.monotonic())
                if job is None:
                    await self._wait(shared.wait_s(time.monotonic()))
                    continue
                was_sharing, trouble = shared.sharing, shared.trouble
                await self._do(job)
                self._tell(was_sharing, trouble)
                self._answered.set()
                self._answered = trio.Event()
        finally:
            self._cut()

    def ask(self, prefix: str) -> None:
        """Have Redis asked for this prefix, where that is due."""
        self._shared.prepare(prefix, time.monotonic())

    async def prepare(self, prefix: str, deadline_s: float = PREPARE_S) -> None:
        """Have what others say of this prefix, if Redis tells it in time."""
        with trio.move_on_after(deadline_s):
            while self._shared.prepare(prefix, time.monotonic()):
                await self._answered.wait()

    def view(self) -> Mapping[str, Any]:
        """Of /admin/kv-index/stats."""
        shared, counts = self._shared, self._shared.counts
        return {
            "server": self.place,
            "fallback_active": not shared.sharing,
            "last_error": shared.trouble,
            "generation": shared.generation,
            "entry_count": shared.rows,
            "waiting": shared.waiting,
            "jobs": self.job_s.count,
            "errors": {kind: getattr(counts, kind) for kind in ERRORS},
            **{name: count for name, count in asdict(counts).items() if name not in ERRORS},
            "unasked": shared.answers.unasked,
        }

    def samples(self) -> Iterator[Sample]:
        shared, counts = self._shared, self._shared.counts
        away = int(not shared.sharing)
        yield Sample("kv_index_fallback_active", "gauge", "Whether the shared index is done without.", away)
        yield Sample("kv_index_shared_entries", "gauge", "Entries in Redis, removals included.", shared.rows)
        yield Sample("kv_index_shared_waiting", "gauge", "Entries that are to be written to Redis.", shared.waiting)
        yield Sample("kv_index_redis_latency_seconds", "histogram", "Time of one round trip to Redis.", self.job_s)
        for kind in ERRORS:
            count, label = getattr(counts, kind), {"type": kind}
            yield Sample("kv_index_redis_errors", "counter", "Round trips to Redis that failed.", count, label)
        for name, help_text in (
            ("applied", "Writes that Redis took."),
            ("refused", "Writes of what Redis knew better."),
            ("dropped", "Writes that waited when Redis went away."),
            ("said_anew", "Entries written again after an outage or another router's gap."),
            ("asked", "Prefixes that Redis was asked about."),
            ("answered", "Answers with a backend in them."),
            ("garbage", "Entries in Redis that can't be read."),
            ("expired", "Entries removed from Redis at their end."),
            ("evicted", "Entries removed from Redis for want of room."),
            ("generations_ended", "Generations ended after an outage or by a clear."),
            ("outages", "Times that Redis went away."),
        ):
            yield Sample(f"kv_index_shared_{name}", "counter", help_text, getattr(counts, name))
        unasked = shared.answers.unasked
        yield Sample("kv_index_shared_unasked", "counter", "Questions for which there was no room.", unasked)

    def _poke(self) -> None:
        self._due.set()

    async def _wait(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._due.wait()
        self._due = trio.Event()

    async def _do(self, job: Job) -> None:
        shared, limits = self._shared, self._options
        if self._wire is None:
            self._wire = self._new_wire()
        wire = self._wire
        deadline_s = limits.timeout_s + (limits.connect_s if job.hello else 0.0)
        kind = why = ""
        try:
            with trio.fail_after(deadline_s):
                replies, asked, answered = await trio.to_thread.run_sync(
                    wire.work, job, abandon_on_cancel=True, limiter=self._one
                )
        except (trio.TooSlowError, redis.TimeoutError):
            kind, why = "timeout", f"no answer within {deadline_s:g} s"
        except (redis.ConnectionError, OSError) as error:
            kind, why = "connection", said(error)
        except Exception as error:  # a server that is no Redis may have redis-py raise anything
            kind, why = "other", said(error)
        if kind:
            self._cut()
            shared.failed(job, kind, why, time.monotonic())
        else:
            self.job_s.observe(answered - asked)
            if not shared.done(job, replies, asked, answered):
                self._cut()

    def _new_wire(self) -> Wire:
        try:
            return Wire(self._url, self._options)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                ["kv_redis_url: must be like redis://:PASSWORD@HOST:6379, rediss:// or unix:///SOCKET"]
            ) from error

    def _cut(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.cut()

    def _tell(self, was_sharing: bool, trouble: str) -> None:
        shared = self._shared
        if shared.sharing and not was_sharing:
            log.info("kv_index.shared %s generation %d", self.place, shared.generation)
        elif shared.trouble and shared.trouble != trouble:
            log.warning("kv_index.alone %s: %s", self.place, shared.trouble)


def said(error: Exception) -> str:
    """By kind and, where the system says it, by reason; never what Redis wrote, which may repeat a secret."""
    cause = error.__cause__ or error.__context__
    reason = next((each.strerror for each in (error, cause) if isinstance(each, OSError) and each.strerror), "")
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"


def shown(url: str) -> str:
    """Without what may be secret."""
    place = urlsplit(url)
    return f"{place.scheme}://{place.hostname or ''}{f':{place.port}' if place.port else ''}" + (
        place.path if place.scheme == "unix" else ""
    )
