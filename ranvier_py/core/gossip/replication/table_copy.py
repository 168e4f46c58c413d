"""A route table as peers see it: its sums, its rows as messages, and peers' rows merged into it.

The part of `route_memory.RouteMemory` that deals with whole tables, for whoever binds gossip to a table. It turns the
table's columns into those of a message and back: local backend ids into keys and boots, times of evidence into ages.

Rules: ages are rounded up and count from when rows were asked for, so nothing gets younger on its way, however often
tables are compared. Rows of backends that are not known here are left out.
Cost: that of `routes.scan` and `routes.bulk`, and about 0.1 us for each claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ranvier_py.core.gossip.wire.messages import Rows
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.bulk_writes import merge
from ranvier_py.core.routing.route_table.scan import Chunk, Columns, Names, RowsScan, SumsScan

MARGIN_S = 5.0
"""Claims with less life left are neither summed nor told: ages differ by a second or two between nodes."""

AGE_MAX_S = 65_535


class Backends(Protocol):
    """What this node calls backends, and what peers call them."""

    def names(self) -> Names:
        """By local id: key, boot, and the epoch whose claims are of that boot."""
        ...

    def holder(self, key: int, boot: int, now: float) -> tuple[int, int] | None:
        """(local id, epoch) of a backend and boot that a peer names; None if its claims are void here."""
        ...


class TableCopy:
    """The calls of RouteMemory but `hear`."""

    def __init__(self, table: RouteTable, backends: Backends) -> None:
        self.unknown_backends = 0  # in chunks of peers
        self._table = table
        self._backends = backends

    def sums(self, now: float) -> Iterator[bytes | None]:
        """See RouteMemory. The caller's later steps use the time of the first."""
        scan = SumsScan(self._table, self._backends.names(), MARGIN_S)
        while True:
            yield scan.step(now)

    def rows(self, buckets: bytes) -> TableWalk:
        """See RouteMemory."""
        names = self._backends.names()
        return TableWalk(RowsScan(self._table, names, MARGIN_S, np.frombuffer(buckets, "<u2").astype(np.uint16)), names)

    def merge(self, rows: Rows, since: float, now: float) -> int:
        """See RouteMemory."""
        holders = [self._backends.holder(key, boot, now) for key, boot in rows.backends]
        self.unknown_backends += sum(holder is None for holder in holders)
        ids = np.array([holder[0] if holder else -1 for holder in holders] or [-1], np.int16)
        generations = np.full(int(ids.max()) + 1, -1, np.int32)
        for holder in holders:
            if holder is not None:
                generations[holder[0]] = holder[1]
        evidence = np.floor(since - np.frombuffer(rows.age_s, "<u2"))
        columns = Columns(
            np.frombuffer(rows.parent, "<u8"),
            np.frombuffer(rows.tokens, "<u4"),
            np.frombuffer(rows.token, "<u8"),
            np.frombuffer(rows.text, "<u8"),
            ids[np.frombuffer(rows.backend, "<u2")],
            evidence.astype(np.int32),
        )
        return merge(self._table, columns, generations, now)


class TableWalk:
    """Chunks of a table as messages. See route_memory.RowsWalk."""

    def __init__(self, scan: RowsScan, names: Names) -> None:
        self._scan = scan
        self._names = names

    def take(self, now: float) -> Rows | None:
        chunk = self._scan.take(now)
        return None if chunk is None else rows_of(chunk, self._names, now)

    def back(self, chunks: int) -> None:
        self._scan.back(chunks)


def rows_of(chunk: Chunk, names: Names, now: float) -> Rows:
    """A chunk as a message, with request and number 0."""
    columns = chunk.columns
    held_by, index = np.unique(columns.backend, return_inverse=True)
    ages = np.clip(np.ceil(now - columns.evidence), 0, AGE_MAX_S)
    return Rows(
        request=0,
        chunk=0,
        last=chunk.last,
        backends=tuple(zip(names.key[held_by].tolist(), names.boot[held_by].tolist(), strict=True)),
        parent=columns.parent.astype("<u8").tobytes(),
        tokens=columns.tokens.astype("<u4").tobytes(),
        token=columns.token.astype("<u8").tobytes(),
        text=columns.text.astype("<u8").tobytes(),
        backend=index.astype("<u2").tobytes(),
        age_s=ages.astype("<u2").tobytes(),
    )
