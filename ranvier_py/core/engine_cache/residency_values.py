"""What a residency is told and tells: scopes, changes, counters, gauges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ranvier_py.core.engine_cache.blocks import Block, BlockIndex
from ranvier_py.core.engine_cache.prefixes import Change, HeldPrefixes
from ranvier_py.core.engine_cache.sources.event_values import BlocksStored


class Scope(NamedTuple):
    """What an engine says of the namespace of a prompt, beside its model."""

    lora_name: str | None
    lora_id: int | None
    salt: str | None


def salt_and_media(event: BlocksStored) -> tuple[str | None, int]:
    """The salt of a prompt, if this event has its start, and the first place whose hash took in more than that.

    vLLM's extra keys of a block are: adapter, media, salt (first block of a prompt only), embeddings. A text alone
    behind the adapter is the salt there; older versions wrote media as a bare text, so that is a salt no prompt has.
    """
    salt, opaque_from = event.salt, 0 if event.media else len(event.hashes)
    for place, keys in enumerate(event.extra_keys[:opaque_from]):
        left = keys[1:] if keys and event.lora_name is not None and keys[0] == event.lora_name else keys
        if not left:
            continue
        if place == 0 and event.parent is None and len(left) == 1 and isinstance(left[0], str):
            salt = left[0]
        else:
            return salt, place
    return salt, opaque_from


@dataclass(slots=True)
class Imported:
    """What a peer's copy says that the engine holds, built beside what is held until it is taken (`snapshot`)."""

    index: BlockIndex
    held: HeldPrefixes
    nameless: Block
    roots: dict[int, Block]  # by their state's total: whose scope that is shows when something is stored there
    group: int | None = None
    block_tokens: int = 0


class Lack(Enum):
    """Why less is known of what an engine holds than it told of, until all of that is gone."""

    NOTHING = ""
    SCHEMA = "its events have names that we do not know"  # `streams`, which reads them, sees this one
    GROUP = "none of its groups of caches keeps whole prefixes"
    TOKENS = "it tells of blocks without their tokens, or with others"
    NAMES = "adapters without a name, or too many salts at a time"
    ROOM = "it tells of more blocks than there is room for"


class Changes(NamedTuple):
    """What became of the prefixes. `cleared`: everything said before is void, then these follow.

    `complete`: there is nothing left to look at; else `settle` wants to be called again.
    """

    cleared: bool
    changes: tuple[Change, ...]
    complete: bool


@dataclass(slots=True)
class ResidencyCounts:
    """Counters since start, in blocks where nothing else is said."""

    stored: int = 0
    told_again: int = 0  # because a request reused them: no new copies
    removed: int = 0
    cleared: int = 0  # events
    resolved_late: int = 0  # parked, and then their parent came
    removed_unknown: int = 0  # of which no copy was known
    refused: int = 0  # no room
    dropped: int = 0  # parked for too long
    opaque: int = 0
    mismatched: int = 0  # events whose tokens are not those of their blocks
    contradicted: int = 0  # told again with another parent
    other_groups: int = 0  # events
    roots_refused: int = 0  # events of one namespace too many
    uncounted: int = 0  # copies beyond 65,535
    copied: int = 0  # taken from peers


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """Gauges."""

    blocks: int
    parked: int
    prefixes: int
    entries: int
    block_tokens: int
    unsettled: int
