"""One request after the other on a cache of the engine's model."""

from __future__ import annotations

from ranvier_py.replay.engine.block_cache import BlockCache, Job, Lease
from ranvier_py.replay.engine.prefix_cache import PrefixCache
from ranvier_py.replay.hybrid.tree_cache import TreeCache


def served(cache: PrefixCache, job: Job) -> Lease:
    """From its begin to its end, with nothing beside it."""
    lease = cache.lease(job)
    assert lease is not None
    cache.grow(lease, job.prompt_tokens)
    cache.grow(lease, job.tokens_computed)
    cache.release(lease)
    assert isinstance(cache, BlockCache | TreeCache)
    cache.check()
    return lease
