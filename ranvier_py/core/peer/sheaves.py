"""Further turns of chats, known by their texts alone, among peers: many become one lesson, and are learned at once.

Down: of what may be told, `takes` takes what fits; `leave` gives it by backend and process, `bind` makes sheaves of it.
Up: rows whose parent is known, or comes with them, are written into the table column by column; others wait as orphans
do. Few rows are told one by one, and learned one by one.

Bound: what one call of `SharedRoutes.lessons` tells. Cost: 1 us a row told, 3 us a row heard; alone 6 and 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ranvier_py.core.gossip.routes.lessons import TOKENS_MAX
from ranvier_py.core.gossip.routes.sheaves import ROWS_MAX, Sheaf
from ranvier_py.core.ids import BackendId
from ranvier_py.core.routes import News, RouteTable
from ranvier_py.core.routes.bulk import merge
from ranvier_py.core.routes.orphans import Orphans
from ranvier_py.core.routes.scan import U64, Columns

BOUND_LEAST = 4
"""Fewer turns are told one by one: that takes no more bytes or time, and all versions understand it."""

MERGED_LEAST = 16
"""Rows that are written column by column: below, one by one is as fast."""


class Bound(NamedTuple):
    """Rows of one sheaf, each (parent, text, depth), and the time of the oldest."""

    rows: Sequence[tuple[int, int, int]]
    at: float


class Pieces(Orphans):
    """Orphans that say whom they wait for."""

    def await_one_of(self, names: Iterable[int]) -> bool:
        return bool(self._waiting) and any(name in self._waiting for name in names)


class SharedSheaves:
    """`understood`: whether all peers know sheaves; the owner says so."""

    def __init__(self, routes: RouteTable, orphans: Pieces) -> None:
        self.understood = False
        self.withdrawn = 0  # stops that were gone before they were told
        self._routes = routes
        self._orphans = orphans
        self._rows, _, self._claims, _ = routes.parts()
        self._taken: dict[tuple[BackendId, int], list[News]] = {}

    # --- down -------------------------------------------------------------------------------------------------------

    def takes(self, news: News) -> bool:
        """Whether it may go with others: it goes on from something, and has no tokens."""
        if not (self.understood and news.parent):
            return False
        for stop in news.stops:
            if stop[1]:
                return False
        self._taken.setdefault((news.backend, news.epoch), []).append(news)
        return True

    def leave(self) -> dict[tuple[BackendId, int], list[News]]:
        """All that was taken, by backend and its epoch."""
        taken, self._taken = self._taken, {}
        return taken

    def bind(self, backend: BackendId, taken: Sequence[News]) -> Iterator[Bound]:
        """What of this is still believed, in sheaves."""
        rows: list[tuple[int, int, int]] = []
        at = taken[0].at
        for news in taken:
            parent = news.parent
            for depth, _, text in reversed(news.stops):
                if not self._is_claimed(text, backend):
                    self.withdrawn += 1
                elif text != parent and 0 < depth <= TOKENS_MAX:
                    rows.append((parent, text, depth))
                    at = min(at, news.at)
                parent = text
            if len(rows) >= ROWS_MAX:
                yield Bound(rows[:ROWS_MAX], at)
                del rows[:ROWS_MAX]
                at = news.at
        while rows:
            yield Bound(rows[:ROWS_MAX], at)
            del rows[:ROWS_MAX]

    def _is_claimed(self, text: int, backend: BackendId) -> bool:
        row = self._rows.index.get(text)
        return row is not None and (self._rows.backend[row] == backend or self._claims.get(row, backend) is not None)

    # --- up ---------------------------------------------------------------------------------------------------------

    def learn(self, sheaf: Sheaf, backend: BackendId, epoch: int, at: float, now: float) -> int:
        """Learn what a peer told, by evidence of that time. Returns the number of new rows."""
        _, _, parents, texts, tokens = sheaf
        names = texts.tolist()
        if len(names) < MERGED_LEAST or self._orphans.await_one_of(names):
            return self._one_by_one(sheaf, range(len(names)), backend, epoch, at)
        lost = self._lost(parents.tolist(), names)
        if lost:
            placed = np.ones(len(texts), np.bool_)
            placed[lost] = False
            parents, texts, tokens = parents[placed], texts[placed], tokens[placed]
        count = len(texts)
        epochs = np.full(backend + 1, -1, np.int32)
        epochs[backend] = epoch
        held_by, evidence = np.full(count, backend, np.int16), np.full(count, int(at), np.int32)
        columns = Columns(parents, tokens, np.zeros(count, U64), texts, held_by, evidence)
        hearing = self._routes.hearing
        if hearing is not None and at > self._claims.horizon:
            pieces = zip(parents.tolist(), texts.tolist(), tokens.tolist(), strict=True)
            hearing((((depth, 0, text), (0, 0, parent)) for parent, text, depth in pieces), backend, epoch, int(at))
        created = merge(self._routes, columns, epochs, now) if count else 0
        return created + self._one_by_one(sheaf, lost, backend, epoch, at)

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

    def _one_by_one(self, sheaf: Sheaf, rows: Sequence[int], backend: BackendId, epoch: int, at: float) -> int:
        created = 0
        for row in rows:
            stop = (int(sheaf.tokens[row]), 0, int(sheaf.texts[row]))
            created += self._orphans.learn((stop,), int(sheaf.parents[row]), backend, epoch, at)
        return created
