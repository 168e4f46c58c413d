"""The tenant of a key is who asks, for isolation, for stored answers, and for the salt that engines get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.node.access.key_lab import BLUE, RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import lab
from tests.node.test_cached_responses import COLD, ON
from tests.proxy.wire import GOOD, Scripted

GREEN = "rk-green-key-of-a-client"


def two_tenants(folder: Path) -> Path:
    lines = [key_lines(RED, tenant="t"), key_lines(BLUE, tenant="t"), key_lines(GREEN), '[[tenant]]\nname = "t"\n']
    return keys_file(folder, *lines)


@pytest.mark.parametrize("isolation", ["credential", "header:X-Tenant"])
async def test_keys_of_one_tenant_share_and_tenants_share_nothing(tmp_path: Path, isolation: str) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, tenant_isolation=isolation, keys_file=two_tenants(tmp_path)) as node:
        found = []
        for number, key in enumerate((RED, GREEN, BLUE, GREEN), 1):
            response = await asked(node, {"x-api-key": key, "x-tenant": "t", "x-other": "t"})
            found.append(int(response.headers["x-ranvier-matched-tokens"]))
            await node.until_routes(lambda view, number=number: view["tokenizer_worker"]["learned"] >= number)
    assert found[:2] == [0, 0]
    assert min(found[2:]) > 0
    red, green, blue, green_again = (json.loads(body)["cache_salt"] for body in engine.bodies)
    assert red == blue != green == green_again


@pytest.mark.parametrize("isolation", ["off", "credential", "header:X-Tenant"])
async def test_answers_belong_to_a_tenant(tmp_path: Path, isolation: str) -> None:
    async with lab(Scripted(GOOD), **ON, tenant_isolation=isolation, keys_file=two_tenants(tmp_path)) as node:
        keys = [({"x-api-key": RED}, "MISS"), (bearer(BLUE), "HIT"), (bearer(GREEN), "MISS")]
        for fields, result in [*keys, ({"api-key": GREEN}, "HIT")]:
            response = await asked(node, {**fields, "cookie": "a=b"}, **COLD)
            assert response.headers["x-cache"] == result
        emptied = {"tenant": "t"}
        response = await node.http.post(f"{node.control}/admin/response-cache/invalidate", json=emptied)
        assert response.json()["cleared_entries"] == 1
        found = [(await asked(node, bearer(key), **COLD)).headers["x-cache"] for key in (GREEN, RED)]
        assert found == ["HIT", "MISS"]


async def test_a_trusted_proxy_and_a_key_name_the_same_tenant(tmp_path: Path) -> None:
    settings = {
        "tenant_isolation": "header:X-Tenant",
        "trusted_proxies": "127.0.0.1",
        "keys_file": two_tenants(tmp_path),
    }
    async with lab(Scripted(GOOD), **ON, **settings) as node:
        asks = [({"x-tenant": "t"}, "MISS"), (bearer(RED), "HIT"), ({**bearer(GREEN), "x-tenant": "t"}, "MISS")]
        for fields, result in asks:
            assert (await asked(node, fields, **COLD)).headers["x-cache"] == result
        assert (await node.ask("/admin/access"))["claims"] == {"x-tenant": 1}


@pytest.mark.parametrize(("proxies", "salts"), [("127.0.0.0/8", 2), ("10.0.0.0/8 ::1", 1)])
async def test_without_keys_the_field_counts_from_trusted_proxies_alone(proxies: str, salts: int) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, tenant_isolation="header:X-Tenant", trusted_proxies=proxies) as node:
        for tenant in ("a", "b"):
            assert (await asked(node, {"x-tenant": tenant, **bearer("k")})).status_code == 200
    assert len({json.loads(body)["cache_salt"] for body in engine.bodies}) == salts
    for head in engine.heads:
        assert (b"\r\nx-tenant: " in head) == (salts == 2)
        assert b"\r\nauthorization: Bearer k\r\n" in head


async def test_an_explanation_is_for_the_tenant_whose_key_it_names(tmp_path: Path) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, tenant_isolation="credential", keys_file=two_tenants(tmp_path)) as node:
        await asked(node, bearer(RED))
        await node.until_routes(lambda view: view["tokenizer_worker"]["learned"] >= 1)
        found = {}
        for key in (BLUE, GREEN):
            body = json.dumps({k: v for k, v in json.loads(engine.bodies[0]).items() if k != "cache_salt"}).encode()
            answer = await node.http.post(f"{node.control}/explain", content=body, headers={"x-api-key": key})
            found[key] = max(each["matched_tokens"] for each in answer.json()["candidates"])
        assert found[BLUE] > 0 == found[GREEN]
