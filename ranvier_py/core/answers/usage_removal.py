"""Takes the counts that only we asked for out of a stream again; all other bytes go on as they came.

The counts are one event of their own, with empty `choices` and a `usage`, between the last output and `[DONE]`. It is
found wherever reads and HTTP chunks cut it: a piece that ends at the end of an event and says nothing of
`"prompt_tokens"` passes as it is, in its own chunks (quotes in generated text are escaped, so text can't say it). Any
other piece is taken out of its chunks, cut into events, and what is kept leaves in a chunk of ours. Of an event that is
not complete nothing leaves before the rest has come.

Rules: an event with output is never changed. So `"usage":null` in other events stays: vLLM's completions and older
SGLang write it asked or not, their chats of today never, by their sources; only vLLM 0.5 and 0.6 and OpenAI itself add
it for the question, to no client's harm, while to take it out would cost every event a search and would be wrong for
the former. In one thing a stream that was asked differs for good: vLLM since 2026 puts `system_fingerprint` into the
event of the counts instead of the last one with output. Counts in an event with output were not asked for by us: then
nothing is taken out of this stream (`counts_anyway`). Where the answer has a content-length, a comment of the same
length takes the place of the event.
Invariant: the chunks that leave end with the message, and no byte of payload is doubled, moved or lost but the event.
Cost: a usual piece costs one search and one comparison. Holds at most HELD_BYTES_MAX.
"""

from __future__ import annotations

import re
from typing import Protocol

import orjson

from ranvier_py.core.errors import UpstreamGarbled

MARK = b'"prompt_tokens"'
EVENT_END = re.compile(rb"\n\r?\n")
NEXT_CHUNK = re.compile(rb"(?:\r\n)?([0-9A-Fa-f]{1,16})[^\r\n]*\r\n")

HELD_BYTES_MAX = 64 * 1024
"""A longer event is not one of counts, which have some 300 bytes: it goes on as it comes."""

LINE_BYTES_MAX = 4096 + 4
"""Of the line before a chunk, as `core.chunked` has it."""


class Marks(Protocol):
    """Who follows the chunks for the connection's sake."""

    inside: bool  # in the middle of a chunk, as of the last piece
    chunks: int  # that ended since this was 0


class UsageRemover:
    """One answer's body on its way. `marks`: where it is chunked; None elsewhere.

    Attributes:
        removed: events taken out.
        counts: the last of them.
        counts_anyway: an event with output had counts, which we did not ask for.
    """

    __slots__ = (
        "_aligned",
        "_blank",
        "_end",
        "_ended",
        "_held",
        "_left",
        "_line",
        "_marks",
        "_passing",
        "counts",
        "counts_anyway",
        "removed",
    )

    def __init__(self, framing: str, marks: Marks | None) -> None:
        self._marks = marks
        self._blank = framing == "length"
        self._end = b"\n\n\r\n" if marks is not None else b"\n\n"
        self._aligned = True  # all so far was whole events, and whole chunks
        self._held = b""  # of an event that is not complete
        self._passing = False  # the first part of this event is gone already
        self._left = 0  # bytes of the chunk that are still to come
        self._line = b""  # of the line before a chunk
        self._ended = False  # the last chunk has begun
        self.removed = 0
        self.counts = b""
        self.counts_anyway = False

    def feed(self, data: bytes, complete: bool) -> bytes:
        """What goes on to the client of this piece and of what was held. `complete`: the message ends with it.

        Raises UpstreamGarbled.
        """
        if not data and not complete:
            return data
        marks = self._marks
        chunks = 0
        if marks is not None:
            chunks, marks.chunks = marks.chunks, 0
        if self._aligned and (self.counts_anyway or (MARK not in data and self._is_whole(data, chunks, complete))):
            return data
        if marks is None:
            kept = self._kept(data)
            if complete:
                kept, self._held = kept + self._held, b""
            self._aligned = not self._held and not self._passing
            return kept
        return self._rechunked(data, marks)

    def _is_whole(self, data: bytes, chunks: int, complete: bool) -> bool:
        """Whether a piece that begins with an event ends with one, and so does each of its chunks."""
        if not complete and (not data.endswith(self._end) or (self._marks is not None and self._marks.inside)):
            return False
        return chunks < 2 or data.count(self._end) >= chunks - complete  # the last chunk is empty

    def _rechunked(self, data: bytes, marks: Marks) -> bytes:
        """The same for chunks: payload out, payload in."""
        if self._ended:
            return data
        payload, last = self._payload(data)
        kept = self._kept(payload)
        if last:
            kept, self._held = kept + self._held, b""
        self._aligned = not (self._held or self._passing or self._left or marks.inside) and self._line in (b"", b"\r\n")
        if self._aligned:
            self._line = b""
        return b"%x\r\n%b\r\n%b" % (len(kept), kept, last) if kept else last

    def _payload(self, data: bytes) -> tuple[bytes, bytes]:
        """The payload of these bytes, and the last chunk with all that follows it, once it is there."""
        data, self._line = self._line + data, b""
        found: list[bytes] = []
        at = 0
        while at < len(data):
            if self._left:
                end = min(at + self._left, len(data))
                found.append(data[at:end])
                self._left -= end - at
                at = end
                continue
            line = NEXT_CHUNK.match(data, at)
            if line is None:
                self._line = data[at:]
                if len(self._line) > LINE_BYTES_MAX:
                    raise UpstreamGarbled("the backend's chunks can't be followed")
                break
            self._left = int(line[1], 16)
            at = line.end()
            if not self._left:
                self._ended = True
                return b"".join(found), data[line.start(1) :]
        return b"".join(found), b""

    def _kept(self, payload: bytes) -> bytes:
        """Whole events of this payload and what was held, without that of the counts."""
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
        """Let go of an event that is not complete, but for a line end that may become its end."""
        self._passing = True
        kept = 1 if data.endswith(b"\n") else 2 if data.endswith(b"\n\r") else 0
        self._held = data[len(data) - kept :]
        return data[: len(data) - kept]

    def _sifted(self, events: bytes) -> bytes:
        """Whole events without that of the counts."""
        kept: list[bytes] = []
        at = 0
        while not self.counts_anyway and (mark := events.find(MARK, at)) >= 0:
            start, end = end_of_events(events, at, mark), EVENT_END.search(events, mark)
            assert end is not None, "the last event is whole"
            kept += (events[at:start], self._judged(events[start : end.end()]))
            at = end.end()
        return b"".join(kept) + events[at:]

    def _judged(self, event: bytes) -> bytes:
        kind = kind_of(event)
        if kind == "output":
            self.counts_anyway = True
        if kind != "counts":
            return event
        self.removed += 1
        self.counts = event
        if not self._blank:
            return b""
        body = event.rstrip(b"\r\n")
        return b":".ljust(len(body)) + event[len(body) :]


def end_of_events(data: bytes, start: int, stop: int) -> int:
    """Where the last event that ends between these places does; `start` where there is none."""
    plain, carried = data.rfind(b"\n\n", start, stop), data.rfind(b"\n\r\n", start, stop)
    return max(plain + 2 if plain >= 0 else start, carried + 3 if carried >= 0 else start)


def kind_of(event: bytes) -> str:
    """«counts» and nothing else, «output» with counts beside it, or «other»."""
    lines = [line for line in event.splitlines() if line]
    if len(lines) != 1 or not lines[0].startswith(b"data:"):
        return "other"
    try:
        fields = orjson.loads(lines[0][5:])
    except orjson.JSONDecodeError:
        return "other"
    if type(fields) is not dict or type(fields.get("usage")) is not dict:
        return "other"
    return "counts" if fields.get("choices") == [] else "output"
