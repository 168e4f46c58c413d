"""One reader finds in an answer what is in it, however it is cut, and lets through all that is not to be removed."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_events import BLANK, EMPTY
from ranvier_py.core.answers.answer_reader import (
    CAPTURE_BYTES_MAX,
    WHOLE_BYTES_MAX,
    AnswerReader,
    StreamReader,
    WholeReader,
)
from ranvier_py.core.answers.chunked import ChunkedReader, unchunked
from tests.core.answers.feeding import (
    COUNTS,
    DONE,
    USAGE,
    chunked,
    cut,
    delta,
    event,
    event_reader,
    removal_of,
    through,
    whole_reader,
)
from tests.examples import examples


class Known(NamedTuple):
    """An event, and what a reader has to make of it: a status makes it a failure."""

    data: bytes
    begins: bool = False
    has_output: bool = False
    status: int = 0
    left: bytes | None = None  # of counts that we asked for
    finishes: bool = False  # without a word


FULL = {"error": {"message": "The request queue is full.", "type": "service_unavailable", "code": 503}}
NOTHING = [Known(b": ping\n\n"), Known(b"\n\n"), Known(DONE)]
OF_ERRORS = 'an error: {"error": 1}, event: error, "prompt_tokens": 3'


def text(words: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish}], "usage": None})


BOTH = [
    *NOTHING,
    Known(b'data: {"prompt_tokens": NaN, "no": "json"}\n\n', begins=True),
    Known(event(FULL), status=503),
    Known(b"event: error\ndata: broken\n\n", status=500),
    Known(COUNTS, left=b""),
    Known(b"event: message\nid: 9\n" + COUNTS.replace(b"[]", b"null"), left=b""),
    Known(event({"usage": USAGE, "timings": [1]}), left=event({"timings": [1]})),
]
CHAT = [
    *BOTH,
    Known(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})),
    Known(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), finishes=True),
    Known(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}), begins=True),
    *[Known(delta(unseen), has_output=True) for unseen in (" \n", "\u200b", "\ufffd\ufffd ")],
    Known(delta("a"), begins=True, has_output=True),
    Known(delta(OF_ERRORS), begins=True, has_output=True),
]
COMPLETION = [
    *BOTH,
    *(Known(text("")), Known(text("", "stop"), finishes=True), Known(text("", "content_filter"), begins=True)),
    *(Known(text(" \n"), has_output=True), Known(text("a"), begins=True, has_output=True)),
    Known(text(OF_ERRORS), begins=True, has_output=True),
]
MESSAGES = [
    *NOTHING,
    Known(b'event: message_start\ndata: {"type":"message_start","message":{"content":[]}}\n\n'),
    Known(b'event: ping\ndata: {"type": "ping"}\n\n'),
    Known(b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"text"}}\n\n'),
    Known(event({"type": "content_block_start", "content_block": {"type": "redacted_thinking", "data": "x"}}), True),
    Known(event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}), finishes=True),
    Known(event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": " "}}), has_output=True),
    Known(event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}), True, True),
    Known(b"event: error\n" + event({"type": "error", "error": {"type": "overloaded_error"}}), status=529),
]
RESPONSES = [
    *NOTHING,
    *[Known(event({"type": f"response.{kind}", "response": {"error": None}})) for kind in ("created", "in_progress")],
    Known(event({"type": "response.output_item.added", "item": {}})),
    Known(event({"type": "response.output_item.added", "item": {"type": "web_search_call"}}), begins=True),
    Known(event({"type": "response.completed", "response": {"output": []}}), finishes=True),
    Known(event({"type": "response.output_text.delta", "delta": "\t"}), has_output=True),
    Known(event({"type": "response.output_text.delta", "delta": "a"}), begins=True, has_output=True),
    Known(event({"type": "response.failed", "response": {}}), status=500),
    Known(event({"type": "error", "code": "rate_limit_exceeded"}), status=429),
]
EVENTS = {"chat": CHAT, "completion": COMPLETION, "messages": MESSAGES, "responses": RESPONSES}
LINE_ENDS = (b"\n", b"\r\n", b"\r")


class Reference:
    """What a reader has to find: the events one by one, as they are known."""

    def __init__(self, events: list[Known], *, removes: bool) -> None:
        self.begun = self.has_output = finished = False
        self.status = 0
        for one in events:
            self.status = self.status or one.status
            self.begun |= one.begins and not self.status
            self.has_output |= one.has_output and not self.status
            finished |= one.finishes
        if not (self.begun or self.status):
            self.status = BLANK.status if finished or self.has_output else EMPTY.status
        self.left = b"".join(one.data if one.left is None or not removes else one.left for one in events)
        self.removed = sum(one.left is not None for one in events)


@st.composite
def streams(draw: Any) -> tuple[str, list[Known], list[int], list[int], str, bool]:
    api = draw(st.sampled_from(list(EVENTS)))
    events = draw(st.lists(st.sampled_from(EVENTS[api]), max_size=7))
    places = st.lists(st.integers(0, 3000), max_size=12)
    removes = draw(st.booleans()) and api in ("chat", "completion")
    end = draw(st.sampled_from(LINE_ENDS))
    if end != b"\n":
        events = [one._replace(data=one.data.replace(b"\n", end)) for one in events]
        events = [one if not one.left else one._replace(left=one.left.replace(b"\n\n", 2 * end)) for one in events]
    return api, events, draw(places), draw(places), draw(st.sampled_from(["chunked", "close"])), removes


@seed(36)
@settings(max_examples=examples(600))
@given(streams())
def test_what_is_found_and_what_passes_is_that_of_a_plain_reading_of_each_event(
    stream: tuple[str, list[Known], list[int], list[int], str, bool],
) -> None:
    api, events, chunk_cuts, reads, framing, removes = stream
    body = b"".join(one.data for one in events)
    wire = body if framing == "close" else chunked(cut(body, chunk_cuts) if body else [])
    reader, known = event_reader(framing, api, removes=removes), Reference(events, removes=removes)
    pieces = cut(wire, reads) if wire else [b""]
    out = through(pieces, reader)
    left = unchunked(b"".join(out)) if framing == "chunked" else b"".join(out)
    assert left == known.left
    assert (reader.failure.status if reader.failure is not None else 0) == known.status
    assert (reader.begun, reader.has_output) == (known.begun, known.has_output)
    assert reader.captured == wire
    if removes:
        assert removal_of(reader).removed == known.removed
    else:
        assert all(before is after for before, after in zip(pieces, out, strict=True))


@pytest.mark.parametrize("api", EVENTS)
def test_pieces_of_whole_events_pass_in_their_own_chunks_once_there_is_output(api: str) -> None:
    token = next(one.data for one in EVENTS[api] if one.has_output)
    pieces = [b"%x\r\n%b\r\n" % (len(token), token)] * 3
    out = through([*pieces, b"0\r\n\r\n"], event_reader("chunked", api))
    assert all(before is after for before, after in zip(pieces, out, strict=False))


WHOLE: dict[str, tuple[list[bytes], bool, bool, int]] = {
    "an answer": ([b'{"choices":[{"text":"a"}]}'], True, True, 0),
    "in pieces": ([b'{"id":"x",', b'"choices":[{"text":"a"}]', b"}"], True, True, 0),
    "without a word": ([b'{"id":"x",', b'"choices":[{"text":""}]', b"}"], False, False, 200),
    "with its first word far behind": ([b'{"choices":[{"x":"%b","text":"a"}]}' % (b"y" * 5_000)], True, True, 0),
    "an error": ([json.dumps(FULL).encode()], False, False, 503),
    "an error, in pieces": ([b'{"obj', b'ect":"x","err', b'or":"y"}'], False, False, 500),
    "an error behind blanks": ([b"\n", b" ", b'{"error":"y"}'], True, False, 500),
    "an error beside what was asked for": ([b'{"error":{"code":503},', b'"choices":[{"text":"a"}]}'], True, True, 0),
    "no object": ([b"[1]"], False, False, 500),
    "nothing": ([b""], False, False, 500),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_answer_is_judged_by_its_object(kind: str) -> None:
    pieces, *expected = WHOLE[kind]
    reader = whole_reader("completion")
    assert through(pieces, reader) == pieces
    assert [reader.begun, reader.has_output, reader.failure.status if reader.failure is not None else 0] == expected


def test_an_answer_of_an_unknown_kind_passes_at_once_and_has_its_first_token_where_it_is() -> None:
    reader = WholeReader("chat", None, streams=True, names=False, captures=True)
    for piece, has_output in (
        (b"\n", False),
        (b'[{"role": 1},', False),
        (b"x" * WHOLE_BYTES_MAX, False),
        (delta("a"), True),
    ):
        assert reader.feed(piece, complete=False) is piece
        assert (reader.begun, reader.has_output) == (True, has_output)


def test_nothing_waits_for_more_than_decides() -> None:
    def begun(*pieces: bytes, stream: bool = True, complete: bool = False) -> bool:
        reader = event_reader() if stream else whole_reader("completion")
        for piece in pieces:
            reader.feed(piece, complete=complete)
        return reader.begun or reader.failure is not None

    assert begun(delta("a"))
    assert begun(event(FULL))
    assert not begun(event(FULL)[:-1])
    assert not begun(b'{"choices":[{"text":"a', stream=False)
    assert begun(b'{"choices":[{"text":"a', b"b" * WHOLE_BYTES_MAX, stream=False)
    assert begun(b'{"choices":[{"text":"a","finish_reason":"stop"}]}', stream=False, complete=True)
    assert begun(b" ", stream=False)
    assert not begun(b'{"error":' + b" " * 9000, stream=False)
    assert begun(b'{"error":' + b" " * WHOLE_BYTES_MAX, stream=False)
    assert not begun(b"", stream=False)


def test_the_id_of_a_response_is_found_where_chunks_cut_it() -> None:
    opening = event({"type": "response.created", "response": {"id": "resp_1", "object": "response"}})
    reader = StreamReader("responses", ChunkedReader(), streams=True, names=True, captures=True)
    through(cut(chunked(cut(opening + DONE, [60])), [70]), reader)
    assert reader.name == "resp_1"


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_is_not_looked_into_passes_as_it_comes(streams: bool) -> None:
    reader = AnswerReader("chat", None, streams=streams, names=False, captures=True)
    reader.feed(b"", complete=False)
    assert (reader.begun, reader.has_output) == (not streams, False)
    for piece in (json.dumps(FULL).encode(), b"x" * CAPTURE_BYTES_MAX, b"y"):
        assert reader.feed(piece, complete=False) is piece
    assert (reader.failure, reader.begun, reader.has_output) == (None, True, not streams)
    assert reader.captured is not None
    assert not reader.captured.endswith(b"y")


@pytest.mark.parametrize(
    "event", [b"\n\n", b"data:\n\n", b"error\n\n", b'data:"error"\n\n', b'"prompt_tokens"\n\n', b"data:{}\r\r"]
)
@pytest.mark.parametrize("before", [b"", delta("a")])
def test_no_piece_of_many_small_events_takes_long(event: bytes, before: bytes) -> None:
    """Each is read at once, between two looks at other sockets."""
    pieces = [before, *5 * [event * (65_536 // len(event))]]
    took_s = []
    for _ in range(3):
        reader = event_reader()
        began = perf_counter()
        assert b"".join(through(pieces, reader)) == b"".join(pieces)
        took_s.append(perf_counter() - began)
    assert min(took_s) / 5 < 0.05
