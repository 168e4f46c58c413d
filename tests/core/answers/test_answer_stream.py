"""Answers are read as a client will send them back."""

import json
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_events import UNSEEN
from ranvier_py.core.answers.answer_stream import has_finished, has_token, has_word, read_answer
from ranvier_py.core.answers.chunked import unchunked
from tests.node.turns import OCCUPIED_S_MAX, least_s


def event(delta: dict[str, object], **more: object) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}], **more}) + b"\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_role_chunk_is_no_first_token_and_content_is() -> None:
    assert not has_token(event({"role": "assistant", "content": ""}))
    assert has_token(event({"content": "Hello"}))
    assert has_token(event({"tool_calls": [{"index": 0}]}))
    assert has_token(b'data: {"choices": [{"text": "x"}]}\n\n')


@pytest.mark.parametrize("is_escaped", [False, True])
def test_what_nobody_sees_is_no_word_however_it_is_written(is_escaped: bool) -> None:
    for unseen in (UNSEEN, *UNSEEN):
        assert not has_word(b'"content":' + json.dumps(unseen, ensure_ascii=is_escaped).encode(), "chat")
        assert has_word(b'"content":' + json.dumps(unseen + "a", ensure_ascii=is_escaped).encode(), "chat")


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


@pytest.mark.parametrize("streamed", [False, True])
def test_a_mark_of_byte_order_hides_no_answer(streamed: bool) -> None:
    message = {"role": "assistant", "content": "hi"}
    whole = orjson.dumps({"choices": [{"index": 0, "message": message}], "usage": {"prompt_tokens": 7}})
    raw = b"\xef\xbb\xbf" + (event(message, usage={"prompt_tokens": 7}) if streamed else whole)
    answer = read_answer(raw, chunked=False, streamed=streamed, kind="chat")
    assert (answer.text, answer.prompt_tokens) == ("hi", 7)


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


# --- messages, responses ---------------------------------------------------------------------------------------------


def named_event(kind: str, **fields: object) -> bytes:
    """An event as Anthropic's and OpenAI's newer API name them."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def claude_stream(*blocks: dict[str, object], cached: int | None = 96) -> bytes:
    """A stream of /v1/messages with these blocks, each in two deltas."""
    usage = {"input_tokens": 4, "cache_read_input_tokens": cached, "output_tokens": 0}
    raw = named_event("message_start", message={"id": "msg_1", "role": "assistant", "content": [], "usage": usage})
    for index, block in enumerate(blocks):
        kind = str(block["type"])
        name, delta, empty = {
            "text": ("text", "text", ""),
            "thinking": ("thinking", "thinking", ""),
            "tool_use": ("input", "partial_json", {}),
        }[kind]
        whole = block[name] if isinstance(block[name], str) else orjson.dumps(block[name]).decode()
        half = len(str(whole)) // 2
        raw += named_event("content_block_start", index=index, content_block={**block, name: empty})
        for piece in (str(whole)[:half], str(whole)[half:]):
            change = {"type": "input_json_delta" if kind == "tool_use" else f"{kind}_delta", delta: piece}
            raw += named_event("content_block_delta", index=index, delta=change)
        raw += named_event("content_block_stop", index=index)
    raw += named_event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7})
    return raw + named_event("message_stop")


SPOKEN = {"type": "text", "text": "Let me see."}
USED = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
CALLED = [{"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_message_with_a_tool_use_is_read_as_the_next_turn_has_it(streamed: bool) -> None:
    usage = {"input_tokens": 4, "cache_read_input_tokens": 96, "output_tokens": 7}
    whole = orjson.dumps({"type": "message", "content": [SPOKEN, USED], "stop_reason": "tool_use", "usage": usage})
    raw = claude_stream(SPOKEN, USED) if streamed else whole
    answer = read_answer(raw, chunked=False, streamed=streamed, kind="messages")
    assert answer.message == {"role": "assistant", "content": "Let me see.", "tool_calls": CALLED}
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (100, 96, 7)
    assert has_finished(raw, "messages")


def test_counts_of_messages_without_those_of_the_cache_have_none_of_it() -> None:
    raw = claude_stream(SPOKEN, cached=None)
    answer = read_answer(raw, chunked=False, streamed=True, kind="messages")
    assert (answer.prompt_tokens, answer.cached_tokens) == (4, None)


def test_a_message_with_thoughts_teaches_no_boundary() -> None:
    raw = claude_stream({"type": "thinking", "thinking": "hm, well"}, SPOKEN)
    assert read_answer(raw, chunked=False, streamed=True, kind="messages").message is None


def test_only_output_is_a_first_token_of_messages() -> None:
    opening, *events = claude_stream(SPOKEN).split(b"\n\n")
    assert not has_token(opening, "messages")
    assert [has_token(each, "messages") for each in events[:3]] == [False, True, True]
    assert has_token(claude_stream(USED), "messages")
    ping = named_event("ping") + named_event("error", error={"type": "overloaded_error", "message": "text_delta"})
    assert not has_token(ping, "messages")
    assert not has_finished(opening + ping, "messages")


WORDS = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "t1", "name": "read", "arguments": '{"path":"a"}'}


def response_stream(*items: dict[str, object], end: str = "completed") -> bytes:
    asked = {"id": "resp_1", "instructions": "delta", "tools": [], "text": {"format": {"type": "text"}}}
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 96}, "output_tokens": 7}
    raw = named_event("response.created", response={**asked, "status": "in_progress", "output": []})
    for item in items:
        raw += named_event("response.output_item.added", item={**item, "content": []})
        raw += named_event("response.output_text.delta", delta="Yes.")
        raw += named_event("response.output_item.done", item=item)
    ended = {**asked, "status": end, "output": list(items), "usage": usage}
    return raw + named_event(f"response.{end}", response=ended)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([WORDS], {"role": "assistant", "content": "Yes."}),
        ([WORDS, CALL], {"role": "assistant", "content": "Yes.", "tool_calls": CALLED}),
        ([CALL], {"role": "assistant", "tool_calls": CALLED}),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, WORDS], None),
        ([], None),
    ],
)
def test_a_response_is_read_as_the_next_turn_begins(
    streamed: bool, items: list[dict[str, object]], message: object
) -> None:
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 96}, "output_tokens": 7}
    whole = orjson.dumps({"id": "resp_1", "status": "completed", "output": items, "usage": usage})
    raw = response_stream(*items) if streamed else whole
    answer = read_answer(raw, chunked=False, streamed=streamed, kind="responses")
    assert answer.message == message
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (100, 96, 7)
    assert has_finished(raw, "responses")


def test_only_output_is_a_first_token_of_responses() -> None:
    opening, *events = response_stream(WORDS).split(b"\n\n")
    assert not has_token(opening, "responses")
    assert [has_token(each, "responses") for each in events[:2]] == [False, True]
    failed = named_event("response.failed", response={"id": "resp_1", "status": "failed"})
    assert not has_token(failed, "responses")
    assert not has_finished(opening + failed, "responses")


@given(st.sampled_from(["messages", "responses"]), st.booleans(), st.data())
def test_what_is_cut_off_of_an_answer_teaches_nothing_and_raises_nothing(
    kind: str, streamed: bool, data: st.DataObject
) -> None:
    whole = claude_stream(SPOKEN, USED) if kind == "messages" else response_stream(WORDS, CALL)
    end = data.draw(st.integers(0, len(whole) - 40))
    read_answer(whole[:end], chunked=False, streamed=streamed, kind=kind)
    read_answer(whole[end:], chunked=False, streamed=streamed, kind=kind)


def usage_of(kind: str, prompt: int, cached: int, completion: int) -> dict[str, object]:
    """The answer of an API with these counts."""
    if kind == "messages":
        usage = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": completion}
        return {"content": [], "usage": usage}
    if kind == "responses":
        details = {"cached_tokens": cached}
        usage = {"input_tokens": prompt, "input_tokens_details": details, "output_tokens": completion}
        return {"output": [], "usage": usage}
    if kind == "generate":
        return {"meta_info": {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}}
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "prompt_tokens_details": details, "completion_tokens": completion}
    return {"choices": [{"text": "a", "message": {"content": "a"}}], "usage": usage}


def test_of_a_generated_stream_only_the_last_event_is_read_however_many_lines_are_empty() -> None:
    first, last = (orjson.dumps({"text": "a", **usage_of("generate", *counts)}) for counts in ((9, 0, 1), (9, 4, 2)))
    raw = b"data: " + first + b"\n" * 1_000_000 + b"data: " + last + b"\r\n" * 3 + b"data: [DONE]\n\n"

    def took_s() -> float:
        began = time.thread_time()
        assert read_answer(raw, chunked=False, streamed=True, kind="generate").cached_tokens == 4
        return time.thread_time() - began

    assert least_s(took_s) <= OCCUPIED_S_MAX
    assert read_answer(b"\n\n", chunked=False, streamed=True, kind="generate").cached_tokens is None


@pytest.mark.parametrize("kind", ["chat", "completion", "messages", "responses", "generate"])
def test_counts_that_can_be_no_counts_are_none(kind: str) -> None:
    """An engine's bug, or a proxy's before it: one of them is learned from like any other."""

    def counts(*given: int) -> tuple[int | None, ...]:
        answer = read_answer(orjson.dumps(usage_of(kind, *given)), chunked=False, streamed=False, kind=kind)
        return answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens

    assert counts(100, 96, 7) == (100, 96, 7)
    assert counts(2**31 - 1, 0, 2**31 - 1) == (2**31 - 1, 0, 2**31 - 1)
    assert counts(2**31, 0, 2**31) == (None, 0, None)
    if kind != "messages":  # whose prompt has what was cached beside it
        assert counts(100, 101, 7) == (100, 100, 7)
        assert counts(100, 2**60, 7) == (100, None, 7)
