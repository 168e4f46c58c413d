"""Side state for peers that missed updates of it: owners of responses and sessions, checkpoints of hybrid models.

No row of a table has side state. A node that copied a table, was behind a cut or adds a backend late may lack some: it
asks one peer for all of it, another one if the answer does not arrive whole, and once more after a while, because the
peer may have missed the same updates. Rules: what it learns so it does not send on. A part is encoded when it is due,
in about 2 ms. Bound: FAILED_MAX_S between two tries.
Invariant: a peer restores what loss took (test_side_state.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.mesh.transfer import Piece, Walk
from ranvier_py.core.pauses import doubled
from ranvier_py.core.routing.peers.route_sync import RouteSync, SidePiece
from ranvier_py.core.routing.peers.route_updates import Entry, pack_entries

ANSWERS, AGAIN_S = 2, 5.0
"""A node wants ANSWERS whole answers for each cause, AGAIN_S apart."""

FAILED_S, FAILED_MAX_S = 1.0, 60.0
"""Until the next try, at first and at most: a busy peer answers at once."""


class SideTurns:
    """When this node asks for side state next, and whom."""

    def __init__(self) -> None:
        self.at = inf
        self._failures = self._answers = 0  # failed tries since the last answer; answers that are still wanted
        self._last: Peer | None = None  # the peer asked last

    def want(self, at: float) -> None:
        """Ask at that time, because this node may lack side state, even if an answer is arriving just now."""
        self.at = min(self.at, at)
        self._failures, self._answers = 0, ANSWERS

    def next_peer(self, peers: Sequence[Peer], rng: Random) -> Peer:
        """Choose whom to ask now."""
        self.at = inf
        self._last = rng.choice([peer for peer in peers if peer != self._last] or peers)
        return self._last

    def came(self, now: float) -> None:
        """Note that an answer arrived whole."""
        self._failures = 0
        self._answers -= 1
        if self._answers > 0:
            self.at = min(self.at, now + AGAIN_S)

    def failed(self, now: float) -> None:
        self.at = min(self.at, now + doubled(FAILED_S, self._failures, FAILED_MAX_S))
        self._failures += 1


class SideWalk(Walk):
    """One pass over the side state of this node, a part at a time: what `TableWalk` is for rows."""

    def __init__(self, sync: RouteSync) -> None:
        self._sync = sync
        self._unread = sync.side_state()
        self._next = next(self._unread, None)

    def take(self, now: float) -> Piece:
        piece, self._next = self._next or SidePiece(), next(self._unread, None)
        entries = tuple([Entry(0, update) for update in self._sync.side_updates(piece, now)])
        return Piece(pack_entries(entries), self._next is None)
