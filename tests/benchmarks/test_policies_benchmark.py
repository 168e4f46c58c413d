"""The arithmetic of the policies benchmark's goals on made-up figures, and one run from traffic to goals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import orjson
import pytest

from benchmarks import policies
from benchmarks.harness.bench import to_json
from benchmarks.harness.policies_goals import (
    Cells,
    Row,
    affinity_hits,
    affinity_near_ttft,
    better_than_each,
    cells_of,
    goals,
    near_best,
    negative_control,
    never_worse,
    ratio,
)
from benchmarks.workloads import anew, traffic, workloads
from benchmarks.workloads.reported import A100, REPORTED, questions
from benchmarks.workloads.workloads import AMPLE, OWN, TIGHT, WORKLOADS, Workload, alone, sessions
from ranvier_py.replay.jobs import Task, execute, execute_all, make_ready
from ranvier_py.replay.replay_plan import Plan, Restart
from ranvier_py.replay.traces.trace import Trace


def row(policy: str, p90_s: float, *, load: float = 0.5, nodes: int = 1, hits: float = 0.5, workload: str = "w") -> Row:
    return Row(
        workload=workload,
        cache=AMPLE,
        nodes=0 if policy.startswith("oracle") else nodes,
        load=load,
        streamed=True,
        rate=load,
        policy=policy,
        ttft_p50_s=p90_s / 2,
        ttft_p90_s=p90_s,
        ttft_p99_s=2 * p90_s,
        ttft_mean_s=p90_s / 2,
        e2e_p50_s=1.0,
        e2e_p90_s=2.0,
        hit_rate=hits,
        predicted_hit_rate=hits,
        requests_per_s=1.0,
        max_over_mean=1.0,
        uneven_share=0.0,
        failed=0,
        regret_s=None,
        processor_s=0.0,
    )


def cells(*rows: Row) -> Cells:
    return cells_of(rows)


def test_an_oracle_stands_beside_every_number_of_nodes_of_its_load() -> None:
    found = cells(row("ttft", 1.0), row("ttft", 1.0, nodes=4), row("ttft", 1.0, load=0.9), row("oracle_ttft", 0.9))
    assert [sorted(cell) for cell in found.values()] == [["oracle_ttft", "ttft"], ["oracle_ttft", "ttft"], ["ttft"]]


def test_ttft_may_be_two_percent_behind_the_best_other_policy_and_no_more() -> None:
    within = never_worse(cells(row("ttft", 1.02), row("chwbl", 1.0), row("random", 5.0), row("oracle_ttft", 0.1)))
    assert within["reached"]
    beyond = never_worse(cells(row("ttft", 1.03), row("chwbl", 1.0), row("random", 5.0)))
    assert not beyond["reached"]
    assert [(miss["other"], miss["ratio"]) for miss in beyond["missed"]] == [("chwbl", 1.03)]


def test_misses_are_listed_with_the_worst_first() -> None:
    found = never_worse(
        cells(
            row("ttft", 1.1),
            row("chwbl", 1.0),
            row("ttft", 3.0, load=0.9),
            row("chwbl", 1.0, load=0.9),
            row("ttft", 0.5, load=0.7),
            row("chwbl", 1.0, load=0.7),
        )
    )
    assert [miss["ratio"] for miss in found["missed"]] == [3.0, 1.1]
    assert found["cells"] == 3
    assert found["ratio"] == pytest.approx((1.1 * 3.0 * 0.5) ** (1 / 3), abs=1e-4)


def test_nothing_to_compare_is_no_goal_reached() -> None:
    assert not never_worse({})["reached"]


def test_two_thirds_of_the_cells_are_counted_for_each_other_policy() -> None:
    rows = [row("ttft", 1.0, load=load) for load in (0.1, 0.2, 0.3)]
    rows += [row("chwbl", p90_s, load=load) for p90_s, load in ((2.0, 0.1), (2.0, 0.2), (0.9, 0.3))]
    rows += [row("random", p90_s, load=load) for p90_s, load in ((1.0, 0.1), (2.0, 0.2), (0.9, 0.3))]
    found = better_than_each(cells(*rows))
    assert found["by_policy"]["chwbl"]["share"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["missed"] == ["random"]  # a draw is not better


@pytest.mark.parametrize(
    ("p90_s", "hits", "reached"), [(1.05, 0.71, True), (1.06, 0.75, False), (0.5, 0.70, False), (0.5, 0.9, True)]
)
def test_affinity_may_be_five_percent_and_one_point_behind_ttft(p90_s: float, hits: float, reached: bool) -> None:
    rows = (row("affinity", p90_s, hits=hits), row("ttft", 1.0, hits=0.72), row("affinity", 9.0, load=0.9))
    found = affinity_near_ttft(cells(*rows))
    assert (found["cells"], found["reached"]) == (1, reached)
    assert found["points_most"] == pytest.approx(72 - 100 * hits)


def test_affinity_is_no_other_policy_that_ttft_is_to_beat() -> None:
    alone = cells(row("ttft", 2.0), row("affinity", 1.0))
    assert not never_worse(alone)["cells"]
    assert not better_than_each(alone)["by_policy"]


def test_hits_are_compared_where_caches_suffice_alone() -> None:
    pair = [row("affinity", 1.0, hits=0.70), row("oracle_greedy", 1.0, hits=0.73)]
    assert [miss["below"] for miss in affinity_hits(cells(*pair), AMPLE)["missed"]] == [0.03]
    assert affinity_hits(cells(*(each._replace(cache=TIGHT) for each in pair)), AMPLE)["cells"] == 0
    near = [row("affinity", 1.0, hits=0.711), row("oracle_greedy", 1.0, hits=0.73)]
    assert affinity_hits(cells(*near), AMPLE)["reached"]


def test_the_negative_control_asks_every_policy_on_that_workload_alone() -> None:
    found = negative_control(
        cells(
            row("least_loaded", 1.0), row("affinity", 1.005), row("chwbl", 1.5), row("oracle_greedy", 9.0),
            row("least_loaded", 1.0, workload="other"), row("affinity", 9.0, workload="other"),
        ),
        ["w"],
    )  # fmt: skip
    assert found["missed"] == ["chwbl"]
    assert sorted(found["by_policy"]) == ["affinity", "chwbl"]


def test_both_of_ours_are_compared_with_the_best_of_all_in_first_tokens_and_whole_answers() -> None:
    best = row("least_loaded", 1.0)._replace(e2e_p90_s=1.9)
    late = row("ttft", 1.1)._replace(uneven_share=0.2)
    found = near_best(cells(best, late, row("affinity", 1.04), row("oracle_ttft", 0.1)), "ttft")
    assert [(miss["other"], miss["ratio"]) for miss in found["ttft_p90_s"]["missed"]] == [("least_loaded", 1.1)]
    assert [miss["ratio"] for miss in found["e2e_p90_s"]["missed"]] == [pytest.approx(2.0 / 1.9, abs=1e-4)]
    assert list(found["uneven_missed"].values()) == [0.2]
    assert near_best(cells(best, late, row("affinity", 1.04)), "affinity")["ttft_p90_s"]["reached"]


def test_streams_and_answers_that_come_as_a_whole_are_cells_of_their_own() -> None:
    found = cells(row("ttft", 1.0), row("ttft", 2.0)._replace(streamed=False))
    assert [str(name).endswith("whole answers") for name in found] == [False, True]


@pytest.mark.parametrize(("ours", "other", "expected"), [(1.0, 2.0, 0.5), (0.0, 0.0, 1.0), (1.0, 0.0, 1e9)])
def test_nothing_against_nothing_is_a_draw(ours: float, other: float, expected: float) -> None:
    assert ratio(ours, other) == expected


# --- traffic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retime", [alone, sessions, workloads.poisson])
def test_a_draw_moves_requests_in_time_and_changes_nothing_else(retime: workloads.Retime) -> None:
    trace = traffic.chat_threads(1, threads=20)
    drawn, again, other = retime(trace, 1), retime(trace, 1), retime(trace, 2)
    times = [request.at for request in drawn.requests]
    assert times == sorted(times)
    assert times == [request.at for request in again.requests] != [request.at for request in other.requests]
    assert sorted(request.blocks for request in drawn.requests) == sorted(request.blocks for request in trace.requests)
    assert times[-1] == pytest.approx(trace.requests[-1].at, rel=0.5)


def test_turns_keep_their_distances_when_sessions_are_drawn_anew() -> None:
    trace = traffic.chat_threads(1, threads=20)

    def gaps(of: Trace) -> list[float]:
        times = [request.at for request in of.requests if request.session == "thread 3"]
        return [round(at - times[0], 6) for at in times]

    assert gaps(sessions(trace, 5)) == gaps(trace)


def test_every_workload_has_a_capacity_for_both_caches_and_room_for_its_longest_request() -> None:
    for workload in WORKLOADS.values():
        assert sorted(workload.capacity) == [AMPLE, TIGHT]
        assert len(workload.engines(TIGHT, 16)) == workloads.ENGINES
        assert workload.engines(TIGHT, 16)[0].cache_tokens < workload.engines(AMPLE, 16)[0].cache_tokens
    assert [workload.name for workload in WORKLOADS.values() if workload.negative] == ["sharegpt"]


@pytest.mark.parametrize("workload", [each for each in REPORTED.values() if not each.file], ids=lambda each: each.name)
def test_reported_traffic_differs_by_its_draw_and_fits_its_engines(workload: Workload) -> None:
    trace = workload.loaded(None)
    again, other = workload.trace(0, workload.loaded(None)), workload.trace(1, trace)
    assert [each.blocks for each in trace.requests] == [each.blocks for each in again.requests]
    assert [each.blocks for each in trace.requests] != [each.blocks for each in other.requests]
    longest = max(each.prompt_tokens + each.answer_tokens for each in trace.requests)
    assert longest < min(limits.cache_tokens for limits in workload.engines(OWN, trace.block_tokens))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("policy", ["affinity", "ttft"])
def test_an_engine_that_joins_empty_has_its_share_within_15_s_of_prompts_that_begin_alike(
    policy: str, stream: bool
) -> None:
    """All others hold what the prompts share; that they cost less there must not leave it without work for ever."""
    joins_at, trace = 5.0, questions(1, 500, 20.0, shared=6000, question=200, answer=100)
    plan = Plan(policy, 1, (A100,) * 4, restarts=(Restart(joins_at, 2),), per_request=True, regret=False)
    lines = execute(Task(make_ready(trace, stream=stream), plan), lambda: 0.0).lines.splitlines()
    rows = [orjson.loads(line) for line in lines]
    later = [each["engine"] == 2 for each in rows if each["at"] > joins_at + 15.0]
    assert len(later) > 50
    assert 0.15 < later.count(True) / len(later) < 0.35


def test_a_workload_drawn_anew_keeps_sessions_whole_and_is_has_the_load_of_its_name() -> None:
    trace = traffic.chat_threads(1, threads=200)
    lengths = Counter(request.session for request in trace.requests)
    source = anew.Source("threads", lambda: trace, WORKLOADS["chat_threads"].engine, 100_000, capacity=2.0)
    for seed in range(8):
        workload = anew.workload(source, trace, Random(seed))
        load, count = float(workload.name.split()[-1]), len(workload.fleet)
        drawn = workload.trace(1, workload.loaded(None))
        assert len(drawn.requests) in range(anew.REQUESTS * count // 2, anew.REQUESTS * count + 40) or count > 8
        assert all(lengths[name] == many for name, many in Counter(r.session for r in drawn.requests).items())
        rate = len(drawn.requests) / drawn.requests[-1].at
        whole = len(trace.requests) / trace.requests[-1].at
        assert rate / whole == pytest.approx(2.0 * load * count / workloads.ENGINES, rel=0.01)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_one_run_goes_from_traffic_to_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "LOADS", ((AMPLE, 1, (0.7,)), (AMPLE, 4, (0.7,)), (TIGHT, 1, (0.7,))))
    monkeypatch.setattr(policies, "WHOLE_LOADS", ((AMPLE, 1, (0.7,)),))
    workload = replace(WORKLOADS["shared_prefix_groups"], draws=2, retimed=workloads.poisson)
    trace = traffic.shared_prefix_groups(1, groups=5)
    arguments = policies.parse(["--policy", "ttft,affinity,least_loaded,oracle_ttft,oracle_greedy"])
    cases = policies.cases_of(workload, trace, arguments)
    counts = [(case.cache, case.streamed, case.draw, case.task.plan.policy, case.task.plan.nodes) for case in cases]
    # both draws; 1 and 4 nodes, tight, and answers that come as a whole; oracles once each
    assert len(set(counts)) == len(counts) == 2 * (3 * 3 + 2 * 2 + 3)
    done = execute_all([case.task for case in cases], 1, lambda: 0.0)
    ran = [(case, each.result) for case, each in zip(cases, done, strict=True)]
    rows = policies.rows_of(ran)
    assert len(rows) == len(cases) / 2
    found = goals(rows, ample=AMPLE, controls=["shared_prefix_groups"])
    assert found["ttft_never_worse"]["cells"] == 4
    assert found["ttft_near_oracle"]["cells"] == 3
    assert found["affinity_hits"]["cells"] == 2
    assert found["near_best"]["affinity"]["e2e_p90_s"]["cells"] == 4
    assert all(each.failed == 0 and each.ttft_p90_s > 0 for each in rows)
    text = policies.page_of(ran, {"seed": 1})
    assert "shared_prefix_groups" in text
    assert "oracle_greedy" in text
    written = json.loads(to_json({"goals": found, "columns": rows[0]._fields}, rows))
    assert [dict(zip(written["columns"], each, strict=True)) for each in written["rows"]] == [
        each._asdict() for each in rows
    ]


@pytest.mark.slow
def test_a_quick_run_writes_no_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part of the benchmark must never take the place of the committed figures."""
    monkeypatch.setattr(policies, "RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.harness.bench.RESULTS", tmp_path)
    flags = ["--quick", "--workload", "shared_prefix_groups", "--policy", "least_loaded", "--jobs", "1"]
    assert policies.main(flags) == 0
    assert list(tmp_path.iterdir()) == []


def test_policies_measured_again_take_the_place_of_their_own_rows_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(policies, "RESULTS", tmp_path)
    before, again = row("ttft", 0.1), row("affinity", 0.2)
    recorded = {"commit": "abc", "columns": Row._fields, "rows": [before, row("affinity", 0.3)]}
    (tmp_path / "policies.json").write_text(json.dumps(recorded))
    assert policies.with_recorded([again]) == ([before, again], {"others_commit": "abc"})
    columns = [name for name in Row._fields if name not in policies.NEW_COLUMNS]
    older = recorded | {"columns": columns, "rows": [[getattr(before, name) for name in columns]]}
    (tmp_path / "policies.json").write_text(json.dumps(older))
    assert policies.with_recorded([again])[0] == [before._replace(e2e_p90_s=None, uneven_share=None), again]
    (tmp_path / "policies.json").write_text(json.dumps(recorded | {"others_commit": "first"}))
    assert policies.with_recorded([again])[1] == {"others_commit": "first"}


def test_a_policy_that_is_none_is_stated_before_anything_is_read() -> None:
    with pytest.raises(SystemExit, match="no such policy: best"):
        policies.main(["--policy", "ttft,best"])
