"""Decides which tools the fake engine calls: those that the user's last directives name, one after the other. Pure.

A directive `[call NAME {"argument": …}]` in a user's message asks for one call. Each call is made when the calls before
it have results; then the engine answers in words. So a test directs an agent through its user's words, and the agent's
sub-agent through directives in an argument that is a prompt. Besides, a `tool_choice` that demands a call gets one,
with the least arguments that the tool's schema allows. Calls are written as templates of Hermes and Qwen write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DIRECTIVE = re.compile(r"\[call (\S+) (?=\{)")

LEAST: Mapping[str, Any] = {"string": "x", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments`: JSON as templates write it. `space`: the namespace of the tool, if it has one."""

    name: str
    arguments: str
    space: str = ""

    @property
    def head(self) -> str:
        """The text of the call before its arguments."""
        return f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": '

    @property
    def text(self) -> str:
        """The call as it is generated, and as it is rendered in a history."""
        return f"{self.head}{self.arguments}}}\n</tool_call>"

    def in_chat(self, name: str) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`."""
        return {"id": name, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def next_call(messages: Sequence[Any], tools: Sequence[Any] | None, choice: object) -> ToolCall | None:
    """Return the call that this chat waits for; None if it waits for words."""
    functions = dict(functions_of(tools))
    if not functions or choice == "none" or kind_of(choice) == "none":
        return None
    found, done = asked_of(messages)
    if done < len(found):
        name, arguments = found[done]
        if name in functions:
            return ToolCall(name, as_rendered(arguments), str(functions[name].get("namespace") or ""))
    name = forced_name(choice, list(functions))
    if name in functions and not done:
        function = functions[name]
        schema = function.get("parameters") or {}
        return ToolCall(name, as_rendered(least_of(schema)), str(function.get("namespace") or ""))
    return None


def asked_of(messages: Sequence[Any]) -> tuple[list[tuple[str, Any]], int]:
    """Return the calls of the last user message that asks for any, and the number of tool results since that message;
    if no message asks for calls, since the user's last message."""
    roles = [message.get("role") for message in messages]
    users = [index for index, role in enumerate(roles) if role == "user"]
    for index in reversed(users):
        found = list(directives_of(text_of(messages[index].get("content"))))
        if found:
            return found, roles[index:].count("tool")
    return [], roles[users[-1] :].count("tool") if users else 0


def directives_of(text: str) -> Iterator[tuple[str, Any]]:
    """Yield names and arguments of directives. A directive inside another one's arguments is not one of this text."""
    decoder, at = json.JSONDecoder(), 0
    while (match := DIRECTIVE.search(text, at)) is not None:
        at = match.end()
        try:
            arguments, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            continue
        yield match[1], arguments


def text_of(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def functions_of(tools: Sequence[Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name, function) of a chat's tools."""
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"], function


def kind_of(choice: object) -> object:
    return choice.get("type") if isinstance(choice, dict) else choice


def forced_name(choice: object, names: Sequence[str]) -> str:
    """Return the tool that `tool_choice` demands, in any API's form; "" if it demands none."""
    if kind_of(choice) in ("required", "any"):
        return names[0]
    if isinstance(choice, dict):
        function = choice.get("function")
        return str((function if isinstance(function, dict) else choice).get("name") or "")
    return ""


def least_of(schema: Mapping[str, Any]) -> Any:
    """Return the least value that a JSON schema allows."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind in (None, "object"):
        properties = schema.get("properties") or {}
        return {name: least_of(properties.get(name) or {"type": "string"}) for name in schema.get("required") or ()}
    return LEAST.get(str(kind), "x")


def as_rendered(arguments: Any) -> str:
    """Write JSON as a template's `tojson` does."""
    return json.dumps(arguments, ensure_ascii=False)
