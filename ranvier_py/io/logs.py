"""Logs: set up once, one line for each event, as text or as JSON.

    2026-11-21T05:50:16.123Z info ranvier_py.requests request id=4f1c method=POST path=/v1/chat/completions status=200 …
    {"time":"2026-11-21T05:50:16.123Z","level":"info","logger":"ranvier_py.requests","event":"request","id":"4f1c",…}

Who logs waits for nobody: a line goes into a queue, and one thread of each process writes it, several at a time. A
request's line is made there, too.

Rules: each request is exactly one line (`request_line`), made from a RequestSummary, which has no room for headers or
bodies. Values from outside can't forge a line: control characters are escaped. The configured secrets and anything that
looks like a bearer key are blacked out on the way out, whoever logged them. A reader that stalls, and a stream that
can't be written to, lose lines and never a request; the next line that is written says how many.
Bounds: QUEUE_BYTES_MAX wait. At the end they are written for LAST_WRITE_S at most.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.routing.summary import RequestSummary

TEXT_CHARACTERS_MAX = 300
"""Paths, ids and names longer than this are cut: a log line is not a store for what a client sends."""

QUEUE_BYTES_MAX = 4 << 20  # some 8,000 lines of requests: two seconds of a busy node, while whoever reads catches up
ENTRY_BYTES = 512  # what a waiting line takes beside its text
COLLECT_S = 0.02  # lines of so long leave together; whoever follows a log does not see the difference
FLUSH_LOOK_S = 0.001  # between two looks whether all is written
LAST_WRITE_S = 1.0  # a stalled reader must not hold up the end of the process
WRITE_BYTES_MAX = select.PIPE_BUF  # so that lines of several processes in one pipe do not mix

BARE_WORD = re.compile(r"[!#-<>-~]+")  # printable ASCII but blank, quote and equals sign
BARE_WORDS = re.compile(rf"(?:[!#-<>-~]{{1,{TEXT_CHARACTERS_MAX}}}(?:\n|$))+")  # one in each line, none too long
BEARER = re.compile(r"(?i)(bearer\s+)[^\s\"',;]+")
BLACK = "***"

requests_log = logging.getLogger("ranvier_py.requests")
own_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LogCounters:
    """Lines since the start. `dropped` is counted where they are logged, the others by the writing thread."""

    lines: int = counter("Log lines written.")
    dropped: int = counter("Log lines that found the queue full: whoever reads them stalls.")
    lost: int = counter("Log lines that the stream did not take.")
    waiting_bytes: int = gauge("Log lines that wait to be written, in bytes.")


def set_up_logs(level: str, form: str, *, secrets: Sequence[str] = (), descriptor: int | None = None) -> None:
    """Send all logs of this process to one file, stderr by default. Calling again replaces the earlier set-up.

    Args:
        level: debug, info, warning or error, for our own loggers; other libraries speak from warning on.
        form: "text" or "json".
        secrets: texts that must never appear.
    """
    logging.raiseExceptions = False  # a full disk or closed pipe is not a reason to print tracebacks
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # not in our lines
    logging.captureWarnings(True)  # Python's own would be written at once, and wait for the reader
    sys.unraisablehook = log_unraisable
    root = logging.getLogger()
    for handler in line_handlers():
        root.removeHandler(handler)
        handler.close()
    if descriptor is None and sys.stderr is not None:
        descriptor = sys.stderr.fileno()
    root.addHandler(LineHandler(descriptor, form, secrets))
    set_levels(level)


def change_logs(level: str, form: str, secrets: Sequence[str]) -> None:
    """The same for logs that were set up already: from the next line on, with the same descriptor and counters.

    Nothing where they were not. `secrets` are texts that must not appear from now on, beside those of the time before.
    """
    for handler in line_handlers():
        handler.change(form, secrets)
        set_levels(level)


def set_levels(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(number, logging.WARNING))
    logging.getLogger("ranvier_py").setLevel(number)


def line_handlers() -> list[LineHandler]:
    """What `set_up_logs` set up: one or none."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]


def request_line() -> Callable[[RequestSummary], object] | None:
    """What logs a request, at info and as one line; None where nothing was set up, or only worse is logged."""
    if not requests_log.isEnabledFor(logging.INFO):
        return None
    return next((handler.request for handler in line_handlers()), None)


def log_counters() -> LogCounters:
    """Of this process. Zeros where nothing was set up."""
    return next((handler.statistics() for handler in line_handlers()), LogCounters())


def last_words(text: str) -> None:
    """Why this process ends, plainly on stderr, after all that was logged. Waits for the reader no longer than that."""
    for handler in line_handlers():
        handler.put(lambda: text, len(text))
        handler.flush()
        return
    print(text, file=sys.stderr)


def announce(text: str) -> None:
    """Print a line on stdout without waiting for whoever reads it."""
    Thread(target=write_all, args=(1, f"{text}\n".encode()), name="stdout", daemon=True).start()


class LineHandler(logging.Handler):
    """Has each record written as one line, with secrets blacked out. `emit` never waits and never raises.

    The thread is begun with the first line of each process, so a fork takes along neither a thread nor lines: those are
    the parent's to write.
    """

    def __init__(self, descriptor: int | None, form: str, secrets: Sequence[str] = ()) -> None:
        """`descriptor` is None where the process was started without one."""
        super().__init__()
        self._descriptor = descriptor
        self._latest_secrets: set[str] = set()
        self.change(form, secrets)
        self._second, self._stamp = -1, ""
        self._begin(0)

    def change(self, form: str, secrets: Sequence[str]) -> None:
        """Write so from now on, and black out these secrets, too."""
        self._form = JSON if form == "json" else TEXT
        spelled = {spelling for secret in secrets if secret for spelling in (secret, json.dumps(secret)[1:-1])}
        self._secrets = sorted(spelled | self._latest_secrets, key=len, reverse=True)  # those of before may still come
        self._latest_secrets = spelled

    def _begin(self, process: int) -> None:
        self._process = process
        self._queue: SimpleQueue[tuple[Callable[[], str], int]] = SimpleQueue()
        self._counters = LogCounters()
        self._queued_bytes = self._written_bytes = 0  # one is counted by who logs, the other by the thread
        self._dropped_before = 0  # as the last line about it had it
        self._hurried = Event()
        self._closed = False

    # --- who logs ---------------------------------------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        rest = self._event(record)  # now: what the arguments are may change
        self.put(partial(self._stamped, record.created, rest), len(rest))

    def request(self, summary: RequestSummary) -> None:
        """The line of a request. Not through `logging`, whose records take longer than all else here."""
        self.put(partial(self._request, time.time(), summary), len(summary.path))

    def put(self, make: Callable[[], str], size: int) -> None:
        """Queue a line of about this many bytes, which is made when it is written."""
        if self._process != os.getpid():
            self._begin(os.getpid())
            with suppress(RuntimeError):  # no more threads: lines wait until they are dropped
                start_without_signals(Thread(target=self._run, name="logs", daemon=True))
        size += ENTRY_BYTES
        if self._queued_bytes - self._written_bytes + size > QUEUE_BYTES_MAX:
            self._counters.dropped += 1
            return
        self._queued_bytes += size
        self._queue.put((make, size))

    def flush(self) -> None:
        """Wait until all that was logged is written, for LAST_WRITE_S at most."""
        until = time.monotonic() + LAST_WRITE_S
        self._hurried.set()
        while self._process == os.getpid() and self._written_bytes < self._queued_bytes and time.monotonic() < until:
            time.sleep(FLUSH_LOOK_S)

    def close(self) -> None:
        """Have the thread end when it has written what waits."""
        self._closed = True
        self._queue.put((str, 0))
        super().close()

    def statistics(self) -> LogCounters:
        """The counters, with the gauge as it is now."""
        self._counters.waiting_bytes = self._queued_bytes - self._written_bytes
        return self._counters

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._closed and self._queue.empty()):
            entries = [self._queue.get()]
            self._hurried.wait(COLLECT_S)
            self._hurried.clear()
            entries += [self._queue.get() for _ in range(self._queue.qsize())]
            self._write_lines(make for make, _ in entries)
            self._written_bytes += sum([size for _, size in entries])

    def _write_lines(self, makes: Iterable[Callable[[], str]]) -> None:
        """Write whole lines, as many at a time as one write takes in one piece."""
        piece, count = b"", 0
        for line in map(self._made, makes):
            if len(piece) + len(line) > WRITE_BYTES_MAX:
                self._write(piece, count)
                piece, count = b"", 0
            piece += line
            count += bool(line)
        dropped = self._counters.dropped
        if self._write(piece, count) and dropped > self._dropped_before:
            args = (dropped - self._dropped_before,)
            message = "logs.dropped %d lines: whoever reads them was too slow"
            record = logging.LogRecord(__name__, logging.WARNING, "", 0, message, args, None)
            self._write(self._made(partial(self._stamped, time.time(), self._event(record))), 1)
            self._dropped_before = dropped

    def _write(self, lines: bytes, count: int) -> bool:
        is_written = self._descriptor is not None and write_all(self._descriptor, lines)
        if is_written:
            self._counters.lines += count
        else:
            self._counters.lost += count
        return is_written

    def _made(self, make: Callable[[], str]) -> bytes:
        try:
            line = make()
        except Exception as error:  # a slip in making one line loses no other
            line = f"{type(error).__name__} in a line of the log"
        return f"{self._masked(line)}\n".encode(errors="backslashreplace") if line else b""

    def _request(self, seconds: float, summary: RequestSummary) -> str:
        return self._stamped(seconds, self._form.request(summary))

    def _event(self, record: logging.LogRecord) -> str:
        try:
            return self._form.event(record)
        except Exception:  # arguments that do not fit end no loop, and their line says as much as it can
            plain = logging.LogRecord(record.name, record.levelno, "", 0, str(record.msg), None, record.exc_info)
            return self._form.event(plain)

    def _stamped(self, seconds: float, rest: str) -> str:
        """UTC with milliseconds. The part down to the second is made once for all lines of that second."""
        second = int(seconds)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._form.head}{self._stamp}.{int((seconds - second) * 1000):03}Z{rest}"

    def _masked(self, line: str) -> str:
        for secret in self._secrets:
            if secret in line:
                line = line.replace(secret, BLACK)
        return BEARER.sub(rf"\1{BLACK}", line) if "earer " in line or "EARER " in line else line


# --- what a line looks like, after its time --------------------------------------------------------------------------


def text_event(record: logging.LogRecord) -> str:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    words = ["", record.levelname.lower(), record.name, escaped(record.getMessage())]
    words.extend(f"{name}={text_value(value)}" for name, value in fields.items())
    line = " ".join(words)
    return f"{line}\n{traceback_text(record)}" if record.exc_info else line


def text_request(summary: RequestSummary) -> str:
    *values, error = summary
    if BARE_WORDS.fullmatch("\n".join([value for value in values if type(value) is str])):
        line = REQUEST_TEXT % tuple(values)
    else:
        line = REQUEST_TEXT % tuple(map(text_value, values))
    return f"{line} error={text_value(error)}" if error else line


def json_event(record: logging.LogRecord) -> str:
    event: dict[str, Any] = {
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    event.update((name, cut(value) if isinstance(value, str) else value) for name, value in fields.items())
    if record.exc_info:
        event["traceback"] = traceback_text(record)
    return json_rest(event)


def json_request(summary: RequestSummary) -> str:
    kept = {name: cut(value) if type(value) is str else value for name, value in summary._asdict().items()}
    return json_rest({"level": "info", "logger": requests_log.name, "event": "request", **kept})


def json_rest(event: Mapping[str, Any]) -> str:
    """An object that goes on after its first member."""
    return f'",{orjson.dumps(event, default=str)[1:].decode()}'


class Form(NamedTuple):
    """How lines are written: what is before the time, and what makes the rest."""

    head: str
    event: Callable[[logging.LogRecord], str]
    request: Callable[[RequestSummary], str]


REQUEST_TEXT = f" info {requests_log.name} request " + " ".join(f"{name}=%s" for name in RequestSummary._fields[:-1])
TEXT = Form("", text_event, text_request)
JSON = Form('{"time":"', json_event, json_request)


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


# --- the world ------------------------------------------------------------------------------------------------------


def write_all(descriptor: int, data: bytes) -> bool:
    """Whether the file took it all. Waits for its reader."""
    left = memoryview(data)
    with suppress(OSError):  # closed, full or gone
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # somebody else who has the file wants no write to wait
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()
    return not left


def start_without_signals(thread: Thread) -> None:
    """Start a thread that takes no signal: they are for the main thread, which may wait for them blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def log_unraisable(failure: sys.UnraisableHookArgs) -> None:
    """What Python would print at once: an exception that nobody can catch, as in a finalizer."""
    own_log.error("python.unraisable %s", failure.err_msg or "exception ignored", exc_info=failure.exc_value)
