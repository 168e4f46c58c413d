"""The fake engine's answers by /v1/messages and /v1/responses, whole and as streams, in the shapes of vLLM. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import orjson

from cluster.engine.engine_api import ApiError, Reply

STOP_REASONS: Mapping[str, str] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def parsed(arguments: str) -> Any:
    """Return the arguments of a call; {} if the token limit cut them off."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


@dataclass(frozen=True, slots=True)
class ClaudeReply(Reply):
    """An answer of /v1/messages."""

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> bytes:
        block = {"type": "text", "text": text} if self.call is None else self._tool_use(parsed(text))
        ended = {"stop_reason": STOP_REASONS[finish_reason], "usage": claude_usage(usage)}
        return orjson.dumps({**self._start(), "content": [block], **ended})

    def announced(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        start = named_event("message_start", {"message": {**self._start(), "content": [], "usage": usage}})
        return start + named_event("ping", {})

    def failed(self, error: ApiError, *, stream: bool) -> bytes:
        body = error.body(claude=True)
        return b"event: error\ndata: " + body + b"\n\n" if stream else body

    def role_chunk(self) -> bytes:
        block = {"type": "text", "text": ""} if self.call is None else self._tool_use({})
        return self.announced() + named_event("content_block_start", {"index": 0, "content_block": block})

    def text_chunks(self, pieces: Sequence[str]) -> bytes:
        kind, key = ("text_delta", "text") if self.call is None else ("input_json_delta", "partial_json")
        deltas = ({"index": 0, "delta": {"type": kind, key: piece}} for piece in pieces if piece or not self.call)
        return b"".join(named_event("content_block_delta", delta) for delta in deltas)

    def last_chunks(self, text: str, finish_reason: str, usage: Mapping[str, Any] | None) -> bytes:  # noqa: ARG002
        delta = {"stop_reason": STOP_REASONS[finish_reason], "stop_sequence": None}
        return (
            named_event("content_block_stop", {"index": 0})
            + named_event("message_delta", {"delta": delta, "usage": claude_usage(usage or {})})
            + named_event("message_stop", {})
        )

    def _start(self) -> dict[str, Any]:
        known = {"id": self.request_id, "type": "message", "role": "assistant", "model": self.model}
        return {**known, "stop_reason": None, "stop_sequence": None}

    def _tool_use(self, given: Any) -> dict[str, Any]:
        assert self.call is not None
        return {"type": "tool_use", "id": self.call_id, "name": self.call.name, "input": given}


def claude_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage in Anthropic's shape, whose input tokens are without the cached ones."""
    details = usage.get("prompt_tokens_details")
    cached = details["cached_tokens"] if details else 0
    read = {"cache_read_input_tokens": cached} if details else {}
    return {"input_tokens": usage["prompt_tokens"] - cached, **read, "output_tokens": usage["completion_tokens"]}


@dataclass(frozen=True, slots=True)
class ResponseReply(Reply):
    """An answer of /v1/responses."""

    numbers: Iterator[int] = field(default_factory=count)  # of the events of one stream

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> bytes:
        return orjson.dumps(self._ended(text, finish_reason, usage))

    def announced(self) -> bytes:
        begun = {"response": self._response("in_progress")}
        return self._event("created", begun) + self._event("in_progress", begun)

    def failed(self, error: ApiError, *, stream: bool) -> bytes:
        response = {**self._response("failed"), "error": {"code": error.kind, "message": str(error)}}
        return self._event("failed", {"response": response}) if stream else orjson.dumps(response)

    def role_chunk(self) -> bytes:
        item = self._item("", "in_progress")
        chunks = [self.announced()]
        if self.call is None:
            item["content"] = []
        chunks.append(self._event("output_item.added", {"output_index": 0, "item": item}))
        if self.call is None:
            chunks.append(self._event("content_part.added", {**self._place(), "part": part_of("")}))
        return b"".join(chunks)

    def text_chunks(self, pieces: Sequence[str]) -> bytes:
        kind = "output_text.delta" if self.call is None else "function_call_arguments.delta"
        deltas = ({**self._place(), "delta": piece} for piece in pieces if piece or not self.call)
        return b"".join(self._event(kind, delta) for delta in deltas)

    def last_chunks(self, text: str, finish_reason: str, usage: Mapping[str, Any] | None) -> bytes:
        ended = self._ended(text, finish_reason, usage or {})
        if self.call is None:
            done = self._event("output_text.done", {**self._place(), "text": text})
            done += self._event("content_part.done", {**self._place(), "part": part_of(text)})
        else:
            done = self._event("function_call_arguments.done", {**self._place(), "arguments": text})
        done += self._event("output_item.done", {"output_index": 0, "item": ended["output"][0]})
        return done + self._event(ended["status"], {"response": ended})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return named_event(f"response.{kind}", {"sequence_number": next(self.numbers), **fields})

    def _ended(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if "prompt_tokens_details" in usage:
            counts["input_tokens_details"] = usage["prompt_tokens_details"]
        status = "incomplete" if finish_reason == "length" else "completed"
        return {**self._response(status), "output": [self._item(text, status)], "usage": counts}

    def _response(self, status: str) -> dict[str, Any]:
        known = {"id": self.request_id, "object": "response", "created_at": self.created, "model": self.model}
        return {
            **known,
            "status": status,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _place(self) -> dict[str, Any]:
        part = {"content_index": 0} if self.call is None else {}
        return {"item_id": self._item("", "")["id"], "output_index": 0, **part}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        if self.call is None:
            item = {"type": "message", "id": f"msg_{self.request_id}", "role": "assistant"}
            return {**item, "status": status, "content": [part_of(text)]}
        made = replace(self.call, arguments=text)
        item = {"type": "function_call", "id": f"fc_{self.request_id}", "call_id": self.call_id, "status": status}
        space = {"namespace": made.space} if made.space else {}
        return {**item, "name": made.name, "arguments": made.arguments, **space}


def part_of(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
