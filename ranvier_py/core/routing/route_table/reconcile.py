"""Setting the route table right by what engines are known to hold, some rows at a time.

Rules: a row with a token fingerprint is raised to CONFIRMED for a backend that holds it, where it is not so already or
where the evidence ages; a claim of a backend that does not hold it is withdrawn, unless its evidence is too young to
tell. Neither is a use of the row. Rows that are known by their text alone, and those of prompts with media, of which no
events tell, follow the rows above them.
Bound: `rows_max` for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import is_of_media
from ranvier_py.core.routing.route_table.route_values import Trust
from ranvier_py.core.routing.route_table.rows import SHARED
from ranvier_py.core.routing.route_table.table import RouteTable

FRESH_SHARE = 0.25
"""Of the time to live: evidence of a held row that is older is renewed. A sweep comes round more often than that."""


class Exact(NamedTuple):
    """A backend of which all is known. Evidence of this second or later is not doubted, nor is less trust than this."""

    backend: BackendId
    generation: int
    held_among: Callable[[Sequence[Fingerprint]], Mapping[Fingerprint, int]]  # those that it holds, and the tier
    doubted_before: float
    trust_min: Trust = Trust.REMOTE


class Reconciler:
    """Walks round and round one table.

    Called before each `RouteTable.sweep` with the same number of rows it is always a step ahead of that: where a new
    generation voids claims of what is held all the same, they are raised before they are removed.
    """

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._rows = table.rows
        self._claims = table.claims
        self._cursor = 1
        self._counting: dict[int, int] = {}
        self.rounds = 0  # that are complete
        self.confirmed: dict[int, int] = {}  # rows by backend, as the last round found; shared ones count for one

    def walk(self, rows_max: int, engines: Sequence[Exact], now: float) -> tuple[int, int]:
        """Look at the next rows. Returns how many claims were raised or refreshed, and how many withdrawn."""
        window = self._window(rows_max)
        if not engines:
            return 0, 0
        names = list(window)
        held = {engine.backend: engine.held_among(names) for engine in engines}
        affirmed = 0
        for engine in engines:
            for name, tier in held[engine.backend].items():
                affirmed += self._affirm(window[name], engine, tier, now)
        exact = {engine.backend: engine for engine in engines}
        retracted = sum([self._retract(name, row, exact, held, now) for name, row in window.items()])
        return affirmed, retracted

    def _window(self, rows_max: int) -> dict[Fingerprint, int]:
        """The next rows, by their token fingerprints."""
        rows, counting = self._rows, self._counting
        parents, tokens, found = rows.parent, rows.token, {}
        for _ in range(min(rows_max, rows.top - 1)):
            if self._cursor >= rows.top:
                self.rounds, self.confirmed, self._cursor = self.rounds + 1, counting, 1
                counting = self._counting = {}
            row = self._cursor
            self._cursor += 1
            if parents[row] >= 0 and tokens[row]:
                found[Fingerprint(tokens[row])] = row
                if rows.trust[row] == Trust.CONFIRMED:
                    backend = rows.backend[row]
                    counting[backend] = counting.get(backend, 0) + 1
        return found

    def _affirm(self, row: int, engine: Exact, tier: int, now: float) -> bool:
        claims, backend = self._claims, engine.backend
        claim = claims.get(row, backend)
        fresh = now - self._table.ttl_s * FRESH_SHARE
        if (
            claim is None
            or claim.generation != engine.generation
            or claim.trust < Trust.CONFIRMED
            or claim.evidence < fresh
        ):
            self._table.affirm(row, backend, engine.generation, now)
            claims.set_tier(row, backend, tier)
            return True
        if claims.lowered or tier:
            claims.set_tier(row, backend, tier)
        return False

    def _retract(
        self,
        name: Fingerprint,
        row: int,
        exact: Mapping[BackendId, Exact],
        held: Mapping[BackendId, Mapping[Fingerprint, int]],
        now: float,
    ) -> int:
        """Withdraw what this row claims wrongly, if it is still there: it may have gone with one above it."""
        rows = self._rows
        backend = BackendId(rows.backend[row])
        if not rows.flags[row] & SHARED and (backend not in exact or name in held[backend]):
            return 0  # the usual row
        if rows.parent[row] < 0 or rows.token[row] != name or is_of_media(name):
            return 0
        retracted = 0
        for number, claim in list(self._claims.of(row)):
            engine = exact.get(BackendId(number))
            if engine is None or name in held[engine.backend] or claim.trust < engine.trust_min:
                continue
            if claim.evidence >= int(engine.doubted_before):
                continue
            retracted += self._table.withdraw(name, engine.backend, now)
        return retracted
