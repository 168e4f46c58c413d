"""Opening a trace: which format is this file, and what is made of it.

| first line | format |
|---|---|
| an object with `hash_ids` | mooncake: prompts as block hashes |
| an object with `messages`, or with `transcript` and `queries` | chats: text, rendered and tokenized |
| an object with `prompt_token_ids` or `input_tok_ids` | token_ids |
| an object with `ranvier_recording` | recording: what `ranvier serve --record` wrote |
| `TIMESTAMP,ContextTokens,GeneratedTokens` | no trace: arrivals for another one (option `arrivals`) |

Gzipped files are read as they are, whatever they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ranvier_py.core.routing.request_record import MARK
from ranvier_py.replay.trace import Trace, TraceError
from ranvier_py.replay.traces import chats, mooncake, token_ids
from ranvier_py.replay.traces import node_record as recording
from ranvier_py.replay.traces.arrivals import HEADER, lend, read_arrivals
from ranvier_py.replay.traces.lines import first_line, json_line
from ranvier_py.replay.traces.trace_options import Format, TraceOptions

LOADERS: dict[str, Callable[[Path, TraceOptions], Trace]] = {
    "mooncake": mooncake.load,
    "chats": chats.load,
    "token_ids": token_ids.load,
    "recording": recording.load,
}
MARKS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("mooncake", ("hash_ids",)),
    ("chats", ("messages",)),
    ("chats", ("transcript", "queries")),
    ("token_ids", ("prompt_token_ids",)),
    ("token_ids", ("input_tok_ids",)),
    ("recording", (MARK,)),
)
"""Members that an object of a format has all of."""


def open_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """The requests of a file, in order of time. Raises TraceError."""
    options = options or TraceOptions()
    trace = LOADERS[options.format or format_of(path)](path, options)
    if options.arrivals is None:
        return trace
    if trace.timed and not options.arrivals_replace:
        raise TraceError(f"{path}: has times of its own; --arrivals-replace takes those of {options.arrivals}")
    return lend(trace, read_arrivals(options.arrivals))


def format_of(path: Path) -> str:
    """The format of a file, by its first line. Raises TraceError."""
    number, data = first_line(path)
    if data.strip() == HEADER:
        raise TraceError(f"{path}: found arrivals without prompts, expected a trace (they can lend it their times)")
    fields = json_line(path, number, data).fields
    for name, members in MARKS:
        if all(member in fields for member in members):
            return name
    found = ", ".join(list(fields)[:8]) or "nothing"
    known = "; ".join(f"{' and '.join(members)} ({name})" for name, members in MARKS)
    raise TraceError(f"{path}:{number}: found an object with {found}, expected one with {known}")
