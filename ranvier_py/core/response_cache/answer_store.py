"""Keeps answers in memory. The least recently used is dropped first, and none outlives `ttl_s`.

Bounds: entries and bytes. Cost: a look-up and a move in a dictionary.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.options import Options, option, part, seconds
from ranvier_py.core.response_cache.cache_keys import CacheKeyOptions
from ranvier_py.core.response_cache.invalidations import EVERYTHING, Invalidations, VoidScope, parts_of
from ranvier_py.core.response_cache.stored_answers import StoredAnswer

ENTRY_BYTES = 700
"""Bytes of an entry beside its bodies: key, record, place in the dictionary."""


@dataclass(frozen=True, slots=True)
class ResponseCacheOptions(Options):
    """The response cache of a node."""

    SECTION = "Responses"
    PREFIX = "response_cache_"

    enabled: bool = option(
        False,
        "Answer requests of temperature 0 that were answered before without an engine. Each credential has answers of "
        "its own, and loses them when an engine refuses it (401, 403). Requests that only a cookie or a forwarded user "
        "identifies are passed by, and so are answers whose cache-control forbids it.",
        key="response_cache",
    )
    eligible: CacheKeyOptions = part(CacheKeyOptions)
    backend: str = option(
        "memory",
        "Where answers are kept: in this node's memory, in Redis or Valkey, or in the memory of all nodes of the "
        "cluster: what a node lacks it fetches from a peer, sealed with the cluster's key. cluster needs "
        "cluster_key_file, or several workers, and no tenant_isolation.",
        one_of=("memory", "cluster", "redis"),
    )
    capacity: int = option(1000, "Answers kept; the least recently used goes first.", least=1)
    bytes_max: int = option(256 * 2**20, "Memory for the answers of the response cache.", least=65_536)
    ttl_s: float = seconds(300.0, "An answer is kept so long.")
    answer_bytes_max: int = option(2**20, "Largest answer that is kept.", least=1)
    stream_bytes_max: int = option(10 * 2**20, "Largest stream that is kept, as it came.", least=1)
    peer_timeout_s: float = seconds(
        0.02, "With cluster: a request waits for the answer of a peer that has it no longer than this."
    )


@dataclass(slots=True)
class ResponseCacheCounters:
    """What the response cache did since the start."""

    requests: dict[str, int] = counter(
        "Requests by what the response cache made of them: hit, miss or skip.", label="result"
    )
    shared: int = counter("Hits that waited for an equal request under way and got its answer as it came.")
    unkept: int = counter(
        "Answers to eligible requests that were not kept: too large, an error, cut off or void by then."
    )
    refused: int = counter("Requests that an engine refused (401, 403), which voids answers of their credential.")
    refused_unspread: int = counter(
        "Refusals of a credential that peers and Redis do not know of: too many, or too soon."
    )
    evictions: int = counter("Answers dropped from the response cache for want of room.")
    saved_prompt_tokens: int = counter("Prompt tokens of hits, which no engine had to read.")
    saved_output_tokens: int = counter("Output tokens of hits, which no engine had to make.")
    entries: int = gauge("Answers in the memory of the response cache.")
    size_bytes: int = gauge("Bytes of memory that the response cache's answers take.")

    @property
    def hit_rate(self) -> float:
        """Hits as a share of hits and misses, since the start."""
        hits, misses = self.requests["hit"], self.requests["miss"]
        return hits / max(1, hits + misses)


class AnswerStore:
    """Answers by key.

    Attributes:
        invalidations: those that void answers, however late an answer comes.
        kept, dropped: callbacks, called for each answer that is kept or dropped, so that others know what is here.
    """

    def __init__(self, options: ResponseCacheOptions) -> None:
        self.options = options
        self.counters = ResponseCacheCounters(requests={"hit": 0, "miss": 0, "skip": 0})
        self.invalidations = Invalidations(options.ttl_s)
        self.kept: Callable[[bytes, StoredAnswer], object] = lambda *_: None
        self.dropped: Callable[[bytes], object] = lambda _: None
        self._kept_of = Counter[bytes]()  # answers of each credential
        self._answers: OrderedDict[bytes, StoredAnswer] = OrderedDict()

    def find(self, key: bytes, now: float, max_age_s: float) -> StoredAnswer | None:
        """Return the answer if it is no older than `max_age_s`. An expired one is dropped."""
        found = self._answers.get(key)
        if found is None:
            return None
        age_s = now - found.stored_at
        if age_s >= self.options.ttl_s:
            self._drop(key)
            return None
        if age_s > max_age_s or max_age_s <= 0:
            return None
        self._answers.move_to_end(key)
        return found

    def has_any(self, credential: bytes) -> bool:
        """Whether an answer of this credential is kept."""
        return self._kept_of[credential] > 0

    def keep(self, key: bytes, answer: StoredAnswer) -> None:
        if key in self._answers:
            self._drop(key)
        counters = self.counters
        self._answers[key] = answer
        self._kept_of[parts_of(answer.tenant)[-1]] += 1
        counters.entries += 1
        counters.size_bytes += answer.size + ENTRY_BYTES
        self.kept(key, answer)
        self.trim()

    def trim(self) -> None:
        """Drop the least recently used answers while there are too many, or too many bytes."""
        counters, options = self.counters, self.options
        while counters.entries > options.capacity or counters.size_bytes > options.bytes_max:
            self._forget(*self._answers.popitem(last=False))
            counters.evictions += 1

    def void(self, scope: VoidScope = EVERYTHING, before: float = inf) -> int:
        """Drop the answers of this scope that were stored at `before` or earlier. Returns how many."""
        chosen = [
            key
            for key, answer in self._answers.items()
            if scope.covers(answer.model, answer.tenant) and answer.stored_at <= before
        ]
        for key in chosen:
            self._drop(key)
        return len(chosen)

    def _drop(self, key: bytes) -> None:
        self._forget(key, self._answers.pop(key))

    def _forget(self, key: bytes, answer: StoredAnswer) -> None:
        """Count an answer as dropped that is none of these any more."""
        counters, kept_of = self.counters, self._kept_of
        counters.entries -= 1
        counters.size_bytes -= answer.size + ENTRY_BYTES
        credential = parts_of(answer.tenant)[-1]
        kept_of[credential] = left = kept_of[credential] - 1
        if not left:
            del kept_of[credential]
        self.dropped(key)
