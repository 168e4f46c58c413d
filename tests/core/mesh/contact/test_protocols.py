"""Nodes of other protocols: what is skipped, who is named, and in which version peers write to each other."""

from __future__ import annotations

from ranvier_py.core.mesh.contact.other_protocols import HOSTS_MAX, KEPT_S, OtherProtocols
from ranvier_py.core.mesh.mesh_values import Outgoing, Plane
from ranvier_py.core.mesh.wire.frame import BASE_VERSION, MAGIC, PROTOCOL_VERSION, SPOKEN, common_version, pack
from ranvier_py.core.mesh.wire.messages import Echo, Hello, Nack, Push
from ranvier_py.core.mesh.wire.records import pack_record
from ranvier_py.core.peer.peer_view import peer_view
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend_state.backend_sets import BackendSet
from tests.core.mesh.contact.contact_world import Delivery, Node, kinds, pair
from tests.core.mesh.wire.wire_samples import RECORD
from tests.core.peer.test_gossip_state import started
from tests.core.peer.test_hostile_member import carry

UNKNOWN_KIND = 200
SOURCE = ("10.0.0.9", 7946)
CONTACT = ("Hello", "Echo", "Challenge")


def speaking(node: Node, highest: int) -> Node:
    """The node as one that speaks this version and the one before."""
    node.sessions.about = highest, ""
    return node


def versions(deliveries: list[Delivery], *, contact: bool = False) -> list[int]:
    return [
        each.data[len(MAGIC)]
        for each, kind in zip(deliveries, kinds(deliveries), strict=True)
        if (kind in CONTACT) is contact
    ]


def test_traffic_of_unknown_kinds_is_counted_by_itself() -> None:
    node, other = started(), started(number=2)
    node.receive(other.sealer.seal(Plane.DATAGRAM, node.me.session, UNKNOWN_KIND, bytes(10)), SOURCE, Plane.DATAGRAM, 1)
    assert peer_view(node, 1.0)["topics"]["unknown"]["received"]["packets"] == 1


def test_a_node_of_another_protocol_is_listed_from_its_first_packet_until_it_is_silent() -> None:
    node = started()
    node.receive(b"RG" + bytes((PROTOCOL_VERSION + 2,)) + b"2" * 60, SOURCE, Plane.DATAGRAM, 1.0)
    node.tick(1.0)
    assert peer_view(node, 1.0)["other_protocols"] == {SOURCE[0]: PROTOCOL_VERSION + 2}
    assert node.counters.other_protocols == 1
    assert dict(node.sessions.others.new) == {SOURCE[0]: PROTOCOL_VERSION + 2}
    node.tick(1.0 + KEPT_S + 1)
    assert (peer_view(node, 100.0)["other_protocols"], node.counters.other_protocols) == ({}, 0)


def test_hosts_of_other_protocols_are_bounded_and_reported_once() -> None:
    """Anybody can write such a packet, in the name of any host."""
    others = OtherProtocols()
    for number in range(3 * HOSTS_MAX):
        others.note(f"10.0.{number >> 8}.{number & 255}", 9, 1.0)
    assert len(others.listed(1.0)) == len(others.new) == HOSTS_MAX
    others.new.clear()
    others.note("10.0.0.191", 9, 2.0)
    assert not others.new
    others.note("10.0.0.191", 8, 2.0)
    assert dict(others.new) == {"10.0.0.191": 8}


def test_peers_write_in_the_highest_version_that_both_speak_and_contact_as_all_do() -> None:
    for highest, common in ((4, 4), (5, 5), (6, 5)):
        one, two, world = pair()
        speaking(two, highest)
        assert versions(world.meet(one, two), contact=True) == [BASE_VERSION] * 3
        one.ping(two)
        assert versions(world.run()) == [common]
        assert two.messages(), "and what is written is read"


def test_a_session_that_is_not_known_yet_is_written_to_in_the_lowest_version() -> None:
    """It asks for a proof, and so both learn what the other speaks."""
    one, two, world = pair()
    one.ping(two)
    assert versions(world.run()) == [SPOKEN[0]] * 2, "and once more with the proof"
    one.ping(two)
    assert versions(world.run()) == [PROTOCOL_VERSION]
    assert len(two.messages()) == 2


def test_versions_more_than_one_apart_have_none_in_common() -> None:
    assert [common_version(5 + apart, 5) for apart in (-2, -1, 0, 1, 2)] == [0, 4, 5, 5, 0]


def test_a_node_of_a_later_protocol_is_named_by_its_first_hello_and_gets_no_answer() -> None:
    one, two, world = pair()
    speaking(two, PROTOCOL_VERSION + 2)
    two.sessions.greet(one.address, world.now)
    assert kinds(world.run()) == ["Hello"]
    assert one.count("version") == 1
    assert one.sessions.others.listed(world.now) == {two.address[0]: PROTOCOL_VERSION + 2}
    one.sessions.greet(two.address, world.now)
    assert kinds(world.run()) == ["Hello"]
    assert two.sessions.others.listed(world.now) == {one.address[0]: PROTOCOL_VERSION}, "and so does it"


def test_the_padding_of_a_hello_of_version_4_stands_in_no_field() -> None:
    hello = CODEC.decode(CODEC.number_of[Hello], pack(pack_record(RECORD), 5, bytes(400)), 4)
    assert hello == Hello(RECORD, 5, 4, "")


def test_fields_that_a_later_version_adds_are_passed_over() -> None:
    later = pack(pack_record(RECORD), 5, 0, 6, "2.0", "more", bytes(100), 7)
    assert CODEC.decode(CODEC.number_of[Echo], later, 4) == Echo(RECORD, 5, 0, 6, "2.0")
    assert CODEC.decode(CODEC.number_of[Nack], pack(7, "more", bytes(9))) == Nack(7)


def test_a_peer_is_not_sent_what_its_version_lacks() -> None:
    node, other = started(), started(number=2)
    other.sessions.about = 4, ""
    other.contact([(node.me.host, node.me.port)], 1.0)
    carry([node, other], 1.0)
    known = node.sessions.known(other.me.session)
    assert known is not None
    assert known.version == 4
    before = node.counters.unspoken
    for message in (BackendSet(1, 2, wanted=False), Push(())):
        node.outbox.append(Outgoing(known.address, other.me.session, Plane.BULK, message))
    node.settle(1.0)
    assert [each.data[len(MAGIC)] for each in node.take()] == [4]
    assert node.counters.unspoken == before + 1


def test_the_release_of_a_members_software_is_shown() -> None:
    node, other = started(), started(number=2)
    other.sessions.about = PROTOCOL_VERSION, "9.8.7"
    other.contact([(node.me.host, node.me.port)], 1.0)
    carry([node, other], 1.0)
    (member,) = peer_view(node, 1.0)["members"]
    assert (member["release"], member["protocol"]) == ("9.8.7", PROTOCOL_VERSION)
