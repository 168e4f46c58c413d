"""Counts of running budgets as they lie in a file: batches of rows, each of which is read whole or not at all.

A batch: 4 bytes mark | 4 length | 8 digest | rows as they travel. Whatever follows a batch that is cut off or damaged
is not read: it was written later. Rows may come in any order and any number of times, as from peers. Invariant: what
was saved of a window outlives a start with a wrong clock that is set within KEPT_S (test_limit_records.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct

from ranvier_py.core.access.limits.count import CountRow
from ranvier_py.core.access.limits.counts import GRACE_S, ROWS_MAX, SWEPT_AT_ONCE, Counters
from ranvier_py.core.access.limits.limit_gossip import COUNT_ROWS_MAX, COUNTED
from ranvier_py.core.access.limits.meters import LimitSpan
from ranvier_py.core.mesh.wire.frame import BadFrame

HEAD = Struct("<4sI8s")
MARK = b"RLC1"
PERSON = b"limit counts"
KEPT_S = 3600.0  # within which the clock of a machine that has just started is set


class SavedRows:
    """Rows that earlier processes saved. Those whose window does not run by our clock are kept for KEPT_S, and tried
    again whenever it is set: a machine may start in 1970, or with its local time for UTC. Bound: ROWS_MAX."""

    def __init__(self, counters: Counters, now: float) -> None:
        self._counters, self._until = counters, now + KEPT_S
        self._clock_s = counters.wall_offset_s
        self._kept: dict[tuple[int, int, int, int], CountRow] = {}
        self._tried: list[tuple[int, int, int, int]] = []

    def take(self, row: CountRow, now: float) -> None:
        """Take a row of the file."""
        key = row[:4]
        if not self._counters.merge(row, now) and (key in self._kept or len(self._kept) < ROWS_MAX):
            self._kept[key] = max(self._kept.get(key, row), row, key=lambda one: one[-3:])

    def sweep(self, now: float) -> None:
        """Try rows again after the clock was set, some at once; drop them in the end."""
        if now >= self._until:
            self._kept.clear()
            self._tried.clear()
            return
        if abs(self._counters.wall_offset_s - self._clock_s) >= GRACE_S:
            self._clock_s = self._counters.wall_offset_s
            self._tried = [*self._kept]
        for key in self._tried[-SWEPT_AT_ONCE:]:
            if self._counters.merge(self._kept[key], now):
                del self._kept[key]
        del self._tried[-SWEPT_AT_ONCE:]

    def all(self, now: float) -> Sequence[CountRow]:
        """Return all that is to be in the file: these, and all rows of budgets, which are saved with this."""
        return [*all_rows(self._counters, now), *self._kept.values()]


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
