"""A residency against SGLang's own RadixCache: the same events, the same blocks, the same hits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.routing.checkpoints.cache_profile import NO_BUFFER
from ranvier_py.replay.hybrid.alpha_search import TokenRequest
from ranvier_py.replay.hybrid.checkpoint_profile import EndlessCheckpoints
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


def states_of(slots: int) -> Iterator[list[Any]]:
    with oracle("sglang", "--requests", "300", "--block-size", "1", "--state-slots", str(slots)) as process:
        assert process.stdout is not None
        yield from records_of(process.stdout)


def tokens_of(*parts: list[int]) -> bytes:
    return np.concatenate([np.array(part, dtype="<u4") for part in parts]).tobytes()


def test_a_profile_without_buffer_reuses_what_the_tree_of_a_hybrid_model_does() -> None:
    """300 requests that grow, branch off and repeat each other, with room for all states: to the token."""
    cache, wrong, reused, less = EndlessCheckpoints(NO_BUFFER), [], 0, 0
    prompt: list[int] = []
    for kind, *values in states_of(100_000):
        if kind == "request":
            prompt, held, hit = values
            found = cache.lookup(TokenRequest(tokens_of(prompt), tokens_of(prompt)))
            if found != hit:
                wrong.append((len(prompt), hit, found))
            reused += hit
            less += held - hit
        elif kind == "served":
            cache.insert(TokenRequest(tokens_of(prompt), tokens_of(prompt, values[0])))
    assert wrong == []
    assert min(reused, less) > 50_000, "all that was held was reused, or nearly nothing: this proves nothing"


def test_no_event_speaks_of_a_state_that_the_tree_gives_up() -> None:
    """But where it was at the end of a branch, whose keys and values go with it."""
    decoder, silent, spoken = EventDecoder(), 0, 0
    for kind, *values in states_of(60):
        if kind == "given up":
            states, payload = values
            events = decoder.decode(payload).events
            silent += states if not events else 0
            spoken += bool(events)
            assert not [event for event in events if getattr(event, "kind", None) == "mamba"]
    assert silent > 20
    assert spoken > 20
