"""How long tasks of a node hold up its event loop, in processor time, so that a busy machine does not count.

A first try may find caches, or the host of a virtual machine, at their worst: what is too slow is tried again. What is
too slow on a slow machine counts by what the same machine takes at that moment for a work that is always the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from math import inf

import orjson
import trio

OCCUPIED_S_MAX = 0.050
TRIES = 8
DEADLINE_S = 60.0
OVER = object()

SAME_WORK = b"[%b0]" % b"".join(b'{"%d":[%d,"x"]},' % (number, number) for number in range(2000))
SAME_WORK_S = 0.0011  # on two cores of an AMD EPYC with AVX-512, for which the limit is meant
SLOW_MAX = 4.0


def slow_by() -> float:
    """How many times longer this machine takes just now for the same work, at least once as long."""
    return min(max(1.0, min(map(same_work_s, range(3 * TRIES))) / SAME_WORK_S), SLOW_MAX)


def same_work_s(_: int) -> float:
    found, began = {}, time.thread_time()
    for each in orjson.loads(SAME_WORK)[:-1]:
        for name, (number, _) in each.items():
            found[name] = number
    return time.thread_time() - began


def least_s(measured: Callable[[], float], enough_s: float = OCCUPIED_S_MAX) -> float:
    """The least of a few tries, by the speed of the machine; the first one that is good enough is the last one."""
    least = inf
    for _ in range(TRIES):
        least = min(least, measured())
        if least <= enough_s:
            return least
    return least / slow_by()


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
        (took_s, task), self._longest = self._longest, (0.0, "")
        return took_s if took_s <= OCCUPIED_S_MAX else took_s / slow_by(), task


@asynccontextmanager
async def watched() -> AsyncIterator[Turns]:
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    try:
        yield turns
    finally:
        trio.lowlevel.remove_instrument(turns)
