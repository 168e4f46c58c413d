"""What does placement owe to its constants: each halved and doubled, in workloads that are drawn anew from the traces?

    python -m benchmarks.constants [--seed 1] [--trace qmsum] [--draws 2]

`affinity` serves each workload of `workloads.anew` as it is, and again with one constant changed. A figure is the p90
of the time to first token, as a multiple of that without the change, streamed and as whole answers. `chance` is the
control: LOAD_MORE of the load, which should mean nothing; how far it moves a cell is how far chance alone does, since
one request that goes elsewhere changes what all later ones find. Goal: no constant moves any cell by more than 3 %.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest.mock import patch

from benchmarks.harness.bench import command_line, finish, show, show_row
from benchmarks.workloads.anew import drawn
from benchmarks.workloads.workloads import Workload
from ranvier_py.core.routing.placement import affinity, ttft
from ranvier_py.core.routing.rates import decode_rate, evictions, service_rate, work
from ranvier_py.replay.jobs import Task, execute_all, make_ready
from ranvier_py.replay.replay_plan import Plan

POLICY = "affinity"
MOST = 1.03
TIMES = (0.5, 2.0)
LOAD_MORE = 1.01
CONSTANTS: Mapping[str, Any] = {
    "LIGHTEST": affinity,
    **dict.fromkeys(("COMMON_SHARE", "COMMON_SLACK_TOKENS", "TIE_SHARE", "DECODE_SHARE"), ttft),
    **dict.fromkeys(("OTHERS_SHARE", "LOSSES_S"), ttft),
    **dict.fromkeys(("ANSWER_TOKENS", "ASSUMED", "LOOK_EVERY", "LENGTH_WINDOW"), decode_rate),
    **dict.fromkeys(("STEP_TOKENS", "CONTEXT_TOKENS"), decode_rate),
    **dict.fromkeys(("BORROWED", "WINDOW", "NOMINAL_S_PER_TOKEN"), service_rate),
    **dict.fromkeys(("FADE_S", "RECENT_S", "PRIOR_TOKENS"), evictions),
    "REQUEST_TOKENS": work,
}
"""The constants by which `affinity` and `ttft` place, with the modules that have them. `UNEVEN` has no half: it is a
ratio above 1."""


@contextmanager
def changed(name: str, times: float) -> Iterator[None]:
    """Change a constant wherever a module of the package has imported it."""
    before = getattr(CONSTANTS[name], name)
    value = max(1, round(times * before)) if isinstance(before, int) else times * before
    having = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("ranvier_py.core.routing") and getattr(module, name, None) is before
    ]
    patches = [patch.object(module, name, value) for module in having]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def tasks_of(workload: Workload, draws: int, seed: int) -> list[list[Task]]:
    """Return the runs of a workload: of each kind of answers those of all draws."""
    cache, capacity = next(iter(workload.capacity.items()))
    loaded = workload.loaded(None)
    traces = [workload.trace(draw, loaded) for draw in range(min(draws, workload.draws))]
    plan = Plan(POLICY, 1, workload.engines(cache, traces[0].block_tokens), speed=capacity, seed=seed, regret=False)
    return [
        [Task(make_ready(trace, stream=streamed), replace(plan, seed=seed + at)) for at, trace in enumerate(traces)]
        for streamed in (True, False)
    ]


def p90s(cells: Sequence[Sequence[Task]], jobs: int) -> list[float]:
    """Return the mean p90 of each cell."""
    done = iter(execute_all([task for cell in cells for task in cell], jobs, time.process_time))
    return [fmean(next(done).result.ttft_s["p90"] for _ in cell) for cell in cells]


def row_of(name: str, times: float, found: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(found, base, strict=True)]
    moved = [max(ratio, 1 / ratio) for ratio in ratios]
    return {
        "constant": name,
        "times": times,
        "cells": len(ratios),
        "ratio": round(math.exp(fmean(map(math.log, ratios))), 4),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "over": sum(each > MOST for each in moved),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, seed="the workloads", jobs=True, quick="one constant, one workload")
    parser.add_argument("--trace", default="", help="names of traces with commas (all)")
    parser.add_argument("--draws", type=int, default=2, help="of each workload (2)")
    arguments = parser.parse_args(argv)
    traces = arguments.trace.split(",") if arguments.trace else [""]
    there = [each for each in drawn(arguments.seed) if any(each.name.startswith(trace) for trace in traces)]
    there = there[:1] if arguments.quick else there
    cells = [cell for workload in there for cell in tasks_of(workload, arguments.draws, arguments.seed)]
    base = p90s(cells, arguments.jobs)
    again = [
        [task._replace(plan=replace(task.plan, speed=task.plan.speed * LOAD_MORE)) for task in cell] for cell in cells
    ]
    rows = [row_of("chance", 1.0, p90s(again, arguments.jobs), base)]
    for name in list(CONSTANTS)[: 1 if arguments.quick else None]:
        for times in TIMES:
            with changed(name, times):
                rows.append(row_of(name, times, p90s(cells, arguments.jobs), base))
            show_row(rows[-1])
    if not there:
        show("no traces: set SHARED_DATA")
    return finish("constants", arguments, {"goal": MOST, "rows": rows}, whole=bool(there))


if __name__ == "__main__":
    sys.exit(main())
