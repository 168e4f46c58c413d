"""KV cache events as values, independent of engine and encoding, and how they are read from the fields of a message.

Events have other names here than on the wire: `BlocksStored` is BlockStored, for a run of blocks; `BlocksRemoved` is
BlockRemoved, `CacheCleared` is AllBlocksCleared, `TierCleared` is TierBlocksCleared. An engine's block hash is kept
only as a name: bytes as they came, numbers modulo 2^64, so that signed and unsigned spellings are one name. Rule: a
field of the wrong form raises Unreadable, because a block whose salt is unknown must not pass for one without salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

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


HASH_BYTES_MAX = 64  # SHA-512; vLLM's own are 32
TEXT_CHARACTERS_MAX = 1024  # names of adapters, salts, media
EXTRA_KEYS_MAX = 64  # of one block: for media items that reach into it
BLOCK_TOKENS_MAX = 65_536
HASHES_MAX = 131_072
"""Of one event: a prompt of a million tokens has half as many blocks, and a whole cache is cleared, not removed."""
U32_MAX, U64 = 0xFFFFFFFF, 1 << 64

REUSED = "REUSED"
"""`origin` of blocks not stored anew, but reported because a request asked for a full report (vLLM #51699)."""


class Unreadable(Exception):
    """A field of a known event has the wrong form."""


def hash_of(value: object) -> EngineHash:
    if type(value) is bytes and 0 < len(value) <= HASH_BYTES_MAX:
        return value
    if type(value) is int:
        return value % U64
    raise Unreadable


def hashes_of(value: object) -> tuple[EngineHash, ...]:
    if type(value) is not tuple or len(value) > HASHES_MAX:
        raise Unreadable
    for each in value:
        if type(each) is bytes:
            if not 0 < len(each) <= HASH_BYTES_MAX:
                raise Unreadable
        elif type(each) is not int or not 0 <= each < U64:
            return tuple([hash_of(one) for one in value])
    return value


def tokens_of(value: object) -> bytes:
    """Read token ids, or pairs of a token and the next one (SGLang's EAGLE), of which the first counts."""
    if value is None:
        return b""
    if type(value) is not tuple:
        raise Unreadable
    if value and type(value[0]) is tuple:
        if not all(type(pair) is tuple and len(pair) == 2 for pair in value):
            raise Unreadable
        value = tuple([pair[0] for pair in value])
    try:
        return array("I", value).tobytes()
    except (TypeError, OverflowError) as error:
        raise Unreadable from error


def extra_keys_of(value: object) -> tuple[tuple[ExtraKey, ...], ...]:
    if value is None:
        return ()
    if type(value) is not tuple or len(value) > HASHES_MAX:  # those of one block each
        raise Unreadable
    if value.count(None) == len(value):
        return ()
    return tuple([() if keys is None else _keys_of_block(keys) for keys in value])


def _keys_of_block(keys: object) -> tuple[ExtraKey, ...]:
    if type(keys) is not tuple or len(keys) > EXTRA_KEYS_MAX:
        raise Unreadable
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if len(parts) > EXTRA_KEYS_MAX or not all(type(part) in (str, bytes, int) for part in parts):
            raise Unreadable
        if any(len(part) > TEXT_CHARACTERS_MAX for part in parts if type(part) in (str, bytes)):
            raise Unreadable
    return keys


def _text(value: object) -> str | None:
    if value is None or (type(value) is str and len(value) <= TEXT_CHARACTERS_MAX):
        return value
    raise Unreadable


def _number(value: object, highest: int = U32_MAX) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= highest):
        return value
    raise Unreadable


def salt_in(metadata: object) -> object:
    """Return the salt in an event's metadata (SGLang)."""
    if metadata is None:
        return None
    if type(metadata) is not dict:
        raise Unreadable
    return metadata.get("cache_salt")


def _stored(values: Mapping[str, Any]) -> BlocksStored:
    hashes, parent, get = hashes_of(values.get("block_hashes")), values.get("parent_block_hash"), values.get
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else hash_of(parent),
        token_bytes=tokens_of(get("token_ids")),
        block_tokens=_number(get("block_size"), BLOCK_TOKENS_MAX) or 0,
        lora_id=_number(get("lora_id")),
        medium=_text(get("medium")),
        lora_name=_text(get("lora_name")),
        extra_keys=extra_keys_of(get("extra_keys")),
        group=_number(get("group_idx")) or 0,
        kind=_text(get("kv_cache_spec_kind")),
        locality=_text(get("locality")),
        salt=_text(get("cache_salt")),
        media=bool(get("mm_keys")),
        reused=get("origin") == REUSED,
    )


def _removed(values: Mapping[str, Any]) -> BlocksRemoved:
    return BlocksRemoved(
        hashes=hashes_of(values.get("block_hashes")),
        medium=_text(values.get("medium")),
        group=_number(values.get("group_idx")) or 0,
        locality=_text(values.get("locality")),
    )


def _cleared(_values: Mapping[str, Any]) -> CacheCleared:
    return CacheCleared()


def _tier_cleared(values: Mapping[str, Any]) -> TierCleared:
    return TierCleared(tier_of(_text(values.get("medium")), _text(values.get("locality"))))


READERS: dict[str, Callable[[Mapping[str, Any]], Event]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
    "TierBlocksCleared": _tier_cleared,  # vLLM #57296
}

ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
    "TierBlocksCleared": ("medium",),
}
"""Fields of the array encoding, in their order after the tag."""

MAP_FIELDS: dict[str, frozenset[str]] = {
    "BlockStored": frozenset(
        (*ARRAY_FIELDS["BlockStored"], "locality", "ownership", "session_id", "cache_salt", "mm_keys", "origin")
    ),
    "BlockRemoved": frozenset((*ARRAY_FIELDS["BlockRemoved"], "locality", "ownership")),
    "AllBlocksCleared": frozenset(),
    "TierBlocksCleared": frozenset(("medium", "locality", "ownership")),
}
