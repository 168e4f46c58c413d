"""The simulated network: what it loses, delays, doubles and breaks, and that a seed says all of it."""

from random import Random

import pytest

from cluster.simulation.sim_net import GIVE_UP_S, NEUTRAL, STREAM_BUFFER_BYTES, Link, Rule, SimNet, flipped
from cluster.simulation.trace import Heap, Trace
from ranvier_py.core.gossip.gossip_values import Address, Plane

ADDRESSES = [(f"10.0.0.{number}", 7946) for number in range(4)]


class Box:
    """A host that writes down what reaches it."""

    def __init__(self) -> None:
        self.generation = 1
        self.running = True
        self.room = True
        self.got: list[tuple[bytes, Address, Plane]] = []
        self.told: list[tuple[Address, Plane]] = []

    def arrive(self, data: bytes, source: Address, plane: Plane) -> bool:
        if self.room:
            self.got.append((data, source, plane))
        return self.room

    def broken(self, address: Address, plane: Plane) -> None:
        self.told.append((address, plane))


def make_net(seed: int = 1) -> tuple[Heap, SimNet, list[Box]]:
    heap, boxes = Heap(), [Box() for _ in ADDRESSES]
    return heap, SimNet(heap, Random(seed), Trace(), boxes, ADDRESSES), boxes


def rule(net: SimNet, link: Link, nodes: tuple[int, ...] = (0,), others: tuple[int, ...] = (1,), **more: bool) -> Rule:
    made = Rule(
        net.mask(nodes),
        net.mask(others),
        more.get("one_way", False),
        more.get("udp", True),
        more.get("tcp", True),
        link,
    )
    net.add(made)
    return made


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


def test_a_good_network_delivers_each_datagram_once_with_its_source() -> None:
    heap, net, boxes = make_net()
    for data in numbered(100):
        net.send(0, ADDRESSES[1], Plane.DATAGRAM, data)
    heap.run(5.0)
    assert sorted(data for data, _, _ in boxes[1].got) == numbered(100)
    assert {source for _, source, _ in boxes[1].got} == {ADDRESSES[0]}


def test_loss_takes_its_share_of_datagrams_and_none_of_a_stream() -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(loss=0.3))
    for data in numbered(1000):
        net.send(0, ADDRESSES[1], Plane.DATAGRAM, data)
        net.send(0, ADDRESSES[1], Plane.BULK, data)
    heap.run(1000.0)
    by_plane = [[data for data, _, plane in boxes[1].got if plane is wanted] for wanted in Plane]
    assert 620 < len(by_plane[Plane.DATAGRAM]) < 780
    assert by_plane[Plane.BULK] == numbered(1000), "in order and complete, only late"


def test_datagrams_overtake_each_other_and_come_twice() -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(duplicate=0.5, reorder=0.5, reorder_s=0.1))
    for data in numbered(400):
        net.send(0, ADDRESSES[1], Plane.DATAGRAM, data)
    heap.run(10.0)
    got = [data for data, _, _ in boxes[1].got]
    assert got != sorted(got)
    assert 500 < len(got) < 700


def test_a_flipped_bit_is_one_bit() -> None:
    data = bytes(64)
    assert sum(byte.bit_count() for byte in flipped(data, Random(1))) == 1
    assert flipped(b"", Random(1)) == b""


def test_what_is_larger_than_the_way_allows_vanishes() -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(mtu=1000))
    net.send(0, ADDRESSES[1], Plane.DATAGRAM, bytes(1000))
    net.send(0, ADDRESSES[1], Plane.DATAGRAM, bytes(1001))
    heap.run(1.0)
    assert [len(data) for data, _, _ in boxes[1].got] == [1000]
    assert net.statistics.oversize == 1


@pytest.mark.parametrize(("one_way", "back"), [(True, 1), (False, 0)])
def test_a_cut_can_be_one_way(one_way: bool, back: int) -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(cut=True), one_way=one_way)
    net.send(0, ADDRESSES[1], Plane.DATAGRAM, b"there")
    net.send(1, ADDRESSES[0], Plane.DATAGRAM, b"back")
    net.send(0, ADDRESSES[2], Plane.DATAGRAM, b"elsewhere")
    heap.run(1.0)
    assert (len(boxes[1].got), len(boxes[0].got), len(boxes[2].got)) == (0, back, 1)


def test_a_cut_can_take_one_plane_only() -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(cut=True), tcp=False)
    for plane in Plane:
        net.send(0, ADDRESSES[1], plane, b"x")
    heap.run(1.0)
    assert sorted(plane for _, _, plane in boxes[1].got) == [Plane.PROBE, Plane.BULK]


def test_a_stream_survives_a_short_cut_and_breaks_in_a_long_one() -> None:
    heap, net, boxes = make_net()
    cut = rule(net, NEUTRAL._replace(cut=True))
    net.send(0, ADDRESSES[1], Plane.BULK, b"held")
    heap.run(GIVE_UP_S / 2)
    net.remove(cut)
    heap.run(GIVE_UP_S)
    assert [data for data, _, _ in boxes[1].got] == [b"held"]
    rule(net, NEUTRAL._replace(cut=True))
    net.send(0, ADDRESSES[1], Plane.BULK, b"lost")
    heap.run(3 * GIVE_UP_S)
    assert boxes[0].told == [(ADDRESSES[1], Plane.BULK)]
    assert len(boxes[1].got) == 1


def test_a_process_that_is_gone_resets_streams_and_swallows_datagrams() -> None:
    heap, net, boxes = make_net()
    boxes[1].running = False
    net.send(0, ADDRESSES[1], Plane.BULK, b"x")
    net.send(0, ADDRESSES[1], Plane.DATAGRAM, b"x")
    heap.run(1.0)
    assert boxes[0].told == [(ADDRESSES[1], Plane.BULK)]


def test_the_next_process_does_not_get_what_was_for_the_last() -> None:
    heap, net, boxes = make_net()
    net.send(0, ADDRESSES[1], Plane.BULK, b"first")
    heap.run(1.0)
    boxes[1].generation = 2
    net.send(0, ADDRESSES[1], Plane.BULK, b"second")
    heap.run(2.0)
    assert [data for data, _, _ in boxes[1].got] == [b"first"]
    assert boxes[0].told == [(ADDRESSES[1], Plane.BULK)]
    net.send(0, ADDRESSES[1], Plane.BULK, b"third")
    heap.run(3.0)
    assert boxes[1].got[-1][0] == b"third"


def test_a_reader_that_does_not_read_fills_the_buffer_and_no_more() -> None:
    heap, net, boxes = make_net()
    boxes[1].room = False
    piece = bytes(STREAM_BUFFER_BYTES // 8)
    for _ in range(12):
        net.send(0, ADDRESSES[1], Plane.BULK, piece)
    heap.run(5.0)
    assert net.statistics.overflowed == 4
    boxes[1].room = True
    heap.run(10.0)
    assert len(boxes[1].got) == 8


def test_refusing_is_told_at_once() -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(cut=True, refuse=True))
    net.send(0, ADDRESSES[1], Plane.DATAGRAM, b"x")
    heap.run(0.001)
    assert boxes[0].told == [(ADDRESSES[1], Plane.DATAGRAM)]


def test_a_core_is_well_whatever_the_rules_say() -> None:
    heap, net, boxes = make_net()
    rule(net, NEUTRAL._replace(cut=True), others=(1, 2))
    net.protect(net.mask((0, 1)))
    net.send(0, ADDRESSES[1], Plane.DATAGRAM, b"x")
    net.send(0, ADDRESSES[2], Plane.DATAGRAM, b"x")
    heap.run(1.0)
    assert (len(boxes[1].got), len(boxes[2].got)) == (1, 0)


def test_an_address_of_nobody_swallows_everything() -> None:
    heap, net, boxes = make_net()
    net.send(0, ("192.0.2.1", 1), Plane.BULK, b"x")
    heap.run(1.0)
    assert net.statistics.nobody == 1
    assert all(not box.got for box in boxes)


def test_the_seed_says_when_and_what_arrives() -> None:
    def once(seed: int) -> tuple[list[tuple[bytes, Address, Plane]], int]:
        heap, net, boxes = make_net(seed)
        rule(net, NEUTRAL._replace(loss=0.2, duplicate=0.2, reorder=0.5, corrupt=0.2, jitter_s=0.01))
        for data in numbered(200):
            net.send(0, ADDRESSES[1], Plane.DATAGRAM, data)
            net.send(0, ADDRESSES[1], Plane.BULK, data)
        heap.run(60.0)
        return boxes[1].got, heap.done

    assert once(3) == once(3)
    assert once(3) != once(4)
