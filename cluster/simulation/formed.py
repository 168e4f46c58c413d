"""A cluster that is there already when the clock starts: its nodes have of each other what they would after an hour.

Each two of a thousand nodes that start with nothing must hear of each other first: minutes of a core before anything
can go wrong. Here every node is made by the same code, but what they would have sent each other is put there by hand:

    members     all know all; no update is left to spread, and lists are next compared some time in their usual pace
    sessions    neighbours have proved theirs to each other; all others still do when they are probed, by real packets
    backends    probed once, told, and heard from all neighbours
    routes      there are none yet, and nobody waits for a table

Rule: all nodes that run, at one moment, before any of them has sent a packet; names are unique.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.simulation.sim_engine import SimEngine
from cluster.simulation.sim_node import SimNode
from ranvier_py.core.gossip.backend_state.facts import BackendFacts
from ranvier_py.core.gossip.gossip import RouterPeer
from ranvier_py.core.gossip.membership.member_lists import JOIN_LISTS
from ranvier_py.core.gossip.membership.members import Membership
from ranvier_py.core.gossip.wire.messages import Record
from ranvier_py.core.gossip.wire.records import pack_records, unpack_records


def form(nodes: Sequence[SimNode], engines: Sequence[SimEngine], now: float) -> None:
    """Nodes that have just been made become a cluster."""
    records = unpack_records(pack_records([node.peer.me for node in nodes]))
    for node in nodes:
        peer = node.peer
        know(peer.members, records, now)
        neighbours = peer.members.neighbours.unmet()
        prove(peer, neighbours, now)
        for engine in engines:
            node.probed(engine.number, engine.probe(), now)
        peer.flush(now)
        peer.live_members.update(now)
        agree(peer.facts, neighbours)
        peer.routes._pull.synced = True
        peer._sends.clear()


def know(members: Membership, records: Sequence[Record], now: float) -> None:
    """All others are alive, and nobody needs to be sent that."""
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
    """They have shaken hands."""
    for session in neighbours:
        member = peer.members.member(session)
        assert member is not None
        peer.sessions._prove(member.record, 0, now).knows_us = True
        peer.members.table.proved(member)
        member.received_at = now


def agree(facts: BackendFacts, neighbours: Sequence[int]) -> None:
    """Each has sent its neighbours every backend, and they have sent it theirs."""
    for known in facts._known.values():
        known.counted = True
    facts._changed.clear()
    facts._answered = dict.fromkeys(neighbours)
