"""The bucket sums of our own table: computed in steps when somebody wants them, and kept for a moment.

Rules: one computation at a time, whoever asks; what is younger than SUMS_LIFE_S serves everybody who asks meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ranvier_py.core.gossip.route_memory import RouteMemory

SUMS_LIFE_S = 1.0
"""Claims learned meanwhile make buckets differ that do not: a second of them is a few."""


class OwnSums:
    def __init__(self, memory: RouteMemory) -> None:
        self._memory = memory
        self._steps: Iterator[bytes | None] | None = None
        self._value = b""
        self._at = -inf

    def step(self, now: float) -> bytes | None:
        """One step, at most 2 ms. None: not ready, call again."""
        if now - self._at < SUMS_LIFE_S:
            return self._value
        if self._steps is None:
            self._steps = self._memory.sums(now)
        value = next(self._steps)
        if value is not None:
            self._value, self._at, self._steps = value, now, None
        return value
