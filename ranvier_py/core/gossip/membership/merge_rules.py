"""What to believe of records that others send: the rules of SWIM, and those it lacks.

Of two records about one session the greater (epoch, incarnation, state) holds. Beyond that:

    stale life       an ALIVE older than the suspicion or death held here is answered with that accusation, so that its
                     sender, and through it the accused, hears of it (memberlist#311); an accusation older than what is
                     held here is answered with that, too
    unknown dead     a suspicion or death of somebody unknown is kept and relayed (memberlist#345)
    monotone         a greater record is kept even when it changes nothing (al8n/memberlist#197)
    own evidence     a death of a member heard within `evidence_s` is only a suspicion, and told to it
    lists            a death read in a whole list is a suspicion: it may be as old as a cut (memberlist's mergeState)
    one name         of two sessions with one name the later epoch holds, at once; the other is told so
    me               accusations are outbid; a namesake is overtaken, or gets the name
    too much         what one peer changes beyond its `allowance` is ignored

`hear` returns what the sender should be told, if anything. It is strictly greater than what was sent, so two nodes
that correct each other come to an end. Invariant: the pair (epoch, incarnation) held for a session never falls, and
DEAD becomes ALIVE only with a higher one. Cost: O(1) for each record.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier_py.core.gossip.gossip_values import Plane
from ranvier_py.core.gossip.membership.allowance import SELF_COST, Allowance
from ranvier_py.core.gossip.membership.identity import EPOCH_MAX, Identity
from ranvier_py.core.gossip.membership.local_health import LocalHealth
from ranvier_py.core.gossip.membership.member_table import Ledger
from ranvier_py.core.gossip.membership.membership_counters import Counts
from ranvier_py.core.gossip.membership.membership_outbox import Post
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.wire.messages import Record, State, Update

SUPERSEDED_MAX = 64
"""Sessions that live but have lost their name to a later one and may not know it yet. The oldest is forgotten first."""

SPREAD_LISTED_MAX = 64
"""In clusters up to this size a joining node spreads what it reads in lists, as two parts may just be meeting. In
larger ones it would send everybody everything that they told it."""


class MergeRules:
    """Judges records. `joining`: this node is still reading its first lists."""

    def __init__(self, identity: Identity, ledger: Ledger, post: Post, health: LocalHealth, counts: Counts) -> None:
        self.joining = True
        self._identity = identity
        self._ledger = ledger
        self._post = post
        self._health = health
        self._counts = counts
        self._superseded: dict[int, str] = {}  # session -> the name it lost
        self._allowance = Allowance()

    def hear(self, update: Update, sender: int, now: float, listed: bool = False) -> Update | None:
        """Take in one record. `listed`: from a whole list rather than as news. Returns what to tell the sender."""
        record = update.record
        known = self._ledger.roster.get(record.session)
        if known is not None and known.record is record and record.state is State.ALIVE:
            if not listed:
                self._ledger.broadcasts.echoed(record.session)
            return None  # most of what goes about in a large cluster; one row is one object (`packets.records`)
        if record.epoch > EPOCH_MAX:
            self._counts.absurd += 1
            return None
        if record.session == self._identity.record.session:
            return self._about_me(record, sender, now)
        if record.name == self._identity.record.name:
            return self._about_my_name(record, sender, now)
        member = self._ledger.roster.get(record.session)
        if member is not None and (record.name == member.record.name or self._may_take_name(member, record)):
            return self._about_member(member, update, sender, now, listed)
        if member is not None:
            return self._lost_name(member, record)
        return self._about_stranger(update, sender, now, listed)

    def hear_list(self, records: Sequence[Record], sender: int, now: float) -> list[Update]:
        """Take in a whole list. Returns what to tell the sender. 0.1 us for each record that is held as it is."""
        known, told = self._ledger.roster.get, []
        for record in records:
            member = known(record.session)
            if member is not None and member.record is record and record.state is State.ALIVE:
                continue
            correction = self.hear(Update(record), sender, now, listed=True)
            if correction is not None:
                told.append(correction)
        return told

    def superseded(self, session: int) -> Update | None:
        """What to tell a live session that has lost its name: who has it now."""
        name = self._superseded.get(session)
        if name is None or self._ledger.roster.get(session) is not None:
            return None
        return self._holder(name)

    def accuse(self, member: Member, now: float) -> None:
        """Tell a member what is held against it, so that it refutes: at most once in a probe interval."""
        if now - member.accused_at < self._health.profile.probe_interval_s:
            return
        member.accused_at = now
        self._counts.accusations += 1
        said = [self.held(member)]
        best = self._post.best_plane(member)
        self._post.tell(member.address, member.session, said, best)
        if member.misses and best is Plane.DATAGRAM:  # it may not pass
            self._post.tell(member.address, member.session, said, Plane.PROBE)

    def held(self, member: Member) -> Update:
        """What this node says of a member."""
        suspicion = self._ledger.suspicions.get(member.session)
        return Update(member.record, 0 if suspicion is None else suspicion.accuser)

    # --- this node ----------------------------------------------------------------------------------------------------

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
        self._counts.refutations += accused
        if accused:
            self._health.worse()
        return self._announce(now)

    def _about_my_name(self, record: Record, sender: int, now: float) -> Update | None:
        if self._identity.outranks(record):
            return Update(self._identity.record) if record.state <= State.SUSPECT else None
        if not self._may_change(sender, SELF_COST, now):
            return None
        self._counts.overtaken += 1
        if self._identity.overtake(record):
            self._counts.renamed += 1
            self._ledger.note("renamed", self._identity.record, f"another node lives under the name {record.name}")
        return self._announce(now)

    def _announce(self, now: float) -> Update:
        update = Update(self._identity.record)
        self._ledger.broadcasts.push(update, now)
        return update

    # --- names --------------------------------------------------------------------------------------------------------

    def _holder(self, name: str) -> Update | None:
        if name == self._identity.record.name:
            return Update(self._identity.record)
        holder = self._ledger.roster.named(name)
        return None if holder is None else self.held(holder)

    def _may_take_name(self, member: Member, record: Record) -> bool:
        """Whether a known session may go by the new name in `record`, which an earlier session may have."""
        if rank(record) <= rank(member.record):
            return True  # stale: the name does not matter
        holder = self._ledger.roster.named(record.name)
        return holder is None or by_epoch(record) >= by_epoch(holder.record)

    def _lost_name(self, member: Member, record: Record) -> Update | None:
        """A known session calls itself by a name that a later session has."""
        self._ledger.forget(member)
        self._supersede(record)
        return self._holder(record.name)

    def _supersede(self, record: Record) -> None:
        self._superseded.pop(record.session, None)
        self._superseded[record.session] = record.name
        if len(self._superseded) > SUPERSEDED_MAX:
            del self._superseded[next(iter(self._superseded))]

    # --- others -------------------------------------------------------------------------------------------------------

    def _about_stranger(self, update: Update, sender: int, now: float, listed: bool) -> Update | None:
        record = update.record
        holder = self._ledger.roster.named(record.name)
        why = "proved itself" if sender == record.session else "told by a member"
        if holder is not None:
            if by_epoch(record) < by_epoch(holder.record):
                if sender == record.session:
                    self._supersede(record)
                return self.held(holder) if record.state <= State.SUSPECT else None
            why = "a new session of this name"
        if not (listed and self.joining) and not self._may_change(sender, 1, now):
            return None
        if holder is not None:
            self._counts.supplanted += 1
            self._ledger.forget(holder)
        self._superseded.pop(record.session, None)
        spread = not (listed and self.joining and self._ledger.members > SPREAD_LISTED_MAX)
        if record.state > State.SUSPECT:
            self._ledger.remember_dead(record, now)
            if not listed:
                self._ledger.broadcasts.push(Update(record), now)
            return None
        member = self._ledger.join(record, now, why)
        if member is not None and record.state is State.SUSPECT:
            self._ledger.suspect(member, record, update.accuser or sender, now, "told by a member")
        elif member is not None and spread:
            self._ledger.broadcasts.push(Update(member.record), now)
        return None

    def _about_member(self, member: Member, update: Update, sender: int, now: float, listed: bool) -> Update | None:
        record, held = update.record, member.record
        accuser = update.accuser or sender
        if listed and record.state is State.DEAD:
            record = record._replace(state=State.SUSPECT)
        if order(record) <= order(held):
            if record.state is held.state is State.SUSPECT and rank(record) == rank(held) and not listed:
                self._ledger.confirm(member, accuser, now)
            stale_life = record.state is State.ALIVE and held.state is not State.ALIVE
            stale_death = record.state is not State.ALIVE and rank(record) < rank(held)
            return self.held(member) if stale_life or stale_death else None
        cost = SELF_COST if sender == record.session else 1
        if not (listed and self.joining) and not self._may_change(sender, cost, now):
            return None
        if rank(record) == rank(held):
            record = held._replace(state=record.state)  # all else only the member itself changes, and then raises it
        elif record.name != held.name and (holder := self._ledger.roster.named(record.name)) is not None:
            self._ledger.forget(holder)
        if record.state is State.ALIVE:
            self._ledger.absolve(member, record, now, "its own word")
        elif record.state is State.SUSPECT:
            self._ledger.suspect(member, record, accuser, now, "told by a member")
            if self._heard_lately(member, now):
                self.accuse(member, now)
        elif record.state is State.DEAD and self._heard_lately(member, now):
            self._veto(member, record, sender, now)
        else:
            self._ledger.bury(member, record, now, "told by a member")
        return None

    def _veto(self, member: Member, record: Record, sender: int, now: float) -> None:
        """Others say that it is dead, but it was heard just now: a suspicion, and it may speak for itself."""
        self._counts.vetoes += 1
        suspected = record._replace(state=State.SUSPECT)
        if order(suspected) > order(member.record):
            self._ledger.suspect(member, suspected, sender, now, "said to be dead, but heard")
        elif member.live:
            self._ledger.confirm(member, sender, now)
        self.accuse(member, now)

    def _may_change(self, sender: int, cost: int, now: float) -> bool:
        """Whether this peer has not changed too much already."""
        if self._allowance.spend(sender, cost, self._ledger.members, now):
            return True
        self._counts.changes_refused += 1
        member = self._ledger.roster.get(sender)
        if member is not None and self._allowance.warn(sender):
            self._ledger.note(
                "flooding", member.record, "changes more members than it may; what is too much is ignored"
            )
        return False

    def _heard_lately(self, member: Member, now: float) -> bool:
        return now - member.heard_at < self._health.profile.evidence_s


def rank(record: Record) -> tuple[int, int]:
    """What only the member itself raises."""
    return record.epoch, record.incarnation


def order(record: Record) -> tuple[int, int, int]:
    """Of two records about one session the greater holds."""
    return record.epoch, record.incarnation, record.state


def by_epoch(record: Record) -> tuple[int, int]:
    """Of two sessions with one name the greater is the later; the session number breaks ties everywhere alike."""
    return record.epoch, record.session
