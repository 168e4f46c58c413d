"""Logs: set up once, one line for each event, as text or as JSON (`text_event`, `json_event`).

Rule: lines go into a queue, and one thread per process formats and writes them, several at a time. Each request is
exactly one line (`request_line`), made from a RequestSummary. Values from outside can't forge a line: control
characters are escaped. Configured secrets, and what looks like a bearer key, are masked, whoever logged it. A reader
that stalls loses lines, which the log counts afterwards.
Invariant: nobody waits for the log, and no body, header value or key is in it (test_logs.py).
Bounds: QUEUE_BYTES_MAX may wait, at the end for LAST_WRITE_S; a bug's traceback is written once in LOG_INTERVAL_S.
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
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import orjson

from ranvier_py.core.log_events import LogEvent, event
from ranvier_py.core.log_limit import LogLimit
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.routing.summary import RequestSummary

TEXT_CHARACTERS_MAX = 300
"""Longer paths, ids and names are cut: a log does not store whatever a client sends."""

FIELD_CHARACTERS_MAX, FIELD_ITEMS_MAX = 4_000, 64
"""Of a field of one of our own events, whose words are ours but may quote a file."""

LEVEL_CHARACTERS = 7  # of all levels but one that ends the process: what follows stands in one column

TRACEBACK_CHARACTERS_MAX = 16_000  # of one that recurses, the first and the last frames

QUEUE_BYTES_MAX = 4 << 20  # some 8,000 lines of requests: a busy node's lines while the reader pauses for two seconds
ENTRY_BYTES = 512  # of a waiting line, besides its text
COLLECT_S = 0.02  # the thread collects lines for so long and writes them together; no reader notices the delay
FLUSH_LOOK_S = 0.001  # between two checks whether all lines are written
LAST_WRITE_S = 1.0  # a stalled reader must not delay the end of the process
WRITE_BYTES_MAX = select.PIPE_BUF  # so that lines of several processes in one pipe do not mix

BARE_WORD = re.compile(r"[!#-<>-~]+")  # printable ASCII but blank, quote and equals sign
BEARER = re.compile(r"(?i)(bearer\s+)[^\s\"',;]+")
BLACK = "***"

COMMON_WORDS_MAX = 512  # of a node's paths, engines, reasons and outcomes: half a megabyte at most

requests_log = logging.getLogger("ranvier_py.requests")
own_log = logging.getLogger(__name__)

COMMON_END, NUMBERS_END = (RequestSummary._fields.index(last) + 1 for last in ("source", "sent_bytes"))
COMMON_FIELDS, NUMBERS = RequestSummary._fields[1:COMMON_END], RequestSummary._fields[COMMON_END:NUMBERS_END]
REQUEST_TEXT = f" {'info':{LEVEL_CHARACTERS}} {requests_log.name} request id=%s %s " + " ".join(
    f"{name}=%s" for name in NUMBERS
)
WHO, MODELS, TRACE = ("key_id", "tenant"), ("asked", "model"), ("trace_id", "span_id")


@dataclass(slots=True)
class LogCounters:
    """Lines since the start. Threads that log count `dropped`, the writing thread the others."""

    lines: int = counter("Log lines written to the log's stream.")
    dropped: int = counter("Log lines that found the queue full: whoever reads them stalls.")
    lost: int = counter("Log lines that the log's stream did not take.")
    waiting_bytes: int = gauge("Log lines that wait to be written, in bytes.")


def set_up_logs(level: str, form: str, *, secrets: Sequence[str] = (), descriptor: int | None = None) -> None:
    """Write all logs of this process to one descriptor, stderr by default. A further call replaces the set-up before.

    Args:
        level: debug, info, warning or error, for our own loggers; all others log nothing below warning.
        form: "text" or "json".
        secrets: texts that must never appear.
    """
    logging.raiseExceptions = False  # a full disk or closed pipe is not a reason to print tracebacks
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # not in our lines
    logging.captureWarnings(True)  # Python would write them at once, and wait for the reader
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
    """Change logs that were set up already, from the next line on, with the same descriptor and counters.

    Without a set-up this does nothing. `secrets` must not appear from now on, nor those of the set-up before.
    """
    for handler in line_handlers():
        handler.change(form, secrets)
        set_levels(level)


def mask_in_logs(secrets: Iterable[str]) -> None:
    """Mask these as well from now on, until the logs have changed twice."""
    for handler in line_handlers():
        handler.mask(secrets)


def set_levels(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(number, logging.WARNING))
    logging.getLogger("ranvier_py").setLevel(number)


def line_handlers() -> list[LineHandler]:
    """Return the handler of `set_up_logs`, if there is one."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]


def name_lines(node: str, worker: int) -> None:
    """Have lines of JSON name this node and its worker from now on."""
    for handler in line_handlers():
        handler.name_lines(f'","worker":{worker:d},"node":{orjson.dumps(node).decode()[:-1]}')


def forked() -> None:
    """Leave to the parent of this process what waits there."""
    for handler in line_handlers():
        handler.begin()


os.register_at_fork(after_in_child=forked)


def request_line() -> Callable[[RequestSummary], object] | None:
    """Return the function that logs a request as one line; None without a set-up, or if info is not logged."""
    if not requests_log.isEnabledFor(logging.INFO):
        return None
    return next((handler.request for handler in line_handlers()), None)


def log_counters() -> LogCounters:
    """Return this process's counters; zeros without a set-up."""
    return next((handler.statistics() for handler in line_handlers()), LogCounters())


def last_words(text: str) -> None:
    """Write to stderr, after all logged lines, why this process ends: plain text, or a line of JSON where all lines are
    that. Waits LAST_WRITE_S at most."""
    for handler in line_handlers():
        handler.put(partial(handler.spoken, logging.ERROR, text, event("node.ended", why=text)), len(text))
        handler.flush()
        return
    print(text, file=sys.stderr)


def announce(text: str) -> None:
    """Print a line on stdout, in the form of `last_words`, without waiting for whoever reads it."""
    line = next(
        (handler.spoken(logging.INFO, text, event("node.announced", words=text)) for handler in line_handlers()), text
    )
    Thread(target=write_all, args=(1, f"{line}\n".encode()), name="stdout", daemon=True).start()


def spellings(secrets: Iterable[str]) -> set[str]:
    """Return secrets as lines of either form may have them."""
    return {spelling for secret in secrets if secret for spelling in (secret, json.dumps(secret)[1:-1])}


class LineHandler(logging.Handler):
    """Queues each record to be written as one line with secrets masked. `emit` never waits and never raises.

    Each process starts its thread with its first line. A fork takes along neither the thread nor waiting lines, which
    the parent writes (`forked`).
    """

    def __init__(self, descriptor: int | None, form: str, secrets: Sequence[str] = ()) -> None:
        """`descriptor` is None if the process was started without stderr."""
        super().__init__()
        self._descriptor = descriptor
        self._form = TEXT
        self._latest_secrets: set[str] = set()
        self.change(form, secrets)
        self._log_limit = LogLimit()
        self._second = (-1, "")  # of the last line, and how it is spelled
        self.begin()

    def change(self, form: str, secrets: Sequence[str]) -> None:
        """Use this form from now on, and mask these secrets and those of the call before."""
        self._form = (JSON if form == "json" else TEXT)._replace(place=self._form.place)
        spelled = spellings(secrets)
        self._secrets = sorted(spelled | self._latest_secrets, key=len, reverse=True)  # old ones may still be logged
        self._latest_secrets = spelled

    def mask(self, secrets: Iterable[str]) -> None:
        self._latest_secrets |= spellings(secrets)
        self._secrets = sorted({*self._secrets, *self._latest_secrets}, key=len, reverse=True)

    def name_lines(self, place: str) -> None:
        """Have lines of JSON begin so, behind their time."""
        self._form = self._form._replace(place=place)

    def begin(self) -> None:
        """Begin with an empty queue and no thread."""
        self._has_thread = False
        self._queue: SimpleQueue[tuple[Callable[[], str], int]] = SimpleQueue()
        self._counters = LogCounters()
        self._queued_bytes = self._written_bytes = 0  # each has one writer: threads that log, and the writing thread
        self._dropped_before = 0  # as the last line about dropped lines had it
        self._hurried = Event()
        self._closed = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.levelno < logging.CRITICAL:
            record = self._limited(record)
        rest = self._event(record)  # now, because the arguments may change later
        self.put(partial(self._stamped, record.created, rest), len(rest))

    def _limited(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record, without its traceback if one of the same bug was logged within LOG_INTERVAL_S."""
        more = self._log_limit.more(place_of(record), time.monotonic())
        if more == 0:
            return record
        limited = copy(record)
        if more is None:
            limited.exc_info = limited.exc_text = None
        else:
            found = event_of(record)
            limited.msg, limited.args = LogEvent(found.name, {**found.fields, "more": more}), ()
        return limited

    def request(self, summary: RequestSummary) -> None:
        """Queue a request's line, without `logging`, whose records would take most of the time."""
        self.put(partial(self._request, time.time(), summary), len(summary.path))

    def put(self, make: Callable[[], str], size: int) -> None:
        """Queue a line of about this many bytes; the writing thread calls `make` for its text."""
        if not self._has_thread:
            self._has_thread = True
            with suppress(RuntimeError):  # no more threads: lines wait until they are dropped
                start_without_signals(Thread(target=self._run, name="logs", daemon=True))
        size += ENTRY_BYTES
        if self._queued_bytes - self._written_bytes + size > QUEUE_BYTES_MAX:
            self._counters.dropped += 1
            return
        self._queued_bytes += size
        self._queue.put((make, size))

    def spoken(self, level: int, text: str, found: LogEvent) -> str:
        """Return what is for people: as it is, or as a line of JSON."""
        if not self._form.head:
            return text
        return self._stamped(time.time(), self._event(logging.LogRecord("ranvier", level, "", 0, found, None, None)))

    def flush(self) -> None:
        """Wait until all lines so far are written, for at most LAST_WRITE_S."""
        until = time.monotonic() + LAST_WRITE_S
        self._hurried.set()
        while self._has_thread and self._written_bytes < self._queued_bytes and time.monotonic() < until:
            time.sleep(FLUSH_LOOK_S)

    def close(self) -> None:
        """Let the thread end once it has written the waiting lines."""
        self._closed = True
        self._queue.put((str, 0))
        super().close()

    def statistics(self) -> LogCounters:
        """Return the counters, with the gauge up to date."""
        self._counters.waiting_bytes = self._queued_bytes - self._written_bytes
        return self._counters

    def _run(self) -> None:
        while not (self._closed and self._queue.empty()):
            entries = [self._queue.get()]
            self._hurried.wait(COLLECT_S)
            self._hurried.clear()
            entries += [self._queue.get() for _ in range(self._queue.qsize())]
            self._write_lines(make for make, _ in entries)
            self._written_bytes += sum([size for _, size in entries])

    def _write_lines(self, makes: Iterable[Callable[[], str]]) -> None:
        """Write whole lines, as many at a time as fit in one atomic write."""
        piece, count = b"", 0
        for line in map(self._made, makes):
            if len(piece) + len(line) > WRITE_BYTES_MAX:
                self._write(piece, count)
                piece, count = b"", 0
            piece += line
            count += bool(line)
        dropped = self._counters.dropped
        if self._write(piece, count) and dropped > self._dropped_before:
            found = event("logs.dropped", lines=dropped - self._dropped_before)
            record = logging.LogRecord(__name__, logging.WARNING, "", 0, found, None, None)
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
        except Exception as error:  # a bug in one line loses no other
            line = f"{type(error).__name__} in a line of the log"
        return f"{self._masked(line)}\n".encode(errors="backslashreplace") if line else b""

    def _request(self, seconds: float, summary: RequestSummary) -> str:
        return self._stamped(seconds, self._form.request(summary))

    def _event(self, record: logging.LogRecord) -> str:
        try:
            return self._form.event(record)
        except Exception:  # arguments that do not fit the message: log the message without them
            plain = logging.LogRecord(record.name, record.levelno, "", 0, str(record.msg), None, record.exc_info)
            return self._form.event(plain)

    def _stamped(self, seconds: float, rest: str) -> str:
        """Put the time before a line: UTC with milliseconds. Its part down to the second is cached for that second."""
        second = int(seconds)
        if second != self._second[0]:
            self._second = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        place = self._form.place if self._form.head else ""
        return f"{self._form.head}{self._second[1]}.{int((seconds - second) * 1000):03}Z{place}{rest}"

    def _masked(self, line: str) -> str:
        for secret in self._secrets:
            if secret in line:
                line = line.replace(secret, BLACK)
        return BEARER.sub(rf"\1{BLACK}", line) if "earer " in line or "EARER " in line else line


def text_event(record: logging.LogRecord) -> str:
    line = f" {record.levelname.lower():{LEVEL_CHARACTERS}} {record.name} {escaped(record.getMessage())}"
    return f"{line}\n{traceback_text(record)}" if record.exc_info else line


def text_request(summary: RequestSummary) -> str:
    common = summary[1:COMMON_END]
    words = common_words(*common) if len(summary.path) <= TEXT_CHARACTERS_MAX else common_words.__wrapped__(*common)
    line = REQUEST_TEXT % (text_value(summary.id), words, *summary[COMMON_END:NUMBERS_END])
    names = [*(WHO if summary.tenant else ()), *(MODELS if summary.asked else ()), *(TRACE if summary.trace_id else ())]
    names += ("error",) if summary.error else ()
    return " ".join([line, *(f"{name}={text_value(getattr(summary, name))}" for name in names)])


@lru_cache(COMMON_WORDS_MAX)
def common_words(*values: object) -> str:
    """Return what many lines have in common: from the method to what the decision rests on."""
    return " ".join([f"{name}={text_value(value)}" for name, value in zip(COMMON_FIELDS, values, strict=True)])


def json_event(record: logging.LogRecord) -> str:
    found = event_of(record)
    line: dict[str, Any] = {"level": record.levelname.lower(), "logger": record.name, "event": found.name}
    line.update(
        (name, within(value)) for name, value in found.fields.items() if value not in (None, "", 0) or name != "more"
    )
    if record.exc_info:
        line["traceback"] = traceback_text(record)
    return json_rest(line)


def event_of(record: logging.LogRecord) -> LogEvent:
    """Return what is logged as an event: libraries log sentences."""
    return record.msg if isinstance(record.msg, LogEvent) else event("library.logged", message=record.getMessage())


def within(value: object) -> object:
    """Return a field's value, cut if it is longer than a log should keep."""
    if isinstance(value, str):
        return cut(value, FIELD_CHARACTERS_MAX)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # one with names has a text
        return [within(each) for each in value[:FIELD_ITEMS_MAX]]
    return value


def json_request(summary: RequestSummary) -> str:
    kept = {name: cut(value) if type(value) is str else value for name, value in summary._asdict().items()}
    kept["failed_tries"] = [each._asdict() for each in summary.failed_tries]
    return json_rest({"level": "info", "logger": requests_log.name, "event": "request", **kept})


def json_rest(event: Mapping[str, Any]) -> str:
    """Return the rest of a JSON object whose first member, the time, is already written up to its closing quote."""
    return f'",{orjson.dumps(event, default=str)[1:].decode()}'


class Form(NamedTuple):
    """How lines are written: the text before the time, and the functions that make the text after it."""

    head: str
    event: Callable[[logging.LogRecord], str]
    request: Callable[[RequestSummary], str]
    place: str = ""  # in JSON: which node of a cluster, and which of its workers


TEXT = Form("", text_event, text_request)
JSON = Form('{"time":"', json_event, json_request)


def traceback_text(record: logging.LogRecord) -> str:
    assert record.exc_info
    text = logging.Formatter().formatException(record.exc_info)
    if len(text) <= TRACEBACK_CHARACTERS_MAX:
        return text
    half = TRACEBACK_CHARACTERS_MAX // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def place_of(record: logging.LogRecord) -> str:
    """Return where an exception was logged and where it was raised: there are as many as lines of the program."""
    assert record.exc_info
    kind, _, traceback = record.exc_info
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}" if traceback is not None else ""
    return f"{record.pathname}:{record.lineno} {kind.__name__ if kind else ''} {raised}"


def text_value(value: object) -> str:
    """Return a value as one word that reads back: bare if it can be, else quoted as JSON."""
    if not isinstance(value, str):
        return str(value)
    return value if len(value) <= TEXT_CHARACTERS_MAX and BARE_WORD.fullmatch(value) else json.dumps(cut(value))


def cut(text: str, most: int = TEXT_CHARACTERS_MAX) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def escaped(text: str) -> str:
    """Escape line breaks and other control characters."""
    return text if text.isprintable() else json.dumps(text)[1:-1]


def write_all(descriptor: int, data: bytes) -> bool:
    """Write all of `data`, waiting for the file's reader. Returns whether it took all."""
    left = memoryview(data)
    with suppress(OSError):  # closed, full or gone
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # another process that shares the file has made it non-blocking
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()
    return not left


def start_without_signals(thread: Thread) -> None:
    """Start a thread that receives no signals: they are for the main thread, which may block and wait for them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def log_unraisable(failure: sys.UnraisableHookArgs) -> None:
    """Log an exception that nobody can catch, as in a finalizer; Python would print it and wait for the reader."""
    own_log.error(event("python.unraisable", what=failure.err_msg or "exception ignored"), exc_info=failure.exc_value)
