"""What knowing the engines' caches is worth where they are too small: estimated, calibrated by answers, told by events.

`python -m benchmarks.truth [--quick] [--workload qmsum]`

The real Router and modelled engines in virtual time (`ranvier_py.replay`), eight engines whose caches together hold 25,
50 or 100 % of the working set (all prefixes of the trace, each once). What is told of a run: token hit rate by engine
truth; tokens believed to be cached where they were not, as a share of all prompt tokens (`wasted`: prefill that placing
had not reckoned with); p90 of the time to first token. With events and four nodes each engine is heard by one node, and
the real gossip tells the others.
Goals: calibration alone recovers at least half of what events would, in wasted prefill and in hit rate where there is
something to recover; four nodes with events within a point of one.
Results: results/truth.json. A full run takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.common import RESULTS, commit, machine
from benchmarks.policies_workloads import ENGINES, WORKLOADS, Workload
from ranvier_py.replay.jobs import Ready, Task, execute_all, make_ready
from ranvier_py.replay.knowledge import KNOWLEDGE, KnowledgeName
from ranvier_py.replay.results import RunResult
from ranvier_py.replay.run import Plan

SHARES = (0.25, 0.5, 1.0)
"""Of the working set, in all caches together."""

NODES = (1, 4)
POLICIES = ("affinity", "ttft", "cache_aware", "least_loaded")
TRAFFIC = ("mooncake", "qmsum", "chat_threads", "shared_prefix_groups")
LOAD = 0.7
"""Of the capacity that the policies benchmark measured with ample caches: where queues matter and nothing saturates."""

LOADS_BY_CACHE = {0.25: 0.5, 0.5: 0.6, 1.0: LOAD}
"""Small caches compute more, so the same rate would drown them."""

QUICK_REQUESTS = 300
RECOVERED_GOAL = 0.5
NODES_GOAL = 0.01
WORTH = 0.005
"""A difference between estimated and told below half a point is nothing to recover."""


@dataclass(frozen=True, slots=True)
class Row:
    workload: str
    share: float  # of the working set
    nodes: int
    policy: str
    knowledge: KnowledgeName
    hit_rate: float
    wasted: float  # share of the prompt tokens
    ttft_p50_s: float
    ttft_p90_s: float
    failed: int

    @property
    def cell(self) -> tuple[str, float, int, str]:
        return self.workload, self.share, self.nodes, self.policy


def cases(workload: Workload, ready: Ready, share: float, seed: int) -> Iterator[tuple[KnowledgeName, Task]]:
    """All runs of a workload at one size of cache."""
    cache_tokens = cache_tokens_of(ready, share)
    engine = replace(workload.engine, cache_tokens=cache_tokens, block_size=ready.summary.block_tokens)
    speed = workload.capacity["ample"] * LOADS_BY_CACHE[share]
    for nodes in NODES:
        for policy in POLICIES:
            for knowledge in KNOWLEDGE:
                plan = Plan(
                    policy,
                    nodes,
                    (engine,) * ENGINES,
                    speed=round(speed, 5),
                    seed=seed,
                    regret=False,
                    knowledge=knowledge,
                )
                yield knowledge, Task(ready, plan)


def cache_tokens_of(ready: Ready, share: float) -> int:
    """Of one engine, in whole blocks; never less than the longest request needs."""
    block_tokens = ready.summary.block_tokens
    blocks = len({block for item in ready.items for block in item.request.blocks})
    longest = max(len(item.request.blocks) for item in ready.items) + 2
    return max(longest, int(blocks * share / ENGINES)) * block_tokens


def row_of(workload: str, share: float, knowledge: KnowledgeName, result: RunResult) -> Row:
    return Row(
        workload=workload,
        share=share,
        nodes=result.nodes,
        policy=result.policy,
        knowledge=knowledge,
        hit_rate=round(result.hit_rate, 5),
        wasted=round(wasted_of(result), 5),
        ttft_p50_s=round(result.ttft_s["p50"], 5),
        ttft_p90_s=round(result.ttft_s["p90"], 5),
        failed=result.failed,
    )


def wasted_of(result: RunResult) -> float:
    """Tokens believed and not found, for each prompt token. What was found and not believed counts against it."""
    return max(0.0, result.predicted_hit_rate - result.hit_rate)


# --- what is asked of the figures -------------------------------------------------------------------------------------


def recovered(rows: Sequence[Row], measure: str) -> dict[str, Any]:
    """How much of the distance between estimated and told calibration covers, where it is worth a word."""
    by_cell = {(row.cell, row.knowledge): getattr(row, measure) for row in rows}
    shares = {}
    for cell in dict.fromkeys(row.cell for row in rows):
        nothing, learned, told = (by_cell[cell, name] for name in KNOWLEDGE)
        distance = told - nothing if measure == "hit_rate" else nothing - told
        gained = learned - nothing if measure == "hit_rate" else nothing - learned
        if distance >= WORTH:
            shares[" ".join(map(str, cell))] = round(gained / distance, 3)
    values = list(shares.values())
    return {
        "goal": RECOVERED_GOAL,
        "cells": len(values),
        "mean": round(fmean(values), 3) if values else None,
        "reached": all(value >= RECOVERED_GOAL for value in values),
        "missed": {cell: value for cell, value in shares.items() if value < RECOVERED_GOAL},
    }


def four_as_one(rows: Sequence[Row]) -> dict[str, Any]:
    """Hit rates of four nodes that hear the engines, against one."""
    told = {row.cell: row.hit_rate for row in rows if row.knowledge == "events"}
    below = {
        f"{workload} {share} {policy}": round(told[workload, share, 1, policy] - told[workload, share, 4, policy], 4)
        for workload, share, nodes, policy in told
        if nodes == 1
    }
    missed = {cell: value for cell, value in below.items() if value > NODES_GOAL}
    return {"goal": NODES_GOAL, "greatest": max(below.values()), "reached": not missed, "missed": missed}


# --- running ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), default=[])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few requests of each; nothing is written")
    return parser.parse_args(argv)


def rows_of(name: str, arguments: argparse.Namespace) -> list[Row]:
    workload = WORKLOADS[name]
    trace = workload.load()
    if arguments.quick:
        trace = replace(trace, requests=trace.requests[:QUICK_REQUESTS])
    ready = make_ready(replace(trace, name=name))
    found = []
    for share in SHARES:
        named = list(cases(workload, ready, share, arguments.seed))
        done = execute_all([task for _, task in named], arguments.jobs, time.process_time)
        found += [row_of(name, share, knowledge, each.result) for (knowledge, _), each in zip(named, done, strict=True)]
    for row in found:
        print(shown(row), flush=True)
    return found


def shown(row: Row) -> str:
    return (
        f"{row.workload:22} {row.share:4.0%} {row.nodes} {row.policy:13} {row.knowledge:11} hits {row.hit_rate:.3f}  "
        f"wasted {row.wasted:.4f}  ttft p50 {row.ttft_p50_s * 1000:6.0f} p90 {row.ttft_p90_s * 1000:6.0f} ms"
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    names = [name for name in arguments.workload or TRAFFIC if WORKLOADS[name].there]
    rows = [row for name in names for row in rows_of(name, arguments)]
    goals = {
        "calibration_recovers_wasted_prefill": recovered(rows, "wasted"),
        "calibration_recovers_hits": recovered(rows, "hit_rate"),
        "four_nodes_as_one": four_as_one(rows),
    }
    for name, goal in goals.items():
        print(name, json.dumps(goal))
    if arguments.quick or arguments.workload or len(names) < len(TRAFFIC):
        return 0
    result = {"commit": commit(), "machine": machine(), "seed": arguments.seed, "goals": goals}
    lines = ",\n".join(f"    {json.dumps({slot: getattr(row, slot) for slot in Row.__slots__})}" for row in rows)
    text = json.dumps(result, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ]\n}}\n'
    (RESULTS / "truth.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
