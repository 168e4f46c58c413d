"""Small tables whose rows outlive their origin and merge by a join: in any order and however often they come.

A node sends rows that are new here to its peers, whoever made them; all rows to a newcomer; and all rows to one random
peer about every REPEAT_S. So all nodes end with the same (test_join_table.py); a lost message costs one REPEAT_S.
Bounds: ROWS_MAX rows in a message. With more than EVERYONE_MAX peers, so many random ones are sent what is new, and the
others get it through these. The rows are the owner's, with their bound; `_changed` has keys of rows alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from random import Random
from typing import ClassVar, Generic, TypeVar

from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Message

Key = TypeVar("Key")
Row = TypeVar("Row")


@dataclass(slots=True)
class Rounds:
    """When rows that are new were sent last, and when all are sent again."""

    sent_at: float
    repeat_at: float


class JoinTable(Machine, Generic[Key, Row]):
    """Sends the rows of one table to peers (see the module)."""

    ROWS_MAX: ClassVar[int]
    REPEAT_S: ClassVar[float]
    GATHER_S: ClassVar[float] = 0.0  # the shortest time between two messages of what is new
    EVERYONE_MAX: ClassVar[float] = inf

    def __init__(self, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self._outbox = outbox
        self._rng = rng
        self._peers: Sequence[Peer] = ()
        self._changed: dict[Key, None] = {}  # rows that are new here and still to be sent
        repeat_at = now + (rng.uniform(0, self.REPEAT_S) if isfinite(self.REPEAT_S) else inf)
        self._rounds = Rounds(now - self.GATHER_S, repeat_at)

    @property
    def wake_at(self) -> float:
        """When `tick` must be called next; any call may bring it nearer."""
        return (
            min(self._rounds.repeat_at, self._rounds.sent_at + self.GATHER_S)
            if self._changed
            else self._rounds.repeat_at
        )

    def tick(self, now: float) -> None:
        """Send what is due. Without peers nothing is kept for later, since a newcomer is sent all rows."""
        if self._changed and now >= self._rounds.sent_at + self.GATHER_S:
            self._rounds.sent_at = now
            changed, self._changed = self._changed, {}
            self._send(self._some(self._peers), self._rows(changed, now))
        if now >= self._rounds.repeat_at:
            self._rounds.repeat_at = now + self.REPEAT_S * self._rng.uniform(0.8, 1.2)
            if self._peers:
                self._send([self._rng.choice(self._peers)], self._rows(None, now))

    @abstractmethod
    def _rows(self, keys: dict[Key, None] | None, now: float) -> Sequence[Row]:
        """Return the rows with these keys, or all rows for None, as they are sent now."""

    @abstractmethod
    def _message(self, rows: Sequence[Row]) -> Message:
        """Return the message of at most ROWS_MAX rows."""

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers, and send the newcomers all rows."""
        self._meet(peers.near, now)

    def _meet(self, live: Sequence[Peer], now: float) -> bool:
        """Set the live peers, and send the newcomers all rows. Returns whether there are any."""
        before = {peer.session: None for peer in self._peers}
        self._peers = live
        newcomers = [peer for peer in live if peer.session not in before]
        if newcomers:
            self._send(self._some(newcomers), self._rows(None, now))
        return bool(newcomers)

    def _some(self, peers: Sequence[Peer]) -> Sequence[Peer]:
        return peers if len(peers) <= self.EVERYONE_MAX else self._rng.sample(peers, int(self.EVERYONE_MAX))

    def _send(self, peers: Sequence[Peer], rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), self.ROWS_MAX) if peers else ():
            message = self._message(rows[start : start + self.ROWS_MAX])
            for peer in peers:
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))


class ClockedTable(JoinTable[Key, Row]):
    """A join table whose rows bear times of day. `wall_ms` is that at `now`; the owner repeats it by `set_wall_clock`,
    as the clock may be corrected."""

    def __init__(self, outbox: list[Outgoing], rng: Random, now: float, wall_ms: int) -> None:
        super().__init__(outbox, rng, now)
        self.set_wall_clock(wall_ms, now)

    def set_wall_clock(self, wall_ms: int, now: float) -> None:
        """Set the time of day at `now`. A wrong clock costs that rows of others are refused, and counted, until it is
        set right."""
        self._wall_ms_before = wall_ms - 1000 * now

    def _wall_ms(self, now: float) -> int:
        return max(0, round(self._wall_ms_before + 1000 * now))
