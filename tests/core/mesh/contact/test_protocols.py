"""Nodes of other protocols: what is skipped, who is named, and in which version peers write to each other."""

from __future__ import annotations

from ranvier_py.core.mesh.contact.other_protocols import HOSTS_MAX, KEPT_S, OtherProtocols
from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.wire.frame import PROTOCOL_VERSION
from ranvier_py.core.peer.peer_view import peer_view
from tests.core.peer.test_gossip_state import started

UNKNOWN_KIND = 200
SOURCE = ("10.0.0.9", 7946)


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
