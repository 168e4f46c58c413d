"""What the response cache costs and saves: a miss, a hit, and many equal requests at once.

    python -m benchmarks.response_cache [--rounds 5] [--seconds 2]

Two nodes before the same two stub engines, one with `--response-cache`, take turns under the load of `wrk` with 16
connections and chats of 3 kB at temperature 0. With messages that nobody has seen every request is a miss: the
difference in processor time is what looking, keeping and sharing cost. With 64 requests again and again every one is a
hit, beside the engines themselves under the same load. Then 200 clients send one new request at once, and what reaches
the engines is counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.bench import ROOT, command_line, finish, show_row
from benchmarks.harness.processes import Target, node, processor_s, stub_engines

SCRIPT = ROOT / "benchmarks" / "lua" / "chat_fresh.lua"
CONNECTIONS, BODY_BYTES, EQUAL = 16, 3_000, 200
WARM_UP_S = 2.0


def load(target: Target, manner: str, seconds: float) -> dict[str, float]:
    """One run of wrk: requests/s, p50 and p99 in µs, failures, and processor time in µs a request."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(SCRIPT)]
    used_s = processor_s(target.pid)
    url = f"{target.url}/v1/chat/completions"
    shown = subprocess.run([*command, url, "--", str(BODY_BYTES), manner], check=True, capture_output=True, text=True)
    used_s = processor_s(target.pid) - used_s
    found: dict[str, float] = json.loads(shown.stdout.split("RESULT ", 1)[1])
    requests = max(1, found["requests"])
    return {**found, "per_s": requests / found["seconds"], "processor_us": used_s / requests * 1e6}


def paired(targets: dict[str, Target], manner: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of each target, which take turns; and what the cache costs beyond the node without, pair by pair."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for target in targets.values():
        load(target, manner, WARM_UP_S)
    for number in range(rounds):
        order = list(targets) if number % 2 else list(reversed(targets))
        for name in order:
            runs[name].append(load(targets[name], manner, seconds))
            show_row({"round": number + 1, "manner": manner, "target": name, **runs[name][-1]})
    names = ("per_s", "p50_us", "p99_us", "processor_us")
    found: dict[str, Any] = {
        name: {key: round(statistics.median(run[key] for run in each), 1) for key in names}
        for name, each in runs.items()
    }
    more = [ours["processor_us"] - theirs["processor_us"] for ours, theirs in zip(runs["on"], runs["off"], strict=True)]
    return {
        **found,
        "more_us": round(statistics.median(more), 1),
        "failed": sum(r["failed"] for e in runs.values() for r in e),
    }


def equal_at_once(target: Target) -> dict[str, int]:
    """How many of EQUAL new, equal requests at once reach an engine."""
    before = placed(target)
    body = json.dumps(
        {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "once " * 600}]}
    ).encode()
    headers = {"content-type": "application/json"}

    def one(_: int) -> int:
        request = urllib.request.Request(f"{target.url}/v1/chat/completions", body, headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # our own loopback address
            return int(answer.status)

    with ThreadPoolExecutor(EQUAL) as pool:
        good = list(pool.map(one, range(EQUAL))).count(200)
    return {"requests": EQUAL, "answered": good, "sent_to_engines": placed(target) - before}


def placed(target: Target) -> int:
    with urllib.request.urlopen(f"{target.control}/admin/routes", timeout=30) as answer:  # noqa: S310
        return sum(json.load(answer)["decisions"].values())


def main(argv: Sequence[str] | None = None) -> int:
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--tokenizer", type=Path, default="embedded", help="as of `ranvier serve`")
    arguments = parser.parse_args(argv)
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing: apt-get install wrk")
    with ExitStack() as stack:
        urls = stack.enter_context(stub_engines(2))
        nodes = {
            "off": stack.enter_context(node(urls, arguments.tokenizer)),
            "on": stack.enter_context(node(urls, arguments.tokenizer, "--response-cache")),
        }
        misses = paired(nodes, "greedy", arguments.rounds, arguments.seconds)
        hits = paired({"direct": Target(urls[0]), **nodes}, "repeated", arguments.rounds, arguments.seconds)
        once = equal_at_once(nodes["on"])
    show_row(once)
    return finish("response_cache", arguments, {"misses": misses, "hits": hits, "equal_at_once": once})


if __name__ == "__main__":
    sys.exit(main())
