"""What membership counts, and what it shows of itself. Counters only grow; each drop, veto and bound has one."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.gossip.gossip_values import Address
from ranvier_py.core.gossip.membership.roster import Member
from ranvier_py.core.gossip.wire.messages import State


@dataclass(slots=True)
class Counts:
    """Since the start. One field for each kind of event."""

    probes: int = 0
    probes_helped: int = 0  # answered, but only through a relay or the stream
    probes_failed: int = 0
    probes_spared: int = 0  # failed, but the member itself was heard meanwhile
    probes_void: int = 0  # under way when this node woke up late
    probes_repeated: int = 0  # failed, but only one of the two ways had been tried
    stream_rescues: int = 0  # answered on the stream alone: datagrams do not pass
    stream_first: int = 0  # sent on the stream at once, since datagrams do not pass
    datagrams_missed: int = 0  # of probes that the stream got through
    datagrams_given_up: int = 0  # how often they reached hardly anybody
    sends_failed: int = 0  # the edge could not send
    relayed: int = 0  # pings in the name of others
    relays_dropped: int = 0  # too many at once
    nacks: int = 0  # sent
    suspicions: int = 0  # begun here, by our own probe or by reports of others
    confirmations: int = 0
    refutations: int = 0  # of what was said about this node
    false_alarms: int = 0  # members that refuted a suspicion or a death held here
    deaths: int = 0
    vetoes: int = 0  # deaths not believed, because the member itself was heard
    accusations: int = 0  # told to the accused
    corrections: int = 0  # told to senders of stale records
    corrections_dropped: int = 0
    late_ticks: int = 0
    late_wakes: int = 0  # later than a probe interval: outstanding probes void, suspicions put off
    overtaken: int = 0  # another session had this node's name and a higher epoch
    renamed: int = 0
    supplanted: int = 0  # sessions of others replaced by a later one of the same name
    absurd: int = 0  # records with an epoch nobody can have
    members_refused: int = 0  # table full
    contacts_dropped: int = 0
    updates_oversized: int = 0  # larger than a datagram: never sent by gossip
    updates_dropped: int = 0  # queue full
    exchanges: int = 0
    exchanges_refused: int = 0  # asked for the list too often
    greetings: int = 0
    changes_refused: int = 0  # of members, by a peer that changed too much already
    changes_dropped: int = 0  # nobody drained `changes`


@dataclass(frozen=True, slots=True)
class MembersStatistics:
    """One moment. `counts` is a copy."""

    counts: Counts
    alive: int  # others, suspects included
    suspects: int
    dead: int  # remembered: DEAD and LEFT
    contacts: int
    queued: int  # updates waiting to be sent
    relays: int  # pings under way for others
    health: int  # 0 well … health_max
    helped_share: float  # of answered probes
    strained: bool  # the profile is doubled


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member as this node sees it, for status. Ages in seconds; infinite when never."""

    name: str
    session: int
    address: Address
    public: str
    state: State
    epoch: int
    incarnation: int
    state_age_s: float
    heard_age_s: float
    rtt_s: float  # mean of direct pings; NaN when none was measured
    proved: bool
    datagrams: bool  # False: only the stream reaches it
    schema: int  # of its routes

    @classmethod
    def of(cls, member: Member, now: float) -> MemberView:
        record = member.record
        return cls(
            name=record.name,
            session=record.session,
            address=member.address,
            public=record.public,
            state=record.state,
            epoch=record.epoch,
            incarnation=record.incarnation,
            state_age_s=now - member.since,
            heard_age_s=now - member.heard_at,
            rtt_s=member.rtt_s,
            proved=member.proved,
            datagrams=member.datagrams,
            schema=record.schema,
        )
