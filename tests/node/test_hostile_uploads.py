"""No body on the wire holds up the event loop of a node: its control port, its peers and everybody else would wait.

What counts is processor time in one turn of a task of the node (tests/node/turns.py).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
import trio

from ranvier_py.core.prompts.body_json import PARSED_BYTES_MAX
from ranvier_py.core.prompts.body_members import MESSAGES_MAX
from ranvier_py.core.routing.request_paths import CHAT_PATH
from tests.core.routing.hostile_bodies import LIMIT, MESSAGE_BYTES, Hostile, content_of, endless, messages, roles
from tests.node.node_lab import Node, cluster_lab, lab
from tests.node.turns import DEADLINE_S, OCCUPIED_S_MAX, TRIES, Turns, watched

SOAK_S = 60.0
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(EVENTS), EVENTS)


class Swallowing:
    """An engine that reads whatever comes, and answers with two events."""

    async def serve(self, stream: trio.SocketStream) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some(65_536)
                if not more:
                    return
                data += more
            head, _, rest = data.partition(b"\r\n\r\n")
            _, _, length = head.lower().partition(b"content-length: ")
            missing = int(length.split(b"\r", 1)[0] or b"0") - len(rest)
            while missing > 0:
                missing -= len(await stream.receive_some(262_144))
            data = b""
            await stream.send_all(ANSWER)


def send(port: int, hostile: Hostile, chunk_bytes: int) -> bytes:
    """The status line of what a client gets that sends as fast as it can; 0: in no chunks. In a thread of its own."""
    framing = b"transfer-encoding: chunked" if chunk_bytes else b"content-length: %d" % len(hostile.body)
    body = hostile.body
    if chunk_bytes:
        whole = len(body) // chunk_bytes * chunk_bytes
        pieces = [body[start : start + chunk_bytes] for start in range(0, whole, chunk_bytes)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, body[whole:]) if piece)
        body += b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
        sock.sendall(b"POST %b HTTP/1.1\r\nhost: h\r\nconnection: close\r\n%b\r\n\r\n" % (hostile.path, framing))
        sock.sendall(body)
        data = b""
        while more := sock.recv(65_536):
            data += more
    return data.partition(b"\r\n")[0]


async def longest_turn(
    node: Node, turns: Turns, hostile: Hostile, chunk_bytes: int = 0, *, learned: bool = False
) -> tuple[float, str]:
    """Of a few tries the best one. `learned`: its tokens are learned meanwhile."""
    found = (0.0, "")
    for _ in range(TRIES):
        turns.take()
        status = await trio.to_thread.run_sync(send, node.address[1], hostile, chunk_bytes)
        is_too_large = len(hostile.body) > LIMIT
        assert (status == b"HTTP/1.1 413 Request Entity Too Large") is is_too_large, f"{status!r} to {hostile.name}"
        assert is_too_large or status in (b"HTTP/1.1 200 OK", b"HTTP/1.1 400 Bad Request"), hostile.name
        await node.until("/admin/routes", lambda view: not view["tokenizer_worker"]["queued"])
        if learned:
            await node.until("/admin/routes", lambda view: view["tokenizer_worker"]["learned"])
        found = turns.take()
        if found[0] <= OCCUPIED_S_MAX:
            break
    return found


WIRE: dict[str, tuple[Callable[[], Hostile], int]] = {
    "64 MiB of lists": (lambda: content_of("lists", b"[],")(LIMIT), 0),
    "64 MiB of text with message ends": (lambda: roles(LIMIT), 0),
    "64 MiB in large chunks": (lambda: content_of("letters", b"a", b'"', b'"')(LIMIT), 65_536),
    "as much as is parsed": (lambda: content_of("letters", b"a", b'"', b'"')(PARSED_BYTES_MAX), 0),
    "chunks of one byte": (lambda: Hostile("ones", CHAT_PATH, b" " * 500_000), 1),
    "chunks of two bytes": (lambda: Hostile("twos", CHAT_PATH, b" " * 500_000), 2),
}
"""What makes a body, and the bytes of its chunks; 0: it has none."""


@pytest.mark.parametrize("name", WIRE)
async def test_no_body_on_the_wire_holds_up_the_event_loop(name: str) -> None:
    make, chunk_bytes = WIRE[name]
    hostile = make()
    async with lab(Swallowing(), deadline_s=DEADLINE_S) as node, watched() as turns:
        took_s, task = await longest_turn(node, turns, hostile, chunk_bytes)
        assert took_s <= OCCUPIED_S_MAX, task


async def test_a_chat_of_as_many_messages_as_are_read_holds_up_neither_its_node_nor_a_peer(tmp_path: Path) -> None:
    async with cluster_lab(tmp_path, engines=0, deadline_s=DEADLINE_S) as place:
        place.engines += [await place.listen(Swallowing().serve)]
        first, other = await place.cluster(2)
        async with watched() as turns:
            took_s, task = await longest_turn(first, turns, messages(MESSAGE_BYTES * MESSAGES_MAX), learned=True)
            await other.until_routes(lambda routes: routes["rows"] >= MESSAGES_MAX // 2)
            assert max(took_s, turns.take()[0]) <= OCCUPIED_S_MAX, task


@pytest.mark.skipif("RANVIER_SOAK" not in os.environ, reason="takes a minute of a core: make soak")
async def test_nothing_that_a_generator_sends_in_a_minute_holds_up_the_event_loop() -> None:
    seed = int.from_bytes(os.urandom(4))
    rng = Random(seed)
    async with lab(Swallowing(), deadline_s=3 * SOAK_S) as node, watched() as turns:
        ends_at = time.monotonic() + SOAK_S
        for number, hostile in enumerate(takewhile(lambda _: time.monotonic() < ends_at, endless(seed))):
            chunk_bytes = rng.choice((0, 0, 0, 1 + len(hostile.body) // 100_000, 65_536))
            took_s, task = await longest_turn(node, turns, hostile, chunk_bytes)
            words = f"seed {seed}, body {number}: {hostile.name}, {len(hostile.body)} bytes in chunks of {chunk_bytes}"
            assert took_s <= OCCUPIED_S_MAX, f"{words}, {task}"
