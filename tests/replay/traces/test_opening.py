"""Which format a file is, and that nothing but a TraceError comes of any bytes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.traces.mooncake import load as load_mooncake
from ranvier_py.replay.traces.open_trace import LOADERS, MARKS, lend, open_trace, read_arrivals
from ranvier_py.replay.traces.trace import Format, TraceError, TraceOptions
from tests.examples import examples
from tests.replay.traces.given import all_are_sound, load_once, shared, written

MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
TOKENS = {"prompt_token_ids": [1, 2, 3]}
CHAT = {"messages": [{"role": "user", "content": "Hello."}], "answer": "Hello!"}
DOCUMENT = {"doc_id": "d", "transcript": "A: yes.", "queries": [{"q": "What?", "a": "Yes."}]}
RECORDED = {"ranvier_recording": 1, "started": 5, "block_tokens": 16, "scheme": "a"}
HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("line", [MOONCAKE, TOKENS, CHAT, DOCUMENT])
def test_the_format_is_reported_by_the_first_line(tmp_path: Path, line: Any, packed: bool) -> None:
    trace = open_trace(written(tmp_path / "what.ever.jsonl", [b" ", line], packed))
    assert trace.name == "what.ever"
    assert len(trace.requests) == 1
    all_are_sound(trace)


def test_a_given_format_is_believed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found hash_ids missing"):
        open_trace(written(tmp_path / "a", [{**TOKENS, **MOONCAKE, "hash_ids": None}]), TraceOptions(format="mooncake"))


@pytest.mark.parametrize(
    ("lines", "states"),
    [
        ([{"prompt": "a", "n": 1}], "a:1: found an object with prompt, n, expected one with hash_ids (mooncake)"),
        ([{}], "found an object with nothing"),
        ([b"hello"], "a:1: found no JSON"),
        ([b"", b"3"], "a:2: found 3, expected one JSON object"),
        ([], "found no line"),
        ([HEADER, b"2023-11-16 18:15:46.6805900,374,44"], "found arrivals without prompts"),
        ([b"\x1f\x8bnot gzipped"], "can't be read"),
    ],
)
def test_what_is_no_trace_is_stated(tmp_path: Path, lines: Any, states: str) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(written(tmp_path / "a", lines))
    assert states in str(caught.value)


def test_a_file_that_is_not_there_is_stated(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: can't be read"):
        open_trace(tmp_path / "nowhere")


def test_a_file_that_was_cut_off_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"\n".join(orjson.dumps(MOONCAKE | {"timestamp": at}) for at in range(500)))[:-20])
    with pytest.raises(TraceError, match=r"cut.gz:\d+: can't be read"):
        open_trace(path)


# --- any bytes --------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "q", "a"]), inner)
    ),
    max_leaves=6,
)
WORDS = (
    ("timestamp", "input_length", "output_length", "hash_ids", "messages", "answer", "response", "session", "model"),
    ("tools", "transcript", "queries", "doc_id", "prompt_token_ids", "output_token_ids", "arrival_time_ns"),
)
NAMES = st.sampled_from([name for names in WORDS for name in names])


def as_bytes(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # numbers beyond 64 bits, lone surrogates
        return b"null"


GOOD = st.sampled_from([MOONCAKE, TOKENS, CHAT, DOCUMENT, RECORDED])
CHANGED = st.builds(lambda good, more: as_bytes({**good, **more}), GOOD, st.dictionaries(NAMES, VALUES, max_size=3))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": VALUES},
        optional={"tool_calls": VALUES, "reasoning": VALUES, "name": VALUES},
    ),
    min_size=1,
    max_size=4,
)
SPOKEN = st.builds(lambda sent, answer: as_bytes({"messages": sent, "answer": answer}), MESSAGES, VALUES)
LINES = st.lists(CHANGED | SPOKEN | st.binary(max_size=40) | VALUES.map(as_bytes), max_size=4)


def problem(path: Path, options: TraceOptions) -> str:
    """What is wrong with a file; empty for a trace, all of whose requests are sound."""
    try:
        trace = open_trace(path, options)
    except TraceError as error:
        return str(error)
    all_are_sound(trace)
    return ""


@settings(max_examples=examples(120))
@given(form=st.sampled_from(["mooncake", "token_ids", "recording"]), lines=LINES)
def test_no_bytes_are_more_than_a_trace_error(tmp_path_factory: pytest.TempPathFactory, form: Any, lines: Any) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any", lines)
    found = problem(path, TraceOptions(format=form))
    assert not found or found.startswith(str(path))


@settings(max_examples=examples(80))
@given(lines=st.lists(SPOKEN, min_size=1, max_size=2) | LINES)
def test_no_chat_is_more_than_a_trace_error(tmp_path_factory: pytest.TempPathFactory, lines: Any) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any", lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTokenizer, "load", load_once)
        found = problem(path, TraceOptions(format="chats"))
    assert not found or found.startswith(str(path))


@settings(max_examples=examples(60))
@given(lines=st.lists(st.binary(max_size=40) | st.just(b"2023-11-16 18:15:46.6805900,374,44"), max_size=3))
def test_no_arrivals_are_more_than_a_trace_error(tmp_path_factory: pytest.TempPathFactory, lines: Any) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any", [HEADER, *lines])
    try:
        times = read_arrivals(path)
    except TraceError as error:
        times, found = [], str(error)
    else:
        found = ""
    assert times == sorted(times)
    assert found.startswith(str(path)) != bool(times)


# --- arrivals ---------------------------------------------------------------------------------------------------------


def azure(path: Path, *seconds: str) -> Path:
    return written(path / "azure.csv", [HEADER, *(f"2023-11-16 18:15:{at},374,44".encode() for at in seconds)])


def test_arrivals_are_lent_in_order(tmp_path: Path) -> None:
    path = written(tmp_path / "a", [{"prompt_token_ids": [at]} for at in range(3)])
    lender = azure(tmp_path, "46.6805900", "47.6805900", "50.1805910")
    trace = open_trace(path, TraceOptions(arrivals=lender))
    assert trace.timed
    assert [request.at for request in trace.requests] == pytest.approx([0.0, 1.0, 3.5], abs=1e-5)
    plain = open_trace(path).requests
    assert [request.blocks for request in trace.requests] == [request.blocks for request in plain]


def test_arrivals_of_2024_are_read_with_and_without_a_fraction(tmp_path: Path) -> None:
    stamps = ("00:00:00.009930", "00:00:01", "00:00:02.5")
    lines = [f"2024-05-10 {at}+00:00,2162,5".encode() for at in stamps]
    assert read_arrivals(written(tmp_path / "a", [HEADER, *lines])) == pytest.approx([0.0, 0.99007, 2.49007])


def test_a_longer_trace_takes_the_arrivals_again(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "a", [{"prompt_token_ids": [at]} for at in range(5)]))
    times = [request.at for request in lend(trace, [0.0, 1.0, 4.0]).requests]
    assert times == pytest.approx([0.0, 1.0, 4.0, 6.0, 7.0])


def test_times_of_its_own_are_replaced_only_if_reported_so(tmp_path: Path) -> None:
    path, lender = written(tmp_path / "a", [MOONCAKE, MOONCAKE]), azure(tmp_path, "46.0000000", "47.5000000")
    with pytest.raises(TraceError, match="has times of its own; --arrivals-replace takes"):
        open_trace(path, TraceOptions(arrivals=lender))
    trace = open_trace(path, TraceOptions(arrivals=lender, arrivals_replace=True))
    assert [request.at for request in trace.requests] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("lines", "states"),
    [
        ([b"at,prompt,answer"], "a:1: found b'at,prompt,answer"),
        ([HEADER], "found no arrival"),
        ([HEADER, b"2023-11-16 18:15:46.6,374,44", b"soon,1,2"], "a:3: found b'soon,1,2', expected a line like"),
        ([HEADER, b"2023-11-16 18:15:46.6,374"], "a:2: found"),
        ([HEADER, b"2023-11-16 18:15:46.6,many,44"], "a:2: found"),
    ],
)
def test_what_are_no_arrivals_is_stated(tmp_path: Path, lines: Any, states: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_arrivals(written(tmp_path / "a", lines))
    assert states in str(caught.value)


def test_the_published_arrivals_are_read() -> None:
    times = read_arrivals(shared("traces/azure2023_conv.csv.gz"))
    assert len(times) == 19_366
    assert times[0] == 0
    assert times[-1] == pytest.approx(58 * 60 + 22, abs=2)
    trace = load_mooncake(shared("traces/mooncake_conversation.jsonl.gz"), TraceOptions(limit=100))
    assert lend(trace, times).requests[99].at == times[99]


def test_every_format_has_its_loader() -> None:
    assert {name for name in get_args(Format) if name} == LOADERS.keys() == {name for name, _ in MARKS}


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    """Some editors begin every file with one."""
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path = written(tmp_path / "marked.jsonl", [b"\xef\xbb\xbf" + orjson.dumps(line), line])
    assert len(open_trace(path).requests) == 2
