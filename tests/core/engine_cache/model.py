"""The slow, plain truth that a residency has to equal: every block as it was told, every question a walk."""

from __future__ import annotations

import numpy as np

from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.residency_values import Changes, Scope
from ranvier_py.core.engine_cache.sources.event_values import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    Tier,
    TierCleared,
)
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher

KEY = b"sixteen bytes or more"
SIZE = 16
PLAIN = Scope(None, None, None)


def hasher() -> TokenHasher:
    return TokenHasher(KEY, SIZE)


def namespace_of(scope: Scope) -> Fingerprint | None:
    """Another one for each adapter and salt; none for an adapter called `foreign`."""
    if scope.lora_name == "foreign":
        return None
    return Fingerprint(1 + sum(map(ord, f"{scope.lora_name}/{scope.lora_id}/{scope.salt}")))


def fingerprint(tokens: list[int], scope: Scope = PLAIN) -> Fingerprint:
    """Of a whole number of blocks of ours."""
    assert len(tokens) % SIZE == 0
    return fingerprints(tokens, scope)[len(tokens)]


def fingerprints(tokens: list[int], scope: Scope = PLAIN) -> dict[int, Fingerprint]:
    """Of all prefixes of whole blocks of ours, by their ends."""
    namespace = namespace_of(scope)
    assert namespace is not None
    own, ends = hasher(), range(SIZE, len(tokens) + 1, SIZE)
    found = own.extend(own.start(namespace), np.array(tokens, dtype=np.uint32), ends)
    return {end: state.end[1] for end, state in zip(ends, found, strict=True)}


class Model:
    """Blocks that were told once stay known here for ever, so events must never tell one name twice differently."""

    def __init__(self) -> None:
        self.reported: dict[EngineHash, tuple[EngineHash | None, list[int], Scope]] = {}
        self.copies: dict[tuple[EngineHash, Tier], int] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            parent, ids, width = event.parent, event.ids.tolist(), event.block_tokens
            for place, key in enumerate(event.hashes):
                if ids:
                    own = ids[place * width : (place + 1) * width]
                    self.reported[key] = (parent, own, Scope(event.lora_name, event.lora_id, event.salt))
                self.copies[key, event.tier] = self.copies.get((key, event.tier), 0) + 1
                parent = key
        elif isinstance(event, BlocksRemoved):
            for key in event.hashes:
                self.copies[key, event.tier] = max(0, self.copies.get((key, event.tier), 0) - 1)
        else:
            tier = event.tier if isinstance(event, TierCleared) else None
            self.copies = {place: count for place, count in self.copies.items() if tier not in (None, place[1])}

    def block_table(self, tier: Tier) -> dict[EngineHash, int]:
        return {key: count for (key, at), count in self.copies.items() if at is tier and count}

    def tiers(self) -> dict[Fingerprint, Tier]:
        """Every prefix of whole blocks of ours, at the nearest tier where all of it is."""
        found: dict[Fingerprint, Tier] = {}
        for key in {key: 0 for (key, _), count in self.copies.items() if count}:
            path = self.path(key)
            if path is None:
                continue
            tokens = [token for _, own, _ in path for token in own]
            tier = max(tier for tier, _, _ in path)
            start = len(tokens) - len(path[-1][1])
            for depth in range(SIZE, len(tokens) + 1, SIZE):
                if depth > start and tier is not Tier.ABSENT:
                    name = fingerprint(tokens[:depth], path[0][2])
                    found[name] = min(found.get(name, Tier.ABSENT), tier)
        return found

    def path(self, key: EngineHash) -> list[tuple[Tier, list[int], Scope]] | None:
        """Nearest tier, tokens and scope of each block from the start of the prompt to this one; None if one is
        unknown."""
        path = []
        at: EngineHash | None = key
        while at is not None:
            if at not in self.reported or len(path) > len(self.reported):
                return None
            nearest = min((tier for tier in Tier if self.copies.get((at, tier))), default=Tier.ABSENT)
            path.append((nearest, *self.reported[at][1:]))
            at = self.reported[at][0]
        return path[::-1]


class Listener:
    """Sums up what a residency reports."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.tiers: dict[Fingerprint, Tier] = {}
        self.tokens: dict[Fingerprint, int] = {}
        self.parents: dict[Fingerprint, Fingerprint] = {}

    def receive(self, steps_max: int = 1000) -> Changes:
        changes = self.residency.settle(steps_max)
        if changes.cleared:
            self.tiers.clear()
        for change in changes.changes:
            assert self.tiers.get(change.fingerprint, Tier.ABSENT) is not change.tier, "no change at all"
            self.tokens[change.fingerprint] = change.tokens
            self.parents[change.fingerprint] = change.parent
            if change.tier is Tier.ABSENT:
                del self.tiers[change.fingerprint]
            else:
                self.tiers[change.fingerprint] = change.tier
        return changes

    def receive_all(self, steps_max: int = 1000) -> None:
        while not self.receive(steps_max).complete:
            pass
