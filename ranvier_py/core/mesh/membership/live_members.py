"""Which peers the planes above membership deal with: live members whose sessions are proved.

In a small cluster these are all members. In a large one they are the neighbours (`neighbour_set`) and the *guests*:
members that count us as their neighbour, because they see other members than we do, and send us route updates. What the
others know comes through these. Only loads, which nobody passes on, go to some of all acquaintances, other ones each
time. Bounds: GUESTS_MAX guests, the oldest goes. Cost: O(members) for each update, so changes are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Peer

DELAY_S, DELAY_MANY_S, DELAY_FAR_S = 0.02, 0.5, 5.0
"""Seconds until the planes learn that members changed: in a small cluster; in a large one; and in a large one if there
is only one more member to send loads to. Without a delay a node that joins N peers would take N² steps."""

GUESTS_MAX = 32


class LivePeers(NamedTuple):
    """The peers at one moment. The lists of sessions are the same objects until members change."""

    near: Sequence[Peer]  # neighbours and guests
    sharing: Sequence[Peer]  # those of them that share routes: their schema is ours
    met: Sequence[Peer]  # all acquaintances
    sessions: Sequence[int]  # of all live members but us
    able: Sequence[int]  # of those of our schema


class LiveMembers:
    """Finds the peers, and calls `meet` with them. `wake_at`: when `update` must be called. `sharing`: sessions that
    share routes."""

    def __init__(self, members: Membership, meet: Callable[[LivePeers, float], None]) -> None:
        self.wake_at = inf
        self.sharing: dict[int, None] = {}
        self._members = members
        self._meet = meet
        self._guests: BoundedDict[int, None] = BoundedDict(GUESTS_MAX)
        self._alive: Sequence[Member] | None = None
        self._sessions: Sequence[int] = ()
        self._able: Sequence[int] = ()

    def changed(self, now: float) -> None:
        """Plan an update: a member came or went."""
        delay_s = DELAY_S if self._members.neighbours.is_mesh else DELAY_MANY_S
        self.wake_at = min(self.wake_at, now + delay_s)

    def proved(self, session: int, now: float) -> None:
        """Plan an update: this live member has proved itself."""
        if self._members.neighbours.wants(session):
            self.changed(now)
        else:
            self.wake_at = min(self.wake_at, now + DELAY_FAR_S)

    def admit(self, session: int, now: float) -> None:
        """Make this session a peer now, perhaps as a guest, if it may share routes and is none yet."""
        member = self._members.member(session)
        if member is None or not (member.live and member.proved and member.record.schema == self._members.me.schema):
            return
        if not self._members.neighbours.wants(session):
            self._guests[session] = None
        self.update(now)

    def update(self, now: float) -> None:
        """Give all planes their peers as of now."""
        self.wake_at = inf
        members, schema = self._members, self._members.me.schema
        close = self._close()
        near = [Peer(member.session, member.address) for member in close]
        sharing = [Peer(member.session, member.address) for member in close if member.record.schema == schema]
        met = [Peer(member.session, member.address) for member in members.neighbours.acquainted()]
        self.sharing = {peer.session: None for peer in sharing}
        self._list(members.alive())
        self._meet(LivePeers(near, sharing, met, self._sessions, self._able), now)

    def _list(self, alive: Sequence[Member]) -> None:
        """List the sessions of all members and of those of our schema anew, if members have changed."""
        if alive is self._alive:
            return
        self._alive = alive
        self._sessions = [member.record.session for member in alive]
        schema = self._members.me.schema
        able = [member.record.session for member in alive if member.record.schema == schema]
        if able != self._able:  # a plane that is given the same list object does nothing
            self._able = able

    def _close(self) -> Sequence[Member]:
        neighbours = self._members.neighbours
        met = neighbours.acquainted()
        if neighbours.is_mesh:
            self._guests.clear()
            return met
        near = neighbours.near()
        for session in list(self._guests):
            member = self._members.member(session)
            if member is None or not (member.live and member.proved):
                del self._guests[session]
        return [member for member in met if member.session in near or member.session in self._guests]
