"""Digests, vectors and what is sent for them: message by message."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.routing.peers.eager_push import IN_TRANSIT_S, EagerPush
from ranvier_py.core.routing.peers.repair import ASK_INTERVAL_S, REPAIR_S, Repair
from ranvier_py.core.routing.peers.route_messages import Digest, Reset, RouteUpdates, Vector, wire_bytes
from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.route_settings import MIN_BYTES_PER_S, RouteGossipSettings
from ranvier_py.core.routing.peers.route_updates import Entry
from ranvier_py.core.routing.peers.update_log import LoggedUpdate, UpdateLogs

ME, B, C, D = (Peer(session, ("10.0.0.1", 7000 + session)) for session in (1, 2, 3, 4))
NOW = 1000.0
SCHEMA = 77


class Side:
    """One node's repair, with what it is made of."""

    def __init__(self, entries_max: int = 10_000, **settings: float) -> None:
        chosen = RouteGossipSettings(schema=SCHEMA, ttl_s=100.0, log_entries_max=entries_max, **settings)  # type: ignore[arg-type]
        self.outbox: list[Outgoing] = []
        self.route_outbox = RouteOutbox(ME.session, chosen, self.outbox)
        self.logs = UpdateLogs(ME.session, chosen, self.route_outbox.counters)
        self.eager = EagerPush(self.logs, self.route_outbox, chosen.tick_s)
        self.repair = Repair(self.logs, self.route_outbox, self.eager, Random(1), NOW)
        self.meet(B, C)

    def meet(self, *peers: Peer) -> None:
        self.route_outbox.meet(peers)
        self.logs.present([peer.session for peer in peers], NOW)
        self.eager.meet()
        self.repair.meet()

    def own(self, count: int, size: int = 10) -> None:
        for _ in range(count):
            self.logs.append(b"x" * size, NOW)

    def of(self, origin: int, count: int, at: float = NOW) -> None:
        assert self.logs.open(origin, NOW)
        self.logs.extend(origin, [LoggedUpdate(b"y" * 10, at, at)] * count)

    def sent(self) -> list[tuple[int, Message]]:
        sent = [(outgoing.session, outgoing.message) for outgoing in self.outbox]
        self.outbox.clear()
        return sent

    def messages(self) -> list[Message]:
        return [message for _, message in self.sent()]


def ranges(messages: list[Message]) -> list[tuple[int, int, int]]:
    """(origin, from, to); the side's own route updates name no origin."""
    return [
        (m.origin or ME.session, m.after, m.after + len(m.entries)) for m in messages if isinstance(m, RouteUpdates)
    ]


def test_equal_vectors_end_after_the_digest() -> None:
    side = Side()
    side.own(3)
    side.repair.digest(B, Digest(side.logs.vector.hash, SCHEMA), NOW)
    assert side.sent() == []


def test_another_hash_is_answered_with_the_vector() -> None:
    side = Side()
    side.own(3)
    side.of(C.session, 2)
    side.repair.digest(B, Digest(1, SCHEMA), NOW)
    assert side.sent() == [(B.session, Vector(((1, 3), (3, 2)), reply=True))]


def test_digests_of_another_schema_are_counted_and_ignored() -> None:
    side = Side()
    side.repair.digest(B, Digest(1, SCHEMA + 1), NOW)
    assert side.sent() == []
    assert side.route_outbox.counters.foreign == 1


def test_a_node_that_knows_nothing_is_brought_up_to_date() -> None:
    """Its vector is not empty on the wire, which would mean that it joins."""
    side, other = Side(), Side()
    side.repair.digest(B, Digest(1, SCHEMA), NOW)
    (vector,) = side.messages()
    assert vector == Vector(((1, 0),), reply=True)
    other.own(2)
    other.repair.vector(B, Vector(((9, 0),), reply=True), NOW)
    assert ranges(other.messages()) == [(1, 0, 2)]


def test_a_newcomer_is_reported_the_vector_only() -> None:
    side = Side()
    side.own(3)
    side.repair.vector(B, Vector((), reply=True), NOW)
    assert side.sent() == [(B.session, Vector(((1, 3),), reply=False))]


def test_a_peer_gets_exactly_what_it_lacks_oldest_first() -> None:
    side = Side()
    side.of(D.session, 5, at=NOW - 9)
    side.own(4)
    side.of(C.session, 3, at=NOW - 20)
    side.repair.vector(B, Vector(((1, 4), (4, 2), (3, 1), (99, 5)), reply=False), NOW)
    assert ranges(side.messages()) == [(3, 1, 3), (4, 2, 5)]


def test_what_was_pushed_a_moment_ago_is_not_sent_twice() -> None:
    """Under load digests always differ by what is on its way: repair would send it all again, twice a second."""
    side = Side()
    side.own(4)
    side.eager.learned()
    side.eager.tick(NOW)
    side.sent()
    have_two = Vector(((1, 2),), reply=False)
    side.repair.vector(B, have_two, NOW + IN_TRANSIT_S / 2)
    assert side.messages() == []
    side.repair.vector(B, have_two, NOW + 2 * IN_TRANSIT_S)
    assert ranges(side.messages()) == [(1, 2, 4)], "it was lost"


def test_what_was_lost_is_sent_while_more_is_pushed() -> None:
    """Else a node that learns without a pause would repair nothing."""
    side = Side()
    for step in range(3):
        side.own(1)
        side.eager.learned()
        side.eager.tick(NOW + step * IN_TRANSIT_S)
    side.sent()
    side.repair.vector(B, Vector(((1, 0),), reply=False), NOW + 2 * IN_TRANSIT_S)
    assert ranges(side.messages()) == [(1, 0, 3)]


def test_nobody_is_reported_what_he_learned() -> None:
    side = Side()
    side.of(B.session, 5)
    side.repair.vector(B, Vector(((2, 0),), reply=False), NOW)
    assert side.sent() == []


def test_a_piece_that_does_not_fit_ends_at_a_number() -> None:
    """T-partial-delta (chitchat#121): what is cut off by the budget is asked for again; nobody skips it."""
    side = Side(node_bytes_per_s=MIN_BYTES_PER_S, peer_bytes_per_s=MIN_BYTES_PER_S)
    side.own(2000, size=100)
    have, rounds = 0, 0
    while have < 2000:
        side.repair.vector(B, Vector(((1, have),), reply=False), NOW + 2 * rounds)
        sent = side.messages()
        assert sum(wire_bytes(message) for message in sent) <= MIN_BYTES_PER_S / 2
        for origin, after, end in ranges(sent):
            assert (origin, after) == (1, have)
            have = end
        rounds += 1
    assert rounds == pytest.approx(2000 * 105 / (MIN_BYTES_PER_S / 2), abs=1.5)


def test_a_trimmed_log_is_answered_with_its_base() -> None:
    """T-reset-truncated (chitchat#110), the boundary included: who has all up to the base lacks nothing of it."""
    side = Side(entries_max=100)
    side.own(150)
    for have, answer in (
        (49, [Reset(1, 50)]),
        (50, [RouteUpdates(0, 50, (Entry(0, b"x" * 10),) * 100)]),
        (149, [RouteUpdates(0, 149, (Entry(0, b"x" * 10),))]),
        (150, []),
        (151, []),
    ):
        side.repair.vector(B, Vector(((1, have),), reply=False), NOW)
        assert side.messages() == answer
    assert side.route_outbox.counters.resets_sent == 1


def test_other_origins_are_supplied_beside_a_reset() -> None:
    side = Side(entries_max=100)
    side.own(150)
    side.of(C.session, 10)
    side.repair.vector(B, Vector(((1, 3),), reply=False), NOW)
    messages = side.messages()
    assert messages[0] == Reset(1, 60)
    assert ranges(messages) == [(3, 0, 10)]


def test_what_would_take_too_long_as_route_updates_is_left_to_tables() -> None:
    side = Side(entries_max=60_000, peer_bytes_per_s=MIN_BYTES_PER_S)
    side.of(C.session, 5)
    side.own(int(REPAIR_S * MIN_BYTES_PER_S / 104) + 10, size=100)
    number = side.logs.own
    side.repair.vector(B, Vector(((1, 0),), reply=False), NOW)
    assert sorted(side.messages()) == [Reset(1, number), Reset(3, 5)]
    side.repair.vector(B, Vector(((1, number - 5), (3, 5)), reply=False), NOW)
    assert ranges(side.messages()) == [(1, number - 5, number)]


def test_nothing_is_stated_of_the_dead_whose_route_updates_expired() -> None:
    """T-dead-owner-cleanup (smg#1661): a peer that has forgotten them must not be sent them again."""
    side = Side()
    side.of(D.session, 5, at=NOW - 50)
    side.meet(B, C)
    side.logs.prune(NOW + 50)
    side.repair.vector(B, Vector(((1, 0),), reply=False), NOW + 50)
    assert side.sent() == []
    side.meet(B, C, D)
    side.repair.vector(B, Vector(((1, 0),), reply=False), NOW + 51)
    assert side.messages() == [Reset(D.session, 5)], "it lives: others will receive more of it"


def test_digests_go_to_some_peer_twice_a_second() -> None:
    side = Side()
    reported: list[int] = []
    now = NOW
    while now < NOW + 100:
        now = max(now, side.repair.wake_at)
        side.repair.tick(now)
        reported += [session for session, message in side.sent() if message == Digest(0, SCHEMA)]
    assert 180 <= len(reported) <= 220
    assert min(reported.count(B.session), reported.count(C.session)) > 60


def test_a_peer_that_was_left_out_is_asked_first() -> None:
    side = Side()
    side.own(1)
    side.eager.lazy[C.session] = None
    for second in range(20):
        side.repair.tick(NOW + 1 + second)
    assert {session for session, _ in side.sent()} == {C.session}
    side.repair.vector(C, Vector(((1, 0),), reply=False), NOW + 30)
    assert side.eager.lazy == {}, "it has everything again"


def test_a_peer_stays_left_out_while_it_lacks_something() -> None:
    side = Side(node_bytes_per_s=MIN_BYTES_PER_S, peer_bytes_per_s=MIN_BYTES_PER_S)
    side.own(2000, size=100)
    side.eager.lazy[B.session] = None
    side.repair.vector(B, Vector(((1, 0),), reply=False), NOW)
    assert B.session in side.eager.lazy
    side.repair.digest(B, Digest(side.logs.vector.hash, SCHEMA), NOW)
    assert B.session not in side.eager.lazy


def test_who_missed_something_asks_soon_and_once() -> None:
    side = Side()
    side.own(1)
    for _ in range(50):
        side.repair.missed(B.session, NOW)
    side.repair.missed(D.session, NOW)
    assert side.repair.wake_at <= NOW + ASK_INTERVAL_S / 4
    side.repair.tick(NOW + ASK_INTERVAL_S / 4)
    asked = [message for session, message in side.sent() if session == B.session and isinstance(message, Vector)]
    assert asked == [Vector(((1, 1),), reply=False)]
    side.repair.missed(B.session, NOW + 0.1)
    for step in range(1, 20):
        side.repair.tick(NOW + step * ASK_INTERVAL_S / 10)
        vectors = [message for _, message in side.sent() if isinstance(message, Vector)]
        assert not vectors or step * ASK_INTERVAL_S / 10 >= ASK_INTERVAL_S


def test_questions_to_peers_that_left_are_dropped() -> None:
    side = Side()
    side.repair.missed(B.session, NOW)
    side.meet(C)
    side.repair.tick(NOW + 0.3)
    assert {session for session, _ in side.sent()} <= {C.session}
    side.meet()
    assert side.repair.wake_at == float("inf"), "with nobody there is nothing to repair"
