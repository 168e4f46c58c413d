"""A collector that others wrote takes what a node sends: rotel, where there is one (`make collector`)."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from cluster.pages.helm import program
from ranvier_py.node.tracing import trace_parts
from tests.node.access.key_lab import asked
from tests.node.node_lab import BETWEEN_LOOKS_S, MODEL, Lab, opened
from tests.node.tracing.test_collectors import SPANS, until
from tests.node.tracing.test_spans_of_requests import DEADLINE_S, PARENT, SAMPLED, TRACE
from tests.proxy.wire import END, ROLE, STREAM_HEAD, TOKEN, Scripted

ROTEL = program("rotel-agent")
LAST = "-> ranvier.try: "
"""The last attribute of the last span of a request."""


@asynccontextmanager
async def collecting(shown: Path) -> AsyncIterator[tuple[str, trio.Process]]:
    """One that writes what it read into a file; its address, and itself."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        http, grpc = (f"127.0.0.1:{free.getsockname()[1]}" for free in (one, other))
    command = [str(ROTEL), "start", f"--otlp-http-endpoint={http}", f"--otlp-grpc-endpoint={grpc}"]
    command += ["--exporter=blackhole", "--debug-log=traces", "--debug-log-verbosity=detailed"]
    with shown.open("wb") as output:
        async with trio.open_nursery() as nursery:
            run = partial(trio.run_process, command, stdout=output, stderr=subprocess.STDOUT, check=False, env={})
            process: trio.Process = await nursery.start(run)
            try:
                await holds(shown, "Starting Rotel", process)
                yield http, process
            finally:
                process.terminate()


async def holds(shown: Path, words: str, process: trio.Process) -> str:
    """What the file has once these words are there."""
    while True:
        text = await trio.Path(shown).read_text()
        if words in text:
            return text
        assert process.poll() is None, text
        await trio.sleep(BETWEEN_LOOKS_S)


def spans_of(text: str) -> list[dict[str, str]]:
    """Each span's fields and attributes, as they are shown."""
    line = re.compile(r"^ *(?:-> )?([\w.][\w. ]*?) *: (.+)$", re.MULTILINE)
    return [dict(line.findall(each)) for each in text.split("Span #")[1:]]


@pytest.mark.skipif(ROTEL is None, reason="no collector of OpenTelemetry is here: make collector")
@pytest.mark.parametrize("compression", ["gzip", "none"])
async def test_a_collector_that_others_wrote_reads_each_span_as_it_was_meant(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_parts, "BATCH_S", 0.02)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    shown = tmp_path / "shown"
    async with collecting(shown) as (address, process), opened(Lab, 0, DEADLINE_S) as place:
        place.engines.append(await place.listen(Scripted(STREAM_HEAD, ROLE, TOKEN, END).serve))
        node = await place.start(otel_endpoint=f"http://{address}", otel_sample_ratio=1.0)
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "a"}]}
        headers = {"traceparent": SAMPLED, "tracestate": "a=1"}
        assert (await asked(node, headers, body=json.dumps(body).encode())).status_code == 200
        found = await until(node, exported_total=SPANS)
        spans = spans_of(await holds(shown, LAST, process))
    assert (found["failures_total"], [name for name in found if name.startswith("dropped")]) == (0, [])
    server, place_, client = spans
    kinds = [(each["Kind"], each["Name"]) for each in spans]
    assert kinds == [
        ("SPAN_KIND_SERVER", "POST /v1/chat/completions"),
        ("SPAN_KIND_INTERNAL", "ranvier.place"),
        ("SPAN_KIND_CLIENT", f"chat {MODEL}"),
    ]
    assert {each["Trace ID"] for each in spans} == {TRACE}
    assert [each["Parent ID"] for each in spans] == [PARENT, server["ID"], server["ID"]]
    assert (server["http.response.status_code"], place_["ranvier.candidates"]) == ("Int(200)", "Int(1)")
    assert (client["gen_ai.operation.name"], client["gen_ai.request.stream"]) == ("Str(chat)", "Bool(true)")
    assert re.fullmatch(r"Double\(0\.\d+\)", client["gen_ai.response.time_to_first_chunk"])
    assert int(server["Start time"]) <= int(client["Start time"]) < int(client["End time"]) <= int(server["End time"])
