"""Records how many requests an engine has at each moment.

Moments are those of the engine's model, which is on time even where a busy machine lets the process report them late.
"""

from __future__ import annotations

from collections import deque
from typing import Any

CHANGES_MAX = 100_000
"""A request changes it three times; the oldest changes are dropped, and counted, so that nobody misses them."""


class Occupancy:
    """The latest changes, as (seconds, more requests that run, more requests that wait)."""

    def __init__(self) -> None:
        self.changes: deque[tuple[float, int, int]] = deque(maxlen=CHANGES_MAX)
        self.dropped = 0

    def note(self, at: float, running: int, waiting: int) -> None:
        """Note that so many more requests run and wait from then on, which may be before the last change."""
        self.dropped += len(self.changes) == CHANGES_MAX
        self.changes.append((at, running, waiting))

    def record(self, ahead_s: float) -> dict[str, Any]:
        """Return since when how many requests ran and waited, in order of time, by a clock that is so far ahead."""
        running = waiting = 0
        found: list[tuple[float, int, int]] = []
        for at, more_run, more_wait in sorted(self.changes, key=lambda change: change[0]):
            running, waiting = running + more_run, waiting + more_wait
            found.append((at + ahead_s, running, waiting))
        return {"changes": found, "dropped": self.dropped}
