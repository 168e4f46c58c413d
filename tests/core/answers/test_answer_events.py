"""Errors behind a status of 200: which there are, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_events import EMPTY, Failure
from tests.core.answers.feeding import event_reader, through, whole_reader

FULL = {"message": "The request queue is full.", "type": "service_unavailable", "code": 503}
ROLE: dict[str, Any] = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
TOKEN: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "word"}}]}


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)


ERRORS: dict[str, tuple[Any, int]] = {
    "SGLang's": ({"error": FULL}, 503),
    "vLLM's": ({"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}, 400),
    "vLLM's of before": ({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, 400),
    "Anthropic's": ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, 529),
    "Anthropic's limit": ({"type": "error", "error": {"type": "rate_limit_error", "message": "x"}}, 429),
    "OpenAI's": ({"error": {"type": "server_error", "code": None, "message": "x"}}, 500),
    "by a code of words": ({"error": {"type": "error", "code": "rate_limit_exceeded", "message": "x"}}, 429),
    "by a code in quotes": ({"error": {"code": "503", "message": "x"}}, 503),
    "a text": ({"error": "CUDA error"}, 500),
    "a code that is no status": ({"error": {"code": 17, "message": "x"}}, 500),
}
OF_RESPONSES: dict[str, tuple[Any, int]] = {
    "failed": ({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "x"}}}, 500),
    "limited": ({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded"}}}, 429),
    "failed without a word": ({"type": "response.failed", "response": {"error": None}}, 500),
    "an event": ({"type": "error", "code": "server_error", "message": "x"}, 500),
}
OPENINGS: dict[str, list[Any]] = {
    "chat": [ROLE],
    "completion": [{"choices": [{"index": 0, "text": ""}]}],
    "generate": [],
    "messages": [{"type": "message_start", "message": {"content": []}}, {"type": "ping"}],
    "responses": [{"type": "response.created", "response": {"error": None}}, {"type": "response.in_progress"}],
}


def failure_in(data: bytes, api: str) -> Failure | None:
    reader = event_reader(api=api)
    reader.feed(data, complete=False)
    return None if reader.begun else reader.failure


def failure_of_whole(data: bytes) -> Failure | None:
    reader = whole_reader()
    reader.feed(data, complete=True)
    return reader.failure


@pytest.mark.parametrize("api", OPENINGS)
@pytest.mark.parametrize("kind", [*ERRORS, *OF_RESPONSES])
def test_an_error_before_any_output_is_a_failure_by_the_code_inside(kind: str, api: str) -> None:
    error, status = {**ERRORS, **OF_RESPONSES}[kind]
    for data in (stream(error), stream(*OPENINGS[api], error), b": ping\n\n" + b"event: error\n" + stream(error)):
        failure = failure_in(data, api)
        assert failure is not None
        assert failure.status == status


@pytest.mark.parametrize("kind", ERRORS)
def test_a_whole_answer_that_is_an_error_is_a_failure(kind: str) -> None:
    error, status = ERRORS[kind]
    for data in (json.dumps(error).encode(), json.dumps(error, indent=1, separators=(",", " : ")).encode()):
        failure = failure_of_whole(data)
        assert failure is not None
        assert failure.status == status


@pytest.mark.parametrize(
    "data",
    [
        stream(TOKEN, {"error": FULL}),
        stream(ROLE),
        stream({"choices": [], "error": None}),
        stream({"type": "response.created", "response": {"error": None}}),
        stream({"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"arguments": '{"error": {}}'}}]}}]}),
        b": ping\n\n",
        b'data: {"error": {"mess',
    ],
)
def test_a_stream_with_output_or_without_an_event_yet_has_not_failed(data: bytes) -> None:
    assert failure_in(data, "chat") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"error": None, "output": [{"type": "message"}]},
        {"error": None},
        {"choices": [{"index": 0}], "error": FULL},
        {"data": [{"embedding": [1.0]}], "error": "one of two"},
        {"choices": [{"message": {"content": 'say {"error": {"code": 500}}'}}]},
        {"content": [{"type": "tool_use", "input": {"error": {"code": 500}}}], "type": "message"},
        {"result": {"error": {"code": 500}}},
        [{"error": FULL}],
    ],
)
def test_no_whole_answer_fails_that_has_what_was_asked_for(fields: Any) -> None:
    assert failure_of_whole(json.dumps(fields).encode()) is None


@pytest.mark.parametrize("data", [b"", b"data: [DONE]\n\n", b": ping\n\n", b"\n"])
def test_a_stream_that_ends_without_an_event_is_a_failure(data: bytes) -> None:
    reader = event_reader()
    assert through([data], reader) == [data]
    assert reader.failure == EMPTY


DEEP = b'{"error":' * 400 + b"1" + b"}" * 400


@given(st.binary(max_size=200))
@example(b"[" * 2000)
@example(DEEP)
def test_no_bytes_break_anything(data: bytes) -> None:
    for body in (b'{"error":' + data, data):
        for failure in (failure_in(b"data: " + body + b"\n\n", "chat"), failure_of_whole(body)):
            assert failure is None or 400 <= failure.status <= 599
