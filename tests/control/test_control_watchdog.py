"""No body that comes to the control port holds up the event loop of a node, nor takes much more memory than itself.

What counts is processor time in one turn of a task (tests/node/turns.py).
"""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest
import trio

from ranvier_py.core.prompts.body_json import PARSED_BYTES_MAX
from tests.core.routing.hostile_bodies import filled, messages, numbered
from tests.node.node_lab import lab
from tests.node.turns import DEADLINE_S, OCCUPIED_S_MAX, TRIES, watched

LIMIT = 16 * 2**20
"""Of a body on this port."""

EXPLAINED = {
    "as many lists as fit": filled(b'{"messages":[', b"[],", b"]}", LIMIT),
    "as many lists as are parsed": filled(b'{"messages":[', b"[],", b"]}", 66_000 * 3),
    "lists up to what is parsed": filled(b'{"messages":[', b"[],", b"]}", PARSED_BYTES_MAX),
    "as much text as fits": filled(b'{"messages":[{"role":"user","content":"', b"abcd ", b'"}]}', LIMIT),
    "as much text as is parsed": filled(
        b'{"messages":[{"role":"user","content":"', b"abcd ", b'"}]}', PARSED_BYTES_MAX
    ),
    "a completion of text": filled(b'{"prompt":"', b"abcd ", b'"}', PARSED_BYTES_MAX),
    "a completion of tokens": filled(b'{"prompt":[', b"17,", b"]}", 198_000 * 3),
    "many messages": messages(PARSED_BYTES_MAX).body,
    "unknown members": numbered(b"{", b'"%b":0,', b"}", LIMIT),
    "unknown members beside a chat": numbered(b'{"messages":[],', b'"%b":0,', b'"z":0}', 2_000_000),
    "depth": b'{"messages":' + b"[" * 500_000,
}
ADMIN = (
    "POST /admin/backends",
    "DELETE /admin/backends",
    "POST /admin/backends/drain",
    "POST /admin/response-cache/invalidate",
)
ADMITTED = {
    "a thousand unknown members": numbered(b"{", b'"%b":0,', b"}", 14_000),
    "fifty thousand unknown members": numbered(b"{", b'"%b":0,', b"}", 700_000),
    "a million unknown members": numbered(b"{", b'"%b":0,', b"}", LIMIT),
    "names that are nearly right": b"{%b}" % b",".join(b'"weigh%x":1' % number for number in range(4000)),
    "a long name": b'{"%b":1}' % (b"weight" * 10_000),
    "a long text": b'{"url":"http://%b","name":"%b"}' % (b"a." * 200_000, b"n" * 400_000),
    "a long list": filled(b'{"url":[', b"{},", b"]}", LIMIT),
    "maps in maps": b'{"url":' * 900 + b"1" + b"}" * 900,
}


def status_of(port: int, route: str, body: bytes) -> int:
    """What is answered. In a thread of its own."""
    method, path = route.split()
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
        with suppress(ConnectionError):  # refused before it was read
            sock.sendall(head.encode() + body)
        data = b""
        while more := sock.recv(65_536):
            data += more
    return int(data.split(b" ", 2)[1])


async def longest_turn(route: str, body: bytes, statuses: tuple[int, ...]) -> tuple[float, str]:
    """Of a few tries the best one."""
    async with lab(engines=1, response_cache=True, deadline_s=DEADLINE_S) as node:
        port = int(node.control.rpartition(":")[2])
        longest = (0.0, "")
        for _ in range(TRIES):
            async with watched() as turns:
                status = await trio.to_thread.run_sync(status_of, port, route, body)
            assert status in statuses
            longest = turns.take()
            if longest[0] <= OCCUPIED_S_MAX:
                break
        return longest


@pytest.mark.parametrize("name", EXPLAINED)
async def test_no_body_to_explain_holds_up_the_event_loop(name: str) -> None:
    took_s, task = await longest_turn("POST /explain", EXPLAINED[name], (200, 400, 413))
    assert took_s <= OCCUPIED_S_MAX, task


@pytest.mark.parametrize("name", ADMITTED)
@pytest.mark.parametrize("route", ADMIN)
async def test_no_order_of_an_operator_holds_up_the_event_loop(route: str, name: str) -> None:
    took_s, task = await longest_turn(route, ADMITTED[name], (400, 413))
    assert took_s <= OCCUPIED_S_MAX, task
