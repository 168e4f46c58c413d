"""Answers of the index, kept for a moment: Continuum's two phases, `prepare` and then `score`, in one call.

What other routers have shared (`shared_index`) is added to what the index has heard itself; of two words about one
backend the later counts.

Rule: one question for each prefix in `LIFE_S`, however many requests ask, unless the index has changed meanwhile: an
answer that outlives an eviction would send requests to a backend that holds nothing (resolution CX28). The bound is
`PREFIXES_MAX` answers; beyond, all are forgotten.
Source: Continuum Router, «KV cache optimization», tier 4 (CR19).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ranvier_py.core.engine_cache.prefix_index.prefix_index import Entry, KvIndex
from ranvier_py.core.engine_cache.prefix_index.shared_answers import Told
from ranvier_py.core.engine_cache.prefix_index.shared_index import SharedIndex
from ranvier_py.core.histogram import Histogram
from ranvier_py.core.ids import BackendId

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
        self.overlap = Histogram(OVERLAP_BUCKETS, unit="ratio")  # of requests that warmth placed
        self.kv_aware = 0  # placements by the index or by routes
        self.fallback = 0  # by the ring, or with no key by load
        self._clock = clock
        self._answers: dict[str, tuple[int, float, Mapping[BackendId, Entry]]] = {}

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, Entry]:
        """Who holds this prefix."""
        known, version = self._answers.get(prefix), self._version()
        if known is not None and known[0] == version and now < known[1]:
            return known[2]
        began = self._clock()
        found: Mapping[BackendId, Entry] = self.index.query(prefix, now)
        if self.shared is not None:
            found = with_told(found, self.shared.holders(prefix, now), self.index.settings.ttl_s, now)
        self.query_s.observe(max(0.0, self._clock() - began))
        if len(self._answers) >= PREFIXES_MAX:
            self._answers.clear()
        self._answers[prefix] = (version, now + LIFE_S, found)
        return found

    def _version(self) -> int:
        """Both only grow, so their sum changes with each of them."""
        return self.index.version + (self.shared.answers.version if self.shared is not None else 0)

    def placed(self, overlap: float | None) -> None:
        """A request was placed: by this share of its prompt, or not by warmth at all."""
        if overlap is None:
            self.fallback += 1
        else:
            self.kv_aware += 1
            self.overlap.observe(overlap)


def with_told(
    own: Mapping[BackendId, Entry], told: Mapping[BackendId, Told], ttl_s: float, now: float
) -> Mapping[BackendId, Entry]:
    """What this router heard, and where others heard more or later, that."""
    if not told:
        return own
    found = dict(own)
    for backend, (entry, heard_at) in told.items():
        known = own.get(backend)
        if entry.until > now and (known is None or heard_at > known.until - ttl_s):
            found[backend] = entry
    return found
