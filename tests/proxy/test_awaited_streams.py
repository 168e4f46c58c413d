"""A client that waits for a stream's first event is never left silent: whole nodes, and scripted engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import trio

from ranvier_py.core.answers.chunked import payload_of
from ranvier_py.proxy.answers import awaited_stream
from tests.node.node_lab import BETWEEN_LOOKS_S, chat, lab
from tests.node.test_cached_responses import ON, until_in_flight
from tests.proxy.test_overload import QUESTIONS, question
from tests.proxy.test_pipeline import at_rest, streamed
from tests.proxy.test_silent_streams import CHAT, FIRST, GENERATE, MESSAGES, RESPONSES
from tests.proxy.wire import (
    CLOSE,
    END,
    GOOD,
    HANG,
    RESET,
    ROLE,
    STREAM_HEAD,
    TOKEN,
    Scripted,
    Step,
    Wire,
    answer,
    chunk,
    event,
    post,
)

PING, OURS = b": ping\n\n", b": keepalive\n\n"
HEAD_END = b"\r\n\r\n"
COUNTS = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
CLOSED_HEAD = STREAM_HEAD.replace(b"transfer-encoding: chunked\r\n", b"")
ERROR = {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}
OPENINGS = {
    CHAT: ROLE,
    MESSAGES: event({"type": "message_start", "message": {"content": []}}) + event({"type": "ping"}),
    RESPONSES: event({"type": "response.created", "response": {"output": []}}),
    GENERATE: b"",
}


@pytest.fixture(autouse=True)
def _held_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_stream, "HELD_S", 0.05)


def engines(*turns: Sequence[Step], count: int = 2) -> list[Scripted]:
    shared: Iterator[Sequence[Step]] = iter(turns)
    return [Scripted(turns=shared) for _ in range(count)]


async def ended(wire: Wire) -> bytes:
    """The payload of what comes until the end of a chunked answer."""
    while not wire.seen.endswith(b"\r\n0\r\n\r\n"):
        assert await wire.more(), wire.seen
    head, _, body = wire.seen.partition(HEAD_END)
    assert head.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1" not in body
    return payload_of(body)


def without_ours(payload: bytes) -> bytes:
    return payload.replace(OURS, b"")


@pytest.mark.parametrize("path", OPENINGS)
async def test_head_and_comments_go_out_and_comments_of_ours_follow_until_the_first_event(path: bytes) -> None:
    computed = trio.Event()
    script = [STREAM_HEAD + chunk(PING) + OPENINGS[path], computed, FIRST[path] + END]
    async with lab(Scripted(*script), sse_keepalive_s=0.05, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(question(path, stream=True))
        assert payload_of((await wire.until(chunk(OURS))).partition(HEAD_END)[2]).startswith(PING)
        await wire.until(chunk(OURS))
        computed.set()
        payload = await ended(wire)
        assert (await at_rest(node))["outcomes"] == {"success": 1}
    assert without_ours(payload) == PING + payload_of(OPENINGS[path] + FIRST[path] + END)
    assert OURS not in payload.partition(payload_of(FIRST[path]))[2]


async def test_comments_of_ours_can_be_turned_off() -> None:
    computed = trio.Event()
    engine = Scripted(STREAM_HEAD, computed, TOKEN + END)
    async with lab(engine, sse_keepalive_s=0, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        await wire.until(HEAD_END)
        computed.set()
        assert await ended(wire) == payload_of(TOKEN + END)


async def test_a_stream_whose_head_went_out_is_learned_and_its_counts_are_removed() -> None:
    computed = trio.Event()
    script = [STREAM_HEAD + ROLE[:9], computed, ROLE[9:] + TOKEN[:20], TOKEN[20:] + event(COUNTS) + END]
    async with lab(Scripted(*script), sse_keepalive_s=0.05) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        await wire.until(chunk(OURS))
        computed.set()
        assert without_ours(await ended(wire)) == payload_of(ROLE + TOKEN + END)
        while b"answers_learned_total 1.0" not in (await node.http.get(f"{node.control}/metrics")).content:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
FAILS: dict[str, list[Step]] = {
    "an error": [event(ERROR) + END],
    "broken off": [CLOSE],
    "reset": [RESET],
    "no event": [DONE],
    "hangs": [HANG],
    "garbled": [b"zz\r\n"],
}
OTHER_ROLE = event({"id": "other", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
FOLLOWS: dict[str, list[Step]] = {
    "in chunks": [STREAM_HEAD + OTHER_ROLE + TOKEN, TOKEN + END],
    "in pieces": [STREAM_HEAD, chunk(PING) + OTHER_ROLE[:30], OTHER_ROLE[30:] + TOKEN, TOKEN + END],
    "until the connection ends": [CLOSED_HEAD + payload_of(OTHER_ROLE + TOKEN + TOKEN + END), CLOSE],
    "with a length": [answer(payload_of(OTHER_ROLE + TOKEN + TOKEN + END), b"content-type: text/event-stream")],
}


CONTINUED = [
    *((True, first, "in chunks") for first in FAILS),
    *((True, "broken off", follows) for follows in FOLLOWS if follows != "in chunks"),
    *((False, "reset", follows) for follows in FOLLOWS),
    (False, "hangs", "in chunks"),
]


@pytest.mark.parametrize(("chunked", "first", "follows"), CONTINUED)
async def test_another_engine_continues_a_stream_of_which_only_head_and_comments_went_out(
    chunked: bool, first: str, follows: str
) -> None:
    failed, begun = trio.Event(), b"" if first == "no event" else ROLE
    opened = chunk(PING) + begun if chunked else PING + payload_of(begun)
    script = [(STREAM_HEAD if chunked else CLOSED_HEAD) + opened, failed, *FAILS[first]]
    settings: dict[str, Any] = {"first_event_timeout_s": 0.6} if first == "hangs" else {}
    nodes = engines(script, FOLLOWS[follows])
    async with lab(*nodes, sse_keepalive_s=0.1, ask_usage=False, **settings) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        await wire.until(OURS)
        failed.set()
        if chunked:
            payload = await ended(wire)
        else:
            await wire.rest()
            payload = wire.seen.partition(HEAD_END)[2]
        outcomes = (await at_rest(node))["outcomes"]
    role = payload_of(begun or OTHER_ROLE)
    assert without_ours(payload).replace(PING, b"") == role + payload_of(TOKEN + TOKEN + END)
    assert outcomes.pop("success") == 1
    assert sum(outcomes.values()) == 1


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_stream_is_announced_once_whichever_engine_answers(path: bytes) -> None:
    failed = trio.Event()
    both = engines([STREAM_HEAD + OPENINGS[path], failed, CLOSE], [STREAM_HEAD + OPENINGS[path], FIRST[path] + END])
    async with lab(*both, sse_keepalive_s=0.1, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(json.dumps({**QUESTIONS[path], "stream": True, "store": False}).encode(), target=path))
        await wire.until(payload_of(OPENINGS[path]))
        failed.set()
        assert without_ours(await ended(wire)) == payload_of(OPENINGS[path] + FIRST[path] + END)


async def test_the_line_is_held_while_another_engine_computes_before_it_sends_a_head() -> None:
    failed, computed = trio.Event(), trio.Event()
    both = engines([STREAM_HEAD, failed, CLOSE], [computed, STREAM_HEAD + TOKEN + END])
    async with lab(*both, sse_keepalive_s=0.05, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        await wire.until(OURS)
        failed.set()
        while sum(len(each.bodies) for each in both) < 2:
            await wire.until(OURS)
        await wire.until(OURS)
        computed.set()
        assert without_ours(await ended(wire)) == payload_of(TOKEN + END)


SHAPES = {
    CHAT: lambda events: events[0][1]["error"]["message"],
    b"/v1/completions": lambda events: events[0][1]["error"]["message"],
    GENERATE: lambda events: events[0][1]["error"]["message"],
    MESSAGES: lambda events: (
        events[0][0] == "error" and events[0][1]["type"] == "error" and events[0][1]["error"]["message"]
    ),
    RESPONSES: lambda events: (
        (events[0][1]["type"], events[1][1]["type"]) == ("error", "response.failed") and events[0][1]["message"]
    ),
}
NONE_CAN: dict[str, tuple[list[Step], str]] = {
    "full": ([answer(b'{"error":{"message":"no room","type":"x","code":503}}', status=503)], "no room"),
    "refuses": ([answer(b'{"error":{"message":"too long","type":"x","code":400}}', status=401)], "too long"),
    "full, without words": ([answer(b"", status=503)], "failed"),
    "breaks off": ([CLOSE], "closed"),
    "has no event": ([STREAM_HEAD + DONE], "without any output"),
    "answers as a whole": ([GOOD], "no stream"),
    "answers compressed": (
        [STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + TOKEN + END],
        "no stream",
    ),
    "fails within a 200": ([STREAM_HEAD + event(ERROR) + END], "CUDA"),
    "fails within a 200 that is no stream": (
        [answer(json.dumps(ERROR).encode(), b"content-type: application/json")],
        "",
    ),
}


def events_of(payload: bytes) -> list[tuple[str, Any]]:
    found = []
    for text in without_ours(payload).decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in text.split("\n") if line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


@pytest.mark.parametrize(
    ("path", "second"),
    [
        *((CHAT, second) for second in NONE_CAN),
        *product([path for path in SHAPES if path != CHAT], ["full", "breaks off"]),
    ],
)
async def test_if_none_can_continue_it_the_failure_is_an_event_in_the_shape_of_its_api(
    path: bytes, second: str
) -> None:
    failed, (script, words) = trio.Event(), NONE_CAN[second]
    both = engines([STREAM_HEAD + OPENINGS.get(path, b""), failed, CLOSE], script)
    async with lab(*both, sse_keepalive_s=0.1, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(json.dumps({**QUESTIONS[path], "stream": True, "store": False}).encode(), target=path))
        await wire.until(OURS)
        failed.set()
        events = events_of(await ended(wire))[len(events_of(payload_of(OPENINGS.get(path, b"")))) :]
        routes = await at_rest(node)
    assert "success" not in routes["outcomes"]
    assert routes["rows"] == 0
    message = SHAPES[path](events) if second != "fails within a 200" else events[0][1]["error"]["message"]
    assert words in message


@pytest.mark.parametrize("end", [[b'"choices":[]}'], [CLOSE]], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"], ids=["whole answer", "compressed stream"])
async def test_what_no_other_engine_could_continue_goes_out_as_it_came(end: list[Step], kind: bytes) -> None:
    seen, coding = trio.Event(), b"content-encoding: gzip\r\n" if kind == b"text/event-stream" else b""
    head = b"HTTP/1.1 200 OK\r\n%bcontent-type: %b\r\ncontent-length: 14\r\n\r\n" % (coding, kind)
    both = engines([head + (b"" if coding else b"{"), seen, *([b"{"] if coding else []), *end], [GOOD])
    async with lab(*both) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=bool(coding))))
        await wire.until(HEAD_END)
        seen.set()
        if end == [CLOSE]:
            assert await wire.cut()
        else:
            assert await wire.exactly(14) == b'{"choices":[]}'
    assert sum(len(each.bodies) for each in both) == 1


async def test_a_connection_serves_on_behind_such_an_event() -> None:
    failed = trio.Event()
    engine = engines([STREAM_HEAD, failed, CLOSE], [STREAM_HEAD + TOKEN + END], count=1)
    async with lab(*engine, sse_keepalive_s=0.1, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        await wire.until(OURS)
        failed.set()
        assert b"error" in await ended(wire)
        wire.buffer = wire.seen = b""
        await wire.send(post(chat(stream=True)))
        assert await ended(wire) == payload_of(TOKEN + END)


async def test_a_stream_without_a_first_event_in_time_ends_with_such_an_event() -> None:
    async with lab(Scripted(STREAM_HEAD, HANG), sse_keepalive_s=0.1, first_event_timeout_s=0.6) as node:
        assert b'"message"' in await streamed(node)
        assert (await at_rest(node))["outcomes"] == {"timeout": 1}


async def test_comments_and_pings_of_an_engine_count_as_life() -> None:
    beats = [trio.Event() for _ in range(5)]
    steps = [step for number, beat in enumerate(beats) for step in (beat, chunk(b": %d\n\n" % number))]
    engine = Scripted(STREAM_HEAD, *steps, TOKEN + END)
    settings = {"sse_keepalive_s": 0.25, "first_event_timeout_s": 0.9}
    async with lab(engine, **settings, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        for number, beat in enumerate(beats):  # at least 0.25 s each
            await wire.until(OURS)
            beat.set()
            await wire.until(b": %d\n\n" % number)
        assert (await ended(wire)).endswith(payload_of(TOKEN + END))


async def test_what_is_too_long_to_be_held_goes_out_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_stream, "HELD_S", 1000.0)
    many, computed = event({"type": "ping", "pad": "x" * 70_000}), trio.Event()
    engine = Scripted(STREAM_HEAD + many, computed, FIRST[MESSAGES] + END)
    async with lab(engine) as node, await node.wire() as wire:
        await wire.send(question(MESSAGES, stream=True))
        await wire.until(many)
        computed.set()
        await wire.until(FIRST[MESSAGES] + END)


async def test_a_client_of_http_1_0_gets_comments_without_chunks() -> None:
    computed = trio.Event()
    engine = Scripted(STREAM_HEAD + chunk(PING), computed, TOKEN + END)
    async with lab(engine, sse_keepalive_s=0.05, ask_usage=False) as node, await node.wire() as wire:
        await wire.send(post(chat(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await wire.until(OURS)
        computed.set()
        await wire.rest()
    assert without_ours(wire.seen.partition(HEAD_END)[2]) == PING + payload_of(TOKEN + END)


async def test_a_client_that_leaves_while_the_first_event_is_waited_for_ends_the_request() -> None:
    engine = Scripted(STREAM_HEAD, HANG)
    async with lab(engine, sse_keepalive_s=0.05) as node:
        async with await node.wire() as wire:
            await wire.send(post(chat(stream=True)))
            await wire.until(OURS)
        await engine.left.wait()
        assert (await at_rest(node))["outcomes"] == {"cancelled": 1}


@pytest.mark.parametrize("last", [[TOKEN + END], [CLOSE]], ids=["served", "failed"])
async def test_all_who_ask_the_same_get_the_comments_and_the_end(last: list[Step]) -> None:
    computed = trio.Event()
    engine = Scripted(STREAM_HEAD, computed, *last)
    asked = post(chat(stream=True, temperature=0))
    settings = {**ON, "sse_keepalive_s": 0.05, "ask_usage": False}
    async with lab(engine, **settings) as node, await node.wire() as first, await node.wire() as second:
        await first.send(asked)
        await engine.asked.wait()
        await second.send(asked)
        await until_in_flight(node, 2)
        await first.until(OURS)
        await second.until(OURS)
        computed.set()
        got = [without_ours(await ended(wire)) for wire in (first, second)]
        if last != [CLOSE]:
            async with await node.wire() as later:  # gets what was kept, which has none of our comments
                await later.send(asked)
                assert await ended(later) == got[0]
    assert got[0] == got[1]
    assert (b"word" in got[0], b"error" in got[0]) == (last != [CLOSE], last == [CLOSE])
    assert len(engine.bodies) == 1


async def test_a_part_that_an_engine_begins_without_a_word_is_kept_until_it_has_one() -> None:
    block = event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    fails = trio.Event()
    opening = STREAM_HEAD + OPENINGS[MESSAGES] + block
    backends = engines([opening, fails, CLOSE], [opening + FIRST[MESSAGES] + END])
    async with lab(*backends, sse_keepalive_s=0.05) as node, await node.wire() as wire:
        await wire.send(question(MESSAGES, stream=True))
        await wire.until(chunk(OURS))
        fails.set()
        payload = without_ours(await ended(wire))
    assert payload == payload_of(OPENINGS[MESSAGES] + block + FIRST[MESSAGES] + END)
