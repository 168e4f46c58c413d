"""Eviction by utility: the row with the least score goes, by when it was last used and by what it saves.

Rule: score = recency + ALPHA * efficiency (Marconi, Pan et al.), each scaled to [0, 1] over all candidates: the leaves,
and the rows with one child, which takes the place of an evicted row. So the end of an idle chat outlives its inner
rows, and a long edge a short one. REMOTE goes before LOCAL, LOCAL before CONFIRMED.
Invariant: that of `rows`, except that a row may stand in a lane of tokens or children that it no longer has: a row's
changes take effect when it becomes the head (test_routes_utility.py). Bound: LANES_MAX lanes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranvier_py.core.routing.route_table.route_values import UTILITY, Numbers, RouteTableOptions
from ranvier_py.core.routing.route_table.rows import FORKED, LANES, TRUST_BITS, LeafQueue, Rows

ALPHA = 1.0
"""Recency and efficiency weigh the same. By any more, documents that never come again keep fresh chats out of the
table. By half as much, chats in small tables gain half or less."""

DEPTH_SLOPE = 1 / (3 * 4096)
"""The share by which each earlier token raises the operations of a token: Marconi's table 1, a Transformer of width
4096, where attention takes 8 L D^2 + 4 L^2 D and the MLP 16 L D^2."""

CLASS_MAX = 30  # classes of own tokens, by powers of two: 2 ** 29 and more are the last
LANES_MAX = len(LANES) * 2 * CLASS_MAX
STRAIGHT_BITS = 3
"""A row with one child, behind which no prompts have differed so far, counts an eighth (2 ** -3) of its operations:
prompts that go on through its child do not need it."""

FOLLOWED_MAX = 64


class Head(NamedTuple):
    """The first row of a lane, and what it is scored by."""

    row: int
    lane: int
    used: int  # second
    efficiency: float


class ScoreScale(NamedTuple):
    """How the heads are scored at one moment: by age from the oldest one on, by efficiency from the least one on."""

    trust: int
    lane: int  # of the least score
    limit: float  # the next lane's score
    latest: int  # second of this moment
    oldest: int  # second of the last use
    age_s: int  # from `oldest` to `latest`
    least: float  # efficiency
    range: float  # from the least to the greatest efficiency

    def score(self, head: Head) -> float:
        efficiency = (head.efficiency - self.least) / self.range if self.range else 1.0
        return (head.used - self.oldest) / self.age_s + ALPHA * efficiency


class UtilityQueue(LeafQueue):
    """Evicts by score."""

    takes_inner = True

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.heads = defaultdict(dict)
        self.seconds = defaultdict(list)
        self._lanes: dict[int, list[int]] = {trust: [] for trust in LANES}
        self._latest = 0  # second
        self._scale: ScoreScale | None = None
        self._followed = 0

    def lane_of(self, row: int) -> int:
        """Return the lane that a row belongs to: by trust, whether it has a child, and the bits of its own tokens; 0:
        it is no candidate, for it has no claims or several children."""
        rows = self._rows
        child, trust = rows.child[row], rows.best[row]
        if not trust or (child and rows.right[child]):
            return 0
        own = rows.tokens[row] - rows.tokens[rows.parent[row]]
        if child and not rows.flags[row] & FORKED:
            own >>= STRAIGHT_BITS
        alike = min(max(own, 1).bit_length(), CLASS_MAX)
        return int(trust | (alike + CLASS_MAX if child else alike) << TRUST_BITS)

    def is_inner(self, row: int) -> bool:
        return self._rows.lane[row] >> TRUST_BITS > CLASS_MAX

    def push(self, row: int, lane: int = 0) -> None:
        lane = lane or self.lane_of(row)
        if not lane:
            return
        if lane not in self.heads:
            self._lanes[lane & LANES[-1]].append(lane)
        self._latest = max(self._latest, self._rows.used[row])
        super().push(row, lane)

    def lanes_of(self, leaves: Numbers) -> npt.NDArray[np.uint8]:
        """Return what `lane_of` returns for each of these rows, which have claims."""
        rows = self._rows
        child = np.frombuffer(rows.child, np.int32)[leaves]
        tokens, parents = np.frombuffer(rows.tokens, np.uint32), np.frombuffer(rows.parent, np.int32)[leaves]
        own = tokens[leaves].astype(np.int64) - tokens[parents]
        straight = (child > 0) & (np.frombuffer(rows.flags, np.uint8)[leaves] & FORKED == 0)
        alike = np.frexp(np.maximum(np.where(straight, own >> STRAIGHT_BITS, own), 1))[1].clip(max=CLASS_MAX)
        lanes = super().lanes_of(leaves) | (alike + np.where(child > 0, CLASS_MAX, 0)).astype(np.uint8) << TRUST_BITS
        return np.where((child > 0) & (np.frombuffer(rows.right, np.int32)[child] > 0), np.uint8(0), lanes)

    def push_many(self, leaves: Numbers) -> None:
        lanes = self.lanes_of(leaves)
        leaves = leaves[lanes > 0]
        if not len(leaves):
            return
        for lane in np.unique(lanes[lanes > 0]).tolist():
            if lane not in self.heads:
                self._lanes[lane & LANES[-1]].append(lane)
        self._latest = max(self._latest, int(np.frombuffer(self._rows.used, np.int32)[leaves].max()))
        super().push_many(leaves)

    def pop(self) -> int:
        for trust in LANES:
            head = self._followed_head(trust) or self._least(trust)
            if head is not None:
                self.remove(head.row)
                return head.row
        return 0

    def _followed_head(self, trust: int) -> Head | None:
        """Return the head of the lane that was found last, if its score has not passed the next lane's; None: compare
        all, as at each second's first eviction, or after FOLLOWED_MAX rows."""
        scale = self._scale
        if scale is None or (scale.trust, scale.latest) != (trust, self._latest) or self._followed >= FOLLOWED_MAX:
            return None
        head = self._head(scale.lane)
        if head is None or scale.score(head) > scale.limit:
            return None
        self._followed += 1
        return head

    def _least(self, trust: int) -> Head | None:
        """Return the head with the least score among all lanes of a trust; None: they are empty."""
        heads = [head for lane in self._lanes[trust] if (head := self._head(lane)) is not None]
        if not heads:
            return None
        oldest, least = min(head.used for head in heads), min(head.efficiency for head in heads)
        most = max(head.efficiency for head in heads)
        scale = ScoreScale(
            trust=trust,
            lane=0,
            limit=0.0,
            latest=self._latest,
            oldest=oldest,
            age_s=max(1, self._latest - oldest),
            least=least,
            range=most - least,
        )
        ordered = sorted([(scale.score(head), at) for at, head in enumerate(heads)])
        found = heads[ordered[0][1]]
        limit = ordered[1][0] if len(ordered) > 1 else ordered[0][0] + 1.0
        self._scale, self._followed = scale._replace(lane=found.lane, limit=limit), 1
        return found

    def _head(self, lane: int) -> Head | None:
        """Return the first row of a lane that is at its true place; move those before it to theirs."""
        rows = self._rows
        while row := self.first(lane):
            second, place = rows.bucket[row], self.lane_of(row)
            if place == lane and rows.used[row] == second:
                return Head(row, lane, second, self._efficiency(row))
            self.remove(row)
            if place:
                self.push(row, place)
        return None

    def _efficiency(self, row: int) -> float:
        """Return the operations that a match loses without the row, in units of those of a prompt's first token: of its
        own tokens, beyond its parent. Marconi divides them by the memory taken, which is the same for all rows."""
        rows = self._rows
        end, start = rows.tokens[row], rows.tokens[rows.parent[row]]
        found = max(1, end - start) * (1.0 + DEPTH_SLOPE * (start + end) / 2)
        return found / (1 << STRAIGHT_BITS) if rows.child[row] and not rows.flags[row] & FORKED else found


def make_queue(rows: Rows, options: RouteTableOptions) -> LeafQueue:
    """Make the queue of the order of eviction that the options name."""
    return UtilityQueue(rows) if options.eviction == UTILITY else LeafQueue(rows)
