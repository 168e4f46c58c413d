"""What do several nodes lose against one in hit rate, time to first token and balance, with and without gossip?

    python -m benchmarks.nodes [--trace mooncake] [--nodes 1 2 4 8] [--seeds 5] [--minutes 20]

In virtual time, with 8 engines, and with the same requests at the same times in all runs of a seed. Each request enters
at a node that is drawn for it alone: the worst that DNS can do to a conversation. taubench has caches that evict
nothing; mooncake has a million tokens for each engine. Up to WHOLE_NODES nodes are also run with answers that come as a
whole, of which a router sees no first token.
Goals: with gossip the hit rate is within 1 point and the times are within 5 % of those of one node, over all seeds
together. The slowest hundredth of one run is only 25 requests, so that the p99 of equal runs differs by a quarter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import orjson

from benchmarks.harness.bench import command_line, data_folder, finish, percentiles, show_row
from benchmarks.hit_rate import LARGE_CACHE_TOKENS
from benchmarks.workloads.workloads import MOONCAKE, WORKLOADS, sessions
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Done, Task, execute_all, make_ready
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Trace, TraceOptions

ENGINES = 8
MOONCAKE_MINUTES = 20.0  # of 59: 3658 requests, 45 million tokens
MOONCAKE_CACHE_TOKENS = 1_000_000  # an 8B model's keys and values in 80 GB; as in the trace's published LRU figures

WHOLE_NODES = 4
"""The most nodes that are run with answers that come as a whole: more of them take longest."""

GOAL_POINTS = 1.0
GOAL_RATIO = 1.05


class Case(NamedTuple):
    """A trace, made by the seed of its arrivals, and the cache of each engine."""

    trace: Callable[[int], Trace]
    cache_tokens: int


class Run(NamedTuple):
    """One replay: its number of nodes, whether they gossip, its result, and whether the answers were streams."""

    nodes: int
    gossip: bool
    done: Done
    streamed: bool = True


# --- traces -----------------------------------------------------------------------------------------------------------


def taubench() -> Case:
    """Return tau-bench, tokenized once: another seed has the same dialogues at other times."""
    return Case(partial(sessions, WORKLOADS["taubench"].load()), LARGE_CACHE_TOKENS)


def mooncake(minutes: float) -> Case:
    def trace(seed: int) -> Trace:
        whole = open_trace(data_folder() / "traces" / MOONCAKE, TraceOptions(seed=seed))
        return replace(whole, requests=[request for request in whole.requests if request.at < 60 * minutes])

    return Case(trace, MOONCAKE_CACHE_TOKENS)


# --- runs -------------------------------------------------------------------------------------------------------------


def plans_of(cache_tokens: int, block_tokens: int, nodes: Sequence[int], seed: int) -> list[Plan]:
    """Return plans for each number of nodes, with the real gossip and without any."""
    limits = EngineLimits(cache_tokens=cache_tokens, block_size=block_tokens)
    plan = Plan("affinity", 1, (limits,) * ENGINES, seed=seed, regret=False, per_request=True)
    return [
        replace(plan, nodes=count, gossip_delay_s=delay_s)
        for count in nodes
        for delay_s in ((inf,) if count == 1 else (None, inf))
    ]


def measure(name: str, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Do and compare all runs of one trace."""
    runs: list[Run] = []
    for seed in range(1, arguments.seeds + 1):
        trace = case.trace(seed)
        for streamed in (True, False):
            ready = make_ready(trace, stream=streamed)
            show_row({"seed": seed, **asdict(ready.summary), "streamed": streamed})
            counts = [count for count in arguments.nodes if streamed or count <= WHOLE_NODES]
            plans = plans_of(case.cache_tokens, ready.summary.block_tokens, counts, seed)
            done = execute_all([Task(ready, plan) for plan in plans], arguments.jobs, time.process_time)
            runs += [
                Run(plan.nodes, plan.gossip_delay_s is None, each, streamed)
                for plan, each in zip(plans, done, strict=True)
            ]
    compared = compare(runs)
    for each in compared:
        show_row(each)
    return {
        "trace": name,
        "requests": ready.summary.requests,
        "prompt_tokens": ready.summary.prompt_tokens,
        "cache_tokens": case.cache_tokens,
        "compared": compared,
    }


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare each number of nodes, with and without gossip, with one node, over all seeds together."""
    kinds: dict[tuple[int, bool, bool], list[Done]] = {}
    for run in runs:
        kinds.setdefault((run.nodes, run.gossip, run.streamed), []).append(run.done)
    together = {kind: pooled(done) for kind, done in kinds.items()}
    found = []
    for (nodes, gossip, streamed), each in together.items():
        alone = together.get((1, False, streamed))
        if alone is None:
            continue
        points = 100 * (each["hit_rate"] - alone["hit_rate"])
        p50, p99 = (each["ttft_s"][name] / alone["ttft_s"][name] for name in ("p50", "p99"))
        reached = points >= -GOAL_POINTS and max(p50, p99) <= GOAL_RATIO
        ratios = {"hit_points": points, "ttft_p50_times": p50, "ttft_p99_times": p99}
        kind = {"nodes": nodes, "gossip": gossip, "streamed": streamed}
        found.append({**kind, **each, **ratios, "reached": reached})
    return found


def pooled(runs: Sequence[Done]) -> dict[str, Any]:
    """Sum up several seeds: shares of all tokens, times of all requests, and the mean coefficient of variation."""
    rows = [orjson.loads(line) for each in runs for line in each.lines.splitlines()]
    first = percentiles([row["ttft_s"] for row in rows if "ttft_s" in row], digits=6)
    results = [each.result for each in runs]
    return {
        "hit_rate": sum(each.cached_tokens for each in results) / sum(each.prompt_tokens for each in results),
        "ttft_s": {name: first[name] for name in ("p50", "p99")},
        "coefficient_of_variation": sum(each.load_cv for each in results) / len(results),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if traces are absent: they are skipped with a message."""
    parser = command_line(__doc__, jobs=True)
    parser.add_argument("--trace", action="append", choices=["taubench", "mooncake"], default=[], help="default: both")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=5, help="of arrivals, of DNS and of the nodes")
    parser.add_argument("--minutes", type=float, default=MOONCAKE_MINUTES, help="of the mooncake trace")
    arguments = parser.parse_args(argv)
    cases: dict[str, Callable[[], Case]] = {"taubench": taubench, "mooncake": partial(mooncake, arguments.minutes)}
    names = [name for name in arguments.trace or cases if WORKLOADS[name].is_there()]
    traces = [measure(name, cases[name](), arguments) for name in names]
    return finish("nodes", arguments, {"engines": ENGINES, "traces": traces}, whole=bool(names))


if __name__ == "__main__":
    sys.exit(main())
