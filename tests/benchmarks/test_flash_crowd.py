"""The flash_crowd benchmark: who is busy, and who counts."""

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
    allowed,
    burst_requests,
    burst_run,
    by_engine,
    hot_run,
    replay,
    summed,
    summed_hot,
)
from benchmarks.harness.report_replays import flash_crowd
from benchmarks.workloads.traffic import one_hot_prefix


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


def test_one_node_does_not_send_a_crowd_to_the_engine_that_is_idle_at_first() -> None:
    """Nobody who waits there has much to compute, but all of them will decode at once."""
    shares = by_engine(replay(burst_requests(1, 0.0), 1, 1, gossip=False, policy="ttft"))
    assert max(shares) < 1.5 * BURST_REQUESTS / ENGINES


def test_who_computes_a_prefix_first_is_counted_apart_from_those_who_find_it() -> None:
    first = {"session": "application 0", "engine": 0, "prompt": 100, "cached": 0, "ttft_s": 2.0}
    found = [{**first, "engine": 1, "cached": 90, "ttft_s": 0.5}, {**first, "session": "x", "engine": 2, "cached": 50}]
    rows = [first, *found, {**found[0], "ttft_s": 0.25}]
    assert summed_hot(rows)["found"] == {"share": 0.75, "ttft_p99_s": 2.0}
    assert summed_hot([rows[0], rows[1], rows[3]])["found"] == {"share": pytest.approx(2 / 3), "ttft_p99_s": 0.5}
    assert summed_hot(rows)["holders"] == 2


def test_who_stays_at_the_holder_of_what_all_want_waits_and_who_is_diverted_does_not() -> None:
    found = hot_run(one_hot_prefix(1, requests=300), 1.2, 2, gossip=True)
    assert found["stays"]["holders"] == 1 < found["diverts"]["holders"]
    assert found["diverts"]["found"]["ttft_p99_s"] < 0.5 * found["stays"]["found"]["ttft_p99_s"]
    assert found["stays"]["requests"] == found["diverts"]["requests"] == 300
    [row] = flash_crowd({"burst": [], "hot": [found]})
    assert "1.2 x 20 a second, 2 nodes that gossip: " in row.question
    assert "holders 1 / " in row.figure


def test_a_crowd_whose_answers_come_as_a_whole_is_a_row_of_its_own() -> None:
    """Nodes see no first token, so it is placed in another way."""
    requests = burst_requests(1, 0.2)
    streams, whole = (
        replay(requests, 1, 3, gossip=True, policy="ttft", streamed=streamed) for streamed in (True, False)
    )
    assert summed(whole)["requests"] == BURST_REQUESTS
    assert [row["engine"] for row in whole] != [row["engine"] for row in streams]
    burst = [burst_run(0.0, "ttft", 1, gossip=False, seeds=1, streamed=streamed) for streamed in (True, False)]
    hot = [hot_run(one_hot_prefix(1, requests=30), 1.0, 1, gossip=False, streamed=False)]
    rows = list(flash_crowd({"burst": burst, "hot": hot}))
    assert ["whole answers" in row.question for row in rows] == [False, True, True]
