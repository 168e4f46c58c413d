"""Does a route table that is too small give more hits if it evicts by utility, and what does that cost when it is full?

`python -m benchmarks.route_eviction [--quick] [--workload taubench]`

*Hits*: one node with the default policy serves each trace with eight engines that evict nothing, so that every miss is
due to the router. The tables have SHARES of the rows that the trace would fill, and evict by LRU or by utility. Answers
are streams, or come as a whole: then a router sees no first token. *Costs*: for a full table of a million rows with the
chats of `decision`, the memory of a row, and the microseconds of one `learn` of a new chat, which evicts as many rows
as it adds.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.decision import Chats, fill, learn, measure, memory_of_process
from benchmarks.harness.bench import command_line, each_apart, finish, how_answered, show, show_row
from benchmarks.workloads.hybrid_workloads import HYBRID_WORKLOADS, speed_of
from benchmarks.workloads.workloads import AMPLE, AMPLE_TOKENS, ENGINES, WORKLOADS, Workload
from ranvier_py.core.routing.route_table import RouteTable, RouteTableOptions
from ranvier_py.core.routing.route_table.route_values import LRU, UTILITY
from ranvier_py.replay.jobs import Ready, Task, make_ready, make_run
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.traces.trace import Trace

POLICY = "affinity"
LOAD = 0.5  # share of the capacity that a trace has in the policies benchmark, if it has one
SHARES = (0.15, 0.4)
"""Sizes of tables, as shares of the rows that an unbounded table would have at the end."""

REQUESTS_MAX = 1000  # of each trace
TABLE_ROWS = 1_000_000
ROUNDS = 2000
WORSE_GOAL = 0.01  # hit rate below LRU's, at most
QUICK_WORKLOADS = ("chat_threads", "rag")
QUICK_REQUESTS, QUICK_ROWS = 500, 50_000

Row = Mapping[str, Any]
"""Workload, share, rows, eviction, and figures."""


def workloads_of(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names, or all: those of the hybrid and those of the policies benchmark."""
    known = {**{name: WORKLOADS[name] for name in WORKLOADS if name not in HYBRID_WORKLOADS}, **HYBRID_WORKLOADS}
    return [each for name, each in known.items() if (not names or name in names) and each.is_there()]


def rows_of(workload: Workload, limit: int, seed: int) -> Iterator[Row]:
    """Yield the rows of a workload with streams, and with answers that come as a whole."""
    trace = workload.loaded(limit)
    for streamed in (True, False):
        yield from rows_of_kind(workload, trace, seed, streamed)


def rows_of_kind(workload: Workload, trace: Trace, seed: int, streamed: bool) -> Iterator[Row]:
    """Yield the rows of a table that is never full, and of smaller ones with either rule."""
    ready = make_ready(trace, stream=streamed)
    engine = replace(workload.engine, cache_tokens=AMPLE_TOKENS, block_size=ready.summary.block_tokens)
    speed = workload.capacity[AMPLE] * LOAD if AMPLE in workload.capacity else speed_of(ready, workload.engine)
    plan = Plan(POLICY, 1, (engine,) * ENGINES, speed=speed, seed=seed, regret=False)
    whole, figures = run(ready, plan)
    names = {"workload": workload.name, "streamed": streamed}
    yield {**names, "share": 1.0, "rows": whole, "eviction": LRU, **figures}
    for share in SHARES:
        capacity = max(16, int(share * whole))
        for eviction in (LRU, UTILITY):
            small = replace(plan, routes_max=capacity, routes=RouteTableOptions(eviction))
            rows, figures = run(ready, small)
            yield {**names, "share": share, "rows": rows, "eviction": eviction, **figures}


def run(ready: Ready, plan: Plan) -> tuple[int, dict[str, Any]]:
    """Do one run; return the number of rows at the end, and the figures for the result file."""
    done = make_run(Task(ready, plan))
    done.go()
    assert isinstance(done.placer, Nodes)
    table, found = done.placer.routers[0].routes, done.tally.measures(done.span_s)
    figures = {name: found[name] for name in ("hit_rate", "predicted_hit_rate")}
    return len(table), {**figures, "ttft_p90_s": found["ttft_s"]["p90"]}


# --- what it takes ----------------------------------------------------------------------------------------------------


def costs_of(case: tuple[str, int, int]) -> Row:
    """Measure the costs of a full table that learns new chats."""
    eviction, rows, seed = case
    chats, table = Chats(seed), RouteTable(capacity=rows, options=RouteTableOptions(eviction))
    gc.collect()
    before = memory_of_process()
    now = fill(table, chats, rows)
    gc.collect()
    memory = memory_of_process() - before
    new = [chats.new() for _ in range(ROUNDS)]
    evicted = sum(table.counters.evicted.values())
    gc.disable()
    times = measure(lambda number: partial(learn, table, new[number], now + number / 20), ROUNDS)
    gc.enable()
    each = (sum(table.counters.evicted.values()) - evicted) / ROUNDS
    return {
        "eviction": eviction,
        "rows": len(table),
        "memory_bytes_per_row": round(memory / len(table), 1),
        "learn_microseconds": times,
        "evicted_by_each": round(each, 1),
    }


# --- what is asked of the figures -------------------------------------------------------------------------------------


def goals(rows: Sequence[Row]) -> dict[str, Any]:
    """Compare the hits of utility with those of LRU in each cell of workload and share."""
    hits = {(f"{row['workload']}{how_answered(row)}", row["share"], row["eviction"]): row["hit_rate"] for row in rows}
    gained = {
        f"{workload} {share:g}": round(hits[workload, share, UTILITY] - rate, 5)
        for (workload, share, eviction), rate in hits.items()
        if eviction == LRU and share < 1
    }
    worst = min(gained.values(), default=0.0)
    return {
        "goal": WORSE_GOAL,
        "cells": len(gained),
        "better": sum(by > 0 for by in gained.values()),
        "mean": round(sum(gained.values()) / max(1, len(gained)), 5),
        "most": max(gained.values(), default=0.0),
        "worst": worst,
        "reached": worst >= -WORSE_GOAL,
        "gained": gained,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, seed="the node and the chats", quick="two traces and a small table")
    parser.add_argument("--workload", action="append", default=[])
    arguments: argparse.Namespace = parser.parse_args(argv)
    quick = arguments.quick
    rows = []
    for workload in workloads_of(arguments.workload or (QUICK_WORKLOADS if quick else ())):
        for row in rows_of(workload, QUICK_REQUESTS if quick else REQUESTS_MAX, arguments.seed):
            show_row(row)
            rows.append(row)
    cases = [(eviction, QUICK_ROWS if quick else TABLE_ROWS, arguments.seed) for eviction in (LRU, UTILITY)]
    costs = [] if arguments.workload else list(each_apart(costs_of, cases))
    show(str(costs))
    result = {"goals": goals(rows), "costs": costs}
    return finish("route_eviction", arguments, result, whole=not arguments.workload, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
