"""The rows of the route table, stored in columns: one row per prefix; and the order in which leaves are evicted.

A row is a number. Row 0 is the empty prefix, the parent of every row whose ancestors are not known. Links are row
numbers: `parent`, `child` (the first one), `left` and `right` (siblings). A row that is free or not placed yet has
parent -1. The first claim of a row is in the columns `backend` … `evidence`; the rare further ones in `claims`.
Invariant: following `parent` from any placed row ends at row 0; each fingerprint in `index` names a row that has it; a
queued leaf never stands behind its true place, so the first that stands at its own goes (test_routes_properties.py).
Bound: a heap has twice as many seconds as have rows at most, and EMPTY_SECONDS more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table.route_values import Numbers, Trust

ROWS_MIN = 1024
"""Columns start with this many rows, 70 kB, and double up to the capacity: 20 ms at most, at a million rows. Smaller
steps would leave holes in the heap, 35 bytes for each row (measured)."""

NO_BACKEND = -1
WHOLE = 1
"""Bit of `flags`: the ancestors of this row are known to be complete, so that a walk need not read further keys."""
SHARED = 2
"""Bit of `flags`: the row has more claims than the one in the columns."""
ALIASED = 4
"""Bit of `flags`: the row has more text fingerprints than the one in the columns."""
FORKED = 8
"""Bit of `flags`: the row has, or had, several children, so prompts differ behind it."""

TEXTS_MAX = 64
"""Text fingerprints of one row. It has several where chats differ in what the template leaves out, such as names."""


class Rows:
    """Stores rows and links them. Decides nothing about trust, time or the order of eviction."""

    def __init__(self, capacity: int) -> None:
        self.rows_max = capacity + 1
        self.top = 1  # rows from here on were never used
        self.index: dict[int, int] = {}
        self.aliases: dict[int, tuple[int, ...]] = {}  # further text fingerprints of a row
        self.free: list[int] = []
        self.count = 0
        self.texts_dropped = 0
        self.parent, self.child, self.left, self.right = array("i"), array("i"), array("i"), array("i")
        self.tokens, self.token, self.text = array("I"), array("Q"), array("Q")
        self.flags = array("B")
        self.used = array("i")  # whole second of the last use; a row with children may lag behind them
        self.backend, self.generation = array("h"), array("i")
        self.trust, self.evidence = array("B"), array("i")
        self.best = array("B")  # highest trust of the row's claims; 0 = it has none
        self.lane, self.bucket = array("B"), array("i")  # where the row stands in LeafQueue; lane 0 = nowhere
        self.older, self.newer = array("i"), array("i")
        self.grow()
        self.parent[0] = 0

    def grow(self) -> None:
        """Double all columns, up to the capacity."""
        size = len(self.parent)
        step = min(max(size, ROWS_MIN), self.rows_max - size)
        self.parent.extend(array("i", (-1,)) * step)
        self.backend.extend(array("h", (NO_BACKEND,)) * step)
        for column in vars(self).values():
            if isinstance(column, array) and len(column) == size:
                column.frombytes(bytes(step * column.itemsize))

    def create(self, tokens: int, token: int, text: int, used: int) -> int:
        """Create a row without claims, not placed yet. One of its fingerprints is not 0; none is in the index yet."""
        if self.free:
            row = self.free.pop()
        else:
            row = self.top
            self.top += 1
            if row == len(self.parent):
                self.grow()
        self.count += 1
        self.tokens[row] = tokens
        self.token[row] = token
        self.text[row] = text
        self.used[row] = used
        if token:
            self.index[token] = row
        if text:
            self.index[text] = row
        return row

    def release(self, row: int) -> int:
        """Free a placed row that has no children and no claims and is not queued. Returns its parent."""
        parent = self.detach(row)
        index, token, text = self.index, self.token[row], self.text[row]
        if token:
            del index[token]
        if text:
            del index[text]
            for alias in self.aliases.pop(row, ()):
                del index[alias]
        self.parent[row] = -1
        self.flags[row] = 0
        self.count -= 1
        self.free.append(row)
        return parent

    def splice(self, row: int) -> int:
        """Free a placed row with one child, which takes its place. Returns the parent, whose last use stays."""
        child, parent = self.child[row], self.parent[row]
        above, own = self.used[parent], self.used[row]
        self.detach(child)
        self.release(row)
        self.place(child, parent)
        self.used[child] = max(self.used[child], own)
        self.used[parent] = above
        return parent

    def texts(self, row: int) -> tuple[int, ...]:
        """All text fingerprints of the row."""
        first = self.text[row]
        if not first:
            return ()
        more = self.aliases.get(row)
        return (first, *more) if more else (first,)

    def add_text(self, row: int, text: int) -> None:
        """Give the row one more text fingerprint, which must not be in the index.

        Of more than TEXTS_MAX the greatest goes: so all nodes keep the same ones, whatever came first.
        """
        self.index[text] = row
        texts = (*self.texts(row), text)
        if len(texts) > TEXTS_MAX:
            greatest = max(texts)
            del self.index[greatest]
            texts = tuple([each for each in texts if each != greatest])
            self.texts_dropped += 1
        self.text[row], *others = texts
        if others:
            self.aliases[row] = tuple(others)
            self.flags[row] |= ALIASED

    def take_texts(self, source: int, target: int) -> None:
        """Move all text fingerprints of the source to the target."""
        texts = self.texts(source)
        self.text[source] = 0
        self.aliases.pop(source, None)
        self.flags[source] &= ~ALIASED
        for text in texts:
            self.add_text(target, text)

    def place(self, row: int, parent: int) -> None:
        """Hang an unplaced row under a parent (0: the top)."""
        first = self.child[parent]
        self.parent[row] = parent
        self.left[row] = 0
        self.right[row] = first
        if first:
            self.left[first] = row
            self.flags[parent] |= FORKED
        self.child[parent] = row

    def detach(self, row: int) -> int:
        """Take a placed row and its subtree from its parent, which inherits its last use. Returns the parent."""
        parent, left, right = self.parent[row], self.left[row], self.right[row]
        if left:
            self.right[left] = right
        else:
            self.child[parent] = right
        if right:
            self.left[right] = left
        self.used[parent] = max(self.used[parent], self.used[row])
        self.parent[row] = -1
        return parent

    def is_above(self, row: int, other: int) -> bool:
        """Whether `row` is a proper ancestor of `other`."""
        parent = self.parent
        other = parent[other]
        while other > 0:
            if other == row:
                return True
            other = parent[other]
        return False

    def children(self, row: int) -> Iterator[int]:
        """Yield the children, last placed first. The caller may move away the one that it was given last."""
        child = self.child[row]
        while child:
            following = self.right[child]
            yield child
            child = following

    def branches(self, key: PrefixKey) -> int:
        """Return how many children the rows of this key have: 0, 1, or 2 for more."""
        found = 0
        for name in key[1:]:
            row = self.index.get(name)  # 0 is nobody's name
            if row is not None and (child := self.child[row]):
                if self.right[child]:
                    return 2
                found = 1
        return found

    def name(self, row: int) -> int:
        """Return a fingerprint that finds this row; 0 for the empty prefix."""
        return self.token[row] or self.text[row]

    def above(self, row: int) -> int:
        """The name of the row's parent."""
        return self.name(self.parent[row])

    def key(self, row: int) -> PrefixKey:
        return self.tokens[row], self.token[row], self.text[row]

    def known_chain(self, chain: Iterable[PrefixKey]) -> Iterator[PrefixKey]:
        """Yield these keys, deepest first, up to the first one without a token fingerprint whose text has a row. From
        there on yield the rows' own keys, of that row and all above it: they have what other nodes tokenized."""
        for key in chain:
            if not key[1] and key[2] in self.index:
                row = self.index[key[2]]
                while row > 0:
                    yield self.key(row)
                    row = self.parent[row]
                return
            yield key


LANES = (Trust.REMOTE, Trust.LOCAL, Trust.CONFIRMED)
TRUST_BITS = 2
"""The lowest bits of a lane's number, which say its trust."""

EMPTY_SECONDS = 64
"""Seconds without rows that a heap may always keep: a table that is never full pops nothing, and lives for years."""


class LeafQueue:
    """Rows that are, or lately were, leaves. REMOTE goes before LOCAL before CONFIRMED, then what was unused longest.

    One lane per trust has a ring of rows for each second of last use, and a heap of those seconds; the links of rings
    are columns of Rows. A use only writes the second into the row's column; the row moves to its new ring when it comes
    to the head of its old one. Lane and second only grow; whoever lowers a row's trust takes it out first.
    """

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
