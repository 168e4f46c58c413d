"""How fast a backend gets to first tokens, learned from those it gave."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.placement.pace import NOMINAL, WINDOW, Pace, fitted


def show(pace: Pace, count: int, *, per_token: float, alone: float, queued: float, noise: float = 0.0) -> None:
    """Let a backend serve `count` prompts of random sizes, half of them from a queue."""
    rng = Random(1)
    for _ in range(count):
        tokens, waited = rng.randrange(10, 8000), rng.random() < 0.5
        gap_s = (queued if waited else alone) + tokens * per_token
        pace.observe(tokens, 0, gap_s * (1 + rng.uniform(-noise, noise)), queued=waited)


def test_before_anything_is_known_only_the_tokens_count() -> None:
    assert Pace().line() == NOMINAL
    assert Pace(Pace()).line() == NOMINAL


def test_rate_and_fixed_parts_are_found() -> None:
    pace = Pace()
    show(pace, 100, per_token=2e-4, alone=0.01, queued=0.2)
    assert pace.line().per_token == pytest.approx(2e-4, rel=0.01)
    assert pace.line().alone == pytest.approx(0.01, rel=0.05)
    assert pace.line().queued == pytest.approx(0.2, rel=0.05)
    assert pace.error_s < 0.05


def test_noise_of_a_third_leaves_the_rate_within_a_tenth() -> None:
    pace = Pace()
    show(pace, 200, per_token=2e-4, alone=0.01, queued=0.2, noise=0.33)
    assert pace.line().per_token == pytest.approx(2e-4, rel=0.1)


def test_a_new_backend_is_taken_for_one_of_the_fleet_until_it_shows_another_pace() -> None:
    fleet = Pace()
    show(fleet, 200, per_token=1e-4, alone=0.01, queued=0.01)
    slow = Pace(fleet)
    assert slow.line().per_token == pytest.approx(1e-4, rel=0.05)
    show(slow, 50, per_token=5e-4, alone=0.01, queued=0.01)
    assert slow.line().per_token > 4e-4


def test_a_backend_that_nobody_asked_yet_keeps_up_with_what_the_fleet_shows() -> None:
    """Else it would seem slower or faster than the others for ever, and be asked never or always."""
    fleet = Pace()
    unseen = Pace(fleet)
    assert unseen.line() == NOMINAL
    show(fleet, 200, per_token=3e-5, alone=0.01, queued=0.01)
    assert unseen.line().per_token == pytest.approx(3e-5, rel=0.05)


def test_a_backend_that_gets_slower_is_known_as_slower_after_a_window() -> None:
    pace = Pace()
    show(pace, 300, per_token=1e-4, alone=0.0, queued=0.0)
    show(pace, 2 * int(WINDOW), per_token=3e-4, alone=0.0, queued=0.0)
    assert pace.line().per_token == pytest.approx(3e-4, rel=0.15)


def test_what_the_engine_says_amends_what_was_predicted() -> None:
    """An engine that had evicted what we believed in it looks slow, until it says how much it computed."""
    pace = Pace()
    for _ in range(50):
        pace.observe(100, 0, 0.5, queued=False)
        pace.amend(100, 5000, 0, 0.5, queued=False)
        pace.observe(2500, 0, 0.25, queued=False)
    assert pace.line().per_token == pytest.approx(1e-4, rel=0.1)


def test_gaps_that_are_no_service_are_left_out() -> None:
    pace = Pace()
    pace.observe(100, 0, 10_000.0, queued=False)
    pace.observe(100, 0, -1.0, queued=False)
    assert pace.count == 0
    assert pace.line() == NOMINAL


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(0, 600), st.booleans()), max_size=60))
def test_no_observations_make_a_prediction_negative_or_infinite(seen: list[tuple[int, float, bool]]) -> None:
    pace = Pace(Pace())
    for tokens, gap_s, queued in seen:
        pace.observe(tokens, 0, gap_s, queued=queued)
        pace.amend(tokens, tokens // 2, 0, gap_s, queued=queued)
        assert all(0.0 <= part < 1e9 for part in pace.line())


def test_a_fleet_without_tokens_predicts_by_the_nominal_rate() -> None:
    pace = Pace()
    pace.observe(0, 0, 0.5, queued=False)
    assert pace.line() == NOMINAL
    assert fitted(Pace()._alone, Pace()._queued) == NOMINAL
