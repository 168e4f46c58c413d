"""Virtual time: calls that are planned for a time and made in order, without a clock.

`run` makes every call at the time for which it was planned. Calls planned for the same time are made in the order in
which they were planned, so a run is a function of its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from typing import Any


class VirtualTime:
    """`now` is in seconds; `done` counts the calls that were made."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.done = 0
        self._planned: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    @property
    def next_at(self) -> float:
        """The time of the next call; infinite if none is planned."""
        return self._planned[0][0] if self._planned else inf

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Plan a call. A time in the past means now."""
        self._number += 1
        heapq.heappush(self._planned, (max(when, self.now), self._number, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._planned, (self.now + seconds, self._number, call, arguments))

    def run(self, until: float) -> None:
        """Make all calls that are planned up to and including `until`; then it is `until`."""
        planned, pop = self._planned, heapq.heappop
        while planned and planned[0][0] <= until:
            self.now, _, call, arguments = pop(planned)
            self.done += 1
            call(*arguments)
        self.now = max(self.now, until)

    def run_until(self, condition: Callable[[], bool], within_s: float, step_s: float = 0.1) -> float:
        """Run until `condition`, checked every `step_s`, holds. Returns seconds. AssertionError after `within_s`."""
        began = self.now
        while not condition():
            assert self.now - began < within_s, f"not within {within_s} s"
            self.run(self.now + step_s)
        return self.now - began
