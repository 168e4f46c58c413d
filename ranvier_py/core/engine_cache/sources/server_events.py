"""Reads server-sent events as they come: bytes in pieces of any size -> events of an index.

Rules: `event:` names the kind; only if it is missing, the member `event` of the JSON does (CR15). Lines end with LF, CR
or CRLF. Comments and unknown fields are skipped; an event that cannot be read is None, and so is one with more lines or
parts than are read at once. One event may have `EVENT_BYTES_MAX`; a longer one raises TooLong, since it is unknown
where the next begins, and the reader connects anew (CX29). A WebSocket frame is one event's data: `event_of`.
Source: Continuum Router, «KV cache optimization», tier 4; the grammar is WHATWG's HTML, section 9.2.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from ranvier_py.core.engine_cache.prefix_index.prefix_index import KINDS, IndexEvent
from ranvier_py.core.options import Options, option
from ranvier_py.core.prompts.body_json import excess, object_of

EVENT_BYTES_MAX = 1 << 20  # Continuum's MAX_SSE_BUFFER_SIZE

LINES_MAX = 4096  # of one event, which has two or three

LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)")
EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
COMMENTS = re.compile(rb"(?::[^\r\n]*(?:\r\n|\n|\r(?!\n)))+")
PREFIX = re.compile(r"(?:0x)?[0-9A-Fa-f]+\Z")


@dataclass(frozen=True, slots=True)
class SourceOptions(Options):
    """`idle_s`: after so many seconds of silence everything that the stream published has expired."""

    SECTION = "Index"
    PREFIX = "kv_index_"

    reconnect_s: float = option(
        1.0, "First wait before a lost event stream is connected again; it doubles up to 60 s.", above=0.0, most=60.0
    )
    idle_s: float = inf


class TooLong(ValueError):
    """An event has more than EVENT_BYTES_MAX."""


class EventReader:
    """Keeps the piece of an event that has come so far."""

    def __init__(self) -> None:
        self._piece = bytearray()
        self._searched = 0  # bytes of the piece that hold no end

    def feed(self, data: bytes) -> Iterator[IndexEvent | None]:
        """Yield the events that these bytes complete. Raises TooLong.

        A CR at their very end counts as a line end; if its LF follows with the next bytes, it is read as an empty line.
        """
        piece, start = self._piece, 0
        piece += data
        while (found := EVENT_END.search(piece, max(start, self._searched))) is not None:
            event = bytes(piece[start : found.start()])
            start = self._searched = found.end()
            if event.count(b"\n") + event.count(b"\r") > LINES_MAX:
                yield None
                continue
            kind, text = fields_of(event)
            if text:
                yield event_of(kind, text)
        comments = COMMENTS.match(piece, start)
        del piece[: comments.end() if comments is not None else start]
        self._searched = max(0, len(piece) - 3)
        if len(piece) > EVENT_BYTES_MAX:
            raise TooLong(f"an event of more than {EVENT_BYTES_MAX} bytes")


def fields_of(event: bytes) -> tuple[bytes, bytes]:
    """Return kind and data of one event."""
    kind, data = b"", []
    for line in LINE_END.split(event.removeprefix(b"\xef\xbb\xbf")):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            kind = value
        elif name == b"data":
            data.append(value)
    return kind, b"\n".join(data)


def event_of(kind: bytes, data: bytes) -> IndexEvent | None:
    """Return the event that a kind and its JSON stand for; None if they cannot be read as one."""
    fields = None if excess(data) else object_of(data)
    if fields is None:
        return None
    name = kind.decode("latin-1") if kind else fields.get("event")
    prefix, tokens = fields.get("prefix_hash"), fields.get("token_count")
    known = KINDS.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(prefix, str) or PREFIX.match(prefix) is None:
        return None
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        return None
    return IndexEvent(known, prefix.lower().removeprefix("0x"), tokens)
