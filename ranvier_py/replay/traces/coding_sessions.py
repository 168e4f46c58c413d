"""Loads recorded sessions of coding agents: JSON lines with one session each, whose prompts are ranges of block hashes.

    {"id": "trace_0002", "block_size": 64, "requests": [{"t": 9.0, "in": 16003, "out": 99, "h": [1, 250]}, …]}

`t` is seconds from the session's start; `h` has starts and lengths of ranges, with one hash for each whole block. A
sub-agent has `requests` of its own, whose times count from its `t`. Rule: hashes are valid only within a session, so
sessions share no blocks; they begin at random within `window_s`. The other rules are those of `mooncake`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ranvier_py.replay.traces.lines import TraceLine, drawn, json_lines, name_of, nothing_in, shown
from ranvier_py.replay.traces.mooncake import TOKENS_MAX, MooncakeRecord, requests_of
from ranvier_py.replay.traces.trace import Trace, TraceOptions
from ranvier_py.replay.traces.trace_chains import linked

DEPTH_MAX = 4
"""Levels of agents within agents."""

TIME_MAX_S = 1e7
"""Greatest time within a session: four months."""


class SessionRequest(NamedTuple):
    """One request of a session. `line`: the line of its session, within which the hashes are valid."""

    at: float
    line: int
    session: str
    prompt_tokens: int
    answer_tokens: int
    ranges: Sequence[tuple[int, int]]


def load(path: Path, options: TraceOptions) -> Trace:
    """Return the requests of a file. Raises TraceError."""
    rng = drawn(options.seed, "sessions")
    entries: list[SessionRequest] = []
    size = 0
    for line in json_lines(path):
        own = line.integer("block_size", 1, TOKENS_MAX)
        if size not in (0, own):
            raise line.wrong(f"block_size {own}", f"{size}, as on the lines before")
        size = own
        session = line.text("id") or f"line {line.number}"
        start = rng.uniform(0.0, options.window_s)
        entries.extend(read_requests(line, line.fields.get("requests"), session, start, size))
    if not entries:
        raise nothing_in(path)
    entries.sort(key=lambda entry: entry.at)
    records = list(named(entries[: options.limit or None]))
    requests = requests_of(records, [record.stamp - entries[0].at for record in records], size)
    return Trace(name_of(path), requests, size, timed=False)


def named(entries: Iterable[SessionRequest]) -> Iterator[MooncakeRecord]:
    """Yield the entries with their blocks' chained names. Names shared with the session's last entry are reused."""
    before: dict[str, tuple[Sequence[tuple[int, int]], list[int]]] = {}
    for entry in entries:
        ranges, path = before.get(entry.session, ((), []))
        path = path[: in_common(ranges, entry.ranges)]
        above, skipped = path[-1] if path else linked(0, entry.line), len(path)
        for first, count in entry.ranges:
            for number in range(first + min(skipped, count), first + count):
                above = linked(above, number)
                path.append(above)
            skipped -= min(skipped, count)
        before[entry.session] = entry.ranges, path
        yield MooncakeRecord(entry.at, entry.session, entry.prompt_tokens, entry.answer_tokens, path)


def in_common(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Return how many leading blocks two lists of ranges share, at least."""
    found = 0
    for (first, count), (other, length) in zip(some, others, strict=False):
        if first != other:
            break
        found += min(count, length)
        if count != length:
            break
    return found


def read_requests(
    line: TraceLine, given: Any, session: str, start: float, size: int, depth: int = 0
) -> Iterator[SessionRequest]:
    """Yield the requests of a session, or of an agent within it. Raises TraceError."""
    if not isinstance(given, list) or depth > DEPTH_MAX:
        raise line.wrong(f"requests {shown(given)}", "a list of requests, of agents within agents up to 4 deep")
    for number, entry in enumerate(given):
        if not isinstance(entry, dict):
            raise line.wrong(f"a request {shown(entry)}", "an object")
        at = entry.get("t")
        if not isinstance(at, int | float) or not 0 <= at <= TIME_MAX_S:
            raise line.wrong(f"t {shown(at)}", f"seconds from 0 to {TIME_MAX_S:g}")
        if entry.get("requests") is not None:
            agent = f"{session}/{entry.get('agent_id') or number}"
            yield from read_requests(line, entry["requests"], agent, start + at, size, depth + 1)
        else:
            yield read_request(TraceLine(line.file, line.number, entry), session, start + at, size)


def read_request(line: TraceLine, session: str, at: float, size: int) -> SessionRequest:
    """Read one request. Raises TraceError."""
    prompt, answer = line.integer("in", 1, TOKENS_MAX), line.integer("out", 0, TOKENS_MAX)
    given = line.fields.get("h")
    if not isinstance(given, list) or len(given) % 2 or any(type(each) is not int or each < 0 for each in given):
        raise line.wrong(f"h {shown(given)}", "a list of starts and lengths")
    ranges = list(zip(given[::2], given[1::2], strict=True))
    blocks = sum(count for _, count in ranges)
    if blocks != prompt // size:
        raise line.wrong(f"{blocks} hashes for in {prompt}", f"{prompt // size} of them ({size} tokens to a block)")
    return SessionRequest(
        at=at, line=line.number, session=session, prompt_tokens=prompt, answer_tokens=max(1, answer), ranges=ranges
    )
