"""Which tool the lab's engines call: what the user's words ask for, in turn, or what `tool_choice` demands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.engine.agent_apis import chat_of_claude, chat_of_items
from cluster.engine.engine_text import ByteTokenizer
from cluster.engine.tool_calls import next_call

FIRST = '[call read {"path": "a"}]'
SECOND = '[call task {"prompt": "Look. [call read {\\"path\\": \\"b\\"}]"}]'
RESULT = {"role": "tool", "content": "done"}


def user(*lines: str) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join(lines)}


def tools(*names: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def called(messages: list[Any], names: tuple[str, ...] = ("read", "task"), choice: object = None) -> str:
    call = next_call(messages, tools(*names), choice)
    return f"{call.name} {call.arguments}" if call else ""


def test_calls_are_made_one_after_the_other_as_their_results_come() -> None:
    messages = [user("Read it.", FIRST, SECOND)]
    assert called(messages) == 'read {"path": "a"}'
    messages += [{"role": "assistant", "content": ""}, RESULT]
    assert called(messages).startswith("task ")
    assert called([*messages, RESULT]) == ""
    assert called([*messages, RESULT, user("And now?")]) == "", "what was asked for was done"
    assert called([*messages, RESULT, user("Again.", FIRST)]) == 'read {"path": "a"}'


def test_the_words_for_a_sub_agent_direct_the_sub_agent_alone() -> None:
    call = next_call([user(SECOND)], tools("read", "task"), None)
    assert call is not None
    assert call.name == "task"
    assert called([user(json.loads(call.arguments)["prompt"])]) == 'read {"path": "b"}'


@pytest.mark.parametrize("line", ["[call write {}]", "[call read {not JSON}]", "call read {}", "[call read]"])
def test_what_is_no_call_of_a_tool_that_is_there_is_answered_in_words(line: str) -> None:
    assert called([user(line)]) == ""
    assert called([user(line)], choice="required") == "read {}"


def test_a_chat_without_tools_or_that_forbids_them_gets_words() -> None:
    assert called([user(FIRST)], names=()) == ""
    assert called([user(FIRST)], choice="none") == ""
    assert called([user(FIRST)], choice={"type": "none"}) == ""


def test_a_call_is_rendered_as_it_was_generated_whichever_api_brings_it_back() -> None:
    words = ByteTokenizer()
    call = next_call([user(FIRST)], tools("read"), None)
    assert call is not None
    item = {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"path":"a"}'}
    block = {"type": "tool_use", "id": "c", "name": "read", "input": {"path": "a"}}
    bodies = [
        {"messages": [user("Hello"), {"role": "assistant", "content": None, "tool_calls": [call.in_chat("c")]}]},
        chat_of_claude({"messages": [user("Hello"), {"role": "assistant", "content": [block]}]}),
        chat_of_items({"input": [user("Hello"), item]}, ()),
    ]
    rendered = {words.render(body["messages"], None, {}, generation=False) for body in bodies}
    (text,) = rendered
    before = words.render([user("Hello")], None, {}, generation=True)
    assert text.startswith(before + call.text)


def test_words_and_calls_of_one_answer_are_rendered_alike_whichever_api_brings_them_back() -> None:
    words, both = ByteTokenizer(), ("a", "b")
    functions = [{"name": "read", "arguments": f'{{"path":"{path}"}}'} for path in both]
    calls = [{"id": "c", "type": "function", "function": function} for function in functions]
    blocks = [{"type": "tool_use", "id": "c", "name": "read", "input": {"path": path}} for path in both]
    items = [{"type": "function_call", "call_id": "c", **function} for function in functions]
    answer = {"role": "assistant", "content": "Let me see."}
    bodies = [
        {"messages": [user("Hello"), {**answer, "tool_calls": calls}]},
        chat_of_claude(
            {"messages": [user("Hello"), {**answer, "content": [{"type": "text", "text": "Let me see."}, *blocks]}]}
        ),
        chat_of_items({"input": [user("Hello"), answer, *items]}, ()),
    ]
    assert len({words.render(body["messages"], None, {}, generation=False) for body in bodies}) == 1


def test_a_tool_of_a_namespace_is_called_with_it() -> None:
    space = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]}
    body = chat_of_items({"input": [user("[call spawn {}]")], "tools": [space, {"type": "web_search"}]}, ())
    call = next_call(body["messages"], body["tools"], None)
    assert call is not None
    assert (call.name, call.space) == ("spawn", "agents")
