"""Dictionaries and a queue with a bound, for all that the other end of a connection could fill."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """Holds at most `entries_max` entries. A key that is set becomes the newest; beyond the bound the oldest one is
    dropped and counted.

    Reading does not change the order: to drop the least recently used entry, set an entry again after reading it.
    A plain dict would look for its oldest entry among all that were deleted before it."""

    __slots__ = ("dropped", "entries_max")

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self.entries_max = entries_max
        self.dropped = 0

    def __setitem__(self, key: Key, value: Value) -> None:
        if key in self:
            self.move_to_end(key)
        elif len(self) >= self.entries_max:
            self.popitem(last=False)
            self.dropped += 1
        OrderedDict.__setitem__(self, key, value)


class FoundOf(Generic[Key, Value]):
    """What was found out of at most `entries_max` objects that do not change: of each itself, not of what equals it."""

    def __init__(self, entries_max: int) -> None:
        self._found: BoundedDict[int, tuple[Key, Value]] = BoundedDict(entries_max)

    def get(self, key: Key) -> Value | None:
        known = self._found.get(id(key))
        return known[1] if known is not None and known[0] is key else None

    def keep(self, key: Key, value: Value) -> Value:
        self._found[id(key)] = key, value
        return value


class BoundedQueue(deque[Value]):
    """Values that wait for somebody to take them: at most `entries_max`, beyond which the oldest one is dropped."""

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self.entries_max = entries_max
        self.came: Callable[[], object] = lambda: None  # called when a value comes into the empty queue

    def put(self, value: Value) -> int:
        """Append a value. Returns how many were dropped for want of room."""
        full = len(self) >= self.entries_max
        if full:
            self.popleft()
        self.append(value)
        if len(self) == 1:
            self.came()
        return full

    def taken(self) -> Iterator[Value]:
        """Yield the values, each once."""
        while self:
            yield self.popleft()
