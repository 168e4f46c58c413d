"""A residency against SGLang's own RadixCache: the same events, the same blocks, the same hits."""

from __future__ import annotations

import pytest

from tests.engines.records import Held, compare, oracle, records_of

pytestmark = pytest.mark.engines("sglang")


@pytest.mark.parametrize(
    ("page", "tokens", "requests", "more"),
    [(16, 40_000, 2000, ()), (64, 30_000, 2000, ("--dynamo-format",)), (1, 20_000, 400, ())],
    ids=["pages of 16", "pages of 64 in Dynamo's format", "pages of one token"],
)
def test_the_residency_is_the_radix_tree(page: int, tokens: int, requests: int, more: tuple[str, ...]) -> None:
    """Mixed requests with evictions: block by block at every 100th; and before each request the tokens that it will
    hit. Pages of one token are SGLang's default."""
    held = Held()
    arguments = ("--requests", str(requests), "--block-size", str(page), "--blocks", str(tokens // page), *more)
    with oracle("sglang", *arguments) as process:
        assert process.stdout is not None
        seen = compare(records_of(process.stdout), held)
    print(seen, held.residency.counters, held.residency.view(), held.decoder.counters)
    assert seen.wrong == []
    assert (seen.requests, seen.tables) == (requests, requests // 100)
    assert seen.hit_tokens > seen.tokens // 4, "nearly nothing was found: this proves nothing"
    assert seen.removed > tokens // page, "nearly nothing was evicted: this proves nothing"
    counts = held.residency.counters
    assert (counts.removed_unknown, counts.contradicted, counts.mismatched, counts.opaque) == (0, 0, 0, 0)
    read = held.decoder.counters
    assert read.unread == read.tags_skipped == read.fields_skipped == 0
