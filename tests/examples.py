"""How much is tried of what could be tried for ever: all in CI and with WHOLE_SUITE=1, a part while one works."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

LEAST = 10


def whole(much: Any, enough: Any) -> Any:
    return much if "WHOLE_SUITE" in os.environ else enough


def examples(count: int) -> int:
    """How many hypothesis tries, of a test that tries `count` in CI."""
    return whole(count, min(count, max(LEAST, count // 4)))


def some(values: Iterable[object], kept: int = 1) -> list[object]:
    """Parameters of a test: all but the first ones are slow."""
    values = list(values)
    return [*values[:kept], *(pytest.param(value, marks=pytest.mark.slow) for value in values[kept:])]
