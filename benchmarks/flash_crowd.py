"""Everybody wants the same: a burst of one new prefix, and a prefix that is most of the traffic. In virtual time.

    python -m benchmarks.flash_crowd [--nodes 16] [--seeds 5] [--only burst] [--dry]

`burst` (dynamo#589): of 8 engines one is idle, the others have some requests each; 160 requests of one new prefix come
to 16 nodes by turns, at once or within a second. Routers that do not know each other's requests all send them to the
same engine. Its figure is the greatest share of an engine over the mean, beside the policies that a router may have.
At once means: before any router can hear of another. `affinity` then lets each of them fill the idle engine up to its
own idea of too busy, sixteen times over; `ttft` does not, since it counts what queues behind a prefill as waiting.

`hot`: for a minute, 80 % of all requests begin with the same 1536 tokens of 2048, the others with one of 40 prefixes.
Compared are the hit rate and the time to first token with the load override (at 2 x the median + 2) and without. The
Ranvier document reports 5 points of hit rate for 45 % of P99; how much there is to gain depends on the rate, so several
are run, up to where one engine can't serve the prefix alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from benchmarks.common import percentiles, to_json, write_result
from benchmarks.hit_rate import show, spread
from benchmarks.hit_rate_replay import Replay
from benchmarks.hit_rate_router import RouterPlacement
from benchmarks.hit_rate_traces import Prepared
from benchmarks.nodes_blocks import BLOCK_TOKENS, Block, BlockTokenizer, prepared
from benchmarks.nodes_net import NodesPlacement, make_net
from ranvier_py.replay.engine.model import EngineLimits

ENGINES = 8
IDLE = 0  # the engine that has nothing to do
START_S = 10.0  # by then the peers have found each other
LIMITS = EngineLimits(cache_tokens=1_000_000, block_size=BLOCK_TOKENS)

BUSY_REQUESTS = 4  # at each of the others, all through the burst
BUSY_TOKENS = 600  # 6 s of decoding
BURST_AFTER_S = 2.0
BURST_REQUESTS = 160  # dynamo#589
BURST_PREFIX_BLOCKS = 4
BURST_WITHIN_S = (0.0, 0.2, 1.0)
QUESTION_TOKENS = 64
ANSWER_TOKENS = 64

HOT_SHARE = 0.8
HOT_PREFIX_BLOCKS = 3
OTHER_PREFIXES = 40
HOT_RATES_PER_S = (15.0, 20.0, 25.0, 30.0)
"""One engine serves the prefix at about 22 requests/s: 26 ms of prefill each, 32 at once, 64 steps of 10 ms."""

HOT_S = 60.0
OVERRIDE = {"load_factor": 2.0, "load_floor": 2}
NO_OVERRIDE = {"load_factor": 1000.0, "load_floor": 1_000_000}
PREFIXES = 1 << 20
"""Numbers of blocks from here on are prefixes; below, each request has its own."""

RANVIER = {"hit_points": 5.0, "p99_share": 0.45}


@dataclass(slots=True)
class Seen:
    """What came of the requests that count."""

    by_engine: list[int] = field(default_factory=lambda: [0] * ENGINES)
    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


class WatchedPlacement:
    """A Placement that keeps the books of the sessions named «crowd»."""

    def __init__(self, placement: NodesPlacement, seen: Seen) -> None:
        self._placement = placement
        self._seen = seen

    def route(self, item: Prepared, now: float) -> tuple[int, Any]:
        engine, attempt = self._placement.route(item, now)
        counts = item.request.session == "crowd"
        self._seen.by_engine[engine] += counts
        return engine, (attempt, counts, now)

    def first_token(self, attempt: tuple[Any, bool, float], now: float) -> None:
        inner, counts, sent_at = attempt
        if counts:
            self._seen.first_token_s.append(now - sent_at)
        self._placement.first_token(inner, now)

    def finished(self, attempt: tuple[Any, bool, float], item: Prepared, cached_tokens: int, now: float) -> None:
        inner, counts, _ = attempt
        if counts:
            self._seen.prompt_tokens += item.job.prompt_tokens
            self._seen.cached_tokens += cached_tokens
        self._placement.finished(inner, item, cached_tokens, now)


def kept_out(item: Prepared) -> Sequence[int]:
    """A session named «busy-K» goes to engine K, whatever the policy says."""
    kind, _, engine = item.request.session.partition("-")
    return [other for other in range(ENGINES) if other != int(engine)] if kind == "busy" else ()


def replay(
    items: Sequence[Prepared], seen: Seen, seed: str, nodes: int, gossip: bool, policy: str, **settings: Any
) -> None:
    """One run, entered into `seen`. Requests come to the nodes by turns."""
    tokenizer = BlockTokenizer()
    routers = [
        RouterPlacement(policy, tokenizer, ENGINES, f"{seed}/{number}", block_size_tokens=BLOCK_TOKENS, **settings)
        for number in range(nodes)
    ]
    net = make_net(routers, seed, 0.0) if gossip else None
    turn = count()
    placement = NodesPlacement(routers, lambda _: next(turn) % nodes, net, kept_out)
    Replay(items, WatchedPlacement(placement, seen), ENGINES, LIMITS, net).run()


def summed(seen: Seen) -> dict[str, Any]:
    first = percentiles(seen.first_token_s, digits=6)
    return {
        "hit_rate": seen.cached_tokens / seen.prompt_tokens,
        "ttft_s": {name: first[name] for name in ("p50", "p99")},
        "requests": len(seen.first_token_s),
    }


# --- burst ----------------------------------------------------------------------------------------------------------


def burst_items(seed: int, within_s: float) -> list[Prepared]:
    """The busy engines' requests, then the burst."""
    number = count()
    found = []
    for engine in range(ENGINES):
        for each in range(BUSY_REQUESTS if engine != IDLE else 0):
            own, at = next(number), START_S + 0.01 * each + 0.001 * engine
            found.append(prepared(at, f"busy-{engine}", [[Block(own)]], own, BUSY_TOKENS))
    prefix = [Block(PREFIXES + seed * BURST_PREFIX_BLOCKS + depth) for depth in range(BURST_PREFIX_BLOCKS)]
    for index in range(BURST_REQUESTS):
        own, at = next(number), START_S + BURST_AFTER_S + within_s * index / BURST_REQUESTS
        found.append(prepared(at, "crowd", [prefix, [Block(own, QUESTION_TOKENS)]], own, ANSWER_TOKENS))
    return sorted(found, key=lambda item: item.request.at)


def burst(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every policy, one node and many, at once and within a second."""
    kinds = dict.fromkeys([(1, False), (arguments.nodes, False), (arguments.nodes, True)])
    return [
        burst_run(within_s, policy, nodes, gossip, arguments.seeds)
        for within_s in BURST_WITHIN_S
        for policy in ("affinity", "ttft", "least_loaded")
        for nodes, gossip in kinds
    ]


def burst_run(within_s: float, policy: str, nodes: int, gossip: bool, seeds: int) -> dict[str, Any]:
    """The same burst with several prefixes: each has another home among the engines."""
    together, shares, idle = Seen(), [], 0
    for seed in range(seeds):
        seen = Seen()
        replay(burst_items(seed, within_s), seen, f"{seed}", nodes, gossip, policy)
        shares.append(spread(seen.by_engine)["max_over_mean"])
        idle += seen.by_engine[IDLE]
        together.first_token_s += seen.first_token_s
        together.prompt_tokens += seen.prompt_tokens
        together.cached_tokens += seen.cached_tokens
    found = {
        "within_s": within_s,
        "policy": policy,
        "nodes": nodes,
        "gossip": gossip,
        "max_over_mean": {"mean": sum(shares) / seeds, "worst": max(shares)},
        "idle_share": idle / seeds / BURST_REQUESTS,
        **summed(together),
    }
    show(
        f"burst within {within_s:3.1f} s  {policy:12} {nodes:2} nodes {'gossip   ' if gossip else 'no gossip'}"
        f"  max/mean {found['max_over_mean']['mean']:.2f} (worst {max(shares):.2f})"
        f"  idle engine {found['idle_share']:5.1%}  hits {found['hit_rate']:.3f}  {times(found)}"
    )
    return found


# --- hot ------------------------------------------------------------------------------------------------------------


def hot_items(seed: int, rate_per_s: float) -> list[Prepared]:
    """A minute of requests, most of them with one prefix."""
    rng = Random(f"{seed}/hot")
    found: list[Prepared] = []
    at = START_S
    while (at := at + rng.expovariate(rate_per_s)) < START_S + HOT_S:
        which = 0 if rng.random() < HOT_SHARE else 1 + rng.randrange(OTHER_PREFIXES)
        first = PREFIXES + (seed * (OTHER_PREFIXES + 1) + which) * HOT_PREFIX_BLOCKS
        prefix = [Block(first + depth) for depth in range(HOT_PREFIX_BLOCKS)]
        own = len(found)
        found.append(prepared(at, "crowd", [prefix, [Block(own)]], own, ANSWER_TOKENS))
    return found


def hot(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """With the override and without, at several rates."""
    kinds = dict.fromkeys([(1, False), (arguments.nodes, False), (arguments.nodes, True)])
    return [hot_pair(rate, nodes, gossip, arguments.hot_seeds) for rate in HOT_RATES_PER_S for nodes, gossip in kinds]


def hot_pair(rate_per_s: float, nodes: int, gossip: bool, seeds: int) -> dict[str, Any]:
    """The same traffic twice."""
    found: dict[str, Any] = {"rate_per_s": rate_per_s, "nodes": nodes, "gossip": gossip}
    for name, settings in (("override", OVERRIDE), ("none", NO_OVERRIDE)):
        seen = Seen()
        for seed in range(seeds):
            replay(hot_items(seed, rate_per_s), seen, f"{seed}", nodes, gossip, "affinity", **settings)
        found[name] = {**summed(seen), **spread(seen.by_engine)}
    found |= paid(found["override"], found["none"])
    show(
        f"hot {rate_per_s:4.0f}/s  {nodes:2} nodes {'gossip   ' if gossip else 'no gossip'}"
        f"  override: hits {found['override']['hit_rate']:.3f} {times(found['override'])}"
        f"  none: hits {found['none']['hit_rate']:.3f} {times(found['none'])}"
        f"  {found['hit_points_paid']:.1f} points for {found['p99_share_won']:.0%} of p99"
    )
    return found


def paid(override: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    """Points of hit rate given, and the share of the 99th percentile that went away for them."""
    points = 100 * (none["hit_rate"] - override["hit_rate"])
    won = 1 - override["ttft_s"]["p99"] / none["ttft_s"]["p99"]
    reached = points <= RANVIER["hit_points"] and won >= RANVIER["p99_share"]
    return {"hit_points_paid": points, "p99_share_won": won, "as_good_as_ranvier": reached}


def times(found: dict[str, Any]) -> str:
    return f"ttft {found['ttft_s']['p50'] * 1e3:.0f} {found['ttft_s']['p99'] * 1e3:.0f} ms"


# --- all ------------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5, help="of the burst: prefixes with other homes")
    parser.add_argument("--hot-seeds", type=int, default=1, help="of the hot minute")
    parser.add_argument("--only", choices=["burst", "hot"], help="default: both")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    result = {
        "question": "who gets a burst of one new prefix, and what the load override costs and gains",
        "engines": ENGINES,
        "nodes": arguments.nodes,
        "seeds": arguments.seeds,
        "burst": burst(arguments) if arguments.only != "hot" else [],
        "hot": hot(arguments) if arguments.only != "burst" else [],
        "ranvier_document": RANVIER,
    }
    if arguments.dry:
        print(to_json(result), end="")
    else:
        show(str(write_result("flash_crowd", result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
