"""Removes the counts that only we asked for from a stream; all other bytes go on as they came.

Rule: the counts are one event of their own, with a `usage` and no `choices`, found however reads and HTTP chunks cut
it. A piece that ends at the end of an event and lacks MARK passes unchanged, in its own chunks; any other is taken out
of its chunks and cut into events, and what is kept leaves in a chunk of ours. An event with output is never changed.
Invariant: chunks end with the message, and only the event's bytes are moved or lost (test_usage_removal.py).
Cost: a usual piece costs one search and one comparison. Bound: holds at most HELD_BYTES_MAX of an incomplete event.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError
from ranvier_py.core.errors import UpstreamGarbled

MARK = b'"prompt_tokens"'  # quotes in generated text are escaped, so text cannot contain it
EVENT_END = re.compile(rb"\n\r?\n|\r\r")

HELD_BYTES_MAX = 64 * 1024
"""A longer event is not one of counts, which have some 300 bytes; it is passed on as it comes."""

USUAL = frozenset(
    ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier", "obfuscation")
)
"""Members of an event of counts by OpenAI's API, which is all there is to know of them."""


class UsageRemover:
    """Filters the body of one answer. `chunks` follows those of a chunked body; None for others."""

    __slots__ = (
        *("_aligned", "_blank", "_chunks", "_end", "_held", "_own", "_passing"),
        *("counts", "counts_anyway", "has_more", "removed"),
    )

    def __init__(self, framing: str, chunks: ChunkedReader | None) -> None:
        self._chunks = chunks
        self._own: ChunkedReader | None = None  # follows chunks that do not pass unchanged
        self._blank = framing == "length"
        self._end = b"\n\n\r\n" if chunks is not None else b"\n\n"
        self._aligned = True  # everything so far was whole events in whole chunks
        self._held = b""  # the beginning of an incomplete event
        self._passing = False  # the first part of this event was passed on already
        self.removed, self.counts = 0, b""  # events that were removed, and the last of them
        self.counts_anyway = False  # an event with output had counts, for which we did not ask
        self.has_more = False  # an event with counts has something else, which clients would not get were it removed

    def feed(self, data: bytes, complete: bool) -> bytes:
        """Return what goes on to the client of this piece and of what was held. `complete`: the message ends with it.
        Raises UpstreamGarbled."""
        if not data and not complete:
            return data
        chunks, ended = self._chunks, 0
        if chunks is not None:
            ended, chunks.chunks = chunks.chunks, 0
        if self._aligned and (self.counts_anyway or MARK not in data):
            is_cut = not complete and (not data.endswith(self._end) or (chunks is not None and chunks.inside))
            if self.counts_anyway or not (is_cut or (ended > 1 and data.count(self._end) < ended)):
                return data
        if chunks is None:
            kept = self._kept(data)
            if complete:
                kept, self._held = kept + self._held, b""
            self._aligned = not self._held and not self._passing
            return kept
        return self._rechunked(data)

    def _rechunked(self, data: bytes) -> bytes:
        if self._own is None:  # here a chunk begins
            self._own = ChunkedReader()
        own = self._own
        if len(own.last):
            return data
        try:
            own.feed(data)
        except ChunkError as error:
            raise UpstreamGarbled("the backend's chunks can't be followed") from error
        kept = self._kept(own.payload(data))
        if own.last:
            kept, self._held = kept + self._held, b""
        self._aligned = not (self._held or self._passing or own.inside)
        if self._aligned:
            self._own = None
        return b"%x\r\n%b\r\n%b" % (len(kept), kept, own.last) if kept else own.last

    def _kept(self, payload: bytes) -> bytes:
        """Return the whole events of this payload and of what was held, without the counts."""
        data = self._held + payload
        begun = b""
        if self._passing:
            first = EVENT_END.search(data)
            if first is None:
                return self._pass_on(data)
            self._passing = False
            begun, data = data[: first.end()], data[first.end() :]
        end = end_of_events(data, 0, len(data))
        events, self._held = data[:end], data[end:]
        if MARK in events and not self.counts_anyway:
            events = self._sifted(events)
        if len(self._held) > HELD_BYTES_MAX:
            events += self._pass_on(self._held)
        return begun + events

    def _pass_on(self, data: bytes) -> bytes:
        """Let an incomplete event go, except a line end at its end that may become the event's end."""
        self._passing = True
        kept = 2 if data.endswith(b"\n\r") else 1 if data.endswith((b"\n", b"\r")) else 0
        self._held = data[len(data) - kept :]
        return data[: len(data) - kept]

    def _sifted(self, events: bytes) -> bytes:
        """Return whole events without the counts."""
        kept: list[bytes] = []
        at = 0
        while not self.counts_anyway and (mark := events.find(MARK, at)) >= 0:
            start, end = end_of_events(events, at, mark), EVENT_END.search(events, mark)
            assert end is not None, "the last event is whole"
            kept += (events[at:start], self._judged(events[start : end.end()]))
            at = end.end()
        return b"".join(kept) + events[at:]

    def _judged(self, event: bytes) -> bytes:
        """Return what goes on of an event that may have counts."""
        fields = counted(event)
        if fields is None:
            return event
        # `"usage":null` there stays: vLLM's completions and older SGLang write it asked or not, and it harms no client
        if fields.get("choices"):
            self.counts_anyway = True
            return event
        # vLLM since 2026 has `system_fingerprint` in this event, not in the last one with output: that is lost
        self.removed += 1
        self.counts = event
        body, left = event.rstrip(b"\r\n"), b""
        if any(value is not None and name not in USUAL for name, value in fields.items()):
            self.has_more = True
            left = without_counts(body, fields)
        if self._blank:
            # the answer has a content-length: a comment of the same length takes the place
            left = left.ljust(len(body)) if 0 < len(left) <= len(body) else b":".ljust(len(body))
        return left + event[len(body) :] if left else b""


def end_of_events(data: bytes, start: int, stop: int) -> int:
    """Return where the last event that ends between these places ends; `start` if there is none."""
    found = ((data.rfind(end, start, stop), len(end)) for end in (b"\n\n", b"\n\r\n", b"\r\r"))
    return max([place + length for place, length in found if place >= 0], default=start)


def counted(event: bytes) -> dict[str, Any] | None:
    """Return the object of an event that has a `usage`, whatever other lines the event has; None if it has none."""
    try:
        fields = orjson.loads(b"\n".join([line[5:] for line in event.splitlines() if line.startswith(b"data:")]))
    except orjson.JSONDecodeError:
        return None
    return fields if type(fields) is dict and type(fields.get("usage")) is dict else None


def without_counts(event: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return an event with the other lines that it has, and all of its object but `usage`."""
    lines = [line for line in event.splitlines() if not line.startswith(b"data:")]
    rest = orjson.dumps({name: value for name, value in fields.items() if name != "usage"})
    return b"\n".join((*lines, b"data: " + rest))
