"""Computes the paper's figures from our traces, with the numbers that the paper states, as data for a page.

All runs have the published behaviour (COMPAT), as the paper's have. Times to the first token are on a line through the
published measurements of Jamba 1.5 Mini: FIRST_TOKEN_MS, and TOKEN_MS for each token that is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from benchmarks.harness.marconi_reference import BOOTSTRAP, SIZE_GB
from benchmarks.workloads.hybrid_traces import TRACES, Shape, trace
from ranvier_py.replay.engine.block_cache import chain_keys
from ranvier_py.replay.hybrid.alpha_search import TokenRequest, TunedOnce
from ranvier_py.replay.hybrid.block_states import BlockStates
from ranvier_py.replay.hybrid.hybrid_model import PAPER_7B, HybridModel, paper_model
from ranvier_py.replay.hybrid.state_tree import COMPAT, StateTree
from ranvier_py.replay.hybrid.trace_caches import TraceRun, TreeOfTrace, run

GB = 10**9
FIRST_TOKEN_MS, TOKEN_MS = 17.8, 0.0530
FINE_BLOCK = 32
SIZES = {"lmsys": (1, 2, 4), "sharegpt": (0.5, 1, 2), "swebench": (5, 10, 30), "rag": (1, 2, 4)}
CONTENTION_GB = (5, 10, 15, 20, 30)
LAYERS = ((32, 4), (30, 5), (28, 7), (24, 12), (0, 36))
COLUMNS = (128, 64, 32, 16)
LENGTHS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 32_768)
MARCONI, SGLANG, VLLM, NOTHING = "Marconi", "SGLang+", "vLLM+", "no cache"

Requests = Sequence[TokenRequest]
Figure = Mapping[str, Any]
Points = Sequence[tuple[float, float]]


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
    gigabytes: float, model: HybridModel = PAPER_7B, shape: Shape = TRACES["swebench"]
) -> Callable[[str], float]:
    """Return a function that returns the hit rate of a kind of cache on the agents' trace."""
    return lambda kind: round(ran(kind, "swebench", gigabytes, known_requests(shape), model).hit_rate, 4)


def chart(series: Mapping[str, Points], x: str, y: str, **more: object) -> Figure:
    named = [{"name": name, "points": [list(point) for point in points]} for name, points in series.items()]
    return {"series": named, "x": x, "y": y, **more}


def bars(values: Mapping[str, float], x: str, *, percent: bool = False) -> Figure:
    return {"bars": dict(values), "x": x, "percent": percent}


def by_kind(kinds: Sequence[str], xs: Sequence[float], rows: Sequence[Sequence[float]]) -> dict[str, Points]:
    return {kind: list(zip(xs, row, strict=True)) for kind, row in zip(kinds, rows, strict=True)}


def ttft_ms(found: TraceRun) -> list[float]:
    pairs = zip(found.prompts, found.reused, strict=True)
    return [FIRST_TOKEN_MS + TOKEN_MS * (prompt - reused) for prompt, reused in pairs]


def figures() -> Iterator[Figure]:
    """Yield all figures in the order of the paper. `published` None: the paper's and ours are of the same formulas."""
    for each in (reuse, sizes, efficiency, against_fine, against_recency, tails, by_length, contention):
        yield from each()
    for one in (layers, columns, arrivals, breakdown):
        yield from one()


def reuse() -> Iterator[Figure]:
    found = {}
    for name in TRACES:
        blocks, states = reuse_of(known_requests(TRACES[name]))
        found[f"{name}: blocks"] = round(blocks, 4)
        found[f"{name}: states"] = round(states, 4)
    yield {
        "number": "3a",
        "title": "Of blocks of 32 tokens, how many are ever reused, and how many of their states",
        "ours": bars(found, "share of those stored, endless cache", percent=True),
        "published": bars({"blocks": 0.25, "states": 0.004}, "share of those stored, one SWE-bench run", percent=True),
    }


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


def sizes() -> Iterator[Figure]:
    transformer = paper_model(0, 32, 32)
    series = {"Transformer": [(at, at * transformer.token_bytes / GB) for at in LENGTHS]}
    for block in (16, 32, 64, 128):
        series[f"hybrid, block {block}"] = [
            (at, (-(-at // block) * PAPER_7B.state_bytes + at * PAPER_7B.token_bytes) / GB) for at in LENGTHS
        ]
    series["hybrid, one checkpoint"] = [(at, PAPER_7B.prefix_bytes(at) / GB) for at in LENGTHS]
    yield {
        "number": "3b",
        "title": "What the cache entries of one sequence take",
        "ours": chart(series, "tokens", "GB", log_x=True, log_y=True),
        "published": None,
        "note": "10,000 tokens in blocks of 16: 17.4 GB, 3.3 times a Transformer's, as the paper states.",
    }


def efficiency() -> Iterator[Figure]:
    models = {"Transformer": paper_model(0, 32, 32), "hybrid 24:4": PAPER_7B, "hybrid 32:4": paper_model(32, 4, 36)}
    series = {
        name: [(at, model.prefix_flops(at) / max(1, stored(model, at))) for at in LENGTHS]
        for name, model in models.items()
    }
    yield {
        "number": "5",
        "title": "Operations saved for each byte kept",
        "ours": chart(series, "tokens", "operations/byte", log_x=True),
        "published": None,
        "note": "Steep below some 4,000 tokens, nearly flat above: it tells short from long, not long from longer.",
    }


def stored(model: HybridModel, tokens: int) -> int:
    return model.prefix_bytes(tokens) if model.recurrent_layers else tokens * model.token_bytes


@cache
def hit_rates() -> dict[tuple[str, float], dict[str, TraceRun]]:
    """Return the runs of all kinds of cache, by trace and capacity."""
    return {
        (name, size): {kind: ran(kind, name, size, known_requests(TRACES[name])) for kind in (VLLM, SGLANG, MARCONI)}
        for name, steps in SIZES.items()
        for size in steps
    }


def against_fine() -> Iterator[Figure]:
    found = {
        f"{name} {size:g} GB": round(runs[MARCONI].hit_rate / runs[VLLM].hit_rate, 2)
        for (name, size), runs in hit_rates().items()
    }
    yield {
        "number": "7",
        "title": "Hit rate of Marconi as a multiple of vLLM+'s",
        "ours": bars(found, "times vLLM+"),
        "published": bars({"LMSys": 4.5, "ShareGPT": 7.3, "SWE-bench": 34.4}, "times vLLM+, mean of all runs"),
    }


def against_recency() -> Iterator[Figure]:
    found = {
        f"{name} {size:g} GB": round(runs[MARCONI].hit_rate / runs[SGLANG].hit_rate, 3)
        for (name, size), runs in hit_rates().items()
    }
    yield {
        "number": "8",
        "title": "Hit rate of Marconi as a multiple of SGLang+'s: eviction alone",
        "ours": bars(found, "times SGLang+"),
        "published": bars({"LMSys": 1.456, "ShareGPT": 1.19, "SWE-bench": 3.197}, "times SGLang+, P95 of all runs"),
        "note": "Below 1 in several of ours: alpha is tuned once, on how the trace began.",
    }


def tails() -> Iterator[Figure]:
    found = {}
    for name in TRACES:
        runs = hit_rates()[name, SIZE_GB[name]]
        whole = TraceRun([0] * len(runs[VLLM].prompts), runs[VLLM].prompts)
        slowest = float(np.percentile(ttft_ms(whole), 95))
        for kind in (VLLM, SGLANG, MARCONI):
            found[f"{name}: {kind}"] = round(float(np.percentile(ttft_ms(runs[kind]), 95)) / slowest, 4)
    yield {
        "number": "9",
        "title": "P95 of the time to the first token, as a share of what it is without a cache",
        "ours": bars(found, "share of P95 without a cache", percent=True),
        "published": bars(
            {"LMSys: Marconi": 0.631, "ShareGPT: Marconi": 0.268, "SWE-bench: Marconi": 0.532},
            "at best, share of P95 without a cache",
            percent=True,
        ),
        "note": "A line through measurements of Jamba 1.5 Mini: 17.8 ms, and 0.053 ms for each token computed.",
    }


def by_length() -> Iterator[Figure]:
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
    yield {
        "number": "10a",
        "title": "Hit rate by length of the prompt, agents, 10 GB",
        "ours": chart(series, "prompt tokens", "mean hit rate of requests", percent_y=True),
        "published": "Marconi below SGLang+ by up to 3.0 points under 7,000 tokens, above by up to 25.5 points beyond; "
        "hit rate 32.7 % against 16.4 %, operations saved +90.3 %.",
    }
    whole = {kind: ttft_ms(found) for kind, found in runs.items()}
    quantiles = {
        kind: [(float(np.percentile(times, share)), share / 100) for share in range(0, 101, 5)]
        for kind, times in whole.items()
    }
    yield {
        "number": "10b",
        "title": "Distribution of times to the first token, agents, 10 GB",
        "ours": chart(quantiles, "ms", "share of requests", percent_y=True),
        "published": "Marconi against SGLang+: P5 6.3 % later, P50 13.4 % and P95 22.0 % sooner.",
    }


def contention() -> Iterator[Figure]:
    kinds = (MARCONI, SGLANG)
    rows = [[agents(size)(kind) for size in CONTENTION_GB] for kind in kinds]
    published = [(0.0959, 0.2274, 0.4303, 0.4792, 0.4821), (0.0772, 0.1501, 0.2557, 0.3690, 0.4389)]
    yield {
        "number": "11",
        "title": "Hit rate by the size of the cache, agents",
        "ours": chart(by_kind(kinds, CONTENTION_GB, rows), "GB, 40 sessions", "hit rate", percent_y=True),
        "published": chart(
            by_kind(kinds, (60, 80, 100, 120, 140), published), "GB, 100 sessions", "hit rate", percent_y=True
        ),
    }


def layers() -> Iterator[Figure]:
    kinds = (MARCONI, SGLANG, VLLM)
    models = [paper_model(recurrent, attention, recurrent + attention) for recurrent, attention in LAYERS]
    rows = [[agents(SIZE_GB["swebench"], model)(kind) for model in models] for kind in kinds]
    shares = [recurrent / (recurrent + attention) for recurrent, attention in LAYERS]
    published = [
        (0.1806, 0.1230, 0.0835, 0.0569, 0.0505),
        (0.1131, 0.0851, 0.0662, 0.0538, 0.0504),
        (0.0501, 0.0501, 0.0501, 0.0502, 0.0504),
    ]
    axis = ("share of recurrent layers among those with a state", "hit rate")
    yield {
        "number": "12a",
        "title": "Hit rate by layers, recurrent to attention: 0:36, 24:12, 28:7, 30:5, 32:4",
        "ours": chart(by_kind(kinds, shares, rows), *axis, percent_y=True),
        "published": chart(by_kind(kinds, shares, published), *axis, percent_y=True),
    }


def columns() -> Iterator[Figure]:
    kinds = (MARCONI, SGLANG, VLLM)
    rows = [[agents(SIZE_GB["swebench"], paper_model(columns=each))(kind) for each in COLUMNS] for kind in kinds]
    published = [
        (0.3155, 0.2988, 0.3019, 0.2936),
        (0.1639, 0.1739, 0.1800, 0.1837),
        (0.0089, 0.0150, 0.0314, 0.0517),
    ]
    yield {
        "number": "12b",
        "title": "Hit rate by the dimension of the state",
        "ours": chart(by_kind(kinds, COLUMNS, rows), "state dimension", "hit rate", percent_y=True),
        "published": chart(by_kind(kinds, COLUMNS, published), "state dimension", "hit rate", percent_y=True),
    }


def arrivals() -> Iterator[Figure]:
    kinds, size = (MARCONI, SGLANG), SIZE_GB["swebench"]
    by_sessions, by_tools = (0.5, 1.0, 2.0), (5.0, 7.5, 10.0)
    shapes = [Shape("swebench", each if each != 1 else 1, 40, 7.5) for each in by_sessions]
    rows = [[agents(size, shape=shape)(kind) for shape in shapes] for kind in kinds]
    yield {
        "number": "13a",
        "title": "Hit rate by how often sessions begin, agents",
        "ours": chart(by_kind(kinds, by_sessions, rows), "sessions/s, 10 GB", "hit rate", percent_y=True),
        "published": chart(
            by_kind(kinds, by_sessions, [(0.4870, 0.4492, 0.4302), (0.3518, 0.2927, 0.2636)]),
            "sessions/s, 100 GB",
            "hit rate",
            percent_y=True,
        ),
    }
    shapes = [Shape("swebench", 1, 40, each) for each in by_tools]
    rows = [[agents(size, shape=shape)(kind) for shape in shapes] for kind in kinds]
    yield {
        "number": "13b",
        "title": "Hit rate by the time between the requests of a session, agents",
        "ours": chart(by_kind(kinds, by_tools, rows), "seconds, 10 GB", "hit rate", percent_y=True),
        "published": chart(
            by_kind(kinds, by_tools, [(0.2590, 0.2425, 0.2408), (0.1883, 0.1660, 0.1549)]),
            "seconds",
            "hit rate",
            percent_y=True,
        ),
    }


def breakdown() -> Iterator[Figure]:
    series: dict[str, Points] = {"recurrent": [], "attention": [], "MLP": []}
    for at in LENGTHS:
        whole = PAPER_7B.prefix_flops(at)
        parts = PAPER_7B.recurrent_flops(at), PAPER_7B.attention_flops(at), PAPER_7B.mlp_flops(at)
        for name, part in zip(series, parts, strict=True):
            series[name] = [*series[name], (at, part / whole)]
    yield {
        "number": "14",
        "title": "Whose operations they are, 24 recurrent, 4 attention and 28 MLP layers",
        "ours": chart(series, "tokens", "share of operations", log_x=True, percent_y=True),
        "published": None,
        "note": "Attention is 7.1 % of the layers.",
    }
