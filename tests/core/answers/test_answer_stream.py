"""Answers are read as a client will send them back."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_stream import has_token, read_answer, unchunked


def event(delta: dict[str, object], **more: object) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}], **more}) + b"\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_role_chunk_is_no_first_token_and_content_is() -> None:
    assert not has_token(event({"role": "assistant", "content": ""}))
    assert has_token(event({"content": "Hello"}))
    assert has_token(event({"tool_calls": [{"index": 0}]}))
    assert has_token(b'data: {"choices": [{"text": "x"}]}\n\n')


@given(st.lists(st.text(min_size=1), min_size=1, max_size=20))
def test_the_pieces_of_a_stream_add_up_to_the_answer(pieces: list[str]) -> None:
    raw = chunked(event({"role": "assistant", "content": ""}), *(event({"content": piece}) for piece in pieces))
    answer = read_answer(raw, chunked=True, streamed=True, kind="chat")
    assert answer.message == {"role": "assistant", "content": "".join(pieces)}


def test_usage_of_a_stream_is_read_from_its_last_event() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 96}}
    raw = chunked(event({"content": "a"}), event({}, usage=usage), b"data: [DONE]\n\n")
    answer = read_answer(raw, chunked=True, streamed=True, kind="chat")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (100, 96, 3)


def test_tool_calls_are_put_together_from_their_deltas() -> None:
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": ""}}
    raw = b"".join(
        (
            event({"tool_calls": [first]}),
            event({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
            event({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        )
    )
    answer = read_answer(raw, chunked=False, streamed=True, kind="chat")
    assert answer.message is not None
    assert answer.message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a":1}'}}
    ]


def test_an_answer_with_reasoning_teaches_no_boundary_since_the_next_turn_leaves_it_out() -> None:
    raw = event({"reasoning_content": "hm"}) + event({"content": "yes"})
    assert read_answer(raw, chunked=False, streamed=True, kind="chat").message is None


def test_several_choices_learn_nothing() -> None:
    raw = event({"content": "a"}) + b'data: {"choices":[{"index":1,"delta":{"content":"b"}}]}\n\n'
    assert read_answer(raw, chunked=False, streamed=True, kind="chat").message is None


def test_an_answer_in_one_object_is_read() -> None:
    body = {
        "choices": [{"message": {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1},
    }
    answer = read_answer(orjson.dumps(body), chunked=False, streamed=False, kind="chat")
    assert answer.message == {"role": "assistant", "content": "hi"}
    assert (answer.prompt_tokens, answer.cached_tokens) == (7, None)


def test_the_text_of_a_completion_is_read() -> None:
    raw = b'data: {"choices":[{"index":0,"text":"ab"}]}\n\ndata: {"choices":[{"index":0,"text":"\\u00e4"}]}\n\n'
    assert read_answer(raw, chunked=False, streamed=True, kind="completion").text == "abä"


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_garbage_teaches_nothing_and_raises_nothing(raw: bytes, chunked: bool, streamed: bool) -> None:
    read_answer(raw, chunked=chunked, streamed=streamed, kind="chat")


@pytest.mark.parametrize("raw", [b"", b"5\r\nab\r\n0\r\n\r\n", b"zz\r\n", b"-1\r\n"])
def test_a_body_that_is_not_chunked_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        unchunked(raw)
