"""Counts in streams: engines are asked for them, clients see what they asked for. Whole nodes on real sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.late_import import Late
from tests.node.node_lab import MODEL, Node, lab, turn
from tests.proxy.wire import STREAM_HEAD, Scripted, chunk

openai = Late("openai")


def events(client: openai.OpenAI, **more: Any) -> list[dict[str, Any]]:
    """What the SDK makes of a stream, without what differs between two answers."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=turn("Tell me of maps"),  # type: ignore[arg-type]
        max_tokens=12,
        stream=True,
        **more,
    )
    return [chunk.model_dump(exclude={"id", "created"}) for chunk in stream]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_the_sdk_sees_exactly_what_the_engine_would_have_sent(options: dict[str, Any]) -> None:
    async with lab(engines=1) as node:

        def both() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            with (
                openai.OpenAI(base_url=f"{node.engines[0]}/v1", api_key="k", max_retries=0) as direct,
                openai.OpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=0) as routed,
            ):
                events(direct, **options)  # warm: counts of cached tokens are equal from now on
                return events(direct, **options), events(routed, **options)

        direct, routed = await trio.to_thread.run_sync(both)
        assert routed == direct
        assert (routed[-1]["usage"] is not None) == bool(options)
        reported = await node.until_routes(lambda found: found["engine_cached_share"] is not None)
        assert reported["engine_cached_share"] > 0


async def test_a_raw_stream_is_the_engines_own_byte_by_byte() -> None:
    """SDKs forgive a lot."""

    def sent(body: bytes) -> list[dict[str, Any]]:
        lines = [json.loads(line[6:]) for line in body.split(b"\n\n") if line and line != b"data: [DONE]"]
        return [{**line, "id": "", "created": 0} for line in lines]

    async with lab(engines=1) as node:
        body = {"model": MODEL, "messages": turn("Maps?"), "max_tokens": 9, "stream": True}
        direct = await node.http.post(f"{node.engines[0]}/v1/chat/completions", json=body)
        routed = await node.http.post(f"{node.url}/v1/chat/completions", json=body)
        assert sent(routed.content) == sent(direct.content)
        assert routed.content.endswith(b"data: [DONE]\n\n")
        assert len(routed.content) == len(direct.content)


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
ASKED = {"/v1/chat/completions": {"messages": turn("Maps?")}, "/v1/completions": {"prompt": "Maps?"}}
DONE = b"data: [DONE]\n\n"


def data(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


WORD = data({"choices": [{"index": 0, "delta": {"content": "word"}, "text": "word", "finish_reason": "stop"}]})
COUNTS = data({"object": "chat.completion.chunk", "choices": [], "usage": USAGE})
FORMS = {
    "alone": COUNTS,
    "with other fields": b"event: message\nid: 9\nretry: 5\n" + COUNTS,
    "behind a comment": b": usage\n" + COUNTS,
    "choices null": COUNTS.replace(b"[]", b"null"),
    "no choices": COUNTS.replace(b'"choices": [], ', b""),
    "in two lines": COUNTS.replace(b'"usage"', b'\ndata: "usage"'),
    "no blank": b"data:" + COUNTS[6:],
}


def stream(*events: bytes, end: bytes = b"\n") -> Scripted:
    return Scripted(STREAM_HEAD, *[chunk(each.replace(b"\n", end)) for each in events], b"0\r\n\r\n")


async def asked(node: Node, path: str, **more: Any) -> bytes:
    return (await node.http.post(f"{node.url}{path}", json={**ASKED[path], "stream": True, **more})).content


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("form", FORMS)
async def test_counts_that_we_asked_for_are_found_by_their_data_alone_from_the_first_request_on(
    form: str, path: str, end: bytes
) -> None:
    engine = stream(WORD, FORMS[form], DONE, end=end)
    async with lab(engine) as node:
        for _ in range(2):
            assert await asked(node, path) == (WORD + DONE).replace(b"\n", end)
        routes = await node.until_routes(lambda found: found["engine_cached_share"])
    assert [b"include_usage" in body for body in engine.bodies] == [True, True]
    assert (routes["outcomes"], round(routes["engine_cached_share"], 2)) == ({"success": 2}, 0.57)


@pytest.mark.parametrize("path", ASKED)
async def test_what_an_engine_writes_beside_counts_reaches_the_client_and_it_is_not_asked_again(path: str) -> None:
    more = {"object": "chat.completion.chunk", "choices": [], "timings": {"prompt_n": 7, "predicted_per_second": 33.3}}
    engine = stream(WORD, data({**more, "usage": USAGE}), DONE)
    async with lab(engine) as node:
        first = await asked(node, path)
        second = await asked(node, path)
    assert [json.loads(line[6:]) for line in first.splitlines() if b"timings" in line] == [more]
    assert second == WORD + data({**more, "usage": USAGE}) + DONE, "it sends them anyway"
    assert [b"include_usage" in body for body in engine.bodies] == [True, False]


EACH = WORD.replace(b'"choices"', b'"usage": {"prompt_tokens": 7, "completion_tokens": 1}, "choices"')


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("events", "options", "settings"),
    [
        ([EACH, COUNTS], {}, {}),  # `--enable-force-include-usage`
        ([WORD, COUNTS], {"stream_options": {"include_usage": True}}, {}),
        ([WORD, COUNTS], {}, {"ask_usage": False}),
    ],
    ids=["in every event", "for the client", "for nobody"],
)
async def test_counts_that_an_engine_sends_unasked_by_us_stay(
    path: str, events: list[bytes], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    engine = stream(*events, DONE)
    async with lab(engine, **settings) as node:
        for _ in range(2):
            assert await asked(node, path, **options) == b"".join([*events, DONE])
