"""How long does it take to tokenize the next turn of a chat, and does the length of its history matter?

    python -m benchmarks.tokenize [--rounds 10]

For histories of 2k, 10k and 50k tokens, in milliseconds, as medians over rounds in which the candidates take turns:

- `tail`: tokenize_tail of the new turn (an answer of about 200 tokens and a question of about 50), one at a time;
- `text_alone`: the same two texts encoded once by the bare tokenizer, the least possible. Goal: tail <= 1.5 x;
- `full`: the whole conversation, as for every turn without incremental tokenizing.

Both with the embedded tokenizer and, if it is present, with the one in $SHARED_DATA/tokenizers/qwen2.5.

`path` is the latency that a turn of a chat sees in a node that is a process of its own: microseconds from just before
the last byte of the body is sent (the rest has been sent before) to the first byte at an engine. `relay` is the same
for a process that only reads a whole request and sends it on; `router` is the difference of the medians.
Goal: at most 300 us through the node, with `tokenized_first` 0, which means that no request waited for its tokens.
"""

from __future__ import annotations

import json
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

import orjson
from tokenizers import Tokenizer

from benchmarks.harness.bench import command_line, data_folder, finish, percentiles
from benchmarks.harness.processes import Target, free_port, node, process
from benchmarks.harness.stub_engine import ANSWER, INFORMATION, chat_request, read_message
from cluster.load import chats as lab_chats
from ranvier_py.core.prompts.boundaries import Chat, Message
from ranvier_py.io.tokenizer import EMBEDDED, ChatTokenizer

HISTORY_TOKENS = (2_000, 10_000, 50_000)
TURN_ROUNDS = 20  # rounds of a single turn, which is short, per round of a whole conversation
SEED = 1
CHATS = 16  # chats that continue in turn, so that none grows much
TURNS = 8  # measured turns of each chat
LEARNED_S = 60.0  # longest wait until all histories are learned
ENGINES = 2
KIND = "last_byte_busy"

GOALS = {"tail_to_text_alone": 1.5, "last_byte_p50_us": 300}
MATCHED = re.compile(rb"x-ranvier-matched-tokens: (\d+)")


def median_s(rounds: int, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each call. Each round does one of each, in alternating order, to be fair."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in sorted(calls, reverse=turn % 2 == 1):
            begin = perf_counter()
            calls[name]()
            times[name].append(perf_counter() - begin)
    return {name: median(found) for name, found in times.items()}


class Texts:
    """Makes running text of the lab's chats."""

    def __init__(self) -> None:
        self._rng = Random(SEED)
        self._grammar = lab_chats.read_grammar()

    def of(self, characters: int) -> str:
        found = ""
        while len(found) < characters:
            found += " ".join(str(message["content"]) for message in self._chat()) + " "
        return found[:characters]

    def _chat(self) -> Sequence[Message]:
        return lab_chats.chat(self._grammar, 0, 8, self._rng)

    def turn(self, characters_per_token: float) -> list[Message]:
        """Return an answer of about 200 tokens, and the next question of about 50."""
        return [
            {"role": "assistant", "content": self.of(int(200 * characters_per_token))},
            {"role": "user", "content": self.of(int(50 * characters_per_token))},
        ]


def history(tokenizer: ChatTokenizer, texts: Texts, tokens: int) -> list[Message]:
    """Return a chat of about `tokens` tokens that ends with a question."""
    messages: list[Message] = [{"role": "system", "content": texts.of(2_000)}, {"role": "user", "content": "Hello."}]
    while len(tokenizer.tokenize(Chat(messages)).ids) < tokens:
        for _ in range(max(1, tokens // 2_000)):
            messages.extend(texts.turn(tokenizer.facts.chars_per_token))
    return messages


def measure_turn(tokenizer: ChatTokenizer, bare: Tokenizer, texts: Texts, tokens: int, rounds: int) -> dict[str, Any]:
    known = history(tokenizer, texts, tokens)
    tail = texts.turn(tokenizer.facts.chars_per_token)
    whole = Chat([*known, *tail])
    contents = [str(message["content"]) for message in tail]
    encode(bare, [tokenizer.render(Chat(known), generation=False)])  # the library caches words: now both know them
    calls: dict[str, Callable[[], object]] = {
        "tail": lambda: tokenizer.tokenize_tail(tail, lambda: whole, len(known)),
        "text_alone": lambda: encode(bare, contents),
    }
    times = median_s(rounds * TURN_ROUNDS, calls) | median_s(rounds, {"full": lambda: tokenizer.tokenize(whole)})
    found = tokenizer.tokenize_tail(tail, lambda: whole, len(known))
    assert found is not None, tokenizer.facts.probe_report
    return {
        "history_tokens": len(tokenizer.tokenize(Chat(known)).ids),
        "history_messages": len(known),
        "tail_tokens": len(found.ids),
        **{f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in times.items()},
        "tail_to_text_alone": round(times["tail"] / times["text_alone"], 3),
        "full_to_tail": round(times["full"] / times["tail"], 1),
    }


# --- the path of a request ------------------------------------------------------------------------------------------


class Engine(socketserver.ThreadingTCPServer):
    """A stub engine that answers at once, and notes when the first byte of the last POST came."""

    daemon_threads = True
    first_byte_ns = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AnswerHandler)
        self.port = int(self.server_address[1])


class AnswerHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            first = self.request.recv(1 << 18)
            came = perf_counter_ns()
            if first.startswith(b"POST"):
                Engine.first_byte_ns = came
            if not read_message(self.request, first):
                return
            self.request.sendall(ANSWER if first.startswith(b"POST") else INFORMATION)


def relay(port: int, engine_port: int) -> None:
    """Do the least that a router does: read a request, forward it, return the answer. One connection at a time."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            client, _ = listener.accept()
            with client, connection(engine_port) as engine:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while request := read_message(client):
                    engine.sendall(request)
                    client.sendall(read_message(engine))


def connection(port: int) -> socket.socket:
    """Connect to a port of this machine, without send delay; retry while its server starts. Raises TimeoutError."""
    for _ in range(100):
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.1)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    raise TimeoutError(f"nobody listens on port {port}")


@dataclass(frozen=True, slots=True)
class Paths:
    """Connections to the node and to the relay, and the node itself."""

    node: socket.socket
    relay: socket.socket
    target: Target

    def tokenizer_counts(self) -> Mapping[str, int]:
        found: dict[str, int] = json.loads(self.target.see("/admin/routes"))["tokenizer_worker"]
        return found

    def wait_until_learned(self) -> None:
        """Wait until nothing has been learned for a second and nothing is queued. Raises TimeoutError."""
        until, before = time.monotonic() + LEARNED_S, {"queued": 1}
        while (now := dict(self.tokenizer_counts())) != before or now["queued"]:
            if time.monotonic() > until:
                raise TimeoutError(f"still learning after {LEARNED_S:.0f} s: {now}")
            before = now
            time.sleep(1.0)


@contextmanager
def paths(source: Path) -> Iterator[Paths]:
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine()) for _ in range(ENGINES)]
        for engine in engines:
            threading.Thread(target=engine.serve_forever, daemon=True).start()
            stack.callback(engine.shutdown)
        urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
        target, relay_port = stack.enter_context(node(urls, source, "--debug-headers")), free_port()
        bare = ["-m", "benchmarks.tokenize", "--relay", str(relay_port), str(engines[0].port)]
        stack.enter_context(process([sys.executable, *bare]))
        ports = (int(target.url.rpartition(":")[2]), relay_port)
        through = [stack.enter_context(connection(port)) for port in ports]
        yield Paths(through[0], through[1], target)


def request_of(messages: Sequence[Message]) -> bytes:
    return chat_request(orjson.dumps({"model": "m", "messages": messages}))


def send(sock: socket.socket, data: bytes) -> tuple[float, bytes]:
    """Send a request; return the microseconds until its first byte is at the engine, and the answer."""
    sock.sendall(data[:-1])
    begin = perf_counter_ns()
    sock.sendall(data[-1:])
    answer = read_message(sock)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return (Engine.first_byte_ns - begin) / 1e3, answer


def measure_path(through: Paths, tokenizer: ChatTokenizer, texts: Texts, tokens: int) -> dict[str, Any]:
    """Measure the latency of turns of chats of about `tokens` tokens, through the node and through the relay."""
    known = history(tokenizer, texts, tokens)
    chats = [[{"role": "system", "content": f"Chat {number} of {tokens}."}, *known] for number in range(CHATS)]
    for chat in chats:
        send(through.node, request_of(chat))
    through.wait_until_learned()
    before = through.tokenizer_counts()
    times: dict[str, list[float]] = {}
    matched = []
    for _ in range(TURNS):
        for chat in chats:
            chat.append({"role": "assistant", "content": "hello"})
            chat.append({"role": "user", "content": texts.of(int(50 * tokenizer.facts.chars_per_token))})
            data = request_of(chat)
            for name, sock in (("node", through.node), ("relay", through.relay)):
                waited, answer = send(sock, data)
                times.setdefault(f"{KIND}_{name}_us", []).append(waited)
                if found := MATCHED.search(answer):
                    matched.append(int(found[1]))
    after = through.tokenizer_counts()
    result: dict[str, Any] = {
        "history_tokens": tokens,
        "body_bytes": len(data),
        "matched_tokens_min": min(matched),
        "tokenized_first": after["tokenized_first"] - before["tokenized_first"],
        "deadlines_missed": after["deadlines_missed"] - before["deadlines_missed"],
        **{name: percentiles(found, 1) for name, found in times.items()},
    }
    share = result[f"{KIND}_node_us"]["p50"] - result[f"{KIND}_relay_us"]["p50"]
    return result | {f"{KIND}_router_us": round(share, 1)}


# --- all of it ------------------------------------------------------------------------------------------------------


def measure(name: str, source: Path, rounds: int) -> dict[str, Any]:
    tokenizer = ChatTokenizer.load(str(source))
    bare = Tokenizer.from_file(str(source / "tokenizer.json"))
    texts = Texts()
    turns = [measure_turn(tokenizer, bare, texts, tokens, rounds) for tokens in HISTORY_TOKENS]
    with paths(source) as through:
        path = [measure_path(through, tokenizer, texts, tokens) for tokens in HISTORY_TOKENS]
    return {
        "tokenizer": name,
        "chars_per_token": round(tokenizer.facts.chars_per_token, 2),
        "turns": turns,
        "path": path,
    }


def encode(bare: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in bare.encode_batch_fast(texts, add_special_tokens=False)]


def sources() -> list[tuple[str, Path]]:
    data = data_folder() / "tokenizers" / "qwen2.5"
    return [("embedded", EMBEDDED), *([("qwen2.5", data)] if data.is_dir() else [])]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--relay", type=int, nargs=2, metavar=("PORT", "ENGINE_PORT"), help="be the relay")
    arguments = parser.parse_args()
    if arguments.relay:
        relay(*arguments.relay)
    tokenizers = [measure(name, source, arguments.rounds) for name, source in sources()]
    return finish("tokenize", arguments, {"goals": GOALS, "tokenizers": tokenizers})


if __name__ == "__main__":
    sys.exit(main())
