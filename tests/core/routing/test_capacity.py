"""How large a cache is, by how old what it still had was."""

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.capacity import (
    BORROWED,
    HALF_LIFE,
    SECONDS_MAX,
    CapacityEstimate,
    StackClock,
    bucket_of,
    edge_of,
)
from tests.examples import examples

USES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500), st.integers(-1, 50)), max_size=40)


@settings(max_examples=examples(100))
@given(USES, st.integers(0, 60), st.integers(0, 9000))
def test_the_clock_counts_each_token_in_the_second_of_its_last_use(
    uses: list[tuple[int, int, int]], second: int, distance: int
) -> None:
    """Beside a plain dict. Each use is of new tokens, or of some that were last used in an earlier second."""
    clock, model = StackClock(), dict.fromkeys(range(-1, 60), 0)
    for at, tokens, again in sorted(uses):
        used = tokens
        if 0 <= again < at and again in [one for one, _, _ in uses if one < at]:
            used = min(tokens, model[again])
            assert clock.take(tokens, again) == used
            model[again] -= used
        clock.add(used, at + 0.5)
        model[at] += used

    def after(moment: int) -> int:
        return sum(tokens for at, tokens in model.items() if at > moment)

    assert clock.total == after(-2)
    assert clock.distance(second) == after(second)
    before = clock.second_before(distance)
    assert before < 0 or after(before) > distance
    seen = [at for at, _, _ in uses]
    assert all(after(at) <= distance for at in seen if at > before)
    left = clock.left_of(distance)
    assert list(left) == sorted({at for at in seen if at > before})
    assert all(deep == distance - after(at) for at, deep in left.items())


def test_what_comes_late_counts_in_its_own_second_and_is_found_there() -> None:
    """A peer's use is known some time after ours, and used again in the second that it names."""
    clock = StackClock()
    clock.add(100, 10)
    clock.add(100, 14)
    for late in (10, 12):  # nothing was used in 12: with what came next
        clock.add(50, late)
    assert (clock.distance(9), clock.distance(10), clock.distance(13)) == (300, 150, 150)
    assert (clock.take(200, 10), clock.take(50, 12)) == (150, 50)
    assert clock.total == 100


def test_a_clock_that_runs_for_long_forgets_single_seconds_only() -> None:
    clock = StackClock()
    for second in range(3 * SECONDS_MAX):
        clock.add(10, second)
    assert clock.total == 30 * SECONDS_MAX
    for second in (100, SECONDS_MAX, 3 * SECONDS_MAX - 50):
        exact = 10 * (3 * SECONDS_MAX - 1 - second)
        assert clock.distance(second) == pytest.approx(exact, rel=0.01, abs=400)
    assert clock.take(25, 3 * SECONDS_MAX - 50) == 10
    assert clock.take(25, 3 * SECONDS_MAX) == 0  # nothing was used then


@given(st.floats(0, 2**35))
def test_every_distance_is_below_the_edge_of_its_bucket(distance: float) -> None:
    place = bucket_of(distance)
    assert edge_of(place - 1) <= distance * 1.000001 or place == 0
    assert distance <= edge_of(place) * 1.000001


def observe(estimate: CapacityEstimate, capacity: float, answers: int, rng: Random, noise: float = 0.05) -> None:
    for _ in range(answers):
        distance = 2 ** rng.uniform(10, 18)
        warm = float((distance < capacity) != (rng.random() < noise))
        estimate.observe(distance, 2 * warm - 1)
        estimate.counted()


@pytest.mark.parametrize("capacity", [5_000, 40_000, 150_000])
def test_a_capacity_is_found_to_a_fifth_though_some_answers_lie(capacity: int) -> None:
    estimate = CapacityEstimate()
    observe(estimate, capacity, 400, Random(1))
    assert capacity / 1.3 < estimate.learned < capacity * 1.3


def test_nothing_limits_what_was_never_cold() -> None:
    estimate = CapacityEstimate()
    assert estimate.learned == inf
    observe(estimate, inf, 300, Random(1))
    assert estimate.learned == inf
    estimate.observe(2.0**17, -1.0)  # one cold answer is chance
    assert estimate.limit == inf


def test_a_cache_that_grew_is_noticed_and_so_is_one_that_shrank() -> None:
    estimate, rng = CapacityEstimate(), Random(2)
    observe(estimate, 10_000, 300, rng)
    observe(estimate, 80_000, int(3 * HALF_LIFE), rng)
    assert estimate.learned > 50_000
    observe(estimate, 10_000, int(3 * HALF_LIFE), rng)
    assert estimate.learned < 20_000


def test_a_limit_that_nothing_renews_fades_away() -> None:
    """Else a burst of other clients would cost matches for ever."""
    estimate = CapacityEstimate()
    for _ in range(20):
        estimate.observe(50_000, -1.0)
        estimate.counted()
    assert estimate.learned < 50_000
    for _ in range(int(5 * HALF_LIFE)):
        estimate.observe(1000, 1.0)
        estimate.counted()
    assert estimate.learned == inf


def test_an_engine_that_has_shown_little_is_taken_for_as_large_as_the_others() -> None:
    fleet = CapacityEstimate()
    observe(fleet, 40_000, 400, Random(1))
    estimate = CapacityEstimate(fleet)
    assert 40_000 / 1.3 < estimate.learned < 40_000 * 1.3
    observe(estimate, 160_000, int(2 * BORROWED), Random(2))
    assert estimate.learned > 120_000


def test_what_the_engine_reports_is_never_exceeded() -> None:
    estimate = CapacityEstimate()
    estimate.reported = 30_000
    assert estimate.limit == 30_000
    assert estimate.learned == inf


def test_one_that_reports_nothing_is_no_larger_than_the_largest_that_reports_unless_it_shows_more() -> None:
    fleet = CapacityEstimate()
    fleet.reported = 30_000
    estimate = CapacityEstimate(fleet)
    assert estimate.limit == 30_000
    estimate.reported = 20_000
    assert estimate.limit == 20_000
    estimate.reported = None
    for _ in range(5):
        estimate.observe(60_000, 1.0)
        estimate.counted()
    assert estimate.limit == inf


def test_weights_stay_numbers_over_a_long_life() -> None:
    estimate = CapacityEstimate()
    observe(estimate, 40_000, 20_000, Random(3))
    assert 30_000 < estimate.learned < 55_000
