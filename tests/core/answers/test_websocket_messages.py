"""Messages of a WebSocket are whole before anything is passed on, however their bytes are cut; they may name models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.frame_protocol import FrameProtocol

from ranvier_py.core.answers.websocket_messages import NAMING_BYTES_MAX, WebSocketMessages, models_in
from ranvier_py.core.errors import BadRequest

TEXTS = st.one_of(st.text(max_size=300), st.sampled_from(["", "x" * 126, "y" * 70_000]))


@given(
    st.lists(st.tuples(TEXTS, st.integers(1, 4), st.booleans()), max_size=5),
    st.lists(st.integers(1, 90_000), min_size=1),
)
def test_each_message_comes_whole_and_as_it_was_sent(parts: list[tuple[str, int, bool]], cuts: list[int]) -> None:
    protocol, sent, wanted = FrameProtocol(client=True, extensions=[]), list[bytes](), list[tuple[bytes, bytes]]()
    for text, count, pinged in parts:
        frames = list[bytes]()
        step = len(text) // count + 1
        for number in range(count):
            piece = text[number * step :][:step]
            frames.append(protocol.send_data(piece, fin=number == count - 1))
            sent.append(frames[-1])
            if pinged:
                sent.append(protocol.ping())
                wanted.append((sent[-1], b""))
        at = len(wanted) if not pinged else len(wanted) - 1
        wanted.insert(at, (b"".join(frames), text.encode()))
    messages, whole, at, got = WebSocketMessages(), b"".join(sent), 0, list[tuple[bytes, bytes]]()
    for cut in cuts * (len(whole) + 1):
        if at >= len(whole):
            break
        got += messages.feed(whole[at : at + cut])
        at += cut
    assert got == wanted


NAMED: dict[str, tuple[Any, list[str]]] = {
    "itself": ({"type": "session.update", "model": "a"}, ["a"]),
    "the session": ({"session": {"model": "a", "audio": {"input": {"transcription": {"model": "b"}}}}}, ["a", "b"]),
    "the response": ({"response": {"model": "a"}}, ["a"]),
    "tools, items and metadata do not": (
        {"tools": {"model": "a"}, "item": {"content": {"model": "a"}}, "session": {"metadata": {"model": "a"}}},
        [],
    ),
    "lists do not": ([{"model": "a"}], []),
    "schemas do not": ({"session": {"tools": [{"parameters": {"properties": {"model": {"type": "string"}}}}]}}, []),
    "texts do not": ({"text": '{"model": "a"}'}, []),
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be"])
def test_models_are_named_by(kind: str, encoding: str) -> None:
    message, models = NAMED[kind]
    assert sorted(models_in(json.dumps(message).encode(encoding))) == models


def test_of_two_names_both_count_and_escapes_hide_none() -> None:
    assert models_in(b'{"model": "a", "mod\\u0065l": "b"}') == ["a", "b"]
    assert models_in(b'{"\\u006dodel": "b"}') == ["b"]


@pytest.mark.parametrize("text", [b'{"model": ', b'{"model": 1} x', b'{"model":' + b"[" * 50_000, b'{"model":"\xff"}'])
def test_what_may_name_a_model_and_cannot_be_read_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest):
        models_in(text)


def test_a_long_message_is_read_only_if_it_names_none() -> None:
    audio = b'{"type": "input_audio_buffer.append", "audio": "%b"}' % (b"A" * NAMING_BYTES_MAX)
    assert models_in(audio) == ()
    with pytest.raises(BadRequest):
        models_in(audio[:-1] + b', "model": "m"}')
