"""The bucket sums of our own table: computed in steps when somebody wants them, once for all who asked before it began.

Rule: whoever asked gets sums that were begun after he asked, never older ones. He will take it that what we had then is
in them: with older sums he would miss, for ever, what we learned between.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ranvier_py.core.gossip.replication.route_store import RouteMemory


class OwnSums:
    def __init__(self, memory: RouteMemory) -> None:
        self.begun_at = -inf  # of the last sums that were finished
        self._memory = memory
        self._steps: Iterator[bytes | None] | None = None
        self._steps_begun_at = -inf
        self._value = b""

    def step(self, since: float, now: float) -> bytes | None:
        """One step, at most 2 ms, towards sums that were begun at `since` or later. None: not ready, call again."""
        if self.begun_at >= since:
            return self._value
        if self._steps is None:
            self._steps, self._steps_begun_at = self._memory.sums(now), now
        value = next(self._steps)
        if value is not None:
            self._value, self.begun_at, self._steps = value, self._steps_begun_at, None
        return value if self.begun_at >= since else None
