"""The engine of the benchmarks answers what it is asked, whoever wrote the body down."""

from __future__ import annotations

import http.client
import threading

import pytest

from benchmarks.harness.stub_engine import CHUNKS, COMPLETION, EVENT, Stub

MESSAGES = b'"messages":[{"role":"user","content":"%b"}]' % (b"words " * 500)


@pytest.fixture(scope="module")
def port() -> int:
    stub = Stub(0)
    threading.Thread(target=stub.run, daemon=True).start()
    return int(stub.listener.getsockname()[1])


def asked(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body)
        return connection.getresponse().read()
    finally:
        connection.close()


@pytest.mark.parametrize("manner", ["at_once", "writes", "steps"])
@pytest.mark.parametrize("body", [b'{"stream":true,%b}', b'{%b,"model":"m","stream":true}'], ids=["ahead", "behind"])
def test_a_stream_has_all_its_events_wherever_a_router_puts_the_field(port: int, body: bytes, manner: str) -> None:
    asked(port, "GET", f"/manner/{manner}")
    streamed = asked(port, "POST", "/v1/chat/completions", body % MESSAGES)
    assert streamed == EVENT * CHUNKS + b"data: [DONE]\n\n"
    assert asked(port, "POST", "/v1/chat/completions", b"{%b}" % MESSAGES) == COMPLETION
