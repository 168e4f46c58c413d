"""Generated traffic has the shape it is said to have, and a shape is run to its checks."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from benchmarks import shapes
from benchmarks.harness import report_replays
from benchmarks.workloads import traffic
from benchmarks.workloads.traffic import Passage, Stage, Writer, evenly, poisson, shared_share
from ranvier_py.replay.jobs import execute, make_ready
from ranvier_py.replay.traces.trace import Trace, TraceRequest
from tests.replay.traces.given import all_are_sound


def small(name: str, seed: int = 1) -> Trace:
    made = {
        "groups": lambda: traffic.shared_prefix_groups(seed, groups=20),
        "hot": lambda: traffic.one_hot_prefix(seed, requests=400),
        "users": lambda: traffic.grouped_users(seed, groups=10, stage_s=0.3),
        "threads": lambda: traffic.chat_threads(seed, threads=40),
    }
    return made[name]()


def reported(request: TraceRequest) -> tuple[object, ...]:
    """Everything about a request that a run could see."""
    return (
        request.at, request.session, request.prompt_tokens, request.answer_tokens,
        tuple(request.chain), tuple(request.ends), request.blocks, request.opening,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["groups", "hot", "users", "threads"])
def test_a_seed_gives_the_same_traffic_and_another_one_other_traffic(name: str) -> None:
    first, again, other = small(name), small(name), small(name, seed=2)
    assert list(map(reported, first.requests)) == list(map(reported, again.requests))
    assert list(map(reported, first.requests)) != list(map(reported, other.requests))


@pytest.mark.parametrize("name", ["groups", "hot", "users", "threads"])
def test_requests_are_what_a_trace_promises(name: str) -> None:
    """Besides, that one message ends where the prompt does."""
    trace = small(name)
    times = [request.at for request in trace.requests]
    assert times == sorted(times)
    all_are_sound(trace)
    for request in trace.requests:
        assert request.prompt_tokens in [request.chain[end].tokens for end in request.ends]


def test_equal_passages_at_equal_places_are_equal_blocks_and_no_others() -> None:
    writer = Writer()
    system, question, other = writer.passage(64), writer.passage(32), writer.passage(32)
    answer = writer.passage(16)
    first = writer.request(0.0, "a", [system, question], answer)
    second = writer.request(0.0, "b", [system, other], answer)
    moved = writer.request(0.0, "c", [question, system], answer)
    assert first.blocks[:4] == second.blocks[:4]
    assert not {*first.blocks[4:]} & {*second.blocks}
    assert not {*moved.blocks} & {*first.blocks}
    assert first.opening == second.opening != moved.opening


def test_passages_are_whole_blocks_and_at_least_one() -> None:
    writer = Writer()
    assert [writer.passage(tokens).blocks for tokens in (1, 16, 2048, 100)] == [1, 1, 128, 6]
    assert writer.passage(16) != Passage(1, 1)


def test_every_prefix_group_is_asked_for_equally_often() -> None:
    trace = small("groups")
    assert set(Counter(request.session for request in trace.requests).values()) == {5}
    assert shared_share(trace) == pytest.approx(2048 / 2176 * 4 / 5)


def test_four_fifths_of_the_traffic_are_on_the_hot_prefix() -> None:
    trace = traffic.one_hot_prefix(1, requests=2000)
    hot = sum(request.session == "application 0" for request in trace.requests)
    assert hot / 2000 == pytest.approx(0.8, abs=0.03)
    assert len({request.blocks[0] for request in trace.requests}) == 21


def test_users_of_a_group_share_six_thousand_tokens_and_repeat_themselves() -> None:
    trace = traffic.grouped_users(1, groups=4, stage_s=1.0)
    by_user = {request.session: request for request in trace.requests}
    shared = 6000 // 16
    for user, request in by_user.items():
        for other, another in by_user.items():
            same = user.split("/")[0] == other.split("/")[0]
            assert (request.blocks[:shared] == another.blocks[:shared]) == same
            assert (request.blocks[shared] == another.blocks[shared]) == (user == other)
    first = trace.requests[0]
    again = next(request for request in trace.requests[1:] if request.session == first.session)
    whole = first.prompt_tokens // 16
    assert first.blocks[:whole] == again.blocks[:whole]
    assert first.blocks[whole] != again.blocks[whole]


def test_a_turn_of_a_thread_begins_with_the_turn_before_and_its_answer() -> None:
    last: dict[str, TraceRequest] = {}
    turns = Counter[str]()
    for request in traffic.chat_threads(1, threads=200).requests:
        before = last.get(request.session)
        if before is not None:
            assert request.blocks[: len(before.blocks)] == before.blocks
            assert request.opening == before.opening
        last[request.session] = request
        turns[request.session] += 1
    assert turns.total() / len(turns) == pytest.approx(5.0, abs=0.8)
    assert len({request.blocks[0] for request in last.values()}) == 200


def test_arrivals_have_the_rates_they_are_drawn_with() -> None:
    times = poisson(Random(1), [Stage(10.0, 100.0), Stage(50.0, 100.0)])
    assert times == sorted(times)
    assert sum(at < 100.0 for at in times) == pytest.approx(1000, rel=0.1)
    assert sum(at >= 100.0 for at in times) == pytest.approx(5000, rel=0.1)
    assert evenly(Random(1), 4000, 20.0)[-1] == pytest.approx(200.0, rel=0.1)


def test_the_share_that_one_cache_could_find_is_counted_from_the_start_of_prompts() -> None:
    writer = Writer()
    system, question, answer = writer.passage(48), writer.passage(16), writer.passage(16)
    turn = [system, question]
    requests = [
        writer.request(0.0, "", turn, answer),
        writer.request(1.0, "", turn, answer),
        writer.request(2.0, "", [question, system], answer),
    ]
    assert shared_share(Trace("t", requests, 16, timed=True)) == pytest.approx(64 / 192)


@pytest.mark.parametrize("name", list(shapes.SHAPES))
def test_no_shape_is_reproduced_by_policies_that_are_all_alike(name: str) -> None:
    """And its checks find every figure they ask for, which would otherwise show after minutes of runs."""
    shape = shapes.SHAPES[name]
    ready = make_ready(traffic.shared_prefix_groups(1, groups=2))
    names = [setting.name for setting in shape.settings]
    assert len(set(names)) == len(names)
    alike = dict.fromkeys(names, execute(shapes.tasks_of(shape, ready, 1)[0], lambda: 0.0).result)
    assert not all(shape.checks(shape.ours(alike)).values())


def test_a_shape_runs_from_traffic_to_checks() -> None:
    """The order of policies needs the whole traffic; here, that every figure and check is there."""
    shape = shapes.SHAPES["sglang"]
    found = shapes.measured(shape, traffic.shared_prefix_groups(1, groups=12), shapes.parse(["--jobs", "1"]))
    assert set(shape.published) <= set(found["ours"])
    assert len(found["checks"]) == 3
    assert found["ours"]["cache_aware_hits"] > found["ours"]["round_robin_hits"]
    assert found["reproduced"] == all(found["checks"].values())
    assert [run["failed"] for run in found["runs"]] == [0] * len(shape.settings)


def test_a_shape_is_also_run_with_whole_answers_and_the_page_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes.main(["--quick", "--jobs", "1", "--shape", "sglang"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [result[key]["sglang"]["streamed"] for key in ("shapes", "whole_answers")] == [True, False]
    rows = report_replays.shapes(result)
    assert [row.question.partition(": ")[0] for row in rows] == ["`sglang`", "`sglang`, whole answers"]
