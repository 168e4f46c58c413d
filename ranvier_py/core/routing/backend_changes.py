"""What becomes of backends: of their health, their processes and their models, by probes, peers and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier_py.core.findings import counted
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Backend, Card, ProbeResult, RegistryCounters, Transition, in_short
from ranvier_py.core.routing.backend_ids import BackendIds
from ranvier_py.core.routing.blame.backend_pauses import Pauses
from ranvier_py.core.routing.blame.context_lengths import lengths_of
from ranvier_py.core.routing.blame.refusals import Refusals
from ranvier_py.core.routing.blame.suspects import Fault
from ranvier_py.core.routing.health import Event, VitalState
from ranvier_py.core.routing.pools import Pools
from ranvier_py.core.routing.processes.cache_counts import count_caches
from ranvier_py.core.routing.processes.engine_names import EngineNames
from ranvier_py.core.routing.processes.reuse import Reuse

ALIVE_S = 2.0  # after its last byte an engine is not called dead by hearsay: peers noticed what they say before that


class BackendChanges:
    """Changes the backends of one node, and returns what is to be logged of that."""

    def __init__(  # what forgets with a process, each named
        self,
        ids: BackendIds,
        pools: Pools,
        *,
        names: EngineNames,
        pauses: Pauses,
        refusals: Refusals,
        counters: RegistryCounters,
        restarted: Callable[[Backend], object],
    ) -> None:
        self._ids, self._pools, self._names = ids, pools, names
        self._pauses, self._refusals, self._counters = pauses, refusals, counters
        self.restarted = restarted  # called when a generation has begun

    def blamed(self, fault: Fault, now: float) -> Sequence[Transition]:
        """Count a failure of a finished request against its backend, unless another process is behind that by now."""
        backend = self._ids.current(fault.backend)
        if backend is None or backend.generation != fault.generation:
            return ()
        backend.seen.rate(fault.outcome)
        before = backend.vitals.state
        cause, was_seen, sent_at = fault.cause, fault.was_seen, fault.sent_at
        backend.vitals.end(fault.outcome, now, cause=cause, was_seen=was_seen, sent_at=sent_at)
        return self.settle(backend, before, fault.outcome.value)

    def probed(self, id: BackendId, result: ProbeResult, now: float) -> Sequence[Transition]:  # noqa: A002
        """Take in a probe's result, unless the backend has been removed meanwhile. Returns the transitions."""
        backend = self._ids.current(id)
        if backend is None:
            return ()
        vitals, seen = backend.vitals, backend.seen
        seen.probe(result)
        before = vitals.state
        vitals.tick(now)
        changed = self.judge(backend, result, now)
        if result.lacks is not None and result.lacks != seen.lacks:
            seen.lacks = result.lacks
            self._pools.names.relist(self._ids)
        backend.reuse.page_read(result.caches, result.hit_tokens)
        self.reconsider(backend)
        changed += backend.key_changed(result.key_refused)
        began = now - result.latency_s
        is_overruled = result.timed_out and seen.received_at > began
        self._counters.probes_overruled += is_overruled
        if result.ok or result.status:
            seen.received_at = seen.probed_at = now
        ok, received_at = result.ok or is_overruled, seen.received_at
        if result.loops:  # a request that it got would come back until this node is full
            vitals.doubt(now)
        vitals.probe(ok, now, began=began, received_at=received_at, timed_out=result.timed_out)
        if result.models is not None:
            changed += self.set_models(backend, result.models, result.cards)
        if result.marks is not None and not backend.behind.as_ranks:  # else its ranks show theirs
            self._names.probed(backend.id, result.marks, now)
        changed += self._names.judge(backend, self._ids.current, now)
        return [*self.settle(backend, before, result.detail or "probe"), *changed, *count_caches(backend, now)]

    def doubted(self, id: BackendId, observers: int, now: float) -> Sequence[Transition]:  # noqa: A002
        """Call a backend unhealthy if two peers, or one peer and a failed probe or request here, say so. If something
        came from it since its last probe, and just now, the next probe here decides."""
        backend = self._ids[id]
        vitals = backend.vitals
        if observers < 1 or (observers < 2 and vitals.streak >= 0 and not vitals.faults):
            return ()
        before = vitals.state
        if backend.seen.received_at > max(backend.seen.probed_at, now - ALIVE_S):
            vitals.doubt(now)
            return ()
        vitals.condemn(now)
        return self.settle(backend, before, f"{counted(observers, 'peer')} said so")

    def received(self, id: BackendId, now: float) -> Sequence[Transition]:  # noqa: A002
        """Note that something came from the engine just now: a page, an event. Answers note it themselves."""
        backend = self._ids.current(id)
        if backend is None:
            return ()
        backend.seen.received_at = now
        return self.revive(backend, now)

    def hangs(self, backend: Backend, why: str, now: float) -> Sequence[Transition]:
        """Call a backend unhealthy until something comes from it."""
        before = backend.vitals.state
        backend.vitals.hang(now)
        return self.settle(backend, before, why)

    def revive(self, backend: Backend, now: float) -> Sequence[Transition]:
        """Make a silent backend healthy if it sent something since it was last found silent."""
        vitals = backend.vitals
        if not vitals.silent or backend.seen.received_at <= vitals.failed_at or backend.removed:
            return ()
        before = vitals.state
        vitals.revive()
        return self.settle(backend, before, f"sent something {now - backend.seen.received_at:.1f} s ago")

    def judge(self, backend: Backend, result: ProbeResult, now: float) -> list[Transition]:
        """Begin the next generation if the probe shows that another process answers."""
        if not result.ok:
            backend.seen.process.refused |= result.refused
            return []
        failing = backend.vitals.streak < 0
        why = backend.seen.process.answered(result.started_at, used=backend.used, failing=failing, now=now)
        return self.restart(backend, why, now)

    def restart(self, backend: Backend, why: str, now: float) -> list[Transition]:
        """Begin the next generation, which voids old claims, and forgive faults. Does nothing if `why` is ""."""
        if not why:
            return []
        before = backend.generation
        backend.generation += 1
        backend.seen.process.has_remote_routes, backend.seen.lacks = False, frozenset()
        self._pools.names.relist(self._ids)
        backend.reuse = Reuse()
        self._ids.generations_used[backend.id] = backend.generation
        backend.vitals.feed(Event.RESTARTED, now)
        self._pauses.forget(backend.id)
        self._refusals.forget(backend.id)
        self._counters.backend_restarts += 1
        self._pools.version += 1
        self.restarted(backend)
        return [Transition.of(backend, "generation", str(before), str(backend.generation), why)]

    def restart_reported(
        self, backend: Backend, started_at: float, now: float, why: str = "a peer saw it"
    ) -> list[Transition]:
        """Begin the next generation by a peer's report or by the engine's own events, unless that is the known process.
        A probe of this node's own comes later then."""
        return self.restart(backend, why if backend.seen.process.replaced(started_at, now) else "", now)

    def start_reported(self, backend: Backend, started_at: float, now: float) -> list[Transition]:
        """Take in a peer's start time of the process with our generation, of which our claims may not be."""
        failing = backend.vitals.streak < 0
        why = backend.seen.process.reported(started_at, used=backend.used, failing=failing, now=now)
        return self.restart(backend, why, now)

    def set_models(self, backend: Backend, names: Sequence[str], cards: tuple[Card, ...]) -> list[Transition]:
        """Take the names and cards of its model list. Returns the transition that this is, if any."""
        if backend.catalog.cards != cards:
            backend.catalog.cards, backend.catalog.lengths = cards, lengths_of(cards)
            backend.catalog.owned_by = frozenset([str(card.get("owned_by")).lower() for card in cards])
            self._pools.measure()
        models = tuple(sorted(set(names)))
        if models == backend.catalog.models:
            return []
        before = "unknown" if backend.catalog.models is None else in_short(backend.catalog.models)
        backend.catalog.models = models
        self._pools.relist()
        return [Transition.of(backend, "models", before, in_short(models), "listed by the engine")]

    def reconsider(self, backend: Backend) -> None:
        """Let pools know whether a backend reuses prefixes, if that has changed."""
        if backend.reuse.believed is not backend.reuse.happens:
            backend.reuse.believed = not backend.reuse.believed
            self._pools.version += 1

    def settle(self, backend: Backend, before: VitalState, why: str) -> list[Transition]:
        """Update the version and the next wake-up after a change of vitals. Returns the transitions."""
        after = backend.vitals.state
        self._pools.version += after[2:] != before[2:]
        self._pools.wake(backend.vitals.wake_at)
        pairs = (("health", before.health, after.health), ("circuit", before.circuit, after.circuit))
        return [Transition.of(backend, what, old.value, new.value, why) for what, old, new in pairs if old is not new]
