"""Logs and metrics name the key by its id and the tenant, in a bounded number of series, and never the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.io.logs import text_request
from ranvier_py.node.parts import request_parts
from ranvier_py.node.parts.request_metrics import TENANTS_MAX
from ranvier_py.node.parts.request_parts import RequestPath
from tests.builders.built_nodes import built
from tests.node.access.key_lab import BLUE, RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, lab
from tests.proxy.wire import GOOD, Scripted, answer

LISTED = b'{"object":"list","data":[{"id":"lab-model","object":"model"}]}'


async def counts(node: Node, family: str) -> dict[str, int]:
    page = (await node.http.get(f"{node.control}/metrics")).text
    assert "rk-" not in page
    found = re.findall(rf"^ranvier_{family}_total\{{(.*)\}} (\S+)$", page, re.MULTILINE)
    return {labels.replace('"', ""): int(float(number)) for labels, number in found}


async def test_each_request_is_counted_once_and_its_line_names_key_and_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[RequestSummary] = []
    monkeypatch.setattr(request_parts, "request_line", lambda: lines.append)
    red = key_lines(RED, tenant="t", models=["lab-*"]) + '[[tenant]]\nname = "t"\n'
    turns = iter([[GOOD], [GOOD], [answer(b"{}", status=400)]])
    async with lab(Scripted(turns=turns, page=LISTED), keys_file=keys_file(tmp_path, red, key_lines(BLUE))) as node:
        for key, model in ((RED, "lab-model"), (BLUE, "lab-model"), (RED, "lab-model"), (RED, "other"), ("rk-x", "a")):
            await asked(node, bearer(key), model=model)
        await node.http.get(f"{node.url}/v1/models", headers=bearer(BLUE))
        assert await counts(node, "requests") == {
            "code=200,model=lab-model,path=/v1/chat/completions,tenant=t": 1,
            "code=200,model=lab-model,path=/v1/chat/completions,tenant=blue": 1,
            "code=400,model=lab-model,path=/v1/chat/completions,tenant=t": 1,
            "code=404,model=,path=/v1/chat/completions,tenant=t": 1,
            "code=401,model=,path=/v1/chat/completions,tenant=": 1,
            "code=200,model=,path=/v1/models,tenant=blue": 1,
        }
        backend = node.engines[0].removeprefix("http://")
        expected = {f"backend={backend},code=200": 2, f"backend={backend},code=400": 1}
        assert await counts(node, "backend_requests") == expected
        assert await counts(node, "access_refused") == {"reason=unknown": 1}
    named = [(line.key_id, line.tenant, line.model) for line in lines]
    assert named[:2] == [("red", "t", "lab-model"), ("blue", "blue", "lab-model")]
    assert named[4:] == [("", "", ""), ("blue", "blue", "")]
    assert " key_id=red tenant=t" in text_request(lines[0])
    assert "key_id" not in text_request(lines[4])
    assert not any("rk-" in str(line) for line in lines)


def test_tenants_beyond_a_bound_are_counted_as_others() -> None:
    counts = built().part(RequestPath).counts
    for number in range(TENANTS_MAX + 10):
        counts.refused(RequestSummary("", "POST", "/v1/embeddings", 429, "", tenant=f"t{number}"))
        counts.refused(RequestSummary("", "POST", f"/{number}", 429, "", tenant="t0"))
    found = {
        (each.labels["path"], each.labels["tenant"]): each.value for each in counts.samples() if each.name == "requests"
    }
    assert len(found) == TENANTS_MAX + 2
    assert found["/v1/embeddings", "other"] == 10
    assert found["other", "t0"] == TENANTS_MAX + 10


async def test_tokens_are_counted_by_tenant_and_shown_by_the_page(tmp_path: Path) -> None:
    tenant = '[[tenant]]\nname = "t"\n'
    async with lab(
        engines=1, keys_file=keys_file(tmp_path, key_lines(RED, tenant="t") + tenant, key_lines(BLUE))
    ) as node:
        for key, stream in ((RED, False), (RED, True), (BLUE, False)):
            await asked(node, bearer(key), stream=stream, max_tokens=3)
        while await counts(node, "tenant_output_tokens") != {"tenant=t": 6, "tenant=blue": 3}:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)  # answers are read beside the path
        found = {name: await counts(node, f"tenant_{name}_tokens") for name in ("prompt", "cached", "output")}
        assert found["prompt"]["tenant=t"] == 2 * found["prompt"]["tenant=blue"] > 0
        assert found["cached"].keys() == found["prompt"].keys()
        past = await node.until(
            "/admin/page/past?ago=0", lambda past: len(past.get("panes", {}).get("tenant_requests", ())) == 2
        )
        for name, (requests, refused, *tokens) in past["panes"]["tenant_requests"].items():
            assert (requests, refused) == ({"t": 2, "blue": 1}[name], 0)
            assert tokens == [found[each][f"tenant={name}"] for each in ("prompt", "cached", "output")]
