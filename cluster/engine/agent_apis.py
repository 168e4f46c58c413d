"""The fake engine's /v1/messages and /v1/responses: each body made a chat's, each answer in its API's shape. Pure.

It shares nothing with the router's own reading of them: what is equal here is rendered to equal text, and that is what
the cache goes by. Like vLLM it keeps responses in memory, unless they say `"store": false`, and knows none but its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from cluster.engine.engine_api import ApiError, Reply, bad_request


def chat_of_claude(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A body of /v1/messages as a chat's. Raises ApiError."""
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise bad_request("messages must be a list with at least one message", "messages")
    messages: list[Any] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": joined(fields["system"], "")})
    for turn in turns:
        blocks = turn["content"] if isinstance(turn["content"], list) else [{"type": "text", "text": turn["content"]}]
        results = [block for block in blocks if block["type"] == "tool_result"]
        others = [block for block in blocks if block["type"] != "tool_result"]
        messages += [{"role": "tool", "content": joined(block.get("content") or "", "\n")} for block in results]
        if others or not results:
            messages.append({"role": turn["role"], "content": "\n".join(map(words_of_block, others))})
    return {**fields, "messages": messages, "tools": plain_tools(fields)}


def words_of_block(block: Mapping[str, Any]) -> str:
    """What the template prints of it."""
    if block["type"] == "text":
        return str(block["text"])
    return orjson.dumps({key: value for key, value in block.items() if key not in ("cache_control", "id")}).decode()


def joined(content: Any, line_end: str) -> str:
    return content if isinstance(content, str) else line_end.join(str(block.get("text", "")) for block in content)


def plain_tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """As a template is given them."""
    found = []
    for tool in fields.get("tools") or []:
        schema = tool.get("input_schema", tool.get("parameters"))
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
        found.append({"type": "function", "function": function})
    return found or None


def chat_of_items(fields: Mapping[str, Any], before: Sequence[Any]) -> dict[str, Any]:
    """A body of /v1/responses as a chat's, after the messages `before`. Raises ApiError."""
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_request("input must be a text or a list of items", "input")
    messages = [*before, *map(message_of_item, items)]
    if fields.get("instructions"):
        messages.insert(0, {"role": "system", "content": fields["instructions"]})
    limit = fields.get("max_output_tokens")
    return {**fields, "messages": messages, "tools": plain_tools(fields), "max_tokens": limit}


def message_of_item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item["role"], "content": joined(item["content"], "\n")}
    if kind == "function_call_output":
        return {"role": "tool", "content": joined(item["output"], "\n")}
    if kind == "function_call":
        return {"role": "assistant", "content": f"{item['name']}({item['arguments']})"}
    return {"role": "assistant", "content": joined(item.get("content") or item.get("summary") or "", "\n")}


class StoredResponses:
    """Responses of one process: by id the conversation with its answer."""

    def __init__(self) -> None:
        self._messages: dict[str, Sequence[Any]] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def messages(self, name: str) -> Sequence[Any]:
        """Raises ApiError 404."""
        if name not in self._messages:
            raise ApiError(404, "NotFoundError", f"Response with id '{name}' not found.", "response_id")
        return self._messages[name]

    def keep(self, name: str, messages: Sequence[Any], answer: str) -> None:
        self._messages[name] = [*messages, {"role": "assistant", "content": answer}]

    def forget(self) -> None:
        self._messages.clear()

    def delete(self, name: str) -> None:
        """Raises ApiError 404."""
        self.messages(name)
        del self._messages[name]


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


@dataclass(frozen=True, slots=True)
class ClaudeReply(Reply):
    """An answer of /v1/messages."""

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> bytes:
        body = {**self._start(), "content": [{"type": "text", "text": text}], "stop_reason": stop_of(finish_reason)}
        return orjson.dumps({**body, "usage": claude_usage(usage)})

    def role_chunk(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        start = named_event("message_start", {"message": {**self._start(), "content": [], "usage": usage}})
        return start + named_event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})

    def text_chunks(self, pieces: Sequence[str]) -> bytes:
        deltas = ({"index": 0, "delta": {"type": "text_delta", "text": piece}} for piece in pieces)
        return b"".join(named_event("content_block_delta", delta) for delta in deltas)

    def last_chunks(self, finish_reason: str, usage: Mapping[str, Any] | None) -> bytes:
        end = {"delta": {"stop_reason": stop_of(finish_reason)}, "usage": claude_usage(usage or {})}
        return (
            named_event("content_block_stop", {"index": 0})
            + named_event("message_delta", end)
            + named_event("message_stop", {})
        )

    def _start(self) -> dict[str, Any]:
        return {"id": self.request_id, "type": "message", "role": "assistant", "model": self.model}


def stop_of(finish_reason: str) -> str:
    return "max_tokens" if finish_reason == "length" else "end_turn"


def claude_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """What was cached is no part of the input there."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


@dataclass(frozen=True, slots=True)
class ResponseReply(Reply):
    """An answer of /v1/responses."""

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> bytes:
        return orjson.dumps(self._ended(text, finish_reason, usage))

    def role_chunk(self) -> bytes:
        return named_event("response.created", {"response": self._response("in_progress")})

    def text_chunks(self, pieces: Sequence[str]) -> bytes:
        return b"".join(named_event("response.output_text.delta", {"delta": piece}) for piece in pieces)

    def last_chunks(self, finish_reason: str, usage: Mapping[str, Any] | None) -> bytes:
        ended = self._ended("", finish_reason, usage or {})
        return named_event(f"response.{ended['status']}", {"response": {**ended, "output": []}})

    def _ended(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": f"msg_{self.request_id}", "role": "assistant", "content": [part]}
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
        }
        status = "incomplete" if finish_reason == "length" else "completed"
        return {**self._response(status), "output": [item], "usage": counts}

    def _response(self, status: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": "response", "status": status, "model": self.model}
