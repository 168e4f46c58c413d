"""What is wrong among nodes, as one of them sees it: pure, from its peer alone.

Rule: a peer that shares nothing with this node is named by its address, one that shares less by its name. What only
time can show, such as a packet under another key, holds for HELD_S after the last sign of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from ranvier_py.core.addresses import spelled
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Address
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.mesh.wire.messages import State
from ranvier_py.core.peer.router_peer import RouterPeer

HELD_S = 90.0
"""A node that finds nobody greets the addresses of its configuration each half minute."""

LOST_S = 600.0
"""So long a death degrades the cluster: later another node has taken its place, or is not to."""

ALONE_S = 10.0  # after its start: a first look-up and an answer take less
AUDITS_DIFFERING = 3  # in a row: one is a node that joins, two may be a burst


@dataclass(slots=True)
class PeerSigns:
    """What a node has noticed of its cluster, and when last."""

    stranger: Address | None = None  # who sent a packet under another key
    stranger_at: float = -inf
    untimely_at: float = -inf  # when a peer's command had a time far from ours
    blocked_at: float = -inf  # when a datagram was given up for a stream


def peer_findings(peer: RouterPeer, signs: PeerSigns, now: float, *, expected: bool, age_s: float) -> Iterator[Finding]:
    """Yield the findings. `expected`: whether the configuration names peers; `age_s`: since the start."""
    yield from strangers(peer, signs, now)
    for member in peer.members.everybody():
        yield from of_member(peer, member, now)
    for session, how in peer.features.backend_sets.differing.items():
        name = peer.name_of(session)
        what, whom = f"peer {name} has another set of engines: {how}", "requests that it gets, and routes of these"
        remedy = "Give all nodes the same backends; ranvier backend add --cluster tells all at once."
        yield Finding(
            "peer_engines",
            Severity.DEGRADED,
            what,
            about=name,
            whom=whom,
            remedy=remedy,
            command="ranvier backend list",
        )
    for session in peer.features.backend_sets.unlike:
        name = peer.name_of(session)
        what, whom = f"peer {name} places requests by other settings than this node", "where the same request goes"
        remedy = "Compare what both print, and give all nodes the same; while a change is rolled out, wait for its end."
        yield Finding(
            "peer_config", Severity.NOTICE, what, about=name, whom=whom, remedy=remedy, command="ranvier config"
        )
    if peer.alone and expected and age_s > ALONE_S:
        what, whom = "this node finds no peer", "hits: it learns from its own requests alone"
        remedy = "See whether a peer runs at the addresses of join, under the same key, and whether UDP and TCP pass."
        yield Finding("no_peer", Severity.DEGRADED, what, whom=whom, remedy=remedy, command="ranvier config --check")
    audits = peer.features.routes.counters
    if audits.audits_differing >= AUDITS_DIFFERING:
        what = (
            f"route tables differ from peers' in {audits.differing_buckets} of 4096 parts, {audits.audits_differing} "
        )
        what += "comparisons in a row"
        remedy = (
            "They are repaired meanwhile. If it stays, see gossip_bytes_per_s_max and over_budget of gossip_routes."
        )
        yield Finding(
            "tables_differ", Severity.DEGRADED, what, whom="hits", remedy=remedy, command="ranvier status --against URL"
        )


def strangers(peer: RouterPeer, signs: PeerSigns, now: float) -> Iterator[Finding]:
    """Yield who speaks to this node and shares nothing with it, and what the network or the clocks do."""
    if signs.stranger is not None and now - signs.stranger_at < HELD_S:
        place = spelled(signs.stranger)
        what, whom = f"a node at {place} has another cluster key or cluster_name", "it shares nothing with this node"
        remedy = "Give it the current cluster_key_file; while keys are rotated, the old one stays as a second line."
        yield Finding(
            "peer_key", Severity.DEGRADED, what, about=place, whom=whom, remedy=remedy, command="ranvier config --check"
        )
    for host, protocol in peer.sessions.others.listed(now).items():
        what = f"a node at {host} speaks gossip protocol {protocol}, this one {PROTOCOL_VERSION}"
        remedy = "Upgrade the older one: only neighbouring protocols understand each other."
        whom = "it shares nothing with this node"
        yield Finding(
            "peer_protocol", Severity.DEGRADED, what, about=host, whom=whom, remedy=remedy, command="ranvier version"
        )
    if now - signs.untimely_at < HELD_S:
        what, whom = "peers sent orders signed long ago or in the future", "orders for all nodes, revocations of keys"
        yield Finding(
            "clocks",
            Severity.DEGRADED,
            what,
            whom=whom,
            remedy="Set the clocks of all nodes by NTP.",
            command="date -u",
        )
    if now - signs.blocked_at < HELD_S:
        what, whom = "peers answer over TCP and hardly any over UDP", "how soon a dead node is noticed"
        remedy = "Open the gossip port for UDP in both directions, or set gossip_udp = false."
        yield Finding("peer_datagrams", Severity.NOTICE, what, whom=whom, remedy=remedy)


def of_member(peer: RouterPeer, member: Member, now: float) -> Iterator[Finding]:
    record, me = member.record, peer.me
    if member.state is State.DEAD:
        what = f"peer {record.name} at {spelled(member.address)} is gone without saying so"
        remedy = "Start it again, or leave it: its routes stay, and it is forgotten after a day."
        severity = Severity.DEGRADED if now - member.since < LOST_S else Severity.NOTICE
        yield Finding("peer_lost", severity, what, about=record.name, whom="clients that only it serves", remedy=remedy)
    if not member.live:
        return
    if record.schema != me.schema:
        what = f"peer {record.name} makes other fingerprints: another tokenizer, template, block size or secret"
        remedy = "Give all nodes the same tokenizer, chat_template, block_size_tokens and cluster_secret."
        yield Finding(
            "peer_fingerprints",
            Severity.DEGRADED,
            what,
            about=record.name,
            whom="hits: no route is shared",
            remedy=remedy,
        )
    known, release = peer.sessions.known(member.session), peer.sessions.about[1]
    if known is not None and known.release and known.release != release:
        what = f"peer {record.name} runs release {known.release}, this node {release}"
        yield Finding(
            "peer_release",
            Severity.NOTICE,
            what,
            about=record.name,
            remedy="End the upgrade.",
            command="ranvier version",
        )
