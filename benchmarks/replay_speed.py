"""How long does a replay of all of mooncake_conversation through 8 engines take, and how much memory?

`python -m benchmarks.replay_speed [--policy ttft] [--quick]`

Each policy runs with and without regret, each in its own process, which also reads the trace: that is what a user waits
for, and its memory is measured. Goal: less than 15 s of processor time per policy.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.harness.bench import command_line, data_folder, each_apart, finish, show_row
from benchmarks.workloads.workloads import MOONCAKE, WORKLOADS
from ranvier_py.core.routing.placement.policies import POLICIES
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.jobs import Done, Ready, Task, execute, make_ready
from ranvier_py.replay.oracles import ORACLES
from ranvier_py.replay.replay_plan import Plan
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import TraceOptions

MEASURED = ("ttft", "affinity", "cache_aware_smg", "kv_score", "round_robin", "oracle_greedy", "oracle_ttft")
GOAL_S = 15.0
ENGINES = 8
QUICK_REQUESTS = 1000
MIB = 1024.0  # ru_maxrss is in KiB


def read(limit: int) -> Ready:
    return make_ready(open_trace(data_folder() / "traces" / MOONCAKE, TraceOptions(limit=limit)))


def run(ready: Ready, policy: str, *, regret: bool) -> Done:
    limits = replace(EngineLimits(), block_size=ready.summary.block_tokens)
    plan = Plan(policy=policy, nodes=0 if policy in ORACLES else 1, engines=(limits,) * ENGINES, regret=regret)
    return execute(Task(ready, plan), time.perf_counter)


def measure(limit: int, case: tuple[str, bool]) -> dict[str, Any]:
    """Measure one policy, with regret or without, in this process, which has done nothing else."""
    policy, regret = case
    began = time.perf_counter()
    ready = read(limit)
    read_s = time.perf_counter() - began
    read_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    began, cpu = time.perf_counter(), time.process_time()
    result = run(ready, policy, regret=regret).result
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {
        "policy": policy,
        "regret": regret,
        "requests": result.requests,
        "read_s": round(read_s, 2),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "requests_per_s": round(result.requests / wall_s),
        "requests_per_processor_s": round(result.requests / cpu_s),
        "read_mib": round(read_mib),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB),
        "reached": cpu_s < GOAL_S,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if the trace is absent: a message says so."""
    parser = command_line(__doc__, quick=f"the first {QUICK_REQUESTS} requests")
    parser.add_argument("--policy", action="append", choices=[*POLICIES, *ORACLES], default=[])
    arguments = parser.parse_args(argv)
    if not WORKLOADS["mooncake"].is_there():
        return 0
    found = []
    cases = list(product(arguments.policy or MEASURED, (False, True)))
    for each in each_apart(partial(measure, QUICK_REQUESTS if arguments.quick else 0), cases):
        show_row(each)
        found.append(each)
    result = {"goal_s": GOAL_S, "engines": ENGINES, "runs": found}
    return finish("replay_speed", arguments, result, whole=not arguments.policy)


if __name__ == "__main__":
    sys.exit(main())
