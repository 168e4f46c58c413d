"""Budgets: how many bytes gossip may send in a second, whichever second one looks at.

A `Window` allows so many units within any second. It knows what was spent in the last second, in slots of 50 ms. So
after a quiet second a message as large as the whole budget can go at once, and nothing else until a second has passed.
`wire_bytes` is an upper bound of what a message takes on the wire: with headers, seal and frame, without those of TCP
and IP.

Rules: nobody waits for room. A sender that finds none drops its message, and repair brings it later.
"""

from __future__ import annotations

from collections import deque

from ranvier_py.core.gossip.wire.columns import ENTRY_BYTES
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES
from ranvier_py.core.gossip.wire.messages import Message, RouteUpdates, SideState, TableRows, Vector

SLOTS_PER_S = 20

FIELDS_BYTES, ROWS_FIELDS_BYTES = 36, 64
"""What any route message takes for the frame's length, the small fields and the headers of byte strings (msgpack)."""

MESSAGE_BYTES = OVERHEAD_BYTES + FIELDS_BYTES
"""What any message takes beside its columns."""

VECTOR_ENTRY_BYTES, BACKEND_BYTES = 16, 12


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


def wire_bytes(message: Message) -> int:
    """Return what a route message takes on the wire, at most some 40 bytes too many."""
    if isinstance(message, RouteUpdates | SideState):
        return MESSAGE_BYTES + sum([len(route_update) + ENTRY_BYTES for _, route_update in message.entries])
    if isinstance(message, Vector):
        return MESSAGE_BYTES + VECTOR_ENTRY_BYTES * len(message.entries)
    columns = sum([len(member) for member in message if isinstance(member, bytes)])
    if isinstance(message, TableRows):
        return OVERHEAD_BYTES + ROWS_FIELDS_BYTES + BACKEND_BYTES * len(message.backends) + columns
    return MESSAGE_BYTES + columns
