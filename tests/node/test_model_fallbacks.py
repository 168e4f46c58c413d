"""Another model is asked when no engine of the first can serve: when, in which order, how often, and when not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
import trio.lowlevel

from ranvier_py.proxy.answers import awaited_stream
from tests.builders.engines import Request
from tests.node.node_lab import Node, lab
from tests.node.test_models_at_run_time import asked
from tests.node.test_models_by_name import Hanging, Named
from tests.proxy.test_overload import QUESTIONS
from tests.proxy.test_realtime import request as handshake
from tests.proxy.wire import GOOD, Scripted, answer, chunk

PATHS = [path for path in QUESTIONS if path != b"/generate"]
FULL = [answer(b"{}", status=429), answer(b"{}", b"retry-after: 1", status=503), answer(b"{}", status=529)]
ILL = [answer(b"{}", status=status) for status in (500, 502, 503, 504)]
LONG = answer(b'{"error":{"message":"the maximum context length is 9 tokens","code":400}}', status=400)
INSIDE = answer(b'{"error":{"message":"out of memory","code":500}}', b"content-type: application/json")
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ERROR_EVENT = b'data: {"error":{"message":"boom","code":503}}\n\n'
CHAIN = [{"name": "a", "to": "main", "fallback": ["second", "third"]}]


def fallbacks(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line.startswith("ranvier_models_fallbacks_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


async def metrics(node: Node) -> str:
    return (await node.http.get(f"{node.control}/metrics")).text


@pytest.mark.parametrize("reply", [*FULL, *ILL])
async def test_when_all_engines_of_a_model_refuse_or_fail_the_next_model_serves_by_every_api(reply: bytes) -> None:
    engines = [Named("main", reply=reply) for _ in range(3)]
    second = Named("second")
    async with lab(*engines, second, model=CHAIN, circuit_failures=1000) as node:
        for path in PATHS:
            for stream in (False, True):
                answered = await asked(node, path, "a", stream=stream, store=False)
                assert (answered.status_code, answered.headers["x-ranvier-model"]) == (200, "second"), (path, stream)
        kind = "overloaded" if reply in FULL else "error"
        found = fallbacks(await metrics(node))
    assert found.get(kind, 0) + found.get("empty", 0) == len(second.served) == 2 * len(PATHS)
    assert set(second.served) == {"second"}
    assert all(len(engine.came) > 0 for engine in engines)


@pytest.mark.parametrize("size", [1, 3, 8])
async def test_each_model_of_a_chain_is_asked_once_and_the_client_gets_the_last_ones_answer(size: int) -> None:
    names = ["main", *(f"m{number}" for number in range(1, size))]
    engines = [
        Named(name, reply=answer(b'{"of":"%b"}' % name.encode(), b"retry-after: 7", status=429)) for name in names
    ]
    tables = [{"name": "a", "to": "main", "fallback": names[1:]}, {"name": "m1", "fallback": ["main", "a"]}]
    async with lab(*engines, model=tables) as node:
        answered = await asked(node, b"/v1/chat/completions", "a")
        assert (answered.status_code, answered.headers["retry-after"]) == (429, "7")
        assert answered.json() == {"of": names[-1]}
        assert answered.headers["x-ranvier-model"] == names[-1]
    assert [engine.served for engine in engines] == [[name] for name in names]


async def test_a_model_without_engines_is_passed_over_at_once_and_a_fallback_without_any_too() -> None:
    third = Named("third")
    async with lab(third, model=CHAIN) as node:
        answered = await asked(node, b"/v1/messages", "a")
        assert (answered.status_code, answered.headers["x-ranvier-model"]) == (200, "third")
        assert fallbacks(await metrics(node)) == {"empty": 1}
        listed = (await node.http.get(f"{node.url}/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["third", "a"]


async def test_an_engine_that_is_gone_or_silent_or_lacks_the_model_has_the_next_one_asked() -> None:
    tables = [{**CHAIN[0], "first_event_timeout_s": 0.2}]
    lacking = Named(
        "main", reply=answer(b'{"error":{"message":"The model `main` does not exist.","code":404}}', status=404)
    )
    for engine in (Hanging("main"), lacking, Named("main", reply=b"")):
        async with lab(engine, Named("second"), model=tables) as node:
            for stream in (False, True):
                answered = await asked(node, b"/v1/chat/completions", "a", stream=stream)
                assert (answered.status_code, answered.headers["x-ranvier-model"]) == (200, "second")


@pytest.mark.parametrize("path", [path for path in PATHS if path != b"/v1/embeddings"])
async def test_a_stream_that_fails_before_its_first_event_is_another_models_also_behind_its_head(path: bytes) -> None:
    broken = [STREAM, STREAM + chunk(b": ping\n\n"), STREAM + chunk(ERROR_EVENT) + b"0\r\n\r\n", INSIDE]
    second = Scripted(
        STREAM + chunk(b'data: {"choices":[{"text":"x","delta":{"content":"x"}}]}\n\n') + b"0\r\n\r\n",
        page=b'{"data":[{"id":"second"}]}',
    )
    for begun in broken:
        engine = Breaking("main", reply=begun)
        async with lab(engine, second, model=CHAIN) as node:
            answered = await asked(node, path, "a", stream=True, store=False)
            assert (answered.status_code, answered.headers["x-ranvier-model"]) == (200, "second")
            assert answered.text.count("data: ") == 1
            assert len(engine.came) == 1


class Breaking(Named):
    """Ends the connection behind what it answers, if that is not complete."""

    may_break: trio.Event | None = None  # set once it may

    async def serve(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        await super().serve(stream)

    async def answer(self, asked: Request) -> bytes:
        found = await super().answer(asked)
        if asked.method == "POST" and not found.endswith((b"0\r\n\r\n", b"}")):
            await self.stream.send_all(found)
            if self.may_break is not None:
                await self.may_break.wait()
            await self.stream.aclose()
            raise trio.BrokenResourceError
        return found


async def test_another_model_continues_a_stream_whose_head_the_client_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is kept while the next model is asked, and no role is announced twice."""
    monkeypatch.setattr(awaited_stream, "HELD_S", 0.1)
    role, word = (b'data: {"choices":[{"delta":{"%b":"x"}}]}\n\n' % name for name in (b"role", b"content"))
    second = Scripted(STREAM + chunk(role) + chunk(word) + b"0\r\n\r\n", page=b'{"data":[{"id":"second"}]}')
    engine = Breaking("main", reply=STREAM + chunk(role))
    engine.may_break = trio.Event()
    body, lines = {**QUESTIONS[b"/v1/chat/completions"], "model": "a", "stream": True}, list[str]()
    async with (
        lab(engine, second, model=CHAIN, sse_keepalive_s=0.1) as node,
        node.http.stream("POST", f"{node.url}/v1/chat/completions", json=body) as answered,
    ):
        async for line in answered.aiter_lines():
            lines.append(line)
            if line == ": keepalive":
                engine.may_break.set()
    assert [line for line in lines if line.startswith("data:")] == [part.decode().strip() for part in (role, word)]
    assert json.loads(second.bodies[0])["model"] == "second"


async def test_nothing_falls_back_behind_the_first_event() -> None:
    begun = STREAM + chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    engine, second = Breaking("main", reply=begun), Named("second")
    async with lab(engine, second, model=CHAIN) as node:
        with pytest.raises(httpx.TransportError):
            await asked(node, b"/v1/chat/completions", "a", stream=True)
    assert second.came == []


async def test_only_listed_kinds_fall_back_and_too_long_prompts_where_it_is_listed() -> None:
    for kinds, reply, status in (
        (["error"], FULL[0], 429), (["overloaded"], ILL[0], 500), (["overloaded"], FULL[2], 200),
        (["empty", "timeout"], ILL[1], 502), (["too_long"], LONG, 200), (["error"], LONG, 400),
    ):  # fmt: skip
        async with lab(Named("main", reply=reply), Named("second"), model=[{**CHAIN[0], "fallback_on": kinds}]) as node:
            assert (await asked(node, b"/v1/chat/completions", "a")).status_code == status, (kinds, reply)
    for status in (400, 401, 403, 404, 422):
        second = Named("second")
        async with lab(Named("main", reply=answer(b"{}", status=status)), second, model=CHAIN) as node:
            assert (await asked(node, b"/v1/chat/completions", "a")).status_code == status
        assert second.came == []


async def test_what_an_engine_may_keep_is_not_sent_to_another_model_once_it_may_have_arrived() -> None:
    for fields, reply, status in (
        ({}, ILL[0], 500), ({"store": False}, ILL[0], 200), ({}, FULL[0], 200), ({}, b"HTTP/1.1 2", 502)
    ):  # fmt: skip
        async with lab(Breaking("main", reply=reply), Named("second"), model=CHAIN) as node:
            assert (await asked(node, b"/v1/responses", "a", **fields)).status_code == status, (fields, reply)


async def test_the_answer_of_another_model_is_not_kept_under_the_key_of_the_first() -> None:
    main, second = Named("main", reply=FULL[0]), Named("second")
    async with lab(main, second, model=CHAIN, response_cache=True) as node:
        for expected in ("MISS", "MISS"):
            answered = await asked(node, b"/v1/chat/completions", "a", temperature=0)
            assert (answered.status_code, answered.headers["x-cache"]) == (200, expected)
        main.reply = GOOD
        await trio.lowlevel.checkpoint()
        assert len(second.came) == 2


async def test_a_continued_response_goes_to_the_engine_that_keeps_it_whatever_the_share() -> None:
    """By the words of a turn alone some of them would be of the other share."""
    stored = json.dumps({"id": "resp_1", "object": "response", "status": "completed", "output": []}).encode()
    engines = [Named(name, reply=answer(stored, b"content-type: application/json")) for name in ("main", "next")]
    async with lab(*engines, model=[{"name": "a", "to": {"main": 1, "next": 1}, "fallback": ["next"]}]) as node:
        first = await asked(node, b"/v1/responses", "a")
        keeper = next(engine for engine in engines if engine.came)
        assert first.headers["x-ranvier-model"] == keeper.models[0]
        for number in range(12):
            answered = await asked(node, b"/v1/responses", "a", input=f"Turn {number}", previous_response_id="resp_1")
            assert (answered.status_code, answered.headers["x-ranvier-model"]) == (200, keeper.models[0])
        assert set(keeper.served) == set(keeper.models)
        keeper.reply = FULL[0]
        answered = await asked(node, b"/v1/responses", "a", previous_response_id="resp_1")
        assert answered.status_code == 429
    assert sum(len(engine.came) for engine in engines) == len(keeper.came)


async def test_the_log_names_what_was_asked_for_and_what_served(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr("ranvier_py.node.parts.request_parts.request_line", lambda: found.append)
    async with lab(Named("main", reply=FULL[0]), Named("second"), model=CHAIN) as node:
        await asked(node, b"/v1/chat/completions", "a")
    (summary,) = [each for each in found if each.path == "/v1/chat/completions"]
    assert (summary.asked, summary.model, summary.outcome, summary.tries) == ("a", "second", "success", 2)
    assert "it answered 429" in summary.error


async def test_a_busy_models_own_refusal_is_the_answer_if_the_next_one_cannot_be_reached() -> None:
    """It says when to come again; that the other engine is gone does not help the client."""
    busy = answer(b'{"error":{"message":"full"}}', b"retry-after: 9", status=429)
    async with lab(Named("main", reply=busy), Breaking("second", reply=b"HTTP/1.1 2"), model=CHAIN) as node:
        answered = await asked(node, b"/v1/chat/completions", "a")
        assert (answered.status_code, answered.headers["retry-after"]) == (429, "9")
        assert answered.json() == {"error": {"message": "full"}}
        assert await node.faults() == {}


async def test_a_websocket_is_opened_at_another_model_if_no_engine_of_the_first_is_reached() -> None:
    """Before that its circuit opens; what an engine refuses is the client's."""
    async with lab(Named("second", reply=answer(b"no", status=403)), model=CHAIN) as node:
        async with await node.wire() as client:
            await client.send(handshake(target=b"/v1/realtime?model=a"))
            assert (await client.response())[0] == 403
        assert fallbacks(await metrics(node)) == {"empty": 1}


async def test_a_missing_target_is_named_to_clients_as_they_asked_for_it() -> None:
    async with lab(Named("main"), model=[{"name": "gpt-4o", "to": "gone"}]) as node:
        for path in PATHS:
            answered = await asked(node, path, "gpt-4o")
            assert answered.status_code == 404
            assert answered.json()["error"]["message"].startswith("The model `gpt-4o` does not exist")
