"""Errors behind a status of 200: which there are, and what is none."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_events import BLANK, EMPTY, NO_ANSWER, Failure
from ranvier_py.core.answers.answer_events import FOREIGN as OF_ANOTHER_API
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


def failure_of_whole(data: bytes, api: str = "chat") -> Failure | None:
    reader = whole_reader(api)
    reader.feed(data, complete=True)
    return reader.failure


def api_of(fields: dict[str, Any]) -> str:
    """Whose answer this is."""
    if "choices" in fields:
        return "completion" if "text" in fields["choices"][0] else "chat"
    return "messages" if "content" in fields else "responses" if "output" in fields else "generate"


def whole_of(*choices: Any) -> bytes:
    return json.dumps({"id": "1", "choices": choices}).encode()


@pytest.mark.parametrize("api", OPENINGS)
@pytest.mark.parametrize("kind", [*ERRORS, *OF_RESPONSES])
def test_an_error_before_any_output_is_a_failure_by_the_code_inside(kind: str, api: str) -> None:
    error, status = {**ERRORS, **OF_RESPONSES}[kind]
    for data in (stream(error), stream(*OPENINGS[api], error), b": ping\n\n" + b"event: error\n" + stream(error)):
        failure = failure_in(data, api)
        assert failure is not None
        assert failure.status == status


@pytest.mark.parametrize(
    "output", [{"delta": {"role": "assistant", "content": ""}}, {"message": {"content": None}}, {}]
)
def test_an_error_inside_a_choice_without_output_is_a_failure(output: Any) -> None:
    """A gateway's, whose provider failed."""
    choice = {
        "index": 0,
        "finish_reason": "error",
        "error": {"code": 502, "message": "Provider disconnected"},
        **output,
    }
    for failure in (failure_in(stream({"choices": [choice]}), "chat"), failure_of_whole(whole_of(choice))):
        assert failure is not None
        assert failure.status == 502
    beside = {"message": {"content": "half an ans"}}
    assert failure_of_whole(whole_of({"error": choice["error"], **beside})) is None
    assert failure_of_whole(whole_of(choice, beside)) is None


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_choice_that_was_aborted_before_any_output_is_a_failure(reason: str, api: str) -> None:
    empty: dict[str, Any] = {"delta": {}, "message": {"role": "assistant", "content": None}}
    empty = {"text": ""} if api == "completion" else empty
    choice = {"index": 0, **empty, "finish_reason": reason}
    beside = {"index": 1, "text": "half an ans", "message": {"content": "half an ans"}, "finish_reason": reason}
    for failure in (
        failure_in(stream(*OPENINGS[api], {"choices": [choice]}), api),
        failure_of_whole(whole_of(choice), api),
    ):
        assert failure is not None
        assert failure.status == 500
    assert failure_of_whole(whole_of(choice, beside), api) is None
    token = {"choices": [{"index": 0, "text": "word"}]} if api == "completion" else TOKEN
    assert failure_in(stream(token, {"choices": [{**choice, "finish_reason": "abort"}]}), api) is None
    assert failure_of_whole(whole_of({**choice, "finish_reason": "stop"}), api) is BLANK


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
        {"error": None, "output": [{"type": "function_call"}]},
        {"choices": [{"index": 0}], "error": FULL},
        {"output": [{"embedding": [1.0]}], "error": "one of two"},
        {"choices": [{"message": {"content": 'say {"error": {"code": 500}}'}}]},
        {"content": [{"type": "tool_use", "input": {"error": {"code": 500}}}], "type": "message"},
        {"object": "response", "status": "queued", "output": [], "error": None},
        {"type": "message", "content": [], "stop_reason": "refusal"},
        {"choices": [{"text": "", "finish_reason": "stop"}, {"text": "a", "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": []}, "finish_reason": "content_filter"}]},
        {"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}]},
    ],
)
def test_no_whole_answer_fails_that_has_what_was_asked_for(fields: Any) -> None:
    assert failure_of_whole(json.dumps(fields).encode(), api_of(fields)) is None


def test_lists_in_lists_are_followed_no_further_than_answers_go() -> None:
    assert failure_of_whole(b'{"output":%b%b}' % (b"[" * 900, b"]" * 900), "responses") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"output": [{"type": "message"}], "status": "completed"},
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": ""}]}]},
        {"type": "message", "content": [], "stop_reason": "end_turn"},
        {"type": "message", "content": [{"type": "text", "text": ""}]},
        {"text": "", "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}},
        {"choices": [{"text": "", "finish_reason": "stop"}, {"text": "", "finish_reason": "length"}]},
        {"choices": [{"text": "", "finish_reason": "failed"}]},
        {"choices": [{"message": {"role": "assistant", "content": []}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"role": "assistant", "content": " \n", "provider_fields": {"refusal": None}}}]},
        {"choices": [{"text": "\n\n", "finish_reason": "length"}]},
        {"choices": [{"text": "\u200b\ufeff ", "finish_reason": "length"}]},
        {"choices": [{"message": {"content": "\ufffd\ufffd"}, "finish_reason": "stop"}]},
        {"type": "message", "content": [{"type": "text", "text": "\t"}], "stop_reason": "max_tokens"},
        {"text": " ", "output_ids": [220], "meta_info": {"finish_reason": {"type": "length"}}},
    ],
)
def test_what_finishes_without_a_word_and_without_a_reason_is_blank(fields: Any) -> None:
    assert failure_of_whole(json.dumps(fields).encode(), api_of(fields)) is BLANK


@pytest.mark.parametrize("fields", [{"error": None}, {"result": {"error": {"code": 500}}}, [{"error": FULL}], {}])
def test_what_has_no_member_of_an_answer_fails_only_where_text_was_asked_for(fields: Any) -> None:
    assert failure_of_whole(json.dumps(fields).encode(), api="") is None
    assert failure_of_whole(json.dumps(fields).encode()) is not None


@pytest.mark.parametrize("api", ["chat", "completion", "messages", "responses"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", 500),
        (b"upstream request timeout", 500),
        (b'[{"error":{"code":503,"message":"The model is overloaded."}}]', 500),
        (b'{"detail":"Internal Server Error"}', 500),
        (b'{"code":429,"msg":"too fast","success":false}', 429),
        (b'{"__type":"ThrottlingException","message":"Too many requests"}', 429),
        (b'{"base_resp":{"status_code":1002,"status_msg":"rate limit"},"choices":null}', 500),
        (b'{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":3}}', 500),
        (b'{"Output":{"__type":"UnknownOperationException"}}', 500),
        (b'\xef\xbb\xbf{"error":{"message":"x","code":503}}', 503),
        (b'{"\\u0065rror":{"message":"x","code":503}}', 503),
        (b'{"error":{"message":"x","http_status_code":422}}', 422),
        (b"null", 500),
        (b'{"detail"', 500),
        (b'{"choices":[{"text":"a', 500),
        (b'{"object":"list","data":[{"id":"m","object":"model"}]}', 404),
        (b'{"object":"list","data":[{"index":0,"embedding":[0.5]}]}', 404),
        (b'{"data":{"error":"boom"}}', 500),
        (b'{"model":"m","message":{"role":"assistant","content":"hi"},"done":true}', 500),
        (b'{"response":"hi","done":false}\n{"done":true}', 500),
        (b'{"object":"response","status":"failed","error":null,"output":[]}', 500),
    ],
)
def test_what_is_no_answer_is_a_failure_whatever_its_words_and_cuts(body: bytes, status: int, api: str) -> None:
    for cut in (0, 1, 3, len(body) // 2):
        reader = whole_reader(api)
        for piece, is_last in ((body[:cut], False), (body[cut:], True)):
            reader.feed(piece, complete=is_last)
        assert reader.failure is not None
        assert (reader.failure.status, reader.begun) == (status, False)


ANSWERED = {
    "embeddings": [b'{"data":[{"embedding":[0.1]}]}', b'{"data":[{"embedding":"AAAA"}]}'],
    "generate": [b'{"text":"a"}', b'{"output_ids":[1],"meta_info":{}}', b'[{"text":"a"},{"text":"b"}]'],
    "rerank": [b'{"results":[{"index":0,"relevance_score":0.9}]}', b'[{"index":0,"score":0.9}]'],
    "score": [b'{"object":"list","data":[{"index":0,"score":1}]}', b'{"scores":[0.5],"object":"scoring"}'],
    "classify": [b'{"data":[{"label":"a","probs":[0.5]}]}', b'[{"embedding":[0.1]}]'],
    "tokenize": [b'{"count":1,"max_model_len":9,"tokens":[1]}', b'{"tokens":[]}'],
    "detokenize": [b'{"prompt":""}', b'{"text":"a"}', b'{"content":"a"}'],
    "count_tokens": [b'{"input_tokens":0}'],
}
FOREIGN = [
    *(b"OK", b"null", b"true", b"[]", b"{", b"{}", b"<?xml version='1.0'?>", b"<!-- x --><html>", b'{"status":"ok"}'),
    *(b'{"data":{"error":"boom"}}', b'{"data":{"error":{"message":"boom"}},"success":false}'),
    *(b'{"code":401,"data":null}', b'{"success":false,"errors":[{"code":1}]}', b'{"detail":[{"msg":"no"}]}'),
]


@pytest.mark.parametrize("api", ANSWERED)
def test_what_else_engines_compute_is_known_by_what_it_has(api: str) -> None:
    for body in ANSWERED[api]:
        assert failure_of_whole(body, api) is None
        if body.startswith(b"{"):
            assert failure_of_whole(body[:-4], api) is not None
    for body in FOREIGN:
        assert failure_of_whole(body, api) is not None, body


WHOLES: dict[str, dict[str, Any]] = {
    "chat": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}]},
    "completion": {"choices": [{"index": 0, "text": "word", "finish_reason": "stop"}]},
    "messages": {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "word"}]},
    "responses": {"output": [{"type": "message", "content": [{"type": "output_text", "text": "word"}]}]},
    "generate": {"text": "word", "meta_info": {"finish_reason": {"type": "stop"}}},
    "embeddings": {"object": "list", "data": [{"index": 0, "embedding": [0.5]}]},
}
EVENTS: dict[str, dict[str, Any]] = {
    "chat": TOKEN,
    "completion": {"choices": [{"index": 0, "text": "word"}]},
    "messages": {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word"}},
    "responses": {"type": "response.output_text.delta", "delta": "word"},
    "generate": {"text": "word", "meta_info": {"finish_reason": None}},
}


@pytest.mark.parametrize("asked", WHOLES)
@pytest.mark.parametrize("given", WHOLES)
def test_an_answer_of_another_api_than_was_asked_is_a_404_of_this_one(asked: str, given: str) -> None:
    failure = failure_of_whole(json.dumps(WHOLES[given]).encode(), asked)
    assert failure is (None if asked == given else OF_ANOTHER_API)


@pytest.mark.parametrize("asked", ["rerank", "score", "classify", "tokenize", "count_tokens"])
@pytest.mark.parametrize("given", ["chat", "completion", "responses"])
def test_text_is_no_answer_where_none_was_asked_for(asked: str, given: str) -> None:
    assert failure_of_whole(json.dumps(WHOLES[given]).encode(), asked) is OF_ANOTHER_API


@pytest.mark.parametrize("asked", EVENTS)
@pytest.mark.parametrize("given", EVENTS)
def test_an_event_of_another_api_than_was_asked_begins_no_answer(asked: str, given: str) -> None:
    failure = failure_in(stream(*OPENINGS[given], EVENTS[given]), asked)
    assert failure is (None if given in (asked, "generate") else OF_ANOTHER_API)


def test_a_list_of_models_has_no_embeddings() -> None:
    assert failure_of_whole(b'{"object":"list","data":[{"id":"m","object":"model"}]}', "embeddings") is OF_ANOTHER_API


@pytest.mark.parametrize("words", [b"null", b"[]", b"Bad Gateway", b"<html><center>nginx</center></html>"])
def test_words_where_an_event_is_due_are_a_failure_but_not_behind_output(words: bytes) -> None:
    for api, first in EVENTS.items():
        assert failure_in(b"data: %b\n\ndata: [DONE]\n\n" % words, api) is NO_ANSWER
        reader = event_reader(api=api)
        reader.feed(stream(first) + b"data: %b\n\n" % words, complete=True)
        assert (reader.begun, reader.failure) == (True, None)


@pytest.mark.parametrize("vectors", [[], [{"embedding": []}], [{"embedding": [None, None]}, {"embedding": None}]])
def test_embeddings_without_a_number_are_blank(vectors: Any) -> None:
    assert failure_of_whole(json.dumps({"object": "list", "data": vectors}).encode(), "embeddings") is BLANK


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "body", [b'data: {"choices":[]}\n\n', b": ping\n\n", b"event: x\n", b'\n{"choices":[{"index":NaN}]}']
)
def test_events_without_their_type_and_answers_with_odd_numbers_are_passed_on(body: bytes, streams: bool) -> None:
    for first, second in combinations_with_replacement(range(len(body)), 2):
        reader = whole_reader(streams=streams)
        reader.feed(body[:first], complete=False)
        reader.feed(body[first:second], complete=False)
        reader.feed(body[second:], complete=True)
        assert (reader.failure, reader.begun) == (None, True)


@pytest.mark.parametrize("fields", [{"detail": "Internal Server Error"}, {"code": 500, "msg": "x"}, {"choices": None}])
def test_words_of_a_gateway_begin_no_stream(fields: Any) -> None:
    reader = event_reader()
    reader.feed(stream(fields), complete=False)
    assert not reader.begun
    reader.feed(b"", complete=True)
    assert reader.failure is EMPTY


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
