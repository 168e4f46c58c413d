"""Answers in Redis or Valkey, which several nodes share; in memory while it is away.

    away --hello answered--> sharing --failure, deadline, refusal--> away

Sharing: look-ups are one round trip, for the generation and the entries (core/response_cache/redis_entries.py), of all
requests that came during the last one; what is kept waits for the one writer, and is found there meanwhile. So an
invalidation counts everywhere as soon as Redis has it, also for what engines are at work on: an answer belongs to the
generation in which it was asked for.
Away: from the first failure on, in the very request that met it, answers are in memory, or nowhere, as the operator
wants. Redis is asked again every `retry_s`. On return the generation is raised, unless another node has done so since,
and what memory had is dropped: what an operator invalidated meanwhile, here or on another node, comes back from neither
(CX20). An invalidation that Redis did not get is owed to it, and settled before anything is found there again.

Rules: nothing here fails a request or has it wait much longer than `timeout_s`. Redis without room (OOM) is not away:
what it refuses is not kept. Neither SCAN nor KEYS.
Bounds: FINDS_MAX look-ups at once, those of WaitingAnswers in the queue; more are left out, counted.
Source: Continuum Router, tier 3 (CR11 to CR14).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf
from random import Random
from typing import Any

import trio

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.redis_commands import Command, RedisCommands, RedisFailure, RedisRefusal
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.redis_answer_options import RedisAnswerCounters, RedisAnswerOptions
from ranvier_py.core.response_cache.redis_entries import (
    GENERATION_BYTES_MAX,
    SWAP,
    ExpiringSum,
    Generation,
    answer_in,
    entry_name,
    entry_of,
    generation_in,
    new_generation,
)
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.core.response_cache.waiting_answers import Waiting, WaitingAnswers

log = logging.getLogger(__name__)

LATENCY_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
FINDS_MAX = 256
READERS = 2  # round trips for look-ups at once
PATIENCE = 1.1  # a request waits for its look-up no longer than this times the deadline of a command
BATCH_MAX, BATCH_BYTES_MAX = 16, 4 << 20  # of one round trip
TICK_S = 1.0
SWAPS_MAX = 5  # tries to add an invalidation while others do; then all is cleared
PROBE_MS = 60_000  # what only shows that one may write expires
KNOWN_MAX, BEGUN_MAX = 16, 4096

BEARABLE = frozenset(("OOM", "WRONGTYPE"))
"""Refusals that are no reason to do without Redis: it is full, or a key of ours is somebody else's."""


class LookUp:
    """A request's question to Redis.

    Attributes:
        found: the answer.
        is_over: Redis was asked, or need not be; else the request looks in memory.
    """

    __slots__ = ("done", "found", "is_over", "key", "max_age_s")

    def __init__(self, key: bytes, max_age_s: float) -> None:
        self.key, self.max_age_s = key, max_age_s
        self.found: StoredAnswer | None = None
        self.is_over = False
        self.done = trio.Event()


class RedisAnswers:
    """AnswersElsewhere, in Redis.

    Attributes:
        sharing: Redis is there.
        memory: of the time without; None where nothing is to be cached then.
    """

    backend = "redis"
    uses_memory = False

    def __init__(
        self, commands: RedisCommands, options: RedisAnswerOptions, responses: ResponseCacheOptions, rng: Random
    ) -> None:
        self.counters = RedisAnswerCounters()
        self.errors = {"connection": 0, "timeout": 0, "other": 0}
        self.latency = {operation: Histogram(LATENCY_S) for operation in ("get", "set", "delete", "probe")}
        self.sharing = False
        self.trouble = ""  # why Redis is away
        lesser = replace(responses, capacity=options.fallback_capacity, ttl_s=options.fallback_ttl_s)
        self.memory = AnswerStore(lesser) if options.fallback else None
        self._commands, self._options, self._rng, self.responses = commands, options, rng, responses
        self._written = ExpiringSum(responses.ttl_s)
        self._generation_key = f"{options.key_prefix}generation"
        self._generation: Generation | None = None
        self._known = deque[str]((), KNOWN_MAX)  # generations that were ours
        self._is_owed = False
        self._outage = 0  # how often it was left, for what began before
        self._server_ms = 0.0  # Redis's clock where ours is 0
        self._waiting = WaitingAnswers()
        self._begun = BoundedDict[bytes, Generation | None](BEGUN_MAX)  # of answers that engines are at work on
        self._asked = deque[LookUp]()
        self._finding = 0  # those that were taken up
        self._tick_at = self._retry_at = -inf
        self._due, self._asked_due = trio.Event(), trio.Event()

    def set_options(self, responses: ResponseCacheOptions) -> None:
        """From now on. What is in Redis expires when it was to, and is found no longer than the new time to live."""
        if responses.ttl_s != self.responses.ttl_s:
            self._written = ExpiringSum(responses.ttl_s)
        self.responses = responses

    # --- requests -----------------------------------------------------------------------------------------------------

    async def find(self, key: bytes, max_age_s: float) -> StoredAnswer | None:
        if not self.sharing:
            return self._in_memory(key, max_age_s)
        waiting = self._waiting.find(key)
        if waiting is not None:
            return waiting if time.monotonic() - waiting.stored_at <= max_age_s else None
        if self._generation is None or self._is_owed or len(self._asked) + self._finding >= FINDS_MAX:
            self.counters.unasked += 1
            return None
        look_up = LookUp(key, max_age_s)
        self._asked.append(look_up)
        self._asked_due.set()
        with trio.move_on_after(PATIENCE * self._options.timeout_s):
            await look_up.done.wait()
        if not look_up.is_over:
            return self._in_memory(key, max_age_s)
        if look_up.found is None:
            self._begun[key] = self._generation
        return look_up.found

    def keep(self, key: bytes, answer: StoredAnswer) -> None:
        if not self.sharing:
            if self.memory is not None:
                self.memory.keep(key, answer)
        elif answer.size > self._options.bytes_max:
            self.counters.too_large += 1
        elif self._waiting.add(key, answer, self._begun.pop(key, self._generation)):
            self._due.set()
        else:
            self.counters.dropped += 1
        self.counters.waiting = len(self._waiting)

    async def _look_up(self, batch: Sequence[LookUp]) -> None:
        """In one round trip; in two where the generation is another one by now."""
        generation, outage, most = self._generation, self._outage, self._options.bytes_max
        data: list[object] = []
        for _ in range(2):
            if generation is None:
                break
            names = [entry_name(self._options.key_prefix, generation, each.key) for each in batch]
            reads: list[Command] = [("GETRANGE", name, 0, most) for name in names]
            replies = await self._send("get", self._generation_read(), *reads)
            if replies is None or outage != self._outage:
                return
            was, now_there = generation, replies[0]
            if now_there != generation.raw:
                generation = self._adopt(now_there)
            if generation is not None and generation.id == was.id:
                data = replies[1:]
                break
        for each, reply in zip_longest(batch, data, fillvalue=b""):
            assert isinstance(each, LookUp)
            each.is_over = True
            if generation is not None:
                each.found = self._read(each.key, reply, generation, each.max_age_s)

    def _read(self, key: bytes, data: object, generation: Generation, max_age_s: float) -> StoredAnswer | None:
        now, most = time.monotonic(), self._options.bytes_max
        if data == b"":
            return None
        found = None
        if isinstance(data, bytes):
            found = answer_in(key, data, generation, now, self._server_ms + 1000 * now, most)
        if found is None:
            self.counters.garbage += 1
            return None
        age_s = now - found.stored_at
        if age_s >= self.responses.ttl_s or age_s > max_age_s:
            return None
        self.counters.found += 1
        return found

    def _in_memory(self, key: bytes, max_age_s: float) -> StoredAnswer | None:
        found = self.memory.find(key, time.monotonic(), max_age_s) if self.memory is not None else None
        self.counters.fallback_hits += found is not None
        return found

    # --- operators ----------------------------------------------------------------------------------------------------

    async def invalidate(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> int | None:
        """All: how many this node had written. Others can't be counted without a search."""
        before = inf if older_than_s is None else time.monotonic() - older_than_s
        self._waiting.invalidate(model, tenant, before)
        self.counters.waiting = len(self._waiting)
        cleared = self.memory.invalidate(model, tenant, before) if self.memory is not None else 0
        is_all = model is None and tenant is None and older_than_s is None
        written = self._written.total(time.monotonic())[0]
        is_done = self.sharing and await (self._renew() if is_all else self._void(model, tenant, older_than_s))
        if not is_done:
            self._is_owed, self._tick_at = True, -inf
            self._due.set()
            return cleared
        return cleared + written if is_all else None

    async def _void(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> bool:
        """Add an invalidation to those that Redis has. Whether it has it."""
        for _ in range(SWAPS_MAX):
            replies = await self._send("delete", ("TIME",), self._generation_read())
            if replies is None:
                return False
            self._set_clock(replies[0])
            found = generation_in(replies[1])
            before_s = None if older_than_s is None else time.monotonic() - older_than_s
            before_ms = None if before_s is None else max(0, round(self._server_ms + 1000 * before_s))
            changed = found.without(model, tenant, before_ms) if found is not None else None
            if found is None or changed is None:
                break
            swap: Command = ("EVAL", SWAP, 1, self._generation_key, found.raw, changed.raw)
            replies = await self._send("delete", swap, bears_all=True)
            if replies is None:
                return False
            if replies[0] == 1:
                self._use(changed)
                return True
            if isinstance(replies[0], RedisRefusal):  # no room, or no scripts
                break
        return await self._renew()

    async def _begin(self) -> bool:
        """Make a generation where there is none, or use the one of who was faster."""
        raised = new_generation(self._rng)
        replies = await self._send("delete", ("SET", self._generation_key, raised.raw, "NX"), self._generation_read())
        found = generation_in(replies[1]) if replies is not None else None
        if found is None:
            return replies is not None and await self._renew()
        self.counters.generations += found.id == raised.id
        self._use(found)
        return True

    async def _renew(self) -> bool:
        """Raise the generation, for all. Where Redis has no room for another, there is none until it has."""
        raised = new_generation(self._rng)
        replies = await self._send("delete", ("SET", self._generation_key, raised.raw))
        if replies is None:
            return False
        self._written.clear()
        if not isinstance(replies[0], RedisRefusal):
            self.counters.generations += 1
            self._use(raised)
            return True
        self._generation = None
        return await self._send("delete", ("DEL", self._generation_key)) is not None

    # --- Redis --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow)
                for _ in range(READERS):
                    nursery.start_soon(self._serve_look_ups)
        finally:
            self._commands.close_idle()

    async def _serve_look_ups(self) -> None:
        """All that came meanwhile at once, for ever: a round trip costs more than what it asks."""
        while True:
            while not self._asked:
                await self._asked_due.wait()
                self._asked_due = trio.Event()
            batch = [self._asked.popleft() for _ in range(min(len(self._asked), BATCH_MAX))]
            self._finding += len(batch)
            try:
                await self._look_up(batch)
            finally:
                self._finding -= len(batch)
                for each in batch:
                    each.done.set()

    async def _follow(self) -> None:
        """Redis as it comes and goes, its clock and generation, and write, for ever."""
        while True:
            await self._round()

    async def _round(self) -> None:
        now = time.monotonic()
        due_at = self._tick_at if self.sharing else self._retry_at
        if now >= due_at:
            await (self._tick() if self.sharing else self._greet())
        elif self.sharing and self._waiting and self._generation is not None:
            await self._write(self._generation)
        else:
            with trio.move_on_after(due_at - now):
                await self._due.wait()
            self._due = trio.Event()

    async def _greet(self) -> None:
        """Come back, if Redis answers, takes what is written, and nothing invalidated can be found in it."""
        probe: Command = ("SET", f"{self._options.key_prefix}probe", 1, "PX", PROBE_MS)
        replies = await self._send("probe", ("TIME",), probe, self._generation_read(), connects=True)
        if replies is None:
            return
        self._set_clock(replies[0])
        found = generation_in(replies[2])
        if self._is_owed or (found is not None and found.id in self._known):
            self._is_owed = False
            if not await self._renew():
                self._is_owed = True
                return
        elif found is not None:
            self._use(found)
        elif not await self._begin():
            return
        self.sharing, self.trouble = True, ""
        self._tick_at = -inf if self._is_owed else time.monotonic() + TICK_S
        if self.memory is not None:
            self.memory.invalidate()
        log.info("response_cache.shared %s", self._commands.place)

    async def _tick(self) -> None:
        """Follow Redis's clock and generation where no request does."""
        self._tick_at = time.monotonic() + TICK_S
        replies = await self._send("probe", ("TIME",), self._generation_read())
        if replies is None:
            return
        self._set_clock(replies[0])
        if self._is_owed:
            self._is_owed = False
            self._is_owed = not await self._renew()
        elif generation_in(replies[1]) is None:
            await self._begin()
        elif self._generation is None or replies[1] != self._generation.raw:
            self._adopt(replies[1])

    async def _write(self, generation: Generation) -> None:
        """The oldest of the queue, as many as one round trip takes."""
        batch: list[tuple[bytes, Waiting, int]] = []
        commands: list[Command] = []
        size, now = 0, time.monotonic()
        for key, waiting in self._waiting.oldest(BATCH_MAX):
            ttl_ms = round(1000 * (self.responses.ttl_s - (now - waiting.answer.stored_at)))
            mine = waiting.generation or generation
            entry = entry_of(key, waiting.answer, mine, now, self._server_ms + 1000 * now)
            if len(entry) > self._options.bytes_max or ttl_ms <= 0:
                self.counters.too_large += ttl_ms > 0
                self._waiting.remove(key)
                continue
            batch.append((key, waiting, len(entry)))
            commands.append(("SET", entry_name(self._options.key_prefix, mine, key), entry, "PX", ttl_ms))
            size += len(entry)
            if size >= BATCH_BYTES_MAX:
                break
        replies = await self._send("set", *commands) if commands else []
        for (key, waiting, length), reply in zip(batch, replies or (), strict=False):
            if isinstance(reply, RedisRefusal):
                self.counters.refused += 1
            else:
                self.counters.written += 1
                self._written.add(length, now)
            self._waiting.remove(key, waiting)
        self.counters.waiting = len(self._waiting)

    def _generation_read(self) -> Command:
        return "GETRANGE", self._generation_key, 0, GENERATION_BYTES_MAX

    async def _send(
        self, operation: str, *commands: Command, connects: bool = False, bears_all: bool = False
    ) -> list[object] | None:
        """The replies; None: Redis is away from now on."""
        began, outage = time.monotonic(), self._outage
        replies = await self._commands.send(commands, connects=connects)
        if isinstance(replies, RedisFailure):
            self._fail(replies, outage)
            return None
        self.latency[operation].observe(time.monotonic() - began)
        codes = {reply.code for reply in replies if isinstance(reply, RedisRefusal)} - BEARABLE
        if (codes and not bears_all) or len(replies) != len(commands):
            self._fail(RedisFailure("other", f"refused: {', '.join(sorted(codes))}"), outage)
            return None
        return replies

    def _fail(self, failure: RedisFailure, outage: int) -> None:
        """`outage` was the last one when what failed began."""
        self.errors[failure.kind] += 1
        if outage != self._outage:
            return
        self._retry_at = time.monotonic() + self._options.retry_s
        if failure.why != self.trouble:
            log.warning("response_cache.alone %s: %s", self._commands.place, failure.why)
        self.trouble = failure.why
        if not self.sharing:
            return
        self.sharing = False
        self._outage += 1
        self.counters.outages += 1
        for key, answer in self._waiting.drain():
            if self.memory is not None:
                self.memory.keep(key, answer)
        self.counters.waiting = 0
        while self._asked:
            self._asked.popleft().done.set()
        self._due.set()

    def _adopt(self, raw: object) -> Generation | None:
        """Another generation stands in Redis, or none: then a new one is made soon."""
        found = generation_in(raw)
        if found is not None:
            self._use(found)
        else:
            self._generation, self._tick_at = None, -inf
            self._due.set()
        return found

    def _use(self, generation: Generation) -> None:
        if self._generation is None or self._generation.id != generation.id:
            self._known.append(generation.id)
        self._generation = generation

    def _set_clock(self, reply: object) -> None:
        """From the reply to TIME."""
        if isinstance(reply, tuple) and len(reply) == 2 and all(type(each) is int for each in reply):
            self._server_ms = 1000 * reply[0] + reply[1] / 1000 - 1000 * time.monotonic()

    # --- the control port ---------------------------------------------------------------------------------------------

    @property
    def fallback_active(self) -> bool:
        return not self.sharing and self.memory is not None

    def view(self) -> Mapping[str, Any]:
        """Of /admin/response-cache/stats: `entries` and `size_bytes` are what this node wrote and has not expired."""
        entries, size = self._written.total(time.monotonic())
        memory = self.memory.counters if self.memory is not None else None
        return {
            "entries": entries if self.sharing or memory is None else memory.entries,
            "size_bytes": size if self.sharing or memory is None else memory.size_bytes,
            "redis": {
                "server": self._commands.place,
                "connections": {"active": self._commands.active, "idle": self._commands.idle},
                "connected": self.sharing,
                "fallback_active": self.fallback_active,
                "errors": dict(self.errors),
                "last_error": self.trouble,
                "generation": self._generation.id if self._generation is not None else None,
                "invalidation_owed": self._is_owed,
                "entries_in_memory": memory.entries if memory is not None else 0,
                **values(self.counters),
            },
        }

    def samples(self) -> Iterator[Sample]:
        """Continuum's metrics under our prefix (CR22), and ours."""
        active, idle = self._commands.active, self._commands.idle
        yield Sample("cache_redis_connections_active", "gauge", "Connections to Redis in use.", active)
        yield Sample("cache_redis_connections_idle", "gauge", "Connections to Redis that are not.", idle)
        for operation, took_s in self.latency.items():
            label = {"operation": operation}
            yield Sample("cache_redis_latency_seconds", "histogram", "Time of a round trip to Redis.", took_s, label)
        for kind, count in self.errors.items():
            yield Sample("cache_redis_errors", "counter", "Round trips to Redis that failed.", count, {"type": kind})
        yield Sample("cache_fallback_active", "gauge", "Whether memory stands in for Redis.", self.fallback_active)
        yield from samples("response_cache_redis", self.counters)
