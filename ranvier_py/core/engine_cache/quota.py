"""Limits how often something is done that others can provoke: a burst at once, then one at regular intervals."""

from __future__ import annotations


class Quota:
    """Allows `most` at once, and one more for each `each_s` seconds that passed."""

    __slots__ = ("_at", "_each_s", "_left", "_most")

    def __init__(self, most: int, each_s: float) -> None:
        self._most = most
        self._each_s = each_s
        self._left = float(most)
        self._at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether it may be done now. If so, it counts as done."""
        self._left = min(float(self._most), self._left + (now - self._at) / self._each_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
