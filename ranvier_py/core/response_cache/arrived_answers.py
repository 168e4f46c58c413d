"""Decides what is kept of an answer that has arrived as a whole.

Of a stream its chunks are kept, without its end and the event with its counts (`stored_answers`).

Invariant: only an answer that is complete and no error is kept (test_stored_answers.py). An engine may send each byte
in a chunk of its own, so the work is done in portions. Chunks of more than READ_BYTES are kept as several.
Bounds: `bytes_max` of an answer when it is whole, COUNTS_BYTES_MAX of an event of counts, and what may be parsed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import orjson

from ranvier_py.core.answers.answer_events import AnswerEvent, end_of_events
from ranvier_py.core.answers.answer_stream import count
from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError
from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.response_cache.cache_keys import CHAT, COMPLETION, Question
from ranvier_py.core.response_cache.stored_answers import (
    COUNTS_BYTES_MAX,
    DONE,
    LAST_CHUNK,
    MISSHAPEN,
    OBJECTS,
    PORTION_BYTES,
    Portions,
    StoredAnswer,
    chunk,
)

COUNTS = b'"prompt_tokens"'
ENDS = {CHAT: DONE, COMPLETION: DONE, "messages": b'"type":"message_stop"', "responses": b'"type":"response.completed"'}
"""What shows that a stream is complete."""

FAULTY = frozenset(("error", "abort", "cancelled"))
"""Finish reasons that are not the model's."""

FAULT = re.compile(
    rb'"finish_reason":\s*"(?:%b)"|data:\s*\{"(?:error"|object":\s*"error"|type":\s*"error")'
    % "|".join(FAULTY).encode()
)
"""Shows that a stream failed: by how it finished, or by an error event. Quotes in generated text are escaped."""

READ_BYTES = 16_384
"""Of the framing that are read at once: at worst 3,000 chunks, which take 4 ms."""

FAULT_BYTES_MAX = 1024  # of a mark of a fault, with the blanks in it


class Arrived(NamedTuple):
    """An answer as it was relayed: the whole body in its framing, and the event of counts removed from it."""

    content_type: bytes
    framing: str
    body: bytes
    counts: bytes = b""


class Portion(NamedTuple):
    """A part of the payload, and the sizes of the chunks in it."""

    payload: bytes
    sizes: array[int]


Kept = tuple[bytes, bytes, tuple[int, int]]
"""Body, event of counts, and tokens, as a StoredAnswer has them."""


def stored_answer(
    question: Question, tenant: bytes, arrived: Arrived, now: float, bytes_max: int
) -> Portions[StoredAnswer | None]:
    """Return what to keep of a complete answer of status 200; None for an error, or beyond `bytes_max` when whole."""
    try:
        portions = yield from portions_of(arrived)
        payload = b"".join([portion.payload for portion in portions])
        if question.stream:
            found = yield from kept_stream(question.api, portions, payload, arrived.counts, bytes_max)
        else:
            found = kept_whole(question.api, payload, bytes_max)
    except MISSHAPEN:
        return None
    return stored_of(question, tenant, arrived.content_type, found, now)


def stored_at_once(
    question: Question, tenant: bytes, arrived: Arrived, now: float, bytes_max: int
) -> StoredAnswer | None:
    """Return the same of a whole answer that did not come in chunks, as nearly all of them."""
    try:
        found = kept_whole(question.api, arrived.body, bytes_max)
    except MISSHAPEN:
        return None
    return stored_of(question, tenant, arrived.content_type, found, now)


def stored_of(
    question: Question, tenant: bytes, content_type: bytes, found: Kept | None, now: float
) -> StoredAnswer | None:
    if found is None:
        return None
    body, counts, tokens = found
    return StoredAnswer(
        api=question.api,
        model=question.model,
        tenant=tenant,
        content_type=content_type,
        body=body,
        counts=counts,
        stream=question.stream,
        stored_at=now,
        tokens=tokens,
    )


def portions_of(arrived: Arrived) -> Portions[Sequence[Portion]]:
    """Return the payload, by HTTP chunks if it came in chunks. Raises ChunkError."""
    body = arrived.body
    if arrived.framing != "chunked":
        return (Portion(body, array("Q", (len(body),))),)
    reader, found, begun = ChunkedReader(), [], b""
    for start in range(0, len(body), READ_BYTES):
        reader.feed(portion := body[start : start + READ_BYTES])
        pieces = [portion[low:high] for low, high in reader.spans]
        if begun:
            pieces[:1] = [b"".join((begun, *pieces[:1]))]
        begun = pieces.pop() if pieces and reader.left and len(pieces[-1]) < READ_BYTES else b""
        found.append(Portion(b"".join(pieces), array("Q", map(len, pieces))))
        if start + READ_BYTES < len(body):
            yield
    if not reader.done:
        raise ChunkError("the answer is not complete")
    return found


def kept_whole(api: str, body: bytes, bytes_max: int) -> Kept | None:
    if len(body) > bytes_max or excess(body):
        return None
    fields = orjson.loads(body)
    if fields.get("error") or fields.get("type") == "error":
        return None
    if api == "responses" and fields.get("status") != "completed":
        return None
    ends = [one.get("finish_reason") for one in fields.get("choices") or ()]
    if not FAULTY.isdisjoint(ends) or (api in OBJECTS and not (ends and all(ends))):
        return None
    return body, b"", tokens_of(fields.get("usage"))


def kept_stream(
    api: str, portions: Sequence[Portion], payload: bytes, counts: bytes, bytes_max: int
) -> Portions[Kept | None]:
    end = ENDS.get(api)
    if end is None or (yield from has_fault(payload)):
        return None
    if api not in OBJECTS:
        if end not in payload[-16_384:]:
            return None
        return (yield from chunks_of(portions, len(payload))) + LAST_CHUNK, b"", (0, 0)
    if not payload.endswith(DONE) or output_bytes(payload) > bytes_max:
        return None
    ends_at = len(payload) - len(DONE)
    at = payload.rfind(COUNTS)
    if at >= 0:
        start = end_of_events(payload, 0, at)
        if ends_at - start > COUNTS_BYTES_MAX:
            return None
        event = payload[start:ends_at]
        if (found := AnswerEvent.of(event).fields) is None or found.get("choices"):
            return None  # counts in events with output: a client that wants none must not get them
        ends_at, counts = start, event
    if len(counts) > COUNTS_BYTES_MAX:
        return None
    usage = (AnswerEvent.of(counts).fields or {}).get("usage")
    return (yield from chunks_of(portions, ends_at)), counts, tokens_of(usage)


def has_fault(payload: bytes) -> Portions[bool]:
    """Return whether a stream shows that it failed."""
    for start in range(0, len(payload), PORTION_BYTES):
        if FAULT.search(payload, start, start + PORTION_BYTES + FAULT_BYTES_MAX) is not None:
            return True
        if start + PORTION_BYTES < len(payload):
            yield
    return False


def chunks_of(portions: Sequence[Portion], left: int) -> Portions[bytes]:
    """Return the first `left` bytes of the payload in their chunks, of which the last one may be cut."""
    made: list[bytes] = []
    for portion in portions:
        at, chunks = 0, []
        for size in portion.sizes:
            if left <= 0:
                break
            if size:
                chunks.append(chunk(portion.payload[at : at + min(size, left)]))
            at, left = at + size, left - size
        made.append(b"".join(chunks))
        if left <= 0:
            break
        yield
    return b"".join(made)


def output_bytes(payload: bytes) -> int:
    """Return an upper estimate of the whole answer's size: the stream without what its first and last event repeat."""
    first = payload.find(b"\n\n") + 2
    last = len(payload) - len(DONE) - payload.rfind(b"data:", 0, -len(DONE))
    return max(0, len(payload) - payload.count(b"\n\n") * min(first, last))


def tokens_of(usage: object) -> tuple[int, int]:
    if type(usage) is not dict:
        return 0, 0
    return count(usage.get("prompt_tokens")) or 0, count(usage.get("completion_tokens")) or 0
