"""Which engine gets a request by the model that it names, or names none, while adapters come and go."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import trio

from cluster.engine.engine_models import SGLANG, VLLM
from ranvier_py.core.routing.models import list_looks
from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import Lab, Node, lab, opened, start_engine
from tests.proxy.test_overload import QUESTIONS
from tests.proxy.wire import GOOD, Scripted, answer

SEEN_BY = {VLLM: "{}", SGLANG: "base:{}"}
"""How a client names an adapter."""

GENERATING = [path for path in QUESTIONS if path not in (b"/generate", b"/v1/embeddings")]


async def loaded(node: Node, engine: str, owner: str, name: str, verb: str = "load") -> None:
    prefix = "" if owner == SGLANG else "/v1"
    fields = {"lora_name": name, "lora_path": f"/weights/{name}"}
    answered = await node.http.post(f"{engine}{prefix}/{verb}_lora_adapter", json=fields)
    assert answered.status_code == 200, answered.text


async def asked(node: Node, path: bytes, model: str | None, **fields: Any) -> httpx.Response:
    body = {**QUESTIONS[path], "max_tokens": 4, **fields}
    body = {**body, "model": model} if model is not None else {k: v for k, v in body.items() if k != "model"}
    return await node.http.post(f"{node.url}{path.decode()}", json=body)


class Place:
    """One node in front of lab engines of given kinds."""

    def __init__(self, *kinds: dict[str, Any], **settings: Any) -> None:
        self.kinds, self.settings = kinds, settings

    async def __aenter__(self) -> Node:
        self.opened = opened(Lab, 0, 60)
        place = await self.opened.__aenter__()
        for number, kind in enumerate(self.kinds):
            place.engines.append((await start_engine(place.nursery, number, **{"models": ("base",), **kind}))[0])
        return await place.start(**self.settings)

    async def __aexit__(self, *raised: object) -> None:
        await self.opened.__aexit__(*raised)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("owner", [VLLM, SGLANG])
async def test_an_adapter_is_served_as_soon_as_an_engine_has_loaded_it_by_every_api(owner: str) -> None:
    async with Place({"owner": owner}, {"owner": owner}) as node:
        for number, path in enumerate(GENERATING):
            for stream in (False, True):
                name = f"tuned-{number}-{stream}"
                await loaded(node, node.engines[number % 2], owner, name)
                answered = await asked(node, path, SEEN_BY[owner].format(name), stream=stream)
                assert answered.status_code == 200, (path, stream, answered.text)


@pytest.mark.parametrize("owner", [VLLM, SGLANG])
async def test_equal_prompts_for_a_model_and_its_adapters_share_no_prefix(owner: str) -> None:
    long = {"messages": [{"role": "user", "content": "Which shelf has the atlases of this library? " * 30}]}
    async with Place({"owner": owner, "models": ("base", "one", "two")}, debug_headers=True) as node:
        names = ["base", SEEN_BY[owner].format("one"), SEEN_BY[owner].format("two")]
        for round_ in range(2):
            for name in names:
                answered = await asked(node, b"/v1/chat/completions", name, **long)
                assert answered.status_code == 200, answered.text
                assert (int(answered.headers["x-ranvier-matched-tokens"]) > 0) is (round_ == 1), name


@pytest.mark.parametrize("owner", [VLLM, SGLANG])
async def test_an_adapter_that_one_of_two_engines_has_unloaded_is_served_by_the_other(owner: str) -> None:
    """No client sees the refusal, and from the first one on the engine's list is known anew."""
    async with Place(*[{"owner": owner, "models": ("base", "tuned")}] * 2, policy="round_robin") as node:
        await loaded(node, node.engines[1], owner, "tuned", "unload")
        for number in range(12):
            answered = await asked(node, GENERATING[number % 4], SEEN_BY[owner].format("tuned"), stream=number % 2 == 0)
            assert answered.status_code == 200, answered.text
        first, second = [await _backend(node, number) for number in range(2)]
        assert (first["models"], second["models"]) == (["base", "tuned"], ["base"])
        assert second["outcomes"].get("refused", 0) <= 2
        await loaded(node, node.engines[0], owner, "tuned", "unload")
        gone = [(await asked(node, b"/v1/completions", SEEN_BY[owner].format("tuned"))).status_code for _ in range(3)]
        assert set(gone) <= {400, 404}


async def _backend(node: Node, number: int) -> dict[str, Any]:
    return next(each for each in await node.backends() if each["url"] == node.engines[number])


class Lister(AnsweringEngine):
    """An engine that counts how often its list is read. It never answers for it while it `hangs`."""

    def __init__(self, *models: str) -> None:
        self.models: Sequence[str] = models
        self.reads: list[float] = []
        self.hangs = False
        self.refusal = b""
        self.served: list[str] = []

    async def answer(self, asked: Request) -> bytes:
        if asked.line == "GET /v1/models":
            self.reads.append(time.monotonic())
            if self.hangs:
                await trio.sleep_forever()
            return answer(json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        if asked.method == "GET":
            return answer(b"{}")
        self.served.append(json.loads(asked.body)["model"])
        return self.refusal or GOOD


LACKING = [
    answer(b'{"error":{"message":"The model `tuned` does not exist.","type":"NotFoundError","code":404}}', status=404),
    answer(b'{"object":"error","message":"The model `tuned` does not exist.","code":404}', status=400),
    answer(b'{"error":{"message":"The model `tuned` does not exist.","type":"NotFoundError","code":404}}'),
    answer(b'{"error":"model \'tuned\' not found, try pulling it first"}', status=404),
    answer(b'{"message":"The following requested LoRA adapters are not loaded: tuned"}', status=400),
    answer(gzip.compress(b'{"error":{"code":"model_not_found"}}', mtime=0), b"content-encoding: gzip", status=404),
]


@pytest.mark.parametrize("refusal", LACKING)
async def test_an_engine_that_lacks_a_model_is_asked_for_its_list_and_another_one_serves(refusal: bytes) -> None:
    first, second = Lister("base", "tuned"), Lister("base", "tuned")
    async with lab(first, second, policy="round_robin") as node:
        first.models, first.refusal = ("base",), refusal
        for number in range(8):
            assert (await asked(node, GENERATING[number % 4], "tuned")).status_code == 200
        await node.until("/admin/backends", lambda answer: ["base"] in [each["models"] for each in answer["backends"]])
        before = len(first.served)
        for number in range(8):
            assert (await asked(node, GENERATING[number % 4], "tuned")).status_code == 200
    assert len(first.served) == before <= 4


async def test_many_unknown_names_at_once_ask_each_engine_once_and_are_missing_by_each_api() -> None:
    engines = Lister("base", "other"), Lister("base")
    async with lab(*engines) as node:
        reads = [len(engine.reads) for engine in engines]
        statuses: Counter[int] = Counter()

        async def ask(number: int) -> None:
            path = GENERATING[number % len(GENERATING)]
            answered = await asked(node, path, f"nobody-{number}", stream=number % 2 == 0)
            statuses[answered.status_code] += 1
            error = answered.json()["error"]
            assert error.get("code", error["type"]) == ("not_found_error" if b"messages" in path else "model_not_found")

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(ask, number)
        assert statuses == {404: 200}
        assert all(1 <= len(engine.reads) - before <= 2 for engine, before in zip(engines, reads, strict=True))
        before = len(engines[0].reads)
        assert (await asked(node, b"/v1/completions", "nobody-7")).status_code == 404, "it is remembered"
        assert len(engines[0].reads) == before
    assert [engine.served for engine in engines] == [[], []]


async def test_a_model_that_one_engine_lists_is_found_although_another_never_answers_for_its_list() -> None:
    quick, stuck = Lister("base"), Lister("base")
    async with lab(quick, stuck) as node:
        stuck.hangs, quick.models = True, ("base", "new")
        began = time.monotonic()
        assert (await asked(node, b"/v1/chat/completions", "new")).status_code == 200
        assert time.monotonic() - began < 1.9
        assert (await asked(node, b"/v1/chat/completions", "never")).status_code == 404
        assert time.monotonic() - began < 6
    assert quick.served == ["new"]


async def test_engines_are_asked_for_their_lists_once_a_second_at_most() -> None:
    engine = Lister("base")
    async with lab(engine) as node:
        before, began = len(engine.reads), time.monotonic()
        for number in range(60):
            assert (await asked(node, b"/v1/completions", f"invented-{number}")).status_code == 404
        assert len(engine.reads) - before <= 2 + (time.monotonic() - began)


@pytest.mark.parametrize("claude", [False, True])
async def test_a_missing_model_names_the_nearest_ones(claude: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_looks, "PAUSE_S", 0.01)
    async with lab(Lister("Qwen/Qwen3-8B", "sql-lora", "base")) as node:
        headers = {"anthropic-version": "2023-06-01"} if claude else {}
        for wrong, right in (("qwen3-8B", "Qwen/Qwen3-8B"), ("sql_lora", "sql-lora"), ("zzz", None)):
            for answered in (
                await node.http.post(f"{node.url}/v1/chat/completions", json={"model": wrong}, headers=headers),
                await node.http.get(f"{node.url}/v1/models/{wrong}", headers=headers),
            ):
                error = answered.json()["error"]
                assert answered.status_code == 404
                assert (error["type"] if claude else error["code"]) == (
                    "not_found_error" if claude else "model_not_found"
                )
                assert right is None or f"`{right}`" in error["message"]


async def test_a_single_model_that_was_just_loaded_is_found_in_both_shapes() -> None:
    engine = Lister("base")
    async with lab(engine) as node:
        engine.models = ("base", "org/new")
        found = await node.http.get(f"{node.url}/v1/models/org%2Fnew")
        assert (found.status_code, found.json()["id"]) == (200, "org/new")
        engine.models = ("base", "org/new", "newer")
        found = await node.http.get(f"{node.url}/v1/models/newer", headers={"anthropic-version": "2023-06-01"})
        assert (found.status_code, found.json()["type"]) == (200, "model")


async def test_engines_that_take_any_name_get_those_that_nobody_lists() -> None:
    named, any_name = Lister("base"), Lister("model.gguf")
    async with lab(named) as node:
        url = await node.lab.listen(any_name.serve)
        added = await node.http.post(f"{node.control}/admin/backends", json={"url": url, "any_model": True})
        assert added.json()["any_model"] is True
        await node.until("/admin/backends", lambda answer: answer["backends"][1]["models"])
        for model in ("base", "gpt-4o", "model.gguf", "claude:latest"):
            assert (await asked(node, b"/v1/chat/completions", model)).status_code == 200
    assert (named.served, any_name.served) == (["base"], ["gpt-4o", "model.gguf", "claude:latest"])


@pytest.mark.parametrize("owner", [VLLM, SGLANG])
@pytest.mark.parametrize("policy", ["round_robin", "affinity"])
async def test_a_request_without_model_goes_to_engines_that_serve_its_api(owner: str, policy: str) -> None:
    async with Place({"owner": owner, "embeds": True}, {"owner": owner}, policy=policy) as node:
        for number in range(12):
            answered = await asked(node, GENERATING[number % 4], None, stream=number % 3 == 0)
            assert (answered.status_code, answered.headers["x-ranvier-backend"]) == (200, node.engines[1][7:])
        embedder = await _backend(node, 0)
        assert sum(embedder["outcomes"].values()) == 0
        if owner == SGLANG:
            answered = await asked(node, b"/v1/embeddings", None)
            assert (answered.status_code, answered.headers["x-ranvier-backend"]) == (200, node.engines[0][7:])


CARDS = [
    {"task": "embed"},
    {"tasks": ["embed", "classify"]},
    {"type": "embeddings"},
    {"model_type": "reranker"},
    {"capabilities": ["embedding"]},
    {"capabilities": {"completion_chat": False, "embedding": True}},
    {"mode": "embedding"},
]


@pytest.mark.parametrize("card", CARDS)
async def test_what_an_engine_serves_is_known_by_its_cards(card: dict[str, Any]) -> None:
    embedder = Scripted(GOOD, page=json.dumps({"data": [{"id": "e", **card}]}).encode())
    chatting = Scripted(GOOD, page=b'{"data":[{"id":"c"}]}')
    async with lab(embedder, chatting, policy="round_robin") as node:
        for number in range(8):
            assert (await asked(node, GENERATING[number % 4], None)).status_code == 200
    assert (len(embedder.bodies), len(chatting.bodies)) == (0, 8)


REFUSALS = [
    answer(b'{"detail":"Not Found"}', status=404),
    answer(b'{"error":{"message":"The model does not support Chat Completions API","code":400}}', status=400),
    answer(b'{"error":{"message":"This server does not support completions.","code":501}}', status=501),
    answer(b'{"error":"\\"all-minilm\\" does not support chat"}', status=400),
]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_what_no_page_shows_is_learned_from_refusals_that_no_client_sees(refusal: bytes) -> None:
    embedder, chatting = Scripted(refusal), Scripted(GOOD)
    async with lab(embedder, chatting, policy="round_robin") as node:
        for _ in range(20):
            assert (await asked(node, b"/v1/chat/completions", None)).status_code == 200
    assert len(embedder.bodies) <= 3


ODD = (
    *(
        " ",
        "x" * 512,
        "x" * 10_000,
        ":",
        "::",
        ":base",
        "bas",
        "BASE",
        "base ",
        "a/b/c",
        "../..",
        "..%2f..",
        "%00",
        "%2e",
    ),
    *("模型", "🙂", "\0", "\n", "*", "b*", "[a-z]*", "?", "${x}", "' or 1=1", "`base`", "\u202ebase", "a:" * 200),
)


async def test_odd_names_are_missing_by_every_api_and_reach_no_engine() -> None:
    engines = Lister("base", "other"), Lister("base")
    async with lab(*engines) as node:
        for path in QUESTIONS:
            for name in ODD:
                answered = await asked(node, path, name)
                assert (answered.status_code, answered.json()["error"]["message"][:9]) == (404, "The model"), (
                    path,
                    name,
                )
        for name in ODD[3:]:
            answered = await node.http.get(f"{node.url}/v1/models/{quote(name, safe='')}")
            assert answered.status_code == 404, name
        assert await node.faults() == {}
    assert [engine.served for engine in engines] == [[], []]
