"""The tables of membership, and every step by which a member changes in them.

    (unknown) --join--> ALIVE --suspect--> SUSPECT --bury--> DEAD | LEFT --forget--> (unknown)
                          ^------absolve------+----------------+
Each step keeps all tables consistent; whether it may be taken is decided elsewhere (`merge_rules`, `members`). The dead
stay in the roster for a day, so that a stale report of their life is recognised; ten minutes after the death the planes
above forget the session (`gone`): its routes have expired by then. Bounds: MEMBERS_MAX live, and those that come back
from the dead; DEAD_MAX dead, of which the longest dead goes first; CHANGES_MAX undrained changes.
"""

from __future__ import annotations

from random import Random

from ranvier_py.core.mesh.membership.broadcasts import Broadcasts
from ranvier_py.core.mesh.membership.contacts import Contacts, Greetings
from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.membership.neighbour_set import NeighbourSet
from ranvier_py.core.mesh.membership.own_record import OwnRecord
from ranvier_py.core.mesh.membership.profile import LocalHealth, Profile
from ranvier_py.core.mesh.membership.roster import Member, Paths, ProbeOrder, Roster
from ranvier_py.core.mesh.membership.suspicion import Suspicions
from ranvier_py.core.mesh.mesh_values import MemberChange
from ranvier_py.core.mesh.wire.messages import Record, State, Update

MEMBERS_MAX = 4096  # four times the largest cluster that is simulated. More are refused and counted.
DEAD_MAX = 4096  # dead members remembered
DEAD_S = 24 * 3600.0  # how long they are remembered: a session that comes back later is a new one to us
GONE_S = 600.0
"""How long after its death the planes above forget a session: the life of a route. Far above twice the longest
suspicion plus a push-pull, so that nobody still spreads what was forgotten (chitchat#155)."""

CHANGES_MAX = 4096  # undrained changes; more are dropped and counted
SECOND_OPINIONS = 3  # members, on average, that probe a suspect as soon as they learn of the suspicion


class TheDead:
    """The sessions of members that died or left: `died` has when, in that order."""

    def __init__(self) -> None:
        self.died: dict[int, float] = {}
        self.gone: list[int] = []  # to be forgotten by the planes above
        self.returned = False  # a member held for dead lives: a cut has healed, and lists should be compared
        self._lingering: dict[int, float] = {}  # those that the planes above have not forgotten yet

    def add(self, session: int, now: float) -> None:
        for table in (self.died, self._lingering):
            table.pop(session, None)
            table[session] = now

    def revive(self, session: int) -> None:
        self.died.pop(session)
        self._lingering.pop(session, None)

    def forget(self, session: int) -> None:
        """Forget a session, dead or not; so have the planes above, unless they have already."""
        known_above = self._lingering.pop(session, None) is not None or session not in self.died
        self.died.pop(session, None)
        if known_above:
            self.gone.append(session)

    def ripe(self, now: float) -> int:
        """Return a session that the planes above forget from now on; 0 if there is none."""
        session = next(iter(self._lingering), 0)
        if not session or now - self._lingering[session] < GONE_S:
            return 0
        del self._lingering[session]
        self.gone.append(session)
        return session

    def overdue(self, now: float) -> int:
        """Return a session that has been dead for long enough; 0 if there is none."""
        session = next(iter(self.died), 0)
        return session if session and (now - self.died[session] >= DEAD_S or len(self.died) > DEAD_MAX) else 0


class MemberTable:
    """All tables, and this node's own record. Other parts read them; only the steps here change a member's state."""

    def __init__(self, me: Record, profile: Profile, room_bytes: int, rng: Random) -> None:
        """`room_bytes` is the room for updates in a datagram."""
        self.identity = OwnRecord(me)
        self.health = LocalHealth(profile)
        self.counters = counters = MembershipCounters()
        self.rng = rng
        self.roster = Roster()
        self.neighbours = NeighbourSet(me.session, me.schema, self.roster)
        self.suspicions = Suspicions()
        self.greetings = Greetings(rng)
        self.contacts = Contacts(rng, counters)
        self.probe_order = ProbeOrder(rng)
        self.paths = Paths(self.roster, counters)
        self.broadcasts = Broadcasts(profile.retransmit_mult, profile.gossip_interval_s, room_bytes, counters)
        self.changes: list[MemberChange] = []
        self.dead = TheDead()

    @property
    def members(self) -> int:
        """Live members, this node included."""
        return self.roster.live + 1

    def note(self, what: str, record: Record, why: str) -> None:
        """Note a change for the operator."""
        if len(self.changes) >= CHANGES_MAX:
            self.counters.changes_dropped += 1
        else:
            self.changes.append(MemberChange(what, record, why))

    def held(self, member: Member) -> Update:
        """Return what this node holds of a member, as an update to send."""
        suspicion = self.suspicions.get(member.session)
        return Update(member.record, 0 if suspicion is None else suspicion.accuser)

    def join(self, record: Record, now: float, why: str) -> Member | None:
        """Add a new live member; the caller spreads it. Returns None when the table is full."""
        if self.roster.live >= MEMBERS_MAX:
            self.counters.members_refused += 1
            return None
        alive = record if record.state is State.ALIVE else record._replace(state=State.ALIVE)
        member = self.roster.add(alive, now)
        self._settle(member, now)
        self.note("joined", member.record, why)
        return member

    def remember_dead(self, record: Record, now: float) -> None:
        """Add a dead member that this node never met, so that stale reports of its life are refused. Not spread."""
        member = self.roster.add(record, now)
        self._lay_out(member, now)

    def absolve(self, member: Member, record: Record, now: float, why: str) -> None:
        """Set a member ALIVE by a higher record: refuted, returned, or just renewed. Spread in any case."""
        before = member.record.state
        self.broadcasts.push(Update(record), now)
        if before is State.ALIVE:
            self._move(member, record, now)
            return
        self._revive(member, record, now)
        self.counters.false_alarms += before is not State.LEFT
        self.dead.returned |= before is State.DEAD
        self.note("refuted" if before is State.SUSPECT else "returned", member.record, why)

    def suspect(self, member: Member, record: Record, accuser: int, now: float, why: str) -> None:
        """Begin a suspicion at the incarnation of `record`, also over an older one."""
        if member.live:
            self._move(member, record._replace(state=State.SUSPECT), now)
        else:  # suspected at a higher incarnation than it died at: so it has refuted that death
            self._revive(member, record._replace(state=State.SUSPECT), now)
        self.suspicions.begin(member.session, accuser, self.health.profile, self.members, now)
        self.counters.suspicions += 1
        self.note("suspected", member.record, why)
        self.broadcasts.push(Update(member.record, accuser), now)
        if accuser != self.identity.record.session and self.rng.random() * self.roster.live < SECOND_OPINIONS:
            self.probe_order.hasten(member.session)

    def confirm(self, member: Member, accuser: int, now: float) -> None:
        """Count one more accuser of a suspect; spread it if it shortens the suspicion."""
        if self.suspicions.confirm(member.session, accuser, self.health.profile, self.members):
            self.counters.confirmations += 1
            self.broadcasts.push(Update(member.record, accuser), now)

    def bury(self, member: Member, record: Record, now: float, why: str) -> None:
        """Set a member DEAD or LEFT, by `record`, and spread it."""
        was_live = member.live
        self.roster.change(member, record, now)
        self._end(member)
        self._lay_out(member, now)
        self.broadcasts.push(Update(member.record), now)
        if was_live:
            self.counters.deaths += record.state is State.DEAD
            self.note("died" if record.state is State.DEAD else "left", member.record, why)

    def forget(self, member: Member) -> None:
        """Remove a member from all tables: a later session has its name, or it has been dead for long."""
        session = member.session
        self.roster.remove(member)
        self._end(member)
        self.broadcasts.drop(session)
        self.dead.forget(session)

    def reap(self, now: float) -> None:
        """Forget members that have been dead for long. Amortised O(1)."""
        while session := self.dead.ripe(now):
            member = self.roster.get(session)
            assert member is not None
            member.proved = False
        while session := self.dead.overdue(now):
            member = self.roster.get(session)
            assert member is not None
            self.forget(member)

    def proved(self, member: Member) -> None:
        """Note that the session of a member has proved to be live."""
        member.proved = True
        self.neighbours.met(member)
        self.greetings.done(member.session)
        self.contacts.remove(member.address)

    def _settle(self, member: Member, now: float) -> None:
        self.broadcasts.members = self.members
        self.probe_order.insert(member.session)
        self.paths.met(member)
        self.neighbours.join(member)
        if not member.proved and self.neighbours.wants(member.session):
            self.greetings.want(member.session, self.members, now)

    def _move(self, member: Member, record: Record, now: float) -> None:
        """Change the record of a member that lives; with a new address it has to prove itself again."""
        if member.address != (record.host, record.port):
            member.proved = False
            self.neighbours.lost(member.session)
            if self.neighbours.wants(member.session):
                self.greetings.want(member.session, self.members, now)
        self.roster.change(member, record, now)

    def _revive(self, member: Member, record: Record, now: float) -> None:
        self.suspicions.end(member.session)
        was_live = member.live
        self._move(member, record, now)
        if not was_live:
            self.dead.revive(member.session)
            self._settle(member, now)

    def _end(self, member: Member) -> None:
        self.suspicions.end(member.session)
        self.probe_order.remove(member.session)
        self.neighbours.part(member.session)
        self.greetings.done(member.session)
        self.broadcasts.members = self.members

    def _lay_out(self, member: Member, now: float) -> None:
        self.dead.add(member.session, now)
        if member.record.state is State.DEAD:
            self.contacts.add(member.address, now)
