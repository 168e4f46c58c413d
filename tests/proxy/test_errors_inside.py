"""Engines that fail behind a status of 200: whole nodes, and scripted engines."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import trio

from ranvier_py.core.answers.chunked import payload_of
from ranvier_py.core.routing.summary import RequestSummary
from tests.node.node_lab import lab
from tests.proxy.test_black_holes import Busy
from tests.proxy.test_overload import QUESTIONS, answered, question
from tests.proxy.test_pipeline import asked, at_rest, sharing
from tests.proxy.test_poison import question as numbered
from tests.proxy.wire import CLOSE, END, GOOD, RESET, ROLE, STREAM_HEAD, TOKEN, Scripted, Step, answer, chunk, event

JSON = b"content-type: application/json"
JSON_HEAD = STREAM_HEAD.replace(b"text/event-stream", b"application/json")
LAST = b"0\r\n\r\n"
GZIP = 16 + zlib.MAX_WBITS
FULL = {"error": {"message": "The request queue is full.", "type": "service_unavailable", "code": 503}}
BROKEN = {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}
EVENT = b"data: " + json.dumps(FULL).encode() + b"\n\n"
CLAUDES = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
FAILED = {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "x"}}}
START, PING = {"type": "message_start", "message": {"role": "assistant", "content": []}}, {"type": "ping"}
ANNOUNCED = [{"type": f"response.{kind}", "response": {"error": None}} for kind in ("created", "queued", "in_progress")]
OF_CHATS = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
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
    "broken behind a role of its own": ([STREAM_HEAD, ROLE, event(BROKEN), LAST], "server_error"),
    "full behind comments": ([STREAM_HEAD, *3 * [chunk(b": ping\n\n")], event(FULL), LAST], "overloaded"),
    "overloaded behind a start": ([STREAM_HEAD, event(START), event(PING), event(CLAUDES), LAST], "overloaded"),
    "failed behind what announces it": ([STREAM_HEAD, *map(event, ANNOUNCED), event(FAILED), LAST], "server_error"),
    "named so alone": ([STREAM_HEAD, chunk(b'event: error\rdata: {"code":529}\r\r'), LAST], "overloaded"),
    "comments alone": ([STREAM_HEAD, chunk(b": ping\n\n"), LAST], "server_error"),
    "no event": ([STREAM_HEAD + LAST], "server_error"),
    "nothing but the end": ([STREAM_HEAD, chunk(b"data: [DONE]\n\n"), LAST], "server_error"),
    "nothing behind a role": ([STREAM_HEAD, event(OF_CHATS), chunk(b"data: [DONE]\n\n"), LAST], "server_error"),
    "nothing behind a start": ([STREAM_HEAD + event(START) + event(PING) + LAST], "server_error"),
    "no model": ([STREAM_HEAD + event(REFUSED) + LAST], "refused"),
    "as JSON": ([answer(json.dumps(FULL).encode(), JSON)], "overloaded"),
    "as events that are called JSON": ([JSON_HEAD + event(FULL) + LAST], "overloaded"),
    "as JSON of no type": ([answer(json.dumps(FULL).encode())], "overloaded"),
    "in another case": ([STREAM_HEAD.replace(b"text/event", b"Text/Event") + event(FULL) + LAST], "overloaded"),
}
WHOLE: dict[str, tuple[list[Step], str]] = {
    "queue full": ([answer(json.dumps(FULL).encode(), JSON)], "overloaded"),
    "broken, in pieces": (
        [JSON_HEAD, chunk(b'{"error":"CU'), chunk(b'DA"}'), LAST],
        "server_error",
    ),
    "broken, in pieces behind an id": (
        [JSON_HEAD, chunk(b'{"id":"x","object":"er'), chunk(b'ror","message":"CUDA","code":500}'), LAST],
        "server_error",
    ),
    "broken beside nothing": (
        [answer(json.dumps({**BROKEN, "choices": [], "output": []}).encode(), JSON)],
        "server_error",
    ),
    "no model": ([answer(json.dumps(REFUSED).encode(), JSON)], "refused"),
    "as an event": ([JSON_HEAD, event(BROKEN), LAST], "server_error"),
    "of no type": ([answer(json.dumps(BROKEN).encode())], "server_error"),
    "empty": ([answer(b"", JSON)], "server_error"),
    "a page": ([answer(b"<!doctype html><title>Sign in</title>", b"content-type: text/html")], "server_error"),
    "a page, in pieces": ([JSON_HEAD, chunk(b"<"), chunk(b"html>"), chunk(b"Error</html>"), LAST], "server_error"),
}
FOREIGN: dict[str, tuple[list[Step], str]] = {  # no errors and no answers, where text is generated
    "no choice": ([answer(b'{"choices":[]}', JSON)], "server_error"),
    "words of a gateway": ([answer(b'{"code":500,"msg":"404 NOT_FOUND"}', JSON)], "server_error"),
    "a list of errors": ([answer(b'[{"error":{"code":503}}]', JSON)], "server_error"),
    "text": ([answer(b"upstream request timeout", b"content-type: text/plain")], "server_error"),
    "throttled": ([answer(b'{"__type":"ThrottlingException"}', JSON)], "overloaded"),
}
CASES = [(True, kind) for kind in STREAMS] + [(False, kind) for kind in WHOLE]
FOREIGN_CASES = [(stream, kind) for stream in (True, False) for kind in FOREIGN]
SILENT = {  # without an error and without output
    *("comments alone", "no event", "nothing but the end", "nothing behind a role", "nothing behind a start"),
    "empty",
}
SILENT_CASES = [case for case in CASES if case[1] in SILENT]
GENERATE = {path: QUESTIONS[path] for path in QUESTIONS if path != b"/v1/embeddings"}


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


def packed(steps: Sequence[Step], wbits: int) -> list[Step]:
    """The same answer, compressed in as many pieces."""
    coding, pieces = zlib.compressobj(wbits=wbits), [step for step in steps if isinstance(step, bytes)]
    head, _, pieces[0] = pieces[0].partition(b"\r\n\r\n")
    if b"content-length" not in head:
        pieces = [payload_of(piece) for piece in pieces]
    head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
    found = [chunk(coding.compress(piece) + coding.flush(zlib.Z_SYNC_FLUSH)) for piece in pieces]
    field = b"\r\ncontent-encoding: %b\r\n\r\n" % (b"gzip" if wbits == GZIP else b"Deflate")
    return [head + field, *found, chunk(coding.flush()) + LAST]


@pytest.mark.parametrize(("stream", "kind"), FOREIGN_CASES)
async def test_no_client_sees_what_is_no_answer_while_another_engine_serves(stream: bool, kind: str) -> None:
    steps, outcome = FOREIGN[kind]
    good: list[Step] = [STREAM_HEAD, ROLE, TOKEN, END] if stream else [GOOD]
    async with lab(Scripted(*steps), Scripted(*good), policy="round_robin", ask_usage=False) as node:
        paths = [path for path in GENERATE if path != b"/generate" or kind != "a list of errors"]  # texts come as one
        for path in paths if stream else [*paths, b"/v1/embeddings"]:
            status, _, body = await answered(node, question(path, b"authorization: Bearer k", stream=stream))
            assert (status, b"word" in body or b"hi" in body) == (200, True), (path, body)
        assert set((await at_rest(node))["outcomes"]) == {"success", outcome}
    async with lab(Scripted(*steps), ask_usage=False) as node:  # it is the answer if no other engine is there
        status, _, body = await answered(node, question(paths[0], stream=stream))
        assert (status, body) == (200, bytes(steps[0]).partition(b"\r\n\r\n")[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "first",
    [
        answer(b'{"id":1}', JSON, status=201),
        answer(json.dumps(FULL).encode(), JSON, status=202),
        answer(b"<!doctype html>", status=203),
        answer(b"", status=200),
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 205 Reset Content\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_any_other_status_of_success_is_judged_by_its_answer(first: bytes, stream: bool) -> None:
    good: list[Step] = [STREAM_HEAD, ROLE, TOKEN, END] if stream else [GOOD.replace(b" 200 ", b" 201 ", 1)]
    async with lab(Scripted(first), Scripted(*good), policy="round_robin", ask_usage=False) as node:
        for path in (path for path in GENERATE if path != b"/generate"):
            status, _, body = await answered(node, question(path, b"authorization: Bearer k", stream=stream))
            assert (status, b"word" in body or b"hi" in body) == (200 if stream else 201, True), path


@pytest.mark.parametrize("wbits", [GZIP, zlib.MAX_WBITS])
@pytest.mark.parametrize(("stream", "kind"), CASES)
async def test_a_compressed_error_within_a_200_is_one_as_well(stream: bool, kind: str, wbits: int) -> None:
    steps, outcome = (STREAMS if stream else WHOLE)[kind]
    good = packed([STREAM_HEAD, ROLE, TOKEN, END] if stream else [GOOD], wbits)
    engines = Scripted(*packed(steps, wbits)), Scripted(*good)
    path = b"/v1/chat/completions"
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        status, _, body = await answered(node, question(path, stream=stream))
        body = zlib.decompress(body, wbits)
        assert (status, b"error" in body, b"word" in body or b"hi" in body) == (200, False, True)
        assert (await at_rest(node))["outcomes"] == {"success": 1, outcome: 1}


@pytest.mark.parametrize(("stream", "kind"), [case for case in CASES if case[1] not in SILENT])
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


async def refused(path: bytes, *steps: Step, engines: int, stream: bool) -> tuple[str, dict[str, Any]]:
    """The message that the client gets in place of such an answer, in the shape of its API, and the routes."""
    async with lab(*[Scripted(*steps) for _ in range(engines)], ask_usage=False) as node, await node.wire() as client:
        for _ in range(2):  # the connection serves on
            await client.send(question(path, stream=stream))
            status, headers, body = await client.response()
            assert (status, headers["content-type"]) == (502, "application/json")
        routes = await at_rest(node)
    fields = json.loads(body)
    assert (fields.get("type") == "error") is (path == b"/v1/messages")
    assert fields["error"]["type"] == ("api_error" if path == b"/v1/messages" else "server_error")
    return fields["error"]["message"], routes


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize(("stream", "kind"), SILENT_CASES)
async def test_if_all_answer_without_any_output_the_client_gets_an_error_of_ours(
    stream: bool, kind: str, path: bytes, engines: int, logged: list[RequestSummary]
) -> None:
    steps, _ = (STREAMS if stream else WHOLE)[kind]
    message, routes = await refused(path, *steps, engines=engines, stream=stream)
    assert message == "the engine ended its answer without any output"
    assert (set(routes["outcomes"]), routes["rows"]) == ({"server_error"}, 0)
    assert [(line.status, line.outcome) for line in logged] == [(502, "upstream_empty")] * 2


@pytest.mark.parametrize("wbits", [GZIP, zlib.MAX_WBITS])
@pytest.mark.parametrize(("stream", "kind"), SILENT_CASES)
async def test_a_compressed_answer_without_any_output_is_the_same_error(stream: bool, kind: str, wbits: int) -> None:
    steps, _ = (STREAMS if stream else WHOLE)[kind]
    message, _ = await refused(b"/v1/chat/completions", *packed(steps, wbits), engines=2, stream=stream)
    assert "without any output" in message


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("steps", [[STREAM_HEAD], [STREAM_HEAD, ROLE], [JSON_HEAD], [answer(b"x" * 9, JSON)[:-9]]])
async def test_if_all_break_off_before_output_the_client_gets_an_error_of_ours(steps: list[Step], path: bytes) -> None:
    message, routes = await refused(path, *steps, CLOSE, engines=2, stream=steps[0] is STREAM_HEAD)
    assert "closed" in message
    assert set(routes["outcomes"]) == {"broken"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("second", [True, False])
async def test_beside_an_answer_without_output_the_client_gets_that_of_the_engine_without_room(
    stream: bool, second: bool
) -> None:
    full, silent = (
        (STREAMS["queue full"][0], STREAMS["no event"][0]) if stream else (WHOLE["queue full"][0], [answer(b"")])
    )
    turns = iter([silent, full] if second else [full, silent])
    async with lab(Scripted(turns=turns), Scripted(turns=turns), ask_usage=False) as node:
        status, _, body = await answered(node, question(b"/v1/chat/completions", stream=stream))
    assert (status, b"queue is full" in body) == (200, True)


EMPTY_ANSWERS: dict[bytes, tuple[dict[str, Any], dict[str, Any]]] = {  # the last event, and the whole answer
    b"/v1/chat/completions": (
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}]},
    ),
    b"/v1/completions": 2 * ({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},),
    b"/v1/messages": (
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 0}},
        {"type": "message", "role": "assistant", "content": [], "stop_reason": "max_tokens"},
    ),
    b"/v1/responses": (
        {"type": "response.completed", "response": {"status": "completed", "output": [], "error": None}},
        {"object": "response", "status": "completed", "output": [], "error": None},
    ),
    b"/generate": 2 * ({"text": "", "meta_info": {"finish_reason": {"type": "length", "length": 0}}},),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", EMPTY_ANSWERS)
async def test_a_finished_answer_may_be_empty(path: bytes, stream: bool) -> None:
    end, whole = EMPTY_ANSWERS[path]
    steps = [STREAM_HEAD, event(end), LAST] if stream else [answer(json.dumps(whole).encode(), JSON)]
    async with lab(Scripted(*steps), Scripted(*steps), ask_usage=False) as node:
        status, _, body = await answered(node, question(path, stream=stream))
        assert (status, body) == (200, payload_of(event(end)) if stream else json.dumps(whole).encode())
        assert (await at_rest(node))["outcomes"] == {"success": 1}


async def test_what_generates_nothing_may_be_empty() -> None:
    async with lab(Scripted(answer(b"", JSON))) as node:
        assert (await answered(node, question(b"/v1/embeddings")))[::2] == (200, b"")
        assert (await node.http.get(f"{node.url}/v1/files/f1")).status_code == 200


@pytest.mark.parametrize(
    "kind", ["queue full", "broken behind a role of its own", "comments alone", "no event", "no model"]
)
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


OUTPUTS: dict[bytes, dict[str, Any]] = {
    b"/v1/chat/completions": {"choices": [{"index": 0, "delta": {"content": "word"}}]},
    b"/v1/completions": {"choices": [{"index": 0, "text": "word"}]},
    b"/v1/messages": {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word"}},
    b"/v1/responses": {"type": "response.output_text.delta", "delta": "word"},
    b"/generate": {"text": "word", "meta_info": {"finish_reason": None}},
}
ENDS = {"full": (FULL, "overloaded"), "broken": (BROKEN, "server_error"), "refused": (REFUSED, "refused")}
OWN_ENDS = {
    "overloaded": (b"/v1/messages", CLAUDES, "overloaded"),
    "failed": (b"/v1/responses", FAILED, "server_error"),
}


@pytest.mark.parametrize(
    ("path", "error", "outcome"),
    [*[(path, *each) for path in OUTPUTS for each in ENDS.values()], *OWN_ENDS.values()],
)
async def test_an_error_behind_output_ends_the_attempt_as_failed_and_the_answer_as_it_came(
    path: bytes, error: dict[str, Any], outcome: str, logged: list[RequestSummary]
) -> None:
    pieces = [event(OUTPUTS[path]), event(error), LAST]
    engines = [Scripted(STREAM_HEAD, *pieces) for _ in range(2)]
    async with lab(*engines, ask_usage=False) as node:
        async with await node.wire() as client:
            await client.send(question(path, stream=True))
            await client.until(b"\r\n\r\n")
            assert await client.until(LAST) == b"".join(pieces)
        outcomes = (await at_rest(node))["outcomes"]
    assert (asked(engines), outcomes) == (1, {outcome: 1})
    assert [(line.status, line.outcome, "within a 200" in line.error) for line in logged] == [(200, outcome, True)]


async def test_a_compressed_error_behind_output_ends_the_attempt_as_failed_and_the_answer_as_it_came() -> None:
    steps = packed([STREAM_HEAD, TOKEN, event(BROKEN) + LAST], GZIP)
    async with lab(Scripted(*steps), ask_usage=False) as node, await node.wire() as client:
        await client.send(question(b"/v1/chat/completions", stream=True))
        await client.until(b"\r\n\r\n")
        assert await client.until(LAST) == b"".join(step for step in steps[1:] if isinstance(step, bytes))
        assert (await at_rest(node))["outcomes"] == {"server_error": 1}


async def test_an_engine_that_breaks_behind_output_again_and_again_is_left() -> None:
    sick = Scripted(STREAM_HEAD, TOKEN, event(BROKEN), LAST)
    async with lab(sick, ask_usage=False) as node:
        for number in range(5):
            await answered(node, numbered(b"/v1/chat/completions", number, poison=False, stream=True))
        assert [backend["circuit"] for backend in await node.backends()] == ["open"]


@pytest.mark.parametrize("end", [(event(BROKEN), LAST), (CLOSE,), (RESET,)], ids=["an error", "closed", "reset"])
async def test_no_more_than_three_clients_have_an_answer_that_fails_behind_its_beginning(end: tuple[Step, ...]) -> None:
    engines = [Scripted(STREAM_HEAD, TOKEN, *end), Scripted(STREAM_HEAD, ROLE, TOKEN, END)]
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        for number in range(12):
            request = numbered(b"/v1/chat/completions", number, poison=False, stream=True)
            async with await node.wire() as client:
                await client.send(request)
                with suppress(trio.BrokenResourceError):
                    while LAST not in client.seen and await client.more():
                        pass
        assert [backend["circuit"] for backend in await node.backends()] == ["open", "closed"]
    assert len(engines[0].bodies) == 3


async def test_an_error_behind_blanks_ends_the_attempt_as_failed() -> None:
    seen = trio.Event()
    engine = Scripted(JSON_HEAD + chunk(b"\n"), seen, chunk(json.dumps(BROKEN).encode()) + LAST)
    async with lab(engine) as node, await node.wire() as client:
        await client.send(question(b"/v1/completions"))
        await client.until(chunk(b"\n"))
        seen.set()
        await client.until(LAST)
        routes = await at_rest(node)
    assert (routes["outcomes"], routes["rows"]) == ({"server_error": 1}, 0)


@pytest.mark.parametrize("opening", [ROLE, chunk(b": ping\n\n"), event(START), event(ANNOUNCED[0]), b""])
@pytest.mark.parametrize("end", [CLOSE, RESET, b"zz\r\n"])
async def test_a_stream_that_breaks_off_before_it_begins_is_asked_for_elsewhere(opening: bytes, end: Step) -> None:
    engines = sharing(2, [STREAM_HEAD, opening, end])
    async with lab(*engines) as node:
        status, _, body = await answered(node, question(b"/v1/chat/completions"))
        assert (status, b"hi" in body) == (200, True)
        assert (await at_rest(node))["outcomes"] == {"broken": 1, "success": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_no_answer_that_fails_within_a_200_is_kept_for_others(stream: bool) -> None:
    steps = [STREAM_HEAD, TOKEN, event(FULL), LAST] if stream else WHOLE["queue full"][0]
    engine = Scripted(*steps)
    async with lab(engine, ask_usage=False, response_cache=True) as node:
        for _ in range(2):
            await answered(node, question(b"/v1/chat/completions", b"authorization: Bearer k", stream=stream))
    assert asked([engine]) == 2


async def test_what_is_no_inference_may_be_an_error_within_a_200() -> None:
    failed = answer(b'{"id":"f1","error":{"message":"x","code":500}}', JSON)
    engines = [Scripted(failed), Scripted(failed)]
    async with lab(*engines) as node:
        assert (await node.http.get(f"{node.url}/v1/files/f1")).status_code == 200
        assert (await at_rest(node))["outcomes"] == {"success": 1}


@pytest.mark.parametrize("blank", [b"\n", b" "])
async def test_blanks_by_which_an_engine_keeps_a_line_open_are_relayed_at_once(blank: bytes) -> None:
    seen = trio.Event()
    engine = Scripted(JSON_HEAD + chunk(blank), seen, chunk(b'{"choices":[]}') + LAST)
    async with lab(engine) as node, await node.wire() as client:
        await client.send(question(b"/v1/completions"))
        await client.until(chunk(blank))
        seen.set()
        await client.until(LAST)


CUT = {
    "of a length": [answer(b"x" * 400).partition(b"x")[0] + GOOD.partition(b"\r\n\r\n")[2]],
    "of a length, in pieces": [GOOD[:-20], GOOD[-20:-9]],
    "in chunks": [JSON_HEAD, chunk(GOOD.partition(b"\r\n\r\n")[2])],
}


LONGER = b"content-length: 9999"
EVENTS_CUT = {  # of which the length is known
    "behind a token": [STREAM_HEAD.replace(b"transfer-encoding: chunked", LONGER) + payload_of(ROLE + TOKEN)],
    "behind the end": [STREAM_HEAD.replace(b"transfer-encoding: chunked", LONGER) + payload_of(ROLE + TOKEN + END)],
}


@pytest.mark.parametrize("kind", EVENTS_CUT)
async def test_a_stream_of_a_known_length_that_breaks_off_is_asked_for_elsewhere(kind: str) -> None:
    engines = [Scripted(*EVENTS_CUT[kind], CLOSE), Scripted(STREAM_HEAD, ROLE, TOKEN, END)]
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        for path in GENERATE:
            status, _, body = await answered(node, question(path, stream=True))
            assert (status, body) == (200, payload_of(ROLE + TOKEN + END))
        assert set((await at_rest(node))["outcomes"]) == {"success", "broken"}


CUT_CASES = [(False, kind) for kind in CUT] + [
    (True, kind) for kind in CUT if kind != "in chunks"
]  # that may be a stream


@pytest.mark.parametrize(("stream", "kind"), CUT_CASES)
async def test_a_whole_answer_that_breaks_off_before_its_end_is_asked_for_elsewhere(stream: bool, kind: str) -> None:
    engines = [Scripted(*CUT[kind], CLOSE), Scripted(GOOD)]
    async with lab(*engines, policy="round_robin", ask_usage=False) as node:
        for path in QUESTIONS:
            status, _, body = await answered(node, question(path, stream=stream))
            assert (status, body) == (200, GOOD.partition(b"\r\n\r\n")[2])
        assert set((await at_rest(node))["outcomes"]) == {"success", "broken"}
