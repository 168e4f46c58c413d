from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.processes import free_port, stub_engines, wait_for_answer
from cluster.processes.commands import serve_argv
from ranvier_py.core.log_events import event
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.core.routing.wanted.found_backend import SourceName
from ranvier_py.io.logs import (
    ENTRY_BYTES,
    QUEUE_BYTES_MAX,
    TRACEBACK_CHARACTERS_MAX,
    LineHandler,
    LogCounters,
    log_counters,
    request_line,
    set_up_logs,
)

DEADLINE_S = 20

SECRET = 'key "of" the cluster'
SUMMARY = RequestSummary(
    id="4f1c",
    method="POST",
    path="/v1/chat/completions",
    status=200,
    outcome="success",
    backend="10.0.0.1:8000",
    policy="affinity",
    reason="holder",
    source="text",
    matched_tokens=1024,
    prompt_tokens=1100,
    tries=1,
    first_byte_ms=12.346,
    total_ms=1500.0,
    sent_bytes=20_000,
)


class Log:
    """A logger of its own, and what it wrote to a file."""

    def __init__(self, form: str, secrets: tuple[str, ...] = ()) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as the logger
        self.handler = LineHandler(self.file.fileno(), form, secrets)
        self.logger = logging.Logger("ranvier_py.test", logging.INFO)  # noqa: LOG001  # of this test alone
        self.logger.addHandler(self.handler)

    @property
    def text(self) -> str:
        self.handler.flush()
        self.file.seek(0)
        return self.file.read().decode()

    def close(self) -> None:
        self.handler.close()
        self.file.close()


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    log = Log(request.param, (SECRET,))
    yield log
    log.close()


@pytest.fixture
def text_log() -> Iterator[Log]:
    log = Log("text")
    yield log
    log.close()


@pytest.fixture
def json_log() -> Iterator[Log]:
    log = Log("json")
    yield log
    log.close()


def test_a_request_is_one_line_of_text(text_log: Log) -> None:
    text_log.handler.request(SUMMARY)
    stamp, _, rest = text_log.text.partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    assert rest == (
        "info    ranvier_py.requests request id=4f1c method=POST path=/v1/chat/completions status=200 outcome=success "
        "backend=10.0.0.1:8000 policy=affinity reason=holder source=text matched_tokens=1024 prompt_tokens=1100 "
        "tries=1 first_byte_ms=12.346 total_ms=1500.0 sent_bytes=20000\n"
    )


def test_a_request_that_reached_no_backend_has_quoted_gaps(text_log: Log) -> None:
    text_log.handler.request(RequestSummary("a b", "GET", "/", 503, "no_backend", error="e1: connection refused"))
    assert ' id="a b" method=GET path=/ status=503 outcome=no_backend backend="" policy=""' in text_log.text
    assert text_log.text.endswith(' sent_bytes=0 error="e1: connection refused"\n')


@pytest.mark.parametrize(
    ("seconds", "stamp"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (0.9996, "1970-01-01T00:00:00.999Z"),
        (1_795_240_000.0625, "2026-11-21T05:46:40.062Z"),
    ],
)
def test_a_line_begins_with_its_time_in_utc(seconds: float, stamp: str, text_log: Log) -> None:
    record = logging.LogRecord("ranvier_py.test", logging.INFO, "", 0, "ready", None, None)
    record.created = seconds
    text_log.logger.handle(record)
    assert text_log.text == f"{stamp} info    ranvier_py.test ready\n"


def test_a_request_is_one_object_of_json(json_log: Log) -> None:
    json_log.handler.request(SUMMARY)
    event = json.loads(json_log.text)
    assert (event["event"], event["level"], event["reason"], event["first_byte_ms"]) == (
        "request",
        "info",
        "holder",
        12.346,
    )
    assert json_log.text.count("\n") == 1


def test_a_field_of_several_named_parts_is_one_text_in_json(json_log: Log) -> None:
    json_log.logger.warning(event("backends.source_failing", source=SourceName("dns", "a:1"), why="x"))
    assert json.loads(json_log.text)["source"] == "dns a:1"


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(("level", "is_logged"), [("debug", True), ("info", True), ("warning", False)])
def test_requests_are_logged_at_info(level: str, is_logged: bool) -> None:
    set_up_logs(level, "text")
    assert (request_line() is not None) is is_logged


def test_a_summary_has_no_room_for_headers_or_bodies() -> None:
    """What can't be passed in can't be logged. Whoever adds a field decides it here again."""
    kinds = RequestSummary.__annotations__
    texts = {name for name, kind in kinds.items() if kind.__forward_arg__ == "str"}
    routed = {"backend", "policy", "reason", "source", "asked", "model", "key_id", "tenant", "client"}
    routed |= {"trace_id", "span_id"}
    assert texts == {"id", "method", "path", "outcome", "error"} | routed
    others = ("int", "float", "bool", "int | None", "Sequence[FailedTry]")
    assert all(kind.__forward_arg__ in ("str", *others) for kind in kinds.values())


def test_secrets_of_a_configuration_that_was_read_again_are_blacked_out_with_those_of_before() -> None:
    log = Log("text", ("first-secret",))
    try:
        log.handler.change("json", ("second-secret",))
        log.logger.warning("first-secret second-secret")
        assert json.loads(log.text)["message"] == "*** ***"
    finally:
        log.close()


def test_secrets_that_a_source_brings_are_blacked_out_from_then_on_and_after_a_reload() -> None:
    log = Log("text", ("first-secret",))
    try:
        log.handler.mask(["of-a-source"])
        log.logger.warning("first-secret of-a-source")
        log.handler.change("text", ())
        log.logger.warning("of-a-source")
        assert "first-secret" not in log.text
        assert "of-a-source" not in log.text
        assert log.text.count("***") == 3
    finally:
        log.close()


def test_secrets_are_blacked_out_whoever_logs_them(log: Log) -> None:
    log.logger.error("refused %s", SECRET)
    log.logger.error("sent Authorization: Bearer sk-abc.def and BEARER sk-abc.def")
    log.logger.error(event("config.note", note=f"{SECRET} bearer sk-abc.def"))
    try:
        raise ValueError(f"bad key {SECRET}")
    except ValueError:
        log.logger.exception("failed")
    assert SECRET not in log.text
    assert json.dumps(SECRET)[1:-1] not in log.text
    assert "sk-abc" not in log.text
    assert log.text.count("***") == 6
    assert "ValueError" in log.text


def test_a_traceback_stays_inside_its_json_line(json_log: Log) -> None:
    log = json_log
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.logger.exception("failed")
    assert log.text.count("\n") == 1
    assert "first\nsecond" in json.loads(log.text)["traceback"]


def deep(levels: int) -> None:
    if levels == 0:
        raise ValueError("at the bottom")
    (deep if levels % 2 else deeper)(levels - 1)


def deeper(levels: int) -> None:
    deep(levels)


def test_a_bug_leaves_its_traceback_once_in_a_while_however_often_it_is_met(text_log: Log) -> None:
    log = text_log
    for number in range(50):
        try:
            deep(600 if number == 0 else 3)
        except ValueError:
            log.logger.exception("request %d failed: 100 %%", number)
    try:
        raise KeyError("another bug")
    except KeyError:
        log.logger.exception("failed")
    assert log.text.count("Traceback (most recent call last)") == 2
    assert log.text.count("failed: 100 %") == 50
    assert "at the bottom" in log.text
    assert len(log.text) < TRACEBACK_CHARACTERS_MAX + 10_000


@given(st.text(), st.text())
def test_nothing_from_outside_can_forge_a_line(path: str, message: str) -> None:
    """Request ids and paths come from clients."""
    for form in ("text", "json"):
        log = Log(form)
        path = path.encode("utf-8", "replace").decode()
        log.handler.request(RequestSummary(path, "GET", path, 400, "bad_request"))
        log.logger.warning("%s", message.encode("utf-8", "replace").decode())
        text = log.text
        log.close()
        assert len(text.split("\n")) == 3
        assert not any(character < " " for character in text.replace("\n", ""))
        assert form == "json" or text.replace("\n", "").isprintable()


def test_long_values_are_cut(log: Log) -> None:
    log.handler.request(RequestSummary("id", "GET", "/" + "x" * 100_000, 404, "not_found"))
    assert 300 < len(log.text) < 1000


def test_a_log_call_with_the_wrong_arguments_is_a_line_and_no_error(log: Log) -> None:
    log.logger.error("%d of %d", "three")  # noqa: PLE1206
    assert "%d of %d" in log.text


def test_a_line_that_can_not_be_made_loses_no_other(text_log: Log) -> None:
    text_log.handler.put(lambda: str(1 // 0), 0)
    text_log.logger.info("the next")
    assert "ZeroDivisionError in a line of the log\n" in text_log.text
    assert text_log.text.endswith("the next\n")


def test_a_stream_that_is_gone_loses_lines_and_nothing_else(text_log: Log) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = LineHandler(writer, "text")
    handler.request(SUMMARY)
    handler.flush()
    assert (handler.statistics().lines, handler.statistics().lost) == (0, 1)
    handler.close()
    os.close(writer)


@pytest.mark.usefixtures("restored_logging")
def test_a_process_without_a_stderr_logs_nowhere_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    set_up_logs("info", "text")
    report = request_line()
    assert report is not None
    report(SUMMARY)
    logging.getLogger().handlers[-1].flush()
    assert log_counters().lost == 1


class StalledPipe:
    """A pipe that is full, with a reader that reads when it is asked to."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.filled = 0
        with suppress(BlockingIOError):
            while True:
                self.filled += os.write(self.writer, b"\n" * 4096)
        os.set_blocking(self.writer, True)
        self.text = ""

    def read(self, until: str) -> str:
        """All that comes until this has come."""
        while until not in self.text:
            self.text += os.read(self.reader, 1 << 16).decode()
        return self.text.lstrip("\n")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def stalled() -> Iterator[StalledPipe]:
    pipe = StalledPipe()
    yield pipe
    pipe.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stalls_costs_lines_and_learns_how_many(stalled: StalledPipe, blocking: bool) -> None:
    os.set_blocking(stalled.writer, blocking)
    handler = LineHandler(stalled.writer, "text")
    asked = 0
    while handler.statistics().dropped < 10:
        handler.request(SUMMARY)
        asked += 1
    assert handler.statistics().waiting_bytes <= QUEUE_BYTES_MAX
    handler.put(lambda: "the last", -ENTRY_BYTES)
    stalled.read("the last")
    text = stalled.read("was too slow")  # before the last, or behind it
    assert text.count(" request id=") == asked - 10
    assert text.count(" logs.dropped 10 lines: ") == 1
    handler.flush()
    assert handler.statistics() == LogCounters(lines=asked - 10 + 2, dropped=10)
    handler.close()


def test_the_path_of_a_request_counts_among_what_waits(stalled: StalledPipe) -> None:
    """Or a client would fill our memory with paths while nobody reads the log."""
    handler = LineHandler(stalled.writer, "text")
    for _ in range(100):
        handler.request(SUMMARY._replace(path="/" * (1 << 16)))
    assert handler.statistics().dropped > 100 - QUEUE_BYTES_MAX // (1 << 16)
    stalled.read("logs.dropped")
    handler.flush()
    handler.close()


def test_flushing_to_a_reader_that_stalls_ends_all_the_same(
    stalled: StalledPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranvier_py.io.logs.LAST_WRITE_S", 0.01)
    handler = LineHandler(stalled.writer, "text")
    handler.request(SUMMARY)
    handler.flush()
    assert handler.statistics().waiting_bytes > 0
    stalled.read(" request id=")
    handler.flush()
    handler.close()


def test_lines_of_several_processes_in_one_pipe_do_not_mix() -> None:
    """Each write is whole lines, and short enough to be taken in one piece."""
    reader, writer = os.pipe2(os.O_DIRECT)  # each write is a packet of its own
    handler = LineHandler(writer, "text")
    for number in range(100):
        handler.request(SUMMARY._replace(id=f"n{number}"))
    handler.flush()
    packets = []
    while sum(packet.count(b"\n") for packet in packets) < 100:
        packets.append(os.read(reader, 1 << 16))
    assert all(packet.endswith(b"\n") for packet in packets)
    assert len(packets) < 20
    handler.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("restored_logging")
def test_setting_up_twice_writes_each_line_once(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in ("first", "second"))
    set_up_logs("debug", "text", descriptor=first)
    set_up_logs("info", "json", descriptor=second)
    logging.getLogger("ranvier_py.node.node").debug("too fine")
    logging.getLogger("ranvier_py.node.node").info("ready")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    logging.getLogger().handlers[-1].flush()
    assert (tmp_path / "first").read_text() == ""
    lines = (tmp_path / "second").read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["ready", "trouble"]
    os.close(first)
    os.close(second)


PROCESS = """
import os, sys, warnings
from ranvier_py.io.logs import announce, last_words, own_log, set_up_logs

set_up_logs("info", "text")
own_log.info("before the fork")
if os.fork() == 0:
    own_log.info("from the child")
    sys.exit(0)
os.wait()

class Odd:
    def __del__(self):
        raise ValueError("in a finalizer")

Odd()
warnings.warn("take care", RuntimeWarning)
announce("here I am")
last_words("that was all")
"""


def run_process(program: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(
        [sys.executable, "-c", program], cwd=root, text=True, timeout=DEADLINE_S, check=False, **streams
    )


def test_a_process_writes_all_its_lines_once_also_after_a_fork_and_its_last_words_last() -> None:
    done = run_process(PROCESS)
    assert (done.returncode, done.stdout) == (0, "here I am\n")
    for once in ("before the fork", "from the child", "ValueError: in a finalizer", "RuntimeWarning: take care"):
        assert done.stderr.count(once) == 1
    assert done.stderr.endswith("\nthat was all\n")


SOON = "from ranvier_py.io import logs; logs.LAST_WRITE_S = 0.05\n"  # it is waited for up to three times


def test_a_process_ends_though_nobody_reads_what_it_writes(stalled: StalledPipe) -> None:
    assert run_process(SOON + PROCESS, stdout=stalled.writer, stderr=stalled.writer).returncode == 0


CRASH = """
import sys, types
from ranvier_py import cli

async def run(config, _, *, source):
    raise RuntimeError("a bug")

sys.modules["ranvier_py.node.run_node"] = types.SimpleNamespace(run=run)
sys.exit(cli.main(["serve"]))
"""


def test_a_crash_leaves_its_traceback() -> None:
    done = run_process(CRASH)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "RuntimeError: a bug" in done.stderr


def test_a_crash_ends_the_process_though_nobody_reads_its_traceback(stalled: StalledPipe) -> None:
    assert run_process(SOON + CRASH, stderr=stalled.writer).returncode == 1


@pytest.mark.slow
def test_a_node_whose_log_nobody_reads_serves_on_and_ends_at_its_signal(stalled: StalledPipe) -> None:
    with stub_engines(1) as engines:
        port, control = free_port(), free_port()
        flags = ("--tokenizer", "embedded", "--log-level", "info")
        command = serve_argv(f"127.0.0.1:{port}", f"127.0.0.1:{control}", engines, flags)
        with subprocess.Popen(command, stdout=stalled.writer, stderr=stalled.writer) as process:
            try:
                wait_for_answer(f"http://127.0.0.1:{control}/readyz")
                connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
                for number in range(2000):
                    chat = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
                    connection.request("POST", "/v1/chat/completions", json.dumps(chat))
                    answer = connection.getresponse()
                    assert answer.status == 200
                    answer.read()
                connection.close()
                with urllib.request.urlopen(f"http://127.0.0.1:{control}/metrics", timeout=DEADLINE_S) as page:
                    assert re.search(rb"ranvier_logs_waiting_bytes [1-9]", page.read())
                process.terminate()
                assert process.wait(DEADLINE_S) == 0
            finally:
                process.kill()
