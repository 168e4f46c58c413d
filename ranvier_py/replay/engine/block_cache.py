"""A prefix cache like vLLM's: blocks of tokens, found again by name, evicted oldest first. Pure.

Only whole blocks can be found; a block is named by a hash of its parent's name and its own tokens. The block that holds
the last prompt token is always computed again, so a prompt of n tokens hits at most (n-1)//block blocks. A running
request holds its blocks; released ones queue up for eviction, the deepest first. A block that was computed twice is
stored twice and removed twice, as vLLM does it (seen on the wire with vLLM 0.32).

Invariants: used + free == capacity, always; a held block is never evicted; an evicted block is never found.
Cost: about 0.5 us per block. Blocks that were never used cost no memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.uint32]


class BlocksStored(NamedTuple):
    """Consecutive blocks can be found from now on. `parent` is the key before the first, 0 at the start of a prompt."""

    keys: tuple[int, ...]
    parent: int
    ids: TokenIds


class BlockRemoved(NamedTuple):
    """One copy of this key is gone. A key may have been stored twice: then it is removed twice."""

    key: int


class CacheCleared(NamedTuple):
    """Nothing can be found any more."""


CacheEvent = BlocksStored | BlockRemoved | CacheCleared


def chain_keys(ids: TokenIds, block_size: int, salt: bytes = b"") -> tuple[int, ...]:
    """Names of the whole blocks of `ids`: unsigned 64-bit, never 0. `salt` enters the first, hence all of them."""
    data, width = ids.astype("<u4").tobytes(), 4 * block_size
    parent, keys = salt, []
    for at in range(0, len(data) - width + 1, width):
        parent = blake2b(parent + data[at : at + width], digest_size=8).digest()
        keys.append(int.from_bytes(parent, "little") or 1)
    return tuple(keys)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Tokens of one request: its prompt and the answer it will get. Immutable, so replays share it."""

    prompt_tokens: int
    answer_tokens: int
    ids: TokenIds  # prompt, then answer
    keys: tuple[int, ...]  # of the whole blocks of `ids`

    @classmethod
    def of(
        cls, prompt: Sequence[int] | TokenIds, answer: Sequence[int] | TokenIds, block_size: int = 16, salt: bytes = b""
    ) -> Job:
        """Raises ValueError when the prompt or the answer has no token."""
        if not len(prompt) or not len(answer):
            raise ValueError("a job needs at least one prompt token and one answer token")
        ids = np.concatenate((np.asarray(prompt, dtype=np.uint32), np.asarray(answer, dtype=np.uint32)))
        return cls(len(prompt), len(answer), ids, chain_keys(ids, block_size, salt))

    @property
    def tokens_computed(self) -> int:
        """Tokens whose KV is ever computed: the last answer token is sampled but never fed back."""
        return self.prompt_tokens + self.answer_tokens - 1


class Lease:
    """Blocks one running request holds. `blocks[i]` is at depth i; the first `hits` were found in the cache."""

    __slots__ = ("blocks", "hits", "job", "promised", "stored")

    def __init__(self, job: Job, blocks: list[int], promised: int) -> None:
        self.job = job
        self.blocks = blocks
        self.hits = len(blocks)
        self.stored = len(blocks)  # leading blocks that can be found under their keys
        self.promised = promised  # blocks that were reserved and not taken yet


class BlockCache:
    """Reference-counted blocks with vLLM's eviction order. `events_max` bounds the undrained events; 0 records none."""

    def __init__(self, capacity_blocks: int, block_size: int = 16, *, events_max: int = 0) -> None:
        self.capacity_blocks = capacity_blocks
        self.block_size = block_size
        self.evicted_blocks = 0
        self.events_lost = 0
        self._events: deque[CacheEvent] = deque(maxlen=events_max)
        self._untouched = capacity_blocks  # never handed out: taken before any other
        self._free: OrderedDict[int, None] = OrderedDict()  # released blocks, the next victim first
        self._references: list[int] = []  # by block
        self._keys: list[int] = []  # by block; 0 = cannot be found
        self._by_key: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}  # further blocks under the same key: rare
        self._promised = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds; most of them still hold something that can be found."""
        return self._untouched + len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.capacity_blocks - self.free_blocks

    @property
    def found_blocks(self) -> int:
        """Distinct keys that can be found."""
        return len(self._by_key)

    @property
    def promised_blocks(self) -> int:
        return self._promised

    def hit_blocks(self, job: Job) -> int:
        """Leading blocks a request for `job` would reuse now. Changes nothing."""
        return len(self._found(job))

    def lease(self, job: Job) -> Lease | None:
        """Take the cached prefix and promise the rest, or None while too few blocks are free. No state changes then."""
        blocks = self._found(job)
        idle = sum(1 for block in blocks if not self._references[block])
        promised = -(-job.tokens_computed // self.block_size) - len(blocks)
        if self.free_blocks - self._promised - idle < promised:
            return None
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        self._promised += promised
        return Lease(job, blocks, promised)

    def grow(self, lease: Lease, tokens: int) -> None:
        """The request has computed its first `tokens` tokens: take blocks for them, make the whole ones findable."""
        while len(lease.blocks) * self.block_size < tokens:
            lease.blocks.append(self._take())
            lease.promised -= 1
            self._promised -= 1
        whole = min(tokens // self.block_size, len(lease.job.keys))
        if whole > lease.stored:
            self._store(lease, whole)

    def release(self, lease: Lease) -> None:
        """The request is over. Its deepest blocks become the first victims among its own."""
        for block in reversed(lease.blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
        self._promised -= lease.promised
        lease.blocks, lease.promised = [], 0

    def clear(self) -> None:
        """Forget all contents. Blocks of running requests stay theirs."""
        self._keys = [0] * len(self._keys)
        self._by_key.clear()
        self._copies.clear()
        self._record(CacheCleared())

    def drain_events(self) -> list[CacheEvent]:
        """What became findable or was lost since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def check(self) -> None:
        """Assert the invariants. O(blocks): for tests."""
        held = sum(1 for count in self._references if count)
        assert held + len(self._free) + self._untouched == self.capacity_blocks, "blocks are neither made nor lost"
        assert all(not self._references[block] for block in self._free), "a held block waits for eviction"
        assert 0 <= self._promised <= self.free_blocks, "more was promised than is free"
        copies = sum(len(blocks) for blocks in self._copies.values())
        assert sum(1 for key in self._keys if key) == len(self._by_key) + copies, "index and blocks disagree"
        assert all(self._keys[block] == key for key, block in self._by_key.items()), "a key names another block"

    def _found(self, job: Job) -> list[int]:
        blocks = []
        for key in job.keys[: (job.prompt_tokens - 1) // self.block_size]:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take(self) -> int:
        if self._untouched:
            self._untouched -= 1
            self._references.append(1)
            self._keys.append(0)
            return len(self._keys) - 1
        block, _ = self._free.popitem(last=False)
        if self._keys[block]:
            self._evict(block)
        self._references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], 0
        copies = self._copies.get(key)
        if copies is None:
            del self._by_key[key]
        else:
            if self._by_key[key] == block:
                self._by_key[key] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[key]
        self.evicted_blocks += 1
        self._record(BlockRemoved(key))

    def _store(self, lease: Lease, whole: int) -> None:
        first, keys = lease.stored, lease.job.keys
        for depth in range(first, whole):
            key, block = keys[depth], lease.blocks[depth]
            self._keys[block] = key
            if key in self._by_key:
                self._copies.setdefault(key, []).append(block)
            else:
                self._by_key[key] = block
        lease.stored = whole
        if self._events.maxlen:
            ids = lease.job.ids[first * self.block_size : whole * self.block_size]
            self._record(BlocksStored(keys[first:whole], keys[first - 1] if first else 0, ids))

    def _record(self, event: CacheEvent) -> None:
        if self._events.maxlen:
            self.events_lost += len(self._events) == self._events.maxlen
            self._events.append(event)
