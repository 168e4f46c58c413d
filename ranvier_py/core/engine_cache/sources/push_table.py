"""What one worker says it holds: hash -> depth and tier, in buckets, each with a sum that shows whether two such tables
are equal.

A worker and a router keep one each. Every 5 s they compare the sum of all; where that differs the sums of the buckets,
and what is in those that differ travels. So 100,000 hashes cost 100 bytes as long as nothing was lost.

Rules: a hash is a number, of 64 bits (our fingerprints) or of 256 (the prefix hashes of the Purdue report). Sums are
those of mixed (hash, tier) modulo 2^64: they find what was lost, not what somebody forged, who is authenticated.
Bounds: the owner's. Cost: 2 us for a change; about 160 bytes for a hash, with its place in the forward map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.prompts.fingerprint import GOLDEN, MASK, mix

BUCKETS = 1024
"""A comparison of buckets is 8 kB; of 100,000 hashes, each that was lost costs some hundred more to be sent."""

TIER_BITS = 3


class Entry(NamedTuple):
    """One hash that is held: its depth in tokens (0: not said), where, and the next shorter one (0: none, not said)."""

    key: int
    tokens: int = 0
    tier: Tier = Tier.GPU
    parent: int = 0

    @property
    def packed(self) -> int:
        return self.tokens << TIER_BITS | self.tier


def tier_in(packed: int) -> Tier:
    return Tier(packed & ((1 << TIER_BITS) - 1))


def tokens_in(packed: int) -> int:
    return packed >> TIER_BITS


def digest_of(key: int, tier: int) -> int:
    return mix((key ^ (tier + 1) * GOLDEN) & MASK)


def bucket_of(key: int) -> int:
    return key % BUCKETS


class HashTable:
    """Hashes in buckets, with the sums of those."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[int, int]] = {}  # bucket -> hash -> depth and tier
        self.sums = [0] * BUCKETS
        self.count = 0
        self.total = 0  # of all sums

    def __len__(self) -> int:
        return self.count

    def __contains__(self, key: int) -> bool:
        return key in self._buckets.get(key % BUCKETS, ())

    def __iter__(self) -> Iterator[int]:
        for bucket in self._buckets.values():
            yield from bucket

    def get(self, key: int) -> int | None:
        """Depth and tier, packed."""
        bucket = self._buckets.get(key % BUCKETS)
        return None if bucket is None else bucket.get(key)

    def tier(self, key: int) -> Tier:
        packed = self.get(key)
        return Tier.ABSENT if packed is None else tier_in(packed)

    def put(self, key: int, packed: int) -> int | None:
        """Returns what was there before."""
        place = key % BUCKETS
        bucket = self._buckets.setdefault(place, {})
        before = bucket.get(key)
        if before == packed:
            return before
        bucket[key] = packed
        if before is None:
            self.count += 1
            self._add(place, digest_of(key, tier_in(packed)))
        else:
            self._add(place, digest_of(key, tier_in(packed)) - digest_of(key, tier_in(before)))
        return before

    def pop(self, key: int) -> int | None:
        """Forget a hash. Returns what was there."""
        place = key % BUCKETS
        bucket = self._buckets.get(place)
        before = None if bucket is None else bucket.pop(key, None)
        if before is not None:
            self.count -= 1
            self._add(place, -digest_of(key, tier_in(before)))
        return before

    def bucket(self, place: int) -> Mapping[int, int]:
        """Not to be changed while it is read."""
        return self._buckets.get(place, {})

    def differing(self, sums: Iterable[int]) -> list[int]:
        """Buckets whose sums are others than these."""
        return [place for place, (ours, theirs) in enumerate(zip(self.sums, sums, strict=True)) if ours != theirs]

    def _add(self, place: int, difference: int) -> None:
        self.sums[place] = (self.sums[place] + difference) & MASK
        self.total = (self.total + difference) & MASK
