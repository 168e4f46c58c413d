"""`kv_score`: Continuum's tier 4, by its formula, and where ours departs from it."""

from __future__ import annotations

from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import UNKNOWN, BackendId
from ranvier_py.core.routing.placement import Choice, Holder, Match
from ranvier_py.core.routing.placement.chwbl import Chwbl
from ranvier_py.core.routing.placement.kv_score import KvScore, KvScoreOptions
from tests.core.routing.placement.engines import Engine, engines, match_of
from tests.examples import examples

AS_WRITTEN = KvScoreOptions(overlap_norm="relative", bounded_score=False)
KEY = b"\x42" * 32


def offloaded(*held: tuple[int, int, int], prompt: int = 1000) -> Match:
    """`held`: (backend, tokens, tier)."""
    holders = [Holder(BackendId(backend), tokens, 2, tier) for backend, tokens, tier in held]
    return match_of(prompt=prompt)._replace(holders=holders)


def choose(match: Match, candidates: tuple[Engine, ...], options: KvScoreOptions | None = None) -> Choice:
    return KvScore(options).choose(match, candidates, Random(1))


def scores(match: Match, candidates: tuple[Engine, ...], options: KvScoreOptions | None = None) -> list[float]:
    return [term["score"] for term in KvScore(options).terms(match, candidates)]


def test_the_score_is_the_weighted_sum_of_overlap_spare_load_and_success() -> None:
    candidates = engines(4, 1, 0)
    candidates[1].seen.success_rate = 0.5
    found = scores(offloaded((0, 1000, 0), (1, 500, 1)), candidates)
    assert found == pytest.approx([0.6 * 1.0 + 0.3 * 0.0 + 0.1, 0.6 * 0.5 * 0.6 + 0.3 * 0.75 + 0.1 * 0.5, 0.3 + 0.1])


def test_by_the_documents_norm_the_best_holder_counts_as_full_coverage_however_little_it_holds() -> None:
    candidates = engines(0, 0, 0)
    crumb = match_of((1, 16), prompt=10_000, opening=KEY)
    assert choose(crumb, candidates, AS_WRITTEN) == Choice(BackendId(1), "kv_aware", 16)
    assert choose(crumb, candidates) == Chwbl().choose(crumb, candidates, Random(1))
    assert scores(match_of((0, 2048), (1, 512), prompt=9000), candidates, AS_WRITTEN) == pytest.approx([1.0, 0.55, 0.4])


def test_load_and_health_never_beat_warmth_as_the_document_has_it() -> None:
    """Warm, fully loaded and failing: 0.6; cold, idle and healthy: 0.4; offloaded and fully loaded: 0.46."""
    candidates = engines(90, 0)
    candidates[0].seen.success_rate = 0.0
    assert scores(match_of((0, 1000)), candidates, AS_WRITTEN) == pytest.approx([0.6, 0.4])
    assert choose(match_of((0, 1000)), candidates, AS_WRITTEN) == Choice(BackendId(0), "kv_aware", 1000)
    candidates[0].seen.success_rate = 1.0
    assert scores(offloaded((0, 1000, 1)), candidates, AS_WRITTEN) == pytest.approx([0.46, 0.4])


def test_a_holder_at_the_cap_of_the_ring_gets_no_points() -> None:
    candidates = engines(4, 3, 3, 3)  # ceil(1.25 x 14 / 4) = 5
    warm = match_of((0, 1000), (2, 400), opening=KEY)
    assert choose(warm, candidates) == Choice(BackendId(0), "kv_aware", 1000)
    candidates[0].load = 5  # ceil(1.25 x 15 / 4) = 5
    assert choose(warm, candidates) == Choice(BackendId(2), "kv_aware", 400)
    assert choose(warm, candidates, KvScoreOptions(bounded_score=False)).backend == 0
    assert [term["below_cap"] for term in KvScore().terms(warm, candidates)] == [0, 1, 1, 1]


def test_when_only_the_overloaded_hold_enough_the_ring_decides() -> None:
    candidates = engines(5, 3, 3, 3)
    warm = match_of((0, 1000), (2, 200), opening=KEY)
    assert choose(warm, candidates) == Chwbl().choose(warm, candidates, Random(1))
    assert choose(warm, candidates).reason in ("prefix_hash", "overflow")


@pytest.mark.parametrize(
    ("tokens", "tier", "reason"),
    [(300, 0, "kv_aware"), (299, 0, "prefix_hash"), (500, 1, "kv_aware"), (499, 1, "prefix_hash")],
)
def test_the_ring_decides_below_three_tenths_of_credited_overlap(tokens: int, tier: int, reason: str) -> None:
    match = offloaded((0, tokens, tier))._replace(opening=KEY, home_tokens=500)
    assert choose(match, engines(0, 0, 0)).reason == reason


def test_below_the_threshold_and_without_a_key_the_least_loaded_serves() -> None:
    assert choose(offloaded((0, 100, 0))._replace(home=UNKNOWN), engines(1, 0)) == Choice(BackendId(1), "fallback", 0)


def test_of_two_that_hold_as_much_the_one_in_memory_is_preferred_to_the_offloaded_one() -> None:
    assert choose(offloaded((0, 1000, 1), (1, 1000, 0)), engines(0, 0)).backend == 1
    equal = KvScoreOptions(storage_tier_weight=1.0)
    assert scores(offloaded((0, 1000, 1), (1, 1000, 0)), engines(0, 0), equal) == pytest.approx([1.0, 1.0])


def test_an_idle_cluster_divides_nothing_by_zero() -> None:
    assert scores(match_of((0, 1000)), engines(0, 0)) == pytest.approx([1.0, 0.4])
    assert scores(match_of((0, 0), prompt=0), engines(0, 0)) == pytest.approx([0.4, 0.4])


def test_of_equal_scores_the_one_with_fewer_in_flight_serves() -> None:
    options = KvScoreOptions(overlap_weight=1.0, load_weight=0.0, health_weight=0.0, bounded_score=False)
    warm = match_of((0, 1000), (1, 1000), (2, 1000))
    assert choose(warm, engines(3, 2, 4), options).backend == 1


def test_of_equal_scores_and_loads_the_first_on_the_ring_serves_wherever_it_stands() -> None:
    for opening in (bytes([number]) * 32 for number in range(40)):
        warm = match_of((0, 1000), (1, 1000), (2, 1000), opening=opening)
        ours = engines(1, 1, 1, 1)
        walk = Chwbl().ring.walk(int.from_bytes(opening[:8], "big"), ours)
        assert choose(warm, ours).backend == next(position for position in walk if position != 3)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_the_chosen_has_the_highest_score_of_those_below_the_cap(data: st.DataObject) -> None:
    candidates = engines(*data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=8)))
    ids = st.sampled_from([one.id for one in candidates])
    match = match_of(*data.draw(st.dictionaries(ids, st.integers(1, 1000), min_size=1)).items(), opening=KEY)
    choice = choose(match, candidates)
    terms = KvScore().terms(match, candidates)
    open_to = [term for term in terms if term["below_cap"]]
    if choice.reason == "kv_aware":
        assert terms[choice.backend] in open_to
        assert terms[choice.backend]["score"] == max(term["score"] for term in open_to)
    else:
        assert max(term["overlap_share"] for term in open_to) < 0.3


def test_its_own_defaults_sum_to_one_although_not_in_binary() -> None:
    options = KvScoreOptions()
    assert options.overlap_weight + options.load_weight + options.health_weight != 1.0
    assert KvScoreOptions(overlap_weight=0.6000005)


@pytest.mark.parametrize("weights", [(0.6, 0.3, 0.2), (0.6, 0.3, 0.09999), (0.0, 0.0, 0.0)])
def test_weights_that_do_not_sum_to_one_are_refused(weights: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="overlap_weight, load_weight, health_weight: must sum to 1, not"):
        KvScoreOptions(*weights)


def test_a_thousand_scores_take_no_more_than_the_document_allows() -> None:
    """1,000 scores under 100 ms; here one choice scores 64 backends, so 16 choices are 1,024."""
    policy, candidates = KvScore(), engines(*[3] * 64)
    warm = match_of(*((number, 900 - number) for number in range(64)), opening=KEY)
    policy.choose(warm, candidates, Random(1))
    began = process_time()
    for _ in range(16):
        policy.choose(warm, candidates, Random(1))
    assert process_time() - began < 0.1
