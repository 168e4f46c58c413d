"""How often something may be done that others can provoke: some at once, then one in a while."""

from __future__ import annotations


class Quota:
    """`most` at once, and one more for each `each_s` seconds that went by."""

    __slots__ = ("_at", "_each_s", "_left", "_most")

    def __init__(self, most: int, each_s: float) -> None:
        self._most = most
        self._each_s = each_s
        self._left = float(most)
        self._at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether it may be done now; then it counts as done."""
        self._left = min(float(self._most), self._left + (now - self._at) / self._each_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
