from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.io.logs import LineHandler, request_line, set_up_logs

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
    """A logger of its own, and what it wrote."""

    def __init__(self, form: str, secrets: tuple[str, ...] = ()) -> None:
        self.stream = io.StringIO()
        self.logger = logging.Logger("ranvier_py.test", logging.INFO)  # noqa: LOG001  # of this test alone
        self.logger.addHandler(LineHandler(self.stream, form, secrets))

    @property
    def text(self) -> str:
        return self.stream.getvalue()


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Log:
    return Log(request.param, (SECRET,))


def test_a_request_is_one_line_of_text() -> None:
    log = Log("text")
    request_line(SUMMARY, log.logger)
    stamp, _, rest = log.text.partition(" ")
    assert stamp.endswith("Z")
    assert rest == (
        "info ranvier_py.test request id=4f1c method=POST path=/v1/chat/completions status=200 outcome=success "
        "backend=10.0.0.1:8000 policy=affinity reason=holder source=text matched_tokens=1024 prompt_tokens=1100 "
        'tries=1 first_byte_ms=12.346 total_ms=1500.0 sent_bytes=20000 error=""\n'
    )


def test_a_line_begins_with_its_time_in_utc() -> None:
    handler = LineHandler(io.StringIO(), "text")
    assert handler.timestamp(0.0) == "1970-01-01T00:00:00.000Z"
    assert handler.timestamp(0.9996) == "1970-01-01T00:00:00.999Z"
    assert handler.timestamp(1_795_240_000.0625) == "2026-11-21T05:46:40.062Z"


def test_a_request_is_one_object_of_json() -> None:
    log = Log("json")
    request_line(SUMMARY, log.logger)
    event = json.loads(log.text)
    assert (event["event"], event["level"], event["reason"], event["first_byte_ms"]) == (
        "request",
        "info",
        "holder",
        12.346,
    )
    assert log.text.count("\n") == 1


def test_below_its_level_nothing_is_written() -> None:
    log = Log("text")
    log.logger.setLevel(logging.WARNING)
    request_line(SUMMARY, log.logger)
    assert log.text == ""


def test_a_summary_has_no_room_for_headers_or_bodies() -> None:
    """What can't be passed in can't be logged. Whoever adds a field decides it here again."""
    texts = {field.name for field in fields(RequestSummary) if field.type == "str"}
    assert texts == {"id", "method", "path", "outcome", "backend", "policy", "reason", "source", "error"}
    assert all(field.type in ("str", "int", "float") for field in fields(RequestSummary))


def test_secrets_are_blacked_out_whoever_logs_them(log: Log) -> None:
    log.logger.error("refused %s", SECRET)
    log.logger.error("sent Authorization: Bearer sk-abc.def and BEARER sk-abc.def")
    log.logger.error("fields", extra={"fields": {"given": SECRET, "header": "bearer sk-abc.def"}})
    try:
        raise ValueError(f"bad key {SECRET}")
    except ValueError:
        log.logger.exception("failed")
    assert SECRET not in log.text
    assert json.dumps(SECRET)[1:-1] not in log.text
    assert "sk-abc" not in log.text
    assert log.text.count("***") == 6
    assert "ValueError" in log.text


def test_a_traceback_stays_inside_its_json_line() -> None:
    log = Log("json")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.logger.exception("failed")
    assert log.text.count("\n") == 1
    assert "first\nsecond" in json.loads(log.text)["traceback"]


@given(st.text(), st.text())
def test_nothing_from_outside_can_forge_a_line(path: str, message: str) -> None:
    """Request ids and paths come from clients."""
    for form in ("text", "json"):
        log = Log(form)
        path = path.encode("utf-8", "replace").decode()
        request_line(RequestSummary(path, "GET", path, 400, "bad_request"), log.logger)
        log.logger.warning("%s", message.encode("utf-8", "replace").decode())
        assert len(log.text.split("\n")) == 3
        assert not any(character < " " for character in log.text.replace("\n", ""))
        assert form == "json" or log.text.replace("\n", "").isprintable()


def test_long_values_are_cut(log: Log) -> None:
    request_line(RequestSummary("id", "GET", "/" + "x" * 100_000, 404, "not_found"), log.logger)
    assert len(log.text) < 1000


def test_a_stream_that_is_gone_loses_lines_and_nothing_else() -> None:
    log = Log("text")
    log.stream.close()
    request_line(SUMMARY, log.logger)
    (handler,) = log.logger.handlers
    assert isinstance(handler, LineHandler)
    assert handler.lines_lost == 1


def test_a_process_without_a_stderr_logs_nowhere_and_goes_on(
    restored_logging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    set_up_logs("info", "text")
    request_line(SUMMARY)
    (handler,) = [each for each in logging.getLogger().handlers if isinstance(each, LineHandler)]
    assert handler.lines_lost > 0


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("ranvier_py")
    switches = {name: getattr(logging, name) for name in vars(logging) if name.startswith(("log", "raise"))}
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    for name, value in switches.items():
        setattr(logging, name, value)


@pytest.mark.usefixtures("restored_logging")
def test_setting_up_twice_writes_each_line_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logs("debug", "text", stream=first)
    set_up_logs("info", "json", stream=second)
    logging.getLogger("ranvier_py.node.node").debug("too fine")
    logging.getLogger("ranvier_py.node.node").info("ready")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    assert first.getvalue() == ""
    assert [json.loads(line)["event"] for line in second.getvalue().splitlines()] == ["ready", "trouble"]
