"""The engine's /metrics page, with vLLM 0.32's names (`gpu_cache_usage_perc` is `kv_cache_usage_perc` now). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ranvier_py.core.metrics import Histogram
from ranvier_py.replay.engine.engine_values import CacheName, EngineStatistics

MAMBA_MODES: Mapping[CacheName, tuple[str, str]] = MappingProxyType(
    {"vllm_align": ("align", "0"), "vllm_all": ("all", "None")}
)
"""vLLM's `mamba_cache_mode` and retention interval. vLLM makes labels of these, as of all options of its cache."""

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def metrics_page(  # noqa: PLR0913  # one for each thing on the page
    statistics: EngineStatistics,
    *,
    model: str,
    block_size: int,
    started_at: float,
    first_token_s: Histogram,
    duration_s: Histogram,
    cache: CacheName = "attention",
    prefix_caching: bool = True,
) -> bytes:
    """Return Prometheus text. `started_at` is in Unix seconds; by its change routers notice a restart."""
    labels = f'engine="0",model_name="{escape(model)}"'
    usage = statistics.used_blocks / statistics.capacity_blocks
    numbers = (
        ("vllm:num_requests_running", "gauge", statistics.running),
        ("vllm:num_requests_waiting", "gauge", statistics.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", usage),
        ("vllm:prefix_cache_queries_total", "counter", statistics.prompt_tokens),
        ("vllm:prefix_cache_hits_total", "counter", statistics.cached_tokens),
        ("vllm:prompt_tokens_total", "counter", statistics.prompt_tokens),
        ("vllm:prompt_tokens_cached_total", "counter", statistics.cached_tokens),
        ("vllm:generation_tokens_total", "counter", statistics.generated_tokens),
        ("vllm:num_preemptions_total", "counter", 0),
        ("vllm:request_success_total", "counter", statistics.finished),
    )
    lines: list[str] = []
    for name, kind, value in numbers:
        lines += [f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{{{labels}}} {value}"]
    lines += ["# TYPE vllm:request_success_created gauge", f"vllm:request_success_created{{{labels}}} {started_at!r}"]
    lines += histogram_lines("vllm:time_to_first_token_seconds", labels, first_token_s)
    lines += histogram_lines("vllm:e2e_request_latency_seconds", labels, duration_s)
    config = f'block_size="{block_size}",num_gpu_blocks="{statistics.capacity_blocks}"'
    config += f',enable_prefix_caching="{prefix_caching}"'
    if cache in MAMBA_MODES:
        mode, retention = MAMBA_MODES[cache]
        config += f',mamba_block_size="{block_size}",mamba_cache_mode="{mode}"'
        config += f',prefix_cache_retention_interval="{retention}"'
    lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{engine="0",{config}}} 1']
    lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_at:.3f}"]
    return ("\n".join(lines) + "\n").encode()


def merged(pages: Iterable[bytes]) -> bytes:
    """Join the pages of ranks into one, family by family, each rank under its number."""
    families: dict[str, list[str]] = {}
    for rank, page in enumerate(pages):
        for line in page.decode().replace('engine="0"', f'engine="{rank}"').splitlines():
            if line.startswith("#"):
                family = families.setdefault(line, [])
            else:
                family.append(line)
    return ("\n".join(line for head, lines in families.items() for line in (head, *lines)) + "\n").encode()


def histogram_lines(name: str, labels: str, histogram: Histogram) -> list[str]:
    lines = [f"# TYPE {name} histogram"]
    for bound, count in histogram.cumulative():
        edge = "+Inf" if bound == float("inf") else repr(float(bound))
        lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {count}')
    return [*lines, f"{name}_sum{{{labels}}} {histogram.sum}", f"{name}_count{{{labels}}} {histogram.count}"]


def escape(value: str) -> str:
    """Escape a label's value (Prometheus text format 0.0.4)."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
