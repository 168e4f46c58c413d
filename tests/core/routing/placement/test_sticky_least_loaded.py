"""`sticky_least_loaded`: the Purdue report. Its promises about state are in tests/node/test_purdue_reports.py."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement import Choice, Match
from ranvier_py.core.routing.placement.sticky_least_loaded import StickyLeastLoaded, StickyLeastLoadedOptions
from tests.core.routing.placement.engines import engines, match_of
from tests.core.routing.test_router import chat, make_router, start_attempt


def choose(match: Match, *loads: int, options: StickyLeastLoadedOptions | None = None) -> Choice:
    return StickyLeastLoaded(options).choose(match, engines(*loads), Random(1))


def test_of_those_that_hold_the_beginning_the_least_loaded_serves_even_if_others_are_idler() -> None:
    assert choose(match_of((0, 64), (1, 512), (2, 64)), 3, 9, 2, 0) == Choice(BackendId(2), "hit", 64)


@pytest.mark.parametrize(
    ("held", "prompt", "reason"),
    [
        (64, 1000, "hit"),
        (48, 1000, "miss"),
        (48, 48, "hit"),  # the whole prompt
        (32, 48, "miss"),
    ],
)
def test_a_hit_is_the_first_64_tokens_or_the_whole_of_a_shorter_prompt(held: int, prompt: int, reason: str) -> None:
    assert choose(match_of((0, held), prompt=prompt), 5, 0).reason == reason


def test_a_miss_goes_to_any_of_the_least_loaded() -> None:
    rng, policy = Random(1), StickyLeastLoaded()
    chosen = Counter(policy.choose(match_of((0, 48)), engines(5, 1, 1, 2), rng) for _ in range(100))
    assert {(choice.backend, choice.reason) for choice in chosen} == {(1, "miss"), (2, "miss")}


def test_the_length_of_the_beginning_is_an_option() -> None:
    shorter = StickyLeastLoadedOptions(prefix_tokens=48)
    assert choose(match_of((0, 48)), 5, 0, options=shorter).reason == "hit"


def test_as_the_report_has_it_stickiness_has_no_limit() -> None:
    assert choose(match_of((0, 64)), 900, 0, 0, 0) == Choice(BackendId(0), "hit", 64)


def test_with_a_limit_a_holder_above_twice_the_median_is_no_hit() -> None:
    limit = StickyLeastLoadedOptions(sticky_limit_factor=2.0)
    assert choose(match_of((0, 64)), 10, 4, 4, 4, options=limit).reason == "hit"
    assert choose(match_of((0, 64)), 11, 4, 3, 4, options=limit) == Choice(BackendId(2), "limited", 0)
    assert choose(match_of((0, 64), (1, 64)), 31, 10, 4, 4, options=limit) == Choice(BackendId(1), "hit", 64)


def test_in_multi_depth_only_the_deepest_of_those_that_hit_serve() -> None:
    """Else everything behind one system prompt is one key, and a chat's own cache is lost to the idlest of its kind."""
    deep = StickyLeastLoadedOptions(multi_depth=True)
    assert choose(match_of((0, 64), (1, 512)), 0, 9, options=deep) == Choice(BackendId(1), "hit", 512)
    assert choose(match_of((0, 64), (1, 512)), 0, 9) == Choice(BackendId(0), "hit", 64)


def test_a_failed_first_request_binds_nobody() -> None:
    """The claim is speculative: the report's map would keep it until the next snapshot."""
    router, body = make_router(policy="sticky_least_loaded"), chat("question", system="You answer. " * 40)
    router.finish_attempt(start_attempt(router, body), Outcome.CONNECT_ERROR, 0.0)
    assert start_attempt(router, body).decision.reason == "miss"
