"""Which of the backends that serve a model may be asked by one request.

Rule: those that are not unhealthy and whose circuits admit a request. If there are none the pool *fails open*
(`last_resort`): faults everywhere at once point at the request or at something common, and a 503 from here would be
certain, one from an engine only likely. All are offered, so that requests do not herd onto one. Unhealthy ones are not,
for a quick 503 with Retry-After beats a wait, unless by time-outs alone (`silent`): they may be busy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.health import Health


class Eligible(NamedTuple):
    """The backends that may be asked. `last_resort`: their circuits are overruled; `silent`: so are their probes."""

    backends: Sequence[Backend]
    last_resort: bool
    silent: bool


def eligible_of(
    serving: Sequence[Backend], exclude: Collection[BackendId], avoid: Collection[BackendId], then: float | None
) -> Eligible:
    """Return those who may be asked now or, with `then`, at that time if nothing happens until then."""
    able = [b for b in serving if b.health is not Health.UNHEALTHY]
    silent = not able
    if silent:
        able = [b for b in serving if b.vitals.silent]
    admitted = [b for b in able if (b.vitals.admits if then is None else b.vitals.admits_then(then))]
    # for the same reason circuits take out at most half of a pool, but for those that serve nothing all the same
    if admitted and 2 * len(admitted) < len(able):
        admitted = overruled(able, admitted)
    eligible = [b for b in admitted if b.id not in exclude]
    last_resort = False
    if not eligible:
        eligible = [b for b in able if b.id not in exclude]
        last_resort = bool(eligible)
    if avoid:
        eligible = [b for b in eligible if b.id not in avoid] or eligible
    return Eligible(eligible, last_resort, silent and last_resort)


def overruled(able: Sequence[Backend], admitted: Sequence[Backend]) -> list[Backend]:
    """Return half of the backends, rounded up: those that are admitted, and of those that are not asked in vain the
    ones whose circuits try again first."""
    ids = {b.id for b in admitted}
    others = sorted(
        (b for b in able if b.id not in ids and not b.vitals.in_vain), key=lambda b: (b.vitals.wake_at, b.id)
    )
    ids.update(b.id for b in others[: (len(able) + 1) // 2 - len(admitted)])
    return [b for b in able if b.id in ids]
