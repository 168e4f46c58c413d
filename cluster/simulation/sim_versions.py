"""A node of the version before: what version 2 of the protocol brought is taken away from a node of this one.

It says so in its record, compares tables by all their sums, makes no update batches, and does with what it does not
know as version 1 did: a message of a later kind is skipped and counted, a update batch counts as a bad route update.
"""

from __future__ import annotations

from ranvier_py.core.gossip.gossip import Gossip
from ranvier_py.core.gossip.gossip_values import Peer
from ranvier_py.core.gossip.peer.router_peer import RouterPeer
from ranvier_py.core.gossip.replication.update_batches import is_batch
from ranvier_py.core.gossip.wire.messages import Message, PartSums, TotalSum, Update

FIRST_VERSION = 1


def speak(gossip: Gossip, version: int) -> None:
    """Say in the node's own record that this is the latest version it knows. Before it has met anybody."""
    members = gossip.members
    members._identity.record = members.me._replace(version_max=version)
    members._broadcasts.push(Update(members.me), 0.0)
    gossip.sessions.me = members.me
    gossip._company.version = version


def make_first_version(peer: RouterPeer) -> None:
    """Make a node that has just been made one of version 1."""
    gossip, shared = peer.gossip, peer.routes
    speak(gossip, FIRST_VERSION)
    routes = gossip.routes
    receive, hear = routes.receive, shared.hear

    def skip(sender: Peer, message: Message, now: float) -> None:
        if isinstance(message, TotalSum | PartSums):
            gossip.sessions._drop("kind")
        else:
            receive(sender, message, now)

    def refuse(route_update: bytes, age_s: float, now: float) -> bool:
        if is_batch(route_update):
            shared.counters.bad += 1
            return False
        return hear(route_update, age_s, now)

    routes.receive = skip  # type: ignore[assignment]
    routes._pull._comparison._version_of = lambda _: FIRST_VERSION
    shared.hear = refuse  # type: ignore[method-assign]
