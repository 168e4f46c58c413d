"""Opens a trace file: recognizes its format by the first line (MARKS), loads it, and gives it arrival times if asked.

Gzipped files are recognized by their content, whatever their names. Arrivals are Azure's CSV, of which only the times
are used; the lengths must be numbers, since a file in which they are none is of another kind:

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ranvier_py.core.routing.request_record import MARK
from ranvier_py.replay.traces import chats, coding_sessions, mooncake, node_record, token_ids
from ranvier_py.replay.traces.lines import first_line, from_start, json_line, raw_lines, shown
from ranvier_py.replay.traces.trace import Format, Trace, TraceError, TraceOptions

LOADERS: dict[str, Callable[[Path, TraceOptions], Trace]] = {
    "mooncake": mooncake.load,
    "chats": chats.load,
    "token_ids": token_ids.load,
    "recording": node_record.load,
    "sessions": coding_sessions.load,
}
MARKS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("mooncake", ("hash_ids",)),
    ("chats", ("messages",)),
    ("chats", ("transcript", "queries")),
    ("token_ids", ("prompt_token_ids",)),
    ("token_ids", ("input_tok_ids",)),
    ("recording", (MARK,)),
    ("sessions", ("block_size", "requests")),
)
"""Formats in the order in which they are tried, each with the members that its first line must all have."""

ARRIVALS = b"TIMESTAMP,ContextTokens,GeneratedTokens"
EXPECTED = "a line like 2023-11-16 18:15:46.6805900,374,44"


def open_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """Return the requests of a file, in order of time. Raises TraceError."""
    options = options or TraceOptions()
    trace = LOADERS[options.format or format_of(path)](path, options)
    if options.arrivals is None:
        return trace
    if trace.timed and not options.arrivals_replace:
        raise TraceError(f"{path}: has times of its own; --arrivals-replace takes those of {options.arrivals}")
    return lend(trace, read_arrivals(options.arrivals))


def format_of(path: Path) -> str:
    """Return the format of a file, by its first line. Raises TraceError."""
    number, data = first_line(path)
    if data.strip() == ARRIVALS:
        raise TraceError(f"{path}: found arrivals without prompts, expected a trace (they can lend it their times)")
    fields = json_line(path, number, data).fields
    for name, members in MARKS:
        if all(member in fields for member in members):
            return name
    found = ", ".join(list(fields)[:8]) or "nothing"
    known = "; ".join(f"{' and '.join(members)} ({name})" for name, members in MARKS)
    raise TraceError(f"{path}:{number}: found an object with {found}, expected one with {known}")


def read_arrivals(path: Path) -> list[float]:
    """Return the arrivals in seconds since the first one, ascending. Raises TraceError."""
    number, header = first_line(path)
    if header.strip() != ARRIVALS:
        raise TraceError(f"{path}:{number}: found {shown(header)}, expected {ARRIVALS.decode()}")
    times = [read_time(path, line, data) for line, data in raw_lines(path) if line > number]
    if not times:
        raise TraceError(f"{path}: found no arrival, expected at least one")
    return sorted(from_start(times))


def read_time(path: Path, number: int, data: bytes) -> float:
    """Return the time on one line, in seconds since 1970. Raises TraceError."""
    try:
        stamp, prompt, answer = data.decode().strip().split(",")
        int(prompt), int(answer)
        at = datetime.fromisoformat(stamp)  # those of 2024 have a zone, and no fraction where it is 0
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{path}:{number}: found {shown(data)}, expected {EXPECTED}") from error


def lend(trace: Trace, arrivals: Sequence[float]) -> Trace:
    """Return the trace with these arrivals: the n-th request gets the n-th time.

    If there are fewer times than requests, they begin again, one mean gap after the last.
    """
    span = arrivals[-1]
    period = span + (span / (len(arrivals) - 1) if len(arrivals) > 1 and span > 0 else 1.0)
    requests = [
        replace(request, at=number // len(arrivals) * period + arrivals[number % len(arrivals)])
        for number, request in enumerate(trace.requests)
    ]
    return replace(trace, requests=requests, timed=True)
