"""What is shown of limits: what of each was used, is reserved and is left, who was refused, and why last."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ranvier_py.core.access.limits.count import Count
from ranvier_py.core.access.limits.limiter import Limiter
from ranvier_py.core.access.limits.meters import LimitSpan, Meter

SHOWN_MAX = 1000  # scopes in one answer, those first of which most is taken
BUDGETS_MAX = 1000  # in metrics, those first that requests met first: each takes 10 us


def limits_view(limiter: Limiter, now: float) -> dict[str, Any]:
    """Return the limits of which this node knows, by scope. Only limits that a request met since the start have an
    amount here."""
    limiter.counts.book(now)
    scopes: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for count in list(limiter.counts.counts.values()):
        if (meter := count.meter) is not None:
            shown = limit_view(limiter, meter, count, now)
            scopes.setdefault(meter.scope, []).append((shown["remaining"] / meter.amount, shown))
    for scope in limiter.refusals:
        scopes.setdefault(scope, [])
    order = sorted(scopes, key=lambda scope: min((left for left, _ in scopes[scope]), default=0.0))
    return {
        "limits": {
            scope: {
                "limits": [shown for _, shown in scopes[scope]],
                "refused": refused.times if (refused := limiter.refusals.get(scope)) is not None else 0,
                "last_refusal": refused.last if refused is not None else None,
            }
            for scope in order[:SHOWN_MAX]
        },
        "limited": len(scopes),
        "nodes": 1 + len(limiter.peers.live),
        "vanished_nodes": len(limiter.peers.vanished),
    }


def budgets_left(limiter: Limiter, now: float) -> Iterator[tuple[Meter, float]]:
    """Yield budgets that requests met since the start, with the share of each that is left."""
    counts = (each.meter for each in limiter.counts.counts.values())
    budgets = (meter for meter in counts if meter is not None and meter.span > LimitSpan.MINUTE and meter.amount > 0)
    for meter in islice(budgets, BUDGETS_MAX):
        yield meter, max(0.0, limiter.room.left(meter, now)) / meter.amount


def limit_view(limiter: Limiter, meter: Meter, count: Count, now: float) -> dict[str, Any]:
    left = limiter.room.left(meter, now)
    window = limiter.counts.window(meter.span, now)
    rows = [row for row in count.rows.values() if meter.span <= 1 or row.window == window]
    reserved = sum(max(0.0, row.reserved - row.settled) for row in rows)
    return {
        "limit": meter.name,
        "amount": meter.amount,
        "used": round(sum(row.used for row in rows), 6),
        "reserved": round(reserved, 6),
        "remaining": round(max(0.0, left), 6),
        "mode": "shadow" if meter.shadow else "enforce",
    }
