"""Limits of keys and tenants as clients meet them: what is refused, in which words, and what answers show."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.core.routing.request_paths import COUNTING_PATHS
from tests.late_import import Late
from tests.node.access.key_lab import BLUE, CHAT, RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, chat, lab
from tests.node.test_cached_responses import until_in_flight
from tests.proxy.wire import HANG, STREAM_HEAD, Scripted, answer, chunk, post

anthropic, openai = Late("anthropic"), Late("openai")


def counted(prompt: int, output: int, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    choice = {"message": {"role": "assistant", "content": "hi"}, "text": "hi", "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": usage, "text": "hi"}).encode()


CLAUDES = (
    b'{"type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn",'
    b'"usage":{"input_tokens":100,"output_tokens":50}}'
)
RESPONSE = (
    b'{"id":"resp_1","object":"response","status":"completed","output":[],'
    b'"usage":{"input_tokens":100,"output_tokens":50,"input_tokens_details":{"cached_tokens":0}}}'
)
EMBEDDED = b'{"data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":150,"total_tokens":150}}'
COMPLETED = (
    b'{"choices":[{"text":"hi","finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50}}'
)
BODIES = {
    CHAT: counted(100, 50),
    "/v1/completions": COMPLETED,
    "/v1/messages": CLAUDES,
    "/v1/responses": RESPONSE,
    "/v1/embeddings": EMBEDDED,
}
"""By path, an answer that took 150 tokens."""

SHORT = [{"role": "user", "content": "hi"}]
ASKS = json.dumps({"model": "lab-model", "messages": [], "prompt": "a", "input": "a", "max_tokens": 8}).encode()


@asynccontextmanager
async def limited(
    folder: Path, engine: Scripted, *, tenant: str = "", settings: dict[str, Any] | None = None, **limits: Any
) -> AsyncIterator[Node]:
    """A node where RED has these limits, and its tenant those lines. BLUE has none."""
    lines = key_lines(RED, tenant="acme", **limits) + key_lines(BLUE)
    file = keys_file(folder, f'[[tenant]]\nname = "acme"\n{tenant}\n', lines)
    async with lab(engine, keys_file=file, **(settings or {})) as node:
        yield node


def left(response: httpx.Response, what: str = "tokens") -> int:
    return int(response.headers[f"x-ratelimit-remaining-{what}"])


async def test_what_a_provider_has_left_is_not_shown_beside_what_the_key_has(tmp_path: Path) -> None:
    """A client would read both as one: "9, 2"."""
    own = b"X-RateLimit-Limit-Requests: 9\r\nanthropic-ratelimit-requests-limit: 9\r\nx-limit-other: 5"
    async with limited(tmp_path, Scripted(answer(counted(10, 5), own)), requests_per_minute=2) as node:
        found = {key: (await asked(node, bearer(key))).headers for key in (RED, BLUE)}
        assert [found[key]["x-ratelimit-limit-requests"] for key in (RED, BLUE)] == ["2", "9"]
        assert ["anthropic-ratelimit-requests-limit" in found[key] for key in (RED, BLUE)] == [False, True]
        assert found[RED]["x-limit-other"] == "5"


async def test_requests_beyond_a_limit_are_refused_with_the_time_to_wait(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(10, 5)))
    async with limited(tmp_path, engine, requests_per_minute=2) as node:
        answers = [await asked(node, bearer(RED)) for _ in range(3)]
        assert [one.status_code for one in answers] == [200, 200, 429]
        assert [left(one, "requests") for one in answers] == [1, 0, 0]
        assert {one.headers["x-ratelimit-limit-requests"] for one in answers} == {"2"}
        refused = answers[-1]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "2 requests per minute of key red" in refused.json()["error"]["message"]
        assert 55 <= int(refused.headers["retry-after"]) <= 61
        assert (await asked(node, bearer(BLUE))).status_code == 200
    assert len(engine.heads) == 3


@pytest.mark.parametrize("path", BODIES)
async def test_tokens_are_settled_by_the_engines_counts_in_every_api(tmp_path: Path, path: str) -> None:
    engine = Scripted(answer(BODIES[path]))
    async with limited(tmp_path, engine, tokens_per_minute=100_000) as node:
        for _ in range(2):
            assert (await asked(node, bearer(RED), path, ASKS)).status_code == 200
        view = await node.ask("/admin/access")
        (limit,) = view["limits"]["key red"]["limits"]
        assert (limit["used"], limit["reserved"], limit["remaining"]) == (300, 0, 99_700)


EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":100,"total_tokens":150,"completion_tokens":50}}\n\n'
STREAMED = {
    "counted": (EVENT + COUNTS + b"data: [DONE]\n\n", 150),
    "uncounted": (EVENT * 20 + b"data: [DONE]\n\n", None),
}


@pytest.mark.parametrize("kind", STREAMED)
async def test_a_stream_is_settled_by_counts_or_by_its_events(tmp_path: Path, kind: str) -> None:
    body, tokens = STREAMED[kind]
    engine = Scripted(answer(body, b"content-type: text/event-stream"))
    async with limited(tmp_path, engine, tokens_per_minute=100_000) as node:
        response = await asked(node, bearer(RED), stream=True)
        assert b"usage" not in response.content
        assert 0 < left(response) < 100_000
        (limit,) = (await node.ask("/admin/access"))["limits"]["key red"]["limits"]
        prompt = limit["used"] - 21
        assert limit["used"] == tokens if tokens else 100 < prompt < 400
        assert limit["reserved"] == 0


@pytest.mark.parametrize("status", [b"400 Bad Request", b"500 Internal Server Error", b"429 Too Many Requests"])
async def test_what_an_engine_refuses_takes_no_tokens(tmp_path: Path, status: bytes) -> None:
    engine = Scripted(answer(b'{"error":{"message":"no"}}', status=status))
    async with limited(tmp_path, engine, tokens_per_minute=100_000) as node:
        response = await asked(node, bearer(RED))
        assert (b"%d" % response.status_code, 0 < left(response) < 100_000) == (status[:3], True)
        (limit,) = (await node.ask("/admin/access"))["limits"]["key red"]["limits"]
        assert (limit["used"], limit["reserved"]) == (0, 0)


async def test_a_request_that_is_tried_at_several_engines_counts_once(tmp_path: Path) -> None:
    turns = iter([[answer(b"{}", status=503)], [answer(b"{}", status=503)], [answer(counted(100, 50))]])
    engines = [Scripted(turns=turns) for _ in range(3)]
    file = keys_file(tmp_path, key_lines(RED, requests_per_minute=9, tokens_per_minute=100_000))
    async with lab(*engines, keys_file=file) as node:
        assert (await asked(node, bearer(RED))).status_code == 200
        assert used(await node.ask("/admin/access")) == {"requests per minute": (1, 0), "tokens per minute": (150, 0)}
    assert sum(len(engine.heads) for engine in engines) == 3


async def test_a_tenants_limit_holds_for_all_its_keys_and_for_its_models(tmp_path: Path) -> None:
    lines = key_lines(RED, tenant="acme") + key_lines(BLUE, tenant="acme")
    table = '[[tenant]]\nname = "acme"\nrequests_per_minute = 3\n'
    models = '[[tenant.model_limits]]\nmodels = "lab-*"\nrequests_per_minute = 1\n'
    for extra, most in (("", 3), (models, 1)):
        file = keys_file(tmp_path, f"{table}{extra}\n", lines)
        async with lab(Scripted(answer(counted(1, 1))), keys_file=file) as node:
            statuses = [(await asked(node, bearer(key))).status_code for key in (RED, BLUE, RED, BLUE)]
            assert statuses.count(200) == most


PROMPT = b'"messages": [], "max_tokens": 1'
UNNAMED = {
    "no model": (b"{%b}" % PROMPT, {}),
    "an empty name": (b'{"model": "", %b}' % PROMPT, {}),
    "what SGLang calls its own": (b'{"model": "default", %b}' % PROMPT, {}),
    "an adapter": (b'{"model": "lab-model:a", %b}' % PROMPT, {}),
    "a body that is not read": (gzip.compress(ASKS), {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("kind", UNNAMED)
async def test_who_names_no_model_that_is_listed_is_held_to_the_limits_of_what_may_serve(
    tmp_path: Path, kind: str
) -> None:
    limits = '[[tenant.model_limits]]\nmodels = "{}"\nrequests_per_minute = 1\n'
    page = json.dumps({"data": [{"id": "lab-model", "owned_by": "sglang"}]}).encode()
    (body, headers), engine = UNNAMED[kind], Scripted(answer(counted(1, 1)), page=page)
    async with limited(tmp_path, engine, tenant="".join(map(limits.format, ("*-model", "other")))) as node:
        answers = [await asked(node, {**bearer(RED), **headers}, body=body) for _ in range(2)]
        assert [one.status_code for one in answers] == [200, 429]
        shown = (await node.ask("/admin/access"))["limits"]
        assert [scope for scope in shown if shown[scope]["limits"][0]["used"]] == ["tenant acme, models *-model"]


async def test_a_spent_budget_is_a_quota_that_is_not_to_be_retried(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(100, 50)))
    tenant = 'budget = [{amount = 160, window = "hour"}]'
    async with limited(tmp_path, engine, tenant=tenant) as node:
        assert (await asked(node, bearer(RED), messages=SHORT)).status_code == 200
        refused = await asked(node, bearer(RED), messages=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert refused.headers["x-should-retry"] == "false"
        assert 0 < int(refused.headers["retry-after"]) <= 3600


async def test_a_request_that_is_refused_for_its_tokens_is_none_that_counts(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(100, 50)))
    async with limited(tmp_path, engine, requests_per_minute=10, tokens_per_minute=160) as node:
        answers = [await asked(node, bearer(RED), messages=SHORT) for _ in range(2)]
        assert [one.status_code for one in answers] == [200, 429]
        assert left(answers[-1], "requests") == 9


async def test_a_refusal_for_tokens_names_what_is_left_and_what_the_request_needs(tmp_path: Path) -> None:
    """Of 160 tokens 10 are left, which is no reason that a client sees."""
    engine = Scripted(answer(counted(100, 50)))
    async with limited(tmp_path, engine, tokens_per_minute=160) as node:
        await asked(node, bearer(RED), messages=SHORT)
        refused = (await asked(node, bearer(RED), messages=SHORT, max_tokens=20)).json()["error"]["message"]
    assert "160 tokens per minute of key red; 10 are left, and this request needs " in refused
    needed = int(refused.partition("needs ")[2].partition(" ")[0])
    assert 20 < needed <= 160


@pytest.mark.parametrize("path", sorted(COUNTING_PATHS))
async def test_asking_for_the_number_of_tokens_takes_none(tmp_path: Path, path: bytes) -> None:
    """Agents ask before each turn: a long chat would be paid for twice."""
    async with limited(tmp_path, Scripted(answer(b'{"input_tokens":9}')), tokens_per_minute=10_000) as node:
        body = json.dumps({"model": "lab-model", "messages": SHORT, "prompt": "word " * 500}).encode()
        counted_by_engine = await asked(node, bearer(RED), path.decode(), body)
        assert counted_by_engine.status_code == 200
        shown = (await node.ask("/admin/access"))["limits"]
        assert [limit["used"] for one in shown.values() for limit in one["limits"]] in ([], [0.0])


async def test_uncached_tokens_leave_out_what_the_engine_had_cached(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(100, 50, cached=80)))
    async with limited(tmp_path, engine, uncached_tokens_per_minute=10_000) as node:
        await asked(node, bearer(RED))
        (limit,) = (await node.ask("/admin/access"))["limits"]["key red"]["limits"]
        assert limit["used"] == 70


async def test_a_refusal_in_the_shape_of_anthropics_api_comes_with_its_fields(tmp_path: Path) -> None:
    async with limited(tmp_path, Scripted(answer(CLAUDES)), requests_per_minute=1, tokens_per_minute=9000) as node:
        answers = [await asked(node, {"x-api-key": RED}, "/v1/messages", ASKS) for _ in range(2)]
        assert [one.status_code for one in answers] == [200, 429]
        assert answers[1].json()["error"]["type"] == "rate_limit_error"
        for one in answers:
            assert one.headers["anthropic-ratelimit-requests-limit"] == "1"
            assert one.headers["anthropic-ratelimit-requests-remaining"] == "0"
            assert one.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
            assert 0 < int(one.headers["anthropic-ratelimit-tokens-remaining"]) < 9000


async def test_models_and_other_answers_of_the_node_itself_show_what_is_left_and_take_nothing(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(1, 1)), page=b'{"data":[{"id":"lab-model","object":"model"}]}')
    async with limited(tmp_path, engine, requests_per_minute=2) as node:
        for _ in range(3):
            listed = await node.http.get(f"{node.url}/v1/models", headers=bearer(RED))
            assert (listed.status_code, left(listed, "requests")) == (200, 2)


OWN = {"/v1/models": 200, "/v1/models/lab-model": 200, "/v1/models/none": 404, CHAT: 405, "/nothing": 404}


async def test_what_the_node_answers_itself_needs_no_room_in_a_limit(tmp_path: Path) -> None:
    """So does an agent find out, while it waits, which models there are."""
    engine = Scripted(
        turns=iter([[answer(counted(1, 1))], [HANG]]), page=b'{"data":[{"id":"lab-model","object":"model"}]}'
    )
    async with limited(tmp_path, engine, requests_per_minute=2, concurrent=1) as node:
        assert (await asked(node, bearer(RED))).status_code == 200
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, node, bearer(RED))
            await until_in_flight(node, 1)
            assert (await asked(node, bearer(RED))).status_code == 429
            for path, status in OWN.items():
                found = await node.http.get(node.url + path, headers=bearer(RED))
                assert (found.status_code, left(found, "requests")) == (status, 0)
            nursery.cancel_scope.cancel()
    assert len(engine.heads) == 2


async def test_what_is_refused_by_its_head_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(10, 5)))
    async with limited(tmp_path, engine, requests_per_minute=1) as node, await node.wire() as wire:
        assert (await asked(node, bearer(RED))).status_code == 200
        lines = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-api-key: {RED}\r\ncontent-length: 9999999\r\n\r\n"
        await wire.send(lines.encode())
        status, headers, _ = await wire.response()
        assert (status, headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert len(engine.heads) == 1


UNCOUNTED = {
    "/v1/batches": b"{}",
    "/v1/files": b"{}",
    "/v1/responses": b'{"model":"lab-model","input":"a","background":true}',
    "/v1/images/generations": b"{}",
}
DENSE = b'{"model":"lab-model","input":[%b1],"background":true,"tools":[%b1]}' % ((b"[]," * 60_000,) * 2)


@pytest.mark.parametrize("path", UNCOUNTED)
async def test_what_nobody_counts_is_refused_to_keys_with_limits_of_tokens_unless_these_allow_it(
    tmp_path: Path, path: str
) -> None:
    for more, status in (({}, 403), ({"uncounted": True}, 200)):
        async with limited(tmp_path, Scripted(answer(RESPONSE)), tokens_per_minute=9000, **more) as node:
            assert (await asked(node, bearer(RED), path, UNCOUNTED[path])).status_code == status
            assert (await asked(node, bearer(BLUE), path, UNCOUNTED[path])).status_code == 200


@pytest.mark.parametrize("kind", ["streamed", "whole"])
async def test_a_response_in_the_background_is_refused_wherever_its_body_asks_for_that(
    tmp_path: Path, kind: str
) -> None:
    body = DENSE if kind == "whole" else DENSE.replace(b'"background"', b'"stream":true,"background"')
    async with limited(tmp_path, Scripted(answer(RESPONSE)), tokens_per_minute=9000) as node:
        assert (await asked(node, bearer(RED), "/v1/responses", body)).status_code == 403
        answers = [await asked(node, bearer(BLUE), "/v1/responses", body)]
        answers += [await asked(node, bearer(RED), "/v1/responses", b'{"model":"lab-model","input":"a"}')]
        assert [one.status_code for one in answers] == [200, 200]


MANY = {
    "/v1/chat/completions": b'"messages":[],"n":20',
    "/v1/completions": b'"prompt":[%b"a"]' % (b'"a",' * 20),
    "/generate": b'"text":"a","sampling_params":{"n":20}',
}


@pytest.mark.parametrize("path", MANY)
async def test_room_is_held_for_all_answers_wherever_a_body_asks_for_them(tmp_path: Path, path: str) -> None:
    body = DENSE.replace(b'"background":true', MANY[path])
    async with limited(tmp_path, Scripted(answer(counted(5, 5))), tokens_per_minute=9000) as node:
        one = await asked(node, bearer(RED), path, DENSE.replace(b'"background":true', b'"n":1,"prompt":"a"'))
        assert [one.status_code, (await asked(node, bearer(RED), path, body)).status_code] == [200, 429]


async def test_a_request_larger_than_its_limit_is_refused_for_good_only_if_that_is_sure(tmp_path: Path) -> None:
    async with limited(tmp_path, Scripted(answer(counted(5, 5))), tokens_per_minute=50) as node:
        await asked(node, bearer(BLUE))
        await node.until_routes(lambda view: view["tokenizer_worker"]["learned"] >= 1)
        found = await asked(node, bearer(RED))
        assert (found.status_code, found.json()["error"]["code"]) == (400, "request_larger_than_limit")
        assert "50 tokens per minute of key red" in found.json()["error"]["message"]
        unread = await asked(node, {**bearer(RED), "content-encoding": "gzip"}, CHAT, gzip.compress(chat()))
        assert unread.status_code == 200


async def test_a_limit_in_the_shadow_refuses_nobody(tmp_path: Path) -> None:
    async with limited(tmp_path, Scripted(answer(counted(1, 1))), requests_per_minute=1, mode="shadow") as node:
        answers = [await asked(node, bearer(RED)) for _ in range(3)]
        assert [one.status_code for one in answers] == [200] * 3
        assert "x-ratelimit-limit-requests" not in answers[0].headers
        page = (await node.http.get(f"{node.control}/metrics")).text
        assert 'ranvier_limits_shadowed_total{limit="requests per minute"} 2.0' in page


def used(view: dict[str, Any], scope: str = "key red") -> dict[str, tuple[float, float]]:
    """What is used, and reserved, of each limit of RED, or of its tenant."""
    return {each["limit"]: (each["used"], each["reserved"]) for each in view["limits"][scope]["limits"]}


async def test_requests_at_a_time_are_bounded_and_free_when_a_client_leaves(tmp_path: Path) -> None:
    engine = Scripted(HANG)  # it never answers
    async with limited(tmp_path, engine, concurrent=1) as node, trio.open_nursery() as nursery:
        nursery.start_soon(asked, node, bearer(RED))
        await node.until("/admin/access", lambda view: reserved(view) == 1)
        assert (await asked(node, bearer(RED))).status_code == 429
        nursery.cancel_scope.cancel()
    del node


def reserved(view: dict[str, Any]) -> float:
    found = view["limits"].get("key red")
    return float(found["limits"][0]["reserved"]) if found else 0.0


async def test_a_client_that_leaves_pays_for_its_prompt(tmp_path: Path) -> None:
    async with limited(tmp_path, Scripted(HANG), tokens_per_minute=100_000) as node:
        with trio.move_on_after(0.5):
            await asked(node, bearer(RED))
        view = await node.until("/admin/access", lambda view: view["limits"] and not reserved(view))
        used = view["limits"]["key red"]["limits"][0]["used"]
        assert 50 < used < 500


async def test_a_client_that_leaves_amid_its_answer_pays_for_what_came_too(tmp_path: Path) -> None:
    engine = Scripted(turns=iter([[HANG], [STREAM_HEAD + chunk(EVENT * 30), HANG]]))
    async with limited(tmp_path, engine, tokens_per_minute=100_000) as node:
        with trio.move_on_after(0.5):
            await asked(node, bearer(RED), stream=True)
        await node.until("/admin/access", lambda view: view["limits"] and not reserved(view))
        ((prompt, _),) = used(await node.ask("/admin/access")).values()
        async with await node.wire() as wire:
            await wire.send(post(chat(stream=True), b"x-api-key: " + RED.encode()))
            await wire.until(EVENT * 30)
        await node.until("/admin/access", lambda view: not reserved(view))
        assert used(await node.ask("/admin/access")) == {"tokens per minute": (2 * prompt + 30, 0)}


@pytest.mark.slow
async def test_a_changed_file_of_keys_changes_a_limit_at_once(tmp_path: Path) -> None:
    engine = Scripted(answer(counted(1, 1)))
    async with limited(tmp_path, engine, requests_per_minute=1) as node:
        assert [(await asked(node, bearer(RED))).status_code for _ in range(2)] == [200, 429]
        keys_file(tmp_path, '[[tenant]]\nname = "acme"\n\n', key_lines(RED, tenant="acme", requests_per_minute=3))
        while (found := await asked(node, bearer(RED))).status_code == 429:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
        assert left(found, "requests") == 1, "what was counted stays"


async def test_the_libraries_see_their_own_errors_with_the_time_to_wait(tmp_path: Path) -> None:
    async with limited(tmp_path, Scripted(answer(counted(1, 1))), requests_per_minute=1) as node:
        began = time.monotonic()
        await asked(node, bearer(RED))
        messages = [{"role": "user", "content": "hi"}]

        def with_openai() -> Any:
            client = openai.OpenAI(base_url=f"{node.url}/v1", api_key=RED, max_retries=0)
            return client.chat.completions.create(model="lab-model", messages=messages)

        def with_anthropic() -> Any:
            client = anthropic.Anthropic(base_url=node.url, api_key=RED, max_retries=0)
            return client.messages.create(model="lab-model", max_tokens=8, messages=messages)

        for call, library in ((with_openai, openai), (with_anthropic, anthropic)):
            with pytest.raises(library.RateLimitError) as caught:
                await trio.to_thread.run_sync(call)
            passed_s = time.monotonic() - began
            assert 59 - passed_s <= int(caught.value.response.headers["retry-after"]) <= 61


async def test_the_libraries_do_not_try_again_where_a_budget_is_spent(tmp_path: Path) -> None:
    """As they do by default, twice."""
    tenant = 'budget = [{amount = 160, window = "month"}]'
    async with limited(tmp_path, Scripted(answer(counted(100, 50))), tenant=tenant) as node:
        assert (await asked(node, bearer(RED), messages=SHORT)).status_code == 200
        messages: Any = SHORT

        def with_openai() -> Any:
            client = openai.OpenAI(base_url=f"{node.url}/v1", api_key=RED)
            return client.chat.completions.create(model="lab-model", messages=messages)

        def with_anthropic() -> Any:
            client = anthropic.Anthropic(base_url=node.url, api_key=RED)
            return client.messages.create(model="lab-model", max_tokens=99, messages=messages)

        for number, (call, library) in enumerate(((with_openai, openai), (with_anthropic, anthropic)), 1):
            with pytest.raises(library.RateLimitError) as caught:
                await trio.to_thread.run_sync(call)
            assert "insufficient_quota" in caught.value.response.text or library is anthropic
            assert (await node.ask("/admin/access"))["limits"]["tenant acme"]["refused"] == number
