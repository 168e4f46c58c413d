"""Routers as peers of one cluster: settings, keys and sessions, everything about them drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.hit_rate_router import RouterPlacement
from benchmarks.nodes_net import PeerNet, address_of
from ranvier_py.core.gossip.gossip import GossipSettings
from ranvier_py.core.gossip.packets.keyring import KEY_BYTES, KeyRing
from ranvier_py.core.gossip.packets.seal import Subkeys
from ranvier_py.core.gossip.routes.route_settings import RouteGossipSettings
from ranvier_py.core.peer import PeerSettings, RouterPeer


def make_peers(nodes: Sequence[RouterPlacement], seed: int | str, now: float) -> list[RouterPeer]:
    """One peer for each node; they do not know each other yet."""
    rng = Random(f"{seed}/peers")
    ring = KeyRing({1: rng.randbytes(KEY_BYTES)}, 1)
    subkeys = Subkeys()
    peers = []
    for index, node in enumerate(nodes):
        host, port = address_of(index)
        routes = RouteGossipSettings(schema=node.scheme.schema)
        gossip = GossipSettings(f"node-{index}", host, port, session=rng.getrandbits(64) or 1, routes=routes)
        settings = PeerSettings(gossip, fingerprint_key=node.scheme.key)
        peers.append(RouterPeer(node.router, settings, ring, Random(f"{seed}/{index}"), now, subkeys=subkeys))
    return peers


def make_net(nodes: Sequence[RouterPlacement], seed: int | str, now: float) -> PeerNet:
    """The nodes as peers that have been told of each other."""
    return PeerNet(make_peers(nodes, seed, now), now)
