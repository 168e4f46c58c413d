"""Heads that are remembered read as if they were parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.errors import UpstreamGarbled
from ranvier_py.proxy.heads import FramedHead, HeadShape, KnownHead, ResponseParser

HEADS = (
    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length:%d\r\ncontent-encoding: gzip\r\nX-Request-Id: 7\r\n\r\n",
    b"HTTP/1.1 500 Oh no\r\nconnection: close\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nconnection: server\r\nserver: x\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx-%d: y\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HTTP/1.1 204 No %d\r\n\r\n",
    b"HTTP/1.1 200 until the end %d\r\n\r\n",
)


def parsed(data: bytes) -> FramedHead:
    return ResponseParser().read_head(data, b"POST")


def meaning(reading: FramedHead) -> object:
    head = reading.head
    return head.status, head.reason, head.headers, head.framing, head.fields, reading[1:]


@given(st.sampled_from(HEADS), st.integers(0, 300), st.sampled_from(HEADS), st.integers(0, 300))
def test_a_head_like_the_last_reads_as_a_parser_reads_it(first: bytes, one: int, second: bytes, other: int) -> None:
    known = KnownHead.of(first % one, parsed(first % one))
    again = known.again(second % other) if known is not None else None
    if again is not None:
        assert meaning(again) == meaning(parsed(second % other))


def test_only_the_digits_of_the_length_may_differ() -> None:
    first, second = (HEADS[1] % length for length in (7, 12_345))
    known = KnownHead.of(first, parsed(first))
    assert known is not None
    again = known.again(second)
    assert again is not None
    assert again.length == 12_345
    for strange in (b"", b"x", b"-1", b"+1", b"1 ", b"1,1", b"0", b"1" * 19, b"1\r\ncontent-length: 2"):
        assert known.again(HEADS[1].replace(b"%d", strange)) is None
    assert known.again(first.replace(b"Server", b"server")) is None


def test_a_head_with_two_lengths_has_no_shape_because_no_parser_takes_it() -> None:
    with pytest.raises(UpstreamGarbled):
        parsed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n")
    with pytest.raises(UpstreamGarbled):
        parsed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n")


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_a_shape_finds_digits_in_heads_of_its_own_alone(head: bytes, other: bytes) -> None:
    shape = HeadShape.of(head)
    assert shape.digits_of(head) is not None
    digits = shape.digits_of(other)
    if digits is not None:
        assert shape.before + digits + shape.after == other
