"""Runs the processes of a benchmark on this machine: stub engines, our nodes, other routers and load; measures them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import NamedTuple

from benchmarks.harness.bench import ROOT
from cluster.processes.commands import join_flags, serve_argv

READY_S = 60.0
"""Seconds that a router may take to start: the Rust ones need some to register their workers."""

CHATS = ROOT / "benchmarks" / "lua" / "chat_fresh.lua"
PEERS_DIR = Path.home() / ".cache" / "ranvier-peers"


class Target(NamedTuple):
    """What is under load: its URL, the process whose time counts (None: no process), and a node's control port."""

    url: str
    pid: int | None = None
    control: str = ""

    def see(self, path: str) -> bytes:
        """Return a page of its control port."""
        with urllib.request.urlopen(f"{self.control}{path}", timeout=30) as answer:  # noqa: S310  # our own loopback
            return bytes(answer.read())


@contextmanager
def process(command: Sequence[str]) -> Iterator[int]:
    """Run a process until the end of the block, and delete its log then. Yields its id."""
    with TemporaryFile() as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            yield running.pid
        finally:
            running.terminate()
            try:
                running.wait(5)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def wait_for_answer(url: str, enough: Callable[[bytes], bool] = lambda _: True) -> None:
    """Wait until the URL answers 200 with a body that is `enough`. Raises TimeoutError."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310  # our own loopback address
                if enough(response.read()):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not get ready within {READY_S:.0f} s")


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = int(listener.getsockname()[1])
        try:
            with ExitStack() as stack:
                for number in range(1, count):
                    stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
        except OSError:
            continue
        return first


def processor_s(pid: int | None) -> float:
    """Return the processor time of a process and all its descendants so far; 0 without a process."""
    return sum(processor_parts_s(pid))


def processor_parts_s(pid: int | None) -> tuple[float, float]:
    """Return the processor time of a process itself, and that of its descendants."""
    if pid is None:
        return 0.0, 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = Path(f"/proc/{pid}/task").glob("*/children")  # of the thread that started them
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:
        return 0.0, 0.0
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s, sum(processor_s(int(child)) for child in children)


def running_s(pid: int | None) -> float:
    """Return how long a process's threads have run so far, to the nanosecond: the ticks of `processor_s` miss short
    turns. Threads that have ended and children are left out; 0 without a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat") if pid is not None else ()
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def load(
    target: Target, connections: int, seconds: float, body_bytes: int, manner: str, path: str = "/v1/chat/completions"
) -> dict[str, float]:
    """Run wrk once with chats of `body_bytes`. Returns requests/s, p50 and p99 in µs, failures, and the target's
    processor time in µs per request, of which `children_us` is its children's. `manner` is one of `chat_fresh.lua`."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(CHATS)]
    command += [f"{target.url}{path}", "--", str(body_bytes), manner]
    before_s = processor_parts_s(target.pid)
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    own_s, children_s = (after - before for after, before in zip(processor_parts_s(target.pid), before_s, strict=True))
    found: dict[str, float] = json.loads(output.split("RESULT ", 1)[1])
    requests = max(1, found["requests"])
    spent = {"processor_us": (own_s + children_s) / requests * 1e6, "children_us": children_s / requests * 1e6}
    return {**found, "per_s": found["requests"] / found["seconds"], **spent}


def need_wrk() -> None:
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing: apt-get install wrk")


# --- engines and nodes ------------------------------------------------------------------------------------------------


@contextmanager
def stub_engines(count: int) -> Iterator[list[str]]:
    """Run engines that only answer (`stub_engine`). Yields their URLs."""
    ports = [free_port() for _ in range(count)]
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(process([sys.executable, "-m", "benchmarks.harness.stub_engine", str(port)]))
            wait_for_answer(f"http://127.0.0.1:{port}/health")
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextmanager
def node(engine_urls: Sequence[str], tokenizer: str | Path, *more: str) -> Iterator[Target]:
    """Run a node with these engines, and with `more` flags of `ranvier serve`."""
    port, control = free_port(), free_port(2)
    as_the_others = ("--policy", "affinity", "--log-level", "info")
    flags = ("--tokenizer", str(tokenizer), *as_the_others, *more)
    command = serve_argv(f"127.0.0.1:{port}", f"127.0.0.1:{control}", engine_urls, flags)
    with process(command) as pid:
        for number in range(2 if "--workers" in more else 1):
            wait_for_answer(f"http://127.0.0.1:{control + number}/readyz")
        yield Target(f"http://127.0.0.1:{port}", pid, f"http://127.0.0.1:{control}")


@contextmanager
def peers(
    engine_urls: Sequence[str], count: int, key: str, *more: str, tokenizer: Path = Path("embedded")
) -> Iterator[list[Target]]:
    """Run `count` nodes of one cluster with this key; each joins all others."""
    gossips = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    with ExitStack() as stack:
        key_file = Path(stack.enter_context(TemporaryDirectory(prefix="ranvier-peers-"))) / "cluster.key"
        key_file.touch(mode=0o600)
        key_file.write_text(f"{key}\n")
        targets = []
        for gossip in gossips:
            flags = ["--gossip", gossip, "--cluster-key-file", str(key_file), *more]
            flags += join_flags(other for other in gossips if other != gossip)
            targets.append(stack.enter_context(node(engine_urls, tokenizer, *flags)))
        yield targets


# --- other routers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A router to compare with: what to install, and how to start it."""

    name: str
    package: str
    program: Sequence[str]  # of the environment's bin directory

    def command(self, bin_dir: Path, host: str, port: int, metrics_port: int) -> list[str]:
        """Return its command line, after which the engines' URLs follow."""
        return [
            *(str(bin_dir / self.program[0]), *self.program[1:]),
            *("--host", host, "--port", str(port), "--prometheus-host", host, "--prometheus-port", str(metrics_port)),
            *("--policy", "cache_aware", "--log-level", "info", "--worker-urls"),
        ]


SMG = Peer("smg 1.13.0", "smg==1.13.0", ("smg", "launch", "--disable-tokenizer-autoload"))
SGLANG = Peer("sglang-router 0.3.2", "sglang-router==0.3.2", ("python", "-m", "sglang_router.launch_router"))
PEERS = (SMG, SGLANG)


def installed(peer: Peer, peers_dir: Path) -> Path:
    """Return the bin directory of the peer's environment; make it if absent. Raises CalledProcessError, OSError."""
    place = peers_dir / peer.package.replace("==", "-")
    done = place / "installed"
    if not done.exists():
        subprocess.run((sys.executable, "-m", "venv", "--clear", place), check=True)
        pip = (place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, peer.package), check=True)
        done.touch()
    return place / "bin"


@contextmanager
def peer_router(peer: Peer, bin_dir: Path, engine_urls: Sequence[str], *more: str) -> Iterator[Target]:
    """Run another router, with `more` of its flags, and wait until it has registered all these engines."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with process([*peer.command(bin_dir, "127.0.0.1", port, free_port()), *engine_urls, *more]) as pid:
        wait_for_answer(f"{base}/workers", lambda body: body.count(b'"url"') >= len(engine_urls))
        wait_for_answer(f"{base}/readiness")
        yield Target(base, pid)


def mesh_flags(number: int, own: str, first: str) -> list[str]:
    """Return the flags by which smg's gateway `number` shares with others. `own` and `first`: HOST:PORT of its own mesh
    and of the first gateway's, which must be up before the others start."""
    host, _, port = own.rpartition(":")
    flags = ["--enable-mesh", "--mesh-server-name", f"smg-{number}", "--mesh-host", host]
    flags += ["--mesh-advertise-host", host, "--mesh-port", port]
    return [*flags, "--mesh-peer-urls", first] if number else flags
