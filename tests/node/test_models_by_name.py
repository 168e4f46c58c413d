"""Clients ask for models by other names than engines have: what engines get, and what clients, logs and caches see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio

from ranvier_py.core.routing.models import list_looks
from tests.builders.engines import AnsweringEngine, Request
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Node, chat, lab, opened, turn
from tests.node.test_models_at_run_time import asked
from tests.node.test_reload import ReloadLab
from tests.node.test_verdict import finding, until_found
from tests.proxy.test_overload import QUESTIONS
from tests.proxy.test_realtime import request as handshake
from tests.proxy.wire import GOOD, answer, chunk, post

NAMED = [path for path in QUESTIONS if path != b"/generate"]
OTHERS = (b"/v1/messages/count_tokens", b"/v1/rerank", b"/tokenize", b"/v1/whatever")
MAIN = [{"name": "gpt-4o", "to": "main"}, {"name": "claude-*", "to": "main"}, {"name": "embed", "to": "other"}]


class Named(AnsweringEngine):
    """An engine that lists models, and keeps what it gets."""

    def __init__(self, *models: str, reply: bytes = GOOD) -> None:
        self.models: Sequence[str] = models
        self.reply = reply
        self.came: list[Request] = []

    async def answer(self, asked: Request) -> bytes:
        if asked.method == "GET" and not asked.target.startswith("/v1/realtime"):
            listed = asked.target == "/v1/models"
            cards = [{"id": name, "object": "model", "created": 7, "owned_by": "vllm"} for name in self.models]
            return answer(json.dumps({"data": cards}).encode() if listed else b"{}")
        self.came.append(asked)
        return self.reply

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.came]

    @property
    def served(self) -> list[str]:
        return [json.loads(body)["model"] for body in self.bodies]


@pytest.mark.parametrize("path", [*NAMED, *OTHERS])
async def test_an_engine_gets_the_name_of_its_model_and_all_other_bytes_as_they_came(path: bytes) -> None:
    engine, other = Named("main"), Named("other")
    fields = json.dumps(QUESTIONS.get(path, {"input": "hi", "model": "m"}))[1:-1]
    async with lab(engine, other, model=MAIN, ask_usage=False) as node:
        for spelled in (
            f"{{{fields}}}",
            f'\n{{ "é":"\\u00e9\\ud83d\\ude00", {fields} , "n":1.0e2}} ',
            f'{{"user":"model", {fields}}}',
        ):
            sent = spelled.replace('"m"', ' "gpt-4o"').encode()
            await node.http.post(f"{node.url}{path.decode()}", content=sent)
            assert engine.bodies[-1] == sent.replace(b'"gpt-4o"', b'"main"')
        for model in ("claude-opus-4-1-20250805", "claude-", "main"):
            await node.http.post(
                f"{node.url}{path.decode()}", content=f"{{{fields}}}".replace('"m"', f'"{model}"').encode()
            )
            assert engine.served[-1] == "main"
        assert other.came == []


async def test_a_name_is_found_however_it_is_spelled_and_wherever_it_stands() -> None:
    engine, long = Named("main", "base:adapter"), "word " * 60_000
    odd = "модель/🙂 №1"
    tables = [*MAIN, {"name": odd, "to": "main"}, {"name": "lora", "to": "base:adapter"}]
    bodies = [
        b'{"model":"gpt\\u002d4o","prompt":"hi"}',
        b'{"mod\\u0065l":"gpt-4o","prompt":"hi"}',
        json.dumps({"model": odd, "prompt": "hi"}).encode(),
        json.dumps({"model": odd, "prompt": "hi"}, ensure_ascii=False).encode(),
        json.dumps({"prompt": long, "model": "gpt-4o"}).encode(),
        json.dumps({"model": "gpt-4o", "prompt": long}).encode(),
        json.dumps({"user": long, "model": "gpt-4o", "prompt": long}).encode(),
        json.dumps({"model": "gpt-4o", "prompt": long * 20}).encode(),
        json.dumps({"prompt": long * 20, "model": "gpt-4o"}).encode(),
        b'{"prompt":"hi","metadata":{"model":"x"},"model":"gpt-4o","tools":[{"model":"y"}]}',
        b'{"model":"nobody","prompt":"hi","model":"gpt-4o"}',
    ]
    async with lab(engine, model=tables) as node:
        for number, body in enumerate(bodies):
            answered = await node.http.post(f"{node.url}/v1/completions", content=body)
            assert answered.status_code == 200, (number, answered.text)
            assert engine.served[-1] == "main", number
        answered = await node.http.post(f"{node.url}/v1/completions", content=b'{"model":"lora","prompt":"hi"}')
        assert (answered.status_code, engine.served[-1]) == (200, "base:adapter")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"model":', b'{"model":7}', b'{"model":{"gpt-4o":1}}', b'{"model":null}']
)
async def test_a_body_that_names_no_model_is_what_it_was(body: bytes) -> None:
    engine = Named("main")
    async with lab(engine, model=MAIN) as node:
        with_tables = await node.http.post(f"{node.url}/v1/completions", content=body)
        assert await node.faults() == {}
    async with lab(engine) as node:
        without = await node.http.post(f"{node.url}/v1/completions", content=body)
    assert (with_tables.status_code, with_tables.content) == (without.status_code, without.content)


async def test_a_form_and_a_websocket_name_their_model_by_an_alias() -> None:
    engine = Named("main", "a/b c", reply=answer(b"no", status=403))
    async with lab(engine, model=[*MAIN, {"name": "spaced", "to": "a/b c"}]) as node:
        for model, served in (("gpt-4o", "main"), ("spaced", "a/b c")):
            await node.http.post(
                f"{node.url}/v1/audio/transcriptions", data={"model": model, "n": "1"}, files={"file": b"gpt-4o" * 99}
            )
            (part,) = [part for part in engine.bodies[-1].split(b"\r\n--") if b'name="model"' in part]
            assert part.endswith(b"\r\n\r\n" + served.encode())
            assert engine.bodies[-1].count(b"gpt-4o") == 99
            for target in (b"/v1/realtime?a=1&model=%b&b=%%20#", b"/v1/realtime?model=%b"):
                async with await node.wire() as client:
                    await client.send(handshake(target=target.replace(b"%b", quote(model).encode()).rstrip(b"#")))
                    assert (await client.response())[0] == 403
                assert engine.came[-1].target.encode() == target.replace(b"%b", quote(served, safe="").encode()).rstrip(
                    b"#"
                )


async def test_aliases_are_listed_with_the_card_of_their_model_in_both_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_looks, "PAUSE_S", 0.01)
    tables = [*MAIN, {"name": "org/x 1", "to": "gpt-4o"}, {"name": "main", "to": "main", "max_tokens": 4}]
    async with lab(Named("main"), Named("real"), model=[*tables, {"name": "lost", "to": "gone"}]) as node:
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            listed = (await node.http.get(f"{node.url}/v1/models", headers=headers)).json()
            assert sorted(card["id"] for card in listed["data"]) == ["gpt-4o", "main", "org/x 1", "real"]
            for name in ("gpt-4o", "org/x 1", "claude-3-5-haiku-latest", "main"):
                for spelled in (quote(name, safe=""), quote(name)):
                    one = await node.http.get(f"{node.url}/v1/models/{spelled}", headers=headers)
                    assert (one.status_code, one.json()["id"]) == (200, name)
            for name in ("lost", "embed", "nobody"):
                assert (await node.http.get(f"{node.url}/v1/models/{name}", headers=headers)).status_code == 404
        cards = {card["id"]: card for card in (await node.http.get(f"{node.url}/v1/models")).json()["data"]}
        assert cards["gpt-4o"] == {**cards["main"], "id": "gpt-4o"}


async def test_turns_by_an_alias_and_by_the_models_own_name_share_what_was_computed() -> None:
    async with lab(
        engines=2, model=[{"name": "a-*", "to": MODEL}, {"name": "b", "to": "c"}, {"name": "c", "to": MODEL}]
    ) as node:
        first = await node.chat(turn("What is on shelf 7? " * 30), model="a-1")
        backends = {first.headers["x-ranvier-backend"]}
        for number, name in enumerate(("a-2", MODEL, "b", "a-1")):
            answered = await node.chat(turn("What is on shelf 7? " * 30, "Books.", f"And on {number}?"), model=name)
            assert int(answered.headers["x-ranvier-matched-tokens"]) > 100, name
            backends.add(answered.headers["x-ranvier-backend"])
        assert len(backends) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_response_cache_keeps_answers_of_models_not_of_names(stream: bool) -> None:
    engine = Named("main", "other")
    async with lab(engine, model=MAIN, response_cache=True) as node:
        found = [
            (await asked(node, b"/v1/completions", name, temperature=0, stream=stream)).headers["x-cache"]
            for name in ("gpt-4o", "main", "claude-x", "embed", "other")
        ]
    assert found == ["MISS", "HIT", "HIT", "MISS", "HIT"] if not stream else found[0] == "MISS"
    assert set(engine.served) == {"main", "other"}


async def test_what_served_is_in_debug_headers_and_metrics_and_invented_names_are_not() -> None:
    engine = Named("main", "real-1")
    tables = [*MAIN, {"name": "real-*", "max_tokens": 5}]
    async with lab(engine, model=tables) as node:
        for model, shown in (("gpt-4o", "main"), ("real-1", "real-1"), ("claude-invented", "main")):
            answered = await asked(node, b"/v1/chat/completions", model)
            assert answered.headers["x-ranvier-model"] == shown
        assert "x-ranvier-model" not in (await asked(node, b"/v1/chat/completions", "main")).headers
        assert (await asked(node, b"/v1/chat/completions", "real-invented")).status_code == 404
        page = (await node.http.get(f"{node.control}/metrics")).text
        counts = {line for line in page.splitlines() if line.startswith("ranvier_models_served_total{")}
        assert counts == {
            'ranvier_models_served_total{model="main"} 2.0',
            'ranvier_models_served_total{model="real-*"} 2.0',
        }


async def test_chats_keep_their_model_on_every_node_and_shares_follow_the_weights() -> None:
    """Two nodes that know nothing of each other agree: nothing is kept, and nothing is exchanged."""
    tables = [{"name": "m", "to": {"main": 3, "next": 1}}]
    first, second = Named("main", "next"), Named("main", "next")
    async with lab(first, model=tables) as one, lab(second, model=tables) as two:
        for number in range(40):
            chats: list[Any] = [turn(f"Chat {number}", "Yes?", "Go on")[: 2 * at] for at in (1, 2)]
            await one.chat(chats[0], model="m")
            await two.chat(chats[1], model="m", max_tokens=9)
    assert first.served == second.served
    assert 4 <= Counter(first.served)["next"] <= 18


@pytest.mark.parametrize("path", [path for path in NAMED if path != b"/v1/embeddings"])
async def test_a_session_keeps_its_model_whatever_its_chats_are(path: bytes) -> None:
    engine = Named("main", "next")
    async with lab(engine, model=[{"name": "m", "to": {"main": 1, "next": 1}}]) as node:
        for number in range(8):
            for words in ("hello", "something else"):
                body = {**QUESTIONS[path], "prompt_cache_key": f"s{number}"}
                body |= {"prompt": words} if "prompt" in body else {"input": words} if "input" in body else {}
                if "messages" in body:
                    body["messages"] = [{"role": "user", "content": words}]
                await node.http.post(f"{node.url}{path.decode()}", json=body)
    pairs = list(zip(engine.served[::2], engine.served[1::2], strict=True))
    assert all(before == after for before, after in pairs)
    assert len(set(pairs)) == 2


async def test_explain_places_the_model_that_serves() -> None:
    async with lab(Named("main"), Named("other"), model=MAIN) as node:
        shown = (await node.http.post(f"{node.control}/explain", content=chat(model="embed"))).json()
        assert [each["backend"] for each in shown["candidates"]] == [node.engines[1][7:]]


async def served_by(node: Node, model: str) -> tuple[int, str]:
    answered = await asked(node, b"/v1/completions", model)
    return answered.status_code, answered.headers.get("x-ranvier-model", "")


async def test_a_target_that_no_engine_serves_is_a_missing_model_until_one_does() -> None:
    engine = Named("main")
    async with lab(engine, model=[{"name": "new", "to": "soon"}]) as node:
        assert (await served_by(node, "new"))[0] == 404
        engine.models = ("main", "soon")
        answered = await node.http.post(
            f"{node.control}/admin/backends", json={"url": await node.lab.listen(engine.serve)}
        )
        assert answered.status_code in (200, 201)
        await node.until("/admin/backends", lambda answer: answer["backends"][1]["models"])
        assert await served_by(node, "new") == (200, "soon")


async def test_a_reload_takes_new_tables_and_names_all_that_is_wrong_with_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(partial(ReloadLab, folder=tmp_path), 0, 60) as place:
        assert isinstance(place, ReloadLab)
        place.engines.append(await place.listen(Named("main", "other").serve))
        node = await place.start(model=[{"name": "a", "to": "main"}, {"name": "late", "to": "soon"}])
        while "model.unknown late leads to soon" not in caplog.text:  # noqa: ASYNC110  # a log wakes nobody
            await trio.sleep(BETWEEN_LOOKS_S)
        found = finding(await until_found(node, "model"), "model")
        assert (found["what"], found["severity"], found["whom"]) == (
            "model late leads to soon, which no engine serves",
            "degraded",
            "who asks for late",
        )
        assert await served_by(node, "a") == (200, "main")
        place.write(model=[{"name": "a", "to": "other"}, {"name": "b-*", "to": "main"}, {"name": "late", "to": "soon"}])
        assert (await node.http.post(f"{node.control}/admin/reload")).json()["applied"] == ["model"]
        assert [await served_by(node, name) for name in ("a", "b-1")] == [(200, "other"), (200, "main")]
        place.write(model=[{"name": "a", "to": "gone"}, {"name": "b", "to": "b", "fallback": ["lost", "main"]}])
        refused = await node.http.post(f"{node.control}/admin/reload")
        assert refused.status_code == 400
        for words in ("a leads to gone", "b leads to b, lost"):
            assert words in refused.text
        place.write(model=[{"name": "a", "to": "b"}, {"name": "b", "to": "a"}])
        assert "a -> b -> a" in (await node.http.post(f"{node.control}/admin/reload")).text
        assert [await served_by(node, name) for name in ("a", "b-1")] == [(200, "other"), (200, "main")]
        place.write()
        assert (await node.http.post(f"{node.control}/admin/reload")).json()["applied"] == ["model"]
        assert (await served_by(node, "a"))[0] == 404


async def test_a_models_time_limits_and_retries_are_its_own() -> None:
    """Requests to other models keep those of the node."""
    tables = [
        {"name": "hasty", "to": "slow", "first_event_timeout_s": 0.1, "total_retries_max": 0},
        {"name": "stubborn", "to": "bad", "total_retries_max": 5, "worker_retries_max": 4, "retry_statuses": [500]},
    ]
    slow, bad = Hanging("slow"), Named("bad", reply=answer(b"{}", status=500))
    async with lab(slow, bad, model=tables, first_event_timeout_s=30) as node:
        for path in (b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/v1/completions"):
            for stream in (False, True):
                assert (await asked(node, path, "hasty", stream=stream, store=False)).status_code == 504
        tries = len(bad.came)
        assert (await asked(node, b"/v1/completions", "stubborn")).status_code == 500
        assert len(bad.came) - tries == 4
        tries = len(bad.came)
        assert (await asked(node, b"/v1/completions", "bad")).status_code == 500
        assert len(bad.came) - tries == 1


class Hanging(Named):
    async def answer(self, asked: Request) -> bytes:
        found = await super().answer(asked)
        if asked.method == "POST":
            await trio.sleep_forever()
        return found


async def test_an_engine_gets_the_key_of_its_model_where_the_client_sends_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Named("main", "other")
    (tmp_path / "key").write_text("of-a-file\n")
    tables = [
        {"name": "a", "to": "main", "api_key": "of-the-table"},
        {"name": "b", "to": "other", "api_key_file": str(tmp_path / "key")},
    ]
    async with lab(engine, model=tables, backend_api_key="of-all") as node:
        for model in ("a", "b", "main"):
            await asked(node, b"/v1/completions", model)
        await node.http.post(
            f"{node.url}/v1/completions", json={"model": "a"}, headers={"authorization": "Bearer mine"}
        )
        shown = (await node.http.get(f"{node.control}/admin/config")).text
    sent = [each.fields[b"authorization"] for each in engine.came]
    assert sent == [b"Bearer of-the-table", b"Bearer of-a-file", b"Bearer of-all", b"Bearer mine"]
    assert "of-the-table" not in shown + caplog.text
    assert "of-a-file" not in shown + caplog.text


STREAMED = [
    b'data: {"model":"main","choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"model":"main","choices":[{"delta":{"content":"say \\"model\\":\\"main\\""}}]}\n\n',
    b'data: {"model":"main","choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]
WHOLE = (
    b'{"id":"1","model":"main","choices":[{"message":{"content":"\\"model\\":\\"main\\"","role":"assistant"},'
    b'"finish_reason":"stop"}]}'
)
JSON_KIND, STREAM_KIND = b"content-type: application/json", b"content-type: text/event-stream"
HEADS = {
    "chunked": b"HTTP/1.1 200 OK\r\n%b\r\ntransfer-encoding: chunked\r\n\r\n",
    "close": b"HTTP/1.1 200 OK\r\n%b\r\nconnection: close\r\n\r\n",
}
AS_ASKED = [{"name": "gpt-4o", "to": "main", "model_in_answer": "asked"}, {"name": "plain", "to": "main"}]


def framed(kind: str, stream: bool) -> bytes:
    pieces = STREAMED if stream else [WHOLE[:30], WHOLE[30:]]
    if kind == "length":
        return answer(b"".join(pieces), STREAM_KIND if stream else JSON_KIND)
    head = HEADS[kind] % (STREAM_KIND if stream else JSON_KIND)
    if kind == "close":
        return head + b"".join(pieces)
    cut = b"".join(pieces)
    return head + b"".join(chunk(cut[at : at + 37]) for at in range(0, len(cut), 37)) + b"0\r\n\r\n"


class Closing(Named):
    async def serve(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        await super().serve(stream)

    async def answer(self, asked: Request) -> bytes:
        found = await super().answer(asked)
        if asked.method == "POST" and b"connection: close" in found:
            await self.stream.send_all(found)
            await self.stream.aclose()
            raise trio.BrokenResourceError
        return found


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["length", "chunked", "close"])
async def test_answers_name_the_model_that_was_asked_for_where_a_table_wants_that(
    kind: str, stream: bool, cache: bool
) -> None:
    """However they are framed, and to clients of HTTP/1.0, too; all other bytes are the engine's."""
    engine = Closing("main", reply=framed(kind, stream))
    expected = b"".join(STREAMED) if stream else WHOLE
    async with lab(engine, model=AS_ASKED, ask_usage=False, response_cache=cache) as node:
        for model, shown in (("gpt-4o", b"gpt-4o"), ("plain", b"main"), ("main", b"main"), ("gpt-4o", b"gpt-4o")):
            answered = await asked(node, b"/v1/chat/completions", model, stream=stream, temperature=0)
            wanted = expected.replace(b'"model":"main"', b'"model":"%b"' % shown)
            if cache and stream:  # what is kept is replayed in events of the cache
                assert b'"model":"%b"' % shown in answered.content
                continue
            assert answered.content == wanted, (model, answered.headers)
            if "content-length" in answered.headers:
                assert int(answered.headers["content-length"]) == len(wanted)
        body = json.dumps({**QUESTIONS[b"/v1/chat/completions"], "model": "gpt-4o", "stream": stream}).encode()
        async with await node.wire() as client:
            await client.send(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            content = (await client.rest()).partition(b"\r\n\r\n")[2]
        assert content == expected.replace(b'"model":"main"', b'"model":"gpt-4o"')
        assert await node.faults() == {}
    assert len(engine.came) == (2 if cache else 5)


async def test_errors_and_what_is_no_json_keep_the_engines_words() -> None:
    replies = [
        answer(b'{"model":"main"}', JSON_KIND, status=400), answer(b'{"model":"main"}', b"content-type: audio/wav"),
        answer(b'{"model":"main"}', JSON_KIND, b"content-encoding: br"), answer(b"[1]", JSON_KIND),
    ]  # fmt: skip
    engine = Named("main")
    async with lab(engine, model=AS_ASKED) as node:
        for reply in replies:
            engine.reply = reply
            async with await node.wire() as client:
                await client.send(post(b'{"model":"gpt-4o","input":"x"}', target=b"/v1/embeddings"))
                _, _, content = await client.response()
            assert content == reply.partition(b"\r\n\r\n")[2]
