"""The flash_crowd benchmark: who is busy, who counts, and that the override does what is measured."""

from __future__ import annotations

import pytest

from benchmarks.flash_crowd import (
    BURST_AFTER_S,
    BURST_PREFIX_BLOCKS,
    BURST_REQUESTS,
    BUSY_REQUESTS,
    ENGINES,
    IDLE,
    NO_OVERRIDE,
    OVERRIDE,
    START_S,
    Seen,
    burst_items,
    hot_items,
    kept_out,
    paid,
    replay,
    summed,
)
from benchmarks.nodes_blocks import BLOCK_TOKENS


def test_the_burst_is_of_one_prefix_that_each_seed_makes_anew() -> None:
    items = [item for item in burst_items(1, 0.5) if item.request.session == "crowd"]
    assert len(items) == BURST_REQUESTS
    assert len({item.job.keys[:BURST_PREFIX_BLOCKS] for item in items}) == 1
    assert len({item.body for item in items}) == BURST_REQUESTS
    assert {item.request.at for item in burst_items(1, 0.0) if item.request.session == "crowd"} == {
        START_S + BURST_AFTER_S
    }
    other = [item for item in burst_items(2, 0.5) if item.request.session == "crowd"]
    assert other[0].job.keys[0] != items[0].job.keys[0]


def test_all_engines_but_one_are_busy() -> None:
    busy = [item for item in burst_items(1, 0.0) if item.request.session != "crowd"]
    allowed = [set(range(ENGINES)) - set(kept_out(item)) for item in busy]
    assert all(len(engines) == 1 for engines in allowed)
    assert sorted(engine for engines in allowed for engine in engines) == sorted(
        [engine for engine in range(ENGINES) if engine != IDLE] * BUSY_REQUESTS
    )


@pytest.mark.parametrize("gossip", [False, True])
def test_every_request_of_the_burst_is_counted_and_no_other(gossip: bool) -> None:
    seen = Seen()
    replay(burst_items(1, 0.2), seen, "1", 3, gossip, "affinity")
    assert sum(seen.by_engine) == BURST_REQUESTS
    assert len(seen.first_token_s) == BURST_REQUESTS
    assert seen.prompt_tokens == BURST_REQUESTS * (BURST_PREFIX_BLOCKS * BLOCK_TOKENS + 64)
    assert 0.5 < summed(seen)["hit_rate"] < 1.0


def test_most_of_the_hot_traffic_begins_with_one_prefix() -> None:
    items = hot_items(1, 20.0)
    starts = [item.job.keys[0] for item in items]
    assert 0.7 < starts.count(max(set(starts), key=starts.count)) / len(starts) < 0.9
    assert len(set(starts)) > 20
    times = [item.request.at for item in items]
    assert times == sorted(times)
    assert START_S < times[0] < times[-1] < START_S + 60


def test_without_the_override_one_engine_gets_the_hot_prefix_and_with_it_several_do() -> None:
    items = [item for item in hot_items(1, 25.0) if item.request.at < START_S + 10]
    found = {}
    for name, settings in (("override", OVERRIDE), ("none", NO_OVERRIDE)):
        seen = Seen()
        replay(items, seen, "1", 1, False, "affinity", **settings)
        found[name] = seen
    assert max(found["none"].by_engine) > 0.7 * len(items)
    assert max(found["override"].by_engine) < 0.5 * len(items)
    assert summed(found["override"])["ttft_s"]["p99"] < summed(found["none"])["ttft_s"]["p99"]


def test_what_is_paid_and_won_is_reckoned_against_no_override() -> None:
    better = {"hit_rate": 0.70, "ttft_s": {"p99": 0.5}}
    worse = {"hit_rate": 0.74, "ttft_s": {"p99": 1.0}}
    found = paid(better, worse)
    assert found["hit_points_paid"] == pytest.approx(4.0)
    assert found["p99_share_won"] == pytest.approx(0.5)
    assert found["as_good_as_ranvier"]
    assert not paid(worse, better)["as_good_as_ranvier"]
