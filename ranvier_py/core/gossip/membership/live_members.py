"""Who the planes above membership deal with: routes, backends, orders and streams hear of proved live members only.

In a small cluster that is everybody. In a large one it is the neighbours (membership/circle), and the *guests*: members
that take us for their neighbour because they see other members than we do, and speak to us of routes. What the others
know comes through these. Loads alone, which nobody passes on, go to some of all acquaintances, other ones each time.

Bounds: GUESTS_MAX guests, the oldest goes. Cost: 0.3 us for each member where any has changed since the last update,
which is therefore not made at each change.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ranvier_py.core.gossip.backend_state.facts import BackendFacts
from ranvier_py.core.gossip.backend_state.signed_commands import SignedCommands
from ranvier_py.core.gossip.gossip_values import Peer
from ranvier_py.core.gossip.membership.members import Members
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.readers.reader_gossip import StreamGossip
from ranvier_py.core.gossip.replication.route_gossip import RouteGossip

DELAY_S, DELAY_MANY_S, DELAY_FAR_S = 0.02, 0.5, 5.0
"""So soon the planes hear who came or went: in a small cluster; in a large one, where a change among a few of many can
wait; and there of one more who may be told of loads. At once would cost a node that joins N peers N² steps."""

GUESTS_MAX = 32


class Company:
    """Tells the planes who is there. `wake_at`: when `update` is wanted."""

    def __init__(
        self, members: Members, routes: RouteGossip, facts: BackendFacts, orders: SignedCommands, streams: StreamGossip
    ) -> None:
        self.wake_at = inf
        self.version = members.me.version_max  # of the protocol: the greatest that all know
        self._members = members
        self._routes = routes
        self._facts = facts
        self._orders = orders
        self._streams = streams
        self._sharing: dict[int, None] = {}  # whom routes know as a peer
        self._guests: dict[int, None] = {}
        self._alive: Sequence[Member] | None = None
        self._everybody: Sequence[int] = ()
        self._able: Sequence[int] = ()  # the members of our schema

    def changed(self, now: float) -> None:
        """Somebody came or went."""
        delay_s = DELAY_S if self._members.neighbours.is_mesh else DELAY_MANY_S
        self.wake_at = min(self.wake_at, now + delay_s)

    def proved(self, session: int, now: float) -> None:
        """This live member has proved itself."""
        if self._members.neighbours.wants(session):
            self.changed(now)
        else:
            self.wake_at = min(self.wake_at, now + DELAY_FAR_S)

    def admits(self, session: int, now: float) -> bool:
        """Whether routes hear what this session says. May make it a guest."""
        if session in self._sharing:
            return True
        member = self._members.member(session)
        if member is None or not (member.live and member.proved and member.record.schema == self._members.me.schema):
            return False
        if not self._members.neighbours.wants(session):
            self._guests[session] = None
            if len(self._guests) > GUESTS_MAX:
                del self._guests[next(iter(self._guests))]
        self.update(now)
        return session in self._sharing

    def update(self, now: float) -> None:
        """Tell all of them."""
        self.wake_at = inf
        members, schema = self._members, self._members.me.schema
        close = self._close()
        peers = [Peer(member.session, member.address) for member in close]
        sharing = [Peer(member.session, member.address) for member in close if member.record.schema == schema]
        met = [Peer(member.session, member.address) for member in members.neighbours.acquainted()]
        self._sharing = {peer.session: None for peer in sharing}
        self._count(members.alive())
        self._routes.peers(sharing, now, self._everybody)
        self._facts.peers(peers, met)
        self._orders.peers(peers)
        self._streams.peers(sharing, met, self._able)

    def _count(self, alive: Sequence[Member]) -> None:
        """What all members say of themselves, if any of it has changed since the last time."""
        if alive is self._alive:
            return
        self._alive = alive
        me = self._members.me
        everybody, able, version, schema = [], [], me.version_max, me.schema
        for member in alive:
            record = member.record
            everybody.append(record.session)
            if record.schema == schema:
                able.append(record.session)
            version = min(version, record.version_max)
        self._everybody, self.version = everybody, version
        if able != self._able:  # who is handed the same list has nothing to do
            self._able = able

    def _close(self) -> Sequence[Member]:
        neighbours = self._members.neighbours
        met = neighbours.acquainted()
        if neighbours.is_mesh:
            self._guests.clear()
            return met
        near = neighbours.near()
        self._guests = {member.session: None for member in met if member.session in self._guests}
        return [member for member in met if member.session in near or member.session in self._guests]
