"""Counts in streams: engines are asked for them, clients see what they asked for. Whole nodes on real sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.late_import import Late
from tests.node.node_lab import MODEL, chat, lab, turn
from tests.proxy.wire import END, STREAM_HEAD, TOKEN, Scripted, Wire, answer, event, post

openai = Late("openai")

USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
COUNTS = event({"choices": [], "usage": USAGE})
STREAM = STREAM_HEAD + TOKEN + COUNTS + END
UNKNOWN = answer(b'{"error":{"message":"Unknown field stream_options"}}', status=400)


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


async def test_the_engine_is_asked_and_nothing_else_of_the_body_changes() -> None:
    backend = Scripted(STREAM)
    async with lab(backend) as node:
        whole = await node.chat(stream=True)
        assert whole.content.endswith(b"data: [DONE]\n\n")
        assert b"prompt_tokens" not in whole.content
        [body] = backend.bodies
        asked = json.loads(body)
        assert asked.pop("stream_options") == {"include_usage": True}
        assert body == b'{"stream_options":{"include_usage":true},' + whole.request.content[1:]


async def test_a_client_that_asked_keeps_its_counts_and_its_body() -> None:
    backend = Scripted(STREAM)
    async with lab(backend) as node:
        whole = await node.chat(stream=True, stream_options={"include_usage": True})
        assert b'"prompt_tokens": 5' in whole.content
        assert backend.bodies == [whole.request.content]


async def test_without_ask_usage_bodies_arrive_as_they_came() -> None:
    backend = Scripted(STREAM_HEAD + TOKEN + END)
    async with lab(backend, ask_usage=False) as node:
        whole = await node.chat(stream=True)
        assert backend.bodies == [whole.request.content]


class Old(Scripted):
    """An engine that does not know `stream_options`."""

    async def play(self, wire: Wire) -> bool:
        await wire.send(UNKNOWN if b"stream_options" in self.bodies[-1] else STREAM_HEAD + TOKEN + END)
        return True


async def test_an_engine_that_refuses_the_question_gets_the_request_as_it_came_and_is_not_asked_again() -> None:
    backend = Old()
    async with lab(backend) as node:
        for _ in range(2):
            whole = await node.chat(stream=True)
            assert whole.status_code == 200
        assert [b"stream_options" in body for body in backend.bodies] == [True, False, False]


async def test_a_client_gets_the_refusal_of_a_body_that_is_refused_both_times() -> None:
    backend = Scripted(UNKNOWN)
    async with lab(backend) as node:
        whole = await node.chat(stream=True)
        assert (whole.status_code, whole.content) == (400, b'{"error":{"message":"Unknown field stream_options"}}')
        assert len(backend.bodies) == 2


async def test_an_engine_that_has_taken_the_question_is_believed_when_it_refuses() -> None:
    """Else every bad request would be sent twice."""
    backend = Scripted(turns=iter([[STREAM], [UNKNOWN]]))
    async with lab(backend) as node:
        await node.chat(stream=True)
        assert (await node.chat(stream=True)).status_code == 400
        assert len(backend.bodies) == 2


async def test_an_engine_that_compresses_its_streams_is_not_asked_again() -> None:
    """What can't be read can't be taken out."""
    backend = Scripted(STREAM.replace(b"\r\ntransfer", b"\r\ncontent-encoding: br\r\ntransfer", 1))
    async with lab(backend) as node:
        for _ in range(2):
            async with await node.wire() as client:
                await client.send(post(chat(stream=True)))
                await client.until(b"\r\n0\r\n\r\n")
        assert [b"stream_options" in body for body in backend.bodies] == [True, False]


async def test_a_stream_for_a_client_of_http_1_0_has_no_counts_either() -> None:
    backend = Scripted(STREAM)
    async with lab(backend) as node:
        async with await node.wire() as client:
            await client.send(post(chat(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            data = await client.rest()
        assert data.endswith(b"data: [DONE]\n\n")
        assert b"prompt_tokens" not in data
