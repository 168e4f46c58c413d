"""First contact, and the gate behind it: who gets in, and once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.contact.sessions import Incoming
from ranvier_py.core.mesh.mesh_values import Peer, Plane
from ranvier_py.core.mesh.wire.messages import Ack, Echo, Hello, Ping, Record, State, Update
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.peers.route_messages import RouteUpdates
from tests.core.mesh.contact.contact_world import ELSEWHERE, Node, World, acquainted, kinds, pair
from tests.core.mesh.wire.wire_samples import LONGEST
from tests.examples import examples

# --- proofs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", Plane)
def test_three_packets_prove_two_sessions_to_each_other(plane: Plane) -> None:
    one, two, world = pair()
    assert one.sessions.greet(two.address, world.now, plane)
    assert kinds(world.run()) == ["Hello", "Echo", "Echo"]
    assert (one.proofs(), two.proofs()) == ([two.session], [one.session])
    assert one.taken[0][0] == Incoming(Peer(two.session, two.address), proved=two.record)
    assert one.knows(two)
    assert two.knows(one)
    assert two.sessions.session_at(one.address) == one.session
    assert one.count("sessions") == 1


def test_an_address_is_not_greeted_again_at_once() -> None:
    one, two, world = pair()
    assert one.sessions.greet(two.address, world.now)
    assert not one.sessions.greet(two.address, world.now + 0.4)
    assert one.sessions.greet(ELSEWHERE, world.now + 0.4)
    assert one.sessions.greet(two.address, world.now + 0.5)


def test_what_is_sent_before_the_proof_is_not_lost() -> None:
    """The last Echo gets lost, so the other side does not know whose ping this is, and asks."""
    one, two, world = pair()
    one.sessions.greet(two.address, world.now)
    world.run(lost=lambda delivery: isinstance(delivery.out.message, Echo) and delivery.source == one.address)
    assert (one.proofs(), two.proofs()) == ([two.session], [])
    world.now += 60
    one.ping(two, seq=7)
    assert kinds(world.run()) == ["Ping", "Challenge", "Echo", "Ping"]
    assert two.proofs() == [one.session]
    assert two.messages() == [Ping(7)]
    assert (two.count("stranger"), one.count("resent")) == (1, 1)


def test_a_session_that_was_forgotten_comes_back_by_what_it_sends() -> None:
    one, two, world = acquainted()
    two.sessions.forget(one.session)
    one.ping(two, seq=7)
    world.run()
    assert two.knows(one)
    assert (two.proofs(), two.messages()) == ([one.session], [Ping(7)])
    assert one.proofs() == []  # it was never in doubt


def test_whoever_is_written_to_without_being_known_is_greeted() -> None:
    """Its answer would be refused: by datagram it would be challenged, over a stream it would just be lost."""
    one, two, world = acquainted()
    one.sessions.forget(two.session)
    one.ping(two, plane=Plane.PROBE)
    assert kinds(world.run()) == ["Ping", "Hello", "Echo"]
    assert one.knows(two)
    assert two.messages() == [Ping(1)]


def test_over_streams_a_peer_is_greeted_until_it_has_shown_that_it_knows_us() -> None:
    """The last Echo was lost with its connection. Nobody can be challenged there, so nobody else would notice."""
    one, two, world = pair()
    one.sessions.greet(two.address, world.now, Plane.PROBE)
    world.run(lost=lambda delivery: isinstance(delivery.out.message, Echo) and delivery.source == one.address)
    world.now += 1
    one.ping(two, 1, Plane.PROBE)
    assert kinds(world.run()) == ["Ping", "Hello", "Echo", "Echo"]
    assert (two.proofs(), two.messages()) == ([one.session], [])
    world.now += 1
    one.ping(two, 2, Plane.PROBE)
    assert kinds(world.run()) == ["Ping", "Hello", "Echo"]
    world.now += 1
    one.ping(two, 3, Plane.PROBE)
    assert kinds(world.run()) == ["Ping"]
    assert two.messages() == [Ping(2), Ping(3)]


def test_an_answer_shows_that_a_peer_knows_us() -> None:
    one, two, world = pair()
    world.meet(one, two)
    two.send(Peer(one.session, one.address), Ack(1))
    world.run()
    one.send(Peer(two.session, two.address), RouteUpdates(5, 1, ()), Plane.BULK)
    assert kinds(world.run()) == ["RouteUpdates"]


def test_a_peer_that_greets_us_may_not_know_us() -> None:
    """It came back from forgetting us, and its proof of us may be lost."""
    one, two, world = acquainted()
    two.sessions.forget(one.session)
    two.sessions.greet(one.address, world.now)
    world.run(lost=lambda delivery: delivery.source == one.address)
    world.now += 1
    one.ping(two, 5, Plane.PROBE)
    assert kinds(world.run()) == ["Ping", "Hello", "Echo", "Echo"]
    assert two.knows(one)


@settings(max_examples=examples(150))
@given(st.lists(st.booleans(), max_size=24), st.booleans(), st.sampled_from([Plane.DATAGRAM, Plane.PROBE]))
def test_whatever_is_lost_both_know_each_other_soon_after(fates: list[bool], both: bool, plane: Plane) -> None:
    """With both sides probing whom they know, twice a second. Each proof is reported once."""
    one, two, world = pair()
    left = list(fates)
    for _ in range(len(fates) + 6):
        for node, other in ((one, two), (two, one)):
            if node.knows(other):
                node.ping(other, plane=plane)
            elif node is one or both:
                node.sessions.greet(other.address, world.now, plane)
        world.run(lost=lambda _: bool(left) and left.pop())
        world.now += 0.5
    assert one.knows(two)
    assert two.knows(one)
    assert (one.proofs(), two.proofs()) == ([two.session], [one.session])
    one.ping(two, 99, plane)
    world.run()
    assert Ping(99) in two.messages()


# --- what the gate refuses --------------------------------------------------------------------------------------------


def test_one_plane_does_not_hold_up_another() -> None:
    """A stream that was stuck delivers what is far behind the datagrams of its sender."""
    one, two, world = acquainted()
    one.ping(two, 1, Plane.BULK)
    (late,) = world.run(lost=lambda _: True)
    for _ in range(5000):
        one.sealer.seal(Plane.DATAGRAM, 1, CODEC.number_of[Ping], b"")
    one.ping(two, 2)
    world.run()
    assert world.deliver(late) is not None
    assert two.messages() == [Ping(2), Ping(1)]


def test_a_packet_for_another_session_is_refused() -> None:
    one, two, world = acquainted()
    one.send(Peer(0xDEAD, two.address), Ping(1))
    one.send(Peer(0, two.address), Ping(2))  # for whoever is there: that may only be a Hello
    world.run(lost=lambda delivery: isinstance(delivery.out.message, Hello))
    assert two.messages() == []
    assert two.count("receiver") == 2


def test_a_greeting_for_another_session_is_refused_too() -> None:
    """Only 0 means whoever is there. It may be a replay of what was claimed to somebody who is gone."""
    one, two, world = pair()
    one.send(Peer(0xDEAD, two.address), Hello(one.record, 5))
    assert kinds(world.run(lost=lambda delivery: delivery.source == two.address)) == ["Hello", "Challenge"]
    assert two.count("receiver") == 1


def test_a_packet_for_one_node_is_worth_nothing_at_another() -> None:
    one, two, world = acquainted()
    three = world.put(Node("three", 0xC3, ("10.0.0.3", 7946)))
    world.meet(one, three)
    one.ping(two)
    (delivery,) = world.run()
    assert three.receive(delivery.data, one.address, delivery.plane, world.now) is None
    assert three.count("receiver") == 1


@pytest.mark.parametrize("message", [Hello, Echo])
def test_nobody_speaks_for_another_session(message: type) -> None:
    """The record in a handshake is the one of who sealed it. Also a proved node can't bind another's session."""
    one, two, world = acquainted()
    forged = one.record._replace(session=0xF0F0)
    claimed = Hello(forged, 5) if message is Hello else Echo(forged, 5, 6)
    one.send(Peer(two.session, two.address), claimed)
    assert len(world.run()) == 1
    assert two.count("record") == 1
    assert two.count("sessions") == 1


def test_a_kind_of_a_later_version_is_a_sign_of_life_and_no_more() -> None:
    one, two, world = acquainted()
    for number, (kind, body) in enumerate(((200, b"whatever"), (CODEC.number_of[Ping], b"broken")), 1):
        packet = one.sealer.seal(Plane.DATAGRAM, two.session, kind, body)
        incoming = two.receive(packet, one.address, Plane.DATAGRAM, world.now)
        assert incoming == Incoming(Peer(one.session, one.address))
        assert two.count("unknown") + two.count("body") == number
    stranger = Node("four", 0xD4, ("10.0.0.4", 7946))
    packet = stranger.sealer.seal(Plane.DATAGRAM, two.session, CODEC.number_of[Echo], b"broken")
    assert two.receive(packet, stranger.address, Plane.DATAGRAM, world.now) is None
    assert (two.count("unknown"), two.count("body"), two.outbox) == (1, 2, [])
    one.ping(two)
    world.run()
    assert two.messages() == [Ping(1)], "what follows is taken"


def test_an_echo_that_nobody_asked_for_proves_nothing() -> None:
    one, two, world = pair()
    one.send(Peer(two.session, two.address), Echo(one.record, 12345, 678))
    assert kinds(world.run()) == ["Echo"]
    assert (two.proofs(), two.count("nonce")) == ([], 1)


def test_an_echo_that_comes_too_late_proves_nothing() -> None:
    one, two, world = pair()
    one.sessions.greet(two.address, world.now)
    world.run(lost=lambda delivery: delivery.source == two.address)
    answer = world.log[-1]
    world.now += 4.1
    assert world.deliver(answer) is None
    assert (one.proofs(), one.count("nonce")) == ([], 1)


# --- replays of whole handshakes --------------------------------------------------------------------------------------


def test_what_was_sealed_before_a_proof_is_past() -> None:
    """Forgetting a session forgets its window. Still nothing that it ever claimed is taken again when it comes back."""
    one, two, world = acquainted()
    for plane in Plane:
        one.ping(two, 5, plane)
    claimed = world.run()
    two.sessions.forget(one.session)
    one.ping(two, 6)
    world.run()
    assert two.knows(one)
    before = len(two.taken)
    for delivery in claimed:
        world.deliver(delivery)
    assert len(two.taken) == before
    assert two.count("replay") == len(claimed)


def test_a_proof_can_not_be_replayed_after_its_session_was_forgotten() -> None:
    """Not even within the seconds in which its number is still good: the proof has a counter, too."""
    one, two, world = pair()
    world.meet(one, two)
    proof = world.log[-1]
    assert isinstance(proof.out.message, Echo)
    assert two.knows(one)
    two.sessions.forget(one.session)
    assert world.deliver(proof) is None
    assert not two.knows(one)
    assert two.count("replay") == 1


# --- ourselves, restarts, moves ---------------------------------------------------------------------------------------


def test_a_node_does_not_greet_itself() -> None:
    """The seed name resolves to us, too."""
    one, _, world = pair()
    assert not one.sessions.greet(one.address, world.now)


def test_packets_of_our_own_are_only_counted() -> None:
    """A service address leads back to us today, or somebody sends us back what we claimed to others."""
    one, two, world = acquainted()
    one.ping(two)
    (delivery,) = world.run()
    assert one.sessions.greet(ELSEWHERE, world.now)
    (hello,) = one.drain(world.now)
    broken = one.sealer.seal(Plane.DATAGRAM, 0, CODEC.number_of[Hello], b"broken")
    for packet in (delivery.data, hello.data, broken):
        assert one.receive(packet, two.address, Plane.DATAGRAM, world.now) is None
    assert one.count("own") == 3
    assert one.drain(world.now) == []


def test_a_restarted_node_displaces_its_old_session() -> None:
    one, two, world = acquainted()
    again = world.put(Node("two", 0xB3, two.address, epoch=2))
    world.meet(again, one)
    assert one.knows(again)
    assert not one.knows(two)
    assert one.sessions.session_at(two.address) == again.session
    assert (one.count("replaced"), one.count("sessions")) == (1, 1)


def test_of_two_sessions_with_one_name_the_lower_epoch_displaces_nothing() -> None:
    """It came back without its state, with an epoch of the past. Membership tells it; until then both are received."""
    one, two, world = acquainted()
    again = world.put(Node("two", 0xB3, two.address, epoch=1))
    world.meet(again, one)
    assert one.knows(again)
    assert one.knows(two)
    assert one.sessions.session_at(two.address) == again.session
    one.sessions.forget(two.session)
    assert one.sessions.session_at(two.address) == again.session


def test_whoever_came_back_with_a_lower_epoch_does_not_shield_the_higher_one() -> None:
    one, two, world = acquainted()
    for session, epoch in ((0xB3, 0), (0xB4, 2)):
        again = world.put(Node("two", session, two.address, epoch=epoch))
        world.meet(again, one)
        assert one.knows(again)
        world.now += 1
    assert not one.knows(two)


def test_another_node_at_an_address_displaces_nobody_by_that() -> None:
    one, two, world = acquainted()
    other = world.put(Node("other", 0xC3, two.address, epoch=9))
    world.meet(other, one)
    assert one.knows(two)
    assert one.sessions.session_at(two.address) == other.session


def test_a_session_moves_only_by_another_proof() -> None:
    one, two, world = acquainted()
    old, new = one.address, ("10.7.7.7", 7000)
    one.sessions.me = one.record._replace(host=new[0], port=new[1], incarnation=1)
    one.send(Peer(two.session, two.address), Echo(one.sessions.me, 4711, 0))  # proves nothing: it repeats no number
    world.run()
    assert two.sessions.session_at(old) == one.session
    one.sessions.greet(two.address, world.now)
    world.run(lost=lambda delivery: delivery.to == new)
    assert two.sessions.session_at(old) == one.session  # claimed, not proved
    world.nodes[new] = one
    del world.nodes[old]
    one.address = new
    world.now += 1
    world.meet(one, two)
    assert two.sessions.session_at(new) == one.session
    assert two.sessions.session_at(old) == 0
    assert two.sessions.session_at(new) == one.session
    assert two.taken[-1][0].proved == one.sessions.me
    two.ping(one, 3)
    world.run()
    assert Ping(3) in one.messages()


def test_a_packet_from_a_proved_session_counts_wherever_it_comes_from() -> None:
    """The seal says who it is. NAT may change the source; the answer goes to the proved address all the same."""
    one, two, world = acquainted()
    one.ping(two)
    (delivery,) = one.drain(world.now)
    incoming = two.receive(delivery.data, ELSEWHERE, Plane.DATAGRAM, world.now)
    assert incoming.peer == Peer(one.session, one.address)
    assert two.knows(one)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_sessions_are_bounded_and_the_longest_silent_goes_first() -> None:
    hub = Node("hub", 0x99, ("10.0.0.99", 7946), sessions_max=3)
    world = World(hub)
    spokes = [world.put(Node(f"spoke-{number}", number, ("10.0.0.1", number))) for number in range(1, 6)]
    for spoke in spokes[:3]:
        world.meet(spoke, hub)
        world.now += 1
    spokes[0].ping(hub)
    world.run()
    spokes[3].sessions.greet(hub.address, world.now)
    world.run()
    assert [hub.knows(spoke) for spoke in spokes] == [True, False, True, True, False]
    assert (hub.count("sessions"), hub.count("evicted")) == (3, 1)
    spokes[1].ping(hub, 8)
    world.run()
    assert hub.knows(spokes[1])  # whoever was put out by mistake comes back by itself
    assert Ping(8) in hub.messages()


def test_the_update_of_a_record_travels_in_the_next_handshake() -> None:
    """`me` is replaced by membership, for instance after a refutation."""
    one, two, world = pair()
    one.sessions.me = one.record._replace(incarnation=9)
    world.meet(one, two)
    assert two.taken[0][0].proved == one.record._replace(incarnation=9)


def test_a_record_may_be_as_long_as_it_may() -> None:
    """Also the longest ones find each other in datagrams."""
    one, two, world = pair()
    for node in (one, two):
        longest: Record = LONGEST._replace(
            session=node.session,
            host=node.address[0],
            port=node.address[1],
            name=f"{node.session:064}",
            state=State.ALIVE,
        )
        node.sessions.me = longest
    one.sessions.greet(two.address, world.now)
    assert max(len(delivery.data) for delivery in world.run()) in (512, 513)
    assert one.knows(two)
    assert two.knows(one)
    assert two.taken[0][0].message is None
    assert Update(one.sessions.me).record == two.taken[0][0].proved
