"""How fast a request gets through: this node, the Rust routers, and no router at all.

    python -m benchmarks.data_plane [--rounds 3] [--seconds 3] [--tokenizer embedded] [--peers-dir DIR] [--only NAME …]

Everything runs on this machine at once: two stub engines, each router with both as its backends, and `wrk` as load. In
each round every target takes its turn at every case, so that what else the machine does hits all alike. The medians
over the rounds and their ratios to this node are the result; the ratios mean more than the numbers.

Cases: 16 connections with chats of 3 kB and of 60 kB, each request with a message nobody has seen; the same as streams
of 100 chunks, which the engine writes at once, one by one back to back, or in ten steps; and one connection, whose
latency beyond the direct one is what the router adds. `processor_us` is the router's own processor time for a request.
The other routers are installed in environments of their own under --peers-dir, and left out where that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import ROOT, write_result

SCRIPT = ROOT / "benchmarks" / "lua" / "chat_fresh.lua"
READY_S = 60.0
"""Longest start of a router: the Rust ones take seconds to register their workers."""

WARM_UP_S = 3.0
"""Long enough to tokenize 64 histories of 60 kB once, 1 MB/s being the tokenizer's speed beside the load."""

NODE, DIRECT, WORKERS = "ranvier_py", "direct", "ranvier_py, 2 workers"
"""Workers are two nodes that share the port: the Rust routers use both cores here, one node of ours one."""


class Target(NamedTuple):
    """What is under load: where, and whose processor time that costs (None: nobody's)."""

    url: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    connections: int
    history_bytes: int
    manner: str = ""  # how engines write a stream: at_once, in single writes, in steps; "" is no stream


CASES = (
    Case("chat_3kB", 16, 3_000),
    Case("chat_60kB", 16, 60_000),
    Case("stream_100_chunks", 16, 3_000, manner="at_once"),
    Case("stream_100_writes", 16, 3_000, manner="writes"),
    Case("stream_in_10_steps", 16, 3_000, manner="steps"),
    Case("one_connection", 1, 3_000),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A router to compare with: what to install, and how to start it."""

    name: str
    package: str
    command: Callable[[Path, int, int], list[str]]


def sglang_command(bin_dir: Path, port: int, metrics_port: int) -> list[str]:
    return [
        *(str(bin_dir / "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", "cache_aware", "--log-level", "warn", "--worker-urls"),
    ]


def smg_command(bin_dir: Path, port: int, metrics_port: int) -> list[str]:
    return [
        *(str(bin_dir / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", "cache_aware", "--disable-tokenizer-autoload", "--log-level", "warn", "--worker-urls"),
    ]


PEERS = (
    Peer("smg 1.13.0", "smg==1.13.0", smg_command),
    Peer("sglang-router 0.3.2", "sglang-router==0.3.2", sglang_command),
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def installed(peer: Peer, peers_dir: Path) -> Path:
    """The bin directory of the peer's environment, made when absent. Raises CalledProcessError, OSError."""
    place = peers_dir / peer.package.replace("==", "-")
    done = place / "installed"
    if not done.exists():
        subprocess.run((sys.executable, "-m", "venv", "--clear", place), check=True)
        pip = (place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, peer.package), check=True)
        done.touch()
    return place / "bin"


@contextmanager
def process(command: list[str], **environment: str) -> Iterator[int]:
    """A process that ends with the block; gives its id."""
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield running.pid
    finally:
        running.terminate()
        try:
            running.wait(5)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def await_answer(url: str, enough: Callable[[bytes], bool] = lambda _: True) -> None:
    """Until the URL answers 200 with enough. Raises TimeoutError."""
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


@contextmanager
def engines(count: int) -> Iterator[list[str]]:
    ports = [free_port() for _ in range(count)]
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(process([sys.executable, "-m", "benchmarks.stub_engine", str(port)]))
            await_answer(f"http://127.0.0.1:{port}/health")
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextmanager
def node(urls: list[str], tokenizer: str, *more: str) -> Iterator[Target]:
    port, control = free_port(), free_ports(2)
    command = [sys.executable, "-m", "ranvier_py", "serve", "--listen", f"127.0.0.1:{port}"]
    command += ["--control", f"127.0.0.1:{control}", "--tokenizer", tokenizer, "--policy", "affinity"]
    command += ["--log-level", "warning", *more]  # as the other routers are told
    for url in urls:
        command += ["--backend", url]
    with process(command) as pid:
        for number in range(2 if "--workers" in more else 1):
            await_answer(f"http://127.0.0.1:{control + number}/readyz")
        yield Target(f"http://127.0.0.1:{port}", pid)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        try:
            with ExitStack() as stack:
                for number in range(count):
                    stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
        except OSError:
            continue
        return first


@contextmanager
def peer_router(peer: Peer, bin_dir: Path, urls: list[str]) -> Iterator[Target]:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with process([*peer.command(bin_dir, port, free_port()), *urls]) as pid:
        await_answer(f"{base}/workers", lambda body: body.count(b'"url"') >= len(urls))
        await_answer(f"{base}/readiness")
        yield Target(base, pid)


def load(target: Target, case: Case, seconds: float) -> dict[str, float]:
    """One run of wrk: requests/s, p50 and p99 in µs, failures, and the target's processor time in µs a request."""
    command = ["wrk", "-t1", f"-c{case.connections}", f"-d{max(1, round(seconds))}s", "-s", str(SCRIPT)]
    command += [f"{target.url}/v1/chat/completions", "--", str(case.history_bytes), "stream" if case.manner else ""]
    used_s = processor_s(target.pid)
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used_s = processor_s(target.pid) - used_s
    found = json.loads(output.split("RESULT ", 1)[1])
    found["per_s"] = found["requests"] / found["seconds"]
    found["processor_us"] = used_s / max(1, found["requests"]) * 1e6
    return dict(found)


def processor_s(pid: int | None) -> float:
    """Processor time of a process and of its children's so far; 0 without one."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own_s + sum(processor_s(int(child)) for child in children)


def tell(engine_urls: list[str], case: Case) -> None:
    """Have the engines stream as the case wants it: over their own port, for not every router passes fields on."""
    for url in engine_urls:
        await_answer(f"{url}/manner/{case.manner or 'at_once'}")


def measure(targets: dict[str, Target], engine_urls: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """By case and target: medians over the rounds, and all of them."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {case.name: {name: [] for name in targets} for case in CASES}
    for case in CASES:  # nobody is measured cold: each target has met the histories of each case
        tell(engine_urls, case)
        for target in targets.values():
            load(target, case, WARM_UP_S)
    for number in range(rounds):
        for case in CASES:
            tell(engine_urls, case)
            for name, target in targets.items():
                runs[case.name][name].append(load(target, case, seconds))
                best = runs[case.name][name][-1]
                print(
                    f"round {number + 1} {case.name:18} {name:20} {best['per_s']:9.0f}/s"
                    f"  p50 {best['p50_us']:6.0f} µs  p99 {best['p99_us']:6.0f} µs  failed {best['failed']}"
                )
    return {case: {name: summed(each) for name, each in by_name.items()} for case, by_name in runs.items()}


def summed(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "per_s": round(statistics.median(run["per_s"] for run in runs), 1),
        "p50_us": statistics.median(run["p50_us"] for run in runs),
        "p99_us": statistics.median(run["p99_us"] for run in runs),
        "processor_us": round(statistics.median(run["processor_us"] for run in runs), 1),
        "failed": sum(run["failed"] for run in runs),
        "per_s_rounds": [round(run["per_s"], 1) for run in runs],
    }


def compared(cases: dict[str, Any]) -> dict[str, Any]:
    """This node against each peer: throughput as a ratio (above 1 is faster), added latency in µs side by side."""
    found: dict[str, Any] = {}
    for case, by_name in cases.items():
        if NODE not in by_name:
            continue
        ours = by_name[NODE]["per_s"]
        others = {name: each for name, each in by_name.items() if name != NODE}
        found[case] = {f"times {name}": round(ours / each["per_s"], 2) for name, each in others.items()}
    if DIRECT in cases["one_connection"]:
        one = cases["one_connection"]
        found["added_latency_us"] = {
            name: {key: each[key] - one[DIRECT][key] for key in ("p50_us", "p99_us")}
            for name, each in one.items()
            if name != DIRECT
        }
    return found


def main() -> None:
    options = read_options()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing: apt-get install wrk")
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        urls = stack.enter_context(engines(2))
        targets = {DIRECT: Target(urls[0])}
        workers = ("--workers", "2", "--gossip", f"127.0.0.1:{free_ports(2)}")
        ours = (
            (NODE, node(urls, options.tokenizer)),
            (WORKERS, node(urls, options.tokenizer, *workers)),
        )
        for name, started in ours:
            if not options.only or name in options.only:
                targets[name] = stack.enter_context(started)
        for peer in PEERS:
            if options.only and not any(peer.name.startswith(name) for name in options.only):
                continue
            try:
                targets[peer.name] = stack.enter_context(peer_router(peer, installed(peer, options.peers_dir), urls))
            except (OSError, subprocess.CalledProcessError) as error:  # TimeoutError is an OSError
                left_out[peer.name] = str(error)
                print(f"left out: {peer.name}: {error}")
        cases = measure(targets, urls, options.rounds, options.seconds)
    result = {
        "question": "requests/s and added latency of this node beside other routers and none",
        "rounds": options.rounds,
        "seconds": options.seconds,
        "tokenizer": Path(options.tokenizer).name,
        "cases": cases,
        "compared": compared(cases),
        "left_out": left_out,
    }
    print(json.dumps(result["compared"], indent=2, ensure_ascii=False))
    if not options.dry:
        print(write_result("data_plane", result))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--tokenizer", default="embedded", help="as of `ranvier serve`")
    parser.add_argument("--peers-dir", type=Path, default=Path.home() / ".cache" / "ranvier-peers")
    parser.add_argument("--only", nargs="*", default=[], help="targets to measure; all by default")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
