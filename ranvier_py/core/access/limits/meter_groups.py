"""The limits that count a request together, as groups: of an identity by the head of a request, and for each model.

A group may take `allowed` of each of its limits until its slot ends, without a look at their counts: what it took is
in `tally`, which is booked later for all of them. Rule: no request takes more of anything than its tokens, or is one
request, so one number stands for all limits of a group but those of cost. Bounds: IDENTITIES_MAX, MODELS_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, sqrt
from typing import NamedTuple

from ranvier_py.core.access.identity import Identity, globs
from ranvier_py.core.access.limit_values import Limits, Unit
from ranvier_py.core.access.limits.count import Count, SlotTally
from ranvier_py.core.access.limits.meters import INDEX, LimitSpan, Measure, Meter, meters_of
from ranvier_py.core.bounded import BoundedDict

IDENTITIES_MAX = 4096  # whose meters are kept made; making them anew only costs time
MODELS_MAX = 64  # of one identity, likewise
BY_HEAD = (Measure.REQUESTS, Measure.CONCURRENT)
NO_TALLY = SlotTally(-1, ())
DEVIATIONS = 2.0  # standard ones: a sum of many exceeds its mean by more once in 44 times


class Excess(NamedTuple):
    """By how much a request may take more tokens than are reserved: the variance of their number, and the most."""

    variance: float
    most: float

    def per(self, amount: float) -> Excess:
        """Return it for each of so many tokens."""
        return Excess(self.variance / amount, self.most / amount) if self.variance else self

    def margin(self, amount: float) -> float:
        """Return what must be left beside an amount, so that all that runs stays within both.
        Sums of many vary less than each."""
        if not self.variance or amount <= 0.0:  # a little less than nothing may be left of what ran: it is rounded
            return 0.0
        return min(DEVIATIONS * sqrt(self.variance * amount), self.most * amount)


NO_EXCESS = Excess(0.0, 0.0)


class MeterGroup:
    """Limits that count a request together (see the module). `unit`: what `left` and `floor` count, a place in Amounts.

    Of the limit of this `amount` that is `shown`, one of those that it `shows`, so much is left as `left` and `back`,
    which was given back since; `left` falls by all that is taken, down to `floor`. `line`: for whoever shows it.
    `excess`: of each token that is reserved. `together`: groups with one tally, the one by the head first; none: alone.
    """

    __slots__ = (
        *("amount", "back", "cost_left", "floor", "left", "line", "meters"),
        *("excess", "shown", "shows", "tally", "together", "unit", "until"),
    )

    def __init__(self, meters: Iterable[Meter], shows: Iterable[Meter] = ()) -> None:
        self.meters, self.shows = tuple(meters), frozenset(shows)
        by_head = all(meter.measure in BY_HEAD for meter in self.meters)
        self.unit = INDEX[Measure.REQUESTS if by_head else Measure.TOKENS]
        self.tally, self.line, self.amount = NO_TALLY, b"", 0.0
        self.until = self.left = self.back = self.floor = 0.0
        self.cost_left, self.excess = inf, NO_EXCESS
        self.shown: Count | None = None
        self.together: Sequence[MeterGroup] = ()

    def took(self, count: Count, amount: float) -> None:
        """Take it that others took so much, less than nothing if they gave it back."""
        self.floor += max(0.0, amount)
        self.cost_left -= max(0.0, amount)
        if count is self.shown:
            self.back -= amount


class IdentityMeters:
    """The meters of one identity. `first`: what counts a request by its head alone; `rest`: all others but those of its
    tenant's models. `tokens`: that, if it is of all models and counts nothing but tokens. `shown`: what shows how much
    is left, of the latest model. `needs_counts`: requests whose tokens nobody counts may not pass its limits of tokens.
    """

    __slots__ = (
        *("_by_model", "_globs", "counts_cost", "first", "identity"),
        *("is_unlimited", "needs_counts", "rest", "shown", "tenant", "tokens"),
    )

    def __init__(self, identity: Identity, find: Callable[[str, Limits, str], tuple[Meter, ...]]) -> None:
        tenant, key = identity.tenant, identity.key
        own = [*find(f"tenant {tenant.name}", tenant.limits, tenant.name)]
        scopes = [tenant.limits, *[limits for _, limits in tenant.model_limits]]
        if key is not None:
            own += find(f"key {key.id}", key.limits, tenant.name)
            scopes.append(key.limits)
        self._globs = [
            (globs([glob]), find(f"tenant {tenant.name}, models {glob}", limits, tenant.name))
            for glob, limits in tenant.model_limits
        ]
        self.identity, self.tenant = identity, tenant.name
        minutes = [meter for meter in own if meter.span is LimitSpan.MINUTE and not meter.shadow]
        requests = [meter for meter in minutes if meter.measure is Measure.REQUESTS]
        tokens = [meter for meter in minutes if meter.measure is Measure.TOKENS]
        self.first = MeterGroup([meter for meter in own if meter.measure in BY_HEAD], requests)
        self.rest = MeterGroup([meter for meter in own if meter.measure not in BY_HEAD], tokens)
        self.first.together = self.rest.together = (self.first, self.rest)
        only_tokens = all(meter.measure is Measure.TOKENS for meter in self.rest.meters)
        self.tokens = self.rest if self.rest.meters and only_tokens and not self._globs else None
        self.shown = [group for group in (self.first, self.rest) if group.shows]
        self.counts_cost = any(budget.unit is Unit.COST for limits in scopes for budget in limits.budget)
        self.needs_counts = not all(limits.uncounted for limits in scopes if counts_tokens(limits))
        self.is_unlimited = not (own or self._globs)
        self._by_model = BoundedDict[tuple[str, ...], MeterGroup](MODELS_MAX)

    @property
    def has_model_limits(self) -> bool:
        return bool(self._globs)

    def of(self, *models: str) -> MeterGroup:
        """Return what counts a request for one of these models beside `first`: of which is not known if there are
        several."""
        if not self._globs:
            return self.rest
        group = self._by_model.get(models)
        if group is None:
            more = [each for glob, meters in self._globs if any(map(glob.match, models)) for each in meters]
            self._by_model[models] = group = MeterGroup((*self.rest.meters, *more), self.rest.shows)
        if group.shows:
            self.shown[-1] = group
        return group


def counts_tokens(limits: Limits) -> bool:
    each = limits.tokens_per_minute, limits.uncached_tokens_per_minute
    return any(amount is not None for amount in each) or bool(limits.budget)


class Meters:
    """Finds the meters of identities."""

    def __init__(self) -> None:
        self._made = BoundedDict[int, IdentityMeters](IDENTITIES_MAX)
        self._scopes = BoundedDict[str, tuple[Limits, tuple[Meter, ...]]](IDENTITIES_MAX)

    def of(self, identity: Identity) -> IdentityMeters:
        found = self._made.get(id(identity))
        if found is None or found.identity is not identity:  # its limits may have changed
            self._made[id(identity)] = found = IdentityMeters(identity, self._find)
        return found

    def _find(self, scope: str, limits: Limits, tenant: str) -> tuple[Meter, ...]:
        """Return the meters of a scope, the same ones for all its keys as long as its limits stay."""
        found = self._scopes.get(scope)
        if found is None or found[0] != limits:
            self._scopes[scope] = found = limits, tuple(meters_of(scope, limits, tenant))
        return found[1]
