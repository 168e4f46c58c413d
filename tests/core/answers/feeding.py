"""Streams for readers of answers, cut in all ways, and what passes them."""

import json
from itertools import pairwise
from typing import Any

from ranvier_py.core.answers.answer_reader import AnswerReader, StreamReader, WholeReader
from ranvier_py.core.answers.chunked import ChunkedReader
from ranvier_py.core.answers.usage_removal import UsageRemoval

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
DONE = b"data: [DONE]\n\n"


def event(fields: Any, end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + end


def delta(text: str, **more: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}], **more})


COUNTS = event({"choices": [], "usage": USAGE})


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % len(data) for place in places)})
    return [data[low:high] for low, high in pairwise(bounds)]


def event_reader(framing: str = "close", api: str = "chat", *, removes: bool = True) -> StreamReader:
    chunks = ChunkedReader() if framing == "chunked" else None
    reader = StreamReader(api, chunks, streams=True, names=False, captures=True)
    if removes:
        reader.remove(UsageRemoval(keeps_length=framing == "length"))
    return reader


def whole_reader(api: str = "chat", *, streams: bool = False) -> WholeReader:
    return WholeReader(api, None, streams=streams, names=False, captures=True)


def through(pieces: list[bytes], reader: AnswerReader) -> list[bytes]:
    """What leaves for each piece, as an exchange would feed them."""
    out, chunks = [], reader.chunks
    for number, piece in enumerate(pieces):
        if chunks is not None:
            assert chunks.feed(piece) == len(piece)
        out.append(reader.feed(piece, chunks.done if chunks is not None else number == len(pieces) - 1))
    return out


def removal_of(reader: StreamReader) -> UsageRemoval:
    assert reader.removal is not None
    return reader.removal
