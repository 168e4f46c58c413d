"""A node that answers from its response cache: clients on real sockets, engines that follow a script."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.proxy.answers import awaited_stream
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, chat, lab
from tests.proxy.wire import (
    CHUNKED_HEAD,
    CLOSE,
    END,
    GOOD,
    HANG,
    ROLE,
    STREAM_HEAD,
    TOKEN,
    Scripted,
    Step,
    Wire,
    answer,
    chunk,
    delta,
    post,
)

ON = {"response_cache": True}
COLD = {"temperature": 0}


async def ask(node: Node, credential: str = "alice", control: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {credential}", **({"cache-control": control} if control else {})}
    sent = chat(**{**COLD, **fields})
    return await node.http.post(f"{node.url}/v1/chat/completions", content=sent, headers=headers)


def results(*responses: httpx.Response) -> list[str]:
    return [response.headers["x-cache"] for response in responses]


async def counted(node: Node) -> dict[str, int]:
    stats = await node.ask("/admin/response-cache/stats")
    return {name: stats["requests"][name] for name in ("hit", "miss", "skip")}


async def test_a_second_equal_request_contacts_no_engine() -> None:
    engine = Scripted(GOOD)
    async with lab(engine, **ON) as node:
        first, second = await ask(node), await ask(node)
        assert results(first, second) == ["MISS", "HIT"]
        assert first.content == second.content
        assert second.headers["content-type"] == "application/json"
        assert int(second.headers["age"]) == 0
        assert "x-ranvier-backend" not in second.headers
        assert len(engine.bodies) == 1
        assert await counted(node) == {"hit": 1, "miss": 1, "skip": 0}
        assert sum((await node.ask("/admin/routes"))["decisions"].values()) == 1


async def test_what_is_not_eligible_is_passed_by() -> None:
    engine = Scripted(GOOD)
    async with lab(engine, **ON) as node:
        for _ in range(2):
            assert results(await ask(node, temperature=0.5), await ask(node, control="no-store")) == ["BYPASS"] * 2
        assert await counted(node) == {"hit": 0, "miss": 0, "skip": 4}
    assert len(engine.bodies) == 4


async def test_no_client_gets_what_another_credential_got() -> None:
    engine = Scripted(GOOD)
    async with lab(engine, **ON) as node:
        assert results(*[await ask(node, name) for name in ("alice", "bob", "bob")]) == ["MISS", "MISS", "HIT"]


async def test_who_wants_a_fresh_answer_gets_one_and_leaves_it_to_the_others() -> None:
    async with lab(Scripted(GOOD), **ON) as node:
        asked = [await ask(node, control=control) for control in ("", "no-cache", "max-age=0", "max-age=60", "")]
        assert results(*asked) == ["MISS", "MISS", "MISS", "HIT", "HIT"]


STREAM: Sequence[Step] = (STREAM_HEAD + ROLE + TOKEN, TOKEN + END)


async def test_a_stream_is_replayed_to_who_wants_a_stream_and_nothing_but_a_stream_without_counts() -> None:
    engine = Scripted(*STREAM)
    async with lab(engine, **ON, ask_usage=False) as node:
        first, second = [await ask(node, stream=True) for _ in range(2)]
        assert results(first, second, await ask(node)) == ["MISS", "HIT", "BYPASS"]
        assert first.content == second.content
        assert second.headers["content-type"].startswith("text/event-stream")


def turns(*scripts: Sequence[Step]) -> Iterator[Sequence[Step]]:
    yield from scripts
    while True:
        yield [GOOD]


async def test_of_errors_and_cut_answers_nothing_is_kept() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}"
    engine = Scripted(turns=turns([refusal], [STREAM_HEAD + ROLE + TOKEN, CLOSE]))
    async with lab(engine, **ON) as node:
        assert (await ask(node)).status_code == 400
        with suppress(httpx.TransportError):
            await ask(node, stream=True)
        assert results(await ask(node), await ask(node)) == ["MISS", "HIT"]


async def test_equal_requests_at_once_are_one_request_and_all_get_it_as_it_comes() -> None:
    go_on = trio.Event()
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, go_on, TOKEN + END)
    async with lab(engine, **ON, ask_usage=False) as node, trio.open_nursery() as nursery:
        raws: list[bytes] = []
        begun = [trio.Event() for _ in range(20)]

        async def follow(event: trio.Event) -> None:
            async with await node.wire() as wire:
                await wire.send(post(chat(stream=True, **COLD)))
                while b"word" not in wire.buffer:
                    await wire.more()
                event.set()
                while not wire.buffer.endswith(b"0\r\n\r\n"):
                    await wire.more()
                raws.append(wire.buffer.partition(b"\r\n\r\n")[2])

        for event in begun:
            nursery.start_soon(follow, event)
        for event in begun:
            await event.wait()
        go_on.set()
        await node.until("/admin/response-cache/stats", lambda stats: stats["requests"]["hit"] == 19)
        assert await counted(node) == {"hit": 19, "miss": 1, "skip": 0}
    assert (len(raws), len(set(raws)), len(engine.bodies)) == (20, 1, 1)


WHOLE, STREAMED = post(chat(**COLD)), post(chat(stream=True, **COLD))


async def begun(node: Node) -> Wire:
    """A client whose answer has begun."""
    wire = await node.wire()
    await wire.send(STREAMED)
    await until_words(wire, 1)
    return wire


async def until_words(wire: Wire, count: int) -> None:
    while wire.buffer.count(b'"word"') < count:
        assert await wire.more()


async def until_in_flight(node: Node, count: int) -> None:
    """Until so many requests have been read and not answered."""
    while f"ranvier_server_in_flight {count}.0\n" not in (await node.http.get(f"{node.control}/metrics")).text:  # noqa: ASYNC110
        await trio.sleep(BETWEEN_LOOKS_S)


async def leave(node: Node, client: Wire) -> None:
    """It hangs up, and the node has seen it."""
    await client.aclose()
    await node.backends()  # what comes over the network later is seen later


async def test_when_the_first_who_asked_leaves_the_others_still_get_the_answer() -> None:
    go_on = trio.Event()
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, go_on, TOKEN + END)
    async with lab(engine, **ON, ask_usage=False) as node:
        leader, follower = await begun(node), await begun(node)
        async with follower:
            await leave(node, leader)
            go_on.set()
            await until_words(follower, 2)
    assert len(engine.bodies) == 1


async def test_when_the_first_who_asked_leaves_a_silent_engine_is_given_up_for_the_others_in_time() -> None:
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, HANG)
    async with lab(engine, **ON, ask_usage=False, stall_timeout_s=0.5) as node:
        leader, follower = await begun(node), await begun(node)
        await leave(node, leader)
        async with follower:
            assert await follower.cut()
        await engine.left.wait()


async def test_when_all_who_asked_have_left_the_engine_is_let_go() -> None:
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, HANG)
    async with lab(engine, **ON, ask_usage=False) as node:
        leader, *followers = [await begun(node) for _ in range(3)]
        await leave(node, leader)
        for follower in followers:
            assert not engine.left.is_set()
            await leave(node, follower)
        await engine.left.wait()
        await node.until_backend(lambda backend: backend["in_flight"] == 0)


async def test_a_prefill_goes_on_for_the_others_when_the_first_who_asked_leaves() -> None:
    go_on = trio.Event()
    engine = Scripted(go_on, GOOD)
    async with lab(engine, **ON) as node:
        leader, follower = await node.wire(), await node.wire()
        await leader.send(WHOLE)
        await engine.asked.wait()
        await follower.send(WHOLE)
        await until_in_flight(node, 2)
        await leave(node, leader)
        go_on.set()
        async with follower:
            assert (await follower.response())[0] == 200
    assert len(engine.bodies) == 1


async def test_a_first_one_who_takes_too_little_is_cut_off_alone() -> None:
    go_on = trio.Event()
    large = delta("x" * 500_000) * 14  # more than sockets keep
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, go_on, large + END)
    async with lab(engine, **ON, ask_usage=False, send_window_s=0.3) as node:
        leader = await Wire.connect(node.address[1], receive_buffer=4096)
        await leader.send(STREAMED)
        await until_words(leader, 1)
        async with leader, await begun(node) as follower:
            go_on.set()
            while not (await follower.stream.receive_some()).endswith(END[-20:]):
                pass
            await until_in_flight(node, 0)
            assert await leader.cut()
    assert len(engine.bodies) == 1


async def test_a_follower_gets_only_what_its_own_fields_let_it_read() -> None:
    go_on = trio.Event()
    small = gzip.compress(GOOD.partition(b"\r\n\r\n")[2])
    compressed = answer(small, b"content-type: application/json", b"content-encoding: gzip")
    engine = Scripted(turns=turns([compressed[:-9], go_on, compressed[-9:]]))
    async with lab(engine, **ON) as node:
        leader, like, other = [await node.wire() for _ in range(3)]
        for number, wire in enumerate((leader, like, other), 1):
            await wire.send(post(chat(**COLD), b"accept-encoding: gzip") if wire is not other else WHOLE)
            await until_in_flight(node, number)
        go_on.set()
        found = []
        for wire in (leader, like, other):
            async with wire:
                _, headers, body = await wire.response()
                found.append((headers["x-cache"], headers.get("content-encoding"), body == small))
    assert found == [("MISS", "gzip", True), ("HIT", "gzip", True), ("MISS", None, False)]


async def test_a_follower_of_http_1_0_gets_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_stream, "HELD_S", 0.05)
    go_on = trio.Event()
    body = GOOD.partition(b"\r\n\r\n")[2]
    engine = Scripted(CHUNKED_HEAD + chunk(body[:9]), go_on, chunk(body[9:]) + b"0\r\n\r\n")
    async with lab(engine, **ON) as node, await node.wire() as leader, await node.wire() as follower:
        await leader.send(WHOLE)
        await leader.until(b"\r\n\r\n")
        await follower.send(WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        await until_in_flight(node, 2)
        go_on.set()
        assert (await follower.rest()).partition(b"\r\n\r\n")[2] == body
    assert len(engine.bodies) == 1


async def test_an_operator_invalidates_answers_and_sees_what_the_cache_saved() -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 2}
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    async with lab(Scripted(answer(json.dumps({"choices": [choice], "usage": counts}).encode())), **ON) as node:
        for _ in range(3):
            await ask(node)
        await ask(node, temperature=0.5)
        stats = await node.ask("/admin/response-cache/stats")
        shown = [stats[name] for name in ("enabled", "backend_type", "entries", "capacity")]
        assert shown == [True, "memory", 1, 1000]
        assert stats["requests"] == {"hit": 2, "miss": 1, "skip": 1, "total": 4}
        assert stats["hit_rate"] == "0.6667", "of what was looked up (CX14)"
        assert (stats["saved_prompt_tokens"], stats["saved_output_tokens"]) == (18, 4)
        url = f"{node.control}/admin/response-cache/invalidate"
        none = (await node.http.post(url, json={"model": "other"})).json()
        assert none == {"success": True, "action": "invalidate", "cleared_entries": 0}
        old = (await node.http.post(url, json={"older_than_s": 0, "tenant": "alice"})).json()
        assert old["cleared_entries"] == 1
        await ask(node)
        cleared = (await node.http.post(url, json={"clear_all": True})).json()
        assert cleared == {"success": True, "action": "clear_all", "cleared_entries": 1}
        assert (await node.http.post(url, json={})).status_code == 400
        assert (await node.http.post(url, json={"clear_all": True, "model": "m"})).status_code == 400
        assert results(await ask(node)) == ["MISS"]
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_response_cache_requests_total{result="hit"} 2.0' in page
