"""Compares all placement policies on the same traffic, from idle engines to saturated ones, on one node and on four.

`python -m benchmarks.policies [--quick] [--workload qmsum] [--policy ttft,affinity] [--nodes 1] [--load 0.5,0.85]`
`python -m benchmarks.policies --anew [--seed 2]`

All policies and both oracles are replayed by `ranvier_py.replay`. `workloads.workloads` describes the traffic, the
engines and the loads, `workloads.reported` traffic that others reported, `harness.policies_goals` the goals. Each
workload is run with streams, and some policies also with answers that come as a whole, of which a router sees no first
token. Regret is computed only at REGRET_LOAD, since it takes as long as the rest of a run. The results are in
results/policies.json, and as a page with charts in policies.html.
`--anew` draws cells from the traces by the seed instead (`workloads.anew`), and writes policies_anew.json.
With `--policy` alone, these policies are measured again, and the JSON keeps the recorded rows of all others, as of
`others_commit`; the page stays that of the last complete run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.harness.bench import RESULTS, command_line, finish, show, show_row
from benchmarks.harness.policies_goals import DIGITS, Row, goals
from benchmarks.workloads.anew import drawn
from benchmarks.workloads.reported import REPORTED
from benchmarks.workloads.workloads import AMPLE, OWN, TIGHT, WORKLOADS, Workload
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.replay.html_report import page
from ranvier_py.replay.jobs import Ready, Task, execute, execute_all, make_ready
from ranvier_py.replay.oracles import ORACLES
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.results import ReplayResults, RunResult
from ranvier_py.replay.traces.trace import Trace

ALL = {**WORKLOADS, **REPORTED}

Loads = Sequence[tuple[str, int, Sequence[float]]]

LOADS = ((AMPLE, 1, (0.1, 0.5, 0.7, 0.85, 0.95)), (AMPLE, 4, (0.5, 0.85)), (TIGHT, 1, (0.5, 0.85)))
"""Cache, nodes, and loads, which are shares of the capacity."""

FLEET_LOADS = ((OWN, 1, (1.0,)),)
WHOLE_LOADS = ((AMPLE, 1, (0.5, 0.85)), (TIGHT, 1, (0.85,)))
"""Of workloads that have engines of their own, and of answers that come as a whole."""

FEW_POLICIES = ("ttft", "affinity", "cache_aware_smg", "bounded_load", "least_loaded", "round_robin")
"""Policies that are run there and on several nodes: ours, and the best others of each kind."""

REGRET_LOAD = 0.7

NEW_COLUMNS: Mapping[str, Any] = {"streamed": True, "e2e_p90_s": None, "uneven_share": None}
"""What rows have that were recorded without these columns."""

KNEE = 4.0
"""The capacity is the speed at which the p90 of `oracle_ttft` is so many times that of idle engines."""

IDLE_SPEED = 0.02
FIRST_SPEED = 0.25
CAPACITY_WITHIN = 1.05  # the bisection ends when the upper bound is at most so many times the lower one

QUICK_REQUESTS = 250
QUICK_LOADS = ((AMPLE, 1, (0.85,)), (AMPLE, 4, (0.85,)))
QUICK_WORKLOADS = ("sharegpt", "shared_prefix_groups")

PAGE_POLICIES = (
    "ttft", "affinity", "cache_aware_smg", "chwbl", "kv_score", "least_loaded", "round_robin", "oracle_greedy",
    "oracle_ttft",
)  # fmt: skip
"""Policies on the page: one of each kind. With all of them it would be a megabyte; the JSON has all."""


class Case(NamedTuple):
    """A run with its workload, cache, load, kind of answers and draw."""

    workload: Workload
    cache: str
    load: float
    streamed: bool
    draw: int
    task: Task


Ran = Sequence[tuple[Case, RunResult]]
"""Runs with their results."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(
        __doc__, seed="entry nodes and drawn placements", jobs=True, quick="a few runs of a few requests"
    )
    parser.add_argument("--workload", action="append", choices=list(ALL), default=[])
    parser.add_argument("--policy", default="", help="names with commas (all, and both oracles)")
    parser.add_argument("--nodes", default="", help="1 or 4 (both)")
    parser.add_argument("--load", default="", help="shares of capacity with commas, instead of the usual ones")
    parser.add_argument("--anew", action="store_true", help="draw workloads from the traces by the seed")
    parser.add_argument("--calibrate", action="store_true", help="measure the capacities and say them")
    return parser.parse_args(argv)


# --- what is run ------------------------------------------------------------------------------------------------------


def policies_of(given: str) -> list[str]:
    known = [*POLICIES, *ORACLES]
    wanted = given.split(",") if given else known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"no such policy: {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted


def loads_of(workload: Workload, streamed: bool, arguments: argparse.Namespace) -> list[tuple[str, int, float]]:
    """Return (cache, nodes, load) of all runs of one policy that is no oracle."""
    given = [float(load) for load in arguments.load.split(",") if load]
    wanted: Loads = QUICK_LOADS if arguments.quick else LOADS if streamed else WHOLE_LOADS
    if workload.fleet:
        wanted, given = FLEET_LOADS, []
    kept = [each for each in wanted if not arguments.nodes or str(each[1]) in arguments.nodes.split(",")]
    return [(cache, nodes, load) for cache, nodes, loads in kept for load in given or loads]


def cases_of(workload: Workload, loaded: Trace, arguments: argparse.Namespace) -> list[Case]:
    """Return all runs of a workload."""
    return [
        case
        for draw in range(1 if arguments.quick else workload.draws)
        for trace in [workload.trace(draw, loaded)]
        for streamed in (True, False)
        for case in cases_of_draw(workload, trace, draw, streamed, arguments)
    ]


def cases_of_draw(
    workload: Workload, trace: Trace, draw: int, streamed: bool, arguments: argparse.Namespace
) -> list[Case]:
    """Return the runs of one draw. An oracle has no nodes: it runs once for all numbers of nodes."""
    wanted = loads_of(workload, streamed, arguments)
    ready = make_ready(trace, stream=streamed)
    found = []
    for cache, load in dict.fromkeys((cache, load) for cache, _, load in wanted):
        counts = [nodes for other, nodes, at in wanted if (other, at) == (cache, load)]
        for policy in policies_of(arguments.policy):
            few = policy in FEW_POLICIES
            if (workload.fleet or not streamed) and not few:
                continue
            for nodes in [0] if policy in ORACLES else [each for each in counts if few or each == 1]:
                plan = Plan(
                    policy=policy,
                    nodes=nodes,
                    engines=workload.engines(cache, trace.block_tokens),
                    speed=round(workload.capacity[cache] * load, DIGITS),
                    seed=arguments.seed + draw,
                    restarts=workload.restarts,
                    regret=load == REGRET_LOAD,
                    think_s=workload.think_s,
                )
                found.append(Case(workload, cache, load, streamed, draw, Task(ready, plan)))
    return found


# --- what comes of it -------------------------------------------------------------------------------------------------


def rows_of(ran: Ran) -> list[Row]:
    """Return a row for each policy in each cell, with the means of the draws."""
    together: dict[tuple[str, str, int, float, bool, str], list[RunResult]] = {}
    for case, result in ran:
        name = (case.workload.name, case.cache, result.nodes, case.load, case.streamed, result.policy)
        together.setdefault(name, []).append(result)
    return [
        Row(
            workload=workload,
            cache=cache,
            nodes=nodes,
            load=load,
            streamed=streamed,
            rate=runs[0].rate,
            policy=policy,
            ttft_p50_s=mean([run.ttft_s["p50"] for run in runs]),
            ttft_p90_s=mean([run.ttft_s["p90"] for run in runs]),
            ttft_p99_s=mean([run.ttft_s["p99"] for run in runs]),
            ttft_mean_s=mean([run.ttft_s["mean"] for run in runs]),
            e2e_p50_s=mean([run.e2e_s["p50"] for run in runs]),
            e2e_p90_s=mean([run.e2e_s["p90"] for run in runs]),
            hit_rate=mean([run.hit_rate for run in runs]),
            predicted_hit_rate=mean([run.predicted_hit_rate for run in runs]),
            requests_per_s=mean([run.requests_per_s for run in runs]),
            max_over_mean=mean([run.max_over_mean for run in runs]),
            uneven_share=mean([run.uneven_share for run in runs]),
            failed=sum(run.failed for run in runs),
            regret_s=mean([run.regret_s["mean"] for run in runs]) if runs[0].regret_s else None,
            processor_s=round(sum(run.wall_s for run in runs), 2),  # the runs' clock was processor time
        )
        for (workload, cache, nodes, load, streamed, policy), runs in together.items()
    ]


def with_recorded(rows: Sequence[Row]) -> tuple[list[Row], dict[str, str]]:
    """Return these rows after the recorded ones of all other policies, and the commit of those. Runs are in virtual
    time, so what a policy does changes with its own code alone."""
    recorded = json.loads((RESULTS / "policies.json").read_text())
    measured = {row.policy for row in rows}
    columns = recorded["columns"]
    every = [Row(**dict(NEW_COLUMNS, **dict(zip(columns, each, strict=True)))) for each in recorded["rows"]]
    others = [row for row in every if row.policy not in measured]
    return [*others, *rows], {"others_commit": recorded.get("others_commit", recorded["commit"])}


def mean(values: Sequence[float]) -> float:
    return round(fmean(values), 5)


def described(case: Case) -> dict[str, Any]:
    """Return what one has to know of a workload to understand its figures."""
    workload = case.workload
    return {
        **asdict(case.task.ready.summary),
        "limits": workload.limits,
        "draws": workload.draws,
        "tight_cache_tokens": workload.tight_tokens,
        "engines": [asdict(limits) for limits in workload.fleet or (workload.engine,)],
        "think_s": workload.think_s,
        "capacity": dict(workload.capacity),
    }


def page_of(ran: Ran, settings: dict[str, Any]) -> str:
    """Return the report of each workload's first draw with ample caches, without load over time, to keep it small."""
    summaries, runs = {}, []
    for case, result in ran:
        if case.draw == 0 and case.cache == AMPLE and case.streamed and result.policy in PAGE_POLICIES:
            summaries[case.workload.name] = case.task.ready.summary
            runs.append(replace(result, load_over_time=()))
    return page(ReplayResults(settings, list(summaries.values()), runs))


def show_rows(rows: Sequence[Row]) -> None:
    for row in sorted(
        rows, key=lambda row: (row.workload, row.cache, row.load, not row.streamed, row.nodes or 99, row.ttft_p90_s)
    ):
        show_row(row._asdict())


# --- capacity ---------------------------------------------------------------------------------------------------------


def capacity(workload: Workload, ready: Ready, cache: str) -> float:
    """Return the capacity, found by bisection: the speed at which `oracle_ttft` reaches KNEE."""
    plan = Plan(
        policy="oracle_ttft", nodes=0, engines=workload.engines(cache, ready.summary.block_tokens), regret=False
    )

    def p90_s(speed: float) -> float:
        result = execute(Task(ready, replace(plan, speed=speed)), time.perf_counter).result
        show(f"  {workload.name} {cache}: p90 {result.ttft_s['p90'] * 1e3:.0f} ms at speed {speed:.4g}")
        return result.ttft_s["p90"]

    most = KNEE * p90_s(IDLE_SPEED)
    low, high = IDLE_SPEED, FIRST_SPEED  # approach from below: runs beyond capacity take longest
    while p90_s(high) <= most:
        low, high = high, 2 * high
    while high > CAPACITY_WITHIN * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if p90_s(middle) <= most else (low, middle)
    return low


# --- all --------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if traces are absent: they are skipped with a message."""
    arguments = parse(argv)
    policies_of(arguments.policy)
    began = time.perf_counter()
    names = arguments.workload or (QUICK_WORKLOADS if arguments.quick else list(ALL))
    there = drawn(arguments.seed) if arguments.anew else [ALL[name] for name in names if ALL[name].is_there()]
    limit = QUICK_REQUESTS if arguments.quick else None
    if arguments.calibrate:
        for workload in (each for each in there if not each.fleet):
            ready = make_ready(workload.trace(0, workload.loaded(limit)))
            for cache in (AMPLE, TIGHT):
                show(f"{workload.name} {cache}: capacity {capacity(workload, ready, cache):.3g}")
        return 0
    ran: list[tuple[Case, RunResult]] = []
    for workload in there:
        cases = cases_of(workload, workload.loaded(limit), arguments)
        show(f"{workload.name}: {len(cases)} runs, {time.perf_counter() - began:.0f} s so far")
        gc.collect()
        gc.freeze()  # no garbage collection, here or in a forked process, needs to walk through the traces
        done = execute_all([case.task for case in cases], arguments.jobs, time.process_time)
        gc.unfreeze()
        here = [(case, each.result) for case, each in zip(cases, done, strict=True)]
        show_rows(rows_of(here))
        ran += here
    return report(ran, arguments, time.perf_counter() - began)


def report(ran: Ran, arguments: argparse.Namespace, took_s: float) -> int:
    rows = rows_of(ran)
    part = arguments.anew or arguments.quick or arguments.load or arguments.nodes or arguments.workload
    kept: dict[str, str] = {}
    if arguments.policy and not part:
        rows, kept = with_recorded(rows)
    found = goals(rows, ample=AMPLE, controls=[workload.name for workload in WORKLOADS.values() if workload.negative])
    for name, goal in found.items():
        show_row({"goal": name, **{key: value for key, value in goal.items() if key != "by_policy"}})
    settings = {"seed": arguments.seed, "knee": KNEE, "loads": [list(each) for each in LOADS]}
    if arguments.anew:
        return finish(
            "policies_anew", arguments, {"took_s": round(took_s), "goals": found, "columns": Row._fields}, rows=rows
        )
    if part or arguments.dry:
        return 0
    workloads = {case.workload.name: described(case) for case, _ in reversed(ran)}
    result = {**settings, **kept, "took_s": round(took_s), "workloads": workloads, "goals": found}
    result["columns"] = Row._fields
    if not kept:
        (RESULTS / "policies.html").write_text(page_of(ran, settings))
    return finish("policies", arguments, result, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
