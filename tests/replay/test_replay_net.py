"""What passes between the nodes of a replay: packets, gossip of real routers, news after a delay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import pytest

from ranvier_py.core.gossip.gossip_values import Address, Plane, Send
from ranvier_py.core.gossip.peer import RouterPeer
from ranvier_py.core.routing.placement.policies import PlacementOptions
from ranvier_py.core.routing.router import Router
from ranvier_py.replay.replay_network import (
    DELAY_S,
    TICK_MIN_S,
    DelayedNet,
    Net,
    PeerNet,
    StillNet,
    StillPeer,
    address_of,
    make_peers,
)
from ranvier_py.replay.replay_nodes import KEY, SCHEMA, NodeSettings, Prepared, make_router, prepare
from tests.replay.synthetic import BLOCK, chats

# --- network --------------------------------------------------------------------------------------------------------


class Fake:
    """A peer that ticks at set times and says hello to whom it is told of."""

    def __init__(self, ticks: Sequence[float] = ()) -> None:
        self.ticks = list(ticks)
        self.happened: list[tuple[str, float]] = []
        self.out: list[Send] = []

    @property
    def wake_at(self) -> float:
        return self.ticks[0] if self.ticks else inf

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> None:
        self.happened.append((data.decode(), now))
        if data == b"hello":
            self.out.append(Send(source, plane, b"echo"))

    def contact(self, addresses: Sequence[Address], now: float) -> None:
        self.out += [Send(address, Plane.DATAGRAM, b"hello") for address in addresses]

    def tick(self, now: float) -> None:
        self.happened.append(("tick", now))
        self.ticks = self.ticks[1:]

    def take(self) -> Sequence[Send]:
        out, self.out = self.out, []
        return out


def run_net(net: PeerNet, until: float) -> None:
    while net.next_at() <= until:
        net.advance(net.next_at())


def test_packets_take_their_time_and_peers_are_woken_when_they_want() -> None:
    peers = [Fake([1.0]), Fake()]
    net = PeerNet(peers, 0.0)
    run_net(net, 5.0)
    assert peers[0].happened == [("hello", DELAY_S), ("echo", 2 * DELAY_S), ("tick", 1.0)]
    assert peers[1].happened == [("hello", DELAY_S), ("echo", 2 * DELAY_S)]
    assert net.packets == 4
    assert net.bytes_by_plane[Plane.DATAGRAM] == 18
    assert net.next_at() == inf


def test_a_peer_that_always_wants_more_does_not_stop_the_clock() -> None:
    peer = Fake([0.0] * 10)
    net = PeerNet([peer], 0.0)
    run_net(net, 1.0)
    assert [now for _, now in peer.happened] == pytest.approx([TICK_MIN_S * (number + 1) for number in range(10)])


def test_a_packet_to_nobody_is_lost() -> None:
    peer = Fake()
    net = PeerNet([peer], 0.0)
    peer.out.append(Send(address_of(300), Plane.BULK, b"x"))
    net.touched(0, 1.0)
    assert net.packets == 1
    assert net.next_at() == inf


# --- real routers ---------------------------------------------------------------------------------------------------

SETTINGS = NodeSettings("affinity", 3, 2, BLOCK, 1, PlacementOptions())
ITEMS = prepare(chats(count=6, turns=3))


def still(routers: Sequence[Router]) -> Net:
    return StillNet(make_peers(StillPeer, routers, key=KEY, schema=SCHEMA, seed=1, now=0.0), 0.0)


def restless(routers: Sequence[Router]) -> Net:
    return PeerNet(make_peers(RouterPeer, routers, key=KEY, schema=SCHEMA, seed=1, now=0.0), 0.0)


def delayed(routers: Sequence[Router]) -> Net:
    return DelayedNet(routers, 0.05)


def serve(router: Router, item: Prepared, now: float) -> int:
    """A request gets its first token at this node. Returns its backend."""
    found = router.find(item.prompt, now)
    attempt = router.start_attempt(item.prompt, router.place(item.prompt, found), now, found=found)
    router.first_token(attempt, now)
    return attempt.backend


def run_until(net: Net, now: float) -> None:
    while net.next_at() <= now:
        net.advance(net.next_at())


@pytest.mark.parametrize("kind", [still, restless, delayed])
def test_what_one_node_served_the_others_know_a_tenth_of_a_second_later(
    kind: Callable[[Sequence[Router]], Net],
) -> None:
    routers = [make_router(SETTINGS, f"1/{index}") for index in range(3)]
    net = kind(routers)
    for number, item in enumerate(ITEMS):
        at = 10.0 + number
        run_until(net, at)
        backend = serve(routers[0], item, at)
        net.touched(0, at)
        run_until(net, at + 0.1)
        for other in routers[1:]:
            held = other.find(item.prompt, at + 0.1, touch=False).holders
            assert (backend, item.prompt.end.tokens) in [(holder.backend, holder.tokens) for holder in held]


@pytest.mark.parametrize("kind", [still, restless, delayed])
def test_nodes_hear_of_requests_in_flight_at_the_others(kind: Callable[[Sequence[Router]], Net]) -> None:
    routers = [make_router(SETTINGS, f"1/{index}") for index in range(3)]
    net = kind(routers)
    run_until(net, 10.0)
    backend = serve(routers[0], ITEMS[0], 10.0)
    net.touched(0, 10.0)
    run_until(net, 10.3)
    for router in routers:
        loads = [0, 0]
        loads[backend] = 1
        assert [each.load for each in router.registry] == loads


def test_a_peer_that_is_told_of_events_looks_at_its_router_far_less_often() -> None:
    looks = []
    for kind in (still, restless):
        routers = [make_router(SETTINGS, f"1/{index}") for index in range(3)]
        net = kind(routers)
        assert isinstance(net, PeerNet)
        run_until(net, 10.0)
        serve(routers[0], ITEMS[0], 10.0)  # it stays in flight: a node that is not told looks every 50 ms
        net.touched(0, 10.0)
        count = 0
        while net.next_at() <= 20.0:
            net.advance(net.next_at())
            count += 1
        looks.append(count)
    assert looks[0] < 0.8 * looks[1]


def test_delayed_news_take_their_time() -> None:
    routers = [make_router(SETTINGS, f"1/{index}") for index in range(2)]
    net = DelayedNet(routers, 2.0)
    serve(routers[0], ITEMS[0], 10.0)
    net.touched(0, 10.0)
    assert net.next_at() == 12.0
    run_until(net, 11.9)
    assert not routers[1].find(ITEMS[0].prompt, 11.9).holders
    run_until(net, 12.0)
    assert routers[1].find(ITEMS[0].prompt, 12.0).holders
    assert net.next_at() == inf
    assert not routers[1].routes.outgoing.new, "what was heard is not told on"
