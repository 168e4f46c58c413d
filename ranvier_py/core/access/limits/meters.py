"""What limits count: a meter for each limit of a key, of its tenant, and of the tenant for some models.

A meter's id is made of its scope, measure and span: its amount may change, what was counted stays. Calendar windows are
those of UTC, by number; weeks begin on Mondays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, IntEnum
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import NamedTuple

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.limit_values import CalendarWindow, Limits, Mode, ModelCost, Unit
from ranvier_py.core.bounded import BoundedDict

IDENTITIES_MAX = 4096  # whose meters are kept made; making them anew only costs time
MODELS_MAX = 64  # of one identity, likewise
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
            yield Meter(number, scope, measure, span, amount, limits.mode is Mode.SHADOW, INDEX[measure], home)


def number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class IdentityMeters:
    """The meters of one identity. `first`: what counts a request by its head alone; `rest`: all others but those of its
    tenant's models. `uncounted`: requests whose tokens nobody counts may pass its limits of tokens."""

    __slots__ = (
        "_by_model",
        "_globs",
        "counts_cost",
        "counts_tokens",
        "first",
        "identity",
        "rest",
        "shown",
        "uncounted",
    )

    def __init__(self, identity: Identity, find: Callable[[str, Limits, str], tuple[Meter, ...]]) -> None:
        tenant, key = identity.tenant, identity.key
        own = [*find(f"tenant {tenant.name}", tenant.limits, tenant.name)]
        scopes = [tenant.limits, *[limits for _, limits in tenant.model_limits]]
        if key is not None:
            own += find(f"key {key.id}", key.limits, tenant.name)
            scopes.append(key.limits)
        self._globs = [
            (glob, find(f"tenant {tenant.name}, models {glob}", limits, tenant.name))
            for glob, limits in tenant.model_limits
        ]
        self.identity = identity
        self.first = tuple(meter for meter in own if meter.measure in BY_HEAD)
        self.rest = tuple(meter for meter in own if meter.measure not in BY_HEAD)
        minutes = [meter for meter in own if meter.span is LimitSpan.MINUTE and not meter.shadow]
        self.shown = tuple(meter for meter in minutes if meter.measure in SHOWN)
        self.counts_cost = any(budget.unit is Unit.COST for limits in scopes for budget in limits.budget)
        self.counts_tokens = any(map(counts_tokens, scopes))
        self.uncounted = all(limits.uncounted for limits in scopes if counts_tokens(limits))
        self._by_model = BoundedDict[str, tuple[Meter, ...]](MODELS_MAX)

    @property
    def is_unlimited(self) -> bool:
        return not (self.first or self.rest or self._globs)

    def of(self, model: str) -> tuple[Meter, ...]:
        """Return what counts a request for this model beside `first`."""
        if not self._globs:
            return self.rest
        meters = self._by_model.get(model)
        if meters is None:
            more = [each for glob, meters in self._globs if fnmatchcase(model, glob) for each in meters]
            self._by_model[model] = meters = (*self.rest, *more)
        return meters


BY_HEAD, SHOWN = (Measure.REQUESTS, Measure.CONCURRENT), (Measure.REQUESTS, Measure.TOKENS)


def counts_tokens(limits: Limits) -> bool:
    each = limits.tokens_per_minute, limits.uncached_tokens_per_minute
    return any(amount is not None for amount in each) or bool(limits.budget)


class Meters:
    """Finds the meters of identities."""

    def __init__(self) -> None:
        self._made = BoundedDict[tuple[str, str], IdentityMeters](IDENTITIES_MAX)
        self._scopes = BoundedDict[str, tuple[Limits, tuple[Meter, ...]]](IDENTITIES_MAX)

    def of(self, identity: Identity) -> IdentityMeters:
        name = identity.tenant.name, identity.key_id
        found = self._made.get(name)
        if found is None or found.identity is not identity:  # its limits may have changed
            self._made[name] = found = IdentityMeters(identity, self._find)
        return found

    def _find(self, scope: str, limits: Limits, tenant: str) -> tuple[Meter, ...]:
        """Return the meters of a scope, the same ones for all its keys as long as its limits stay."""
        found = self._scopes.get(scope)
        if found is None or found[0] != limits:
            self._scopes[scope] = found = limits, tuple(meters_of(scope, limits, tenant))
        return found[1]


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
