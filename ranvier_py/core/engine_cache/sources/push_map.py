"""The plain push protocol of the Purdue report: which worker holds which prefix hash. Pure.

The forward map (hash -> workers) and the reverse map (worker -> its hashes) follow two messages: an eviction report
takes hashes from a worker, a sync has all that it holds. What the report lacks is added: a sync is applied in slices
and an eviction that comes meanwhile stands; a worker that is silent for three syncs is not believed until it reports
again; hashes are bounded.

A route that traffic made of a worker has a lease, within which the worker has to confirm it: a snapshot may have been
taken before the prompt was cached, so what it lacks proves nothing of what was served a moment ago.

Invariant: a worker is among the holders of a hash exactly if the hash is among its own; a hash that nobody holds has no
entry. What one worker reports never touches another worker's hashes.
Bounds: hashes of one worker and of all; what is beyond is refused and counted. LEASES_MAX leases, the oldest dropped
and counted: its route then ends by its time to live.
Source: Pandey, Kumar, Khanolkar, Avula, «Stateful cache-aware routing», Purdue 2025 (PU4 to PU11).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.metrics import counter

SLICE_HASHES = 250
"""Of a sync: others have their turn after each."""

LEASE_S = 10.0
"""Two syncs: a snapshot that was taken just before the first token says nothing of it, the next one does."""

LEASES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class PushSettings:
    hashes_max: int = 1_000_000  # of one worker: a cache of 16 million tokens
    hashes_all_max: int = 8_000_000  # 1 GB
    silent_s: float = 15.0  # three syncs of 5 s


@dataclass(slots=True)
class PushCounters:
    messages: int = counter("Eviction reports and syncs of workers.")
    syncs: int = counter("Syncs of workers.")
    evicted: int = counter("Prefix hashes that workers reported as evicted.")
    evicted_unknown: int = counter("Evicted prefix hashes that were not known.")
    refused: int = counter("Prefix hashes for which there was no room.")
    healed_gone: int = counter("Prefix hashes that a sync took away.")
    healed_new: int = counter("Prefix hashes that a sync brought.")
    silenced: int = counter("Times that a worker was silent for too long to be believed.")
    keys_noted: int = counter("Prefix hashes of prompts that were linked to a fingerprint.")
    keys_foreign: int = counter("Prefix hashes of prompts with a salt, or of a model that nobody lists.")
    leases_kept: int = counter("Routes of traffic that a worker confirmed.")
    leases_ended: int = counter("Routes of traffic that no worker confirmed.")
    leases_dropped: int = counter("Leases for which there was no room.")


class PushWorker:
    """One worker's hashes, and when it reported. `model` is the one that its hashes are of; empty: not given."""

    __slots__ = ("changed", "hashes", "model", "reported_at", "silent", "synced_at", "syncs")

    def __init__(self, model: str) -> None:
        self.model = model
        self.hashes: dict[int, None] = {}
        self.reported_at = 0.0
        self.synced_at: float | None = None
        self.silent = False
        self.syncs = 0  # begun
        self.changed: dict[int, None] | None = None  # evicted since the sync in work began


class PushMap:
    """All workers' hashes."""

    def __init__(self, settings: PushSettings | None = None) -> None:
        self.counters = PushCounters()
        self.workers: dict[BackendId, PushWorker] = {}  # the reverse map
        self._settings = settings or PushSettings()
        self._holders: dict[int, tuple[BackendId, ...]] = {}  # the forward map
        self._alone: dict[BackendId, tuple[BackendId, ...]] = {}  # one tuple for all hashes that one worker holds alone
        self._count = 0

    def __len__(self) -> int:
        """Hashes of all workers."""
        return self._count

    def holders(self, key: int) -> Sequence[BackendId]:
        """Workers that hold a hash, as far as they are believed."""
        return [one for one in self._holders.get(key, ()) if not self.workers[one].silent]

    def forward(self) -> Mapping[int, Sequence[BackendId]]:
        """The whole forward map. Not to be changed."""
        return self._holders

    def report(self, backend: BackendId, model: str, now: float) -> PushWorker:
        """A message came. A worker whose hashes are of another model than before begins anew."""
        worker = self.workers.get(backend)
        if worker is None or worker.model != model:
            self.forget(backend)
            worker = self.workers[backend] = PushWorker(model)
            self._alone[backend] = (backend,)
        self.counters.messages += 1
        worker.reported_at, worker.silent = now, False
        return worker

    def evict(self, backend: BackendId, keys: Iterable[int]) -> None:
        worker = self.workers[backend]
        for key in keys:
            if worker.changed is not None:
                worker.changed[key] = None
            self.counters.evicted += 1
            self.counters.evicted_unknown += not self._drop(backend, worker, key)

    def sync(self, backend: BackendId, active: Mapping[int, None], now: float) -> Iterator[tuple[list[int], Tier]]:
        """Make these the worker's hashes, a slice with each step. Yields those that went (ABSENT) or came (GPU).

        A sync that begins while another one is in work ends that one.
        """
        worker = self.workers[backend]
        worker.syncs += 1
        number = worker.syncs
        changed: dict[int, None] = {}
        worker.changed = changed
        for tier, keys in ((Tier.ABSENT, list(worker.hashes)), (Tier.GPU, list(active))):
            for start in range(0, len(keys), SLICE_HASHES):
                if self.workers.get(backend) is not worker or worker.syncs != number:
                    return
                some = [key for key in keys[start : start + SLICE_HASHES] if key not in changed]
                if tier is Tier.ABSENT:
                    some = [key for key in some if key not in active and self._drop(backend, worker, key)]
                    self.counters.healed_gone += len(some)
                else:
                    some = [key for key in some if key not in worker.hashes and self._put(backend, worker, key)]
                    self.counters.healed_new += len(some)
                yield some, tier
        if worker.syncs == number:
            worker.changed, worker.synced_at = None, now
            self.counters.syncs += 1

    def silence(self, now: float) -> None:
        """Workers that have been silent for too long are not believed."""
        for worker in self.workers.values():
            if not worker.silent and now - worker.reported_at >= self._settings.silent_s:
                worker.silent, worker.synced_at = True, None
                self.counters.silenced += 1

    def forget(self, backend: BackendId) -> None:
        """There is no such worker any more, or it holds nothing. O(its hashes)."""
        worker = self.workers.pop(backend, None)
        if worker is not None:
            for key in worker.hashes:
                self._unhold(backend, key)
            self._count -= len(worker.hashes)
            del self._alone[backend]

    # Inside

    def _put(self, backend: BackendId, worker: PushWorker, key: int) -> bool:
        """Whether there was room."""
        settings = self._settings
        if len(worker.hashes) >= settings.hashes_max or self._count >= settings.hashes_all_max:
            self.counters.refused += 1
            return False
        worker.hashes[key] = None
        self._count += 1
        held = self._holders.get(key)
        self._holders[key] = self._alone[backend] if held is None else (*held, backend)
        return True

    def _drop(self, backend: BackendId, worker: PushWorker, key: int) -> bool:
        """Whether it was there."""
        if key not in worker.hashes:
            return False
        del worker.hashes[key]
        self._count -= 1
        self._unhold(backend, key)
        return True

    def _unhold(self, backend: BackendId, key: int) -> None:
        left = tuple([one for one in self._holders[key] if one != backend])
        if not left:
            del self._holders[key]
        else:
            self._holders[key] = left if len(left) > 1 else self._alone[left[0]]


class Leases:
    """(backend, fingerprint) -> when its worker must have confirmed it."""

    def __init__(self, counters: PushCounters) -> None:
        self._ends: BoundedDict[tuple[BackendId, Fingerprint], float] = BoundedDict(LEASES_MAX)  # the first ends first
        self._counters = counters

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, lease: tuple[BackendId, Fingerprint]) -> bool:
        return lease in self._ends

    def begin(self, backend: BackendId, fingerprint: Fingerprint, now: float) -> None:
        """From now on, unless it has one: being served again confirms nothing."""
        if (backend, fingerprint) not in self._ends:
            self._ends[backend, fingerprint] = now + LEASE_S
            self._counters.leases_dropped = self._ends.dropped

    def settle(self, backend: BackendId, fingerprint: Fingerprint) -> None:
        """The worker reported it."""
        self._ends.pop((backend, fingerprint), None)

    def ended(self, now: float) -> Iterator[tuple[BackendId, Fingerprint]]:
        """Those that are over, which end with it."""
        while self._ends:
            lease, until = next(iter(self._ends.items()))
            if until > now:
                return
            del self._ends[lease]
            yield lease
