"""Push-pull: two members send each other their whole lists, so that what gossip missed arrives in the end.

A node does so with a session that just proved itself, if it is joining or had held that session for dead, and with a
random live member every `exchange_interval_s`, sooner when a member came back from the dead or an exchange in a large
cluster that grows found somebody new. A list has this node, our record of the receiver, live members, and those
that died last. It goes by datagram if small, but on BULK where datagrams may be blocked. Bounds: LIST_RECORDS in a
part, DEAD_LISTED dead; in answer, one list a second for each asker, and ANSWERED_RECORDS in total.
"""

from __future__ import annotations

from itertools import islice

from ranvier_py.core.mesh.membership.member_table import MemberTable
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Members as MemberList
from ranvier_py.core.mesh.wire.messages import Record, Update
from ranvier_py.core.mesh.wire.records import ROWS_MAX, size_of

LIST_RECORDS = ROWS_MAX  # in one part: some 20 KB, 54 KB if all names are as long as they may be
SMALL_LIST_RECORDS = 32  # more never fit a datagram: each takes 40 bytes at least
DEAD_LISTED = 1024  # the last dead in a list: enough to heal a cut in a cluster of two thousand at the first exchange
JOIN_LISTS = 3  # members whose lists a joining node reads quickly, or all if there are fewer
JOIN_S = 1.0  # between these, longer while nobody answers; also the least between two exchanges when cuts heal
GROWING_MEMBERS, GROWING_S = 64, 3.0  # with more members than this and than at the last exchange, the next is so soon
ANSWERED_RECORDS = 20_000  # sent in answer within a second, 1.3 MB: a thousand nodes that start together take turns
ANSWERS_MAX = 256  # lists sent in answer within one second, however short


class MemberLists:
    """Decides when lists are exchanged, and sends them. `datagram_bytes` is 0 where there are only streams."""

    def __init__(self, table: MemberTable, sends: list[Outgoing], datagram_bytes: int, now: float) -> None:
        self.wake_at = now + table.rng.uniform(0, JOIN_S)
        self._table = table
        self._sends = sends
        self._counters = table.counters
        self._rng = table.rng
        self._datagram_bytes = datagram_bytes
        self._read: dict[int, None] = {}  # members whose lists this node has read, up to JOIN_LISTS
        self._join_s = JOIN_S / 2  # doubled with each question, so the first wait is JOIN_S
        self._asked_at: dict[int, float] = {}  # sessions that were answered within the last second
        self._met_at = -JOIN_S
        self._lived = 0  # live members at the last exchange
        self._unanswered = 0  # questions since a list came

    @property
    def joining(self) -> bool:
        return len(self._read) < min(JOIN_LISTS, self._table.roster.live)

    def tick(self, now: float) -> None:
        """Exchange lists with a random member, when it is time."""
        if now < self.wake_at:
            return
        interval_s, live = self._table.health.profile.exchange_s(self._table.members), self._table.roster.live
        if self.joining:
            interval_s = self._join_s = min(2 * self._join_s, interval_s)
        elif live > max(self._lived, GROWING_MEMBERS):
            interval_s = min(interval_s, GROWING_S)
        self._lived = live
        self.wake_at = now + self._rng.uniform(0.8, 1.2) * interval_s
        met = self._table.neighbours.acquainted()
        if met:
            partner = self._rng.choice(met)
            self._ask(partner.address, partner.session)

    def met(self, address: Address, session: int, was_dead: bool, now: float) -> None:
        """React to a session that has just proved itself. `was_dead`: it was held for dead before."""
        if not (self.joining or was_dead):
            return
        if now - self._met_at >= JOIN_S:
            self._met_at = now
            self._ask(address, session)
        else:
            self.wake_at = min(self.wake_at, self._met_at + JOIN_S)

    def hurry(self, now: float) -> None:
        """Exchange within JOIN_S: what refuted a death may have been sent while nobody here could receive it."""
        self.wake_at = min(self.wake_at, now + self._rng.uniform(0.2, 1.0) * JOIN_S)

    def soon(self, now: float) -> None:
        """Exchange after about GROWING_S: so much is spread at once that some of it may be missed."""
        self.wake_at = min(self.wake_at, now + self._rng.uniform(0.8, 1.2) * GROWING_S)

    def answer(self, peer: Peer, now: float, plane: Plane = Plane.DATAGRAM) -> None:
        """Send the list to a peer that asked for it, by the plane of its question, within the limits."""
        while self._asked_at and now - next(iter(self._asked_at.values())) >= 1.0:
            del self._asked_at[next(iter(self._asked_at))]
        most = min(ANSWERS_MAX, max(1, ANSWERED_RECORDS // (len(self._table.roster) + 1)))
        if peer.session in self._asked_at or len(self._asked_at) >= most:
            self._counters.exchanges_refused += 1
            return
        self._asked_at[peer.session] = now
        self._send(peer.address, peer.session, plane, reply=False)

    def read(self, session: int) -> None:
        """A list of this member, or a part of one, has arrived."""
        self._unanswered = 0
        if len(self._read) < JOIN_LISTS:
            self._read[session] = None
            self._join_s = JOIN_S / 2

    def _ask(self, address: Address, session: int) -> None:
        member = self._table.roster.get(session)
        passes = self._unanswered == 0 and (member is None or member.datagrams)
        self._counters.exchanges += 1
        self._unanswered += 1
        self._send(address, session, Plane.DATAGRAM if passes else Plane.BULK, reply=True)

    def _send(self, to: Address, session: int, plane: Plane, *, reply: bool) -> None:
        records = self._records(session)
        small = len(records) <= SMALL_LIST_RECORDS
        if not small or sum([size_of(Update(record)) for record in records]) > self._datagram_bytes:
            plane = Plane.BULK
        for start in range(0, len(records), LIST_RECORDS):
            end = start + LIST_RECORDS
            asks = reply and end >= len(records)
            self._sends.append(Outgoing(to, session, plane, MemberList(tuple(records[start:end]), asks)))

    def _records(self, receiver: int) -> list[Record]:
        """Return the records of a list, in the order in which the receiver should read them."""
        roster = self._table.roster
        member = roster.get(receiver)
        held = [] if member is None else [member.record]
        live = [other.record for other in roster.alive() if other is not member]
        dead = (roster.get(session) for session in islice(reversed(self._table.dead.died), DEAD_LISTED))
        fallen = [other.record for other in dead if other is not None and other is not member]
        return [self._table.identity.record, *held, *live, *fallen]
