"""What do stale routes cost: wasted prefill by evictions and restarts per second, with and without engine events?

`python -m benchmarks.stale [--quick]`

Eight modelled engines, `affinity`, chats of many threads, all at one rate: LOAD times the capacity of the smallest
caches. Evictions: caches from all of the working set down to a quarter of it. Restarts: at equal intervals the next
engine in turn restarts, with caches that hold everything. The figures are those of `engine_caches`. All is run with
streams, and with answers that come as a whole, of which a router sees no first token.
Published: Ranvier measured no gain of push (1,902 wasted tokens with and without); Purdue published no figure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks.engine_caches import CAPACITY, cache_tokens_of, figures
from benchmarks.harness.bench import command_line, finish, show_row
from benchmarks.workloads.workloads import ENGINES, WORKLOADS
from ranvier_py.replay.jobs import Done, Ready, Task, execute_all, make_ready
from ranvier_py.replay.knowledge import KNOWLEDGE
from ranvier_py.replay.replay_plan import Plan, Restart

TRAFFIC = "chat_threads"
LOAD = 0.7
SHARES = (1.0, 0.5, 0.35, 0.25)
"""Sizes of all caches together, as shares of the working set."""

RESTARTS = (0, 16, 64, 256)
"""Restarts in a whole run."""

ROOMY = 4.0
QUICK_REQUESTS = 400


def plan_of(ready: Ready, share: float, restarts: int, seed: int) -> Plan:
    workload = WORKLOADS[TRAFFIC]
    speed = CAPACITY[TRAFFIC][0] * LOAD
    span_s = ready.summary.span_s / speed
    engine = replace(workload.engine, cache_tokens=cache_tokens_of(ready, share), block_size=ready.summary.block_tokens)
    times = tuple(Restart(span_s * (at + 1) / (restarts + 1), at % ENGINES) for at in range(restarts))
    plan = Plan("affinity", 1, (engine,) * ENGINES, speed=speed, seed=seed, regret=False, per_request=True)
    return replace(plan, restarts=times)


def evicted_tokens_per_s(plan: Plan, done: Done, answers: float) -> float:
    """Return the tokens per second that an engine stores and cannot keep; 0 with restarts, which are no evictions."""
    stored = [computed + answers / ENGINES for computed in done.result.computed_by_engine]
    evicted = sum(max(0.0, each - plan.engines[0].cache_tokens) for each in stored) / ENGINES
    return 0.0 if plan.restarts else round(evicted / done.result.virtual_s, 1)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = command_line(__doc__, seed="the nodes", jobs=True, quick="a few requests").parse_args(argv)
    trace = WORKLOADS[TRAFFIC].loaded(QUICK_REQUESTS if arguments.quick else None)
    kinds = {streamed: make_ready(trace, stream=streamed) for streamed in (True, False)}
    ready = kinds[True]
    sizes = [*((share, 0) for share in SHARES), *((ROOMY, restarts) for restarts in RESTARTS)]
    cases = [
        (streamed, share, replace(plan_of(ready, share, restarts, arguments.seed), knowledge=knowledge))
        for streamed in kinds
        for share, restarts in sizes
        for knowledge in KNOWLEDGE
    ]
    done = execute_all([Task(kinds[streamed], plan) for streamed, _, plan in cases], arguments.jobs, time.process_time)
    rows = []
    for (streamed, share, plan), each in zip(cases, done, strict=True):
        row = {
            "streamed": streamed,
            "knowledge": plan.knowledge,
            "cache_share": share,
            "restarts_per_s": round(len(plan.restarts) / each.result.virtual_s, 4),
            "evicted_tokens_per_s": evicted_tokens_per_s(plan, each, ready.summary.answer_tokens),
            **figures(each, ready.summary.block_tokens),
        }
        rows.append(row)
        show_row(row)
    published = {"ranvier_wasted_tokens": {"push": 1902, "none": 1902}, "purdue": None}
    return finish("stale", arguments, {"traffic": asdict(ready.summary), "published": published}, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
