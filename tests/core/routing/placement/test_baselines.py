"""The baselines, and the list of policies by name."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.routing.placement import Holder, Match
from ranvier_py.core.routing.placement.policies import POLICIES, make_policy
from tests.core.routing.placement.engines import NO_MATCH, Engine, engines


def chosen(policy: str, candidates: tuple[Engine, ...], times: int) -> list[str]:
    instance, rng = make_policy(policy), Random(1)
    by_id = {one.id: one.name for one in candidates}
    return [by_id[instance.choose(NO_MATCH, candidates, rng).backend] for _ in range(times)]


def test_round_robin_takes_each_in_its_turn_whatever_the_load() -> None:
    assert chosen("round_robin", engines(9, 0, 5), 7) == ["e0", "e1", "e2", "e0", "e1", "e2", "e0"]


def test_round_robin_spreads_the_turns_of_a_heavier_backend() -> None:
    candidates = engines(0, 0, 0)
    candidates[0].weight = 2.0
    turns = chosen("round_robin", candidates, 8)
    assert Counter(turns) == {"e0": 4, "e1": 2, "e2": 2}
    assert "e0 e0 e0" not in " ".join(turns)


def test_round_robin_goes_on_fairly_when_one_backend_is_left_out_for_a_while() -> None:
    policy, candidates, rng = make_policy("round_robin"), engines(0, 0, 0), Random(1)
    turns = Counter(policy.choose(NO_MATCH, candidates[: 2 + (turn % 2)], rng).backend for turn in range(60))
    assert turns[candidates[0].id] + turns[candidates[1].id] + turns[candidates[2].id] == 60
    assert min(turns.values()) >= 10


def test_random_follows_the_weights() -> None:
    candidates = engines(0, 0)
    candidates[1].weight = 3.0
    counts = Counter(chosen("random", candidates, 4000))
    assert 2850 < counts["e1"] < 3150


def test_least_loaded_draws_among_the_least_loaded_alone() -> None:
    counts = Counter(chosen("least_loaded", engines(4, 1, 9, 1), 1000))
    assert set(counts) == {"e1", "e3"}
    assert 400 < counts["e1"] < 600


def test_least_loaded_counts_the_load_of_a_heavier_backend_for_less() -> None:
    candidates = engines(3, 2)
    candidates[0].weight = 2.0
    assert set(chosen("least_loaded", candidates, 50)) == {"e0"}


def test_power_of_two_never_takes_the_busiest_and_reaches_all_others() -> None:
    counts = Counter(chosen("power_of_two", engines(1, 2, 3, 9), 1000))
    assert set(counts) == {"e0", "e1", "e2"}
    assert 440 < counts["e0"] < 560  # in half of the pairs


def test_power_of_two_of_one_is_that_one() -> None:
    assert chosen("power_of_two", engines(7), 3) == ["e0"] * 3


@pytest.mark.parametrize("name", list(POLICIES))
def test_each_policy_reports_its_name_and_what_the_chosen_backend_holds(name: str) -> None:
    policy = make_policy(name)
    match = Match([Holder(BackendId(0), 64, 1)], 100, Fingerprint(5))
    choice = policy.choose(match, engines(0), Random(1))
    assert policy.name == name
    assert choice.tokens == 64


def test_a_policy_that_is_none_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=f"policy: must be one of {', '.join(POLICIES)}, not 'fastest'"):
        make_policy("fastest")
