"""Tracks which prefixes one engine holds, each at the nearest tier, and what changed since the last call of `drain`.

Two blocks of an engine may share a prefix of ours: blocks of 32 tokens that differ only after the first 16. So each
fingerprint counts its holders by tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ranvier_py.core.engine_cache.sources.event_values import HELD_TIERS, Tier
from ranvier_py.core.ids import UNKNOWN, Fingerprint

HOLDERS_BITS = 24  # there can be no more blocks than that
HOLDERS_MASK = (1 << HOLDERS_BITS) - 1
ONE_HOLDER = (*(1 << HOLDERS_BITS * tier for tier in HELD_TIERS), 0)  # at ABSENT there are no holders to count
GPU, ABSENT = Tier.GPU, Tier.ABSENT
make = tuple.__new__  # makes named tuples in half the time of their own `__new__`


class Change(NamedTuple):
    """A prefix is at `tier` now; ABSENT: it is gone. `parent`: the next shorter prefix at an anchor; 0: none."""

    fingerprint: Fingerprint
    tokens: int
    tier: Tier
    parent: Fingerprint


class HeldPrefixes:
    """The number of blocks that hold each prefix, by tier."""

    def __init__(self) -> None:
        self._holders: dict[Fingerprint, int] = {}
        self._before: dict[Fingerprint, tuple[int, Fingerprint, int]] = {}  # tokens, parent, holders at last `drain`

    def __len__(self) -> int:
        return len(self._holders)

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> dict[Fingerprint, Tier]:
        """Return those of these prefixes that are held, with their tiers."""
        found = zip(fingerprints, map(self._holders.get, fingerprints), strict=True)
        return {fingerprint: nearest(holders) for fingerprint, holders in found if holders}

    def tiers(self) -> Mapping[Fingerprint, Tier]:
        """All prefixes that are held, with their tiers. O(all)."""
        return {fingerprint: nearest(holders) for fingerprint, holders in self._holders.items()}

    def move(self, fingerprint: Fingerprint, tokens: int, parent: Fingerprint, old: Tier, new: Tier) -> None:
        """Move one holder of this prefix from one tier to another."""
        holders = self._holders
        then = holders.get(fingerprint, 0)
        now = then - ONE_HOLDER[old] + ONE_HOLDER[new]
        if now:
            holders[fingerprint] = now
            if then and nearest(then) is nearest(now):
                return
        else:
            del holders[fingerprint]
        if fingerprint not in self._before:
            self._before[fingerprint] = (tokens, parent, then)

    def drain(self, most: int) -> tuple[Change, ...]:
        """Return what differs from the last call, for at most `most` prefixes."""
        changes: list[Change] = []
        chosen = self._before if len(self._before) <= most else dict(islice(self._before.items(), most))
        holders, append = self._holders.get, changes.append
        for fingerprint, (tokens, parent, then) in chosen.items():
            now = holders(fingerprint, 0)
            tier = GPU if now & HOLDERS_MASK else nearest(now)
            if tier is not (GPU if then & HOLDERS_MASK else nearest(then)):
                append(make(Change, (fingerprint, tokens, tier, parent)))
        if chosen is not self._before:
            for fingerprint in chosen:
                del self._before[fingerprint]
        else:
            self._before.clear()
        return tuple(changes)

    @property
    def undrained(self) -> int:
        """Changed prefixes that `drain` has not looked at yet."""
        return len(self._before)

    def replaces(self, other: HeldPrefixes) -> None:
        """Let `drain` report from now on how this differs from what the other has reported, which is used up. O(what
        both hold)."""
        reported = other._before
        for fingerprint, holders in other._holders.items():
            reported.setdefault(fingerprint, (0, UNKNOWN, holders))
        for fingerprint, (tokens, parent, _) in self._before.items():
            reported[fingerprint] = (tokens, parent, reported.get(fingerprint, (0, UNKNOWN, 0))[2])
        self._before = reported


def nearest(holders: int) -> Tier:
    if holders & HOLDERS_MASK:
        return GPU
    if not holders:
        return ABSENT
    return next(tier for tier in HELD_TIERS if holders >> (HOLDERS_BITS * tier) & HOLDERS_MASK)
