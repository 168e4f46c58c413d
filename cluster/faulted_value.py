"""Faults that overlap: several of one kind at one place, of which each ends by itself. Pure; both harnesses use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class FaultedValue(Generic[Value]):
    """One condition of a node, an engine or the like: the value of the latest fault in force, or else the usual one.

    It is true while a fault is in force. `changed` gets the value after each begin and end.
    """

    def __init__(self, usual: Value, changed: Callable[[Value], object] = lambda _: None) -> None:
        self.usual = usual
        self._changed = changed
        self._faults: dict[object, Value] = {}

    def __bool__(self) -> bool:
        return bool(self._faults)

    @property
    def value(self) -> Value:
        return next(reversed(self._faults.values()), self.usual)

    def begin(self, value: Value) -> Callable[[], bool]:
        """Begin a fault. The returned function ends it, and returns whether it was still in force."""
        fault = object()
        self._faults[fault] = value
        self._changed(self.value)

        def end() -> bool:
            was_in_force = fault in self._faults
            if was_in_force:
                del self._faults[fault]
                self._changed(self.value)
            return was_in_force

        return end

    def clear(self) -> None:
        """End all faults."""
        if self._faults:
            self._faults.clear()
            self._changed(self.usual)
