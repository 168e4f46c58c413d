"""Prompts as lists of block hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranvier_py.replay.traces.mooncake import load
from ranvier_py.replay.traces.trace import TraceError, TraceOptions, TraceRequest
from tests.replay.traces.given import all_are_sound, loaded, shared, shares


def record(ids: list[int], prompt: int, answer: int = 100, at: int = 0) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": answer, "hash_ids": ids}


def requests_of(path: Path, *records: Any, **options: Any) -> list[TraceRequest]:
    return list(loaded(path, "mooncake", *records, **options).requests)


def test_equal_ids_at_the_start_are_equal_blocks_and_stops(tmp_path: Path) -> None:
    one, two = requests_of(tmp_path, record([1, 2, 3], 1500), record([1, 2, 4], 1500, at=1))
    assert one.blocks[:2] == two.blocks[:2]
    assert one.chain[:2] == two.chain[:2]
    assert one.blocks[2:] != two.blocks[2:]
    assert [key.tokens for key in one.chain] == [512, 1024, 1536]


def test_ids_that_stand_for_single_blocks_are_chained(tmp_path: Path) -> None:
    """Else a block would be found after a prefix that an engine does not have."""
    one, two = requests_of(tmp_path, record([1, 9], 1024), record([2, 9], 1024, at=1))
    assert not set(one.blocks[:2]) & set(two.blocks[:2])


def test_a_partial_block_is_nobodys_and_an_answer_is_the_requests_own(tmp_path: Path) -> None:
    one, two = requests_of(tmp_path, record([1, 2], 1000, 600), record([1, 2], 1000, 600, at=1))
    assert one.blocks[:1] == two.blocks[:1]
    assert not set(one.blocks[1:]) & set(two.blocks[1:])
    assert (one.prompt_tokens + one.answer_tokens) // 512 == len(one.blocks) == 3


def test_messages_end_where_requests_part_and_where_prompts_end(tmp_path: Path) -> None:
    one, two, three = requests_of(
        tmp_path, record([0, 1, 2, 3], 2048), record([0, 1, 5], 1536, at=1), record([0, 1, 2, 3, 4], 2100, at=2)
    )
    assert list(one.ends) == [1, 3]
    assert list(two.ends) == [1, 2]
    assert list(three.ends) == [1, 3]


def test_stamps_that_repeat_are_spread_over_their_step(tmp_path: Path) -> None:
    """Or every router would see bursts that were none."""
    records = [record([number], 400, at=3000 * (number // 10)) for number in range(100)]
    requests = requests_of(tmp_path, *records)
    assert len({request.at for request in requests}) == 100
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    assert 27 <= requests[-1].at < 30
    assert [request.at for request in requests_of(tmp_path, *records)] == [request.at for request in requests]


def test_stamps_that_differ_are_taken_as_they_are(tmp_path: Path) -> None:
    requests = requests_of(tmp_path, *(record([number], 400, at=500 + 70 * number) for number in range(9)))
    assert [request.at for request in requests] == pytest.approx([0.07 * number for number in range(9)])


def test_other_block_sizes_are_an_option(tmp_path: Path) -> None:
    qwen = {**record([1, 2, 3], 40, at=61), "chat_id": 159}
    [request, _] = requests_of(tmp_path, qwen, {**qwen, "timestamp": 62.5}, block_tokens=16)
    assert [key.tokens for key in request.chain][:2] == [16, 32]
    assert request.session == "159"


def test_the_limit_takes_the_first_in_time(tmp_path: Path) -> None:
    requests = requests_of(tmp_path, *(record([number], 400 + number, at=-number) for number in range(9)), limit=3)
    assert [request.prompt_tokens for request in requests] == [408, 407, 406]


@pytest.mark.parametrize(
    ("line", "states"),
    [
        (record([1, 2], 1500), "found 2 hash_ids for input_length 1500, expected 3 of them (512 tokens to a block)"),
        (record([], 0), "found input_length 0, expected a whole number from 1"),
        (record([1], 400, -1), "found output_length -1"),
        (record([1], True), "found input_length True"),
        ({"timestamp": 0, "input_length": 5, "output_length": 5}, "found hash_ids missing or null"),
        (record(["a"], 400), "found 'a' among hash_ids"),  # type: ignore[list-item]
        (record([-1], 400), "found -1 among hash_ids"),
        ({**record([1], 400), "timestamp": "noon"}, "found timestamp 'noon', expected a time stamp"),
        (b"{", "found no JSON"),
        (b"[1]", "found [1], expected one JSON object"),
        (b"\xff\xfe", "found no JSON"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, line: Any, states: str) -> None:
    with pytest.raises(TraceError) as caught:
        requests_of(tmp_path, record([1], 400), b"", line)
    assert f"trace.jsonl:3: {states}" in str(caught.value)


def test_an_empty_file_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found no line"):
        requests_of(tmp_path)


def test_the_published_trace_has_the_published_shares() -> None:
    trace = load(shared("traces/mooncake_conversation.jsonl.gz"), TraceOptions())
    assert len(trace.requests) == 12_031
    assert trace.timed
    assert 3537 < trace.requests[-1].at < 3540
    assert shares(trace, draws=3) == pytest.approx((0.374, 0.138, 0.373), abs=0.005)
    all_are_sound(trace)
    for request in trace.requests[::100]:
        assert request.ends[0] == 0, "all share the first block"
