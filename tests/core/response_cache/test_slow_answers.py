"""No answer that an engine sends, or that another store returns, takes long in one portion to be kept or replayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ranvier_py.core.response_cache.answer_frames import decoded, encoded
from ranvier_py.core.response_cache.arrived_answers import Arrived, stored_answer
from ranvier_py.core.response_cache.cache_keys import Question
from ranvier_py.core.response_cache.stored_answers import CONTENT_TYPES, DONE, LAST_CHUNK, Portions, StoredAnswer, chunk
from tests.core.response_cache.test_stored_answers import finished
from tests.core.routing.hostile_bodies import filled
from tests.node.turns import OCCUPIED_S_MAX, least_s, longest_step_s

STREAM_BYTES = 10 * 2**20
WHOLE_BYTES = 2**20
ENTRY_BYTES = 4 * 2**20
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
LAST = END + COUNTS + DONE
ENDS = {"messages": b'data: {"type":"message_stop"}\n\n', "responses": b'data: {"type":"response.completed"}\n\n'}
MANY_LISTS = b'data: {"choices":[],"usage":{"prompt_tokens":5},"x":['


def bytewise(data: bytes) -> bytes:
    return b"".join([chunk(data[at : at + 1]) for at in range(len(data))]) + LAST_CHUNK


def at_once(data: bytes) -> bytes:
    return chunk(data) + LAST_CHUNK


STREAMS: dict[str, Callable[[bytes], bytes]] = {
    "each byte in a chunk": lambda end: bytewise(filled(b"", EVENT, end, 150_000)),
    "each event in a chunk": lambda end: chunk(EVENT) * 20_000 + at_once(end),
    "one chunk": lambda end: at_once(filled(b"", EVENT, end, STREAM_BYTES)),
    "empty events": lambda end: at_once(filled(b"", b"\n\n", end, STREAM_BYTES)),
    "nearly faults": lambda end: at_once(filled(b'data: {"x":"', b'"finish_reason":   ', end, STREAM_BYTES)),
    "blanks": lambda end: at_once((b"data:" + b" " * 500_000) * 20 + end),
    "many lists with counts": lambda end: at_once(filled(EVENT + MANY_LISTS, b"[],", b"[]]}\n\n" + end, STREAM_BYTES)),
}
CHOICE = b'{"index":%d,"message":{"role":"assistant","content":"%b"%b},"finish_reason":"stop"}'
WHOLES = {
    "text": lambda: (b"", b"a" * (WHOLE_BYTES - 200), b"", 1),
    "escapes": lambda: (b"", b"\\n" * (WHOLE_BYTES // 2 - 200), b"", 1),
    "lists": lambda: (b"", b"", b',"x":[' + b"[]," * 99_000 + b"[]]", 1),
    "many choices": lambda: (b"", b"", b"", 9000),
    "many choices with a long head": lambda: (b'"x":[' + b"1," * 1000 + b"1],", b"", b"", 4000),
}


def is_quick(make: Callable[[], Portions[Any]]) -> bool:
    return least_s(lambda: longest_step_s(make())) <= OCCUPIED_S_MAX


def asked(api: str = "chat", *, stream: bool) -> Question:
    return Question(b"k" * 32, api, "m", stream, False, 1e9)


def whole(name: str) -> bytes:
    head, text, more, count = WHOLES[name]()
    choices = b",".join([CHOICE % (number, text, more) for number in range(count)])
    return b'{%b"choices":[%b],"usage":{"prompt_tokens":5}}' % (head, choices)


@pytest.mark.parametrize("api", ["chat", "completion", "messages", "responses"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_kept_and_replayed_in_short_portions(name: str, api: str) -> None:
    arrived = Arrived(CONTENT_TYPES[True], "chunked", STREAMS[name](ENDS.get(api, LAST)))
    assert is_quick(lambda: stored_answer(asked(api, stream=True), b"t", arrived, 0.0, WHOLE_BYTES))
    stored = finished(stored_answer(asked(api, stream=True), b"t", arrived, 0.0, STREAM_BYTES))
    for stream in (False, True) if stored is not None else ():
        assert is_quick(lambda stored=stored, stream=stream: stored.reply(asked(api, stream=stream)))  # type: ignore[misc]


@pytest.mark.parametrize("name", WHOLES)
def test_a_whole_answer_is_kept_and_replayed_in_short_portions(name: str) -> None:
    body = whole(name)
    for arrived in (
        Arrived(CONTENT_TYPES[False], "length", body),
        Arrived(CONTENT_TYPES[False], "chunked", bytewise(body[: WHOLE_BYTES // 6])),
    ):
        assert is_quick(lambda arrived=arrived: stored_answer(asked(stream=False), b"t", arrived, 0.0, WHOLE_BYTES))  # type: ignore[misc]
    stored = finished(
        stored_answer(asked(stream=False), b"t", Arrived(CONTENT_TYPES[False], "length", body), 0.0, WHOLE_BYTES)
    )
    for stream in (False, True) if stored is not None else ():
        assert is_quick(lambda stored=stored, stream=stream: stored.reply(asked(stream=stream)))  # type: ignore[misc]


STOLEN = {
    "a whole answer of lists": lambda: (False, filled(b'{"choices":[', b"[],", b"[]]}", ENTRY_BYTES), b""),
    "a whole answer of numbers": lambda: (False, filled(b'{"choices":[', b"1,", b"1]}", ENTRY_BYTES), b""),
    "counts of lists": lambda: (True, chunk(EVENT), filled(MANY_LISTS, b"[],", b"[]]}\n\n", ENTRY_BYTES)),
    "a stream of lists": lambda: (True, chunk(filled(b'data: {"choices":[', b"[],", b"[]]}\n\n", ENTRY_BYTES)), COUNTS),
    "each byte in a chunk": lambda: (True, bytewise(filled(b"", EVENT, b"", 150_000))[: -len(LAST_CHUNK)], COUNTS),
    "chunks without an end": lambda: (True, b"ffffff" * (ENTRY_BYTES // 6), COUNTS),
}


@pytest.mark.parametrize("name", STOLEN)
def test_what_somebody_put_in_the_place_of_a_kept_answer_holds_up_nobody(name: str) -> None:
    """With a digest that fits: whoever can write there knows how it is made."""
    stream, body, counts = STOLEN[name]()
    data = encoded(b"k", StoredAnswer("chat", "m", b"t", CONTENT_TYPES[stream], body, counts, stream, 0.0, (1, 1)), 0.0)
    found = decoded(b"k", data, 0.0, 2 * ENTRY_BYTES)

    def took_s() -> float:
        began = time.thread_time()
        decoded(b"k", data, 0.0, 2 * ENTRY_BYTES)
        return time.thread_time() - began

    assert least_s(took_s, OCCUPIED_S_MAX / 2) <= OCCUPIED_S_MAX / 2  # several may come at once
    for other in (False, True) if found is not None else ():
        assert is_quick(lambda found=found, other=other: found.reply(asked(stream=other)))  # type: ignore[misc,union-attr]
