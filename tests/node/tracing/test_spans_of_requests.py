"""The spans of each kind of request, as a collector gets them and the protocol's own decoder reads them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from cluster.collector import Collector, Reply, plain, serve
from ranvier_py.node.tracing import trace_parts
from tests.late_import import Late
from tests.node.access.key_lab import RED, asked, bearer, key_lines, keys_file
from tests.node.node_lab import MODEL, Lab, Node, Serving, chat, opened
from tests.node.test_lines_of_nodes import WHOLE
from tests.proxy.test_realtime import request as handshake
from tests.proxy.wire import CLOSE, END, GOOD, HANG, ROLE, STREAM_HEAD, TOKEN, Scripted, answer

SERVER, PLACE, CLIENT = 2, 1, 3
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{PARENT}-0{flag}" for flag in (1, 0))
DEADLINE_S = 60

json_format = Late("google.protobuf.json_format")
trace_service_pb2 = Late("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@pytest.fixture(autouse=True)
def _sent_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_parts, "BATCH_S", 0.02)


@asynccontextmanager
async def traced(
    *backends: Serving, script: Sequence[Reply] = (), **settings: Any
) -> AsyncIterator[tuple[Node, Collector]]:
    """A node that traces everything, and its collector."""
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines += [await place.listen(backend.serve) for backend in backends]
        collector = Collector(script=[*script])
        host, port = await place.nursery.start(serve, collector)
        options = {"otel_endpoint": f"http://{host}:{port}", "otel_sample_ratio": 1.0, **settings}
        yield await place.start(**options), collector


def shape(spans: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Kinds and names in the order of the tries; all of one trace, all below its SERVER span."""
    (server,) = [span for span in spans if span["kind"] == SERVER]
    assert {span["traceId"] for span in spans} == {server["traceId"]}
    assert all(span["parentSpanId"] == server["spanId"] for span in spans if span is not server)
    for span in spans:
        assert int(server["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    return [(span["kind"], span["name"]) for span in spans]


def of(span: Mapping[str, Any]) -> Mapping[str, Any]:
    return plain(span["attributes"])


ONE_TRY = [(SERVER, "POST /v1/chat/completions"), (PLACE, "ranvier.place"), (CLIENT, f"chat {MODEL}")]


async def test_a_request_has_a_server_span_its_placement_and_the_engines_answer_with_its_counts() -> None:
    engine = Scripted(answer(WHOLE))
    async with traced(engine, node_name="router-7") as (node, collector):
        assert (await node.chat()).status_code == 200
        spans = await collector.until(3)
    assert shape(spans) == ONE_TRY
    server, place, client = map(of, spans)
    assert (server["http.response.status_code"], server["http.route"], server["client.address"]) == (
        200,
        "/v1/chat/completions",
        "127.0.0.1",
    )
    assert "error.type" not in server
    assert not any("status" in span for span in spans)
    assert (place["ranvier.engine"], place["ranvier.candidates"]) == (client["ranvier.engine"], 1)
    known = ("gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.output_tokens")
    assert [client[name] for name in known] == [120, 96, 7]
    assert (client["gen_ai.operation.name"], client["gen_ai.request.model"]) == ("chat", MODEL)
    assert collector.resources[0] == {"service.name": "ranvier", "service.instance.id": "router-7"}
    assert collector.heads[0][":first"] == "POST /v1/traces HTTP/1.1"
    (head,) = engine.heads
    sent = head.lower().partition(b"traceparent: ")[2].partition(b"\r\n")[0].decode()
    assert sent == f"00-{spans[0]['traceId']}-{spans[2]['spanId']}-01", "the engine's spans hang below the try"


async def test_a_stream_has_its_first_chunk(tmp_path: Path) -> None:
    async with traced(Scripted(STREAM_HEAD, ROLE, TOKEN, END)) as (node, collector):
        assert (await node.chat(stream=True)).status_code == 200
        spans = await collector.until(3)
    assert shape(spans) == ONE_TRY
    assert of(spans[2])["gen_ai.request.stream"] is True
    assert 0 < of(spans[2])["gen_ai.response.time_to_first_chunk"] < DEADLINE_S


async def test_a_trace_goes_on_with_its_state_and_its_parents_decision() -> None:
    engine = Scripted(GOOD)
    async with traced(engine) as (node, collector):
        await asked(node, {"traceparent": UNSAMPLED})
        await asked(node, {"traceparent": SAMPLED, "tracestate": "vendor=1, other=2"})
        spans = await collector.until(3)
    assert shape(spans) == ONE_TRY
    assert (spans[0]["traceId"], spans[0]["parentSpanId"], spans[0]["traceState"]) == (
        TRACE,
        PARENT,
        "vendor=1,other=2",
    )
    assert (spans[0]["flags"], spans[2]["flags"]) == (0x301, 0x101)
    assert len(spans) == 3, "of the first request no trace is kept"
    for head, flag in zip(engine.heads, (b"00", b"01"), strict=True):
        (line,) = [line for line in head.split(b"\r\n") if line.lower().startswith(b"traceparent:")]
        assert TRACE.encode() in line
        assert PARENT.encode() not in line
        assert line.endswith(b"-" + flag)
    assert b"tracestate: vendor=1,other=2\r\n" in engine.heads[1]


async def test_without_a_collector_what_a_client_sends_goes_on_as_it_came() -> None:
    engine = Scripted(GOOD)
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines.append(await place.listen(engine.serve))
        node = await place.start()
        await asked(node, {"traceparent": "what ever", "TraceState": "x"})
    assert b"traceparent: what ever\r\n" in engine.heads[0]
    assert b"TraceState: x\r\n" in engine.heads[0]


async def test_each_try_is_a_span_and_what_failed_is_kept_though_it_is_not_sampled() -> None:
    numbers = count()
    async with traced(Scripted(answer(b"{}", status=500)), Scripted(GOOD), otel_sample_ratio=0) as (node, collector):
        while not collector.spans:
            prompt = [{"role": "user", "content": f"{next(numbers)} " * 50}]
            assert (await node.chat(prompt)).status_code == 200
            await trio.sleep(0.05)
        spans = await collector.until(5)
    assert shape(spans[:5]) == [*ONE_TRY, *ONE_TRY[1:]]
    first, second = spans[2], spans[4]
    assert (of(first)["http.response.status_code"], first["status"]["message"]) == (500, "it answered 500")
    assert of(first)["error.type"] == "500"
    assert "status" not in second
    assert "status" not in spans[0]
    assert int(spans[3]["startTimeUnixNano"]) >= int(first["endTimeUnixNano"])


@pytest.mark.parametrize(
    ("steps", "status", "error"),
    [
        ([answer(b'{"error":"x"}', status=400)], 400, ""),
        ([answer(b'{"error":"x"}', status=500)], 500, "server_error"),
        ([CLOSE], 502, "upstream_closed"),
        ([STREAM_HEAD, TOKEN, CLOSE], 200, "broken"),
    ],
    ids=["refused", "failed", "closed", "cut"],
)
async def test_what_a_client_did_wrong_is_no_error_of_the_server(steps: list[Any], status: int, error: str) -> None:
    async with traced(Scripted(*steps), total_retries_max=1, worker_retries_max=1) as (node, collector):
        try:
            await node.chat(stream=status == 200)
        except httpx.HTTPError:
            assert status == 200
        spans = await collector.until(3)
    server, client = spans[0], spans[2]
    assert of(server)["http.response.status_code"] == status
    assert ("status" in server) is bool(error)
    assert "status" in client, "HTTP: for who asks, 4xx is an error as well"
    assert bool(error) is bool(of(server).get("error.type")) or of(server)["error.type"] == "400"


async def test_a_client_that_leaves_has_ended_spans_without_an_error() -> None:
    engine = Scripted(HANG)
    async with traced(engine) as (node, collector), await node.wire() as wire:
        body = chat()
        await wire.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await engine.asked.wait()
        await wire.aclose()
        spans = await collector.until(3)
    assert shape(spans) == ONE_TRY
    assert of(spans[0])["ranvier.outcome"] == "client_gone"
    assert of(spans[2])["error.type"] == "cancelled"
    assert not any("status" in span for span in spans)


async def test_who_is_refused_before_a_route_has_a_server_span_alone(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, key_lines(RED, requests_per_minute=1))
    async with traced(Scripted(GOOD), keys_file=keys) as (node, collector):
        await asked(node, {**bearer("rk-wrong"), "traceparent": SAMPLED})
        spans = await collector.until(1)
        assert [(await asked(node, bearer(RED))).status_code for _ in range(2)] == [200, 429]
        limited = (await collector.until(5))[4:]
    assert shape(spans) == shape(limited) == [(SERVER, "POST /v1/chat/completions")]
    assert (of(limited[0])["error.type"], of(limited[0])["http.response.status_code"]) == ("rate_limit_exceeded", 429)
    assert (spans[0]["traceId"], spans[0]["parentSpanId"]) == (TRACE, PARENT)
    assert (of(spans[0])["http.response.status_code"], of(spans[0])["error.type"]) == (401, "invalid_api_key")
    assert "status" not in spans[0]


async def test_no_engine_for_it_is_an_error_of_the_server() -> None:
    async with traced(otel_sample_ratio=0) as (node, collector):
        assert (await node.chat()).status_code == 503
        spans = await collector.until(1)
    assert shape(spans) == [(SERVER, "POST /v1/chat/completions")]
    assert (of(spans[0])["error.type"], spans[0]["status"]["code"]) == ("no_backend", 2)


async def test_a_hit_of_the_response_cache_and_a_follower_have_a_server_span_alone() -> None:
    go = trio.Event()
    engine = Scripted(go, answer(WHOLE))
    settings = {"response_cache": True}
    async with traced(engine, **settings) as (node, collector):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(lambda: node.chat(temperature=0))
            await engine.asked.wait()
            go.set()
        assert (await node.chat(temperature=0)).headers["x-cache"] == "HIT"
        spans = await collector.until(5)
    servers = [span for span in spans if span["kind"] == SERVER]
    assert sorted(of(span)["ranvier.cache"] for span in servers) == ["HIT", "HIT", "MISS"]
    alone = [span for span in servers if of(span)["ranvier.cache"] == "HIT"]
    assert not {span["spanId"] for span in alone} & {span.get("parentSpanId") for span in spans}
    assert len(spans) == 5


async def test_a_websocket_is_one_attempt_until_it_ends() -> None:
    engine = Scripted(GOOD)

    async def upgraded(stream: trio.SocketStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some()
        if data.startswith(b"GET /v1/realtime"):
            await stream.send_all(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
            )
            await stream.receive_some()
            await stream.aclose()
        else:
            await stream.send_all(answer(b"{}"))
            await stream.aclose()

    engine.serve = upgraded  # type: ignore[method-assign]
    async with traced(engine) as (node, collector), await node.wire() as wire:
        await wire.send(handshake())
        await wire.until(b"\r\n\r\n")
        await wire.aclose()
        spans = await collector.until(3)
    assert [kind for kind, _ in shape(spans)] == [SERVER, PLACE, CLIENT]
    assert of(spans[0])["http.response.status_code"] == 101
    assert spans[2]["name"].startswith("realtime")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/files"])
async def test_each_api_has_its_operation(path: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}]})
    async with traced(Scripted(answer(WHOLE))) as (node, collector):
        await asked(node, {}, path, body.encode())
        spans = await collector.until(3)
    names = {
        "/v1/completions": ("POST /v1/completions", "text_completion"),
        "/v1/responses": ("POST /v1/responses", "chat"),
        "/v1/messages": ("POST /v1/messages", "chat"),
        "/v1/embeddings": ("POST /v1/embeddings", "embeddings"),
        "/v1/files": ("POST", "request"),
    }
    assert (spans[0]["name"], of(spans[2])["gen_ai.operation.name"]) == names[path]


async def test_the_protocols_own_decoder_reads_what_is_sent() -> None:
    async with traced(Scripted(answer(b"{}", status=500)), total_retries_max=1, worker_retries_max=1) as (
        node,
        collector,
    ):
        await asked(node, {"traceparent": SAMPLED, "tracestate": "a=1"})
        spans = await collector.until(3)
    sent = json.loads(collector.bodies[0])
    for span in sent["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):  # in OTLP hex, in protobuf's JSON base64
            span[name] = b64encode(bytes.fromhex(span[name])).decode()
    read = json_format.ParseDict(sent, trace_service_pb2.ExportTraceServiceRequest())
    (resource,) = read.resource_spans
    (scope,) = resource.scope_spans
    assert scope.scope.name == "ranvier_py"
    assert [span.name for span in scope.spans] == [span["name"] for span in spans[: len(scope.spans)]]
    assert scope.spans[0].trace_id.hex() == TRACE
    assert scope.spans[2].status.code == 2
    assert scope.spans[0].start_time_unix_nano > 1_700_000_000 * 10**9
