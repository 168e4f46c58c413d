"""A prefix cache like vLLM's: blocks of tokens are found by name, and the one released first is evicted first. Pure.

Rule: only whole blocks can be found, by a hash of the parent's name and their own tokens; the one with the last prompt
token is always computed again. A running request holds its blocks; when released, they queue up for eviction, the
deepest first. A block that was computed twice is stored twice and removed twice (as seen in vLLM 0.32). Invariants:
used + free == capacity; a held block is never evicted; an evicted block is never found; if a block can be found, so can
all above it, but after it was cleared under running requests (test_model.py). Bound: the capacity.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]

WALK_BLOCKS_MAX = 24
"""Up to so many blocks, looking up one after the other is as fast as bisection."""

QUEUE_SLACK_BLOCKS = 64  # stale places that the queue of free blocks may have, beyond one per block


class KeysStored(NamedTuple):
    """Consecutive blocks can be found from now on. `parent` is the key before the first, 0 at the start of a prompt."""

    keys: tuple[int, ...]
    parent: int
    ids: TokenIds


class KeyRemoved(NamedTuple):
    """One copy of this key is gone. A key that was stored twice is removed twice."""

    key: int


class StateStored(NamedTuple):
    """A checkpoint of a hybrid model's state was kept at the end of the last of these consecutive blocks. The request
    kept none between `parent` and there."""

    keys: tuple[int, ...]
    parent: int
    ids: TokenIds


class StateRemoved(NamedTuple):
    """The checkpoint at the end of this block is gone; the block's keys and values may remain."""

    key: int


class KeysCleared(NamedTuple):
    """Nothing can be found any more."""


CacheEvent = KeysStored | KeyRemoved | StateStored | StateRemoved | KeysCleared


def chain_keys(ids: TokenIds, block_size: int, salt: bytes = b"") -> tuple[int, ...]:
    """Return the names of the whole blocks of `ids`: unsigned 64-bit, never 0. All of them depend on `salt`."""
    data, width = ids.astype("<u4").tobytes(), 4 * block_size
    parent, keys = salt, []
    for at in range(0, len(data) - width + 1, width):
        parent = blake2b(parent + data[at : at + width], digest_size=8).digest()
        keys.append(int.from_bytes(parent, "little") or 1)
    return tuple(keys)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The tokens of one request: its prompt and the answer it will get. Immutable, so that runs can share it."""

    prompt_tokens: int
    answer_tokens: int
    ids: TokenIds  # prompt, then answer
    keys: tuple[int, ...]  # of the whole blocks of `ids`

    @classmethod
    def of(
        cls, prompt: Sequence[int] | TokenIds, answer: Sequence[int] | TokenIds, block_size: int = 16, salt: bytes = b""
    ) -> Job:
        """Make a job from token ids. Raises ValueError if the prompt or the answer has no token."""
        if not len(prompt) or not len(answer):
            raise ValueError("a job needs at least one prompt token and one answer token")
        ids = np.concatenate((np.asarray(prompt, dtype=np.uint32), np.asarray(answer, dtype=np.uint32)))
        return cls(len(prompt), len(answer), ids, chain_keys(ids, block_size, salt))

    @classmethod
    def named(cls, prompt_tokens: int, answer_tokens: int, keys: tuple[int, ...]) -> Job:
        """Make a job from the names of its whole blocks alone: equal names only for equal tokens up to their ends, or a
        block could be found whose parent is gone. Its cache events have no token ids. Raises as `of`."""
        if prompt_tokens < 1 or answer_tokens < 1:
            raise ValueError("a job needs at least one prompt token and one answer token")
        return cls(prompt_tokens, answer_tokens, np.zeros(0, dtype=np.uint32), keys)

    @property
    def tokens_computed(self) -> int:
        """Tokens whose keys and values are computed. The last answer token is sampled but never fed back."""
        return self.prompt_tokens + self.answer_tokens - 1


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks that a running request holds. `blocks[i]` is at depth i; the first `hits` were found in the cache."""

    job: Job
    blocks: list[int]
    promised: int  # blocks that are reserved and not taken yet
    hits: int
    stored: int  # leading blocks that can be found under their keys

    def copy(self) -> Self:
        return replace(self, blocks=self.blocks.copy())


class ReportingCache:
    """The events of a cache. `events_max` bounds the undrained ones: beyond it the oldest is lost; 0 records none."""

    def __init__(self, events_max: int) -> None:
        self.events_lost = 0
        self._events: deque[CacheEvent] = deque(maxlen=events_max)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def drain_events(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def _record(self, event: CacheEvent) -> None:
        if self._events.maxlen:
            self.events_lost += len(self._events) == self._events.maxlen
            self._events.append(event)


class BlockCache(ReportingCache):
    """Reference-counted blocks with vLLM's eviction order.

    Free blocks wait in a queue. If one is held again, its place in the queue becomes stale and is skipped later.
    """

    def __init__(self, capacity_blocks: int, block_size: int = 16, *, events_max: int = 0) -> None:
        super().__init__(events_max)
        self.capacity_blocks, self.block_size = capacity_blocks, block_size
        self.evicted_blocks = 0
        self._untouched = capacity_blocks  # never handed out: taken before any other
        self._queue: list[int] = []  # released blocks, the next victim first
        self._head = 0  # the first place of the queue that is not used up
        self._queued = 0  # blocks that wait in the queue
        self._states: list[int] = []  # by block: how many hold it, or ~place in the queue
        self._keys: list[int] = []  # by block; 0 = cannot be found
        self._by_key: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}  # further blocks under the same key: rare
        self._promised = 0
        self._gaps = False  # whether a block may be findable whose parent is not
        self._refused: Job | None = None  # a job that got no lease, and nothing has changed since that could help it
        self._awaited: frozenset[int] = frozenset()  # the keys of that job

    def copy(self) -> BlockCache:
        """Return another cache with the same contents that records no events."""
        return self._filled(BlockCache(self.capacity_blocks, self.block_size))

    def _filled(self, found: BlockCache) -> BlockCache:
        """Copy the contents of this cache into `found`, and return it."""
        found._untouched, found._head, found._queued = self._untouched, self._head, self._queued
        found._queue, found._states, found._keys = self._queue.copy(), self._states.copy(), self._keys.copy()
        found._by_key = self._by_key.copy()
        found._copies = {key: blocks.copy() for key, blocks in self._copies.items()}
        found._promised, found._gaps = self._promised, self._gaps
        return found

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds. Most of them have contents that can still be found."""
        return self._untouched + self._queued

    @property
    def used_blocks(self) -> int:
        return self.capacity_blocks - self.free_blocks

    @property
    def found_blocks(self) -> int:
        """Distinct keys that can be found."""
        return len(self._by_key)

    def fits(self, job: Job) -> bool:
        """Whether the job would have room in an empty cache."""
        return job.tokens_computed <= self.capacity_blocks * self.block_size

    def hit_blocks(self, job: Job) -> int:
        """Return how many leading blocks `job` would reuse now. Changes nothing."""
        keys, by_key = job.keys, self._by_key
        deepest = min(len(keys), (job.prompt_tokens - 1) // self.block_size)
        if deepest > WALK_BLOCKS_MAX and not self._gaps:
            return bisect_left(keys, True, 0, deepest, key=lambda key: key not in by_key)
        for depth in range(deepest):
            if keys[depth] not in by_key:
                return depth
        return deepest

    def has_room(self, job: Job) -> bool:
        """Whether `lease` would succeed now. Changes nothing."""
        return self._room(job, self._found(job))

    def lease(self, job: Job) -> Lease | None:
        """Hold the cached prefix and promise the other blocks. If too few are free: return None and hold nothing."""
        if job is self._refused:
            return None
        blocks = self._found(job)
        if not self._room(job, blocks):
            self._refused, self._awaited = job, frozenset(job.keys)
            return None
        states = self._states
        for block in blocks:
            if states[block] < 0:
                states[block] = 1
                self._queued -= 1
            else:
                states[block] += 1
        promised = -(-job.tokens_computed // self.block_size) - len(blocks)
        self._promised += promised
        return Lease(job, blocks, promised, len(blocks), len(blocks))

    def grow(self, lease: Lease, tokens: int) -> None:
        """Take blocks for the first `tokens` tokens, which the request has computed, and make whole ones findable."""
        missing = -(-tokens // self.block_size) - len(lease.blocks)
        if missing > 0:
            self._take(lease.blocks, missing)
            lease.promised -= missing
            self._promised -= missing
        whole = min(tokens // self.block_size, len(lease.job.keys))
        if whole > lease.stored:
            self._store(lease, whole)

    def release(self, lease: Lease) -> None:
        """End a request: it holds its blocks no more. The deepest of them will be evicted first."""
        states, queue = self._states, self._queue
        first = place = len(queue)
        for block in reversed(lease.blocks):
            if states[block] == 1:
                states[block] = ~place
                queue.append(block)
                place += 1
            else:
                states[block] -= 1
        self._queued += place - first
        self._promised -= lease.promised
        lease.blocks, lease.promised = [], 0
        self._refused = None
        if len(queue) > 2 * self.capacity_blocks + QUEUE_SLACK_BLOCKS:
            self._drop_stale_places()

    def clear(self) -> None:
        """Forget all contents. AdmittedRequest requests keep their blocks."""
        self._gaps = self.used_blocks > 0
        self._keys = [0] * len(self._keys)
        self._by_key.clear()
        self._copies.clear()
        self._refused = None
        self._record(KeysCleared())

    def outlives(self, job: Job, blocks: int, taken: int) -> bool:
        """Whether the first `blocks` blocks of `job`, found now, certainly remain when `taken` more blocks were taken.

        Only the deepest is checked: it would go first. May be False if a sure answer would take long. Changes nothing.
        """
        taken -= self._untouched
        if taken <= 0 or not blocks:
            return True
        if self._gaps:
            return False
        place = ~self._states[self._by_key[job.keys[blocks - 1]]]
        if place < 0:
            return True  # a running request holds it
        for before in range(self._head, min(place, self._head + 2 * taken)):
            taken -= self._states[self._queue[before]] == ~before
            if not taken:
                return True
        return False

    def check(self) -> None:
        """Assert the invariants. O(blocks): for tests."""
        waiting = [block for place, block in enumerate(self._queue) if self._states[block] == ~place]
        held = sum(1 for state in self._states if state > 0)
        assert held + self._queued + self._untouched == self.capacity_blocks, "blocks are neither made nor lost"
        assert self._queued == len(waiting) == len(self._states) - held, "a held block waits for eviction"
        assert all(~self._states[block] >= self._head for block in waiting), "a block was passed over"
        assert 0 <= self._promised <= self.free_blocks, "more was promised than is free"
        copies = sum(len(blocks) for blocks in self._copies.values())
        assert sum(1 for key in self._keys if key) == len(self._by_key) + copies, "index and blocks disagree"
        assert all(self._keys[block] == key for key, block in self._by_key.items()), "a key names another block"
        assert len(self._queue) <= 2 * self.capacity_blocks + QUEUE_SLACK_BLOCKS, "stale places pile up"

    def _found(self, job: Job) -> list[int]:
        return list(map(self._by_key.__getitem__, job.keys[: self.hit_blocks(job)]))

    def _room(self, job: Job, blocks: list[int]) -> bool:
        """Whether enough blocks for the rest of `job`, besides these, are free and not promised."""
        states = self._states
        idle = sum([states[block] < 0 for block in blocks])
        missing = -(-job.tokens_computed // self.block_size) - len(blocks)
        return self._untouched + self._queued - self._promised - idle >= missing

    def _take(self, blocks: list[int], count: int) -> None:
        fresh = min(count, self._untouched)
        if fresh:
            first = len(self._keys)
            blocks.extend(range(first, first + fresh))
            self._states.extend([1] * fresh)
            self._keys.extend([0] * fresh)
            self._untouched -= fresh
        if count > fresh:
            victims = self._victims(count - fresh)
            self._evict(victims)
            blocks.extend(victims)

    def _victims(self, count: int) -> list[int]:
        """Take the next `count` blocks out of the queue; they are held from now on."""
        states, queue, place = self._states, self._queue, self._head
        found = []
        self._queued -= count
        while count:
            block = queue[place]
            if states[block] == ~place:
                states[block] = 1
                found.append(block)
                count -= 1
            place += 1
        self._head = place
        return found

    def _evict(self, blocks: list[int]) -> None:
        names, by_key, copies, records = self._keys, self._by_key, self._copies, self._events.maxlen
        for block in blocks:
            key = names[block]
            if not key:
                continue
            names[block] = 0
            if key in copies:
                self._evict_copy(key, block)
            else:
                del by_key[key]
            self.evicted_blocks += 1
            if records:
                self._record(KeyRemoved(key))

    def _evict_copy(self, key: int, block: int) -> None:
        copies = self._copies[key]
        if self._by_key[key] == block:
            self._by_key[key] = copies.pop(0)
            self._refused = None  # another request may hold the copy, so the refused job may fit now
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]

    def _store(self, lease: Lease, whole: int) -> None:
        first, names, by_key = lease.stored, self._keys, self._by_key
        keys, blocks = lease.job.keys[first:whole], lease.blocks[first:whole]
        for key, block in zip(keys, blocks, strict=True):
            names[block] = key
            if by_key.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)
        lease.stored = whole
        if self._refused is not None and not self._awaited.isdisjoint(keys):
            self._refused = None
        if self._events.maxlen:
            ids = lease.job.ids[first * self.block_size : whole * self.block_size]
            self._record(KeysStored(keys, lease.job.keys[first - 1] if first else 0, ids))

    def _drop_stale_places(self) -> None:
        """Rebuild the queue without its stale places: at most once per `capacity_blocks` released blocks."""
        states, queue = self._states, self._queue
        self._queue = [queue[place] for place in range(self._head, len(queue)) if states[queue[place]] == ~place]
        self._head = 0
        for place, block in enumerate(self._queue):
            states[block] = ~place
