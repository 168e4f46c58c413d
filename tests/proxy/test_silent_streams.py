"""How long an engine may be silent: until a stream's first token as long as for a first byte, then as long as clients
wait. Whole nodes, and scripted engines."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from ranvier_py.config.config_model import Config
from tests.node.node_lab import Node, lab
from tests.proxy.test_overload import question
from tests.proxy.test_pipeline import at_rest, streamed
from tests.proxy.wire import END, HANG, ROLE, STREAM_HEAD, TOKEN, Scripted, chunk, event

CHAT, MESSAGES, RESPONSES = b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"
COMPLETIONS, GENERATE = b"/v1/completions", b"/generate"
WHAT_PROVES_NO_TOKEN = {
    "nothing": (CHAT, b""),
    "an empty line": (CHAT, chunk(b"\n")),
    "a comment": (CHAT, chunk(b": ping\n\n")),
    "a role": (CHAT, ROLE),
    "nothing of a completion": (COMPLETIONS, b""),
    "an empty text": (COMPLETIONS, event({"choices": [{"index": 0, "text": ""}]})),
    "the start of a message": (MESSAGES, event({"type": "message_start", "message": {"content": []}})),
    "a ping": (MESSAGES, event({"type": "ping"})),
    "a response in progress": (RESPONSES, event({"type": "response.created", "response": {"output": []}})),
    "nothing of generated text": (GENERATE, b""),
}
FIRST = {
    CHAT: TOKEN,
    COMPLETIONS: event({"choices": [{"index": 0, "text": "word"}]}),
    MESSAGES: event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word"}}),
    RESPONSES: event({"type": "response.output_text.delta", "delta": "word"}),
    GENERATE: event({"text": "word"}),
}


async def received(node: Node, path: bytes, into: list[bytes]) -> None:
    async with await node.wire() as wire:
        await wire.send(question(path, stream=True))
        with suppress(trio.BrokenResourceError):
            while not wire.buffer.endswith(b"\r\n0\r\n\r\n") and await wire.more():
                pass
        into.append(wire.buffer)


@pytest.mark.parametrize("kind", WHAT_PROVES_NO_TOKEN)
async def test_a_long_prefill_behind_an_early_head_is_no_stall(kind: str) -> None:
    """Another stream, which stalls after its first token, is cut meanwhile: so much time has passed."""
    path, opening = WHAT_PROVES_NO_TOKEN[kind]
    computed = trio.Event()
    engine = Scripted(turns=iter([[STREAM_HEAD + opening, computed, FIRST[path], END], [STREAM_HEAD, TOKEN, HANG]]))
    got: list[bytes] = []
    async with lab(engine, stall_timeout_s=0.1, ask_usage=False) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(received, node, path, got)
            await engine.asked.wait()
            assert not (await streamed(node)).endswith(END)
            computed.set()
        assert (await at_rest(node))["outcomes"] == {"timeout": 1, "success": 1}
    assert got[0].endswith(opening + FIRST[path] + END)


@pytest.mark.parametrize("opening", [b"", ROLE, chunk(b": ping\n\n")])
async def test_a_stream_without_a_first_token_ends_when_the_wait_for_one_is_over(opening: bytes) -> None:
    engine = Scripted(STREAM_HEAD + opening, HANG)
    async with lab(engine, first_byte_timeout_s=0.1) as node:
        await streamed(node)
        assert (await at_rest(node))["outcomes"] == {"timeout": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "life"),
    [(CHAT, chunk(b": ping\n\n")), (COMPLETIONS, chunk(b":\n\n")), (MESSAGES, event({"type": "ping"}))],
    ids=["a comment", "an empty comment", "a ping"],
)
async def test_comments_and_pings_within_a_stream_show_that_its_engine_lives(path: bytes, life: bytes) -> None:
    """For longer than the longest silence; without them the stream would be cut, as the one above is."""
    pauses = [trio.Event() for _ in range(8)]
    signs = [step for pause in pauses for step in (life, pause)]
    engine = Scripted(STREAM_HEAD, FIRST[path], *signs, FIRST[path], END)
    got: list[bytes] = []
    async with lab(engine, stall_timeout_s=1.0, ask_usage=False) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(received, node, path, got)
            await engine.asked.wait()
            for pause in pauses:
                await trio.sleep(0.2)
                pause.set()
        assert (await at_rest(node))["outcomes"] == {"success": 1}
    assert got[0].endswith(FIRST[path] + life * len(pauses) + FIRST[path] + END)


def test_by_default_no_silence_is_shorter_than_what_clients_wait() -> None:
    limits = Config().pipeline
    assert min(limits.first_event_s, limits.stall_s) >= 600
