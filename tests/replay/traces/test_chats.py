"""Chats as text, through a real template and tokenizer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.io.tokenizer import EMBEDDED, ChatTokenizer
from ranvier_py.replay.engine.block_cache import chain_keys
from ranvier_py.replay.traces import chat_prefixes as prefixes
from ranvier_py.replay.traces import chats
from ranvier_py.replay.traces.chats import load
from ranvier_py.replay.traces.lines import json_lines
from ranvier_py.replay.traces.trace import Trace, TraceError, TraceOptions
from tests.replay.traces.given import all_are_sound, leading, load_once, loaded, shared, shares

SYSTEM = {"role": "system", "content": "You are an agent of an airline. " + "Be brief, be kind, be exact. " * 12}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Bern"}'}}
DIALOGUE = [
    SYSTEM,
    {"role": "user", "content": "Where is my attempt from Bern? " * 4},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "LX123 is late. " * 9},
    {"role": "assistant", "content": "It is late, by two hours or so. " * 5},
    {"role": "user", "content": "Thank you."},
    {"role": "assistant", "content": "You are welcome. " * 6},
    {"role": "user", "content": "###STOP###"},
]
MOVING = (
    "{%- for message in messages %}{%- if message.role == 'user' %}[INST] {% if loop.last or (loop.index0 == "
    "messages|length - 2) %}{{ messages[0].content }}\n\n{% endif %}{{ message.content }} [/INST]{%- elif message.role "
    "== 'assistant' %} {{ message.content }}</s>{%- endif %}{%- endfor %}"
)
"""As Mistral's templates do: the system text stands in the last question, and moves at every turn."""


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTokenizer, "load", load_once)


def message_of(text: str, count: int = 30) -> dict[str, str]:
    return {"role": "user", "content": f"{text} " * count}


def test_a_dialogue_is_one_request_for_each_answer(tmp_path: Path) -> None:
    trace = loaded(tmp_path, "chats", {"messages": DIALOGUE, "session_id": "s"})
    assert len(trace.requests) == 3
    assert not trace.timed
    first, second, third = trace.requests
    assert [request.session for request in trace.requests] == ["s"] * 3
    assert second.at - first.at == third.at - second.at == 5.0
    assert first.prompt_tokens < second.prompt_tokens < third.prompt_tokens


def test_a_turn_extends_the_one_before_with_its_answer(tmp_path: Path) -> None:
    """In blocks and in stops: what a router learned of one turn, it finds in the next."""
    requests = loaded(tmp_path, "chats", {"messages": DIALOGUE}).requests
    for before, after in pairwise(requests):
        assert after.blocks[: len(before.blocks)] == before.blocks
        assert tuple(after.chain[: len(before.chain)]) == tuple(before.chain)
        assert tuple(after.ends[: len(before.ends)]) == tuple(before.ends)
        answered = [key for key in before.chain if key.tokens > before.prompt_tokens]
        assert answered or before.answer_tokens < 16


def test_tokens_are_those_of_the_whole_prompt_as_sent(tmp_path: Path) -> None:
    """Incremental tokens must be the engine's: else its blocks are other ones."""
    other = [SYSTEM, message_of("a"), {"role": "assistant", "content": "b"}]
    lines = [{"messages": DIALOGUE}, {"messages": other}]
    trace = loaded(tmp_path, "chats", *lines)
    prompts = [DIALOGUE[:2], DIALOGUE[:4], DIALOGUE[:6], other[:2]]
    assert in_full(prompts, EMBEDDED) <= sent(trace)


def sent(trace: Trace) -> set[tuple[int, tuple[int, ...]]]:
    """Length and blocks of the prompts of a trace."""
    return {(request.prompt_tokens, request.blocks[: request.prompt_tokens // 16]) for request in trace.requests}


def in_full(prompts: list[Any], source: Path) -> set[tuple[int, tuple[int, ...]]]:
    """The same of these messages, by the tokens of the whole text."""
    templates, backend = ChatTokenizer.load(str(source)), Tokenizer.from_file(str(source / "tokenizer.json"))
    found = set()
    for messages in prompts:
        text = templates.render(Chat(messages), generation=True)
        ids = np.array(backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        found.add((len(ids), chain_keys(ids, 16)))
    return found


def test_a_line_with_an_answer_is_one_request(tmp_path: Path) -> None:
    line = {"messages": DIALOGUE[:6], "answer": "You are welcome.", "timestamp": 3, "model": "m"}
    [request] = loaded(tmp_path, "chats", line).requests
    assert request.model == "m"
    assert request.session == ""
    assert request.at == 0


def test_logged_turns_are_the_dialogue_they_came_from(tmp_path: Path) -> None:
    """One log of requests and one dialogue of the same messages give the same blocks and stops."""
    turns = [2, 4, 6]
    log = [{"messages": DIALOGUE[:turn], "response": DIALOGUE[turn], "session": 7} for turn in turns]
    logged, spoken = loaded(tmp_path, "chats", *log), loaded(tmp_path, "chats", {"messages": DIALOGUE})
    assert [request.session for request in logged.requests] == ["7"] * 3
    for one, other in zip(logged.requests, spoken.requests, strict=True):
        assert one.blocks == other.blocks
        assert one.chain == other.chain
        assert one.ends == other.ends
        assert (one.prompt_tokens, one.answer_tokens) == (other.prompt_tokens, other.answer_tokens)


def test_lines_of_one_session_are_requests_even_without_answers(tmp_path: Path) -> None:
    log = [{"messages": DIALOGUE[:turn], "session": "s"} for turn in (2, 4, 6)]
    trace = loaded(tmp_path, "chats", *log, answer_tokens=40)
    assert len(trace.requests) == 3
    assert {request.answer_tokens for request in trace.requests} == {40}
    assert [request.at - trace.requests[0].at for request in trace.requests] == [0.0, 5.0, 10.0]


@pytest.mark.parametrize(
    "answer",
    [
        "Fine.",
        {"role": "assistant", "content": "Fine."},
        {"content": "Fine."},
        {"choices": [{"message": {"role": "assistant", "content": "Fine."}}]},
    ],
)
def test_an_answer_is_a_text_a_message_or_a_response(tmp_path: Path, answer: Any) -> None:
    [plain] = loaded(tmp_path, "chats", {"messages": [message_of("a")], "answer": "Fine."}).requests
    [request] = loaded(tmp_path, "chats", {"messages": [message_of("a")], "answer": answer}).requests
    assert (request.blocks, request.answer_tokens) == (plain.blocks, plain.answer_tokens)


def test_models_and_tools_share_no_stops(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    line = {"messages": [message_of("a", 60)], "answer": "b"}
    requests = loaded(tmp_path, "chats", line, {**line, "model": "m"}, {**line, "tools": tools}).requests
    fingerprints = [{key.fingerprint for key in request.chain} for request in requests]
    assert not fingerprints[0] & fingerprints[1]
    assert not fingerprints[0] & fingerprints[2]
    names = [set(request.blocks) for request in requests]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("one", "two"),
    [(10.0, 12.5), (1_700_000_000_000, 1_700_000_002_500), ("2026-11-21T05:50:16Z", "2026-11-21T05:50:18.5+00:00")],
)
def test_stamps_are_seconds_milliseconds_or_iso(tmp_path: Path, one: Any, two: Any) -> None:
    lines = [{"messages": [message_of("a")], "answer": "b", "timestamp": stamp} for stamp in (two, one)]
    trace = loaded(tmp_path, "chats", *lines)
    assert trace.timed
    assert [request.at for request in trace.requests] == pytest.approx([0.0, 2.5])


def test_conversations_without_stamps_begin_within_the_window(tmp_path: Path) -> None:
    lines = [{"messages": DIALOGUE[:5]} for _ in range(20)]
    times = [request.at for request in loaded(tmp_path, "chats", *lines, window_s=30.0, turn_s=1.0).requests]
    assert times == sorted(times)
    assert 20 < max(times) <= 31
    assert times != [
        request.at for request in loaded(tmp_path, "chats", *lines, window_s=30.0, turn_s=1.0, seed=2).requests
    ]


def test_the_limit_takes_the_first_in_time(tmp_path: Path) -> None:
    lines = [{"messages": DIALOGUE} for _ in range(5)]
    whole, some = loaded(tmp_path, "chats", *lines), loaded(tmp_path, "chats", *lines, limit=4)
    assert [request.at for request in some.requests] == [request.at for request in whole.requests[:4]]
    assert [request.blocks for request in some.requests] == [request.blocks for request in whole.requests[:4]]


def test_a_template_that_moves_text_shares_what_its_tokens_share(tmp_path: Path) -> None:
    """With Mistral's, a next turn shares next to nothing: message by message it would seem to share all."""
    lines = {
        "messages": [
            SYSTEM,
            message_of("a", 60),
            {"role": "assistant", "content": "b " * 40},
            message_of("c"),
            DIALOGUE[4],
        ]
    }
    first, second = loaded(tmp_path, "chats", lines, chat_template=MOVING).requests
    common = next(at for at, (one, two) in enumerate(zip(first.blocks, second.blocks, strict=False)) if one != two)
    assert common * 16 < 0.3 * first.prompt_tokens
    assert not {key for key in first.chain if key.tokens > 32} & set(second.chain)


TEMPLATES = ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct", "microsoft-Phi-3.5-mini-instruct")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("answer", ["\n\nIt is late. ", " It is late. ", "</think>\nIt is late. ", ""])
def test_an_answer_that_history_writes_otherwise_names_no_prefix_that_engines_lack(
    tmp_path: Path, template: str, answer: str
) -> None:
    """What was generated runs into the words before it when it is read back: the next turn has other tokens there."""
    dialogue = [SYSTEM, message_of("a")]
    for number in range(3):
        dialogue += [{"role": "assistant", "content": answer + f"{number} " * 40}, message_of("b")]
    tokenizer, path = shared("tokenizers/qwen2.5"), shared(f"tokenizers/templates/{template}.jinja")
    lines = {"messages": dialogue}, {"messages": [*dialogue[:2], *dialogue[4:]]}
    trace = loaded(tmp_path, "chats", *lines, tokenizer=str(tokenizer), chat_template=str(path))
    requests = [request for request in trace.requests if request.session == "line 1"]
    assert len(requests) == 3
    for before, after in pairwise(requests):
        common = leading(set(before.blocks), after.blocks) * 16
        assert [key for key in before.chain if key.tokens > common] == []
        assert common + 32 > before.prompt_tokens


def test_a_dialogue_keeps_its_opening(tmp_path: Path) -> None:
    """It is what Continuum's ring hashes: another system text, or another model, is another key."""
    other = [{"role": "system", "content": "Be slow."}, *DIALOGUE[1:]]
    lines = [{"messages": DIALOGUE}, {"messages": other}, {"messages": DIALOGUE, "model": "m"}]
    keys = [request.opening for request in loaded(tmp_path, "chats", *lines).requests]
    assert len(keys) == 9
    assert all(keys)
    assert len(set(keys)) == 3


def test_forgotten_prefixes_cost_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"messages": [*DIALOGUE[:5], message_of(str(number)), DIALOGUE[6]]} for number in range(4)]
    expected = [request.blocks for request in loaded(tmp_path, "chats", *lines).requests]
    monkeypatch.setattr(prefixes, "PREFIXES_MAX", 2)
    assert [request.blocks for request in loaded(tmp_path, "chats", *lines).requests] == expected


@pytest.mark.parametrize(
    ("line", "states"),
    [
        ({"messages": []}, "found messages [], expected a list of 1 to 2048 messages"),
        ({"messages": "hello"}, "found messages 'hello'"),
        ({"messages": ["hello"]}, "found a message 'hello'"),
        ({"messages": [{"content": "a"}]}, "found a message {'content': 'a'}"),
        ({"messages": [message_of("a")], "answer": 5}, "found the answer 5, expected a text, a message"),
        ({"messages": [message_of("a")], "response": {"choices": [5]}}, "found the answer missing or null"),
        ({"messages": [message_of("a")], "tools": 5}, "found tools 5, expected a list"),
        ({"messages": [message_of("a")], "session": []}, "found session []"),
        ({"messages": [message_of("a")], "timestamp": 5}, "found a timestamp, expected one on every line, or on none"),
        ({"messages": [{"role": "user", "content": 5}]}, "found what the chat template refuses"),
        ({"transcript": 5, "queries": []}, "found transcript 5"),
        ({"transcript": "a", "queries": [{"q": 1}]}, "found the question {'q': 1}"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, line: Any, states: str) -> None:
    with pytest.raises(TraceError) as caught:
        loaded(tmp_path, "chats", {"messages": [message_of("a")]}, line)
    assert f"trace.jsonl:2: {states}" in str(caught.value)


def test_a_tokenizer_that_is_not_there_is_stated(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="can't be loaded"):
        loaded(tmp_path, "chats", {"messages": [message_of("a")]}, tokenizer=str(tmp_path))


@pytest.mark.slow
def test_the_published_dialogues_have_the_published_shares() -> None:
    """And a sample of them is tokenized as in full."""
    source = shared("tokenizers/qwen2.5")
    path = shared("traces/taubench_gpt4o_airline.jsonl.gz")
    trace = load(path, TraceOptions(tokenizer=str(source)))
    assert len(trace.requests) == 2454
    assert shares(trace) == pytest.approx((0.926, 0.671, 0.920), abs=0.005)
    all_are_sound(trace)
    prompts = []
    for line in list(json_lines(path))[::40]:
        messages = line.fields["messages"]
        prompts += [messages[:at] for at in range(1, len(messages)) if messages[at]["role"] == "assistant"][::3]
    assert len(prompts) >= 15
    assert in_full(prompts, source) <= sent(trace)


def test_questions_about_a_document_share_it(tmp_path: Path) -> None:
    queries = [{"q": f"What was message_of in part {number}?", "a": "Little. " * 9} for number in range(3)]
    lines = [{"doc_id": f"d{at}", "transcript": f"Speaker {at}: yes.\n" * 60, "queries": queries} for at in range(2)]
    trace = loaded(tmp_path, "chats", *lines)
    assert sorted(request.session for request in trace.requests) == ["d0"] * 3 + ["d1"] * 3
    one, two, _ = [request for request in trace.requests if request.session == "d0"]
    assert one.blocks[:20] == two.blocks[:20]
    assert len(set(one.blocks) & set(two.blocks)) * 16 > 0.8 * one.prompt_tokens


@pytest.mark.slow
def test_the_published_documents_are_tokenized_as_in_full() -> None:
    source, path = shared("tokenizers/llama3"), shared("traces/qmsum_doc_qa.jsonl.gz")
    trace = load(path, TraceOptions(tokenizer=str(source), limit=1))
    sessions = {request.session for request in trace.requests}
    prompts = [
        [
            {"role": "system", "content": chats.QUESTION_SYSTEM},
            {"role": "user", "content": f"{line.fields['transcript']}\n\nQuestion: {query['q']}"},
        ]
        for line in json_lines(path)
        for query in line.fields["queries"]
        if line.fields["doc_id"] in sessions
    ]
    assert sent(trace) <= in_full(prompts, source)
