"""The real node in the simulator: gossip with the real router, and what the checkers read of both.

It decides nothing. The cluster's keys are numbers in scenarios, each of which stands for the same 32 bytes in every
run. The nodes of a run share their subkeys, since they would all derive the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from cluster.scenario import Cluster
from cluster.simulation.node_streams import NodeStreams
from cluster.simulation.sim_router import KEY, TABLE_ROWS, Birth, SimRouter
from ranvier_py.core.mesh.contact.sessions import SESSIONS_MAX
from ranvier_py.core.mesh.membership.contacts import CONTACTS_MAX
from ranvier_py.core.mesh.membership.member_table import DEAD_MAX, MEMBERS_MAX
from ranvier_py.core.mesh.membership.profile import LAN, WAN
from ranvier_py.core.mesh.membership.relays import RELAYS_MAX
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.core.mesh.wire.seal import Subkeys
from ranvier_py.core.metrics import values
from ranvier_py.core.peer.router_peer import GossipSettings, RouterPeer
from ranvier_py.core.routing.backend_state.loads import BACKENDS_MAX
from ranvier_py.core.routing.peers.route_messages import TABLES
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import HELD_MAX
from ranvier_py.core.routing.peers.update_log import ORIGINS_MAX
from ranvier_py.core.routing.route_table.orphans import ORPHANS_MAX
from ranvier_py.core.routing.route_table.outgoing import QUEUE_MAX
from ranvier_py.core.routing.route_table.table import WITHDRAWING_MAX

SUBKEYS_MAX = 16_384
"""Enough for a thousand nodes, some restarts and two keys, so that nothing is derived twice."""

SCHEMA = 7


class Bounded(NamedTuple):
    """A buffer's size, and the most that it may ever hold."""

    size: int
    bound: int


@dataclass(frozen=True, slots=True)
class Look:
    """What the checkers compare, at one instant."""

    me: Record
    members: Mapping[int, Record]  # by session, without the node itself
    vector: Mapping[int, int]  # origin's session -> the node has all its updates up to this number
    tables: Mapping[str, Bounded] = field(default_factory=dict)


def ring_of(keys: Sequence[int]) -> KeyRing:
    """Return a key ring of keys by number, the first as the primary."""
    return KeyRing({number: Random(f"key {number}").randbytes(32) for number in keys}, keys[0])


def route_settings(cluster: Cluster) -> RouteGossipSettings:
    """Return the node's defaults, with what the scenario sets."""
    standard = RouteGossipSettings()
    budget = cluster.budget_bytes_per_s
    return RouteGossipSettings(
        schema=SCHEMA,
        ttl_s=cluster.route_ttl_s or standard.ttl_s,
        node_bytes_per_s=budget or standard.node_bytes_per_s,
        peer_bytes_per_s=min(budget or standard.peer_bytes_per_s, standard.peer_bytes_per_s),
        log_entries_max=cluster.log_entries or standard.log_entries_max,
    )


class SimNode(SimRouter):
    """One process, which a crash ends; only what `peer.state()` returned and the host has written survives."""

    def __init__(self, birth: Birth, subkeys: Subkeys) -> None:
        rng = birth.rng()
        self.session = rng.getrandbits(64) | 1
        super().__init__(birth, rng)
        host, port = birth.address
        settings = GossipSettings(
            name=birth.name,
            host=host,
            port=port,
            session=self.session,
            fingerprint_key=KEY,
            label=birth.label,
            wall_ms=birth.wall_ms,
            state=birth.state,
            profile=WAN if birth.cluster.profile == "wan" else LAN,
            routes=route_settings(birth.cluster),
        )
        self.settings = settings
        self.peer = RouterPeer(self.router, settings, ring_of(birth.keys), rng, birth.now, subkeys=subkeys)
        self.streams = NodeStreams(self.router, self.ids, self.peer.features.streams) if birth.cluster.events else None

    def rekey(self, keys: Sequence[int], now: float) -> None:  # noqa: ARG002  # as all calls
        self.peer.sealer.rekey(ring_of(keys))

    # --- looking ----------------------------------------------------------------------------------------------------

    def alone(self) -> bool:
        return self.peer.alone

    def look(self, now: float) -> Look:  # noqa: ARG002  # as all calls
        members = {member.session: member.record for member in self.peer.members.everybody()}
        return Look(self.peer.me, members, self.peer.features.routes.vector(), self.tables())

    def living(self, now: float) -> Mapping[int, State]:  # noqa: ARG002  # as all calls
        return {member.session: member.state for member in self.peer.members.alive()}

    def tables(self) -> Mapping[str, Bounded]:
        """Return the size and the bound of all buffers."""
        members, sessions = self.peer.members.statistics(), self.peer.sessions.statistics()
        return {
            "members": Bounded(members.alive, MEMBERS_MAX),
            "dead members": Bounded(members.dead, DEAD_MAX),
            "contacts": Bounded(members.contacts, CONTACTS_MAX),
            "updates to spread": Bounded(members.queued, 2 * (members.alive + members.dead) + 8),
            "relays": Bounded(members.relays, RELAYS_MAX),
            "sessions": Bounded(sessions.sessions, SESSIONS_MAX),
            "backends with facts": Bounded(len(self.peer.features.facts.backends), BACKENDS_MAX),
            "observers of loads": Bounded(len(self.peer.features.facts.loads), members.alive + members.dead + 1),
            **self.route_tables(members.alive),
        }

    def route_tables(self, peers: int) -> Mapping[str, Bounded]:
        gossip, shared, table = self.peer.features.routes.counters, self.peer.features.route_sync, self.router.routes
        return {
            "route updates kept": Bounded(gossip.logged, self.settings.routes.log_entries_max),
            "origins": Bounded(gossip.origins, ORIGINS_MAX),
            "lazy peers": Bounded(gossip.lazy_peers, peers),
            "transfers": Bounded(self.peer.features.routes.transfer.running(), TABLES.given_max),
            "new routes": Bounded(len(table.outgoing.new), QUEUE_MAX),
            "routes that wait": Bounded(shared.waiting, 2 * HELD_MAX),
            "orphans": Bounded(shared.orphans, ORPHANS_MAX),
            "withdrawals": Bounded(len(table.withdrawing), WITHDRAWING_MAX),
            "rows": Bounded(len(table), TABLE_ROWS),
        }

    def counters(self) -> Mapping[str, int]:
        counters = self.peer.counters
        found: dict[str, int] = {
            **values(self.peer.members.statistics()),
            **values(self.peer.sessions.statistics()),
        }
        found |= {f"refused_{name}": count for name, count in counters.refused.items()}
        found |= {f"sent_{topic}_bytes": count for topic, count in counters.bytes_sent.items()}
        return found

    def route_bytes(self) -> int:
        return self.peer.counters.bytes_sent["routes"]

    def updates_sent(self) -> int:
        """Return how many route updates of its own it has sent since its start."""
        return self.peer.features.routes.vector().get(self.session, 0)

    def sums(self, now: float) -> Sequence[int]:
        """Return the bucket sums, as the node would send them to a peer."""
        scan = self.peer.features.route_sync.copy.sums(now)
        return memoryview(next(filter(None, iter(lambda: scan.step(now), b"")))).cast("Q")


Maker = Callable[[Birth], SimNode]


def sim_nodes() -> Maker:
    """Return what makes the nodes of one run."""
    return partial(SimNode, subkeys=Subkeys(entries_max=SUBKEYS_MAX))
