"""Recordings of a node, read back as traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.request_record import Header, RequestRecord
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import TraceError, TraceOptions, TraceRequest
from tests.core.routing.recorded import a_record
from tests.examples import examples
from tests.replay.traces.given import all_are_sound, leading, written

HEADER = Header(1_000.0, 16, "a")
RECORD = a_record()


def loaded(path: Path, *lines: Header | RequestRecord | bytes, **options: Any) -> list[TraceRequest]:
    data = [line if isinstance(line, bytes) else line.line().strip() for line in lines]
    trace = open_trace(written(path / "node.jsonl", data), TraceOptions(**options))
    all_are_sound(trace)
    return list(trace.requests)


def test_requests_come_in_order_of_time_with_their_chains(tmp_path: Path) -> None:
    one, two = loaded(tmp_path, HEADER, replace(RECORD, at=4.0, model="n"), RECORD)
    assert (one.at, two.at) == (0.0, 2.5)
    assert (one.model, two.model) == ("m", "n")
    assert [tuple(key) for key in one.chain] == list(RECORD.chain)
    assert tuple(one.ends) == RECORD.ends
    assert (one.prompt_tokens, one.answer_tokens, one.session) == (100, 30, "")


def test_blocks_are_shared_up_to_the_last_stop_in_common(tmp_path: Path) -> None:
    other = replace(RECORD, at=2.0, chain=(*RECORD.chain[:3], (112, 99)), ends=(1,), prompt_tokens=120)
    one, two = loaded(tmp_path, HEADER, RECORD, other)
    assert leading(set(one.blocks), two.blocks) == 4
    assert not set(one.blocks[4:]) & set(two.blocks[4:])


def test_a_turn_extends_the_one_before(tmp_path: Path) -> None:
    first = replace(RECORD, chain=(*RECORD.chain, (128, 15)))
    second = replace(RECORD, at=2.0, chain=(*first.chain, (192, 16)), ends=(1, 3, 5), prompt_tokens=200)
    one, two = loaded(tmp_path, HEADER, first, second)
    assert two.blocks[: len(one.blocks)] == one.blocks
    assert two.chain[: len(one.chain)] == one.chain


def test_prompts_that_meet_in_a_deep_stop_have_the_same_blocks_up_to_there(tmp_path: Path) -> None:
    """One record was learned with fewer stops on the way; a fingerprint names the whole prefix all the same."""
    few = replace(RECORD, at=2.0, chain=((32, 12), (96, 14)), ends=(1,))
    other = replace(RECORD, at=3.0, chain=((64, 13), (80, 21), (96, 14)), ends=(1,))
    one, two, three = loaded(tmp_path, HEADER, RECORD, few, other)
    assert one.blocks[:6] == two.blocks[:6] == three.blocks[:6]


def test_one_fingerprint_of_two_prefixes_is_refused(tmp_path: Path) -> None:
    for chain in (((16, 99), (96, 14)), ((16, 11), (32, 14))):
        with pytest.raises(TraceError, match="found a prefix that begins in two ways"):
            loaded(tmp_path, HEADER, RECORD, replace(RECORD, at=2.0, chain=chain, ends=(1,)))


def test_what_lies_beyond_the_deepest_stop_is_the_requests_own(tmp_path: Path) -> None:
    one, two = loaded(tmp_path, HEADER, RECORD, replace(RECORD, at=2.0))
    assert leading(set(one.blocks), two.blocks) == 6
    assert len(one.blocks) == 130 // 16 == 8


def test_stops_beyond_what_the_engine_counted_are_left_out(tmp_path: Path) -> None:
    [request] = loaded(tmp_path, HEADER, replace(RECORD, prompt_tokens=60, answer_tokens=5))
    assert [key.tokens for key in request.chain] == [16, 32, 64]
    assert list(request.ends) == [1]


def test_a_prompt_of_unknown_length_is_taken_from_its_bytes(tmp_path: Path) -> None:
    unknown = replace(RECORD, kind="opaque", chain=(), ends=(), prompt_tokens=0, answer_tokens=0)
    [request] = loaded(tmp_path, HEADER, unknown, answer_tokens=50)
    assert (request.prompt_tokens, request.answer_tokens) == (200, 50)


def test_failed_tries_are_left_out(tmp_path: Path) -> None:
    failed = replace(RECORD, at=1.0, outcome="connect_error", status=0, first_token_s=None)
    assert len(loaded(tmp_path, HEADER, failed, RECORD)) == 1
    with pytest.raises(TraceError, match="found no request that was served"):
        loaded(tmp_path, HEADER, failed)


def test_files_may_be_put_one_after_the_other(tmp_path: Path) -> None:
    """Rotated ones, in any order, and those of a node that was started again."""
    later = replace(HEADER, started=HEADER.started + 100)
    one, two, three = loaded(tmp_path, later, RECORD, HEADER, RECORD, replace(RECORD, at=3.0), limit=3)
    assert [one.at, two.at, three.at] == [0.0, 1.5, 100.0]


def test_a_last_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    """A node that is recording, or that was killed: what it wrote before is worth as much as ever."""
    whole = HEADER.line() + RECORD.line() + replace(RECORD, at=2.0).line()
    path = tmp_path / "node.jsonl"
    for cut in (1, 2, 50):
        path.write_bytes(whole[:-cut])
        assert len(open_trace(path, TraceOptions()).requests) == (2 if cut == 1 else 1)
    path.write_bytes(whole[:-50] + b"\n" + RECORD.line())
    with pytest.raises(TraceError, match=r"node\.jsonl:3: found no JSON"):
        open_trace(path, TraceOptions())


def test_recordings_of_different_schemes_are_not_one_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"node.jsonl:3: found a recording under another secret"):
        loaded(tmp_path, HEADER, RECORD, replace(HEADER, scheme="b"), RECORD)


@pytest.mark.parametrize(
    ("lines", "states"),
    [
        ([HEADER, b"{}"], "node.jsonl:2: found no chain"),
        ([HEADER, RECORD, b'{"at":', RECORD], "node.jsonl:3: found no JSON"),
        ([replace(HEADER, block_tokens=10), RECORD], "node.jsonl:2: found a prefix key inside a block"),
        ([b'{"ranvier_recording":9}'], "node.jsonl:1: found version 9 of a recording, expected 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[Any], states: str) -> None:
    with pytest.raises(TraceError) as caught:
        loaded(tmp_path, *lines)
    assert states in str(caught.value)


def test_a_record_without_a_header_is_stated(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="expected the header before it"):
        loaded(tmp_path, RECORD, format="recording")


CHANGES = st.dictionaries(
    st.sampled_from(RequestRecord.__slots__), st.none() | st.integers() | st.text(max_size=3), max_size=2
)


@settings(max_examples=examples(80))
@given(CHANGES)
def test_no_record_is_more_than_a_trace_error(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    fields = {**orjson.loads(RECORD.line()), **changes}
    try:
        line = orjson.dumps(fields)
    except TypeError:  # numbers beyond 64 bits
        return
    folder = tmp_path_factory.getbasetemp()
    try:
        loaded(folder, HEADER, line)
    except TraceError as error:
        sent = str(error)
    else:
        sent = str(folder)
    assert sent.startswith(str(folder))
