"""A residency against vLLM's own KVCacheManager: the same events, the same table, the same hits."""

from __future__ import annotations

import pytest

from tests.engines.records import Held, compare, oracle, records_of

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
    held = Held()
    arguments = ("--requests", str(REQUESTS), "--block-size", str(block_size), "--blocks", str(blocks), *more)
    with oracle("vllm", *arguments) as process:
        assert process.stdout is not None
        seen = compare(records_of(process.stdout), held)
    print(seen, held.residency.counters, held.residency.view(), held.decoder.counters)
    assert seen.wrong == []
    assert (seen.requests, seen.tables) == (REQUESTS, REQUESTS // 100)
    assert seen.hit_tokens > seen.tokens // 4, "nearly nothing was found: this proves nothing"
    assert seen.removed > blocks, "nearly nothing was evicted: this proves nothing"
    assert seen.copied_blocks > 0, "no block was there twice: this proves nothing"
    counts = held.residency.counters
    assert (counts.repeated > 0) is (more == FULL), "what a request reuses is told of if it wants that"
    assert (counts.removed_unknown, counts.contradicted, counts.mismatched, counts.opaque) == (0, 0, 0, 0)
    read = held.decoder.counters
    assert read.unread == read.tags_skipped == read.fields_skipped == 0
