"""The marks of an engine's process, by its metrics page."""

from __future__ import annotations

import pytest

from ranvier_py.core.engine_cache.sources.engine_metrics import LINES_MAX
from ranvier_py.core.engine_cache.sources.engine_pages import SERIES_MAX
from ranvier_py.core.engine_cache.sources.engine_polls import Page, read_process
from ranvier_py.core.routing.processes.engine_marks import EngineMarks, agree, disagree

VLLM = """process_start_time_seconds 1.75379532e+09
vllm:prefix_cache_queries_total{{engine="0"}} {tokens}.0
vllm:prefix_cache_queries_created{{engine="0"}} {created}
vllm:generation_tokens_total{{engine="0"}} 12.0
vllm:generation_tokens_created{{engine="0"}} 1.7537953269999999e+09
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="573"}} 1.0
vllm:e2e_request_latency_seconds_sum{{engine="0"}} {seconds}
vllm:num_requests_running{{engine="0"}} 3.0
"""
SGLANG = """sglang:prompt_tokens_total{{model_name="m",tp_rank="0"}} {tokens}.0
sglang:generation_tokens_total{{model_name="m"}} 12.0
sglang:e2e_request_latency_seconds_sum{{model_name="m"}} {seconds}
sglang:num_running_reqs{{model_name="m"}} 3.0
"""


def marks(
    form: str, rank: int | None = None, tokens: int = 9, seconds: float = 0.25, created: str = "1.75e9"
) -> EngineMarks:
    page = form.format(tokens=tokens, seconds=seconds, created=created).encode()
    found = read_process(Page(200, page), rank).marks
    assert found is not None
    return found


@pytest.mark.parametrize("form", [VLLM, SGLANG])
def test_two_pages_of_an_engine_at_rest_agree(form: str) -> None:
    busy = form.replace("3.0", "7.0")  # gauges
    assert agree(marks(form), marks(busy))
    assert not agree(marks(form), EngineMarks())


def test_engines_of_one_machine_and_one_second_differ_by_when_their_series_began() -> None:
    assert disagree(marks(VLLM), marks(VLLM, created="1.7537953269358884e+09"))
    assert agree(marks(VLLM), marks(VLLM, tokens=10, seconds=1.5))
    assert marks(VLLM).is_exact


def test_ranks_of_one_process_are_engines_of_their_own() -> None:
    assert disagree(marks(VLLM, 0), marks(VLLM, 1))
    assert disagree(marks(VLLM, 0), marks(VLLM))


def test_engines_without_times_differ_by_what_they_have_done() -> None:
    assert marks(SGLANG).identity == 0
    assert disagree(marks(SGLANG), marks(SGLANG, tokens=10))
    assert disagree(marks(SGLANG), marks(SGLANG, seconds=0.26))


def test_what_all_engines_of_a_kind_count_after_their_start_shows_nothing() -> None:
    fresh = SGLANG.replace("sglang:e2e", "other:e2e")
    assert marks(fresh) == marks(SGLANG, tokens=0, seconds=0).__class__() == EngineMarks()
    assert marks(fresh, tokens=300).totals
    assert marks("x{tokens}{seconds}{created} 1\n") == EngineMarks()


def test_a_page_that_is_missing_or_cut_shows_nothing() -> None:
    assert read_process(Page(404, b""), None) == (None, read_process(Page(0, b""), None).figures, None)
    page = VLLM.format(tokens=9, seconds=1, created=1).encode()
    assert read_process(Page(200, page, is_cut=True), None).marks == EngineMarks()


def test_what_is_no_number_counts_for_nothing() -> None:
    odd = b"".join(b"vllm:prompt_tokens_created %b\n" % value for value in (b"NaN", b"-1", b"x", b"1e999", b"0", b""))
    assert read_process(Page(200, odd), None).marks == EngineMarks()
    assert read_process(Page(200, odd + b"vllm:prompt_tokens_created 1.5\n"), None).marks != EngineMarks()


def test_of_a_page_without_end_the_beginning_counts_or_nothing() -> None:
    many = b"".join(b"vllm:prompt_tokens_created 2.%07d\n" % number for number in range(SERIES_MAX))
    late = many + b"vllm:prompt_tokens_created 1.0\n"
    assert read_process(Page(200, late), None).marks == read_process(Page(200, many), None).marks
    assert read_process(Page(200, many + b"\n" * LINES_MAX), None).marks == EngineMarks()
