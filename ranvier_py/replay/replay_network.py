"""The network between the nodes of a replay: the real gossip within this process.

`PeerNetwork` delivers what peers send after a delay. Nothing is lost, and all clocks agree.

Rule: a network alone never keeps a run going. The run ends without waiting for `next_at`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil, inf
from random import Random
from typing import NamedTuple

from ranvier_py.core.mesh.mesh_values import Address, Plane
from ranvier_py.core.mesh.wire.keyring import KEY_BYTES, KeyRing
from ranvier_py.core.mesh.wire.seal import Subkeys
from ranvier_py.core.peer.router_peer import FLUSH_INTERVAL_S, IDLE_INTERVAL_S, GossipSettings, RouterPeer
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.core.routing.router import Router

DELAY_S = 0.0005
"""Transit time of a packet between two machines of one site. A plan may have another."""

TICK_MIN_S = 0.001
"""Least time until a peer is woken again, as a node's timers are no finer: the virtual clock must not stand still."""

PORT = 7946

SCHEMA = 1
"""Names how the fingerprints are made; the same on all nodes of a replay."""


def make_network(
    routers: Sequence[Router], *, key: bytes, seed: int | str, delay_s: float | None, now: float
) -> PeerNetwork | None:
    """Return None for a single node or if nodes send each other nothing (`delay_s` inf; None: DELAY_S). `key`: of the
    fingerprints."""
    if len(routers) == 1 or delay_s == inf:
        return None
    return PeerNetwork(make_peers(routers, key=key, seed=seed, now=now), now, DELAY_S if delay_s is None else delay_s)


def address_of(index: int) -> Address:
    return f"10.0.{index // 250}.{index % 250 + 1}", PORT


class Packet(NamedTuple):
    """A packet in transit, due at `at`. `number` keeps the order of equal times."""

    at: float
    number: int
    to: int
    source: Address
    plane: Plane
    data: bytes


class ReplayPeer(RouterPeer):
    """A peer that flushes only after its router changed, but at a multiple of the interval at which a node flushes.

    A real node flushes every FLUSH_INTERVAL_S while a request is in flight and mostly finds nothing. Here the router
    can have changed only if `touched` was called, so the flushes in between are skipped.
    """

    def flush(self, now: float) -> None:
        super().flush(now)
        if self.synced:  # until then new routes wait, so it flushes at the usual interval
            self.flushes.next = now + IDLE_INTERVAL_S

    def touched(self, now: float) -> None:
        """Note that the router may have changed: flush at the next multiple of the interval."""
        self.flushes.hurry()
        late_s = now - self.flushes.next
        if late_s > 0.0:
            self.flushes.next += ceil(late_s / FLUSH_INTERVAL_S) * FLUSH_INTERVAL_S


class PeerNetwork:
    """Delivers what peers send and wakes them. After each call of a peer it asks when that peer wants to be woken."""

    def __init__(self, peers: Sequence[ReplayPeer], now: float, delay_s: float = DELAY_S) -> None:
        self.packets = 0
        self.bytes_sent = 0
        self._peers, self._delay_s = peers, delay_s
        self._index_of = {address_of(index): index for index in range(len(peers))}
        self._in_transit: list[Packet] = []
        self._wakes: list[float] = [inf] * len(peers)
        self._next_at = inf
        for index, peer in enumerate(peers):
            peer.contact([address_of(other) for other in range(len(peers)) if other != index], now)
            self._send(index, now)

    def next_at(self) -> float:
        return self._next_at

    def advance(self, now: float) -> None:
        while self._in_transit and self._in_transit[0].at <= now:
            packet = heapq.heappop(self._in_transit)
            self._peers[packet.to].receive(packet.data, packet.source, packet.plane, now)
            self._send(packet.to, now)
        for index, wake_at in enumerate(self._wakes):
            if wake_at <= now:
                self._peers[index].tick(now)
                self._send(index, now)

    def touched(self, index: int, now: float) -> None:
        """Note that this node's router may have changed."""
        self._peers[index].touched(now)
        self._send(index, now)

    def _send(self, index: int, now: float) -> None:
        """Put what a peer has to send in transit, and note when the peer wants to be woken."""
        peer = self._peers[index]
        for to, plane, data in peer.take():
            self.packets += 1
            self.bytes_sent += len(data)
            if to in self._index_of:
                packet = Packet(
                    at=now + self._delay_s,
                    number=self.packets,
                    to=self._index_of[to],
                    source=address_of(index),
                    plane=plane,
                    data=data,
                )
                heapq.heappush(self._in_transit, packet)
        self._wakes[index] = max(peer.wake_at, now + TICK_MIN_S)
        self._next_at = min(*self._wakes, self._in_transit[0].at if self._in_transit else inf)


def make_peers(routers: Sequence[Router], *, key: bytes, seed: int | str, now: float) -> list[ReplayPeer]:
    """Make a peer for each router, all its random parts drawn from the seed. The peers do not know each other yet."""
    rng = Random(f"{seed}/peers")  # noqa: S311  # virtual nodes have no secrets
    ring = KeyRing({1: rng.randbytes(KEY_BYTES)}, 1)
    subkeys = Subkeys()
    peers = []
    for index, router in enumerate(routers):
        host, port = address_of(index)
        routes = RouteGossipSettings(schema=SCHEMA)
        settings = GossipSettings(
            f"node-{index}", host, port, rng.getrandbits(64) or 1, fingerprint_key=key, routes=routes
        )
        own = Random(f"{seed}/{index}")  # noqa: S311  # as above
        peers.append(ReplayPeer(router, settings, ring, own, now, subkeys=subkeys))
    return peers
