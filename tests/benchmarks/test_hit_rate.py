"""The hit_rate benchmark: references that one can compute by hand, and one run from a trace to its goals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import hit_rate
from benchmarks.harness import report_replays
from benchmarks.hit_rate import LARGE_CACHE_TOKENS, reference
from benchmarks.workloads.traffic import Writer, chat_threads
from benchmarks.workloads.workloads import WORKLOADS
from ranvier_py.replay.traces.trace import Trace


def asked(prompts: str) -> Trace:
    """Requests for documents of two blocks each, one for each letter."""
    writer = Writer()
    documents = {outgoing: writer.passage(32) for outgoing in sorted(set(prompts))}
    requests = [writer.request(0.0, "", [documents[outgoing]], writer.passage(16)) for outgoing in prompts]
    return Trace("t", requests, 16, timed=True)


def test_the_reference_figures_are_those_one_can_compute() -> None:
    known = reference(asked("abaa"), engines=2)
    assert (known.ideal, known.greedy) == (0.5, 0.5)
    assert 0.0 <= known.random <= 0.5
    assert reference(asked("abaa"), engines=1).random == 0.5


def test_greedy_leaves_an_engine_that_has_had_its_share() -> None:
    known = reference(asked("a" * 40), engines=4)
    assert known.ideal == 39 / 40
    assert known.greedy == (40 - 3) / 40  # three of the four computed it once, the cap never reaches the last one


def test_every_policy_is_measured_with_every_cache_against_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(WORKLOADS["taubench"], load=lambda: chat_threads(1, threads=12), file="")
    monkeypatch.setattr(hit_rate, "WORKLOADS", {"taubench": workload})
    arguments = hit_rate.parse(["--policy", "affinity", "--policy", "random", "--engines", "4", "--jobs", "1"])
    found = hit_rate.measure("taubench", arguments)
    assert len(found["runs"]) == 8
    runs = {(run["policy"], run["cache_tokens"]): run for run in found["runs"] if run["streamed"]}
    assert len(runs) == 4
    large: dict[str, Any] = runs["affinity", LARGE_CACHE_TOKENS]
    assert large["hit_rate"] > runs["random", LARGE_CACHE_TOKENS]["hit_rate"]
    assert large["share_of_greedy"] == pytest.approx(large["hit_rate"] / found["reference"]["greedy"])
    assert abs(large["predicted_hit_rate"] - large["hit_rate"]) < 0.02
    goal, of_whole_answers = hit_rate.goals([found])
    assert goal["reached"] == (large["share_of_greedy"] >= 0.95)
    assert not of_whole_answers["streamed"]


def test_the_page_shows_whole_answers_beside_streams_and_old_results_as_streams() -> None:
    def run(policy: str, hits: float, **kind: bool) -> list[dict[str, Any]]:
        return [{"policy": policy, "cache_tokens": size, "hit_rate": hits, **kind} for size in (9, 1)]

    trace = {"trace": "t", "reference": {"greedy": 0.9}}
    old = [*run("affinity", 0.8), *run("round_robin", 0.3)]
    new = [*run("affinity", 0.7, streamed=False), *run("round_robin", 0.2, streamed=False)]
    goals = [{"trace": "t", "reached": True}, {"trace": "t", "reached": False, "streamed": False}]
    result = {"traces": [{**trace, "runs": [*old, *new]}], "goals": goals}
    streams, whole = report_replays.hit_rate(result)
    assert "engines: " in streams.question
    assert "engines, whole answers: " in whole.question
    assert ("80.0%" in streams.figure, "70.0%" in whole.figure) == (True, True)
    assert (streams.met, whole.met) == (True, False)
    assert len(list(report_replays.hit_rate({"traces": [{**trace, "runs": old}], "goals": goals[:1]}))) == 1


@pytest.mark.slow
def test_the_references_of_a_real_trace_are_the_published_ones() -> None:
    if not WORKLOADS["qmsum"].is_there():
        pytest.skip("the trace is not there")
    trace = WORKLOADS["qmsum"].load()
    assert len(trace.requests) == 553
    assert reference(trace) == pytest.approx(hit_rate.PUBLISHED["qmsum"], abs=0.02)
