"""What each pane of the page showed, by time: bytes, packed.

Rules: what equals the one before is not kept again. What is older than KEPT_S goes, but for the last one before, which
was shown until the next.
Bounds: BYTES_MAX of packed bytes in all; for more the oldest of all panes goes.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple

KEPT_S = 900.0
BYTES_MAX = 11 << 20
"""With the series less than 16 MiB."""

LEVEL = 1
"""Of packing: a third of the time of the default for a fifth more bytes."""


class PastPane(NamedTuple):
    at: float
    packed: bytes


class Snapshots:
    """See the module. `dropped`: those that went before their time, for want of room."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes, self.dropped = 0, 0
        self._bytes_max = bytes_max
        self._kept: dict[str, deque[PastPane]] = {}

    def add(self, pane: str, shown: bytes, now: float) -> None:
        """Keep what a pane shows."""
        self.keep(pane, zlib.compress(shown, LEVEL), now)

    def keep(self, pane: str, packed: bytes, now: float) -> None:
        """Keep what somebody has packed: of large panes in a thread."""
        kept = self._kept.setdefault(pane, deque())
        if not kept or kept[-1].packed != packed:
            kept.append(PastPane(now, packed))
            self.bytes += len(packed)
        while len(kept) > 1 and kept[1].at <= now - KEPT_S:
            self.bytes -= len(kept.popleft().packed)
        while self.bytes > self._bytes_max:
            oldest = min((each for each in self._kept.values() if each), key=lambda each: each[0].at)
            self.bytes -= len(oldest.popleft().packed)
            self.dropped += 1

    def copy(self) -> Snapshots:
        """Return one that stays as it is, for a thread to read."""
        made = Snapshots(self._bytes_max)
        made._kept = {pane: kept.copy() for pane, kept in self._kept.items()}
        return made

    def at(self, then: float) -> dict[str, tuple[float, bytes]]:
        """Return what was shown at a time, by pane: since when, and what. Panes that were not shown yet are missing."""
        found = {}
        for pane, kept in self._kept.items():
            last = next((each for each in reversed(kept) if each.at <= then), None)
            if last is not None:
                found[pane] = (last.at, zlib.decompress(last.packed))
        return found
