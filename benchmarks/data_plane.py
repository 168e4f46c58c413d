"""How fast does a request get through: with this node, with the Rust routers, and without a router?

    python -m benchmarks.data_plane [--rounds 3] [--seconds 3] [--tokenizer embedded] [--peers-dir DIR] [--only NAME …]

Each router has the same two stub engines as backends, and `wrk` makes the load. In each round the targets take turns in
every case, so that other work of the machine affects all alike. The result has the medians over the rounds, and their
ratios to this node. All targets log at level info, into files. Processor time is that of all processes of a target; the
part of its child processes (our tokenizer, our workers) is shown as well. The other routers are installed in
environments of their own, and left out if that fails.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.bench import command_line, finish, show, show_row
from benchmarks.harness.processes import (
    PEERS,
    PEERS_DIR,
    Target,
    free_port,
    installed,
    load,
    need_wrk,
    node,
    peer_router,
    stub_engines,
    wait_for_answer,
)

FIGURES = ("per_s", "p50_us", "p99_us", "processor_us", "children_us")

WARM_UP_S = 3.0
"""Long enough to tokenize 64 histories of 60 kB once, at 1 MB/s, the tokenizer's speed under load."""

NODE, DIRECT, WORKERS = "ranvier_py", "direct", "ranvier_py, 2 workers"
"""Two workers are two nodes that share the port. The Rust routers use both cores here; one node of ours uses one."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    connections: int
    history_bytes: int
    manner: str = ""  # how engines write a stream (at_once, writes, steps); "": no stream


CASES = (
    Case("chat_3kB", 16, 3_000),
    Case("chat_60kB", 16, 60_000),
    Case("stream_100_chunks", 16, 3_000, manner="at_once"),
    Case("stream_100_writes", 16, 3_000, manner="writes"),
    Case("stream_in_10_steps", 16, 3_000, manner="steps"),
    Case("one_connection", 1, 3_000),
)

API_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
API_BYTES = (3_000, 60_000)
API_ROUNDS = 4  # runs per round: the differences that matter are a few µs


def run_of(target: Target, case: Case, seconds: float) -> dict[str, float]:
    return load(target, case.connections, seconds, case.history_bytes, "stream" if case.manner else "")


def set_manner(engine_urls: Sequence[str], case: Case) -> None:
    """Tell the engines how to stream in this case, directly: not every router passes such a field on."""
    for url in engine_urls:
        wait_for_answer(f"{url}/manner/{case.manner or 'at_once'}")


def measure(targets: Mapping[str, Target], engine_urls: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Return, by case and target, the medians over the rounds, and the throughput of every round."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {case.name: {name: [] for name in targets} for case in CASES}
    for case in CASES:  # warm-up: each target has seen the histories of each case before it is measured
        set_manner(engine_urls, case)
        for target in targets.values():
            run_of(target, case, WARM_UP_S)
    for number in range(rounds):
        for case in CASES:
            set_manner(engine_urls, case)
            for name, target in targets.items():
                run = run_of(target, case, seconds)
                runs[case.name][name].append(run)
                show_row({"round": number + 1, "case": case.name, "target": name, **run})
    return {case: {name: summed(each) for name, each in by_name.items()} for case, by_name in runs.items()}


def summed(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(run[name] for run in runs), 1) for name in FIGURES}
    return {
        **medians,
        "failed": sum(run["failed"] for run in runs),
        "per_s_rounds": [round(run["per_s"], 1) for run in runs],
    }


def measure_apis(urls: list[str], tokenizer: str | Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the processor time in µs that a request costs a node by each API: its median, and the median of its ratios
    to that of chats in the same turn, since other work of the machine affects both alike.

    Each API has its own node: otherwise what one API's node learns later would be counted for the next API.
    """
    found: dict[str, Any] = {}
    for size in API_BYTES:
        spent: dict[str, list[float]] = {path: [] for path in API_PATHS}
        with ExitStack() as stack:
            targets = {path: stack.enter_context(node(urls, tokenizer)) for path in API_PATHS}
            for number in range(-1, API_ROUNDS * rounds):
                for path, target in targets.items():
                    manner = path.rpartition("/")[2]
                    run = load(target, 16, WARM_UP_S if number < 0 else seconds, size, manner, path)
                    assert not run["failed"], "nothing fails where nothing is amiss"
                    if number >= 0:
                        spent[path].append(run["processor_us"])
        chats = spent[API_PATHS[0]]
        for path, each in spent.items():
            ratio = statistics.median(own / chat for own, chat in zip(each, chats, strict=True))
            times = {"processor_us": round(statistics.median(each), 1), "times_chat": round(ratio, 3)}
            found[f"{path}, {size // 1000} kB"] = times
            show_row({"api": path, "bytes": size, **times})
    return found


def compared(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Compare this node with each other target: ratios of throughput (above 1: faster), and added latencies in µs."""
    found: dict[str, Any] = {}
    for case, by_name in cases.items():
        if NODE in by_name:
            ours = by_name[NODE]["per_s"]
            others = {name: each for name, each in by_name.items() if name != NODE}
            found[case] = {f"times {name}": round(ours / each["per_s"], 2) for name, each in others.items()}
    one = cases["one_connection"]
    if DIRECT in one:
        found["added_latency_us"] = {
            name: {key: each[key] - one[DIRECT][key] for key in ("p50_us", "p99_us")}
            for name, each in one.items()
            if name != DIRECT
        }
    return found


def start_targets(
    stack: ExitStack, urls: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, Target], dict[str, str]]:
    """Start what is compared. Returns the targets, and why others were left out."""
    targets, left_out = {DIRECT: Target(urls[0])}, {}
    workers = ("--workers", "2", "--gossip", f"127.0.0.1:{free_port(2)}")
    for name, more in ((NODE, ()), (WORKERS, workers)):
        if not arguments.only or name in arguments.only:
            targets[name] = stack.enter_context(node(urls, arguments.tokenizer, *more))
    for peer in PEERS:
        if arguments.only and not any(peer.name.startswith(name) for name in arguments.only):
            continue
        try:
            bin_dir = installed(peer, arguments.peers_dir)
            targets[peer.name] = stack.enter_context(peer_router(peer, bin_dir, urls))
        except (OSError, subprocess.CalledProcessError) as error:  # TimeoutError is an OSError
            left_out[peer.name] = str(error)
            show(f"left out: {peer.name}: {error}")
    return targets, left_out


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--tokenizer", type=Path, default="embedded", help="as of `ranvier serve`")
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR)
    parser.add_argument("--only", nargs="*", default=[], help="targets to measure; all by default")
    arguments = parser.parse_args(argv)
    need_wrk()
    with ExitStack() as stack:
        urls = stack.enter_context(stub_engines(2))
        targets, left_out = start_targets(stack, urls, arguments)
        cases = measure(targets, urls, arguments.rounds, arguments.seconds)
        apis = measure_apis(urls, arguments.tokenizer, arguments.rounds, arguments.seconds) if NODE in targets else {}
    result = {"cases": cases, "apis": apis, "compared": compared(cases), "left_out": left_out}
    for case, by_name in cases.items():
        for name, each in by_name.items():
            show(f"{case:18} {name:22}" + "".join(f"{each[figure]:9.0f} {figure}" for figure in FIGURES))
    show_row(result["compared"])
    return finish("data_plane", arguments, result)


if __name__ == "__main__":
    sys.exit(main())
