"""Equal requests at the same time: nobody waits for the failures, or for the slow reading, of another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
import trio

from tests.examples import some
from tests.node.node_lab import Node, chat, lab
from tests.node.test_cached_responses import COLD, ON, counted, leave, until_in_flight
from tests.node.test_whose_answers import APIS
from tests.proxy.wire import CLOSE, END, GOOD, HANG, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, Wire, answer, delta, post

TRIES_MAX = 4  # of one request
KINDS = {"whole": {}, "stream": {"stream": True}}


def forever(script: Sequence[Step]) -> Iterator[Sequence[Step]]:
    while True:
        yield script


def body_of(path: str, *, stream: bool) -> bytes:
    return json.dumps({**json.loads(APIS[path][0]), **({"stream": True} if stream else {})}).encode()


async def at_once(node: Node, engine: Scripted, path: str, streams: Sequence[bool], go_on: trio.Event) -> list[int]:
    """Statuses of equal requests, all under way before the engine answers the first."""
    found: list[int] = []

    async def one(stream: bool) -> None:
        response = await node.http.post(node.url + path, content=body_of(path, stream=stream))
        found.append(response.status_code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, streams[0])
        await engine.asked.wait()
        for stream in streams[1:]:
            nursery.start_soon(one, stream)
        await until_in_flight(node, len(streams))
        go_on.set()
    return found


@pytest.mark.parametrize("path", some(list(APIS)))
@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_failure_of_the_first_who_asked_is_the_failure_of_all_who_waited(path: str, status: int) -> None:
    """Also of those who want the other kind."""
    go_on = trio.Event()
    engine = Scripted(go_on, answer(b'{"error":{}}', b"retry-after: 7", status=status))
    async with lab(engine, **ON) as node:
        kinds = [False] * 10 if path == "/v1/embeddings" else [False] * 5 + [True] * 5
        assert await at_once(node, engine, path, kinds, go_on) == [status] * 10
        assert (await counted(node))["hit"] == 0
    assert len(engine.bodies) <= TRIES_MAX


@pytest.mark.parametrize("end", [CLOSE, HANG])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_gives_no_answer_fails_all_who_waited_at_the_same_time(end: str, stream: bool) -> None:
    go_on = trio.Event()
    engine = Scripted(go_on, end)
    async with lab(engine, **ON, first_byte_timeout_s=0.5) as node:
        statuses = await at_once(node, engine, "/v1/chat/completions", [stream] * 5 + [not stream] * 5, go_on)
        assert set(statuses) == {504 if end == HANG else 502}
        await until_in_flight(node, 0)
    assert len(engine.bodies) <= TRIES_MAX


async def test_who_leads_in_vain_for_a_client_that_left_holds_up_nobody() -> None:
    go_on = trio.Event()
    engine = Scripted(turns=iter([[go_on, answer(b"{}", status=400)], *[[GOOD]] * 5]))
    async with lab(engine, **ON) as node, await node.wire() as follower:
        leader = await node.wire()
        await leader.send(post(chat(**COLD)))
        await engine.asked.wait()
        await follower.send(post(chat(**COLD)))
        await until_in_flight(node, 2)
        await leave(node, leader)
        go_on.set()
        assert (await follower.response())[0] == 400
        await follower.send(post(chat(**COLD)))
        assert (await follower.response())[0] == 200


LARGE = 4_000_000  # more than sockets keep
WORDS = delta("x" * (LARGE // 32)) * 8  # a delta has it four times
WHOLE = json.dumps(
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * LARGE}, "finish_reason": "stop"}]}
).encode()


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_waits_for_a_slower_reader_than_itself(kind: str) -> None:
    """The first who asked reads nothing at all; the others have the answer while its end is still to come."""
    ending = trio.Event()
    if kind == "stream":
        script: list[Step] = [STREAM_HEAD + ROLE + TOKEN + WORDS, ending, END]
        first = STREAM_HEAD + ROLE + TOKEN + WORDS
        wanted = len(first.partition(b"\r\n\r\n")[2])
    else:
        raw = answer(WHOLE, b"content-type: application/json")
        script = [raw[:-9], ending, raw[-9:]]
        wanted = len(WHOLE) - 9
    engine = Scripted(*script)
    request = post(chat(**COLD, **KINDS[kind]))
    async with lab(engine, **ON, ask_usage=False, response_cache_answer_bytes_max=2 * LARGE) as node:
        leader = await Wire.connect(node.address[1], receive_buffer=4096)
        async with leader, await node.wire() as early, await node.wire() as late:
            await leader.send(request)
            await engine.asked.wait()
            for follower in (early, late):
                await follower.send(request)
                await follower.until(b"\r\n\r\n")
                while len(follower.buffer) < wanted:
                    assert await follower.more()
            ending.set()
            for follower in (early, late):
                while not follower.buffer.endswith(script[-1]):  # type: ignore[arg-type]
                    assert await follower.more()
            async with await node.wire() as later:
                await later.send(request)
                assert (await later.response())[1]["x-cache"] == "HIT"
            while not leader.buffer.endswith(script[-1]):  # type: ignore[arg-type]
                assert await leader.more(), "the slow one gets all of it, too"
            assert len(leader.buffer.partition(b"\r\n\r\n")[2]) == len(early.buffer)
    assert len(engine.bodies) == 1


async def test_a_first_reader_that_falls_behind_gets_what_it_lacks_while_the_engine_is_silent() -> None:
    ending = trio.Event()
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN + WORDS, ending, END)
    async with lab(engine, **ON, ask_usage=False) as node:
        leader = await Wire.connect(node.address[1], receive_buffer=4096)
        async with leader:
            await leader.send(post(chat(**COLD, stream=True)))
            size = len(ROLE + TOKEN + WORDS)
            await leader.until(b"\r\n\r\n")
            while len(leader.buffer) < size:
                assert await leader.more()
            ending.set()
            while not leader.buffer.endswith(END):
                assert await leader.more()


async def test_an_answer_that_outgrows_its_room_keeps_the_engine_waiting_for_its_only_reader_and_no_other_request() -> (
    None
):
    ending = trio.Event()
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN + WORDS, ending, END)
    async with lab(engine, **ON, ask_usage=False, response_cache_stream_bytes_max=100_000) as node:
        leader = await Wire.connect(node.address[1], receive_buffer=4096)
        async with leader, await node.wire() as other:
            request = post(chat(**COLD, stream=True))
            await leader.send(request)
            await leader.until(b"\r\n\r\n")
            while len(leader.buffer) < 200_000:
                await leader.more()
            ending.set()
            await other.send(request)
            while not other.buffer.endswith(END):
                assert await other.more()
            while not leader.buffer.endswith(END):
                assert await leader.more()
    assert len(engine.bodies) == 2
