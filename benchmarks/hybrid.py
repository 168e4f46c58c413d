"""What does a router gain that knows hybrid models' checkpoints, and what does it lose if it knows only attention?

`python -m benchmarks.hybrid [--quick] [--workload rag] [--profile vllm_align] [--nodes 1]`

Eight engines of each profile (`ranvier_py/replay/hybrid/cache_models.py` says what they keep of a prefix), one policy,
and three kinds of knowledge. *attention*: only the events of keys and values, which is all that today's routers read.
*checkpoint*: as our nodes do, the events of states if an engine publishes them, else what its profile and answers tell
(SGLang). *oracle*: what each engine would reuse. Traffic and engines: `workloads/hybrid_workloads.py`. One node is also
run with answers that come as a whole, of which a router sees no first token.

Each run gives: the hit rate by the engines' count; times to the first token; precision, the share of the predicted
tokens that were reused; recall, the share of the reused tokens that were predicted; and `wasted`, tokens that were
computed although predicted to be cached, as a share of all prompt tokens. `missed` tokens were reused but not
predicted; `in_step` are those of requests whose prediction was short by less than one step of anchors, within which a
router cannot know where prompts part.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks.engine_caches import believed
from benchmarks.harness.bench import command_line, finish, how_answered, show, show_row
from benchmarks.workloads.hybrid_workloads import HYBRID_WORKLOADS, speed_of
from benchmarks.workloads.workloads import ENGINES, Workload
from ranvier_py.core.prompts.fingerprint import ANCHOR_STEP_BLOCKS
from ranvier_py.replay.engine.engine_values import CacheName
from ranvier_py.replay.engine.presets import PROFILES
from ranvier_py.replay.jobs import Done, Task, execute_all, make_ready
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.traces.trace import Trace

POLICY = "affinity"
"""The default policy."""

NODES = (1, 4)
REQUESTS = 400
"""The first requests of each workload."""

SEVERAL_NODES: tuple[CacheName, ...] = ("attention", "vllm_align", "sglang_no_buffer", "sglang_extra_buffer")
"""The profiles that four nodes run with: those that engines have by default, and those whose states nothing reports."""

QUICK_REQUESTS = 200
QUICK_WORKLOADS = ("lmsys", "rag")

ORACLE_GOAL = 0.02  # hit rate below that of the oracle, at most
PREDICTED_GOAL = 0.98  # precision and recall

ATTENTION, CHECKPOINT, ORACLE = "attention", "checkpoint", "oracle"

KNOWLEDGE: Mapping[str, KnowledgeName] = MappingProxyType(
    {ATTENTION: "attention", CHECKPOINT: "events", ORACLE: "oracle"}
)
"""The replay's knowledge, by what the router knows."""

COUNTED = ("requests", "cached_tokens", "missed", "in_step", "failed")
MEASURED = ("rate", "hit_rate", "ttft_p50_s", "ttft_p90_s", "precision", "recall", "wasted")


Row = Mapping[str, Any]
"""Workload, profile, nodes, what the router knows, kind of answers, and figures, over all draws of the workload."""


def cases(
    workload: Workload, trace: Trace, arguments: argparse.Namespace, nodes: int, draw: int, streamed: bool
) -> Iterator[tuple[Row, Task]]:
    """Yield all runs of one draw of a workload on so many nodes, each with the names of its row."""
    ready = make_ready(trace, stream=streamed)
    speed = speed_of(ready, workload.engine)
    for cache in arguments.profile or (PROFILES if nodes == 1 else SEVERAL_NODES):
        engine = replace(workload.engine, cache=cache, block_size=ready.summary.block_tokens)
        for known, knowledge in KNOWLEDGE.items():
            plan = Plan(
                POLICY,
                nodes,
                (engine,) * ENGINES,
                speed=speed,
                seed=arguments.seed + draw,
                regret=False,
                per_request=True,
                knowledge=knowledge,
            )
            names = {"workload": workload.name, "profile": cache, "nodes": nodes, "knows": known, "streamed": streamed}
            yield names, Task(ready, plan)


def figures(done: Done, block_tokens: int) -> dict[str, Any]:
    """Return a run's figures for the result file."""
    result = done.result
    predicted, reused, both, prompts = believed(done, block_tokens)
    return {
        "rate": result.rate,
        "requests": result.requests,
        "hit_rate": round(result.hit_rate, 5),
        "cached_tokens": result.cached_tokens,
        "ttft_p50_s": round(result.ttft_s["p50"], 5),
        "ttft_p90_s": round(result.ttft_s["p90"], 5),
        "precision": round(both / predicted, 5) if predicted else None,
        "recall": round(both / reused, 5) if reused else None,
        "wasted": round((predicted - both) / max(1, prompts), 5),
        **missed(done, block_tokens),
        "failed": result.failed,
    }


def missed(done: Done, block_tokens: int) -> dict[str, int]:
    """Return the tokens reused but not predicted, and those of them where a request's prediction was short by less than
    a step of anchors."""
    rows = [row for row in map(json.loads, done.lines.splitlines()) if row.get("cached", 0) > row["matched"]]
    behind = [row["cached"] - row["matched"] for row in rows]
    return {"missed": sum(behind), "in_step": sum(each for each in behind if each < ANCHOR_STEP_BLOCKS * block_tokens)}


# --- what is asked of the figures -------------------------------------------------------------------------------------


def goals(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the goals: in each cell hits near the oracle's, and unchanged for attention; for each profile, precision
    and recall as means over its workloads."""
    cells: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        nodes_and_answers = f"{row['nodes']}{how_answered(row)}"
        cells.setdefault((row["workload"], row["profile"], nodes_and_answers), {})[row["knows"]] = row
    below, shown, lost = {}, {}, {}
    right: dict[str, list[Row]] = {}
    for (workload, profile, nodes), known in cells.items():
        name, ours = f"{workload} {profile} {nodes}", known[CHECKPOINT]
        below[name] = round(known[ORACLE]["hit_rate"] - ours["hit_rate"], 5)
        right.setdefault(f"{profile} {nodes}", []).append(ours)
        if profile == "attention":
            lost[name] = known[ATTENTION]["cached_tokens"] - ours["cached_tokens"]
    for name, each in right.items():
        for key in ("precision", "recall"):  # None: nothing was predicted, or nothing reused
            shown[f"{name} {key}"] = round(fmean(1.0 if row[key] is None else row[key] for row in each), 5)
    return {
        "near_oracle": goal_of(below, ORACLE_GOAL, max, {name: by for name, by in below.items() if by > ORACLE_GOAL}),
        "predicted": goal_of(
            shown, PREDICTED_GOAL, min, {name: by for name, by in shown.items() if by < PREDICTED_GOAL}
        ),
        "attention_unchanged": goal_of(lost, 0, max, {name: by for name, by in lost.items() if by}),
    }


def goal_of(found: Mapping[str, float], goal: float, worst: Any, missed: Mapping[str, float]) -> dict[str, Any]:
    return {
        "goal": goal,
        "cells": len(found),
        "worst": worst(found.values(), default=None),
        "reached": not missed,
        "missed": dict(missed),
    }


# --- running ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, seed="the nodes", jobs=True, quick="a few requests of some")
    parser.add_argument("--workload", action="append", choices=list(HYBRID_WORKLOADS), default=[])
    parser.add_argument("--profile", action="append", choices=PROFILES, default=[])
    parser.add_argument("--nodes", type=int, action="append", choices=NODES, default=[])
    return parser.parse_args(argv)


def rows_of(workload: Workload, arguments: argparse.Namespace) -> Iterator[Row]:
    loaded = workload.loaded(QUICK_REQUESTS if arguments.quick else REQUESTS)
    kinds = [(nodes, streamed) for streamed in (True, False) for nodes in arguments.nodes or NODES]
    for nodes, streamed in (kind for kind in kinds if kind != (4, False)):
        named: list[tuple[Row, Task]] = []
        for draw in range(1 if arguments.quick else workload.draws):
            named += cases(workload, workload.trace(draw, loaded), arguments, nodes, draw, streamed)
        done = execute_all([task for _, task in named], arguments.jobs, time.process_time)
        drawn: dict[tuple[Any, ...], list[Row]] = {}
        for (about, _), each in zip(named, done, strict=True):
            drawn.setdefault(tuple(about.values()), []).append({**about, **figures(each, loaded.block_tokens)})
        for draws in drawn.values():
            row = mean_of(draws)
            show_row(row)
            yield row


def mean_of(draws: Sequence[Row]) -> Row:
    """Return one row for all draws of a cell: sums of counts, means of the rest. `hit_rates` has each draw's."""
    first = draws[0]
    if len(draws) == 1:
        return first
    row = {**first, "hit_rates": [each["hit_rate"] for each in draws]}
    for key in COUNTED:
        row[key] = sum(each[key] for each in draws)
    for key in MEASURED:
        row[key] = mean([each[key] for each in draws if each[key] is not None])
    return row


def mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 5) if values else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if traces are absent: they are skipped with a message."""
    arguments = parse(argv)
    began = time.perf_counter()
    names = arguments.workload or (QUICK_WORKLOADS if arguments.quick else list(HYBRID_WORKLOADS))
    there = [HYBRID_WORKLOADS[name] for name in names if HYBRID_WORKLOADS[name].is_there()]
    rows: list[Row] = []
    for workload in there:
        rows += rows_of(workload, arguments)
        show(f"{workload.name}: {time.perf_counter() - began:.0f} s so far")
    found = goals(rows)
    for name, goal in found.items():
        show_row({"goal": name, **goal})
    settings = {"policy": POLICY, "engines": ENGINES, "limits": {each.name: each.limits for each in there}}
    settings["first_requests"] = REQUESTS
    settings["draws"] = {each.name: each.draws for each in there}
    whole = len(there) == len(HYBRID_WORKLOADS) and not (arguments.profile or arguments.nodes)
    return finish("hybrid", arguments, {**settings, "goals": found}, whole=whole, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
