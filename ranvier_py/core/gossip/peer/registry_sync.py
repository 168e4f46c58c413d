"""The registry among peers: what this node sees of its backends becomes facts, what peers say becomes the registry's.

Between nodes a backend is a key, the keyed hash of its URL: ids are numbers of one node, and a URL on the wire would be
an address taken from gossip. Only backends that the registry has are ever ranked; facts about others wait.

Down, by looking: `look` compares each backend with what it was at the last look (in flight, verdict, generation,
draining), so that nothing is done on a request's path. Up: `follow` applies what was heard.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ranvier_py.core.gossip.backend_state.facts import BOOT_BITS, BackendFacts, Boot, Drain, Start, Verdict
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import Backend, Circuit, Health, Registry, Transition
from ranvier_py.core.routing.process import same_process
from ranvier_py.core.routing.route_table.scan import Names
from ranvier_py.core.routing.work import Load

TRANSITIONS_MAX = 1000  # waiting for the log; later ones are not logged

VERDICTS = {Health.UNKNOWN: Verdict.UNKNOWN, Health.HEALTHY: Verdict.HEALTHY, Health.UNHEALTHY: Verdict.UNHEALTHY}


@dataclass(slots=True)
class Seen:
    """One backend as it was at the last look. `generation` is this node's, of the process that the facts call by
    `boot`."""

    backend: Backend
    generation: int
    draining: bool


class SharedBackends:
    """Key <-> backend, and the traffic between registry and facts.

    Args:
        key: 16 to 64 secret bytes, the same on all nodes.
    """

    def __init__(self, registry: Registry, facts: BackendFacts, key: bytes) -> None:
        self.registry = registry
        self.facts = facts
        self.doubted: dict[BackendId, None] = {}  # a peer calls it ill: to be probed now; drained by the owner
        self.transitions: list[Transition] = []  # for the log; drained by the owner
        self._key = key
        self._seen: dict[int, Seen] = {}  # by key
        self._keys: dict[BackendId, int] = {}
        self._version = (-1, -1)
        self._restarts = 0  # that the facts know of
        self._passed_over: dict[int, None] = {}  # of whom claims were not taken, their count not being known

    def key_of(self, backend: BackendId) -> int | None:
        """None for a backend that was not there at the last look."""
        return self._keys.get(backend)

    def find(self, key: int) -> Backend | None:
        seen = self._seen.get(key)
        return seen.backend if seen is not None and not seen.backend.removed else None

    def names(self) -> Names:
        """What this node's ids mean to others, for the scans of the table."""
        slots = self.registry.slots
        keys = np.zeros(len(slots), np.uint64)
        boots = np.zeros(len(slots), np.uint64)
        generations = np.full(len(slots), -1, np.int32)
        for backend, key in self._keys.items():
            seen = self._seen[key]
            if not seen.backend.removed and seen.backend.generation == seen.generation:
                keys[backend], boots[backend], generations[backend] = key, self.facts.boot(key), seen.generation
        return Names(keys, boots, generations)

    def holder(self, key: int, boot: int, now: float) -> tuple[int, int] | None:
        """(local id, epoch) of a backend's boot, of which the low bits are enough. None: unknown, or an earlier one.

        A later boot than ours is started here first. A restart that the registry saw since the last look counts now: by
        the number of the process before it, what that one held would pass for the new one's. For the same reason
        nothing is taken before a peer has told its counts, with the start times that belong to them.
        """
        seen = self._seen.get(key)
        if seen is None or seen.backend.removed:
            return None
        if not self.facts.is_counted(key):
            self._passed_over[key] = None
            return None
        backend = seen.backend
        self._settle(key, seen, now)
        if self.facts.boot_of(key, boot % (1 << BOOT_BITS)) != self.facts.boot(key):
            return None
        self.follow(now)
        backend.process.has_remote_routes = True
        return backend.id, backend.generation

    def regained(self) -> bool:
        """Whether the count of a backend has come whose claims were not taken for want of it. Says so once."""
        if not self._passed_over:
            return False
        known = [key for key in self._passed_over if self.facts.is_counted(key)]
        for key in known:
            del self._passed_over[key]
        return bool(known)

    # --- down -------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Tell the facts what changed since the last look; whether anything is in flight. 0.3 us for each backend."""
        registry = self.registry
        if self._version != (registry.counters.backends_added, registry.counters.backends_removed):
            self._version = (registry.counters.backends_added, registry.counters.backends_removed)
            self._rename(now)
        loads: dict[int, Load] = {}
        for key, seen in self._seen.items():
            backend = seen.backend
            if backend.inflight:
                loads[key] = backend.own_load
            self._settle(key, seen, now)
            if backend.draining is not seen.draining:
                seen.draining = backend.draining
                self.facts.drain(key, backend.draining)
            self.facts.observe(key, verdict_of(backend), backend.process.started_at or 0.0)
        self.facts.carry(loads)
        return bool(loads)

    def before_hearing(self, now: float) -> None:
        """Count the restarts that this node saw since the last look. A peer may have seen the same, and would else seem
        to tell of others."""
        if self._restarts != self.registry.counters.backend_restarts:
            self._restarts = self.registry.counters.backend_restarts
            for key, seen in self._seen.items():
                if not seen.backend.removed:
                    self._settle(key, seen, now)

    def _settle(self, key: int, seen: Seen, now: float) -> None:
        """See that the registry's epoch and the facts' boot are of one process."""
        backend = seen.backend
        started_at, told = backend.process.started_at or 0.0, self.facts.started_at(key)
        if backend.generation == seen.generation and started_at and told and not same_process(started_at, told):
            self._log(self.registry.restart(backend, "peers knew another process", now))
        if backend.generation != seen.generation:
            seen.generation = backend.generation
            self.facts.restarted(key, started_at)

    def _rename(self, now: float) -> None:
        """Backends came or went. A newcomer starts as what peers already said of it."""
        before, self._seen, self._keys = self._seen, {}, {}
        for backend in self.registry:
            key = keyed(self._key, backend.url)
            old = before.get(key)
            same = old is not None and old.backend is backend
            self._seen[key] = old if old is not None and same else Seen(backend, backend.generation, backend.draining)
            self._keys[backend.id] = key
            if not same:
                self.registry.set_peer_load(backend.id, self.facts.peer_load(key), now)

    # --- up ---------------------------------------------------------------------------------------------------------

    def follow(self, now: float) -> None:
        """Apply what was heard since the last call."""
        facts, registry = self.facts, self.registry
        if facts.loads.moved:
            for key in facts.loads.moved:
                backend = self.find(key)
                if backend is not None:
                    registry.set_peer_load(backend.id, facts.peer_load(key), now)
            facts.loads.moved.clear()
        if facts.news:
            news, facts.news = facts.news, []
            for each in news:
                seen = self._seen.get(each.backend)
                if seen is None or seen.backend.removed:
                    if isinstance(each, Start):
                        facts.begun(*each)
                    continue
                if isinstance(each, Boot):
                    self._start_boot(seen, each, now)
                elif isinstance(each, Start):
                    self._know_start(seen, each, now)
                elif isinstance(each, Drain):
                    seen.draining = each.draining
                    registry.drain(seen.backend.url, each.draining)
                else:
                    self._doubt(seen.backend, each.observers, now)

    def _start_boot(self, seen: Seen, boot: Boot, now: float) -> None:
        """The claims so far are of an earlier boot: unless the registry has begun the new one already, it begins."""
        backend = seen.backend
        transitions = self.registry.restart_reported(backend, boot.started_at, now)
        if not transitions and backend.generation == seen.generation:
            transitions = self.registry.restart(backend, "peers count another process", now)
        self._log(transitions)
        seen.generation = backend.generation

    def _know_start(self, seen: Seen, start: Start, now: float) -> None:
        """Our claims, and what we told of them, may be of the process before: then the known one is the next boot."""
        self._log(self.registry.start_reported(seen.backend, start.started_at, now))
        self._settle(start.backend, seen, now)
        self.facts.begun(*start)

    def _doubt(self, backend: Backend, observers: int, now: float) -> None:
        if backend.health is not Health.UNHEALTHY:
            self.doubted[backend.id] = None
            self._log(list(self.registry.doubted(backend.id, observers, now)))

    def _log(self, transitions: list[Transition]) -> None:
        self.transitions += transitions[: TRANSITIONS_MAX - len(self.transitions)]


def verdict_of(backend: Backend) -> Verdict:
    """What is told of it. An open circuit is told too: a peer may meet the same faults.

    Never what we took on others' word: some nodes would hold a backend for ill for ever, each because others do.
    """
    if backend.circuit is Circuit.OPEN:
        return Verdict.CIRCUIT_OPEN
    if backend.vitals.merge_rules and backend.health is Health.UNHEALTHY:
        return Verdict.UNKNOWN
    return VERDICTS[backend.health]


def keyed(key: bytes, url: str) -> int:
    """The name of a backend between nodes: 64 bits, without which key nobody can ask for a URL."""
    digest = blake2b(url.encode(), digest_size=8, key=key, person=b"backend").digest()
    return int.from_bytes(digest, "little")
