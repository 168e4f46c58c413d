"""`cache_aware`: sglang-router 0.3.2, by its thresholds and by how its last release was seen to behave."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Choice, Match
from ranvier_py.core.routing.placement.cache_aware import CacheAware, CacheAwareOptions
from tests.core.routing.placement.engines import Engine, engines, match_of


def choose(match: Match, *loads: int, options: CacheAwareOptions | None = None) -> Choice:
    return CacheAware(options).choose(match, engines(*loads), Random(1))


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ((64, 0, 0), "match"),
        ((65, 0, 0), "imbalance"),
        ((195, 130, 150), "match"),  # 65 apart, but not more than 1.5 times the least
        ((196, 130, 150), "imbalance"),
        ((3, 900, 0), "imbalance"),  # whoever is the busy one
    ],
)
def test_load_decides_when_both_thresholds_are_exceeded(loads: tuple[int, ...], reason: str) -> None:
    choice = choose(match_of((0, 900)), *loads)
    assert choice.reason == reason
    assert loads[choice.backend] == (loads[0] if reason == "match" else min(loads))


@pytest.mark.parametrize(("matched", "reason"), [(300, "least_loaded"), (301, "match"), (1000, "match")])
def test_a_match_is_followed_when_it_exceeds_three_tenths_of_the_prompt(matched: int, reason: str) -> None:
    assert choose(match_of((2, matched)), 0, 0, 60) == (
        Choice(BackendId(2), "match", matched) if reason == "match" else Choice(BackendId(0), "least_loaded", 0)
    )


def test_a_long_prompt_behind_a_cached_system_prompt_of_a_fifth_is_a_miss() -> None:
    """What a threshold by share costs: 5,000 cached tokens are thrown away."""
    assert choose(match_of((2, 5000), prompt=25_000), 0, 0, 0) == Choice(BackendId(0), "least_loaded", 0)


def test_the_least_loaded_backend_keeps_what_it_holds() -> None:
    assert choose(match_of((1, 200)), 4, 0, 4) == Choice(BackendId(1), "least_loaded", 200)


def test_new_prompts_one_by_one_all_go_to_the_first_backend() -> None:
    """Observed: 12 of 12 unique prompts on one of three workers."""
    policy, candidates = CacheAware(), engines(0, 0, 0)
    chosen = [policy.choose(match_of(home=home), candidates, Random(home)).backend for home in range(12)]
    assert chosen == [0] * 12


def served_at_once(policy: CacheAware, candidates: tuple[Engine, ...], requests: int) -> list[int]:
    """Requests at once behind one shared system prompt of 80 % of their text; none ends meanwhile."""
    held: dict[int, int] = {}
    for home in range(requests):
        choice = policy.choose(match_of(*held.items(), home=home), candidates, Random(home))
        held[choice.backend] = 800
        candidates[choice.backend].bear(1000 - choice.tokens)
    return [one.load for one in candidates]


def test_a_crowd_behind_one_system_prompt_stays_on_one_backend_up_to_the_threshold() -> None:
    """Observed: 48 at once, 48/0/0."""
    assert served_at_once(CacheAware(), engines(0, 0, 0), 48) == [48, 0, 0]
    assert served_at_once(CacheAware(), engines(0, 0, 0), 70) == [66, 2, 2]


def test_the_loads_of_a_heavier_backend_count_for_less() -> None:
    candidates = engines(120, 60)
    candidates[0].weight = 2.0
    assert CacheAware().choose(match_of(), candidates, Random(1)).backend == 0
    candidates[0].load = 121
    assert CacheAware().choose(match_of(), candidates, Random(1)).backend == 1


def test_all_thresholds_are_options() -> None:
    eager = CacheAwareOptions(cache_threshold=0.1, balance_abs_threshold=10, balance_rel_threshold=2.0)
    assert choose(match_of((1, 101)), 0, 10, options=eager).reason == "match"
    assert choose(match_of((1, 101)), 0, 11, options=eager).reason == "imbalance"
    assert choose(match_of((1, 101)), 11, 22, options=eager).reason == "match"
    assert choose(match_of((1, 100)), 0, 10, options=eager).reason == "least_loaded"
