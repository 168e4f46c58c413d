"""What membership counts: each drop, veto and bound has a counter."""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.metrics import counter, gauge


@dataclass(slots=True)
class MembershipCounters:
    """Counters since the start; `Membership.statistics` sets the gauges when it is called."""

    probes: int = counter("Members probed.")
    probes_helped: int = counter("Probes answered only through a relay or the stream.")
    probes_failed: int = counter("Probes without an answer.")
    probes_spared: int = counter("Failed probes of a member that was received from meanwhile.")
    probes_void: int = counter("Probes under way when this node woke up late.")
    probes_repeated: int = counter("Failed probes for which one of the two paths was not tried yet.")
    stream_rescues: int = counter("Probes answered on the stream alone.")
    stream_first: int = counter("Probes sent on the stream at once, since datagrams do not pass.")
    datagrams_missed: int = counter("Datagrams of probes that only the stream got through.")
    datagrams_given_up: int = counter("Times that datagrams reached hardly anybody.")
    sends_failed: int = counter("Sends that the edge could not make.")
    relayed: int = counter("Pings in the name of others.")
    relays_dropped: int = counter("Pings not relayed, too many being under way.")
    nacks: int = counter("Answers «not yet» sent by this node as a relay.")
    suspicions: int = counter("Suspicions begun here, by our own probe or a peer's report.")
    confirmations: int = counter("Further accusers of a suspect.")
    refutations: int = counter("Accusations of this node that it refuted.")
    false_alarms: int = counter("Members that refuted a suspicion or a death held here.")
    deaths: int = counter("Members declared dead here.")
    vetoes: int = counter("Deaths not believed, since the member itself was received from.")
    accusations: int = counter("Accusations sent to the accused.")
    corrections: int = counter("Corrections sent to senders of stale records.")
    corrections_dropped: int = counter("Corrections beyond the bound of one message.")
    late_ticks: int = counter("Ticks that came late.")
    late_wakes: int = counter("Ticks later than a probe interval: probes void, suspicions put off.")
    overtaken: int = counter("Other sessions with this node's name and a higher epoch.")
    renamed: int = counter("Times that this node gave up its name.")
    supplanted: int = counter("Sessions replaced by a later one of the same name.")
    absurd: int = counter("Records with an epoch nobody can have.")
    members_refused: int = counter("Members not taken, the table being full.")
    contacts_dropped: int = counter("Addresses of the dead dropped at the bound.")
    updates_oversized: int = counter("Updates larger than a datagram, never sent by gossip.")
    updates_dropped: int = counter("Updates dropped, the queue being full.")
    exchanges: int = counter("Exchanges of whole lists begun.")
    exchanges_refused: int = counter("Lists not sent, asked for too often.")
    greetings: int = counter("Greetings wanted.")
    changes_refused: int = counter("Changes by a peer beyond its allowance.")
    changes_dropped: int = counter("Changes dropped, nobody having drained them.")
    alive: int = gauge("Other members that live, suspects included.")
    suspects: int = gauge("Members suspected now.")
    dead: int = gauge("Members remembered that are dead or left.")
    contacts: int = gauge("Addresses of the dead that are greeted now and then.")
    queued: int = gauge("Updates waiting to be sent.")
    relays: int = gauge("Pings under way for others.")
    health: int = gauge("Local health, 0 when well.")
    helped_share: float = gauge("Share of answered probes that needed help.")
    strained: bool = gauge("1 while the network loses so much that the profile is doubled.")
