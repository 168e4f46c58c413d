"""A residency against SGLang's own RadixCache: the same events, the same blocks, the same hits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.harness.endless_checkpoints import EndlessCheckpoints
from ranvier_py.core.engine_cache.sources.events import EventDecoder
from ranvier_py.core.routing.checkpoints.cache_profile import EXTRA_BUFFER, NO_BUFFER, CheckpointProfile
from ranvier_py.replay.hybrid.alpha_search import TokenRequest
from tests.engines.records import compared, records

pytestmark = pytest.mark.engines("sglang")


@pytest.mark.parametrize(
    ("page", "tokens", "requests", "more"),
    [(16, 40_000, 2000, ()), (64, 30_000, 2000, ("--dynamo-format",)), (1, 20_000, 400, ())],
    ids=["pages of 16", "pages of 64 in Dynamo's format", "pages of one token"],
)
def test_the_residency_is_the_radix_tree(page: int, tokens: int, requests: int, more: tuple[str, ...]) -> None:
    """Mixed requests with evictions: block by block at every 100th; and before each request the tokens that it will
    hit. Pages of one token are SGLang's default."""
    blocks = tokens // page
    held, seen = compared("sglang", "--requests", requests, "--block-size", page, "--blocks", blocks, *more)
    assert seen.requests == requests
    assert held.removed > blocks, "nearly nothing was evicted: this proves nothing"


def states_of(slots: int, *more: str) -> Iterator[list[Any]]:
    return records("sglang", "--requests", 300, "--block-size", 1, "--state-slots", slots, *more)


def tokens_of(*parts: list[int]) -> bytes:
    return np.concatenate([np.array(part, dtype="<u4") for part in parts]).tobytes()


class Reused(NamedTuple):
    """Of one prompt, in tokens: keys and values that the tree has, what it reuses of them, what a profile credits."""

    held: int
    hit: int
    credited: int


def reused_by(profile: CheckpointProfile, *more: str) -> list[Reused]:
    """300 requests that grow, branch off and repeat each other, with room for all states."""
    cache, prompt, found = EndlessCheckpoints(profile), [], []
    for kind, *values in states_of(100_000, *more):
        if kind == "request":
            prompt, held, hit = values
            found.append(Reused(held, hit, cache.lookup(TokenRequest(tokens_of(prompt), tokens_of(prompt)))))
        elif kind == "served":
            cache.insert(TokenRequest(tokens_of(prompt), tokens_of(prompt, values[0])))
    return found


def test_a_profile_without_buffer_reuses_what_the_tree_of_a_hybrid_model_does() -> None:
    """To the token."""
    found = reused_by(NO_BUFFER)
    assert [each for each in found if each.credited != each.hit] == []
    less = sum(each.held - each.hit for each in found)
    assert min(sum(each.hit for each in found), less) > 50_000, "all or nearly nothing was reused: this proves nothing"


def test_a_profile_with_extra_buffer_credits_hardly_more_than_the_tree_of_a_hybrid_model_reuses() -> None:
    """To the token in 95 of 100 requests, and never less. More where prompts part: the state that the tree keeps there
    is in place of that at the prompt's end, and of an answer it has no keys behind the last state, where others could
    part from it. Nodes see that by the engine's count."""
    found = reused_by(EXTRA_BUFFER, "--extra-buffer")
    assert [each for each in found if each.credited < each.hit] == []
    assert sum(each.credited > each.hit for each in found) <= len(found) // 20
    reused, less = sum(each.hit for each in found), sum(each.held - each.hit for each in found)
    assert sum(each.credited for each in found) <= 1.01 * reused
    assert min(reused / 5, less) > 20_000, "all or nearly nothing was reused: this proves nothing"


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
