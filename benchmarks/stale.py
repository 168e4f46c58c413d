"""What stale claims cost: wasted prefill by evictions and restarts per second, with engines that tell and without.

`python -m benchmarks.stale [--quick]`

Eight modelled engines, `affinity`, chats of many threads (`chat_threads` of the policies benchmark), all at one rate,
LOAD of what the smallest caches bear. Evictions: caches from all of the working set down to a quarter of it. Restarts:
an engine, each in turn, at even distances, with caches that hold everything; nodes see a restart by a probe within 5 s
where nobody tells. Knowledge: requests alone (`estimated`), counts in answers and metrics (`calibrated`), events
(`events`, the push of the Purdue report).
Of each: tokens evicted per second and engine, restarts per second of all, tokens believed to be cached and not
found per prompt token (`wasted`), found and not believed (`unforeseen`), hit rate, p90 of the time to first token.
Published: Ranvier measured no gain of push (1,902 wasted tokens with and without); Purdue published no figure.
Results: results/stale.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.engine_caches import CAPACITY, cache_tokens_of, errors_of
from benchmarks.harness.bench import command_line, finish, show_row
from benchmarks.workloads.workloads import ENGINES, WORKLOADS
from ranvier_py.replay.jobs import Done, Ready, Task, execute_all, make_ready
from ranvier_py.replay.knowledge import KNOWLEDGE
from ranvier_py.replay.replay_plan import Plan, Restart

TRAFFIC = "chat_threads"
LOAD = 0.7
SHARES = (1.0, 0.5, 0.35, 0.25)
"""Of the working set, in all caches together."""

RESTARTS = (0, 16, 64, 256)
"""In the whole run."""

ROOMY = 4.0
QUICK_REQUESTS = 400


@dataclass(frozen=True, slots=True)
class Row:
    knowledge: str
    cache_share: float
    restarts_per_s: float
    evicted_tokens_per_s: float  # of one engine
    wasted: float
    unforeseen: float
    hit_rate: float
    ttft_p90_s: float
    failed: int


def plan_of(ready: Ready, share: float, restarts: int, seed: int) -> Plan:
    workload = WORKLOADS[TRAFFIC]
    speed = CAPACITY[TRAFFIC][0] * LOAD
    span_s = ready.summary.span_s / speed
    engine = replace(workload.engine, cache_tokens=cache_tokens_of(ready, share), block_size=ready.summary.block_tokens)
    times = tuple(Restart(span_s * (at + 1) / (restarts + 1), at % ENGINES) for at in range(restarts))
    plan = Plan("affinity", 1, (engine,) * ENGINES, speed=speed, seed=seed, regret=False, per_request=True)
    return replace(plan, restarts=times)


def row_of(plan: Plan, done: Done, answers: float) -> Row:
    """What was stored and does not fit was evicted; a restart empties a cache and is none."""
    result = done.result
    wasted, unforeseen = errors_of(done, plan.engines[0].block_size)
    capacity = plan.engines[0].cache_tokens
    stored = [computed + answers / ENGINES for computed in result.computed_by_engine]
    evicted = sum(max(0.0, each - capacity) for each in stored) / ENGINES
    return Row(
        knowledge=plan.knowledge,
        cache_share=0.0,  # set by who knows it
        restarts_per_s=round(len(plan.restarts) / result.virtual_s, 4),
        evicted_tokens_per_s=0.0 if plan.restarts else round(evicted / result.virtual_s, 1),
        wasted=round(wasted, 5),
        unforeseen=round(unforeseen, 5),
        hit_rate=round(result.hit_rate, 5),
        ttft_p90_s=round(result.ttft_s["p90"], 5),
        failed=result.failed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = command_line(__doc__, seed="the nodes", jobs=True, quick="a few requests").parse_args(argv)
    trace = WORKLOADS[TRAFFIC].load()
    if arguments.quick:
        trace = replace(trace, requests=trace.requests[:QUICK_REQUESTS])
    ready = make_ready(replace(trace, name=TRAFFIC))
    cases = [*((share, 0) for share in SHARES), *((ROOMY, restarts) for restarts in RESTARTS)]
    plans = [
        replace(plan_of(ready, share, restarts, arguments.seed), knowledge=knowledge)
        for share, restarts in cases
        for knowledge in KNOWLEDGE
    ]
    done = execute_all([Task(ready, plan) for plan in plans], arguments.jobs, time.process_time)
    rows = []
    for (share, _), plan, each in zip([case for case in cases for _ in KNOWLEDGE], plans, done, strict=True):
        row = replace(row_of(plan, each, ready.summary.answer_tokens), cache_share=share)
        rows.append(row)
        show_row(asdict(row))
    result = {
        "seed": arguments.seed,
        "traffic": asdict(ready.summary),
        "published": {"ranvier_wasted_tokens": {"push": 1902, "none": 1902}, "purdue": None},
    }
    write = not (arguments.quick or arguments.dry)
    return finish("stale", result, write=write, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
