"""Giving our table and side state to peers that join, or whose sums differ from ours: the other side of `pull`.

A transfer reads the table chunk by chunk, one chunk each tick, and no further than the peer has said that it will take.
It is kept for a while after its last chunk, which might have been lost. Rules: at most TRANSFERS_MAX transfers run at
once, one for each peer: a new request of a peer ends its old one. A peer that is refused is answered Busy at once. A
node that has not joined itself refuses every peer. While TRANSFERS_MAX run, none gets more than a quarter of the budget
for rows.
Bounds: KEPT_MAX transfers, finished ones included; SUMS_WAITING_MAX waiting questions for sums, more are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.routing.peers.comparison import AnySums, Buckets, answer_to, differing_buckets
from ranvier_py.core.routing.peers.route_messages import Busy, PartSums, RowsWanted, wire_bytes
from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.peers.side_state import SideWalk
from ranvier_py.core.routing.peers.table_copy import WINDOW_CHUNKS, OwnSums, TableWalk

TRANSFERS_MAX = 2
KEPT_MAX = 4
SILENCE_S = 5.0
"""A transfer ends when its peer is silent for this long: five times what the peer takes to ask again."""

SUMS_WAITING_MAX = 8  # 32 KiB each
SHARE_OF_ONE = 4
"""Each of several transfers may use the budget for rows divided by this."""

CHUNK_BYTES = 20_000
"""The room that the budget must have for a chunk to be read; a few chunks are larger."""

NO_ROOM_S = 0.05


class SumsWanted(NamedTuple):
    """One peer's question for our sums, which must have been begun at `since` or later."""

    message: AnySums
    since: float


@dataclass(slots=True)
class Transfer:
    """The transfer for one peer's request, and how far it has come."""

    peer: Peer
    request: int
    walk: TableWalk | SideWalk
    share: Window
    until: float  # when it ends, if the peer stays silent
    cursor: int = 0  # the peer has all chunks before this one
    sent: int = 0  # chunks sent
    finished: bool = False

    @property
    def waits(self) -> bool:
        """Whether there is a chunk to send that the peer would take."""
        return not self.finished and self.sent < self.cursor + WINDOW_CHUNKS


class SnapshotSource:
    """The giving side of the transfer of tables."""

    def __init__(
        self,
        outbox: RouteOutbox,
        sync: RouteSync,
        sums: OwnSums,
        differs: Callable[[Peer, Buckets, float], None],
    ) -> None:
        self._outbox = outbox
        self._counters = outbox.counters
        self._sync = sync
        self._sums = sums
        self._differs = differs  # called with the buckets that a comparison with this peer found to differ
        self._transfers: dict[int, Transfer] = {}  # by session; the one whose turn it is comes first
        self._sums_wanted: dict[int, SumsWanted] = {}  # by session
        self._no_room_until = 0.0

    @property
    def wake_at(self) -> float:
        if not (self._sums_wanted or self._transfers):
            return inf
        if self._sums_wanted or any(transfer.waits for transfer in self._transfers.values()):
            return self._no_room_until
        return min((transfer.until for transfer in self._transfers.values()), default=inf)

    def running(self) -> int:
        return sum(not transfer.finished for transfer in self._transfers.values())

    def meet(self) -> None:
        """React to a change of the live peers."""
        peers = self._outbox.peers
        for session in [session for session in self._transfers if session not in peers]:
            self._end(session)
        self._sums_wanted = {session: wanted for session, wanted in self._sums_wanted.items() if session in peers}

    def tick(self, now: float) -> None:
        """Send sums or one chunk: at most one step of 2 ms."""
        if not (self._sums_wanted or self._transfers):
            return
        for session in [session for session, transfer in self._transfers.items() if transfer.until <= now]:
            self._end(session)
        if now < self._no_room_until:
            return
        if self._sums_wanted:
            self._send_sums(now)
            return
        for session, transfer in self._transfers.items():
            if transfer.waits and self._has_room(transfer, now):
                del self._transfers[session]
                self._transfers[session] = transfer  # the others come first next time
                self._send_chunk(transfer, now)
                return
        if any(transfer.waits for transfer in self._transfers.values()):
            self._no_room_until = now + NO_ROOM_S

    # --- what peers ask ---------------------------------------------------------------------------------------------

    def sums(self, peer: Peer, message: AnySums, now: float) -> None:
        """Queue a peer's question for our sums. Its second one is answered from those of the first, or later ones."""
        if not message.reply:
            return
        if peer.session not in self._sums_wanted and len(self._sums_wanted) >= SUMS_WAITING_MAX:
            self._counters.sums_refused += 1
        else:
            is_second = isinstance(message, PartSums) and isfinite(self._sums.begun_at)
            self._sums_wanted[peer.session] = SumsWanted(message, self._sums.begun_at if is_second else now)

    def wanted(self, peer: Peer, message: RowsWanted, now: float, *, serving: bool) -> None:
        """Take a peer's request, or a cursor of a running one. `serving`: whether this node has joined itself."""
        transfer = self._transfers.get(peer.session)
        if transfer is not None and transfer.request == message.request:
            self._go_on(transfer, message.cursor, now)
            return
        others = sum(not each.finished for each in self._transfers.values() if each is not transfer)
        if message.cursor or not serving or others >= TRANSFERS_MAX:
            self._counters.refused += 1
            self._outbox.send(peer, Busy(message.request), now)
            return
        self._transfers.pop(peer.session, None)
        while len(self._transfers) >= KEPT_MAX:  # at most one runs, so there is a finished one
            del self._transfers[next(session for session, each in self._transfers.items() if each.finished)]
        share = Window(self._outbox.bulk.per_s // SHARE_OF_ONE)
        walk = SideWalk(self._sync) if message.side else self._sync.copy.rows(message.buckets, now)
        self._transfers[peer.session] = Transfer(peer, message.request, walk, share, now + SILENCE_S)

    def _go_on(self, transfer: Transfer, cursor: int, now: float) -> None:
        if not transfer.cursor <= cursor <= transfer.sent:
            return
        transfer.until = now + SILENCE_S
        if cursor == transfer.cursor and transfer.sent > cursor:
            transfer.walk.back(transfer.sent - cursor)
            self._counters.chunks_resent += transfer.sent - cursor
            transfer.sent = cursor
            transfer.finished = False
        transfer.cursor = cursor

    # --- what they get ----------------------------------------------------------------------------------------------

    def _send_sums(self, now: float) -> None:
        value = self._sums.step(min(wanted.since for wanted in self._sums_wanted.values()), now)
        if value is None:
            return
        for session, wanted in list(self._sums_wanted.items()):
            if wanted.since > self._sums.begun_at:
                continue
            peer, asked = self._outbox.peers[session], wanted.message
            if not self._outbox.send_bulk(peer, answer_to(asked, value), now):
                self._no_room_until = now + NO_ROOM_S
                return
            del self._sums_wanted[session]
            if isinstance(asked, PartSums):
                self._differs(peer, differing_buckets(value, asked), now)

    def _has_room(self, transfer: Transfer, now: float) -> bool:
        if self._outbox.bulk.room(now) < CHUNK_BYTES:
            return False
        return self.running() < TRANSFERS_MAX or transfer.share.room(now) >= CHUNK_BYTES

    def _send_chunk(self, transfer: Transfer, now: float) -> None:
        chunk = transfer.walk.take(now)
        if chunk is None:
            return
        chunk = chunk._replace(request=transfer.request, chunk=transfer.sent)
        transfer.sent += 1
        transfer.finished = chunk.last
        transfer.share.spend(wire_bytes(chunk), now)
        self._counters.chunks_sent += 1
        self._outbox.send_chunk(transfer.peer, chunk, now)

    def _end(self, session: int) -> None:
        self._counters.broken_transfers += not self._transfers.pop(session).finished
