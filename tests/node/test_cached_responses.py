"""A node that answers from its response cache: clients on real sockets, engines that follow a script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import trio

from tests.node.node_lab import Node, chat, lab
from tests.proxy.wire import CLOSE, END, GOOD, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, answer, post

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


async def test_without_the_option_nothing_is_cached_and_no_answer_speaks_of_it() -> None:
    engine = Scripted(GOOD)
    async with lab(engine) as node:
        assert not [response for _ in range(2) if "x-cache" in (response := await ask(node)).headers]
    assert len(engine.bodies) == 2


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


async def test_a_whole_answer_serves_who_wants_a_stream() -> None:
    async with lab(Scripted(GOOD), **ON) as node:
        assert results(await ask(node), streamed := await ask(node, stream=True)) == ["MISS", "HIT"]
        assert b'"content":"hi"' in streamed.content
        assert streamed.content.endswith(b"data: [DONE]\n\n")


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


async def test_when_the_first_who_asked_leaves_the_others_still_get_the_answer() -> None:
    go_on, begun = trio.Event(), trio.Event()
    engine = Scripted(STREAM_HEAD + ROLE + TOKEN, go_on, TOKEN + END)
    async with lab(engine, **ON, ask_usage=False) as node, trio.open_nursery() as nursery:
        leader = await node.wire()
        await leader.send(post(chat(stream=True, **COLD)))
        while b"word" not in leader.buffer:
            await leader.more()

        async def follow() -> None:
            async with await node.wire() as wire:
                await wire.send(post(chat(stream=True, **COLD)))
                while b"word" not in wire.buffer:
                    await wire.more()
                begun.set()
                while not wire.buffer.endswith(b"0\r\n\r\n"):
                    assert await wire.more()
                assert wire.buffer.count(b'"word"') == 2

        nursery.start_soon(follow)
        await begun.wait()
        await leader.aclose()
        go_on.set()
    assert len(engine.bodies) == 1


async def test_a_failure_sends_one_of_those_who_waited_and_not_all() -> None:
    waiting = trio.Event()
    broken = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}"
    engine = Scripted(turns=turns([waiting, broken]))
    async with lab(engine, **ON) as node, trio.open_nursery() as nursery:
        found: list[httpx.Response] = []

        async def one() -> None:
            found.append(await ask(node))

        for _ in range(10):
            nursery.start_soon(one)
        await node.until("/admin/backends", lambda view: view["backends"][0]["in_flight"] == 1)
        waiting.set()
    assert sorted(response.status_code for response in found) == [200] * 9 + [400]
    assert len(engine.bodies) == 2


async def test_an_operator_invalidates_answers_and_sees_what_the_cache_saved() -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 2}
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    async with lab(Scripted(answer(json.dumps({"choices": [choice], "usage": counts}).encode())), **ON) as node:
        for _ in range(3):
            await ask(node)
        stats = await node.ask("/admin/response-cache/stats")
        assert (stats["enabled"], stats["backend_type"], stats["entries"], stats["capacity"]) == (
            True,
            "memory",
            1,
            1000,
        )
        assert stats["requests"] == {"hit": 2, "miss": 1, "skip": 0, "total": 3}
        assert stats["hit_rate"] == "0.6667"
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
