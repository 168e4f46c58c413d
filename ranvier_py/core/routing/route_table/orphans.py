"""Learning pieces of paths from peers, in whatever order they come.

A peer tells a piece of a path and the name of the row above it. If that row is not known yet, because the route update
that brings it takes another way, the piece is stored all the same, and waits here: when the row comes, the piece is
hung under it, and its claims climb. So the table in the end does not depend on the order of route updates.

Rules: what waits is looked at again when a route update brings the name it waits for, and a few at a time with each
route update, for rows that came otherwise. Bound: ORPHANS_MAX pieces; beyond, the one that has waited longest stays
where it is. Cost: nothing for a piece whose row is known but two looks at what waits; 5 us for one that waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.route_values import Trust
from ranvier_py.core.routing.route_table.table import RouteTable

ORPHANS_MAX = 4096
LOOKS_EACH = 2


class Orphan(NamedTuple):
    """The top of a piece: what is to be hung, and the claim that it was told with."""

    key: PrefixKey
    backend: BackendId
    generation: int
    at: float  # of the evidence


class Orphans:
    """The way of peers' pieces into a table."""

    def __init__(self, table: RouteTable) -> None:
        self.adopted = 0  # pieces that found their row later
        self.dropped = 0
        self._table = table
        self._rows, _, self._claims, _ = table.parts()
        self._waiting: dict[int, list[Orphan]] = {}  # by the name they wait for; looked at longest ago first
        self._count = 0

    def __len__(self) -> int:
        """Pieces that wait."""
        return self._count

    def learn(self, chain: Sequence[PrefixKey], parent: int, backend: BackendId, generation: int, at: float) -> int:
        """Learn a piece of a path (deepest first) under the row that `parent` names, if not 0. Trust is REMOTE.

        Returns the number of new rows. Raises ValueError as `RouteTable.learn` does.
        """
        table = self._table
        above = table.prefix_key_of(parent) if parent else None
        created = table.learn((*chain, above) if above else chain, backend, generation, Trust.REMOTE, at)
        if self._waiting:
            for _, token, text in chain:
                self._adopt(token)
                self._adopt(text)
            self._look_again()
        if parent and above is None and not any(parent in key[1:] for key in chain):
            self._wait(parent, Orphan(chain[-1], backend, generation, at))
        return created

    def _wait(self, parent: int, orphan: Orphan) -> None:
        self._waiting.setdefault(parent, []).append(orphan)
        self._count += 1
        if self._count > ORPHANS_MAX:
            oldest = next(iter(self._waiting))
            self._waiting[oldest].pop(0)
            if not self._waiting[oldest]:
                del self._waiting[oldest]
            self._count -= 1
            self.dropped += 1

    def _look_again(self) -> None:
        """At those that were looked at longest ago."""
        for _ in range(min(LOOKS_EACH, len(self._waiting))):
            parent = next(iter(self._waiting))
            if not self._adopt(parent):
                self._waiting[parent] = self._waiting.pop(parent)

    def _adopt(self, parent: int) -> bool:
        """Hang what waits for this name under its row. False: there is no such row, or nothing waits for it."""
        if parent not in self._waiting:
            return False
        above = self._table.prefix_key_of(parent)
        if above is None:
            return False
        orphans = self._waiting.pop(parent)
        self._count -= len(orphans)
        self.adopted += len(orphans)
        for key, backend, generation, at in orphans:
            if self._has_claim(key, backend):
                self._table.learn((key, above), backend, generation, Trust.REMOTE, at)
        return True

    def _has_claim(self, key: PrefixKey, backend: BackendId) -> bool:
        """Whether what was told is still believed: it may have been withdrawn since."""
        row = self._rows.index.get(key[1] or key[2])
        return row is not None and self._claims.get(row, backend) is not None
