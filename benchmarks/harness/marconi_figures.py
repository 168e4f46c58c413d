"""Computes the paper's figures from our traces, with the numbers that the paper states, as data for a page.

All runs have the published behaviour (COMPAT), as the paper's have. Times to the first token are on a line through the
published measurements of Jamba 1.5 Mini: FIRST_TOKEN_MS, and TOKEN_MS for each token that is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.block_states import BlockStates
from benchmarks.harness.marconi_reference import BOOTSTRAP, SIZE_GB
from benchmarks.harness.trace_caches import TraceRun, TreeOfTrace, run
from benchmarks.workloads.hybrid_traces import TRACES, Shape, trace
from ranvier_py.replay.engine.block_cache import chain_keys
from ranvier_py.replay.hybrid.alpha_search import TokenRequest, TunedOnce
from ranvier_py.replay.hybrid.hybrid_model import PAPER_7B, HybridModel, paper_model
from ranvier_py.replay.hybrid.state_tree import COMPAT, StateTree

GB = 10**9
FIRST_TOKEN_MS, TOKEN_MS = 17.8, 0.0530
FINE_BLOCK = 32
SIZES = {"lmsys": (1, 2, 4), "sharegpt": (0.5, 1, 2), "swebench": (5, 10, 30), "rag": (1, 2, 4)}
LENGTHS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 32_768)
MARCONI, SGLANG, VLLM = "Marconi", "SGLang+", "vLLM+"

Requests = Sequence[TokenRequest]
Figure = Mapping[str, Any]
Points = Sequence[tuple[float, float]]
Rate = Callable[[str], float]
"""Returns the hit rate of a kind of cache."""


def requests_of(shape: Shape) -> list[TokenRequest]:
    """Return a trace in the form that caches take."""
    found = []
    for turn in trace(shape):
        prompt = np.array(turn.prompt, dtype="<u4").tobytes()
        found.append(TokenRequest(prompt, prompt + np.array(turn.answer, dtype="<u4").tobytes()))
    return found


known_requests = cache(requests_of)


def ran(kind: str, name: str, gigabytes: float, requests: Requests, model: HybridModel = PAPER_7B) -> TraceRun:
    """Run requests through a cache of this kind and size."""
    capacity = int(gigabytes * GB)
    if kind == VLLM:
        return run(BlockStates(model, capacity, FINE_BLOCK), requests)
    if kind == SGLANG:
        return run(TreeOfTrace(StateTree(model, capacity, "lru", defects=COMPAT)), requests)
    return run(TreeOfTrace(StateTree(model, capacity, "utility", defects=COMPAT), TunedOnce(BOOTSTRAP[name])), requests)


def agents(
    gigabytes: float = SIZE_GB["swebench"], model: HybridModel = PAPER_7B, shape: Shape = TRACES["swebench"]
) -> Rate:
    """Return the hit rates on the agents' trace, each measured when it is asked for."""
    return lambda kind: round(ran(kind, "swebench", gigabytes, known_requests(shape), model).hit_rate, 4)


@cache
def hit_rates() -> dict[tuple[str, float], dict[str, TraceRun]]:
    """Return the runs of all kinds of cache, by trace and capacity."""
    return {
        (name, size): {kind: ran(kind, name, size, known_requests(TRACES[name])) for kind in (VLLM, SGLANG, MARCONI)}
        for name, steps in SIZES.items()
        for size in steps
    }


def figure(number: str, title: str, ours: Figure, published: Figure | str | None, note: str = "") -> Figure:
    """Return one figure. `published` None: the paper's and ours are of the same formulas."""
    named = {"number": number, "title": title, "ours": ours, "published": published}
    return named | ({"note": note} if note else {})


def chart(series: Mapping[str, Points], x: str, y: str, **more: object) -> Figure:
    named = [{"name": name, "points": [list(point) for point in points]} for name, points in series.items()]
    return {"series": named, "x": x, "y": y, **more}


def bars(values: Mapping[str, float], x: str, *, percent: bool = False) -> Figure:
    return {"bars": dict(values), "x": x, "percent": percent}


def ttft_ms(found: TraceRun) -> list[float]:
    pairs = zip(found.prompts, found.reused, strict=True)
    return [FIRST_TOKEN_MS + TOKEN_MS * (prompt - reused) for prompt, reused in pairs]


def figures() -> Iterator[Figure]:
    """Yield all figures in the order of the paper."""
    yield reuse()
    yield sizes()
    yield efficiency()
    yield relative(
        *("7", "Hit rate of Marconi as a multiple of vLLM+'s", VLLM, 2),
        bars({"LMSys": 4.5, "ShareGPT": 7.3, "SWE-bench": 34.4}, "times vLLM+, mean of all runs"),
    )
    yield relative(
        *("8", "Hit rate of Marconi as a multiple of SGLang+'s: eviction alone", SGLANG, 3),
        bars({"LMSys": 1.456, "ShareGPT": 1.19, "SWE-bench": 3.197}, "times SGLang+, P95 of all runs"),
        "Below 1 in several of ours: alpha is tuned once, on how the trace began.",
    )
    yield tails()
    yield by_length()
    yield distribution()
    yield from map(swept, sweeps())
    yield breakdown()


# --- each of them -----------------------------------------------------------------------------------------------------


def reuse() -> Figure:
    found = {}
    for name in TRACES:
        blocks, states = reuse_of(known_requests(TRACES[name]))
        found[f"{name}: blocks"] = round(blocks, 4)
        found[f"{name}: states"] = round(states, 4)
    return figure(
        "3a",
        "Of blocks of 32 tokens, how many are ever reused, and how many of their states",
        bars(found, "share of those stored, endless cache", percent=True),
        bars({"blocks": 0.25, "states": 0.004}, "share of those stored, one SWE-bench run", percent=True),
    )


def reuse_of(requests: Requests) -> tuple[float, float]:
    stored: set[int] = set()
    read: set[int] = set()
    resumed: set[int] = set()
    for request in requests:
        keys = chain_keys(np.frombuffer(request.whole, dtype="<u4"), FINE_BLOCK)
        asked = len(request.prompt) // (4 * FINE_BLOCK)
        hits = next((at for at in range(asked) if keys[at] not in stored), asked)
        read.update(keys[:hits])
        resumed.update(keys[hits - 1 : hits] if hits else ())
        stored.update(keys)
    return len(read) / len(stored), len(resumed) / len(stored)


def sizes() -> Figure:
    transformer = paper_model(0, 32, 32)
    series = {"Transformer": [(at, at * transformer.token_bytes / GB) for at in LENGTHS]}
    for block in (16, 32, 64, 128):
        series[f"hybrid, block {block}"] = [
            (at, (-(-at // block) * PAPER_7B.state_bytes + at * PAPER_7B.token_bytes) / GB) for at in LENGTHS
        ]
    series["hybrid, one checkpoint"] = [(at, PAPER_7B.prefix_bytes(at) / GB) for at in LENGTHS]
    note = "10,000 tokens in blocks of 16: 17.4 GB, 3.3 times a Transformer's, as the paper states."
    ours = chart(series, "tokens", "GB", log_x=True, log_y=True)
    return figure("3b", "What the cache entries of one sequence take", ours, None, note)


def efficiency() -> Figure:
    models = {"Transformer": paper_model(0, 32, 32), "hybrid 24:4": PAPER_7B, "hybrid 32:4": paper_model(32, 4, 36)}
    series = {
        name: [(at, model.prefix_flops(at) / max(1, stored(model, at))) for at in LENGTHS]
        for name, model in models.items()
    }
    note = "Steep below some 4,000 tokens, nearly flat above: it tells short from long, not long from longer."
    ours = chart(series, "tokens", "operations/byte", log_x=True)
    return figure("5", "Operations saved for each byte kept", ours, None, note)


def stored(model: HybridModel, tokens: int) -> int:
    return model.prefix_bytes(tokens) if model.recurrent_layers else tokens * model.token_bytes


def relative(number: str, title: str, base: str, digits: int, published: Figure, note: str = "") -> Figure:
    found = {
        f"{name} {size:g} GB": round(runs[MARCONI].hit_rate / runs[base].hit_rate, digits)
        for (name, size), runs in hit_rates().items()
    }
    return figure(number, title, bars(found, f"times {base}"), published, note)


def tails() -> Figure:
    found = {}
    for name in TRACES:
        runs = hit_rates()[name, SIZE_GB[name]]
        whole = TraceRun([0] * len(runs[VLLM].prompts), runs[VLLM].prompts)
        slowest = float(np.percentile(ttft_ms(whole), 95))
        for kind in (VLLM, SGLANG, MARCONI):
            found[f"{name}: {kind}"] = round(float(np.percentile(ttft_ms(runs[kind]), 95)) / slowest, 4)
    published = {"LMSys: Marconi": 0.631, "ShareGPT: Marconi": 0.268, "SWE-bench: Marconi": 0.532}
    return figure(
        "9",
        "P95 of the time to the first token, as a share of what it is without a cache",
        bars(found, "share of P95 without a cache", percent=True),
        bars(published, "at best, share of P95 without a cache", percent=True),
        "A line through measurements of Jamba 1.5 Mini: 17.8 ms, and 0.053 ms for each token computed.",
    )


def by_length() -> Figure:
    runs = hit_rates()["swebench", SIZE_GB["swebench"]]
    edges = (0, 3_000, 5_000, 7_000, 9_000, 12_000, 15_000, 33_000)
    series = {}
    for kind in (SGLANG, MARCONI):
        prompts, reused = np.array(runs[kind].prompts), np.array(runs[kind].reused)
        bins = np.digitize(prompts, edges)
        series[kind] = [
            (float(prompts[bins == each].mean()), float((reused[bins == each] / prompts[bins == each]).mean()))
            for each in range(1, len(edges))
            if (bins == each).any()
        ]
    return figure(
        "10a",
        "Hit rate by length of the prompt, agents, 10 GB",
        chart(series, "prompt tokens", "mean hit rate of requests", percent_y=True),
        "Marconi below SGLang+ by up to 3.0 points under 7,000 tokens, above by up to 25.5 points beyond; "
        "hit rate 32.7 % against 16.4 %, operations saved +90.3 %.",
    )


def distribution() -> Figure:
    runs = hit_rates()["swebench", SIZE_GB["swebench"]]
    series = {
        kind: [(float(np.percentile(ttft_ms(found), share)), share / 100) for share in range(0, 101, 5)]
        for kind, found in runs.items()
    }
    return figure(
        "10b",
        "Distribution of times to the first token, agents, 10 GB",
        chart(series, "ms", "share of requests", percent_y=True),
        "Marconi against SGLang+: P5 6.3 % later, P50 13.4 % and P95 22.0 % sooner.",
    )


class Sweep(NamedTuple):
    """Hit rates on the agents' trace for several values of x: our runs, and what the paper states of Marconi, SGLang+
    and (if given) vLLM+. `xs`: the paper's values of x, if they are not ours."""

    number: str
    title: str
    axis: str
    runs: Mapping[float, Rate]
    published: Sequence[Sequence[float]]
    published_axis: str = ""
    xs: Sequence[float] = ()


def sweeps() -> Iterator[Sweep]:
    yield Sweep(
        *("11", "Hit rate by the size of the cache, agents", "GB, 40 sessions"),
        {size: agents(size) for size in (5, 10, 15, 20, 30)},
        [(0.0959, 0.2274, 0.4303, 0.4792, 0.4821), (0.0772, 0.1501, 0.2557, 0.3690, 0.4389)],
        "GB, 100 sessions",
        (60, 80, 100, 120, 140),
    )
    layers = ((32, 4), (30, 5), (28, 7), (24, 12), (0, 36))
    yield Sweep(
        "12a",
        "Hit rate by layers, recurrent to attention: 0:36, 24:12, 28:7, 30:5, 32:4",
        "share of recurrent layers among those with a state",
        {each[0] / sum(each): agents(model=paper_model(*each, sum(each))) for each in layers},
        [
            (0.1806, 0.1230, 0.0835, 0.0569, 0.0505),
            (0.1131, 0.0851, 0.0662, 0.0538, 0.0504),
            (0.0501, 0.0501, 0.0501, 0.0502, 0.0504),
        ],
    )
    yield Sweep(
        *("12b", "Hit rate by the dimension of the state", "state dimension"),
        {columns: agents(model=paper_model(columns=columns)) for columns in (128, 64, 32, 16)},
        [(0.3155, 0.2988, 0.3019, 0.2936), (0.1639, 0.1739, 0.1800, 0.1837), (0.0089, 0.0150, 0.0314, 0.0517)],
    )
    yield Sweep(
        *("13a", "Hit rate by how often sessions begin, agents", "sessions/s, 10 GB"),
        {each: agents(shape=Shape("swebench", each, 40, 7.5)) for each in (0.5, 1.0, 2.0)},
        [(0.4870, 0.4492, 0.4302), (0.3518, 0.2927, 0.2636)],
        "sessions/s, 100 GB",
    )
    yield Sweep(
        *("13b", "Hit rate by the time between the requests of a session, agents", "seconds, 10 GB"),
        {each: agents(shape=Shape("swebench", 1, 40, each)) for each in (5.0, 7.5, 10.0)},
        [(0.2590, 0.2425, 0.2408), (0.1883, 0.1660, 0.1549)],
        "seconds",
    )


def swept(sweep: Sweep) -> Figure:
    kinds = (MARCONI, SGLANG, VLLM)[: len(sweep.published)]
    ours = {kind: [(x, rate(kind)) for x, rate in sweep.runs.items()] for kind in kinds}
    xs = sweep.xs or list(sweep.runs)
    published = {kind: list(zip(xs, row, strict=True)) for kind, row in zip(kinds, sweep.published, strict=True)}
    return figure(
        sweep.number,
        sweep.title,
        chart(ours, sweep.axis, "hit rate", percent_y=True),
        chart(published, sweep.published_axis or sweep.axis, "hit rate", percent_y=True),
    )


def breakdown() -> Figure:
    series: dict[str, list[tuple[float, float]]] = {"recurrent": [], "attention": [], "MLP": []}
    for at in LENGTHS:
        parts = PAPER_7B.recurrent_flops(at), PAPER_7B.attention_flops(at), PAPER_7B.mlp_flops(at)
        for points, part in zip(series.values(), parts, strict=True):
            points.append((at, part / PAPER_7B.prefix_flops(at)))
    title = "Whose operations they are, 24 recurrent, 4 attention and 28 MLP layers"
    ours = chart(series, "tokens", "share of operations", log_x=True, percent_y=True)
    return figure("14", title, ours, None, "Attention is 7.1 % of the layers.")
