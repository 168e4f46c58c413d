"""Bugs in loops: what `house.loops` finds, made to fail as it goes round."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest

from tests.house import with_call_in_loops

BUG = "planted_bug"


class Bug:
    """Raises in a loop until it is mended, or was met so often."""

    def __init__(self, times_max: int = 100) -> None:
        self.rounds = 0
        self.left = times_max

    def __call__(self) -> None:
        self.rounds += 1
        if self.left > 0:
            self.left -= 1
            raise RuntimeError("a bug of ours")


def plant(monkeypatch: pytest.MonkeyPatch, module: str, name: str, bug: Bug) -> None:
    """The coroutine as it is, with the bug as the first thing that each round of its loops does."""
    *path, last = name.split(".")
    home = importlib.import_module(module)
    monkeypatch.setattr(home, BUG, bug, raising=False)
    made: dict[str, Any] = {}
    exec(with_call_in_loops(module, name, BUG), vars(home), made)
    monkeypatch.setattr(functools.reduce(getattr, path, home), last, made[last])
