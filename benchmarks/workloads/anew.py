"""Workloads drawn anew from the traces: other parts of them, numbers of engines, caches and rates.

A policy whose constants fit the workloads that it was made with shows it here. Everything is drawn by a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from benchmarks.harness.bench import data_folder
from benchmarks.workloads.reported import CODING, LAB
from benchmarks.workloads.workloads import ENGINES, OWN, WORKLOADS, Workload
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Trace, TraceOptions

EACH = 5  # workloads of each trace
COUNTS = (3, 5, 12)  # of engines
REQUESTS = 90  # for each engine, about
DRAWS = 5  # the p90 of so few hangs on a handful of them
CACHE = (0.5, 4.0)  # times the tight cache of the trace's own workload
LOAD = (0.3, 0.9)  # shares of the capacity
ROOM = 0.8  # of a cache: longer requests are left out


@dataclass(frozen=True, slots=True)
class Source:
    """A trace to draw from. `capacity`: the speed at which it fills ENGINES such engines. `agents`: sessions named
    «session/agent» belong together."""

    name: str
    load: Callable[[], Trace]
    engine: EngineLimits
    tight_tokens: int
    capacity: float
    agents: bool = False


def sources() -> list[Source]:
    """Return the traces that are there."""
    found = [
        Source(each.name, each.load, each.engine, each.tight_tokens, min(each.capacity.values()))
        for each in WORKLOADS.values()
        if each.file and each.is_there()
    ]
    coding = data_folder() / "traces" / CODING
    if coding.is_file():
        found.append(Source("coding", lambda: open_trace(coding, TraceOptions()), LAB, 60_000, 12.0, agents=True))
    return found


def drawn(seed: int) -> list[Workload]:
    """Draw EACH workloads of each trace."""
    found = []
    for source in sources():
        trace = source.load()
        found += [workload(source, trace, Random(f"{seed}/{source.name}/{each}")) for each in range(EACH)]
    return found


def workload(source: Source, trace: Trace, rng: Random) -> Workload:
    count = rng.choice(COUNTS)
    cache_tokens = round(source.tight_tokens * CACHE[0] * (CACHE[1] / CACHE[0]) ** rng.random())
    load = round(rng.uniform(*LOAD), 2)
    seeds = rng.random()
    name = f"{source.name}, {count} engines of {cache_tokens / 1000:.0f}k, load {load:g}"
    whole_s = trace.requests[-1].at
    blocks = ROOM * cache_tokens / trace.block_tokens
    fitting = replace(trace, requests=[each for each in trace.requests if len(each.blocks) < blocks])

    def part(draw: int) -> Trace:
        """Return another part of the trace, at the rate that is `load` of what these engines can serve."""
        some = part_of(fitting, REQUESTS * count, Random(f"{seeds}/{draw}"), agents=source.agents)
        span_s = some.requests[-1].at
        share = (len(some.requests) / span_s) / (len(trace.requests) / whole_s)  # of the trace's rate
        stretched = share / (source.capacity * load * count / ENGINES)
        return replace(some, requests=[replace(each, at=each.at * stretched) for each in some.requests])

    return Workload(
        name=name,
        load=lambda: part(0),
        tight_tokens=0,
        capacity={OWN: 1.0},
        draws=DRAWS,
        retimed=lambda _, draw: part(draw),
        fleet=(replace(source.engine, cache_tokens=cache_tokens),) * count,
    )


def part_of(trace: Trace, many: int, rng: Random, *, agents: bool) -> Trace:
    """Return about so many requests: whole sessions where the trace names them, and else some that follow each other.
    Times begin at 0."""
    requests = trace.requests
    names = [request.session.split("/")[0] if agents else request.session for request in requests]
    counts = Counter(names)
    if len(counts) > 1:
        kept, left = set[str](), many
        for name in rng.sample(sorted(counts), len(counts)):
            if left <= 0:
                break
            kept.add(name)
            left -= counts[name]
        requests = [request for request, name in zip(requests, names, strict=True) if name in kept]
    else:
        start = rng.randrange(max(1, len(requests) - many))
        requests = requests[start : start + many]
    first = requests[0].at
    return replace(trace, requests=[replace(each, at=each.at - first) for each in requests])
