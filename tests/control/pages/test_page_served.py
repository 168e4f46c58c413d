"""The page's files and what they ask for, without a browser: real nodes, real sockets."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trustme

from ranvier_py.control.pages import feed as feed_module
from ranvier_py.control.pages.page import POLICY
from ranvier_py.node.part import Part
from ranvier_py.node.parts.verdict_parts import VerdictParts
from tests.node.node_lab import Node, cluster_lab, lab, turn

PAGES = files("ranvier_py.control.pages")
KEY, SECRET = "the-key-of-the-port", "a sentence that nobody but the engine may see"
PANES = {
    "verdict",
    "requests",
    "engines",
    "prefixes",
    "decisions",
    "hits",
    "shadows",
    "tenants",
    "clients",
    "tenant_requests",
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "STEP_S", 0.1)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def lines(node: Node, query: str = "?seconds=2", key: str = "") -> list[dict[str, Any]]:
    headers = bearer(key) if key else {}
    answer = await node.http.get(f"{node.control}/admin/page/stream{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@asynccontextmanager
async def following(control: str, http: httpx.AsyncClient, query: str = "") -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream, each as it comes."""
    async with (
        http.stream("GET", f"{control}/admin/page/stream{query}") as answer,
        aclosing(answer.aiter_lines()) as found,
    ):
        yield found


async def history(node: Node) -> dict[str, Any]:
    """The series that a viewer gets, as soon as there are some."""
    while True:
        found = [line["history"]["series"] for line in await lines(node, "?seconds=1") if "history" in line]
        if found:
            return {name: values for each in found for name, values in each.items()}


async def test_the_shell_needs_no_key_and_all_that_it_asks_for_does() -> None:
    async with lab(engines=1, control_key=KEY) as node:
        shell = await node.http.get(f"{node.control}/")
        assert shell.status_code == 200
        for path in re.findall(r'(?:src|href)="([^"]+)"', shell.text):
            found = await node.http.get(f"{node.control}{path}")
            assert found.status_code == 200, path
            assert found.headers["content-security-policy"] == POLICY
            assert found.headers["x-content-type-options"] == "nosniff"
        for path in ("/admin/page/stream?seconds=1", "/admin/page/past?ago=1", "/admin/status", "/page", "/page/"):
            assert (await node.http.get(f"{node.control}{path}")).status_code == 401, path
        refused = await node.http.get(f"{node.control}/admin/page/stream", headers=bearer("another"))
        assert refused.status_code == 401
        hello, whole, *_ = await lines(node, key=KEY)
        assert hello["hello"]["role"] == "admin"
        assert whole["panes"].keys() == PANES


def test_no_file_of_the_page_has_what_the_policy_forbids() -> None:
    assert "unsafe" not in POLICY
    shell = (PAGES / "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]* src=)|\son\w+=|\sstyle=|https?://", shell)
    for each in PAGES.iterdir():
        if each.name.endswith(".js"):
            text = each.read_text()
            assert not re.search(r"\beval\(|new Function|innerHTML|document\.write|\bstyle=\"|https?://", text), each
            assert "EventSource" not in text, "it can send no key"


async def test_nothing_else_is_served() -> None:
    async with lab(engines=0) as node:
        for name in (
            "__init__.py",
            "page.py",
            "%2e%2e/page.py",
            "vendor",
            "vendor/README.md",
            "vendor/../page.py",
            "x.js",
        ):
            found = await node.http.get(f"{node.control}/page/{name}")
            assert found.status_code == 404, name


def test_libraries_are_as_they_were_published_and_bring_their_licences() -> None:
    folder = PAGES / "vendor"
    known = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(known) == {each.name for each in folder.iterdir()} - {"SHA256SUMS", "README.md"}
    for name, digest in known.items():
        assert sha256((folder / name).read_bytes()).hexdigest() == digest, name
    libraries = {name.partition(".")[0] for name in known}
    assert {name.removesuffix(".LICENSE") for name in known if name.endswith(".LICENSE")} == libraries


async def test_a_viewer_gets_everything_first_and_then_what_has_changed() -> None:
    async with lab(engines=2, shadow=["least_loaded"]) as node:
        await node.chat()
        async with following(node.control, node.http, "?seconds=20") as changes:
            hello = json.loads(await anext(changes))["hello"]
            assert hello == {"role": "admin", "caller": "-", "step_s": 1.0, "seconds": 900}
            whole = json.loads(await anext(changes))
            assert whole["panes"].keys() == PANES
            names = {f"load/{each['name']}" for each in whole["panes"]["engines"]}
            assert {*names, "requests", "saved_s/least_loaded"} <= (await history(node)).keys()
            await node.chat(turn("and now?"))
            rest = [json.loads(line) async for line in changes]
            assert [len(line["panes"]["decisions"]) for line in rest if "decisions" in line.get("panes", {})][-1] == 2
            assert rest[-1]["now"]["requests"] == 2


async def test_what_has_not_changed_is_not_sent_again() -> None:
    async with lab(engines=1) as node:
        _, _, *rest = await lines(node, "?seconds=6")
        sent = [pane for line in rest if "panes" in line for pane in line["panes"]]
        assert sent.count("shadows") <= 1
        assert sent.count("tenants") <= 1


async def test_the_past_has_each_pane_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SNAPSHOT_S", 1)
    async with lab(engines=1) as node:
        early = await node.http.get(f"{node.control}/admin/page/past?ago=900")
        assert early.status_code == 404
        assert "nothing is known of that time" in early.text
        (engine,) = await node.backends()
        await node.until("/admin/page/past?ago=0", lambda past: "engines" in past.get("panes", {}))
        await node.until("/admin/page/past?ago=2", lambda past: "engines" in past.get("panes", {}))
        before = trio.current_time()
        drained = await node.http.post(f"{node.control}/admin/backends/drain", json={"name": engine["name"]})
        assert drained.status_code == 200
        shows = lambda past: past["panes"]["engines"][0]["draining"]  # noqa: E731
        await node.until("/admin/page/past?ago=0", shows)
        while shows(await node.ask(f"/admin/page/past?ago={int(trio.current_time() - before) + 1}")):
            pass  # it took so long to ask that the order was before
        for wrong in ("x", "-1", ""):
            assert (await node.http.get(f"{node.control}/admin/page/past?ago={wrong}")).status_code == 400


async def test_no_text_of_a_request_is_in_anything_that_the_page_gets() -> None:
    async with lab(engines=2, shadow=["affinity"]) as node:
        for number in range(4):
            await node.chat(turn(f"{SECRET} {number} " * 30, SECRET, SECRET))
        found = await lines(node)
        assert found[1]["panes"]["prefixes"]["name"]
        assert "nobody but the engine" not in json.dumps(found)


async def test_a_part_that_fails_costs_its_own_pane_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lab(engines=1) as node:
        assert (await lines(node))[1]["panes"]["verdict"]

        def fail(part: Part, now: float, *, watched: bool) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(VerdictParts, "panes", fail)
        found = await lines(node, "?seconds=3")
        assert found[1]["panes"].keys() == PANES  # as it was
        assert (await node.faults()).keys() == {"page_panes"}


async def test_a_decision_opens_into_its_candidates_and_in_seconds_while_somebody_looks() -> None:
    async with lab(engines=2, policy="ttft") as node:
        await node.chat()
        ((first,),) = [line["panes"]["decisions"] for line in (await lines(node))[1:2]]
        opened_ = await node.ask(f"/admin/decisions/{first['request_id']}")
        assert not opened_["weighed"]
        assert [each["backend"] for each in opened_["candidates"]] == [each["name"] for each in await node.backends()]
        await node.chat()
        await node.until("/admin/decisions", lambda answer: len(answer["decisions"]) == 2)
        second = (await node.ask("/admin/decisions"))["decisions"][0]
        opened_ = await node.ask(f"/admin/decisions/{second['request_id']}")
        assert opened_["weighed"]
        assert opened_["chosen"] == second["backend"]
        held = {each["backend"]: each["matched_tokens"] for each in opened_["candidates"]}
        assert held[opened_["chosen"]] == second["matched_tokens"] > 0
        assert all(each["terms"]["sum_s"] >= 0 for each in opened_["candidates"])
        assert (await node.http.get(f"{node.control}/admin/decisions/none")).status_code == 404


async def test_a_node_that_ends_closes_the_streams_of_its_viewers(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 1) as place:
        process, _, control = await place.addressed_process()
        async with following(control, place.http) as changes:
            await anext(changes)
            process.terminate()
            with suppress(httpx.ReadError):  # it is cut off
                async for _ in changes:
                    pass
        assert await process.wait() == 0


async def test_any_node_shows_its_peers(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, 1) as place:
        first, _ = await place.cluster(2)
        whole = (await lines(first))[1]
        (peer,) = whole["panes"]["peers"]["members"]
        assert peer["state"] == "alive"
        assert {"lag_ms", "bytes_per_s", "protocol", "route_sync"} <= whole["panes"]["peers"].keys()


async def test_it_is_served_by_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    settings = {"control_tls_certificate_file": chain, "control_tls_key_file": key}
    async with lab(engines=1, **settings) as node, httpx.AsyncClient(verify=trusted, trust_env=False) as http:
        assert (await http.get(f"{node.control}/")).status_code == 200
        assert (await http.get(f"{node.control}/admin/page/stream?seconds=1")).status_code == 200
