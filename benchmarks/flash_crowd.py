"""Everybody wants the same: a burst of one new prefix, and a prefix that is most of the traffic. In virtual time.

    python -m benchmarks.flash_crowd [--nodes 16] [--seeds 5] [--only burst]

`burst` (dynamo#589): of 8 engines one is idle, the others have some requests each; 160 requests of one new prefix come
to 16 nodes by turns, at once or within a second. Routers that do not know each other's requests all send them to the
same engine. Its figure is the greatest share of an engine over the mean, beside the policies that a router may have.
At once means: before any router can know of another's requests. `affinity` then lets each of them fill the idle engine
up to its own idea of too busy, sixteen times over; `ttft` does not, since it counts what queues behind a prefill as
waiting.

`hot`: for a minute, 80 % of all requests begin with the same 1536 tokens of 2048, the others with one of 40 prefixes.
Compared are the hit rate and the time to first token with the load override (at 2 x the median + 2) and without. The
Ranvier document reports 5 points of hit rate for 45 % of P99; how much there is to gain depends on the rate, so several
are run, up to where one engine can't serve the prefix alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import count
from math import inf
from random import Random
from types import MappingProxyType
from typing import Any

from benchmarks.harness.bench import command_line, finish, percentiles, show_row, spread
from benchmarks.workloads.traffic import BLOCK_TOKENS, Writer
from ranvier_py.core.routing.placement.policies import PlacementOptions
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.replay_nodes import Nodes
from ranvier_py.replay.replay_plan import Placed, Plan, Prepared, prepare
from ranvier_py.replay.replay_run import Run
from ranvier_py.replay.traces.trace import Trace, TraceRequest

ENGINES = 8
IDLE = 0  # the engine that has nothing to do
LIMITS = EngineLimits(cache_tokens=1_000_000, block_size=BLOCK_TOKENS)

BUSY_REQUESTS = 4  # at each of the others, all through the burst
BUSY_PROMPT_TOKENS, BUSY_ANSWER_TOKENS = 512, 600  # 6 s of decoding
BURST_AFTER_S = 2.0
BURST_REQUESTS = 160  # dynamo#589
BURST_PREFIX_TOKENS = 2048
BURST_WITHIN_S = (0.0, 0.2, 1.0)
QUESTION_TOKENS = 64
ANSWER_TOKENS = 64

HOT_SHARE = 0.8
HOT_PREFIX_TOKENS, HOT_OWN_TOKENS = 1536, 512
OTHER_PREFIXES = 40
HOT_RATES_PER_S = (15.0, 20.0, 25.0, 30.0)
"""One engine serves the prefix at about 22 requests/s: 26 ms of prefill each, 32 at once, 64 steps of 10 ms."""

HOT_S = 60.0
OVERRIDES = MappingProxyType(
    {
        "override": PlacementOptions(divert_factor=2.0, divert_floor=2),
        "none": PlacementOptions(divert_factor=1000.0, divert_floor=1_000_000),
    }
)
CONTENTS = 1 << 12  # more than there are in a burst

CROWD = "crowd"
"""The session of the requests that count."""

RANVIER = {"hit_points": 5.0, "p99_share": 0.45}

Rows = Sequence[dict[str, Any]]


class CrowdNodes(Nodes):
    """Nodes that requests enter by turns. A session named «busy-K» goes to engine K, whatever the policy says."""

    def __init__(self, plan: Plan, engines: Sequence[EngineModel]) -> None:
        super().__init__(plan, engines, BLOCK_TOKENS)
        self._turns = count()

    def place(self, item: Prepared, now: float) -> Placed:
        excluded = [engine for engine in range(ENGINES) if engine not in allowed(item.request)]
        return self.place_at(next(self._turns) % len(self.routers), item, now, excluded)


def allowed(request: TraceRequest) -> Sequence[int]:
    """The engines that a request may go to."""
    kind, _, engine = request.session.partition("-")
    return [int(engine)] if kind == "busy" else range(ENGINES)


def replay(
    requests: Sequence[TraceRequest],
    seed: int,
    nodes: int,
    gossip: bool,
    policy: str,
    options: PlacementOptions | None = None,
) -> Rows:
    """One run: what became of each request of the crowd."""
    plan = Plan(
        policy,
        nodes,
        (LIMITS,) * ENGINES,
        seed=seed,
        options=options or PlacementOptions(),
        gossip_delay_s=None if gossip else inf,
        regret=False,
        per_request=True,
    )
    engines = [EngineModel(limits) for limits in plan.engines]
    run = Run(plan, prepare(Trace(CROWD, requests, BLOCK_TOKENS, timed=True)), engines, CrowdNodes(plan, engines))
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
    """Nodes, and whether they gossip."""
    return list(dict.fromkeys([(1, False), (nodes, False), (nodes, True)]))


# --- burst ------------------------------------------------------------------------------------------------------------


def burst_requests(seed: int, within_s: float) -> list[TraceRequest]:
    """The busy engines' requests, then the burst."""
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


def burst_run(within_s: float, policy: str, nodes: int, gossip: bool, seeds: int) -> dict[str, Any]:
    """The same burst with several seeds."""
    runs = [replay(burst_requests(seed, within_s), seed, nodes, gossip, policy) for seed in range(seeds)]
    shares = [spread(by_engine(rows))["max_over_mean"] for rows in runs]
    found = {
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


# --- hot --------------------------------------------------------------------------------------------------------------


def hot_requests(seed: int, rate_per_s: float, seconds: float = HOT_S) -> list[TraceRequest]:
    """Requests, most of them with one prefix."""
    rng, writer = Random(f"{seed}/hot"), Writer(seed * CONTENTS)
    prefixes = [writer.passage(HOT_PREFIX_TOKENS) for _ in range(1 + OTHER_PREFIXES)]
    found: list[TraceRequest] = []
    at = 0.0
    while (at := at + rng.expovariate(rate_per_s)) < seconds:
        which = 0 if rng.random() < HOT_SHARE else 1 + rng.randrange(OTHER_PREFIXES)
        prompt = [prefixes[which], writer.passage(HOT_OWN_TOKENS)]
        found.append(writer.request(at, CROWD, prompt, writer.passage(ANSWER_TOKENS)))
    return found


def hot_pair(rate_per_s: float, nodes: int, gossip: bool, seeds: int) -> dict[str, Any]:
    """The same traffic twice: with the override and without."""
    found: dict[str, Any] = {"rate_per_s": rate_per_s, "nodes": nodes, "gossip": gossip}
    for name, options in OVERRIDES.items():
        rows = [
            row
            for seed in range(seeds)
            for row in replay(hot_requests(seed, rate_per_s), seed, nodes, gossip, "affinity", options)
        ]
        found[name] = {**summed(rows), **spread(by_engine(rows))}
    found |= paid(found["override"], found["none"])
    show_row(found)
    return found


def paid(override: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    """Points of hit rate given, and the share of the 99th percentile that went away for them."""
    points = 100 * (none["hit_rate"] - override["hit_rate"])
    won = 1 - override["ttft_s"]["p99"] / none["ttft_s"]["p99"]
    reached = points <= RANVIER["hit_points"] and won >= RANVIER["p99_share"]
    return {"hit_points_paid": points, "p99_share_won": won, "as_good_as_ranvier": reached}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Burst: every policy, at once and within a second. Hot: at several rates. Both on one node and on many."""
    found: dict[str, Any] = {"burst": [], "hot": []}
    if arguments.only != "hot":
        found["burst"] = [
            burst_run(within_s, policy, nodes, gossip, arguments.seeds)
            for within_s in BURST_WITHIN_S
            for policy in ("affinity", "ttft", "least_loaded")
            for nodes, gossip in kinds(arguments.nodes)
        ]
    if arguments.only != "burst":
        found["hot"] = [
            hot_pair(rate, nodes, gossip, arguments.hot_seeds)
            for rate in HOT_RATES_PER_S
            for nodes, gossip in kinds(arguments.nodes)
        ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5, help="of the burst")
    parser.add_argument("--hot-seeds", type=int, default=1, help="of the hot minute")
    parser.add_argument("--only", choices=["burst", "hot"], help="default: both")
    arguments = parser.parse_args(argv)
    result = {
        "question": "who gets a burst of one new prefix, and what the load override costs and gains",
        "engines": ENGINES,
        "nodes": arguments.nodes,
        "seeds": arguments.seeds,
        **measure(arguments),
        "ranvier_document": RANVIER,
    }
    return finish("flash_crowd", result, write=not arguments.only and not arguments.dry)


if __name__ == "__main__":
    sys.exit(main())
