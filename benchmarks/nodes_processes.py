"""Compares several routers as real processes: ours with and without gossip, smg 1.13.0 with and without its mesh.

    python -m benchmarks.nodes_processes [--nodes 1 2 4] [--think 0.5 3] [--seconds 45] [--only ranvier] [--dry]

Each configuration gets fresh engines (the lab's, with tokenizer and block cache) and the same chats: the lab's own,
with 6 shared system prompts and 8 turns. Every turn looks up the routers' name again and so gets the next router: that
is the worst that DNS can do to a conversation, and the case for sharing. With --sticky a conversation keeps its router.
The engines report the hit rate, the client measures times, and a failure is any outcome but a good answer. The ratios
within one run mean more than the numbers. Our nodes are also asked for answers that come as a whole, of which they see
no first token. smg is installed in an environment of its own under --peers-dir, and left out if that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

import trio

from benchmarks.harness.bench import command_line, finish, how_answered, percentiles, show, show_row, spread
from benchmarks.harness.processes import PEERS_DIR, SMG, installed, mesh_flags, processor_s
from cluster.demo.demo_plan import Lab, Settings, at, node_commands, plan, write_key
from cluster.dns.addresses import NamesError
from cluster.dns.resolvers import RoundRobinResolver
from cluster.load import chats
from cluster.load.http_client import Connection, ExchangeFailed, fetch
from cluster.load.load_report import LoadLog, Report
from cluster.load.runner import Runner, Target, Transcript
from cluster.load.workload import Conversation, Turn, with_poisson_arrivals, with_think
from cluster.processes.children import Child, ChildDied, ChildNotReady, Command, start, stop, wait_all_ready, wait_ready
from cluster.processes.commands import engine_command

ENGINES = 4
READY_S = 60.0
SETTLE_S = 6.0
"""Wait between the last router's start and the first chat: smg's mesh carries nothing for 3 to 4 s (measured)."""

TURNS = 8
SYSTEM_PROMPTS = 6
MAX_TOKENS = 24
NAME = "router.lab"
POLICY = "affinity"


@dataclass(frozen=True, slots=True)
class Kind:
    """One configuration: which router, how many of it, whether they share what they learn, and the kind of answers."""

    router: str  # "ranvier" or "smg"
    nodes: int
    shared: bool
    streamed: bool = True

    @property
    def name(self) -> str:
        how = {"ranvier": ("no gossip", "gossip"), "smg": ("no mesh", "mesh")}[self.router][self.shared]
        return f"{self.nodes} {self.router} {how}{how_answered(asdict(self))}"

    @property
    def settings(self) -> Settings:
        return Settings(
            nodes=self.nodes,
            engines=ENGINES,
            policies=(POLICY,),
            cache_tokens=200_000,
            prefill_tokens_per_s=20_000,
            decode_ms=10,
        )


def router_commands(kind: Kind, lab: Lab, key_file: Path, smg_dir: Path | None) -> list[Command]:
    """Return the commands of the routers in the order of their start. `smg_dir` is smg's bin directory."""
    if kind.router == "ranvier":
        return node_commands(lab, POLICY, key_file=key_file if kind.shared else None)
    assert smg_dir is not None
    commands = []
    for number, (public, metrics, mesh) in enumerate(
        zip(lab.nodes[POLICY], lab.controls[POLICY], lab.gossips[POLICY], strict=True)
    ):
        argv = SMG.command(smg_dir, public.ip, public.port, metrics) + [engine.url for engine in lab.engines]
        if kind.shared:
            argv += mesh_flags(number, at(mesh), at(lab.gossips[POLICY][0]))
        commands.append(Command(f"smg-{number}", tuple(argv), public.ip, public.port, "/readiness"))
    return commands


class TurnByTurn(Runner):
    """Looks up the name again for every turn, as a client does that keeps no connections."""

    async def take_turn(self, connection: Connection, turn: Turn, transcript: Transcript) -> bool:
        connection.close()
        return await super().take_turn(connection, turn, transcript)


def conversations(arguments: argparse.Namespace, think_s: float) -> list[Conversation]:
    """Return the conversations, which are the same for every configuration."""
    rng = Random(arguments.seed)
    count = int(arguments.rate * arguments.seconds * 2) + 10  # more than will arrive
    supply = chats.conversations(rng, system_prompts=SYSTEM_PROMPTS, turns=TURNS)
    return list(with_poisson_arrivals(with_think(islice(supply, count), think_s, rng), arguments.rate, rng))


async def measure(
    kind: Kind, think_s: float, arguments: argparse.Namespace, folder: Path, smg_dir: Path | None
) -> dict[str, Any]:
    """Start one configuration, measure it, and end it. Raises ChildDied, ChildNotReady, NamesError, OSError."""
    logs = folder / f"{kind.name} {think_s:g}".replace(" ", "-")
    logs.mkdir()
    key_file = logs / "cluster.key"
    write_key(key_file)
    lab = plan(kind.settings, Random())
    children: list[Child] = []
    try:
        children += [start(engine_command(kind.settings, place), logs) for place in lab.engines]
        await wait_all_ready(children, READY_S)
        routers = []
        for command in router_commands(kind, lab, key_file, smg_dir):
            routers.append(start(command, logs))
            children.append(routers[-1])
            await wait_ready(routers[-1], READY_S)
            if kind.router == "smg":
                await wait_for_workers(command)
        await trio.sleep(SETTLE_S)
        before = used_s(routers)
        log, seconds = await traffic(lab, think_s, arguments, kind.streamed)
        for child in children:
            if child.process.poll() is not None:
                raise OSError(f"{child.command.name} ended in mid-run; its log is in {logs}")
        spent_s = used_s(routers) - before
    finally:
        await stop(children)
    return result_of(kind, think_s, log, seconds, spent_s)


def used_s(routers: Sequence[Child]) -> float:
    return sum(processor_s(child.process.pid) for child in routers)


async def wait_for_workers(smg: Command) -> None:
    """Wait until smg has registered every engine. Raises TimeoutError."""
    with trio.move_on_after(READY_S):
        while True:
            try:
                _, body = await fetch(smg.ready_host, smg.ready_port, "/workers")
            except ExchangeFailed:
                body = b""
            if body.count(b'"url"') >= ENGINES:
                return
            await trio.sleep(0.1)
    raise TimeoutError(f"{smg.name} did not register its workers within {READY_S:.0f} s")


async def traffic(lab: Lab, think_s: float, arguments: argparse.Namespace, streamed: bool) -> tuple[LoadLog, float]:
    """Send all chats; return the log, and the seconds that they took."""
    addresses = lab.nodes[POLICY]
    trio.socket.set_custom_hostname_resolver(RoundRobinResolver({NAME: list(addresses)}))
    log = LoadLog()
    port, model = addresses[0].port, Settings().model
    target = Target(NAME, port, model=model, max_tokens=MAX_TOKENS, timeout_s=30.0, stream=streamed)
    runner = Runner(target, log) if arguments.sticky else TurnByTurn(target, log)
    began = trio.current_time()
    await runner.run_open(conversations(arguments, think_s), arguments.seconds)
    return log, trio.current_time() - began


def result_of(kind: Kind, think_s: float, log: LoadLog, seconds: float, router_cpu_s: float) -> dict[str, Any]:
    """Return the figures of one configuration; the hit rate is as the engines count it."""
    outcome = Report(log, seconds)
    first = percentiles([one.ttft_s for one in log.samples if one.ttft_s is not None] or [0.0], digits=6)
    answer = percentiles([one.total_s for one in log.samples] or [0.0], digits=6)
    found = {
        "name": kind.name,
        **asdict(kind),
        "think_s": think_s,
        "requests": {name: getattr(log, name) for name in ("sent", "ok", "failed", "not_sent")},
        "hit_rate": outcome.hit_rate,
        "without_usage": outcome.without_usage,
        "ttft_s": {name: first[name] for name in ("p50", "p99")},
        "answer_s": {name: answer[name] for name in ("p50", "p99")},
        "engines": spread([one.requests for one in outcome.engines] or [0]) if log.ok else {},
        "nodes_used": len(outcome.nodes),
        "router_cpu_s": round(router_cpu_s, 2),
        "seconds": round(seconds, 1),
        "failures": {group.reason: group.count for group in outcome.failures},
    }
    show_row(found)
    return found


def kinds(arguments: argparse.Namespace) -> list[Kind]:
    """Return the configurations. A single router has no peer to share with."""
    wanted = arguments.only or ["ranvier", "smg"]
    return [
        Kind(router, nodes, shared, streamed)
        for nodes in arguments.nodes
        for router in wanted
        for shared in ((True, False) if nodes > 1 else (False,))
        for streamed in ((True, False) if router == "ranvier" else (True,))
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, seed="the chats and their arrivals")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate", type=float, default=2.0, help="conversations that begin in a second")
    parser.add_argument("--think", type=float, nargs="+", default=[0.5, 3.0], help="mean pauses before a turn, seconds")
    parser.add_argument("--seconds", type=float, default=45.0, help="of traffic for each configuration")
    parser.add_argument("--sticky", action="store_true", help="a conversation keeps its router")
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR)
    parser.add_argument("--only", nargs="*", choices=["ranvier", "smg"], default=[], help="default: both")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if smg cannot be installed: it is then skipped with a message."""
    arguments = parse(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # smg would ask the hub for a tokenizer
    wanted, left_out, smg_dir = kinds(arguments), {}, None
    if any(kind.router == "smg" for kind in wanted):
        try:
            smg_dir = installed(SMG, arguments.peers_dir)
        except (OSError, subprocess.CalledProcessError) as error:
            left_out[SMG.name] = str(error)
            wanted = [kind for kind in wanted if kind.router != "smg"]
            show(f"left out: {SMG.name}: {error}")
    runs, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ranvier-nodes-") as folder:
        for think_s, kind in product(arguments.think, wanted):
            try:
                runs.append(trio.run(measure, kind, think_s, arguments, Path(folder), smg_dir))
            except (ChildDied, ChildNotReady, NamesError, OSError) as error:  # TimeoutError is an OSError
                left_out[f"{kind.name}, think {think_s:g} s"] = str(error)
                show(f"left out: {kind.name}: {error}")
    wall_s = round(time.perf_counter() - began)
    result = {"engines": ENGINES, "runs": runs, "left_out": left_out, "wall_s": wall_s}
    return finish("nodes_processes", arguments, result)


if __name__ == "__main__":
    sys.exit(main())
