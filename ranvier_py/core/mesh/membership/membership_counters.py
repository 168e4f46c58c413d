"""What membership counts: each drop, veto and bound has a counter."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter, gauge


@dataclass(slots=True)
class MembershipCounters:
    """Counters since the start; `Membership.statistics` sets the gauges when it is called."""

    probes: int = counter("Probes of members of the cluster by this node.")
    probes_helped: int = counter("Probes answered only through a relay or the stream.")
    probes_failed: int = counter("Probes of members that got no answer.")
    probes_spared: int = counter("Failed probes of a member from which a message came meanwhile.")
    probes_void: int = counter("Probes void because this node woke up late while they were under way.")
    probes_repeated: int = counter("Failed probes for which one of the two paths was not tried yet.")
    stream_rescues: int = counter("Probes answered on the stream alone.")
    stream_first: int = counter("Probes sent on the stream at once, since datagrams do not pass.")
    datagrams_missed: int = counter("Datagrams of probes that only the stream got through.")
    datagrams_given_up: int = counter("Times that datagrams reached hardly anybody.")
    sends_failed: int = counter("Messages to members that the socket did not take.")
    relayed: int = counter("Pings sent on behalf of other members.")
    relays_dropped: int = counter("Pings not relayed for other members because too many were under way.")
    nacks: int = counter("Answers «not yet» sent by this node as a relay.")
    suspicions: int = counter("Suspicions begun here, by our own probe or a peer's report.")
    confirmations: int = counter("Times that another member confirmed a suspicion of a member.")
    refutations: int = counter("Accusations of this node that it refuted.")
    false_alarms: int = counter("Members that refuted a suspicion or a death held here.")
    deaths: int = counter("Members that this node declared dead itself.")
    vetoes: int = counter("Reports of a member's death not believed, since messages of that member came.")
    accusations: int = counter("Suspicions that were sent to the suspected member itself.")
    corrections: int = counter("Corrections sent to senders of stale records.")
    corrections_dropped: int = counter("Corrections of stale records that did not fit one message.")
    late_ticks: int = counter("Ticks of the membership timer that came late.")
    late_wakes: int = counter("Membership ticks later than a probe interval: probes are void, suspicions put off.")
    overtaken: int = counter("Other sessions with this node's name and a higher epoch.")
    renamed: int = counter("Times that this node gave up its name.")
    supplanted: int = counter("Members' sessions replaced by a later one of the same name.")
    absurd: int = counter("Records of members with an epoch that nobody can have.")
    members_refused: int = counter("Members refused because the table of members is full.")
    contacts_dropped: int = counter("Addresses of dead members dropped because too many are remembered.")
    updates_oversized: int = counter("Membership updates larger than a datagram, which are never sent by gossip.")
    updates_dropped: int = counter("Membership updates dropped because their queue was full.")
    exchanges: int = counter("Exchanges of whole lists of members begun.")
    exchanges_refused: int = counter("Lists of members not sent because they were asked for too often.")
    greetings: int = counter("Greetings that membership asked to be sent to addresses.")
    changes_refused: int = counter("Membership changes of a peer refused because it made too many.")
    changes_dropped: int = counter("Membership changes dropped because the log did not take them in time.")
    alive: int = gauge("Other members that live, suspects included.")
    suspects: int = gauge("Members of the cluster suspected now.")
    dead: int = gauge("Members remembered that are dead or left.")
    contacts: int = gauge("Addresses of dead members that are greeted now and then.")
    queued: int = gauge("Membership updates that wait to be sent.")
    relays: int = gauge("Pings under way on behalf of other members.")
    health: int = gauge("This node's own slowness as its probes show it, 0 when well.")
    helped_share: float = gauge("Share of answered probes of members that needed a relay or the stream.")
    strained: bool = gauge("1 while the network loses so much that the profile is doubled.")
