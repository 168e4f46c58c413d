"""Redis's clock, as a router knows it: by it the events of several routers are in one order.

Each reply tells Redis's time, which is that of some moment between question and answer. The sample with the least doubt
is kept; its doubt grows with the drift of two clocks. A sample that cannot be squared with it is believed: the clock
was set. Sequences of one router ascend strictly, whatever its idea of the time does, so its own order is never lost.
Two routers' order is right to the doubt, half a round trip: what is wrong within it the next event puts right.
"""

from __future__ import annotations

from math import inf

DRIFT = 1e-4  # seconds a second: ten times that of a bad quartz


class RedisClock:
    """Times of this process are monotonic, in seconds; those of Redis are microseconds since 1970."""

    __slots__ = ("_at", "_doubt_s", "_last", "_offset")

    def __init__(self) -> None:
        self._offset = 0.0  # microseconds to add to ours
        self._doubt_s = inf
        self._at = 0.0
        self._last = 0

    def learn(self, redis: int, asked: float, answered: float) -> None:
        """Redis said this between two moments of ours."""
        doubt_s = max(0.0, answered - asked) / 2
        offset = redis - (asked + answered) / 2 * 1e6
        doubt_now_s = self.doubt_s(answered)
        was_set = abs(offset - self._offset) > (doubt_s + doubt_now_s) * 1e6
        if doubt_s <= doubt_now_s or was_set:
            self._offset, self._doubt_s, self._at = offset, doubt_s, answered

    def doubt_s(self, now: float) -> float:
        return self._doubt_s + max(0.0, now - self._at) * DRIFT

    def sequence(self, now: float) -> int:
        """The number of an event heard at `now`; above all numbers before."""
        self._last = max(self._last + 1, int(now * 1e6 + self._offset))
        return self._last

    def moment(self, redis: int) -> float:
        """A time of Redis in ours."""
        return (redis - self._offset) / 1e6
