"""The registry of backends: which there are (`backend_ids`), which may be asked (`pools`), what becomes of them
(`backend_changes`), and what each is doing. An id's next backend has a higher generation, so no old claim and no late
`finished` hits it.
Invariant: `inflight` of a backend = its `dispatched` - its `finished` (test_backends.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ranvier_py.core.errors import BadRequest, Conflict
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import (
    NAME_CHARS_MAX,
    Backend,
    Behind,
    Catalog,
    Pool,
    ProbeResult,
    RegistryCounters,
    Transition,
    is_hosted_url,
    normal_url,
)
from ranvier_py.core.routing.backend_changes import BackendChanges
from ranvier_py.core.routing.backend_ids import BackendIds
from ranvier_py.core.routing.blame.backend_pauses import Pauses
from ranvier_py.core.routing.blame.refusals import Refusals
from ranvier_py.core.routing.health import BackendLimits, Circuit, Event, Health, Outcome, Vitals
from ranvier_py.core.routing.pools import Pools
from ranvier_py.core.routing.processes.engine_names import EngineNames
from ranvier_py.core.routing.processes.ranks import rank_of
from ranvier_py.core.routing.rates.work import InFlight, Load, Unseen

__all__ = [
    "Backend",
    "BackendLimits",
    "Circuit",
    "Health",
    "Outcome",
    "Pool",
    "ProbeResult",
    "Registry",
    "Transition",
]


class Registry:
    """All backends of this node."""

    def __init__(
        self,
        limits: BackendLimits,
        *,
        resorted: Callable[[str], object] = lambda _: None,
        restarted: Callable[[Backend], object] = lambda _: None,
        rank_refused: Callable[[Backend], bool] = lambda _: False,
    ) -> None:
        self.limits = limits
        self.rank_refused = rank_refused  # called for a rank; whether others may be asked
        self.busied: Callable[[], object] = lambda: None  # called when an idle backend gets a request
        self.counters = RegistryCounters()
        self.pauses = Pauses()
        self.refusals = Refusals()
        self.names = EngineNames()
        self.unseen = Unseen()
        self.ids = BackendIds(limits.backends_max)
        self.pools = Pools(self.ids, self.unseen, self.counters, resorted)
        self.changes = BackendChanges(
            self.ids,
            self.pools,
            names=self.names,
            pauses=self.pauses,
            refusals=self.refusals,
            counters=self.counters,
            restarted=restarted,
        )

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.ids.by_name.values())

    def __len__(self) -> int:
        return len(self.ids.by_name)

    def __getitem__(self, id: BackendId) -> Backend:  # noqa: A002
        """Return the backend with this id, even if it was removed and is ending its requests. Raises KeyError."""
        slots = self.ids.slots
        backend = slots[id] if 0 <= id < len(slots) else None
        if backend is None:
            raise KeyError(id)
        return backend

    def add(
        self, url: str, *, weight: float = 1.0, name: str = "", hosted: bool | None = None, any_model: bool = False
    ) -> Backend:
        """Add a backend, eligible at once. `name` defaults to host:port; `hosted` to what its URL and its cards say;
        `any_model`: its engine ignores the names of models.

        Raises BadRequest, and adds nothing, for a bad URL, weight or name, a duplicate, or when the registry is full.
        """
        url = normal_url(url)
        name = name or url.partition("://")[2]
        if len(name) > NAME_CHARS_MAX or not all("!" <= char <= "~" for char in name):
            raise BadRequest(f"backend name must be 1 to {NAME_CHARS_MAX} visible ASCII characters: {name!r}")
        if not 0 < weight <= 1000:
            raise BadRequest(f"backend weight must be above 0 and at most 1000, not {weight}")
        twin = self.ids.by_url.get(url) or self.ids.by_name.get(name)
        if twin is not None:
            raise Conflict(f"backend {twin.name!r} at {twin.url} is there already")
        id_ = self.ids.take_id()
        backend = Backend(
            id=BackendId(id_),
            url=url,
            name=name,
            weight=weight,
            generation=self.ids.generations_used[id_] + 1,
            vitals=Vitals(self.limits),
            behind=Behind(rank_of(url)),
            catalog=Catalog(
                any_model=any_model, listed_hosted=is_hosted_url(url) or None if hosted is None else hosted
            ),
        )
        self.ids.enter(backend)
        self.counters.backends_added += 1
        self.pools.version += 1
        return backend

    def remove(self, name_or_url: str) -> Backend:
        """Remove a backend. Its running requests go on; its id is free when the last of them has ended."""
        backend = self.ids.leave(name_or_url)
        self.pauses.forget(backend.id)
        self.refusals.forget(backend.id)
        self.names.forget(backend.id)
        self.pools.relist()
        self.counters.backends_removed += 1
        if backend.work.own.inflight == 0:
            self.ids.free(backend)
        return backend

    def reweigh(self, name_or_url: str, weight: float) -> None:
        """Give it another weight from now on. Raises NotFound."""
        backend = self.ids.known(name_or_url)
        for each in (backend, *backend.behind.as_ranks):
            each.weight = weight
        self.pools.version += 1

    def place_as(self, backend: Backend, ranks: tuple[Backend, ...]) -> None:
        """Send its requests to these from now on; () to itself. Its claims stay."""
        backend.behind.as_ranks = ranks
        self.names.forget(backend.id)
        self.pools.version += 1

    def drain(self, name_or_url: str, draining: bool = True) -> Backend:
        """Send it no more requests (or, with False, send it requests again), as an operator orders. Its claims stay."""
        backend = self.ids.known(name_or_url)
        for each in (backend, *backend.behind.as_ranks):
            self.pools.version += each.origin.drained is not draining
            each.origin.drained = draining
        return backend

    def leave(self, backend: Backend, why: str) -> None:
        """Send it no more requests, because of its sources, or send it requests again if `why` is empty."""
        for each in (backend, *backend.behind.as_ranks):
            self.pools.version += bool(each.origin.leaving) is not bool(why)
            each.origin.leaving = why

    def dispatched(self, backend: Backend, now: float, request: InFlight | None = None, expected_at: float = 0) -> None:
        """Count a request as in flight; where the circuit is half open, it takes the trial. `expected_at`: when its
        first token is expected, if it can't be seen."""
        request = request or InFlight()
        work = backend.work
        work.begin(request, now)
        self.unseen.sent(work, request.tokens, now)
        if not request.seen:
            self.unseen.add(work, request, expected_at)
        backend.load += 1
        if work.own.inflight == 1:
            self.busied()
        if backend.vitals.circuit is Circuit.HALF_OPEN:
            before = backend.vitals.state
            backend.vitals.feed(Event.DISPATCHED, now)
            self.changes.settle(backend, before, "dispatched")

    def reported_hit(self, backend: Backend, generation: int, api: str) -> None:
        """Note that an answer of this process and API reported cached tokens."""
        if generation == backend.generation:
            backend.reuse.hit = True
            backend.reuse.apis.add(api)
            self.changes.reconsider(backend)

    def finished(
        self,
        backend: Backend,
        outcome: Outcome,
        now: float,
        request: InFlight | None = None,
        *,
        judged: bool = True,
    ) -> Sequence[Transition]:
        """End a dispatched request: exactly once for each `dispatched`. Returns the transitions that it caused.

        `request` as when it was dispatched; `judged` as for `Vitals.end`.
        """
        backend.work.end(request or InFlight(), now)
        backend.load -= 1
        seen = backend.seen
        seen.outcomes[outcome] += 1
        if judged and (outcome is not Outcome.SUCCESS or seen.success_rate < 1.0):
            seen.rate(outcome)
        if backend.removed:
            if backend.work.own.inflight == 0:
                self.ids.free(backend)
            return ()
        vitals = backend.vitals
        if outcome is Outcome.SUCCESS and vitals.quiet:
            return ()
        before = vitals.state
        vitals.end(outcome, now, judged=judged)
        return [*self.changes.settle(backend, before, outcome.value), *self.changes.revive(backend, now)]

    def set_foreign_load(self, id: BackendId, requests: int) -> None:  # noqa: A002
        """Set how many requests in the engine no node has sent, by the engine's count: others may use it, too."""
        backend = self[id]
        before, backend.work.room.foreign = backend.work.room.foreign, requests
        backend.load += requests - before

    def set_peer_load(self, id: BackendId, load: Load, now: float) -> None:  # noqa: A002
        """Set the load that the peers together report for this backend."""
        backend = self[id]
        backend.load += load.requests - backend.work.peers.requests
        backend.work.set_peers(load, now)
