"""What does one warm turn cost a node, in calls and bytecode instructions of its own code?

    python -m benchmarks.request_cost [--only CASE …] [--json | --dry]

The node is a process of its own, wired as `ranvier serve` wires it, in lockstep with this process, which acts as its
client and its engine: it sends a turn, answers it piece by piece, and begins again. A tokenizer that cuts text every
four bytes learns during the warm-up, and then stops. Counted is what `ranvier_py` runs from the arrival of a turn until
the end of its answer, generated code included, by file: the least of some turns, with one engine the same within 1 % on
every machine with the same Python. A generator that goes on counts as a call. Goals: `TURN_MOST` in
`benchmarks/harness/report.py`.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import mkstemp
from types import FrameType
from typing import Any

import numpy as np
import trio

import ranvier_py
from benchmarks.harness.bench import ROOT, command_line, finish, show_row
from benchmarks.harness.stub_engine import ANSWER, EVENT, STREAM_END, STREAM_HEAD, chat_request, chunk, read_message
from cluster.local_tokenizer import LocalTokenizer
from ranvier_py.config.config_loader import config_of
from ranvier_py.core.prompts.boundaries import Chat, TailJob, TokenIds, TokenizedChat
from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts
from ranvier_py.node.access.access_parts import Access
from ranvier_py.node.fingerprints import tokenizer_process
from ranvier_py.node.node import make_node, parts_of
from ranvier_py.node.part import Node
from ranvier_py.node.parts.request_parts import PublicPort, RequestPath
from ranvier_py.node.parts.upkeep import Learner

PACKAGE = f"{Path(ranvier_py.__file__).parent}/"
HISTORIES = 2
MESSAGE_BYTES = 300
SEED = 20
BYTES_PER_TOKEN = 4
NODE = "--node"
WARM_UP_TURNS = 8
COUNTED_TURNS = 16  # now and then one has more to do: a sweep, or a read in two pieces
CHUNKS = 100


@dataclass(frozen=True)
class Case:
    history_bytes: int = 3_000
    answer: Sequence[bytes] = (ANSWER,)  # pieces; each is sent when the client has received the previous one
    fields: str = ""  # members of the body before `messages`
    keys: str = ""  # what the file of keys has; "" for none
    traced: float | None = None  # share of the requests whose spans are kept; None: none is traced
    caches: bool = False  # with a response cache, in which no turn finds its answer
    engines: int = 1  # of several each has a request that it does not answer, so that places are weighed
    spread: float = 1.02  # times the least instructions of several runs that another run may take

    def options(self, keys: str) -> dict[str, Any]:
        """Return the node's options. `keys`: the file of keys, or ""."""
        found: dict[str, Any] = {"keys_file": keys} if keys else {}
        if self.traced is not None:
            found |= {"otel_endpoint": "http://127.0.0.1:1", "otel_sample_ratio": self.traced}
        return found | ({"response_cache": True} if self.caches else {})


PIECES = (STREAM_HEAD + chunk(EVENT), *[chunk(EVENT)] * (CHUNKS - 1), STREAM_END)
KEY = b"rk-of-the-benchmark"
KEYS = f'[[key]]\nid = "b"\ntenant = "t"\nsha256 = "{sha256(KEY).hexdigest()}"\n[[tenant]]\nname = "t"\n'
LIMITS = """requests_per_minute = 1000000
tokens_per_minute = 1000000000
concurrent = 1000
budget = [{amount = 1000000000000, window = "month"}]
"""
CASES = {
    "chat_3kB": Case(),
    "chat_3kB_key": Case(keys=KEYS),
    "chat_3kB_limits": Case(keys=KEYS + LIMITS),
    "chat_3kB_miss": Case(fields='"temperature":0,', caches=True),
    "chat_3kB_placed": Case(engines=2, spread=1.1),  # times decide who is chosen
    "chat_60kB": Case(history_bytes=60_000),
    "stream_100_chunks": Case(answer=PIECES, fields='"stream":true,'),
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


class Peer:  # the node's client and engine, in one loop that does one thing after the other
    def __init__(self, case: Case) -> None:
        self.case, self.bodies = case, bodies(case)
        self.engines = [socket.create_server(("127.0.0.1", 0)) for _ in range(case.engines)]
        self.waiting: list[socket.socket] = []  # clients whose requests are not answered
        self.asked: list[socket.socket] = []  # accepted connections of the node to its engine
        self.client: socket.socket

    @property
    def urls(self) -> str:
        return " ".join([f"http://127.0.0.1:{engine.getsockname()[1]}" for engine in self.engines])

    def connected(self, port: int) -> None:
        self.client = at_once(socket.create_connection(("127.0.0.1", port)))

    def occupy(self, port: int) -> None:
        """Leave a request at each engine."""
        for _ in self.engines:
            self.waiting.append(at_once(socket.create_connection(("127.0.0.1", port))))
            self.waiting[-1].sendall(chat_request(next(self.bodies)))
            self.waiting.append(self.request())
            self.asked.remove(self.waiting[-1])

    def close(self) -> None:
        for sock in (self.client, *self.engines, *self.asked, *self.waiting):
            sock.close()

    def turn(self) -> None:
        asked = chat_request(next(self.bodies))
        self.client.sendall(
            asked.replace(b"\r\n\r\n", b"\r\nx-api-key: %b\r\n\r\n" % KEY, 1) if self.case.keys else asked
        )
        waiting = self.request()
        for piece in self.case.answer:
            waiting.sendall(piece)
            data = b""
            while not data.endswith(piece[-4:]):
                data += (more := self.client.recv(1 << 18))
                assert more, f"closed after {data[-200:]!r}"

    def request(self) -> socket.socket:
        """Wait for the node's request. Returns the engine's connection that got it."""
        while True:
            for ready in select.select([*self.engines, *self.asked], (), ())[0]:
                if ready in self.engines:
                    self.asked.append(at_once(ready.accept()[0]))
                elif read_message(ready):
                    return ready


def at_once(sock: socket.socket) -> socket.socket:
    """Have small pieces leave at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def bodies(case: Case) -> Iterator[bytes]:
    """Yield bodies of chats that continue: each repeats one of the histories and adds a new message."""
    rng = Random(SEED)
    histories = []
    for number in range(HISTORIES):
        turns = case.history_bytes // MESSAGE_BYTES // 2
        roles = ["system", *("user", "assistant") * turns]
        histories.append(
            ",".join(message(role, f"{number} {rng.randbytes(MESSAGE_BYTES // 2).hex()}") for role in roles)
        )
    while True:
        for history in histories:
            question = message("user", rng.randbytes(MESSAGE_BYTES // 3).hex())
            yield f'{{"model":"m",{case.fields}"messages":[{history},{question}]}}'.encode()


def message(role: str, text: str) -> str:
    return f'{{"role":"{role}","content":"{text}"}}'


class Count:
    """Calls and instructions by file; generated code counts for the file that calls it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.switches, self.last = 0, ""  # calls from one file's code to another's, or back by what comes next
        self.instructions: Counter[str] = Counter()

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code, caller = frame.f_code.co_filename, frame.f_back
        while code == "<string>" and caller is not None:
            code, caller = caller.f_code.co_filename, caller.f_back
        if event != "call" or not code.startswith(PACKAGE):
            return None
        name = code.removeprefix(PACKAGE)
        self.calls[name] += 1
        self.switches, self.last = self.switches + (name != self.last), name
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def step(_frame: FrameType, event: str, _: object) -> Any:
            self.instructions[name] += event == "opcode"
            return step

        return step


async def run_node(urls: str, options: str) -> None:
    """Run the node with these engines, and with these options, as JSON. Prints its port; ends learning at the first
    line of input; prints what it counted at each."""
    config, key = config_of(backend=urls.split(), log_level="warning", **json.loads(options)), bytes(32)
    tokenizer = LocalTokenizer(tokenizer_process(config, key).setup, ByteTokenizer(), FACTS)
    node, inbox = make_node(config, tokenizer, Random(SEED), key)
    node.assemble(parts_of(node, tokenizer, inbox))
    async with trio.open_nursery() as nursery:
        await node.part(Access).run()
        ((_, port),) = await nursery.start(node.part(PublicPort).server.serve, "127.0.0.1", 0)
        await count_turns(node, port)
        nursery.cancel_scope.cancel()
    node.part(RequestPath).upstream.close()


async def count_turns(node: Node, port: int) -> None:
    learner, lines = node.part(Learner), trio.wrap_file(sys.stdin)
    async with trio.open_nursery() as learning:
        learning.start_soon(learner.loop)
        print(port, flush=True)
        await lines.readline()
        while learner.view()["queued"]:  # noqa: ASYNC110  # it tells nobody
            await trio.sleep(0.01)
        learning.cancel_scope.cancel()
    count, line = Count(), "first"
    while line:
        sys.settrace(None)
        print(json.dumps([count.calls, count.instructions, count.switches]), flush=True)
        count = Count()
        sys.settrace(count.trace)
        line = await lines.readline()


def counted(case: Case) -> dict[str, Any]:
    """Return the calls and instructions of one turn, of all files and of each; the most instructions first."""
    peer, found, keys = Peer(case), [], Path(mkstemp(suffix=".toml")[1])
    keys.write_text(case.keys)
    options = json.dumps(case.options(str(keys) if case.keys else ""))
    command = [sys.executable, "-m", "benchmarks.request_cost", NODE, peer.urls, options]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        port = int(node.stdout.readline())
        peer.connected(port)
        for number in range(WARM_UP_TURNS + COUNTED_TURNS):
            peer.turn()
            if number == 1 and case.engines > 1:
                peer.occupy(port)
            if number + 1 >= WARM_UP_TURNS:
                print(file=node.stdin, flush=True)
                calls, instructions, switches = json.loads(node.stdout.readline())
                found.append((sum(instructions.values()), sum(calls.values()), switches, calls, instructions))
        node.stdin.close()
        peer.close()
    keys.unlink()
    total, calls_total, switches, calls, instructions = min(found[1:], key=lambda each: each[:2])
    files = {name: [calls[name], instructions[name]] for name in sorted(calls, key=lambda name: -instructions[name])}
    return {"calls": calls_total, "instructions": total, "switches": switches, "files": files}


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == NODE:
        trio.run(run_node, sys.argv[2], sys.argv[3])
        return 0
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=CASES, help="cases; all by default")
    parser.add_argument("--json", action="store_true", help="print the result alone, and write no file")
    options = parser.parse_args()
    options.dry |= vars(options).pop("json")
    cases = {}
    for name in options.only or CASES:
        cases[name] = counted(CASES[name])
        figures = {key: cases[name][key] for key in ("calls", "instructions", "switches")}
        show_row({"case": name, **figures, "files": len(cases[name]["files"])})
    return finish("request_cost", options, {"cases": cases}, whole=not options.only)


if __name__ == "__main__":
    sys.exit(main())
