"""A node with a response cache: whose answers a client gets, before any engine has seen its key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.examples import some
from tests.node.node_lab import Node, chat, lab
from tests.node.test_cached_responses import COLD, ON, ask, results, until_in_flight
from tests.node.test_shared_responses import sharing, until_known, until_result
from tests.proxy.wire import END, GOOD, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, answer, post

STREAMED = STREAM_HEAD + ROLE + TOKEN + END
KEY = {"authorization": "Bearer alice"}
SPELLED = [{"authorization": "bearer alice"}, {"authorization": "alice"}, {"x-api-key": "alice"}]
BODY = GOOD.partition(b"\r\n\r\n")[2]

MESSAGE = b'{"type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn"}'
RESPONSE = b'{"object":"response","status":"completed","output":[]}'
APIS = {
    "/v1/chat/completions": (chat(**COLD), BODY),
    "/v1/completions": (json.dumps({"model": "lab-model", "prompt": "p", **COLD}).encode(), BODY),
    "/v1/messages": (chat(**COLD, max_tokens=9), MESSAGE),
    "/v1/responses": (json.dumps({"model": "lab-model", "input": "p", "store": False, **COLD}).encode(), RESPONSE),
    "/v1/embeddings": (json.dumps({"model": "lab-model", "input": "p"}).encode(), b'{"data":[]}'),
}


async def asked(node: Node, headers: dict[str, str], path: str = "/v1/chat/completions", **fields: Any) -> str:
    body = chat(**{**COLD, **fields}) if fields or path not in APIS else APIS[path][0]
    response = await node.http.post(node.url + path, content=body, headers=headers)
    return response.headers["x-cache"] if response.status_code == 200 else str(response.status_code)


@pytest.mark.parametrize("isolation", ["off", "credential", "header:X-Tenant"])
@pytest.mark.parametrize("path", some(list(APIS)))
async def test_a_wrong_key_or_none_gets_no_answer_of_another_credential(isolation: str, path: str) -> None:
    engine = Scripted(answer(APIS[path][1], b"content-type: application/json"))
    async with lab(engine, **ON, tenant_isolation=isolation) as node:
        tenant = {"x-tenant": "t"}
        assert await asked(node, KEY | tenant, path) == "MISS"
        assert [await asked(node, each | tenant, path) for each in SPELLED] == ["HIT"] * 3
        others = [{"authorization": "Bearer mallory"}, {}, {"x-api-key": "alice2"}]
        assert [await asked(node, each | tenant, path) for each in others] == ["MISS"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_no_credential_is_one_class_but_not_whom_a_cookie_or_a_proxy_names(stream: bool) -> None:
    engine = Scripted(STREAMED if stream else GOOD)
    async with lab(engine, **ON, ask_usage=False) as node:
        fields = {"stream": True} if stream else {}
        assert [await asked(node, {}, **fields) for _ in range(2)] == ["MISS", "HIT"]
        for named in ({"cookie": "a=b"}, {"x-forwarded-user": "u"}, {"x-auth-request-email": "e"}):
            assert await asked(node, named, **fields) == "BYPASS"
            assert await asked(node, named | KEY, **fields) in ("MISS", "HIT")


def refusing(*statuses: int) -> Iterator[Sequence[Step]]:
    """Turns: answers, or refusals with these statuses."""
    for status in statuses:
        yield [GOOD if status == 200 else answer(b"{}", status=status)]
    while True:
        yield [GOOD]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("isolation", ["off", "header:X-Tenant"])
async def test_what_a_credential_cached_is_void_once_an_engine_refuses_it(status: int, isolation: str) -> None:
    engine = Scripted(turns=refusing(200, 200, status))
    async with lab(engine, **ON, tenant_isolation=isolation) as node:
        bob = {"authorization": "Bearer bob"}
        assert [await asked(node, each) for each in (KEY, bob, KEY)] == ["MISS", "MISS", "HIT"]
        assert await asked(node, KEY, temperature=1) == str(status)  # a request that the cache has no part in
        assert [await asked(node, each) for each in (KEY, bob)] == ["MISS", "HIT"]


@pytest.mark.parametrize("backend", ["memory", "cluster"])
async def test_a_refusal_at_one_node_voids_the_answers_of_all(tmp_path: Path, backend: str) -> None:
    engine = Scripted(turns=refusing(200, *([200] if backend == "memory" else []), 401))
    async with sharing(tmp_path, engine, response_cache_backend=backend) as (_, nodes):
        await ask(nodes[0])
        if backend == "cluster":
            await until_known(nodes[1:], 1)
        await ask(nodes[1])
        await until_result(nodes[1], "HIT")
        assert (await ask(nodes[1], control="no-cache")).status_code == 401
        await nodes[0].until("/admin/response-cache/stats", lambda stats: stats["entries"] == 0)
        assert results(await ask(nodes[0])) == ["MISS"]


@pytest.mark.parametrize("control", ["no-store", "private", "no-cache", "max-age=0", 'public, Private="x"'])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_engine_gives_to_one_alone_is_neither_kept_nor_shared(
    control: str,
    stream: bool,
) -> None:
    go_on = trio.Event()
    line = b"HTTP/1.1 200 OK\r\nCache-Control: " + control.encode()
    whole = (STREAMED if stream else GOOD).replace(b"HTTP/1.1 200 OK", line, 1)
    engine = Scripted(turns=iter([[whole[:-5], go_on, whole[-5:]], *[[whole]] * 9]))
    async with lab(engine, **ON, ask_usage=False) as node, trio.open_nursery() as nursery:
        found: list[httpx.Response] = []

        async def one() -> None:
            found.append(await ask(node, **({"stream": True} if stream else {})))

        nursery.start_soon(one)
        await engine.asked.wait()
        for _ in range(3):
            nursery.start_soon(one)
        while len(found) < 3:  # noqa: ASYNC110  # those who would have waited are served first
            await trio.sleep(0.01)
        go_on.set()
    assert len(engine.bodies) == len(found) == 4
    assert "HIT" not in results(*found)


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_who_asked_gets_the_answers_cookie(stream: bool) -> None:
    go_on = trio.Event()
    whole = (STREAMED if stream else GOOD).replace(b"\r\n", b"\r\nSet-Cookie: s=1\r\nx-kept: 1\r\n", 1)
    engine = Scripted(whole[:-5], go_on, whole[-5:])
    async with lab(engine, **ON, ask_usage=False) as node:
        request = post(chat(**COLD, **({"stream": True} if stream else {})))
        async with await node.wire() as leader, await node.wire() as follower, await node.wire() as late:
            await leader.send(request)
            await engine.asked.wait()
            await follower.send(request)
            await until_in_flight(node, 2)
            go_on.set()
            heads = [(await wire.response())[1] for wire in (leader, follower)]
            await late.send(request)
            heads.append((await late.response())[1])
    assert [head["x-cache"] for head in heads] == ["MISS", "HIT", "HIT"]
    assert ["set-cookie" in head for head in heads] == [True, False, False]
    assert [head.get("x-kept") for head in heads[:2]] == ["1", "1"]
