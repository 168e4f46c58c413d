"""What chats are to be tokenized where engines are SGLang's. `tests/engines` compares it with SGLang itself."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.boundaries import Chat
from ranvier_py.core.prompts.request_apis import CHAT, MESSAGES, RESPONSES, Api
from ranvier_py.core.tokenize.sglang_form import sglang_message
from ranvier_py.core.tokenize.tokenize_service import chat_of
from tests.core.prompts.test_request_apis import CHAT_TOOLS, CLAUDE_TOOLS, FLAT_TOOLS, SCHEMA, body_of, text, user


def test_tools_and_leads_of_each_api_are_printed_as_sglang_prints_them() -> None:
    """It keeps the order of a chat's client, and adds a member of its own; between texts of `system` it puts a line."""
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    reordered = {"parameters": SCHEMA, "name": "read", "x": 1}

    def chat(api: Api, tools: Sequence[object], **members: object) -> Chat:
        return chat_of(body_of(api, [user("hi")], tools=tools, **members), api, by_sglang=True)

    def printed(**found: object) -> str:
        return json.dumps([{"type": "function", "function": found, "defer_loading": None}])

    assert json.dumps(chat(CHAT, CHAT_TOOLS).tools) == printed(**function)
    for api, tools in ((MESSAGES, CLAUDE_TOOLS), (RESPONSES, FLAT_TOOLS)):
        assert json.dumps(chat(api, tools).tools) == printed(**function, strict=False)
    assert json.dumps(chat(CHAT, [{"function": reordered}]).tools) == printed(
        parameters=SCHEMA, name="read", description=None
    )
    bare = {"input_schema": SCHEMA, "name": "read"}
    assert json.dumps(chat(MESSAGES, [bare]).tools) == printed(
        name="read", description="", parameters=SCHEMA, strict=False
    )
    (deferred,) = chat(MESSAGES, [{**bare, "defer_loading": True}]).tools or ()
    assert (deferred["function"]["defer_loading"], deferred["defer_loading"]) == (True, True)
    (inner,) = chat(CHAT, [{"type": "function", "function": {**function, "defer_loading": True}}]).tools or ()
    assert (inner["function"]["defer_loading"], inner["defer_loading"]) == (True, None)
    flat = {"type": "function", "parameters": SCHEMA, "strict": True, "name": "read"}
    assert json.dumps(chat(RESPONSES, [flat]).tools) == printed(
        name="read", description=None, parameters=SCHEMA, strict=True
    )
    other = {"type": "function", "function": {"name": "write"}}
    for choice, left in (("auto", 2), ("none", 0), ({"type": "function", "function": {"name": "write"}}, 1)):
        assert len(chat(CHAT, [*CHAT_TOOLS, other], tool_choice=choice).tools or ()) == left
    assert not chat(MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}]).tools
    blocks = [text("Be"), text(""), {"type": "image"}, text("brief.")]
    assert [each["content"] for each in chat(MESSAGES, CLAUDE_TOOLS, system=blocks).messages] == ["Be\nbrief.", "hi"]
    assert [each["content"] for each in chat(MESSAGES, CLAUDE_TOOLS, system="Be").messages] == ["Be", "hi"]
    assert [each["content"] for each in chat(MESSAGES, CLAUDE_TOOLS).messages] == ["hi"]
    for empty in (" ", [text("")], [{"type": "image"}]):
        with pytest.raises(TemplateRefused):
            chat(MESSAGES, CLAUDE_TOOLS, system=empty)


@pytest.mark.parametrize(
    ("content", "labelled"),
    [
        ("Be brief.", "Developer instructions:\nBe brief."),
        ([text("Be"), text("brief.")], "Developer instructions:\nBe brief."),
        ([{"type": "image"}], [text("Developer instructions:"), {"type": "image"}]),
        ([{"type": "image"}, text("Be")], [{"type": "image"}, text("Developer instructions:\nBe")]),
        ([], "Developer instructions:"),
    ],
)
def test_sglang_makes_a_labelled_system_message_of_a_developers_input(content: object, labelled: object) -> None:
    message = {"role": "developer", "content": content}
    assert sglang_message(message, RESPONSES.name, parts=False) == {"role": "system", "content": labelled}
    assert sglang_message(message, CHAT.name, parts=False)["role"] == "developer"
    assert sglang_message(message, RESPONSES.name, parts=True)["role"] == "system"
