"""Keeps the two ends of an answer as it passes, where engines write their counts, and counts its events."""

from __future__ import annotations

ENDS_BYTES = 4096
"""From the beginning and the end of an answer: where engines write the counts."""


class AnswerEnds:
    """What is kept of one answer."""

    __slots__ = ("begin", "end", "events", "size")

    def __init__(self) -> None:
        self.begin = self.end = b""
        self.events = self.size = 0

    def add(self, data: bytes) -> None:
        if len(self.begin) < ENDS_BYTES:
            self.begin += data[: ENDS_BYTES - len(self.begin)]
        self.end = data[-ENDS_BYTES:] if len(data) >= ENDS_BYTES else (self.end + data)[-ENDS_BYTES:]
        self.events += data.count(b"data:")
        self.size += len(data)
