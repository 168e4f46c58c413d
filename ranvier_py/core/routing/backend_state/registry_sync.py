"""The registry among peers: what this node sees of its backends becomes facts, peers' facts change the registry.

Between nodes a backend is named by a key, the keyed hash of its URL: ids are numbers of one node, and a URL on the wire
would be an address taken from gossip. Only backends that the registry has are ever ranked; facts about others wait. A
process has two numbers: this node's generation of the backend, and the generation as all nodes count it (the facts').

Out: `look` compares each backend with its state at the last look (in flight, verdict, generation, draining), so that
nothing is done on a request's path. In: `follow` applies what was received to the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.routing.backend_state.facts import (
    GENERATION_BITS,
    UNKNOWN,
    BackendFacts,
    DrainChange,
    FactChange,
    Facts,
    KnownStart,
    NewGeneration,
    Verdict,
)
from ranvier_py.core.routing.backend_state.loads import Loads
from ranvier_py.core.routing.backends import Backend, Circuit, Health, Registry, Transition
from ranvier_py.core.routing.processes.engine_marks import EngineMarks
from ranvier_py.core.routing.processes.several_processes import same_process
from ranvier_py.core.routing.rates.work import NO_LOAD, Load
from ranvier_py.core.routing.route_table.route_values import BackendNames

TRANSITIONS_MAX = 1000  # that wait for the log; later ones are not logged

NEVER = (-1, -1)

VERDICTS = {Health.UNKNOWN: Verdict.UNKNOWN, Health.HEALTHY: Verdict.HEALTHY, Health.UNHEALTHY: Verdict.UNHEALTHY}


@dataclass(slots=True)
class Seen:
    """One backend as it was at the last look. `generation` is by this node's count."""

    backend: Backend
    generation: int
    draining: bool


class RegistrySync(Machine):
    """Maps backends to keys and back, and carries changes between registry and facts.

    Args:
        key: 16 to 64 secret bytes, the same on all nodes.
    """

    kinds = BackendFacts.kinds

    def __init__(self, registry: Registry, facts: BackendFacts, key: bytes) -> None:
        self.registry = registry
        self.facts = facts
        self.doubted: dict[BackendId, None] = {}  # backends that a peer calls ill, to be probed now; owner drains
        self.transitions: list[Transition] = []  # for the log; drained by the owner
        self.lacked: Callable[[float], object] = lambda _: None  # called when claims that were ignored can be taken
        self.drained_by: Callable[[int, float], str] = lambda *_: ""  # who drained the backend with a key, if known
        self._key = key
        self.own: dict[int, Seen] = {}  # our backends by key; another dict whenever one comes or goes
        self._keys: dict[BackendId, int] = {}
        self._version = NEVER
        self._restarts = 0  # number of restarts that the facts include
        self._passed_over: dict[int, None] = {}  # whose claims were ignored, for want of a count or a backend

    @property
    def _registry_version(self) -> tuple[int, int]:
        """Differs whenever a backend came or went."""
        return self.registry.counters.backends_added, self.registry.counters.backends_removed

    def key_of(self, backend: BackendId) -> int | None:
        """Return a backend's key; None if the registry did not have it at the last look."""
        return self._keys.get(backend)

    def find(self, key: int) -> Backend | None:
        seen = self.own.get(key)
        return seen.backend if seen is not None and not seen.backend.removed else None

    def name_of(self, backend: BackendId, generation: int) -> tuple[int, int] | None:
        """Return (key, low bits of the shared generation), by which peers know this process. None: it is gone."""
        key = self._keys.get(backend)
        found = self.find(key) if key is not None else None
        if key is None or found is None or found.generation != generation:
            return None
        return key, self.facts.of(key).generation % (1 << GENERATION_BITS)

    def names(self) -> BackendNames:
        """Return the keys and shared generations of this node's backend ids, for scans of the table."""
        slots = self.registry.ids.slots
        keys = np.zeros(len(slots), np.uint64)
        shared = np.zeros(len(slots), np.uint64)
        generations = np.full(len(slots), -1, np.int32)
        for backend, key in self._keys.items():
            seen = self.own[key]
            if not seen.backend.removed and seen.backend.generation == seen.generation:
                keys[backend], shared[backend] = key, self.facts.of(key).generation
                generations[backend] = seen.generation
        return BackendNames(keys, shared, generations)

    def holder(self, key: int, generation: int, now: float) -> tuple[BackendId, int] | None:
        """Return our (id, generation) of a process; low bits of `generation` suffice. None: unknown, or earlier.

        A later generation than ours is started here first. A restart that the registry saw since the last look is
        counted now: otherwise routes of the process before, which had that number, would pass for the new one's. For
        the same reason this returns None until a peer has sent its count of the backend, with the start time.
        """
        seen, facts = self.own.get(key), self.facts
        if seen is None or seen.backend.removed or seen.backend.behind.names.strangers:
            return None
        known, backend = facts.backends.get(key, UNKNOWN), seen.backend
        if not known.counted:
            self._passed_over[key] = None
            return None
        if backend.generation != seen.generation or (backend.seen.process.started_at or 0.0) != known.started_at:
            self._settle(key, seen, now)
        low_bits = generation % (1 << GENERATION_BITS)
        ours = known.generation % (1 << GENERATION_BITS)
        if low_bits != ours and facts.generation_of(key, low_bits) != known.generation:  # a later one is adopted
            return None
        self.follow(now)
        backend.seen.process.has_remote_routes = True
        return backend.id, backend.generation

    def regained(self) -> bool:
        """Whether claims that were ignored can be taken now, because the backend and its count are here. True once."""
        known = [key for key in self._passed_over if self.facts.of(key).counted]
        for key in known:
            del self._passed_over[key]
        return bool(known)

    def look(self, now: float) -> bool:
        """Note in the facts what changed since the last look. Returns whether anything is in flight."""
        registry = self.registry
        registry.unseen.settle(now)  # or peers would read of whole answers as waiting until the next request comes
        if self._version != self._registry_version:
            is_first = self._version == NEVER
            self._version = self._registry_version
            newcomers = self._rename(now)
            self._passed_over = {key: None for key in self._passed_over if key in self.own}
            if not is_first:  # a node that starts copies a whole table
                self._passed_over |= newcomers
        loads: dict[int, Load] = {}
        for key, seen in self.own.items():
            backend = seen.backend
            if backend.work.own.inflight:
                loads[key] = backend.work.own.load
            self._settle(key, seen, now)
            if backend.origin.drained is not seen.draining:
                seen.draining = backend.origin.drained
                self.facts.drain(key, backend.origin.drained)
            started_at, reading = backend.seen.process.started_at or 0.0, registry.names.readings.get(backend.id)
            self.facts.observe(key, verdict_of(backend), started_at, reading)
        self.facts.loads.carry(loads)
        return bool(loads)

    def count_restarts(self, now: float) -> None:
        """Count the restarts that this node saw since the last look. Call it before facts are taken: a restart that a
        peer saw, too, would otherwise count twice."""
        if self._restarts != self.registry.counters.backend_restarts:
            self._restarts = self.registry.counters.backend_restarts
            for key, seen in self.own.items():
                if not seen.backend.removed:
                    self._settle(key, seen, now)

    def _settle(self, key: int, seen: Seen, now: float) -> None:
        backend = seen.backend
        started_at, shared = backend.seen.process.started_at or 0.0, self.facts.of(key).started_at
        differs = bool(started_at and shared) and not same_process(started_at, shared)
        is_one = backend.behind.processes == 1 and not backend.behind.names.strangers
        if differs and backend.generation == seen.generation and is_one:
            self._log(self.registry.changes.restart(backend, "peers knew another process", now))
        if backend.generation != seen.generation:
            seen.generation = backend.generation
            self.facts.restarted(key, started_at)

    def _rename(self, now: float) -> dict[int, None]:
        """Note that backends came or went. A newcomer takes over what peers sent of it. Returns the newcomers' keys."""
        before, self.own, self._keys = self.own, {}, {}
        newcomers: dict[int, None] = {}
        for backend in self.registry:
            key = keyed(self._key, backend.url)
            self._keys[backend.id] = key
            old = before.get(key)
            if old is not None and old.backend is backend:
                self.own[key] = old
                continue
            newcomers[key] = None
            if self.facts.drains(key, now):
                self.registry.drain(backend.url)
            # the facts' state: so `look` takes back an order that has ended, and sends one given before this look
            self.own[key] = Seen(backend, backend.generation, self.facts.of(key).draining)
            self.registry.set_peer_load(backend.id, self.facts.loads.of(key), now)
        for key in before:
            if key not in self.own:
                self.facts.left(key, now)
        return newcomers

    def follow(self, now: float) -> None:
        """Apply the loads and facts that were received since the last call to the registry."""
        facts, registry = self.facts, self.registry
        if facts.loads.moved:
            for key in facts.loads.moved:
                backend = self.find(key)
                if backend is not None:
                    load = NO_LOAD if backend.behind.names.strangers else facts.loads.of(key)
                    registry.set_peer_load(backend.id, load, now)
            facts.loads.moved.clear()
        if facts.read:
            self._take_marks(now)
        changes, facts.changes = facts.changes, []
        for each in changes:
            seen = self.own.get(each.backend)
            if seen is not None and not seen.backend.removed:
                self._apply(seen, each, now)
            elif isinstance(each, KnownStart):
                facts.begun(*each)

    def _apply(self, seen: Seen, change: FactChange, now: float) -> None:
        """Apply a change to a backend of ours. But for drains, none is of our engine where nodes reach several."""
        if isinstance(change, DrainChange):
            self._drain(seen, draining=change.draining, by=self.drained_by(change.backend, now))
        elif seen.backend.behind.names.strangers:
            pass
        elif isinstance(change, NewGeneration):
            backend = seen.backend  # our claims so far are of an earlier process, unless the registry knows of this one
            transitions = self.registry.changes.restart_reported(backend, change.started_at, now)
            if not transitions and backend.generation == seen.generation:
                transitions = self.registry.changes.restart(backend, "peers count another process", now)
            self._log(transitions)
            seen.generation = backend.generation
        elif isinstance(change, KnownStart):  # begins the next generation if our claims may be of one before
            self._log(self.registry.changes.start_reported(seen.backend, change.started_at, now))
            self._settle(change.backend, seen, now)
            self.facts.begun(*change)
        elif seen.backend.health is not Health.UNHEALTHY:
            self.doubted[seen.backend.id] = None
            self._log(list(self.registry.changes.doubted(seen.backend.id, change.observers, now)))

    @property
    def wake_at(self) -> float:
        return self.facts.wake_at if self._restarts == self.registry.counters.backend_restarts else 0.0

    def tick(self, now: float) -> None:
        self.count_restarts(now)
        self.facts.tick(now)
        self._catch_up(now)

    def receive(self, peer: Peer, message: Facts | Loads, now: float) -> None:
        self.count_restarts(now)
        self.facts.receive(peer, message, now)
        self._catch_up(now)

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers: what others read of engines counts no more."""
        self.registry.unseen.peers = len(peers.sessions)
        self.registry.names.keep({peer.session for peer in peers.near})
        self.facts.met(peers, now)

    def forgotten(self, session: int, now: float) -> None:
        self.facts.forgotten(session, now)

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_facts": self.facts.counters}

    def _catch_up(self, now: float) -> None:
        self.follow(now)
        if self._passed_over and self.regained():
            self.lacked(now)

    def _take_marks(self, now: float) -> None:
        """Compare the marks that peers read with ours; not before `look` has seen which backends there are, since a
        backend without its key would be another one. What is dropped here is sent again."""
        names, (read, self.facts.read) = self.registry.names, (self.facts.read, [])
        if self._version != self._registry_version:
            return
        for session, fact in read:
            ours, marks = self.find(fact.backend), EngineMarks(fact.identity, fact.totals)
            names.peer_read(session, fact.backend, ours.id if ours else None, marks, now - fact.read_s, now)
        for changed in names.changed():
            if (backend := self.registry.ids.current(changed)) is not None:
                self._log(names.judge(backend, self.registry.ids.current, now))

    def _drain(self, seen: Seen, *, draining: bool, by: str) -> None:
        """Drain a backend, or end that, as an operator ordered on another node."""
        backend, before = seen.backend, seen.backend.origin.drained
        seen.draining = draining
        self.registry.drain(backend.url, draining)
        if before is not draining:
            change = (str(before), str(draining), f"ordered by {by}" if by else "ordered on another node")
            self.transitions.append(Transition.of(backend, "draining", *change))

    def _log(self, transitions: list[Transition]) -> None:
        self.transitions += transitions[: TRANSITIONS_MAX - len(self.transitions)]


def verdict_of(backend: Backend) -> Verdict:
    """Return the verdict that peers are sent, an open circuit included: a peer may meet the same faults.

    Never a verdict that we took from peers: nodes would call a backend ill for ever, each because others do.
    """
    if backend.circuit is Circuit.OPEN:
        return Verdict.CIRCUIT_OPEN
    if backend.vitals.by_report and backend.health is Health.UNHEALTHY:
        return Verdict.UNKNOWN
    return VERDICTS[backend.health]


def keyed(key: bytes, url: str) -> int:
    """Return a backend's key, 64 bits: without the secret `key` nobody can find out which URL it stands for."""
    digest = blake2b(url.encode(), digest_size=8, key=key, person=b"backend").digest()
    return int.from_bytes(digest, "little")
