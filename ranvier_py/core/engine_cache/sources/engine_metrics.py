"""Reads what an engine's metrics page says about its cache and its queue: bytes in, one value out.

Rule: everything but the names below is skipped unread. Over the ranks of a data-parallel engine requests, tokens and
capacity are summed, and the highest usage counts. A value that is no number, negative, infinite or absurd counts as
missing. A line is taken apart without a pattern, which could look through each again and again. Nothing raises.
Source: vLLM 0.8 to 0.32, SGLang, TensorRT-LLM's own server, Triton, llama.cpp.
Bounds: LINES_MAX, SERIES_MAX, LINE_BYTES_MAX, LABEL_BYTES_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from ranvier_py.core.routing.checkpoints.cache_profile import Signs
from ranvier_py.core.routing.processes.ranks import placeable, rank_in, ranks_of

SERIES_MAX = 1024
"""Series with our names that are read of one page: some ten for each rank."""

LINES_MAX = 50_000
"""A longer page is not an engine's: those have some 2,000 lines."""

LABEL_BYTES_MAX = 128 * 1024
"""Bytes of all labels of one page together."""

LINE_BYTES_MAX = 4096
"""Of a series; a longer one is skipped. vLLM's cache_config_info has some 1,500 bytes of labels."""

VALUE_MAX = 2.0**53
TOKENS_MAX = 2**40
BLOCK_TOKENS_MAX = 2**20

FIELDS: Mapping[bytes, str] = {
    b"vllm:num_requests_running": "running",
    b"sglang:num_running_reqs": "running",
    b"trtllm_num_requests_running": "running",
    b"trtllm_num_active_requests": "running",
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"vllm:num_requests_waiting": "waiting",
    b"sglang:num_queue_reqs": "waiting",
    b"trtllm_num_requests_waiting": "waiting",
    b"trtllm_num_queued_requests": "waiting",
    b"vllm:kv_cache_usage_perc": "usage",
    b"vllm:gpu_cache_usage_perc": "usage",  # its old name
    b"sglang:token_usage": "usage",
    b"trtllm_kv_cache_utilization": "usage",
    b"vllm:prefix_cache_queries_total": "queried",
    b"vllm:gpu_prefix_cache_queries_total": "queried",
    b"sglang:prompt_tokens_total": "queried",
    b"trtllm_prompt_tokens_total": "queried",
    b"vllm:prefix_cache_hits_total": "hit",
    b"vllm:gpu_prefix_cache_hits_total": "hit",
    b"sglang:cached_tokens_total": "hit",
    b"trtllm_prompt_cached_tokens_total": "hit",
    b"trtllm_prompt_tokens_cached_total": "hit",
    b"vllm:generation_tokens_total": "generated",
    b"sglang:generation_tokens_total": "generated",
    b"trtllm_generation_tokens_total": "generated",
    b"sglang:max_total_num_tokens": "capacity",  # up to 0.5.10 it is in labels of `cache_config_info`
    b"sglang:page_size": "block",
    b"sglang:mamba_used_tokens": "states",  # these four are 0 where there are none
    b"sglang:mamba_available_tokens": "states",
    b"sglang:swa_used_tokens": "windows",
    b"sglang:swa_available_tokens": "windows",
    b"trtllm_kv_cache_tokens_per_block": "block",
    b"trtllm_kv_cache_max_blocks": "blocks",
}
"""Name of a series -> the quantity that it shows."""

TRITON: Mapping[tuple[bytes, str], str] = {
    (b"nv_trt_llm_request_metrics", "scheduled"): "running",
    (b"nv_trt_llm_request_metrics", "waiting"): "waiting",
    (b"nv_trt_llm_kv_cache_block_metrics", "fraction"): "usage",
    (b"nv_trt_llm_kv_cache_block_metrics", "tokens_per"): "block",
    (b"nv_trt_llm_kv_cache_block_metrics", "max"): "blocks",
}
CONFIGS = (b"vllm:cache_config_info", b"sglang:cache_config_info")

NAMES = (*FIELDS, *dict.fromkeys(name for name, _ in TRITON), *CONFIGS)
OURS = re.compile(
    # a line's start as a byte, which is searched ten times as fast as with MULTILINE
    rb"\n(%b)(?=[{ \t])" % b"|".join(re.escape(name) for name in sorted(NAMES, key=len, reverse=True))
)
TIME = re.compile(rb"-?\d{1,20}")  # the time stamp behind a value
VALUE_BYTES_MAX = 40

START_TIME = b"process_start_time_seconds"
START_TIMES_MAX = 16  # lines with that name that are looked at

LABEL = re.compile(r'(?<!\w)([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

ENGINES: Mapping[bytes, str] = {b"vllm": "vllm", b"sglang": "sglang"}

OTHERS = frozenset(("states", "windows"))
"""Quantities of caches beside those of attention."""

OFF = ("false", "0")

MODE_CHARACTERS_MAX = 16

FIRST_RANK = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of ranks that all show the same number: only the first rank counts."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What one page said; None: it did not say. Tokens count since the process began; gauges are current.

    `queried_tokens` are prompt tokens looked up in the prefix cache, `hit_tokens` those that were found.
    """

    running: int | None = None
    waiting: int | None = None
    usage: float | None = None  # of the cache, 0 to 1
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    generated_tokens: int | None = None
    capacity_tokens: int | None = None
    block_tokens: int | None = None
    caches: bool | None = None  # whether the engine caches prefixes at all
    hybrid: bool | None = None  # whether caches beside attention's also decide how much of a prefix is reused
    states: bool | None = None  # whether these hold recurrent states
    state_mode: str = ""  # vLLM's `mamba_cache_mode`: at which block ends it makes states
    retention: str = ""  # vLLM's `prefix_cache_retention_interval`: which states it keeps
    engine: str = ""  # vllm or sglang, if the page has a series named so
    ranks: int | None = None  # data-parallel ones that the page has series of
    placeable: int | None = None  # as how many backends these can be placed

    @property
    def requests(self) -> int | None:
        """Requests in the engine, whoever sent them."""
        return None if self.running is None else self.running + (self.waiting or 0)

    @property
    def known(self) -> bool:
        """Whether the page was an engine's at all."""
        return self != EngineMetrics()


class Series(NamedTuple):
    name: bytes
    labels: Mapping[str, str]
    value: float


def read_metrics(page: bytes, rank: int | None = None) -> EngineMetrics:
    """Read a page; with `rank` without the series of other ranks. Never raises."""
    sums: dict[str, float] = {}
    capacity = 0.0
    caches: bool | None = None
    hybrid, engine, mode, retention = False, "", "", ""
    found_series = list(series_of(page, rank))
    for series in found_series:
        engine = engine or ENGINES.get(series.name.partition(b":")[0], "")
        if series.name in CONFIGS:
            block, tokens, on = config_of(series)
            hybrid |= bool(number_of(series.labels.get("mamba_block_size")))
            if hybrid:
                mode = series.labels.get("mamba_cache_mode", mode)[:MODE_CHARACTERS_MAX]
                retention = series.labels.get("prefix_cache_retention_interval", retention)[:MODE_CHARACTERS_MAX]
            capacity += tokens
            if block:
                sums["block"] = block
            caches = on or bool(caches)
            continue
        field = FIELDS.get(series.name) or triton_field(series)
        if field is None or not counts(series):
            continue
        if field in ("usage", "block"):
            sums[field] = max(sums.get(field, 0.0), series.value)
        else:
            sums[field] = sums.get(field, 0.0) + series.value
    found = {other: sums.get(other, 0.0) for other in OTHERS}
    ranks = ranks_of((series.name, series.labels) for series in found_series)
    blocks_capacity = sums.get("blocks", 0.0) * sums.get("block", 0.0)
    return EngineMetrics(
        running=whole(sums.get("running")),
        waiting=whole(sums.get("waiting")),
        usage=usage_of(sums.get("usage")),
        queried_tokens=whole(sums.get("queried")),
        hit_tokens=whole(sums.get("hit")),
        generated_tokens=whole(sums.get("generated")),
        capacity_tokens=bounded(capacity or sums.get("capacity", 0.0) or blocks_capacity, TOKENS_MAX),
        block_tokens=bounded(sums.get("block", 0.0), BLOCK_TOKENS_MAX),
        caches=caches,
        hybrid=hybrid or bool(found["states"] or found["windows"])
        if caches is not None or OTHERS & sums.keys()
        else None,
        states=hybrid or bool(found["states"]) if caches is not None or "states" in sums else None,
        state_mode=mode,
        retention=retention,
        engine=engine,
        ranks=len(ranks) or None,
        placeable=placeable(ranks) if ranks else None,
    )


def signs_of(metrics: EngineMetrics) -> Signs:
    """Return what a page shows of the engine's cache profile."""
    return Signs(
        engine=metrics.engine,
        has_states=metrics.states,
        state_mode=metrics.state_mode,
        retention=metrics.retention,
        block_tokens=metrics.block_tokens or 0,
    )


def series_of(page: bytes, rank: int | None) -> Iterator[Series]:
    """Yield the series with our names and a valid number."""
    if page.count(b"\n") > LINES_MAX:
        return
    label_bytes, page = 0, b"\n" + page
    for number, found in enumerate(OURS.finditer(page)):
        if number >= SERIES_MAX:
            return
        rest = rest_of_line(page, found.end())
        if rest is None or (rank is not None and rank_in(rest[0]) not in (None, rank)):
            continue
        label_bytes += len(rest[0])
        if label_bytes > LABEL_BYTES_MAX:
            return
        if rest[1] is not None and 0 <= rest[1] <= VALUE_MAX:
            yield Series(found[1], dict(LABEL.findall(rest[0].decode("utf-8", "replace"))), rest[1])


def rest_of_line(page: bytes, start: int) -> tuple[bytes, float | None] | None:
    """Return labels and value of the series whose name ends here, no value if it is not finite; None: no series."""
    end = page.find(b"\n", start)
    end = len(page) if end < 0 else end
    if end - start > LINE_BYTES_MAX:
        return None
    labels, brace, tail = page[start:end].rpartition(b"}")
    parts = tail.split(None, 2)
    if labels[:1] != (b"{" if brace else b"") or tail[:1] not in (b" ", b"\t") or not 1 <= len(parts) <= 2:
        return None
    if len(parts[0]) > VALUE_BYTES_MAX or (len(parts) == 2 and TIME.fullmatch(parts[1]) is None):
        return None
    try:
        value = float(parts[0])
    except ValueError:
        return None
    return labels[1:], value if isfinite(value) else None


def read_start_time(page: bytes) -> float | None:
    """Return the value of process_start_time_seconds in a Prometheus page, with or without labels and time stamp."""
    at = -1
    for _ in range(START_TIMES_MAX):
        at = page.find(START_TIME, at + 1)
        if at < 0:
            break
        start = at + len(START_TIME)
        rest = rest_of_line(page, start) if page[max(at - 1, 0) : at] in (b"", b"\n") else None
        if rest is not None and page.find(b"\n", start) >= 0:  # else the page was cut within the line
            return rest[1] if rest[1] is not None and rest[1] > 0 else None
    return None


def counts(series: Series) -> bool:
    """Whether this number counts, and does not repeat another series: SGLang has one for each rank of tensor and
    pipeline parallelism, and by priority beside the total."""
    labels = series.labels
    if any(labels.get(rank, "0") not in ("0", "") for rank in FIRST_RANK):
        return False
    return not labels.get("priority")


def triton_field(series: Series) -> str | None:
    kind = series.labels.get("request_type") or series.labels.get("kv_cache_block_type") or ""
    return TRITON.get((series.name, kind))


def config_of(series: Series) -> tuple[float, float, bool]:
    """Return block size, capacity in tokens (0: unknown) and whether prefixes are kept, from a cache_config_info."""
    labels = series.labels
    if not counts(series):
        return 0.0, 0.0, True
    block = number_of(labels.get("block_size") or labels.get("page_size"))
    blocks = number_of(labels.get("num_gpu_blocks") or labels.get("num_pages"))
    tokens = number_of(labels.get("kv_cache_size_tokens")) or block * blocks
    return block, tokens, labels.get("enable_prefix_caching", "").lower() not in OFF


def number_of(text: str | None) -> float:
    """Return a label's whole number; 0 if it is none («None» while vLLM has not measured its memory)."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 15 else 0.0


def whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def usage_of(value: float | None) -> float | None:
    return None if value is None or value > 1.0001 else min(value, 1.0)


def bounded(value: float, most: int) -> int | None:
    return int(value) if 1 <= value <= most else None
