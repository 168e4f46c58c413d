"""Stands between an answer and a client that is to read the name of the model by which it asked, not the engine's.

Rule: a stream passes event by event, in chunks of ours. A whole answer is held until it is here, and gets its new
length. What is longer than HELD_BYTES_MAX, no JSON, compressed or an error passes as it came. Who else gets the same
answer, now or from the cache, gets it by the name by which he asked.
"""

from __future__ import annotations

from dataclasses import replace

from ranvier_py.core.answers.chunked import LAST_CHUNK, ChunkedReader, in_chunk, unchunked
from ranvier_py.core.answers.model_renames import HELD_BYTES_MAX, ModelRenames
from ranvier_py.proxy.http_values import NO_RESPONSE_FIELDS, Fields, HttpResponseHead, response_head


class RenamedAnswer:
    """The answer to one request. `is_on`: its body goes through `more`, since its head was taken."""

    __slots__ = ("_chunks", "_held", "_left", "_renames", "_streams", "_whole", "is_on")

    def __init__(self, name: str) -> None:
        self._renames = ModelRenames(name)
        self._chunks: ChunkedReader | None = None
        self._whole: tuple[HttpResponseHead, Fields, bytes, bool] | None = None  # the head of a whole answer, if held
        self._held = bytearray()  # of such a one
        self._left = 0  # bytes that are still to come of a body with a length
        self._streams = self.is_on = False

    def takes(self, head: HttpResponseHead) -> bool:
        """Whether this is an answer that may name a model."""
        fields, kind = head.fields, value_of(head, b"content-type")
        return head.status == 200 and fields.readable and (fields.streams or b"json" in kind) and head.framing != "none"

    def begin(self, head: HttpResponseHead, extra: Fields, body: bytes, lines: bytes, *, close: bool) -> bytes:
        """Take the head, with more fields and lines of ours, and the first bytes of the body. Returns what goes on."""
        self.is_on, self._streams = True, head.fields.streams and head.framing != "length"
        self._chunks = ChunkedReader() if head.framing == "chunked" else None
        self._left = int(value_of(head, b"content-length") or 0)
        self._whole = None if self._streams else (head, extra, lines, close)
        return (response_head(head, extra, lines, close=close) if self._streams else b"") + self.more(body)

    def more(self, data: bytes) -> bytes:
        """Return what goes on of the next piece of the body."""
        chunks, self._left = self._chunks, self._left - len(data)
        if chunks is not None:
            chunks.feed(data)
            data = chunks.payload(data)
            return self._framed(data, is_last=chunks.done)
        is_last = self._whole is not None and self._whole[0].framing == "length" and self._left <= 0
        return self._framed(data, is_last=is_last)

    def end(self) -> bytes:
        """Return what is left of an answer that ends with its connection."""
        return self._framed(b"", is_last=True) if self.is_on and self._chunks is None else b""

    def stored(self, body: bytes, *, in_chunks: bool) -> bytes:
        """Return the body of an answer that was kept."""
        if not in_chunks:
            return self._renames.whole(body)
        return in_chunk(self._renames.feed(unchunked(body), is_last=True)) + LAST_CHUNK

    def _framed(self, payload: bytes, *, is_last: bool) -> bytes:
        last = self._chunks.last if self._chunks is not None and is_last else b""
        head = b""
        if self._whole is not None:
            self._held += payload
            if not is_last and len(self._held) <= HELD_BYTES_MAX:
                return b""
            payload, (whole, extra, lines, close) = bytes(self._held), self._whole
            if is_last:
                streams = whole.fields.streams
                payload = self._renames.feed(payload, is_last=True) if streams else self._renames.whole(payload)
                whole = with_length(whole, len(payload))
            head, self._whole = response_head(whole, extra, lines, close=close), None
            self._held.clear()
        elif self._streams:
            payload = self._renames.feed(payload, is_last=is_last)
        self.is_on = not is_last
        return head + (in_chunk(payload) if self._chunks is not None else payload) + last


def with_length(head: HttpResponseHead, length: int) -> HttpResponseHead:
    """Return the head of a body of another length, if it has one."""
    if head.framing != "length":
        return head
    kept = [(name, b"%d" % length if name.lower() == b"content-length" else value) for name, value in head.headers]
    return replace(head, headers=kept, fields=NO_RESPONSE_FIELDS)


def value_of(head: HttpResponseHead, name: bytes) -> bytes:
    return next((value.lower() for key, value in head.headers if key.lower() == name), b"")
