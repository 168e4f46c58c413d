"""Who the planes above membership deal with: all of them know proved live members only.

In a small cluster that is everybody. In a large one it is the neighbours (`neighbour_set`), and the *guests*: members
that take us for their neighbour because they see other members than we do, and send us route updates. What the others
know comes through these. Loads alone, which nobody passes on, go to some of all acquaintances, other ones each time.

Bounds: GUESTS_MAX guests, the oldest goes. Cost: O(members) for each update, so it is not made at each change.
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
"""So soon the planes learn who came or went: in a small cluster; in a large one, where a change among a few of many can
wait; and there of one more who may be sent loads. At once would cost a node that joins N peers N² steps."""

GUESTS_MAX = 32


class LiveMembers:
    """Hands the planes who is there. `wake_at`: when `update` is wanted. `sharing`: sessions that routes know."""

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
        """Whether routes take what this session sends. May make it a guest."""
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
        """Hand all of them who is there."""
        self.wake_at = inf
        members, schema = self._members, self._members.me.schema
        close = self._close()
        peers = [Peer(member.session, member.address) for member in close]
        sharing = [Peer(member.session, member.address) for member in close if member.record.schema == schema]
        met = [Peer(member.session, member.address) for member in members.neighbours.acquainted()]
        self.sharing = {peer.session: None for peer in sharing}
        self._list(members.alive())
        self._routes.peers(sharing, now, self._everybody)
        self._facts.peers(peers, met)
        self._orders.peers(peers, now)
        self._streams.peers(sharing, met, self._able)
        self._answers.peers(peers, sharing, now)
        self._verdicts.peers(peers)
        self._prefills.peers(sharing)

    def _list(self, alive: Sequence[Member]) -> None:
        """All members, and those of our schema, if any has changed since the last time."""
        if alive is self._alive:
            return
        self._alive = alive
        self._everybody = [member.record.session for member in alive]
        schema = self._members.me.schema
        able = [member.record.session for member in alive if member.record.schema == schema]
        if able != self._able:  # who is handed the same list has nothing to do
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
