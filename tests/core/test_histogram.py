from __future__ import annotations

from math import inf, isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.metrics import LATENCY_BUCKETS_S, Histogram, LabelledCounts
from ranvier_py.proxy.call import PipelineLimits

VALUES = st.lists(st.floats(0, 1000, allow_nan=False), max_size=60)


def filled(values: list[float], bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram


def test_a_value_on_a_bound_counts_below_it() -> None:
    """Prometheus reads bounds as «less or equal»."""
    histogram = filled([1.0, 1.5, 2.0, 3.0], (1.0, 2.0))
    assert histogram.counts == [1, 2, 1]
    assert histogram.cumulative() == [(1.0, 1), (2.0, 3), (inf, 4)]
    assert histogram.sum == 7.5


@given(VALUES.filter(bool), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    histogram = filled(values)
    rank = max(1, -(-share * len(values) // 1))  # ceiling
    true = sorted(values)[int(rank) - 1]
    low = max((bound for bound in (0.0, *LATENCY_BUCKETS_S) if bound < true), default=0.0)
    high = min((bound for bound in LATENCY_BUCKETS_S if bound >= true), default=LATENCY_BUCKETS_S[-1])
    assert min(low, high) <= histogram.quantile(share) <= high


def test_an_empty_histogram_has_no_quantile() -> None:
    assert isnan(Histogram((1.0,)).quantile(0.5))


def test_what_lies_above_all_bounds_counts_as_the_highest_bound() -> None:
    assert filled([99.0], (1.0, 2.0)).quantile(0.5) == 2.0


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0), (1.0, inf), (float("nan"),)])
def test_bounds_that_are_no_bounds_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        Histogram(bounds)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Histogram((1.0,)).quantile(share)


def test_not_a_number_is_refused_before_it_spoils_the_sum() -> None:
    histogram = Histogram((1.0,))
    with pytest.raises(AssertionError):
        histogram.observe(float("nan"))
    assert (histogram.count, histogram.sum) == (0, 0.0)


def test_a_histogram_reads_well() -> None:
    assert repr(filled([0.5, 0.5], (1.0,))) == "<Histogram 2 observed, p50 0.5 p99 0.99>"


def test_buckets_reach_as_far_as_any_answer_may_take_by_default() -> None:
    limits = PipelineLimits()
    assert LATENCY_BUCKETS_S[-1] >= max(limits.first_event_s, limits.stall_s)


def test_what_was_never_counted_is_0_and_leaves_no_series_when_it_is_read() -> None:
    counts = LabelledCounts()
    counts["busy"] += 1
    assert (counts["busy"], counts["full"]) == (1, 0)
    assert counts == {"busy": 1}
