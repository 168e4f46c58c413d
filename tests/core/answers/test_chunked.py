"""The reader of chunks against llhttp and against itself in other pieces."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ranvier_py.core.answers.chunked import LINE_BYTES_MAX, TRAILER_LINES_MAX, ChunkedReader, ChunkError

PIECES = st.sampled_from([*b"0 1 3 a F ; x=y abc - _ :".split(), *(b"\r\n", b"\r", b"\n", b"a: b", b" ", b"0\r\n\r\n")])


class Llhttp:
    """What llhttp makes of the same body."""

    def __init__(self) -> None:
        self.body = b""
        self.done = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True


def encoded(chunks: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    lines = [b"%x%b\r\n%b\r\n" % (len(data), extension, data) for data in chunks if data]
    return b"".join(lines) + b"0" + extension + b"\r\n" + trailers + b"\r\n"


@given(
    st.lists(st.binary(max_size=40)),
    st.sampled_from([b"", b";a", b";a=b;c"]),
    st.sampled_from([b"", b"t: u\r\n"]),
    st.data(),
)
def test_what_was_encoded_is_read_in_any_pieces_and_nothing_of_what_follows(
    chunks: list[bytes], extension: bytes, trailers: bytes, data: st.DataObject
) -> None:
    message = encoded(chunks, extension, trailers)
    stream = message + b"GET / HTTP/1.1"
    reader, used, payload, last = ChunkedReader(), 0, b"", b""
    at = 0
    while not reader.done:
        step = data.draw(st.integers(1, 30))
        used += (count := reader.feed(piece := stream[at : at + step]))
        payload += reader.payload(piece)
        last = (last and last + piece[:count]) or reader.last
        at += step
    assert used == len(message)
    assert last
    assert message.endswith(last)
    assert payload == b"".join(chunks)
    assert reader.total == sum(map(len, chunks))
    assert reader.feed(b"more") == 0


@given(st.lists(PIECES, max_size=14).map(b"".join))
@example(b"0;:0\r\n\r\n")
def test_what_llhttp_refuses_is_refused(body: bytes) -> None:
    """We may be stricter than llhttp (blanks, bare line ends), never more lenient."""
    other = Llhttp()
    parser = httptools.HttpRequestParser(other)
    parser.feed_data(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    reader = ChunkedReader()
    try:
        used = reader.feed(body)
    except ChunkError:
        return
    if reader.done:
        parser.feed_data(body[:used])
        assert other.done
        assert other.body == reader.payload(body)


@pytest.mark.parametrize(
    "body",
    [
        b"3;" + b"x" * LINE_BYTES_MAX + b"\r\nabc\r\n",
        b"3;" + b"x" * (LINE_BYTES_MAX + 1),
        b"0\r\n" + b"a: b\r\n" * (TRAILER_LINES_MAX + 1),
        b"1" * 17 + b"\r\n",
        b"1\r\naXX",
    ],
)
def test_lines_and_trailers_are_bounded(body: bytes) -> None:
    with pytest.raises(ChunkError):
        ChunkedReader().feed(body)
