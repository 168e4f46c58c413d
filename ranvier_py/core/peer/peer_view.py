"""A node among its peers, as the control port shows it."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ranvier_py.core.addresses import spelled
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.metrics import values
from ranvier_py.core.peer.router_peer import RouterPeer

QUANTILES = {"p50": 0.5, "p99": 0.99}


def peer_view(peer: RouterPeer, now: float) -> dict[str, Any]:
    """Return this node and what it knows of its peers, ready for JSON."""
    me, counters = peer.me, peer.counters
    return {
        "name": me.name,
        "session": f"{me.session:016x}",
        "epoch": me.epoch,
        "incarnation": me.incarnation,
        "state": me.state.name.lower(),
        "address": spelled((me.host, me.port)),
        "release": peer.sessions.about[1],
        "protocol": PROTOCOL_VERSION,
        "synced": peer.synced,
        "members": [member_view(each, me.schema, now) | spoken(peer, each) for each in peer.members.everybody()],
        "topics": {
            topic: {
                "sent": {"packets": counters.packets_sent[topic], "bytes": counters.bytes_sent[topic]},
                "received": {"packets": counters.packets_received[topic], "bytes": counters.bytes_received[topic]},
            }
            for topic in counters.packets_sent
        },
        **{name: shown for machine in peer.machines.called for name, shown in machine.view().items()},
        "membership": values(peer.members.statistics()),
        "lag_ms": {
            name: rounded(peer.features.routes.lag.quantile(share) * 1000, 1) for name, share in QUANTILES.items()
        },
        "other_protocols": peer.sessions.others.listed(now),
        "sessions": values(peer.sessions.statistics()),
        "refused": dict(counters.refused),
        "opened_by_key": dict(counters.opened),
    }


def member_view(member: Member, schema: int, now: float) -> dict[str, Any]:
    """Return one line of the table of members. Ages in seconds, round trips in milliseconds; None for never.

    `routes`: whether the member makes fingerprints by our `schema`; otherwise it shares no routes with us.
    """
    record = member.record
    return {
        "name": record.name,
        "state": member.state.name.lower(),
        "address": spelled(member.address),
        "public": record.public,
        "incarnation": record.incarnation,
        "epoch": record.epoch,
        "session": f"{member.session:016x}",
        "since_s": round(now - member.since, 1),
        "silent_s": rounded(now - member.received_at, 1),
        "rtt_ms": rounded(member.rtt_s * 1000, 2),
        "proved": member.proved,
        "datagrams": member.datagrams,
        "routes": record.schema == schema,
    }


def spoken(peer: RouterPeer, member: Member) -> dict[str, Any]:
    """Return the release of a member's software, and the version of the protocol in which it is written to."""
    known = peer.sessions.known(member.session)
    return {"release": known.release if known else None, "protocol": known.version if known else None}


def rounded(value: float, digits: int) -> float | None:
    return round(value, digits) if isfinite(value) else None
