"""A route table as peers see it: its bucket sums, its rows as messages, and peers' rows merged into it.

It converts the table's columns into those of a message and back: local backend ids into keys and generations as all
nodes count them, times of evidence into ages. Long work is done in steps of at most 2 ms: the caller asks for the next
step at each of its ticks, and requests are served in between.

Rules: ages are rounded up and count from when rows were asked for, so no claim gets younger on its way, however often
tables are compared. Rows of backends that are not known here are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.transfer import Piece, Walk
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.peers.route_messages import TableRows, pack_rows
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.route_table.route_values import BackendNames, RouteColumns
from ranvier_py.core.routing.route_table.scan import Chunk, ClaimReader, RowsScan, SumsScan

MARGIN_S = 5.0
"""Claims that expire sooner than this are neither summed nor sent: ages differ by a second or two between nodes."""

AGE_MAX_S = 65_535
"""The greatest age that a row can be sent with. Older claims are neither summed nor sent, or they would get younger on
their way and never expire where nodes send them to and fro."""


class TableCopy:
    """A table for peers. `asked`, which the owner sets, is called before a peer gets sums or rows of the table."""

    def __init__(self, table: RouteTable, registry: RegistrySync) -> None:
        self.unknown_backends = 0  # in chunks of peers, counted for each chunk
        self.asked: Callable[[float], object] = lambda _: None
        self._table = table
        self._registry = registry

    def _reader(self, names: BackendNames) -> ClaimReader:
        """Return what reads all claims but those that expire too soon for peers."""
        margin_s = max(MARGIN_S, self._table.ttl_s - AGE_MAX_S)
        return ClaimReader(self._table.rows, self._table.claims, names, margin_s)

    def sums(self, now: float) -> SumsScan:
        """Begin to compute the bucket sums."""
        self.asked(now)
        return SumsScan(self._reader(self._registry.names()))

    def rows(self, buckets: bytes, now: float) -> TableWalk:
        """Begin a walk over the rows of these buckets (u16 each); over the whole table if there are none."""
        self.asked(now)
        names = self._registry.names()
        return TableWalk(RowsScan(self._reader(names), np.frombuffer(buckets, "<u2").astype(np.uint16)), names)

    def merge(self, rows: TableRows, since: float, now: float) -> int:
        """Learn a chunk that was asked for at `since`, from which its ages count. Returns the number of new rows."""
        holders = [self._registry.holder(*backend, now) for backend in rows.backends]
        self.unknown_backends += sum(holder is None for holder in holders)
        ids = np.array([holder[0] if holder else -1 for holder in holders] or [-1], np.int16)
        generations = np.full(int(ids.max()) + 1, -1, np.int32)
        for holder in holders:
            if holder is not None:
                generations[holder[0]] = holder[1]
        evidence = np.floor(since - np.frombuffer(rows.age_s, "<u2"))
        backends = ids[np.frombuffer(rows.backend, "<u2")]
        columns = RouteColumns(
            parent=np.frombuffer(rows.parent, "<u8"),
            tokens=np.frombuffer(rows.tokens, "<u4"),
            token=np.frombuffer(rows.token, "<u8"),
            text=np.frombuffer(rows.text, "<u8"),
            backend=backends,
            evidence=evidence.astype(np.int32),
        )
        removals = self._table.outgoing.removals
        names = columns.token.tolist(), columns.text.tolist()
        if not all(map(removals.at.keys().isdisjoint, names)):
            claims = zip(*names, map(BackendId, backends.tolist()), evidence.tolist(), strict=True)
            backends[[removals.refuse(*claim, now) for claim in claims]] = -1
        return self._table.merge(columns, generations, now)


class OwnSums:
    """Our own bucket sums: computed in steps on demand, once for all peers that asked before the computation began.

    Rule: a peer gets sums that were begun when it asked or later, never older ones. It assumes that what we had then is
    in them: with older sums it would miss for ever what we learned in between.
    """

    def __init__(self, copy: TableCopy) -> None:
        self.begun_at = -inf  # when the last finished sums were begun
        self._copy = copy
        self._scan: SumsScan | None = None
        self._scan_begun_at = -inf
        self._value = b""

    def step(self, since: float, now: float) -> bytes | None:
        """Do one step, at most 2 ms, and return sums begun at `since` or later. None: not ready, call again."""
        if self.begun_at >= since:
            return self._value
        if self._scan is None:
            self._scan, self._scan_begun_at = self._copy.sums(now), now
        value = self._scan.step(now)
        if value is not None:
            self._value, self.begun_at, self._scan = value, self._scan_begun_at, None
        return value if self.begun_at >= since else None


class TableWalk(Walk):
    """One pass over a table, a chunk at a time, parents before children."""

    def __init__(self, scan: RowsScan, names: BackendNames) -> None:
        self._scan = scan
        self._names = names

    def take(self, now: float) -> Piece | None:
        chunk = self._scan.take(now)
        return None if chunk is None else Piece(pack_rows(rows_of(chunk, self._names, now)), chunk.last)


def rows_of(chunk: Chunk, names: BackendNames, now: float) -> TableRows:
    columns = chunk.columns
    held_by, index = np.unique(columns.backend, return_inverse=True)
    ages = np.clip(np.ceil(now - columns.evidence), 0, AGE_MAX_S)
    keys, generations = names.key[held_by].tolist(), names.shared_generation[held_by].tolist()
    return TableRows(
        backends=tuple(zip(keys, generations, strict=True)),
        parent=columns.parent.astype("<u8").tobytes(),
        tokens=columns.tokens.astype("<u4").tobytes(),
        token=columns.token.astype("<u8").tobytes(),
        text=columns.text.astype("<u8").tobytes(),
        backend=index.astype("<u2").tobytes(),
        age_s=ages.astype("<u2").tobytes(),
    )
