"""Holds back each message that a client sends over a WebSocket until it is whole, and finds the models that it names.

Rule: for a key of some models alone, since `session.update` (OpenAI, vLLM) may name another model than the handshake
did. A message of which this cannot be told is refused: one that is compressed, too long, or no JSON though it may name
a model. What only looks like a name, in tools, texts and metadata, is none.
Bounds: HELD_BYTES_MAX of one message; NAMING_BYTES_MAX of one that may name a model, which is parsed at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ranvier_py.core.answers.websocket_frames import CONTROL, FINAL, MASKED, frame_head
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.prompts.body_json import UNCOUNTED_BYTES_MAX
from ranvier_py.core.prompts.reserved_members import NAME_ESCAPE

HELD_BYTES_MAX = 1 << 20  # 24 s of the audio that OpenAI's and vLLM's clients send, 16 kHz of 16 bits in base64
NAMING_BYTES_MAX = UNCOUNTED_BYTES_MAX
RESERVED_BITS = 0x70

NAME = b'"model"'
TEXTS_OF_OTHERS = frozenset(("tools", "item", "metadata"))

UNREAD = "the key is for some models: messages come uncompressed, in JSON, with at most 1 MiB"


class WebSocketMessages:
    """What a client sends, from the first frame on."""

    __slots__ = ("_held", "_raw", "_text")

    def __init__(self) -> None:
        self._raw = bytearray()  # from the first byte of the current frame on
        self._held, self._text = bytearray(), bytearray()  # of the current message: its frames, and what they say

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield what is whole now, as it came: each message with its text, each control frame with none. Raises
        BadRequest for what is not to be read."""
        self._raw += data
        while (frame := self._frame()) is not None:
            raw, text = frame
            if raw[0] & CONTROL:
                yield raw, b""
                continue
            self._held += raw
            self._text += text
            if len(self._text) > HELD_BYTES_MAX:
                raise BadRequest(UNREAD)
            if raw[0] & FINAL:
                yield bytes(self._held), bytes(self._text)
                self._held, self._text = bytearray(), bytearray()

    def _frame(self) -> tuple[bytes, bytes] | None:
        """Take the next whole frame, and return it with its unmasked content."""
        raw = self._raw
        if (head := frame_head(raw)) is None:
            return None
        start, length = head
        if raw[0] & RESERVED_BITS or length > HELD_BYTES_MAX:
            raise BadRequest(UNREAD)
        end = start + length
        if len(raw) < end:
            return None
        found, is_masked = bytes(raw[:end]), raw[1] & MASKED
        del raw[:end]
        return found, masked(found[start:], found[start - 4 : start]) if is_masked else found[start:]


def masked(data: bytes, mask: bytes) -> bytes:
    """Return these bytes with a mask of four bytes laid over them, or taken off again (RFC 6455, 5.3)."""
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data) ^ int.from_bytes(key)).to_bytes(size)


def models_in(text: bytes) -> Sequence[str]:
    """Return the models that a message names: in itself, its session, its response, or in parts of these. Raises
    BadRequest if it may name one, and cannot be read."""
    if not (NAME in text.replace(b"\0", b"") or NAME_ESCAPE.search(text)):  # zeros: UTF-16 is JSON, too
        return ()
    if len(text) > NAMING_BYTES_MAX:
        raise BadRequest(UNREAD)
    try:
        found: Any = json.loads(text, object_pairs_hook=tuple)  # of two members of one name an engine may read either
    except (ValueError, RecursionError) as error:
        raise BadRequest(UNREAD) from error
    models, objects = list[str](), [found]
    while objects:
        one = objects.pop()
        for name, value in one if type(one) is tuple else ():
            if type(value) is tuple and name not in TEXTS_OF_OTHERS:
                objects.append(value)
            elif type(value) is str and name == "model":
                models.append(value)
    return models
