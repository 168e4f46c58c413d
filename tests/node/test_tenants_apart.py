"""What one client learns of another: nothing, where the operator keeps tenants apart; and how an answer was routed only
who may."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from ranvier_py.core.prompts.tenants import Tenants
from tests.node.node_lab import Node, chat, lab
from tests.proxy.wire import GOOD, Scripted

KEY = {"control_key": "k" * 24}


async def asked(node: Node, credential: str = "", path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    authorization = {"authorization": f"Bearer {credential}"} if credential else {}
    return await node.http.post(node.url + path, content=chat(), headers={**authorization, **headers})


def ours(response: httpx.Response) -> list[str]:
    return sorted(name for name in response.headers if name.startswith("x-ranvier-"))


NAMES = ["x-ranvier-backend", "x-ranvier-matched-tokens", "x-ranvier-reason"]


async def test_how_it_was_routed_is_for_who_has_the_control_key_and_the_engine_never_sees_that() -> None:
    engine = Scripted(GOOD)
    async with lab(engine, debug_headers=False, **KEY) as node:
        assert ours(await asked(node)) == []
        assert ours(await asked(node, **{"x-ranvier-control-key": "k" * 23})) == []
        assert ours(await asked(node, **{"X-Ranvier-Control-Key": "k" * 24})) == NAMES
    assert len(engine.heads) == 3
    assert not any(b"control-key" in head.lower() for head in engine.heads)


async def test_an_empty_key_opens_nothing() -> None:
    async with lab(Scripted(GOOD), debug_headers=False) as node:
        assert ours(await asked(node, **{"x-ranvier-control-key": ""})) == []


@pytest.mark.parametrize("isolation", ["credential", "header:X-Tenant"])
async def test_a_tenants_prompt_matches_its_own_history_alone_and_reaches_the_engine_with_its_salt(
    isolation: str,
) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, tenant_isolation=isolation) as node:
        found = []
        for number, name in enumerate(("alice", "bob", "alice", "bob"), 1):
            response = await asked(node, name, **{"x-tenant": name})
            found.append(int(response.headers["x-ranvier-matched-tokens"]))
            await node.until_routes(lambda view, number=number: view["tokenizer_worker"]["learned"] >= number)
    assert found[:2] == [0, 0]
    assert min(found[2:]) > 0
    salts = [json.loads(body)["cache_salt"] for body in engine.bodies]
    assert salts[:2] == salts[2:]
    assert len(set(salts)) == 2
    assert not {"alice", "bob"} & set(salts)


async def test_an_operator_explains_a_tenants_prompt_as_that_tenant() -> None:
    async with lab(Scripted(GOOD), tenant_isolation="credential") as node:
        await asked(node, "alice")
        await node.until_routes(lambda view: view["tokenizer_worker"]["learned"])
        held = []
        for name in ("alice", "bob"):
            answer = await node.http.post(f"{node.control}/explain", content=chat(), headers={"x-api-key": name})
            held.append(answer.json()["candidates"][0]["matched_tokens"])
    assert held[0] > 0 == held[1]


async def test_what_an_engine_could_read_and_no_salt_can_enter_is_refused() -> None:
    engine = Scripted()
    async with lab(engine, tenant_isolation="credential") as node:
        url = f"{node.url}/v1/chat/completions"
        packed = {"content": gzip.compress(chat()), "headers": {"content-encoding": "gzip"}}
        wide = {"content": chat().decode().encode("utf-16")}
        for sent in (packed, wide):
            assert (await node.http.post(url, **sent)).status_code == 400
        assert (await node.http.post(url.replace("/v1/c", "/v1/%63"), **wide)).status_code == 400
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("owner", "are_salted"), [("vllm", [True, True]), ("sglang", [True, False]), ("somebody", [False, False])]
)
async def test_an_engine_that_knows_no_salt_gets_none_and_that_is_counted(owner: str, are_salted: list[bool]) -> None:
    engine = Scripted(GOOD)
    engine.page = json.dumps({"data": [{"id": "lab-model", "object": "model", "owned_by": owner}]}).encode()
    async with lab(engine, tenant_isolation="credential") as node:
        await node.until_backend(lambda backend: backend["models"])
        for path in ("/v1/chat/completions", "/v1/messages"):
            await asked(node, "alice", path)
        page = (await node.http.get(f"{node.control}/metrics")).text
    assert f"ranvier_unsalted_total {float(are_salted.count(False))}\n" in page
    assert ["cache_salt" in json.loads(body) for body in engine.bodies] == are_salted


async def test_who_asks_is_found_out_once_for_a_request_also_where_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_for: list[tuple[bytes, ...]] = []
    named = Tenants.named
    monkeypatch.setattr(Tenants, "named", lambda self, *values: (asked_for.append(values), named(self, *values))[1])
    async with lab(Scripted(GOOD), tenant_isolation="credential", response_cache=True) as node:
        for name in ("alice", "bob", "alice"):
            assert (await asked(node, name)).status_code == 200
    assert asked_for == [(b"alice",), (b"bob",), (b"alice",)]
