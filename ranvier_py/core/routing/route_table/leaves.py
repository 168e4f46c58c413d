"""The order in which leaves are evicted: REMOTE before LOCAL before CONFIRMED, then the longest unused first.

Rule: one lane per trust has a ring of rows for each second of last use, and a heap of those seconds. A use only writes
the second into the row's column; the row moves to its new ring when it comes to the head of its old one.
Invariant: a queued leaf never stands behind its true place (lane, second of last use), because both only grow; whoever
lowers a row's trust takes it out first. So the first row found at its true place goes (test_routes_properties.py).
Bound: a heap has twice as many seconds as have rows at most, and EMPTY_SECONDS more.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from ranvier_py.core.routing.route_table.route_values import Numbers, Trust
from ranvier_py.core.routing.route_table.rows import Rows

LANES = (Trust.REMOTE, Trust.LOCAL, Trust.CONFIRMED)
TRUST_BITS = 2
"""The lowest bits of a lane's number, which say its trust."""

EMPTY_SECONDS = 64
"""Seconds without rows that a heap may always keep: a table that is never full pops nothing, and lives for years."""


class LeafQueue:
    """Rows that are, or lately were, leaves. The links of its rings are columns of Rows."""

    takes_inner = False  # whether rows with one child are queued, too

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.heads: dict[int, dict[int, int]] = {lane: {} for lane in LANES}  # lane -> second -> oldest row
        self.seconds: dict[int, list[int]] = {lane: [] for lane in LANES}  # by lane: a heap of the seconds in `heads`

    def is_inner(self, row: int) -> bool:  # noqa: ARG002  # who takes some, tells
        """Whether a row is queued as one with a child. This order queues none such."""
        return False

    def push(self, row: int, lane: int = 0) -> None:
        """Queue a row that has claims and is not queued, at its last use in the lane of its trust, or in `lane`."""
        rows = self._rows
        lane, second = lane or rows.best[row], rows.used[row]
        rows.lane[row], rows.bucket[row] = lane, second
        head = self.heads[lane].get(second)
        if head is None:
            self._begin(lane, second, row)
            rows.older[row] = rows.newer[row] = row
            return
        last = rows.older[head]
        rows.older[row], rows.newer[row] = last, head
        rows.newer[last] = rows.older[head] = row

    def _begin(self, lane: int, second: int, row: int) -> None:
        """Note the first row of a second, and forget the seconds without rows once they are the most."""
        heads, seconds = self.heads[lane], self.seconds[lane]
        heads[second] = row
        heappush(seconds, second)
        if len(seconds) > 2 * len(heads) + EMPTY_SECONDS:
            seconds[:] = sorted(heads)

    def lanes_of(self, leaves: Numbers) -> npt.NDArray[np.uint8]:
        """Return the lane of each of these rows, which have claims."""
        return np.frombuffer(self._rows.best, np.uint8)[leaves]

    def push_many(self, leaves: Numbers) -> None:
        """Queue rows that have claims and are not queued, as a `push` of each in turn would."""
        rows = self._rows
        older, newer = np.frombuffer(rows.older, np.int32), np.frombuffer(rows.newer, np.int32)
        lanes, seconds = self.lanes_of(leaves), np.frombuffer(rows.used, np.int32)[leaves]
        np.frombuffer(rows.lane, np.uint8)[leaves], np.frombuffer(rows.bucket, np.int32)[leaves] = lanes, seconds
        for lane, second in dict.fromkeys(zip(lanes.tolist(), seconds.tolist(), strict=True)):
            several = leaves[(lanes == lane) & (seconds == second)]
            older[several[1:]], newer[several[:-1]] = several[:-1], several[1:]
            first, last = int(several[0]), int(several[-1])
            head = self.heads[lane].get(second)
            if head is None:
                self._begin(lane, second, first)
                rows.newer[last], rows.older[first] = first, last
                continue
            tail = rows.older[head]
            rows.older[first], rows.newer[tail] = tail, first
            rows.newer[last], rows.older[head] = head, last

    def remove(self, row: int) -> None:
        """Take a row out of the queue if it is in it."""
        rows = self._rows
        lane = rows.lane[row]
        if not lane:
            return
        heads, second = self.heads[lane], rows.bucket[row]
        older, newer = rows.older[row], rows.newer[row]
        if newer == row:
            del heads[second]
        else:
            rows.newer[older], rows.older[newer] = newer, older
            if heads[second] == row:
                heads[second] = newer
        rows.lane[row] = 0

    def pop(self) -> int:
        """Take out the next row to evict, and return it; 0 when there is none."""
        rows = self._rows
        for lane in LANES:
            while row := self.first(lane):
                self.remove(row)
                if rows.child[row]:
                    continue
                if rows.used[row] == rows.bucket[row] and rows.best[row] == lane:
                    return row
                self.push(row)
        return 0

    def first(self, lane: int) -> int:
        """Return the head of a lane's earliest ring, or 0 when the lane is empty. Forgets seconds without rows."""
        heads, seconds = self.heads[lane], self.seconds[lane]
        while seconds:
            row = heads.get(seconds[0])
            if row is not None:
                return row
            heappop(seconds)
        return 0
