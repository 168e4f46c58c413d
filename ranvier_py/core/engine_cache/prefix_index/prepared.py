"""Answers of the index, kept for a moment: Continuum's two phases, `prepare` and then `score`, in one call.

What other routers have shared (`shared_index`) is added to what the index knows itself, which counts more.

Rule: one question for each prefix in `LIFE_S`, however many requests ask, unless the index has changed meanwhile: an
answer that outlives an eviction would send requests to a backend that holds nothing (resolution CX28). The bound is
`PREFIXES_MAX` answers; beyond, all are forgotten.
Source: Continuum Router, «KV cache optimization», tier 4 (CR19).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ranvier_py.core.engine_cache.prefix_index.prefix_index import KvIndex, Storage
from ranvier_py.core.engine_cache.prefix_index.shared_index import SharedIndex
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement.kv_score import IndexedPrefix

LIFE_S = 0.1
PREFIXES_MAX = 4096

QUERY_BUCKETS_S = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 1e-3, 1e-2)
OVERLAP_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class PreparedIndex:
    """An index as a policy asks it.

    Args:
        clock: seconds, for how long questions take; any origin.
    """

    def __init__(self, index: KvIndex, clock: Callable[[], float]) -> None:
        self.index = index
        self.shared: SharedIndex | None = None
        self.query_s = Histogram(QUERY_BUCKETS_S)
        self.overlap = Histogram(OVERLAP_BUCKETS, unit="ratio")  # of requests that the index or routes placed
        self.kv_aware = 0  # placements by the index or by routes
        self.fallback = 0  # by the ring, or with no key by load
        self._clock = clock
        self._answers: dict[str, tuple[int, float, Mapping[BackendId, IndexedPrefix]]] = {}

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, IndexedPrefix]:
        """Who holds this prefix."""
        shared = self.shared
        version = self.index.version + (shared.version if shared is not None else 0)  # both only grow
        known = self._answers.get(prefix)
        if known is not None and known[0] == version and now < known[1]:
            return known[2]
        began = self._clock()
        entries = self.index.query(prefix, now)
        if shared is not None:
            entries = {**shared.holders(prefix, now), **entries}
        found = {
            backend: IndexedPrefix(entry.tokens, entry.storage is Storage.WARM) for backend, entry in entries.items()
        }
        self.query_s.observe(max(0.0, self._clock() - began))
        if len(self._answers) >= PREFIXES_MAX:
            self._answers.clear()
        self._answers[prefix] = (version, now + LIFE_S, found)
        return found

    def placed(self, overlap: float | None) -> None:
        """A request was placed: by this share of its prompt, or by none."""
        if overlap is None:
            self.fallback += 1
        else:
            self.kv_aware += 1
            self.overlap.observe(overlap)
