"""Follows the frames of one direction of a WebSocket, to find where a frame of ours may stand between them (RFC 6455).

Rule: it reads heads alone and changes nothing. A control frame may stand between any two frames, also within a message.
Invariant: where frames end does not depend on how their bytes are cut (test_websocket_frames.py).
"""

from __future__ import annotations

from struct import pack

CLOSE, CONTROL, MASKED, FINAL = 0x8, 0x8, 0x80, 0x80
POLICY_VIOLATION = 1008  # the only code that fits a key which is not valid any more (RFC 6455, 7.4.1)
REASON_BYTES_MAX = 123  # a control frame has 125
EXTENDED = {126: 2, 127: 8}
"""Bytes of a length, by what stands in its place."""


class WebSocketFrames:
    """`has_closed`: this side has sent its close frame."""

    __slots__ = ("_head", "_left", "has_closed")

    def __init__(self) -> None:
        self._head = b""  # of a frame, as far as it is here
        self._left = 0  # bytes that the current frame still has
        self.has_closed = False

    @property
    def is_between(self) -> bool:
        """Whether the last frame is complete, and the next one has not begun."""
        return not self._head and not self._left

    def feed(self, data: bytes, *, to_the_end: bool = False) -> int:
        """Follow these bytes; if `to_the_end`, only to the end of the frame that they continue. Returns how many."""
        at = 0
        while at < len(data):
            if not self._left:
                at = self._begin(data, at)
            step = min(self._left, len(data) - at)
            self._left -= step
            at += step
            if to_the_end and self.is_between:
                break
        return at

    def _begin(self, data: bytes, at: int) -> int:
        """Read the head of a frame from here on. Returns where it ends, or `data`."""
        known = len(self._head)
        head = self._head + data[at : at + 14 - known]
        found = frame_head(head)
        if found is None or len(head) < found[0]:
            self._head = head
            return len(data)
        self._head, (end, self._left) = b"", found
        self.has_closed = self.has_closed or head[0] & 0x0F == CLOSE
        return at + end - known


def frame_head(data: bytes | bytearray) -> tuple[int, int] | None:
    """Return where the content of a frame begins, and how long it is, as soon as enough of its head is here."""
    if len(data) < 2:
        return None
    length = data[1] & ~MASKED
    more = EXTENDED.get(length, 0)
    if len(data) < 2 + more:
        return None
    start = 2 + more + (4 if data[1] & MASKED else 0)
    return start, int.from_bytes(data[2 : 2 + more]) if more else length


def close_frame(code: int, reason: str) -> bytes:
    """Return a server's frame that ends a WebSocket."""
    body = pack("!H", code) + reason.encode()[:REASON_BYTES_MAX]
    return bytes((FINAL | CLOSE, len(body))) + body
