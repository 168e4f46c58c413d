"""Engines that fail behind a status of 200: whole nodes, and scripted engines."""

from __future__ import annotations

import json

import pytest
import trio

from tests.node.node_lab import lab
from tests.proxy.test_black_holes import Busy
from tests.proxy.test_overload import QUESTIONS, answered, question
from tests.proxy.test_pipeline import asked, at_rest
from tests.proxy.wire import END, GOOD, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, answer, chunk, event

JSON = b"content-type: application/json"
LAST = b"0\r\n\r\n"
FULL = {"error": {"message": "The request queue is full.", "type": "service_unavailable", "code": 503}}
BROKEN = {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}
EVENT = b"data: " + json.dumps(FULL).encode() + b"\n\n"
CLAUDES = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
FAILED = {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "x"}}}
REFUSED = {"error": {"message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}}

STREAMS: dict[str, tuple[list[Step], str]] = {
    "queue full": ([STREAM_HEAD + event(FULL) + LAST], "overloaded"),
    "queue full, in pieces": ([STREAM_HEAD, event(FULL), LAST], "overloaded"),
    "queue full, cut": ([STREAM_HEAD, chunk(EVENT[:30]), chunk(EVENT[30:-1]), chunk(EVENT[-1:]), LAST], "overloaded"),
    "broken": ([STREAM_HEAD + event(BROKEN) + chunk(b"data: [DONE]\n\n") + LAST], "server_error"),
    "broken behind a role": ([STREAM_HEAD + ROLE + event(BROKEN) + LAST], "server_error"),
    "overloaded": (
        [STREAM_HEAD + chunk(b"event: error\ndata: " + json.dumps(CLAUDES).encode() + b"\n\n") + LAST],
        "overloaded",
    ),
    "response failed": ([STREAM_HEAD + event({"type": "response.created"}) + event(FAILED) + LAST], "server_error"),
    "no event": ([STREAM_HEAD + LAST], "server_error"),
    "nothing but the end": ([STREAM_HEAD, chunk(b"data: [DONE]\n\n"), LAST], "server_error"),
    "no model": ([STREAM_HEAD + event(REFUSED) + LAST], "refused"),
    "as JSON": ([answer(json.dumps(FULL).encode(), JSON)], "overloaded"),
}
WHOLE: dict[str, tuple[list[Step], str]] = {
    "queue full": ([answer(json.dumps(FULL).encode(), JSON)], "overloaded"),
    "broken, in pieces": (
        [STREAM_HEAD.replace(b"text/event-stream", b"application/json"), chunk(b'{"error":"CU'), chunk(b'DA"}'), LAST],
        "server_error",
    ),
    "no model": ([answer(json.dumps(REFUSED).encode(), JSON)], "refused"),
    "of no type": ([answer(json.dumps(BROKEN).encode())], "server_error"),
}
CASES = [(True, kind) for kind in STREAMS] + [(False, kind) for kind in WHOLE]


@pytest.mark.parametrize(("stream", "kind"), CASES)
async def test_no_client_sees_an_error_within_a_200_while_another_engine_serves(stream: bool, kind: str) -> None:
    steps, outcome = (STREAMS if stream else WHOLE)[kind]
    good: list[Step] = [STREAM_HEAD, ROLE, TOKEN, END] if stream else [GOOD]
    paths = [path for path in QUESTIONS if not (stream and path == b"/v1/embeddings")]
    async with lab(Scripted(*steps), Scripted(*good), policy="round_robin", ask_usage=False) as node:
        for path in paths:
            status, _, body = await answered(node, question(path, b"authorization: Bearer k", stream=stream))
            assert (status, b"error" in body, b"word" in body or b"hi" in body) == (200, False, True), path
        outcomes = (await at_rest(node))["outcomes"]
    assert outcomes["success"] == len(paths)
    assert set(outcomes) == {"success", outcome}


@pytest.mark.parametrize(("stream", "kind"), CASES)
async def test_if_all_fail_so_the_client_gets_an_answer_as_it_came_and_nothing_is_learned(
    stream: bool, kind: str
) -> None:
    steps, outcome = (STREAMS if stream else WHOLE)[kind]
    engines = [Scripted(*steps), Scripted(*steps)]
    async with lab(*engines, ask_usage=False) as node, await node.wire() as client:
        await client.send(question(b"/v1/chat/completions", stream=stream))
        came = await client.exactly(len(b"HTTP/1.1 200"))
        status = int(came[-3:])
        routes = await at_rest(node)
        states = [(backend["circuit"], backend["refusing_status"]) for backend in await node.backends()]
    assert status == 200
    assert (asked(engines), routes["outcomes"], routes["rows"]) == (2, {outcome: 2}, 0)
    assert states == [("closed", None)] * 2


@pytest.mark.parametrize("kind", ["queue full", "broken", "no event", "no model"])
async def test_an_engine_that_fails_at_once_within_a_200_attracts_no_load(kind: str) -> None:
    engines = [Scripted(*STREAMS[kind][0]), Busy(), Busy()]
    failed = 0
    async with lab(*engines, ask_usage=False) as node:

        async def client() -> None:
            nonlocal failed
            for _ in range(10):
                _, _, body = await answered(node, question(b"/v1/completions", stream=True))
                failed += b"word" not in body

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(client)
    assert failed == 0
    assert len(engines[0].bodies) <= 20


async def test_an_error_behind_output_ends_the_answer_as_it_came() -> None:
    engines = [Scripted(STREAM_HEAD + ROLE + TOKEN + event(BROKEN) + LAST) for _ in range(2)]
    async with lab(*engines, ask_usage=False) as node:
        status, _, body = await answered(node, question(b"/v1/chat/completions", stream=True))
    assert (status, b"word" in body, b"CUDA" in body, asked(engines)) == (200, True, True, 1)


async def test_what_is_no_inference_may_be_an_error_within_a_200() -> None:
    failed = answer(b'{"id":"f1","error":{"message":"x","code":500}}', JSON)
    engines = [Scripted(failed), Scripted(failed)]
    async with lab(*engines) as node:
        assert (await node.http.get(f"{node.url}/v1/files/f1")).status_code == 200
        assert (await at_rest(node))["outcomes"] == {"success": 1}


@pytest.mark.parametrize("blank", [b"\n", b" "])
async def test_blanks_by_which_an_engine_keeps_a_line_open_are_relayed_at_once(blank: bytes) -> None:
    seen = trio.Event()
    head = STREAM_HEAD.replace(b"text/event-stream", b"application/json")
    engine = Scripted(head + chunk(blank), seen, chunk(b'{"choices":[]}') + LAST)
    async with lab(engine) as node, await node.wire() as client:
        await client.send(question(b"/v1/completions"))
        await client.until(chunk(blank))
        seen.set()
        await client.until(LAST)
