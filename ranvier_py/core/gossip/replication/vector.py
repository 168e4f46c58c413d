"""Version vectors: for each origin, the number up to which everything is here.

The hash of a vector is the XOR of one pseudo-random number for each origin and its number: it does not depend on order,
and two nodes compare everything they know of each other's logs by these 8 bytes. It is asked for a few times a second
and moves with each route update, so it is brought up to date when it is asked for.
Rules: an origin that taught nothing yet (number 0) is not in the vector. Within one session numbers only grow.
Cost: 0.2 us for each step, 1 us for each origin that moved since the hash was asked for.
"""

from __future__ import annotations

from collections.abc import ItemsView

from ranvier_py.core.prompts.fingerprint import GOLDEN, MASK, mix


def term(origin: int, number: int) -> int:
    """What one origin adds to the hash."""
    return mix((mix(origin) + number * GOLDEN) & MASK)


class VersionVector:
    """Origins (sessions, u64) and numbers (u64)."""

    __slots__ = ("_hash", "_moved", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._hash = 0
        self._moved: dict[int, int] = {}  # origin -> its number as the hash has it

    @property
    def hash(self) -> int:
        numbers, moved = self._numbers, self._moved
        for origin, before in moved.items():
            for number in (before, numbers.get(origin, 0)):
                self._hash ^= term(origin, number) if number else 0
        moved.clear()
        return self._hash

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, origin: int) -> int:
        """The number of this origin; 0 for one that taught nothing."""
        return self._numbers.get(origin, 0)

    def items(self) -> ItemsView[int, int]:
        return self._numbers.items()

    def raise_to(self, origin: int, number: int) -> None:
        """Everything of `origin` up to `number`, which is greater than before, is here."""
        before = self._numbers.get(origin, 0)
        assert number > before
        self._moved.setdefault(origin, before)
        self._numbers[origin] = number

    def drop(self, origin: int) -> None:
        """Forget an origin, if it is there."""
        number = self._numbers.pop(origin, 0)
        if number:
            self._moved.setdefault(origin, number)
