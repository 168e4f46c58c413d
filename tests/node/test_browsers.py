"""What a page of another origin may read of a node, by the exact requests of browsers (Fetch standard, section 4.9)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import httpx
import pytest
import trio

from ranvier_py.core.routing.request_paths import PATHS
from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import Node, lab
from tests.node.test_cached_responses import COLD, ON, until_in_flight
from tests.node.test_whose_answers import APIS
from tests.proxy.test_overload import QUESTIONS
from tests.proxy.wire import GOOD, answer

PAGE, OTHER = "http://chat.example", "https://other.example:8443"
ASKED = "authorization,content-type,x-stainless-lang"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"},{"id":"lab-model","object":"model"}]}'
Fields = Mapping[bytes, bytes]
Rule = Callable[[Fields], list[bytes]]


def any_origin(_: Fields) -> list[bytes]:
    """As vLLM's own server has it."""
    return [b"access-control-allow-origin: *"]


def with_credentials(asked: Fields) -> list[bytes]:
    """As SGLang's has it."""
    named = b"*" if b"access-control-request-method" not in asked else asked[b"origin"]
    return [b"Access-Control-Allow-Origin: " + named, b"access-control-allow-credentials: true", b"vary: Origin"]


def one_origin(asked: Fields) -> list[bytes]:
    """As either has it with --allowed-origins."""
    is_it = asked[b"origin"] == PAGE.encode()
    return [b"access-control-allow-origin: " + PAGE.encode(), b"vary: Origin"] if is_it else []


def none_at_all(_: Fields) -> list[bytes]:
    return []


class Engine(AnsweringEngine):
    """Answers as engines behind Starlette's middleware do; `asked` is what came with an origin."""

    def __init__(self, rule: Rule, body: bytes = GOOD.partition(b"\r\n\r\n")[2]) -> None:
        self.rule, self.body = rule, body
        self.asked: list[str] = []
        self.answers = trio.Event()
        self.answers.set()

    async def answer(self, asked: Request) -> bytes:
        allowed = self.rule(asked.fields) if b"origin" in asked.fields else []
        if b"origin" in asked.fields:
            self.asked.append(asked.line)
        if asked.method == "OPTIONS":
            return self.preflight(asked.fields, allowed)
        await self.answers.wait()
        return answer(MODELS if asked.target == "/v1/models" else self.body, *allowed)

    def preflight(self, fields: Fields, allowed: list[bytes]) -> bytes:
        if not allowed:
            return answer(b'{"detail":"Method Not Allowed"}', b"allow: POST", status=405)
        named = fields.get(b"access-control-request-headers", b"")
        more = [b"access-control-allow-methods: GET, POST", b"access-control-max-age: 600"]
        return answer(b"OK", *allowed, *more, *([b"access-control-allow-headers: " + named] if named else []))


class Page:
    """A page of some origin: what it may send to a node, and may read of it."""

    def __init__(self, node: Node, origin: str = PAGE) -> None:
        self.node, self.origin = node, origin

    async def preflight(self, path: str, method: str = "POST") -> httpx.Response:
        fields = {"origin": self.origin, "access-control-request-method": method}
        return await self.node.http.options(
            self.node.url + path, headers={**fields, "access-control-request-headers": ASKED, "sec-fetch-mode": "cors"}
        )

    async def may_send(self, path: str, method: str = "POST") -> bool:
        found = await self.preflight(path, method)
        methods = found.headers.get("access-control-allow-methods", "")
        named = found.headers.get("access-control-allow-headers", "").lower().replace(" ", "")
        return (
            found.is_success
            and self.may_read(found)
            and method in methods
            and set(ASKED.split(",")) <= {*named.split(",")}
        )

    def may_read(self, found: httpx.Response) -> bool:
        return found.headers.get_list("access-control-allow-origin") in (["*"], [self.origin])

    async def fetch(self, path: str, body: object = None, **fields: str) -> httpx.Response:
        method = "GET" if body is None else "POST"
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"origin": self.origin, "content-type": "application/json", **fields}
        return await self.node.http.request(method, self.node.url + path, content=content, headers=headers)


RULES = [any_origin, with_credentials, one_origin]
SETTINGS = {"engines": {}, "operator": {"cors_origins": (PAGE,)}, "any": {"cors_origins": ("*",)}}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("isolation", ["off", "credential"])
async def test_every_path_can_be_asked_for_without_a_key(rule: Rule, isolation: str) -> None:
    paths = [*(path.decode() for path in PATHS), "/v1/models", "/v1/responses/resp_1", "/v1/files", "/health", "/else"]
    engine = Engine(rule)
    async with lab(engine, tenant_isolation=isolation) as node:
        for path in paths:
            for method in ("GET", "POST"):
                assert await Page(node).may_send(path, method), path
        assert (await Page(node).preflight("/else")).headers["access-control-max-age"] == "600"
    assert {asked for asked in engine.asked if "else" in asked or "health" in asked} == set()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("first", ["/v1/models", "/v1/models/none"])
async def test_the_very_first_answer_of_a_node_can_be_read(setting: str, first: str) -> None:
    for rule in RULES if setting == "engines" else [none_at_all]:
        async with lab(Engine(rule), **SETTINGS[setting]) as node:
            assert Page(node).may_read(found := await Page(node).fetch(first)), rule
            assert found.status_code == (404 if "none" in first else 200)
            assert not Page(node, OTHER).may_read(await Page(node, OTHER).fetch(first)) or rule is not one_origin


@pytest.mark.parametrize("setting", SETTINGS)
async def test_errors_of_the_node_can_be_read(setting: str) -> None:
    engine = Engine(any_origin if setting == "engines" else none_at_all)
    async with lab(engine, body_bytes_max=200_000, in_flight_bytes_max=200_000, **SETTINGS[setting]) as node:
        await node.until_backend(lambda backend: backend["models"])
        page = Page(node)
        expected = [
            (404, await page.fetch("/v1/chat/completions", {"model": "none", "messages": []})),
            (404, await page.fetch("/v1/messages", {"model": "none", "messages": []})),
            (400, await page.fetch("/v1/chat/completions", b"{")),
            (413, await page.fetch("/v1/embeddings", b" " * 200_001)),
            (405, await page.fetch("/generate")),
            (417, await page.fetch("/v1/embeddings", {}, expect="more")),
            (426, await page.fetch("/v1/responses", connection="Upgrade", upgrade="websocket")),
        ]
        for status, found in expected:
            assert (found.status_code, page.may_read(found)) == (status, True)
            assert "retry-after" in found.headers["access-control-expose-headers"]


@pytest.mark.parametrize("rule", RULES)
async def test_answers_from_the_cache_can_be_read(rule: Rule) -> None:
    engine = Engine(rule)
    async with lab(engine, **ON) as node:
        page, other = Page(node), Page(node, OTHER)
        for path, (asked, engine.body) in APIS.items():
            assert (await node.http.post(node.url + path, content=asked)).headers["x-cache"] == "MISS"
            for reader, may_read in [(page, True), (other, rule is not one_origin)] * 2:
                hit = await reader.fetch(path, asked)
                assert (hit.headers["x-cache"], reader.may_read(hit)) == ("HIT", may_read)


@pytest.mark.parametrize("rule", RULES)
async def test_whoever_gets_the_answer_of_another_page_can_read_it(rule: Rule) -> None:
    engine, found = Engine(rule), dict[str, httpx.Response]()
    asked = {**QUESTIONS[b"/v1/chat/completions"], **COLD}
    async with lab(engine, **ON) as node:
        engine.answers = trio.Event()

        async def ask(origin: str) -> None:
            found[origin] = await Page(node, origin).fetch("/v1/chat/completions", asked)

        async with trio.open_nursery() as nursery:
            for number, origin in enumerate((OTHER, PAGE, "null", "http://third.example")):
                nursery.start_soon(ask, origin)
                await until_in_flight(node, number + 1)
            engine.answers.set()
        allowed = {origin: Page(node, origin).may_read(each) for origin, each in found.items()}
    assert [each.headers["x-cache"] for each in found.values()].count("HIT") == 3
    assert allowed == {origin: rule is not one_origin or origin == PAGE for origin in found}


@pytest.mark.parametrize("rule", RULES)
async def test_without_an_engine_pages_can_do_what_they_could_before(rule: Rule) -> None:
    engine = Engine(rule)
    async with lab(engine) as node:
        page = Page(node)
        assert await page.may_send("/v1/chat/completions")
        await node.http.delete(f"{node.control}/admin/backends", params={"url": node.engines[0]})
        assert await page.may_send("/v1/chat/completions")
        found = await page.fetch("/v1/chat/completions", QUESTIONS[b"/v1/chat/completions"])
        assert (found.status_code, page.may_read(found)) == (503, True)
        assert (await Page(node, OTHER).preflight("/v1/chat/completions")).status_code == 503


async def test_an_engine_that_allows_no_page_anything_decides_so_for_the_node() -> None:
    async with lab(Engine(none_at_all)) as node:
        page = Page(node)
        assert (await page.preflight("/v1/chat/completions")).status_code == 405
        for path in ("/v1/models", "/else"):
            assert not page.may_read(await page.fetch(path))


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), (OTHER, PAGE)])
@pytest.mark.parametrize("rule", [with_credentials, none_at_all])
async def test_origins_of_the_operator_hold_for_all_answers_and_ask_no_engine(
    rule: Rule, origins: tuple[str, ...]
) -> None:
    engine = Engine(rule)
    async with lab(engine, cors_origins=origins) as node:
        page, stranger = Page(node), Page(node, "http://evil.example")
        for path in ("/v1/chat/completions", "/v1/models", "/health"):
            assert await page.may_send(path)
            assert await stranger.may_send(path) is ("*" in origins)
            body = QUESTIONS[b"/v1/chat/completions"] if "chat" in path else None
            found = await page.fetch(path, body)
            assert (found.status_code, page.may_read(found)) == (200, True)
            assert stranger.may_read(await stranger.fetch(path, body)) is ("*" in origins)
            assert ("vary" in found.headers) or "*" in origins
    assert {asked for asked in engine.asked if asked.startswith("OPTIONS")} == set()


async def test_engines_are_asked_once_for_an_origin_and_never_for_programs() -> None:
    engine = Engine(any_origin)
    async with lab(engine) as node:
        await node.http.get(f"{node.url}/v1/models")
        assert engine.asked == []
        for _ in range(3):
            for path in ("/v1/models", "/else"):
                await Page(node).fetch(path)
        assert engine.asked == ["OPTIONS /v1/models"]
        await Page(node, OTHER).fetch("/v1/models")
        assert engine.asked == ["OPTIONS /v1/models"] * 2
