"""Learning from peers pieces of paths, in whatever order they come.

A piece names the row above it. If that is not known yet, because the update that brings it takes another way, the piece
is stored all the same, and waits here: when the row comes, the piece is hung under it, and its claims climb. So the
table in the end does not depend on the order of updates.

Rules: what waits is looked at again when an update brings the name it waits for, and a few at a time with each update,
for rows that came otherwise. Bound: ORPHANS_MAX pieces; beyond, the one that has waited longest stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.route_values import RouteColumns, Trust
from ranvier_py.core.routing.route_table.table import RouteTable

ORPHANS_MAX = 4096
LOOKS_EACH = 2


class Orphan(NamedTuple):
    """The top of a piece: what is to be hung, and the claim that came with it."""

    key: PrefixKey
    backend: BackendId
    generation: int
    at: float  # of the evidence


class Orphans:
    """Peers' pieces on their way into a table."""

    def __init__(self, table: RouteTable) -> None:
        self.adopted = 0  # pieces that found their row later
        self.dropped = 0
        self._table = table
        self._known = table.names()
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

    def merge(self, columns: RouteColumns, generations: Mapping[BackendId, int], at: float, now: float) -> int:
        """The same of many rows at once, by evidence of that time. Those without a place are learned one by one."""
        rows = list(zip(*(column.tolist() for column in columns[:5]), strict=True))
        lost = self._lost(rows)
        if lost:
            columns = columns.at(np.delete(np.arange(len(rows)), lost))
        self._note_uses(columns, generations, at)
        by_id = np.full(max(generations) + 1, -1, np.int32)
        for backend, generation in generations.items():
            by_id[backend] = generation
        created = self._table.merge(columns, by_id, now)
        if self._waiting:
            for _, _, token, text, _ in rows:
                self._adopt(token)
                self._adopt(text)
            self._look_again()
        for number in lost:
            parent, tokens, token, text, backend = rows[number]
            created += self.learn([(tokens, token, text)], parent, backend, generations[backend], at)
        return created

    def _lost(self, rows: Sequence[tuple[int, int, int, int, BackendId]]) -> list[int]:
        """Rows whose parent is not known here, nor comes with a row before them that has its own."""
        known = self._known
        placed: dict[int, None] = {0: None}
        lost: list[int] = []
        for number, (parent, _, token, text, _) in enumerate(rows):
            if parent in placed or parent in known:
                placed[token] = placed[text] = None
            else:
                lost.append(number)
        return lost

    def _note_uses(self, columns: RouteColumns, generations: Mapping[BackendId, int], at: float) -> None:
        remote_use = self._table.remote_use
        if remote_use is None or not self._table.is_alive(at):
            return
        for backend, generation in generations.items():
            own = columns.at(np.flatnonzero(columns.backend == backend))
            rows = zip(own.parent.tolist(), own.tokens.tolist(), own.token.tolist(), own.text.tolist(), strict=True)
            remote_use(
                (((tokens, token, text), (0, 0, parent)) for parent, tokens, token, text in rows),
                backend,
                generation,
                int(at),
            )

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
            if self._table.claim(key[1] or key[2], backend) is not None:  # it may have been withdrawn since
                self._table.learn((key, above), backend, generation, Trust.REMOTE, at)
        return True
