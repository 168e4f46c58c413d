"""What happens in a burst of one new prefix, and if one prefix is most of the traffic? In virtual time.

    python -m benchmarks.flash_crowd [--nodes 16] [--seeds 5]

The burst is that of dynamo#589: one of 8 engines is idle, the others have some requests each; 160 requests with one new
prefix arrive at 16 nodes in turn, at once or within a second. Its figure is the busiest engine's share over the mean.
"At once" means before any router can know of another's requests.

The hot prefix is Ranvier's («When your load balancer learns»; on one node in `shapes`): 80 % of all requests have it.
Leaving its holder helps only if the holder is too busy. While one engine, or those that got the prefix before the nodes
knew of each other, can serve all of that traffic, no request waits: the p99 is the time to compute a prefix, and each
diversion to a new holder computes it once more. More than 1 % of the requests are the first with their prefix, so the
p99 of all cannot be less than that time; requests that find their prefix are therefore also counted by themselves.

Both are run with streams, and with answers that come as a whole, of which a router sees no first token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

import orjson

from benchmarks.harness.bench import command_line, finish, percentiles, show_row, spread
from benchmarks.workloads import traffic
from benchmarks.workloads.traffic import BLOCK_TOKENS, Writer
from benchmarks.workloads.workloads import A100_8B, AMPLE_TOKENS
from ranvier_py.core.routing.placement.policies import PlacementOptions
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.jobs import Task, execute, make_ready
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_plan import Placed, Plan, Prepared, prepare
from ranvier_py.replay.replay_run import Run
from ranvier_py.replay.traces.trace import Trace, TraceRequest

ENGINES = 8
IDLE = 0  # the engine that is idle before the burst
LIMITS = EngineLimits(cache_tokens=1_000_000, block_size=BLOCK_TOKENS)

BUSY_REQUESTS = 4  # in flight at each of the others during the whole burst
BUSY_PROMPT_TOKENS, BUSY_ANSWER_TOKENS = 512, 600  # 6 s of decoding
BURST_AFTER_S = 2.0
BURST_REQUESTS = 160  # dynamo#589
BURST_PREFIX_TOKENS = 2048
BURST_WITHIN_S = (0.0, 0.2, 1.0)
QUESTION_TOKENS = 64
ANSWER_TOKENS = 64
CONTENTS = 1 << 12  # more passages than one burst has

HOT_SPEEDS = (0.6, 0.8)
"""Multiples of 20 requests/s: at the first, one engine can serve the hot prefix alone; at the second it cannot."""
HOT = "application 0"
"""The session of requests with the hot prefix."""

CROWD = "crowd"
"""The session of the burst's requests, which are the ones that are measured."""

Rows = Sequence[dict[str, Any]]


class CrowdNodes(Nodes):
    """Nodes that requests enter in turn. A session named «busy-K» goes to engine K, whatever the policy is."""

    def __init__(self, plan: Plan, engines: Sequence[EngineModel]) -> None:
        super().__init__(plan, engines, BLOCK_TOKENS)
        self._turns = count()

    def place(self, item: Prepared, now: float) -> Placed:
        excluded = [engine for engine in range(ENGINES) if engine not in allowed(item.request)]
        return self.place_at(next(self._turns) % len(self.routers), item, now, excluded)


def allowed(request: TraceRequest) -> Sequence[int]:
    """Return the engines that may get this request."""
    kind, _, engine = request.session.partition("-")
    return [int(engine)] if kind == "busy" else range(ENGINES)


def replay(
    requests: Sequence[TraceRequest], seed: int, nodes: int, gossip: bool, policy: str, streamed: bool = True
) -> Rows:
    """Do one run, and return a row for each request of the burst."""
    delay_s = None if gossip else inf
    plan = Plan(policy, nodes, ENGINES * (LIMITS,), gossip_delay_s=delay_s, seed=seed, regret=False, per_request=True)
    engines = [EngineModel(limits) for limits in plan.engines]
    items = prepare(Trace(CROWD, requests, BLOCK_TOKENS, timed=True), stream=streamed)
    run = Run(plan, items, engines, CrowdNodes(plan, engines))
    run.go()
    return [row for row in run.rows if row["session"] == CROWD]


def summed(rows: Rows) -> dict[str, Any]:
    first = percentiles([row["ttft_s"] for row in rows], digits=6)
    return {
        "hit_rate": sum(row["cached"] for row in rows) / sum(row["prompt"] for row in rows),
        "ttft_s": {name: first[name] for name in ("p50", "p99")},
        "requests": len(rows),
    }


def by_engine(rows: Rows) -> list[int]:
    return [sum(row["engine"] == engine for row in rows) for engine in range(ENGINES)]


def kinds(nodes: int) -> list[tuple[int, bool]]:
    """Return the (number of nodes, whether they gossip) to compare."""
    return list(dict.fromkeys([(1, False), (nodes, False), (nodes, True)]))


def burst_requests(seed: int, within_s: float) -> list[TraceRequest]:
    """Make the busy engines' requests and the burst, in order of time."""
    writer = Writer(seed * CONTENTS)  # another seed is another prefix, with another home
    found = [
        writer.request(
            0.01 * each + 0.001 * engine,
            f"busy-{engine}",
            [writer.passage(BUSY_PROMPT_TOKENS)],
            writer.passage(BUSY_ANSWER_TOKENS),
        )
        for engine in range(ENGINES)
        if engine != IDLE
        for each in range(BUSY_REQUESTS)
    ]
    prefix = writer.passage(BURST_PREFIX_TOKENS)
    for index in range(BURST_REQUESTS):
        at = BURST_AFTER_S + within_s * index / BURST_REQUESTS
        prompt = [prefix, writer.passage(QUESTION_TOKENS)]
        found.append(writer.request(at, CROWD, prompt, writer.passage(ANSWER_TOKENS)))
    return sorted(found, key=lambda request: request.at)


def burst_run(
    within_s: float, policy: str, nodes: int, gossip: bool, seeds: int, streamed: bool = True
) -> dict[str, Any]:
    """Run the burst with several seeds, and sum up."""
    runs = [replay(burst_requests(seed, within_s), seed, nodes, gossip, policy, streamed) for seed in range(seeds)]
    shares = [spread(by_engine(rows))["max_over_mean"] for rows in runs]
    found = {
        "streamed": streamed,
        "within_s": within_s,
        "policy": policy,
        "nodes": nodes,
        "gossip": gossip,
        "max_over_mean": {"mean": sum(shares) / seeds, "worst": max(shares)},
        "idle_share": sum(by_engine(rows)[IDLE] for rows in runs) / seeds / BURST_REQUESTS,
        **summed([row for rows in runs for row in rows]),
    }
    show_row(found)
    return found


# --- a prefix that is most of the traffic -----------------------------------------------------------------------------


def hot_run(trace: Trace, speed: float, nodes: int, gossip: bool, streamed: bool = True) -> dict[str, Any]:
    """Run the same traffic without and with diverting, both by Ranvier's rule to the letter."""
    limits = (replace(A100_8B, cache_tokens=AMPLE_TOKENS, block_size=BLOCK_TOKENS),) * ENGINES
    delay_s = None if gossip else inf
    plan = Plan("affinity", nodes, limits, speed=speed, gossip_delay_s=delay_s, regret=False, per_request=True)
    found: dict[str, Any] = {"streamed": streamed, "speed": speed, "nodes": nodes, "gossip": gossip}
    ready = make_ready(trace, stream=streamed)
    for name, diverts in (("stays", False), ("diverts", True)):
        options = PlacementOptions(load_aware=diverts, placement_compatibility="ranvier")
        done = execute(Task(ready, replace(plan, options=options)), lambda: 0.0)
        found[name] = summed_hot([orjson.loads(line) for line in done.lines.splitlines()])
    show_row(found)
    return found


def summed_hot(rows: Rows) -> dict[str, Any]:
    """Sum up a run. A request found its prefix if half of its prompt was cached: questions are shorter than that."""
    found = [row for row in rows if 2 * row["cached"] >= row["prompt"]]
    return {
        **summed(rows),
        "found": {
            "share": len(found) / len(rows),
            "ttft_p99_s": percentiles([row["ttft_s"] for row in found], digits=6)["p99"],
        },
        "holders": len({row["engine"] for row in rows if row["session"] == HOT}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5, help="of the burst")
    arguments = parser.parse_args(argv)
    burst = [
        burst_run(within_s, policy, nodes, gossip, arguments.seeds, streamed)
        for streamed in (True, False)
        for within_s in BURST_WITHIN_S
        for policy in ("affinity", "ttft", "least_loaded")
        for nodes, gossip in kinds(arguments.nodes)
    ]
    trace = traffic.one_hot_prefix(1)
    hot = [
        hot_run(trace, speed, *kind, streamed)
        for streamed in (True, False)
        for speed in HOT_SPEEDS
        for kind in kinds(arguments.nodes)
    ]
    return finish("flash_crowd", arguments, {"engines": ENGINES, "burst": burst, "hot": hot})


if __name__ == "__main__":
    sys.exit(main())
