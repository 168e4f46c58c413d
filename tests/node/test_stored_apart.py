"""Tenants kept apart do not reach the responses of another one that engines keep, however they spell path or body."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import Node, lab
from tests.proxy.wire import answer

ID = "resp_of_alice"
PATH = "/v1/responses"
PADDING = "x" * (4 << 20)
MARKS = [[]] * 201_000
FORM = "multipart/form-data; boundary=x"


class Keeper(AnsweringEngine):
    """An engine that keeps responses; `asked` is what reached it from clients."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    async def answer(self, asked: Request) -> bytes:
        if asked.target == "/health" or asked.line == "GET /v1/models":
            return answer(b"{}")
        self.asked.append((asked.line, asked.body))
        return answer(json.dumps({"id": ID, "object": "response", "output": []}).encode())


class Tenant:
    """One client of the node."""

    def __init__(self, node: Node, name: str) -> None:
        self.node, self.name = node, name

    async def ask(self, method: str, path: str, body: bytes = b"", *fields: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to exactly these bytes."""
        wire = await self.node.wire()
        async with wire:
            lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"host: h", b"x-tenant: " + self.name.encode()]
            lines += [b"connection: close", b"content-length: %d" % len(body), *fields]
            await wire.send(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            status, _, text = await wire.response(bodiless=method == "HEAD")
            return status, text

    async def respond(self, **members: object) -> int:
        body = {"model": "lab-model", "input": "Hello", **members}
        return (await self.ask("POST", PATH, json.dumps(body).encode()))[0]


@asynccontextmanager
async def two_tenants(
    engines: int, isolation: str = "header:x-tenant"
) -> AsyncIterator[tuple[Tenant, Sequence[Keeper]]]:
    """The second tenant, once an engine keeps a response of the first one."""
    keepers = [Keeper() for _ in range(engines)]
    async with lab(*keepers, tenant_isolation=isolation) as node:
        alice = Tenant(node, "alice")
        assert await alice.respond() == 200
        assert await alice.respond(previous_response_id=ID) == 200
        assert (await alice.ask("GET", f"{PATH}/{ID}"))[0] == 200
        for keeper in keepers:
            keeper.asked.clear()
        yield Tenant(node, "bob"), keepers


def asked(keepers: Sequence[Keeper]) -> list[tuple[str, bytes]]:
    return [each for keeper in keepers for each in keeper.asked]


ESCAPED_ID = "".join(f"%{ord(one):02x}" for one in ID)
SPELLINGS = (
    f"{PATH}/{ID}",
    f"{PATH}/{ID}/cancel",
    f"{PATH}/{ID}/input_items?limit=2",
    f"{PATH}/{ID}/",
    f"{PATH}/{ID}//",
    f"{PATH}/{ID}/x",
    f"{PATH}/{ID}/input_items/1",
    f"{PATH}/{ID};v=1",
    f"{PATH};v=1/{ID}",
    f"/v1;v=1/responses/{ID}",
    f"{PATH}//{ID}",
    f"//v1/responses/{ID}",
    f"/v1//responses/{ID}",
    f"{PATH}/./{ID}",
    f"{PATH}/x/../{ID}",
    f"/v1/files/../responses/{ID}",
    f"/v1/files/%2e%2E/responses/{ID}",
    f"/v1/files/.%2E/responses/{ID}",
    f"/v1/files/.%252E/responses/{ID}",
    f"/v1/files/..;x/responses/{ID}",
    f"/v1/%72esponses/{ID}",
    f"/v1/%72%65sponses/{ESCAPED_ID}",
    f"/v1/%2572esponses/{ID}",
    f"/v1/%252572esponses/{ID}",
    f"/%761/responses/{ID}",
    f"/v1%2Fresponses/{ID}",
    f"/v1/responses%2F{ID}",
    f"/v1/responses%2f{ID}",
    f"/v1/responses%252F{ID}",
    f"/v1/responses%5C{ID}",
    f"/v1/responses\\{ID}",
    f"/v1/responses%00/{ID}",
    f"/v1/responses%3B/{ID}",
    f"/v1/responses%3F/{ID}",
    f"/v1/responses%20/{ID}",
    f"/v1/Responses/{ID}",
    f"{PATH}/{ESCAPED_ID}",
    f"{PATH}/{ESCAPED_ID}/cancel",
    f"{PATH}/{ID}%2Fcancel",
    f"{PATH}/{ID}#x",
    f"http://h{PATH}/{ID}",
    f"HTTP://h//v1/%72esponses/{ID}/",
    PATH,
    f"{PATH}/",
    f"{PATH}?limit=10",
    f"{PATH}/compact",
    f"{PATH}/input_tokens",
    "/v1/conversations/conv_1/items",
    "/v1/%63onversations/conv_1",
)


@pytest.mark.parametrize("engines", [1, 2])
async def test_no_spelling_of_a_path_leads_to_what_an_engine_keeps_for_another_tenant(engines: int) -> None:
    async with two_tenants(engines) as (bob, keepers):
        for path in SPELLINGS:
            for method in ("GET", "DELETE", "POST", "HEAD", "PUT"):
                if method == "POST" and path.split("?")[0] in (
                    PATH,
                    f"{PATH}/",
                    f"{PATH}/compact",
                    f"{PATH}/input_tokens",
                ):
                    continue  # these are everybody's
                status, text = await bob.ask(method, path)
                assert status in (400, 404, 405), (method, path, status, text)
    assert asked(keepers) == []


KEPT = (
    "/v1/files",
    "/v1/files/file-1",
    "/v1/files/file-1/content?x=1",
    "/v1/%66iles/file-1",
    "/v1/Files/file-1",
    "/v1//files/file-1",
    "/v1/files;x/file-1",
    "/v1/uploads/upload_1/complete",
    "/v1/batches",
    "/v1/batches/batch_1/cancel",
    "/v1/vector_stores/vs_1/search",
    "/v1/threads/thread_1/runs",
    "/v1/conversations",
    "/v1/conversations/conv_1/items",
    "/v1/chat/completions/chatcmpl-1",
    "/v1/chat/completions/chatcmpl-1/messages",
    "/v1/chat/completions/chatcmpl-1/",
    "/v1/chat/%63ompletions/chatcmpl-1",
    "/v1/Chat/Completions/chatcmpl-1",
    "/v1/completions/cmpl-1",
    "/v1/messages/batches",
    "/v1/messages/batches/msgbatch_1/results",
)
READ = (
    "/v1/chat/completions",
    "/v1/chat/completions?limit=5",
    "/v1/chat/completions/",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/whatever",
    "/v1/whatever/1",
)


@pytest.mark.parametrize("engines", [1, 2])
async def test_nothing_else_that_engines_keep_is_reached_where_tenants_are_kept_apart(engines: int) -> None:
    """Files, batches, stored completions and conversations have no owner whom a node knows."""
    async with two_tenants(engines) as (bob, keepers):
        for method in ("GET", "HEAD", "DELETE", "POST", "PUT", "PATCH"):
            for path in KEPT if method == "POST" else (*KEPT, *READ):
                status, text = await bob.ask(method, path, b'{"model":"lab-model"}' if method == "POST" else b"")
                assert status in (404, 405), (method, path, status, text)
                assert method == "HEAD" or json.loads(text)["error"]["message"], path
    assert asked(keepers) == []


async def test_models_and_what_is_only_computed_stay_everybody_s_where_tenants_are_kept_apart() -> None:
    sent = json.dumps({"model": "lab-model", "messages": [], "prompt": "x", "input": "x"}).encode()
    async with two_tenants(1) as (bob, keepers):
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/messages/count_tokens", "/v1/images/generations"):
            assert (await bob.ask("POST", path, sent))[0] == 200
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/lab-model"),
            ("OPTIONS", "/v1/chat/completions"),
        ):
            assert (await bob.ask(method, path))[0] in (200, 503)
    assert len(asked(keepers)) == 6


async def test_without_isolation_what_engines_keep_is_theirs_to_give() -> None:
    async with two_tenants(1, isolation="off") as (bob, keepers):
        for path in KEPT:
            assert (await bob.ask("GET", path))[0] == 200, path
    assert len(asked(keepers)) == len(KEPT)


def body(*members: str) -> bytes:
    return ('{"model":"lab-model","input":"Hello",' + ",".join(members) + "}").encode()


NAMED = f'"previous_response_id":"{ID}"'
PLAIN = body(NAMED)
BODIES: dict[str, Callable[[], bytes]] = {
    "plain": lambda: PLAIN,
    "spaced": lambda: body(NAMED.replace(":", " \n:\t")),
    "escaped": lambda: body(NAMED.replace("_respons", "_respons\\u0065", 1).replace("\\u0065e_", "\\u0065_")),
    "escaped underscore": lambda: body(NAMED.replace("s_r", "s\\u005Fr", 1)),
    "escaped value": lambda: body(NAMED.replace("resp_of", "resp\\u005fof")),
    "last one null": lambda: body(NAMED, '"previous_response_id":null'),
    "first one null": lambda: body('"previous_response_id":null', NAMED),
    "doubled by escapes": lambda: body(NAMED.replace("s_r", "s\\u005fr", 1), '"previous_response_id":null'),
    "in a list": lambda: body(f'"previous_response_id":["{ID}"]'),
    "conversation": lambda: body('"conversation":"conv_1"'),
    "conversation by id": lambda: body('"conversation":{"id":"conv_1"}'),
    "its own id": lambda: body(f'"request_id":"{ID}"'),
    "too large": lambda: body(f'"metadata":{{"x":"{PADDING}"}}', NAMED, f'"instructions":"{PADDING}"'),
    "too large, at its end": lambda: body(f'"metadata":{{"x":"{PADDING}"}}', NAMED),
    "too large, escaped": lambda: body(
        f'"instructions":"{PADDING}"', NAMED.replace("us_r", "us\\u005fr"), f'"x":"{PADDING}"'
    ),
    "too large, conversation": lambda: body(f'"instructions":"{PADDING}"', '"conversation":"c"', f'"x":"{PADDING}"'),
    "too large, its own id": lambda: body(f'"instructions":"{PADDING}"', '"request_id":"c"', f'"x":"{PADDING}"'),
    "too large, far colon": lambda: body(f'"x":"{PADDING}"', NAMED.replace(":", " " * 9000 + ":"), f'"y":"{PADDING}"'),
    "too many marks": lambda: body(f'"x":{json.dumps(MARKS)}', NAMED, f'"y":{json.dumps(MARKS)}'),
    "too long for one library": lambda: body(f'"seed":{"7" * 5000}', NAMED, '"x":NaN'),
    "what one library refuses": lambda: body('"x":NaN', f'"y":"{"y" * 200_000}"', NAMED, f'"z":"{"z" * 200_000}"'),
    "UTF-16": lambda: PLAIN.decode().encode("utf-16"),
    "UTF-16 without a mark": lambda: PLAIN.decode().encode("utf-16-le"),
    "UTF-16, big end": lambda: PLAIN.decode().encode("utf-16-be"),
    "UTF-32": lambda: PLAIN.decode().encode("utf-32"),
    "UTF-16, large": lambda: body(f'"x":"{"x" * 200_000}"', NAMED).decode().encode("utf-16-le"),
    "with a mark": lambda: b"\xef\xbb\xbf" + PLAIN,
    "compressed": lambda: gzip.compress(PLAIN),
}
FIELDS: dict[str, tuple[bytes, ...]] = {
    "JSON": (b"content-type: application/json",),
    "nothing": (),
    "text": (b"content-type: text/plain",),
    "another charset": (b"content-type: application/json; charset=utf-16",),
    "a form": (b"content-type: multipart/form-data; boundary=x",),
    "an URL's form": (b"content-type: application/x-www-form-urlencoded",),
    "a form and JSON": (b"content-type: multipart/form-data; boundary=x", b"content-type: application/json"),
    "gzip": (b"content-type: application/json", b"content-encoding: gzip"),
    "identity": (b"content-type: application/json", b"content-encoding: identity"),
}
TARGETS = (PATH, f"{PATH}/", "/v1/%72esponses", "//v1/responses?x", f"{PATH}/compact", f"{PATH}/input_tokens")


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("kind", BODIES)
async def test_no_spelling_of_a_body_continues_what_an_engine_keeps_for_another_tenant(kind: str, engines: int) -> None:
    body = BODIES[kind]()
    async with two_tenants(engines) as (bob, keepers):
        for target in TARGETS if len(body) < 10_000 else TARGETS[:1]:
            for label, fields in FIELDS.items() if len(body) < 10_000 else [("JSON", FIELDS["JSON"])]:
                status, text = await bob.ask("POST", target, body, *fields)
                error = json.loads(text)["error"]
                assert (status in (400, 404), error["type"]) == (True, "invalid_request_error"), (target, label, text)
    assert asked(keepers) == []


async def test_what_looks_like_a_name_in_the_text_of_a_body_is_no_name() -> None:
    text = json.dumps('The member "previous_response_id": "x", or "conversation\\u005fid".' + PADDING)
    async with two_tenants(1) as (bob, keepers):
        for sent in (body('"instructions":"\\"previous_response_id\\": \\"x\\""'), body(f'"instructions":{text}')):
            assert (await bob.ask("POST", PATH, sent))[0] == 200
        assert await bob.respond(previous_response_id=None, conversation=None) == 200
        assert await bob.respond(tools=[{"type": "function", "name": "f", "parameters": {"conversation": {}}}]) == 200
    assert len(asked(keepers)) == 4


async def test_a_form_where_json_belongs_does_not_leave_its_tenant() -> None:
    """Of other bodies, those of audio are forms, and who uploads a file sends one."""
    sent, form = json.dumps({"model": "lab-model", "input": "Hello", "prompt": "Hello", "messages": []}).encode(), FORM
    part = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nlab-model\r\n--x--\r\n'
    async with two_tenants(1) as (bob, keepers):
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/generate", "/tokenize", "/v1/x"):
            status, text = await bob.ask("POST", path, sent, b"content-type: " + form.encode())
            error = json.loads(text)["error"]
            assert (status, error["type"], "JSON" in error["message"]) == (400, "invalid_request_error", True)
        for path in ("/v1/audio/transcriptions", "/v1/x"):
            assert (await bob.ask("POST", path, part, b"content-type: " + form.encode()))[0] == 200
        for path in ("/v1/chat/completions", PATH):
            assert (await bob.ask("POST", path, part, b"content-type: " + form.encode()))[0] == 400
    assert [target for target, _ in asked(keepers)] == ["POST /v1/audio/transcriptions", "POST /v1/x"]


async def test_the_owner_reaches_a_response_by_each_spelling_of_its_path_and_the_engine_sees_one() -> None:
    async with two_tenants(2) as (bob, keepers):
        alice = Tenant(bob.node, "alice")
        for path in (
            *(
                f"{PATH}/{ID}",
                f"{PATH}/{ID}/",
                f"//v1/%72esponses/{ID}",
                f"{PATH}/{ESCAPED_ID}",
                f"http://h{PATH}/{ID}",
            ),
        ):
            assert (await alice.ask("GET", path + "?after=%78"))[0] == 200
        for more in ("compact", "input_tokens"):
            sent = json.dumps({"model": "lab-model", "previous_response_id": ID}).encode()
            assert (await alice.ask("POST", f"{PATH}/{more}", sent))[0] == 200
            assert (await bob.ask("POST", f"{PATH}/{more}", b'{"input":"x"}'))[0] == 200
    owner = next(keeper for keeper in keepers if any("GET" in target for target, _ in keeper.asked))
    assert [target for target, _ in owner.asked if "GET" in target] == [f"GET {PATH}/{ID}?after=%78"] * 5
    assert sum(b"previous" in sent for _, sent in owner.asked) == 2


async def test_without_isolation_the_only_engine_answers_for_itself_and_a_form_s_field_changes_nothing() -> None:
    async with two_tenants(1, isolation="off") as (bob, keepers):
        assert (await bob.ask("GET", f"{PATH}/unknown"))[0] == 200
        assert (await bob.ask("POST", f"{PATH}/compact", b"{}"))[0] == 200
        assert (await bob.ask("POST", PATH, PLAIN, b"content-type: " + FORM.encode()))[0] == 200
    assert asked(keepers)[-1] == (f"POST {PATH}", PLAIN)


async def test_an_engine_that_takes_no_salt_gets_no_body_that_others_could_read_differently() -> None:
    async with two_tenants(1, isolation="credential") as (bob, keepers):
        answers = [
            await bob.ask("POST", path, json.dumps({"model": "lab-model", "messages": []}).encode("utf-16-le"))
            for path in ("/v1/messages", "/v1/chat/completions", "/v1/embeddings")
        ]
    assert [status for status, _ in answers] == [400] * 3
    assert json.loads(answers[0][1])["type"] == "error"
    assert asked(keepers) == []


def test_httpx_is_not_what_spells_these_paths() -> None:
    """It would write another path than it is given, so that these tests would test nothing."""
    assert httpx.URL("http://h/v1/x/../%72esponses").raw_path != b"/v1/x/../%72esponses"
