"""Answers that are kept, replayed as they came or as the other kind, stream or whole.

Rule: a stream is kept as its HTTP chunks, so that it is replayed with the same chunking; its end (`[DONE]`) and the
event with its counts are kept separately. Counts that only the router asked for are sent to no client that did not. A
whole answer always has counts, so none can be made of a stream whose counts are unknown. Work that takes long is done
in portions. Bounds: SPLIT_BYTES_MAX, COUNTS_BYTES_MAX.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import orjson

from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.answers.answer_events import AnswerEvent
from ranvier_py.core.answers.answer_stream import merge_call
from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError
from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.response_cache.cache_keys import CHAT, COMPLETION, Question

DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
OBJECTS = {CHAT: ("chat.completion", "chat.completion.chunk"), COMPLETION: ("text_completion", "text_completion")}
"""The `object` of whole answers, and of events."""

PORTION_BYTES = 65_536
"""Of a stream that are merged before other tasks have their turn: some 250 events, which take 3 ms."""

COUNTS_BYTES_MAX = 64 * 1024
"""Of an event with counts, which has some 300 bytes; it is parsed at once."""

SPLIT_BYTES_MAX = 16 << 20  # of a stream made of a whole answer: each part repeats what belongs to all choices

Made = TypeVar("Made")
Portions: TypeAlias = Generator[None, None, Made]
"""Work that yields after each portion."""

MISSHAPEN = (AttributeError, LookupError, TypeError, ValueError)
"""What reading JSON raises that does not have the shape of its API. An engine may send anything: such an answer is not
kept, or not converted, and no request fails for it. ChunkError is one, too."""

CONTENT_TYPES = {False: b"application/json", True: b"text/event-stream"}
"""Content type by whether the answer is a stream."""


class StoredAnswer(NamedTuple):
    """One answer. `body`: of a stream the chunks before its end. `counts`: its event of counts, or empty.

    `tokens` are those of prompt and output, as far as the engine counted them; `tenant` is the owner (`askers`).
    """

    api: str
    model: str
    tenant: bytes
    content_type: bytes
    body: bytes
    counts: bytes
    stream: bool
    stored_at: float
    tokens: tuple[int, int]

    @property
    def size(self) -> int:
        """Bytes of this answer, beside what every entry takes."""
        return len(self.body) + len(self.counts)

    @property
    def ends(self) -> AnswerEnds:
        """Return what shows what the engine counted."""
        found = AnswerEnds(self.body)
        found.add(self.counts)
        return found

    def reply(self, question: Question) -> Portions[bytes | None]:
        """Return the body that answers this question, a stream in chunks; None if it cannot be made of this."""
        if self.stream != question.stream:
            try:
                if question.stream:
                    return (yield from split_answer(self, wants_usage=question.wants_usage))
                return (yield from merged_answer(self))
            except MISSHAPEN:
                return None
        if not question.stream:
            return self.body
        if self.api not in OBJECTS:
            return self.body
        if question.wants_usage and not self.counts:
            return None
        counts = chunk(self.counts) if question.wants_usage else b""
        return b"".join((self.body, counts, chunk(DONE), LAST_CHUNK))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# --- the other kind ---------------------------------------------------------------------------------------------------


def merged_answer(stored: StoredAnswer) -> Portions[bytes | None]:
    """Return the whole answer that a stream adds up to, or None."""
    counts = AnswerEvent.of(stored.counts).fields
    if stored.api not in OBJECTS or counts is None or excess(stored.body):
        return None
    yield
    payload = yield from unchunked_in_portions(stored.body)
    first: Mapping[str, Any] | None = None
    choices: dict[int, dict[str, Any]] = {}
    at = done = 0
    while at < len(payload):
        end = payload.find(b"\n\n", at)
        end = len(payload) if end < 0 else end
        piece, at = payload[at:end], end + 2
        if not piece.strip():
            continue
        event = AnswerEvent.of(piece).fields
        if event is None:
            return None
        first = first or event
        for one in event.get("choices") or ():
            merge_choice(choices.setdefault(one.get("index", 0), {}), one, stored.api)
        if at - done >= PORTION_BYTES:
            done = at
            yield
    if first is None:
        return None
    rest = {name: value for name, value in first.items() if name not in ("choices", "usage")}
    found = [finished_choice(choices[index]) for index in sorted(choices)]
    whole = {**rest, "object": OBJECTS[stored.api][0], "choices": found, "usage": counts.get("usage")}
    yield
    return orjson.dumps(whole, default=joined)


def unchunked_in_portions(body: bytes) -> Portions[bytes]:
    """Return the data of chunks, without the last one. Raises ChunkError."""
    reader, found = ChunkedReader(), list[bytes]()
    for start in range(0, len(body), PORTION_BYTES):
        reader.feed(portion := body[start : start + PORTION_BYTES])
        found.append(reader.payload(portion))
        yield
    reader.feed(LAST_CHUNK)
    if not reader.done:
        raise ChunkError("the answer is not complete")
    return b"".join(found)


def merge_choice(choice: dict[str, Any], piece: Mapping[str, Any], api: str) -> None:
    """Add one event's part to a choice."""
    into = choice.setdefault("message", {}) if api == CHAT else choice
    for name, value in (piece.get("delta") or {}).items() if api == CHAT else ():
        if name == "tool_calls":
            calls = into.setdefault("tool_calls", {})
            for call in value or ():
                index = call.get("index", 0)
                merge_call(calls.setdefault(index, {"function": {"name": Parts(), "arguments": Parts()}}), call)
        elif type(value) is str and name != "role":
            add_text(into, name, value)
        elif value is not None or name not in into:
            into[name] = value
    for name, value in piece.items():
        if name == "text":
            add_text(choice, name, value)
        elif name == "logprobs" and value:
            merge_logprobs(choice, value)
        elif name != "delta" and (value is not None or name not in choice):
            choice[name] = value


def merge_logprobs(choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add one event's logprobs: lists are extended, by name."""
    into = choice["logprobs"] = choice.get("logprobs") or {}
    for name, value in piece.items():
        known = into.get(name)
        if type(value) is not list:
            into[name] = value
        elif type(known) is list:
            known += value
        else:
            into[name] = [*(known or ()), *value]


class Parts:
    """A text that grows: adding to a long one copies nothing."""

    __slots__ = ("texts",)

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __iadd__(self, text: str) -> Self:
        self.texts.append(text)
        return self

    def __bool__(self) -> bool:
        return any(self.texts)


def joined(value: object) -> str:
    """Return a text that has grown, for orjson."""
    if type(value) is not Parts:
        raise TypeError(type(value).__name__)
    return "".join(value.texts)


def add_text(into: dict[str, Any], name: str, text: str) -> None:
    known = into.get(name) or Parts()
    if type(known) is not Parts or type(text) is not str:
        raise TypeError(f"{name} is no text")
    known += text
    into[name] = known


def finished_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if message is not None and "tool_calls" in message:
        message["tool_calls"] = [message["tool_calls"][index] for index in sorted(message["tool_calls"])]
        message["content"] = message.get("content") or None
    return choice


def split_answer(stored: StoredAnswer, *, wants_usage: bool) -> Portions[bytes | None]:
    """Return a stream that the whole answer could have come as, in chunks; None if there is none."""
    if stored.api not in OBJECTS:
        return None
    fields = orjson.loads(stored.body)
    usage = fields.pop("usage", None)
    if wants_usage and not usage:
        return None
    choices = fields.pop("choices")
    head = {**fields, "object": OBJECTS[stored.api][1]}
    if len(orjson.dumps(head)) * 2 * len(choices) + len(stored.body) > SPLIT_BYTES_MAX:
        return None
    made: list[bytes] = []
    size = 0
    for part in (part for one in choices for part in parts_of(one, stored.api)):
        made.append(event_of({**head, "choices": [part]}))
        size += len(made[-1])
        if size >= PORTION_BYTES:
            size = 0
            yield
    if wants_usage:
        made.append(event_of({**head, "choices": [], "usage": usage}))
    return b"".join((*made, chunk(DONE), LAST_CHUNK))


def event_of(fields: Mapping[str, Any]) -> bytes:
    """Return one event in a chunk of its own."""
    return chunk(b"data: " + orjson.dumps(fields) + b"\n\n")


def parts_of(choice: Mapping[str, Any], api: str) -> Iterator[Mapping[str, Any]]:
    """Yield a choice in two parts: its output, and its end."""
    if api == COMPLETION:
        yield {**choice, "finish_reason": None}
        yield {**choice, "text": "", "logprobs": None}
        return
    message = {name: value for name, value in choice["message"].items() if value is not None}
    if "tool_calls" in message:
        calls = message["tool_calls"] or ()
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    rest = {name: value for name, value in choice.items() if name != "message"}
    yield {**rest, "delta": message, "finish_reason": None}
    yield {**rest, "delta": {}, "logprobs": None}
