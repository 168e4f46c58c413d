"""How fast do route updates spread in a simulated cluster of the real core, and what does that cost?

    python -m benchmarks.convergence [--nodes 3,10,30,100,1000] [--loss 0,10,30] [--seconds 30] [--seed 1] [--formed]

For each number of nodes and loss rate, chats run while the network loses that share of its datagrams (streams are
slowed instead), and one node is killed half-way. `learned` is the time from the first token until a node can use the
route update, for each (update, node); `everywhere` until the last node can; `noticed` from the kill until the first and
until the last node reports it. `route_bytes_per_turn_and_peer` falls with the rate, since route updates share packets,
so ten nodes also have a run with BUSY_TURNS_PER_S at each. From CROWD nodes on there are fewer chats and losses, and no
idle run. With `--formed` nodes know each other from the start; `--keep` keeps other rows. Each row names its commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.bench import RESULTS, command_line, commit, each_apart, finish, show_row
from cluster.scenario import Cluster, Expect, Load, Scenario, Step
from cluster.simulation.sim_node import sim_nodes
from cluster.simulation.sim_run import simulate

NODES = "3,10,30,100,1000"
BUSY_NODES, BUSY_TURNS_PER_S = 10, 16
CROWD = 1000
CROWD_CHATS_PER_S = 0.5
CROWD_LOSS_MAX = 0.1
"""With greater loss, CROWD nodes show the same as 100 nodes and take ten times as long."""

KEPT = (
    "packets", "learned_t50_s", "learned_t99_s", "learned_t100_s", "everywhere_t50_s", "everywhere_t99_s",
    "everywhere_t100_s", "noticed_first_t50_s", "noticed_all_t100_s", "false_deaths", "updates_late",
    "datagram_bytes_per_node_s", "probe_bytes_per_node_s", "bulk_bytes_per_node_s", "route_bytes_per_turn_and_peer",
)  # fmt: skip


def scenario_of(nodes: int, loss: float, seconds: float, chats_per_s: float, *, formed: bool = False) -> Scenario:
    """Return a scenario: a cluster forms (or is `formed`), then loses packets until the end, and half-way one node."""
    quiet_s = min(10.0, seconds / 4)
    steps = []
    if loss:
        steps.append(Step(quiet_s, "link", nodes="all", loss=loss))
    if nodes > 2:
        steps.append(Step((quiet_s + seconds) / 2, "kill", nodes=(nodes - 1,)))
    return Scenario(
        name=f"convergence-{nodes}-{loss:g}",
        about="one node dies while packets are lost",
        for_s=seconds,
        cluster=Cluster(nodes=nodes, engines=4, spread_s=0.0 if formed else min(2.0, nodes / 50), formed=formed),
        load=Load(chats_per_s=chats_per_s) if chats_per_s else None,
        steps=tuple(steps),
        expect=Expect(),
        runs_on=("sim",),
    )


class Cell(NamedTuple):
    """One run."""

    nodes: int
    loss: float
    seconds: float
    seed: int
    chats_per_s: float
    formed: bool
    commit: str


def measured(cell: Cell) -> dict[str, Any]:
    nodes, loss, seconds, seed, chats_per_s, formed, code = cell
    began = time.perf_counter()
    gc.disable()  # as the simulator's own command does: nothing here makes reference cycles
    result = simulate(scenario_of(nodes, loss, seconds, chats_per_s, formed=formed), seed, sim_nodes())
    wall_s = time.perf_counter() - began
    assert result.violation is None, f"{nodes} nodes, loss {loss}: {result.violation}"
    head = {"nodes": nodes, "loss": loss, "chats_per_s": chats_per_s, "virtual_s": seconds, "commit": code}
    head |= {"formed": True} if formed else {}
    speed = {"events_per_wall_s": round(result.events / wall_s), "virtual_per_wall": round(seconds / wall_s, 2)}
    return head | {name: result.measures[name] for name in KEPT} | speed


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield all runs that were asked for, each with the present commit."""
    code, formed = commit(), options.formed
    losses = [float(percent) / 100 for percent in options.loss.split(",")]
    for nodes in map(int, options.nodes.split(",")):
        if nodes < CROWD:
            yield Cell(nodes, 0.0, options.seconds, options.seed, 0.0, formed, code)
        chats_per_s = options.chats_per_s if nodes < CROWD else min(CROWD_CHATS_PER_S, options.chats_per_s)
        for loss in losses:
            if nodes < CROWD or loss <= CROWD_LOSS_MAX:
                yield Cell(nodes, loss, options.seconds, options.seed, chats_per_s, formed, code)
        if nodes == BUSY_NODES:
            yield Cell(nodes, 0.0, options.seconds, options.seed, nodes * BUSY_TURNS_PER_S / Load().turns, formed, code)


def key(row: dict[str, Any]) -> tuple[int, float, float, bool]:
    return row["nodes"], row["chats_per_s"], row["loss"], row.get("formed", False)


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the present file that none of these replaces, each with its commit."""
    replaced = {key(row) for row in rows}
    before = json.loads((RESULTS / "convergence.json").read_text())
    origin = {"virtual_s": before["settings"]["virtual_s"], "commit": before["commit"]}
    return [origin | row for row in before["rows"] if key(row) not in replaced]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, seed="the simulation")
    parser.add_argument("--nodes", default=NODES)
    parser.add_argument("--loss", default="0,10,30", help="percent, comma-separated")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--chats-per-s", type=float, default=4.0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--formed", action="store_true", help="clusters that know each other from the start")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows about other sizes")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for row in each_apart(measured, list(cells(options)), options.jobs):
        rows.append(row)
        show_row(row)
    rows = sorted([*rows, *(kept(rows) if options.keep else ())], key=key)
    settings = {"seed": options.seed, "virtual_s": options.seconds, "link": "0.2 ms and an exponential 0.2 ms one way"}
    return finish("convergence", options, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
