"""How much prefill does each policy save? Text traces over 8 engines in virtual time, counted by the engines.

    python -m benchmarks.hit_rate [--trace taubench] [--policy affinity] [--engines 8] [--cache-tokens 10000000]

With the large cache nothing is evicted. That is what the reference figures assume: `ideal` is one cache that all
requests share; `random` sends each request to a random engine; `greedy` sends it to the engine with the longest prefix,
known perfectly, among those with at most 1.5 times their share of the requests + 4.
All is run with streams, and with answers that come as a whole, of which a router sees no first token.
Goals with the large cache: `affinity` has at least 95 % of `greedy`, and `random` is near the random reference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.harness.bench import command_line, finish, show_row
from benchmarks.workloads.traffic import leading
from benchmarks.workloads.workloads import WORKLOADS
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Task, execute_all, make_ready
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.results import RunResult
from ranvier_py.replay.traces.trace import Trace

LARGE_CACHE_TOKENS = 10_000_000  # more than all prompts of a trace together: nothing is evicted
SMALL_CACHE_TOKENS = MappingProxyType({"taubench": 20_000, "qmsum": 100_000})
"""Small caches by trace: taubench's longest request takes 12,000; QMSum's size is that of its published LRU figures."""

DRAWS = 8  # runs of random routing: the standard deviation of one draw of QMSum is 1.7 points
GOAL_SHARE = 0.95  # share of the hits of greedy longest-prefix routing with perfect knowledge


class Reference(NamedTuple):
    """Hits of the reference placements, as shares of the prompt tokens, 0 to 1."""

    ideal: float
    greedy: float
    random: float


PUBLISHED = MappingProxyType(
    {"taubench": Reference(0.926, 0.920, 0.671), "qmsum": Reference(0.874, 0.789, 0.370)},
)
"""The published figures, for 8 engines."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, seed="drawn placements", jobs=True)
    parser.add_argument("--trace", action="append", choices=list(PUBLISHED), default=[])
    parser.add_argument("--policy", action="append", choices=list(POLICIES), default=[])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, action="append", default=[], help="of one engine (large and small)")
    return parser.parse_args(argv)


# --- what caching could give ------------------------------------------------------------------------------------------


def reference(trace: Trace, engines: int = 8, draws: int = DRAWS) -> Reference:
    """Compute the reference figures of these requests in this order; `random` is the mean of `draws` runs."""
    size = trace.block_tokens
    prompts = [request.blocks[: request.prompt_tokens // size] for request in trace.requests]
    total = sum(request.prompt_tokens for request in trace.requests) / size
    drawn = sum(found_anywhere(prompts, engines, Random(draw)) for draw in range(draws)) / draws
    ideal = found_anywhere(prompts, 1, Random(0))
    return Reference(ideal / total, found_greedily(prompts, engines) / total, drawn / total)


def found_anywhere(prompts: Sequence[Sequence[int]], engines: int, rng: Random) -> int:
    """Return the blocks that are found if each request goes to a random engine."""
    caches: list[set[int]] = [set() for _ in range(engines)]
    found = 0
    for keys in prompts:
        cache = rng.choice(caches)
        found += leading(cache, keys)
        cache.update(keys)
    return found


def found_greedily(prompts: Sequence[Sequence[int]], engines: int) -> int:
    """Return the blocks that are found if each request goes to the engine with its longest prefix, under the cap."""
    caches: list[set[int]] = [set() for _ in range(engines)]
    counts = [0] * engines
    found = 0
    for number, keys in enumerate(prompts):
        eligible = [index for index in range(engines) if counts[index] <= 1.5 * number / engines + 4]
        depth, _, best = max((leading(caches[index], keys), -counts[index], index) for index in eligible)
        found += depth
        counts[best] += 1
        caches[best].update(keys)
    return found


# --- runs -------------------------------------------------------------------------------------------------------------


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every policy and cache size on one trace."""
    trace = WORKLOADS[name].load()
    known = reference(trace, arguments.engines)
    kinds = {streamed: make_ready(trace, stream=streamed) for streamed in (True, False)}
    ready = kinds[True]
    show_row({**asdict(ready.summary), **known._asdict()})
    sizes = arguments.cache_tokens or [LARGE_CACHE_TOKENS, SMALL_CACHE_TOKENS[name]]
    plans = [
        Plan(
            policy=policy,
            nodes=1,
            engines=(EngineLimits(cache_tokens=size, block_size=trace.block_tokens),) * arguments.engines,
            seed=arguments.seed,
            regret=False,
        )
        for size in sizes
        for policy in arguments.policy or list(POLICIES)
    ]
    cases = [(streamed, plan) for streamed in kinds for plan in plans]
    done = execute_all([Task(kinds[streamed], plan) for streamed, plan in cases], arguments.jobs, time.process_time)
    runs = [
        {"streamed": streamed, **figures(each.result, plan.engines[0].cache_tokens, known)}
        for (streamed, plan), each in zip(cases, done, strict=True)
    ]
    for run in runs:
        show_row({name: value for name, value in run.items() if name != "reasons"})
    return {
        "trace": name,
        "requests": ready.summary.requests,
        "prompt_tokens": ready.summary.prompt_tokens,
        "reference": known._asdict(),
        "published": PUBLISHED[name]._asdict(),
        "runs": runs,
    }


def figures(result: RunResult, cache_tokens: int, known: Reference) -> dict[str, Any]:
    """Return one run's figures for the result file."""
    return {
        "policy": result.policy,
        "cache_tokens": cache_tokens,
        "hit_rate": result.hit_rate,
        "ttft_s": {name: result.ttft_s[name] for name in ("p50", "p90", "p99")},
        "share_of_greedy": result.hit_rate / known.greedy,
        "predicted_hit_rate": result.predicted_hit_rate,
        "reasons": dict(result.reasons),
    }


def goals(traces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return whether `affinity` reaches its goal in the runs with the large cache."""
    return [
        {
            "trace": trace["trace"],
            "streamed": run["streamed"],
            "share_of_greedy": share,
            "reached": share >= GOAL_SHARE,
        }
        for trace in traces
        for run in trace["runs"]
        if run["policy"] == "affinity" and run["cache_tokens"] >= LARGE_CACHE_TOKENS
        for share in [run["share_of_greedy"]]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if traces are absent: they are skipped with a message."""
    arguments = parse(argv)
    traces = [measure(name, arguments) for name in arguments.trace or PUBLISHED if WORKLOADS[name].is_there()]
    whole = len(traces) == len(PUBLISHED) and not (arguments.policy or arguments.cache_tokens)
    return finish("hit_rate", arguments, {"traces": traces, "goals": goals(traces)}, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
