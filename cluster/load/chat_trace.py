"""Chat traces: one JSON object per line, `{"messages": [{"role": …, "content": …}, …]}`, plain or gzipped.

Optional keys: `session` or `session_id` (a name, unique in the file), `timestamp` (seconds, any zero) or
`timestamp_ms`. All else is ignored. A line that is not such an object stops the reading with the file's name and the
line's number: a trace that is half understood would give figures that are half true.
"""

from __future__ import annotations

import gzip
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from cluster.load.workload import Conversation, Message, split_turns

LINE_BYTES_MAX = 16 * 1024 * 1024
"""One conversation: twice the largest context in use today (1 M tokens of text is about 4 MB)."""

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


class TraceError(ValueError):
    """The file is not a chat trace. The message names file and line; nothing was sent."""


def read_trace(path: Path, *, keep_recorded: bool = False) -> list[Conversation]:
    """All conversations of a trace. Raises TraceError."""
    found: list[Conversation] = []
    lines_of: dict[str, int] = {}
    for number, line in numbered_lines(path):
        try:
            conversation = read_line(line, f"line-{number}", keep_recorded=keep_recorded)
            if conversation.name in lines_of:
                raise TraceError(f"session {conversation.name!r} was on line {lines_of[conversation.name]} already")
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        lines_of[conversation.name] = number
        found.append(conversation)
    if not found:
        raise TraceError(f"{path}: no conversation in it")
    return found


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, counted from 1."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)  # some editors begin every file with it
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{path}:{number}: longer than {LINE_BYTES_MAX} bytes")
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from error


def read_line(line: bytes, name: str, *, keep_recorded: bool) -> Conversation:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise TraceError(
            'want an object with a list "messages", such as {"messages": [{"role": "user", "content": "…"}]}'
        )
    messages = [read_message(message, index) for index, message in enumerate(record["messages"])]
    turns = split_turns(messages, keep_recorded=keep_recorded)
    if not turns:
        raise TraceError("no user message, so nothing to ask")
    session = record.get("session", record.get("session_id", name))
    return Conversation(str(session), turns, read_start(record))


def read_message(message: Any, index: int) -> Message:
    if not isinstance(message, dict):
        raise TraceError(f"messages[{index}] is not an object")
    if message.get("role") not in ROLES:
        raise TraceError(f"messages[{index}].role is {message.get('role')!r}; want one of {', '.join(sorted(ROLES))}")
    content = message.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise TraceError(f"messages[{index}].content is neither text nor a list of parts")
    return message


def read_start(record: dict[str, Any]) -> float | None:
    for key, scale in (("timestamp", 1.0), ("timestamp_ms", 1e-3)):
        value = record.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TraceError(f"{key} is {value!r}; want a number")
        return float(value) * scale
    return None
