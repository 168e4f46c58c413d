"""`bounded_load`: Ranvier's shipped default, and what it costs."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Choice, Match
from ranvier_py.core.routing.placement.affinity import Affinity
from ranvier_py.core.routing.placement.baselines import mean_load
from ranvier_py.core.routing.placement.bounded_load import BoundedLoad, BoundedLoadOptions, cap_of, jump_hash
from tests.core.routing.placement.engines import NO_MATCH, Engine, engines, match_of


def choose(match: Match, *loads: int) -> Choice:
    return BoundedLoad().choose(match, engines(*loads), Random(1))


@pytest.mark.parametrize(
    ("loads", "cap"),
    [
        ((0, 0, 0, 0), 1),
        ((1, 0, 0, 0), 1),  # mean 0.25: 0.31
        ((1, 1, 1, 0), 1),  # mean 0.75: 0.94
        ((1, 1, 1, 1), 2),
        ((10, 2, 2, 2), 5),  # mean 4: 5 exactly
        ((10, 2, 2, 3), 6),
        ((80, 80, 80, 80), 100),
    ],
)
def test_the_cap_is_the_mean_and_a_quarter_rounded_up_and_at_least_one(loads: tuple[int, ...], cap: int) -> None:
    assert cap_of(mean_load(engines(*loads)) * 1.25, 1.0) == cap


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ((0, 0, 0, 0), "hit"),
        ((1, 0, 0, 0), "hit_probed"),
        ((1, 1, 1, 1), "hit"),
        ((4, 4, 4, 4), "hit"),
        ((5, 3, 4, 4), "hit_probed"),  # at the cap is not below it
    ],
)
def test_a_holder_is_left_at_the_cap(loads: tuple[int, ...], reason: str) -> None:
    assert choose(match_of((0, 900)), *loads).reason == reason


def test_two_concurrent_requests_behind_one_prefix_already_part() -> None:
    """What the default costs: the other rule of the same router keeps them together."""
    for policy, together in ((BoundedLoad(), False), (Affinity(), True)):
        candidates = engines(*[0] * 8)
        first = policy.choose(match_of((3, 900)), candidates, Random(1))
        assert first.backend == 3
        candidates[3].load += 1
        assert (policy.choose(match_of((3, 900)), candidates, Random(1)).backend == 3) is together


def test_a_cold_prefix_goes_to_its_bucket_by_name_and_all_nodes_agree() -> None:
    ours = engines(0, 0, 0, 0, 0)
    theirs = tuple(Engine(BackendId(9 - one.id), one.name) for one in reversed(ours))
    for home in range(1, 60):
        choice = choose(match_of(home=home), 0, 0, 0, 0, 0)
        assert choice == Choice(BackendId(jump_hash(home, 5)), "cold", 0)
        other = BoundedLoad().choose(match_of(home=home), theirs, Random(2))
        assert other.backend == 9 - choice.backend


def test_a_cold_prefix_whose_bucket_is_full_goes_to_the_next_probe() -> None:
    candidates = engines(0, 0, 0, 0, 0)
    probes = [jump_hash(7 + probe, 5) for probe in range(5)]
    candidates[probes[0]].load = 1
    following = next(position for position in probes if position != probes[0])
    assert BoundedLoad().choose(match_of(home=7), candidates, Random(1)) == Choice(
        BackendId(following), "cold_probed", 0
    )


def test_when_no_probe_finds_room_the_least_loaded_serves() -> None:
    """Probes repeat themselves, so they may miss the only backend with room."""
    reasons: Counter[str] = Counter()
    for home in range(1, 400):
        candidates = engines(9, 9, 9, 0)
        choice = BoundedLoad().choose(match_of(home=home), candidates, Random(home))
        assert choice.backend == 3
        reasons[choice.reason] += 1
    assert set(reasons) == {"cold", "cold_probed", "least_loaded"}


def test_a_request_without_a_prefix_goes_to_any_of_the_least_loaded() -> None:
    rng, candidates = Random(1), engines(5, 1, 1)
    chosen = Counter(BoundedLoad().choose(NO_MATCH, candidates, rng) for _ in range(100))
    assert {(choice.backend, choice.reason) for choice in chosen} == {(1, "no_prefix"), (2, "no_prefix")}


def test_a_wider_bound_is_an_option() -> None:
    wide = BoundedLoad(BoundedLoadOptions(bounded_load_epsilon=10.0))
    assert wide.choose(match_of((0, 900)), engines(2, 0, 0, 0), Random(1)).reason == "hit"  # mean 0.5: 6


def test_a_backend_of_twice_the_weight_has_twice_the_cap() -> None:
    candidates = engines(4, 2, 2)
    candidates[0].weight = 2.0  # 8 requests over weight 4: 2.5 each, 5 for this one
    assert BoundedLoad().choose(match_of((0, 900)), candidates, Random(1)).reason == "hit"
    candidates[0].load = 7
    assert BoundedLoad().choose(match_of((0, 900)), candidates, Random(1)).reason == "hit_probed"


@pytest.mark.parametrize(
    ("key", "buckets", "bucket"),
    [(1, 1, 0), (42, 57, 43), (0xDEAD10CC, 1, 0), (0xDEAD10CC, 666, 361), (256, 1024, 520), (0, 1, 0)],
)
def test_jump_hash_gives_the_values_that_other_implementations_give(key: int, buckets: int, bucket: int) -> None:
    """Vectors that implementations in several languages test themselves by (dgryski/go-jump)."""
    assert jump_hash(key, buckets) == bucket
