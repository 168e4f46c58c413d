"""What one request costs the node's thread: instructions where they can be counted, processor time anywhere.

    python -m benchmarks.request_path [--requests 800] [--batches 5] [--only CASE …] [--times-only] [--dry]

The node is wired as `ranvier serve` wires it, with a tokenizer that cuts text every four bytes, so that nothing but the
path itself is measured. Clients and engines are one other process, in lockstep with it: a request on each connection,
all of them answered, piece by piece where they are streams, and then the next; so every run meets the same sequence.

Instructions are those of user space, counted by valgrind's cachegrind where it is installed: two runs, one of them
longer, and their difference for each request. A virtual machine often has no hardware counters. Times are the best of
the batches. Neither figure is exact: how many requests one turn of the event loop serves depends on the machine, and
the same commit was seen to take from 475 k to 565 k instructions. Compare by turns, more than once, one run at a time.
Learning runs while the node is warmed up and then stops: under full load its share is bounded (io/tokenizer_worker.py).
"""

from __future__ import annotations

import argparse
import gc
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller
from random import Random
from typing import Any

import numpy as np
import orjson
import trio

from benchmarks.harness.bench import ROOT, command_line, finish, instructions, show_row
from benchmarks.harness.stub_engine import ANSWER, EVENT, STREAM_END, STREAM_HEAD, chunk
from ranvier_py.config.config_loader import config_of
from ranvier_py.core.prompts.boundaries import Chat, TailJob, TokenIds, TokenizedChat
from ranvier_py.node.node import GARBAGE_THRESHOLDS, Node

HISTORIES = 64
MESSAGE_BYTES = 300
CONNECTIONS = 16
ENGINES = 2
SEED = 20
BYTES_PER_TOKEN = 4
RECEIVE_BYTES = 1 << 18
NODE, PEER = "--node", "--peer"
WARM_UP_REQUESTS = 4 * HISTORIES
PIECES = 20
LONGER = 4
"""The longer run has so many times the requests: the start of Python varies by as much as 40 requests cost."""
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    history_bytes: int = 3_000
    connections: int = CONNECTIONS
    answer: Sequence[bytes] = (ANSWER,)  # pieces, each sent when every client has the one before
    fields: str = ""  # members of the body before `messages`


CASES = {
    case.name: case
    for case in (
        Case("chat_3kB"),
        Case("chat_60kB", history_bytes=60_000),
        Case("one_connection", connections=1),
        Case("stream_at_once", answer=(STREAM_HEAD + chunk(EVENT) * PIECES + STREAM_END,), fields='"stream":true,'),
        Case("stream_by_piece", answer=(STREAM_HEAD, *[chunk(EVENT)] * PIECES, STREAM_END), fields='"stream":true,'),
    )
}


class ByteTokenizer:
    """Four bytes are a token, and messages follow each other without markers."""

    identity = "bytes"
    chars_per_token = float(BYTES_PER_TOKEN)
    keeps_turns = True

    def tokenize(self, chat: Chat) -> TokenizedChat:
        pieces = [self.tokenize_text(str(message["content"])) for message in chat.messages]
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return TokenizedChat(np.concatenate(pieces), ends, "rendered")

    def tokenize_tails(self, jobs: Sequence[TailJob]) -> Sequence[TokenizedChat]:
        return [self.tokenize(Chat(job.tail)) for job in jobs]

    def tokenize_text(self, text: str) -> TokenIds:
        data = text.encode()
        return np.frombuffer(data[: len(data) // BYTES_PER_TOKEN * BYTES_PER_TOKEN], dtype=np.uint32)


# --- clients and engines: a process of its own ----------------------------------------------------------------------


class Peer:
    """All connections of the node, on both sides, in one loop that waits for each thing in turn."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engines = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(ENGINES)]
        self.asked: list[socket.socket] = []  # connections of the node that have been accepted
        self.bodies = bodies(case)
        self.clients: list[socket.socket] = []

    def run(self) -> None:
        """Tell the engines' ports; take the node's port, then numbers of requests, each answered when they are."""
        print(*(engine.getsockname()[1] for engine in self.engines), flush=True)
        port = int(sys.stdin.readline())
        self.clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(self.case.connections)]
        for line in sys.stdin:
            for _ in range(int(line) // self.case.connections):
                self.round()
            print("done", flush=True)

    def round(self) -> None:
        for client in self.clients:
            body = next(self.bodies)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: node\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        waiting = self.requests()
        for piece in self.case.answer:
            for engine in waiting:
                engine.sendall(piece)
            for client in self.clients:
                read_until(client, methodcaller("endswith", piece[-4:]))

    def requests(self) -> list[socket.socket]:
        """The connections on which the node has sent a request: one for each client."""
        found: list[socket.socket] = []
        while len(found) < len(self.clients):
            for ready in select.select([*self.engines, *self.asked], (), ())[0]:
                if ready in self.engines:
                    self.asked.append(ready.accept()[0])
                else:
                    read_until(ready, is_request)
                    found.append(ready)
        return found


def read_until(sock: socket.socket, whole: Callable[[bytes], bool]) -> None:
    data = b""
    while not whole(data):
        more = sock.recv(RECEIVE_BYTES)
        if not more:
            raise SystemExit(f"closed after {data[-200:]!r}")
        data += more


def is_request(data: bytes) -> bool:
    length, end = LENGTH.search(data), data.find(b"\r\n\r\n")
    return length is not None and len(data) == end + 4 + int(length[1])


def bodies(case: Case) -> Iterator[bytes]:
    """Chats that go on: each repeats one of the histories and adds a message that nobody has seen."""
    rng = Random(SEED)
    histories = []
    for number in range(HISTORIES):
        turns = case.history_bytes // MESSAGE_BYTES // 2
        roles = ["system", *("user", "assistant") * turns]
        histories.append(",".join(message(role, f"{number} {prose(rng, MESSAGE_BYTES)}") for role in roles))
    while True:
        for history in histories:
            question = message("user", prose(rng, MESSAGE_BYTES * 2 // 3))
            yield f'{{"model":"m",{case.fields}"messages":[{history},{question}]}}'.encode()


def prose(rng: Random, size: int) -> str:
    return rng.randbytes(size // 2).hex()


def message(role: str, text: str) -> str:
    return f'{{"role":"{role}","content":"{text}"}}'


# --- the node: the process that is measured -------------------------------------------------------------------------


async def run_node(case: Case, requests: int, batches: int) -> list[dict[str, float]]:
    """Microseconds of the node's thread per request, by batch."""
    found = []
    command = [sys.executable, "-m", "benchmarks.request_path", PEER, case.name]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:  # noqa: ASYNC220
        assert peer.stdin is not None
        assert peer.stdout is not None
        answers = trio.wrap_file(peer.stdout)

        async def ask(words: object) -> None:
            assert peer.stdin is not None
            print(words, file=peer.stdin, flush=True)

        gc.freeze()
        gc.set_threshold(*GARBAGE_THRESHOLDS)  # as in a node that runs
        ports = (await answers.readline()).split()
        node = make_node([f"http://127.0.0.1:{port}" for port in ports])
        async with trio.open_nursery() as nursery:
            ((_, port),) = await nursery.start(node.server.serve, "127.0.0.1", 0)
            await ask(port)
            async with trio.open_nursery() as learning:
                await learning.start(node.tokenizer_worker.run)
                await ask(WARM_UP_REQUESTS)
                await answers.readline()
                while node.tokenizer_worker.counters.queued:  # noqa: ASYNC110  # it tells nobody
                    await trio.sleep(0.05)
                learning.cancel_scope.cancel()
            for _ in range(batches):
                before = resource.getrusage(resource.RUSAGE_THREAD)
                await ask(requests)
                assert await answers.readline() == "done\n"
                after = resource.getrusage(resource.RUSAGE_THREAD)
                user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
                found.append({"user_us": user / requests * 1e6, "system_us": system / requests * 1e6})
            nursery.cancel_scope.cancel()
        node.upstream.close()
        peer.stdin.close()
    return found


def make_node(urls: Sequence[str]) -> Node:
    config = config_of(backend=list(urls), log_level="warning")
    return Node(config, ByteTokenizer(), Random(SEED))  # type: ignore[arg-type]


# --- what is asked of both ------------------------------------------------------------------------------------------


def node_command(case: Case, requests: int, batches: int) -> list[str]:
    """The node in a process of its own."""
    return [sys.executable, "-m", "benchmarks.request_path", NODE, case.name, str(requests), str(batches)]


def instructions_of(case: Case, requests: int) -> int:
    """Instructions per request in user space."""
    few, many = (instructions(node_command(case, count, 1)) for count in (requests, LONGER * requests))
    return round((many - few) / ((LONGER - 1) * requests))


def measure(case: Case, requests: int, batches: int, *, count: bool) -> dict[str, Any]:
    done = subprocess.run(node_command(case, requests, batches), cwd=ROOT, check=True, stdout=subprocess.PIPE)
    runs: list[dict[str, float]] = orjson.loads(done.stdout)
    found: dict[str, Any] = {key: round(min(run[key] for run in runs), 1) for key in runs[0]}
    if count:
        found["instructions"] = instructions_of(case, requests)
    return found


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == NODE:
        name, requests, batches = sys.argv[2:]
        print(orjson.dumps(trio.run(run_node, CASES[name], int(requests), int(batches))).decode())
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == PEER:
        Peer(CASES[sys.argv[2]]).run()
        return 0
    options = read_options()
    count = shutil.which("valgrind") is not None and not options.times_only
    cases = {}
    for name in options.only or CASES:
        cases[name] = measure(CASES[name], options.requests, options.batches, count=count)
        show_row({"case": name, **cases[name]})
    result: dict[str, Any] = {
        "benchmark": "request_path",
        "question": "what one request costs the node's thread",
        "requests": options.requests,
        "batches": options.batches,
        "cases": cases,
    }
    if {"stream_at_once", "stream_by_piece"} <= cases.keys():
        once, pieces = cases["stream_at_once"], cases["stream_by_piece"]
        result["each_piece_of_a_stream"] = {key: round((pieces[key] - once[key]) / (PIECES + 1), 1) for key in once}
    return finish("request_path", result, write=not options.dry)


def read_options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=800, help="of each batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], choices=CASES, help="cases; all by default")
    parser.add_argument("--times-only", action="store_true", help="count no instructions: that takes minutes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
