"""How fast is gossip between real processes of one machine, and what does it cost?

`python -m benchmarks.convergence_processes [--nodes 10] [--trials 200] [--idle-s 20] [--turns 400]`

*usable*: the time from when one node served a chat turn until another node would send the next turn to the engine that
holds it (polled with /explain). *idle*: bytes that each node sends to each peer, and its processor time, without
requests. *loaded*: bytes of route gossip per learned turn and peer. *crash*: the time from SIGKILL until all other
nodes consider the victim dead, and false deaths. Times are upper bounds, since all processes share the cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import trio

from benchmarks.harness.bench import command_line, finish, percentiles, show_row
from benchmarks.harness.processes import processor_s
from cluster.demo.demo_plan import Lab, Settings, at, node_commands, plan, write_key
from cluster.processes.children import Child, start, stop, wait_all_ready
from cluster.processes.commands import engine_command

READY_S = 120.0
TRIAL_S = 5.0
CRASH_S = 30.0
WORDS = ("shelf", "atlas", "river", "engine", "outgoing", "window", "market", "garden", "winter", "copper", "signal")
MODEL = "lab-model"
CHAT_TURNS = 10
LOADED_CLIENTS = 16

GOALS = {
    "usable_ms_p99": (100.0, ("usable", "ms", "p99")),
    "idle_bytes_per_s_and_peer": (1000.0, ("idle", "bytes_per_s_and_peer", "max")),
    "idle_cpu_share": (0.01, ("idle", "cpu_share", "p50")),
    "bytes_per_turn_and_peer": (200.0, ("loaded", "routes_bytes_per_turn_and_peer")),
    "crash_s": (3.0, ("crash", "known_to_all_s", "max")),
    "false_deaths": (0, ("crash", "false_deaths")),
}
"""By name: the greatest allowed value, and the path of the figure in the result."""


@dataclass(frozen=True, slots=True)
class Node:
    """One running node, with its URLs."""

    name: str
    url: str
    control: str
    child: Child


@dataclass(slots=True)
class Cluster:
    nodes: list[Node]
    http: httpx.AsyncClient
    rng: Random

    async def view(self, node: Node) -> dict[str, Any]:
        return dict((await self.http.get(f"{node.control}/admin/cluster")).json())

    async def views(self) -> list[dict[str, Any]]:
        return [await self.view(node) for node in self.nodes]

    def words(self, count: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(count))

    async def announce(self, node: Node, messages: list[dict[str, str]]) -> str:
        """Send one more turn of a chat through this node; append the answer. Returns the backend that served it."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 8}
        answer = await self.http.post(f"{node.url}/v1/chat/completions", json=body)
        answer.raise_for_status()
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        return answer.headers["x-ranvier-backend"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, seed="ports, chats and victims")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--turns", type=int, default=400, help="of the loaded part")
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--crashes", type=int, default=3)
    return parser.parse_args(argv)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        logs, children = Path(name), list[Child]()
        settings = Settings(
            nodes=arguments.nodes, engines=arguments.engines, policies=("affinity",), prefill_tokens_per_s=1e6
        )
        lab = plan(settings, Random(arguments.seed))
        try:
            for place in lab.engines:
                children.append(start(engine_command(settings, place), logs))
            nodes = start_nodes(lab, logs, children)
            await wait_all_ready(children, READY_S)
            async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
                return await measure(Cluster(nodes, http, Random(arguments.seed)), arguments)
        finally:
            with trio.CancelScope(shield=True):
                await stop(children)


def start_nodes(lab: Lab, logs: Path, children: list[Child]) -> list[Node]:
    key_file = logs / "key"
    write_key(key_file)
    nodes = []
    for address, command in zip(lab.nodes["affinity"], node_commands(lab, "affinity", key_file=key_file), strict=True):
        children.append(start(command, logs))
        admin = f"http://{command.ready_host}:{command.ready_port}"
        nodes.append(Node(command.name, f"http://{at(address)}", admin, children[-1]))
    return nodes


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    with trio.fail_after(60):
        while any(len(alive(view)) < arguments.nodes - 1 for view in await cluster.views()):  # noqa: ASYNC110
            await trio.sleep(0.2)
    result: dict[str, Any] = {}
    await trio.sleep(2)  # so that the traffic of the start is not counted as idle
    for name, part in (("idle", idle), ("usable", usable), ("loaded", loaded), ("crash", crash)):
        result[name] = await part(cluster, arguments)
        show_row({"part": name, **result[name]})
    result["goals"] = goals(result)
    return result


def alive(view: dict[str, Any]) -> list[str]:
    return [member["name"] for member in view["members"] if member["state"] == "alive"]


async def idle(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes and processor time of nodes without requests."""
    before, cpu_before, began = await cluster.views(), cpu_s(cluster.nodes), trio.current_time()
    await trio.sleep(arguments.idle_s)
    lasted_s = trio.current_time() - began
    cpu_after, after = cpu_s(cluster.nodes), await cluster.views()
    peers = arguments.nodes - 1
    sent = [bytes_sent(late) - bytes_sent(early) for early, late in zip(before, after, strict=True)]
    shares = [(late - early) / lasted_s for early, late in zip(cpu_before, cpu_after, strict=True)]
    return {
        "seconds": round(lasted_s, 1),
        "bytes_per_s_and_peer": percentiles([each / lasted_s / peers for each in sent], 1),
        "cpu_share": percentiles(shares, 4),
    }


def bytes_sent(view: dict[str, Any], *topics: str) -> int:
    return sum(each["sent"]["bytes"] for topic, each in view["topics"].items() if not topics or topic in topics)


def cpu_s(nodes: Sequence[Node]) -> list[float]:
    return [processor_s(node.child.process.pid) for node in nodes]


async def usable(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure from the end of an answer on one node until another would send the next turn to the same engine."""
    times_ms: list[float] = []
    for _ in range(arguments.trials):
        node, other = cluster.rng.sample(cluster.nodes, 2)
        messages = [{"role": "user", "content": cluster.words(150)}]
        backend = await cluster.announce(node, messages)
        began = trio.current_time()
        following = {"model": MODEL, "messages": [*messages, {"role": "user", "content": "And then?"}]}
        with trio.fail_after(TRIAL_S):
            while True:
                asked = trio.current_time()
                found = (await cluster.http.post(f"{other.control}/explain", json=following)).json()
                if found["chosen"] == backend and found["matched_tokens"] > 0:
                    break
        times_ms.append((asked - began) * 1000)
    return {"ms": percentiles(times_ms, 1)}


async def loaded(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run chats of ten turns, each turn by a random node, as fast as the machine serves them; measure gossip bytes."""
    before, began = await cluster.views(), trio.current_time()
    turns = arguments.turns // LOADED_CLIENTS * LOADED_CLIENTS

    async def client(rng: Random) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(turns // LOADED_CLIENTS):
            if turn % CHAT_TURNS == 0:
                messages = [{"role": "system", "content": cluster.words(80)}]
            messages.append({"role": "user", "content": cluster.words(60)})
            await cluster.announce(rng.choice(cluster.nodes), messages)

    async with trio.open_nursery() as nursery:
        for number in range(LOADED_CLIENTS):
            nursery.start_soon(client, Random(number))
    lasted_s = trio.current_time() - began
    await trio.sleep(1)
    after = await cluster.views()
    peers = arguments.nodes - 1
    found: dict[str, Any] = {"turns": turns, "turns_per_s": round(turns / lasted_s, 1)}
    for topic in ("routes", "backends", "membership"):
        sent = sum(
            bytes_sent(late, topic) - bytes_sent(early, topic) for early, late in zip(before, after, strict=True)
        )
        found[f"{topic}_bytes_per_turn_and_peer"] = round(sent / turns / peers, 1)
    return found


async def crash(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill nodes, and measure each time until all others consider the victim dead."""
    known_s: list[float] = []
    for _ in range(min(arguments.crashes, arguments.nodes - 2)):
        victim = cluster.nodes.pop()
        victim.child.stopping = True
        victim.child.process.kill()
        began = trio.current_time()
        with trio.fail_after(CRASH_S):
            while any(is_living(view, victim.name) for view in await cluster.views()):  # noqa: ASYNC110
                await trio.sleep(0.02)
        known_s.append(trio.current_time() - began)
    deaths = [view["membership"]["deaths"] for view in await cluster.views()]
    false_deaths = sum(max(0, number - len(known_s)) for number in deaths)
    return {"known_to_all_s": percentiles(known_s, 2), "false_deaths": false_deaths}


def is_living(view: dict[str, Any], name: str) -> bool:
    """Whether this view has the member as alive or suspected."""
    return any(member["name"] == name and member["state"] in ("alive", "suspect") for member in view["members"])


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, (most, place) in GOALS.items():
        figure: Any = result
        for key in place:
            figure = figure[key]
        found.append({"goal": name, "at_most": most, "is": figure, "met": figure <= most})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    result = trio.run(run, arguments)
    for goal in result["goals"]:
        show_row(goal)
    return finish("convergence_processes", arguments, result)


if __name__ == "__main__":
    sys.exit(main())
