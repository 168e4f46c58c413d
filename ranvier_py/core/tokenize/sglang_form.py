"""What SGLang gives to a chat template, as far as vLLM gives it something else (`prompts.templates`).

Sources: SGLang 0.5.23, `Tool` and `Function` in entrypoints/openai/protocol.py, parser/jinja_template_utils.py,
entrypoints/openai/responses_adapters.py, entrypoints/openai/serving_responses.py, entrypoints/anthropic/serving.py.
`tests/engines/test_sglang_chats.py` compares with these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier_py.core.errors import TemplateRefused
from ranvier_py.core.prompts.body_members import limited_tools, member_of
from ranvier_py.core.prompts.boundaries import Message
from ranvier_py.core.prompts.request_apis import is_kind, lead_of

OPTIONAL = ("strict", "defer_loading")
MEMBERS = ("description", "name", "parameters", *OPTIONAL)
"""All members of a function, in the order in which SGLang adds those that a client left out."""

LACKING: Mapping[str, Any] = {"name": None, "description": None, "parameters": None, "strict": False}
LACKING_OF: Mapping[str, Mapping[str, Any]] = {"messages": {**LACKING, "description": ""}, "responses": LACKING}
"""Members that SGLang itself adds to a tool in this order, by API; those of a chat's come in the client's order."""

DEVELOPER_LABEL = "Developer instructions:"


def sglang_tools(tools: Sequence[Any], choice: Any, api: str) -> list[Any]:
    """Return a chat's tools, those of functions only. A `tool_choice` of one tool excludes the others."""
    limited = limited_tools(choice)
    if limited == "none":
        return []
    found = [tool_as_dumped(tool, api) for tool in tools]
    name = member_of(member_of(limited, "function") or limited, "name")
    return [tool for tool in found if tool is not None and name in (None, tool["function"]["name"])]


def tool_as_dumped(tool: Any, api: str) -> dict[str, Any] | None:
    """Return a tool in the client's order, but for what SGLang itself puts first; None for what is no function."""
    function = member_of(tool, "function")
    if type(function) is not dict:
        return None
    # a tool of /v1/messages has one place for it, and SGLang hands it on in both of a chat's
    deferred = (function if api == "messages" else tool).get("defer_loading")
    function = {**LACKING_OF.get(api, {}), **function}
    names = (*[name for name in function if name in MEMBERS], *MEMBERS)
    found = {name: function.get(name) for name in names}
    if found["defer_loading"] is None:
        found["defer_loading"] = deferred
    found = {name: value for name, value in found.items() if value is not None or name not in OPTIONAL}
    return {"type": tool.get("type", "function"), "function": found, "defer_loading": deferred}


def sglang_lead(system: Any) -> Sequence[Message]:
    """Return `system` of /v1/messages as one message, with lines between its texts.

    Raises TemplateRefused where SGLang leaves it out.
    """
    blocks = [block.get("text") for block in system if is_kind(block, "text")] if type(system) is list else [system]
    texts = [text for text in blocks if type(text) is str and text]
    if not texts or (type(system) is str and not system.strip()):
        raise TemplateRefused("an empty system prompt")
    return lead_of("\n".join(texts))


def sglang_message(message: Message, api: str, parts: bool) -> Message:
    """Return a message of this API with its texts joined by blanks, where the template does not read `parts`.

    A developer's message of /v1/responses becomes the system's, with a label before its first text.
    """
    if api == "responses" and message.get("role") == "developer":
        message = {**message, "role": "system", "content": labelled(message.get("content"))}
    content = message.get("content")
    if type(content) is list and (message.get("role") == "tool" or not parts) and all(map(is_text, content)):
        return {**message, "content": " ".join(part["text"] for part in content)}
    return message


def labelled(content: Any) -> list[Any]:
    """Return the parts of a developer's content with the label before the first text."""
    found = content if type(content) is list else [{"type": "text", "text": content or ""}]
    for at, part in enumerate(found):
        if is_text(part):
            return [*found[:at], {"type": "text", "text": f"{DEVELOPER_LABEL}\n{part['text']}"}, *found[at + 1 :]]
    return [{"type": "text", "text": DEVELOPER_LABEL}, *found]


def is_text(part: Any) -> bool:
    return is_kind(part, "text") and type(part.get("text")) is str
