"""Which backends may be asked for a model.

Rule: a backend is eligible while it is not draining, not unhealthy, its circuit lets a request through, and it serves
the model; when none is, pools fail open (`blame.eligibility`). Invariant: `version` grows when any pool may differ
(test_backends.py). Bounds: POOLS_MAX, NARROWED_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Pool, RegistryCounters
from ranvier_py.core.routing.backend_ids import BackendIds
from ranvier_py.core.routing.blame.context_lengths import NO_END
from ranvier_py.core.routing.blame.eligibility import eligible_of
from ranvier_py.core.routing.health import NEVER_S
from ranvier_py.core.routing.models.model_names import ModelNames
from ranvier_py.core.routing.rates.work import Unseen

POOLS_MAX = 4096  # of as many models and adapters
NARROWED_MAX = 256  # pools that leave out backends to be avoided, kept until anything changes


class Pools:
    """The pools of one node. `version` grows with every change of eligibility."""

    def __init__(
        self, ids: BackendIds, unseen: Unseen, counters: RegistryCounters, resorted: Callable[[str], object]
    ) -> None:
        self.version = 0
        self.names = ModelNames()
        self.shortest = NO_END  # of the known lengths of all backends and models
        self._ids, self._unseen, self._counters = ids, unseen, counters
        self._resorted = resorted  # called with a model that only silent backends serve
        self._by_model: BoundedDict[str | None, Pool] = BoundedDict(POOLS_MAX)  # None: one that nobody lists
        self._narrowed: BoundedDict[tuple[str | None, Sequence[BackendId]], Pool] = BoundedDict(NARROWED_MAX)
        self._made_at = -1  # the version
        self._wake_at = NEVER_S  # when the first open time, or lease of a trial, ends

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._by_model)

    def engines(self, model: str) -> tuple[bool, Sequence[frozenset[str]]]:
        """Return whether any backend that may serve `model` is hosted, and what the cards of each are owned by."""
        serving = [backend for backend in self._ids if backend.catalog.serves(model)]
        return any(backend.catalog.hosted for backend in serving), [backend.catalog.owned_by for backend in serving]

    def pool(
        self, model: str, now: float, exclude: Collection[BackendId] = (), avoid: Sequence[BackendId] = ()
    ) -> Pool:
        """Return the pool for `model` ("" = any), cached until the version changes. With `exclude` it is not cached.

        Those to `avoid` are in it only if no other is.
        """
        if now >= self._wake_at:
            self.tick(now)
        if now >= self._unseen.due_at:
            self._unseen.settle(now)
        if self._made_at != self.version:
            self._by_model.clear()
            self._narrowed.clear()
            self._made_at = self.version
        if not exclude and not avoid and (known := self._by_model.get(model)) is not None:
            return known  # the usual case: a pool is kept under the name of each model that is listed
        key = self.names.pool_of(model)
        pool = None if exclude else self._narrowed.get((key, avoid)) if avoid else self._by_model.get(key)
        if pool is None:
            pool = self.make_pool(model, exclude, avoid)
            self._counters.last_resorts += pool.last_resort and not pool.silent
            if pool.silent:
                self._counters.silent_resorts += 1
                self._resorted(model)
            if not exclude and not avoid:
                self._by_model[key] = pool
            elif not exclude:
                self._narrowed[key, avoid] = pool
        return pool

    def make_pool(
        self,
        model: str,
        exclude: Collection[BackendId],
        avoid: Collection[BackendId],
        then: float | None = None,
    ) -> Pool:
        """Return the pool as it is now or, for a dry run, as it would be at the time `then`. Notes nothing."""
        serving = self.names.serving([b for b in self._ids if not b.draining and not b.behind.as_ranks], model)
        eligible, last_resort, silent = eligible_of(serving, exclude, avoid, then)
        unknown = self.names.lacks(self._ids, model)
        return Pool(eligible, len(self._ids.slots), last_resort=last_resort, unknown=unknown, silent=silent)

    def tick(self, now: float) -> None:
        """End the open times and leases of trials that are over."""
        for backend in self._ids:
            before = backend.vitals.admits
            backend.vitals.tick(now)
            self.version += backend.vitals.admits is not before
        self._wake_at = min((backend.vitals.wake_at for backend in self._ids), default=NEVER_S)

    def wake(self, at: float) -> None:
        """Look at the vitals again at this time, or sooner."""
        self._wake_at = min(self._wake_at, at)

    def relist(self) -> None:
        """Take new lists of models, of backends that may have come or gone."""
        self.names.relist(self._ids)
        self.measure()
        self.version += 1

    def measure(self) -> None:
        """Take new lengths of contexts."""
        lengths = (length for backend in self._ids for length in backend.catalog.lengths.values())
        self.shortest = min(lengths, default=NO_END)
