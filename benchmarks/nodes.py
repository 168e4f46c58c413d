"""What several nodes lose against one: hit rate, time to first token and spread of load, with gossip and without.

    python -m benchmarks.nodes [--trace mooncake] [--nodes 1 2 4 8] [--seeds 5] [--minutes 20] [--dry]

Virtual time, 8 engines, the same requests at the same times in all runs of a seed. Each request comes to a node drawn
for it alone, which is the worst that DNS can do to a conversation. The routers, their gossip and its packets are the
real ones (`nodes_net`); hit rate is engine truth. taubench is text through a real tokenizer with caches that evict
nothing, so that what is missing is the routing's fault. mooncake is production arrivals and prefixes (`nodes_blocks`),
its first `--minutes`, with caches of a million tokens for each engine.
Goals: with gossip the hit rate is within 1 point, the times within 5 % of those of one node. The runs of all seeds are
taken together for that: the slowest hundredth of one run is 25 requests, about as many as the override diverts, so one
run's P99 jumps by a quarter between equals.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.common import percentiles, to_json, write_result
from benchmarks.hit_rate import LARGE_CACHE_TOKENS, MODEL, figures, show
from benchmarks.hit_rate_replay import Outcome, Replay
from benchmarks.hit_rate_router import RememberingTokenizer, RouterPlacement, TraceTokenizer
from benchmarks.hit_rate_traces import TRACES, Prepared, data_folder, prepare
from benchmarks.nodes_blocks import BLOCK_TOKENS, BlockTokenizer, load_mooncake
from benchmarks.nodes_net import NodesPlacement, make_net
from cluster.engine.engine_text import ModelTokenizer
from ranvier_py.io.tokenizer import ChatTokenizer
from ranvier_py.replay.engine.model import EngineLimits
from ranvier_py.replay.replay_network import PeerNet

ENGINES = 8
START_S = 10.0
"""Before the first request: the peers have found each other by then."""

MOONCAKE = "mooncake"
MOONCAKE_FILE = "mooncake_conversation.jsonl.gz"
MOONCAKE_MINUTES = 20.0  # of 59: 3658 requests, 45 million tokens
MOONCAKE_CACHE_TOKENS = 1_000_000  # what 80 GB of 8B keys and values are, and that of the trace's published LRU figures

GOAL_POINTS = 1.0
GOAL_RATIO = 1.05


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, ready to be replayed. `items` gives the requests of one seed, `settings` are keys of a node's Config."""

    name: str
    items: Callable[[int], list[Prepared]]
    tokenizer: TraceTokenizer
    limits: EngineLimits
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One replay: how many nodes, whether they gossip, and what came of it."""

    nodes: int
    gossip: bool
    seed: int
    outcome: Outcome
    reasons: dict[str, int]  # of all nodes' decisions
    told: dict[str, float]
    wall_s: float

    def result(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "gossip": self.gossip,
            "seed": self.seed,
            **figures(self.outcome),
            "reasons": self.reasons,
            **self.told,
            "wall_s": round(self.wall_s, 1),
        }


# --- traces ---------------------------------------------------------------------------------------------------------


def taubench() -> Case:
    """Tokenized once: another seed is the same dialogues at other times."""
    trace = next(trace for trace in TRACES if trace.name == "taubench")
    path = data_folder() / "traces" / trace.file
    source = str(data_folder() / "tokenizers" / trace.tokenizer)
    known = {turn_of(item): item for item in prepare(trace.load(path, 1), ModelTokenizer(source), MODEL)}

    def items(seed: int) -> list[Prepared]:
        requests = trace.load(path, seed)
        return [replace(known[request.session, len(request.messages)], request=request) for request in requests]

    limits = EngineLimits(cache_tokens=LARGE_CACHE_TOKENS)
    return Case(trace.name, items, RememberingTokenizer(ChatTokenizer.load(source)), limits, {})


def turn_of(item: Prepared) -> tuple[str, int]:
    return item.request.session, len(item.request.messages)


def mooncake(minutes: float) -> Case:
    path = data_folder() / "traces" / MOONCAKE_FILE
    limits = EngineLimits(cache_tokens=MOONCAKE_CACHE_TOKENS, block_size=BLOCK_TOKENS)
    settings = {"block_size_tokens": BLOCK_TOKENS}
    return Case(MOONCAKE, lambda seed: load_mooncake(path, seed, minutes), BlockTokenizer(), limits, settings)


def delayed(items: Sequence[Prepared], by_s: float) -> list[Prepared]:
    return [replace(item, request=replace(item.request, at=item.request.at + by_s)) for item in items]


# --- runs -----------------------------------------------------------------------------------------------------------


def run(case: Case, items: Sequence[Prepared], nodes: int, gossip: bool, seed: int) -> Run:
    """One replay of `items`, which begin at START_S."""
    began = time.perf_counter()
    routers = [
        RouterPlacement("affinity", case.tokenizer, ENGINES, f"{seed}/{number}", **case.settings)
        for number in range(nodes)
    ]
    net = make_net(routers, seed, 0.0) if gossip else None
    draw = Random(f"{seed}/dns")
    placement = NodesPlacement(routers, lambda _: draw.randrange(nodes), net)
    outcome = Replay(items, placement, ENGINES, case.limits, net).run()
    reasons: Counter[str] = Counter()
    for router in routers:
        reasons.update(router.router.counters.decisions)
    told = traffic(net, outcome, nodes) if net is not None else {}
    found = Run(nodes, gossip, seed, outcome, dict(sorted(reasons.items())), told, time.perf_counter() - began)
    show(line(found))
    return found


def traffic(net: PeerNet, outcome: Outcome, nodes: int) -> dict[str, float]:
    """What gossip sent: packets and bytes for each node and second, bytes for each request and peer told."""
    sent = sum(net.bytes_by_plane.values())
    return {
        "packets_per_node_s": net.packets / nodes / outcome.ended_at_s,
        "bytes_per_node_s": sent / nodes / outcome.ended_at_s,
        "bytes_per_request_and_peer": sent / outcome.requests / (nodes - 1),
    }


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of one trace."""
    runs = []
    for seed in range(1, arguments.seeds + 1):
        items = delayed(case.items(seed), START_S)
        tokens = sum(item.job.prompt_tokens for item in items)
        show(f"{case.name}, seed {seed}: {len(items)} requests, {tokens:,} prompt tokens")
        for nodes in arguments.nodes:
            gossips = (False,) if nodes == 1 else (True, False)
            runs += [run(case, items, nodes, gossip, seed) for gossip in gossips]
    compared = compare(runs)
    for each in compared:
        show(comparison_line(each))
    return {
        "trace": case.name,
        "requests": runs[0].outcome.requests,
        "prompt_tokens": runs[0].outcome.prompt_tokens,
        "cache_tokens": case.limits.cache_tokens,
        "runs": [each.result() for each in runs],
        "compared": compared,
    }


# --- comparison -----------------------------------------------------------------------------------------------------


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each number of nodes, with gossip and without, against one node, all seeds together."""
    kinds = list(dict.fromkeys((each.nodes, each.gossip) for each in runs))
    together = {kind: pooled([each for each in runs if (each.nodes, each.gossip) == kind]) for kind in kinds}
    alone = together.get((1, False))
    if alone is None:
        return []
    found = []
    for (nodes, gossip), each in together.items():
        points = 100 * (each["hit_rate"] - alone["hit_rate"])
        p50, p99 = (each["ttft_s"][name] / alone["ttft_s"][name] for name in ("p50", "p99"))
        reached = points >= -GOAL_POINTS and max(p50, p99) <= GOAL_RATIO
        ratios = {"hit_points": points, "ttft_p50_times": p50, "ttft_p99_times": p99}
        found.append({"nodes": nodes, "gossip": gossip, **each, **ratios, "reached": reached})
    return found


def pooled(runs: Sequence[Run]) -> dict[str, Any]:
    """Several seeds as one: shares of all tokens, times of all requests, the mean of the spreads."""
    outcomes = [each.outcome for each in runs]
    first = percentiles([value for each in outcomes for value in each.first_token_s], digits=6)
    spreads = [figures(each)["requests_by_engine"]["coefficient_of_variation"] for each in outcomes]
    return {
        "hit_rate": sum(each.cached_tokens for each in outcomes) / sum(each.prompt_tokens for each in outcomes),
        "ttft_s": {name: first[name] for name in ("p50", "p99")},
        "coefficient_of_variation": sum(spreads) / len(spreads),
    }


def line(found: Run) -> str:
    result = found.result()
    ttft, load = result["ttft_s"], result["requests_by_engine"]
    told = f"  {found.told['bytes_per_node_s']:7.0f} B/s a node" if found.told else ""
    return (
        f"  {name_of(found.nodes, found.gossip)}  hits {result['hit_rate']:.4f}"
        f"  ttft {ttft['p50'] * 1e3:6.1f} {ttft['p99'] * 1e3:7.1f} ms  cv {load['coefficient_of_variation']:.3f}"
        f"  diverted {sum(count for reason, count in found.reasons.items() if 'diverted' in reason):4}"
        f"  {found.wall_s:.1f} s{told}"
    )


def comparison_line(each: dict[str, Any]) -> str:
    return (
        f"  {name_of(each['nodes'], each['gossip'])}  {each['hit_points']:+6.2f} points"
        f"  p50 x {each['ttft_p50_times']:.3f}  p99 x {each['ttft_p99_times']:.3f}"
        f"  cv {each['coefficient_of_variation']:.3f}  {'reached' if each['reached'] else 'missed'}"
    )


def name_of(nodes: int, gossip: bool) -> str:
    how = "         " if nodes == 1 else "gossip   " if gossip else "no gossip"
    return f"{nodes:2} node{'s' if nodes > 1 else ' '} {how}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", choices=["taubench", MOONCAKE], default=[], help="default: both")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=5, help="of arrivals, of DNS and of the nodes")
    parser.add_argument("--minutes", type=float, default=MOONCAKE_MINUTES, help="of the mooncake trace")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 also where a trace is absent: that is said and skipped."""
    arguments = parse(argv)
    makers: dict[str, Callable[[], Case]] = {"taubench": taubench, MOONCAKE: lambda: mooncake(arguments.minutes)}
    files = {trace.name: trace.file for trace in TRACES} | {MOONCAKE: MOONCAKE_FILE}
    measured = []
    for name in arguments.trace or makers:
        if not (data_folder() / "traces" / files[name]).is_file():
            show(f"{name}: skipped, {files[name]} is not there (SHARED_DATA says where to look)")
            continue
        measured.append(measure(makers[name](), arguments))
    result = {
        "question": "what N nodes lose against one at the same total rate, with gossip and without",
        "engines": ENGINES,
        "seeds": arguments.seeds,
        "mooncake_minutes": arguments.minutes,
        "traces": measured,
    }
    if measured and not arguments.dry:
        show(str(write_result("nodes", result)))
    elif arguments.dry:
        print(to_json(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
