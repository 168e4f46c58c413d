"""Keeps the two ends of an answer as it passes, where engines write their counts, and counts its events."""

from __future__ import annotations

ENDS_BYTES = 4096
"""From the beginning and the end of an answer: where engines write the counts."""

KEPT_BYTES = 4 * ENDS_BYTES  # until what is between the ends is dropped
EVENT = b"data:"


class AnswerEnds:
    """What is kept of one answer. `captured`: where others keep the first part of it, if they do."""

    __slots__ = ("_begin", "_captured", "_dropped", "_events", "_kept")

    def __init__(self, captured: bytes | bytearray | None = None) -> None:
        self._captured, self._kept, self._begin = b"" if captured is None else captured, bytearray(), b""
        self._dropped = self._events = 0

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > KEPT_BYTES:
            self._drop()

    def _drop(self) -> None:
        kept = self._kept
        self._begin = self._begin or bytes(kept[:ENDS_BYTES])
        end = len(kept) - ENDS_BYTES
        self._events += kept.count(EVENT, 0, end + len(EVENT) - 1)  # those that begin before the end
        self._dropped += end
        del kept[:end]

    @property
    def begin(self) -> bytes:
        return bytes(self._captured[:ENDS_BYTES] + (self._begin or self._kept[:ENDS_BYTES]))[:ENDS_BYTES]

    @property
    def end(self) -> bytes:
        if not self._kept:
            return bytes(self._captured[-ENDS_BYTES:])
        return bytes(self._captured[-ENDS_BYTES:] + self._kept[-ENDS_BYTES:])[-ENDS_BYTES:]

    @property
    def size(self) -> int:
        return len(self._captured) + self._dropped + len(self._kept)

    @property
    def events(self) -> int:
        return self._captured.count(EVENT) + self._events + self._kept.count(EVENT)
