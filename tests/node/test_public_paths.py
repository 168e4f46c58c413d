"""The paths of the public port beside chats: the models of all engines as one list, and whatever else is under /v1/."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import unquote

import httpx
import pytest

from ranvier_py.core.routing.models import list_looks
from ranvier_py.core.routing.request_paths import FORM_PATHS, PATHS
from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import lab
from tests.proxy.test_overload import QUESTIONS
from tests.proxy.wire import GOOD, NO_TLS, Scripted, answer


class Engine(AnsweringEngine):
    """Lists its models, and echoes everything else that it is asked."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.asked: list[tuple[str, bytes]] = []

    async def answer(self, asked: Request) -> bytes:
        if asked.target == "/v1/models":
            cards = [{"id": name, "root": self.models[0]} for name in self.models]
            return answer(json.dumps({"data": cards}).encode())
        if asked.method == "POST" or asked.target.startswith("/v1/"):
            self.asked.append((asked.line, asked.body))
        return answer(b"{}")


@asynccontextmanager
async def client_of(*engines: Engine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node that has heard from all engines."""
    async with lab(*engines) as node, httpx.AsyncClient(base_url=node.url, trust_env=False, verify=NO_TLS) as client:
        yield client


async def test_the_models_are_those_of_all_engines_and_each_goes_to_who_has_it() -> None:
    engines = Engine("base", "one"), Engine("base", "two")
    async with client_of(*engines) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["base", "one", "two"]
        assert cards[1] == {"id": "one", "root": "base"}, "as the engine wrote it"
        for _ in range(3):
            for model in ("one", "two"):
                asked = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
                assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
        unknown = await client.post("/v1/completions", json={"model": "three", "prompt": "hello"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    served = [[json.loads(body)["model"] for _, body in engine.asked] for engine in engines]
    assert served == [["one"] * 3, ["two"] * 3]


async def test_a_prompt_that_only_an_engine_can_read_is_routed_by_load() -> None:
    """Compressed, or with a number that is too long for our library: what it means is the engine's matter."""
    engine = Engine("base")
    chat = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
    compressed = gzip.compress(json.dumps(chat).encode())
    long = json.dumps(chat)[:-1].encode() + b', "seed": ' + b"7" * 5000 + b"}"
    path = "/v1/chat/completions"
    async with client_of(engine) as client:
        answers = [
            await client.post(path, content=compressed, headers={"content-encoding": "gzip"}),
            await client.post(path, content=long),
            await client.request("OPTIONS", path, headers={"origin": "http://page", "x-api-key": "k"}),
        ]
        assert [(answer.status_code, answer.headers["x-ranvier-matched-tokens"]) for answer in answers] == [
            (200, "0")
        ] * 3
        assert (await client.post(path, content=compressed)).status_code == 400, "that is no JSON, and says no coding"
    assert engine.asked == [(f"POST {path}", compressed), (f"POST {path}", long), (f"OPTIONS {path}", b"")]


@pytest.mark.parametrize(
    "spelled", ["Qwen%2FQwen3-8B", "Qwen%2fQwen3-8B", "Qwen/Qwen3-8B", "one", "%6Fne", "sql:lora", "sql%3Alora"]
)
async def test_one_model_is_found_however_its_id_is_spelled_and_by_both_apis(spelled: str) -> None:
    name = unquote(spelled)
    engines = Engine("base"), Engine("base", "Qwen/Qwen3-8B", "one", "sql:lora")
    async with client_of(*engines) as client:
        assert (await client.get(f"/v1/models/{spelled}")).json() == {"id": name, "root": "base"}
        found = (await client.get(f"/v1/models/{spelled}", headers={"anthropic-version": "2023-06-01"})).json()
        assert (found["type"], found["id"], found["display_name"]) == ("model", name, name)
        assert (await client.head(f"/v1/models/{spelled}")).status_code == 200
    assert [engine.asked for engine in engines] == [[], []]


async def test_a_model_that_nobody_has_is_missing_in_the_shape_of_each_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_looks, "PAUSE_S", 0.01)
    async with client_of(Engine("base", "one")) as client:
        for spelled in ("nope", "Qwen%2Fnope", "base%2F..%2Fone", "%ff", "base/one", "o%2Fne"):
            missing = await client.get(f"/v1/models/{spelled}")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found"), spelled
            missing = await client.get(f"/v1/models/{spelled}", headers={"anthropic-version": "2023-06-01"})
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error"), spelled


async def test_one_model_is_asked_of_an_engine_as_long_as_none_has_listed_its_own() -> None:
    engine = Scripted(GOOD, page=b'{"id":"one"}')
    async with client_of(engine) as client:  # type: ignore[arg-type]
        assert (await client.get("/v1/models/one")).json() == {"id": "one"}


@pytest.mark.parametrize("model", ["base:sql-lora", "default", "base", "sql-lora"])
async def test_an_adapter_that_sglang_names_by_its_model_is_asked_of_it_by_every_api(model: str) -> None:
    page = {"data": [{"id": name, "owned_by": "sglang"} for name in ("base", "sql-lora")]}
    engines = Scripted(GOOD, page=json.dumps(page).encode()), Scripted(GOOD, page=b'{"data":[{"id":"other"}]}')
    async with lab(*engines) as node:
        for path, question in QUESTIONS.items():
            for stream in (False, True):
                asked = {**question, "model": model, "stream": stream}
                answered = await node.http.post(f"{node.url}{path.decode()}", json=asked)
                assert answered.status_code == 200, (path, stream)
    assert {json.loads(body)["model"] for body in engines[0].bodies} == {model}
    assert engines[1].bodies == []


HANDSHAKE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "A" * 22 + "==",
}


async def test_a_websocket_where_there_is_none_is_refused_at_once_and_asks_no_engine() -> None:
    engine = Engine("base")
    async with client_of(engine) as client:
        for path in ("/v1/responses", "/v1/responses/", "/responses", "/v1/messages", "/generate", "/v1/x", "/"):
            for fields in ({}, {"connection": "keep-alive, UPGRADE"}, {"upgrade": "WebSocket, h2c"}):
                refused = await client.get(path, headers=HANDSHAKE | fields)
                assert (refused.status_code, refused.headers["upgrade"]) == (426, "HTTP/1.1"), (path, fields)
        assert (await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})).status_code == 200
    assert [asked for asked, _ in engine.asked] == ["POST /v1/completions"]


async def test_another_upgrade_is_passed_over() -> None:
    engine = Engine("base")
    async with client_of(engine) as client:
        fields = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
        assert (await client.post("/v1/responses", json={"model": "base", "input": "hi"}, headers=fields)).json() == {}
    assert [asked for asked, _ in engine.asked] == ["POST /v1/responses"]


async def test_the_answer_to_a_lost_or_doubled_v1_names_the_right_path_in_the_shape_of_its_api() -> None:
    known = [path.decode() for path in PATHS if path.startswith(b"/v1/")]
    meant = {path[3:]: path for path in known if path[3:].encode() not in PATHS} | {
        "/v1" + path: path for path in known
    }
    meant |= {"/api/v1/chat/completions": "/v1/chat/completions", "/openai/messages": "/v1/messages"}
    engine = Engine("base")
    async with client_of(engine) as client:
        for asked, path in meant.items():
            for method, target in (("POST", asked), ("POST", asked + "/"), ("GET", asked + "?x=1")):
                answered = await client.request(method, target, json={"model": "base"})
                body = answered.json()
                assert answered.status_code == 404, target
                assert f"; {path} is what" in body["error"]["message"]
                assert ("type" in body) == path.startswith("/v1/messages")
        for asked, words in (("/models", "; /v1/models is what"), ("/else", "no such path: this port")):
            missing = await client.get(asked)
            assert (missing.status_code, words in missing.json()["error"]["message"]) == (404, True)
    assert engine.asked == []


async def test_a_client_that_asks_for_a_sign_of_life_gets_one() -> None:
    engine = Engine("base")
    async with client_of(engine) as client:
        for path in ("/", "/health", "/health/", "/api/hello", "/v1/models", "/v1/models/", "/v1/models/base/"):
            assert [(await client.request(each, path)).status_code for each in ("HEAD", "GET")] == [200, 200], path
    assert engine.asked == []


async def test_every_path_with_a_slash_at_its_end_is_the_same_path() -> None:
    engine = Engine("base")
    async with client_of(engine) as client:
        for path in PATHS:
            assert (await client.post(path.decode() + "/?x=/", json={"model": "base"})).status_code == 200, path
    assert [asked for asked, _ in engine.asked] == [f"POST {path.decode()}?x=/" for path in PATHS]


async def test_every_path_that_has_an_engine_compute_reaches_one_of_the_model() -> None:
    engines = Engine("one"), Engine("two")
    async with client_of(*engines) as client:
        await client.get("/v1/models")
        for path in PATHS:
            for model in ("one", "two"):
                asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "input": "x"}
                assert (await client.post(path.decode(), json=asked)).status_code == 200, path
        for path, status in (("/rerank", 405), ("/generate", 405), ("/metrics", 404), ("/flush_cache", 404)):
            assert (await client.get(path)).status_code == status
        assert (await client.post("/flush_cache")).status_code == 404
    expected = [f"POST {path.decode()}" for path in PATHS]
    for engine, model in zip(engines, ("one", "two"), strict=True):
        assert [asked for asked, _ in engine.asked] == expected
        assert {json.loads(body)["model"] for _, body in engine.asked} == {model}


async def test_a_form_goes_to_an_engine_of_the_model_it_names() -> None:
    engines = Engine("one"), Engine("two")
    async with client_of(*engines) as client:
        await client.get("/v1/models")
        large, named = ("a.wav", b"\0" * 200_000), [("model", (None, "one")), ("model", (None, "two"))]
        for path in FORM_PATHS:
            for model in named * 2:
                for sent in ([model, ("file", large)], [("file", large), model, ("reference", large)]):
                    assert (await client.post(path.decode(), files=sent)).status_code == 200
    assert [len(engine.asked) for engine in engines] == [8, 8]
    assert all(
        f"\r\n{model}\r\n".encode() in asked
        for engine, model in zip(engines, ("one", "two"), strict=True)
        for _, asked in engine.asked
    )


async def test_a_model_whose_name_is_no_text_is_missing_as_any_other_and_breaks_no_connection() -> None:
    async with lab(Engine("one")) as node:
        await node.until_backend(lambda backend: backend["models"])
        body = b'{"model": "\\ud800", "messages": [{"role": "user", "content": "hello"}]}'
        for url in (f"{node.url}/v1/chat/completions", f"{node.url}/v1/messages", f"{node.control}/explain"):
            answer = await node.http.post(url, content=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "The model `?` does not exist")
        assert await node.faults() == {}
