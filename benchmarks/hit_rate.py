"""How much prefill each policy saves: text traces over 8 engines in virtual time, by engine truth.

`python -m benchmarks.hit_rate [--trace taubench] [--policy affinity] [--engines 8] [--cache-tokens 10000000]`

The router is the real one (`hit_rate_router`), the engines are those of `ranvier replay`
(`ranvier_py.replay.engine.model`), the clock is virtual (`hit_rate_replay`). With the large cache nothing is ever
evicted, which is what the reference figures assume; the small one is where a real engine lives. TTFT is the engines'
queue and prefill alone.
Goals with the large cache: `affinity` at least 95 % of `greedy`, `random` near the random reference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from benchmarks.common import write_result
from benchmarks.hit_rate_replay import Outcome, Replay
from benchmarks.hit_rate_router import RememberingTokenizer, RouterPlacement
from benchmarks.hit_rate_traces import TRACES, Prepared, Reference, Trace, data_folder, prepare, reference
from cluster.engine.engine_text import ModelTokenizer
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.engine.model import EngineLimits

LARGE_CACHE_TOKENS = 10_000_000  # more than all prompts of a trace together: nothing is evicted
SMALL_CACHE_TOKENS = {"taubench": 20_000, "qmsum": 100_000}
"""Where caches hurt: taubench's longest request takes 12,000; QMSum's is that of its published LRU figures."""

GOAL_SHARE = 0.95  # of greedy longest-prefix routing with perfect knowledge
MODEL = "lab-model"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hit_rate", description=__doc__)
    parser.add_argument("--trace", action="append", choices=[trace.name for trace in TRACES], default=[])
    parser.add_argument("--policy", action="append", choices=list(POLICIES), default=[])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, shuffles and drawn placements")
    parser.add_argument("--cache-tokens", type=int, action="append", default=[], help="of one engine (large and small)")
    parser.add_argument("--max-running", type=int, default=EngineLimits().running_max)
    return parser.parse_args(argv)


def measure(trace: Trace, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every policy and cache size on one trace."""
    folder = data_folder()
    requests = trace.load(folder / "traces" / trace.file, arguments.seed)
    source = str(folder / "tokenizers" / trace.tokenizer)
    items = prepare(requests, ModelTokenizer(source), MODEL)
    known = reference([item.job for item in items], arguments.engines, arguments.seed)
    show(f"{trace.name}: {len(items)} requests, {sum(item.job.prompt_tokens for item in items):,} prompt tokens")
    show(f"  reference: ideal {known.ideal:.3f}  greedy {known.greedy:.3f}  random {known.random:.3f}")
    tokenizer = RememberingTokenizer(ChatTokenizer.load(source))
    sizes = arguments.cache_tokens or [LARGE_CACHE_TOKENS, SMALL_CACHE_TOKENS[trace.name]]
    runs = [
        run(items, policy, tokenizer, cache_tokens, known, arguments)
        for cache_tokens in sizes
        for policy in arguments.policy or list(POLICIES)
    ]
    return {
        "trace": trace.name,
        "requests": len(items),
        "prompt_tokens": sum(item.job.prompt_tokens for item in items),
        "reference": {"ideal": known.ideal, "greedy": known.greedy, "random": known.random},
        "published": {"ideal": trace.ideal, "greedy": trace.greedy, "random": trace.random},
        "runs": runs,
    }


def run(
    items: Sequence[Prepared],
    policy: str,
    tokenizer: RememberingTokenizer,
    cache_tokens: int,
    known: Reference,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One policy with one cache size."""
    began = time.perf_counter()
    placement = RouterPlacement(policy, tokenizer, arguments.engines, arguments.seed)
    limits = EngineLimits(cache_tokens=cache_tokens, running_max=arguments.max_running)
    outcome = Replay(items, placement, arguments.engines, limits).run()
    counters = placement.router.counters
    result = {
        "policy": policy,
        "cache_tokens": cache_tokens,
        **figures(outcome),
        "share_of_greedy": outcome.hit_rate / known.greedy,
        "predicted_hit_rate": counters.predicted_tokens / max(1, outcome.prompt_tokens),
        "diverted": sum(count for reason, count in counters.decisions.items() if "diverted" in reason),
        "reasons": dict(sorted(counters.decisions.items())),
        "wall_s": time.perf_counter() - began,
    }
    show(line(result))
    return result


def figures(outcome: Outcome) -> dict[str, Any]:
    """Hit rate, spread over the engines, and time to first token."""
    first = sorted(outcome.first_token_s)
    return {
        "hit_rate": outcome.hit_rate,
        "requests_by_engine": spread(outcome.requests_by_engine),
        "computed_tokens_by_engine": spread(outcome.computed_by_engine),
        "ttft_s": {
            name: first[int(share * (len(first) - 1))] for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
        },
        "virtual_s": outcome.ended_at_s,
    }


def spread(values: Sequence[int]) -> dict[str, float]:
    """How unequal the engines' shares are: 1 and 0 when they are equal."""
    mean = fmean(values)
    return {"max_over_mean": max(values) / mean, "coefficient_of_variation": pstdev(values) / mean}


def line(result: dict[str, Any]) -> str:
    ttft, load = result["ttft_s"], result["requests_by_engine"]
    return (
        f"  {result['policy']:<13} cache {result['cache_tokens']:>10,}  hits {result['hit_rate']:.3f}"
        f" ({result['share_of_greedy']:6.1%} of greedy)  max/mean {load['max_over_mean']:.2f}"
        f"  cv {load['coefficient_of_variation']:.2f}"
        f"  ttft {ttft['p50'] * 1e3:5.0f} {ttft['p90'] * 1e3:5.0f} {ttft['p99'] * 1e3:5.0f} ms"
        f"  diverted {result['diverted']:>4}  {result['wall_s']:.1f} s"
    )


def goals(traces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the large-cache runs reach what they should."""
    found = []
    for trace in traces:
        for result in trace["runs"]:
            if result["policy"] == "affinity" and result["cache_tokens"] >= LARGE_CACHE_TOKENS:
                share = result["share_of_greedy"]
                found.append({"trace": trace["trace"], "share_of_greedy": share, "reached": share >= GOAL_SHARE})
    return found


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0 also where a trace is absent: that is said and skipped."""
    arguments = parse(argv)
    measured = []
    for trace in TRACES:
        if arguments.trace and trace.name not in arguments.trace:
            continue
        if not (data_folder() / "traces" / trace.file).is_file():
            show(f"{trace.name}: skipped, {trace.file} is not there (SHARED_DATA says where to look)")
            continue
        measured.append(measure(trace, arguments))
    if measured:
        write_result("hit_rate", {"seed": arguments.seed, "traces": measured, "goals": goals(measured)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
