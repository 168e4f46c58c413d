"""Real engines and nodes as processes on loopback, and a client that says what each answer took and found."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import orjson
import trio
from tokenizers import Tokenizer

from tests.engines.environments import ROOT, environment_of, python_of
from tests.engines.records import ENVIRONMENT, HERE

MODEL = "mid"
START_S_MAX = 240.0  # two engines at once on a machine that does other things, too
BLOCK_TOKENS = 32  # vLLM on a CPU takes multiples of 32 alone
NICE = ("nice", "-n", "10")


def free_port() -> int:
    """Below the range from which outgoing connections take theirs."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port


def model_directory() -> Path:
    """Made once, and kept with the environment that made it."""
    place = environment_of("vllm") / "models" / MODEL
    if not (place / "config.json").exists():
        command = (*NICE, python_of("vllm"), HERE / "make_model.py", place)
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, capture_output=True)
    return place


class Process:
    """One process in a group of its own, with its log."""

    def __init__(self, command: Sequence[object], log: Path, environment: Mapping[str, str] = {}) -> None:
        self.log = log
        with log.open("ab") as output:
            self.running = subprocess.Popen(
                [str(word) for word in (*NICE, *command)],
                env={**os.environ, **ENVIRONMENT, **environment},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=ROOT,
            )

    def end(self, how: signal.Signals = signal.SIGTERM, within_s: float = 15.0) -> None:
        """The whole group: an engine is several processes."""
        for each in (how, signal.SIGKILL):
            try:
                os.killpg(self.running.pid, each)
                self.running.wait(within_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def answers(self, url: str, holds: Callable[[httpx.Response], bool] = lambda answer: answer.is_success) -> None:
        """Wait until it does. Fails with the end of the log when it does not, or when the process ends."""
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline and self.running.poll() is None:
            try:
                if holds(httpx.get(url, timeout=5.0, trust_env=False)):
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.25)
        raise AssertionError(f"{url} does not answer:\n{self.log.read_text(errors='replace')[-3000:]}")


class Vllm:
    """One engine. Its ports stay its own when it is started again."""

    def __init__(self, name: str, blocks: int, folder: Path) -> None:
        self.name, self.blocks, self.folder = name, blocks, folder
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
            "topic": "kv",
        }
        command = (
            *(python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model_directory()),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", self.port, "--max-model-len", 4096),
            *("--block-size", BLOCK_TOKENS, "--num-gpu-blocks-override", self.blocks, "--max-num-seqs", 8),
            *("--enforce-eager", "--dtype", "float32", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", orjson.dumps(events).decode()),
        )
        here = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
        self.process = Process(command, self.folder / f"engine-{self.name}.log", here)

    def ready(self) -> None:
        self.process.answers(f"{self.url}/health")

    def counter(self, name: str) -> float:
        """The sum of a counter in its metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10.0, trust_env=False).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


class RanvierNode:
    """`ranvier serve` in front of engines, in one cluster with others."""

    def __init__(
        self, name: str, engines: Mapping[str, str], folder: Path, policy: str, join: Sequence[str], *more: str
    ) -> None:
        port, control, self.gossip = free_port(), free_port(), f"127.0.0.1:{free_port()}"
        self.url, self.control = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control}"
        words: list[object] = [Path(sys.executable).parent / "ranvier", "serve"]
        words += ["--listen", f"127.0.0.1:{port}", "--control", f"127.0.0.1:{control}", "--policy", policy]
        words += ["--gossip", self.gossip, "--insecure-gossip", "--node-name", name]
        words += ["--debug-headers", "--tokenizer", model_directory(), "--probe-interval-s", "1", *more]
        for place in join:
            words += ["--join", place]
        for engine, url in engines.items():
            words += ["--backend", f"{url},name={engine}"]
        self.process = Process(words, folder / f"node-{name}-{policy}.log")

    def ready(self, backends: int) -> None:
        self.process.answers(f"{self.control}/readyz")
        self.until("/admin/backends", lambda view: len(view["backends"]) == backends)

    def ask(self, path: str) -> Any:
        return httpx.get(f"{self.control}{path}", timeout=10.0, trust_env=False).json()

    def until(self, path: str, holds: Callable[[Any], bool], within_s: float = 60.0) -> Any:
        deadline = time.monotonic() + within_s
        while True:
            found = self.ask(path)
            if holds(found):
                return found
            assert time.monotonic() < deadline, f"{path} stays {str(found)[:2000]}"
            time.sleep(0.25)


@contextmanager
def started(folder: Path) -> Iterator[Callable[[Process], None]]:
    """Call with each process; all of them end at the end."""
    with ExitStack() as stack:
        yield lambda process: stack.callback(process.end) and None


@dataclass(slots=True)
class Served:
    """One answer as its client saw it."""

    backend: str
    reason: str
    predicted_tokens: int  # that the node said it would find
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str

    def usable_tokens(self, block_tokens: int) -> int:
        """Of the predicted: whole blocks of the engine, and never the last token of the prompt."""
        return min(self.predicted_tokens, self.prompt_tokens - 1) // block_tokens * block_tokens


@cache
def plain_tokens() -> tuple[int, ...]:
    """Tokens that are a word each. A text of them is cut into the same tokens again, as that of a trained model nearly
    always is, and that of random weights never."""
    tokenizer = Tokenizer.from_file(str(model_directory() / "tokenizer.json"))
    words = [(name[1:], number) for name, number in sorted(tokenizer.get_vocab().items()) if name[:1] == "\u0120"]
    return tuple(number for word, number in words if word.isalpha() and tokenizer.encode(f" {word}").ids == [number])[
        :256
    ]


async def ask(http: httpx.AsyncClient, url: str, messages: Sequence[Mapping[str, str]], tokens: int = 24) -> Served:
    body = {
        "model": MODEL,
        "messages": list(messages),
        "max_tokens": tokens,
        "ignore_eos": True,
        "allowed_token_ids": plain_tokens(),
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, text, usage = time.monotonic(), 0.0, "", {}
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread())[:500]
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = orjson.loads(line[6:])
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece and not first:
                first = time.monotonic() - start
            text += piece
            usage = chunk.get("usage") or usage
        heads = answer.headers
    details = usage.get("prompt_tokens_details") or {}
    return Served(
        heads["x-ranvier-backend"],
        heads["x-ranvier-reason"],
        int(heads["x-ranvier-matched-tokens"]),
        usage["prompt_tokens"],
        details.get("cached_tokens") or 0,
        first,
        text,
    )


class Chats:
    """Chats that share system prompts, and go on turn by turn, each turn by another node."""

    def __init__(self, seed: int, count: int, *, systems: int = 3, system_words: int = 350) -> None:
        self.rng = random.Random(seed)
        self.words = [
            f"{a}{b}" for a in ("read", "write", "list", "string", "open") for b in ("er", "ing", "s", "_to", "")
        ]
        opening = [self.announce(system_words) for _ in range(systems)]
        self.chats = [[{"role": "system", "content": opening[number % systems]}] for number in range(count)]

    def announce(self, words: int) -> str:
        return " ".join(self.rng.choice(self.words) for _ in range(words))

    async def run(self, urls: Sequence[str], turns: int, *, users: int = 3, pause_s: float = 0.7) -> list[Served]:
        """All chats, `users` at a time, each with so many turns more."""
        found: list[Served] = []
        left = list(enumerate(self.chats))
        self.rng.shuffle(left)

        async def user() -> None:
            while left:
                number, messages = left.pop()
                for turn in range(turns):
                    messages.append({"role": "user", "content": self.announce(self.rng.randrange(30, 120))})
                    served = await ask(http, urls[(number + turn) % len(urls)], messages)
                    messages.append({"role": "assistant", "content": served.text})
                    found.append(served)
                    await trio.sleep(self.rng.uniform(0.5, 1.5) * pause_s)

        async with httpx.AsyncClient(timeout=120.0, trust_env=False) as http, trio.open_nursery() as nursery:
            for _ in range(users):
                nursery.start_soon(user)
        return found


@dataclass(slots=True)
class Share:
    """Predicted against cached, over many answers, in tokens."""

    answers: int
    prompt_tokens: int
    predicted: int
    cached: int
    right: int
    first_p50_ms: float
    first_p95_ms: float
    wrong: list[str]  # what was predicted otherwise than it was, for whoever reads why a test failed

    @property
    def precision(self) -> float:
        return self.right / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.right / self.cached if self.cached else 1.0

    def row(self, name: str) -> str:
        return (
            f"{name:34} {self.answers:4} answers  {self.prompt_tokens:7} prompt tokens  cached {self.cached:7}"
            f"  precision {self.precision:.4f}  recall {self.recall:.4f}"
            f"  first token p50 {self.first_p50_ms:6.0f} ms  p95 {self.first_p95_ms:6.0f} ms"
        )


def share_of(several: Sequence[Served], block_tokens: int = BLOCK_TOKENS) -> Share:
    waits = sorted(each.first_token_s * 1000 for each in several)
    pairs = [(each.usable_tokens(block_tokens), each.cached_tokens) for each in several]
    return Share(
        len(several),
        sum(each.prompt_tokens for each in several),
        sum(usable for usable, _ in pairs),
        sum(cached for _, cached in pairs),
        sum(min(pair) for pair in pairs),
        waits[len(waits) // 2],
        waits[int(len(waits) * 0.95)],
        [
            f"{each.backend} {each.reason}: predicted {usable}, cached {cached} of {each.prompt_tokens}"
            for each, (usable, cached) in zip(several, pairs, strict=True)
            if usable != cached
        ],
    )
