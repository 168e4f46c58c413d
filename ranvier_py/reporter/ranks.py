"""Several data-parallel ranks of one engine in one book: each rank's names of blocks made its own.

A rank is a cache by itself, so the same name in two of them is two blocks. With its rank in its name each is counted by
itself, and a prefix is held as long as one of the ranks holds it. An engine with one rank keeps its names.
Cost: 1 us for a block.
"""

from __future__ import annotations

from ranvier_py.core.engine_cache.sources.event_values import BlocksRemoved, BlocksStored, EngineHash

NUMBER_BITS, RANK_BYTES = 64, 2


def named(key: EngineHash, rank: int) -> EngineHash:
    """The name of a rank's block among those of all ranks."""
    return key | rank << NUMBER_BITS if isinstance(key, int) else rank.to_bytes(RANK_BYTES, "big") + key


def is_of(key: EngineHash, rank: int) -> bool:
    """Whether this name is of that rank."""
    return (key >> NUMBER_BITS if isinstance(key, int) else int.from_bytes(key[:RANK_BYTES], "big")) == rank


def renamed(event: BlocksStored | BlocksRemoved, rank: int) -> BlocksStored | BlocksRemoved:
    hashes = tuple([named(key, rank) for key in event.hashes])
    if isinstance(event, BlocksStored) and event.parent is not None:
        return event._replace(hashes=hashes, parent=named(event.parent, rank))
    return event._replace(hashes=hashes)
