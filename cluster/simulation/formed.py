"""Forms a cluster before the clock starts: its nodes know about each other what they would know after an hour.

A thousand nodes that start with nothing would first have to learn of each other: minutes of a processor before any
fault. Here the same code makes every node, but what the nodes would have sent each other is put in place directly:

    members     all nodes know all; no update is left to spread; lists are compared next within the usual interval
    sessions    neighbours have proved theirs to each other; others do so when they are probed, by real packets
    backends    each is probed once; all neighbours have sent theirs to each other
    routes      there are none yet, and no node waits for a table

Rule: call it for all nodes that run, at one moment, before any of them has sent a packet; names are unique.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.simulation.sim_engine import SimEngine
from cluster.simulation.sim_node import SimNode
from ranvier_py.core.mesh.membership.member_lists import JOIN_LISTS
from ranvier_py.core.mesh.membership.members import Membership
from ranvier_py.core.mesh.wire.messages import Record
from ranvier_py.core.mesh.wire.records import pack_records, unpack_records
from ranvier_py.core.peer.router_peer import RouterPeer
from ranvier_py.core.routing.backend_state.facts import BackendFacts


def form(nodes: Sequence[SimNode], engines: Sequence[SimEngine], now: float) -> None:
    """Make a cluster of nodes that have just been created."""
    records = [record for node in nodes for record in unpack_records(pack_records([node.peer.me]))]
    for node in nodes:
        peer = node.peer
        know(peer.members, records, now)
        neighbours = peer.members.neighbours.unmet()
        prove(peer, neighbours, now)
        for engine in engines:
            node.probed(engine.number, engine.probe(), now)
        peer.flush(now)
        peer.live_members.update(now)
        agree(peer.features.facts, neighbours)
        peer.features.routes._pull.synced = True
        peer.outbox.clear()


def know(members: Membership, records: Sequence[Record], now: float) -> None:
    """Make all other nodes alive in a member table, with nothing left to send."""
    table, lists, mine = members.table, members.lists, members.me.session
    roster, neighbours = table.roster, table.neighbours
    for record in records:
        if record.session != mine:
            neighbours.join(roster.add(record, now))
    table.broadcasts.members = table.members
    table.broadcasts.drop(mine)
    lists._read = dict.fromkeys([member.session for member in members.alive()[:JOIN_LISTS]])
    lists._lived = roster.live
    lists.wake_at = now + table.rng.uniform(0, table.health.profile.exchange_s(len(records)))


def prove(peer: RouterPeer, neighbours: Sequence[int], now: float) -> None:
    """Let sessions have proved themselves, as after a handshake."""
    for session in neighbours:
        member = peer.members.member(session)
        assert member is not None
        peer.sessions._known.prove(member.record, 0, now).knows_us = True
        peer.members.table.proved(member)
        member.received_at = now


def agree(facts: BackendFacts, neighbours: Sequence[int]) -> None:
    """Let a node and its neighbours have sent each other all their backends."""
    for known in facts.backends.values():
        known.counted = True
    facts._changed.clear()
    facts._answered = dict.fromkeys(neighbours)
