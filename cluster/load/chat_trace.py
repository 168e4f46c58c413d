"""Reads chat traces: one JSON object a line, `{"messages": [{"role": …, "content": …}, …]}`, plain or gzipped.

Optional keys: `session` or `session_id` (a name, unique in the file), `timestamp` (seconds from any zero) or
`timestamp_ms`. Other keys are ignored. A line of any other form is an error that names the file and the line: figures
from a trace that was partly misread would be wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.load.workload import Conversation, Message, split_turns
from ranvier_py.replay.traces.lines import TraceLine, json_lines, nothing_in, shown

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


def read_trace(path: Path, *, keep_recorded: bool = False) -> list[Conversation]:
    """Read all conversations of a trace. Raises TraceError; nothing was sent then."""
    found: dict[str, Conversation] = {}
    for line in json_lines(path):
        conversation = read_line(line, keep_recorded=keep_recorded)
        if conversation.name in found:
            raise line.wrong(f"session {conversation.name!r} once more", "another name on each line")
        found[conversation.name] = conversation
    if not found:
        raise nothing_in(path)
    return [*found.values()]


def read_line(line: TraceLine, *, keep_recorded: bool) -> Conversation:
    messages = line.fields.get("messages")
    if not isinstance(messages, list):
        raise line.wrong(
            f"messages {shown(messages)}", 'a list, as in {"messages": [{"role": "user", "content": "…"}]}'
        )
    turns = split_turns([read_message(line, each) for each in messages], keep_recorded=keep_recorded)
    if not turns:
        raise line.wrong("no user message", "something to ask")
    return Conversation(line.text("session", "session_id") or f"line-{line.number}", turns, read_start(line))


def read_message(line: TraceLine, message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        expected = f"an object with a role, one of {', '.join(sorted(ROLES))}"
        raise line.wrong(f"a message {shown(message)}", expected)
    content = message.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise line.wrong(f"content {shown(content)}", "a text, a list of parts or null")
    return message


def read_start(line: TraceLine) -> float | None:
    for key, unit_s in (("timestamp", 1.0), ("timestamp_ms", 1e-3)):
        if line.fields.get(key) is not None:
            return line.stamp_s(key, unit_s)
    return None
