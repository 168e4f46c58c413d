"""Counts of running budgets as they lie in a file: batches of rows, each of which is read whole or not at all.

A batch: 4 bytes mark | 4 length | 8 digest | rows as they travel. Whatever follows a batch that is cut off or damaged
is not read: it was written later. Rows may come in any order and any number of times, as from peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct

from ranvier_py.core.access.limits.count import CountRow
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.limit_gossip import COUNT_ROWS_MAX, COUNTED
from ranvier_py.core.access.limits.meters import LimitSpan
from ranvier_py.core.mesh.wire.frame import BadFrame

HEAD = Struct("<4sI8s")
MARK = b"RLC1"
PERSON = b"limit counts"


def unsaved_rows(counters: Counters, now: float) -> Sequence[CountRow]:
    """Return the rows of budgets that changed since the last call."""
    counters.book(now)
    keys, counters.unsaved = counters.unsaved, {}
    rows = map(counters.row, keys)
    return [counters.travelling(row, now) for row in rows if row is not None]


def all_rows(counters: Counters, now: float) -> Sequence[CountRow]:
    """Return all rows of budgets, which are saved with this."""
    counters.book(now)
    counters.unsaved.clear()
    return [counters.travelling(row, now) for row in counters.all_rows() if row.count.span > LimitSpan.MINUTE]


def written(rows: Sequence[CountRow]) -> bytes:
    """Return the batches of these rows."""
    batches = []
    assert COUNTED.pack is not None
    for start in range(0, len(rows), COUNT_ROWS_MAX):
        data = COUNTED.pack(rows[start : start + COUNT_ROWS_MAX])
        assert isinstance(data, bytes)
        batches.append(HEAD.pack(MARK, len(data), digest(data)) + data)
    return b"".join(batches)


def read(data: bytes) -> Iterator[tuple[Sequence[CountRow], int]]:
    """Yield the rows of each batch, and where it ends."""
    at = 0
    while at + HEAD.size <= len(data):
        mark, length, found = HEAD.unpack_from(data, at)
        batch = data[at + HEAD.size : at + HEAD.size + length]
        if mark != MARK or len(batch) != length or digest(batch) != found:
            return
        try:
            rows = COUNTED.unpack(batch)
        except BadFrame:
            return
        assert isinstance(rows, tuple)
        at += HEAD.size + length
        yield rows, at


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8, person=PERSON).digest()
