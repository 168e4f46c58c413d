"""Tracks which worker holds which prefix hash, by the plain push protocol of the Purdue report. Pure.

Rule: an eviction report removes some of a worker's hashes, a sync replaces them all. Added to the report: a sync is
applied in slices, and an eviction that comes meanwhile stands; a worker silent for three syncs is not believed until it
reports again. Invariant: what one worker reports never touches another's hashes (test_purdue_map.py).
Bounds: hashes of one worker and of all; those beyond are refused and counted.
Source: Pandey, Kumar, Khanolkar, Avula, «Stateful cache-aware routing», Purdue 2025 (PU4 to PU11).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter

SLICE_HASHES = 250
"""Hashes of a sync that are applied at once; other work has its turn after each slice."""

HASHES_MAX = 1_000_000
"""Hashes of one worker: a cache of 16 million tokens."""

HASHES_ALL_MAX = 8_000_000  # 1 GB
SILENT_S = 15.0  # three syncs of 5 s


@dataclass(slots=True)
class PushCounters:
    messages: int = counter("Eviction reports and syncs of workers.")
    syncs: int = counter("Syncs of workers: lists of all that one holds.")
    evicted: int = counter("Prefix hashes that workers reported as evicted.")
    evicted_unknown: int = counter("Prefix hashes reported as evicted that were not known.")
    refused: int = counter("Prefix hashes of workers that were not noted for want of room.")
    healed_gone: int = counter("Prefix hashes that a worker's sync showed to be gone.")
    healed_new: int = counter("Prefix hashes that only a worker's sync brought.")
    silenced: int = counter("Times that a worker was silent for too long to be believed.")
    keys_noted: int = counter("Prefix hashes of prompts that were linked to a fingerprint.")
    keys_foreign: int = counter("Prefix hashes of prompts with a salt, or of a model that nobody lists.")
    leases_kept: int = counter("Routes of traffic that a worker confirmed.")
    leases_ended: int = counter("Routes of traffic that no worker confirmed.")
    leases_dropped: int = counter("Leases of routes that were not kept for want of room.")


@dataclass(slots=True)
class PushWorker:
    """One worker's hashes, and when it reported. `model`: the model that the hashes belong to; empty: not given."""

    model: str
    generation: int  # of the engine that it reports about
    hashes: dict[int, None] = field(default_factory=dict)
    reported_at: float = 0.0
    synced_at: float | None = None
    silent: bool = False
    changed: dict[int, None] | None = None  # evicted since the current sync began


class PushMap:
    """The hashes of all workers."""

    def __init__(self) -> None:
        self.counters = PushCounters()
        self.workers: dict[BackendId, PushWorker] = {}
        self._count = 0

    def __len__(self) -> int:
        """Hashes of all workers together."""
        return self._count

    def holders(self, key: int) -> Sequence[BackendId]:
        """Return the workers that hold a hash, without silent ones: the report's forward map could say no more."""
        return [one for one, worker in self.workers.items() if key in worker.hashes and not worker.silent]

    def report(self, backend: BackendId, model: str, now: float, generation: int = 0) -> PushWorker:
        """Note that a message came. A worker that names another model than before begins anew."""
        worker = self.workers.get(backend)
        if worker is None or worker.model != model:
            self.forget(backend)
            worker = self.workers[backend] = PushWorker(model, generation)
        self.counters.messages += 1
        worker.reported_at, worker.silent = now, False
        return worker

    def evict(self, backend: BackendId, keys: Sequence[int]) -> Iterator[Sequence[int]]:
        """Remove hashes of the worker, one slice with each step. Yields the slices."""
        worker = self.workers[backend]
        for start in range(0, len(keys), SLICE_HASHES):
            if self.workers.get(backend) is not worker:
                return
            some = keys[start : start + SLICE_HASHES]
            if worker.changed is not None:
                worker.changed.update(dict.fromkeys(some))
            self.counters.evicted += len(some)
            self.counters.evicted_unknown += sum([not self._drop(worker, key) for key in some])
            yield some

    def sync(self, backend: BackendId, active: Mapping[int, None], now: float) -> Iterator[tuple[list[int], Tier]]:
        """Replace the worker's hashes, one slice with each step. Yields the hashes that went (ABSENT) or came (GPU).

        A sync that begins while another is being applied ends that one, as does closing the iterator.
        """
        worker = self.workers[backend]
        changed: dict[int, None] = {}
        worker.changed = changed
        try:
            for tier, keys in ((Tier.ABSENT, list(worker.hashes)), (Tier.GPU, list(active))):
                for start in range(0, len(keys), SLICE_HASHES):
                    if self.workers.get(backend) is not worker or worker.changed is not changed:
                        return
                    some = [key for key in keys[start : start + SLICE_HASHES] if key not in changed]
                    if tier is Tier.ABSENT:
                        some = [key for key in some if key not in active and self._drop(worker, key)]
                        self.counters.healed_gone += len(some)
                    else:
                        some = [key for key in some if key not in worker.hashes and self._put(worker, key)]
                        self.counters.healed_new += len(some)
                    yield some, tier
            if worker.changed is changed:
                worker.synced_at = now
                self.counters.syncs += 1
        finally:
            if worker.changed is changed:
                worker.changed = None

    def silence(self, now: float) -> None:
        """Stop believing workers that have been silent for too long."""
        for worker in self.workers.values():
            if not worker.silent and now - worker.reported_at >= SILENT_S:
                worker.silent, worker.synced_at = True, None
                self.counters.silenced += 1

    def forget(self, backend: BackendId) -> None:
        """Drop a worker that is gone, or holds nothing."""
        worker = self.workers.pop(backend, None)
        self._count -= len(worker.hashes) if worker is not None else 0

    # Inside

    def _put(self, worker: PushWorker, key: int) -> bool:
        """Add a hash. Returns whether there was room."""
        if len(worker.hashes) >= HASHES_MAX or self._count >= HASHES_ALL_MAX:
            self.counters.refused += 1
            return False
        worker.hashes[key] = None
        self._count += 1
        return True

    def _drop(self, worker: PushWorker, key: int) -> bool:
        """Remove a hash. Returns whether it was there."""
        if key not in worker.hashes:
            return False
        del worker.hashes[key]
        self._count -= 1
        return True
