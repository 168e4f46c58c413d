"""Bodies of every API are read as the chat that engines make of them: what moves in them and is not rendered breaks no
chain, and what is rendered never matches another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_apis import APIS, CHAT, MESSAGES, RESPONSES, Api, hoisted
from ranvier_py.core.prompts.request_body import PIECES_MAX, Prompt, PromptReader
from ranvier_py.core.prompts.templates import normalise
from ranvier_py.core.tokenize.tokenize_service import chat_of

KEY = b"k" * 32
MARK = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "role": {"type": "string"}}}
CLAUDE_TOOLS = [{"name": "read", "description": "Reads.", "input_schema": SCHEMA}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}]
FLAT_TOOLS = [{"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}]
Item = dict[str, Any]


def reader(**more: Any) -> PromptReader:
    texts, tokens = TextHasher(KEY), TokenHasher(KEY)
    return PromptReader(texts, tokens, PromptMemory(), identity="t", bytes_per_token=4.0, digest_seed=7, **more)


def body_of(api: Api, items: object, **members: object) -> bytes:
    """As clients of this API spell it: what leads comes first, tools follow the history."""
    tools = members.pop("tools", None)
    fields = {"model": "m", **members, api.history: items, **({"tools": tools} if tools else {})}
    return json.dumps(fields, separators=(",", ":")).encode()


def texts(prompt: Prompt) -> list[int]:
    """Fingerprints from the first message on."""
    return [text for _, _, text in prompt.end.chain() if text][::-1]


def read(api: Api, items: object, **members: object) -> list[int]:
    return texts(reader().chat(body_of(api, items, **members), api=api))


def user(content: object) -> Item:
    return {"role": "user", "content": content}


def text(words: str, **more: object) -> Item:
    return {"type": "text", "text": words, **more}


def use(number: int, **more: object) -> Item:
    return {"type": "tool_use", "id": f"t{number}", "name": "read", "input": {"path": f"{number}"}, **more}


def result(number: int, content: object, **more: object) -> Item:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": content, **more}


# --- what is one -----------------------------------------------------------------------------------------------------


SAME: dict[str, tuple[Api, Sequence[Item], Sequence[Item]]] = {
    "text and its only block": (MESSAGES, [user("hi")], [user([text("hi")])]),
    "a marked block": (MESSAGES, [user([text("hi", **MARK)])], [user("hi")]),
    "a marked call": (
        MESSAGES,
        [user("x"), {"role": "assistant", "content": [use(1, **MARK)]}],
        [user("x"), {"role": "assistant", "content": [use(1)]}],
    ),
    "a marked result": (MESSAGES, [user([result(1, "ok", **MARK)])], [user([result(1, [text("ok", **MARK)])])]),
    "a signature": (
        MESSAGES,
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "a"}, text("y")]}],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "b"}, text("y")]}],
    ),
    "the id of an item": (
        RESPONSES,
        [{"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        [user("hi")],
    ),
    "the state of an answer": (
        RESPONSES,
        [{"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "yes", "annotations": []}]}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}],
    ),
    "the id of a call": (
        RESPONSES,
        [{"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}],
        [{"type": "function_call", "id": "fc_2", "status": "in", "call_id": "c", "name": "f", "arguments": "{}"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_what_no_engine_renders_is_no_difference(case: str) -> None:
    api, one, other = SAME[case]
    assert read(api, one) == read(api, other)


DIFFERENT: dict[str, tuple[Api, Sequence[Item], Sequence[Item]]] = {
    "two images": (
        MESSAGES,
        [user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}])],
        [user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "Qg=="}}])],
    ),
    "arguments": (
        MESSAGES,
        [{"role": "assistant", "content": [use(1)]}],
        [{"role": "assistant", "content": [{**use(1), "input": {"path": "2"}}]}],
    ),
    "what was thought": (
        MESSAGES,
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, text("y")]}],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, text("y")]}],
    ),
    "blocks that nobody knows": (
        MESSAGES,
        [user([{"type": "document", "source": {"data": "a"}}])],
        [user([{"type": "document", "source": {"data": "b"}}])],
    ),
    "outputs": (
        RESPONSES,
        [{"type": "function_call_output", "call_id": "c", "output": "1"}],
        [{"type": "function_call_output", "call_id": "c", "output": "2"}],
    ),
    "items that are referred to": (
        RESPONSES,
        [{"type": "item_reference", "id": "msg_1"}],
        [{"type": "item_reference", "id": "msg_2"}],
    ),
    "reasoning that is sealed": (
        RESPONSES,
        [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "a"}],
        [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "b"}],
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_an_engine_may_render_is_a_difference(case: str) -> None:
    api, one, other = DIFFERENT[case]
    assert set(read(api, one)).isdisjoint(read(api, other))


def test_one_conversation_has_one_chain_whichever_api_it_came_by() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path":"1"}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        user("hi"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "ok"},
        user("and?"),
    ]
    turns = [user("hi"), {"role": "assistant", "content": [use(1)]}, user([result(1, "ok"), text("and?", **MARK)])]
    items = [
        user("hi"),
        {"type": "function_call", "call_id": "t1", "name": "read", "arguments": '{"path":"1"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "t1", "output": "ok", "id": "fco_1"},
        user([{"type": "input_text", "text": "and?"}]),
    ]
    blocks = [text("Be "), text("brief.", **MARK)]
    expected = read(CHAT, chat, tools=CHAT_TOOLS)
    assert len(expected) == 5
    assert read(MESSAGES, turns, system=blocks, tools=CLAUDE_TOOLS) == expected
    assert read(RESPONSES, items, instructions="Be brief.", tools=FLAT_TOOLS) == expected
    assert read(RESPONSES, "hi", instructions="Be brief.", tools=FLAT_TOOLS) == expected[:2]


def test_items_of_one_answer_are_one_message_as_they_are_by_the_other_apis() -> None:
    """Reasoning, text and calls, as engines write them and as vLLM puts them together again."""
    calls = [
        {"id": f"t{number}", "type": "function", "function": {"name": "read", "arguments": f'{{"path":"{number}"}}'}}
        for number in (1, 2)
    ]
    answer = {"role": "assistant", "reasoning_content": "hm", "content": "Let me see.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"t{number}", "content": f"out {number}"} for number in (1, 2)]
    thought = {"role": "assistant", "reasoning_content": "so", "tool_calls": calls[:1]}
    chat = [user("hi"), answer, *results, thought, results[0], {"role": "assistant", "content": "Done."}, user("and?")]
    flat = [
        {"type": "function_call", "call_id": f"t{number}", "name": "read", "arguments": f'{{"path":"{number}"}}'}
        for number in (1, 2)
    ]
    outputs = [
        {"type": "function_call_output", "call_id": f"t{number}", "output": f"out {number}"} for number in (1, 2)
    ]
    items = [
        user("hi"),
        {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        *flat,
        *outputs,
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}]},
        flat[0],
        outputs[0],
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        user("and?"),
    ]
    thinking = [{"type": "thinking", "thinking": "hm"}, text("Let me see."), use(1), use(2)]
    turns = [
        user("hi"),
        {"role": "assistant", "content": thinking},
        user([result(1, "out 1"), result(2, "out 2")]),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, use(1)]},
        user([result(1, "out 1")]),
        {"role": "assistant", "content": "Done."},
        user("and?"),
    ]
    expected = read(CHAT, chat)
    assert len(expected) == 8
    assert read(MESSAGES, turns) == expected
    assert read(RESPONSES, items) == expected
    assert RESPONSES.chat(items) == chat


APART: dict[str, list[Item]] = {
    "calls before a text": [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "Look."},
    ],
    "two texts": [{"role": "assistant", "content": "Look."}, {"role": "assistant", "content": "Look again."}],
    "two thoughts": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": words}]} for words in ("a", "b")
    ],
    "sealed reasoning": [
        {"type": "reasoning", "summary": [], "encrypted_content": "a"},
        {"role": "assistant", "content": "Look."},
    ],
    "another role": [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I do."}],
    "an item that nobody knows": [{"type": "strange"}, {"role": "assistant", "content": "Look."}],
}


@pytest.mark.parametrize("case", APART)
def test_items_in_an_order_of_which_no_engine_makes_one_answer_stay_apart(case: str) -> None:
    assert len(RESPONSES.chat(APART[case])) == 2


def test_calls_of_two_namespaces_are_two_calls() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert set(read(RESPONSES, [call])).isdisjoint(read(RESPONSES, [{**call, "namespace": "mcp"}]))


def test_a_conversation_is_tokenized_as_the_chat_that_engines_make_of_it() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path":"1"}'}}
    messages: list[Item] = [
        {"role": "system", "content": "Be brief."},
        user("hi"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        user("and?"),
    ]
    turns = [
        user("hi"),
        {"role": "assistant", "content": [text("Let me see."), use(1, **MARK)]},
        user([result(1, [text("a"), text("b", **MARK)]), text("and?")]),
    ]
    chats = [
        chat_of(body_of(CHAT, messages, tools=CHAT_TOOLS)),
        chat_of(body_of(MESSAGES, turns, system=[text("Be "), text("brief.")], tools=CLAUDE_TOOLS), MESSAGES),
    ]
    plain = [([normalise(message, False) for message in chat.messages], chat.tools) for chat in chats]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("members", [{"system": "Be long."}, {"tools": CLAUDE_TOOLS}, {"cache_salt": "a"}])
@pytest.mark.parametrize("behind", [False, True])
def test_what_leads_decides_every_boundary_wherever_it_stands(members: Item, behind: bool) -> None:
    growing = reader()

    def fingerprints(turns: int, more: Item) -> list[int]:
        items = [user(f"turn {number}") for number in range(turns)]
        fields = {"model": "m", "messages": items, **more} if behind else {"model": "m", **more, "messages": items}
        prompt = growing.chat(json.dumps(fields).encode(), api=MESSAGES)
        growing.remember(prompt)
        return texts(prompt)

    one, other = {"system": "Be brief."}, {"system": "Be brief.", **members}
    for turns in range(1, 5):
        assert set(fingerprints(turns, one)).isdisjoint(fingerprints(turns, other))
    assert growing.memory.counters.found == (0 if behind else 6), "equal bytes with other members behind are read anew"
    assert fingerprints(6, one) == read(MESSAGES, [user(f"turn {number}") for number in range(6)], **one)


# --- conversations as agents send them -------------------------------------------------------------------------------


def agent_turns(turns: int) -> list[list[Item]]:
    """Histories of a coding agent that marks its last two items, for which it makes a list of what was text."""
    history: list[Item] = [user("look at this")]
    found = []
    for number in range(turns):
        plain = [*history]
        marked = [as_marked(item) for item in plain[-2:]]
        found.append([*plain[:-2], *marked])
        history += [
            {"role": "assistant", "content": [text(f"step {number}"), use(number)]},
            user([result(number, f"output {number}"), text(f"reminder {number}")])
            if number % 2
            else user([result(number, [text(f"output {number}")], is_error=True)]),
        ]
    return found


def as_marked(item: Item) -> Item:
    content = item["content"]
    blocks = [text(content)] if isinstance(content, str) else [*content]
    return {**item, "content": [*blocks[:-1], {**blocks[-1], **MARK}]}


def codex_turns(turns: int) -> list[list[Item]]:
    """Histories of an agent of the other API: each item has an id, calls and results are items."""
    history: list[Item] = [
        {"type": "message", "id": "msg_0", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
    ]
    found = []
    for number in range(turns):
        found.append([*history])
        history += [
            {"type": "reasoning", "id": f"rs_{number}", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "id": f"fco_{number}", "call_id": f"c{number}", "output": "out"},
        ]
    return found


@pytest.mark.parametrize(("api", "turns"), [(MESSAGES, agent_turns(9)), (RESPONSES, codex_turns(9))])
def test_each_turn_of_an_agent_continues_the_whole_one_before(api: Api, turns: list[list[Item]]) -> None:
    growing = reader()
    members: Item = {"tools": CLAUDE_TOOLS, "stream": True}
    if api is MESSAGES:
        members["system"] = [text("You are an agent.", **MARK)]
    before: list[int] = []
    for items in turns:
        prompt = growing.chat(body_of(api, items, **members), api=api)
        assert (prompt.kind, prompt.api, prompt.stream) == ("chat", api.name, True)
        assert texts(prompt)[: len(before)] == before
        assert texts(prompt) == read(api, items, **members)
        before = texts(prompt)
        growing.remember(prompt)
    assert len(before) >= 2 * len(turns)
    assert growing.memory.counters.found >= len(turns) - 3, "the history is found by its bytes, marks or not"


@pytest.mark.parametrize("marks", [1, 2])
@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_history_is_found_whole_where_marks_have_moved_on(
    marks: int, is_list: bool, separators: tuple[str, str]
) -> None:
    """Its last items come in other bytes, and are read again: that they are known shows then."""
    words = 'rules, and a "quote", [a list] and {"type":"text"}'
    growing, history, before = reader(), [user(words), {"role": "assistant", "content": "Yes."}] * 2, 0
    for number in range(5):
        history += [user(f"question {number}")]
        plain = [{**item, "content": [text(item["content"])]} if is_list else item for item in history]
        items = [*plain[:-marks], *map(as_marked, plain[-marks:])]
        body = json.dumps({"model": "m", "system": "s", "messages": items}, separators=separators).encode()
        prompt = growing.chat(body, api=MESSAGES)
        assert texts(prompt) == read(MESSAGES, history, system="s")
        assert prompt.base.messages == before
        before = prompt.end.messages
        growing.remember(prompt)
        history += [{"role": "assistant", "content": f"answer {number}"}]


def test_a_system_prompt_that_chats_share_is_remembered_for_all_of_them_with_its_tokens() -> None:
    growing = reader()
    one, other = (
        growing.chat(body_of(MESSAGES, [user(words)], system="You are brief."), api=MESSAGES) for words in ("hi", "ho")
    )
    assert one.end.first is other.end.first
    assert one.end is not other.end


# --- never a false match ---------------------------------------------------------------------------------------------


WORDS = st.sampled_from(["a", "b", "ab", "", "Tool", '"role"'])
BLOCK = st.one_of(
    st.builds(text, WORDS),
    st.builds(use, st.integers(0, 1)),
    st.builds(result, st.integers(0, 1), WORDS),
    st.builds(lambda words: {"type": "thinking", "thinking": words}, WORDS),
    st.builds(lambda words: {"type": "strange", "words": words}, WORDS),
)
TURN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system"]),
    st.one_of(WORDS, st.lists(BLOCK, max_size=3)),
)
PART = st.builds(lambda kind, words: {"type": kind, "text": words}, st.sampled_from(["input_text", "strange"]), WORDS)
ITEM = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "developer"]),
        st.one_of(WORDS, st.lists(PART, max_size=2)),
    ),
    st.builds(lambda words: {"type": "function_call", "call_id": "c", "name": words, "arguments": "{}"}, WORDS),
    st.builds(lambda words: {"type": "function_call_output", "call_id": "c", "output": words}, WORDS),
    st.builds(
        lambda words: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": words}]},
        st.sampled_from(["a", "b"]),  # none is an empty message, whoever has it
    ),
    st.builds(lambda words: {"type": "strange", "words": words}, WORDS),
)


def rendered_block(block: Any, role: str) -> list[tuple[str, str, str]]:
    """What an engine renders of one block of /v1/messages: (role, kind, words), each on its own."""
    kind = block["type"]
    if kind == "tool_result" and role == "user":
        return [("tool", block["tool_use_id"], block["content"])]
    if kind == "tool_use":
        return [(role, "call", json.dumps([block["id"], block["name"], block["input"]]))]
    if kind == "thinking":
        return [(role, "thinking", block["thinking"])]
    return [(role, kind, block["text"] if kind == "text" else json.dumps(block))]


def rendered_turn(item: Item) -> list[Any]:
    """The messages of one item, as plainly as can be: results first; thoughts are one text, so are calls a list."""
    role, content = item["role"], item["content"]
    blocks = [text(content)] if isinstance(content, str) else content
    spoken = [one for block in blocks for one in rendered_block(block, role)]
    results = [("message", [one]) for one in spoken if one[0] == "tool"]
    thoughts = "".join(words for _, kind, words in spoken if kind == "thinking")
    calls = [one for one in spoken if one[1] == "call"]
    others = [one for one in spoken if one[0] != "tool" and one[1] not in ("call", "thinking")]
    if others == [(role, "text", "")]:
        others = []
    if not (others or calls or thoughts) and results:
        return results if all(one[0] == "tool" for one in spoken) else [*results, ("message", [role])]
    return [*results, ("message", [role, thoughts, calls, others])]


def rendered_item(item: Item) -> list[Any]:
    kind = item.get("type", "message")
    if kind == "message":
        content = item["content"]
        parts = [("input_text", content)] if isinstance(content, str) else [(p["type"], p["text"]) for p in content]
        return [("message", item["role"], [] if parts == [("input_text", "")] else parts)]
    if kind == "reasoning":
        return [(kind, item["content"][0]["text"])]
    return [(kind, json.dumps(item))]


def answers(rendered: Sequence[Any]) -> list[Any]:
    """Runs of what one answer may be, as plainly as can be: each piece goes behind what is less far."""
    found: list[list[Any]] = []
    for each in rendered:
        is_spoken = each[0] == "message" and each[1] == "assistant"
        place = 1 if is_spoken else {"reasoning": 0, "function_call": 2}.get(each[0], -1)
        if found and place >= 0 and (place > found[-1][0] >= 0 or place == found[-1][0] == 2):
            found[-1] = [place, *found[-1][1:], each]
        else:
            found.append([place, each])
    silence = ("message", "assistant", [])  # beside something else it is nothing
    return [[each for each in run[1:] if each != silence or len(run) == 2] for run in found]


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(st.lists(TURN, min_size=1, max_size=5), st.lists(TURN, min_size=1, max_size=5))
def test_two_conversations_of_messages_share_no_boundary_beyond_what_an_engine_renders_alike(
    one: list[Item], other: list[Item]
) -> None:
    plain = [[each for item in items for each in rendered_turn(item)] for items in (one, other)]
    shared = common(read(MESSAGES, one), read(MESSAGES, other))
    assert shared <= common(*plain)
    assert not set(read(MESSAGES, one)[shared:]) & set(read(MESSAGES, other)[shared:])
    assert read(MESSAGES, one + other)[: len(read(MESSAGES, one))] == read(MESSAGES, one)


@given(st.lists(ITEM, min_size=1, max_size=5), st.lists(ITEM, min_size=1, max_size=5))
def test_two_conversations_of_responses_share_no_boundary_beyond_what_an_engine_renders_alike(
    one: list[Item], other: list[Item]
) -> None:
    plain = [answers([each for item in items for each in rendered_item(item)]) for items in (one, other)]
    shared = common(read(RESPONSES, one), read(RESPONSES, other))
    assert shared == common(*plain)
    assert not set(read(RESPONSES, one)[shared:]) & set(read(RESPONSES, other)[shared:])


@given(st.lists(TURN, min_size=1, max_size=9), st.data())
def test_a_conversation_of_messages_read_turn_by_turn_has_the_chain_of_the_whole(
    items: list[Item], data: st.DataObject
) -> None:
    growing = reader()
    for end in sorted(data.draw(st.sets(st.integers(1, len(items)), max_size=4)) | {len(items)}):
        prompt = growing.chat(body_of(MESSAGES, items[:end], system="s", tools=CLAUDE_TOOLS), api=MESSAGES)
        assert texts(prompt) == read(MESSAGES, items[:end], system="s", tools=CLAUDE_TOOLS)
        growing.remember(prompt)


@given(st.data())
def test_a_conversation_of_responses_read_turn_by_turn_has_the_chain_of_the_whole(data: st.DataObject) -> None:
    """Also where a turn ends in the middle of an answer, which the next one completes."""
    items = data.draw(st.lists(ITEM, min_size=1, max_size=9))
    growing = reader()
    for end in sorted(data.draw(st.sets(st.integers(1, len(items)), max_size=4)) | {len(items)}):
        prompt = growing.chat(body_of(RESPONSES, items[:end], instructions="s", tools=FLAT_TOOLS), api=RESPONSES)
        assert texts(prompt) == read(RESPONSES, items[:end], instructions="s", tools=FLAT_TOOLS)
        growing.remember(prompt)


# --- system messages that a template renders first -------------------------------------------------------------------


def hoisting_read(api: Api, items: object, **members: object) -> list[int]:
    return texts(reader(hoists_system=True).chat(body_of(api, items, **members), api=api))


SYSTEM = {"role": "system", "content": "1,000 tokens left"}


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES])
def test_a_system_message_in_mid_conversation_leads_where_the_template_has_it_so(api: Api) -> None:
    before = [user("hi"), {"role": "assistant", "content": "Hello."}, user("so?")]
    after = [{"role": "assistant", "content": "Yes."}, user("and?")]
    late = [*before, SYSTEM, *after]
    assert hoisting_read(api, late) == hoisting_read(api, [SYSTEM, *before, *after])
    assert set(hoisting_read(api, late)).isdisjoint(hoisting_read(api, before)), "no prefix to the engine"
    assert read(api, late)[:3] == read(api, before), "elsewhere it stays where it is"
    assert hoisting_read(api, [*before, *after]) == read(api, [*before, *after])


@given(st.sampled_from([CHAT, MESSAGES, RESPONSES]), st.data())
def test_a_conversation_with_late_system_messages_read_turn_by_turn_has_the_chain_of_the_whole(
    api: Api, data: st.DataObject
) -> None:
    kind = st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "system"]),
        st.sampled_from(["a", "b"]),
    )
    items = data.draw(st.lists(kind, min_size=1, max_size=9))
    growing = reader(hoists_system=True)
    for end in sorted(data.draw(st.sets(st.integers(1, len(items)), max_size=4)) | {len(items)}):
        prompt = growing.chat(body_of(api, items[:end]), api=api)
        assert texts(prompt) == hoisting_read(api, items[:end])
        assert texts(prompt) == hoisting_read(api, hoisted(items[:end]))
        growing.remember(prompt)


def test_bytes_of_one_api_are_never_taken_for_those_of_another() -> None:
    growing = reader()
    items = [user([result(1, "ok")]), user("so?"), user("and?")]
    for api in (MESSAGES, CHAT, MESSAGES):
        prompt = growing.chat(body_of(api, items), api=api)
        assert texts(prompt) == read(api, items)
        growing.remember(prompt)
    assert set(read(MESSAGES, items)).isdisjoint(read(CHAT, items))


@pytest.mark.parametrize("before", [True, False])
def test_a_turn_whose_history_an_engine_keeps_is_no_prefix_of_anything(before: bool) -> None:
    growing = reader()
    plain: Item = {"model": "m", "input": [user("hi"), user("so?")]}
    stored = {"previous_response_id": "resp_1"}
    growing.remember(growing.chat(json.dumps(plain).encode(), api=RESPONSES))
    whole = {**stored, **plain} if before else {**plain, **stored}
    for _ in range(2):
        prompt = growing.chat(json.dumps(whole).encode(), api=RESPONSES)
        assert (prompt.kind, prompt.unread) == ("opaque", "stored")
        growing.remember(prompt)


# --- what is too much, or makes no sense -----------------------------------------------------------------------------


def test_a_turn_of_countless_results_is_routed_by_load() -> None:
    blocks = [result(1, "x")] * (PIECES_MAX + 1)
    assert reader().chat(body_of(MESSAGES, [user(blocks)]), api=MESSAGES).unread == "messages"
    nested = [user([result(1, [text("x")] * PIECES_MAX)])]
    assert reader().chat(body_of(MESSAGES, nested), api=MESSAGES).unread == "messages"
    few = [user([result(number, "x" * 200) for number in range(100)])]
    assert reader().chat(body_of(MESSAGES, few), api=MESSAGES).end.messages == 100


STRANGE = [None, 5, "text", [], {}, [[]], [{}], [None], [5], ["text"], {"type": "text"}, [{"type": "text", "text": 5}],
    [{"type": "tool_use"}], [{"type": "tool_result", "content": 5}], [{"type": "image", "source": 5}],
    [{"type": "image", "source": {"type": "base64", "data": 5}}], [{"type": ["text"]}]]  # fmt: skip


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("value", STRANGE, ids=json.dumps)
def test_whatever_json_stands_anywhere_in_a_body_is_read_or_passed_on(api: Api, value: object) -> None:
    kinds = ("message", "function_call", "function_call_output", "reasoning", "item_reference", "other", None, [], 5)
    members = ("content", "output", "summary", "arguments", "name", "id", "call_id", "role", "type")
    items: list[Any] = [{"role": "user", "content": value}, {"role": "assistant", "content": [value]}, {"role": value}]
    items += [{"type": kind, member: value} for kind in kinds for member in members]
    for item in items:
        assert reader().chat(body_of(api, [item]), api=api).kind == "chat"
    for member in ("tools", "system", "instructions", api.history):
        whole = {"model": "m", api.history: [user("hi")], member: value}
        assert reader().chat(json.dumps(whole).encode(), api=api).kind in ("chat", "opaque")
