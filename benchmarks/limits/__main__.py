"""Does a limit of tokens a minute hold over several nodes without a store, and how much of it is left unused?

    python -m benchmarks.limits [--only virtual | processes | scale] [--dry]

*Virtual*: simulated clusters of 1, 4, 8 and 32 nodes: 32 clients, four fifths of them at one node, ask for twice the
limit, a fifth of all datagrams is lost; then with half of the nodes cut off for 30 s, and with a node killed.
*Processes*: the same with 1, 4 and 8 nodes as processes, behind a relay (`processes`). A request that is refused is
tried again at once, so somebody always waits. Goals: served in no sliding minute more than 1.02 x the limit (1.05 x
with a partition), and held, with what is reserved, on average 0.98 x less one reservation; false refusals, of requests
that fit below 95 % of the limit, are at most 1 % of all requests.
*Scale*: one of 16 nodes with 50,000 keys and 2,000 tenants (`scale`); goals: 100 MB, and 5 kB/s to each peer.

LiteLLM with and without Redis is in `limits_peers`; SMG 1.13 limits no requests on its HTTP path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import trio

from benchmarks.harness.bench import command_line, finish, show, show_row
from benchmarks.limits.processes import with_processes
from benchmarks.limits.scale import Scale
from cluster.limits.limit_run import LimitCase, LimitRun

VIRTUAL = {
    **{f"{nodes} nodes": LimitCase(nodes, for_s=240.0) for nodes in (1, 4, 8, 32)},
    "8 nodes, partition of 30 s": LimitCase(8, cut_s=150.0, for_s=270.0),
    "8 nodes, one killed": LimitCase(8, kill_s=150.0, for_s=270.0),
}
PROCESSES = {
    **{f"{nodes} nodes": LimitCase(nodes, for_s=150.0) for nodes in (1, 4, 8)},
    "8 nodes, partition of 30 s": LimitCase(8, cut_s=100.0, for_s=210.0),
    "8 nodes, one killed": LimitCase(8, kill_s=100.0, for_s=210.0),
}
SCALE_PER_S = (10.0, 30.0)  # requests of each node


def measured(only: Sequence[str], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "virtual" in only:
        found["virtual"] = {}
        for name, case in VIRTUAL.items():
            found["virtual"][name] = LimitRun(case, seed).go()._asdict()
            show_row({"virtual": name, **found["virtual"][name]})
    if "processes" in only:
        found["processes"] = {}
        for name, case in PROCESSES.items():
            found["processes"][name] = trio.run(with_processes, case, seed)
            show_row({"processes": name, **found["processes"][name]})
    if "scale" in only:
        found["scale"] = {}
        for per_s in SCALE_PER_S:
            found["scale"][f"{per_s:g} requests per s and node"] = Scale(per_s, seed).go()
            show_row({"scale": per_s, **found["scale"][f"{per_s:g} requests per s and node"]})
    return found


def main() -> int:
    parser: argparse.ArgumentParser = command_line(__doc__, seed="clients and answers")
    kinds = ("scale", "virtual", "processes")
    parser.add_argument("--only", nargs="*", default=kinds, choices=kinds, help="all by default")
    options = parser.parse_args()
    result = measured(options.only, options.seed)
    show("")
    return finish("limits", options, result, whole=set(options.only) == set(kinds))


if __name__ == "__main__":
    sys.exit(main())
