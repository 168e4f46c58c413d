"""Prompts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranvier_py.replay.traces.token_ids import load
from ranvier_py.replay.traces.trace import TraceError, TraceOptions, TraceRequest
from tests.replay.traces.given import all_are_sound, leading, loaded, shared, shares, written


def record(prompt: list[int], answer: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "output_token_ids": answer or [], **more}


def requests_of(path: Path, *records: Any, **options: Any) -> list[TraceRequest]:
    return list(loaded(path, "token_ids", *records, **options).requests)


def test_blocks_and_stops_are_shared_as_far_as_tokens_are(tmp_path: Path) -> None:
    one, two = requests_of(tmp_path, record([*range(100), 7]), record([*range(100), 8, *range(40)]))
    assert leading(set(one.blocks), two.blocks) == 100 // 16
    assert [key.tokens for key in one.chain][:3] == [16, 32, 64]
    assert one.chain[:4] == two.chain[:4]
    assert one.chain[3].tokens == 96, "a message ends where they part"
    assert one.ends[0] == two.ends[0] == 3


def test_a_turn_extends_the_one_before(tmp_path: Path) -> None:
    """With its answer: else nothing of an answer would ever be found again."""
    first, answer = list(range(100)), list(range(500, 540))
    one, two = requests_of(tmp_path, record(first, answer), record([*first, *answer, *range(900, 950)]))
    assert one.blocks == two.blocks[: len(one.blocks)]
    assert list(one.chain) == list(two.chain[: len(one.chain)])
    assert len(one.blocks) == 140 // 16


def test_an_unknown_answer_has_a_length_and_blocks_of_its_own(tmp_path: Path) -> None:
    one, two = requests_of(tmp_path, record(list(range(32))), record(list(range(32))), answer_tokens=64)
    assert one.answer_tokens == 64
    assert len(one.blocks) == 6
    assert one.blocks[:2] == two.blocks[:2]
    assert not set(one.blocks[2:]) & set(two.blocks[2:])


def test_models_share_nothing(tmp_path: Path) -> None:
    one, two = requests_of(tmp_path, record(list(range(64)), model="a"), record(list(range(64)), model="b"))
    assert not set(one.blocks) & set(two.blocks)
    assert not set(one.chain) & set(two.chain)


def test_without_stamps_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    lines = [record([number] * 20) for number in range(4)]
    assert [request.at for request in requests_of(tmp_path, *lines, turn_s=2.0)] == [0, 2, 4, 6]
    assert not load(written(tmp_path / "trace.jsonl", lines), TraceOptions()).timed


@pytest.mark.parametrize(
    ("line", "states"),
    [
        (record([]), "found no token of a prompt"),
        ({"prompt_token_ids": "1 2 3"}, "found prompt_token_ids '1 2 3'"),
        ({"prompt_token_ids": [1, 2.5]}, "found prompt_token_ids [1, 2.5]"),
        ({"prompt_token_ids": [1, True]}, "found prompt_token_ids [1, True]"),
        ({"prompt_token_ids": [1, [2]]}, "found prompt_token_ids [1, [2]]"),
        ({"prompt_token_ids": [-1]}, "found -1 … -1 in prompt_token_ids"),
        ({"prompt_token_ids": [2**32]}, "expected a list of whole numbers from 0 to 4294967295"),
        ({"input_tok_ids": [1, 2], "input_toks": 3}, "found input_toks 3, expected 2, as there are token ids"),
        (record([1], timestamp=[]), "found timestamp []"),
        (record([1], session={}), "found session {}"),
        (record([1], model=3.5), "found model 3.5"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, line: Any, states: str) -> None:
    with pytest.raises(TraceError) as caught:
        requests_of(tmp_path, record([1]), line)
    assert "trace.jsonl:2: " in str(caught.value)
    assert states in str(caught.value)


def test_time_stamps_are_on_all_lines_or_on_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found 1 time stamps on 2 lines"):
        requests_of(tmp_path, record([1]), record([1], timestamp=1))


def test_the_published_trace_has_the_published_share() -> None:
    trace = load(shared("traces/sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"), TraceOptions())
    assert len(trace.requests) == 300
    assert 29 < trace.requests[-1].at < 30
    ideal, _, greedy = shares(trace, draws=1)
    assert (ideal, greedy) == pytest.approx((0.076, 0.076), abs=0.005)
    all_are_sound(trace)
