"""What becomes of spans when a collector is slow, full, away or of another opinion: counted, and no request waits."""

from __future__ import annotations

import json
import logging
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from cluster.collector import Collector, Reply, serve
from ranvier_py.config.config_loader import config_of
from ranvier_py.config.trace_options import OtelOptions, target_of
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.tracing.span_names import GENAI_MAIN, RELEASED
from ranvier_py.io.tracing.otlp_sender import retry_after
from ranvier_py.node.config_check import file_problems
from ranvier_py.node.tracing import trace_parts
from tests.node.access.key_lab import asked
from tests.node.node_lab import Lab, Node, opened
from tests.node.tracing.test_spans_of_requests import DEADLINE_S, of, traced
from tests.proxy.wire import GOOD, Scripted, answer

SPANS = 3  # of a request of one attempt


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_parts, "BATCH_S", 0.02)
    monkeypatch.setattr(trace_parts, "RETRY_S", 0.02)
    monkeypatch.setattr(trace_parts, "LAST_S", 0.2)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


async def figures(node: Node) -> dict[str, float]:
    page = (await node.http.get(f"{node.control}/metrics")).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("ranvier_traces_")]
    return {name.removeprefix("ranvier_traces_"): float(value) for name, _, value in lines}


async def until(node: Node, **wanted: float) -> dict[str, float]:
    """The figures of traces once these are reached."""
    names = {name: name.replace("__", '{reason="') + ('"}' if "__" in name else "") for name in wanted}
    while True:
        found = await figures(node)
        if all(found.get(names[name], 0) >= value for name, value in wanted.items()):
            return found
        await trio.sleep(0.02)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_what_a_collector_has_no_room_for_comes_again(status: int) -> None:
    async with traced(Scripted(GOOD), script=[Reply(status), Reply(status)]) as (node, collector):
        await node.chat()
        await collector.until(SPANS)
        found = await until(node, exported_total=SPANS)
    assert (found["failures_total"], len(collector.bodies)) == (2, 3)
    assert collector.bodies[0] == collector.bodies[2]
    assert not any(name.startswith("dropped") for name in found)


async def test_the_pause_that_it_asks_for_is_kept() -> None:
    async with traced(Scripted(GOOD), script=[Reply(503, {"retry-after": "1"})]) as (node, collector):
        await node.chat()
        while not collector.heads:
            await collector.came.wait()
        began = trio.current_time()
        await collector.until(SPANS)
        assert trio.current_time() - began >= 1.0


NOON = "Mon, 30 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), (NOON, 10.0), ("-1", 0.0), ("x", 0.0), ("", 0.0), ("1.5", 0.0)]
)
def test_a_pause_is_a_number_or_a_date(text: str, seconds: float) -> None:
    now_s = parsedate_to_datetime(NOON).timestamp() - 10.0
    assert retry_after(text, now_s) == seconds
    assert retry_after(NOON, now_s + 3600.0) == 0.0


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500])
async def test_what_it_refuses_is_dropped_and_counted(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with traced(Scripted(GOOD), script=[Reply(status)] * 2) as (node, collector):
        await node.chat()
        found = await until(node, dropped_total__refused=SPANS)
        await node.chat()
        await until(node, dropped_total__refused=2 * SPANS)
        await node.chat()
        await collector.until(SPANS)
        await until(node, exported_total=SPANS)
    assert found["exported_total"] == 0
    lines = [text for text in caplog.messages if text.startswith("traces.")]
    assert [text.partition(" ")[0] for text in lines] == ["traces.not_taken", "traces.taken"], "once each"
    assert f"it answered {status}" in lines[0]


async def test_a_partial_success_counts_what_was_rejected() -> None:
    reply = Reply(body=b'{"partialSuccess":{"rejectedSpans":"2","errorMessage":"too old"}}')
    async with traced(Scripted(GOOD), script=[reply]) as (node, _):
        await node.chat()
        found = await until(node, dropped_total__rejected=2, exported_total=1)
    assert found["exported_total"] == 1


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b'{"partialSuccess":null}', b'{"partialSuccess":{"rejectedSpans":"x"}}']
)
async def test_an_odd_answer_of_status_200_is_a_success(body: bytes) -> None:
    async with traced(Scripted(GOOD), script=[Reply(body=body)]) as (node, _):
        await node.chat()
        await until(node, exported_total=SPANS)


async def test_a_collector_that_is_away_costs_its_spans_and_no_request_waits(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines.append(await place.listen(Scripted(GOOD).serve))
        settings = {"otel_endpoint": "http://127.0.0.1:1", "otel_sample_ratio": 1.0, "otel_queue_max": 64}
        node = await place.start(**settings)
        found, asked = dict[str, float](), 0
        while not {'dropped_total{reason="away"}', 'dropped_total{reason="queue_full"}'} <= found.keys():
            for _ in range(30):
                assert (await node.chat()).status_code == 200
            found, asked = await figures(node), asked + 30
    assert found["traced_total"] == asked
    assert found["exported_total"] == 0
    assert len([text for text in caplog.messages if text.startswith("traces.not_taken")]) == 1


async def test_a_slow_collector_holds_up_nothing() -> None:
    async with traced(Scripted(GOOD), script=[Reply(pause_s=1.0)]) as (node, collector):
        await node.chat()
        while not collector.heads:
            await collector.came.wait()
        began = trio.current_time()
        for _ in range(5):
            assert (await node.chat()).status_code == 200
        assert trio.current_time() - began < 1.0
        await collector.until(6 * SPANS)


async def test_what_waits_at_the_end_of_a_node_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_parts, "BATCH_S", 3600.0)
    monkeypatch.setattr(trace_parts, "LAST_S", 10.0)
    async with traced(Scripted(GOOD)) as (node, collector):
        await node.chat()
        assert not collector.spans
        node.scope.cancel()
        assert len(await collector.until(SPANS)) == SPANS


@pytest.mark.parametrize(("semconv", "name"), [(RELEASED, "cache_creation"), (GENAI_MAIN, "cache_write")])
async def test_names_are_those_of_the_version_that_is_chosen(semconv: str, name: str) -> None:
    usage = {"input_tokens": 9, "output_tokens": 5, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16}
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}],
        "stop_reason": "end_turn",
    }
    engine = Scripted(answer(json.dumps({**message, "usage": usage}).encode()))
    async with traced(engine, otel_semconv=semconv) as (node, collector):
        body = b'{"model":"lab-model","max_tokens":5,"messages":[{"role":"user","content":"a"}]}'
        await asked(node, {}, "/v1/messages", body)
        spans = await collector.until(SPANS)
    assert of(spans[2])[f"gen_ai.usage.{name}.input_tokens"] == 16
    assert of(spans[2])["gen_ai.usage.cache_read.input_tokens"] == 64
    assert of(spans[2])["gen_ai.usage.input_tokens"] == 89
    scope = json.loads(collector.bodies[0])["resourceSpans"][0]["scopeSpans"][0]
    assert ("schemaUrl" in scope) is (semconv == RELEASED)


async def test_a_collector_may_want_tls_and_a_header(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "headers").write_text("# of the collector\nAuthorization=Bearer collector-key\nx-scope=a\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with opened(Lab, 0, DEADLINE_S) as place:
        place.engines.append(await place.listen(Scripted(GOOD).serve))
        collector = Collector()

        async def encrypted(stream: trio.SocketStream) -> None:
            await collector.serve(trio.SSLStream(stream, context, server_side=True, https_compatible=True))

        url = (await place.listen(encrypted)).replace("http://", "https://")
        files = {"otel_ca_file": tmp_path / "ca.pem", "otel_headers_file": tmp_path / "headers"}
        node = await place.start(otel_endpoint=url, otel_sample_ratio=1.0, **files)
        await node.chat()
        await collector.until(SPANS)
    assert (collector.heads[0]["authorization"], collector.heads[0]["x-scope"]) == ("Bearer collector-key", "a")
    assert collector.heads[0]["content-encoding"] == "gzip"


async def test_the_standard_variables_turn_traces_on(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(serve, collector)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{host}:{port}/base/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.name=other")
        async with opened(Lab, 0, DEADLINE_S) as place:
            place.engines.append(await place.listen(Scripted(GOOD).serve))
            node = await place.start(otel_sample_ratio=1.0)
            await node.chat()
            await collector.until(SPANS)
        nursery.cancel_scope.cancel()
    assert collector.heads[0][":first"] == "POST /base/v1/traces HTTP/1.1"
    assert collector.heads[0]["x-key"] == "a b"
    assert "content-encoding" not in collector.heads[0]
    found = collector.resources[0]
    assert (found["service.name"], found["deployment.environment.name"]) == ("front", "lab")


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, "http://a:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/x"}, "http://a/x"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_where_traces_go_by_variables(variables: dict[str, str], url: str | None) -> None:
    found = target_of(OtelOptions(), variables)
    assert (found.url if found is not None else None) == url
    own = target_of(OtelOptions(otel_endpoint="http://own:4318"), variables)
    assert own is not None
    assert own.url == "http://own:4318/v1/traces"


def test_files_that_can_not_be_used_are_named_without_their_content(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text("s3cret value without a name\n")
    settings: dict[str, Any] = {"otel_endpoint": "https://a:4318", "otel_headers_file": tmp_path / "headers"}
    (problem,) = [each for each in file_problems(config_of(**settings)) if "otel" in each]
    assert "otel_headers_file" in problem
    assert "s3cret" not in problem
    with pytest.raises(ConfigError):
        target_of(OtelOptions(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://a:4317"})
    settings = {"otel_endpoint": "https://a:4318", "otel_ca_file": tmp_path / "headers"}
    assert [each for each in file_problems(config_of(**settings)) if "otel_ca_file" in each]
