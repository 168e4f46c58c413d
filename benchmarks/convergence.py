"""How fast news get about in a simulated cluster of the real core, and what that costs: results/convergence.json.

For each size and loss: lessons of chats under way while the network loses so much of its datagrams (streams are slowed
instead), then one node killed. Times are virtual and depend on the seed alone; `events_per_wall_s` is the machine's.
`learned` counts each (lesson, node) from the first token to being usable; `everywhere` each lesson to its last node;
`noticed` from the kill to the first and to the last node that says so. Bytes are those sent by one node on average.

    python -m benchmarks.convergence [--nodes 3,10,30,100] [--loss 0,10,30] [--seconds 40] [--seed 1]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import write_result
from cluster.scenario import Cluster, Expect, Load, Scenario, Step
from cluster.sim_mind import Minds
from cluster.sim_run import simulate

NODES = "3,10,30,100"
"""1000 takes hours of a slow core: each two of them shake hands."""

KEPT = (
    "packets", "learned_t50_s", "learned_t99_s", "learned_t100_s", "everywhere_t50_s", "everywhere_t99_s",
    "everywhere_t100_s", "noticed_first_t50_s", "noticed_all_t100_s", "false_deaths", "lessons_late",
    "datagram_bytes_per_node_s", "probe_bytes_per_node_s", "bulk_bytes_per_node_s",
)  # fmt: skip


def scenario_of(nodes: int, loss: float, seconds: float, chats_per_s: float) -> Scenario:
    """A cluster that forms well, then loses packets to the end, and a node half-way."""
    formed = min(10.0, seconds / 4)
    steps = []
    if loss:
        steps.append(Step(formed, "link", nodes="all", loss=loss))
    if nodes > 2:
        steps.append(Step((formed + seconds) / 2, "kill", nodes=(nodes - 1,)))
    return Scenario(
        name=f"convergence-{nodes}-{loss:g}",
        about="one node dies while packets are lost",
        for_s=seconds,
        cluster=Cluster(nodes=nodes, engines=4, spread_s=min(2.0, nodes / 50)),
        load=Load(chats_per_s=chats_per_s) if chats_per_s else None,
        steps=tuple(steps),
        expect=Expect(),
    )


def measured(nodes: int, loss: float, seconds: float, seed: int, chats_per_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    result = simulate(scenario_of(nodes, loss, seconds, chats_per_s), seed, Minds())
    wall_s = time.perf_counter() - began
    assert result.violation is None, f"{nodes} nodes, loss {loss}: {result.violation}"
    head = {"nodes": nodes, "loss": loss, "chats_per_s": chats_per_s}
    speed = {"events_per_wall_s": round(result.events / wall_s), "virtual_per_wall": round(seconds / wall_s, 2)}
    return head | {name: result.measures[name] for name in KEPT} | speed


def main() -> None:
    parser = argparse.ArgumentParser(description="convergence of simulated clusters")
    parser.add_argument("--nodes", default=NODES)
    parser.add_argument("--loss", default="0,10,30", help="percent, comma-separated")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chats-per-s", type=float, default=4.0)
    options = parser.parse_args()
    rows = []
    for nodes in map(int, options.nodes.split(",")):
        idle = measured(nodes, 0.0, options.seconds, options.seed, 0.0)
        rows.append(idle)
        print(shown(idle), flush=True)
        for percent in map(float, options.loss.split(",")):
            row = measured(nodes, percent / 100, options.seconds, options.seed, options.chats_per_s)
            rows.append(row)
            print(shown(row), flush=True)
    settings = {"seed": options.seed, "virtual_s": options.seconds, "link": "0.2 ms and an exponential 0.2 ms one way"}
    print(write_result("convergence", {"settings": settings, "rows": rows}))


def shown(row: dict[str, Any]) -> str:
    sent = sum(row[f"{plane}_bytes_per_node_s"] for plane in ("datagram", "probe", "bulk"))
    learned = f"learned p50 {row['learned_t50_s']} p99 {row['learned_t99_s']} s"
    death = f"death known to all {row['noticed_all_t100_s']} s, {row['false_deaths']} false"
    return f"{row['nodes']:>4} nodes, loss {row['loss']:.0%}: {learned}, {death}, {sent:.0f} B/s a node"


if __name__ == "__main__":
    main()
