"""What a computed token costs beside its own time: it evicts another, which may be needed again."""

from __future__ import annotations

from copy import copy

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.rates.evictions import FADE_S, PRIOR_TOKENS, Evictions

FIRST, SECOND = BackendId(0), BackendId(1)


def test_where_nothing_that_was_evicted_comes_again_a_prefill_counts_once() -> None:
    evictions = Evictions()
    for number in range(100):
        evictions.add(FIRST, 5000, 0, float(number))
    assert evictions.price(FIRST) == 1.0


def test_it_counts_twice_where_all_that_is_computed_was_evicted_before() -> None:
    evictions = Evictions()
    for number in range(100):
        evictions.add(FIRST, 5000, 5000, float(number))
    assert evictions.price(FIRST) == pytest.approx(2.0, abs=0.02)
    assert evictions.price(SECOND) == 1.0


def test_one_short_prompt_that_comes_again_is_little() -> None:
    evictions = Evictions()
    evictions.add(FIRST, 100, 100, 0.0)
    assert evictions.price(FIRST) == pytest.approx(1.0 + 100 / (100 + PRIOR_TOKENS))


def test_what_is_computed_elsewhere_again_never_makes_a_prefill_count_more_than_twice() -> None:
    evictions = Evictions()
    for number in range(100):
        evictions.add(FIRST, 0, 5000, float(number))
    assert evictions.price(FIRST) == 2.0


def test_evictions_fade_with_time_and_late_reports_count_in_full() -> None:
    evictions = Evictions()
    evictions.add(FIRST, 10_000, 10_000, 1000.0)
    evictions.add(FIRST, 10_000, 10_000, 0.0)
    assert evictions.price(FIRST) == pytest.approx(1.0 + 20_000 / (20_000 + PRIOR_TOKENS))
    evictions.add(FIRST, 0, 0, 1000.0 + 20 * FADE_S)
    assert evictions.price(FIRST) == pytest.approx(1.0, abs=1e-6)


def test_a_copy_learns_alone_and_a_backend_that_is_gone_leaves_nothing() -> None:
    evictions = Evictions()
    evictions.add(FIRST, 10_000, 10_000, 0.0)
    twin = copy(evictions)
    twin.forget(FIRST)
    assert (evictions.price(FIRST) > 1.5, twin.price(FIRST)) == (True, 1.0)
