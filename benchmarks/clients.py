"""How much of what agents send repeatedly is reused? Recorded shapes run through 1 and 4 nodes, and through smg.

    python -m benchmarks.clients [--shape codex …] [--nodes 1 4] [--peers-dir DIR] [--only ranvier_py smg mended]

Three engines in this process evict nothing. So it is known how much of each prompt one of them held when the request
came, which is the most that a router could have found. A turn is consecutive if it repeats at least half of an earlier
prompt of its task; it reached a holder if no other engine held a block more. Requests go to the routers in turn. smg is
installed in an environment of its own, and left out if that fails; 4 of its gateways share by its mesh. Our nodes are
also asked for answers that come as a whole, of which they see no first token.

`mended`: a recorded agent is made to break its prefixes as another agent was seen to do, and runs through our nodes: as
recorded, broken, and broken with the mending rule on. Each share is a mean of MENDED_DRAWS runs: where a chat resumes
while its engine computes, milliseconds decide who serves it. `--only mended` measures only that part of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import httpx
import trio

from benchmarks.harness.bench import RESULTS, command_line, commit, finish, replace_part, show, show_row
from benchmarks.harness.processes import PEERS_DIR, SMG, free_port, installed, mesh_flags, peer_router, peers
from cluster.agents.agent_shapes import AgentRequest, names, requests_of
from cluster.agents.agent_traffic import RequestRefused, replayed
from cluster.agents.engine_fleet import MODEL, EngineFleet, Reuse
from ranvier_py.io.tokenizer import EMBEDDED

ENGINES = 3
PREFILL_TOKENS_PER_S = 20_000
CONTROL_SHARE = 0.01  # the least that the option allows
GOALS = {"reached": 0.99, "lost": 0.01}
MENDED_GOAL = 0.01
"""How much more a mended agent may compute than one that breaks nothing, as a share of all tokens."""

MENDED_DRAWS = 4
"""Runs behind each share. The three runs of one draw have their engines at the same ports, since these decide ties."""

SETTLE_S = 5.0
"""Wait between the routers' start and the first request, until nodes know each other and gateways their engines."""

KEY = sha256(b"the benchmark of clients").hexdigest()
"""The cluster's key. It is fixed so that in each run the rules leave the same sessions alone."""


def nodes(stack: ExitStack, engines: Sequence[str], count: int, rules: Sequence[str] = ()) -> list[str]:
    """Start `count` nodes of one cluster with these client rules. Returns their URLs."""
    flags = [word for rule in rules for word in ("--client-rules", rule)]
    flags += ["--client-rule-control-share", str(CONTROL_SHARE)]
    return [target.url for target in stack.enter_context(peers(engines, count, KEY, *flags))]


def gateways(bin_dir: Path, stack: ExitStack, engines: Sequence[str], count: int) -> list[str]:
    """Start `count` gateways of smg; all but the first join the first one's mesh. Returns their URLs."""
    meshes = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    mine = [mesh_flags(number, own, meshes[0]) if count > 1 else [] for number, own in enumerate(meshes)]
    return [stack.enter_context(peer_router(SMG, bin_dir, engines, *flags)).url for flags in mine]


Start = Callable[[ExitStack, Sequence[str]], list[str]]
"""Starts routers for these engines. Returns the routers' URLs."""


async def routed(start: Start, requests: Sequence[AgentRequest], ports: Sequence[int] = ()) -> Reuse | str:
    """Send the requests through new routers to empty engines, at these ports if there are any.

    Returns what was reused, or why they were refused.
    """
    with ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            fleet = EngineFleet(ENGINES, tokenizer=str(EMBEDDED), prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
            await fleet.start(nursery, ports)
            urls = await trio.to_thread.run_sync(start, stack, fleet.urls)
            await trio.sleep(SETTLE_S)
            found: Reuse | str = ""
            try:
                found = await replayed(fleet, requests, urls)
            except* (RequestRefused, httpx.HTTPError) as group:
                found = str(group.exceptions[0])[:200]
            nursery.cancel_scope.cancel()
    return found


def measured(
    router: str, count: int, shapes: Sequence[str], bin_dir: Path | None, streamed: bool = True
) -> Iterable[dict[str, Any]]:
    """Measure each shape, and yield a row for it. `bin_dir`: of smg; None: our nodes."""
    make = nodes if bin_dir is None else partial(gateways, bin_dir)
    for shape in shapes:
        row: dict[str, Any] = {"shape": shape, "router": router, "nodes": count, "streamed": streamed}
        requests = requests_of(shape, MODEL)
        reuse = trio.run(routed, partial(make, count=count), requests if streamed else list(map(unstreamed, requests)))
        if isinstance(reuse, str):
            row["refused"] = reuse
        else:
            shares = {"reused": reuse.reused / reuse.tokens, "possible": reuse.possible / reuse.tokens}
            shares |= {"reached": reuse.reached, "lost": reuse.lost}
            row |= {**asdict(reuse), "shares": {name: round(share, 4) for name, share in shares.items()}}
        show_row(row)
        yield row


def unstreamed(request: AgentRequest) -> AgentRequest:
    """Return a request whose answer is to come as a whole."""
    fields = {key: value for key, value in json.loads(request.body).items() if key != "stream_options"}
    return replace(request, body=json.dumps({**fields, "stream": False}).encode())


# --- agents that break their prefixes ---------------------------------------------------------------------------------


class Breaker(NamedTuple):
    """How an agent breaks its prefixes (`broken` changes the n-th body; `clean` is harmless), and what mends that."""

    name: str
    rule: str
    shapes: Sequence[str]
    broken: Callable[[dict[str, Any], int], None]
    clean: Callable[[dict[str, Any], int], None] = lambda _body, _number: None


def nonce_first(body: dict[str, Any], number: int) -> None:
    """Put the billing block of Claude Code 2.1.161 first."""
    line = f"x-anthropic-billing-header: cc_version=2.1.161.abc; cc_entrypoint=cli; cch={7919 * number:05x};"
    body["system"] = [{"type": "text", "text": line}, *body["system"]]


def line_first(body: dict[str, Any], number: int) -> None:
    """Put that billing line first, as if a gateway had joined the blocks to one text."""
    put_first(body, f"x-anthropic-billing-header: cc_version=2.1.161.abc; cch={7919 * number:05x};\n")


def clock_first(body: dict[str, Any], number: int) -> None:
    put_first(body, f"Now: 2026-11-22 10:{number // 6:02}:{number % 6}7\n")


def day_first(body: dict[str, Any], number: int) -> None:  # noqa: ARG001  # as all of them
    put_first(body, "Now: 2026-11-22\n")


def put_first(body: dict[str, Any], text: str) -> None:
    """Put a text before the first message of a chat, or the first item of responses."""
    first = (body.get("messages") or body["input"])[0]
    if isinstance(first["content"], str):
        first["content"] = text + first["content"]
    else:
        first["content"][0]["text"] = text + first["content"][0]["text"]


def tools_shuffled(body: dict[str, Any], number: int) -> None:
    Random(number).shuffle(body.get("tools", []))


BREAKERS = (
    Breaker("nonce in a block", "claude-code-billing", ("opencode-anthropic", "qwen-anthropic"), nonce_first),
    Breaker("nonce in a line", "claude-code-billing-line", ("opencode",), line_first),
    Breaker("clock to the second", "system-clock-to-day", ("codex",), clock_first, day_first),
    Breaker("tools in any order", "tools-by-name", ("qwen",), tools_shuffled),
)


def breaking(requests: Sequence[AgentRequest], change: Callable[[dict[str, Any], int], None]) -> list[AgentRequest]:
    """Change the requests' bodies. With a nonce in a block they also name Claude Code, the one client of that rule."""
    found = []
    for number, request in enumerate(requests):
        body = json.loads(request.body)
        change(body, number)
        headers = [each for each in request.headers if each[0].lower() not in ("user-agent", "accept-language")]
        headers.append(("User-Agent", "claude-cli/2.1.161 (external, cli)"))
        fields = headers if change is nonce_first else request.headers
        found.append(replace(request, headers=fields, body=json.dumps(body).encode()))
    return found


def mended_part(counts: Sequence[int], shapes: Sequence[str]) -> dict[str, Any]:
    """Measure the share of prompt tokens that engines reused: without a breaker, with it, and with its rule on."""
    rows = []
    for count in counts:
        for breaker, shape in [(each, shape) for each in BREAKERS for shape in each.shapes if shape in shapes]:
            drawn = [reused_of(breaker, shape, count) for _ in range(MENDED_DRAWS)]
            means = {name: round(fmean(each[name] for each in drawn), 4) for name in drawn[0]}
            row = {"breaker": breaker.name, "rule": breaker.rule, "shape": shape, "nodes": count, **means}
            show_row(row)
            rows.append(row)
    return {"control_share": CONTROL_SHARE, "goal": MENDED_GOAL, "draws": MENDED_DRAWS, "rows": rows}


def reused_of(breaker: Breaker, shape: str, count: int) -> dict[str, float]:
    """Run one draw: return the shares reused without the breaker, with it, and with its rule on."""
    recorded, rules = requests_of(shape, MODEL), (f"{breaker.rule}=rewrite",)
    ports = [free_port() for _ in range(ENGINES)]
    found = {}
    for name, change, on in (
        ("without", breaker.clean, ()),
        ("broken", breaker.broken, ()),
        ("mended", breaker.broken, rules),
    ):
        reuse = trio.run(routed, partial(nodes, count=count, rules=on), breaking(recorded, change), ports)
        assert isinstance(reuse, Reuse), reuse
        found[name] = round(reuse.reused / reuse.tokens, 4)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--shape", nargs="+", default=names(), choices=names())
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR)
    parser.add_argument("--only", nargs="*", choices=["ranvier_py", "smg", "mended"], default=[], help="default: all")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if smg cannot be installed: it is then skipped with a message."""
    arguments = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # smg would ask the hub for a tokenizer
    if arguments.only == ["mended"]:
        part = mended_part(arguments.nodes, arguments.shape)
        return replace_part("clients", "mended", part, dry=arguments.dry)
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
        for streamed in ((True, False) if bin_dir is None else (True,))
        for row in measured(router, count, arguments.shape, bin_dir, streamed)
    ]
    found: dict[str, Any] = {"engines": ENGINES, "goals": GOALS, "left_out": left_out}
    if not arguments.only or "mended" in arguments.only:
        found["mended"] = {"commit": commit(), **mended_part(arguments.nodes, arguments.shape)}
    elif "mended" in (before := json.loads((RESULTS / "clients.json").read_text())):
        found["mended"] = before["mended"]
    return finish("clients", arguments, found, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
