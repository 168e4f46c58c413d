"""Compressed answers: what is found in them, whatever the cuts, and what is not looked for."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.answers.answer_events import NO_ANSWER
from ranvier_py.core.answers.answer_reader import AnswerReader, StreamReader, WholeReader
from ranvier_py.core.answers.chunked import ChunkedReader
from ranvier_py.core.answers.inflated_reader import INFLATED_BYTES_MAX, InflatedReader
from tests.proxy.wire import chunk

GZIP = 16 + zlib.MAX_WBITS
TOKEN = b'data: {"choices": [{"delta": {"content": "word"}}]}\n\n'
ERROR = b'data: {"error": {"message": "CUDA error", "code": 500}}\n\n'
STREAMS = [TOKEN + TOKEN, ERROR, TOKEN + ERROR, b": ping\n\n", b"", b": ping\n\n" + TOKEN, b'{"x": 1}']
WHOLE = [
    b'{"error": {"code": 429}}',
    b'{"choices": []}',
    b"",
    b"[1]",
    b'{"id": "resp_1", "output": [1]}',
]


def compressed(data: bytes, wbits: int = GZIP) -> bytes:
    coding = zlib.compressobj(wbits=wbits)
    return coding.compress(data) + coding.flush()


def reader_of(kind: type[AnswerReader], *, names: bool = False) -> AnswerReader:
    api = "responses" if names else "chat"
    return kind(api, None, streams=kind is StreamReader, names=names, captures=False)


def found(reader: AnswerReader) -> tuple[object, ...]:
    return reader.begun, reader.has_output, reader.failure, reader.name, reader.naming is None


def fed(reader: AnswerReader, data: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        if reader.chunks is not None:
            reader.chunks.feed(data[start:end])
        assert reader.feed(data[start:end], end == len(data)) == data[start:end]


@given(
    st.sampled_from([*((StreamReader, each) for each in STREAMS), *((WholeReader, each) for each in WHOLE)]),
    st.lists(st.integers(0, 120), max_size=6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([GZIP, zlib.MAX_WBITS]),
)
def test_what_is_found_is_what_is_found_without_the_coding(
    answer: tuple[type[AnswerReader], bytes], cuts: list[int], in_chunks: bool, names: bool, wbits: int
) -> None:
    kind, data = answer
    plain = reader_of(kind, names=names)
    plain.feed(data, complete=True)
    chunks = ChunkedReader() if in_chunks else None
    reader = InflatedReader(reader_of(kind, names=names), [(b"Content-Encoding", b"Gzip")], chunks)
    packed = compressed(data, wbits)
    fed(reader, chunk(packed[:9]) + chunk(packed[9:]) + b"0\r\n\r\n" if in_chunks else packed, cuts)
    assert found(reader) == found(plain)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        (b"br", b"\x0b\x02\x80{}\x03"),
        (b"gzip, gzip", compressed(compressed(ERROR))),
        (b"deflate", b"no such coding"),
        (b"gzip", compressed(ERROR) + b"more"),
        (b"gzip", compressed(b" " * 2 * INFLATED_BYTES_MAX)),
    ],
)
def test_what_can_not_be_read_has_begun(coding: bytes, data: bytes) -> None:
    reader = InflatedReader(reader_of(StreamReader, names=True), [(b"content-encoding", coding)], None)
    assert reader.feed(data, complete=False) == data
    assert found(reader) == (True, False, None, "", True)
    assert reader.feed(b"rest", complete=True) == b"rest"
    assert found(reader) == (True, False, None, "", True)


@pytest.mark.parametrize("data", [b"no such coding", ERROR, compressed(ERROR)[:8] + b"\xff" * 9])
def test_what_is_called_gzip_and_is_none_is_no_answer(data: bytes) -> None:
    reader = InflatedReader(reader_of(StreamReader), [(b"content-encoding", b"gzip")], None)
    for piece in (data, b"rest"):
        assert reader.feed(piece, complete=piece == b"rest") == piece
        assert (reader.begun, reader.failure) == (False, NO_ANSWER)


def test_no_more_is_inflated_than_is_judged() -> None:
    bomb = compressed(b" " * (1 << 26))
    reader = InflatedReader(reader_of(WholeReader), [(b"content-encoding", b"gzip")], None)
    tracemalloc.start()
    reader.feed(bomb, complete=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * INFLATED_BYTES_MAX
    assert reader.begun
