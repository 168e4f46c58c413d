"""Setting the route table right by what engines are known to hold, some rows at a time.

Rules: a row with a token fingerprint is raised to CONFIRMED for a backend that holds it, where it is not so already or
where the evidence ages; a claim of a backend that does not hold it is withdrawn, unless its evidence is too young to
tell. Neither is a use of the row. Rows that are known by their text alone follow the rows around them.
Bound: `rows_max` for each call. Cost: 1 us for a row and backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.kv.values import Tier
from ranvier_py.core.routes.table import RouteTable
from ranvier_py.core.routes.values import Trust


class Exact(NamedTuple):
    """A backend of which all is known. Evidence of this second or later is not doubted."""

    backend: BackendId
    epoch: int
    tier: Callable[[Fingerprint], Tier]
    doubted_before: float


class Reconciler:
    """Walks round and round one table."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._rows, _, self._claims, _ = table.parts()
        self._cursor = 1

    def walk(self, rows_max: int, engines: Sequence[Exact], now: float) -> tuple[int, int]:
        """Look at the next rows. Returns how many claims were raised or refreshed, and how many withdrawn."""
        if not engines:
            return 0, 0
        rows = self._rows
        affirmed = retracted = 0
        for _ in range(min(rows_max, rows.top - 1)):
            row = self._cursor if self._cursor < rows.top else 1
            self._cursor = row + 1
            for engine in engines:
                token = rows.token[row]
                if rows.parent[row] < 0 or not token:
                    break  # free, or it went with a withdrawal
                if (tier := engine.tier(Fingerprint(token))) is not Tier.ABSENT:
                    affirmed += self._affirm(row, engine, tier, now)
                else:
                    retracted += self._retract(row, engine, now)
        return affirmed, retracted

    def _affirm(self, row: int, engine: Exact, tier: Tier, now: float) -> bool:
        claims, backend = self._claims, engine.backend
        claim = claims.get(row, backend)
        fresh = now - self._table.ttl_s / 4
        if claim is None or claim.epoch != engine.epoch or claim.trust < Trust.CONFIRMED or claim.evidence < fresh:
            self._table.affirm(row, backend, engine.epoch, now)
            claims.set_tier(row, backend, tier)
            return True
        if claims.lowered or tier is not Tier.GPU:
            claims.set_tier(row, backend, tier)
        return False

    def _retract(self, row: int, engine: Exact, now: float) -> bool:
        claim = self._claims.get(row, engine.backend)
        if claim is None or claim.evidence >= int(engine.doubted_before):
            return False
        return self._table.retract(self._rows.token[row], engine.backend, now)
