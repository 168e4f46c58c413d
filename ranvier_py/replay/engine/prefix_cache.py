"""The Protocol of a modelled engine's prefix cache, of every kind. Sizes are blocks of `block_size` tokens."""

from __future__ import annotations

from typing import Protocol

from ranvier_py.replay.engine.block_cache import CacheEvent, Job, Lease


class PrefixCache(Protocol):
    """A prefix cache; `BlockCache` documents each call. The forecast relies on these rules.

    Rules: `lease` reuses as many blocks as `hit_blocks` returns, and succeeds if `has_room` is true. Blocks that others
    could find are lost only by `lease`, or by growing leases if `outlives` is false.
    """

    capacity_blocks: int
    block_size: int
    evicted_blocks: int
    events_lost: int

    def copy(self) -> PrefixCache: ...

    @property
    def used_blocks(self) -> int: ...

    @property
    def found_blocks(self) -> int: ...

    @property
    def has_events(self) -> bool: ...

    def fits(self, job: Job) -> bool: ...

    def hit_blocks(self, job: Job) -> int: ...

    def has_room(self, job: Job) -> bool: ...

    def lease(self, job: Job) -> Lease | None: ...

    def grow(self, lease: Lease, tokens: int) -> None: ...

    def release(self, lease: Lease) -> None: ...

    def clear(self) -> None: ...

    def drain_events(self) -> list[CacheEvent]: ...

    def outlives(self, job: Job, blocks: int, taken: int) -> bool: ...
