"""How much one peer may change here: whoever has the cluster's key could else rewrite everybody's list of members.

Each peer has a bucket of changes: so many at once, so many a second. What only repeats what is known is free. A change
costs 1; one about the peer itself (a refutation, a new address) and an accusation of this node cost SELF_COST, since
each makes the whole cluster talk. In a healthy cluster a change is new from one peer only, so even while a thousand
nodes restart a peer brings a few a second; whole lists bring many at once, when cuts heal, hence a bucket that grows
with the cluster. Lists read while joining are free: they are what was asked for.

Drop rule: what the bucket does not cover is ignored, as if the packet had been lost: other peers tell it too, and the
next list brings what is left. Counted; the operator hears of it once until the bucket is full again.
Bounds: PEERS_MAX buckets, the one used longest ago goes first. Cost: O(1) for each change.
"""

from __future__ import annotations

BURST = 512
"""Changes at once, in the smallest cluster. Two large ones that meet need more lists than one."""

BURST_PER_MEMBER = 4
"""More for each member: a list after a cut has each of them changed, and the news before it some of them once more."""

FILL_S = 8.0
"""An empty bucket is full after it: 64 changes a second in a small cluster."""

SELF_COST = 16
"""So 4 refutations a second and 32 at once; honest ones are as seldom as probes of this member fail."""

PEERS_MAX = 4096
"""The largest membership."""


class Bucket:
    """Of one peer. `warned`: the operator was told."""

    __slots__ = ("at", "left", "warned")

    def __init__(self, left: float, now: float) -> None:
        self.left = left
        self.at = now
        self.warned = False


class Allowance:
    """All buckets, by session."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def spend(self, peer: int, cost: int, members: int, now: float) -> bool:
        """Whether this peer may make this change, in a cluster of so many."""
        most = BURST + BURST_PER_MEMBER * members
        bucket = self._buckets.pop(peer, None)
        if bucket is None:
            if len(self._buckets) >= PEERS_MAX:
                del self._buckets[next(iter(self._buckets))]
            bucket = Bucket(most, now)
        self._buckets[peer] = bucket
        bucket.left = min(most, bucket.left + max(0.0, now - bucket.at) * most / FILL_S)
        bucket.at = now
        bucket.warned = bucket.warned and bucket.left < most
        if bucket.left < cost:
            return False
        bucket.left -= cost
        return True

    def warn(self, peer: int) -> bool:
        """Whether the operator should hear of this peer now: once until its bucket is full again."""
        bucket = self._buckets[peer]
        told, bucket.warned = bucket.warned, True
        return not told
