"""Makes the prefix cache of a modelled engine, by the name of its kind (`make_cache`).

Rule: all have the same memory: what the hybrid model's keys and values of `cache_tokens` tokens take. Marconi's paper
compares vanilla, vllm_plus, sglang_plus and marconi. vllm_align, vllm_all, sglang_no_buffer and sglang_extra_buffer
are what engines do (`core.routing.checkpoints`); `attention` is a model without recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ranvier_py.core.routing.checkpoints.cache_profile import (
    ATTENTION,
    EXTRA_BUFFER,
    MARCONI,
    NO_BUFFER,
    NOTHING,
    CacheProfile,
    CheckpointProfile,
    on_grid,
    retained,
)
from ranvier_py.replay.engine.block_cache import BlockCache, Job, Lease
from ranvier_py.replay.engine.engine_values import CacheName, EngineLimits
from ranvier_py.replay.hybrid.alpha_search import Retuned, TunedOnce, Tuner
from ranvier_py.replay.hybrid.checkpoint_cache import PooledCheckpoints, SlottedCheckpoints
from ranvier_py.replay.hybrid.hybrid_model import hybrid_model
from ranvier_py.replay.hybrid.state_tree import EvictionRule, StateTree
from ranvier_py.replay.hybrid.tree_cache import KEY_BYTES, TreeCache

RETUNED_EVERY = 100
"""Requests between tunings. With twice as many, alpha follows our traces' agents too late: reuse falls below `lru`."""

SLOTS_SHARE = 0.9 / 1.9
"""Share of the memory for states. SGLang's `--mamba-full-memory-ratio` is 0.9: states to keys and values."""

FINE_TOKENS = 32
"""Tokens between two checkpoints of vLLM+, unless the trace's blocks are longer."""

PrefixCache = BlockCache | TreeCache
"""A prefix cache of any kind; `BlockCache` documents each call.

The forecast relies on these rules: `lease` reuses as many blocks as `hit_blocks` returns, and succeeds if `has_room` is
true. Blocks that others could find are lost only by `lease`, or by growing leases if `outlives` is false.
"""


class NothingKept(BlockCache):
    """A cache whose blocks are never found."""

    def copy(self) -> BlockCache:
        return self._filled(NothingKept(self.capacity_blocks, self.block_size))

    def hit_blocks(self, job: Job) -> int:  # noqa: ARG002
        return 0

    def _store(self, lease: Lease, whole: int) -> None:
        lease.stored = whole


TREES: Mapping[CacheName, tuple[EvictionRule, Callable[[], Tuner]]] = MappingProxyType(
    {
        "sglang_plus": ("lru", Tuner),  # evicts the least recently visited leaf first
        "marconi": ("utility", TunedOnce),  # evicts by recency and operations saved per byte
        "marconi_retuned": ("utility", lambda: Retuned(RETUNED_EVERY, damped=True)),  # ours
    }
)
"""The caches that are trees of checkpoints: by which rule they evict, and what tunes it."""

SLOTTED: tuple[CacheName, ...] = ("sglang_no_buffer", "sglang_extra_buffer")
"""Caches with slots for states. The others that are no trees have one pool for states and blocks."""

STATES_UNSEEN: tuple[CacheName, ...] = ("attention", "vanilla", *SLOTTED)
"""Caches that have no states, or whose events do not report them."""


def state_groups(limits: EngineLimits) -> int:
    """Return how many groups of block tables for states its events report. Raises ValueError as `make_cache` does."""
    return 0 if limits.cache in STATES_UNSEEN else hybrid_model(limits.hybrid_model).state_groups


def make_cache(limits: EngineLimits) -> PrefixCache:
    """Make the cache of a new engine process. Raises ValueError for an unknown hybrid model."""
    kind, size, events_max = limits.cache, limits.block_size, limits.cache_events_max
    blocks = limits.cache_tokens // size
    if kind == "attention":
        return BlockCache(blocks, size, events_max=events_max)
    if kind == "vanilla":
        return NothingKept(blocks, size)
    model = hybrid_model(limits.hybrid_model)
    capacity_bytes = limits.cache_tokens * model.token_bytes
    if kind in TREES:
        rule, tuner = TREES[kind]
        tree = StateTree(model, capacity_bytes, rule, width=KEY_BYTES, unit_tokens=size)
        return TreeCache(tree, tuner(), events_max=events_max)
    profile, block_bytes = checkpoints_of(limits), model.token_bytes * size
    if kind in SLOTTED:
        slots = int(capacity_bytes * SLOTS_SHARE / model.state_bytes)
        blocks = int(capacity_bytes * (1 - SLOTS_SHARE) / block_bytes)
        return SlottedCheckpoints(blocks, size, profile, slots, events_max)
    return PooledCheckpoints(blocks, size, profile, -(-model.state_bytes // block_bytes), events_max)


def checkpoints_of(limits: EngineLimits) -> CheckpointProfile:
    """Return where a cache for a hybrid model keeps checkpoints, on grids of whole blocks."""
    blocks = hybrid_model(limits.hybrid_model).block_tokens
    profiles = {
        "vanilla": NOTHING,
        "vllm_plus": CheckpointProfile(FINE_TOKENS, every=True),
        "vllm_align": retained(blocks),
        "vllm_all": CheckpointProfile(blocks, every=True),
        "sglang_no_buffer": NO_BUFFER,
        "sglang_extra_buffer": EXTRA_BUFFER,
    }
    return on_grid(profiles.get(limits.cache, MARCONI), limits.block_size)


def profile_of(limits: EngineLimits) -> CacheProfile:
    """Return the cache profile that a router recognises for this engine, with grids of whole blocks."""
    return ATTENTION if limits.cache == "attention" else CacheProfile(limits.cache, checkpoints_of(limits))
