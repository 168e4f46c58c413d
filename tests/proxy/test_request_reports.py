"""What a node reports of a request: its line in the log beside its line in the recording, and `explain` before it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import trio

from ranvier_py.core.answers.answer_counts import answer_counts
from ranvier_py.core.answers.answer_stream import read_answer
from ranvier_py.core.routing.summary import RequestSummary
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Node, cluster_lab, lab, turn
from tests.proxy.wire import CLOSE, GOOD, HANG, Scripted, Step, answer

TEXT = "Where are the atlases of this library? " * 9
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": turn(TEXT)},
    "/v1/completions": {"prompt": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
    "/v1/embeddings": {"input": TEXT},
}


def attempts(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


async def ask(node: Node, path: str, **fields: Any) -> int:
    body = {"model": MODEL, "max_tokens": 4, **BODIES[path], **fields}
    return (await node.http.post(f"{node.url}{path}", json=body)).status_code


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_and_the_recording_count_a_prompt_alike(
    stream: bool, tmp_path: Path, logged: list[RequestSummary]
) -> None:
    async with lab(engines=1, record_file=tmp_path / "record") as node:
        for path, body in BODIES.items():
            for again in (TEXT, TEXT, "hi"):  # cold, cached, shorter than a block
                given = [name for name in body if name in ("prompt", "input")]
                fields = dict.fromkeys(given, again) or {"messages": [{"role": "user", "content": again}]}
                assert await ask(node, path, stream=stream and path != "/v1/embeddings", **fields) == 200
        while len(recorded := attempts(tmp_path / "record")) < 3 * len(BODIES):  # noqa: ASYNC110  # a file
            await trio.sleep(BETWEEN_LOOKS_S)
    assert sorted(line.prompt_tokens for line in logged) == sorted(line["prompt_tokens"] for line in recorded)
    assert all(line.prompt_tokens > 0 for line in logged if line.path != "/v1/embeddings")


USAGES = {
    "chat": {"usage": {"prompt_tokens": 190, "prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens": 3}},
    "messages": {"usage": {"input_tokens": 90, "cache_read_input_tokens": 30, "cache_creation_input_tokens": None}},
    "responses": {"usage": {"input_tokens": 70, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3}},
}


@pytest.mark.parametrize("api", USAGES)
@pytest.mark.parametrize("rest", ["", "x" * 20_000, '"prompt_tokens": 1, "input_tokens": 2'])
def test_the_counts_of_an_answer_are_found_without_reading_it(api: str, rest: str) -> None:
    content: dict[str, Any] = {
        "chat": {"choices": [{"message": {"role": "assistant", "content": rest}, "finish_reason": "stop"}]},
        "messages": {"content": [{"type": "text", "text": rest}]},
        "responses": {"output": [{"type": "message", "role": "assistant", "content": rest}]},
    }[api]
    for indent in (None, 2):
        raw = json.dumps({**content, **USAGES[api]}, indent=indent).encode()
        kind = "chat" if api == "chat" else api
        answer, found = read_answer(raw, chunked=False, streamed=False, kind=kind), answer_counts(raw, api)
        assert found[:3] == (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
        assert found.prompt in (190, 120, 70)
    cut = b'"prompt_tokens": 19\r\n5\r\n0, "input_tokens": 19\r\n5\r\n0,'
    for raw in (b"", b"{}", cut, b'"prompt_tokens": null, "input_tokens": -1}'):
        assert answer_counts(raw, api).prompt is None


# --- tries that failed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        *((answer(b"", status=status), f"it answered {status}") for status in (500, 502, 503, 429, 529)),
        (CLOSE, "closed"),
        (HANG, ""),
    ],
)
async def test_each_try_that_failed_leaves_its_reason_also_where_another_engine_served(
    step: Step, reason: str, logged: list[RequestSummary]
) -> None:
    engines = [Scripted(step), Scripted(step), Scripted(GOOD)]
    settings = {"policy": "round_robin", "circuit_failures": 1000, "first_byte_timeout_s": 0.1}
    async with lab(*engines, **settings) as node:
        for number in range(3):
            assert (await node.chat(seed=number)).status_code == 200
        names = {backend["name"] for backend in await node.backends()}
    tried = [line for line in logged if line.tries > 1]
    assert tried
    for line in tried:
        reasons = line.error.split("; ")
        assert len(reasons) == line.tries - 1
        assert {each.rpartition(": it answered")[0] or each.partition(": ")[0] for each in reasons} <= names
        assert all(reason in each for each in reasons)
    assert all(line.error == "" for line in logged if line.tries == 1)


# --- explain --------------------------------------------------------------------------------------------------------


async def test_explain_has_the_length_of_every_prompt_and_of_none_that_is_not_read() -> None:
    async with lab(engines=1, tokenize_deadline_s=30) as node:
        for content, least, most in (("hi", 1, 15), (TEXT, 50, 200)):  # shorter than a block, and some blocks
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
            await node.http.post(f"{node.url}/v1/chat/completions", json=body)
            await node.until_routes(lambda routes: routes["tokenizer_worker"]["learned"])
            report = (await node.http.post(f"{node.control}/explain", json=body)).json()
            assert report["prompt_tokens_exact"] is True
            assert least <= report["prompt_tokens"] <= most
        for body in ({"messages": "no list"}, {"model": MODEL}, {"prompt": {"a": 1}}):
            report = (await node.http.post(f"{node.control}/explain", json=body)).json()
            assert (report["prompt_tokens"], report["prompt_tokens_exact"]) == (None, False)
            assert report["unread"]


# --- orders over the control port -----------------------------------------------------------------------------------


async def test_each_order_to_drain_leaves_a_line_on_all_nodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with cluster_lab(tmp_path, engines=1) as place:
        first, second = await place.cluster(2)
        (name,) = (backend["name"] for backend in await first.backends())
        for draining in (True, True, False):
            order = {"url": place.engines[0], "draining": draining}
            assert (await first.http.post(f"{first.control}/admin/backends/drain", json=order)).status_code == 200
            await second.until_backend(lambda backend, wanted=draining: backend["draining"] is wanted)
        while len(found := [each for each in caplog.messages if each.startswith("backend.draining ")]) < 4:  # noqa: ASYNC110
            await trio.sleep(BETWEEN_LOOKS_S)
    for change in ("False -> True", "True -> False"):
        for cause in ("ordered by -)", "ordered by - on "):  # who it was has no name; the other node names the first
            assert any(each.startswith(f"backend.draining {name} {change} ({cause}") for each in found)
    assert len(found) == 4


async def test_an_order_to_forget_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with lab(engines=1, response_cache=True) as node:
        for path, order in (
            ("response-cache/invalidate", {"clear_all": True}),
            ("response-cache/invalidate", {"model": "m"}),
            ("kv-index/clear", {}),
        ):
            answer = await node.http.post(f"{node.control}/admin/{path}", json=order)
            assert answer.status_code == 200, answer.text
    ordered = [text.split()[0] for text in caplog.messages if text.endswith("(ordered over the control port)")]
    assert ordered == ["response_cache.invalidated"] * 2 + ["kv_index.cleared"]
