"""Who may ask: by which fields, when, in which words others are refused, and what engines see of a client's key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from ranvier_py.core.routing.request_paths import PATHS, REALTIME_PATH
from ranvier_py.proxy.admission.seen_head import SeenHead
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.stages import identify
from tests.examples import some
from tests.late_import import Late
from tests.node.access.key_lab import BLUE, CHAT, OWN, RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, lab, turn
from tests.node.test_client_libraries import openai_of
from tests.proxy.test_realtime import request as handshake
from tests.proxy.wire import GET, GOOD, Scripted, Wire, answer

anthropic, openai = Late("anthropic"), Late("openai")

MESSAGE = b'{"type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn"}'
SHOWN = [bearer(RED), {"authorization": f"bearer  {RED}"}, {"authorization": RED}, {"x-api-key": RED}, {"api-key": RED}]
ALL_FORMS = {**bearer(RED), "x-api-key": BLUE, "api-key": RED, "x-own": "stays"}
PATHS_OF_BODIES = [path.decode() for path in PATHS if path != REALTIME_PATH]


@pytest.mark.parametrize("fields", SHOWN)
async def test_a_key_opens_by_each_field_in_which_clients_send_one(tmp_path: Path, fields: dict[str, str]) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, keys_file=keys_file(tmp_path)) as node:
        assert (await asked(node, fields)).status_code == 200
        wrong = {name: value.replace("red", "rde") for name, value in fields.items()}
        assert (await asked(node, wrong)).status_code == 401
        assert (await asked(node, {})).status_code == 401
    assert len(engine.heads) == 1


@pytest.mark.parametrize("field", [{"authorization": "Bearer"}, {"authorization": "BEARER"}, {"x-api-key": ""}, {}])
async def test_who_sends_an_empty_key_reads_that_one_is_needed(tmp_path: Path, field: dict[str, str]) -> None:
    """It is what a client sends whose variable is not set: no key is wrong."""
    async with lab(Scripted(GOOD), keys_file=keys_file(tmp_path)) as node:
        refused = await asked(node, field)
        assert (refused.status_code, refused.json()["error"]["message"][:21]) == (401, "this node needs a key")


@pytest.mark.parametrize("path", some([CHAT, *PATHS_OF_BODIES, "/v1/files", "/v1/some/path"], 2))
@pytest.mark.parametrize("own", [None, OWN])
async def test_engines_see_no_form_of_a_clients_key_but_that_of_the_node(
    tmp_path: Path, path: str, own: str | None
) -> None:
    engine = Scripted(answer(MESSAGE))
    settings = {"backend_api_key": own} if own else {}
    async with lab(engine, keys_file=keys_file(tmp_path), **settings) as node:
        for _ in range(2):  # the second head of a connection is known
            response = await asked(node, ALL_FORMS, path, b'{"model": "lab-model", "prompt": "a", "input": "a"}')
            assert response.status_code == 200, response.text
    for head in engine.heads:
        assert b"rk-" not in head
        assert b"\r\nx-own: stays\r\n" in head
        assert head.lower().count(b"\r\nauthorization:") == (own is not None)
        assert own is None or f"authorization: Bearer {own}".encode() in head


@pytest.mark.parametrize("path", ["/v1/files/a", "/v1/responses/resp_1"])
async def test_a_get_needs_a_key_as_well_and_hands_on_none(tmp_path: Path, path: str) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, keys_file=keys_file(tmp_path)) as node:
        assert (await node.http.get(node.url + path)).status_code == 401
        await node.http.get(node.url + path, headers=ALL_FORMS)
    assert not any(b"rk-" in head for head in engine.heads)


async def test_what_shows_only_that_a_node_lives_needs_no_key_nor_do_preflights(tmp_path: Path) -> None:
    async with lab(Scripted(GOOD), keys_file=keys_file(tmp_path), cors_origins="https://page.example") as node:
        for path in ("/health", "/"):
            assert (await node.http.get(node.url + path)).status_code == 200
        for path in ("/v1/models", "/v1/models/lab-model", "/nothing"):
            assert (await node.http.get(node.url + path)).status_code == 401
        asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
        preflight = await node.http.options(node.url + CHAT, headers=asks)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, asks["origin"])
        refused = await asked(node, {"origin": asks["origin"]})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, asks["origin"])
        for other in ({"origin": asks["origin"]}, {"access-control-request-method": "POST"}):
            assert (await node.http.options(node.url + CHAT, headers=other)).status_code == 401


ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.mark.parametrize("path", some(["/v1/messages", *PATHS_OF_BODIES]))
async def test_without_a_valid_key_the_refusal_has_the_shape_of_its_api_and_comes_before_the_body(
    tmp_path: Path, path: str
) -> None:
    engine = Scripted(GOOD)
    async with lab(engine, keys_file=keys_file(tmp_path)) as node, await node.wire() as wire:
        lines = f"POST {path} HTTP/1.1\r\nhost: h\r\nx-api-key: rk-other\r\ncontent-length: 9999999\r\n"
        await wire.send(f"{lines}expect: 100-continue\r\n\r\n".encode())
        status, headers, body = await wire.response()
        found = json.loads(body)
        assert (status, headers["www-authenticate"], headers["connection"]) == (401, "Bearer", "close")
        if path in ANTHROPIC:
            assert (found["type"], found["error"]["type"]) == ("error", "authentication_error")
        else:
            assert (found["error"]["code"], found["error"]["type"]) == ("invalid_api_key", "invalid_request_error")
        assert found["error"]["message"] == "the key is not known here"
    assert engine.heads == []


async def test_a_connection_stays_after_a_refusal_of_a_whole_request_and_each_request_shows_its_own_key(
    tmp_path: Path,
) -> None:
    async with lab(Scripted(GOOD), keys_file=keys_file(tmp_path)) as node, await node.wire() as wire:
        for key, status in ((b"rk-other", 401), (RED.encode(), 200), (b"", 401), (RED.encode(), 200)):
            for _ in range(2):
                await wire.send(post_with(key))
                assert (await wire.response())[0] == status


def post_with(key: bytes, body: bytes = b'{"model":"lab-model","prompt":"a"}') -> bytes:
    lines = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n" % len(body)
    return lines + (b"x-api-key: %b\r\n" % key if key else b"") + b"\r\n" + body


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"disabled": True}, "the key is disabled"),
        ({"expires": "2001-01-01T00:00:00Z"}, "the key has expired"),
        ({"not_before": "2501-01-01T00:00:00Z"}, "the key is not valid yet"),
        ({"not_before": "2001-01-01", "expires": "2501-01-01", "disabled": False}, ""),
    ],
)
async def test_a_key_that_is_not_valid_now_is_refused_with_the_reason(
    tmp_path: Path, members: dict[str, Any], words: str
) -> None:
    async with lab(Scripted(GOOD), keys_file=keys_file(tmp_path, key_lines(RED, **members))) as node:
        response = await asked(node, bearer(RED))
        assert response.status_code == (401 if words else 200)
        assert words in response.text


async def test_a_key_expires_on_a_connection_that_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1e9, 4e9, 4.2e9, 9e9])
    monkeypatch.setattr(identify, "time", SimpleNamespace(time=lambda: next(moments)))
    path = keys_file(tmp_path, key_lines(RED, not_before="1971-01-01", expires="2100-01-01"))
    async with lab(Scripted(GOOD), keys_file=path) as node, await node.wire() as wire:
        found = []
        for _ in range(5):
            await wire.send(post_with(RED.encode()))
            found.append((await wire.response())[0])
    assert found == [401, 200, 200, 401, 401]


async def test_a_websocket_brings_its_key_as_a_subprotocol_which_the_engine_does_not_see(tmp_path: Path) -> None:
    engine = Taking()
    async with lab(engine, keys_file=keys_file(tmp_path), backend_api_key=OWN) as node:
        for offered, status in ((f"realtime, openai-insecure-api-key.{RED}", 101), ("realtime", 401)):
            async with await node.wire() as wire:
                await wire.send(handshake(b"sec-websocket-protocol: " + offered.encode()))
                assert (await wire.response(bodiless=True))[0] == status
        async with await node.wire() as wire:
            await wire.send(handshake(f"sec-websocket-protocol: openai-insecure-api-key.{RED}".encode()))
            assert (await wire.response(bodiless=True))[0] == 101
    first, second = engine.heads
    assert b"\r\nsec-websocket-protocol: realtime\r\n" in first
    assert b"sec-websocket-protocol" not in second
    for head in engine.heads:
        assert b"rk-" not in head
        assert f"authorization: Bearer {OWN}".encode() in head


class Taking(Scripted):
    """Accepts WebSockets."""

    async def serve(self, stream: trio.SocketStream) -> None:
        async with Wire(stream) as wire:
            while request := await wire.next_request():
                if b"\r\nupgrade: websocket\r\n" not in request[0].lower():
                    await wire.send(answer(b"{}"))
                    continue
                self.heads.append(request[0])
                accept = b"sec-websocket-accept: ICX+Yqv66kxgM0FcWaLWlFLwTAI="
                lines = [b"HTTP/1.1 101 Switching", b"upgrade: websocket", b"connection: upgrade", accept]
                await wire.send(b"\r\n".join([*lines, b"", b""]))


async def test_what_claims_another_tenant_or_more_priority_is_removed_and_counted(tmp_path: Path) -> None:
    engine = Scripted(GOOD)
    path = keys_file(tmp_path, key_lines(RED, priority=5), key_lines(BLUE))
    async with lab(engine, keys_file=path) as node:
        await asked(node, {**bearer(RED), "x-tenant": "blue", "X-Tenant-Id": "red", "x-priority": "6"})
        await asked(node, {**bearer(RED), "x-tenant": "red", "x-priority": "5"})
        await asked(node, {**bearer(BLUE), "x-priority": "high", "x-gateway-inference-fairness-id": "red"})
        view = await node.ask("/admin/access")
    seen = [
        sorted(line for line in head.lower().split(b"\r\n") if b"tenant" in line or b"prio" in line)
        for head in engine.heads
    ]
    assert seen == [[b"x-tenant-id: red"], [b"x-priority: 5", b"x-tenant: red"], []]
    assert view["claims"] == {"x-tenant": 1, "x-priority": 2, "x-gateway-inference-fairness-id": 1}


async def test_nobody_gets_in_by_claiming_a_tenant_without_a_trusted_proxy(tmp_path: Path) -> None:
    settings = {"tenant_isolation": "header:X-Tenant", "keys_file": keys_file(tmp_path)}
    async with lab(Scripted(GOOD), **settings) as node:
        assert (await asked(node, {"x-tenant": "red"})).status_code == 401
    async with lab(Scripted(GOOD), **settings, trusted_proxies="10.0.0.0/8 ::1") as node:
        assert (await asked(node, {"x-tenant": "red"})).status_code == 401
    async with lab(Scripted(GOOD), **settings, trusted_proxies="10.0.0.0/8 127.0.0.0/8") as node:
        assert (await asked(node, {"x-tenant": "red"})).status_code == 200
        assert (await asked(node, {"x-tenant": "red", **bearer("rk-other")})).status_code == 401
        assert (await asked(node, {})).status_code == 401


def refused_by_the_sdks(url: str) -> None:
    with openai_of(url, "rk-other") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model=MODEL, messages=turn("hello"))
    assert caught.value.code == "invalid_api_key"
    with openai_of(url, RED) as client, pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model=MODEL, messages=turn("hello"))
    assert missing.value.code == "model_not_found"
    with openai_of(url, BLUE) as client:
        assert client.chat.completions.create(model=MODEL, messages=turn("hello")).choices[0].message.content
    for key, error in (("rk-other", anthropic.AuthenticationError), (RED, anthropic.NotFoundError)):
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as claude, pytest.raises(error):
            claude.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hello"}])
    with anthropic.Anthropic(base_url=url, auth_token=BLUE, max_retries=0) as claude:
        assert claude.messages.create(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hello"}]
        ).content


@pytest.mark.slow
async def test_the_sdks_raise_their_own_exceptions_and_work_with_a_key(tmp_path: Path) -> None:
    path = keys_file(tmp_path, key_lines(RED, models=["other"]), key_lines(BLUE))
    talk: Callable[[str], None] = refused_by_the_sdks
    async with lab(engines=1, keys_file=path) as node:
        await trio.to_thread.run_sync(talk, node.url)


async def test_without_a_file_of_keys_all_is_as_it_was(tmp_path: Path) -> None:
    engine = Scripted(GOOD)
    async with lab(engine) as node:
        assert (await asked(node, {**bearer(RED), "x-tenant": "t", "x-priority": "9"})).status_code == 200
        assert await node.ask("/admin/access") == {"needs_key": False}
        async with await node.wire() as wire:
            await wire.send(GET)
            assert (await wire.response())[0] == 200
    (head,) = engine.heads
    assert all(line in head for line in (RED.encode(), b"x-tenant: t", b"x-priority: 9"))


async def test_a_head_that_is_kept_for_the_next_request_keeps_no_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each idle connection would keep its last one, uncounted."""
    seen, check = list[SeenHead](), identify.Gate.check

    def noted(gate: identify.Gate, request: HttpRequest, client: Client) -> SeenHead:
        seen.append(check(gate, request, client))
        return seen[-1]

    monkeypatch.setattr(identify.Gate, "check", noted)
    engine = Scripted(GOOD)
    async with lab(engine, keys_file=keys_file(tmp_path)) as node:
        for _ in range(2):
            assert (await asked(node, bearer(RED))).status_code == 200
            assert engine.bodies[-1]
            while seen[-1].request.body:  # noqa: ASYNC110  # it tells nobody
                await trio.sleep(BETWEEN_LOOKS_S)
    assert seen[0] is seen[1]
