"""The registry of backends: which there are, which may be asked, and what each is doing.

Rule: a backend is eligible while it is not draining, not unhealthy, its circuit lets a request through, and it serves
the model; when none is, pools fail open (`blame.eligibility`). Bound: `backends_max`. An id is free again only when its
backend was removed *and* its last request has ended. The id's next backend has a higher generation, so no old claim and
no late `finished` hits it.
Invariant: `inflight` of a backend = its `dispatched` - its `finished`; `version` grows when any pool may differ
(test_backends.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.errors import BadRequest, NotFound, RequestError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import (
    NAME_CHARS_MAX,
    Backend,
    Behind,
    Card,
    Pool,
    ProbeResult,
    RegistryCounters,
    Transition,
    in_short,
    is_hosted_url,
    normal_url,
)
from ranvier_py.core.routing.blame.backend_pauses import Pauses
from ranvier_py.core.routing.blame.context_lengths import NO_END, lengths_of
from ranvier_py.core.routing.blame.eligibility import eligible_of
from ranvier_py.core.routing.blame.refusals import Refusals
from ranvier_py.core.routing.blame.suspects import Fault
from ranvier_py.core.routing.health import NEVER_S, BackendLimits, Circuit, Event, Health, Outcome, Vitals, VitalState
from ranvier_py.core.routing.models.model_names import ModelNames
from ranvier_py.core.routing.processes.cache_counts import count_caches
from ranvier_py.core.routing.processes.engine_names import EngineNames
from ranvier_py.core.routing.processes.ranks import rank_of
from ranvier_py.core.routing.processes.reuse import Reuse
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

ALIVE_S = 2.0  # after its last byte an engine is not called dead by hearsay: peers noticed what they say before that
POOLS_MAX = 4096  # of as many models and adapters
NARROWED_MAX = 256  # pools that leave out backends to be avoided, kept until anything changes


class Registry:
    """All backends of this node. `version` grows with every change of eligibility."""

    def __init__(
        self,
        limits: BackendLimits,
        *,
        resorted: Callable[[str], object] = lambda _: None,
        restarted: Callable[[Backend], object] = lambda _: None,
        rank_refused: Callable[[Backend], bool] = lambda _: False,
    ) -> None:
        self.limits = limits
        self.resorted = resorted  # called with a model that only silent backends serve
        self.restarted = restarted  # called when a generation has begun
        self.rank_refused = rank_refused  # called for a rank; whether others may be asked
        self.version = 0
        self.slots: list[Backend | None] = []  # by id; removed backends stay until their last request ended
        self.free_ids: list[int] = []  # a heap
        self.generations_used: list[int] = []  # by id: the highest generation ever given out
        self.by_name: dict[str, Backend] = {}  # in order of id
        self.by_url: dict[str, Backend] = {}
        self.models = ModelNames()
        self.pools: BoundedDict[str | None, Pool] = BoundedDict(POOLS_MAX)  # by model; None: one that nobody lists
        self.narrowed: BoundedDict[tuple[str | None, Sequence[BackendId]], Pool] = BoundedDict(NARROWED_MAX)
        self.shortest = NO_END  # of the known lengths of all backends and models
        self.pools_version = -1
        self.pauses = Pauses()
        self.refusals = Refusals()
        self.names = EngineNames()
        self.wake_at = NEVER_S  # when the first open time, or lease of a trial, ends
        self.unseen = Unseen()
        self.counters = RegistryCounters()
        self.busied: Callable[[], object] = lambda: None  # called when an idle backend gets a request

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def __getitem__(self, id: BackendId) -> Backend:  # noqa: A002
        """Return the backend with this id, even if it was removed and is ending its requests. Raises KeyError."""
        backend = self.slots[id] if 0 <= id < len(self.slots) else None
        if backend is None:
            raise KeyError(id)
        return backend

    def current(self, id: BackendId) -> Backend | None:  # noqa: A002
        """Return the backend with this id; None if there is none or it was removed."""
        backend = self.slots[id] if 0 <= id < len(self.slots) else None
        return None if backend is None or backend.removed else backend

    def find(self, name_or_url: str) -> Backend | None:
        found = self.by_name.get(name_or_url)
        if found is None and "://" in name_or_url:
            try:
                found = self.by_url.get(normal_url(name_or_url))
            except RequestError:
                return None
        return found

    # -- who there is ------------------------------------------------------------------------------------------------

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
        if url in self.by_url or name in self.by_name:
            raise BadRequest(f"backend {name!r} at {url} is there already")
        id_ = self.take_id()
        self.generations_used[id_] += 1
        backend = Backend(
            id=BackendId(id_),
            url=url,
            name=name,
            weight=weight,
            generation=self.generations_used[id_],
            vitals=Vitals(self.limits),
            behind=Behind(rank_of(url)),
            any_model=any_model,
            listed_hosted=is_hosted_url(url) or None if hosted is None else hosted,
        )
        self.slots[id_] = backend
        self.by_name[name] = self.by_url[url] = backend
        self.by_name = dict(sorted(self.by_name.items(), key=lambda item: item[1].id))
        self.counters.backends_added += 1
        self.version += 1
        return backend

    def take_id(self) -> int:
        if self.free_ids:
            return heapq.heappop(self.free_ids)
        if len(self.slots) >= self.limits.backends_max:
            raise BadRequest(f"at most {self.limits.backends_max} backends")
        self.slots.append(None)
        self.generations_used.append(0)
        return len(self.slots) - 1

    def remove(self, name_or_url: str) -> Backend:
        """Remove a backend. Its running requests go on; its id is free when the last of them has ended."""
        backend = self.known(name_or_url)
        del self.by_name[backend.name], self.by_url[backend.url]
        backend.removed = True
        self.pauses.forget(backend.id)
        self.refusals.forget(backend.id)
        self.names.forget(backend.id)
        self.models.relist(self)
        self.measure()
        self.counters.backends_removed += 1
        self.version += 1
        if backend.work.own.inflight == 0:
            self.free(backend)
        return backend

    def free(self, backend: Backend) -> None:
        self.slots[backend.id] = None
        self.generations_used[backend.id] = backend.generation
        heapq.heappush(self.free_ids, backend.id)

    def reweigh(self, name_or_url: str, weight: float) -> None:
        """Give it another weight from now on. Raises NotFound."""
        backend = self.known(name_or_url)
        for each in (backend, *backend.behind.as_ranks):
            each.weight = weight
        self.version += 1

    def place_as(self, backend: Backend, ranks: tuple[Backend, ...]) -> None:
        """Send its requests to these from now on; () to itself. Its claims stay."""
        backend.behind.as_ranks = ranks
        self.names.forget(backend.id)
        self.version += 1

    def drain(self, name_or_url: str, draining: bool = True) -> Backend:
        """Send it no more requests (or, with False, send it requests again). Its claims stay."""
        backend = self.known(name_or_url)
        for each in (backend, *backend.behind.as_ranks):
            self.version += each.draining is not draining
            each.draining = draining
        return backend

    def known(self, name_or_url: str) -> Backend:
        backend = self.find(name_or_url)
        if backend is None:
            raise NotFound(f"no backend {name_or_url!r}")
        return backend

    # -- who may be asked --------------------------------------------------------------------------------------------

    def engines(self, model: str) -> tuple[bool, Sequence[frozenset[str]]]:
        """Return whether any backend that may serve `model` is hosted, and what the cards of each are owned by."""
        serving = [backend for backend in self if backend.serves(model)]
        return any(backend.hosted for backend in serving), [backend.owned_by for backend in serving]

    def pool(
        self, model: str, now: float, exclude: Collection[BackendId] = (), avoid: Sequence[BackendId] = ()
    ) -> Pool:
        """Return the pool for `model` ("" = any), cached until the version changes. With `exclude` it is not cached.

        Those to `avoid` are in it only if no other is.
        """
        if now >= self.wake_at:
            self.tick(now)
        if now >= self.unseen.due_at:
            self.unseen.settle(now)
        if self.pools_version != self.version:
            self.pools.clear()
            self.narrowed.clear()
            self.pools_version = self.version
        key = self.models.pool_of(model)
        pool = None if exclude else self.narrowed.get((key, avoid)) if avoid else self.pools.get(key)
        if pool is None:
            pool = self.make_pool(model, exclude, avoid)
            self.counters.last_resorts += pool.last_resort and not pool.silent
            if pool.silent:
                self.counters.silent_resorts += 1
                self.resorted(model)
            if not exclude and not avoid:
                self.pools[key] = pool
            elif not exclude:
                self.narrowed[key, avoid] = pool
        return pool

    def make_pool(
        self,
        model: str,
        exclude: Collection[BackendId] = (),
        avoid: Collection[BackendId] = (),
        then: float | None = None,
    ) -> Pool:
        """Return the pool as it is now or, for a dry run, as it would be at the time `then`. Notes nothing."""
        serving = self.models.serving([b for b in self if not b.draining and not b.behind.as_ranks], model)
        eligible, last_resort, silent = eligible_of(serving, exclude, avoid, then)
        unknown = self.models.lacks(self, model)
        return Pool(eligible, len(self.slots), last_resort=last_resort, unknown=unknown, silent=silent)

    def tick(self, now: float) -> None:
        """End the open times and leases of trials that are over."""
        for backend in self:
            before = backend.vitals.admits
            backend.vitals.tick(now)
            self.version += backend.vitals.admits is not before
        self.wake_at = min((backend.vitals.wake_at for backend in self), default=NEVER_S)

    # -- what happens to them ----------------------------------------------------------------------------------------

    def dispatched(self, id: BackendId, now: float, request: InFlight | None = None, expected_at: float = 0) -> Backend:  # noqa: A002
        """Count a request as in flight; where the circuit is half open, it takes the trial. Returns the backend.
        `expected_at`: when its first token is expected, if it can't be seen."""
        backend = self[id]
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
            self.settle(backend, before, "dispatched")
        return backend

    def reported_hit(self, backend: Backend, generation: int, api: str) -> None:
        """Note that an answer of this process and API reported cached tokens."""
        if generation == backend.generation:
            backend.reuse.hit = True
            backend.reuse.apis.add(api)
            self.reconsider(backend)

    def reconsider(self, backend: Backend) -> None:
        """Let pools know whether a backend reuses prefixes, if that has changed."""
        if backend.reuse.believed is not backend.reuse.happens:
            backend.reuse.believed = not backend.reuse.believed
            self.version += 1

    def finished(
        self,
        id: BackendId,  # noqa: A002
        outcome: Outcome,
        now: float,
        request: InFlight | None = None,
        *,
        judged: bool = True,
    ) -> Sequence[Transition]:
        """End a dispatched request: exactly once for each `dispatched`. Returns the transitions that it caused.

        `request` as when it was dispatched; `judged` as for `Vitals.end`.
        """
        backend = self[id]
        backend.work.end(request or InFlight(), now)
        backend.load -= 1
        seen = backend.seen
        seen.outcomes[outcome] += 1
        if judged and (outcome is not Outcome.SUCCESS or seen.success_rate < 1.0):
            seen.rate(outcome)
        if backend.removed:
            if backend.work.own.inflight == 0:
                self.free(backend)
            return ()
        vitals = backend.vitals
        if outcome is Outcome.SUCCESS and vitals.quiet:
            return ()
        before = vitals.state
        vitals.end(outcome, now, judged=judged)
        return [*self.settle(backend, before, outcome.value), *self.revive(backend, now)]

    def blamed(self, fault: Fault, now: float) -> Sequence[Transition]:
        """Count a failure of a finished request against its backend, unless another process is behind that by now."""
        backend = self.current(fault.backend)
        if backend is None or backend.generation != fault.generation:
            return ()
        backend.seen.rate(fault.outcome)
        before = backend.vitals.state
        backend.vitals.end(fault.outcome, now, cause=fault.cause)
        return self.settle(backend, before, fault.outcome.value)

    def probed(self, id: BackendId, result: ProbeResult, now: float) -> Sequence[Transition]:  # noqa: A002
        """Take in a probe's result, unless the backend has been removed meanwhile. Returns the transitions."""
        backend = self.current(id)
        if backend is None:
            return ()
        vitals, seen = backend.vitals, backend.seen
        seen.probe(result)
        before = vitals.state
        vitals.tick(now)
        changed = self.judge(backend, result, now)
        if result.lacks is not None and result.lacks != seen.lacks:
            seen.lacks = result.lacks
            self.models.relist(self)
        backend.reuse.page_read(result.caches, result.hit_tokens)
        self.reconsider(backend)
        changed += backend.key_changed(result.key_refused)
        began = now - result.latency_s
        is_overruled = result.timed_out and seen.received_at > began
        self.counters.probes_overruled += is_overruled
        if result.ok or result.status:
            seen.received_at = seen.probed_at = now
        ok, received_at = result.ok or is_overruled, seen.received_at
        vitals.probe(ok, now, began=began, received_at=received_at, timed_out=result.timed_out)
        if result.models is not None:
            changed += self.set_models(backend, result.models, result.cards)
        if result.marks is not None and not backend.behind.as_ranks:  # else its ranks show theirs
            self.names.probed(backend.id, result.marks, now)
        changed += self.names.judge(backend, self.current, now)
        return [*self.settle(backend, before, result.detail or "probe"), *changed, *count_caches(backend, now)]

    def doubted(self, id: BackendId, observers: int, now: float) -> Sequence[Transition]:  # noqa: A002
        """Call a backend unhealthy if two peers, or one peer and a failed probe or request here, say so. If something
        came from it since its last probe, and just now, the next probe here decides."""
        backend = self[id]
        vitals = backend.vitals
        if observers < 1 or (observers < 2 and vitals.streak >= 0 and not vitals.faults):
            return ()
        before = vitals.state
        if backend.seen.received_at > max(backend.seen.probed_at, now - ALIVE_S):
            vitals.doubt(now)
            return ()
        vitals.condemn(now)
        return self.settle(backend, before, f"{observers} peers say so")

    def received(self, id: BackendId, now: float) -> Sequence[Transition]:  # noqa: A002
        """Note that something came from the engine just now: a page, an event. Answers note it themselves."""
        backend = self.current(id)
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
        self.models.relist(self)
        backend.reuse = Reuse()
        self.generations_used[backend.id] = backend.generation
        backend.vitals.feed(Event.RESTARTED, now)
        self.pauses.forget(backend.id)
        self.refusals.forget(backend.id)
        self.counters.backend_restarts += 1
        self.version += 1
        self.restarted(backend)
        return [Transition(backend.id, backend.name, "generation", str(before), str(backend.generation), why)]

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
        if backend.cards != cards:
            backend.cards, backend.lengths = cards, lengths_of(cards)
            self.measure()
        models = tuple(sorted(set(names)))
        if models == backend.models:
            return []
        before = "unknown" if backend.models is None else in_short(backend.models)
        backend.models = models
        self.models.relist(self)
        self.version += 1
        return [Transition(backend.id, backend.name, "models", before, in_short(models), "listed by the engine")]

    def measure(self) -> None:
        self.shortest = min((length for backend in self for length in backend.lengths.values()), default=NO_END)

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

    def settle(self, backend: Backend, before: VitalState, why: str) -> list[Transition]:
        """Update the version and the next wake-up after a change of vitals. Returns the transitions."""
        after = backend.vitals.state
        self.version += (after.admits, after.silent) != (before.admits, before.silent)
        self.wake_at = min(self.wake_at, backend.vitals.wake_at)
        pairs = (("health", before.health, after.health), ("circuit", before.circuit, after.circuit))
        return [
            Transition(backend.id, backend.name, what, old.value, new.value, why)
            for what, old, new in pairs
            if old is not new
        ]
