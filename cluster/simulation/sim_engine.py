"""A simulated engine: which prefixes it holds, whether it runs, how long it takes to a first token.

An engine that runs serves each turn; it then holds every prefix key of it, and reports how many tokens it already had.
A restart empties it and changes its start time, which is all that a node's probe sees of it. Bound: CHAIN_KEYS_MAX
names, of which the least recently used go first. With `kv` it has a block cache instead, and publishes its events.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

import numpy as np

from cluster.engine.kv_events import STRANGE, KvEncoder
from cluster.faulted_value import FaultedValue
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import TokenHasher, TokenState
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.replay.engine.block_cache import BlockCache, Job, KeyRemoved, KeysStored, TokenIds

BLOCK_TOKENS = 16
NAMESPACE = Fingerprint(0x51E)
"""All simulated prompts are of one model."""

KEY = b"k" * 32
"""The key of fingerprints at all nodes."""

EVENTS_MAX = 65_536
WALL_S = 1_790_000_000.0


class ChatTokens:
    """The tokens of all that chats send, by the text fingerprint of the end."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._hasher = TokenHasher(KEY, BLOCK_TOKENS)
        self._ids: dict[int, TokenIds] = {}
        self._jobs: dict[int, Job] = {}
        self.keys: dict[int, int] = {}  # any fingerprint of a prompt -> the engine's name of its last block

    def next(self, parent: Boundary, tokens: int) -> Boundary:
        """Return the end of one more message of so many tokens, a whole number of blocks."""
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
        """Return so many random tokens."""
        return np.frombuffer(self._rng.randbytes(4 * tokens), dtype=np.uint32) % np.uint32(100_000)

    def job(self, end: Boundary) -> Job:
        return self._jobs[end.text]


class SimKv:
    """The block cache and the publisher of one engine."""

    def __init__(self, tokens: ChatTokens, cache_blocks: int, replay_messages: int) -> None:
        self.tokens = tokens
        self.loss = FaultedValue(0.0)  # share of messages that do not arrive
        self.cut = 0  # how many faults keep nodes from the publisher while the engine runs
        self.down = False
        self.garbled = FaultedValue(False)  # whether its messages are unreadable
        self.strange = FaultedValue(False)  # whether its next process publishes events of an unknown version
        self.published = 0  # messages, over all processes
        self._gone_at: dict[int, float] = {}  # block -> when it was last lost
        self._cache_blocks = cache_blocks
        self._replay_messages = replay_messages
        self._begin()

    def restart(self, now: float) -> None:
        """Become a new process: an empty cache, numbers from 0."""
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
        """Whether the cache has the prompt that ends with this fingerprint."""
        return self.tokens.keys.get(name, 0) in self._found

    def last_held_at(self, name: int, now: float) -> float | None:
        """Return when the cache last had the prompt that ends with this fingerprint; None: never."""
        return now if self.holds(name) else self._gone_at.get(self.tokens.keys.get(name, 0))

    def __len__(self) -> int:
        """The number of blocks in the cache."""
        return len(self._found)

    def serve(self, end: Boundary, now: float, rng: Random) -> tuple[int, list[tuple[int, bytes]]]:
        """Serve a prompt. Returns how many of its tokens were cached, and the messages about the changes."""
        job = self.tokens.job(end)
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
            if isinstance(event, KeysStored):
                for key in event.keys:
                    self._found[key] = self._found.get(key, 0) + 1
            elif isinstance(event, KeyRemoved):
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


CHAIN_KEYS_MAX = 20_000
FIRST_TOKEN_S = 0.05
PROBE_S = 0.003


class SimEngine:
    """A simulated engine, see the module. `generation` counts its processes, `born_at` is in virtual seconds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.url = f"http://10.255.{number // 250}.{number % 250 + 1}:8000"
        self.down = 0
        self.down_at = float("-inf")
        self.factor = FaultedValue(1.0)  # how much slower it is
        self.generation = 1
        self.born_at = 1.0  # by the engine's own clock; 0 would mean that it reports no start time
        self.held: OrderedDict[int, None] = OrderedDict()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.served = 0
        self.refused = 0
        self.kv: SimKv | None = None  # set if the scenario has events
        self.published: Callable[[int, Sequence[tuple[int, bytes]]], object] = lambda *_: None
        self.halted: Callable[[int], object] = lambda _: None
        self.restarted: Callable[[int], object] = lambda _: None

    @property
    def running(self) -> bool:
        return self.down == 0

    def halt(self, now: float) -> None:
        """Add a reason not to run."""
        self.down_at = now if self.running else self.down_at
        self.down += 1
        self.halted(self.number)

    def resume(self, now: float) -> None:
        """Remove a reason not to run. Without any left it runs again, as a new process."""
        self.down -= 1
        if self.running:
            self.restart(now)

    def restart(self, now: float) -> None:
        """Become a new process with an empty cache, if it runs; an engine that is down becomes one when it resumes."""
        if not self.running:
            return
        self.generation += 1
        self.born_at = 1.0 + now
        self.held.clear()
        if self.kv is not None:
            self.kv.restart(now)
            self.restarted(self.number)

    def holds(self, name: int) -> bool:
        """Whether it holds the prompt that ends with this fingerprint."""
        return self.kv.holds(name) if self.kv is not None else name in self.held

    def serve_end(self, end: Boundary, now: float, rng: Random) -> bool:
        """Serve the prompt with this end. False: the engine is down."""
        if self.kv is None or not self.running:
            return self.serve(end.chain())
        hits, messages = self.kv.serve(end, now, rng)
        self.prompt_tokens += end.tokens
        self.cached_tokens += hits
        self.served += 1
        self.published(self.number, messages)
        return True

    def serve(self, chain: Iterable[PrefixKey]) -> bool:
        """Serve a prompt, given deepest first. False: the engine is down."""
        if not self.running:
            self.refused += 1
            return False
        path = list(chain)
        cached = next((tokens for tokens, token, text in path if token in self.held or text in self.held), 0)
        for _, token, text in reversed(path):
            for name in (token, text):
                if name:
                    self.held[name] = None
                    self.held.move_to_end(name)
        while len(self.held) > CHAIN_KEYS_MAX:
            self.held.popitem(last=False)
        self.prompt_tokens += path[0][0] if path else 0
        self.cached_tokens += cached
        self.served += 1
        return True

    def seconds(self) -> float:
        """Return the seconds from sending a request to its first token."""
        return FIRST_TOKEN_S * self.factor.value

    def probe(self) -> ProbeResult:
        """Return what a node's probe finds."""
        if not self.running:
            return ProbeResult(ok=False, refused=True, detail="refused")
        return ProbeResult(ok=True, status=200, latency_s=PROBE_S, models=("m",), started_at=self.born_at)
