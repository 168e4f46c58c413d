"""The fake engine's /v1/messages and /v1/responses: turns their bodies into a chat's, and stores responses. Pure.

It shares no code with the router's reading of these APIs. Equal conversations are rendered to equal text, by which the
cache finds them. Like vLLM it stores responses in memory, except with `"store": false`, and knows only its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from cluster.engine.engine_api import ApiError, bad_request


def chat_of_claude(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of /v1/messages as a chat's body. Raises ApiError."""
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise bad_request("messages must be a list with at least one message", "messages")
    messages: list[Any] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": joined(fields["system"], "")})
    for turn in turns:
        blocks = turn["content"] if isinstance(turn["content"], list) else [{"type": "text", "text": turn["content"]}]
        messages += messages_of_blocks(turn["role"], blocks)
    return {**fields, "messages": messages, "tools": plain_tools(fields)}


def messages_of_blocks(role: str, blocks: Sequence[Any]) -> list[Any]:
    """Return a turn's messages: one for each tool result, then one for its other blocks and its calls."""
    messages: list[dict[str, Any]] = [
        {"role": "tool", "content": joined(block.get("content") or "", "\n")}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    calls = [call_of(block["name"], orjson.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    others = [block for block in blocks if block["type"] not in ("tool_result", "tool_use")]
    if others or calls or not messages:
        messages.append({"role": role, "content": "\n".join(map(words_of_block, others)), "tool_calls": calls})
    return messages


def call_of(name: str, arguments: bytes | str) -> dict[str, Any]:
    """Return a call as a chat's message has it."""
    text = arguments if isinstance(arguments, str) else arguments.decode()
    return {"type": "function", "function": {"name": name, "arguments": text}}


def words_of_block(block: Mapping[str, Any]) -> str:
    """Return what the template prints for a block."""
    if block["type"] == "text":
        return str(block["text"])
    return orjson.dumps({key: value for key, value in block.items() if key not in ("cache_control", "id")}).decode()


def joined(content: Any, line_end: str) -> str:
    return content if isinstance(content, str) else line_end.join(str(block.get("text", "")) for block in content)


def plain_tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools as the template gets them; those of a namespace one by one, with its name."""
    found = []
    for tool in fields.get("tools") or []:
        inner = tool["tools"] if tool.get("type") == "namespace" else [tool]
        space = {"namespace": tool.get("name")} if tool.get("type") == "namespace" else {}
        for each in inner:
            schema = each.get("input_schema", each.get("parameters"))
            function = {"name": each.get("name"), "description": each.get("description"), "parameters": schema}
            found.append({"type": "function", "function": {**function, **space}})
    return found or None


def chat_of_items(fields: Mapping[str, Any], before: Sequence[Any]) -> dict[str, Any]:
    """Return a body of /v1/responses as a chat's body, after the messages `before`. Raises ApiError."""
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_request("input must be a text or a list of items", "input")
    messages = [*before, *messages_of_items(items)]
    if fields.get("instructions"):
        messages.insert(0, {"role": "system", "content": fields["instructions"]})
    limit = fields.get("max_output_tokens")
    return {**fields, "messages": messages, "tools": plain_tools(fields), "max_tokens": limit}


def messages_of_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Make a message of each item; calls join the assistant's text before them, as in vLLM and when generated."""
    messages: list[dict[str, Any]] = []
    for item in items:
        message = message_of_item(item)
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def message_of_item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item["role"], "content": joined(item["content"], "\n")}
    if kind == "function_call_output":
        return {"role": "tool", "content": joined(item["output"], "\n")}
    if kind == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [call_of(item["name"], item["arguments"])]}
    return {"role": "assistant", "content": joined(item.get("content") or item.get("summary") or "", "\n")}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The conversation with its answer, its items as they came, and the response as its client got it."""

    messages: Sequence[Any]
    items: Sequence[Any]
    body: bytes

    def listed(self) -> bytes:
        """Return the answer to `input_items`."""
        return orjson.dumps({"object": "list", "data": self.items, "has_more": False})


class StoredResponses:
    """The responses that one process has stored, by id."""

    def __init__(self) -> None:
        self._kept: dict[str, StoredResponse] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, name: str) -> StoredResponse:
        """Return a stored response. Raises ApiError 404."""
        if name not in self._kept:
            raise ApiError(404, "NotFoundError", f"Response with id '{name}' not found.", "response_id")
        return self._kept[name]

    def keep(self, name: str, response: StoredResponse) -> None:
        self._kept[name] = response

    def forget(self) -> None:
        self._kept.clear()

    def delete(self, name: str) -> None:
        """Delete a stored response. Raises ApiError 404."""
        self[name]
        del self._kept[name]
