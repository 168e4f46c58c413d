"""Correcting the route table by what engines are known to hold, some rows at a time.

Rules: a row with a token fingerprint is raised to CONFIRMED for a backend that holds it, unless it is CONFIRMED already
by fresh evidence. A claim of a backend that does not hold it is withdrawn, unless its evidence is too young to judge.
Neither is a use of the row. Text-only rows, and rows of prompts with media, which no events cover, follow those above.
Bound: each call looks at `rows_max` rows at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import is_of_media
from ranvier_py.core.routing.route_table.route_values import Claim, Trust
from ranvier_py.core.routing.route_table.rows import SHARED
from ranvier_py.core.routing.route_table.table import RouteTable

FRESH_SHARE = 0.25
"""Share of the time to live after which the evidence of a held row is renewed. A sweep comes round more often."""


class Exact(NamedTuple):
    """A backend whose whole cache is known: claims with older evidence than `doubted_before` are checked against it."""

    backend: BackendId
    generation: int
    held_among: Callable[[Sequence[Fingerprint]], Mapping[Fingerprint, int]]  # those that it holds, with their tiers
    doubted_before: float
    trust_min: Trust = Trust.REMOTE  # claims of less trust are not withdrawn


class Reconciler:
    """Walks round and round one table.

    Call it before each `RouteTable.sweep` with the same number of rows, so that it stays a step ahead: where a new
    generation voids claims on prefixes that the engine still holds, it raises them before the sweep removes them.
    """

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._rows = table.rows
        self._claims = table.claims
        self._cursor = 1
        self._counting: dict[int, int] = {}
        self.rounds = 0  # complete rounds
        self.confirmed: dict[int, int] = {}  # by backend: CONFIRMED rows in the last round; a shared row counts for one

    def walk(self, rows_max: int, engines: Sequence[Exact], now: float) -> tuple[int, int]:
        """Look at the next rows. Returns how many claims were raised or refreshed, and how many were withdrawn."""
        window = self._window(rows_max)
        if not engines:
            return 0, 0
        self._claims.now = max(self._claims.now, now)
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
        """Return the next rows that have token fingerprints, by these."""
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
            raised = Claim(engine.generation, int(Trust.CONFIRMED), int(now))
            if self._table.outgoing.collecting:
                self._table.outgoing.learned([self._rows.key(row)], row, backend, raised, now)
            claims.raise_from(row, backend, raised)
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
        """Withdraw the wrong claims of a row, unless the row went meanwhile with one above it. Returns how many."""
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
