"""What is kept of answers, and what clients of either kind get of it."""

from __future__ import annotations

import json
from itertools import product
from time import perf_counter
from typing import Any, TypeVar

import pytest

from ranvier_py.core.answers.chunked import unchunked
from ranvier_py.core.response_cache import arrived_answers
from ranvier_py.core.response_cache.arrived_answers import Arrived
from ranvier_py.core.response_cache.cache_keys import Question
from ranvier_py.core.response_cache.stored_answers import Portions, StoredAnswer, chunk

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
DONE = b"data: [DONE]\n\n"
HEAD = {"id": "c-1", "created": 5, "model": "m"}


def asked(api: str = "chat", *, stream: bool = False, usage: bool = False) -> Question:
    return Question(b"k" * 32, api, "m", stream, usage, 1e9)


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def delta(finish: str | None = None, index: int = 0, **message: Any) -> bytes:
    choice = {"index": index, "delta": message, "finish_reason": finish}
    return event({**HEAD, "object": "chat.completion.chunk", "choices": [choice]})


COUNTS = event({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
DONE_EVENTS = (delta("stop"), COUNTS, DONE)
OUTPUT = [delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo"), delta("stop")]


Made = TypeVar("Made")


def finished(making: Portions[Made]) -> Made:
    """What is made, in one go."""
    while True:
        try:
            next(making)
        except StopIteration as end:
            found: Made = end.value
            return found


def stored_answer(question: Question, tenant: bytes, arrived: Arrived, now: float, most: int) -> StoredAnswer | None:
    return finished(arrived_answers.stored_answer(question, tenant, arrived, now, most))


def streamed(*events: bytes, counts: bytes = b"", api: str = "chat", most: int = 1 << 20) -> StoredAnswer | None:
    body = b"".join(map(chunk, events)) + b"0\r\n\r\n"
    arrived = Arrived(b"text/event-stream", "chunked", body, counts)
    return stored_answer(asked(api, stream=True), b"t", arrived, 1.0, most)


def whole(fields: Any, api: str = "chat", most: int = 1 << 20) -> StoredAnswer | None:
    """What is kept of a whole answer, however it came."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    given = asked(api), b"t", Arrived(b"application/json", "length", body), 1.0, most
    found = arrived_answers.stored_at_once(*given)
    in_chunks = given[2]._replace(framing="chunked", body=chunk(body) + b"0\r\n\r\n")
    assert found == stored_answer(*given) == stored_answer(asked(api), b"t", in_chunks, 1.0, most)
    return found


def completion(finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "logprobs": None, "finish_reason": finish}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def made(stored: StoredAnswer, question: Question) -> bytes | None:
    return finished(stored.reply(question))


def reply(stored: StoredAnswer | None, question: Question) -> bytes:
    assert stored is not None
    body = made(stored, question)
    assert body is not None
    return body


def test_a_stream_is_replayed_with_the_chunks_it_came_in() -> None:
    stored = streamed(OUTPUT[0], OUTPUT[1] + OUTPUT[2], OUTPUT[3] + DONE)
    expected = [OUTPUT[0], OUTPUT[1] + OUTPUT[2], OUTPUT[3], DONE]
    assert reply(stored, asked(stream=True)) == b"".join(map(chunk, expected)) + b"0\r\n\r\n"


@pytest.mark.parametrize("asked_by_us", [True, False])
def test_counts_are_for_those_who_ask_for_them_whoever_asked_first(asked_by_us: bool) -> None:
    stored = streamed(*OUTPUT, DONE, counts=COUNTS) if asked_by_us else streamed(*OUTPUT, COUNTS, DONE)
    assert stored is not None
    assert stored.tokens == (7, 3)
    assert unchunked(reply(stored, asked(stream=True))) == b"".join(OUTPUT) + DONE
    assert unchunked(reply(stored, asked(stream=True, usage=True))) == b"".join(OUTPUT) + COUNTS + DONE


def test_who_asks_for_counts_that_nobody_knows_is_for_the_engine() -> None:
    stored = streamed(*OUTPUT, DONE)
    assert stored is not None
    assert made(stored, asked(stream=True, usage=True)) is None
    assert made(stored, asked()) is None, "a whole answer always has counts"


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    stored = streamed(*OUTPUT, DONE, counts=COUNTS)
    found = json.loads(reply(stored, asked()))
    assert found == {
        **HEAD,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def test_tool_calls_and_several_choices_add_up_as_well() -> None:
    first = {"index": 0, "id": "t", "type": "function", "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a":1}'}}
    events = [delta(role="assistant", content=None), delta(tool_calls=[first]), delta(tool_calls=[more]),
              delta(index=1, role="assistant", content="b"), delta("stop", index=1), delta("tool_calls")]  # fmt: skip
    choices = json.loads(reply(streamed(*events, DONE, counts=COUNTS), asked()))["choices"]
    call = {"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    assert [choice["message"] for choice in choices] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "b"},
    ]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]


def test_log_probabilities_of_all_events_are_in_the_whole_answer() -> None:
    def part(token: str) -> bytes:
        choice = {"index": 0, "delta": {"content": token}, "logprobs": {"content": [{"token": token}]}}
        return event({**HEAD, "choices": [choice]})

    found = json.loads(reply(streamed(part("a"), part("b"), delta("stop"), DONE, counts=COUNTS), asked()))
    assert found["choices"][0]["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}]}


@pytest.mark.parametrize("message", [{"content": "Hello"}, {"content": None, "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}]}])  # fmt: skip  # noqa: E501
def test_a_whole_answer_becomes_a_stream_that_adds_up_to_it_again(message: dict[str, Any]) -> None:
    stored = whole(completion(**message))
    body = reply(stored, asked(stream=True, usage=True))
    again = stored_answer(asked(stream=True), b"t", Arrived(b"text/event-stream", "chunked", body), 1.0, 1 << 20)
    assert json.loads(reply(again, asked())) == completion(**message)
    assert b"usage" not in reply(stored, asked(stream=True))


def test_completions_become_either_kind_too() -> None:
    text = {**HEAD, "object": "text_completion", "usage": USAGE}
    fields = {**text, "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]}
    body = reply(whole(fields, "completion"), asked("completion", stream=True, usage=True))
    arrived = Arrived(b"text/event-stream", "chunked", body)
    again = stored_answer(asked("completion", stream=True), b"t", arrived, 1.0, 1 << 20)
    assert json.loads(reply(again, asked("completion"))) == fields


@pytest.mark.parametrize(
    ("api", "end"),
    [("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
     ("responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n')],
)  # fmt: skip
def test_streams_of_other_apis_are_replayed_whole_and_made_into_nothing_else(api: str, end: bytes) -> None:
    begin = b'event: begin\ndata: {"usage":{"prompt_tokens":1}}\n\n'
    stored = streamed(begin, end, api=api)
    assert unchunked(reply(stored, asked(api, stream=True))) == begin + end
    assert stored is not None
    assert made(stored, asked(api)) is None
    assert streamed(begin, api=api) is None, "not complete"


@pytest.mark.parametrize(
    "events",
    [
        OUTPUT,
        [*OUTPUT[:2], DONE[:-1]],
        [*OUTPUT, event({"error": {"message": "no room"}}), DONE],
        [*OUTPUT[:3], delta("error"), DONE],
        [*OUTPUT[:3], delta("abort"), DONE],
        [event({**HEAD, "choices": [{"index": 0, "delta": {"content": "a"}}], "usage": USAGE}), delta("stop"), DONE],
        [],
    ],
    ids=["no end", "cut", "error event", "error", "abort", "counts beside output", "nothing"],
)
def test_no_stream_is_kept_that_is_not_complete_or_failed(events: list[bytes]) -> None:
    assert streamed(*events) is None


def test_what_a_model_writes_about_errors_is_no_error() -> None:
    assert streamed(OUTPUT[0], delta(content='data: {"error": "finish_reason":"error"'), OUTPUT[3], DONE) is not None


@pytest.mark.parametrize(
    "fields",
    [b"", b"{", b"[]", {"error": {"message": "x"}}, {"object": "error"}, completion(None), completion("abort"), {}],
)
def test_no_whole_answer_is_kept_that_is_none(fields: Any) -> None:
    assert whole(fields) is None


@pytest.mark.parametrize("odd", [0.5, True, "x", {"a": 1}, [None], [[]], ["x"], [{"index": None}, {"index": 1}]])
def test_an_answer_of_another_shape_than_its_api_has_is_not_converted_and_fails_nobody(odd: Any) -> None:
    choices = [{"delta": odd}, {"delta": {"tool_calls": odd}}, {"logprobs": odd}, {"finish_reason": odd, "message": {}}]
    for fields in ({"choices": odd}, *({"choices": [choice]} for choice in choices)):
        kept = streamed(event({**HEAD, **fields}), COUNTS, DONE), whole({**HEAD, **fields, "usage": USAGE})
        for stored, stream in product(filter(None, kept), (True, False)):
            assert made(stored, asked(stream=stream, usage=True)) is not None or stored.stream is not stream


def test_what_is_too_large_is_not_kept_and_a_stream_counts_as_the_answer_it_adds_up_to() -> None:
    long = completion(content="x" * 1000)
    assert whole(long, most=900) is None
    events = [OUTPUT[0], *[delta(content="x" * 10)] * 50, OUTPUT[3], DONE]
    assert streamed(*events, most=500) is None
    assert streamed(*events, most=1500) is not None


def test_bytes_that_are_no_chunks_are_not_kept() -> None:
    for body in (b"", b"5\r\nhello", b"zz\r\n", chunk(DONE)):
        arrived = Arrived(b"text/event-stream", "chunked", body)
        assert stored_answer(asked(stream=True), b"", arrived, 1.0, 1 << 20) is None


def test_embeddings_are_kept_as_they_came() -> None:
    fields = {"object": "list", "data": [{"embedding": [0.1, 0.2]}], "usage": {"prompt_tokens": 2}}
    stored = whole(fields, "embeddings")
    assert json.loads(reply(stored, asked("embeddings"))) == fields
    assert stored is not None
    assert stored.tokens == (2, 0)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_whole_answer_is_made_of_a_large_stream_in_short_portions(logprobs: bool) -> None:
    """Each would hold up all other requests; their number shows that the work does not grow with its square."""
    more = {"logprobs": {"content": [{"token": "x", "logprob": -0.5}]}} if logprobs else {}
    one = {"index": 0, "delta": {"content": "word " * 10}, "finish_reason": None, **more}
    count = 4000
    stored = streamed(*[event({**HEAD, "choices": [one]})] * count, *DONE_EVENTS)
    assert stored is not None
    making, took_s = stored.reply(asked()), []
    body = None
    while body is None:
        began = perf_counter()
        try:
            next(making)
        except StopIteration as end:
            body = end.value
            assert body is not None
        took_s.append(perf_counter() - began)
    choice = json.loads(body)["choices"][0]
    assert choice["message"]["content"] == "word " * 10 * count
    assert len((choice.get("logprobs") or {"content": [0] * count})["content"]) == count
    assert sorted(took_s)[len(took_s) // 2] < 0.025
    assert len(took_s) > 10
