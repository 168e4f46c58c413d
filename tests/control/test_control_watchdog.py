"""No body that comes to the control port holds up the event loop of a node, nor takes much more memory than itself.

What counts is processor time in one turn of a task (tests/node/turns.py).
"""

from __future__ import annotations

import socket
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import orjson
import pytest
import trio

from ranvier_py.core.prompts.body_json import PARSED_BYTES_MAX
from tests.core.routing.hostile_bodies import filled, messages, numbered
from tests.node.node_lab import lab
from tests.node.turns import DEADLINE_S, OCCUPIED_S_MAX, TRIES, least_s, watched

LIMIT = 16 * 2**20
"""Of a body on this port."""

# Made when they are sent: some have 16 MB.
EXPLAINED: Mapping[str, Callable[[], bytes]] = {
    "as many lists as fit": partial(filled, b'{"messages":[', b"[],", b"]}", LIMIT),
    "as many lists as are parsed": partial(filled, b'{"messages":[', b"[],", b"]}", 66_000 * 3),
    "lists up to what is parsed": partial(filled, b'{"messages":[', b"[],", b"]}", PARSED_BYTES_MAX),
    "as much text as fits": partial(filled, b'{"messages":[{"role":"user","content":"', b"abcd ", b'"}]}', LIMIT),
    "as much text as is parsed": partial(
        filled, b'{"messages":[{"role":"user","content":"', b"abcd ", b'"}]}', PARSED_BYTES_MAX
    ),
    "a completion of text": partial(filled, b'{"prompt":"', b"abcd ", b'"}', PARSED_BYTES_MAX),
    "a completion of tokens": partial(filled, b'{"prompt":[', b"17,", b"]}", 198_000 * 3),
    "many messages": lambda: messages(PARSED_BYTES_MAX).body,
    "unknown members": partial(numbered, b"{", b'"%b":0,', b"}", LIMIT),
    "unknown members beside a chat": partial(numbered, b'{"messages":[],', b'"%b":0,', b'"z":0}', 2_000_000),
    "depth": lambda: b'{"messages":' + b"[" * 500_000,
}
ADMIN = (
    "POST /admin/backends",
    "DELETE /admin/backends",
    "POST /admin/backends/drain",
    "POST /admin/response-cache/invalidate",
)
ADMITTED: Mapping[str, Callable[[], bytes]] = {
    "a thousand unknown members": partial(numbered, b"{", b'"%b":0,', b"}", 14_000),
    "fifty thousand unknown members": partial(numbered, b"{", b'"%b":0,', b"}", 700_000),
    "a million unknown members": partial(numbered, b"{", b'"%b":0,', b"}", LIMIT),
    "names that are nearly right": lambda: b"{%b}" % b",".join(b'"weigh%x":1' % number for number in range(4000)),
    "a long name": lambda: b'{"%b":1}' % (b"weight" * 10_000),
    "a long text": lambda: b'{"url":"http://%b","name":"%b"}' % (b"a." * 200_000, b"n" * 400_000),
    "a long list": partial(filled, b'{"url":[', b"{},", b"]}", LIMIT),
    "maps in maps": lambda: b'{"url":' * 900 + b"1" + b"}" * 900,
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
    took_s, task = await longest_turn("POST /explain", EXPLAINED[name](), (200, 400, 413))
    assert took_s <= OCCUPIED_S_MAX, task


@pytest.mark.parametrize("name", ADMITTED)
@pytest.mark.parametrize("route", ADMIN)
async def test_no_order_of_an_operator_holds_up_the_event_loop(route: str, name: str) -> None:
    took_s, task = await longest_turn(route, ADMITTED[name](), (400, 413))
    assert took_s <= OCCUPIED_S_MAX, task


HASH = b'"%064x",'
MESSAGE = b'[%d,"%b"],'


def reported(name: bytes, elements: bytes, more: bytes = b"") -> bytes:
    return b'{"worker_id":"WORKER",%b"%b":[%b]}' % (more, name, elements.removesuffix(b","))


def messages_of(payload: bytes, count: int) -> bytes:
    return b"".join([MESSAGE % (number, b64encode(payload)) for number in range(count)])


MAPS = b"\x93\xcb" + bytes(8) + b"\xdc\xff\xff" + b"\x80" * 65_535 + b"\x00"  # a batch of 65,535 empty maps
REPORTS: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "hashes that are evicted": (
        "eviction",
        lambda: reported(b"evicted_hashes", b"".join(map(HASH.__mod__, range(200_000)))),
    ),
    "hashes that are held": ("sync", lambda: reported(b"active_hashes", b"".join(map(HASH.__mod__, range(240_000))))),
    "lists for hashes": ("sync", lambda: reported(b"active_hashes", b"[]," * (LIMIT // 3 - 100))),
    "numbers for hashes": ("sync", lambda: reported(b"active_hashes", b"1," * (LIMIT // 2 - 100))),
    "as many lists as are parsed": ("events", lambda: reported(b"messages", b"[]," * 2900)),
    "lists for messages": ("events", lambda: reported(b"messages", b"[]," * (LIMIT // 3 - 100))),
    "messages of maps": ("events", lambda: reported(b"messages", messages_of(MAPS, 120))),
    "many small messages": ("events", lambda: reported(b"messages", messages_of(b"\x93\x01\x90\x00", 1000))),
    "one long text": ("events", lambda: reported(b"messages", b"", b'"x":"%b",' % (b"a" * (LIMIT - 200)))),
    "an endless number": ("sync", lambda: reported(b"active_hashes", b"1" * (LIMIT - 200))),
    "escapes": ("sync", lambda: reported(b"active_hashes", b"", b'"model":"%b",' % (b"\\u00e9" * (LIMIT // 6 - 100)))),
    "unknown members": ("events", partial(numbered, b'{"worker_id":"WORKER",', b'"%b":0', b"}", LIMIT - 200)),
    "depth": ("sync", lambda: b'{"active_hashes":' + b"[" * 500_000),
}


@pytest.mark.parametrize("name", REPORTS)
async def test_no_report_of_a_worker_holds_up_the_event_loop(name: str) -> None:
    """Nor does what is parsed in a thread keep the interpreter to itself for long."""
    path, made = REPORTS[name]
    longest = (0.0, "")
    async with lab(engines=1, deadline_s=DEADLINE_S) as node:
        port, worker = int(node.control.rpartition(":")[2]), node.engines[0].encode()
        sent = made().replace(b"WORKER", worker)
        for _ in range(TRIES):
            async with watched() as turns:
                status = await trio.to_thread.run_sync(status_of, port, f"POST /internal/{path}", sent)
                await node.ask("/internal/workers")
            assert status in (200, 400, 413)
            longest = turns.take()
            if longest[0] <= OCCUPIED_S_MAX:
                break
    assert longest[0] <= OCCUPIED_S_MAX, longest[1]
    if status == 200:
        assert parsing_s(sent) <= OCCUPIED_S_MAX


def parsing_s(body: bytes) -> float:
    """How long parsing takes, during which nobody else has the interpreter. Of a few tries the best one."""

    def took_s() -> float:
        began = time.thread_time()
        orjson.loads(body)
        return time.thread_time() - began

    return least_s(took_s)
