"""Several nodes in virtual time: each a real router, made peers by the real gossip, over a network in this process.

A request comes to one node by the draw of `node_of`, as a DNS name with many addresses would send it. Between peers
bytes go from hand to hand after `DELAY_S`, nothing is lost, and nobody's clock differs. `PeerNet` is the Background of
a `Replay`: the earliest of packets under way and of peers that want to be woken. A peer's wake-up may move only when
something happens to it, so it is asked then and not at every token of every engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from benchmarks.hit_rate_router import RouterPlacement
from benchmarks.hit_rate_traces import Prepared
from ranvier_py.core.gossip.values import Address, Plane, Send
from ranvier_py.core.router import Flight

DELAY_S = 0.0005
"""One way between two machines of a site."""

TICK_MIN_S = 0.001
"""A timer of the node is good for a millisecond; it keeps a peer that always wants more from standing still here."""

PORT = 7946


class VirtualPeer(Protocol):
    """A node among peers, as its edge drives it."""

    @property
    def wake_at(self) -> float: ...

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None: ...

    def contact(self, addresses: Sequence[Address], now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def take(self) -> Sequence[Send]: ...


def address_of(index: int) -> Address:
    return f"10.0.{index // 250}.{index % 250 + 1}", PORT


class Packet(NamedTuple):
    """Under way. `number` keeps the order of equal times."""

    at: float
    number: int
    to: int
    source: Address
    plane: Plane
    data: bytes


class PeerNet:
    """A Background (see `hit_rate_replay`) that carries what peers send."""

    def __init__(self, peers: Sequence[VirtualPeer], now: float) -> None:
        self.packets = 0
        self.bytes_by_plane = dict.fromkeys(Plane, 0)
        self._peers = peers
        self._index_of = {address_of(index): index for index in range(len(peers))}
        self._under_way: list[Packet] = []
        self._wakes: list[float] = [inf] * len(peers)
        self._next_at = inf
        for index, peer in enumerate(peers):
            peer.contact([address_of(other) for other in range(len(peers)) if other != index], now)
            self.touched(index, now)

    def next_at(self) -> float:
        return self._next_at

    def advance(self, now: float) -> None:
        """Everything that is due."""
        while self._under_way and self._under_way[0].at <= now:
            packet = heapq.heappop(self._under_way)
            self._peers[packet.to].receive(packet.data, packet.source, packet.plane, now)
            self.touched(packet.to, now)
        for index, wake_at in enumerate(self._wakes):
            if wake_at <= now:
                self._peers[index].tick(now)
                self.touched(index, now)

    def touched(self, index: int, now: float) -> None:
        """Something happened to a peer: send what it has to send, and note when it wants to be woken."""
        peer = self._peers[index]
        for to, plane, data in peer.take():
            self.packets += 1
            self.bytes_by_plane[plane] += len(data)
            if to in self._index_of:
                packet = Packet(now + DELAY_S, self.packets, self._index_of[to], address_of(index), plane, data)
                heapq.heappush(self._under_way, packet)
        self._wakes[index] = max(peer.wake_at, now + TICK_MIN_S)
        self._next_at = min(*self._wakes, self._under_way[0].at if self._under_way else inf)


class NodesPlacement:
    """A Placement (see `hit_rate_replay`) by several nodes.

    `kept_out` names engines that are out of the question for a request: how a benchmark makes an engine busy.
    """

    def __init__(
        self,
        nodes: Sequence[RouterPlacement],
        node_of: Callable[[Prepared], int],
        net: PeerNet | None = None,
        kept_out: Callable[[Prepared], Collection[int]] = lambda _: (),
    ) -> None:
        self.nodes = nodes
        self._node_of = node_of
        self._net = net
        self._kept_out = kept_out

    def route(self, item: Prepared, now: float) -> tuple[int, Any]:
        index = self._node_of(item)
        engine, flight = self.nodes[index].route(item, now, self._kept_out(item))
        self._touched(index, now)
        return engine, (index, flight)

    def first_token(self, flight: tuple[int, Flight], now: float) -> None:
        index, own = flight
        self.nodes[index].first_token(own, now)
        self._touched(index, now)

    def finished(self, flight: tuple[int, Flight], item: Prepared, cached_tokens: int, now: float) -> None:
        index, own = flight
        self.nodes[index].finished(own, item, cached_tokens, now)
        self._touched(index, now)

    def _touched(self, index: int, now: float) -> None:
        if self._net is not None:
            self._net.touched(index, now)
