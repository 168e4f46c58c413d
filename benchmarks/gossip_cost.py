"""How much more do a node's requests cost if a peer receives each turn? Results: results/gossip_cost.json.

    python -m benchmarks.gossip_cost [--pairs 12] [--seconds 2] [--tokenizer embedded]

A single node and a node with an idle peer, both with the same two stub engines, take turns under `wrk`. Each pair of
runs is compared by itself, and the result has the medians over the pairs, because single runs on a shared machine
differ by a third. `processor` compares the nodes' own processor time per request: the only cost if the peer were on
another machine. `per_s` and `p99` also include the work of the peer on this machine. `peer_us` is the peer's processor
time per received turn, without what it spends in an equally long run in which it receives none.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.data_plane import CASES, WARM_UP_S, Case, run_of, set_manner
from benchmarks.harness.bench import command_line, finish, show_row
from benchmarks.harness.processes import Target, node, peers, running_s, stub_engines


def pair(alone: Target, peered: Target, peer: Target, case: Case, seconds: float, *, swapped: bool) -> dict[str, float]:
    """Do one run of each node; return the peered one's figures divided by the single one's, and the peer's time."""
    runs: dict[Target, dict[str, float]] = {}
    peer_s: dict[Target, float] = {}
    for target in (peered, alone) if swapped else (alone, peered):
        before_s = running_s(peer.pid)
        runs[target] = run_of(target, case, seconds)
        peer_s[target] = running_s(peer.pid) - before_s
    one, other = runs[alone], runs[peered]
    return {
        "per_s": other["per_s"] / one["per_s"],
        "p99": other["p99_us"] / one["p99_us"],
        "processor": other["processor_us"] / one["processor_us"],
        "processor_us": one["processor_us"],
        "peer_us": (peer_s[peered] - peer_s[alone]) / max(1, other["requests"]) * 1e6,
        "failed": one["failed"] + other["failed"],
    }


def summed(pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Return each figure's median and quartiles."""
    found: dict[str, Any] = {"failed": sum(each["failed"] for each in pairs)}
    for name in ("per_s", "p99", "processor", "processor_us", "peer_us"):
        low, median, high = statistics.quantiles([each[name] for each in pairs], n=4)
        found[name] = {"median": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}
    return found


def measure(stack: ExitStack, options: argparse.Namespace) -> dict[str, Any]:
    urls = stack.enter_context(stub_engines(2))
    alone = stack.enter_context(node(urls, options.tokenizer))
    peered, peer = stack.enter_context(peers(urls, 2, secrets.token_hex(32), tokenizer=options.tokenizer))
    found: dict[str, Any] = {}
    for case in CASES:
        set_manner(urls, case)
        for target in (alone, peered):
            run_of(target, case, WARM_UP_S)
        pairs = [
            pair(alone, peered, peer, case, options.seconds, swapped=bool(number % 2))
            for number in range(options.pairs)
        ]
        found[case.name] = summed(pairs)
        show_row({"case": case.name, **found[case.name]})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--tokenizer", type=Path, default="embedded", help="as of `ranvier serve`")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        cases = measure(stack, options)
    return finish("gossip_cost", options, {"cases": cases})


if __name__ == "__main__":
    sys.exit(main())
