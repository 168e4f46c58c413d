"""Engines that are well and have no room: a whole node, and scripted engines."""

from __future__ import annotations

import json

import pytest

from ranvier_py.core.answers.chunked import payload_of
from tests.node.node_lab import Node, lab
from tests.proxy.test_pipeline import asked, at_rest
from tests.proxy.wire import CLOSE, GOOD, STREAM_HEAD, TOKEN, Scripted, answer, chunk, post

FULL = b'{"object":"error","message":"The request queue is full.","type":"service_unavailable"}'
CHUNKED_503 = b"HTTP/1.1 503 Full\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
WITHOUT_ROOM = {
    "queue full": answer(FULL, status=503),
    "queue full, in chunks": CHUNKED_503 + chunk(FULL[:20]) + chunk(FULL[20:]) + b"0\r\n\r\n",
    "come again": answer(b"", b"retry-after: 1", status=503),
    "come again then": answer(b"busy", b"Retry-After: Fri, 31 Dec 2049 23:59:59 GMT", status=503),
    "too many requests": answer(b"{}", status=429),
    "overloaded": answer(b"{}", status=529),
}
QUESTIONS = {
    b"/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    b"/v1/completions": {"model": "m", "prompt": "hi"},
    b"/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    b"/v1/responses": {"model": "m", "input": "hi"},
    b"/generate": {"text": "hi"},
    b"/v1/embeddings": {"model": "m", "input": "hi"},
}


def question(path: bytes, *fields: bytes, stream: bool = False) -> bytes:
    return post(json.dumps({**QUESTIONS[path], **({"stream": True} if stream else {})}).encode(), *fields, target=path)


async def answered(node: Node, request: bytes) -> tuple[int, dict[str, str], bytes]:
    async with await node.wire() as client:
        await client.send(request)
        return await client.response()


@pytest.mark.parametrize("kind", WITHOUT_ROOM)
async def test_whoever_has_no_room_is_passed_over_and_stays_in_the_circuit(kind: str) -> None:
    full, free = Scripted(WITHOUT_ROOM[kind]), Scripted(GOOD)
    async with lab(full, free, policy="round_robin") as node:
        for path in QUESTIONS:
            for stream in (False, True):
                assert (await answered(node, question(path, stream=stream)))[0] == 200, (path, stream)
        states = {backend["circuit"] for backend in await node.backends()}
        assert (await at_rest(node))["outcomes"] == {"success": 12, "overloaded": len(full.bodies)}
    assert states == {"closed"}
    assert 1 <= len(full.bodies) <= 3  # once, and again when a pause of a second is over


@pytest.mark.parametrize("kind", WITHOUT_ROOM)
async def test_if_nobody_has_room_the_client_gets_the_last_such_answer_as_it_came(kind: str) -> None:
    engines = [Scripted(WITHOUT_ROOM[kind]), Scripted(WITHOUT_ROOM[kind])]
    async with lab(*engines) as node:
        for number, path in enumerate(QUESTIONS):
            async with await node.wire() as client:
                await client.send(question(path))
                status, headers, body = await client.response()
            expected = WITHOUT_ROOM[kind]
            assert f" {status} ".encode() in expected.partition(b"\r\n")[0]
            assert body in (FULL, b"", b"busy", b"{}")
            assert ("retry-after" in headers) is (b"retry-after" in expected.lower())
            assert asked(engines) == 2 * number + 2  # who pauses is asked all the same
        assert {backend["circuit"] for backend in await node.backends()} == {"closed"}


async def test_a_lone_engine_without_room_is_asked_by_every_request() -> None:
    engine = Scripted(WITHOUT_ROOM["come again"])
    async with lab(engine) as node:
        for _ in range(8):
            status, headers, _ = await answered(node, question(b"/v1/chat/completions"))
            assert (status, headers["retry-after"]) == (503, "1")
        assert (await node.backends())[0]["circuit"] == "closed"
    assert len(engine.bodies) == 8


async def test_if_the_others_break_off_the_client_gets_the_answer_of_the_one_without_room() -> None:
    turns = iter([[WITHOUT_ROOM["come again"]], [CLOSE]])
    engines = [Scripted(turns=turns), Scripted(turns=turns)]
    async with lab(*engines) as node:
        status, headers, _ = await answered(node, question(b"/v1/chat/completions"))
        outcomes = (await at_rest(node))["outcomes"]
    assert (status, headers["retry-after"]) == (503, "1")
    assert outcomes == {"overloaded": 1, "broken": 1}


async def test_too_many_requests_of_one_credential_concern_no_other() -> None:
    limited, free = Scripted(answer(b"{}", b"retry-after: 20", status=429)), Scripted(GOOD)
    async with lab(limited, free, policy="round_robin") as node:
        for spelling in (b"authorization: Bearer one", b"authorization: bearer  one", b"x-api-key: one") * 3:
            assert (await answered(node, question(b"/v1/chat/completions", spelling)))[0] == 200
        assert len(limited.bodies) == 1
        for _ in range(2):
            assert (await answered(node, question(b"/v1/chat/completions", b"x-api-key: other")))[0] == 200
        assert len(limited.bodies) == 2
        page = (await node.http.get(f"{node.control}/metrics")).text
    assert 'ranvier_pauses_begun_total{whom="credential"} 2.0' in page


async def test_an_engine_that_pauses_is_shown_with_the_seconds_that_are_left() -> None:
    full, free = Scripted(answer(b"", b"retry-after: 300", status=503)), Scripted(GOOD)
    async with lab(full, free, policy="round_robin") as node:
        for _ in range(3):
            await node.chat()
        left_s = [backend["pause_s"] for backend in await node.backends()]
    assert 25 < left_s[0] <= 30
    assert left_s[1] == 0


@pytest.mark.parametrize("path", [b"/v1/files", b"/v1/batches"])
async def test_what_is_no_inference_is_asked_once_and_pauses_nobody(path: bytes) -> None:
    engines = [Scripted(WITHOUT_ROOM["come again"]), Scripted(WITHOUT_ROOM["come again"])]
    async with lab(*engines) as node:
        status, headers, _ = await answered(node, post(b"{}", target=path))
        assert (status, headers["retry-after"]) == (503, "1")
        assert [backend["pause_s"] for backend in await node.backends()] == [0, 0]
    assert asked(engines) == 1


async def test_an_error_whose_body_does_not_end_is_relayed_as_far_as_it_comes() -> None:
    head = b"HTTP/1.1 404 No\r\ncontent-length: 100\r\n\r\n"
    async with lab(Scripted(head, b"half of it", CLOSE)) as node:
        status, _, body = await answered(node, question(b"/v1/chat/completions"))
    assert (status, b"upstream_closed" in body) == (502, True)


async def test_a_long_error_is_relayed_to_its_end() -> None:
    long = b"x" * 300_000
    async with lab(Scripted(answer(long, status=404))) as node:
        status, _, body = await answered(node, question(b"/v1/chat/completions"))
    assert (status, body) == (404, long)


async def test_a_stream_after_one_without_room_is_relayed_as_it_comes() -> None:
    stream = STREAM_HEAD + TOKEN + b"0\r\n\r\n"
    turns = iter([[WITHOUT_ROOM["overloaded"]], [stream]])
    async with lab(Scripted(turns=turns), Scripted(turns=turns)) as node:
        status, _, body = await answered(node, question(b"/v1/chat/completions", stream=True))
    assert (status, body) == (200, payload_of(TOKEN))
