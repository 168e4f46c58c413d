"""Limits of tenants and keys, and what a model's tokens cost. Frozen values; what is None, empty or 0 is unlimited.

A limit holds over all nodes together. Minutes slide; hours, days, weeks (from Monday) and months are those of UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CalendarWindow(Enum):
    """In which a budget is spent."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Unit(Enum):
    """What a budget counts: tokens, or what they cost by the weights of their model."""

    TOKENS = "tokens"
    COST = "cost"


class Mode(Enum):
    """What becomes of a request beyond a limit: it is refused, or only counted as one that would be."""

    ENFORCE = "enforce"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Budget:
    amount: float  # above 0
    window: CalendarWindow
    unit: Unit = Unit.TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one tenant, of one key, or of one tenant for the models of one glob.

    `uncounted`: requests whose tokens cannot be counted here (batches, files, realtime, background) pass.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    uncached_tokens_per_minute: int | None = None
    concurrent: int | None = None
    budget: Sequence[Budget] = ()
    mode: Mode = Mode.ENFORCE
    uncounted: bool = False


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token of one model costs, in any currency. Input that was cached, or written to a cache, has its own.
    `cached_answers`: the share of that which an answer costs that was computed for an equal request."""

    input: float = 1.0
    cached_input: float = 1.0
    cache_write: float = 1.0
    output: float = 1.0
    reasoning: float = 1.0
    cached_answers: float = 0.0
