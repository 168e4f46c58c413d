"""Says whether an event begins an answer, or is a failure, and which whole answers of status 200 are failures.

Engines that send the head of a stream before the prefill can say only so that they failed: an object with an `error`,
an event of the type or name `error`, or `response.failed`. Beside output a whole answer is none: that error is about a
part of what was asked for. What lacks the member that every answer of its API has is one, whatever its words, and so is
a page; what has that of another API says that this one is not there. Comments, pings, roles and what announces an
answer begin none. One that finishes without more than white space, for no reason that explains it, is blank: engines
may mean that. Invariant: an error counts as the status that it names, and teaches nothing (test_errors_inside.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

EVENT_END = re.compile(rb"\n\r?\n|\r\r")

OUTPUT = ("choices", "output", "content", "data", "text")
"""Members of answers by all APIs."""

COUNTED = ("tokens", "count", "input_tokens", "prompt", "text", "content")
SCORED = ("results", "data", "scores", "score", "rankings", "labels", "predictions", "embedding")
ANSWERS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("chat", "completion"), ("choices",)),
    "messages": ("content",),
    "responses": ("output",),
    "generate": ("text", "output_ids", "meta_info"),
    "embeddings": ("data", "embedding", "embeddings"),
    **dict.fromkeys(("rerank", "score", "classify"), SCORED),
    **dict.fromkeys(("count_tokens", "tokenize", "detokenize"), COUNTED),
}
"""APIs of which each whole answer is an object with one of these members."""

IN_LISTS = ("generate", "rerank", "score", "classify")  # they may answer with a list, to one of inputs
LISTS = ("choices", "output", "data")  # members that are lists, empty or not but for `choices`
CHOICES: Mapping[str, Sequence[str]] = {"chat": ("delta", "message"), "completion": ("text",)}
"""What a choice has, by API."""
STREAMED = ("chat", "completion", "messages", "responses", "generate")
OF_RESPONSES, OF_MESSAGES = "response.", ("message_", "content_block_")  # begin the types of their events

FRAMED = re.compile(rb"(?:data|event|id|retry)?:")  # begins a stream of events, whatever its head says
FRAMED_BYTES = len("event:")
PAGE = re.compile(rb"\s*<(?:!doctype|html|!--|\?xml)", re.IGNORECASE)
"""Begins what no engine writes, but a proxy before one."""

ANNOUNCING = frozenset(
    ("ping", "keepalive", "message_start", "response.created", "response.queued", "response.in_progress")
)
"""Types of events after which another engine may still answer."""

PARTS = ("content_block", "item", "part", "delta", "response")
"""Members of typed events that have the words of an answer, if any."""

TEXT_EVENTS = ("output_text", "reasoning_text", "reasoning_summary_text", "refusal")
FRAMES = frozenset(
    (
        *("content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"),
        *("response.output_item.added", "response.output_item.done", "response.content_part.added"),
        *("response.content_part.done", "response.completed", "response.incomplete"),
        *(f"response.{text}.{step}" for text in TEXT_EVENTS for step in ("delta", "done")),
    )
)
"""Types of events that begin and end an answer, and its parts."""

EXPLAINED = frozenset(
    (
        *("tool_calls", "function_call", "tool_use", "pause_turn", "refusal", "content_filter", "content_filtered"),
        *("safety", "recitation", "blocklist", "prohibited_content", "spii", "guardrail_intervened"),
    )
)
"""Reasons to finish, in lower case, that say why an answer has no words."""

PARTS_LEVELS_MAX = 8  # of lists and objects in the last event of a response, down to its text
WORDLESS = (None, "text", "message", "thinking", "reasoning", "output_text", "text_delta", "thinking_delta")
"""Types of parts that are text, or nothing."""
UNSEEN = " \n\r\t\u200b\u200c\u200d\ufeff\ufffd"  # also what stands for bytes that are no text
TEXT_MEMBERS = frozenset(("content", "reasoning", "reasoning_content", "refusal"))  # of messages

STATUSES: Mapping[str, int] = {
    "overloaded": 529,
    "rate_limit": 429,
    "ratelimit": 429,
    "invalid_request": 400,
    "badrequest": 400,
    "bad_request": 400,
    "authentication": 401,
    "permission": 403,
    "notfound": 404,
    "not_found": 404,
    "unavailable": 503,
    "throttl": 429,
}
"""Parts of an error's type or code, in lower case, and the status that goes with it; any other is a 500."""

ERROR, ABORT = "error", "abort"  # reasons for which vLLM and SGLang finish what they did not serve

OF_STATUS, OF_KIND = ("code", "status"), ("type", "code")  # parts of the names of members that have one of these


class Failure(NamedTuple):
    """The status that the error would have had, and the error itself, as a body."""

    status: int
    body: bytes


EMPTY = Failure(500, b"an answer without any output")
BLANK = Failure(200, b"an answer that has finished without a word")  # until somebody believes that it is one
NO_ANSWER = Failure(500, b"what is no answer of this API")
FOREIGN = Failure(404, b"an answer of another API")  # so it lacks this one


class AnswerEvent(NamedTuple):
    """One event of a stream: its name and its type, as far as it has them; its data; the object that these are."""

    kinds: Sequence[str]
    data: bytes
    fields: Mapping[str, Any] | None

    @classmethod
    def of(cls, event: bytes) -> AnswerEvent:
        lines = event.strip(b"\r\n").splitlines()
        data = b"\n".join([line[5:] for line in lines if line.startswith(b"data:")])
        kinds = [line[6:].strip().decode("latin-1") for line in lines if line.startswith(b"event:")]
        try:
            fields = orjson.loads(data)
        except orjson.JSONDecodeError:
            fields = None
        if type(fields) is not dict:
            return cls(kinds, data, None)
        return cls([*kinds, str(fields.get("type"))], data, fields)

    @property
    def failure(self) -> Failure | None:
        fields = self.fields or {}
        if "response.failed" in self.kinds:
            inner = fields.get("response")
            return failed((inner.get("error") if type(inner) is dict else None) or {})
        if "error" in self.kinds and not fields.get("error"):
            return failed(fields or self.data.decode("utf-8", "replace"))
        return failure_of(fields) or failure_of_choices(fields.get("choices"))

    @property
    def begins(self) -> bool:
        """Whether it begins an answer."""
        fields = self.fields
        if fields is None:
            return self.data.strip() not in (b"", b"[DONE]")
        if type(choices := fields.get("choices")) is list:
            return any(map(has_begun, choices))
        if type(usage := fields.get("meta_info")) is dict:  # SGLang's /generate
            return bool(fields.get("text") or fields.get("output_ids") or usage.get("finish_reason"))
        if "type" not in fields and type(fields.get("usage")) is dict:
            return False
        if "type" not in fields and lacks_output(fields, OUTPUT):  # words of a gateway
            return False
        return ANNOUNCING.isdisjoint(self.kinds)

    @property
    def is_garbled(self) -> bool:
        """Whether it has words where an object is due; some objects have numbers that JSON does not have."""
        return self.fields is None and not self.data.lstrip().startswith((b"{", b"[DONE]")) and bool(self.data.strip())

    def is_of_another(self, api: str) -> bool:
        """Whether it is plainly an event of another API."""
        fields, kind = self.fields or {}, str((self.fields or {}).get("type"))
        if type(choices := fields.get("choices")) is list and choices:
            if api in CHOICES:
                return has_foreign_choice(choices[0], api)
            return api in STREAMED and "type" not in fields and lacks_output(fields, ANSWERS[api])
        if kind.startswith(OF_RESPONSES):
            return api in STREAMED and api != "responses"
        return api in STREAMED and api != "messages" and kind.startswith(OF_MESSAGES)

    @property
    def is_blank(self) -> bool:
        """Whether it begins, or ends, an answer or a part of one, and has no word of it."""
        fields = self.fields or {}
        if str(fields.get("type")) in FRAMES:
            delta = fields.get("delta")
            reason = delta.get("stop_reason") if type(delta) is dict else None
            return not explains(reason) and all(is_wordless(fields.get(part)) for part in ("text", *PARTS))
        return is_blank(fields)


def end_of_events(data: bytes, start: int, stop: int) -> int:
    """Return where the last event that ends between these places ends; `start` if there is none."""
    found = ((data.rfind(end, start, stop), len(end)) for end in (b"\n\n", b"\n\r\n", b"\r\r"))
    return max([place + length for place, length in found if place >= 0], default=start)


def event_at(data: bytes, place: int) -> AnswerEvent:
    """Return the event in which this place is."""
    end = EVENT_END.search(data, place)
    return AnswerEvent.of(data[end_of_events(data, 0, place) : end.start() if end is not None else len(data)])


def has_begun(choice: Any) -> bool:
    """Whether a choice has more than a role."""
    if type(choice) is not dict:
        return True
    message = choice.get("delta", choice.get("message"))
    if type(message) is dict and any(message[name] for name in message if name != "role"):
        return True
    return bool(choice.get("text") or choice.get("finish_reason"))


def has_words(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has any output that is more than white space."""
    message = choice.get("delta", choice.get("message"))
    return not is_wordless(choice.get("text")) or any(
        not is_wordless(part) if name in TEXT_MEMBERS else bool(part)
        for name, part in (message.items() if type(message) is dict else ())
        if name != "role" and not (type(part) is dict and not any(part.values()))
    )


def is_blank(fields: Mapping[str, Any]) -> bool:
    """Whether an answer that is an object has finished without a word, and for no reason that explains it."""
    if type(choices := fields.get("choices")) is list:
        explained = [type(each) is not dict or explains(each.get("finish_reason")) for each in choices]
        return not (any(explained) or any(map(has_words, choices)))
    if type(meta := fields.get("meta_info")) is dict:  # SGLang's /generate
        reason = meta.get("finish_reason")
        kind = reason.get("type") if type(reason) is dict else reason
        text = fields.get("text")
        return not explains(kind) and is_wordless(text) and bool(text or not fields.get("output_ids"))
    if fields.get("status") not in (None, "completed", "incomplete"):
        return False
    if type(data := fields.get("data")) is list:
        return not any(type(each) is not dict or "embedding" not in each or has_vector(each) for each in data)
    items = fields.get("content", fields.get("output"))
    return type(items) is list and not explains(fields.get("stop_reason")) and is_wordless(items)


def has_embedding(data: Sequence[Any]) -> bool:
    """Whether a list may be one of embeddings: it is none of models."""
    return not data or type(data[0]) is not dict or "embedding" in data[0]


def has_vector(embedding: Mapping[str, Any]) -> bool:
    """Whether an embedding has numbers, or bytes for them."""
    vector = embedding["embedding"]
    return bool(vector) and not (type(vector) is list and vector[0] is None)


def explains(reason: object) -> bool:
    """Whether this reason to finish says why an answer has no words."""
    return str(reason).lower() in EXPLAINED


def is_wordless(part: Any, levels: int = PARTS_LEVELS_MAX) -> bool:
    """Whether a part of an answer is text without a word: white space at most."""
    if not part or levels == 0:
        return not part
    if type(part) is str:
        return not part.strip().strip(UNSEEN)
    if type(part) is dict:
        if part.get("type") not in WORDLESS:
            return False
        part = [part.get(name) for name in ("text", "thinking", "content", "summary", "output")]
    return type(part) is list and all(is_wordless(each, levels - 1) for each in part)


def failure_in_whole(body: bytes, api: str) -> Failure | None:
    """Return the failure that a whole answer is; None if it is none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        is_odd = body.endswith(b"}") and any(b'"%b"' % name.encode() in body for name in ANSWERS.get(api, ()))
        return None if is_odd or api not in ANSWERS else NO_ANSWER  # some write numbers that JSON does not have
    names = ANSWERS.get(api, OUTPUT)
    failure = failure_of_choices(fields.get("choices"))
    failure = failure or (None if any(fields.get(name) for name in names) else failure_of(fields))
    if failure is not None or (fields.get("error") and not lacks_output(fields, names)):
        return failure
    if fields.get("status") == "failed":
        return failed(fields.get("incomplete_details") or {})
    if lacks_output(fields, names):
        if api not in ANSWERS:
            return None
        return failed(fields) if lacks_output(fields, OUTPUT) else FOREIGN
    if api in CHOICES and has_foreign_choice(fields["choices"][0], api):
        return FOREIGN
    if api == "embeddings" and type(data := fields.get("data")) is list and not has_embedding(data):
        return FOREIGN
    return BLANK if is_blank(fields) else None


def lacks_output(fields: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether a whole answer has none of these members of answers; a chat without any choice is none either."""
    found = [(name, fields[name]) for name in names if fields.get(name) is not None]
    return not any(name not in LISTS or (type(each) is list and (each or name != "choices")) for name, each in found)


def has_foreign_choice(choice: Any, api: str) -> bool:
    """Whether a choice is one of completions where chats are due, or the reverse."""
    if type(choice) is not dict:
        return True
    if any(name in choice for name in CHOICES[api]):
        return False
    return any(name in choice for names in CHOICES.values() for name in names)


def is_no_answer(text: bytes, api: str) -> bool:
    """Whether what begins so, and is no object, is no answer: a page, or where an object is due anything but events."""
    is_list = api in IN_LISTS and text[:1] == b"[" and text[1:2] != b"]"
    return PAGE.match(text) is not None or (api in ANSWERS and not is_list and FRAMED.match(text) is None)


def failure_of(fields: Mapping[str, Any]) -> Failure | None:
    """Return the failure that an object is, if it is one."""
    error = fields.get("error")
    if type(error) not in (dict, str) and (fields.get("object") == "error" or fields.get("type") == "error"):
        error = fields
    return failed(error) if type(error) in (dict, str) else None


def failure_of_choices(choices: Any) -> Failure | None:
    """Return the failure that the first of these choices names, as some gateways do, or ends with, if none of them has
    any output."""
    if type(choices) is not list or not choices or type(choices[0]) is not dict:
        return None
    failure = failure_of(choices[0])
    if failure is None and choices[0].get("finish_reason") in (ERROR, ABORT):
        failure = failed(choices[0])
    return failure if failure and not any(type(each) is not dict or has_words(each) for each in choices) else None


def failed(error: Any) -> Failure:
    try:
        body = orjson.dumps({"error": error})
    except orjson.JSONEncodeError:  # nested too deeply
        body = b""
    return Failure(status_of(error) if isinstance(error, dict) else 500, body)


def status_of(error: Mapping[str, Any]) -> int:
    """Return the status that an error names, or that its type or code stands for."""
    names = [name for name in error if any(part in name.lower() for part in OF_STATUS)]
    for name in sorted(names, key=lambda name: name != "code"):
        number = error[name]
        if type(number) is str and number.isascii() and number.isdigit() and len(number) == len("500"):
            number = int(number)
        if type(number) is int and 400 <= number <= 599:
            return number
    words = " ".join(str(error[name]) for name in error if any(part in name.lower() for part in OF_KIND)).lower()
    return next((status for part, status in STATUSES.items() if part in words), 500)
