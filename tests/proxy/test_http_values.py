"""Heads whose fields would take long to read."""

from __future__ import annotations

import pytest

from ranvier_py.core.errors import BadRequest, UpstreamGarbled
from ranvier_py.proxy.heads import RequestHead, ResponseParser, ServerLimits
from ranvier_py.proxy.http_values import CONNECTION_OPTIONS_MAX

MANY = [
    b"connection: " + b"," * 60_000,
    b"Connection: " + b"a," * 30_000,
    b"\r\n".join([b"connection: " + b"a, " * (CONNECTION_OPTIONS_MAX // 2)] * 3),
]
FEW = [b"connection: keep-alive, x-own", b"connection: " + b"," * CONNECTION_OPTIONS_MAX]


def read_request(lines: bytes) -> RequestHead:
    head = RequestHead()
    data = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n" + lines + b"\r\n\r\n"
    head.feed(data)
    head.finish(data, ServerLimits())
    return head


def read_answer(lines: bytes) -> None:
    ResponseParser().read_head(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n" + lines + b"\r\n\r\n", b"POST")


def test_a_connection_field_with_more_options_than_anybody_needs_is_refused_unread() -> None:
    for lines in MANY:
        with pytest.raises(BadRequest, match="too many options"):
            read_request(lines)
        with pytest.raises(UpstreamGarbled, match="too many options"):
            read_answer(lines)
    for lines in FEW:
        read_request(lines)
        read_answer(lines)
