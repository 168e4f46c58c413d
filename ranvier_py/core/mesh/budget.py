"""Budgets: how many bytes gossip may send in a second, whichever second one looks at.

A `Window` allows so many units within any second. It knows what was spent in the last second, in slots of 50 ms. So
after a quiet second a message as large as the whole budget can go at once, and nothing else until a second has passed.

Rules: nobody waits for room. A sender that finds none drops its message, and repair brings it later.
"""

from __future__ import annotations

from collections import deque

from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES

SLOTS_PER_S = 20

FIELDS_BYTES = 36
"""What any message takes for the frame's length, the small fields and the headers of byte strings (msgpack)."""

MESSAGE_BYTES = OVERHEAD_BYTES + FIELDS_BYTES
"""What any message takes beside its columns."""


class Window:
    """Allows `per_s` units in any one second. `now` never goes back."""

    __slots__ = ("_slots", "_spent", "per_s")

    def __init__(self, per_s: int) -> None:
        self.per_s = per_s
        self._slots: deque[tuple[int, int]] = deque()
        self._spent = 0

    def room(self, now: float) -> int:
        """Return how many units may be spent now; below 0 if more was spent than allowed."""
        slots = self._slots
        first = int(now * SLOTS_PER_S) - SLOTS_PER_S  # a slot counts until its end is a second ago
        while slots and slots[0][0] < first:
            self._spent -= slots.popleft()[1]
        return self.per_s - self._spent

    def spend(self, units: int, now: float) -> None:
        slots, slot = self._slots, int(now * SLOTS_PER_S)
        if slots and slots[-1][0] == slot:
            slots[-1] = (slot, slots[-1][1] + units)
        else:
            slots.append((slot, units))
        self._spent += units
