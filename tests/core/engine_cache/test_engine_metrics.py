"""What pages of engines say, in the formats that they have; and pages that are none."""

from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.engine_metrics import metrics_page
from ranvier_py.core.engine_cache.sources.engine_metrics import LINES_MAX, EngineMetrics, read_metrics, signs_of
from ranvier_py.core.metrics import LATENCY_BUCKETS_S, Histogram
from ranvier_py.core.routing.checkpoints.cache_profile import Signs
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from tests.examples import examples

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="qwen"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="qwen",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="qwen"} 0.4125
vllm:prefix_cache_queries_total{engine="0",model_name="qwen"} 1.2345e+06
vllm:prefix_cache_queries_created{engine="0",model_name="qwen"} 1.7537953269358883e+09
vllm:prefix_cache_hits_total{engine="0",model_name="qwen"} 250000.0
vllm:generation_tokens_total{engine="0",model_name="qwen"} 12000.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
num_cpu_blocks="None",num_gpu_blocks="573",sliding_window="None"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="qwen"} 10.0
process_start_time_seconds 1.75e+09
"""

SGLANG = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="-922337203685",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="1"} 4.0
sglang:num_running_reqs_offline_batch{tp_rank="0"} 7.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.74
sglang:prompt_tokens_total{model_name="m",tp_rank="0"} 4882260.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 500000.0
sglang:generation_tokens_total{model_name="m"} 139795.0
"""

TRTLLM = b"""trtllm_num_requests_running{engine_type="trtllm",model_name="llama"} 5.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="llama"} 2.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="llama"} 0.62
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="llama"} 32.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="llama"} 1000.0
"""

TRITON = b"""nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 256
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"""


def test_a_page_of_llama_cpp() -> None:
    page = b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 4\nllamacpp:requests_deferred 2\n"
    assert read_metrics(page) == EngineMetrics(running=4, waiting=2)


def test_a_page_of_vllm() -> None:
    assert read_metrics(VLLM) == EngineMetrics(
        running=2,
        waiting=1,
        usage=0.4125,
        queried_tokens=1_234_500,
        hit_tokens=250_000,
        generated_tokens=12_000,
        capacity_tokens=573 * 16,
        block_tokens=16,
        caches=True,
        hybrid=False,
        states=False,
        engine="vllm",
        ranks=1,
        placeable=1,
    )


def test_ranks_of_vllm_add_up_and_the_fullest_is_the_usage() -> None:
    two = VLLM + VLLM.replace(b'engine="0"', b'engine="1"').replace(b"0.4125", b"0.9")
    found = read_metrics(two)
    assert (found.running, found.capacity_tokens, found.usage, found.block_tokens) == (4, 2 * 573 * 16, 0.9, 16)
    assert found.requests == 6


def test_a_page_of_sglang_reports_once_for_each_rank_and_by_priority() -> None:
    found = read_metrics(SGLANG)
    assert (found.running, found.waiting, found.usage) == (4, 3, 0.74)
    assert (found.queried_tokens, found.hit_tokens) == (4_882_260, 1_500_000)
    assert (found.capacity_tokens, found.block_tokens) == (None, None)


@pytest.mark.parametrize(
    "capacity",
    [
        b'sglang:cache_config_info{num_pages="4096",page_size="64"} 1.0\n',
        (
            b'sglang:max_total_num_tokens{tp_rank="0"} 262144\nsglang:max_total_num_tokens{tp_rank="1"} 262144\n'
            b'sglang:page_size{tp_rank="0"} 64\nsglang:page_size{tp_rank="1"} 64\n'
        ),
    ],
)
def test_sglangs_capacity_is_in_labels_or_in_gauges(capacity: bytes) -> None:
    found = read_metrics(SGLANG + capacity)
    assert (found.capacity_tokens, found.block_tokens) == (262_144, 64)


def test_a_hybrid_states_the_size_of_its_states() -> None:
    """vLLM in labels, which are None for attention alone; SGLang in gauges, which are 0 then."""
    label = b'mamba_block_size="%b",sliding_window='
    pages = [VLLM.replace(b"sliding_window=", label % each) for each in (b"None", b"1056", b"16")]
    assert [read_metrics(page).hybrid for page in pages] == [False, True, True]
    gauges = b"sglang:swa_used_tokens 0.0\nsglang:mamba_used_tokens 0.0\nsglang:mamba_available_tokens %d.0\n"
    assert [read_metrics(SGLANG + gauges % each).hybrid for each in (0, 8)] == [False, True]
    assert read_metrics(SGLANG).hybrid is read_metrics(TRTLLM).hybrid is None


def test_a_page_shows_the_signs_of_a_cache_profile() -> None:
    labels = b'mamba_block_size="1056",mamba_cache_mode="align",prefix_cache_retention_interval="0",'
    vllm = VLLM.replace(b"sliding_window=", labels + b"sliding_window=")
    block_tokens = read_metrics(VLLM).block_tokens or 0
    assert signs_of(read_metrics(vllm)) == Signs(
        engine="vllm", has_states=True, state_mode="align", retention="0", block_tokens=block_tokens
    )
    assert signs_of(read_metrics(VLLM)).has_states is False
    windows, states = (b"sglang:%b_available_tokens 8.0\n" % kind for kind in (b"swa", b"mamba"))
    assert [read_metrics(SGLANG + each).states for each in (b"", windows, states)] == [None, None, True]
    assert signs_of(read_metrics(SGLANG + states)).engine == "sglang"


def test_pages_of_tensorrt_llm_and_of_triton() -> None:
    own, triton = read_metrics(TRTLLM), read_metrics(TRITON)
    assert (own.running, own.waiting, own.usage, own.capacity_tokens) == (5, 2, 0.62, 32_000)
    assert (triton.running, triton.waiting, triton.capacity_tokens, triton.block_tokens) == (3, 1, 6239 * 64, 64)


def test_an_engine_without_prefix_caching_states_so() -> None:
    for off in (b"False", b"false", b"0"):
        assert read_metrics(VLLM.replace(b'caching="True"', b'caching="%b"' % off)).caches is False


def test_the_labs_engine_is_read_like_vllm() -> None:
    model = EngineModel(EngineLimits(cache_tokens=32_000))
    page = metrics_page(
        model.statistics(),
        model='a"}b',
        block_size=16,
        started_at=1.0,
        first_token_s=Histogram(LATENCY_BUCKETS_S),
        duration_s=Histogram(LATENCY_BUCKETS_S),
    )
    found = read_metrics(page)
    assert (found.running, found.capacity_tokens, found.block_tokens, found.caches) == (0, 32_000, 16, True)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1", b"1e300", b"abc", b"", b"0x10", b"1 2 3", b"9" * 60])
def test_a_value_that_makes_no_sense_is_not_there(value: bytes) -> None:
    assert read_metrics(b"vllm:num_requests_running " + value + b"\n") == EngineMetrics()


@pytest.mark.parametrize("blocks", [b"None", b"-5", b"1e9", b"9" * 30, b"", b"\xef\xbc\x95"])
def test_a_capacity_that_is_no_number_is_not_there(blocks: bytes) -> None:
    found = read_metrics(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="' + blocks + b'"} 1\n')
    assert (found.capacity_tokens, found.block_tokens) == (None, 16)


@settings(max_examples=examples(200))
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 2000))
def test_nothing_that_an_engine_sends_raises(noise: bytes, start: int, end: int) -> None:
    for page in (VLLM, SGLANG, TRITON):
        found = read_metrics(page[:start] + noise + page[end:])
        assert found.usage is None or 0 <= found.usage <= 1
        assert found.running is None or found.running >= 0


def test_an_endless_page_is_not_looked_through() -> None:
    assert read_metrics(b"\n" * LINES_MAX + VLLM) == EngineMetrics()
    assert read_metrics(b'vllm:num_requests_running{a="' + b"b" * 10_000 + b'"} 1\n') == EngineMetrics()


@pytest.mark.parametrize(
    "labels", [b"a" * 4000, b'a="' + b"b" * 3990, b'a="' + b'\\"' * 1990, b"a=" * 2000, b'"' * 4000]
)
def test_labels_that_are_none_are_looked_through_once(labels: bytes) -> None:
    """From each of their characters on, they would hold up all requests of the node for seconds."""
    page, began = (b"vllm:num_requests_running{" + labels + b"} 1\n") * 32, process_time()
    assert read_metrics(page).running == 32
    assert process_time() - began < 0.5
