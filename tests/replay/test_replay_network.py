"""What passes between the nodes of a replay: packets, gossip of real routers, updates after a delay."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from ranvier_py.core.mesh.mesh_values import Address, Plane, Send
from ranvier_py.core.routing.router import Router
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.replay_network import DELAY_S, TICK_MIN_S, PeerNetwork, address_of, make_network
from ranvier_py.replay.replay_nodes import KEY, make_router
from ranvier_py.replay.replay_plan import Plan, Prepared, prepare
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

    def touched(self, now: float) -> None:
        """Nobody looks."""

    def tick(self, now: float) -> None:
        self.happened.append(("tick", now))
        self.ticks = self.ticks[1:]

    def take(self) -> Sequence[Send]:
        out, self.out = self.out, []
        return out


def network_of(*peers: Fake, delay_s: float = DELAY_S) -> PeerNetwork:
    return PeerNetwork(peers, 0.0, delay_s)  # type: ignore[arg-type]


def run_until(network: PeerNetwork, now: float) -> None:
    while network.next_at() <= now:
        network.advance(network.next_at())


@pytest.mark.parametrize("delay_s", [DELAY_S, 2.0])
def test_packets_take_their_time_and_peers_are_woken_when_they_want(delay_s: float) -> None:
    peers = [Fake([1.0]), Fake()]
    net = network_of(*peers, delay_s=delay_s)
    run_until(net, 5.0)
    packets = [("hello", delay_s), ("echo", 2 * delay_s)]
    assert peers[0].happened == sorted([*packets, ("tick", 1.0)], key=lambda each: each[1])
    assert peers[1].happened == packets
    assert net.packets == 4
    assert net.bytes_sent == 18
    assert net.next_at() == inf


def test_a_peer_that_always_wants_more_does_not_stop_the_clock() -> None:
    peer = Fake([0.0] * 10)
    net = network_of(peer)
    run_until(net, 1.0)
    assert [now for _, now in peer.happened] == pytest.approx([TICK_MIN_S * (number + 1) for number in range(10)])


def test_a_packet_to_nobody_is_lost() -> None:
    peer = Fake()
    net = network_of(peer)
    peer.out.append(Send(address_of(300), Plane.BULK, b"x"))
    net.touched(0, 1.0)
    assert net.packets == 1
    assert net.next_at() == inf


# --- real routers ---------------------------------------------------------------------------------------------------

PLAN = Plan("affinity", 3, (EngineLimits(block_size=BLOCK),) * 2)
ITEMS = prepare(chats(count=6, turns=3))


def three(delay_s: float | None) -> tuple[list[Router], PeerNetwork]:
    """Routers, and the gossip between them."""
    routers = [make_router(PLAN, BLOCK, f"1/{index}") for index in range(3)]
    network = make_network(routers, key=KEY, seed=1, delay_s=delay_s, now=0.0)
    assert network is not None
    return routers, network


def serve(router: Router, item: Prepared, now: float) -> int:
    """A request gets its first token at this node. Returns its backend."""
    found = router.find(item.prompt, now)
    attempt = router.start_attempt(item.prompt, router.place(item.prompt, found), now, found=found)
    router.first_token(attempt, now)
    return attempt.target.id


@pytest.mark.parametrize("delay_s", [None, 0.02])
def test_what_one_node_served_the_others_know_a_tenth_of_a_second_later(delay_s: float | None) -> None:
    routers, net = three(delay_s)
    for number, item in enumerate(ITEMS):
        at = 10.0 + number
        run_until(net, at)
        backend = serve(routers[0], item, at)
        net.touched(0, at)
        run_until(net, at + 0.1)
        for other in routers[1:]:
            held = other.find(item.prompt, at + 0.1, touch=False).holders
            assert (backend, item.prompt.end.tokens) in [(holder.backend, holder.tokens) for holder in held]


@pytest.mark.parametrize("delay_s", [None, 0.02])
def test_nodes_know_of_requests_in_flight_at_the_others(delay_s: float | None) -> None:
    routers, net = three(delay_s)
    run_until(net, 10.0)
    backend = serve(routers[0], ITEMS[0], 10.0)
    net.touched(0, 10.0)
    run_until(net, 10.3)
    for router in routers:
        loads = [0, 0]
        loads[backend] = 1
        assert [each.load for each in router.registry] == loads


def test_a_peer_looks_at_its_router_only_after_something_happened_to_it() -> None:
    """A node looks every 50 ms while a request is in flight: 600 times in these ten seconds."""
    routers, net = three(None)
    run_until(net, 10.0)
    serve(routers[0], ITEMS[0], 10.0)  # it stays in flight
    net.touched(0, 10.0)
    looks = 0
    while net.next_at() <= 20.0:
        net.advance(net.next_at())
        looks += 1
    assert looks < 500


def test_nodes_that_report_each_other_nothing_have_no_network() -> None:
    routers = [make_router(PLAN, BLOCK, f"1/{index}") for index in range(2)]
    assert make_network(routers, key=KEY, seed=1, delay_s=inf, now=0.0) is None
    assert make_network(routers[:1], key=KEY, seed=1, delay_s=None, now=0.0) is None
