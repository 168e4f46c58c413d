"""Numbers by name, one of each second, for the last SECONDS.

Rule: a name that was not given for all of that time is forgotten. A second without its value is NaN.
Bounds: NAMES_MAX names, each an array of fixed size, 4 MB in all; those beyond are counted and not kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from math import nan

SECONDS = 900
NAMES_MAX = 512
"""Four times as many as the largest fleet in use has engines, and all else that is shown."""


class SeriesHistory:
    """The history of some numbers. `ended_at`: the time of the last values; `recorded`: how many there are of each."""

    def __init__(self, seconds: int = SECONDS, names_max: int = NAMES_MAX) -> None:
        self.ended_at, self.recorded, self.dropped = 0.0, 0, 0
        self._seconds, self._names_max, self._place = seconds, names_max, -1
        self._values: dict[str, array[float]] = {}
        self._given: dict[str, int] = {}  # by name the number of the second in which it was given last
        self._second = 0

    def __len__(self) -> int:
        return len(self._values)

    def record(self, values: Iterable[tuple[str, float]], at: float) -> None:
        """Take the values of the next second."""
        self._second += 1
        self._place, self.ended_at = (self._place + 1) % self._seconds, at
        self.recorded, self.dropped = min(self._seconds, self.recorded + 1), 0
        place, known, given, second = self._place, self._values, self._given, self._second
        for column in known.values():
            column[place] = nan
        for name, value in values:
            if name in known or self._has_room(name):
                known[name][place], given[name] = value, second
        for name in [name for name, last in given.items() if last <= second - self._seconds]:
            del known[name], given[name]

    def _has_room(self, name: str) -> bool:
        """Make room for a new name, if there is any."""
        if len(self._values) >= self._names_max:
            self.dropped += 1
            return False
        self._values[name] = array("d", (nan,)) * self._seconds
        return True

    def portions(self, names: int) -> Iterator[dict[str, array[float]]]:
        """Yield the values, oldest first, so many names at a time. What changes meanwhile may be in it or not."""
        wanted = iter([*self._values])
        while portion := [*islice(wanted, names)]:
            yield self.of(portion)

    def of(self, names: Iterable[str]) -> dict[str, array[float]]:
        """Return the values of those names that are known, oldest first."""
        return {name: self._ordered(self._values[name]) for name in names if name in self._values}

    def _ordered(self, column: array[float]) -> array[float]:
        following = self._place + 1
        return column[following:] + column[:following] if self.recorded == self._seconds else column[:following]
