"""Makes event streams of busy engines for benchmarks/residency: the payloads that vLLM would publish, step by step.

Each engine's cache evicts as vLLM's does and is full before the measurement, so that one block is removed for each that
is stored. In a step an engine computes CHUNK_TOKENS of prompts, and one token for each request whose prompt is done.
Payloads are encoded by the fake engine as vLLM 0.32 does: an event for each run of blocks, one for each removed block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from cluster.engine.kv_events import KvEncoder
from ranvier_py.replay.engine.block_cache import BlockCache, CacheEvent, Job, KeyRemoved, KeysStored, Lease

BLOCK_TOKENS = 16
CHUNK_TOKENS = 2048
VOCABULARY = 150_000
DOCUMENTS = 40
DOCUMENT_TOKENS = (500, 6_000)
OWN_TOKENS = (50, 600)
ANSWER_TOKENS = (20, 400)
RUNNING_MAX = 256
EVENTS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Streams:
    """The payloads of one engine: those that fill its cache, and those that are measured and store `blocks` blocks."""

    filling: Sequence[bytes]
    payloads: Sequence[bytes]
    blocks: int
    removed: int
    events: int


@dataclass(slots=True)
class LeasedRequest:
    lease: Lease
    done: int  # tokens computed


class Engine:
    """One engine: its cache and its running requests."""

    def __init__(self, capacity_blocks: int, seed: int) -> None:
        self.rng = Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.cache = BlockCache(capacity_blocks, BLOCK_TOKENS, events_max=EVENTS_MAX)
        self.documents = [self.tokens(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        self.running: deque[LeasedRequest] = deque()

    def tokens(self, least_most: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return self.numbers.integers(0, VOCABULARY, self.rng.randint(*least_most), dtype=np.uint32)

    def step(self) -> list[CacheEvent]:
        """Compute prompts up to a chunk, then a token for each request whose prompt is done. Returns the events."""
        budget = CHUNK_TOKENS
        while budget > 0:
            waiting = next((each for each in self.running if each.done < each.lease.job.prompt_tokens), None)
            if waiting is None:
                waiting = self.begin()
                if waiting is None:
                    break
            part = min(budget, waiting.lease.job.prompt_tokens - waiting.done)
            self.compute(waiting, part)
            budget -= part
        for each in list(self.running):
            if each.done >= each.lease.job.prompt_tokens:
                self.compute(each, 1)
            if each.done >= each.lease.job.tokens_computed:
                self.cache.release(each.lease)
                self.running.remove(each)
        return self.cache.drain_events()

    def begin(self) -> LeasedRequest | None:
        if len(self.running) >= RUNNING_MAX:
            return None
        document = self.documents[min(DOCUMENTS, int(self.rng.paretovariate(0.7))) - 1]
        prompt = np.concatenate((document, self.tokens(OWN_TOKENS)))
        lease = self.cache.lease(Job.of(prompt, self.tokens(ANSWER_TOKENS), BLOCK_TOKENS))
        if lease is None:
            return None
        begun = LeasedRequest(lease, lease.hits * BLOCK_TOKENS)
        self.running.append(begun)
        return begun

    def compute(self, running: LeasedRequest, tokens: int) -> None:
        running.done = min(running.done + tokens, running.lease.job.tokens_computed)
        self.cache.grow(running.lease, running.done)


def make_streams(capacity_blocks: int, blocks: int, seed: int) -> Streams:
    """Fill an engine's cache, then record its payloads until `blocks` more are stored."""
    engine, encoder = Engine(capacity_blocks, seed), KvEncoder("map", BLOCK_TOKENS)
    filling = []
    while engine.cache.evicted_blocks < capacity_blocks // 4:
        if events := engine.step():
            filling.append(encoder.batch(events, 1.5))
    payloads, stored, removed, count = [], 0, 0, 0
    while stored < blocks:
        events = engine.step()
        if events:
            payloads.append(encoder.batch(events, 1.5))
        stored += sum(len(event.keys) for event in events if isinstance(event, KeysStored))
        removed += sum(isinstance(event, KeyRemoved) for event in events)
        count += len(events)
    return Streams(filling, payloads, stored, removed, count)
