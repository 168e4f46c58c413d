"""A key of some models: others are to it as if there were none, in lists and errors, however a request names one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ranvier_py.core.routing.request_paths import FORM_PATHS, PATHS, REALTIME_PATH
from tests.examples import some
from tests.node.access.key_lab import BLUE, CHAT, RED, asked, bearer, key_lines, keys_file
from tests.node.access.test_keys_read import replaced
from tests.node.node_lab import Lab, Node, lab, opened, turn
from tests.node.test_reload import reloadable
from tests.node.test_verdict import finding, until_found
from tests.node.test_whose_answers import APIS
from tests.proxy.test_realtime import request as handshake
from tests.proxy.wire import GOOD, Scripted, answer

CARDS = [{"id": name, "object": "model", "created": 1} for name in ("lab-model", "lab-model-secret", "other")]
PAGE = json.dumps({"object": "list", "data": CARDS}).encode()
JSON_PATHS = [path.decode() for path in PATHS if path not in FORM_PATHS and path != REALTIME_PATH]


def engine_of(page: bytes = PAGE) -> Scripted:
    return Scripted(GOOD, page=page)


def some_models(folder: Path) -> Path:
    some_of_them = key_lines(RED, models=["lab-model", "none-*"], tenant="t")
    return keys_file(folder, some_of_them, key_lines(BLUE, tenant="t"), TENANT)


TENANT = '[[tenant]]\nname = "t"\n'


async def test_lists_have_what_a_key_may_use_in_either_shape(tmp_path: Path) -> None:
    async with lab(engine_of(), keys_file=some_models(tmp_path)) as node:
        for more in ({}, {"anthropic-version": "2023-06-01"}):
            got = {}
            for key in (RED, BLUE):
                response = await node.http.get(f"{node.url}/v1/models", headers={**bearer(key), **more})
                got[key] = [card["id"] for card in response.json()["data"]]
            assert got == {RED: ["lab-model"], BLUE: ["lab-model", "lab-model-secret", "other"]}
            statuses = [
                (await node.http.get(f"{node.url}/v1/models/{name}", headers={**bearer(RED), **more})).status_code
                for name in ("lab-model", "other", "lab-model-secret", "unknown")
            ]
            assert statuses == [200, 404, 404, 404]


async def test_as_long_as_no_engine_has_listed_its_models_a_key_of_some_gets_no_engines_list(
    tmp_path: Path,
) -> None:
    async with lab(engine_of(b"{}"), keys_file=some_models(tmp_path)) as node:
        response = await node.http.get(f"{node.url}/v1/models", headers=bearer(RED))
        assert response.json() == {"object": "list", "data": []}
        for more in ({}, {"anthropic-version": "2023-06-01"}):
            assert (await node.http.get(f"{node.url}/v1/models", headers={**bearer(RED), **more})).status_code == 200
            refused = await node.http.get(f"{node.url}/v1/models/other", headers={**bearer(RED), **more})
            assert refused.status_code == 404


@pytest.mark.parametrize("path", some([CHAT, *JSON_PATHS], 2))
async def test_a_model_that_a_key_may_not_use_is_refused_as_one_that_is_not_there(tmp_path: Path, path: str) -> None:
    engine = engine_of()
    async with lab(engine, keys_file=some_models(tmp_path)) as node:
        found = []
        for name in ("lab-model-secret", "lab-model-sacred", "none-there"):
            body = {"model": name, "messages": turn("hello"), "prompt": "hello", "input": "hello"}
            response = await asked(node, bearer(RED), path, json.dumps(body).encode())
            found.append((response.status_code, response.text.replace(name, "X"), sorted(response.headers)))
        assert found[0] == found[1]
        assert (found[0][0], found[2][0]) == (404, 404)
        for _, text, _ in found:
            assert "secret" not in text
            assert "other" not in text
        assert "`lab-model`" in found[0][1]
    assert engine.heads == []


NO_JSON = (b'{"model":"other"', b"not json")


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"a"}]}',
        b'{"model":null,"messages":[{"role":"user","content":"a"}]}',
        b'{"model":["other"],"messages":[]}',
        b'{"model":"lab-model","messages":[],"model":"other"}',
        b'{"model":"other","messages":[],"model":"lab-model"}',
        b'{"model":"lab-model","messages":[],"mod\\u0065l":"other"}',
        *NO_JSON,
        gzip.compress(b'{"model":"other"}', mtime=0),
    ],
)
async def test_a_body_that_names_no_model_or_can_not_be_read_is_refused_for_a_key_of_some(
    tmp_path: Path, body: bytes
) -> None:
    engine = engine_of()
    encoding = {"content-encoding": "gzip"} if body[:1] == b"\x1f" else {}
    async with lab(engine, keys_file=some_models(tmp_path)) as node:
        response = await asked(node, {**bearer(RED), **encoding}, CHAT, body)
        assert response.status_code in (400, 404), response.text
        assert engine.heads == []
        status = (await asked(node, {**bearer(BLUE), **encoding}, CHAT, body)).status_code
        assert status == (400 if body in NO_JSON else 200)


ADAPTERS = {
    b'"lab-model"': 200,
    b"null": 200,
    b'"mine"': 200,  # as lab-model:mine
    b'"other"': 400,
    b'["lab-model"]': 400,
    b'"lab-model","lora_path":"other"': 400,
    b'"lab-model","lora\\u005fpath":"other"': 400,
}


@pytest.mark.parametrize("path", [CHAT, "/generate"])
async def test_an_adapter_that_a_body_names_beside_the_model_must_be_one_of_the_keys_models(
    tmp_path: Path, path: str
) -> None:
    """SGLang takes its adapters so: with the name of their base alone a key could use all of them."""
    engine = engine_of()
    file = keys_file(tmp_path, key_lines(RED, models=["lab-model", "lab-model:mine"]), key_lines(BLUE))
    body = b'{"model":"lab-model","messages":[{"role":"user","content":"a"}],"text":"a","lora_path":%b}'
    async with lab(engine, keys_file=file) as node:
        for adapter, status in ADAPTERS.items():
            found = [(await asked(node, bearer(key), path, body % adapter)).status_code for key in (RED, BLUE)]
            assert found == [status, 200], adapter
        large = (body % b"null").replace(b'"text":"a"', b'"text":"%b"' % (b"a" * 5_000_000))
        assert (await asked(node, bearer(RED), path, large)).status_code == 400
    assert len(engine.heads) == sum(1 + (status == 200) for status in ADAPTERS.values())


@pytest.mark.parametrize("more", ["a" * 5_000_000, [[[]]] * 100_000])
async def test_a_body_too_large_to_be_read_names_its_model_all_the_same(tmp_path: Path, more: object) -> None:
    async with lab(engine_of(), keys_file=some_models(tmp_path), body_bytes_max=10_000_000) as node:
        found = []
        for key, model in ((RED, "lab-model"), (RED, "other"), (BLUE, "other")):
            body = json.dumps({"messages": turn("a"), "more": more, "model": model}).encode()
            found.append((await asked(node, bearer(key), CHAT, body)).status_code)
        for name in (b"model", b"mod\\u0065l"):
            body = json.dumps({"model": "lab-model", "messages": turn("a"), "more": more}).encode()
            body = body[:-1] + b',"%b":"other"}' % name
            assert (await asked(node, bearer(RED), CHAT, body)).status_code in (400, 404)
    assert found == [200, 404, 200]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/some/path", "/v1/audio/transcriptions", "/generate"])
async def test_so_is_what_no_body_names_unless_the_key_may_use_all_that_engines_list(tmp_path: Path, path: str) -> None:
    async with lab(engine_of(), keys_file=some_models(tmp_path)) as node:
        assert (await asked(node, bearer(RED), path, b'{"text": "a"}')).status_code == 400
    page = json.dumps({"object": "list", "data": CARDS[:1]}).encode()
    async with lab(engine_of(page), keys_file=some_models(tmp_path)) as node:
        assert (await asked(node, bearer(RED), path, b'{"text": "a"}')).status_code == 200


async def test_the_second_turn_of_a_chat_is_looked_at_as_the_first(tmp_path: Path) -> None:
    """Its beginning is known by then, and not read again."""
    engine = engine_of()
    async with lab(engine, keys_file=some_models(tmp_path)) as node:
        for model, status in (("lab-model", 200), ("other", 404), ("lab-model", 200)):
            for messages in (turn("a" * 600), turn("a" * 600, "b", "c")):
                body = json.dumps({"messages": messages, "model": model}).encode()
                first = json.dumps({"model": model, "messages": messages}).encode()
                for each in (first, body):
                    assert (await asked(node, bearer(RED), CHAT, each)).status_code == status


async def test_a_form_names_its_model_in_a_field(tmp_path: Path) -> None:
    async with lab(engine_of(), keys_file=some_models(tmp_path)) as node:
        forms: list[str | list[str]] = ["lab-model", "other", ["lab-model", "other"]]
        assert [await transcribed(node, model) for model in forms] == [200, 404, 400]


async def transcribed(node: Node, model: str | list[str]) -> int:
    files: Any = {"file": ("a.wav", b"RIFF" * 10)}
    path = f"{node.url}/v1/audio/transcriptions"
    return (await node.http.post(path, data={"model": model}, files=files, headers=bearer(RED))).status_code


@pytest.mark.parametrize(
    ("target", "status"), [(b"", 400), (b"?model=other", 404), (b"?model=lab-model&model=other", 400)]
)
async def test_a_websocket_names_its_model_in_the_query(tmp_path: Path, target: bytes, status: int) -> None:
    async with lab(engine_of(), keys_file=some_models(tmp_path)) as node, await node.wire() as wire:
        key = f"authorization: Bearer {RED}".encode()
        await wire.send(handshake(key, target=b"/v1/realtime" + target))
        assert (await wire.response())[0] == status


@pytest.mark.parametrize("path", some(list(APIS)))
async def test_an_answer_that_another_key_of_the_tenant_got_is_not_given_for_a_model_that_this_one_may_not_use(
    tmp_path: Path, path: str
) -> None:
    body, reply = APIS[path]
    other = json.dumps({**json.loads(body), "model": "other"}).encode()
    engine = Scripted(answer(reply, b"content-type: application/json"), page=PAGE)
    async with lab(engine, keys_file=some_models(tmp_path), response_cache=True) as node:
        found = [await asked(node, bearer(key), path, other) for key in (BLUE, BLUE, RED)]
        assert [each.status_code for each in found] == [200, 200, 404]
        assert found[1].headers["x-cache"] == "HIT"
        shared = [await asked(node, bearer(key), path, body) for key in (BLUE, RED)]
        assert [each.headers["x-cache"] for each in shared] == ["MISS", "HIT"]


ALIASED = [{"name": "gpt-4o", "to": {"lab-model": 1.0}}]


async def test_a_key_may_use_an_alias_by_its_name_or_by_that_of_its_model(tmp_path: Path) -> None:
    path = keys_file(tmp_path, key_lines(RED, models=["gpt-*"]), key_lines(BLUE, models=["lab-model"]))
    async with lab(engine_of(), keys_file=path, model=ALIASED) as node:
        lists, statuses = {}, {}
        for key in (RED, BLUE):
            response = await node.http.get(f"{node.url}/v1/models", headers=bearer(key))
            lists[key] = sorted(card["id"] for card in response.json()["data"])
            statuses[key] = [
                (await asked(node, bearer(key), model=name)).status_code for name in ("gpt-4o", "lab-model", "other")
            ]
            for name in ("gpt-4o", "lab-model", "other"):
                one = await node.http.get(f"{node.url}/v1/models/{name}", headers=bearer(key))
                assert (one.status_code == 200) == (name in lists[key])
    assert lists == {RED: ["gpt-4o"], BLUE: ["gpt-4o", "lab-model"]}
    assert statuses == {RED: [200, 404, 404], BLUE: [200, 200, 404]}


async def test_a_hosted_provider_gets_the_nodes_key_and_no_other(tmp_path: Path) -> None:
    engine = engine_of()
    async with opened(Lab, 0, 60) as place:
        place.engines = [f"{await place.listen(engine.serve)},hosted=yes"]
        node = await place.start(keys_file=some_models(tmp_path), backend_api_key="the-key-of-the-provider")
        fields = {**bearer(RED), "x-api-key": RED}
        assert (await asked(node, fields)).status_code == 200
    (head,) = engine.heads
    assert b"authorization: Bearer the-key-of-the-provider\r\n" in head
    assert b"rk-" not in head


async def test_a_model_of_a_key_that_nothing_serves_is_named_with_its_line_until_something_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A typing error locks a client out; a file may also name what is not there yet, so it is taken."""
    tenant = '[[tenant]]\nname = "t"\n[[tenant.model_limits]]\nmodels = "lab-modle*"\ntokens_per_minute = 9\n'
    red = key_lines(RED, models=["lab-*", "none", "gpt-4o"], tenant="t")
    path = keys_file(tmp_path, tenant, red, key_lines(BLUE, models=["gpt-*"]))
    async with reloadable(tmp_path, keys_file=str(path)) as (node, changed):
        view = await node.until("/admin/access", lambda view: view["unknown_models"])
        places = {"lab-modle*": f"{path}:1: tenant t", "gpt-4o": f"{path}:6: key red", "gpt-*": f"{path}:12: key blue"}
        assert view["unknown_models"] == places
        found = finding(await until_found(node, "key_models"), "key_models")
        assert (found["severity"], found["about"]) == ("notice", "models gpt-*")
        assert f"access.model_unknown {path}:6: key red names gpt-4o, which no engine serves" in caplog.text
        await changed(keys_file=str(path), model=[{"name": "gpt-4o", "to": "lab-model"}])
        await node.until("/admin/access", lambda view: list(view["unknown_models"]) == ["lab-modle*"])
        replaced(path, red.replace('t"', 'u"') + tenant.replace("modle", "model").replace('"t"', '"u"'))
        await node.until("/admin/access", lambda view: not view["unknown_models"])
