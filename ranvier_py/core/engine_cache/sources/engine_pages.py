"""Reads the marks of an engine's process from its metrics page. Bytes in, one value out.

vLLM's page shows when its process and, to the microsecond, when its counters began, unless several of its processes
serve HTTP; SGLang's shows neither, but totals of tokens and seconds, as all do. Nothing raises. Bound: SERIES_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ranvier_py.core.engine_cache.sources.engine_metrics import LINES_MAX, EngineMetrics, read_start_time, rest_of_line
from ranvier_py.core.routing.processes.engine_marks import EngineMarks, digest_of
from ranvier_py.core.routing.processes.ranks import rank_in

CREATED = re.compile(
    rb"\nvllm:(?:prompt_tokens|generation_tokens|prefix_cache_queries|request_success)_created(?=[{ \t])"
)
"""When counters of an engine began."""

SECONDS = re.compile(rb"\n(?:vllm|sglang):(?:time_to_first_token|e2e_request_latency)_seconds_sum(?=[{ \t])")
"""Sums of seconds that no two engines have alike once they have served a request."""

SERIES_MAX = 512  # of each kind that are read of one page: some ten for each rank
TOTALS_MIN = 2  # numbers above 0 that must agree
TOKENS_MIN = 256  # of totals without seconds: engines of a kind count the same tokens of their warm-up


def read_marks(page: bytes, metrics: EngineMetrics, rank: int | None) -> EngineMarks:
    """Return the marks of an engine, or of one rank, by its page, of which `metrics` are the figures."""
    if page.count(b"\n") > LINES_MAX:
        return EngineMarks()
    page = b"\n" + page  # each line begins with one, as the patterns have it
    started_at, created = read_start_time(page), min(numbers(CREATED, page, rank), default=None)
    cache = (metrics.capacity_tokens, metrics.block_tokens, rank)
    identity = digest_of(started_at, created, *cache) if started_at or created else 0
    sums = tuple(sorted(numbers(SECONDS, page, rank)))
    tokens = tuple([count or 0 for count in (metrics.queried_tokens, metrics.hit_tokens, metrics.generated_tokens)])
    is_enough = bool(sums) or sum(tokens) >= TOKENS_MIN
    totals = digest_of(sums, tokens) if is_enough and sum(map(bool, (*sums, *tokens))) >= TOTALS_MIN else 0
    return EngineMarks(identity, totals, is_exact=created is not None)


def numbers(names: re.Pattern[bytes], page: bytes, rank: int | None) -> Iterator[float]:
    """Yield the positive numbers of the series with these names; with `rank` without those of other ranks."""
    for count, found in enumerate(names.finditer(page)):
        if count >= SERIES_MAX:
            return
        rest = rest_of_line(page, found.end())
        if rest is None or not rest[1] or rest[1] < 0 or (rank is not None and rank_in(rest[0]) not in (None, rank)):
            continue
        yield rest[1]
