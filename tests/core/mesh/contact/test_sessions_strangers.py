"""What strangers are reported: never more than they sent, not too often, and nothing in the name of others."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.contact.sessions import ANSWER_INTERVAL_S, ANSWERS_PER_INTERVAL, RESEND_S, Incoming
from ranvier_py.core.mesh.mesh_values import Peer, Plane
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES, PROTOCOL_VERSION, pack
from ranvier_py.core.mesh.wire.messages import Challenge, Echo, Hello, Message, Nack, Ping, Push
from ranvier_py.core.mesh.wire.records import pack_record
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.peers.route_messages import RouteUpdates
from tests.core.mesh.contact.contact_world import ELSEWHERE, Node, World, acquainted, kinds, pair
from tests.core.mesh.wire.wire_samples import EXAMPLES, LONGEST

# --- what strangers are answered ------------------------------------------------------------------------------------


def test_no_answer_to_a_stranger_is_longer_than_what_it_sent() -> None:
    """Whatever it sends, with the longest record on our side, by datagram and from a forged source."""
    two = Node("two", 0xB2, ("10.0.0.2", 7946))
    two.sessions.me = LONGEST._replace(session=two.session)
    now = 100.0
    for number, message in enumerate((*EXAMPLES, Nack(1), Ping(1), Push(()))):
        stranger = Node("x", 0x1000 + number, (f"10.1.0.{number + 1}", 7946))
        if isinstance(message, Hello | Echo):
            message = message._replace(record=stranger.record)  # noqa: PLW2901
        kind, body = CODEC.encode(message)
        if len(body) + OVERHEAD_BYTES > 1200:
            continue
        for receiver in (two.session, 0, 77):
            packet = stranger.sealer.seal(Plane.DATAGRAM, receiver, kind, body)
            assert two.receive(packet, (f"192.0.2.{number + 1}", 6), Plane.DATAGRAM, now) is None
            answers = two.drain(now)
            assert len(answers) <= 1
            assert sum(len(answer.data) for answer in answers) <= len(packet)
            if isinstance(message, Hello) and receiver in (two.session, 0):
                assert [answer.to for answer in answers] == [stranger.address]
                assert len(packet) in (512, 513)
            now += 1
    assert two.count("stranger") >= 15


def test_a_hello_that_is_too_short_for_its_answer_gets_none() -> None:
    """Only a later version, or somebody who wants us to shout, would send one."""
    one, two, world = pair()
    body = pack(pack_record(one.record), 5)  # a Hello without the padding
    packet = one.sealer.seal(Plane.DATAGRAM, 0, CODEC.number_of[Hello], body)
    two.sessions.me = LONGEST._replace(session=two.session)
    assert two.receive(packet, one.address, Plane.DATAGRAM, world.now) is None
    assert (two.drain(world.now), two.count("short")) == ([], 1)


def test_a_question_shorter_than_a_challenge_gets_none() -> None:
    one, two, world = pair()
    packet = one.sealer.seal(Plane.DATAGRAM, two.session, CODEC.number_of[Ping], b"\x90")
    two.receive(packet, one.address, Plane.DATAGRAM, world.now)
    assert (two.drain(world.now), two.count("short")) == ([], 1)


def test_answers_to_strangers_are_paced() -> None:
    one, two, world = pair()
    one.sessions.greet(two.address, world.now)
    (hello,) = one.drain(world.now)
    for _ in range(50):
        packet = one.sealer.seal(Plane.DATAGRAM, 0, *CODEC.encode(hello.out.message))
        two.receive(packet, one.address, Plane.DATAGRAM, world.now)
        world.now += 0.01
    assert len(two.drain(world.now)) == 3  # in half a second
    assert two.count("limited") == 47
    for number in range(400):
        stranger = Node("x", 0x1000 + number, ("10.2.0.1", 1 + number))
        kind, body = CODEC.encode(Ping(1))
        packet = stranger.sealer.seal(Plane.DATAGRAM, two.session, kind, body)
        two.receive(packet, stranger.address, Plane.DATAGRAM, world.now)
    assert 250 < len(two.drain(world.now)) <= 256


@pytest.mark.parametrize("kind", [Ping, Hello])
def test_recorded_packets_do_not_use_up_the_answers_to_strangers(kind: type[Message]) -> None:
    """Who has no key replays what strangers sealed for whoever came by, from as many forged sources as he likes."""
    two, world = Node("two", 0xB2, ("10.0.0.2", 7946)), World()
    strangers = [Node("x", 0x1000 + number, ("10.2.0.1", 1 + number)) for number in range(100)]
    recorded = []
    for stranger in strangers:
        message = Ping(1) if kind is Ping else Hello(stranger.record, 5)
        for _ in range(3):
            to = two.session if kind is Ping else 0
            recorded.append(stranger.sealer.seal(Plane.DATAGRAM, to, *CODEC.encode(message)))
    rng = Random(1)
    for _ in range(10 * ANSWERS_PER_INTERVAL):
        forged = (f"10.3.{rng.randrange(256)}.{rng.randrange(256)}", 7946)
        two.receive(rng.choice(recorded), forged, Plane.DATAGRAM, world.now)
    world.now += ANSWER_INTERVAL_S  # what each of them was worth once is behind us
    two.drain(world.now)
    for number in range(10 * ANSWERS_PER_INTERVAL):
        two.receive(recorded[number % 300], ("10.4.0.1", 1 + number), Plane.DATAGRAM, world.now)
    assert two.drain(world.now) == []
    one = Node("one", 0xA1, ("10.0.0.1", 7946))
    one.ping(two)
    (ping,) = [delivery for delivery in one.drain(world.now) if isinstance(delivery.out.message, Ping)]
    two.receive(ping.data, one.address, Plane.DATAGRAM, world.now)
    assert kinds(two.drain(world.now)) == ["Challenge"]


def test_a_packet_of_a_session_that_is_past_is_not_answered() -> None:
    one, two, world = acquainted()
    one.ping(two)
    (ping,) = world.run()[:1]
    two.sessions.forget(one.session)
    two.receive(ping.data, ELSEWHERE, Plane.DATAGRAM, world.now)
    assert two.drain(world.now) == []
    one.ping(two)
    world.run()
    assert two.knows(one)


def test_a_stranger_on_a_stream_is_not_answered() -> None:
    """The port it comes from gets_updates nothing, and its address is not known yet."""
    one, two, world = acquainted()
    two.sessions.forget(one.session)
    one.send(Peer(two.session, two.address), RouteUpdates(5, 1, ()), Plane.BULK)
    assert kinds(world.run()) == ["RouteUpdates"]
    assert (two.messages(), two.count("stranger")) == ([], 1)


# --- challenges from others -------------------------------------------------------------------------------------------


def test_a_challenge_from_where_we_sent_nothing_is_not_heeded() -> None:
    """Else an old one, replayed from a forged source, would make us write to whoever that is."""
    one, _, world = pair()
    stranger = Node("x", 0xE5, ELSEWHERE)
    for wait_s in (0.0, RESEND_S + 0.1):
        kind, body = CODEC.encode(Challenge(5))
        packet = stranger.sealer.seal(Plane.DATAGRAM, one.session, kind, body)
        one.receive(packet, ELSEWHERE, Plane.DATAGRAM, world.now + wait_s)
        assert one.drain(world.now) == []
        one.send(Peer(stranger.session, ELSEWHERE), Ping(1))  # heeded only for a while
        one.drain(world.now)
    assert one.count("unsolicited") == 2


def test_one_message_is_sent_again_once() -> None:
    one, two, world = acquainted()
    two.sessions.forget(one.session)
    one.ping(two, 1)
    one.ping(two, 2)
    deliveries = world.run(lost=lambda _: True)
    stranger_sees = [two.receive(delivery.data, one.address, delivery.plane, world.now + 1) for delivery in deliveries]
    assert stranger_sees == [None, None]
    challenge = two.drain(world.now + 1)
    assert kinds(challenge) == ["Challenge"]
    world.now += 1
    for _ in range(3):
        world.deliver(challenge[0])
    assert kinds(world.run()) == ["Echo", "Ping"]
    assert two.messages() == [Ping(2)]


def test_a_message_for_an_old_session_is_not_sent_to_the_new_one() -> None:
    """It comes back at the same address: the challenge brings it the proof alone."""
    one, two, world = acquainted()
    again = world.put(Node("two", 0xB3, two.address, epoch=2))
    one.ping(two, 5)
    assert kinds(world.run()) == ["Ping", "Challenge", "Echo", "Echo"]
    assert again.messages() == []
    assert again.knows(one)
    assert one.knows(again)


def test_a_challenge_of_a_peer_is_answered_where_it_is_proved_to_be() -> None:
    one, two, world = acquainted()
    two.send(Peer(one.session, one.address), Challenge(5))
    (delivery,) = two.drain(world.now)
    assert one.receive(delivery.data, ELSEWHERE, delivery.plane, world.now) == Incoming(Peer(two.session, two.address))
    assert [(answer.to, answer.out.message) for answer in one.drain(world.now)] == [
        (two.address, Echo(one.record, 5, 0, PROTOCOL_VERSION))
    ]
