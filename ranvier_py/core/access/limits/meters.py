"""What limits count: a meter for each limit of a key, of its tenant, and of the tenant for some models.

A meter's id is made of its scope, measure and span: its amount may change, what was counted stays. Calendar windows are
those of UTC, by number; weeks begin on Mondays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, IntEnum
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from ranvier_py.core.access.limit_values import CalendarWindow, Limits, Mode, ModelCost, Unit

HOUR_S, DAY_S = 3600, 86_400
MONDAY_DAYS = 3  # 1970 began on a Thursday


class Measure(Enum):
    """What is counted."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    UNCACHED = "uncached tokens"  # all but those of the prompt that the engine had cached
    COST = "cost"
    CONCURRENT = "concurrent requests"


class LimitSpan(IntEnum):
    """For how long a count holds: while a request runs, for a minute that slides, or until a calendar window ends."""

    REQUEST = 0
    MINUTE = 1
    HOUR = 2
    DAY = 3
    WEEK = 4
    MONTH = 5


CALENDAR: Mapping[CalendarWindow, LimitSpan] = {window: LimitSpan[window.name] for window in CalendarWindow}


class Amounts(NamedTuple):
    """What a request takes, or took: once it is over, no place."""

    tokens: float = 0.0
    uncached: float = 0.0
    cost: float = 0.0
    requests: float = 1.0
    places: float = 1.0


AmountsFields = tuple[float, float, float, float, float]
amounts_of: Callable[[AmountsFields], Amounts] = partial(tuple.__new__, Amounts)
"""As `placement.match_of`."""


INDEX = {
    Measure.TOKENS: 0,
    Measure.UNCACHED: 1,
    Measure.COST: 2,
    Measure.REQUESTS: 3,
    Measure.CONCURRENT: 4,
}
"""Of a measure in Amounts."""


@dataclass(frozen=True, slots=True, eq=False)
class Meter:
    """One limit as it is enforced."""

    id: int
    scope: str  # "tenant acme", "key k1", "tenant acme, models qwen*"
    measure: Measure
    span: LimitSpan
    amount: float
    shadow: bool
    index: int  # of what it counts in Amounts
    home: int  # names the node that decides near the limit: the same one about all limits of a tenant

    @property
    def name(self) -> str:
        return (
            self.measure.value
            if self.span is LimitSpan.REQUEST
            else f"{self.measure.value} per {self.span.name.lower()}"
        )


def meters_of(scope: str, limits: Limits, tenant: str) -> Iterator[Meter]:
    home = number_of(tenant)
    each = [
        (Measure.REQUESTS, LimitSpan.MINUTE, limits.requests_per_minute),
        (Measure.TOKENS, LimitSpan.MINUTE, limits.tokens_per_minute),
        (Measure.UNCACHED, LimitSpan.MINUTE, limits.uncached_tokens_per_minute),
        (Measure.CONCURRENT, LimitSpan.REQUEST, limits.concurrent),
    ]
    for budget in limits.budget:
        measure = Measure.TOKENS if budget.unit is Unit.TOKENS else Measure.COST
        each.append((measure, CALENDAR[budget.window], budget.amount))  # type: ignore[arg-type]
    for measure, span, amount in each:
        if amount is not None:
            number = number_of(f"{scope}\0{measure.value}\0{span.name}")
            yield Meter(
                id=number,
                scope=scope,
                measure=measure,
                span=span,
                amount=amount,
                shadow=limits.mode is Mode.SHADOW,
                index=INDEX[measure],
                home=home,
            )


def number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def window_at(span: LimitSpan, wall: float) -> int:
    """Return the number of the calendar window at this time, in seconds since 1970."""
    if span is LimitSpan.HOUR:
        return int(wall // HOUR_S)
    days = int(wall // DAY_S)
    if span is LimitSpan.DAY:
        return days
    if span is LimitSpan.WEEK:
        return (days + MONDAY_DAYS) // 7
    day = datetime.fromtimestamp(wall, UTC)
    return 12 * day.year + day.month - 1


def ends_at(span: LimitSpan, window: int) -> float:
    """Return when a calendar window ends, in seconds since 1970."""
    if span is LimitSpan.HOUR:
        return (window + 1) * HOUR_S
    if span is LimitSpan.DAY:
        return (window + 1) * DAY_S
    if span is LimitSpan.WEEK:
        return (7 * (window + 1) - MONDAY_DAYS) * DAY_S
    year, month = divmod(window + 1, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


def cost_of(
    cost: ModelCost, prompt: float, cached: float, output: float, *, written: float = 0, reasoning: float = 0
) -> float:
    """Return what these tokens cost; `cached` and `written` are part of the prompt, `reasoning` of the output."""
    fresh = max(0.0, prompt - cached - written)
    answer = max(0.0, output - reasoning) * cost.output + reasoning * cost.reasoning
    return fresh * cost.input + cached * cost.cached_input + written * cost.cache_write + answer
