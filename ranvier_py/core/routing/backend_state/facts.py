"""Facts about backends, as all nodes share them; they spread as rows of a `join_table`.

Rules: of generations the greater count wins; of drains the order with the greater clock, which ends once no node has
had the backend for HELD_S. Verdicts and marks are never merged: a peer's "unhealthy" is a doubt, believed if two
observers have it within DOUBT_S or we saw a failure ourselves. No claim on a backend is taken until a peer has sent its
count. Facts of backends that are not ours wait until the operator adds them here, KEPT_S at most. Bounds: BACKENDS_MAX
backends; ours always fit, else the one that no node has had for longest is dropped. Observers are live peers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, inf
from random import Random
from typing import NamedTuple

from ranvier_py.core.mesh.join_table import JoinTable
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import rows_field
from ranvier_py.core.mesh.wire.frame import amount, bad
from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.backend_state.loads import BACKENDS_MAX, LOADS_KIND, FactCounters, Loads, PeerLoads
from ranvier_py.core.routing.processes.engine_names import MarksRead
from ranvier_py.core.routing.processes.several_processes import same_process

REPAIR_INTERVAL_S = 10.0  # everything known, to one random peer
ASK_S = 0.5  # before a missing count is asked for; doubled for each further question
HELD_S = 3 * REPAIR_INTERVAL_S  # without any peer that has the draining backend: its order ends
EVERYONE_MAX = 16  # further peers get facts through others
KEPT_S = 3600.0  # after the last registry lost the backend; a command that adds it may arrive that late
COUNT_MAX = 2**32 - 1  # of generations and drain clocks: the wire's limit
COUNT_STEP_MAX = 2**16  # most that one fact may raise a count: honest ones rise by one, and nobody may exhaust it
IDLE_S_MAX = 2**16 - 1
DOUBT_S = 3.0  # for two observers of one illness: Lifeguard's independent confirmation, applied to backends
WELL_S = 5.0  # a node that reaches no engine asks its peers again and again (`wanted`)
VERDICT_MAX = 3
FACTS_MAX = 512  # in a message, 24 kB: taking in one takes some 20 µs
GENERATION_BITS = 8  # bits of a generation in a route update


class Fact(NamedTuple):
    """What one observer knows of one backend."""

    backend: int  # key, u64
    generation: int  # u32: counts the processes of this backend that the cluster has seen
    started_at: float  # as the engine reports it, seconds; 0 when it reports nothing
    verdict: int  # u8: 0 unknown, 1 healthy, 2 unhealthy, 3 circuit open
    draining: bool
    drain_clock: int  # u32: the greater one decides about draining
    idle_s: int = 0  # u16, rounded up: seconds since any node, as far as the observer knows, had it in its registry
    identity: int = 0  # u64, as `totals` and `read_s`: the marks that the observer itself read last; 0: none
    totals: int = 0  # u64
    read_s: int = 0  # u16, rounded up: seconds since it read them


class Facts(NamedTuple):
    """What the sender knows. Empty: asks for all that the receiver knows."""

    facts: tuple[Fact, ...]


def read_fact(  # one for each column
    backend: int, generation: int, started_at: float, verdict: int, draining: int, clock: int, *more: int
) -> Fact:
    if verdict > VERDICT_MAX or draining > 1:
        bad("fact")
    idle_s, identity, totals, read_s = more
    return Fact(
        backend=backend,
        generation=generation,
        started_at=amount(started_at),
        verdict=verdict,
        draining=draining == 1,
        drain_clock=clock,
        idle_s=idle_s,
        identity=identity,
        totals=totals,
        read_s=read_s,
    )


class Verdict(IntEnum):
    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2
    CIRCUIT_OPEN = 3


ILL = (Verdict.UNHEALTHY, Verdict.CIRCUIT_OPEN)


class NewGeneration(NamedTuple):
    """A process that we did not know is behind this backend: the routes of the old one are void.

    `started_at` is its start as peers report it, 0 when they know none.
    """

    backend: int
    generation: int
    started_at: float = 0.0


class KnownStart(NamedTuple):
    """A peer reports the start of the process that has our generation, of which we know no start: see `begun`."""

    backend: int
    started_at: float


class DrainChange(NamedTuple):
    backend: int
    draining: bool


class Doubt(NamedTuple):
    """`observers` peers called this backend ill within DOUBT_S."""

    backend: int
    observers: int


FactChange = NewGeneration | KnownStart | DrainChange | Doubt


@dataclass(slots=True)
class KnownBackend:
    """What this node knows of one backend, from all observers."""

    generation: int = 1
    started_at: float = 0.0  # of its process, as the engine or a peer reports it; 0: not known
    counted: bool = False  # a peer has sent its count; before that, one number may stand for two processes
    verdict: Verdict = Verdict.UNKNOWN  # our own
    reading: MarksRead | None = None  # our own
    draining: bool = False
    drain_clock: int = 0


UNKNOWN = KnownBackend()  # stands for every backend that is not known; never changed


class LastHad:
    """When any node last had each backend that is not ours."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.oldest: list[tuple[float, int]] = []  # the same, in the order of these times

    def note(self, backend: int, at: float | None) -> None:
        """Note when a node had it; None: it is ours, or dropped."""
        before = self.at.pop(backend, None)
        if before is not None:
            del self.oldest[bisect_left(self.oldest, (before, backend))]
        if at is not None:
            self.at[backend] = at
            insort(self.oldest, (at, backend))


class MissingCounts:
    """The backends of which no peer has sent a count, and when peers are asked for these, ever more rarely."""

    def __init__(self) -> None:
        self.backends: dict[int, None] = {}
        self._ask_at = inf  # until there are peers
        self._asked = 0  # questions since the last newcomer

    @property
    def wake_at(self) -> float:
        """With peers."""
        return inf if not self.backends else 0.0 if self._ask_at == inf else self._ask_at

    def newcomer(self) -> None:
        self._asked, self._ask_at = 0, inf

    def is_due(self, now: float, rng: Random) -> bool:
        """Whether a peer is to be asked now; there is one."""
        if self._ask_at == inf:
            self._ask_at = now + ASK_S
        if now < self._ask_at or not self.backends:
            return False
        self._ask_at = now + doubled(ASK_S, self._asked, REPAIR_INTERVAL_S) * rng.uniform(0.8, 1.2)
        self._asked += 1
        return True


class Doubts:
    """When each peer last called a backend ill, and when it last called any healthy."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, float]] = {}  # by backend and session
        self.well: dict[int, float] = {}  # by session
        self.wanted = False  # peers are to be asked at once for all that they know, their verdicts as well

    def count(self, backend: int, now: float) -> int:
        """Return how many peers called this backend ill within DOUBT_S."""
        return sum(now - at <= DOUBT_S for at in self.of.get(backend, {}).values())

    def well_at(self, now: float) -> int | None:
        """Return the session of a peer that called a backend healthy within WELL_S."""
        return next((session for session, at in self.well.items() if now - at <= WELL_S), None)


class BackendFacts(JoinTable[int, Fact]):
    """One node's knowledge of all backends, by their key (`registry_sync`).

    `plane_of` returns how short and frequent messages reach a session.
    """

    kinds = (
        LOADS_KIND,
        Kind("backends", 49, Facts, (rows_field("<QIdBBIHQQH", FACTS_MAX, read_fact),)),
    )
    ROWS_MAX = FACTS_MAX
    REPEAT_S = REPAIR_INTERVAL_S
    EVERYONE_MAX = EVERYONE_MAX

    def __init__(
        self,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        plane_of: Callable[[int], Plane] = lambda _: Plane.DATAGRAM,
    ) -> None:
        super().__init__(outbox, rng, now)
        self.counters = FactCounters()
        self.changes: list[FactChange] = []  # drained by the owner after every call; at most two for each fact
        self.read: list[tuple[int, Fact]] = []  # by a peer's session, whose marks its facts have; drained likewise
        self.loads = PeerLoads(outbox, rng, self.counters, now, plane_of)
        self.backends: dict[int, KnownBackend] = {}  # by key; to be read alone
        self._had = LastHad()
        self.doubts = Doubts()
        self._answered: dict[int, None] = {}  # live peers that sent us facts, and were then sent all of ours
        self._missing = MissingCounts()

    def known(self, now: float) -> Sequence[Fact]:
        """Return all that is known, in the form sent to peers."""
        return self._rows(None, now)

    def observe(self, backend: int, verdict: Verdict, started_at: float, reading: MarksRead | None = None) -> None:
        """Note our own view of one of our backends; cheap when nothing changed."""
        known = self.backends.get(backend)
        if known is None:
            known = self._made(backend)
            self._changed[backend] = None
        elif backend in self._had.at:
            self._had.note(backend, None)
            self._changed[backend] = None
            if not known.counted:
                self._missing.backends[backend] = None
        if started_at and not known.started_at:
            known.started_at = started_at
            self._changed[backend] = None
        if verdict is not known.verdict:
            if verdict in ILL or known.verdict in ILL:
                self._changed[backend] = None
            known.verdict = verdict
        if reading is not known.reading:
            before, known.reading = known.reading, reading
            if reading is not None and (before is None or before.marks.identity != reading.marks.identity):
                self._changed[backend] = None

    def restarted(self, backend: int, started_at: float) -> int:
        """Count a restart that we saw. Returns the generation: the next one, unless a peer reported the same start."""
        known = self.backends.get(backend) or self._made(backend)
        same_start = started_at and known.started_at and same_process(started_at, known.started_at)
        if not same_start:
            known.generation = min(known.generation + 1, COUNT_MAX)
            known.started_at = started_at
            self._changed[backend] = None
        return known.generation

    def begun(self, backend: int, started_at: float) -> None:
        """Take over the start that a peer reported: it is of the process that we count, as are all claims of ours."""
        known = self.backends.get(backend)
        if known is not None and not known.started_at:
            known.started_at = started_at

    def drain(self, backend: int, draining: bool, *, clock: int = 0) -> None:
        """Note that the operator began or ended draining here. `clock`: of the order, from before a restart."""
        known = self.backends.get(backend) or self._made(backend)
        if known.draining is not draining or clock > known.drain_clock:
            known.draining = draining
            known.drain_clock = min(max(clock, known.drain_clock + (not clock)), COUNT_MAX)
            self._changed[backend] = None

    def drains(self, backend: int, now: float) -> bool:
        """Whether the backend drains by an order that still holds (HELD_S)."""
        return self.of(backend).draining and now - self._had.at.get(backend, now) <= HELD_S

    def left(self, backend: int, now: float) -> None:
        """Note that our registry has the backend no more."""
        if backend in self.backends:
            self.backends[backend].reading = None
            self._had.note(backend, now)
            self._missing.backends.pop(backend, None)

    def of(self, backend: int) -> KnownBackend:
        """Return what is known of a backend. The caller must neither change nor keep it."""
        return self.backends.get(backend, UNKNOWN)

    def generation_of(self, backend: int, low_bits: int) -> int:
        """Return the generation whose low bits an update carries: the nearest to ours. A later one is adopted.

        Above COUNT_MAX nothing is counted: what is returned then is no generation of ours, and the update is dropped.
        """
        generation = self.of(backend).generation
        ahead = (low_bits - generation) % (1 << GENERATION_BITS)
        if ahead == 0:
            return generation
        if ahead >= 1 << (GENERATION_BITS - 1):
            return generation + ahead - (1 << GENERATION_BITS)
        self._adopt(backend, min(generation + ahead, COUNT_MAX), 0.0)
        return generation + ahead

    @property
    def wake_at(self) -> float:
        if self.doubts.wanted:
            return 0.0
        return min(super().wake_at, self.loads.wake_at, self._missing.wake_at if self._peers else inf)

    def met(self, peers: LivePeers, now: float) -> None:
        self.loads.peers(peers.met)
        now_there = {peer.session for peer in peers.near}
        self._answered = {session: None for session in self._answered if session in now_there}
        if self._meet(peers.near, now):
            self.loads.newcomers()
            self._missing.newcomer()

    def forgotten(self, session: int, now: float) -> None:  # noqa: ARG002  # as of all machines
        self.loads.forget(session)
        self.doubts.well.pop(session, None)
        for observers in self.doubts.of.values():
            observers.pop(session, None)

    def tick(self, now: float) -> None:
        if now >= self._rounds.repeat_at:
            for backend in [backend for backend, had_at in self._had.at.items() if now - had_at > KEPT_S]:
                self._drop(backend)
            draining = {key: None for key, known in self.backends.items() if known.draining and key not in self._had.at}
            self._send(self._some(self._peers), self._rows(draining, now))
        super().tick(now)
        self.loads.tick(now)
        if self._peers and self._missing.is_due(now, self._rng):
            peer = self._rng.choice(self._peers)
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, Facts(())))
        if self.doubts.wanted:
            self.doubts.wanted = False
            for peer in self._some(self._peers):
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, Facts(())))

    def receive(self, peer: Peer, message: Facts | Loads, now: float) -> None:
        if isinstance(message, Loads):
            self.loads.receive(peer, message, now)
        elif not message.facts:
            self._send([peer], self._rows(None, now))
        else:
            for fact in message.facts:
                self._take_fact(peer, fact, now)
            # to a peer that sends facts for the first time: what we sent when we met may have come too early
            if peer.session not in self._answered and len(self._peers) <= EVERYONE_MAX:
                self._answered[peer.session] = None
                self._send([peer], self._rows(None, now))

    def _take_fact(self, peer: Peer, fact: Fact, now: float) -> None:
        self.counters.facts_received += 1
        ours, had_at = self.of(fact.backend), now - fact.idle_s
        if max(fact.generation - ours.generation, fact.drain_clock - ours.drain_clock) > COUNT_STEP_MAX:
            self.counters.facts_absurd += 1
            return
        self.read.append((peer.session, fact))
        known = self.backends.get(fact.backend)
        if known is None:
            if fact.idle_s > KEPT_S:
                return
            if not self._has_room(had_at):
                self.counters.dropped += 1
                return
            known = self.backends[fact.backend] = KnownBackend(fact.generation, fact.started_at)
            self._had.note(fact.backend, had_at)
            self._changed[fact.backend] = None
            self.changes.append(NewGeneration(fact.backend, fact.generation, fact.started_at))
        else:
            self._merge_generation(fact, known)
            if had_at > self._had.at.get(fact.backend, inf):
                self._had.note(fact.backend, had_at)
        known.counted = True
        self._missing.backends.pop(fact.backend, None)
        if fact.drain_clock > known.drain_clock or (
            fact.drain_clock == known.drain_clock and fact.draining > known.draining
        ):
            known.draining, known.drain_clock = fact.draining, fact.drain_clock
            self._changed[fact.backend] = None
            self.changes.append(DrainChange(fact.backend, fact.draining))
        if fact.verdict in ILL:
            self.doubts.of.setdefault(fact.backend, {})[peer.session] = now
            self.changes.append(Doubt(fact.backend, self.doubts.count(fact.backend, now)))
        else:
            self.doubts.of.get(fact.backend, {}).pop(peer.session, None)
            if fact.verdict == Verdict.HEALTHY:
                self.doubts.well[peer.session] = now

    def _merge_generation(self, fact: Fact, known: KnownBackend) -> None:
        """Merge: the greater number wins; of two processes with one number the one that started later gets the next."""
        both_known = bool(fact.started_at and known.started_at)
        same = both_known and same_process(fact.started_at, known.started_at)
        if fact.generation > known.generation:
            if same:  # the same process under a greater number
                known.generation = fact.generation
                self._changed[fact.backend] = None
                self.counters.facts_adopted += 1
            else:
                self._adopt(fact.backend, fact.generation, fact.started_at)
        elif both_known and not same:
            if fact.started_at > known.started_at:
                self._adopt(fact.backend, min(known.generation + 1, COUNT_MAX), fact.started_at)
            elif fact.generation == known.generation and known.counted:  # claims with it may be of either process
                self._adopt(fact.backend, min(known.generation + 1, COUNT_MAX), known.started_at)
            elif fact.generation == known.generation:
                known.generation = min(known.generation + 1, COUNT_MAX)
                self._changed[fact.backend] = None
        elif fact.generation == known.generation and fact.started_at and not known.started_at:
            self.changes.append(KnownStart(fact.backend, fact.started_at))

    def _adopt(self, backend: int, generation: int, started_at: float) -> None:
        known = self.backends.get(backend) or self._made(backend)
        known.generation, known.started_at = generation, started_at
        self.counters.facts_adopted += 1
        self._changed[backend] = None
        self.changes.append(NewGeneration(backend, generation, started_at))

    def _made(self, backend: int) -> KnownBackend:
        """Add a backend of ours of which no peer has sent a fact."""
        self._has_room(inf)
        known = self.backends[backend] = KnownBackend()
        self._missing.backends[backend] = None
        return known

    def _has_room(self, had_at: float) -> bool:
        """Whether one more backend fits, last had at `had_at`; if full, it replaces one that was last had earlier."""
        if len(self.backends) >= BACKENDS_MAX:
            if not self._had.oldest or self._had.oldest[0][0] >= had_at:
                return False
            self._drop(self._had.oldest[0][1])
            self.counters.dropped += 1
        return True

    def _drop(self, backend: int) -> None:
        self._had.note(backend, None)
        for known in (self.backends, self.doubts.of, self._changed):
            known.pop(backend, None)

    def _rows(self, keys: dict[int, None] | None, now: float) -> Sequence[Fact]:
        return [self._fact(backend, now) for backend in (self.backends if keys is None else keys)]

    def _message(self, rows: Sequence[Fact]) -> Facts:
        return Facts(tuple(rows))

    def _fact(self, backend: int, now: float) -> Fact:
        known, idle_s = self.backends[backend], now - self._had.at.get(backend, now)
        reading = known.reading
        return Fact(
            backend=backend,
            generation=known.generation,
            started_at=known.started_at,
            verdict=known.verdict,
            draining=known.draining,
            drain_clock=known.drain_clock,
            idle_s=ceil(min(max(0.0, idle_s), IDLE_S_MAX)),
            identity=reading.marks.identity if reading is not None else 0,
            totals=reading.marks.totals if reading is not None else 0,
            read_s=ceil(min(max(0.0, now - reading.at), IDLE_S_MAX)) if reading is not None else 0,
        )
