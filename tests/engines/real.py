"""Real engines and nodes as processes on loopback."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson

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


class EngineKind(NamedTuple):
    """What an engine serves. `made` are words of `make_model.py`, `served` of vLLM."""

    name: str
    block_tokens: int
    made: tuple[str, ...]
    served: tuple[str, ...]


ATTENTION = EngineKind(
    "attention", BLOCK_TOKENS, ("--layers", "8", "--width", "512"), ("--block-size", str(BLOCK_TOKENS))
)
HYBRID = EngineKind(
    "hybrid",
    192,
    ("--kind", "hybrid", "--layers", "3", "--width", "256"),
    # no more than a block at once: vLLM's kernel for CPUs gives no state from within a step
    ("--block-size", "64", "--mamba-cache-mode", "align", "--max-num-batched-tokens", "192"),
)
"""vLLM makes blocks of attention as large as a state, which is that of 192 tokens here."""


def model_directory(kind: EngineKind = ATTENTION) -> Path:
    """Made once, and kept with the environment that made it."""
    digest = sha256((HERE / "make_model.py").read_bytes() + repr(kind.made).encode()).hexdigest()[:12]
    place = environment_of("vllm") / "models" / f"{kind.name}-{digest}"
    if not (place / "config.json").exists():
        command = (*NICE, python_of("vllm"), HERE / "make_model.py", place, *kind.made)
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

    def __init__(self, name: str, blocks: int, folder: Path, kind: EngineKind = ATTENTION) -> None:
        self.name, self.blocks, self.folder, self.kind = name, blocks, folder, kind
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
            *(python_of("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", model_directory(self.kind)),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", self.port, "--max-model-len", 4096),
            *("--num-gpu-blocks-override", self.blocks, "--max-num-seqs", 8, *self.kind.served),
            *("--enforce-eager", "--dtype", "float32", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", orjson.dumps(events).decode()),
        )
        here = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
        here["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
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
