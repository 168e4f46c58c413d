"""When requests came: time stamps in many spellings, and times for traces that have none.

A stamp is a number or an ISO 8601 text. A number is seconds; from 1e11 on it can't be (the year 5138), so it is taken
for milliseconds since 1970. `stamp_unit_s` settles it otherwise. Only differences count: a trace starts at 0.
Stamps that were rounded down to steps are spread over the step, or every router would see bursts that were none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import isfinite
from random import Random
from typing import Any

from ranvier_py.replay.traces.lines import Line, shown

MILLISECONDS_FROM = 1e11
STAMP_MAX = 1e19  # nanoseconds since 1970, and room


def drawn(seed: int, what: str) -> Random:
    """The source of everything drawn for one purpose."""
    return Random(f"{seed}/{what}")  # noqa: S311  # times of a replay are no secrets


def stamp_s(line: Line, name: str, unit_s: float | None) -> float:
    """The time stamp under `name`, in seconds since whenever. Raises TraceError."""
    value: Any = line.fields.get(name)
    try:
        if type(value) is str:
            return datetime.fromisoformat(value).timestamp()
        if type(value) in (int, float) and isfinite(value) and abs(value) <= STAMP_MAX:
            return float(value * (unit_s or (0.001 if value >= MILLISECONDS_FROM else 1.0)))
    except (ValueError, OverflowError, OSError):  # no date, or one before the years that a clock knows
        pass
    raise line.wrong(f"{name} {shown(value)}", "a time stamp: seconds, milliseconds since 1970, or ISO 8601")


def from_start(stamps: Sequence[float]) -> list[float]:
    """The same times, the earliest of them 0."""
    first = min(stamps, default=0.0)
    return [stamp - first for stamp in stamps]


def spread(times: Sequence[float], step_s: float, seed: int) -> list[float]:
    """Each time at random within the step that begins at it."""
    rng = drawn(seed, "arrivals")
    return [at + rng.uniform(0.0, step_s) for at in times] if step_s > 0 else list(times)


def repeated(stamps: Sequence[float]) -> bool:
    """Whether there are so few distinct stamps that they must have been rounded."""
    return 2 * len(set(stamps)) <= len(stamps)
