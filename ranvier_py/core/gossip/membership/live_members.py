"""Which peers the planes above membership deal with: live members whose sessions are proved.

In a small cluster these are all members. In a large one they are the neighbours (`neighbour_set`) and the *guests*:
members that count us as their neighbour, because they see other members than we do, and send us route updates. What the
others know comes through these. Only loads, which nobody passes on, go to some of all acquaintances, other ones each
time. Bounds: GUESTS_MAX guests, the oldest goes. Cost: O(members) for each update, so changes are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.gossip.backend_state.facts import BackendFacts
from ranvier_py.core.gossip.backend_state.prefills import PrefillGossip
from ranvier_py.core.gossip.backend_state.signed_commands import SignedCommands
from ranvier_py.core.gossip.gossip_values import Peer
from ranvier_py.core.gossip.membership.members import Membership
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.peer_answers.peer_answers import PeerAnswers
from ranvier_py.core.gossip.readers.shared_streams import SharedStreams
from ranvier_py.core.gossip.replication.route_gossip import RouteGossip
from ranvier_py.core.gossip.rule_verdicts import VerdictGossip

DELAY_S, DELAY_MANY_S, DELAY_FAR_S = 0.02, 0.5, 5.0
"""Seconds until the planes learn that members changed: in a small cluster; in a large one; and in a large one if there
is only one more member to send loads to. Without a delay a node that joins N peers would take N² steps."""

GUESTS_MAX = 32


class LiveMembers:
    """Gives the planes their peers. `wake_at`: when `update` must be called. `sharing`: sessions that share routes."""

    def __init__(  # noqa: PLR0913  # each plane, named
        self,
        members: Membership,
        routes: RouteGossip,
        facts: BackendFacts,
        orders: SignedCommands,
        *,
        streams: SharedStreams,
        answers: PeerAnswers,
        verdicts: VerdictGossip,
        prefills: PrefillGossip,
    ) -> None:
        self.wake_at = inf
        self.sharing: dict[int, None] = {}
        self._members = members
        self._routes = routes
        self._facts = facts
        self._orders = orders
        self._streams = streams
        self._answers = answers
        self._verdicts = verdicts
        self._prefills = prefills
        self._guests: BoundedDict[int, None] = BoundedDict(GUESTS_MAX)
        self._alive: Sequence[Member] | None = None
        self._everybody: Sequence[int] = ()
        self._able: Sequence[int] = ()  # the members of our schema

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

    def admits(self, session: int, now: float) -> bool:
        """Whether this session is a peer of routes, or becomes one now, perhaps as a guest."""
        if session in self.sharing:
            return True
        member = self._members.member(session)
        if member is None or not (member.live and member.proved and member.record.schema == self._members.me.schema):
            return False
        if not self._members.neighbours.wants(session):
            self._guests[session] = None
        self.update(now)
        return session in self.sharing

    def update(self, now: float) -> None:
        """Give all planes their peers as of now."""
        self.wake_at = inf
        members, schema = self._members, self._members.me.schema
        close = self._close()
        peers = [Peer(member.session, member.address) for member in close]
        sharing = [Peer(member.session, member.address) for member in close if member.record.schema == schema]
        met = [Peer(member.session, member.address) for member in members.neighbours.acquainted()]
        self.sharing = {peer.session: None for peer in sharing}
        self._list(members.alive())
        self._routes.peers(sharing, now, self._everybody)
        self._facts.peers(peers, now, met)
        self._orders.peers(peers, now)
        self._streams.peers(sharing, met, self._able)
        self._answers.peers(peers, sharing, now)
        self._verdicts.peers(peers)
        self._prefills.peers(sharing)

    def _list(self, alive: Sequence[Member]) -> None:
        """List the sessions of all members and of those of our schema anew, if members have changed."""
        if alive is self._alive:
            return
        self._alive = alive
        self._everybody = [member.record.session for member in alive]
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
