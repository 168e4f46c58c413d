"""A simulated engine's KV cache and what it publishes of it: real blocks of real tokens, real messages, a small buffer.

`Words` gives chats their tokens, so that prompts and events have the same fingerprints. `SimKv` is one engine: a cache
of the replay's engine (blocks, evictions in vLLM's order), its messages as vLLM writes them, numbered from 0 in each
process, the last `replay_messages` of which can be had again. Rule: no clock and no chance of its own; what happens to
messages on their way is `sim_streams`' matter. Cost: 0.5 ms a turn.
"""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np

from cluster.engine.kv_events import STRANGE, KvEncoder
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher, TokenState
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.replay.engine.block_cache import BlockCache, BlockRemoved, BlocksStored, Job, TokenIds

BLOCK_TOKENS = 16
NAMESPACE = Fingerprint(0x51E)
"""All simulated prompts are of one model."""

KEY = b"k" * 32
"""Of fingerprints, at all nodes."""

EVENTS_MAX = 65_536
WALL_S = 1_790_000_000.0


class Words:
    """The tokens of everything that chats say, by the text fingerprint of where it ends."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._hasher = TokenHasher(KEY, BLOCK_TOKENS)
        self._ids: dict[int, TokenIds] = {}
        self._jobs: dict[int, Job] = {}
        self.keys: dict[int, int] = {}  # any fingerprint of a prompt -> the engine's name of its last block

    def next(self, parent: Boundary, tokens: int) -> Boundary:
        """The end of one more message of so many tokens, a whole number of blocks."""
        end = Boundary(parent, Fingerprint(self._rng.getrandbits(63) | 1), parent.length + tokens, BLOCK_TOKENS)
        own = self.drawn(tokens)
        state: TokenState = parent.state or self._hasher.start(NAMESPACE)
        end.tokenized(self._hasher.extend(state, own, [tokens])[0])
        before = self._ids.get(parent.text)
        self._ids[end.text] = ids = own if before is None else np.concatenate((before, own))
        self._jobs[end.text] = job = Job.of(ids, np.zeros(1, np.uint32), BLOCK_TOKENS)
        for depth, token, text in end.own_chain:
            self.keys[token] = job.keys[depth // BLOCK_TOKENS - 1]
            if text:
                self.keys[text] = self.keys[token]
        return end

    def drawn(self, tokens: int) -> TokenIds:
        """So many tokens of any words."""
        return np.frombuffer(self._rng.randbytes(4 * tokens), dtype=np.uint32) % np.uint32(100_000)

    def job(self, end: Boundary) -> Job:
        return self._jobs[end.text]


class SimKv:
    """The cache and the publisher of one engine."""

    def __init__(self, words: Words, cache_blocks: int, replay_messages: int) -> None:
        self.words = words
        self.loss = 0.0  # share of messages that do not arrive
        self.cut = 0  # reasons for which nobody reaches the publisher, though the engine runs
        self.down = False
        self.garbled = 0  # reasons for which it writes something that nobody knows
        self.strange = False  # from the next start on it is of a version whose events nobody knows
        self.published = 0  # messages, over all processes
        self._gone_at: dict[int, float] = {}  # block -> when it was last lost
        self._cache_blocks = cache_blocks
        self._replay_messages = replay_messages
        self._begin()

    def restart(self, now: float) -> None:
        """A new process: an empty cache, numbers from 0."""
        self._gone_at.update(dict.fromkeys(self._found, now))
        self._begin()

    def _begin(self) -> None:
        self._cache = BlockCache(self._cache_blocks, BLOCK_TOKENS, events_max=EVENTS_MAX)
        self._encoder = KvEncoder(STRANGE if self.strange else "map", BLOCK_TOKENS)
        self._found: dict[int, int] = {}
        self.next_seq = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self._replay_messages)

    @property
    def reachable(self) -> bool:
        return not (self.cut or self.down)

    def holds(self, name: int) -> bool:
        """Whether the prompt that ends with this fingerprint can be found."""
        return self.words.keys.get(name, 0) in self._found

    def last_held_at(self, name: int, now: float) -> float | None:
        """When the prompt that ends there could last be found; None: never."""
        return now if self.holds(name) else self._gone_at.get(self.words.keys.get(name, 0))

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._found)

    def serve(self, end: Boundary, now: float, rng: Random) -> tuple[int, list[tuple[int, bytes]]]:
        """Serve a prompt. Returns how many of its tokens were there, and the messages about what changed."""
        job = self.words.job(end)
        lease = self._cache.lease(job)
        if lease is None:
            return 0, []
        hits = lease.hits * BLOCK_TOKENS
        self._cache.grow(lease, job.prompt_tokens)
        self._cache.release(lease)
        return hits, self._messages(now, rng)

    def _messages(self, now: float, rng: Random) -> list[tuple[int, bytes]]:
        events = self._cache.drain_events()
        for event in events:
            if isinstance(event, BlocksStored):
                for key in event.keys:
                    self._found[key] = self._found.get(key, 0) + 1
            elif isinstance(event, BlockRemoved):
                self._found[event.key] -= 1
                if not self._found[event.key]:
                    del self._found[event.key]
                    self._gone_at[event.key] = now
        if not events:
            return []
        payload = rng.randbytes(60) if self.garbled else self._encoder.batch(events, WALL_S + now)
        message = (self.next_seq, payload)
        self.next_seq += 1
        self.published += 1
        self.buffer.append(message)
        return [message]
