"""Blocks of keys and values with checkpoints beside them, as vLLM and SGLang cache hybrid models. Pure.

A request reuses blocks up to the deepest checkpoint on its path; what lies behind that is computed again, and stored
again. Where checkpoints are kept is a `CheckpointProfile`; those of a prompt are kept when it is computed, those of an
answer when the request ends. A running request has memory for one state.

`PooledCheckpoints` (vLLM): a checkpoint takes blocks of the one pool, evicted in one order with all others, and events
say of it what they say of blocks. `SlottedCheckpoints` (SGLang): states have slots of their own, the one used longest
ago is given up first; that drops no block, and no event speaks of states. A checkpoint whose block is evicted goes with
it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field

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
"""At most so many are kept by one request, but for profiles that keep all."""


@dataclass(slots=True, eq=False)
class CheckpointLease(Lease):
    """`due`: positions to keep, the next one last. `kept`: blocks up to the last one, or to where it went on."""

    due: list[int] = field(default_factory=list)
    kept: int = 0

    def copy(self) -> CheckpointLease:
        return CheckpointLease(
            self.job, self.blocks.copy(), self.promised, self.hits, self.stored, self.due.copy(), self.kept
        )


class CheckpointCache(BlockCache):
    """What both have in common. Grids of the profile are whole blocks."""

    def __init__(self, capacity_blocks: int, block_size: int, profile: CheckpointProfile, events_max: int = 0) -> None:
        super().__init__(capacity_blocks, block_size, events_max=events_max)
        assert profile.grid % block_size == 0, "checkpoints lie at the ends of blocks"
        self.profile = profile
        self.states_refused = 0  # that found no room
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
        due = sorted(set(positions), reverse=True)[: self._states_most()]
        return CheckpointLease(job, found.blocks, found.promised, found.hits, found.stored, due, found.hits)

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
        if lease.due and lease.due[-1] > prompt:  # or it was cancelled before its prompt was computed
            for position in reversed(lease.due):
                if position <= stored:
                    self._keep_at(lease, position)

    def outlives(self, job: Job, blocks: int, taken: int) -> bool:  # noqa: ARG002
        """Only where nothing is evicted for so many blocks and all checkpoints that may come with them."""
        states = STATES_OF_REQUEST * (self._running + 1)
        if self.profile.every:
            states += taken * self.block_size // self.profile.grid
        return taken + states * self._state_blocks() <= self._untouched and self._spare_states() >= states

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
        """There is a new checkpoint at the end of so many blocks: say so, where that is the engine's habit."""

    def _states_most(self) -> int:
        """States that could be there at once: of more than that of one request the deepest are kept."""
        return self.capacity_blocks

    def _state_blocks(self) -> int:
        """Blocks of the pool that a state takes."""
        return 0

    def _spare_states(self) -> int:
        """States that can be kept before one is given up for them, beside those that take blocks."""
        return 1 << 62

    @abstractmethod
    def _has(self, key: int) -> bool:
        """Whether there is a checkpoint at the end of this block."""

    @abstractmethod
    def _touch(self, key: int) -> None:
        """It is used now."""

    @abstractmethod
    def _keep(self, key: int) -> bool:
        """Whether there was room for it."""


class PooledCheckpoints(CheckpointCache):
    """A checkpoint is `state_blocks` blocks under names of its own, below 0, which no prompt has."""

    def __init__(
        self, capacity_blocks: int, block_size: int, profile: CheckpointProfile, state_blocks: int, events_max: int = 0
    ) -> None:
        super().__init__(capacity_blocks, block_size, profile, events_max)
        self.state_blocks = state_blocks
        self._kept: dict[int, Job] = {}  # by the key of their block; some may be evicted
        self._serial = 0
        self._reported: dict[int, int] = {}  # name of its block that goes first -> key; of those that events spoke of

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

    def _states_most(self) -> int:
        return self.capacity_blocks // self.state_blocks

    def _state_blocks(self) -> int:
        return self.state_blocks

    def _has(self, key: int) -> bool:
        state = self._kept.get(key)
        return state is not None and state.keys[-1] in self._by_key  # the last of them is the first to be evicted

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
        """Of a state's own blocks only that the first is gone, and with it the state."""
        if isinstance(event, KeyRemoved) and event.key < 0:
            key = self._reported.pop(event.key, 0)
            if key:
                super()._record(StateRemoved(key))
        elif not isinstance(event, KeysStored) or event.keys[0] >= 0:
            super()._record(event)


class SlottedCheckpoints(CheckpointCache):
    """`slots` states in all, those of running requests included."""

    def __init__(
        self, capacity_blocks: int, block_size: int, profile: CheckpointProfile, slots: int, events_max: int = 0
    ) -> None:
        super().__init__(capacity_blocks, block_size, profile, events_max)
        self.slots = slots
        self._kept: OrderedDict[int, None] = OrderedDict()  # keys of blocks, the one used last at the end

    def copy(self) -> SlottedCheckpoints:
        found = SlottedCheckpoints(self.capacity_blocks, self.block_size, self.profile, self.slots)
        self._filled(found)
        found._kept, found._running = self._kept.copy(), self._running
        return found

    def fits(self, job: Job) -> bool:
        return self.slots > 0 and super().fits(job)

    def lease(self, job: Job) -> CheckpointLease | None:
        found = super().lease(job)
        if found is not None:
            self._leave(self.slots - self._running)
        return found

    def clear(self) -> None:
        super().clear()
        self._kept.clear()

    def _room(self, job: Job, blocks: list[int]) -> bool:
        return self._running < self.slots and super()._room(job, blocks)

    def _states_most(self) -> int:
        return self.slots

    def _spare_states(self) -> int:
        return self.slots - self._running - len(self._kept)

    def _leave(self, states: int) -> None:
        while len(self._kept) > max(0, states):
            self._kept.popitem(last=False)

    def _has(self, key: int) -> bool:
        return key in self._kept

    def _touch(self, key: int) -> None:
        self._kept.move_to_end(key)

    def _keep(self, key: int) -> bool:
        if self._running >= self.slots:
            return False
        self._leave(self.slots - self._running - 1)
        self._kept[key] = None
        return True

    def _evict(self, blocks: list[int]) -> None:
        keys = [self._keys[block] for block in blocks]
        super()._evict(blocks)
        for key in keys:
            if key not in self._by_key:
                self._kept.pop(key, None)
