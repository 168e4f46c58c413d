"""Counts in streams: engines are asked for them, clients see what they asked for. Whole nodes on real sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.late_import import Late
from tests.node.node_lab import MODEL, lab, turn

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
