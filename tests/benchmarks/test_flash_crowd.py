"""The flash_crowd benchmark: who is busy, who counts, and that the override does what is measured."""

from __future__ import annotations

import pytest

from benchmarks.flash_crowd import (
    BURST_AFTER_S,
    BURST_PREFIX_TOKENS,
    BURST_REQUESTS,
    BUSY_REQUESTS,
    CROWD,
    ENGINES,
    IDLE,
    OVERRIDES,
    allowed,
    burst_requests,
    by_engine,
    hot_requests,
    paid,
    replay,
    summed,
)


def test_the_burst_is_of_one_prefix_that_each_seed_makes_anew() -> None:
    crowd, other = ([request for request in burst_requests(seed, 0.0) if request.session == CROWD] for seed in (1, 2))
    assert len(crowd) == len({request.blocks for request in crowd}) == BURST_REQUESTS
    assert len({request.blocks[: BURST_PREFIX_TOKENS // 16] for request in crowd}) == 1
    assert {request.at for request in crowd} == {BURST_AFTER_S}
    assert other[0].blocks[0] != crowd[0].blocks[0]


def test_all_engines_but_one_are_busy() -> None:
    busy = [request for request in burst_requests(1, 0.0) if request.session != CROWD]
    engines = [engine for engine in range(ENGINES) if engine != IDLE]
    assert sorted(engine for request in busy for engine in allowed(request)) == sorted(engines * BUSY_REQUESTS)


@pytest.mark.parametrize("gossip", [False, True])
def test_every_request_of_the_burst_is_counted_and_no_other(gossip: bool) -> None:
    rows = replay(burst_requests(1, 0.2), 1, 3, gossip, "affinity")
    assert sum(by_engine(rows)) == summed(rows)["requests"] == BURST_REQUESTS
    assert {row["prompt"] for row in rows} == {BURST_PREFIX_TOKENS + 64}
    assert {row["node"] for row in rows} == {0, 1, 2}
    assert 0.5 < summed(rows)["hit_rate"] < 1.0


def test_most_of_the_hot_traffic_begins_with_one_prefix() -> None:
    requests = hot_requests(1, 20.0)
    starts = [request.blocks[0] for request in requests]
    assert 0.7 < starts.count(max(set(starts), key=starts.count)) / len(starts) < 0.9
    assert len(set(starts)) > 20
    times = [request.at for request in requests]
    assert times == sorted(times)
    assert times[-1] < 60


def test_without_the_override_one_engine_gets_the_hot_prefix_and_with_it_several_do() -> None:
    requests = hot_requests(1, 25.0, seconds=10.0)
    override, none = (replay(requests, 1, 1, False, "affinity", OVERRIDES[name]) for name in ("override", "none"))
    assert max(by_engine(none)) > 0.7 * len(requests)
    assert max(by_engine(override)) < 0.5 * len(requests)
    assert summed(override)["ttft_s"]["p99"] < summed(none)["ttft_s"]["p99"]


def test_what_is_paid_and_won_is_computed_against_no_override() -> None:
    better = {"hit_rate": 0.70, "ttft_s": {"p99": 0.5}}
    worse = {"hit_rate": 0.74, "ttft_s": {"p99": 1.0}}
    found = paid(better, worse)
    assert found["hit_points_paid"] == pytest.approx(4.0)
    assert found["p99_share_won"] == pytest.approx(0.5)
    assert found["as_good_as_ranvier"]
    assert not paid(worse, better)["as_good_as_ranvier"]
