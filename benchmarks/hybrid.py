"""What a router gains that knows of hybrid models' checkpoints, and what it costs to believe in attention alone.

`python -m benchmarks.hybrid [--quick] [--workload rag] [--profile vllm-align] [--nodes 1]`

Eight engines of each profile (what they keep of a prefix: `ranvier_py/replay/hybrid/cache_models.py`), one policy, and
three kinds of knowledge: *attention*, all that routers of today read, events of keys and values alone; *checkpoint*, as
our nodes have it: events of states where an engine publishes them, what its profile and answers teach where it is
silent of them (SGLang); and an *oracle*, which sees what each engine would reuse. Traffic and engines:
`workloads/hybrid_workloads.py`.

Of each run: hit rate by the engines' count; times to the first token; of the tokens that the router predicted those
that were reused (precision), and of those that were reused those that it predicted (recall); and `wasted`, tokens that
were computed though it believed them cached, as a share of all prompt tokens. `missed` tokens were reused and not
predicted; those `in_step` less than one step of anchors behind the prediction: a router knows no better where prompts
part.
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

from benchmarks.harness.bench import command_line, finish, show, show_row
from benchmarks.workloads.hybrid_workloads import HYBRID_WORKLOADS, speed_of
from benchmarks.workloads.workloads import ENGINES, Workload
from ranvier_py.core.prompts.fingerprint import ANCHOR_STEP_BLOCKS
from ranvier_py.replay.engine.engine_values import CacheName
from ranvier_py.replay.engine.presets import PROFILES
from ranvier_py.replay.jobs import Done, Ready, Task, execute_all, make_ready
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.replay_plan import Plan

POLICY = "affinity"
"""The default."""

NODES = (1, 4)
REQUESTS = {1: 400, 4: 120}
"""The first of each workload: the gossip of four nodes takes longer than all the rest."""

SEVERAL_NODES: tuple[CacheName, ...] = ("attention", "vllm_align", "sglang_no_buffer", "sglang_extra_buffer")
"""Profiles before which four nodes stand: what engines do by default, and where nothing tells of their states."""

QUICK_REQUESTS = 200
QUICK_WORKLOADS = ("lmsys", "rag")

ORACLE_GOAL = 0.02  # hit rate below that of the oracle, at most
PREDICTED_GOAL = 0.98  # precision and recall

ATTENTION, CHECKPOINT, ORACLE = "attention", "checkpoint", "oracle"

KNOWLEDGE: Mapping[str, KnowledgeName] = MappingProxyType(
    {ATTENTION: "attention", CHECKPOINT: "events", ORACLE: "oracle"}
)
"""By what the router knows."""

COUNTED = ("requests", "cached_tokens", "missed", "in_step", "failed")
MEASURED = ("rate", "hit_rate", "ttft_p50_s", "ttft_p90_s", "precision", "recall", "wasted")


Row = Mapping[str, Any]
"""Workload, profile, nodes, what the router knows, and figures: of all draws of the workload together."""


def cases(
    workload: Workload, ready: Ready, arguments: argparse.Namespace, nodes: int, draw: int = 0
) -> Iterator[tuple[Row, Task]]:
    """All runs of one draw of a workload on so many nodes, and what each is."""
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
            yield {"workload": workload.name, "profile": cache, "nodes": nodes, "knows": known}, Task(ready, plan)


def figures(done: Done, block_tokens: int) -> dict[str, Any]:
    """What came of a run, as it is written down."""
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


def believed(done: Done, block_tokens: int) -> tuple[int, int, int, int]:
    """Tokens that were predicted, of what a cache can give at all; reused; both, request by request; and asked."""
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


def missed(done: Done, block_tokens: int) -> dict[str, int]:
    """Tokens that were reused and not predicted; of these those of requests that parted within a step of anchors."""
    rows = [row for row in map(json.loads, done.lines.splitlines()) if row.get("cached", 0) > row["matched"]]
    behind = [row["cached"] - row["matched"] for row in rows]
    return {"missed": sum(behind), "in_step": sum(each for each in behind if each < ANCHOR_STEP_BLOCKS * block_tokens)}


# --- what is asked of the figures -------------------------------------------------------------------------------------


def goals(rows: Sequence[Row]) -> dict[str, Any]:
    """In each cell near the oracle, and the same as ever where there are no states; of each profile right about what is
    reused, which is the mean of its workloads."""
    cells: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["workload"], row["profile"], row["nodes"]), {})[row["knows"]] = row
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
    limit = QUICK_REQUESTS if arguments.quick else None
    for nodes in arguments.nodes or NODES:
        loaded = workload.loaded(limit or REQUESTS[nodes])
        named: list[tuple[Row, Task]] = []
        for draw in range(1 if arguments.quick else workload.draws):
            named += cases(workload, make_ready(workload.trace(draw, loaded)), arguments, nodes, draw)
        done = execute_all([task for _, task in named], arguments.jobs, time.process_time)
        drawn: dict[tuple[Any, ...], list[Row]] = {}
        for (about, _), each in zip(named, done, strict=True):
            drawn.setdefault(tuple(about.values()), []).append({**about, **figures(each, loaded.block_tokens)})
        for draws in drawn.values():
            row = mean_of(draws)
            show_row(row)
            yield row


def mean_of(draws: Sequence[Row]) -> Row:
    """One row for all draws of a cell: means, and sums of what is counted. `hit_rates` has them one by one."""
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
    """0 also where a trace is absent: that is said and skipped."""
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
