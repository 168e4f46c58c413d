"""KV cache events as values, independent of engine and encoding.

Events have other names here than on the wire: `BlocksStored` is BlockStored, for a run of blocks; `BlocksRemoved` is
BlockRemoved, `CacheCleared` is AllBlocksCleared, `TierCleared` is TierBlocksCleared. An engine's block hash is kept
only as a name: bytes as they came, numbers modulo 2^64, so that signed and unsigned spellings are one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ranvier_py.core.prompts.boundaries import TokenIds

EngineHash = int | bytes
"""An engine's name of a block. It means nothing to another engine, nor to the same one after a restart."""

ExtraKey = str | bytes | int | tuple[object, ...]
"""What an engine hashed beside the tokens of a block: adapter, salt (text), media (identifier, offset), embeddings."""


class Tier(IntEnum):
    """Where a block is kept. Lower is nearer to the model; a prefix is as near as the farthest of its blocks."""

    GPU = 0
    CPU = 1
    DISK = 2
    EXTERNAL = 3  # shared with other engines, or an unknown medium
    ABSENT = 4


GPU = Tier.GPU
HELD_TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.EXTERNAL)

MEDIA = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,  # SGLang
    "CPU_TIER1": Tier.CPU,
    "DISK": Tier.DISK,
    "FS": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "OBJ": Tier.EXTERNAL,
}
"""Tier by `medium`, as vLLM, SGLang and TensorRT-LLM write it."""


def tier_of(medium: str | None, locality: str | None) -> Tier:
    """Return the tier: GPU for engines that name no medium, EXTERNAL for a REMOTE copy, which is no engine's own."""
    if locality is not None and locality.upper() == "REMOTE":
        return Tier.EXTERNAL
    if medium is None:
        return Tier.GPU
    found = MEDIA.get(medium)
    return found if found is not None else MEDIA.get(medium.upper(), Tier.EXTERNAL)


class BlocksStored(NamedTuple):
    """Consecutive blocks were stored; those of an offloading tier may come without tokens.

    `token_bytes` are the tokens of all blocks as 32-bit numbers in this machine's byte order; `ids` reads them.
    `extra_keys` has one tuple for each block, or is empty. `parent` is None at the start of a prompt.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None = None
    token_bytes: bytes = b""
    block_tokens: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    group: int = 0
    kind: str | None = None  # kind of the group's cache: full_attention, sliding_window, mamba …
    locality: str | None = None
    salt: str | None = None  # of the whole prompt, if the engine does not send it among the extra keys
    media: bool = False  # media keys came in a separate field
    reused: bool = False  # not stored, only reported because a request used them

    @property
    def ids(self) -> TokenIds:
        return np.frombuffer(self.token_bytes, dtype=np.uint32)

    @property
    def tier(self) -> Tier:
        return GPU if self.medium == "GPU" and self.locality is None else tier_of(self.medium, self.locality)


class BlocksRemoved(NamedTuple):
    """One copy of each of these blocks is gone."""

    hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group: int = 0
    locality: str | None = None

    @property
    def tier(self) -> Tier:
        return GPU if self.medium == "GPU" and self.locality is None else tier_of(self.medium, self.locality)


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The cache holds nothing any more."""


class TierCleared(NamedTuple):
    """Nothing is held at one tier any more."""

    tier: Tier


Event = BlocksStored | BlocksRemoved | CacheCleared | TierCleared


class EngineLoad(NamedTuple):
    """SGLang's LoadStat: an engine's count of its own queue. None for numbers that cannot be read."""

    running: int | None
    waiting: int | None
    tokens: int | None
    tokens_max: int | None
    rank: int | None
    waiting_uncached: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of an engine, or a portion of it: what changed since the previous one. `more`: portions follow.

    `unread` counts events about the cache that had to be skipped: from there on it is less well known what the engine
    holds.
    """

    events: tuple[Event, ...]
    unread: int = 0
    load: EngineLoad | None = None
    more: bool = False
