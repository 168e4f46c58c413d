"""Shares the prefix index of several routers through Redis: decides what one router writes and asks there. Pure.

Rule: while Redis is reachable a router mirrors its index (`KvIndex`) into its own hashes there, and reads the others'
for the prefixes that requests name; while Redis is away it goes on with its own. Invariant: a request waits 5 ms for it
at most (test_redis_index.py). A generation is one connection of a router: only those whose counter advances, by this
router's clock, are believed; after an outage it writes all under a new one. Bounds: PENDING_MAX changes wait, more
count as if Redis were away; QUESTIONS_MAX, PREFIXES_MAX answers (those asked for longest ago are dropped), ROUTERS_MAX.
Source: Continuum Router, «KV cache optimization», tier 4 (CR19, CR20).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import NamedTuple

from ranvier_py.core.engine_cache.prefix_index.prefix_index import NOTHING, TOKENS_MAX, KvIndex
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.redis_commands import Command
from ranvier_py.core.routing.placement.kv_score import IndexedPrefix

PENDING_MAX = 65_536
WRITES_A_JOB = 256
QUESTIONS_A_JOB = 64
QUESTIONS_MAX = 1024
PREFIXES_MAX = 4096
ROUTERS_MAX = 64

GATHER_S = 0.005  # between two jobs of writes, so that each round trip carries several
TICK_S = 1.0
LIVE_S = 5.0  # a generation whose counter stood still for so long is not believed
FORGET_S = 60.0  # ... and is removed from the list
RETRY_MIN_S, RETRY_MAX_S = 1.0, 30.0  # 30 s is Continuum's interval of health probes (CR13)

ASK_INTERVAL_S = 0.1  # as Continuum's `prepare` (CR19)
ANSWER_LIFE_S = 1.0
"""For up to a second requests may go to a backend that has just evicted the prefix. A shorter life would lose what
others know of every prefix that comes less than ten times a second."""

ENTRY = re.compile(rb"(\d{1,10}) ([hw])\Z")
TOKEN = re.compile(rb"[0-9a-f]{16}\Z")


class BadReply(ValueError):
    """Redis' reply does not fit what was asked."""


class RedisJob(NamedTuple):
    """Commands for Redis in one pipeline, in this order; their replies go to `done`.

    First come the writes, then one HGETALL for each prefix and generation that is asked, then the commands of a tick.
    """

    generation: str
    commands: tuple[Command, ...]
    is_hello: bool = False
    is_tick: bool = False
    prefixes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    clear: str = ""


@dataclass(slots=True)
class SharedCounters:
    written: int = counter("Entries of the prefix index written to Redis.")
    removed: int = counter("Entries of the prefix index removed from Redis.")
    dropped: int = counter("Changes of the prefix index dropped because Redis went away before they were written.")
    asked: int = counter("Prefixes that the index in Redis was asked about.")
    answered: int = counter("Answers of the index in Redis that named a backend.")
    unasked: int = counter("Prefixes that the index in Redis was not asked about: too many questions waited.")
    garbage: int = counter("Entries of the prefix index in Redis that can't be read.")
    lost: int = counter("Times that Redis had lost entries of the prefix index.")
    cleared: int = counter("Times that an operator of another router cleared the prefix index.")
    outages: int = counter("Times that the Redis of the prefix index went away.")


@dataclass(slots=True)
class PrefixAnswer:
    """What other routers wrote about one prefix."""

    asked_at: float = -inf
    answered_at: float = -inf
    entries: dict[BackendId, IndexedPrefix] = field(default_factory=dict)
    changed_since: dict[BackendId, None] = field(default_factory=dict)  # here, since this router asked


class SharedIndex:
    """Holds the state (away or sharing), what is to be written and asked, and the answers. In Redis, P being `root`:

        P<generation>:<prefix>   hash: backend -> "<tokens> <h|w>", hot or warm. Expires after the time to live
        Prouters                 hash: generation -> a counter that its router increments every TICK_S
        Pcleared                 text: replaced by another one with each clear by an operator

    Args:
        root: the beginning of every key.
        names: this router's own sources, with the names that all routers use for their backends.
        find: returns the backend that another router's name means here, if any.
        stands: whether our stream of this backend is up, so that its entries in our index can be trusted.
    """

    def __init__(
        self,
        index: KvIndex,
        root: str,
        names: Mapping[BackendId, str],
        *,
        find: Callable[[str], BackendId | None],
        stands: Callable[[BackendId], bool],
        rng: Random,
    ) -> None:
        self.counters = SharedCounters()
        self.errors = {"connection": 0, "timeout": 0, "other": 0}  # as Continuum counts them
        self.sharing = False
        self.generation = ""
        self.trouble = ""  # why Redis is away
        self.poke: Callable[[], object] = lambda: None  # called when `wait_s` became shorter
        self._root = root
        self._index = index
        self._names = names
        self._find = find
        self._stands = stands
        self._rng = rng
        self._job: RedisJob | None = None
        self._pending: dict[tuple[str, BackendId], None] = {}
        self._anew: list[tuple[str, BackendId]] = []  # to be written under a new generation, newest last
        self._answers: OrderedDict[str, PrefixAnswer] = OrderedDict()
        self._questions: dict[str, None] = {}
        self._beat = 0
        self._beats: dict[str, tuple[bytes, float]] = {}  # other generations' counters, and since when they stand so
        self._cleared: bytes | None = None
        self._clear = ""  # to be written
        self._work_at = self._tick_at = self._retry_at = self._shared_at = -inf
        self._retry_s = RETRY_MIN_S
        index.on_change, index.shared, index.shared_view = self._changed, self.holders, self.view

    @property
    def waiting(self) -> int:
        """Number of entries that are still to be written."""
        return len(self._pending) + len(self._anew)

    def clear(self, now: float) -> None:
        """Forget all, for an operator, here and at the other routers. The caller has cleared our own index already."""
        self._clear = f"{self._rng.getrandbits(64):016x}"
        self._leave(now)
        self.poke()

    def _changed(self, prefix: str, backend: BackendId) -> None:
        """Note that our own index changed for this prefix and backend."""
        if not self.sharing or backend not in self._names:
            return
        known = self._answers.get(prefix)
        if known is not None:
            known.changed_since[backend] = None
            known.entries.pop(backend, None)
        if not self._pending:
            self.poke()
        self._pending[prefix, backend] = None

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, IndexedPrefix]:
        """Return what others wrote about this prefix; nothing while Redis is away. Asks anew if that is due."""
        if self.sharing and self._beats:
            self._ask(prefix, now)
        return self.view(prefix, now)

    def view(self, prefix: str, now: float) -> Mapping[BackendId, IndexedPrefix]:
        """Return what `holders` knows now, without asking anything."""
        known = self._answers.get(prefix) if self.sharing and self._beats else None
        return known.entries if known is not None and now < known.answered_at + ANSWER_LIFE_S else NOTHING

    def prepare(self, prefix: str, now: float) -> bool:
        """Ask if that is due. Returns whether an answer is under way and worth waiting for."""
        self.holders(prefix, now)
        known = self._answers.get(prefix)
        return self.sharing and known is not None and known.answered_at < known.asked_at

    def _ask(self, prefix: str, now: float) -> None:
        known = self._answers.get(prefix)
        if known is not None and now - known.asked_at < ASK_INTERVAL_S:
            return
        if known is None:
            if len(self._answers) >= PREFIXES_MAX:
                self._answers.popitem(last=False)
            known = self._answers[prefix] = PrefixAnswer()
        self._answers.move_to_end(prefix)
        if len(self._questions) >= QUESTIONS_MAX:
            self.counters.unasked += 1
            return
        known.asked_at = now
        known.changed_since.clear()
        if not self._questions:
            self.poke()
        self._questions[prefix] = None

    def wait_s(self, now: float) -> float:
        """Seconds until there is a job, as far as is known now."""
        if self._job is not None:
            return inf
        if not self.sharing:
            return max(0.0, self._retry_at - now)
        if self._questions:
            return 0.0
        at = self._tick_at + TICK_S
        if self._pending or self._anew:
            at = min(at, self._work_at + GATHER_S)
        return max(0.0, at - now)

    def next_job(self, now: float) -> RedisJob | None:
        """Return the job that is due now; the caller must follow up with `done` or `failed`."""
        if self.sharing and len(self._pending) > PENDING_MAX:
            self._away("too much is to be written", now)
        if self.wait_s(now) > 0:
            return None
        self._job = self._next(now) if self.sharing else self._hello()
        return self._job

    def _hello(self) -> RedisJob:
        routers, cleared = f"{self._root}routers", f"{self._root}cleared"
        generation = f"{self._rng.getrandbits(64):016x}"
        commands: list[Command] = [("HDEL", routers, self.generation)] if self.generation else []
        if self._clear:
            commands += [("DEL", routers), ("SET", cleared, self._clear)]  # nothing written before is believed
        commands += [("HSET", routers, generation, 1), ("HGETALL", routers), ("GET", cleared)]
        return RedisJob(generation, tuple(commands), is_hello=True, clear=self._clear)

    def _next(self, now: float) -> RedisJob:
        commands = self._writes(now) if now >= self._work_at + GATHER_S else []
        prefixes = tuple(name for name, _ in zip(self._questions, range(QUESTIONS_A_JOB), strict=False))
        for prefix in prefixes:
            del self._questions[prefix]
        others = tuple(one for one, (_, at) in self._beats.items() if now < at + LIVE_S) if prefixes else ()
        commands += [("HGETALL", f"{self._root}{other}:{prefix}") for prefix in prefixes for other in others]
        self.counters.asked += len(prefixes)
        is_tick = now >= self._tick_at + TICK_S
        if is_tick:
            self._tick_at = now
            routers = f"{self._root}routers"
            dead = [one for one, (_, at) in self._beats.items() if now >= at + FORGET_S]
            commands += [("HDEL", routers, *dead)] if dead else []
            commands += [("HINCRBY", routers, self.generation, 1)]
            commands += [("HGETALL", routers), ("GET", f"{self._root}cleared")]
        return RedisJob(
            generation=self.generation,
            commands=tuple(commands),
            is_hello=False,
            is_tick=is_tick,
            prefixes=prefixes,
            others=others,
        )

    def _writes(self, now: float) -> list[Command]:
        """Write what changed, oldest first, then entries of a new generation whose stream is up."""
        self._work_at = now
        keys = [key for key, _ in zip(self._pending, range(WRITES_A_JOB), strict=False)]
        for key in keys:
            del self._pending[key]
        while self._anew and len(keys) < WRITES_A_JOB:
            key = self._anew.pop()
            if self._stands(key[1]) and self._index.peek(*key) is not None:
                keys.append(key)
        commands: list[Command] = []
        ttl_ms = round(1000 * self._index.settings.ttl_s)
        for prefix, backend in keys:
            entry, name = self._index.peek(prefix, backend), f"{self._root}{self.generation}:{prefix}"
            if entry is None:
                self.counters.removed += 1
                commands.append(("HDEL", name, self._names[backend]))
            else:
                self.counters.written += 1
                commands.append(("HSET", name, self._names[backend], f"{entry.tokens} {'hw'[entry.reload]}"))
                commands.append(("PEXPIRE", name, ttl_ms))
        return commands

    def done(self, job: RedisJob, replies: Sequence[object], now: float) -> bool:
        """Take Redis' replies. False: the connection is of no further use."""
        self._job = None
        try:
            if len(replies) != len(job.commands) or any(isinstance(reply, Exception) for reply in replies):
                raise BadReply("errors, or too few")
            if job.is_hello:
                self._greet(job, replies, now)
            elif self.sharing and job.generation == self.generation:  # else it belongs to an earlier generation
                self._read(job, replies, now)
        except BadReply as error:
            self._fail("other", f"a reply that is none: {error}", now)
            return False
        return True

    def failed(self, job: RedisJob, kind: str, why: str, now: float) -> None:
        """The job failed with the connection. `kind` is connection, timeout or other."""
        assert job is self._job
        self._job = None
        self._fail(kind, why, now)

    def _greet(self, job: RedisJob, replies: Sequence[object], now: float) -> None:
        self._beats.clear()
        is_new_here, self.generation = not self.generation, job.generation
        self._see(replies[-2], now)
        if job.clear:
            self._cleared = job.clear.encode()
            if self._clear == job.clear:
                self._clear = ""
        elif self._is_cleared(replies[-1]) and not is_new_here:
            self._index.clear()
        if self._clear:  # cleared again meanwhile: say hello once more
            self._retry_at = now
            return
        self.sharing, self.trouble, self._shared_at, self._tick_at, self._beat = True, "", now, now, 1
        self._anew = [key for key in self._index.pairs() if self._stands(key[1])]

    def _read(self, job: RedisJob, replies: Sequence[object], now: float) -> None:
        at = len(replies) - 3 * job.is_tick - len(job.prefixes) * len(job.others)
        for prefix in job.prefixes:
            self._answered(prefix, replies[at : at + len(job.others)], now)
            at += len(job.others)
        if not job.is_tick:
            return
        beat, routers, cleared = replies[-3:]
        self._beat += 1
        self._see(routers, now)
        if self._is_cleared(cleared):
            self.counters.cleared += 1
            self._index.clear()
            self._leave(now)
        elif beat != self._beat:
            self.counters.lost += 1
            self._leave(now)

    def _see(self, routers: object, now: float) -> None:
        """Note which generations exist, and whose counters have advanced."""
        found: dict[str, tuple[bytes, float]] = {}
        for name, beat in list(pairs_in(routers))[:ROUTERS_MAX]:
            other = name.decode(errors="replace")
            known = self._beats.get(other)
            if other != self.generation:
                found[other] = known if known is not None and known[0] == beat else (beat, now)
        self._beats = found

    def _is_cleared(self, reply: object) -> bool:
        """Whether an operator of another router has cleared since the last look."""
        if not isinstance(reply, bytes) or TOKEN.match(reply) is None or reply == self._cleared:
            return False
        self._cleared = reply
        return True

    def _answered(self, prefix: str, replies: Sequence[object], now: float) -> None:
        known, found = self._answers.get(prefix), dict[BackendId, IndexedPrefix]()
        if known is None:
            return
        for reply in replies:
            for name, text in pairs_in(reply):
                match = ENTRY.match(text)
                if match is None or int(match[1]) > TOKENS_MAX:
                    self.counters.garbage += 1
                    continue
                backend = self._find(name.decode(errors="replace"))
                # our own knowledge takes precedence over what others wrote
                if backend is None or backend in known.changed_since:
                    continue
                entry = IndexedPrefix(int(match[1]), match[2] == b"w", now + ANSWER_LIFE_S)
                # of two routers' entries the greater counts
                if backend not in found or entry.tokens > found[backend].tokens:
                    found[backend] = entry
        self.counters.answered += bool(found)
        known.answered_at, known.entries = now, found

    def _fail(self, kind: str, why: str, now: float) -> None:
        self.errors[kind] += 1
        self._away(why, now)

    def _away(self, why: str, now: float) -> None:
        """Treat Redis as gone: go on alone, and retry later."""
        if self.sharing:
            self.counters.outages += 1
            if now - self._shared_at >= RETRY_MAX_S:
                self._retry_s = RETRY_MIN_S
        self.trouble = why
        self._leave(now + self._retry_s * (1 + self._rng.random()) / 2)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        self.poke()

    def _leave(self, retry_at: float) -> None:
        """Drop all that is under way; whatever was not written is still in our own index."""
        self.sharing, self._retry_at = False, retry_at
        self.counters.dropped += len(self._pending)
        self._pending.clear()
        self._anew.clear()
        self._answers.clear()
        self._questions.clear()
        self._beats.clear()


def pairs_in(reply: object) -> Sequence[tuple[bytes, bytes]]:
    """Return the fields and values of a hash. Raises BadReply."""
    if not isinstance(reply, dict):
        raise BadReply("no hash")
    return [(name, value) for name, value in reply.items() if isinstance(name, bytes) and isinstance(value, bytes)]
