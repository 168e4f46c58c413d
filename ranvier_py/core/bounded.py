"""A dictionary with a bound: the one for all tables that whoever is at the other end could fill."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(dict[Key, Value]):
    """At most `entries_max` entries. A key that is set is the newest; beyond the bound the oldest goes, and is counted.

    Reading moves nothing: who wants the least recently used one to go sets what it reads again.
    """

    __slots__ = ("dropped", "entries_max")

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self.entries_max = entries_max
        self.dropped = 0

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        if len(self) >= self.entries_max:
            del self[next(iter(self))]
            self.dropped += 1
        super().__setitem__(key, value)
