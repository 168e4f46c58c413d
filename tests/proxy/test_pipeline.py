"""What becomes of a request whose backend or client misbehaves: a whole node, and backends that follow a script."""

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.node.parts import request_parts
from ranvier_py.proxy import failed_tries
from ranvier_py.proxy.answers import awaited_stream
from tests.node.node_lab import BETWEEN_LOOKS_S, Node, chat, lab
from tests.proxy.wire import (
    CHUNKED_HEAD,
    CLOSE,
    END,
    GOOD,
    HANG,
    RESET,
    ROLE,
    STREAM_HEAD,
    TOKEN,
    Scripted,
    Step,
    answer,
    post,
)


async def streamed(node: Node, go_on: trio.Event | None = None) -> bytes:
    """A stream's raw bytes, however it ends. `go_on` is set when some have come."""
    async with await node.wire() as wire:
        await wire.send(post(chat(stream=True)))
        await wire.more()
        if go_on is not None:
            go_on.set()
        with suppress(trio.BrokenResourceError):
            while (
                not (wire.buffer.endswith(b"\r\n0\r\n\r\n") or b"content-length" in wire.buffer) and await wire.more()
            ):
                pass
        return wire.buffer


async def at_rest(node: Node) -> dict[str, Any]:
    """The routes' statistics once nothing is in flight any more; times out if something stays."""
    while True:
        in_flight = [backend["in_flight"] for backend in await node.backends()]
        routes = await node.ask("/admin/routes")
        if routes["outcomes"] and not any(in_flight):
            assert routes["speculation"]["attempts"] == routes["speculation"]["fingerprints"] == 0
            return dict(routes)
        await trio.sleep(BETWEEN_LOOKS_S)


def sharing(count: int, *turns: Sequence[Step]) -> list[Scripted]:
    """So many backends, of which whoever is asked next follows the next script; when all are used, it answers well."""

    def scripts() -> Iterator[Sequence[Step]]:
        yield from turns
        while True:
            yield [GOOD]

    shared = scripts()
    return [Scripted(turns=shared) for _ in range(count)]


OWN = b'{"error":{"message":"own words"}}'


def asked(backends: Sequence[Scripted]) -> int:
    return sum(len(backend.bodies) for backend in backends)


@pytest.mark.parametrize(
    ("script", "outcome", "is_learned"),
    [
        pytest.param([STREAM_HEAD, ROLE, TOKEN, END], "success", True, id="complete"),
        pytest.param([STREAM_HEAD, ROLE, CLOSE], "broken", False, id="closed before a token"),
        pytest.param([STREAM_HEAD, ROLE, RESET], "broken", False, id="reset before a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, CLOSE], "broken", True, id="closed after a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, RESET], "broken", True, id="reset after a token"),
        pytest.param([STREAM_HEAD, ROLE, b"zz\r\n"], "broken", False, id="garbled before a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, "seen", b"zz\r\n"], "broken", True, id="garbled after a token"),
        pytest.param([STREAM_HEAD, ROLE, HANG], "timeout", False, id="stalled before a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, HANG], "timeout", True, id="stalled after a token"),
        pytest.param([STREAM_HEAD, ROLE, END], "success", True, id="an empty answer"),
        pytest.param([answer(OWN, status=400)], "refused", False, id="400"),
        pytest.param([answer(OWN, status=404)], "refused", False, id="404"),
    ],
)
async def test_every_stream_that_begins_is_asked_for_once_and_learned_only_when_proved(
    script: list[Step], outcome: str, is_learned: bool
) -> None:
    go_on = trio.Event()
    steps = [go_on if step == "seen" else step for step in script]
    backends = [Scripted(*steps), Scripted(*steps)]
    async with lab(*backends, stall_timeout_s=0.1, first_byte_timeout_s=0.5) as node:
        assert await (streamed(node, go_on) if script[0] == STREAM_HEAD else node.chat(stream=True))
        routes = await at_rest(node)
    refused = outcome == "refused"  # 400: perhaps it was the question for counts; 404: another one may know the model
    unbegun = outcome != "success" and TOKEN not in script and not refused  # so another one may answer
    assert asked(backends) == 1 + refused + unbegun
    assert routes["outcomes"] == {outcome: 1 + unbegun + (script == [answer(OWN, status=404)])}
    assert bool(routes["rows"]) == is_learned


@pytest.mark.parametrize("step", [CLOSE, RESET, b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"nonsense\r\n\r\n"])
async def test_before_the_first_byte_others_are_asked_the_same_but_not_for_ever(step: Step) -> None:
    backends = [Scripted(step, CLOSE) for _ in range(6)]
    async with lab(*backends, total_retries_max=3) as node:
        failed = await node.chat()
        assert failed.status_code == 502
        assert failed.json()["error"].keys() == {"message", "type", "param", "code"}
        routes = await at_rest(node)
    assert asked(backends) == 4
    assert {len(backend.bodies) for backend in backends} == {0, 1}
    assert {body for backend in backends for body in backend.bodies} == {chat()}
    assert routes["outcomes"] == {"broken": 4}
    assert routes["rows"] == 0


@pytest.mark.parametrize("step", [CLOSE, RESET, b"nonsense\r\n\r\n", answer(b"", status=503), CHUNKED_HEAD + b"zz\r\n"])
async def test_what_fails_before_the_first_byte_is_asked_elsewhere(step: Step) -> None:
    async with lab(*sharing(2, [step, CLOSE])) as node:
        answered = await node.chat()
        assert (answered.status_code, answered.content) == (200, GOOD.partition(b"\r\n\r\n")[2])
        routes = await at_rest(node)
    assert routes["outcomes"]["success"] == 1


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(429, "overloaded"), (500, "server_error"), (503, "overloaded"), (529, "overloaded")],
)
async def test_busy_and_broken_backends_are_passed_over_and_their_last_word_is_passed_on(
    status: int, outcome: str
) -> None:
    backends = [Scripted(answer(b"own", b"Retry-After: 7", status=status)) for _ in range(3)]
    async with lab(*backends) as node:
        refused = await node.chat()
        assert (refused.status_code, refused.text, refused.headers["retry-after"]) == (status, "own", "7")
        routes = await at_rest(node)
    assert [len(backend.bodies) for backend in backends] == [1, 1, 1]
    assert routes["outcomes"] == {outcome: 3}
    assert routes["rows"] == 0


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, ROLE, HANG], [STREAM_HEAD, TOKEN, HANG]])
async def test_a_client_that_leaves_ends_the_attempt_and_teaches_what_a_token_has_proved(
    script: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited_stream, "HELD_S", 0.05)
    backend = Scripted(*script)
    async with lab(backend) as node:
        async with await node.wire() as client:
            await client.send(post(chat(stream=True)))
            await backend.asked.wait()
            if len(script) > 1:
                await client.until(script[1])
        routes = await at_rest(node)
    assert routes["outcomes"] == {"cancelled": 1}
    assert bool(routes["rows"]) == (TOKEN in script)


async def test_an_engine_sees_within_a_tenth_of_a_second_that_its_client_left() -> None:
    """Of three the quickest: a busy machine is late, the node is not."""
    backend = Scripted(STREAM_HEAD, TOKEN, HANG)
    took_s = []
    async with lab(backend) as node:
        for _ in range(3):
            backend.left = trio.Event()
            async with await node.wire() as client:
                await client.send(post(chat(stream=True)))
                await client.until(TOKEN)
            left_at = trio.current_time()
            await backend.left.wait()
            took_s.append(trio.current_time() - left_at)
    assert min(took_s) < 0.1


async def test_a_backend_too_slow_to_begin_is_given_up_with_a_504_and_logged_as_that(
    logged: list[RequestSummary],
) -> None:
    async with lab(Scripted(HANG), first_byte_timeout_s=0.1) as node:
        late = await node.chat()
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "upstream_timeout"
        assert (await at_rest(node))["outcomes"] == {"timeout": 1}
    assert [(line.status, line.outcome) for line in logged] == [(504, "timeout")]


async def test_a_backend_too_slow_to_begin_is_passed_over_while_the_client_still_waits() -> None:
    backends = sharing(2, [HANG])
    async with lab(*backends, first_byte_timeout_s=0.3) as node:
        answered = await node.chat()
        assert answered.status_code == 200
        routes = await at_rest(node)
    assert [len(backend.bodies) for backend in backends] == [1, 1]
    assert routes["outcomes"] == {"timeout": 1, "success": 1}


async def test_no_try_begins_that_could_outlast_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 600 s of waiting, another engine would compute the prompt for nobody."""
    monkeypatch.setattr(failed_tries, "FIRST_BYTE_TOTAL_S", 0.85)
    backends = [Scripted(HANG) for _ in range(4)]
    async with lab(*backends, first_byte_timeout_s=0.3, total_retries_max=3) as node:
        late = await node.chat()
        assert late.status_code == 504
        assert (await at_rest(node))["outcomes"] == {"timeout": 2}
    assert asked(backends) == 2


def test_with_the_default_deadline_there_is_no_second_try() -> None:
    assert 2 * Config().pipeline.first_event_s > failed_tries.FIRST_BYTE_TOTAL_S


async def test_the_query_of_a_path_may_be_a_key_and_is_not_logged(logged: list[RequestSummary]) -> None:
    async with lab(Scripted(GOOD)) as node, await node.wire() as client:
        await client.send(post(b"{}", target=b"/v1/embeddings?api_key=hidden"))
        await client.response()
    assert [line.path for line in logged] == ["/v1/embeddings"]


async def test_the_log_reports_how_much_of_a_broken_answer_was_sent(logged: list[RequestSummary]) -> None:
    async with lab(Scripted(STREAM_HEAD, TOKEN, HANG), stall_timeout_s=0.1) as node:
        received = await streamed(node)
        await at_rest(node)
    assert TOKEN in received
    assert [(line.status, line.outcome, line.sent_bytes) for line in logged] == [(200, "timeout", len(TOKEN))]


async def test_a_backend_that_breaks_off_is_one_line_in_the_log_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ranvier_py"):
        async with lab(Scripted(STREAM_HEAD, TOKEN, CLOSE)) as node:
            await streamed(node)
            await at_rest(node)
            page = (await node.http.get(f"{node.control}/metrics")).text
    assert 'ranvier_server_errors_total{kind="upstream_closed"} 1.0' in page
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_request_id_of_the_backend_is_not_doubled() -> None:
    async with lab(Scripted(answer(b"{}", b"X-Request-Id: theirs"))) as node:
        served = await node.chat()
        assert served.headers.get_list("x-request-id") == ["theirs"]


async def test_the_refusal_of_a_request_does_not_bear_the_id_of_the_one_before_it() -> None:
    async with lab(Scripted(GOOD)) as node, await node.wire() as client:
        await client.send(post(chat(), b"x-request-id: first"))
        assert (await client.response())[1]["x-request-id"] == "first"
        await client.send(b"nonsense\r\n\r\n")
        assert (await client.response())[1]["x-request-id"] not in ("", "first")


async def test_a_prompt_without_a_template_for_it_is_placed_by_load_and_not_refused() -> None:
    backend = Scripted(GOOD)
    async with lab(backend) as node:
        assert (await node.chat(chat_template="{{ messages }}")).status_code == 200
        routes = await at_rest(node)
    assert routes["tokenizer_worker"]["failed"] > 0


MISLEADING = [
    b"/v1/../admin",
    b"/v1/./models/a",
    b"/v1/..",
    b"/v1/..;/admin",
    b"/v1/..;x=y/admin",
    b"/v1/%2e%2E/admin",
    b"/v1/.%2e/admin",
    b"/v1/%252e%252E/admin",
    b"/v1/%25252e%25252e/admin",
    b"/v1/%2525252525252e/admin",
    b"/v1/%%32%65./admin",
    b"/v1/x%2f..%2f..%2fmetrics",
    b"/v1/x%2F..%2F..%2Fmetrics",
    b"/v1/a%2fb",
    b"/v1/a%252Fb",
    b"/v1/%5c..%5cmetrics",
    b"/v1/%255C..%255Cmetrics",
    b"/v1/..\\admin",
    b"/v1/a\\b",
    b"/v1/a%00.json",
    b"/v1/a%0d%0aX-Injected:%20y",
    b"/v1/a%7f",
    b"/v1/%c0%ae%c0%ae/admin",
    b"/v1/%C0%AFadmin",
]

PLAIN = [
    b"/v1/models/gpt-3.5-turbo..beta",
    b"/v1/models/ft:a%3Ab;v=2",
    b"/v1/models/.hidden",
    b"/v1/models/a...b",
    b"/v1/files/100%25%20sure",
    b"/v1/files/100%",
    b"/v1/files/%E6%96%87%zz",
    b"/v1/files/f-1/content?path=..%2f..%2fa&b=%00",
]

CANONICAL = {
    b"/v1/models/gpt-3%2E5": b"/v1/models/gpt-3.5",
    b"/v1/files/%66%2d1?q=%66": b"/v1/files/f-1?q=%66",
    b"/v1/files/a%3ab": b"/v1/files/a%3Ab",
    b"//v1///files//f-1": b"/v1/files/f-1",
    b"/v1/files/f-1/": b"/v1/files/f-1/",
    b"/v1/chat/completions/?x=//": b"/v1/chat/completions?x=//",
    b"/v1/chat/%63ompletions": b"/v1/chat/completions",
    b"http://h//v1/%65mbeddings": b"/v1/embeddings",
}
"""RFC 3986 6.2.2: what it is judged by is what the engine gets."""


async def test_a_path_that_somebody_behind_us_may_read_as_another_is_refused() -> None:
    backend = Scripted(GOOD)
    async with lab(backend) as node, await node.wire() as client:
        for path in MISLEADING:
            await client.send(post(b"", target=path))
            assert (await client.response())[0] == 400, path
    assert backend.heads == []


async def test_paths_with_odd_ids_reach_the_engine_as_they_came() -> None:
    backend = Scripted(GOOD)
    async with lab(backend) as node, await node.wire() as client:
        for path in PLAIN:
            await client.send(post(b"", target=path))
            assert (await client.response())[0] == 200
        await client.send(post(b"", target=b"/admin"))
        assert (await client.response())[0] == 404
    assert [head.split(b" ")[1] for head in backend.heads] == PLAIN


async def test_each_spelling_of_a_path_reaches_the_engine_as_the_one_that_was_judged() -> None:
    backend = Scripted(GOOD)
    async with lab(backend) as node, await node.wire() as client:
        for path in CANONICAL:
            await client.send(post(chat(), target=path))
            assert (await client.response())[0] == 200
    assert [head.split(b" ")[1] for head in backend.heads] == list(CANONICAL.values())


async def test_one_engines_odd_list_of_models_costs_no_other_its_own() -> None:
    odd = b'{"data":[{"id":"odd","max_model_len":99999999999999999999,"p":NaN,"x":"\\ud800"},{"id":"\\ud800"}]}'
    pages = [odd, b'{"data":[{"id":7},null]}', b"not json", b"[" * 10_000, b'{"data":[{"id":"good","n":1}]}']
    async with lab(*[Scripted(page=page) for page in pages]) as node:
        listed = await node.http.get(f"{node.url}/v1/models")
    assert listed.status_code == 200
    cards = {card["id"]: card for card in listed.json()["data"]}
    assert list(cards) == ["odd", "good"]
    assert cards["good"] == {"id": "good", "n": 1}


async def test_a_second_signal_cuts_the_drain_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_parts, "SAME_SIGNAL_S", 0.0)
    async with lab(Scripted(STREAM_HEAD, TOKEN, HANG), drain_timeout_s=3600) as node, await node.wire() as client:
        await client.send(post(chat(stream=True)))
        await client.until(TOKEN)
        os.kill(os.getpid(), signal.SIGTERM)
        while (await node.http.get(f"{node.control}/readyz")).status_code != 503:  # noqa: ASYNC110  # a page
            await trio.sleep(BETWEEN_LOOKS_S)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await client.cut()
