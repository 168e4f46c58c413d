"""The fake network: what it loses, delays, doubles and breaks, and that a seed says all of it."""

from random import Random

import pytest

from cluster.network.fake_network import GIVE_UP_S, STREAM_BUFFER_BYTES, Network
from cluster.network.links import CUT, DATA_CENTRE, TCP, UDP, Link, Rule, flipped
from cluster.network.virtual_time import VirtualTime
from ranvier_py.core.mesh.mesh_values import Plane


class Box:
    """A process that writes down what reaches it."""

    def __init__(self) -> None:
        self.room = True
        self.got: list[tuple[bytes, int, Plane]] = []
        self.broken: list[tuple[int, Plane]] = []

    def arrive(self, data: bytes, source: int, plane: Plane) -> bool:
        if self.room:
            self.got.append((data, source, plane))
        return self.room

    def unreachable(self, address: int, plane: Plane) -> None:
        self.broken.append((address, plane))


def make_net(seed: int = 1) -> tuple[VirtualTime, Network, list[Box]]:
    """Four processes at the addresses 0 … 3."""
    time, boxes = VirtualTime(), [Box() for _ in range(4)]
    net = Network(time, Random(seed), DATA_CENTRE)
    for address, box in enumerate(boxes):
        net.attach(address, box.arrive, box.unreachable)
    return time, net, boxes


def rule(net: Network, link: Link, others: tuple[int, ...] = (1,), **more: bool) -> Rule:
    """From 0 to the others, and back."""
    planes = UDP if not more.pop("tcp", True) else UDP | TCP
    return net.links.add(Rule((0,), others, link, more.get("one_direction", False), planes))


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


def test_a_good_network_delivers_each_datagram_once_with_its_source() -> None:
    time, net, boxes = make_net()
    for data in numbered(100):
        net.send(0, 1, Plane.DATAGRAM, data)
    time.run(5.0)
    assert sorted(data for data, _, _ in boxes[1].got) == numbered(100)
    assert {source for _, source, _ in boxes[1].got} == {0}


def test_loss_takes_its_share_of_datagrams_and_none_of_a_stream() -> None:
    time, net, boxes = make_net()
    rule(net, Link(loss=0.3))
    for data in numbered(1000):
        net.send(0, 1, Plane.DATAGRAM, data)
        net.send(0, 1, Plane.BULK, data)
    time.run(1000.0)
    by_plane = [[data for data, _, plane in boxes[1].got if plane is wanted] for wanted in Plane]
    assert 620 < len(by_plane[Plane.DATAGRAM]) < 780
    assert by_plane[Plane.BULK] == numbered(1000), "in order and complete, only late"


def test_datagrams_overtake_each_other_and_come_twice() -> None:
    time, net, boxes = make_net()
    rule(net, Link(duplicate=0.5, reorder=0.5, reorder_s=0.1))
    for data in numbered(400):
        net.send(0, 1, Plane.DATAGRAM, data)
    time.run(10.0)
    got = [data for data, _, _ in boxes[1].got]
    assert got != sorted(got)
    assert 500 < len(got) < 700


def test_a_flipped_bit_is_one_bit() -> None:
    data = bytes(64)
    assert sum(byte.bit_count() for byte in flipped(data, Random(1))) == 1
    assert flipped(b"", Random(1)) == b""


def test_what_is_larger_than_the_link_allows_vanishes() -> None:
    time, net, boxes = make_net()
    rule(net, Link(mtu=1000))
    net.send(0, 1, Plane.DATAGRAM, bytes(1000))
    net.send(0, 1, Plane.DATAGRAM, bytes(1001))
    time.run(1.0)
    assert [len(data) for data, _, _ in boxes[1].got] == [1000]
    assert net.counters.oversize == 1


@pytest.mark.parametrize(("one_direction", "back"), [(True, 1), (False, 0)])
def test_a_cut_can_be_one_path(one_direction: bool, back: int) -> None:
    time, net, boxes = make_net()
    rule(net, CUT, one_direction=one_direction)
    net.send(0, 1, Plane.DATAGRAM, b"there")
    net.send(1, 0, Plane.DATAGRAM, b"back")
    net.send(0, 2, Plane.DATAGRAM, b"elsewhere")
    time.run(1.0)
    assert (len(boxes[1].got), len(boxes[0].got), len(boxes[2].got)) == (0, back, 1)


def test_a_cut_can_take_one_plane_only() -> None:
    time, net, boxes = make_net()
    rule(net, CUT, tcp=False)
    for plane in Plane:
        net.send(0, 1, plane, b"x")
    time.run(1.0)
    assert sorted(plane for _, _, plane in boxes[1].got) == [Plane.PROBE, Plane.BULK, Plane.ANSWERS]


def test_a_stream_survives_a_short_cut_and_breaks_in_a_long_one() -> None:
    time, net, boxes = make_net()
    cut = rule(net, CUT)
    net.send(0, 1, Plane.BULK, b"held")
    time.run(GIVE_UP_S / 2)
    net.links.remove(cut)
    time.run(GIVE_UP_S)
    assert [data for data, _, _ in boxes[1].got] == [b"held"]
    rule(net, CUT)
    net.send(0, 1, Plane.BULK, b"lost")
    time.run(3 * GIVE_UP_S)
    assert boxes[0].broken == [(1, Plane.BULK)]
    assert len(boxes[1].got) == 1


def test_a_process_that_is_gone_resets_streams_and_swallows_datagrams() -> None:
    time, net, boxes = make_net()
    net.detach(1)
    net.send(0, 1, Plane.BULK, b"x")
    net.send(0, 1, Plane.DATAGRAM, b"x")
    time.run(1.0)
    assert boxes[0].broken == [(1, Plane.BULK)]


def test_the_next_process_does_not_get_what_was_for_the_last() -> None:
    time, net, boxes = make_net()
    net.send(0, 1, Plane.BULK, b"first")
    time.run(1.0)
    net.attach(1, boxes[1].arrive)
    net.send(0, 1, Plane.BULK, b"second")
    time.run(2.0)
    assert [data for data, _, _ in boxes[1].got] == [b"first"]
    assert boxes[0].broken == [(1, Plane.BULK)]
    net.send(0, 1, Plane.BULK, b"third")
    time.run(3.0)
    assert boxes[1].got[-1][0] == b"third"


def test_a_reader_that_does_not_read_fills_the_buffer_and_no_more() -> None:
    time, net, boxes = make_net()
    boxes[1].room = False
    piece = bytes(STREAM_BUFFER_BYTES // 8)
    for _ in range(12):
        net.send(0, 1, Plane.BULK, piece)
    time.run(5.0)
    assert net.counters.overflowed == 4
    boxes[1].room = True
    time.run(10.0)
    assert len(boxes[1].got) == 8


def test_the_sender_learns_of_a_refusal_at_once() -> None:
    time, net, boxes = make_net()
    rule(net, CUT._replace(refuse=True))
    net.send(0, 1, Plane.DATAGRAM, b"x")
    time.run(0.001)
    assert boxes[0].broken == [(1, Plane.DATAGRAM)]


def test_a_core_is_well_whatever_the_rules_state() -> None:
    time, net, boxes = make_net()
    rule(net, CUT, others=(1, 2))
    net.links.protect((0, 1))
    net.send(0, 1, Plane.DATAGRAM, b"x")
    net.send(0, 2, Plane.DATAGRAM, b"x")
    time.run(1.0)
    assert (len(boxes[1].got), len(boxes[2].got)) == (1, 0)


def test_an_address_of_nobody_swallows_everything() -> None:
    time, net, boxes = make_net()
    net.send(0, "nobody", Plane.BULK, b"x")
    time.run(1.0)
    assert net.counters.nobody == 1
    assert all(not box.got for box in boxes)


def test_the_seed_states_when_and_what_arrives() -> None:
    def once(seed: int) -> tuple[list[tuple[bytes, int, Plane]], int]:
        time, net, boxes = make_net(seed)
        rule(net, Link(loss=0.2, duplicate=0.2, reorder=0.5, corrupt=0.2, jitter_s=0.01))
        for data in numbered(200):
            net.send(0, 1, Plane.DATAGRAM, data)
            net.send(0, 1, Plane.BULK, data)
        time.run(60.0)
        return boxes[1].got, time.done

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_what_the_tap_takes_is_lost_and_counted() -> None:
    time, net, boxes = make_net()
    net.tap = lambda source, target, plane, data: data == b"x"
    for data in (b"x", b"y"):
        net.send(0, 1, Plane.BULK, data)
    time.run(1.0)
    assert [data for data, _, _ in boxes[1].got] == [b"y"]
    assert net.counters.lost == 1


def test_virtual_time_runs_in_order_and_until_something_is_so() -> None:
    time, done = VirtualTime(10.0), list[str]()
    time.at(12.0, done.append, "second")
    time.after(1.0, done.append, "first")
    time.at(12.0, done.append, "third")
    assert time.next_at == 11.0
    assert time.run_until(lambda: len(done) == 3, within_s=5.0) == pytest.approx(2.0, abs=0.1)
    assert done == ["first", "second", "third"]
    with pytest.raises(AssertionError, match="not within"):
        time.run_until(lambda: False, within_s=1.0)
