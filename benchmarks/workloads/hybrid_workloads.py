"""The traffic and engines of the hybrid benchmark: four seeded sets, tau-bench and coding agents.

An engine is Qwen3.5-9B with 16 bits on an L40S; coding agents have an H100. On an L40S there is memory for 769,000
tokens of keys and values, and a checkpoint takes as much as 1,572 of them. Requests arrive as in the trace, or slower,
so that the engines would compute for at most the share LOAD of their time if nothing were reused. So nothing saturates,
and missed reuse shows. The times in the seeded sets ignore that an answer takes a while; here no turn is sent before
the answer that it quotes can have been generated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from benchmarks.workloads.hybrid_traces import HEAD, TRACES, Shape, Turn
from benchmarks.workloads.hybrid_traces import trace as turns_of
from benchmarks.workloads.workloads import ENGINES, TAUBENCH, Workload, from_file, sessions
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher, TokenState
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.presets import H100, Accelerator, LanguageModel, derived
from ranvier_py.replay.jobs import Ready
from ranvier_py.replay.traces.trace import Trace, TraceRequest
from ranvier_py.replay.traces.trace_chains import KEY, chain_of, continued

MODEL = "qwen3.5-9b"
QWEN_9B = LanguageModel(9e9, layers=8, heads=4, head_size=256)
"""The keys and values of its eight attention layers take 32,768 bytes a token."""

L40S = Accelerator(362e12, 0.864e12, 48e9, 2048, 256)  # the sheet's 733e12 are with sparsity
SMALL = replace(derived(L40S, QWEN_9B), hybrid_model=MODEL)
LARGE = replace(derived(H100, QWEN_9B), hybrid_model=MODEL)

BLOCK_TOKENS = 16
LOAD = 0.5
ANSWER_TOKENS_PER_S = 25.0
"""An L40S generates 36 for one request, and fewer if it serves others."""

CODING = "claude_code_sessions_dev.jsonl.gz"
CODING_REQUESTS = 250


def set_of(shape: Shape) -> Callable[[], Trace]:
    return lambda: trace_of(shape.name, turns_of(shape))


def trace_of(name: str, turns: Sequence[Turn]) -> Trace:
    """Return these requests as a trace. The end of every message is known, as in a chat."""
    hasher = TokenHasher(KEY, BLOCK_TOKENS)
    start = hasher.start(TextHasher(KEY).namespace({"model": ""}))
    requests = [request_of(turn, hasher, start) for turn in after_answers(turns)]
    return Trace(name, requests, BLOCK_TOKENS, timed=True)


def after_answers(turns: Sequence[Turn]) -> list[Turn]:
    """Delay each turn by the time that the answers before it in its session take."""
    answering_s: dict[int, float] = defaultdict(float)
    delayed = []
    for turn in turns:
        delayed.append(turn._replace(at=turn.at + answering_s[turn.session]))
        answering_s[turn.session] += len(turn.answer) / ANSWER_TOKENS_PER_S
    return sorted(delayed, key=lambda turn: turn.at)


def request_of(turn: Turn, hasher: TokenHasher, start: TokenState) -> TraceRequest:
    """Return a turn as a request. Messages begin at the token HEAD[0], which no content contains."""
    ids = np.array([*turn.prompt, *turn.answer], dtype=np.uint32)
    begins = np.flatnonzero(ids == HEAD[0]).tolist()
    chain, ends = chain_of(hasher.extend(start, ids, [*begins[1:], len(ids)]))
    return TraceRequest(
        at=turn.at,
        session=str(turn.session),
        model="",
        prompt_tokens=len(turn.prompt),
        answer_tokens=len(turn.answer),
        chain=chain,
        ends=ends,
        blocks=continued((), ids, BLOCK_TOKENS),
    )


def speed_of(ready: Ready, engine: EngineLimits) -> float:
    """Return the speed, at most 1, at which requests arrive with a load of at most LOAD."""
    summary = ready.summary
    cold_s = summary.prompt_tokens / engine.prefill_tokens_per_s / ENGINES
    return min(1.0, round(LOAD * summary.span_s / cold_s, 4))


HYBRID_WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            *(Workload(name, set_of(shape), 0, {}, SMALL) for name, shape in TRACES.items()),
            Workload("taubench", from_file(TAUBENCH, "qwen2.5"), 0, {}, SMALL, file=TAUBENCH),
            Workload(
                "coding",
                from_file(CODING, limit=CODING_REQUESTS),
                0,
                {},
                LARGE,
                draws=4,  # if one chat of 325,000 tokens loses its engine, hits fall by 6 points: a single draw is luck
                retimed=sessions,
                file=CODING,
                limits=f"the first {CODING_REQUESTS} of 10,115 requests",
            ),
        )
    }
)
