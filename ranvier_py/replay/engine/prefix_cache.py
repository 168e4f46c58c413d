"""What a modelled engine asks of its prefix cache, whatever that keeps. Sizes are blocks of `block_size` tokens."""

from __future__ import annotations

from typing import Protocol

from ranvier_py.replay.engine.block_cache import CacheEvent, Job, Lease


class PrefixCache(Protocol):
    """As `BlockCache`, which see for what each call does; the forecast relies on what it promises.

    Rules: `lease` finds what `hit_blocks` says and succeeds where `has_room` says so; only `lease` may make anything be
    lost that others could find, but for growing leases where `outlives` says so.
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
