"""The pure parts of the load generator: plans, traces, answers, books; and the chats they are made of."""

from __future__ import annotations

import gzip
import io
import json
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.load import chats
from cluster.load.answer import Answer, Failure
from cluster.load.chat_trace import read_trace
from cluster.load.load_report import REASONS_MAX, LoadLog, Report, Sample, quantile
from cluster.load.load_view import show_report
from cluster.load.workload import (
    Conversation,
    Turn,
    cut,
    split_turns,
    user_starts,
    with_branches,
    with_poisson_arrivals,
    with_think,
    with_trace_arrivals,
)
from ranvier_py.replay.traces.trace import TraceError


def sent(role: str, text: str | None = "x", **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **rest}


def plan(seed: int) -> list[Conversation]:
    rng = Random(seed)
    supply = with_branches(chats.conversations(rng, turns=4), 0.5, rng)
    return list(islice(with_poisson_arrivals(with_think(supply, 2.0, rng), 3.0, rng), 40))


def test_a_seed_gives_the_same_plan_and_another_seed_another_one() -> None:
    assert plan(5) == plan(5)
    assert plan(5) != plan(6)


def test_a_request_is_what_stands_before_each_answer() -> None:
    messages = [sent("system"), sent("assistant", "hi"), sent("user", "1"), sent("assistant"), sent("user", "2")]
    turns = split_turns(messages)
    assert [len(turn.messages) for turn in turns] == [3, 1]
    assert all(turn.recorded is None for turn in turns)


def test_recorded_tool_calls_are_kept_and_other_answers_only_on_demand() -> None:
    call = sent("assistant", None, tool_calls=[{}])
    messages = [sent("user"), call, sent("tool"), sent("assistant", "done")]
    assert [turn.recorded for turn in split_turns(messages)] == [call, None]
    assert [turn.recorded for turn in split_turns(messages, keep_recorded=True)] == [call, sent("assistant", "done")]


def test_a_branch_has_an_earlier_parent_that_is_long_enough() -> None:
    """Else it would wait for a turn that never comes."""
    before: dict[str, Conversation] = {}
    branches = 0
    for one in plan(3):
        if one.parent is not None:
            branches += 1
            assert 1 <= one.parent_turns < len(before[one.parent].turns)
            assert all(message["role"] == "user" for turn in one.turns for message in turn.messages)
        before[one.name] = one
    assert 10 <= branches <= 30


def test_poisson_arrivals_come_at_their_rate() -> None:
    talks = with_poisson_arrivals((Conversation("a", ()) for _ in range(4000)), 5.0, Random(1))
    starts = [one.start_s or 0.0 for one in talks]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(800, rel=0.05)


def test_recorded_arrivals_begin_at_zero_and_can_be_faster() -> None:
    talks = [Conversation("b", (), start_s=130.0), Conversation("a", (), start_s=100.0)]
    assert [(one.name, one.start_s) for one in with_trace_arrivals(talks, 2.0)] == [("a", 0.0), ("b", 15.0)]


def test_the_first_turn_needs_no_thinking() -> None:
    (one,) = with_think([Conversation("a", (Turn(()), Turn(()), Turn(())))], 3.0, Random(1))
    assert one.turns[0].think_s == 0
    assert all(turn.think_s > 0 for turn in one.turns[1:])


def test_users_begin_spread_over_one_pause() -> None:
    starts = user_starts(100, 4.0, Random(1))
    assert max(starts) > 3
    assert min(starts) < 1


def test_a_conversation_is_cut_to_its_turns() -> None:
    (one,) = cut([Conversation("a", (Turn(()),) * 5)], 2)
    assert len(one.turns) == 2


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_a_trace_is_read_with_its_sessions_and_times(tmp_path: Path) -> None:
    chat = {"messages": [sent("user"), sent("assistant")]}
    lines = [json.dumps(chat | {"session": "s", "timestamp": 3}), "", json.dumps(chat | {"timestamp_ms": 1500})]
    found = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert [(one.name, one.start_s) for one in found] == [("s", 3.0), ("line-3", 1.5)]
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress((tmp_path / "t.jsonl").read_bytes()))
    assert read_trace(tmp_path / "t.jsonl.gz") == found
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.jsonl").read_bytes())
    assert read_trace(tmp_path / "t.jsonl") == found


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no JSON"),
        ("[]", "one JSON object"),
        ('{"messages": 3}', "messages"),
        ('{"messages": [3]}', "a message 3"),
        ('{"messages": [{"role": "robot"}]}', "robot"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no user message"),
        ('{"messages": [{"role": "user", "content": "x"}], "timestamp": "now"}', "timestamp"),
        ('{"messages": [{"role": "user", "content": "x"}], "session": "s"}', "once more"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, problem: str) -> None:
    good = '{"messages": [{"role": "user", "content": "x"}], "session": "s"}'
    with pytest.raises(TraceError, match=problem) as caught:
        read_trace(write(tmp_path / "t.jsonl", good, line))
    assert f"{tmp_path / 't.jsonl'}:2: " in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "broken.jsonl.gz"])
def test_a_file_that_cannot_be_read_is_a_trace_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl.gz").write_text("not gzip")
    with pytest.raises(TraceError, match=name):
        read_trace(tmp_path / name)


def test_chats_written_to_a_file_are_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chats.main(["--conversations", "5", "--turns", "3"]) == 0
    found = read_trace(write(tmp_path / "t.jsonl", capsys.readouterr().out))
    assert [len(one.turns) for one in found] == [3] * 5


def test_the_bundled_chats_are_always_the_same_and_share_six_prompts() -> None:
    bundled = chats.bundled()
    assert bundled == chats.bundled()
    systems = [one.turns[0].messages[0]["content"] for one in bundled]
    sizes = [systems.count(text) for text in dict.fromkeys(systems)]
    assert len(sizes) == 6
    assert all(8 <= size <= 20 for size in sizes)
    assert all(1_500 <= len(text) <= 4_500 for text in systems)
    assert not any("{" in text for text in systems)


def test_more_prompts_than_desks_means_more_offices() -> None:
    talks = islice(chats.conversations(Random(1), system_prompts=60, turns=1), 2_000)
    assert len({one.turns[0].messages[0]["content"] for one in talks}) == 60


def test_no_slot_is_left_open() -> None:
    for one in islice(chats.conversations(Random(2), turns=12), 200):
        for turn in one.turns:
            assert "{passages}" not in turn.messages[-1]["content"]
            assert "\0" not in turn.messages[-1]["content"]


EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant"}}], "system_fingerprint": "fp"}\r\n\r\n'
    b': a comment\n\ndata:{"choices": [{"delta": {"content": "Gr\xc3\xbc"}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "\xc3\x9fe"}}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_a_stream_reads_the_same_however_it_is_cut(places: list[int]) -> None:
    """The network cuts where it likes, in the middle of a letter too."""
    answer = Answer(stream=True)
    edges = [0, *sorted(places), len(EVENTS)]
    for now, (start, end) in enumerate(pairwise(edges)):
        answer.feed(EVENTS[start:end], 200, float(now))
    assert answer.finish(200) is None
    assert "".join(answer.text) == "Grüße"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.fingerprint) == (9, 4, "fp")
    assert len(answer.gaps_s) == 1


def test_the_first_token_is_the_first_text_not_the_first_chunk() -> None:
    answer = Answer(stream=True)
    answer.feed(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', 200, 1.0)
    assert answer.first_s is None
    answer.feed(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n', 200, 2.0)
    answer.feed(b'data: {"choices": [{"delta": {"content": "y"}}]}\n\n', 200, 2.5)
    assert (answer.first_s, answer.gaps_s) == (2.0, [0.5])


def test_a_stream_without_its_end_is_not_good() -> None:
    answer = Answer(stream=True)
    answer.feed(EVENTS.removesuffix(b"data: [DONE]\n\n"), 200, 1.0)
    assert answer.finish(200) == Failure("stream ended without [DONE]")


def test_a_stream_that_was_answered_in_one_piece_is_good() -> None:
    """Some servers ignore `stream`; what they say counts, only without a first token."""
    answer = Answer(stream=True)
    answer.feed(b'{"choices": [{"message": {"content": "x"}}]}', 200, 1.0)
    assert answer.finish(200) is None
    assert (answer.text, answer.first_s) == (["x"], None)


@given(st.lists(st.floats(0.0001, 100), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert found is not None
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_of_more_pauses_than_are_kept_an_even_sample_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.load.load_report.GAPS_MAX", 500)
    log = LoadLog()
    log.good(Sample("e1", "n1", 1.0, 0.1, 40, 0, 5), [number / 10_000 for number in range(10_000)])
    assert len(log.gaps_s) == 500
    assert Report(log, 1.0).inter_token_s["p50"] == pytest.approx(0.5, abs=0.1)


def test_nothing_measured_is_none_not_zero() -> None:
    empty = Report(LoadLog(), 0.0)
    assert (empty.hit_rate, empty.ttft_s["p50"], empty.inter_token_s["p99"]) == (None, None, None)
    json.dumps(empty.as_json())


def test_shares_add_up_and_carry_their_own_hit_rate() -> None:
    log = LoadLog()
    for engine, cached in (("e1", 10), ("e1", 30), ("e2", 0), ("e1", 20)):
        log.sent += 1
        log.good(Sample(engine, "n1", 1.0, 0.1, 40, cached, 5))
    first, second = Report(log, 2.0).engines
    assert (first.name, first.requests, first.share, first.hit_rate) == ("e1", 3, 0.75, 0.5)
    assert (second.name, second.requests, second.share, second.hit_rate) == ("e2", 1, 0.25, 0.0)


def test_failures_are_grouped_and_their_kinds_are_bounded() -> None:
    log = LoadLog()
    for number in range(REASONS_MAX + 50):
        log.sent += 1
        log.bad(Failure(f"reason {number}", "first words"), "n1")
    groups = Report(log, 1.0).failures
    assert sum(group.count for group in groups) == REASONS_MAX + 50
    assert (groups[0].reason, groups[0].count) == ("other reasons", 50)


def test_the_shown_report_accounts_for_every_request() -> None:
    """With the reason and the place of every failure."""
    log = LoadLog()
    log.begin(5)
    log.sent, log.cancelled, log.not_sent = 4, 1, 1
    log.good(Sample("e1", "127.0.0.2:80", 1.0, 0.1, 40, 30, 5, predicted_tokens=20, route="deepest"))
    log.good(Sample("e1", "127.0.0.2:80", 1.0, 0.1, 40, 30, 5, has_usage=False))
    log.bad(Failure("HTTP 503 no_backend", "nobody [there]"), "127.0.0.3:80")
    console = Console(file=io.StringIO(), width=80)
    show_report(console, Report(log, 2.0))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("2 / 1 / 1", "1 of 5", "75.0%", "25.0%", "deepest 1", "127.0.0.2:80"):
        assert words in text
    assert "failed 1x HTTP 503 no_backend (127.0.0.3:80 1): nobody [there]" in text
