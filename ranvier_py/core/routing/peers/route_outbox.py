"""The outbox of route messages: which peers a node sends to, and whether the budgets have room for a message.

While there are few nodes, a node sends to all live peers directly. In a larger cluster it sends to its successors on
`fan_out` rings; each ring has all live sessions in another pseudo-random order. All nodes that see the same members see
the same rings. Each ring alone reaches every node, so an update that everyone passes on once reaches all, over about
log2(N) hops; and because the path between two nodes stays the same, updates of an origin arrive in order.

Rules: a message for which there is no room is not sent, and counted; nobody waits. Rows have a budget of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.membership.neighbour_set import RINGS_MAX, positions_of
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.routing.peers.route_messages import wire_bytes
from ranvier_py.core.routing.peers.route_settings import RouteGossipCounters, RouteGossipSettings
from ranvier_py.core.splitmix import MASK


class RouteOutbox:
    """The live peers, and the budgets of what is sent to them."""

    def __init__(self, session: int, settings: RouteGossipSettings, outbox: list[Outgoing]) -> None:
        self.counters = RouteGossipCounters()  # shared by all parts of route gossip
        self.peers: dict[int, Peer] = {}  # by session
        self.order: Sequence[Peer] = ()  # the same peers, to choose from
        self.targets: Sequence[Peer] = ()  # the peers that we push to
        self.relays = False  # whether we pass on what we receive
        self.bulk = Window(settings.bulk_bytes_per_s)
        self._rings = Rings(session, settings.fan_out)
        self.settings = settings
        self.outbox = outbox
        self._node = Window(settings.node_bytes_per_s)
        self._windows: dict[int, Window] = {}

    def meet(self, live: Sequence[Peer], members: int = 0) -> None:
        """Set the live peers, and how many other live members there are: in a large cluster only some are peers."""
        settings = self.settings
        self.order = tuple(live)
        self.peers = {peer.session: peer for peer in live}
        self.relays = max(len(live), members) >= settings.mesh_nodes_max
        self.targets = self._rings.successors(self.order) if self.relays else self.order
        kept = self._windows
        self._windows = {
            peer.session: kept.get(peer.session) or Window(settings.peer_bytes_per_s) for peer in self.order
        }

    def node_room(self, now: float) -> int:
        """Return how many bytes may be sent to all peers together now, rows not counted."""
        return self._node.room(now)

    def room(self, peer: Peer, now: float) -> int:
        """Return how many bytes may be sent to a live peer now, rows not counted."""
        return min(self.node_room(now), self._windows[peer.session].room(now))

    def send(self, peer: Peer, message: Message, now: float) -> bool:
        """Send a message within the budgets. Returns False if there is no room or no such peer."""
        window = self._windows.get(peer.session)
        if window is None:
            return False
        size = wire_bytes(message)
        if size > self._node.room(now) or size > window.room(now):
            self.counters.over_budget += 1
            return False
        self._node.spend(size, now)
        window.spend(size, now)
        self.counters.sent_bytes += size
        self.outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
        return True

    def send_bulk(self, peer: Peer, message: Message, now: float) -> bool:
        """Send sums within the budget for rows. Returns False if there is no room or no such peer."""
        size = wire_bytes(message)
        if peer.session not in self.peers or size > self.bulk.room(now):
            self.counters.over_budget += 1
            return False
        self.bulk.spend(size, now)
        self.counters.sent_sums_bytes += size
        self.outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
        return True


class Rings:
    """The rings: the live peers in several pseudo-random orders."""

    def __init__(self, session: int, rings: int) -> None:
        self._rings = min(rings, RINGS_MAX)
        self._mine = positions_of(session)

    def successors(self, live: Sequence[Peer]) -> Sequence[Peer]:
        """Return the peer that follows us on each ring, or the next one after it that no earlier ring has chosen."""
        chosen: dict[int, Peer] = {}
        for ring in range(self._rings):
            start = self._mine[ring]
            others = [peer for peer in live if peer.session not in chosen]
            if others:
                following = min(others, key=lambda peer: (positions_of(peer.session)[ring] - start) & MASK)
                chosen[following.session] = following
        return tuple(chosen.values())
