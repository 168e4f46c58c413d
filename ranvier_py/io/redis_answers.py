"""Shares cached answers between nodes through Redis or Valkey; keeps them in memory while Redis is away.

    away --hello answered--> sharing --failure, deadline, refusal--> away

Rule: an answer belongs to the generation (core/response_cache/redis_entries.py) in which it was looked up, so an
invalidation counts everywhere as soon as Redis has it. Invariant: none that is invalid returns, even after an outage
(CX20), and nothing here fails a request (test_redis_answers.py, test_redis_answer_outages.py) or delays it much beyond
`timeout_s`. Bounds: FINDS_MAX look-ups at once, and those of WaitingAnswers. Source: CR11 to CR14.
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
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Histogram, Sample, samples, values
from ranvier_py.core.redis_commands import BEARABLE, Command, RedisCommands, RedisFailure, RedisRefusal
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.invalidations import VoidScope
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
from ranvier_py.core.response_cache.waiting_answers import QueuedAnswer, WaitingAnswers

log = logging.getLogger(__name__)

LATENCY_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
FINDS_MAX = 256
READERS = 2  # round trips for look-ups at the same time
PATIENCE = 1.1  # a request waits for its look-up for at most this many deadlines of a command
BATCH_MAX, BATCH_BYTES_MAX = 16, 4 << 20  # commands, and bytes of entries, in one round trip
LONG_BYTES = 1 << 20  # after an entry of so many others have their turn: reading one of 4 MiB takes 10 ms
TICK_S = 1.0
SWAPS_MAX = 5  # tries to add an invalidation while other nodes do so, too; then everything is invalidated
PROBE_MS = 60_000  # time to live of the key that is written only to see whether Redis takes writes
KNOWN_MAX, BEGUN_MAX = 16, 4096


class LookUp:
    """One request's look-up.

    Attributes:
        found: the answer, if there is one.
        is_over: Redis answered, or need not be asked; if it is False at the end, the request looks in memory.
    """

    __slots__ = ("done", "found", "is_over", "key", "max_age_s")

    def __init__(self, key: bytes, max_age_s: float) -> None:
        self.key, self.max_age_s = key, max_age_s
        self.found: StoredAnswer | None = None
        self.is_over = False
        self.done = trio.Event()


class RedisAnswers:
    """Implements AnswersElsewhere with Redis.

    Attributes:
        sharing: whether Redis is used now.
        memory: the answers while Redis is away; None if the operator wants none then.
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
        self._known = deque[str]((), KNOWN_MAX)  # ids of generations that this node has used
        self._changed_at = -inf  # when this node last learned of another generation or invalidation
        self._refused = BoundedDict[bytes, None](BATCH_MAX)  # credentials whose answers are void
        self._is_owed = False
        self._outage = 0  # number of outages so far: a reply to a question from before one is not used
        self._server_ms = 0.0  # Redis's clock when ours was 0
        self._waiting = WaitingAnswers()
        self._begun = BoundedDict[bytes, Generation | None](BEGUN_MAX)  # by key, for answers that engines generate now
        self._asked = deque[LookUp]()
        self._finding = 0  # look-ups that a reader has taken up
        self._tick_at = self._retry_at = -inf
        self._due, self._asked_due = trio.Event(), trio.Event()

    def set_options(self, responses: ResponseCacheOptions) -> None:
        """Use these options from now on. Entries in Redis keep their expiry, but are not found beyond the new one."""
        if responses.ttl_s != self.responses.ttl_s:
            self._written = ExpiringSum(responses.ttl_s)
        self.responses = responses

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

    def keep(self, key: bytes, answer: StoredAnswer, asked_at: float = inf) -> None:
        if not self.sharing:
            if self.memory is not None:
                self.memory.keep(key, answer)
        elif self._begun.get(key) is None and asked_at <= self._changed_at:
            self.counters.dropped += 1  # it may have been invalidated since
        elif answer.size > self._options.bytes_max:
            self.counters.too_large += 1
        elif self._waiting.add(key, answer, self._begun.pop(key, self._generation)):
            self._due.set()
        else:
            self.counters.dropped += 1
        self.counters.waiting = len(self._waiting)

    async def _look_up(self, batch: Sequence[LookUp]) -> None:
        """Look up a batch in one round trip; in two if the generation has changed."""
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
        current = self._generation  # another one voids what is read meanwhile
        for each, reply in zip_longest(batch, data, fillvalue=b""):
            assert isinstance(each, LookUp)
            each.is_over = True
            if generation is not None and self._generation is current:
                each.found = self._read(each.key, reply, generation, each.max_age_s)
            if isinstance(reply, bytes) and len(reply) > LONG_BYTES:
                await trio.lowlevel.checkpoint()

    def _read(self, key: bytes, data: object, generation: Generation, max_age_s: float) -> StoredAnswer | None:
        now, most = time.monotonic(), self._options.bytes_max
        if data == b"":
            return None
        server_ms = self._server_ms + 1000 * now
        found = answer_in(key, data, generation, now, server_ms, most) if isinstance(data, bytes) else None
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

    async def invalidate(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> int | None:
        """Invalidate answers; what Redis can't take now is owed. Returns how many: of all, those that this node wrote;
        of a part None, since only a search could count it; if owed, those in memory."""
        before = inf if older_than_s is None else time.monotonic() - older_than_s
        scope = VoidScope(model or "", tenant or b"")
        self._waiting.void(scope, before)
        self.counters.waiting = len(self._waiting)
        cleared = self.memory.void(scope, before) if self.memory is not None else 0
        is_all = model is None and tenant is None and older_than_s is None
        written = self._written.total(time.monotonic())[0]
        is_done = self.sharing and await (self._renew() if is_all else self._void(model, tenant, older_than_s))
        if not is_done:
            self._is_owed, self._tick_at = True, -inf
            self._due.set()
            return cleared
        return cleared + written if is_all else None

    def refuse(self, credential: bytes) -> None:
        self._refused[credential] = None
        self._due.set()

    async def _void(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> bool:
        """Add an invalidation to those in Redis; if it takes none, renew the generation. Whether Redis has it."""
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
            if isinstance(replies[0], RedisRefusal):  # no room, or scripts are not allowed
                break
        return await self._renew()

    async def _begin(self) -> bool:
        """Make a generation if there is none, or use that of a node that was faster. Returns whether Redis is there."""
        raised = new_generation(self._rng)
        replies = await self._send("delete", ("SET", self._generation_key, raised.raw, "NX"), self._generation_read())
        found = generation_in(replies[1]) if replies is not None else None
        if found is None:
            return replies is not None and await self._renew()
        self.counters.generations += found.id == raised.id
        self._use(found)
        return True

    async def _renew(self) -> bool:
        """Raise the generation for all; without room for it delete it: nothing is found then. Whether that worked."""
        raised = new_generation(self._rng)
        replies = await self._send("delete", ("SET", self._generation_key, raised.raw))
        if replies is None:
            return False
        self._written.clear()
        if not isinstance(replies[0], RedisRefusal):
            self.counters.generations += 1
            self._use(raised)
            return True
        self._use(None)
        return await self._send("delete", ("DEL", self._generation_key)) is not None

    async def run(self) -> None:
        """Run for ever."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow)
                for _ in range(READERS):
                    nursery.start_soon(self._serve_look_ups)
        finally:
            self._commands.close_idle()

    async def _serve_look_ups(self) -> None:
        """Serve all look-ups that came during the last round trip in one, for ever: the trip is most of the cost."""
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
        """Follow Redis as it comes and goes, with its clock and generation, and write waiting answers, for ever."""
        while True:
            await self._round()

    async def _round(self) -> None:
        now = time.monotonic()
        due_at = self._tick_at if self.sharing else self._retry_at
        if self._refused:
            await self.invalidate(None, self._refused.popitem()[0], None)
        elif now >= due_at:
            await (self._tick() if self.sharing else self._greet())
        elif self.sharing and self._waiting and self._generation is not None:
            await self._write(self._generation)
        else:
            with trio.move_on_after(due_at - now):
                await self._due.wait()
            self._due = trio.Event()

    async def _greet(self) -> None:
        """Start sharing if Redis answers, takes writes, and has no invalidated answer that could be found: the
        generation is raised, unless another node has done so, and what memory had is dropped (CX20)."""
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
            self.memory.void()
        log.info(event("response_cache.shared", store=self._commands.place))

    async def _tick(self) -> None:
        """Update Redis's clock and the generation while no request does, and settle an owed invalidation."""
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
        """Write the oldest answers of the queue, as many as fit in one round trip. Those refused for want of room (OOM)
        are not kept: Redis is not away."""
        batch: list[tuple[bytes, QueuedAnswer, int]] = []
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
        """Return the replies; None if the exchange failed, so that Redis is away from now on."""
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
        """Start an outage, unless one has begun since the failed exchange did: `outage` is the number at that time."""
        self.errors[failure.kind] += 1
        if outage != self._outage:
            return
        self._retry_at = time.monotonic() + self._options.retry_s
        if failure.why != self.trouble:
            log.warning(event("response_cache.alone", store=self._commands.place, why=failure.why))
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
        """Use the generation that Redis has now; if it has none, make one soon."""
        found = generation_in(raw)
        if found is not None:
            self._use(found)
        else:
            self._use(None)
            self._tick_at = -inf
            self._due.set()
        return found

    def _use(self, generation: Generation | None) -> None:
        was = self._generation
        if generation is not None and (was is None or was.id != generation.id):
            self._known.append(generation.id)
        if generation != was:
            self._changed_at = time.monotonic()
        self._generation = generation

    def _set_clock(self, reply: object) -> None:
        """Learn Redis's clock from the reply to TIME."""
        if isinstance(reply, tuple) and len(reply) == 2 and all(type(each) is int for each in reply):
            self._server_ms = 1000 * reply[0] + reply[1] / 1000 - 1000 * time.monotonic()

    @property
    def fallback_active(self) -> bool:
        return not self.sharing and self.memory is not None

    def view(self) -> Mapping[str, Any]:
        """For /admin/response-cache/stats. While sharing it counts what this node wrote and has not expired."""
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

    def metrics(self) -> Iterator[Sample]:
        """Yield Continuum's metrics under our prefix (CR22), and our own."""
        active, idle = self._commands.active, self._commands.idle
        yield Sample("cache_redis_connections_active", "gauge", "Connections to Redis for answers, in use.", active)
        yield Sample("cache_redis_connections_idle", "gauge", "Connections to Redis for answers, idle.", idle)
        words = "Seconds of the response cache's round trips to Redis."
        for operation, took_s in self.latency.items():
            yield Sample("cache_redis_latency_seconds", "histogram", words, took_s, {"operation": operation})
        for kind, count in self.errors.items():
            yield Sample("cache_redis_errors", "counter", "Round trips for answers that failed.", count, {"type": kind})
        yield Sample("cache_fallback_active", "gauge", "1 while memory replaces a lost Redis.", self.fallback_active)
        yield from samples("response_cache_redis", self.counters)
