"""Logs: set up once, one line for each event, as text or as JSON.

    2026-11-21T05:50:16.123Z info ranvier_py.requests request id=4f1c method=POST path=/v1/chat/completions status=200 …
    {"time":"2026-11-21T05:50:16.123Z","level":"info","logger":"ranvier_py.requests","event":"request","id":"4f1c",…}

Rules: each request is exactly one line (`request_line`), made from a RequestSummary, which has no room for headers or
bodies. Values from outside can't forge a line: control characters are escaped. The configured secrets and anything that
looks like a bearer key are blacked out on the way to the stream, whoever logged them. A stream that can't be written to
loses lines and never a request.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

import orjson

from ranvier_py.core.routing.summary import RequestSummary

TEXT_CHARACTERS_MAX = 300
"""Paths, ids and names longer than this are cut: a log line is not a store for what a client sends."""

BARE_WORD = re.compile(r"[!#-<>-~]+")  # printable ASCII but blank, quote and equals sign
BEARER = re.compile(r"(?i)(bearer\s+)[^\s\"',;]+")
BLACK = "***"

SUMMARY_FIELDS = tuple(field.name for field in fields(RequestSummary))

requests_log = logging.getLogger("ranvier_py.requests")


def set_up_logs(level: str, form: str, *, secrets: Sequence[str] = (), stream: TextIO | None = None) -> None:
    """Send all logs of this process to one stream, stderr by default. Calling again replaces the earlier set-up.

    Args:
        level: debug, info, warning or error, for our own loggers; other libraries speak from warning on.
        form: "text" or "json".
        secrets: texts that must never appear.
    """
    logging.raiseExceptions = False  # a full disk or closed pipe is not a reason to print tracebacks
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # not in our lines
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, LineHandler):
            root.removeHandler(handler)
    root.addHandler(LineHandler(stream or sys.stderr, form, secrets))
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("ranvier_py").setLevel(number)


def request_line(summary: RequestSummary, log: logging.Logger = requests_log) -> None:
    """Log the one line of a request, at info."""
    if log.isEnabledFor(logging.INFO):
        record = logging.LogRecord(
            log.name, logging.INFO, "", 0, "request", None, None
        )  # no walk for the caller's line
        record.fields = {name: getattr(summary, name) for name in SUMMARY_FIELDS}
        log.handle(record)


class LineHandler(logging.Handler):
    """Writes each record as one line, with secrets blacked out."""

    def __init__(self, stream: TextIO | None, form: str, secrets: Sequence[str] = ()) -> None:
        """`stream` is None where the process was started without one."""
        super().__init__()
        self.stream = stream
        self.lines_lost = 0
        self._line: Callable[[logging.LogRecord, str], str] = json_line if form == "json" else text_line
        self._second, self._stamp = -1, ""
        spelled = {spelling for secret in secrets if secret for spelling in (secret, json.dumps(secret)[1:-1])}
        self._secrets = sorted(spelled, key=len, reverse=True)

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            self.lines_lost += 1
            return
        try:
            self.stream.write(self.masked(self._line(record, self.timestamp(record.created))) + "\n")
            self.stream.flush()
        except (OSError, ValueError):  # closed, full or gone
            self.lines_lost += 1

    def timestamp(self, seconds: float) -> str:
        """UTC with milliseconds. The part down to the second is made once for all lines of that second."""
        second = int(seconds)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._stamp}.{int((seconds - second) * 1000):03}Z"

    def masked(self, line: str) -> str:
        for secret in self._secrets:
            if secret in line:
                line = line.replace(secret, BLACK)
        return BEARER.sub(rf"\1{BLACK}", line) if "earer " in line or "EARER " in line else line


def text_line(record: logging.LogRecord, stamp: str) -> str:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    words = [stamp, record.levelname.lower(), record.name, escaped(record.getMessage())]
    words.extend(f"{name}={text_value(value)}" for name, value in fields.items())
    line = " ".join(words)
    return f"{line}\n{traceback_text(record)}" if record.exc_info else line


def json_line(record: logging.LogRecord, stamp: str) -> str:
    event: dict[str, Any] = {
        "time": stamp,
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    event.update((name, cut(value) if isinstance(value, str) else value) for name, value in fields.items())
    if record.exc_info:
        event["traceback"] = traceback_text(record)
    return orjson.dumps(event, default=str).decode()


def traceback_text(record: logging.LogRecord) -> str:
    assert record.exc_info
    return logging.Formatter().formatException(record.exc_info)


def text_value(value: object) -> str:
    """A value that reads back as one word: bare where it can be, else quoted as JSON."""
    if not isinstance(value, str):
        return str(value)
    return value if len(value) <= TEXT_CHARACTERS_MAX and BARE_WORD.fullmatch(value) else json.dumps(cut(value))


def cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"


def escaped(text: str) -> str:
    """Without line breaks and other control characters."""
    return text if text.isprintable() else json.dumps(text)[1:-1]
