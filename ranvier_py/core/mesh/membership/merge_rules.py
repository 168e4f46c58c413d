"""Merge rules: what to believe of records that others send. The rules of SWIM, and those that it lacks.

Of two records about one session the one with the greater (epoch, incarnation, state) holds; of two sessions with one
name that of the later epoch. `merge` returns what to send the sender, strictly greater than what it sent, so two nodes
that correct each other come to an end. Each peer has an allowance of changes, or one with the cluster's key could
rewrite all lists; what exceeds it is ignored. Invariant: (epoch, incarnation) held for a session never falls, and DEAD
becomes ALIVE only with a higher one (test_members_properties.py). Bounds: SUPERSEDED_MAX, PEERS_MAX allowances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.membership.broadcasts import MembershipOutbox, best_plane
from ranvier_py.core.mesh.membership.member_table import MemberTable
from ranvier_py.core.mesh.membership.own_record import EPOCH_MAX
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.wire.messages import Record, State, Update

SUPERSEDED_MAX = 64  # sessions that live and may not know yet that a later one has their name; the oldest goes first
SPREAD_LISTED_MAX = 64
"""In clusters up to this size a joining node spreads what it reads in lists, as two parts may just be meeting. In
larger ones it would send everybody everything that they sent it."""

BURST = 512  # changes at once, in the smallest cluster. Two large clusters that meet need more lists than one.
BURST_PER_MEMBER = 4  # more for each member: a list after a cut changes each, and updates before it some once more
FILL_S = 8.0  # in which an empty bucket fills up: 64 changes a second in a small cluster
SELF_COST = 16  # so 4 refutations a second and 32 at once; honest ones are as seldom as probes of this member fail
PEERS_MAX = 4096  # buckets, as many as the largest membership; the one used longest ago goes first
REPORTED = "reported by a member"


@dataclass(slots=True)
class Bucket:
    """The allowance that one peer has left. `warned`: the operator was warned of this peer."""

    left: float
    at: float
    warned: bool = False


class Allowance(BoundedDict[int, Bucket]):
    """How much each peer may still change, by session: more in large clusters, since lists bring many changes at once
    when cuts heal. What repeats what is known is free, and so are lists read while joining."""

    def __init__(self) -> None:
        super().__init__(PEERS_MAX)

    def spend(self, peer: int, cost: int, members: int, now: float) -> bool:
        """Whether this peer may make a change of this cost in a cluster of so many; if so, it is paid."""
        most = BURST + BURST_PER_MEMBER * members
        bucket = self[peer] = self.get(peer) or Bucket(most, now)
        bucket.left = min(most, bucket.left + max(0.0, now - bucket.at) * most / FILL_S)
        bucket.at = now
        bucket.warned = bucket.warned and bucket.left < most
        if bucket.left < cost:
            return False
        bucket.left -= cost
        return True

    def warn(self, peer: int) -> bool:
        """Whether to warn the operator of this peer now: once until its bucket is full again."""
        bucket = self[peer]
        warned, bucket.warned = bucket.warned, True
        return not warned


class MergeRules:
    """Judges records. `joining`: this node is still reading its first lists."""

    def __init__(self, table: MemberTable, outbox: MembershipOutbox) -> None:
        self.joining = True
        self._table = table
        self._outbox = outbox
        self._identity = table.identity
        self._health = table.health
        self._counters = table.counters
        self._superseded: BoundedDict[int, str] = BoundedDict(SUPERSEDED_MAX)  # session -> the name it lost
        self._allowance = Allowance()

    def merge(self, update: Update, sender: int, now: float, listed: bool = False) -> Update | None:
        """Merge one record. `listed`: it is from a whole list, not an update: a death there is a suspicion, as it may
        be as old as a cut (memberlist's mergeState). Returns what to send the sender: of a stale record the suspicion
        or death held here, so that through it the accused learns of it (memberlist#311)."""
        record = update.record
        member = self._table.roster.get(record.session)
        if member is not None and member.record is record and record.state is State.ALIVE:
            if not listed:
                self._table.broadcasts.echoed(record.session)
            return None  # the usual case in a large cluster; equal rows are one object (`records`)
        mine = self._identity.record
        if record.epoch > EPOCH_MAX:
            self._counters.absurd += 1
            return None
        if record.name == mine.name and record.session != mine.session:
            return self._about_my_name(record, sender, now)
        if record.epoch == EPOCH_MAX and record.state is not State.ALIVE and sender != record.session:
            # the member's own goodbye, or nonsense: nobody could refute it
            self._counters.absurd += 1
            return None
        if record.session == mine.session:
            return self._about_me(record, sender, now)
        if member is not None and (record.name == member.record.name or self._may_take_name(member, record)):
            return self._about_member(member, update, sender, now, listed)
        if member is not None:
            return self._lost_name(member, record, sender, now)
        return self._about_stranger(update, sender, now, listed)

    def merge_all(self, updates: Iterable[Update], sender: int, now: float, listed: bool = False) -> list[Update]:
        """Merge several records. Returns what to send the sender."""
        corrections = [self.merge(update, sender, now, listed) for update in updates]
        return [correction for correction in corrections if correction is not None]

    def superseded(self, session: int) -> Update | None:
        """Return what to send a live session that has lost its name: the record that has the name now."""
        name = self._superseded.get(session)
        if name is None or self._table.roster.get(session) is not None:
            return None
        return self._holder(name)

    def accuse(self, member: Member, now: float) -> None:
        """Send a member the accusation that is held here, so that it refutes: at most once in a probe interval."""
        if now - member.accused_at < self._health.profile.probe_interval_s:
            return
        member.accused_at = now
        self._counters.accusations += 1
        accusation = [self._table.held(member)]
        best = best_plane(member)
        self._outbox.push(member.address, member.session, accusation, best)
        if member.misses and best is Plane.DATAGRAM:  # the datagram may not arrive
            self._outbox.push(member.address, member.session, accusation, Plane.PROBE)

    def _about_me(self, record: Record, sender: int, now: float) -> Update | None:
        mine, leaving = self._identity.record, self._identity.leaving
        if order(record) == order(mine):
            return None
        if rank(record) < rank(mine) or (leaving and rank(record) == rank(mine)):
            return Update(mine) if leaving or record.state is not State.ALIVE else None
        if not self._may_change(sender, SELF_COST, now):
            return None
        accused = record.state is not State.ALIVE
        self._identity.outbid(record)
        self._counters.refutations += accused
        if accused:
            self._health.worse()
        return self._announce(now)

    def _about_my_name(self, record: Record, sender: int, now: float) -> Update | None:
        if self._identity.outranks(record):
            return Update(self._identity.record) if record.state <= State.SUSPECT else None
        if not self._may_change(sender, SELF_COST, now):
            return None
        self._counters.overtaken += 1
        if self._identity.overtake(record):
            self._counters.renamed += 1
            self._table.note("renamed", self._identity.record, f"another node lives under the name {record.name}")
        return self._announce(now)

    def _announce(self, now: float) -> Update:
        update = Update(self._identity.record)
        self._table.broadcasts.push(update, now)
        return update

    def _holder(self, name: str) -> Update | None:
        if name == self._identity.record.name:
            return Update(self._identity.record)
        holder = self._table.roster.named(name)
        return None if holder is None else self._table.held(holder)

    def _may_take_name(self, member: Member, record: Record) -> bool:
        """Whether a known session may take the new name in `record`: unless a later session has it."""
        if rank(record) <= rank(member.record):
            return True  # stale: the name does not matter
        holder = self._table.roster.named(record.name)
        return holder is None or by_epoch(record) >= by_epoch(holder.record)

    def _lost_name(self, member: Member, record: Record, sender: int, now: float) -> Update | None:
        """Forget a known session that claims a name that a later session has. Returns the latter's record."""
        if not self._may_change(sender, SELF_COST if sender == record.session else 1, now):
            return None
        self._table.forget(member)
        self._superseded[record.session] = record.name
        return self._holder(record.name)

    def _about_stranger(self, update: Update, sender: int, now: float, listed: bool) -> Update | None:
        record, table = update.record, self._table
        holder = table.roster.named(record.name)
        why = "proved itself" if sender == record.session else REPORTED
        if holder is not None:
            if by_epoch(record) < by_epoch(holder.record):
                if sender == record.session:
                    self._superseded[record.session] = record.name
                return table.held(holder) if record.state <= State.SUSPECT else None
            why = "a new session of this name"
        if not (listed and self.joining) and not self._may_change(sender, 1, now):
            return None
        if holder is not None:
            self._counters.supplanted += 1
            table.forget(holder)
        self._superseded.pop(record.session, None)
        spread = not (listed and self.joining and table.members > SPREAD_LISTED_MAX)
        if record.state > State.SUSPECT:  # kept and relayed, though unknown (memberlist#345)
            table.remember_dead(record, now)
            if not listed:
                table.broadcasts.push(Update(record), now)
            return None
        member = table.join(record, now, why)
        if member is not None and record.state is State.SUSPECT:
            table.suspect(member, record, update.accuser or sender, now, REPORTED)
        elif member is not None and spread:
            table.broadcasts.push(Update(member.record), now)
        return None

    def _about_member(self, member: Member, update: Update, sender: int, now: float, listed: bool) -> Update | None:
        record, held = update.record, member.record
        accuser = update.accuser or sender
        if listed and record.state is State.DEAD:  # a list may be as old as a cut (memberlist's mergeState)
            record = record._replace(state=State.SUSPECT)
        if order(record) <= order(held):
            if record.state is held.state is State.SUSPECT and rank(record) == rank(held) and not listed:
                self._table.confirm(member, accuser, now)
            # the sender gets what is held here, and the accused learns of it through the sender (memberlist#311)
            stale_life = record.state is State.ALIVE and held.state is not State.ALIVE
            stale_death = record.state is not State.ALIVE and rank(record) < rank(held)
            return self._table.held(member) if stale_life or stale_death else None
        cost = SELF_COST if sender == record.session else 1
        if not (listed and self.joining) and not self._may_change(sender, cost, now):
            return None
        if rank(record) == rank(held):
            record = held._replace(state=record.state)  # the member raises its rank when it changes anything else
        elif record.name != held.name and (holder := self._table.roster.named(record.name)) is not None:
            self._table.forget(holder)
        self._apply(member, record, accuser, sender, now)
        return None

    def _apply(self, member: Member, record: Record, accuser: int, sender: int, now: float) -> None:
        """Apply a greater record about a known member."""
        table = self._table
        received_lately = now - member.received_at < self._health.profile.evidence_s
        if record.state is State.ALIVE:
            table.absolve(member, record, now, "its own report")
        elif record.state is State.SUSPECT:
            table.suspect(member, record, accuser, now, REPORTED)
            if received_lately:
                self.accuse(member, now)
        elif record.state is State.DEAD and received_lately:
            self._veto(member, record, sender, now)
        else:
            table.bury(member, record, now, REPORTED)

    def _veto(self, member: Member, record: Record, sender: int, now: float) -> None:
        """Turn a reported death into a suspicion, since a packet of the member came just now, and let it refute."""
        self._counters.vetoes += 1
        suspected = record._replace(state=State.SUSPECT)
        if order(suspected) > order(member.record):
            self._table.suspect(member, suspected, sender, now, "reported dead, but received from")
        elif member.live:
            self._table.confirm(member, sender, now)
        self.accuse(member, now)

    def _may_change(self, sender: int, cost: int, now: float) -> bool:
        """Whether this peer's allowance covers the change; if not, it is counted and noted for the operator."""
        if self._allowance.spend(sender, cost, self._table.members, now):
            return True
        self._counters.changes_refused += 1
        member = self._table.roster.get(sender)
        if member is not None and self._allowance.warn(sender):
            why = "changes more members than it may; what is too much is ignored"
            self._table.note("flooding", member.record, why)
        return False


def rank(record: Record) -> tuple[int, int]:
    """Return the part of a record that only the member itself raises."""
    return record.epoch, record.incarnation


def order(record: Record) -> tuple[int, int, int]:
    """Return the sort key of records about one session: the greater holds."""
    return record.epoch, record.incarnation, record.state


def by_epoch(record: Record) -> tuple[int, int]:
    """Return the sort key of sessions with one name: the greater is the later, at all nodes alike."""
    return record.epoch, record.session
