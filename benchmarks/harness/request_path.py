"""How much processor time does one request cost the node's thread, in user space and in the kernel?

    python -m benchmarks.harness.request_path [--requests 800] [--batches 5] [--only CASE …] [--dry]

The node is wired as `ranvier serve` wires it, with a tokenizer that cuts text every four bytes, so that only the path
itself is measured. The node is a process of its own, in lockstep with this process, which acts as its clients and its
engines: it sends a request on each connection, answers all of them (streams piece by piece), and then begins again. So
all runs have the same sequence. Times are the best of the batches. How many requests one turn of the event loop serves
depends on the machine: to compare versions, alternate them, several times, one run at a time.
Learning runs during the warm-up and then stops, because under full load its share is bounded (io/tokenizer_worker.py).
"""

from __future__ import annotations

import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import trio

from benchmarks.harness.bench import ROOT, command_line, finish, show_row
from benchmarks.harness.stub_engine import ANSWER, EVENT, STREAM_END, STREAM_HEAD, chat_request, chunk, read_message
from cluster.local_tokenizer import LocalTokenizer
from ranvier_py.config.config_loader import config_of
from ranvier_py.core.prompts.boundaries import Chat, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts
from ranvier_py.node.fingerprints import tokenizer_process
from ranvier_py.node.garbage import collected_in_waits
from ranvier_py.node.node import make_node, parts_of
from ranvier_py.node.part import Node
from ranvier_py.node.parts.request_parts import PublicPort, RequestPath
from ranvier_py.node.parts.upkeep import Learner

HISTORIES = 64
MESSAGE_BYTES = 300
CONNECTIONS = 16
ENGINES = 2
SEED = 20
BYTES_PER_TOKEN = 4
NODE, CACHE = "--node", "--response-cache"
WARM_UP_REQUESTS = 4 * HISTORIES
PIECES = 20


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    history_bytes: int = 3_000
    connections: int = CONNECTIONS
    answer: Sequence[bytes] = (ANSWER,)  # pieces; each is sent when every client has received the previous one
    fields: str = ""  # members of the body before `messages`
    response_cache: bool = False


GREEDY = '"temperature":0,'
CASES = {
    case.name: case
    for case in (
        Case("chat_3kB"),
        Case("chat_60kB", history_bytes=60_000),
        Case("one_connection", connections=1),
        Case("not_cached", fields=GREEDY),
        Case("cache_miss", fields=GREEDY, response_cache=True),
        Case("stream_at_once", answer=(STREAM_HEAD + chunk(EVENT) * PIECES + STREAM_END,), fields='"stream":true,'),
        Case("stream_by_piece", answer=(STREAM_HEAD, *[chunk(EVENT)] * PIECES, STREAM_END), fields='"stream":true,'),
    )
}


FACTS = TokenizerFacts("bytes", keeps_turns=True, incremental=True, chars_per_token=float(BYTES_PER_TOKEN))


class ByteTokenizer:
    """A tokenizer for which four bytes are a token, and messages follow each other without markers."""

    def tokenize(self, chat: Chat) -> TokenizedChat:
        pieces = [self.tokenize_text(str(message["content"])) for message in chat.messages]
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return TokenizedChat(np.concatenate(pieces), ends, "rendered")

    def tokenize_tails(self, jobs: Sequence[TailJob]) -> Sequence[TokenizedChat]:
        return [self.tokenize(Chat(job.tail)) for job in jobs]

    def tokenize_text(self, text: str, *, bare: bool = False) -> TokenIds:  # noqa: ARG002
        data = text.encode()
        return np.frombuffer(data[: len(data) // BYTES_PER_TOKEN * BYTES_PER_TOKEN], dtype=np.uint32)


class Peer:
    """The node's clients and engines: all its connections, in one loop that does one thing after the other."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engines = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(ENGINES)]
        self.asked: list[socket.socket] = []  # accepted connections of the node to its engines
        self.bodies = bodies(case)
        self.clients: list[socket.socket] = []

    def connect(self, port: int) -> None:
        self.clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(self.case.connections)]

    def run(self, requests: int) -> None:
        for _ in range(requests // self.case.connections):
            self.round()

    def round(self) -> None:
        for client in self.clients:
            client.sendall(chat_request(next(self.bodies)))
        waiting = self.requests()
        for piece in self.case.answer:
            for engine in waiting:
                engine.sendall(piece)
            for client in self.clients:
                read_until(client, piece[-4:])

    def requests(self) -> list[socket.socket]:
        """Wait until the node has sent a request for each client; return the engines' connections that got them."""
        found: list[socket.socket] = []
        while len(found) < len(self.clients):
            for ready in select.select([*self.engines, *self.asked], (), ())[0]:
                if ready in self.engines:
                    self.asked.append(ready.accept()[0])
                elif read_message(ready):
                    found.append(ready)
                else:
                    raise SystemExit("the node closed a connection to an engine")
        return found


def read_until(sock: socket.socket, end: bytes) -> None:
    data = b""
    while not data.endswith(end):
        more = sock.recv(1 << 18)
        if not more:
            raise SystemExit(f"closed after {data[-200:]!r}")
        data += more


def bodies(case: Case) -> Iterator[bytes]:
    """Yield bodies of chats that continue: each repeats one of the histories and adds a new message."""
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


async def run_node(arguments: Sequence[str]) -> None:
    """Run the node. Prints its port; ends learning at the first line of input; prints its thread's time at each."""
    urls = [argument for argument in arguments if argument != CACHE]
    node, lines = node_of(urls, response_cache=len(urls) < len(arguments)), trio.wrap_file(sys.stdin)
    learner = node.part(Learner)
    with collected_in_waits():  # as in a node that runs
        async with trio.open_nursery() as nursery:
            ((_, port),) = await nursery.start(node.part(PublicPort).server.serve, "127.0.0.1", 0)
            async with trio.open_nursery() as learning:
                learning.start_soon(learner.loop)
                print(port, flush=True)
                await lines.readline()
                while learner.view()["queued"]:  # noqa: ASYNC110  # it tells nobody
                    await trio.sleep(0.05)
                learning.cancel_scope.cancel()
            while True:
                used = resource.getrusage(resource.RUSAGE_THREAD)
                print(used.ru_utime, used.ru_stime, flush=True)
                if not await lines.readline():
                    break
            nursery.cancel_scope.cancel()
    node.part(RequestPath).upstream.close()


def node_of(urls: Sequence[str], *, response_cache: bool) -> Node:
    config = config_of(backend=list(urls), log_level="warning", response_cache=response_cache)
    key = bytes(32)
    tokenizer = LocalTokenizer(tokenizer_process(config, key).setup, ByteTokenizer(), FACTS)
    node, inbox = make_node(config, tokenizer, Random(SEED), key)
    node.assemble(parts_of(node, tokenizer, inbox))
    return node


def measure(case: Case, requests: int, batches: int) -> dict[str, float]:
    """Measure the microseconds of the node's thread per request, in the best batch."""
    peer = Peer(case)
    urls = [f"http://127.0.0.1:{engine.getsockname()[1]}" for engine in peer.engines]
    asked = [NODE, *urls, *((CACHE,) if case.response_cache else ())]
    command = [sys.executable, "-m", "benchmarks.harness.request_path", *asked]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        peer.connect(int(node.stdout.readline()))
        peer.run(WARM_UP_REQUESTS)
        used = []
        for _ in range(batches + 1):
            print(file=node.stdin, flush=True)
            used.append([float(seconds) for seconds in node.stdout.readline().split()])
            if len(used) <= batches:
                peer.run(requests)
        node.stdin.close()
    spent = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(used)]
    best = [round(min(each) / requests * 1e6, 1) for each in zip(*spent, strict=True)]
    return {"user_us": best[0], "system_us": best[1]}


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == NODE:
        trio.run(run_node, sys.argv[2:])
        return 0
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=800, help="of each batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], choices=CASES, help="cases; all by default")
    options = parser.parse_args()
    cases = {}
    for name in options.only or CASES:
        cases[name] = measure(CASES[name], options.requests, options.batches)
        show_row({"case": name, **cases[name]})
    result: dict[str, Any] = {"cases": cases}
    if {"stream_at_once", "stream_by_piece"} <= cases.keys():
        once, pieces = cases["stream_at_once"], cases["stream_by_piece"]
        result["each_piece_of_a_stream"] = {key: round((pieces[key] - once[key]) / (PIECES + 1), 1) for key in once}
    return finish("request_path", options, result)


if __name__ == "__main__":
    sys.exit(main())
