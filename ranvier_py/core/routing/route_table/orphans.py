"""Learning pieces of paths from peers, in whatever order they come.

A piece names the row above it. If another update brings that row later, the piece is stored all the same, and waits
here: when the row comes, the piece is hung under it, and its claim is raised from there. So the final table does not
depend on the order of updates.

Rules: a piece is looked at when an update brings the name it waits for; each update also looks at LOOKS_EACH names, for
rows that came otherwise. Bound: ORPHANS_MAX; beyond, one piece that waits for the oldest name is given up and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from typing import NamedTuple

import numpy as np

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.route_values import U64, RouteColumns, Trust
from ranvier_py.core.routing.route_table.table import RouteTable

ORPHANS_MAX = 4096
LOOKS_EACH = 2


class Orphan(NamedTuple):
    """The top row of a piece, which is to be hung under its parent, and the claim that came with it."""

    key: PrefixKey
    backend: BackendId
    generation: int
    at: float  # of the evidence


class PeerRows(NamedTuple):
    """The rows of one update, column by column, parents before children."""

    backend: Sequence[BackendId]
    parent: Sequence[int]  # a name of the row above, or 0
    tokens: Sequence[int]
    token: Sequence[int]
    text: Sequence[int]
    generations: Mapping[BackendId, int]  # of all of these backends
    at: float  # of the evidence

    def names(self) -> Sequence[int]:
        """Return one name of each row: its token fingerprint if it has one, else that of its text."""
        return (
            self.token if all(self.token) else [one or other for one, other in zip(self.token, self.text, strict=True)]
        )

    def paths(self) -> Iterator[tuple[int, list[PrefixKey]]]:
        """Yield each run of rows of one backend, each under the one before: its first index, its keys deepest first."""
        keys = list(zip(self.tokens, self.token, self.text, strict=True))
        start = 0
        for at in range(1, len(keys) + 1):
            _, token, text = keys[at - 1]
            if at == len(keys) or self.backend[at] != self.backend[start] or self.parent[at] != (token or text):
                yield start, keys[start:at][::-1]
                start = at


class Orphans:
    """Writes peers' pieces into a table, and keeps those that wait for their parent."""

    def __init__(self, table: RouteTable) -> None:
        self.adopted = 0  # pieces that found their row later
        self.dropped = 0
        self._table = table
        self._known = table.rows.index
        # by the name they wait for, the one looked at longest ago first
        self._waiting: OrderedDict[int, list[Orphan]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """How many pieces wait."""
        return self._count

    def learn(self, path: Sequence[PrefixKey], parent: int, backend: BackendId, generation: int, at: float) -> int:
        """Learn a piece of a path (deepest first) with trust REMOTE, under the row that `parent` names (0: none).

        Returns the number of new rows. Raises ValueError as `RouteTable.learn` does.
        """
        table = self._table
        above = table.prefix_key_of(parent) if parent else None
        created = table.learn((*path, above) if above else path, backend, generation, Trust.REMOTE, at)
        if self._waiting:
            for _, token, text in path:
                self._adopt(token)
                self._adopt(text)
            self._look_again()
        if parent and above is None and not any(parent in key[1:] for key in path):
            self._wait(parent, Orphan(path[-1], backend, generation, at))
        return created

    def merge(self, pieces: Sequence[PeerRows], generations: Mapping[BackendId, int], now: float) -> int:
        """Learn the rows of many updates at once. Rows whose parent is not known are learned one by one (`learn`)."""
        columns: list[Sequence[int]] = [
            list(chain.from_iterable(column)) for column in zip(*[piece[:5] for piece in pieces], strict=True)
        ]
        columns.append(list(chain.from_iterable([repeat(int(piece.at), len(piece.backend)) for piece in pieces])))
        lost = self._lost(columns[1], columns[3], columns[4])
        others = [[column[at] for column in columns] for at in lost]
        if lost:
            here = [True] * len(columns[0])
            for at in lost:
                here[at] = False
            columns = [list(compress(column, here)) for column in columns]
        by_id = np.full(max(generations) + 1, -1, np.int32)
        for number, generation in generations.items():
            by_id[number] = generation
        created = self._table.merge(columns_of(*columns), by_id, now, used=True)
        if self._waiting:
            for name in filter(self._waiting.__contains__, chain(*columns[3:5])):
                self._adopt(name)
            self._look_again()
        for backend, parent, *key, second in others:
            holder = BackendId(backend)
            created += self.learn([(key[0], key[1], key[2])], parent, holder, generations[holder], second)
        return created

    def _lost(self, parents: Sequence[int], tokens: Sequence[int], texts: Sequence[int]) -> list[int]:
        """Return the indices of rows whose named parent is neither known here nor an earlier row that is not lost."""
        known = self._known
        unknown = [at for at, parent in enumerate(parents) if parent not in known and parent]
        first: dict[int, int] = {}
        lost: dict[int, None] = {}
        for at in unknown:
            parent, above = parents[at], at - 1
            if not at or parent not in (
                tokens[above],
                texts[above],
            ):  # nearly always the parent is the row before
                first = first or first_places(tokens, texts)
                above = first.get(parent, at)
            if above >= at or above in lost:
                lost[at] = None
        return list(lost)

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
        """Look at the LOOKS_EACH names that were looked at longest ago."""
        for _ in range(min(LOOKS_EACH, len(self._waiting))):
            parent = next(iter(self._waiting))
            if not self._adopt(parent):
                self._waiting.move_to_end(parent)

    def _adopt(self, parent: int) -> bool:
        """Hang the pieces that wait for this name under its row. False: there is no such row, or none waits for it."""
        if parent not in self._waiting:
            return False
        above = self._table.prefix_key_of(parent)
        if above is None:
            return False
        orphans = self._waiting.pop(parent)
        self._count -= len(orphans)
        self.adopted += len(orphans)
        for key, backend, generation, at in orphans:
            if self._table.claim(key[1] or key[2], backend) is not None:  # its claim may be withdrawn by now
                self._table.learn((key, above), backend, generation, Trust.REMOTE, at)
        return True


def first_places(*columns: Sequence[int]) -> dict[int, int]:
    """Return the first index of each name in any of the columns."""
    places: dict[int, int] = {}
    for names in columns:
        for name, at in zip(reversed(names), range(len(names) - 1, -1, -1), strict=True):
            places[name] = min(at, places.get(name, at))
    return places


def columns_of(
    backend: Sequence[int],
    parent: Sequence[int],
    tokens: Sequence[int],
    token: Sequence[int],
    text: Sequence[int],
    evidence: Sequence[int],
) -> RouteColumns:
    count = len(backend)
    return RouteColumns(
        parent=np.fromiter(parent, U64, count),
        tokens=np.fromiter(tokens, np.uint32, count),
        token=np.fromiter(token, U64, count),
        text=np.fromiter(text, U64, count),
        backend=np.fromiter(backend, np.int16, count),
        evidence=np.fromiter(evidence, np.int32, count),
    )
