"""The traffic of the policies benchmark, with its rates: four traces of others and four generated shapes.

Caches are either *ample*, so that nothing is evicted, or *tight*: what is requested again does not fit.
Rates are shares of `capacity`: the speed (a factor on the trace's own rate) at which the p90 of `oracle_ttft` is KNEE
times that of idle engines (`python -m benchmarks.policies --calibrate` measures it again). The capacities are written
down here so that results of different days have the same rates. grouped_users is an exception, since its p90 jumps as
soon as a tenth of the requests is cold: its capacity is the speed at which the p99 of `oracle_greedy` rises sharply for
want of cache blocks, and half as much again with ample caches.
Where one request that is placed elsewhere changes all that follows, one run's p90 is up to a tenth off. Such traces are
run with several draws of their arrivals, and figures are means over the draws. Traces without times of their own, and
ShareGPT's 300 requests, have new times in each draw; others arrive a little `slower`. Traffic is open-loop, and the
same for every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from benchmarks.harness.bench import data_folder, show
from benchmarks.workloads import traffic
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.presets import H100, LanguageModel, derived, preset
from ranvier_py.replay.replay_plan import Restart
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Trace, TraceOptions

ENGINES = 8
AMPLE, TIGHT = "ample", "tight"
OWN = "own"  # the caches that the fleet of a workload has
AMPLE_TOKENS = 40_000_000  # cache of one engine: more than all prompts of any workload together

A100_8B = preset("a100-llama-8b")
L4_8B = replace(preset("l4-llama-8b"), cache_tokens=100_000)
"""With 8-bit weights, as in KubeAI's benchmark: that leaves 24e9 x 0.9 - 8e9 bytes for the cache."""
QWEN_32B = derived(H100, LanguageModel(32.8e9, layers=64, heads=8), modes=2)
"""llm-d's pods: Qwen3-32B on two H100. 299,000 tokens of cache, 15,900 prompt tokens/s."""

Retime = Callable[[Trace, int], Trace]

DELAY = 0.002
"""How much slower each draw of a trace with times of its own is than the one before, as a share."""


def slower(trace: Trace, draw: int) -> Trace:
    """Stretch the times between arrivals: nearly the same traffic, in which other ties, queues and evictions happen."""
    return replace(trace, requests=[replace(each, at=each.at * (1 + DELAY * draw)) for each in trace.requests])


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of traffic. `capacity`: speeds by cache. `retimed` draws other arrivals for the same requests. `fleet`:
    engines of its own, instead of ENGINES like `engine` with ample or tight caches. `restarts`, `think_s`: see `Plan`.
    """

    name: str
    load: Callable[[], Trace]
    tight_tokens: int
    capacity: Mapping[str, float]
    engine: EngineLimits = A100_8B
    draws: int = 1
    retimed: Retime = slower
    file: str = ""  # in the shared data; empty: generated
    limits: str = ""  # which part of the trace is run, if not all
    negative: bool = False  # a negative control: hardly anything is shared
    fleet: tuple[EngineLimits, ...] = ()
    think_s: float | None = None
    restarts: tuple[Restart, ...] = ()

    def engines(self, cache: str, block_tokens: int) -> tuple[EngineLimits, ...]:
        if self.fleet:
            return tuple([replace(limits, block_size=block_tokens) for limits in self.fleet])
        cache_tokens = AMPLE_TOKENS if cache == AMPLE else self.tight_tokens
        return (replace(self.engine, cache_tokens=cache_tokens, block_size=block_tokens),) * ENGINES

    def loaded(self, limit: int | None) -> Trace:
        """Load the trace, under the workload's name, with at most `limit` requests."""
        trace = self.load()
        return replace(trace, name=self.name, requests=trace.requests[:limit])

    def trace(self, draw: int, loaded: Trace) -> Trace:
        """Return the trace under the workload's name, with the arrivals of a draw; draw 0 has those of the file."""
        named = replace(loaded, name=self.name)
        return named if draw == 0 else self.retimed(named, draw)

    def is_there(self) -> bool:
        """Whether its file exists, or none is needed. Shows a message if it does not exist."""
        if not self.file or (data_folder() / "traces" / self.file).is_file():
            return True
        show(f"{self.name}: skipped, {self.file} is not there (SHARED_DATA says where to look)")
        return False


def from_file(file: str, tokenizer: str = "", limit: int = 0) -> Callable[[], Trace]:
    def load() -> Trace:
        options = TraceOptions(limit=limit)
        if tokenizer:
            options = replace(options, tokenizer=str(data_folder() / "tokenizers" / tokenizer))
        return open_trace(data_folder() / "traces" / file, options)

    return load


# --- other arrivals ---------------------------------------------------------------------------------------------------


def alone(trace: Trace, draw: int) -> Trace:
    """Move each request to a random time within the trace's span: the same requests in another order."""
    rng = Random(f"{draw}/alone")
    span_s = trace.requests[-1].at
    moved = [replace(request, at=rng.uniform(0.0, span_s)) for request in trace.requests]
    return replace(trace, requests=sorted(moved, key=lambda request: request.at))


def sessions(trace: Trace, draw: int) -> Trace:
    """Move each session to a random start within the time in which sessions began; its turns keep their distances."""
    rng = Random(f"{draw}/sessions")
    first: dict[str, float] = {}
    for request in trace.requests:
        first.setdefault(request.session, request.at)
    within_s = max(first.values())
    start = {session: rng.uniform(0.0, within_s) for session in first}
    moved = [
        replace(request, at=request.at - first[request.session] + start[request.session]) for request in trace.requests
    ]
    return replace(trace, requests=sorted(moved, key=lambda request: request.at))


def poisson(trace: Trace, draw: int) -> Trace:
    """Keep the order and draw Poisson arrivals: for traces whose own arrivals were drawn like that."""
    rng = Random(f"{draw}/poisson")
    times = traffic.evenly(rng, len(trace.requests), len(trace.requests) / trace.requests[-1].at)
    moved = [replace(request, at=at) for request, at in zip(trace.requests, times, strict=True)]
    return replace(trace, requests=moved)


# --- all of them ------------------------------------------------------------------------------------------------------

MOONCAKE, TAUBENCH = "mooncake_conversation.jsonl.gz", "taubench_gpt4o_airline.jsonl.gz"
QMSUM, SHAREGPT = "qmsum_doc_qa.jsonl.gz", "sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"
MOONCAKE_REQUESTS = 2000

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload(
                name="taubench",
                load=from_file(TAUBENCH, "qwen2.5"),
                tight_tokens=40_000,
                capacity={AMPLE: 24.7, TIGHT: 24.7},
                draws=5,
                file=TAUBENCH,
            ),
            Workload(
                name="mooncake",
                load=from_file(MOONCAKE, limit=MOONCAKE_REQUESTS),
                tight_tokens=A100_8B.cache_tokens,
                capacity={AMPLE: 1.76, TIGHT: 1.54},
                draws=2,
                file=MOONCAKE,
                limits=f"the first {MOONCAKE_REQUESTS} of 12,031 requests",
            ),
            Workload(
                name="qmsum",
                load=from_file(QMSUM, "llama3"),
                tight_tokens=100_000,
                capacity={AMPLE: 16.7, TIGHT: 14.7},
                draws=8,  # one draw's p90 is an eighth off: it hangs on a tenth of 553 requests, many in one queue
                retimed=alone,
                file=QMSUM,
            ),
            Workload(
                name="sharegpt",
                load=from_file(SHAREGPT),
                tight_tokens=40_000,
                capacity={AMPLE: 9.93, TIGHT: 1.83},
                draws=4,
                retimed=poisson,
                file=SHAREGPT,
                negative=True,
            ),
            Workload(
                name="shared_prefix_groups",
                load=lambda: traffic.shared_prefix_groups(1),
                tight_tokens=40_000,
                capacity={AMPLE: 1.41, TIGHT: 0.771},
            ),
            Workload(
                name="one_hot_prefix",
                load=lambda: traffic.one_hot_prefix(1),
                tight_tokens=20_000,
                capacity={AMPLE: 1.48, TIGHT: 1.76},
            ),
            Workload(
                name="grouped_users",
                load=lambda: traffic.grouped_users(1),
                tight_tokens=QWEN_32B.cache_tokens,
                capacity={AMPLE: 1.5, TIGHT: 1.0},
                draws=3,
                engine=QWEN_32B,
            ),
            Workload(
                name="chat_threads",
                load=lambda: traffic.chat_threads(1),
                tight_tokens=L4_8B.cache_tokens,
                capacity={AMPLE: 2.48, TIGHT: 2.28},
                draws=4,
                engine=L4_8B,
            ),
        )
    }
)
