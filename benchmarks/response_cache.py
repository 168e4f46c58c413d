"""What does the response cache cost and save: for a miss, a hit, and many equal requests at once?

    python -m benchmarks.response_cache [--rounds 5] [--seconds 2] [--shared-only]

Two nodes with the same two stub engines, one of them with `--response-cache`, take turns under the load of `wrk`: 16
connections, chats of 3 kB, temperature 0. If all messages are new, every request is a miss, and the difference in
processor time is the cost of looking up, storing and sharing. If 64 requests are repeated, every request is a hit;
compared with that are the engines themselves and, if redis-server is installed, a node that stores its answers there.
The p99 of that node's look-ups is from its own histogram, under this load and with 2 connections. Then 200 clients send
one new request at once, and the requests that reach engines are counted. Last, four nodes share their answers, among
themselves or through Redis (`workloads/shared_responses`); `--shared-only` replaces only that part of the result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.bench import command_line, commit, finish, replace_part, show_row
from benchmarks.harness.processes import READY_S, Target, load, need_wrk, node, process, stub_engines
from benchmarks.workloads.shared_responses import Shape, shared

CONNECTIONS, FEW, BODY_BYTES, EQUAL = 16, 2, 3_000, 200
WARM_UP_S = 2.0


def run_of(target: Target, manner: str, seconds: float, connections: int = CONNECTIONS) -> dict[str, float]:
    return load(target, connections, seconds, BODY_BYTES, manner)


def paired(targets: dict[str, Target], manner: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Let the targets take turns; return each one's medians, and the cache's extra processor time, pair by pair."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for target in targets.values():
        run_of(target, manner, WARM_UP_S)
    for number in range(rounds):
        order = list(targets) if number % 2 else list(reversed(targets))
        for name in order:
            runs[name].append(run_of(targets[name], manner, seconds))
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
    """Send EQUAL equal new requests at once, and return how many reach an engine."""
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


@contextmanager
def node_with_redis(urls: Sequence[str], tokenizer: Path) -> Iterator[Target]:
    """Run a node that stores its answers in its own redis-server, on a Unix socket. Raises TimeoutError."""
    with TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "url").write_text(f"unix://{place}/socket")
        server = ("redis-server", "--port", "0", "--unixsocket", f"{place}/socket", "--save", "", "--dir", directory)
        flags = ("--response-cache-backend", "redis", "--response-cache-redis-url-file", f"{place}/url")
        with process(server), node(urls, tokenizer, "--response-cache", *flags) as target:
            until = time.monotonic() + READY_S
            while not json.loads(target.see("/admin/response-cache/stats"))["redis"]["connected"]:
                if time.monotonic() > until:
                    raise TimeoutError("the node did not reach its redis-server")
                time.sleep(0.1)
            yield target


def look_ups(target: Target) -> dict[float, float]:
    """Return from the node's histogram how many look-ups in Redis took at most so many seconds, for each bound."""
    name = 'ranvier_cache_redis_latency_seconds_bucket{le="'
    rows = [line.removeprefix(name) for line in target.see("/metrics").decode().splitlines() if line.startswith(name)]
    return {float(row.partition('"')[0]): float(row.rpartition(" ")[2]) for row in rows if 'operation="get"' in row}


def under(target: Target, connections: int, seconds: float) -> dict[str, float]:
    """Repeat requests on so many connections. Returns the number of look-ups, and the histogram's bound of 99 %."""
    before = look_ups(target)
    run_of(target, "repeated", seconds, connections)
    counts = {bound: count - before[bound] for bound, count in look_ups(target).items()}
    total = max(counts.values())
    return {"round_trips": total, "p99_ms_max": min(1000 * bound for bound, n in counts.items() if n >= 0.99 * total)}


def placed(target: Target) -> int:
    return sum(json.loads(target.see("/admin/routes"))["decisions"].values())


def main(argv: Sequence[str] | None = None) -> int:
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--shared-only", action="store_true", help="measure nodes that share answers, and nothing else")
    parser.add_argument("--bytes-per-s", type=int, default=Shape().bytes_per_s, help="of requests to nodes that share")
    parser.add_argument("--tokenizer", type=Path, default="embedded", help="as of `ranvier serve`")
    arguments = parser.parse_args(argv)
    if arguments.shared_only:
        return replace_part("response_cache", "shared", shared_part(arguments), dry=arguments.dry)
    need_wrk()
    with ExitStack() as stack:
        urls = stack.enter_context(stub_engines(2))
        nodes = {
            "off": stack.enter_context(node(urls, arguments.tokenizer)),
            "on": stack.enter_context(node(urls, arguments.tokenizer, "--response-cache")),
        }
        misses = paired(nodes, "greedy", arguments.rounds, arguments.seconds)
        beside = {"direct": Target(urls[0]), **nodes}
        if shutil.which("redis-server") is not None:
            beside["redis"] = stack.enter_context(node_with_redis(urls, arguments.tokenizer))
        hits = paired(beside, "repeated", arguments.rounds, arguments.seconds)
        in_redis = None
        if "redis" in beside:
            seconds = arguments.rounds * arguments.seconds
            in_redis = {str(count): under(beside["redis"], count, seconds) for count in (FEW, CONNECTIONS)}
        once = equal_at_once(nodes["on"])
    show_row(once)
    found = {"misses": misses, "hits": hits, "in_redis": in_redis, "equal_at_once": once}
    return finish("response_cache", arguments, {**found, "shared": shared_part(arguments)})


def shared_part(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(bytes_per_s=arguments.bytes_per_s)
    return {"commit": commit(), **shape._asdict(), "rows": shared(shape)}


if __name__ == "__main__":
    sys.exit(main())
