"""Reads answers beside the relay: when the first token came, what the model generated, what the engine counted.

The relay passes bytes on and never waits for this. `answer_reader` asks `has_token` and `has_word` until there are
words; `read_answer` reads the copy of a finished answer, off the event loop: with one regular expression if the stream
is plain text, event by event if it is not. From an answer that cannot be read nothing is learned, and nothing fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ranvier_py.core.answers.answer_events import UNSEEN, AnswerEvent, event_at
from ranvier_py.core.answers.chunked import unchunked
from ranvier_py.core.prompts.request_apis import MESSAGES, RESPONSES

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # before some answers

CHAT_TOKEN = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|arguments)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{'
)
FIRST_TOKEN = {
    "messages": re.compile(rb'"type"\s*:\s*"(?:(?:text|thinking|input_json)_delta|tool_use)"'),
    "responses": re.compile(rb'"type"\s*:\s*"(?:response\.[a-z_]+(?:\.[a-z_]+)?\.delta|function_call)"'),
}
"""By API; CHAT_TOKEN for the others. Engines open a stream with an empty role chunk, some before the prefill is done,
so only output proves the prefill."""

UNSEEN_FORMS = [form for each in UNSEEN for form in (each.encode(), each.encode("unicode_escape"))]  # JSON has either
WORD = rb'"(?:%b)*+(?:[^"\\]|\\[^nrt])' % b"|".join(map(re.escape, dict.fromkeys(UNSEEN_FORMS)))
"""The beginning of a text of which there is anything to be seen."""
CHAT_WORD = re.compile(
    rb'"(?:content|reasoning|reasoning_content|arguments)"\s*:\s*%b|"tool_calls"\s*:\s*\[\s*\{' % WORD
)
FIRST_WORD = {
    "completion": re.compile(rb'"choices"\s*:\s*\[\s*\{[^{}]*?"text"\s*:\s*%b' % WORD),
    "generate": re.compile(rb'data: ?\{"text"\s*:\s*%b' % WORD),
    "messages": re.compile(
        rb'"delta"\s*:\s*\{[^{}]*?"(?:text|thinking|partial_json)"\s*:\s*%b|"type"\s*:\s*"tool_use"' % WORD
    ),
    "responses": re.compile(rb'"delta"\s*:\s*%b|"type"\s*:\s*"function_call"' % WORD),
}
"""By API; CHAT_WORD for the others. In nearly all first events with output."""

CHAT_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
FINISHED = {
    "messages": re.compile(rb'"stop_reason"\s*:\s*"'),
    "generate": re.compile(rb'"finish_reason"\s*:\s*[{"]'),
    "responses": re.compile(rb'"(?:type"\s*:\s*"response\.|status"\s*:\s*")(?:completed|incomplete)"'),
}
"""By API, CHAT_FINISHED for the others. In the last event of every choice, message or response; null before it."""

BETWEEN_EVENTS = re.compile(rb"(?:\n\r?\n|\r\r)[\r\n]*")  # an engine may send a million empty lines
STRING = rb'"((?:[^"\\]++|\\.)*+)"'  # possessive: no backtracking into what was matched
DELTA_CONTENT = re.compile(rb'"delta"\s*:\s*\{[^{}]*?"content"\s*:\s*' + STRING)
CHUNK_TEXT = re.compile(rb'"text"\s*:\s*' + STRING)
NOT_PLAIN = (b'"tool_calls"', b'"reasoning', b'"function_call"', b'"index":1', b'"index": 1')
"""Marks of a stream that has to be read event by event. An index above 0 means several choices or tools."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one finished answer contains. `message` is the assistant message as a client will send it back in the next
    turn, or None if the next prompt will not contain it as it was generated (several choices, reasoning, cut off,
    unreadable). `text` is its text. The counts are the engine's, or None."""

    message: Mapping[str, Any] | None = None
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


NOTHING = Answer()

Counts = tuple[int | None, int | None, int | None]
"""Prompt, cached and completion tokens; None for what an engine did not count."""

COUNT_END = 1 << 31
"""A count from here on is not believed: the sum of two counts must fit the 32 bits of a position on the wire."""


def has_finished(data: bytes, api: str) -> bool:
    """Whether an answer has a finish reason; one that is an error and nothing else has none."""
    return FINISHED.get(api, CHAT_FINISHED).search(data) is not None


def has_token(data: bytes, api: str = "chat") -> bool:
    """Whether this piece of a stream has generated output."""
    return FIRST_TOKEN.get(api, CHAT_TOKEN).search(data) is not None


def has_word(data: bytes, api: str) -> bool:
    """Whether this piece of a stream plainly has output that is more than white space."""
    return FIRST_WORD.get(api, CHAT_WORD).search(data) is not None


def read_answer(raw: bytes, *, chunked: bool, streamed: bool, kind: str) -> Answer:
    """Read a complete body as relayed. `kind` is "completion" or the API of a chat. Never raises."""
    try:
        body = (unchunked(raw) if chunked else raw).removeprefix(BYTE_ORDER_MARK)
        if kind == "messages":
            return read_turn(merged_turn(body) if streamed else orjson.loads(body))
        if kind == "generate":
            return read_generated(last_event(body) if streamed else orjson.loads(body))
        if kind == "responses":
            return read_response(merged_response(body) if streamed else orjson.loads(body))
        if streamed:
            return read_stream(body, kind)
        return read_object(orjson.loads(body), kind)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return NOTHING


def read_object(body: Mapping[str, Any], kind: str) -> Answer:
    """Read an answer that came as one JSON object."""
    choices = body["choices"]
    usage = read_usage(body.get("usage"))
    if len(choices) != 1:
        return Answer(None, "", *usage)
    if kind != "chat":
        return Answer(None, choices[0]["text"] or "", *usage)
    message = choices[0]["message"]
    return Answer(as_history(message), message.get("content") or "", *usage)


def as_history(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the message as the next turn will carry it; None if it has reasoning, which next turns leave out."""
    if message.get("reasoning_content") or message.get("reasoning"):
        return None
    kept = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept if len(kept) > 2 or kept["content"] else None


def read_stream(body: bytes, kind: str) -> Answer:
    """Read an answer that came as server-sent events."""
    usage = stream_usage(body)
    pattern = DELTA_CONTENT if kind == "chat" else CHUNK_TEXT
    if not any(mark in body for mark in NOT_PLAIN):
        text = orjson.loads(b'"' + b"".join(pattern.findall(body)) + b'"')
        return Answer(as_history({"content": text}) if kind == "chat" else None, text, *usage)
    if kind != "chat":
        return Answer(None, "", *usage)
    message = merged_deltas(body)
    return Answer(message and as_history(message), message["content"] if message else "", *usage)


def stream_events(body: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of all events. Raises ValueError for one that is no object."""
    return objects_of(BETWEEN_EVENTS.split(body))


def objects_of(events: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    for event in map(AnswerEvent.of, events):
        if event.fields is not None:
            yield event.fields
        elif event.data.strip() not in (b"", b"[DONE]"):
            raise ValueError("an event that is no object")


def merged_deltas(body: bytes) -> dict[str, Any] | None:
    """Return the message that the deltas of one choice add up to; None if there are several choices."""
    message: dict[str, Any] = {"content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for event in stream_events(body):
        for choice in event.get("choices", ()):
            if choice.get("index", 0) != 0:
                return None
            delta = choice.get("delta") or {}
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for piece in delta.get("tool_calls") or ():
                merge_call(calls.setdefault(piece.get("index", 0), {"function": {"name": "", "arguments": ""}}), piece)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def merge_call(call: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add one delta of a tool call to the call so far."""
    for name in ("id", "type"):
        if piece.get(name):
            call[name] = piece[name]
    function = piece.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def read_turn(body: Mapping[str, Any]) -> Answer:
    """Read an answer of /v1/messages, as one object. Its `input_tokens` do not include cached tokens."""
    usage = body.get("usage") or {}
    cached, made = count(usage.get("cache_read_input_tokens")), count(usage.get("cache_creation_input_tokens"))
    tokens = count(usage.get("input_tokens"))
    prompt_tokens = None if tokens is None else tokens + (cached or 0) + (made or 0)
    blocks = body["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    message = MESSAGES.messages({"role": "assistant", "content": blocks})[-1]
    return Answer(as_turn(message), text, *counts_of(prompt_tokens, cached, usage.get("output_tokens")))


def merged_turn(body: bytes) -> Mapping[str, Any]:
    """Return the object that the events of /v1/messages add up to."""
    usage: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for event in stream_events(body):
        kind = event.get("type")
        if kind == "message_start":
            usage.update(event["message"].get("usage") or {})
        elif kind == "message_delta":
            counts = event.get("usage") or {}
            usage.update({name: number for name, number in counts.items() if number is not None})
        elif kind == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif kind == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name, into in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                if name in delta:
                    block[into] = block.get(into, "") + delta[name]
    for block in blocks.values():
        written = block.pop("json")
        if written:
            block["input"] = orjson.loads(written)
    return {"content": [blocks[index] for index in sorted(blocks)], "usage": usage}


def read_response(body: Mapping[str, Any]) -> Answer:
    """Read an answer of /v1/responses, as one object. Of several messages the next turn begins with the first."""
    usage = body.get("usage") or {}
    details = usage.get("input_tokens_details") or {}
    counts = counts_of(usage.get("input_tokens"), details.get("cached_tokens"), usage.get("output_tokens"))
    items = body.get("output") or ()
    message = RESPONSES.chat(items)[0] if items else {}
    content = message.get("content")
    return Answer(as_turn(message), content if type(content) is str else "", *counts)


def read_generated(body: Any) -> Answer:
    """Read the counts of an answer of SGLang's /generate. The last event of a stream has them all."""
    usage = body["meta_info"]
    counts = counts_of(usage.get("prompt_tokens"), usage.get("cached_tokens"), usage.get("completion_tokens"))
    return Answer(None, "", *counts)


def last_event(body: bytes) -> Mapping[str, Any]:
    return next(objects_of(reversed(BETWEEN_EVENTS.split(body))), {})


def merged_response(body: bytes) -> Mapping[str, Any]:
    """Return the response that the last event of a stream has."""
    items: list[Any] = []
    for event in stream_events(body):
        kind = event.get("type")
        if kind == "response.output_item.done":
            items.append(event["item"])
        elif kind in ("response.completed", "response.incomplete"):
            response = event["response"]
            return {"output": response.get("output") or items, "usage": response.get("usage")}
    return {}


def as_turn(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the message as the next turn will carry it; None if that is not certain."""
    if message.get("role") != "assistant" or message.get("reasoning_content"):
        return None
    return message if message.get("content") or message.get("tool_calls") else None


RESPONSE_NAME = re.compile(rb'(?:"response"\s*:\s*|\A)\{[^{}\[\]]*?"id"\s*:\s*"([!#-\[\]-~]{1,200})"')
NAME_BYTES_MAX = 16 * 1024  # an engine names its response in the first event, before it repeats the request


class ResponseName:
    """Finds the id of a response in its first bytes."""

    __slots__ = ("_data", "is_over")

    def __init__(self) -> None:
        self._data = b""
        self.is_over = False

    def feed(self, data: bytes) -> str:
        """Return the id once, as soon as it is complete; empty before and after."""
        if self.is_over:
            return ""
        self._data += data[: NAME_BYTES_MAX - len(self._data)]
        found = RESPONSE_NAME.search(self._data[max(self._data.find(b"{"), 0) :])
        self.is_over = found is not None or len(self._data) >= NAME_BYTES_MAX
        return found[1].decode() if found is not None else ""


MARKED_COUNT = b'"prompt_tokens"'


def stream_usage(body: bytes) -> Counts:
    """Return the counts of the last event that has prompt tokens."""
    at = body.rfind(MARKED_COUNT)
    return read_usage((event_at(body, at).fields or {}).get("usage") if at >= 0 else None)


def read_usage(usage: Mapping[str, Any] | None) -> Counts:
    """Return the counts of a usage object."""
    if not usage:
        return None, None, None
    details = usage.get("prompt_tokens_details") or {}
    return counts_of(usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens"))


def counts_of(prompt: object, cached: object, completion: object) -> Counts:
    """Return the valid counts, None for others. No more tokens can be cached than the prompt has."""
    tokens, found = count(prompt), count(cached)
    return tokens, found if tokens is None or found is None else min(found, tokens), count(completion)


def count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < COUNT_END else None
