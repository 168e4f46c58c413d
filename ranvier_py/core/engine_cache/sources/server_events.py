"""Server-sent events, read as they come: bytes in any pieces -> events of an index.

Rules: `event:` names the kind, a member `event` of the JSON is asked only where it is missing (CR15). Lines end with
LF, CR or CRLF; a comment, a field we do not know and an event that can't be read are skipped, the last one counted. One
event may hold `EVENT_BYTES_MAX`; a longer one raises TooLong, since nobody knows where the next begins, and whoever
reads connects anew (CX29). Text in a frame of a WebSocket is one event's data: `frame`.
Source: Continuum Router, «KV cache optimization», tier 4; the grammar is WHATWG's HTML, section 9.2.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from ranvier_py.core.engine_cache.prefix_index.prefix_index import KINDS, IndexEvent

EVENT_BYTES_MAX = 1 << 20  # Continuum's MAX_SSE_BUFFER_SIZE

LINE_END = re.compile(rb"\r\n|\r|\n")
PREFIX = re.compile(r"(?:0x)?[0-9A-Fa-f]+\Z")


class TooLong(ValueError):
    """An event of more than EVENT_BYTES_MAX."""


class EventReader:
    """State: the piece of a line that has come, and the fields of the event that is under way."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._searched = 0  # of the line, in which no end was
        self._kind = b""
        self._data: list[bytes] = []
        self._size = 0
        self._begun = False
        self.received = 0
        self.dropped = 0

    def feed(self, data: bytes) -> Iterator[IndexEvent]:
        """The events that these bytes complete. Raises TooLong."""
        self._line += data
        for line in self._lines():
            event = self._take(line)
            if event is not None:
                yield event
        if len(self._line) + self._size > EVENT_BYTES_MAX:
            raise TooLong(f"an event of more than {EVENT_BYTES_MAX} bytes")

    def frame(self, data: bytes) -> IndexEvent | None:
        """One WebSocket frame: the JSON alone."""
        if len(data) > EVENT_BYTES_MAX:
            raise TooLong(f"an event of more than {EVENT_BYTES_MAX} bytes")
        return self._read(b"", data)

    def _lines(self) -> Iterator[bytes]:
        """Whole lines. A CR at the very end waits: the LF that belongs to it may follow."""
        buffer, start = self._line, 0
        while (found := LINE_END.search(buffer, max(start, self._searched))) is not None:
            if found.end() == len(buffer) and found.group() == b"\r":
                break
            line = bytes(buffer[start : found.start()])
            start = self._searched = found.end()
            yield line
        del buffer[:start]
        self._searched = max(0, len(buffer) - 1)

    def _take(self, line: bytes) -> IndexEvent | None:
        """One line; an empty one ends the event."""
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            kind, data = self._kind, b"\n".join(self._data)
            self._kind, self._data, self._size = b"", [], 0
            return self._read(kind, data) if data else None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._kind = value
        elif name == b"data":
            self._size += len(value) + 1
            if self._size > EVENT_BYTES_MAX:
                raise TooLong(f"an event of more than {EVENT_BYTES_MAX} bytes")
            self._data.append(value)
        return None

    def _read(self, kind: bytes, data: bytes) -> IndexEvent | None:
        self.received += 1
        event = event_of(kind, data)
        self.dropped += event is None
        return event


def event_of(kind: bytes, data: bytes) -> IndexEvent | None:
    """The event that a kind and its JSON stand for; None when there is none to be seen."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    name = kind.decode("latin-1") if kind else fields.get("event")
    prefix, tokens = fields.get("prefix_hash"), fields.get("token_count")
    known = KINDS.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(prefix, str) or PREFIX.match(prefix) is None:
        return None
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        return None
    return IndexEvent(known, prefix.lower().removeprefix("0x"), tokens)
