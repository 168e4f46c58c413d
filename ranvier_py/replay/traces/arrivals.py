"""Arrivals: Azure's CSV lends its times to a trace that has none.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Only the times are used; the lengths are checked to be numbers, because a file in which they are none is another one.
The n-th request of the trace comes at the n-th time. Where the trace is longer, the times begin again, one mean gap
after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ranvier_py.replay.trace import Trace, TraceError
from ranvier_py.replay.traces.lines import first_line, raw_lines, shown
from ranvier_py.replay.traces.times import from_start

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
EXPECTED = "a line like 2023-11-16 18:15:46.6805900,374,44"
DECIMALS = len(".123456")  # of a second that Python reads; the file has one more
ARRIVALS_MAX = 10_000_000


def read_arrivals(path: Path) -> list[float]:
    """Seconds since the first arrival, ascending. Raises TraceError."""
    number, header = first_line(path)
    if header.strip() != HEADER:
        raise TraceError(f"{path}:{number}: found {shown(header)}, expected {HEADER.decode()}")
    times = []
    for line, data in raw_lines(path):
        if line > number:
            times.append(read_time(path, line, data))
    if not times:
        raise TraceError(f"{path}: found no arrival, expected at least one")
    return sorted(from_start(times))


def read_time(path: Path, number: int, data: bytes) -> float:
    """The time on one line, in seconds since 1970. Raises TraceError."""
    try:
        stamp, prompt, answer = data.decode().strip().split(",")
        int(prompt), int(answer)
        second, point, fraction = stamp.partition(".")
        return datetime.fromisoformat(f"{second}{point}{fraction}"[: len(second) + DECIMALS] + "+00:00").timestamp()
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{path}:{number}: found {shown(data)}, expected {EXPECTED}") from error


def lend(trace: Trace, arrivals: Sequence[float]) -> Trace:
    """The trace with these times: its requests keep their order."""
    span = arrivals[-1]
    period = span + (span / (len(arrivals) - 1) if len(arrivals) > 1 and span > 0 else 1.0)
    requests = []
    for number, request in enumerate(trace.requests):
        rounds, place = divmod(number, len(arrivals))
        requests.append(replace(request, at=rounds * period + arrivals[place]))
    return Trace(trace.name, requests, trace.block_tokens, timed=True)
