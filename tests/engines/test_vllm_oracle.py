"""A residency against vLLM's own KVCacheManager: the same events, the same table, the same hits."""

from __future__ import annotations

import pytest

from tests.engines.records import compared

REQUESTS = 2000
FULL = ("--full-reports", "0.3")

pytestmark = pytest.mark.engines("vllm")


@pytest.mark.parametrize(
    ("block_size", "blocks", "more"),
    [(16, 2500, ()), (16, 700, ("--bytes-as-hashes",)), (32, 1200, ()), (64, 500, ()), (16, 2500, FULL)],
    ids=["blocks of 16", "a small cache, hashes as bytes", "blocks of 32", "blocks of 64", "full reports"],
)
def test_the_residency_is_the_managers_block_table(block_size: int, blocks: int, more: tuple[str, ...]) -> None:
    """2,000 mixed requests with evictions: block by block at every 100th, copies counted; and before each request the
    tokens that it will hit."""
    held, seen = compared("vllm", "--requests", REQUESTS, "--block-size", block_size, "--blocks", blocks, *more)
    assert seen.requests == REQUESTS
    assert held.removed > blocks, "nearly nothing was evicted: this proves nothing"
    assert seen.copied_blocks > 0, "no block was there twice: this proves nothing"
    reused = held.residency.counters.repeated
    assert (reused > 0) is (more == FULL), "what a request reuses is told of if it wants that"
