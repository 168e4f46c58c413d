"""Caches of blocks of keys and values with checkpoints of states, as vLLM and SGLang have for hybrid models. Pure.

Rule: a request reuses blocks up to the deepest checkpoint on its path; what is behind it is computed and stored again.
A `CheckpointProfile` says where checkpoints are kept: those of a prompt when it was computed, those of an answer when
the request ends. Bounds: the capacity; a running request has memory for one state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Self

from ranvier_py.core.routing.checkpoints.cache_profile import CheckpointProfile
from ranvier_py.replay.engine.block_cache import (
    BlockCache,
    CacheEvent,
    Job,
    KeyRemoved,
    KeysStored,
    Lease,
    StateRemoved,
    StateStored,
)

STATES_OF_REQUEST = 4
"""A request keeps at most so many checkpoints, unless its profile keeps every multiple of the grid."""


@dataclass(slots=True, eq=False)
class CheckpointLease(Lease):
    """`due`: positions where to keep a checkpoint, the next one last. `kept`: blocks up to the last kept checkpoint, or
    at first up to that from which the request continued."""

    due: list[int] = field(default_factory=list)
    kept: int = 0

    def copy(self) -> Self:
        return replace(self, blocks=self.blocks.copy(), due=self.due.copy())


class CheckpointCache(BlockCache):
    """What both kinds of cache have in common. The profile's grids are multiples of the block size.

    `state_blocks`: blocks of the pool that a state takes. `states_most`: how many states fit at once; if a request has
    more positions, the deepest are kept.
    """

    state_blocks = 0
    states_most: int

    def __init__(self, capacity_blocks: int, block_size: int, profile: CheckpointProfile, events_max: int = 0) -> None:
        super().__init__(capacity_blocks, block_size, events_max=events_max)
        assert profile.grid % block_size == 0, "checkpoints lie at the ends of blocks"
        self.profile = profile
        self.states_refused = 0  # checkpoints that were not kept for want of room
        self._running = 0

    def hit_blocks(self, job: Job) -> int:
        step = self.profile.grid // self.block_size
        at = super().hit_blocks(job) // step * step
        while at and not self._has(job.keys[at - 1]):
            at -= step
        return at

    def lease(self, job: Job) -> CheckpointLease | None:
        common = super().hit_blocks(job) * self.block_size
        found = super().lease(job)
        if found is None:
            return None
        if found.hits:
            self._touch(job.keys[found.hits - 1])
        total = job.prompt_tokens + job.answer_tokens
        positions = self.profile.kept(job.prompt_tokens, total, common, found.hits * self.block_size)
        self._running += 1
        due = sorted(set(positions), reverse=True)[: self.states_most]
        return CheckpointLease(
            job, found.blocks, found.promised, found.hits, stored=found.stored, due=due, kept=found.hits
        )

    def grow(self, lease: Lease, tokens: int) -> None:
        super().grow(lease, tokens)
        assert isinstance(lease, CheckpointLease)
        prompt = lease.job.prompt_tokens
        while lease.due and lease.due[-1] <= min(tokens, prompt) and tokens >= prompt:
            self._keep_at(lease, lease.due.pop())

    def release(self, lease: Lease) -> None:
        assert isinstance(lease, CheckpointLease)
        stored, prompt = lease.stored * self.block_size, lease.job.prompt_tokens
        super().release(lease)
        self._running -= 1
        if lease.due and lease.due[-1] > prompt:  # else it was cancelled before its prompt was computed
            for position in reversed(lease.due):
                if position <= stored:
                    self._keep_at(lease, position)

    def outlives(self, job: Job, blocks: int, taken: int) -> bool:  # noqa: ARG002
        """True only if nothing has to be evicted for so many blocks and all checkpoints that may come with them."""
        states = STATES_OF_REQUEST * (self._running + 1)
        if self.profile.every:
            states += taken * self.block_size // self.profile.grid
        return taken + states * self.state_blocks <= self._untouched and self._spare_states() >= states

    def _keep_at(self, lease: CheckpointLease, position: int) -> None:
        block = position // self.block_size
        key = lease.job.keys[block - 1]
        if self._has(key):
            self._touch(key)
        elif self._keep(key):
            self._note_kept(lease, block)
        else:
            self.states_refused += 1
            return
        lease.kept = block

    def _note_kept(self, lease: CheckpointLease, block: int) -> None:
        """Record an event for a new checkpoint at the end of so many blocks, in caches that report states."""

    def _spare_states(self) -> int:
        """Return how many more states can be kept before one is dropped for them; blocks are not considered."""
        return 1 << 62

    @abstractmethod
    def _has(self, key: int) -> bool:
        """Whether there is a checkpoint at the end of this block."""

    @abstractmethod
    def _touch(self, key: int) -> None:
        """Note that this checkpoint is used now."""

    @abstractmethod
    def _keep(self, key: int) -> bool:
        """Keep a checkpoint at the end of this block. False if there is no room."""


class PooledCheckpoints(CheckpointCache):
    """vLLM's: a checkpoint takes `state_blocks` blocks of the one pool, under names of its own: below 0, as no prompt's
    are. They are evicted in one order with all others, and events report them as they report blocks."""

    def __init__(
        self, capacity_blocks: int, block_size: int, profile: CheckpointProfile, state_blocks: int, events_max: int = 0
    ) -> None:
        super().__init__(capacity_blocks, block_size, profile, events_max)
        self.state_blocks = state_blocks
        self.states_most = capacity_blocks // state_blocks
        self._kept: dict[int, Job] = {}  # states by the key of their block; some may be evicted
        self._serial = 0
        self._reported: dict[int, int] = {}  # of reported states: name of the first block to be evicted -> key

    def copy(self) -> PooledCheckpoints:
        found = PooledCheckpoints(self.capacity_blocks, self.block_size, self.profile, self.state_blocks)
        self._filled(found)
        found._kept, found._serial, found._running = self._kept.copy(), self._serial, self._running
        return found

    def fits(self, job: Job) -> bool:
        return -(-job.tokens_computed // self.block_size) + self.state_blocks <= self.capacity_blocks

    def lease(self, job: Job) -> CheckpointLease | None:
        found = super().lease(job)
        if found is not None:
            found.promised += self.state_blocks
            self._promised += self.state_blocks
        return found

    def clear(self) -> None:
        super().clear()
        self._kept.clear()
        self._reported.clear()

    def _room(self, job: Job, blocks: list[int]) -> bool:
        self._promised += self.state_blocks
        found = super()._room(job, blocks)
        self._promised -= self.state_blocks
        return found

    def _has(self, key: int) -> bool:
        state = self._kept.get(key)
        return state is not None and state.keys[-1] in self._by_key  # its last block is evicted first

    def _touch(self, key: int) -> None:
        state, states = self._kept[key], self._states
        blocks = [self._by_key[name] for name in state.keys]
        for block in blocks:
            if states[block] < 0:
                states[block] = 0
                self._queued -= 1
            states[block] += 1
        BlockCache.release(self, Lease(state, blocks, 0, 0, len(blocks)))

    def _keep(self, key: int) -> bool:
        count = self.state_blocks
        if self.free_blocks - self._promised < count:
            return False
        names = tuple(range(-self._serial - 1, -self._serial - 1 - count, -1))
        self._serial += count
        state = self._kept[key] = Job.named(count * self.block_size, 1, names)
        lease = Lease(state, [], 0, 0, 0)
        self._take(lease.blocks, count)
        self._store(lease, count)
        BlockCache.release(self, lease)
        if len(self._kept) * count > 2 * self.capacity_blocks + count:
            self._kept = {each: job for each, job in self._kept.items() if self._has(each)}
        return True

    def _note_kept(self, lease: CheckpointLease, block: int) -> None:
        if self._events.maxlen:
            job, first, size = lease.job, lease.kept if lease.kept < block else 0, self.block_size
            self._reported[self._kept[job.keys[block - 1]].keys[-1]] = job.keys[block - 1]
            parent = job.keys[first - 1] if first else 0
            self._record(StateStored(job.keys[first:block], parent, job.ids[first * size : block * size]))

    def _record(self, event: CacheEvent) -> None:
        """Record an event. For a state's own blocks only the eviction of the first one counts: the state is gone."""
        if isinstance(event, KeyRemoved) and event.key < 0:
            key = self._reported.pop(event.key, 0)
            if key:
                super()._record(StateRemoved(key))
        elif not isinstance(event, KeysStored) or event.keys[0] >= 0:
            super()._record(event)


class SlottedCheckpoints(CheckpointCache):
    """SGLang's: slots for `slots` states in all, including one for each running request. The state used longest ago is
    dropped first, without its block; if a block is evicted, so is its state. No event reports states."""

    def __init__(
        self, capacity_blocks: int, block_size: int, profile: CheckpointProfile, slots: int, events_max: int = 0
    ) -> None:
        super().__init__(capacity_blocks, block_size, profile, events_max)
        self.states_most = slots
        self._kept: OrderedDict[int, None] = OrderedDict()  # keys of blocks with a checkpoint, the last used at the end

    def copy(self) -> SlottedCheckpoints:
        found = SlottedCheckpoints(self.capacity_blocks, self.block_size, self.profile, self.states_most)
        self._filled(found)
        found._kept, found._running = self._kept.copy(), self._running
        return found

    def fits(self, job: Job) -> bool:
        return self.states_most > 0 and super().fits(job)

    def lease(self, job: Job) -> CheckpointLease | None:
        found = super().lease(job)
        if found is not None:
            self._leave(self.states_most - self._running)
        return found

    def clear(self) -> None:
        super().clear()
        self._kept.clear()

    def _room(self, job: Job, blocks: list[int]) -> bool:
        return self._running < self.states_most and super()._room(job, blocks)

    def _spare_states(self) -> int:
        return self.states_most - self._running - len(self._kept)

    def _leave(self, states: int) -> None:
        while len(self._kept) > max(0, states):
            self._kept.popitem(last=False)

    def _has(self, key: int) -> bool:
        return key in self._kept

    def _touch(self, key: int) -> None:
        self._kept.move_to_end(key)

    def _keep(self, key: int) -> bool:
        if self._running >= self.states_most:
            return False
        self._leave(self.states_most - self._running - 1)
        self._kept[key] = None
        return True

    def _evict(self, blocks: list[int]) -> None:
        keys = [self._keys[block] for block in blocks]
        super()._evict(blocks)
        for key in keys:
            if key not in self._by_key:
                self._kept.pop(key, None)
