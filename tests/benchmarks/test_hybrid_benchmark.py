"""The hybrid benchmark: its traffic, its figures, and what the two ends of the comparison must come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from benchmarks import hybrid
from benchmarks.harness import report_replays
from benchmarks.hybrid import KNOWLEDGE, believed, goals, mean_of, missed
from benchmarks.workloads.hybrid_traces import Shape, Turn, assistant, user
from benchmarks.workloads.hybrid_workloads import ANSWER_TOKENS_PER_S, HYBRID_WORKLOADS, SMALL, set_of, trace_of
from ranvier_py.replay.jobs import Done, Task, execute, make_ready
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.results import RunResult

SHAPE = Shape("rag", 2, 60)


def ran(cache: str, knows: str, nodes: int = 1) -> tuple[RunResult, Done]:
    engine = replace(SMALL, cache=cache, block_size=16)
    plan = Plan("affinity", nodes, (engine,) * 3, regret=False, per_request=True, knowledge=KNOWLEDGE[knows])
    done = execute(Task(make_ready(set_of(SHAPE)()), plan), lambda: 0.0)
    return done.result, done


def test_ends_of_messages_are_known_and_a_turn_goes_on_from_the_answer_before() -> None:
    asked = user(list(range(200, 240)))
    answer = assistant(list(range(300, 340)))
    more = [*asked, *answer, *user(list(range(400, 440)))]
    trace = trace_of("two", [Turn(0, 0, 0.0, asked, answer), Turn(0, 1, 1.0, more, answer)])
    first, second = trace.requests
    assert [first.chain[end].tokens for end in first.ends] == [48, 96]
    assert [second.chain[end].tokens for end in second.ends] == [48, 96, 144, 208]
    assert second.chain[: len(first.chain)] == first.chain
    assert second.blocks[: len(first.blocks)] == first.blocks


def test_no_turn_is_sent_before_the_answers_that_it_quotes_can_have_been_generated() -> None:
    asked, answer = user(list(range(200, 240))), assistant(list(range(300, 340)))
    turns = [Turn(session, turn, at, asked, answer) for session, turn, at in ((0, 0, 0.0), (0, 1, 1.0), (1, 0, 1.5))]
    trace = trace_of("three", [*turns, Turn(0, 2, 2.0, asked, answer)])
    answer_s = len(answer) / ANSWER_TOKENS_PER_S
    assert [(request.session, request.at) for request in trace.requests] == [
        ("0", 0.0),
        ("1", 1.5),
        ("0", 1.0 + answer_s),
        ("0", 2.0 + 2 * answer_s),
    ]


def test_belief_is_compared_request_by_request() -> None:
    done = Done(
        result=None,  # type: ignore[arg-type]  # is not asked
        lines=b"\n".join(
            orjson.dumps({"matched": matched, "prompt": 100, **cached})
            for matched, cached in [(96, {"cached": 64}), (0, {"cached": 32}), (112, {"cached": 96}), (96, {})]
        ),
    )
    assert believed(done, 16) == (96 + 96, 64 + 32 + 96, 64 + 96, 300)


def test_misses_within_a_step_of_anchors_are_counted_by_themselves() -> None:
    lines = [
        orjson.dumps({"matched": matched, "prompt": 900, **cached})
        for matched, cached in [(256, {"cached": 496}), (256, {"cached": 512}), (96, {"cached": 64}), (96, {})]
    ]
    done = Done(result=None, lines=b"\n".join(lines))  # type: ignore[arg-type]  # is not asked
    assert missed(done, 16) == {"missed": 240 + 256, "in_step": 240}


def test_attention_alone_believes_in_documents_of_which_no_state_is_kept() -> None:
    """SGLang's default keeps none at junctions, so that nothing is reused of what the router sends there for."""
    result, done = ran("sglang_no_buffer", "attention")
    predicted, reused, _, prompts = believed(done, 16)
    assert reused < 0.02 * prompts
    assert predicted > 0.3 * prompts
    assert result.failed == 0


@pytest.mark.parametrize("cache", ["attention", "vllm_align", "sglang_extra_buffer", "marconi"])
def test_an_oracle_is_right_about_what_is_reused(cache: str) -> None:
    """But for what changes while a request waits in a queue."""
    _, done = ran(cache, "oracle")
    predicted, reused, both, _ = believed(done, 16)
    assert both > 0.97 * max(predicted, reused) > 0


def test_where_there_are_no_states_our_knowledge_is_attentions() -> None:
    figures = [ran("attention", knows)[0] for knows in ("attention", "checkpoint")]
    assert figures[0].cached_tokens == figures[1].cached_tokens > 0
    assert figures[0].ttft_s == figures[1].ttft_s


def row(profile: str, knows: str, hits: float, **more: Any) -> dict[str, Any]:
    figures = {"hit_rate": hits, "cached_tokens": int(1000 * hits), "precision": 0.99, "recall": 0.99}
    return {"workload": "rag", "profile": profile, "nodes": 1, "knows": knows, **figures, **more}


def test_goals_name_the_cells_that_miss_them() -> None:
    rows = [
        *(row("attention", knows, hits) for knows, hits in (("attention", 0.5), ("checkpoint", 0.49), ("oracle", 0.5))),
        row("vllm_align", "attention", 0.3),
        row("vllm_align", "checkpoint", 0.4, recall=0.9),
        row("vllm_align", "oracle", 0.45),
    ]
    found = goals(rows)
    assert found["near_oracle"]["missed"] == {"rag vllm_align 1": 0.05}
    assert found["predicted"]["missed"] == {"vllm_align 1 recall": 0.9}
    assert found["attention_unchanged"]["missed"] == {"rag attention 1": 10}
    assert found["near_oracle"]["worst"] == 0.05


def test_of_several_draws_rates_are_means_and_counts_sums() -> None:
    figures = {"rate": 1.0, "requests": 9, "ttft_p50_s": 0.1, "ttft_p90_s": 0.2, "wasted": 0.0, "failed": 1}
    draws = [row("marconi", "oracle", hits, missed=3, in_step=1, recall=None, **figures) for hits in (0.2, 0.4)]
    found = mean_of(draws)
    assert (found["hit_rate"], found["hit_rates"], found["cached_tokens"]) == (0.3, [0.2, 0.4], 600)
    assert (found["requests"], found["failed"], found["missed"], found["recall"]) == (18, 2, 6, None)
    assert mean_of(draws[:1]) == draws[0]


def test_the_whole_of_it_runs_from_a_trace_to_its_goals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = replace(HYBRID_WORKLOADS["rag"], load=set_of(Shape("rag", 2, 12)))
    monkeypatch.setattr(hybrid, "HYBRID_WORKLOADS", {"rag": workload})
    arguments = ["--dry", "--jobs", "1", "--workload", "rag", "--profile", "vllm_align", "--profile", "attention"]
    assert hybrid.main(arguments) == 0
    result = orjson.loads(capsys.readouterr().out)
    cells = {(each["profile"], each["nodes"], each["knows"]) for each in result["rows"]}
    assert len(cells) == 2 * 2 * 3
    assert [row["nodes"] for row in result["rows"] if not row["streamed"]] == [1] * 2 * 3
    assert len(result["rows"]) == len(cells) + 2 * 3
    assert result["goals"]["near_oracle"]["cells"] == 2 * 3
    assert result["goals"]["attention_unchanged"]["reached"]
    places = [row.question for row in report_replays.hybrid(result) if ", engines of " in row.question]
    assert len(places) == len(set(places)) == 2 * 3
    assert sum(", 1 node, whole answers: " in place for place in places) == 2
