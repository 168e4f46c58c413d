"""Decides which requests the response cache may answer, and under which key: tier 2 of Continuum Router.

Rule: a request is eligible if an engine would answer it the same again (temperature 0) and keeps nothing of it. Its key
is the SHA-256 of the target, its owner (`askers`) and the JSON of the body except members that do not change the
answer. The members are sorted; inside them the order counts, because templates print tools and schemas as they are
written. Invariant: each part is preceded by its length, so no two questions have one key (test_cache_keys.py). A stream
and a whole answer share a key. The document's own key (`continuum`) covers few members: others are not eligible.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.body_json import exact_json, excess

CHAT_TARGET = b"/v1/chat/completions"
CHAT, COMPLETION = "chat", "completion"

APIS = {
    CHAT_TARGET: CHAT,
    b"/v1/completions": COMPLETION,
    b"/v1/embeddings": "embeddings",
    b"/v1/messages": "messages",
    b"/v1/responses": "responses",
}

LENGTH = struct.Struct("<Q").pack

SENDING = frozenset(("stream", "stream_options"))
"""Members that change at most how an answer is sent."""

UNKEYED = SENDING | {"user", "metadata"}
"""Members that do not change the content of an answer; but an answer of /v1/responses repeats those of the client."""

CONTINUUM_KEYED = frozenset(("model", "messages", "temperature", "max_tokens", "top_p"))

STATEFUL = ("background", "previous_response_id", "conversation")
"""Members of /v1/responses that make an answer depend on what an engine keeps, or make the engine keep something."""

FORBIDS = re.compile(
    rb"(?:^|,)\s*(?:no-store|private|no-cache|(?:s-maxage|max-age)\s*=\s*\"?(?:-|0+(?![0-9])))\s*(?:[\"=,;]|[0-9]|$)"
)
"""What an engine says in Cache-Control of an answer that no other request may get."""

DIRECTIVE = re.compile(rb"(no-cache|no-store|max-age)\s*(?:=\s*\"?(\d{1,9})\"?)?\s*(?:,|$)")


@dataclass(frozen=True, slots=True)
class CacheKeyOptions(Options):
    """What is eligible for the response cache."""

    SECTION = "Responses"
    PREFIX = "response_cache_"

    assume_greedy: bool = option(
        False, "Take a request without a temperature for one of temperature 0. OpenAI's default is 1."
    )
    streams: bool = option(True, "Keep streams, too, and replay them.")
    key: str = option(
        "canonical",
        "Which key: canonical is the whole body, continuum what that router's document names.",
        one_of=("canonical", "continuum"),
    )


class Question(NamedTuple):
    """A request that the cache may answer.

    `max_age_s`: older answers are not wanted. `wants_usage`: whether a stream has to end with its counts.
    """

    key: bytes
    api: str
    model: str
    stream: bool
    wants_usage: bool
    max_age_s: float


def question_of(
    target: bytes, body: bytes, owner: bytes, cache_control: bytes, options: CacheKeyOptions
) -> Question | None:
    """Return the question that a POST with this body asks; None if the cache takes no part in it."""
    api = APIS.get(target.partition(b"?")[0])
    wishes = directives(cache_control) if cache_control else {}
    if api is None or b"no-store" in wishes or excess(body):
        return None
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if type(fields) is not dict or not is_eligible(fields, api, options):
        return None
    stream, wants_usage = fields.get("stream") is True, False
    if stream:
        asked = fields.get("stream_options") or {}
        if not options.streams or type(asked) is not dict or asked.get("continuous_usage_stats"):
            return None
        wants_usage = bool(asked.get("include_usage"))
    try:
        key = (continuum_key if options.key == "continuum" else canonical_key)(target, api, fields, owner)
    except TypeError:  # a number that was rounded
        return None
    max_age_s = inf if not wishes else 0.0 if b"no-cache" in wishes else wishes.get(b"max-age", inf)
    return Question(
        key=key, api=api, model=fields["model"], stream=stream, wants_usage=wants_usage, max_age_s=max_age_s
    )


def forbids_sharing(cache_control: bytes) -> bool:
    """Whether an engine's Cache-Control says that nobody else may get the answer."""
    return FORBIDS.search(cache_control.lower()) is not None


def directives(cache_control: bytes) -> dict[bytes, float]:
    """Return those directives of a request's Cache-Control that are obeyed, with their seconds."""
    return {name: float(value or 0) for name, value in DIRECTIVE.findall(cache_control.lower())}


def is_eligible(fields: Mapping[str, Any], api: str, options: CacheKeyOptions) -> bool:
    """Whether an engine would answer these members the same again, and keeps nothing of them."""
    model, temperature = fields.get("model"), fields.get("temperature")
    if type(model) is not str or "\0" in model:
        return False
    if options.key == "continuum" and not is_continuum(fields):
        return False
    if api == "responses" and (fields.get("store") is not False or any(fields.get(name) for name in STATEFUL)):
        return False
    if api == "embeddings":
        return True
    if temperature is None:
        return options.assume_greedy
    return type(temperature) in (int, float) and temperature == 0


def is_continuum(fields: Mapping[str, Any]) -> bool:
    """Whether the document's key covers all that these members say."""
    most, top_p = fields.get("max_tokens"), fields.get("top_p")
    numbers = most is None or (type(most) is int and abs(most) < 1 << 63), top_p is None or type(top_p) in (int, float)
    return fields.keys() <= CONTINUUM_KEYED | UNKEYED and all(numbers)


def canonical_key(target: bytes, api: str, fields: Mapping[str, Any], owner: bytes) -> bytes:
    unkeyed = SENDING if api == "responses" else UNKEYED
    kept = {name: fields[name] for name in sorted(fields.keys() - unkeyed)}
    if kept.get("temperature") == 0:
        kept["temperature"] = 0  # whether it was written 0 or 0.0
    members = exact_json(kept)
    parts = LENGTH(len(target)), target, LENGTH(len(owner)), owner, LENGTH(len(members)), members
    return sha256(b"".join(parts)).digest()


def continuum_key(target: bytes, api: str, fields: Mapping[str, Any], owner: bytes) -> bytes:  # noqa: ARG001
    """SHA-256 of model, messages, temperature, max_tokens, top_p and owner as the document orders them.

    The document has chats alone: the key of any other target is the SHA-256 of it and of that. What it leaves open:
    numbers are 8 bytes, little endian, messages compact JSON; an absent temperature is 0.
    """
    most, top_p = fields.get("max_tokens"), fields.get("top_p")
    parts = (
        fields["model"].encode("utf-8", "surrogatepass"),
        sha256(exact_json(fields.get("messages"))).digest(),
        struct.pack("<d", fields.get("temperature") or 0),
        tagged(None if most is None else struct.pack("<q", most)),
        tagged(None if top_p is None else struct.pack("<d", top_p)),
        tagged(owner or None),
    )
    found = sha256(b"\0".join(parts)).digest()
    return found if target == CHAT_TARGET else sha256(target + b"\0" + found).digest()


def tagged(value: bytes | None) -> bytes:
    """Mark a value as present, so that None and an empty value differ."""
    return b"\0" if value is None else b"\1" + value
