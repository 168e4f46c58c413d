"""`cache_aware_smg`: SMG 1.13, by its formulas and by how it was seen to behave."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.placement import Choice, Match
from ranvier_py.core.routing.placement.cache_aware_smg import CacheAwareSmg, CacheAwareSmgOptions
from tests.core.routing.placement.engines import engines, match_of


def choose(match: Match, *loads: int) -> Choice:
    return CacheAwareSmg().choose(match, engines(*loads), Random(1))


@pytest.mark.parametrize(
    ("share", "margin"), [(0, 4), (1, 4), (4, 4), (5, 5), (9, 6), (16, 8), (256, 32), (1024, 64), (5000, 64)]
)
def test_the_margin_is_twice_the_square_root_of_the_mean_between_4_and_64(share: float, margin: int) -> None:
    assert CacheAwareSmg().margin(share) == margin


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ((6, 0, 0), "match"),  # mean 2: at most 2 + 4
        ((7, 0, 0), "spill"),  # 7 > 2.33 + 4 and > 3.5
        ((15, 9, 9), "match"),  # mean 11: 15 is below 1.5 times it
        ((26, 12, 13), "match"),  # mean 17: above 1.5 times it by half a request, but within the margin of 9
        ((36, 12, 12), "spill"),  # mean 20: 36 > 30 and > 29
        ((400, 300, 0), "spill"),  # mean 233: 400 > 350 and > 264
        ((400, 300, 110), "match"),  # mean 270: 400 < 405
    ],
)
def test_a_holder_is_spilled_above_one_and_a_half_times_the_mean_and_the_margin(
    loads: tuple[int, ...], reason: str
) -> None:
    assert choose(match_of((0, 900)), *loads).reason == reason


def test_what_is_spilled_goes_to_the_least_expected_wait_below_the_gate_whatever_it_holds() -> None:
    candidates = engines(90, 3, 4, 90)
    candidates[1].work.pending_tokens, candidates[2].work.pending_tokens = 900, 800
    assert CacheAwareSmg().choose(match_of((0, 900), (1, 880)), candidates, Random(1)) == Choice(
        BackendId(2), "spill", 0
    )


def test_the_expected_wait_is_queued_tokens_and_1024_for_each_decode_over_2000_a_second() -> None:
    candidates = engines(3)
    candidates[0].work.pending_tokens, candidates[0].work.decoding = 4000, 2
    assert CacheAwareSmg().wait_s(candidates[0]) == pytest.approx(3.024)
    candidates[0].weight = 2.0
    assert CacheAwareSmg().wait_s(candidates[0]) == pytest.approx(1.512)


def test_of_the_deepest_holders_the_one_with_the_least_wait_serves_and_shallower_ones_are_not_seen() -> None:
    candidates = engines(2, 2, 2, 0)
    for one, pending in zip(candidates, (500, 400, 0, 0), strict=True):
        one.work.pending_tokens = pending
    choice = CacheAwareSmg().choose(match_of((0, 640), (1, 640), (2, 624)), candidates, Random(1))
    assert choice == Choice(BackendId(1), "match", 640)


def test_only_eight_holders_are_looked_at() -> None:
    candidates = engines(*[1] * 10)
    for one in candidates[:8]:
        one.work.pending_tokens = 100
    everyone = match_of(*((number, 640) for number in range(10)))
    chosen = Counter(CacheAwareSmg().choose(everyone, candidates, Random(seed)).backend for seed in range(200))
    assert set(chosen) == set(range(8))
    more = CacheAwareSmg(CacheAwareSmgOptions(holders_max=10))
    assert more.choose(everyone, candidates, Random(1)).backend in (8, 9)


def test_without_a_match_of_three_tenths_the_least_expected_wait_serves() -> None:
    candidates = engines(9, 1, 1)
    candidates[1].work.pending_tokens = candidates[2].work.pending_tokens = 10
    assert CacheAwareSmg().choose(match_of((1, 300)), candidates, Random(1)) == Choice(BackendId(0), "expected_wait", 0)
    assert CacheAwareSmg().choose(match_of((1, 301)), candidates, Random(1)) == Choice(BackendId(1), "match", 301)


def test_new_prompts_one_by_one_are_spread_over_idle_backends() -> None:
    """Observed: 12 unique prompts went 4/4/4; equal waits are drawn here."""
    policy, candidates, rng = CacheAwareSmg(), engines(0, 0, 0), Random(1)
    chosen = Counter(policy.choose(match_of(home=home), candidates, rng).backend for home in range(600))
    assert min(chosen.values()) > 160


def test_a_crowd_behind_one_system_prompt_is_shared_by_two_of_three() -> None:
    """Observed: 48 at once, 24/24/0. Two that share a crowd evenly never exceed 1.5 times the mean of three."""
    policy, candidates, rng = CacheAwareSmg(), engines(0, 0, 0), Random(1)
    held: dict[int, int] = {}
    reasons: Counter[str] = Counter()
    for home in range(48):
        choice = policy.choose(match_of(*held.items(), home=home), candidates, rng)
        held[choice.backend] = 800
        candidates[choice.backend].bear(1000 - choice.tokens)
        reasons[choice.reason] += 1
    assert sorted(one.load for one in candidates) == [0, 24, 24]
    assert reasons == {"expected_wait": 1, "spill": 1, "match": 46}


def test_equal_engines_of_odd_weight_without_any_margin_still_serve() -> None:
    """Rounding may put all of them above their share."""
    strict = CacheAwareSmg(CacheAwareSmgOptions(spill_factor=1.0, spill_margin_min=0, spill_margin_max=0))
    candidates = engines(3, 3, 3)
    for one in candidates:
        one.weight = 49.0
    assert strict.choose(match_of((0, 900)), candidates, Random(1)).reason in ("match", "spill")


def test_its_terms_are_what_it_weighs() -> None:
    candidates = engines(6, 0, 0)
    candidates[0].work.pending_tokens = 1000
    first, second, _ = CacheAwareSmg().terms(match_of((0, 640)), candidates)
    assert first == {
        "held_tokens": 640,
        "expected_wait_s": 0.5,
        "load_requests": 6,
        "fair_load_requests": 2.0,
        "spill_margin_requests": 4,
    }
    assert second["held_tokens"] == second["expected_wait_s"] == 0


def test_margins_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="spill_margin_min: must be at most spill_margin_max \\(3\\)"):
        CacheAwareSmgOptions(spill_margin_max=3)
