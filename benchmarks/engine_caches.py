"""What is it worth to know the engines' caches if these are too small: by estimates, calibrated by answers, or events?

`python -m benchmarks.engine_caches [--quick] [--workload qmsum]`

The engines' caches together hold 25, 50 or 100 % of the working set (each prefix of the trace once), at LOAD times the
capacity of such engines (`CAPACITY`). For each run: the token hit rate as the engines count it; tokens that were
predicted to be cached and were not, as a share of all prompt tokens (`wasted`); tokens that were cached and not
predicted (`unforeseen`); and times to the first token. Oracles are the bounds: `oracle_greedy` (hits), `oracle_ttft`
(times). Goals: in wasted prefill and in hit rate, calibration alone recovers at least half of what events would, where
there is something to recover; the hit rate of four nodes is within a point of one node's, with events and without. Both
are means of draws (`DRAWS_OF_NODES`), and `hit_rate_error` is the standard error of such a mean. One node is also run
with answers that come as a whole, of which a router sees no first token (`streamed` is false).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness.bench import command_line, finish, show_row
from benchmarks.workloads.workloads import DELAY, ENGINES, WORKLOADS, Workload
from ranvier_py.replay.jobs import Done, Ready, Task, execute_all, make_ready
from ranvier_py.replay.knowledge import KNOWLEDGE
from ranvier_py.replay.oracles import ORACLES
from ranvier_py.replay.replay_plan import Plan

SHARES = (0.25, 0.5, 1.0)
"""Sizes of all caches together, as shares of the working set."""

POLICIES = {1: ("affinity", "ttft", "cache_aware"), 4: ("affinity", "ttft")}
"""Policies to run, by number of nodes."""

SHARES_OF_NODES = {1: SHARES, 4: SHARES[:1]}
"""Cache sizes to run, by number of nodes. Four nodes take ten times as long, so they have only the smallest caches."""

DRAWS_OF_NODES = {1: 8, 4: 6}
"""Runs with the smallest caches, by number of nodes; one run with others. With a few hundred requests a run is chaotic:
one request that is placed elsewhere changes all later evictions, and the hit rate varies by up to two points. Each draw
has another seed, which decides ties and the nodes that requests come to, and arrivals a little slower (DELAY)."""

LOAD = 0.7
"""Share of the capacity at which queues matter and nothing saturates."""

CAPACITY = {
    "mooncake": (1.61, 1.76, 1.76),
    "qmsum": (2.83, 4.56, 8.35),
    "chat_threads": (0.247, 0.504, 1.35),
    "shared_prefix_groups": (0.662, 1.08, 1.41),
}
"""Speeds, for each of SHARES, at which the p90 of `oracle_ttft` is four times that of idle engines, as in the policies
benchmark. Engines with small caches serve far less: they compute more, and hold fewer requests at a time."""

ENGINES_OF = {"qmsum": 4}
"""Numbers of engines where an eighth of the smallest cache would not hold the longest prompt; elsewhere ENGINES."""

QUICK_REQUESTS = 300
RECOVERED_GOAL = 0.5
NODES_GOAL = 0.01
WORTH = 0.005
"""If events differ from estimates by less than half a point, there is nothing to recover."""

ORACLE = "oracle"

Row = Mapping[str, Any]
"""Workload, share of the working set, kind of answers, nodes (0: an oracle), policy, knowledge, and `figures`."""


def cases(
    workload: Workload, ready: Ready, share: float, seed: int, nodes_max: int = max(POLICIES)
) -> Iterator[tuple[str, Task]]:
    """Yield all runs of a workload with one cache size and so many nodes, each with the name of its knowledge."""
    engines = ENGINES_OF.get(workload.name, ENGINES)
    cache_tokens = cache_tokens_of(ready, share, engines)
    engine = replace(workload.engine, cache_tokens=cache_tokens, block_size=ready.summary.block_tokens)
    speed = round(LOAD * CAPACITY[workload.name][SHARES.index(share)], 5)
    plan = Plan("", 0, (engine,) * engines, speed=speed, seed=seed, regret=False, per_request=True)
    for oracle in ORACLES:
        yield ORACLE, Task(ready, replace(plan, policy=oracle))
    for nodes, policies in POLICIES.items():
        for policy in policies if share in SHARES_OF_NODES[nodes] and nodes <= nodes_max else ():
            for knowledge in KNOWLEDGE:
                for draw in range(DRAWS_OF_NODES[nodes] if share == SHARES[0] else 1):
                    run = replace(plan, policy=policy, nodes=nodes, knowledge=knowledge, seed=seed + draw)
                    yield knowledge, Task(ready, replace(run, speed=round(speed * (1 - DELAY * draw), 5)))


def cache_tokens_of(ready: Ready, share: float, engines: int = ENGINES) -> int:
    """Return the cache of one engine, in whole blocks, for a share of the working set; at least the longest request."""
    block_tokens = ready.summary.block_tokens
    blocks = len({block for item in ready.items for block in item.request.blocks})
    longest = max(len(item.request.blocks) for item in ready.items) + 2
    return max(longest, int(blocks * share / engines)) * block_tokens


def figures(done: Done, block_tokens: int) -> dict[str, Any]:
    """Return a run's figures for the result file. Wrong predictions of oracles are not counted."""
    result = done.result
    predicted, reused, both, prompts = believed(done, block_tokens) if result.nodes else (0, 0, 0, 1)
    wasted, unforeseen = (predicted - both) / max(1, prompts), (reused - both) / max(1, prompts)
    return {
        "hit_rate": round(result.hit_rate, 5),
        "wasted": round(wasted, 5),
        "unforeseen": round(unforeseen, 5),
        "ttft_p50_s": round(result.ttft_s["p50"], 5),
        "ttft_p90_s": round(result.ttft_s["p90"], 5),
        "failed": result.failed,
    }


def error_of(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of these values; None for a single one."""
    return round(stdev(values) / len(values) ** 0.5, 5) if len(values) > 1 else None


def believed(done: Done, block_tokens: int) -> tuple[int, int, int, int]:
    """Return the tokens predicted (of what a cache can reuse at all), reused, both (by request), and in all prompts."""
    predicted = reused = both = prompts = 0
    for line in done.lines.splitlines():
        row = json.loads(line)
        if "cached" in row:
            expected = min(row["matched"], (row["prompt"] - 1) // block_tokens * block_tokens)
            predicted += expected
            reused += row["cached"]
            both += min(expected, row["cached"])
            prompts += row["prompt"]
    return predicted, reused, both, prompts


# --- what is asked of the figures -------------------------------------------------------------------------------------


def cell_of(row: Row) -> tuple[str, float, int, str]:
    return row["workload"], row["share"], row["nodes"], row["policy"]


def recovered(rows: Sequence[Row], measure: str) -> dict[str, Any]:
    """Return how much calibration recovers of the difference between estimates and events that is at least WORTH."""
    by_cell = {(cell_of(row), row["knowledge"]): row[measure] for row in rows}
    shares, lost = {}, {}
    for cell in dict.fromkeys(cell_of(row) for row in rows if row["nodes"]):
        estimated, calibrated, events = (by_cell[cell, name] for name in KNOWLEDGE)
        distance = events - estimated if measure == "hit_rate" else estimated - events
        gained = calibrated - estimated if measure == "hit_rate" else estimated - calibrated
        if distance >= WORTH:
            shares[" ".join(map(str, cell))] = round(gained / distance, 3)
        if gained <= -WORTH:
            lost[" ".join(map(str, cell))] = round(-gained, 4)
    values = list(shares.values())
    return {
        "goal": RECOVERED_GOAL,
        "cells": len(values),
        "mean": round(fmean(values), 3) if values else None,
        "reached": all(value >= RECOVERED_GOAL for value in values),
        "missed": {cell: value for cell, value in shares.items() if value < RECOVERED_GOAL},
        "worse_than_estimated": lost,
    }


def four_as_one(rows: Sequence[Row], *knowledge: str) -> dict[str, Any]:
    """Compare the hit rates of four nodes with those of one node with the same kind of `knowledge`."""
    rates = {(*cell_of(row), row["knowledge"]): row["hit_rate"] for row in rows if row["knowledge"] in knowledge}
    below = {
        f"{workload} {share} {policy} {known}": round(rates[workload, share, 1, policy, known] - rate, 4)
        for (workload, share, nodes, policy, known), rate in rates.items()
        if nodes == 4
    }
    missed = {cell: value for cell, value in below.items() if value > NODES_GOAL}
    return {"goal": NODES_GOAL, "greatest": max(below.values()), "reached": not missed, "missed": missed}


# --- running ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, seed="the nodes", jobs=True, quick="a few requests of each")
    parser.add_argument("--workload", action="append", choices=list(CAPACITY), default=[])
    return parser.parse_args(argv)


def rows_of(name: str, arguments: argparse.Namespace) -> list[Row]:
    workload = WORKLOADS[name]
    trace = workload.loaded(QUICK_REQUESTS if arguments.quick else None)
    found: list[Row] = []
    for streamed, share in product((True, False), SHARES):
        ready = make_ready(trace, stream=streamed)
        named = list(cases(workload, ready, share, arguments.seed, max(POLICIES) if streamed else 1))
        done = execute_all([task for _, task in named], arguments.jobs, time.process_time)
        draws: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
        for (knowledge, _), each in zip(named, done, strict=True):
            cell = each.result.nodes, each.result.policy, knowledge
            draws.setdefault(cell, []).append(figures(each, ready.summary.block_tokens))
        for (nodes, policy, knowledge), several in draws.items():
            means: dict[str, Any] = {key: round(fmean(each[key] for each in several), 5) for key in several[0]}
            means["hit_rate_error"] = error_of([each["hit_rate"] for each in several])
            cell_names = {"nodes": nodes, "policy": policy, "knowledge": knowledge}
            row = {"workload": name, "share": share, "streamed": streamed, **cell_names, **means}
            show_row(row)
            found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    names = [name for name in arguments.workload or CAPACITY if WORKLOADS[name].is_there()]
    rows = [row for name in names for row in rows_of(name, arguments)]
    streams, whole = ([row for row in rows if row["streamed"] is streamed] for streamed in (True, False))
    goals = {
        "calibration_recovers_wasted_prefill": recovered(streams, "wasted"),
        "calibration_recovers_hits": recovered(streams, "hit_rate"),
        "calibration_recovers_wasted_prefill_of_whole_answers": recovered(whole, "wasted"),
        "calibration_recovers_hits_of_whole_answers": recovered(whole, "hit_rate"),
        "four_nodes_as_one": four_as_one(streams, "events"),
        "four_nodes_as_one_without_events": four_as_one(streams, "estimated", "calibrated"),
    }
    for name, goal in goals.items():
        show_row({"goal": name, **goal})
    settings = {"load": LOAD, "capacity": CAPACITY, "engines": {name: ENGINES_OF.get(name, ENGINES) for name in names}}
    result = {**settings, "goals": goals}
    return finish("engine_caches", arguments, result, whole=len(names) == len(CAPACITY), rows=rows)


if __name__ == "__main__":
    sys.exit(main())
