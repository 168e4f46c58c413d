"""Update batches of peers: further turns of many chats, known by their texts alone, are learned at once.

Rows whose parent is known, or comes with them, are written into the table column by column; others wait as orphans do.
Few rows are learned one by one. Cost: 3 us a row; alone 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ranvier_py.core.gossip.replication.update_batches import UpdateBatch
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.bulk_writes import merge
from ranvier_py.core.routing.route_table.orphans import Orphans
from ranvier_py.core.routing.route_table.scan import U64, Columns

MERGED_LEAST = 16
"""Rows that are written column by column: below, one by one is as fast."""


class Pieces(Orphans):
    """Orphans that say whom they wait for."""

    def await_one_of(self, names: Iterable[int]) -> bool:
        return bool(self._waiting) and any(name in self._waiting for name in names)


class ReceivedBatches:
    """What peers tell in columns, on its way into the table."""

    def __init__(self, routes: RouteTable, orphans: Pieces) -> None:
        self._routes = routes
        self._orphans = orphans
        self._rows, _, self._claims, _ = routes.parts()

    def learn(self, batch: UpdateBatch, backend: BackendId, generation: int, at: float, now: float) -> int:
        """Learn what a peer told, by evidence of that time. Returns the number of new rows."""
        _, _, parents, texts, tokens = batch
        names = texts.tolist()
        if len(names) < MERGED_LEAST or self._orphans.await_one_of(names):
            return self._one_by_one(batch, range(len(names)), backend, generation, at)
        lost = self._lost(parents.tolist(), names)
        if lost:
            placed = np.ones(len(texts), np.bool_)
            placed[lost] = False
            parents, texts, tokens = parents[placed], texts[placed], tokens[placed]
        count = len(texts)
        generations = np.full(backend + 1, -1, np.int32)
        generations[backend] = generation
        held_by, evidence = np.full(count, backend, np.int16), np.full(count, int(at), np.int32)
        columns = Columns(parents, tokens, np.zeros(count, U64), texts, held_by, evidence)
        hearing = self._routes.hearing
        if hearing is not None and at > self._claims.horizon:
            pieces = zip(parents.tolist(), texts.tolist(), tokens.tolist(), strict=True)
            hearing(
                (((depth, 0, text), (0, 0, parent)) for parent, text, depth in pieces), backend, generation, int(at)
            )
        created = merge(self._routes, columns, generations, now) if count else 0
        return created + self._one_by_one(batch, lost, backend, generation, at)

    def _lost(self, parents: Sequence[int], texts: Sequence[int]) -> Sequence[int]:
        """Rows whose parent is not known here, nor comes with a row before them that has its own."""
        index = self._rows.index
        placed: dict[int, None] = {}
        lost: list[int] = []
        for row, (parent, text) in enumerate(zip(parents, texts, strict=True)):
            if parent in index or parent in placed:
                placed[text] = None
            else:
                lost.append(row)
        return lost

    def _one_by_one(
        self, batch: UpdateBatch, rows: Sequence[int], backend: BackendId, generation: int, at: float
    ) -> int:
        created = 0
        for row in rows:
            key = (int(batch.tokens[row]), 0, int(batch.texts[row]))
            created += self._orphans.learn((key,), int(batch.parents[row]), backend, generation, at)
        return created
