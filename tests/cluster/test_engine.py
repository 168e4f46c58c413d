"""The fake engine over real sockets: vLLM's shapes, engine truth, faults, and clients that go away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from cluster.__main__ import main
from cluster.engine.engine_process import main as engine_command
from cluster.engine.engine_process import make_engine, serve
from cluster.engine.engine_ranks import Ranks
from cluster.engine.engine_routes import Engine, EngineConfig
from cluster.engine.engine_text import ByteTokenizer, TextTokenizer, load_tokenizer
from ranvier_py.replay.engine.engine_values import EngineLimits
from tests.proxy.wire import NO_TLS
from tests.waiting import until

ROOT = Path(__file__).parents[2]
FAST = EngineLimits(cache_tokens=4000, prefill_tokens_per_s=1e6, decode_s=0.0)
SLOW = EngineLimits(cache_tokens=4000, prefill_tokens_per_s=1e6, decode_s=0.02, running_max=2)
DEADLINE_S = 30


class Lab:
    """One engine and a client of it."""

    def __init__(self, engine: Engine, address: tuple[str, int], client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.address = address
        self.client = client

    async def chat(self, text: str = "hello there", **fields: Any) -> httpx.Response:
        body = {"model": "lab", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.client.post(path, json=fields)

    async def statistics(self) -> dict[str, Any]:
        return (await self.client.get("/admin/stats")).json()


@asynccontextmanager
async def served(engine: Engine | Ranks) -> AsyncIterator[tuple[tuple[str, int], httpx.AsyncClient]]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(serve, engine, "127.0.0.1", 0)
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=DEADLINE_S, verify=NO_TLS) as client:
                yield (host, port), client
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def lab(limits: EngineLimits = FAST, tokenizer: TextTokenizer | None = None, **fields: Any) -> AsyncIterator[Lab]:
    config = EngineConfig(name="e1", models=("lab", "adapter"), limits=limits, tokens_max=2000, **fields)
    engine = Engine(config, tokenizer or ByteTokenizer())
    async with served(engine) as (address, client):
        yield Lab(engine, address, client)


def stream_objects(text: str) -> list[Any]:
    """Data of a complete event stream, without its end mark."""
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


# ---- answers


async def test_a_chat_is_answered_in_vllms_shape_and_states_who_served() -> None:
    async with lab() as it:
        answer = await it.chat()
        body = answer.json()
    assert answer.status_code == 200
    assert answer.headers["x-engine"] == body["system_fingerprint"] == "e1"
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_has_role_text_finish_usage_and_end_and_states_the_same_as_the_whole_answer() -> None:
    async with lab() as it:
        whole = (await it.chat()).json()
        answer = await it.chat(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = stream_objects(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 6 + ["length"]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_a_stream_without_the_option_has_no_usage_chunk() -> None:
    async with lab() as it:
        chunks = stream_objects((await it.chat(stream=True)).text)
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user"}]}),
        ("/v1/messages", {"messages": ["x"]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ["x"]}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}], "tools": [5]}),
        ("/v1/responses", {"input": [5]}),
        ("/v1/responses", {"input": [{"type": "function_call"}]}),
        ("/v1/responses", {"input": "x", "previous_response_id": ["a"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "tool_calls": [5]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": 5}),
    ],
)
async def test_a_body_that_is_not_as_its_api_has_it_is_refused_and_does_not_make_the_engine_look_ill(
    path: str, fields: dict[str, Any]
) -> None:
    async with lab() as it:
        assert (await it.post(path, model="lab", **fields)).status_code == 400


async def test_completions_take_text_or_token_ids() -> None:
    async with lab() as it:
        by_text = (await it.post("/v1/completions", model="lab", prompt="one two three four ")).json()
        ids = ByteTokenizer().encode("one two three four ", special=True).tolist()
        by_ids = (await it.post("/v1/completions", model="lab", prompt=ids)).json()
        streamed = await it.post("/v1/completions", model="lab", prompt=[ids], stream=True)
    assert by_text["object"] == "text_completion"
    assert by_text["usage"]["completion_tokens"] == 16
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert by_ids["usage"]["prompt_tokens"] == len(ids)
    chunks = stream_objects(streamed.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == by_text["choices"][0]["text"]


async def test_the_length_of_an_answer_follows_limits_stop_strings_and_ignore_eos() -> None:
    async with lab(answer_tokens=(7, 7)) as it:
        natural = (await it.chat(max_tokens=None)).json()
        limited = (await it.chat(max_tokens=100, max_completion_tokens=3)).json()
        exact = (await it.chat(max_tokens=50, ignore_eos=True)).json()
        word = natural["choices"][0]["message"]["content"][9:14]
        stopped = (await it.chat(max_tokens=None, stop=[word])).json()
    assert (natural["usage"]["completion_tokens"], natural["choices"][0]["finish_reason"]) == (7, "stop")
    assert (limited["usage"]["completion_tokens"], limited["choices"][0]["finish_reason"]) == (3, "length")
    assert (exact["usage"]["completion_tokens"], exact["choices"][0]["finish_reason"]) == (50, "length")
    assert stopped["choices"][0]["message"]["content"] == natural["choices"][0]["message"]["content"][:9]
    assert stopped["choices"][0]["finish_reason"] == "stop"


async def test_tokens_come_one_decode_step_apart() -> None:
    """From before the request on: a busy machine reads the first token late, and never the last one early."""
    async with lab(SLOW) as it:
        began = trio.current_time()
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
        async with it.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            arrivals = [
                trio.current_time()
                async for line in answer.aiter_lines()
                if '"finish_reason":null' in line and '"role"' not in line
            ]
    assert len(arrivals) == 4
    assert arrivals[-1] - began >= 3 * SLOW.decode_s


# ---- the cache as the API tells it


async def test_the_next_turn_finds_prompt_and_answer_of_the_one_before() -> None:
    async with lab() as it:
        first = (await it.chat("word " * 64, max_tokens=64)).json()
        sent = first["choices"][0]["message"]
        messages = [{"role": "user", "content": "word " * 64}, {"role": "assistant", "content": sent["content"]}]
        messages.append({"role": "user", "content": "go on"})
        second = (await it.post("/v1/chat/completions", messages=messages, max_tokens=1)).json()
    known = first["usage"]["prompt_tokens"] + 64 - 1  # the last token was never fed back
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16


@pytest.mark.parametrize("fields", [{"cache_salt": "tenant"}, {"model": "adapter"}])
async def test_salts_and_adapters_share_no_cache(fields: dict[str, str]) -> None:
    async with lab() as it:
        await it.chat("word " * 64)
        other = (await it.chat("word " * 64, **fields)).json()
        same = (await it.chat("word " * 64, **fields)).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_metrics_and_statistics_report_what_usage_reported() -> None:
    async with lab() as it:
        usages = [(await it.chat("word " * 64)).json()["usage"] for _ in range(2)]
        page = (await it.client.get("/metrics")).text
        statistics = await it.statistics()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="lab"}'
    asked = sum(usage["prompt_tokens"] for usage in usages)
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert float(values[f"vllm:prefix_cache_queries_total{labels}"]) == asked == statistics["prompt_tokens"]
    assert float(values[f"vllm:prefix_cache_hits_total{labels}"]) == cached == statistics["cached_tokens"]
    assert float(values[f"vllm:generation_tokens_total{labels}"]) == 10
    assert float(values[f"vllm:num_requests_running{labels}"]) == 0
    assert float(values[f"vllm:num_requests_waiting{labels}"]) == 0
    assert float(values[f"vllm:kv_cache_usage_perc{labels}"]) == 0
    assert float(values[f"vllm:time_to_first_token_seconds_count{labels}"]) == 2
    assert float(values["process_start_time_seconds"]) == pytest.approx(statistics["started_at"], abs=0.002)


async def test_a_restart_clears_the_cache_cuts_streams_and_shows_a_new_start_time() -> None:
    async with lab(SLOW) as it, trio.open_nursery() as nursery:
        before = (await it.chat("word " * 64, max_tokens=1), await it.statistics())[1]

        async def cut_off() -> None:
            with pytest.raises(httpx.TransportError):
                await it.chat(max_tokens=1000, ignore_eos=True, stream=True)

        nursery.start_soon(cut_off)
        await until(lambda: it.engine.live.statistics().running == 1)
        after = (await it.post("/admin/restart")).json()
        again = (await it.chat("word " * 64, max_tokens=1)).json()
    assert after["started_at"] > before["started_at"]
    assert (before["generation"], after["generation"]) == (1, 2)
    assert after["prompt_tokens"] == 0
    assert before["prompt_tokens"] > 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_clear_forgets_prefixes_and_nothing_else() -> None:
    async with lab() as it:
        await it.chat("word " * 64)
        statistics = (await it.post("/admin/clear")).json()
        again = (await it.chat("word " * 64)).json()
    assert (statistics["generation"], statistics["found_blocks"], statistics["finished"]) == (1, 0, 1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# ---- everything else vLLM serves


async def test_models_list_the_base_and_its_adapters() -> None:
    async with lab() as it:
        body = (await it.client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in body["data"]] == [
        ("lab", None, 2000),
        ("adapter", "lab", 2000),
    ]
    assert {card["owned_by"] for card in body["data"]} == {"vllm"}


async def test_probes_answer_and_unknown_paths_and_methods_are_refused() -> None:
    async with lab() as it:
        for path in ("/health", "/ping", "/version"):
            assert (await it.client.get(path)).status_code == 200
        assert (await it.client.get("/nowhere")).status_code == 404
        assert (await it.client.get("/v1/chat/completions")).status_code == 405


async def test_tokenize_and_detokenize_agree_with_usage() -> None:
    async with lab() as it:
        messages = [{"role": "user", "content": "hello there"}]
        chat = (await it.post("/tokenize", model="lab", messages=messages)).json()
        text = (await it.post("/tokenize", prompt="some words")).json()
        back = (await it.post("/detokenize", tokens=text["tokens"])).json()
        used = (await it.chat("hello there")).json()["usage"]["prompt_tokens"]
    assert chat["count"] == len(chat["tokens"]) == used
    assert back == {"prompt": "some words"}
    assert chat["max_model_len"] == 2000


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "nobody's"}, 404, "NotFoundError"),
        ({"messages": []}, 400, "BadRequestError"),
        ({"messages": "hello"}, 400, "BadRequestError"),
        ({"messages": [{"content": "no role"}]}, 400, "BadRequestError"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "BadRequestError"),
        ({"max_tokens": 0}, 400, "BadRequestError"),
        ({"max_tokens": 1999}, 400, "BadRequestError"),
        ({"n": 2}, 400, "BadRequestError"),
        ({"stop": 5}, 400, "BadRequestError"),
        ({"chat_template_kwargs": {"tokenize": True}}, 400, "BadRequestError"),
    ],
)
async def test_bad_requests_get_vllms_errors(fields: dict[str, Any], status: int, kind: str) -> None:
    async with lab() as it:
        answer = await it.chat(**fields)
        statistics = await it.statistics()
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.json()["error"]["code"] == status
    assert statistics["started"] == 0


async def test_a_body_that_is_no_json_object_is_refused() -> None:
    async with lab() as it:
        for body in (b"{", b"[]", b"\xff"):
            answer = await it.client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400
        empty = await it.post("/v1/completions", prompt=[])
    assert empty.json()["error"]["param"] == "prompt"


async def test_a_full_queue_is_a_503() -> None:
    limits = EngineLimits(cache_tokens=4000, decode_s=0.02, running_max=1, waiting_max=1)
    async with lab(limits) as it, trio.open_nursery() as nursery:
        for text in ("a", "b"):
            nursery.start_soon(it.chat, text)
        await until(lambda: it.engine.live.statistics().waiting == 1)
        assert (await it.chat("c")).status_code == 503


# ---- clients that go away


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_blocks_and_its_place(stream: bool) -> None:
    async with lab(SLOW) as it:
        text = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000, "stream": stream})
        request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n{text}"
        connection = await trio.open_tcp_stream(*it.address)
        await connection.send_all(request.encode())
        await until(lambda: it.engine.live.statistics().running == 1)
        await connection.aclose()
        await until(lambda: it.engine.live.statistics().running == 0)
        statistics = await it.statistics()
    assert statistics["cancelled"] == 1
    assert statistics["used_blocks"] == 0


# ---- faults


async def test_a_status_fault_hits_as_often_as_it_was_reported_and_leaves_probes_alone() -> None:
    async with lab() as it:
        await it.post("/admin/faults", kind="status", status=503, count=2)
        assert (await it.client.get("/health")).status_code == 200
        assert [(await it.chat()).status_code for _ in range(3)] == [503, 503, 200]
        await it.post("/admin/faults", kind="status", health=True)
        assert (await it.client.get("/health")).status_code == 500
        await it.post("/admin/faults", kind="none")
        assert (await it.client.get("/health")).status_code == 200
        assert (await it.statistics())["faults"]["status"] == 3


async def test_a_reset_in_mid_stream_comes_after_some_tokens_and_without_an_end() -> None:
    async with lab() as it:
        await it.post("/admin/faults", kind="reset_mid_stream", after_tokens=2, count=1)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}
        received = []
        with pytest.raises(httpx.TransportError):  # noqa: PT012 - what came before the cut counts
            async with it.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    received.append(line)  # noqa: PERF401 - the loop ends in an exception
        statistics = await it.statistics()
    assert statistics["cut"] == 1
    assert statistics["used_blocks"] == 0
    assert not any("[DONE]" in line for line in received)


async def test_a_stall_sends_nothing_more_for_a_while() -> None:
    async with lab() as it:
        await it.post("/admin/faults", kind="stall", after_tokens=1, seconds=0.05, count=1)
        began = trio.current_time()
        chunks = stream_objects((await it.chat(stream=True)).text)
        assert trio.current_time() - began >= 0.05
        assert len(chunks) == 7
        await it.post("/admin/faults", kind="stall", seconds=0.05, count=1)
        assert (await it.chat()).status_code == 200


async def test_latency_holds_a_request_back_and_refuse_gives_no_answer() -> None:
    async with lab() as it:
        await it.post("/admin/faults", kind="latency", seconds=0.05, count=1)
        began = trio.current_time()
        assert (await it.chat()).status_code == 200
        assert trio.current_time() - began >= 0.05
        await it.post("/admin/faults", kind="refuse")
        with pytest.raises(httpx.TransportError):
            await it.client.get("/health")
        with pytest.raises(httpx.TransportError):
            await it.chat()
        assert (await it.post("/admin/faults", kind="none")).status_code == 200
        assert (await it.chat()).status_code == 200


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 503, 529])
async def test_an_engine_can_refuse_in_the_words_of_real_ones(status: int) -> None:
    async with lab() as it:
        await it.post("/admin/faults", kind="status", status=status, retry_after_s=7)
        answer = await it.chat(stream=True)
        healthy = await it.client.get("/health")
    assert (answer.status_code, answer.headers["retry-after"], healthy.status_code) == (status, "7", 200)
    assert answer.json()["error"]["type"] != "InternalServerError"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("counts", [True, False])
async def test_an_engine_can_cache_nothing_and_count_that_or_not(path: str, counts: bool) -> None:
    asked = [{"role": "user", "content": "x" * 400}]
    body = {"model": "lab", "max_tokens": 5, "messages": asked, "input": asked}
    async with lab() as it:
        await it.post("/admin/faults", kind="uncached", counts=counts, stated=True)
        answers = [(await it.client.post(path, json=body)).json()["usage"] for _ in range(2)]
        page = (await it.client.get("/metrics")).text
        statistics = await it.statistics()
        await it.post("/admin/faults", kind="none")
        restored = (await it.client.get("/metrics")).text
    names = ("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens")
    counted = [usage[name] for usage in answers for name in names if name in usage]
    assert counted in ([], [0, 0], [{"cached_tokens": 0}] * 2)
    assert bool(counted) is counts
    assert statistics["cached_tokens"] == 0
    assert 'enable_prefix_caching="False"' in page
    assert 'enable_prefix_caching="True"' in restored


async def test_health_can_be_slow_while_chats_are_answered_at_once() -> None:
    async with lab() as it:
        await it.post("/admin/faults", kind="latency", seconds=8, health="only")
        assert (await it.chat()).status_code == 200
        with pytest.raises(httpx.TimeoutException):
            await it.client.get("/health", timeout=0.05)


async def test_a_hung_engine_sends_no_byte_of_anything_and_then_goes_on() -> None:
    async with lab(SLOW) as it:
        answers: list[httpx.Response] = []
        body = {"model": "lab", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}
        async with trio.open_nursery() as nursery, it.client.stream("POST", "/v1/chat/completions", json=body) as one:
            lines = one.aiter_lines()
            await anext(lines)
            await it.post("/admin/faults", kind="hang")
            for path in ("/health", "/metrics", "/v1/models"):
                with pytest.raises(httpx.TimeoutException):
                    await it.client.get(path, timeout=0.03)

            async def ask() -> None:
                answers.append(await it.chat())

            nursery.start_soon(ask)
            generated = it.engine.live.statistics().generated_tokens
            with trio.move_on_after(0.1) as patience:
                async for _ in lines:
                    pass
            assert patience.cancelled_caught
            assert it.engine.live.statistics().generated_tokens == generated
            assert not answers
            await it.post("/admin/faults", kind="none")
        assert [answer.status_code for answer in answers] == [200]


async def test_a_poisonous_request_makes_every_engine_answer_500() -> None:
    async with lab() as it:
        assert (await it.chat("[poison]", stream=True)).status_code == 500
        assert (await it.chat()).status_code == 200


async def test_ranks_behind_one_port_have_caches_of_their_own_and_one_metrics_page() -> None:
    config = EngineConfig(name="e1", models=("lab",), limits=FAST, tokens_max=2000)
    ranks = Ranks(config, ByteTokenizer(), 3)
    async with served(ranks) as (address, client):
        it = Lab(ranks.engines[0], address, client)

        async def ask(rank: str) -> int:
            headers = {"x-data-parallel-rank": rank} if rank else {}
            body = {"model": "lab", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 5}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        assert [await ask(rank) for rank in ("1", "1", "2", "2")] == [False, True, False, True]
        assert [await ask("") for _ in range(3)].count(True) == 2, "the balancer does not know which rank has what"
        page = (await client.get("/metrics")).text
        assert (await it.statistics())["finished"] == 1
    assert [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")] == [
        f'vllm:request_success_total{{engine="{rank}",model_name="lab"}} {count}'
        for rank, count in enumerate((1, 3, 3))
    ]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_and_each_of_its_ranks_records_what_it_had_to_do_since_when(ranks: int) -> None:
    config = EngineConfig(name="e1", models=("lab",), limits=FAST, tokens_max=2000)
    engine = make_engine(config, ByteTokenizer(), ranks)
    async with served(engine) as (_, client):
        body = {"model": "lab", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        records = (await client.get("/admin/occupancy")).json()
    loads = [[load for _, *load in record["changes"]] for record in records]
    assert sorted(loads, key=len) == [[[0, 0]]] * (ranks - 1) + [[[0, 0], [0, 1], [1, 0], [0, 0]]]
    assert all(record["changes"] == sorted(record["changes"]) and not record["dropped"] for record in records)


async def test_a_fault_that_makes_no_sense_is_refused() -> None:
    async with lab() as it:
        for wrong in (
            {"kind": "fire"},
            {"kind": "latency"},
            {"kind": "status", "status": 99},
            {"kind": "stall", "x": 1},
        ):
            assert (await it.post("/admin/faults", **wrong)).status_code == 400
        assert (await it.chat()).status_code == 200


# ---- a real tokenizer, a real process


async def test_with_a_models_tokenizer_the_whole_rendered_chat_is_tokenized_and_answers_are_reused() -> None:
    tokenizer = load_tokenizer(str(ROOT / "ranvier_py" / "data" / "tokenizer"))
    async with lab(tokenizer=tokenizer) as it:
        messages = [{"role": "system", "content": "You help. " * 40}, {"role": "user", "content": "hello"}]
        rendered = tokenizer.render(messages, None, {}, generation=True)
        first = (await it.post("/v1/chat/completions", messages=messages, max_tokens=40)).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
        second = (await it.post("/v1/chat/completions", messages=messages, max_tokens=1)).json()
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert prompt_tokens == len(tokenizer.encode(rendered, special=False))
    # the answer was cut in mid-word perhaps, so its last block may be tokenized otherwise
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= (prompt_tokens + 39) // 16 * 16 - 16


def test_the_process_states_where_it_listens_and_ends_well_on_a_signal() -> None:
    command = [sys.executable, "-m", "cluster", "engine", "--listen", "127.0.0.1:0", "--tokenizer", "bytes"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("engine ")
            url = line.split()[-1]
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "lab-model"
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_a_wrong_option_or_command_ends_with_code_2() -> None:
    for arguments in (
        ["engine", "--cache-tokens", "1", "--tokenizer", "bytes"],
        ["engine", "--answer-tokens", "9:1"],
        ["engine", "--listen", "nonsense", "--tokenizer", "bytes"],
        ["engine", "--decode-ms", "nan", "--tokenizer", "bytes"],
        ["x"],
    ):
        with pytest.raises(SystemExit, match="2"):
            sys.exit(main(arguments))


def test_an_address_in_use_is_stated_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        assert engine_command(["--listen", address, "--tokenizer", "bytes"]) == 1
    touched = capsys.readouterr().err
    assert touched.startswith(f"engine: can't listen on {address}: ")
    assert touched.count("\n") == 1
