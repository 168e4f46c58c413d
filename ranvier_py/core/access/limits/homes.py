"""The home of a limit: the node that decides for all about requests near it, for whoever asks.

Rule: what it grants it books, as if the asker had sent it already, and of nobody who has given up, which would stay
booked; a question that comes again gets the same answer.
Bound: DECIDED_MAX questions are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranvier_py.core.access.limits.count import Count, CountRow
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.bounded import BoundedDict

DECIDED_MAX = 8192  # each may come several times within the time that it has
SILENT_S, SILENCES_MAX = 1.0, 2


class AskRow(NamedTuple):
    """One of our rows, to which `extra` is to be added, of a limit of `amount`."""

    limit: int
    span: int
    window: int
    age_ms: int
    reserved: float
    settled: float
    used: float
    extra: float
    amount: float


class LimitHome:
    """Decides by the counts of this node. `room`: of a limit of some amount, by its count, now."""

    def __init__(self, counts: Counters, room: Callable[[float, Count, float], float]) -> None:
        self._counts, self._room = counts, room
        self._decided = BoundedDict[tuple[int, int], int](DECIDED_MAX)

    def decide(self, asker: int, number: int, rows: Sequence[AskRow], now: float) -> int:
        """Decide about a question: 0 if all fits, else the limit that is reached."""
        decided = self._decided.get((asker, number))
        if decided is None:
            decided = self._decided[asker, number] = self._judge(asker, rows, now)
        return decided

    def _judge(self, asker: int, rows: Sequence[AskRow], now: float) -> int:
        self._counts.book(now)
        fits = []
        for ask in rows:
            self._counts.merge(CountRow(ask.limit, asker, *ask[1:7]), now)
            count = self._counts.known(ask.limit, now)
            row = count.rows.get((asker, ask.window)) if count is not None else None
            if row is None or ask.extra > self._room(ask.amount, row.count, now):  # None: its window is not ours
                return ask.limit
            if 0 < ask.extra <= row.settled - ask.settled:  # it came so late that the asker has given up, and said so
                return ask.limit
            fits.append((row, ask.extra))
        for row, extra in fits:
            row.count.add(row, extra, 0.0, 0.0, now)
            row.count.tell(extra)
        return 0


class SilentHomes:
    """Homes that do not answer: after SILENCES_MAX times in a row, one is not asked for SILENT_S."""

    def __init__(self) -> None:
        self._silent = BoundedDict[int, tuple[int, float]](1024)

    def has(self, session: int, now: float) -> bool:
        return now < self._silent.get(session, (0, 0.0))[1]

    def answered(self, session: int) -> None:
        self._silent.pop(session, None)

    def add(self, session: int, now: float) -> None:
        """Note that a home did not answer in time."""
        times = self._silent.get(session, (0, 0.0))[0] + 1
        self._silent[session] = times, now + SILENT_S if times >= SILENCES_MAX else 0.0
