"""Traffic that strangers reported of other routers, and that the workloads of `workloads` lack.

Long answers, one long document, engines that start empty or differ in speed, agents that hardly pause, coding sessions.
The clients of `think_s` wait for an answer before they go on, so their load is what the engines can serve. All others
come at the times of the trace. Each draw has new texts, lengths and arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from benchmarks.harness.bench import data_folder
from benchmarks.workloads.traffic import BLOCK_TOKENS, Passage, Writer, evenly
from benchmarks.workloads.workloads import OWN, Workload
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.presets import preset
from ranvier_py.replay.replay_plan import Restart
from ranvier_py.replay.traces.open_trace import open_trace
from ranvier_py.replay.traces.trace import Trace, TraceOptions

LAB, L4, A100, H100 = (preset(name) for name in ("lab", "l4-llama-8b", "a100-llama-8b", "h100-llama-8b"))
DRAWS = 3
ENGINES = 4
CODING = "claude_code_sessions_dev.jsonl.gz"
CODING_SESSIONS = 20
CODING_CACHE_TOKENS, CODING_TOKENS_MAX = 60_000, 50_000


def users(seed: int, many: int, turns: int, *, system: int, question: int, answer: int, history: bool) -> Trace:
    """Users who start within two seconds, share a system prompt, and ask in turns. `history`: each turn repeats those
    before it. Questions and answers vary by a third."""
    rng, writer = Random(f"{seed}/users"), Writer()
    shared = writer.passage(system)
    requests = []
    for user in range(many):
        start, messages = rng.uniform(0.0, 2.0), [shared]
        for turn in range(turns):
            prompt = [*messages, passage(writer, rng, question)]
            answered = passage(writer, rng, answer)
            requests.append(writer.request(start + turn * 1e-3, f"user {user}", prompt, answered))
            messages = [*prompt, answered] if history else messages
    requests.sort(key=lambda request: request.at)
    return Trace("users", requests, BLOCK_TOKENS, timed=True)


def questions(seed: int, many: int, per_s: float, *, shared: int, question: int, answer: int) -> Trace:
    """Poisson arrivals of short questions about one long text."""
    rng, writer = Random(f"{seed}/questions"), Writer()
    text = writer.passage(shared)
    requests = [
        writer.request(at, f"question {index}", [text, passage(writer, rng, question)], passage(writer, rng, answer))
        for index, at in enumerate(evenly(rng, many, per_s))
    ]
    return Trace("questions", requests, BLOCK_TOKENS, timed=True)


def passage(writer: Writer, rng: Random, tokens: int) -> Passage:
    return writer.passage(rng.uniform(2 / 3, 4 / 3) * tokens)


def coding(seed: int) -> Trace:
    """Some of the recorded coding sessions, as far as their prompts fit the engines' caches."""
    trace = open_trace(data_folder() / "traces" / CODING, TraceOptions(seed=seed))
    fitting = [each for each in trace.requests if each.prompt_tokens + each.answer_tokens <= CODING_TOKENS_MAX]
    names = sorted({request.session.split("/")[0] for request in fitting})
    kept = set(Random(f"{seed}/coding").sample(names, min(CODING_SESSIONS, len(names))))
    return replace(trace, requests=[each for each in fitting if each.session.split("/")[0] in kept])


def at_speed(limits: EngineLimits, times: float) -> EngineLimits:
    """Return an engine that computes and decodes so many times as fast."""
    return replace(
        limits,
        prefill_tokens_per_s=limits.prefill_tokens_per_s * times,
        decode_s=limits.decode_s / times,
        decode_s_per_running=limits.decode_s_per_running / times,
        decode_s_per_context_token=limits.decode_s_per_context_token / times,
    )


def workload(
    name: str,
    make: Callable[[int], Trace],
    fleet: tuple[EngineLimits, ...],
    *,
    speed: float = 1.0,
    think_s: float | None = None,
    restarts: tuple[Restart, ...] = (),
    file: str = "",
) -> Workload:
    return Workload(
        name=name,
        load=lambda: make(1),
        tight_tokens=0,
        capacity={OWN: speed},
        draws=DRAWS,
        retimed=lambda _, draw: make(1 + draw),
        file=file,
        fleet=fleet,
        think_s=think_s,
        restarts=restarts,
    )


REPORTED: Mapping[str, Workload] = MappingProxyType(
    {
        each.name: each
        for each in (
            workload(
                "reasoning",
                lambda seed: users(seed, 16, 6, system=2000, question=200, answer=3000, history=False),
                (replace(L4, cache_tokens=42_000),) * ENGINES,
                think_s=1.0,
            ),
            workload(
                "reasoning_chats",
                lambda seed: users(seed, 24, 4, system=2000, question=200, answer=3000, history=True),
                (replace(A100, cache_tokens=60_000),) * ENGINES,
                think_s=1.0,
            ),
            workload(
                "busy_document",
                lambda seed: questions(seed, 600, 6.0, shared=60_000, question=100, answer=300),
                (H100,) * ENGINES,
            ),
            workload(
                "idle_document",
                lambda seed: questions(seed, 400, 0.5, shared=60_000, question=100, answer=300),
                (H100,) * ENGINES,
            ),
            workload(
                "engine_that_joins",
                lambda seed: questions(seed, 3000, 20.0, shared=6000, question=200, answer=100),
                (A100,) * ENGINES,
                restarts=(Restart(40.0, 2),),
            ),
            workload(
                "unequal_engines",
                lambda seed: users(seed, 1, 300, system=1000, question=200, answer=200, history=False),
                tuple(at_speed(A100, times) for times in (4, 1, 2, 1)),
                think_s=0.5,
            ),
            workload(
                "unequal_engines_chats",
                lambda seed: users(seed, 8, 40, system=1000, question=200, answer=200, history=True),
                tuple(at_speed(A100, times) for times in (4, 1, 2, 1)),
                think_s=0.5,
            ),
            workload(
                "agents",
                lambda seed: users(seed, 24, 12, system=3000, question=600, answer=120, history=True),
                (replace(A100, cache_tokens=120_000),) * ENGINES,
                think_s=0.2,
            ),
            workload(
                "shared_prompt",
                lambda seed: users(seed, 8, 20, system=1000, question=100, answer=150, history=False),
                (LAB,) * ENGINES,
                think_s=0.1,
            ),
            workload(
                "coding", coding, (replace(LAB, cache_tokens=CODING_CACHE_TOKENS),) * ENGINES, speed=8.0, file=CODING
            ),
        )
    }
)
