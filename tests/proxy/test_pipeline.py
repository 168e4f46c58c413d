"""What becomes of a request whose backend or client misbehaves: a whole node, and backends that follow a script."""

import errno
import io
import json
import logging
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ranvier_py.cli import leaves
from ranvier_py.config.config_loader import config_of
from ranvier_py.config.config_model import Config
from ranvier_py.core.errors import ConfigError
from ranvier_py.node.node import Addresses, run
from ranvier_py.proxy import pipeline
from tests.proxy.wire import Asked

DEADLINE_S = 10
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HANG, CLOSE, RESET, SEEN = "hang", "close", "reset", "seen"
Step = bytes | str


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def delta(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def answer(status: int, body: bytes = b'{"error":{"message":"own words"}}', fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d Own\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, len(body), body)


ROLE = delta("")
TOKEN = delta("word")
END = delta("", "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
GOOD = answer(200, b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}')


class Scripted:
    """A backend that answers every POST by the same steps, and probes as a healthy engine does."""

    def __init__(self, *script: Step) -> None:
        self.script = script
        self.bodies: list[bytes] = []
        self.asked = trio.Event()
        self.seen = trio.Event()  # by the client: what the script said so far
        self.left = trio.Event()  # the node hung up

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            asked = Asked(stream)
            while (request := await asked.next()) is not None:
                head, body = request
                if head.startswith(b"GET"):
                    await stream.send_all(answer(200, b"{}"))
                    continue
                self.bodies.append(body)
                self.asked.set()
                if not await self.play(stream):
                    return

    async def play(self, stream: trio.SocketStream) -> bool:
        for step in self.script:
            if isinstance(step, bytes):
                await stream.send_all(step)
            elif step == SEEN:
                await self.seen.wait()
            elif step == HANG:
                await stream.receive_some()  # until the node hangs up
                self.left.set()
                return False
            else:
                if step == RESET:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
        return True


async def rest_of(client: trio.SocketStream, received: bytes = b"") -> bytes:
    """What comes until the answer's last chunk, or the connection's end, after what was received."""
    try:
        while not received.endswith(b"\r\n0\r\n\r\n") and (more := await client.receive_some()):
            received += more
    except trio.BrokenResourceError:
        received += b"<reset>"
    return received


class Lab:
    def __init__(self, addresses: Addresses, http: httpx.AsyncClient) -> None:
        self.address = addresses.public[0]
        self.url = "http://{}:{}".format(*self.address)
        self.control = addresses.control
        self.http = http

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.http.post(f"{self.url}/v1/chat/completions", content=chat(**fields))

    async def stream(self, backends: Sequence[Scripted] = ()) -> bytes:
        """A stream's raw bytes, however it ends. The backends are told when some have come."""
        async with await trio.open_tcp_stream(*self.address) as client:
            await client.send_all(request_of(chat(stream=True)))
            first = await client.receive_some()
            for backend in backends:
                backend.seen.set()
            return await rest_of(client, first)

    async def at_rest(self) -> dict[str, Any]:
        """The routes' statistics once nothing is in flight any more; times out if something stays."""
        while True:
            backends = (await self.http.get(f"{self.control}/admin/backends")).json()["backends"]
            routes = (await self.http.get(f"{self.control}/admin/routes")).json()
            if routes["outcomes"] and not any(backend["in_flight"] for backend in backends):
                assert routes["speculation"]["attempts"] == routes["speculation"]["fingerprints"] == 0
                return dict(routes)


@asynccontextmanager
async def lab(*backends: Scripted, **settings: Any) -> AsyncIterator[Lab]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            urls = []
            for backend in backends:
                listeners = await nursery.start(partial(trio.serve_tcp, backend.serve, 0, host="127.0.0.1"))
                urls.append(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
            values: dict[str, Any] = {"probe_interval_s": 60, "drain_timeout_s": 5, **settings}
            values |= {"listen": "127.0.0.1:0", "control": "127.0.0.1:0", "backend": urls}
            config = config_of(**values)
            addresses = await nursery.start(partial(run, config))
            async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http:
                yield Lab(addresses, http)
            nursery.cancel_scope.cancel()


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "How many words are there in this question? " * 20}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def request_of(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def asked(backends: Sequence[Scripted]) -> int:
    return sum(len(backend.bodies) for backend in backends)


@pytest.mark.parametrize(
    ("script", "outcome", "is_learned"),
    [
        pytest.param([STREAM_HEAD, ROLE, TOKEN, END], "success", True, id="complete"),
        pytest.param([STREAM_HEAD, ROLE, CLOSE], "broken", False, id="closed before a token"),
        pytest.param([STREAM_HEAD, ROLE, RESET], "broken", False, id="reset before a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, CLOSE], "broken", True, id="closed after a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, RESET], "broken", True, id="reset after a token"),
        pytest.param([STREAM_HEAD, ROLE, SEEN, b"zz\r\n"], "broken", False, id="garbled chunks"),
        pytest.param([STREAM_HEAD, ROLE, HANG], "timeout", False, id="stalled before a token"),
        pytest.param([STREAM_HEAD, ROLE, TOKEN, HANG], "timeout", True, id="stalled after a token"),
        pytest.param([STREAM_HEAD, ROLE, END], "success", True, id="an empty answer"),
        pytest.param(
            [STREAM_HEAD, event({"error": {"message": "no"}}), b"0\r\n\r\n"], "success", False, id="an error as event"
        ),
        pytest.param([answer(400)], "success", False, id="400"),
        pytest.param([answer(404)], "success", False, id="404"),
    ],
)
async def test_every_stream_is_asked_for_once_and_learned_only_when_proved(
    script: list[Step], outcome: str, is_learned: bool
) -> None:
    backends = [Scripted(*script), Scripted(*script)]
    async with lab(*backends, stall_timeout_s=0.1) as node:
        received = await node.stream(backends) if script[0] == STREAM_HEAD else (await node.chat(stream=True)).content
        assert received
        routes = await node.at_rest()
    refused = script == [answer(400)]  # perhaps it was the question for counts: once more as it came
    assert asked(backends) == 1 + refused
    assert routes["outcomes"] == {outcome: 1}
    assert bool(routes["rows"]) == is_learned


@pytest.mark.parametrize("step", [CLOSE, RESET, b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"nonsense\r\n\r\n"])
async def test_before_the_first_byte_others_are_asked_the_same_but_not_for_ever(step: Step) -> None:
    backends = [Scripted(step, CLOSE) for _ in range(6)]
    async with lab(*backends, total_retries_max=3) as node:
        failed = await node.chat()
        assert failed.status_code == 502
        assert failed.json()["error"].keys() == {"message", "type", "param", "code"}
        routes = await node.at_rest()
    assert asked(backends) == 4
    assert {len(backend.bodies) for backend in backends} == {0, 1}
    assert {body for backend in backends for body in backend.bodies} == {chat()}
    assert routes["outcomes"] == {"connect_error": 4}
    assert routes["rows"] == 0


@pytest.mark.parametrize(("status", "outcome"), [(429, "overloaded"), (500, "server_error"), (503, "server_error")])
async def test_busy_and_broken_backends_are_passed_over_and_their_last_word_is_passed_on(
    status: int, outcome: str
) -> None:
    backends = [Scripted(answer(status, b"own", b"Retry-After: 7\r\n")) for _ in range(3)]
    async with lab(*backends) as node:
        refused = await node.chat()
        assert (refused.status_code, refused.text, refused.headers["retry-after"]) == (status, "own", "7")
        routes = await node.at_rest()
    assert [len(backend.bodies) for backend in backends] == [1, 1, 1]
    assert routes["outcomes"] == {outcome: 3}
    assert routes["rows"] == 0


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, ROLE, HANG]], ids=["before", "after the first byte"])
async def test_a_client_that_leaves_ends_the_attempt_and_teaches_nothing(script: list[Step]) -> None:
    backend = Scripted(*script)
    async with lab(backend) as node:
        async with await trio.open_tcp_stream(*node.address) as client:
            await client.send_all(request_of(chat(stream=True)))
            await backend.asked.wait()
            if script[0] == STREAM_HEAD:
                assert await client.receive_some()
        routes = await node.at_rest()
    assert routes["outcomes"] == {"cancelled": 1}
    assert routes["rows"] == 0


async def test_an_engine_receives_within_a_tenth_of_a_second_that_its_client_left() -> None:
    """Of three the quickest: a busy machine is late, the node is not."""
    backend = Scripted(STREAM_HEAD, TOKEN, HANG)
    took_s = []
    with trio.fail_after(DEADLINE_S):
        async with lab(backend) as node:
            for _ in range(3):
                backend.left = trio.Event()
                async with await trio.open_tcp_stream(*node.address) as client:
                    await client.send_all(request_of(chat(stream=True)))
                    while TOKEN not in await client.receive_some():
                        pass
                left_at = trio.current_time()
                await backend.left.wait()
                took_s.append(trio.current_time() - left_at)
    assert min(took_s) < 0.1


async def test_a_backend_too_slow_to_begin_is_given_up_with_a_504_and_logged_as_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ranvier_py"):
        async with lab(Scripted(HANG), first_byte_timeout_s=0.1) as node:
            late = await node.chat()
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "upstream_timeout"
            assert (await node.at_rest())["outcomes"] == {"timeout": 1}
    (line,) = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert (line["status"], line["outcome"]) == (504, "timeout")


class InTurn(Scripted):
    """One of several backends: whoever is asked next follows the next script."""

    def __init__(self, scripts: Iterator[Sequence[Step]]) -> None:
        super().__init__()
        self.scripts = scripts

    async def play(self, stream: trio.SocketStream) -> bool:
        self.script = tuple(next(self.scripts))
        return await super().play(stream)


async def test_a_backend_too_slow_to_begin_is_passed_over_while_the_client_still_waits() -> None:
    scripts = iter(([HANG], [GOOD]))
    backends = [InTurn(scripts), InTurn(scripts)]
    async with lab(*backends, first_byte_timeout_s=0.3) as node:
        answered = await node.chat()
        assert answered.status_code == 200
        routes = await node.at_rest()
    assert [len(backend.bodies) for backend in backends] == [1, 1]
    assert routes["outcomes"] == {"timeout": 1, "success": 1}


async def test_no_try_begins_that_could_outlast_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 600 s of waiting, another engine would compute the prompt for nobody."""
    monkeypatch.setattr(pipeline, "FIRST_BYTE_TOTAL_S", 0.85)
    backends = [Scripted(HANG) for _ in range(4)]
    async with lab(*backends, first_byte_timeout_s=0.3, total_retries_max=3) as node:
        late = await node.chat()
        assert late.status_code == 504
        assert (await node.at_rest())["outcomes"] == {"timeout": 2}
    assert asked(backends) == 2


def test_with_the_default_deadline_there_is_no_second_try() -> None:
    assert 2 * Config().pipeline.first_byte_s > pipeline.FIRST_BYTE_TOTAL_S


async def test_the_log_reports_how_much_of_a_broken_answer_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ranvier_py"):
        async with lab(Scripted(STREAM_HEAD, TOKEN, HANG), stall_timeout_s=0.1) as node:
            received = await node.stream()
            await node.at_rest()
    (line,) = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert TOKEN in received
    assert (line["status"], line["outcome"], line["sent_bytes"]) == (200, "timeout", len(TOKEN))


async def test_a_backend_that_breaks_off_is_one_line_in_the_log_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ranvier_py"):
        async with lab(Scripted(STREAM_HEAD, TOKEN, CLOSE)) as node:
            await node.stream()
            await node.at_rest()
            page = (await node.http.get(f"{node.control}/metrics")).text
    assert 'ranvier_server_errors_total{kind="upstream_closed"} 1.0' in page
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_request_id_of_the_backend_is_not_doubled() -> None:
    async with lab(Scripted(answer(200, b"{}", b"X-Request-Id: theirs\r\n"))) as node:
        served = await node.chat()
        assert served.headers.get_list("x-request-id") == ["theirs"]


async def test_a_prompt_without_a_template_for_it_is_placed_by_load_and_not_refused() -> None:
    backend = Scripted(GOOD)
    async with lab(backend) as node:
        assert (await node.chat(chat_template="{{ messages }}")).status_code == 200
        routes = await node.at_rest()
    assert routes["tokenizer_worker"]["failed"] > 0


@pytest.mark.parametrize("path", ["/v1/../admin", "/v1/%2E%2e/admin", "/v1/a/..%2fadmin", "/v1/..\\admin", "/admin"])
async def test_no_path_climbs_out_of_what_is_served(path: str) -> None:
    backend = Scripted(GOOD)
    async with lab(backend) as node, await trio.open_tcp_stream(*node.address) as client:
        await client.send_all(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        assert (await client.receive_some()).startswith(b"HTTP/1.1 404 ")
    assert backend.bodies == []


async def test_a_wrong_method_is_reported_the_right_one() -> None:
    async with lab(Scripted(GOOD)) as node:
        refused = await node.http.get(f"{node.url}/v1/chat/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("key", ["chat_template", "tls"])
async def test_files_that_are_not_what_they_should_be_are_the_configurations_problem(key: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe\x00")
    files = {"tls_certificate_file": file, "tls_key_file": file} if key == "tls" else {key: file}
    with pytest.raises(ConfigError, match=key):
        await run(config_of(listen="127.0.0.1:0", control="127.0.0.1:0", **files))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["listen", "control"])
async def test_an_address_in_use_is_named(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        values: dict[str, Any] = {"listen": "127.0.0.1:0", "control": "127.0.0.1:0", key: address}
        with pytest.raises(BaseExceptionGroup) as caught:
            await run(config_of(**values))
    assert any(address in str(error) for error in leaves(caught.value))


async def test_a_node_that_knows_no_engine_states_so(caplog: pytest.LogCaptureFixture) -> None:
    """A flag that was forgotten looks like a node that works, until the first request."""
    await started_and_stopped()
    assert "node.no_backends" in caplog.text


async def test_a_node_whose_output_can_not_be_written_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    await started_and_stopped()


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"])
async def test_a_template_that_must_be_read_in_full_is_a_warning_and_another_is_none(
    template: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template or "")
    await started_and_stopped(chat_template=file if template else None)
    assert ("node.tokenizer incremental=False" in caplog.text) == (template is not None)


async def started_and_stopped(**keys: Any) -> None:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(run, config_of(listen="127.0.0.1:0", control="127.0.0.1:0", **keys))
            nursery.cancel_scope.cancel()


async def test_a_second_signal_cuts_the_drain_short() -> None:
    backend = Scripted(STREAM_HEAD, TOKEN, HANG)
    with trio.fail_after(DEADLINE_S):
        async with lab(backend, drain_timeout_s=3600) as node, await trio.open_tcp_stream(*node.address) as client:
            await client.send_all(request_of(chat(stream=True)))
            received = b""
            while TOKEN not in received:
                received += await client.receive_some()
            os.kill(os.getpid(), signal.SIGTERM)
            while (await node.http.get(f"{node.control}/readyz")).status_code != 503:
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            assert await rest_of(client) == b"<reset>"
