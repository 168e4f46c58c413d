"""The index that several routers share through Redis, as one router sees it: what to say, what to ask, when to doubt.

Each router hears its own event sources and keeps its own index (`kv_index`), with or without Redis. What it hears it
also writes there, and for prefixes that requests name it asks there what the others heard. So when Redis is away every
router goes on with what it hears itself, and only what others heard is missing (resolution CX21).

    away --hello answered--> sharing --error, deadline, too much unsaid--> away (tries again, 1 s doubling to 30 s)
                             sharing --another generation, clear--> away, at once anew

Rules: on the way back from away the generation that was current is ended, unless another router did, for what this one
could not say is missing in it (CX20); then each writes anew what it holds and whose stream stands. A clear ends it too,
and takes what others heard before it out of their own indexes. A stream that begins anew voids what was said of its
backend; who hears that backend without a gap says it again. One job at a time: whoever does the I/O takes `next_job`
and comes back with `done` or `failed`. What came of a job begun before the router was away, or cleared, is nothing.
Invariant: `pending` is empty while away; an answer never contradicts what this router heard after it was asked for.
Bounds: PENDING_MAX writes wait, more is as if Redis were away; questions and answers have theirs (`shared_answers`).
Cost: 5 us an event, of which half when it is said; 1 us a prefix that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple, TypeVar

from ranvier_py.core.engine_cache.prefix_index import shared_calls as words
from ranvier_py.core.engine_cache.prefix_index.prefix_index import (
    PREFIX_CHARACTERS_MAX,
    TOKENS_MAX,
    Entry,
    IndexEvent,
    Kind,
    KvIndex,
)
from ranvier_py.core.engine_cache.prefix_index.shared_answers import NOTHING, SharedAnswers, Told
from ranvier_py.core.engine_cache.prefix_index.shared_calls import BadReply, Call, Said, Write
from ranvier_py.core.engine_cache.prefix_index.shared_clock import RedisClock
from ranvier_py.core.ids import BackendId

PENDING_MAX = 16_384

WRITES_A_CALL = 64  # half a millisecond of Redis
QUESTIONS_A_CALL = 16
CALLS_MAX = 8  # of each kind in one job
ANEW_A_JOB = 128  # of what is said anew: 0.4 ms of the event loop
ANEW_INTERVAL_S = 0.01

GATHER_S = 0.005  # events wait so long for more, so that a round trip is worth it
TICK_S = 1.0  # expired entries, other routers' voids; an idle connection that broke is noticed
RETRY_MIN_S, RETRY_MAX_S = 1.0, 30.0  # 30 s is Continuum's interval of health probes (CR13)
GREET_INTERVAL_S = 0.1  # between two hellos, should someone change the generation all the time

Item = TypeVar("Item")


class Job(NamedTuple):
    """Calls to be made in this order over one connection. `hello`: a lost connection may be made anew for it."""

    calls: tuple[Call, ...]
    hello: bool = False
    questions: tuple[tuple[str, ...], ...] = ()
    clears: int = 0


@dataclass(slots=True)
class SharedCounts:
    """Since start."""

    applied: int = 0  # writes that Redis took
    refused: int = 0  # that it knew better
    dropped: int = 0  # that waited when Redis went away: they are in our own index
    said_anew: int = 0
    asked: int = 0
    answered: int = 0  # with at least one backend
    garbage: int = 0  # entries in Redis or its answers that can't be read
    expired: int = 0
    evicted: int = 0  # for want of room
    generations_ended: int = 0
    outages: int = 0
    connection: int = 0  # errors by kind
    timeout: int = 0
    other: int = 0


class SharedIndex:
    """State: away or sharing, what is to be said and asked, and answers.

    Args:
        names: this router's own sources, by what all routers call their backends.
        find: the backend that another router's name means here, if any.
        stands: whether our stream of this backend stands, so that what our index has of it is so.
    """

    def __init__(
        self,
        index: KvIndex,
        names: Mapping[BackendId, str],
        *,
        find: Callable[[str], BackendId | None],
        stands: Callable[[BackendId], bool],
        rng: Random,
    ) -> None:
        self.counts = SharedCounts()
        self.sharing = False
        self.generation = 0  # the last that was current; 0: none yet
        self.rows = 0  # entries in Redis at the last tick, with removals that are remembered
        self.answers = SharedAnswers(self._wake)
        self.trouble = ""  # why Redis is away
        self.clock = RedisClock()
        self.poke: Callable[[], object] = lambda: None  # called when `wait_s` became shorter
        self._index = index
        self._names = names
        self._ids = {name: backend for backend, name in names.items()}
        self._find = find
        self._stands = stands
        self._rng = rng
        self._job: Job | None = None
        self._clears = self._clears_done = 0
        self._pending: dict[tuple[str, str], Write] = {}
        self._pending_at = 0.0
        self._anew: list[tuple[str, BackendId]] = []  # newest last
        self._anew_at = 0.0
        self._voids: dict[str, int] = {}
        self._greeted = 0  # sequence
        self._tick_at = self._retry_at = self._shared_at = -inf
        self._retry_s = RETRY_MIN_S

    @property
    def waiting(self) -> int:
        """Entries that are still to be said."""
        return len(self._pending) + len(self._anew)

    # --- what this router hears -------------------------------------------------------------------------------------

    def heard(
        self, backend: BackendId, event: IndexEvent, before: Entry | None, after: Entry | None, now: float
    ) -> None:
        """Our own source said this; `before` and `after` is what our own index had of it."""
        if not self.sharing or not event.prefix or len(event.prefix) > PREFIX_CHARACTERS_MAX:
            return
        tokens = event.tokens if event.tokens is not None else before.tokens if before is not None else -1
        if tokens > TOKENS_MAX:
            return
        if after is not None:
            verb = words.VERB_OF[after.storage]
        elif event.kind is Kind.PURGED or event.kind is Kind.EVICTED:
            settings = self._index.settings
            cools = event.kind is Kind.EVICTED and settings.offloading and settings.eviction_is_offload
            verb = words.COOL if cools else words.REMOVED
        else:
            return
        self.answers.contradict(event.prefix, backend)
        self._say(event.prefix, self._names[backend], verb, tokens, now)

    def began(self, backend: BackendId, now: float) -> None:
        """Our stream of this backend began anew: nobody knows what it said meanwhile (CX18)."""
        if not self.sharing:
            return
        name = self._names[backend]
        for key in [key for key in self._pending if key[1] == name]:
            del self._pending[key]
        self.answers.contradict_all(backend)
        self._void(name, now)

    def clear(self, now: float) -> None:
        """An operator wants all forgotten. Our own index was cleared already."""
        self._clears += 1
        if self.sharing:
            self._leave()
            self._retry_at = now
        self._wake()

    def _wake(self) -> None:
        self.poke()

    def _void(self, name: str, now: float) -> None:
        self._say("", name, words.VOID, 0, now)
        self._voids[name] = self._pending["", name].sequence

    def _say(self, prefix: str, name: str, verb: str, tokens: int, now: float) -> None:
        """Later words about the same replace earlier ones that are not said yet."""
        earlier = self._pending.pop((prefix, name), None)
        if earlier is not None:
            if verb == words.COOL:
                verb = words.WARM if earlier.verb == words.HOT else earlier.verb
            if tokens < 0:
                tokens = 0 if earlier.verb == words.REMOVED else earlier.tokens
        if not self._pending:
            self._pending_at = now
            self.poke()
        sequence = self.clock.sequence(now)
        self._pending[prefix, name] = Write(prefix, name, sequence, verb, tokens, self._index.settings.ttl_s)
        if len(self._pending) > PENDING_MAX:
            self._away("too much is unsaid", now)

    # --- what requests ask ------------------------------------------------------------------------------------------

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, Told]:
        """What others said of this prefix; nothing while Redis is away. Asks anew, off the path, where that is due."""
        return self.answers.holders(prefix, now) if self.sharing else NOTHING

    def prepare(self, prefix: str, now: float) -> bool:
        """Ask where that is due. Returns whether an answer is worth waiting for."""
        self.holders(prefix, now)
        return self.sharing and self.answers.awaited(prefix)

    # --- what is to be done -----------------------------------------------------------------------------------------

    def wait_s(self, now: float) -> float:
        """Seconds until there is a job, as far as one knows now."""
        if self._job is not None:
            return inf
        if not self.sharing:
            return max(0.0, self._retry_at - now)
        if self.answers.waiting or len(self._pending) >= WRITES_A_CALL:
            return 0.0
        at = self._tick_at + TICK_S
        if self._pending:
            at = min(at, self._pending_at + GATHER_S)
        if self._anew:
            at = min(at, self._anew_at + ANEW_INTERVAL_S)
        return max(0.0, at - now)

    def next_job(self, now: float) -> Job | None:
        """What is to be done now; `done` or `failed` has to follow."""
        if self.wait_s(now) > 0:
            return None
        if not self.sharing:
            clear = self._clears > self._clears_done
            self._job = Job((words.hello(self.generation, clear),), True, (), self._clears)
            return self._job
        calls = self._writes(now)
        asked = self.answers.take(CALLS_MAX * QUESTIONS_A_CALL)
        questions = tuple(tuple(piece) for piece in pieces(asked, QUESTIONS_A_CALL))
        calls += [words.ask(self.generation, piece) for piece in questions]
        self.counts.asked += len(asked)
        if now >= self._tick_at + TICK_S:
            self._tick_at = now
            calls.append(words.tick(self.generation))
        self._job = Job(tuple(calls), False, questions, self._clears) if calls else None
        return self._job

    def _writes(self, now: float) -> list[Call]:
        """What is pending, oldest first, then what is to be said anew."""
        keys = [key for key, _ in zip(self._pending, range(CALLS_MAX * WRITES_A_CALL), strict=False)]
        said = [self._pending.pop(key) for key in keys]
        self._pending_at = now
        if self._anew and not self._pending and now >= self._anew_at + ANEW_INTERVAL_S:
            self._anew_at = now
            said += self._said_anew(frozenset(keys), now)
        settings = self._index.settings
        return [
            words.write(self.generation, settings.entries_max, settings.ttl_s, piece)
            for piece in pieces(said, WRITES_A_CALL)
        ]

    def _said_anew(self, said: frozenset[tuple[str, str]], now: float) -> list[Write]:
        """What our index holds by a stream that stands is so at this moment, but ends when it would have ended."""
        found = []
        for _ in range(min(ANEW_A_JOB, len(self._anew))):
            prefix, backend = self._anew.pop()
            entry, name = self._index.peek(prefix, backend), self._names[backend]
            if entry is None or entry.until <= now or (prefix, name) in said or not self._stands(backend):
                continue
            verb, left_s = words.VERB_OF[entry.storage], entry.until - now
            found.append(Write(prefix, name, self.clock.sequence(now), verb, entry.tokens, left_s))
        self.counts.said_anew += len(found)
        return found

    # --- what came of it --------------------------------------------------------------------------------------------

    def done(self, job: Job, replies: Sequence[object], asked: float, answered: float) -> bool:
        """Redis replied, between two moments. False: no more is to be expected of this connection."""
        self._job = None
        try:
            self._take(job, replies, asked, answered)
        except BadReply as error:
            self._fail("other", f"a reply that is none: {error}", answered)
            return False
        return True

    def failed(self, job: Job, kind: str, why: str, now: float) -> None:
        """`kind` is connection, timeout or other; the connection is gone."""
        assert job is self._job
        self._job = None
        self._fail(kind, why, now)

    def _take(self, job: Job, replies: Sequence[object], asked: float, answered: float) -> None:
        if len(replies) != len(job.calls):
            raise BadReply("too few")
        states = [words.state_of(reply) for reply in replies]
        self.clock.learn(states[0].now, asked, answered)
        if job.hello:
            self._greet(job, states[0], replies[0], answered)
        elif not self.sharing:  # it was begun before
            return
        elif any(state.generation != self.generation for state in states):
            self._leave()
            self._retry_at = answered + GREET_INTERVAL_S
        else:
            self._read(job, replies, answered)

    def _greet(self, job: Job, state: words.State, reply: object, now: float) -> None:
        ours, garbage = words.counts_of(reply, 2)
        if state.generation == 0:
            raise BadReply("no generation")
        is_new_here = self.generation == 0
        self.counts.generations_ended += ours and not is_new_here
        self.counts.garbage += garbage
        if self._clears_done == job.clears and state.cleared:  # others cleared; what we cleared is gone already
            self._index.forget_before(self.clock.moment(state.cleared))
        self._clears_done = job.clears
        self.generation = state.generation
        if self._clears != job.clears:  # cleared meanwhile: once more
            self._retry_at = now
            return
        self.sharing, self.trouble, self._shared_at = True, "", now
        self._greeted = self.clock.sequence(now)
        self._tick_at = now
        for name in self._ids if is_new_here else ():  # what an earlier life of ours said, no stream vouches for
            self._void(name, now)
        self._anew = [key for key in self._index.pairs() if self._stands(key[1])]

    def _read(self, job: Job, replies: Sequence[object], now: float) -> None:
        questions = iter(job.questions)
        for call, reply in zip(job.calls, replies, strict=True):
            if call.script == "write":
                applied, refused, garbage, expired, evicted = words.counts_of(reply, 5)
                self.counts.applied += applied
                self.counts.refused += refused
                self.counts.evicted += evicted
            elif call.script == "ask":
                (garbage,), expired = words.counts_of(reply, 1), 0
                asked = next(questions)
                answers, bad = words.answers_of(reply, len(asked))
                garbage += bad
                for prefix, said in zip(asked, answers, strict=True):
                    self._answered(prefix, said, now)
            else:
                self.rows, expired, garbage = words.counts_of(reply, 3)
                self._voided(words.voids_of(reply))
            self.counts.expired += expired
            self.counts.garbage += garbage

    def _answered(self, prefix: str, said: Iterable[Said], now: float) -> None:
        told: dict[BackendId, Told] = {}
        for one in said:
            backend = self._find(one.backend)
            unsaid = (prefix, one.backend) in self._pending or ("", one.backend) in self._pending
            until = min(self.clock.moment(one.ends), now + self._index.settings.ttl_s)
            if backend is not None and not unsaid and until > now:
                told[backend] = Told(Entry(one.tokens, one.storage, until), self.clock.moment(one.sequence))
        self.counts.answered += bool(told)
        self.answers.answered(prefix, told, now)

    def _voided(self, voids: Mapping[str, int]) -> None:
        """Others lost a backend's stream: what we hear of it without a gap we say again."""
        affirmed = []
        for name, backend in self._ids.items():
            sequence = voids.get(name, 0)
            if sequence > max(self._greeted, self._voids.get(name, 0)) and self._stands(backend):
                self._voids[name] = sequence
                affirmed.append(backend)
        if affirmed:
            self._anew += [key for key in self._index.pairs() if key[1] in affirmed]
            del self._anew[: -self._index.settings.entries_max]

    def _fail(self, kind: str, why: str, now: float) -> None:
        setattr(self.counts, kind, getattr(self.counts, kind) + 1)
        self._away(why, now)

    def _away(self, why: str, now: float) -> None:
        """Redis is as good as gone: go on alone, and try again later."""
        if self.sharing:
            self.counts.outages += 1
            if now - self._shared_at >= RETRY_MAX_S:
                self._retry_s = RETRY_MIN_S
        self.trouble = why
        self._leave()
        self._retry_at = now + self._retry_s * (1 + self._rng.random()) / 2
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        self.poke()

    def _leave(self) -> None:
        """Nothing that is under way counts any more; all that is unsaid is in our own index."""
        self.sharing = False
        self.counts.dropped += len(self._pending)
        self._pending.clear()
        self.answers.clear()
        self._anew.clear()
        self._voids.clear()


def pieces(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
