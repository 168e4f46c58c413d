"""Records how many requests an engine has at each moment, by the clock that all processes of a machine share."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any

CHANGES_MAX = 100_000
"""A request changes it about four times; the oldest changes are dropped, and counted, so that nobody misses them."""


class Occupancy:
    """The latest changes, as (seconds of the machine, requests that run, requests that wait)."""

    def __init__(self) -> None:
        self.changes: deque[tuple[float, int, int]] = deque([(monotonic(), 0, 0)], CHANGES_MAX)
        self.dropped = 0

    def note(self, running: int, waiting: int) -> None:
        """Note what the engine has from now on."""
        if self.changes[-1][1:] != (running, waiting):
            self.dropped += len(self.changes) == CHANGES_MAX
            self.changes.append((monotonic(), running, waiting))

    def record(self) -> dict[str, Any]:
        return {"changes": [*self.changes], "dropped": self.dropped}
