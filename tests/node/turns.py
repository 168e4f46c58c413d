"""How long tasks of a node hold up its event loop, in processor time, so that a busy machine does not count.

A first try may find caches, or the host of a virtual machine, at their worst: what is too slow is tried again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from math import inf

import trio

OCCUPIED_S_MAX = 0.050
TRIES = 8
DEADLINE_S = 60.0
OVER = object()


def least_s(measured: Callable[[], float], enough_s: float = OCCUPIED_S_MAX) -> float:
    """The least of a few tries, of which the first that is good enough is the last."""
    least = inf
    for _ in range(TRIES):
        least = min(least, measured())
        if least <= enough_s:
            break
    return least


def longest_step_s(steps: Iterator[object]) -> float:
    """The longest step of an iterator, of which the last is the one that ends it."""
    longest = 0.0
    while True:
        began = time.thread_time()
        is_over = next(steps, OVER) is OVER
        longest = max(longest, time.thread_time() - began)
        if is_over:
            return longest


class Turns(trio.abc.Instrument):
    """The longest turn of a task of the node since it was last asked, in seconds of processor time."""

    def __init__(self) -> None:
        self._longest = (0.0, "")
        self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = time.thread_time() - self._began
        if took_s > self._longest[0] and not task.name.startswith(("tests.", "<test")):
            self._longest = (took_s, task.name)

    def take(self) -> tuple[float, str]:
        found, self._longest = self._longest, (0.0, "")
        return found


@asynccontextmanager
async def watched() -> AsyncIterator[Turns]:
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    try:
        yield turns
    finally:
        trio.lowlevel.remove_instrument(turns)
