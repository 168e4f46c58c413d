"""Real backends as a policy in the shadow sees them: with the load that its own choices have put on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.backends import Outcome, Pool, Registry, Transition
from ranvier_py.core.routing.processes.reuse import Reuse
from ranvier_py.core.routing.rates.work import InFlight, Unseen, Work

POOLS_MAX = 64  # mirrored pools that are kept; one more, and all are forgotten


class Mirrored:
    """A real backend with the load that a shadow has put on it, and what its supposed answers show. The load of peers
    and others is the same in every world."""

    def __init__(self, real: Backend) -> None:
        self.real = real
        self.id = real.id
        self.work = Work(room=real.work.room)
        self.work.set_peers(real.work.peers, real.work.progress_at)
        real.work.mirrors.append(self.work)
        self._reuse, self._reuse_of = Reuse(), real.generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def load(self) -> int:
        return self.work.own.inflight + self.work.peers.requests + self.work.room.foreign

    @property
    def reuse(self) -> Reuse:
        """What supposed answers show of this process; whether it reuses anything is for real ones to show."""
        if self._reuse_of != self.real.generation:
            self._reuse, self._reuse_of = Reuse(), self.real.generation
        self._reuse.believed = self.real.reuse.believed
        return self._reuse


class MirroredRegistry:
    """Answers what a Router asks of a Registry: as the real one does, but with the shadow's own loads."""

    def __init__(self, real: Registry) -> None:
        self.real = real
        self._backends: dict[BackendId, Mirrored] = {}
        self.unseen = Unseen()
        self.pools = MirroredPools(self)

    def __getitem__(self, id: BackendId) -> Mirrored:  # noqa: A002
        return self.mirrored(self.real[id])

    def mirrored(self, real: Backend) -> Mirrored:
        known = self._backends.get(real.id)
        if known is None or known.real is not real:  # an id is used again once its backend is gone
            known = self._backends[real.id] = Mirrored(real)
        return known

    def dispatched(self, backend: Mirrored, now: float, request: InFlight, expected_at: float = 0.0) -> None:
        backend.work.begin(request, now)
        if not request.seen:
            self.unseen.add(backend.work, request, expected_at)

    def finished(
        self,
        backend: Mirrored,
        outcome: Outcome,  # noqa: ARG002  # health is not touched: the real registry judges it
        now: float,
        request: InFlight,
        *,
        judged: bool,  # noqa: ARG002
    ) -> Sequence[Transition]:
        backend.work.end(request, now)
        return ()

    def reported_hit(self, backend: Mirrored, generation: int, api: str) -> None:
        """See `Registry.reported_hit`."""
        if generation == backend.real.generation:
            backend.reuse.apis.add(api)


class MirroredPools:
    """The real pools, of mirrored backends."""

    def __init__(self, registry: MirroredRegistry) -> None:
        self._registry = registry
        self._mirrored: dict[int, tuple[Pool, Pool]] = {}  # real, mirrored

    def pool(
        self, model: str, now: float, exclude: Collection[BackendId] = (), avoid: Sequence[BackendId] = ()
    ) -> Pool:
        self._registry.unseen.settle(now)
        real = self._registry.real.pools.pool(model, now, exclude, avoid)
        known = self._mirrored.get(id(real))
        if known is None or known[0] is not real:
            if len(self._mirrored) >= POOLS_MAX:
                self._mirrored.clear()
            backends = cast("Sequence[Backend]", [self._registry.mirrored(backend) for backend in real.backends])
            pool = Pool(backends, len(real.generations), last_resort=real.last_resort, unknown=real.unknown)
            known = self._mirrored[id(real)] = real, pool
        return known[1]
