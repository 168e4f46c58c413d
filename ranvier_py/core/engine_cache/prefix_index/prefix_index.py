"""Continuum's tier 4 index: prefix hash -> which backend holds how many tokens of it, and in which tier.

Rule: a prefix is named by Continuum's key of the opening (64 hex digits, `placement.chwbl`) or by one of our token
fingerprints (16), which our bridge sends; both are just names. No answer is cached, so none is older than the last
event (CX28). What other routers share (`shared_index`) is added; the index's own entries take precedence.
Bounds: an entry lives `ttl_s` after its last event; at `entries_max` pairs (CX24) the oldest tenth is dropped.
Source: Continuum Router, «KV cache optimization», tier 4 (CR15 to CR19).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Histogram, counter, histogram
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.placement.kv_score import IndexedPrefix

ENTRIES_MIN, ENTRIES_MAX = 100, 10_000_000  # what may be configured, as Continuum has it
TTL_MIN_S, TTL_MAX_S = 1.0, 86_400.0
EVICTED_SHARE = 10  # one in so many entries is dropped when the index is full
EXPIRE_STEPS_MAX = 2_000  # entries that one call of `expire` looks at

PREFIX_CHARACTERS_MAX = 128
"""Length of a SHA-512 in hex; longer names are refused."""

TOKENS_MAX = 2**32 - 1

QUERY_BUCKETS_S = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 1e-3, 1e-2)
OVERLAP_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

NOTHING: Mapping[BackendId, IndexedPrefix] = MappingProxyType({})


class Verb(Enum):
    """What an event reports about a prefix."""

    CREATED = "cache_created"
    EVICTED = "cache_evicted"
    OFFLOADED = "cache_offloaded"
    RELOADED = "cache_reloaded"
    PURGED = "cache_purged"


KINDS: Mapping[str, Verb] = {kind.value: kind for kind in Verb}


class IndexEvent(NamedTuple):
    """One event. `tokens` is None where the source did not say."""

    kind: Verb
    prefix: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class IndexSettings(Options):
    """What the index holds, and for how long.

    `eviction_is_offload` is Continuum's `treat_eviction_as_offload`. There it is true by default, which without an
    offloader credits each eviction for ten minutes; so here it takes effect only together with `offloading` (CX22).
    """

    SECTION = "Index"
    PREFIX = "kv_index_"

    entries_max: int = option(
        100_000,
        "Pairs of prefix and backend that event streams (kv_index of a backend) may fill.",
        least=ENTRIES_MIN,
        most=ENTRIES_MAX,
    )
    ttl_s: float = option(  # CX1
        600.0, "An entry is forgotten this long after its last event.", least=TTL_MIN_S, most=TTL_MAX_S
    )
    offloading: bool = option(
        False, "Engines keep what they evict in slower storage: such entries count for less, not for nothing."
    )
    eviction_is_offload: bool = option(
        True, "With kv_index_offloading, an eviction that does not say more is an offload."
    )


@dataclass(slots=True)
class SourceCounts:
    """Events of one backend that changed the index, since start."""

    created: int = 0  # or reloaded, or offloaded
    evicted: int = 0


@dataclass(slots=True)
class IndexCounters:
    query_latency_seconds: Histogram = histogram("Seconds that one query of the prefix index took.", QUERY_BUCKETS_S)
    overlap_score: Histogram = histogram(
        "Share of the prompt held by the chosen backend, of requests placed by kv_score.", OVERLAP_BUCKETS
    )
    routing_decisions: dict[str, int] = counter("Placements by the policy kv_score, by reason.", label="decision")
    hits: int = 0  # questions for which there was a holder
    evictions: int = 0  # entries dropped for want of room, and those expired
    by_backend: dict[BackendId, SourceCounts] = field(default_factory=dict)


class KvIndex:
    """Holds the entries, ordered by their last event, and the holders of each prefix.

    Args:
        clock: returns seconds from any origin; measures how long look-ups take.
    """

    def __init__(self, settings: IndexSettings | None = None, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.settings = settings or IndexSettings()
        self.counters = IndexCounters(routing_decisions={"kv_aware": 0, "fallback": 0})
        self.shared: Callable[[str, float], Mapping[BackendId, IndexedPrefix]] = lambda *_: NOTHING
        self.shared_view = self.shared  # the same, but asks nothing
        self.on_change: Callable[[str, BackendId], object] = lambda *_: None  # for a mirror; not called by `clear`
        self._clock = clock
        self._entries: OrderedDict[tuple[str, BackendId], IndexedPrefix] = OrderedDict()  # oldest event first
        self._holders: dict[str, dict[BackendId, None]] = {}

    def __copy__(self) -> KvIndexView:
        return KvIndexView(self)

    def __len__(self) -> int:
        """Pairs of prefix and backend."""
        return len(self._entries)

    @property
    def prefixes(self) -> int:
        return len(self._holders)

    def apply(self, backend: BackendId, event: IndexEvent, now: float) -> bool:
        """Apply an event of a backend's source. Returns whether it changed anything."""
        if not event.prefix or len(event.prefix) > PREFIX_CHARACTERS_MAX:
            return False
        counts = self.counters.by_backend.setdefault(backend, SourceCounts())
        known = self._entries.get((event.prefix, backend))
        reload = self._reload_after(event.kind)
        if reload is None or (event.kind is Verb.EVICTED and known is None):
            counts.evicted += known is not None
            return self._drop(event.prefix, backend)
        # the document has no default (CX23)
        tokens = event.tokens if event.tokens is not None else known.tokens if known is not None else 0
        if not 0 <= tokens <= TOKENS_MAX:
            return False
        if event.kind is Verb.EVICTED:
            counts.evicted += 1
        else:
            counts.created += 1
        self._put(event.prefix, backend, IndexedPrefix(tokens, reload, now + self.settings.ttl_s))
        return True

    def holders(self, prefix: str, now: float) -> Mapping[BackendId, IndexedPrefix]:
        """Return who holds this prefix, and drop expired entries."""
        began = self._clock()
        found: dict[BackendId, IndexedPrefix] = {}
        for backend in tuple(self._holders.get(prefix, ())):
            entry = self._entries[prefix, backend]
            if entry.until > now:
                found[backend] = entry
            else:
                self._drop(prefix, backend)
                self.counters.evictions += 1
        self.counters.hits += bool(found)
        others = self.shared(prefix, now)
        self.counters.query_latency_seconds.observe(max(0.0, self._clock() - began))
        return {**others, **found} if others else found

    def view(self, prefix: str, now: float) -> Mapping[BackendId, IndexedPrefix]:
        """Return what `holders` would, without counting, dropping or asking anything."""
        entries = {backend: self._entries[prefix, backend] for backend in self._holders.get(prefix, ())}
        found = {backend: entry for backend, entry in entries.items() if entry.until > now}
        return {**self.shared_view(prefix, now), **found}

    def placed(self, overlap: float | None) -> None:
        """Count a placement: by this share of overlap; None: by the ring, or by load if there was no key."""
        if overlap is None:
            self.counters.routing_decisions["fallback"] += 1
        else:
            self.counters.routing_decisions["kv_aware"] += 1
            self.counters.overlap_score.observe(overlap)

    def peek(self, prefix: str, backend: BackendId) -> IndexedPrefix | None:
        """Return one backend's entry for this prefix, even if it has expired. Counts nothing."""
        return self._entries.get((prefix, backend))

    def expire(self, now: float) -> int:
        """Drop expired entries, oldest first: entries are ordered by their last event, hence by their expiry."""
        dropped = 0
        while self._entries and dropped < EXPIRE_STEPS_MAX:
            (prefix, backend), entry = next(iter(self._entries.items()))
            if entry.until > now:
                break
            self._drop(prefix, backend)
            dropped += 1
        self.counters.evictions += dropped
        return dropped

    def forget(self, backends: Iterable[BackendId]) -> int:
        """Drop all entries of these backends: their stream has a gap, or they are gone (CX18). O(all)."""
        gone = frozenset(backends)
        keys = [key for key in self._entries if key[1] in gone]
        for prefix, backend in keys:
            self._drop(prefix, backend)
        return len(keys)

    def pairs(self) -> list[tuple[str, BackendId]]:
        """Return all pairs of prefix and backend, the one with the oldest event first."""
        return list(self._entries)

    def clear(self) -> int:
        """Drop everything. Returns how many entries there were (CX15)."""
        before = len(self._entries)
        self._entries.clear()
        self._holders.clear()
        return before

    def _reload_after(self, kind: Verb) -> bool | None:
        """Whether the engine must reload the prefix after such an event; None: it no longer has it anywhere."""
        if kind is Verb.CREATED or kind is Verb.RELOADED:
            return False
        is_offload = kind is Verb.EVICTED and self.settings.offloading and self.settings.eviction_is_offload
        return True if kind is Verb.OFFLOADED or is_offload else None

    def _put(self, prefix: str, backend: BackendId, entry: IndexedPrefix) -> None:
        key = (prefix, backend)
        if key not in self._entries and len(self._entries) >= self.settings.entries_max:
            self._make_room()
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self._holders.setdefault(prefix, {})[backend] = None
        self.on_change(prefix, backend)

    def _make_room(self) -> None:
        """Drop the oldest tenth: one pause in thousands of events, instead of one with each."""
        for _ in range(max(1, self.settings.entries_max // EVICTED_SHARE)):
            prefix, backend = next(iter(self._entries))
            self._drop(prefix, backend)
            self.counters.evictions += 1

    def _drop(self, prefix: str, backend: BackendId) -> bool:
        if self._entries.pop((prefix, backend), None) is None:
            return False
        holders = self._holders[prefix]
        del holders[backend]
        if not holders:
            del self._holders[prefix]
        self.on_change(prefix, backend)
        return True


class KvIndexView:
    """A view of an index for a dry run: it answers the same, and records nothing."""

    def __init__(self, index: KvIndex) -> None:
        self.holders = index.view

    def placed(self, overlap: float | None) -> None:
        """Count nothing."""
