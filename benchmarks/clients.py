"""How much of what agents send again is found again: recorded shapes through 1 and 4 nodes, and through smg.

    python -m benchmarks.clients [--shape codex …] [--nodes 1 4] [--peers-dir DIR] [--only ranvier smg]

Three engines in this process forget nothing, so how much of each prompt one of them held when it came is known: more
than that no router could have found. A turn is consecutive that repeats at least half of an earlier prompt of its task;
it reached a holder if no engine held a block more. Each request goes to the next router in turn. smg is installed in an
environment of its own, and left out where that fails; 4 of its gateways share by its mesh.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import trio

from benchmarks.harness.bench import command_line, finish, show, show_row
from benchmarks.harness.processes import PEERS_DIR, SMG, free_port, installed, process, wait_for_answer
from cluster.agents.agent_shapes import names, requests_of
from cluster.agents.agent_traffic import RequestRefused, replayed
from cluster.agents.engine_fleet import MODEL, EngineFleet
from cluster.demo.demo_plan import write_key
from cluster.processes.commands import join_flags, serve_argv
from ranvier_py.io.tokenizer import EMBEDDED

ENGINES = 3
PREFILL_TOKENS_PER_S = 20_000
GOALS = {"reached": 0.99, "lost": 0.01}
SETTLE_S = 5.0
"""Between the last router's start and the first request: until nodes know each other, and gateways their engines."""


def nodes(stack: ExitStack, engines: Sequence[str], count: int, folder: Path) -> list[str]:
    """So many nodes of one cluster; their URLs."""
    key_file = folder / "cluster.key"
    write_key(key_file)
    urls: list[str] = []
    gossips = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    for gossip in gossips:
        public, control = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        flags = ["--policy", "affinity", "--gossip", gossip, "--cluster-key-file", str(key_file)]
        flags += join_flags(other for other in gossips if other != gossip)
        stack.enter_context(process(serve_argv(public, control, engines, flags)))
        wait_for_answer(f"http://{control}/readyz")
        urls.append(f"http://{public}")
    return urls


def gateways(stack: ExitStack, engines: Sequence[str], count: int, bin_dir: Path) -> list[str]:
    """So many gateways of smg, each but the first joined to it."""
    urls, first = [], f"127.0.0.1:{free_port()}"
    for number in range(count):
        port = free_port()
        command = [*SMG.command(bin_dir, "127.0.0.1", port, free_port()), *engines]
        if count > 1:
            mesh = first if not number else f"127.0.0.1:{free_port()}"
            command += ["--enable-mesh", "--mesh-server-name", f"smg-{number}", "--mesh-host", "127.0.0.1"]
            command += ["--mesh-advertise-host", "127.0.0.1", "--mesh-port", mesh.partition(":")[2]]
            command += ["--mesh-peer-urls", first] if number else []
        stack.enter_context(process(command))
        url = f"http://127.0.0.1:{port}"
        wait_for_answer(f"{url}/workers", lambda body: body.count(b'"url"') >= len(engines))
        wait_for_answer(f"{url}/readiness")
        urls.append(url)
    return urls


async def measure(router: str, count: int, shapes: Sequence[str], bin_dir: Path | None) -> list[dict[str, Any]]:
    """A row for each shape, with new routers and empty engines for each."""
    found = []
    for shape in shapes:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranvier-clients-")))
            async with trio.open_nursery() as nursery:
                fleet = EngineFleet(ENGINES, tokenizer=str(EMBEDDED), prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
                await fleet.start(nursery)
                make = nodes if router == "ranvier_py" else gateways
                where = folder if router == "ranvier_py" else bin_dir
                assert where is not None
                urls = await trio.to_thread.run_sync(make, stack, fleet.urls, count, where)
                await trio.sleep(SETTLE_S)
                row: dict[str, Any] = {"shape": shape, "router": router, "nodes": count}
                try:
                    reuse = await replayed(fleet, requests_of(shape, MODEL), urls)
                    shares = {"reused": reuse.reused / reuse.tokens, "possible": reuse.possible / reuse.tokens}
                    shares |= {"reached": reuse.reached, "lost": reuse.lost}
                    row |= {**asdict(reuse), "shares": {name: round(share, 4) for name, share in shares.items()}}
                except* (RequestRefused, httpx.HTTPError) as group:
                    row["refused"] = str(group.exceptions[0])[:200]
                nursery.cancel_scope.cancel()
        show_row(row)
        found.append(row)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--shape", nargs="+", default=names(), choices=names())
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR)
    parser.add_argument("--only", nargs="*", choices=["ranvier_py", "smg"], default=[], help="default: both")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 also where smg can't be had: that is said and skipped."""
    arguments = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # smg would ask the hub for a tokenizer
    left_out: dict[str, str] = {}
    routers: dict[str, Path | None] = {"ranvier_py": None}
    if not arguments.only or "smg" in arguments.only:
        try:
            routers[SMG.name] = installed(SMG, arguments.peers_dir)
        except (OSError, subprocess.CalledProcessError) as error:
            left_out[SMG.name] = str(error)
            show(f"left out: {SMG.name}: {error}")
    rows = [
        row
        for count in arguments.nodes
        for router, bin_dir in routers.items()
        for row in trio.run(measure, router, count, arguments.shape, bin_dir)
    ]
    return finish("clients", arguments, {"engines": ENGINES, "goals": GOALS, "left_out": left_out}, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
