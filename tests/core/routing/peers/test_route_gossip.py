"""One node's route gossip: what it does with each message, and its bounds."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from random import Random
from types import FunctionType, ModuleType

import pytest

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.transfer import Wanted
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers.comparison import SUMS_WAITING_MAX
from ranvier_py.core.routing.peers.pull import ALONE_S
from ranvier_py.core.routing.peers.route_gossip import INTAKE_SHARES, ROWS_AT_ONCE_MAX, TAKEN_AT_ONCE_MAX, RouteGossip
from ranvier_py.core.routing.peers.route_settings import MIN_BYTES_PER_S, RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.peers.route_updates import ROUTE_UPDATE_BYTES_MAX, ROWS_MAX, UpdateRow, encode_rows
from ranvier_py.core.routing.peers.update_log import BATCH_BYTES_MAX
from tests.builders.machine_net import alike
from tests.core.routing.peers.route_net import RouteNode

ME = 1
B, C, D = (Peer(session, ("10.0.0.1", 7000 + session)) for session in (2, 3, 4))
NOW = 1000.0


class NotedSync(RouteSync):
    """Notes what it gets."""

    def __init__(self) -> None:
        node = RouteNode(ME, capacity=10)
        super().__init__(node.table, node.backends, node.owners, node.checkpoints)
        self.received: list[tuple[bytes, float]] = []

    def receive(self, updates: Iterable[tuple[float, bytes]], now: float) -> int:  # as its parent
        before = len(self.received)
        self.received += [(data, age_s) for age_s, data in updates]
        return len(self.received) - before


class One:
    """A node that has joined: it was alone for a while."""

    def __init__(self, *peers: Peer, **settings: float) -> None:
        chosen = RouteGossipSettings(**{"ttl_s": 100.0, **settings})  # type: ignore[arg-type]
        self.sync = NotedSync()
        self.outbox: list[Outgoing] = []
        self.gossip = RouteGossip(ME, self.sync, chosen, self.outbox, Random(1), NOW - 2 * ALONE_S)
        self.gossip.tick(NOW)
        assert self.gossip.synced
        self.gossip.met(alike(peers or (B, C)), NOW)

    def sent(self, kind: type = object) -> list[tuple[int, Message]]:
        sent = [(outgoing.session, outgoing.message) for outgoing in self.outbox if isinstance(outgoing.message, kind)]
        self.outbox.clear()
        return sent

    def route_updates(self) -> list[bytes]:
        return [route_update for route_update, _ in self.sync.received]


def batch(first: int, last: int, origin: int = B.session, age_s: int = 0, held_ms: int = 0) -> r.RouteUpdates:
    """Route updates first … last."""
    entries = tuple(r.Entry(age_s, b"%d" % number) for number in range(first, last + 1))
    return r.RouteUpdates(origin, first - 1, entries, held_ms)


# --- telling ----------------------------------------------------------------------------------------------------------


def test_route_updates_that_name_no_origin_are_their_sender_s() -> None:
    """The session is in every packet already."""
    one = One()
    one.gossip.receive(B, r.RouteUpdates(0, 0, (r.Entry(1, b"x"),), 0), NOW)
    assert one.gossip.vector() == {B.session: 1}


def test_what_is_learned_goes_to_every_peer_within_a_tick() -> None:
    one = One(B, C, D)
    one.gossip.announce(b"x", NOW)
    one.gossip.announce(b"y", NOW + 0.02)
    assert one.gossip.wake_at <= NOW + 0.05
    one.gossip.tick(NOW + 0.05)
    message = r.RouteUpdates(0, 0, (r.Entry(1, b"x"), r.Entry(1, b"y")), 30)
    assert one.sent(r.RouteUpdates) == [(peer.session, message) for peer in (C, D, B)]
    one.gossip.tick(NOW + 0.2)
    assert one.sent(r.RouteUpdates) == [], "each route update goes once"


def test_messages_go_to_the_peer_s_address_as_bulk() -> None:
    one = One(B)
    one.gossip.announce(b"x", NOW)
    one.gossip.tick(NOW + 0.05)
    outgoing = next(outgoing for outgoing in one.outbox if isinstance(outgoing.message, r.RouteUpdates))
    assert (outgoing.to, outgoing.session, outgoing.plane) == (B.address, B.session, Plane.BULK)


def test_announcing_writes_nothing() -> None:
    """smg#919: what was serialised for each request took all memory within minutes."""
    one = One()
    for _ in range(1000):
        one.gossip.announce(b"x" * 60, NOW)
    assert one.outbox == []


def test_nothing_is_written_while_there_is_nobody() -> None:
    one = One()
    one.gossip.met(alike(()), NOW)
    one.gossip.announce(b"x", NOW)
    one.gossip.tick(NOW + 1)
    assert one.outbox == []
    one.gossip.met(alike((B,)), NOW + 2)
    one.gossip.announce(b"y", NOW + 2)
    one.gossip.tick(NOW + 2.05)
    assert one.sent(r.RouteUpdates) == [(B.session, r.RouteUpdates(0, 1, (r.Entry(1, b"y"),), 50))], (
        "the first one is for repair"
    )


@pytest.mark.parametrize("size", [0, ROUTE_UPDATE_BYTES_MAX + 1])
def test_what_no_peer_could_read_is_not_announced(size: int) -> None:
    """T-poison-item (smg#808): it would be tried again with every tick."""
    one = One()
    one.gossip.announce(bytes(size), NOW)
    one.gossip.announce(bytes(ROUTE_UPDATE_BYTES_MAX), NOW)
    one.gossip.tick(NOW + 0.1)
    assert [len(m.entries) for _, m in one.sent(r.RouteUpdates) if isinstance(m, r.RouteUpdates)] == [1, 1]
    assert one.gossip.counters.oversized == 1


def test_a_peer_without_room_is_left_to_repair() -> None:
    one = One(node_bytes_per_s=10 * MIN_BYTES_PER_S, peer_bytes_per_s=MIN_BYTES_PER_S)
    for _ in range(700):
        one.gossip.announce(bytes(100), NOW)
    one.gossip.tick(NOW + 0.05)
    sent = one.sent(r.RouteUpdates)
    for peer in (B, C):
        reported = sum(r.wire_bytes(message) for session, message in sent if session == peer.session)
        assert MIN_BYTES_PER_S - BATCH_BYTES_MAX < reported <= MIN_BYTES_PER_S, "no more than the budget of each"
    assert one.gossip.counters.lazy_peers == 2
    one.gossip.announce(b"later", NOW + 2)
    one.gossip.tick(NOW + 2.05)
    assert one.sent(r.RouteUpdates) == [], "it would not join"
    have = max(m.after + len(m.entries) for _, m in sent if isinstance(m, r.RouteUpdates))
    one.gossip.receive(B, r.Vector(((ME, have),), reply=False), NOW + 3)
    assert one.gossip.counters.lazy_peers == 1
    one.gossip.announce(b"last", NOW + 3)
    one.sent()
    one.gossip.tick(NOW + 3.05)
    assert [session for session, _ in one.sent(r.RouteUpdates)] == [B.session]


def test_among_many_nodes_what_is_new_is_reported_on_once() -> None:
    peers = [Peer(session, ("10.0.0.1", 7000)) for session in range(2, 30)]
    one = One(*peers)
    one.gossip.receive(peers[0], batch(1, 3, origin=20, held_ms=40), NOW)
    one.gossip.receive(peers[1], batch(1, 4, origin=20, held_ms=10), NOW + 0.01)
    one.gossip.tick(NOW + 0.05)
    reported = [(session, m) for session, m in one.sent(r.RouteUpdates) if isinstance(m, r.RouteUpdates)]
    assert 2 <= len(reported) <= 3
    assert all((m.origin, m.after, len(m.entries)) == (20, 0, 4) for _, m in reported)
    assert all(session not in (20, peers[0].session) for session, _ in reported)
    assert all(m.held_ms == 50 for _, m in reported), "10 ms there, 40 ms here"
    one.gossip.receive(peers[2], batch(1, 4, origin=20), NOW + 0.06)
    one.gossip.tick(NOW + 0.2)
    assert one.sent(r.RouteUpdates) == []


def test_among_few_nodes_nothing_is_reported_on() -> None:
    one = One(B, C, D)
    one.gossip.receive(B, batch(1, 3), NOW)
    one.gossip.tick(NOW + 0.1)
    assert one.sent(r.RouteUpdates) == []


# --- receiving --------------------------------------------------------------------------------------------------------


def test_each_route_update_is_received_once_and_in_order() -> None:
    one = One()
    for first, last in ((1, 3), (1, 3), (2, 5), (4, 4), (6, 6)):
        one.gossip.receive(B, batch(first, last), NOW)
    assert one.route_updates() == [b"%d" % number for number in range(1, 7)]
    statistics = one.gossip.counters
    assert (statistics.received, statistics.duplicates, statistics.gaps) == (6, 3 + 2 + 1, 0)
    assert one.gossip.vector() == {B.session: 6}


def test_a_batch_that_does_not_join_is_dropped_and_its_sender_is_asked() -> None:
    """T-partial-delta (chitchat#121): a number beyond a hole would hide the hole for ever."""
    one = One()
    one.gossip.receive(B, batch(1, 3), NOW)
    one.gossip.receive(B, batch(5, 6), NOW)
    assert one.route_updates() == [b"1", b"2", b"3"]
    assert one.gossip.vector() == {B.session: 3}
    assert one.gossip.counters.gaps == 1
    one.sent()
    one.gossip.tick(NOW + 0.06)
    assert one.sent(r.Vector) == [(B.session, r.Vector(((B.session, 3),), reply=False))]


def test_what_we_learned_ourselves_is_not_received_again() -> None:
    one = One()
    one.gossip.announce(b"x", NOW)
    one.gossip.receive(B, batch(1, 9, origin=ME), NOW)
    assert one.sync.received == []
    assert one.gossip.vector() == {ME: 1}


def test_expired_route_updates_count_but_are_not_received() -> None:
    one = One()
    message = r.RouteUpdates(B.session, 0, (r.Entry(3, b"a"), r.Entry(100, b"b"), r.Entry(200, b""), r.Entry(99, b"c")))
    one.gossip.receive(B, message, NOW)
    assert one.sync.received == [(b"a", 3), (b"c", 99)]
    assert one.gossip.vector() == {B.session: 4}
    assert one.gossip.counters.expired == 2


def test_a_route_update_too_large_is_marked_as_handled() -> None:
    """T-poison-item: else it is asked for again with each digest."""
    one = One()
    message = r.RouteUpdates(
        B.session, 0, (r.Entry(0, b"a"), r.Entry(0, bytes(ROUTE_UPDATE_BYTES_MAX + 1)), r.Entry(0, b"b"))
    )
    one.gossip.receive(B, message, NOW)
    assert one.route_updates() == [b"a", b"b"]
    assert one.gossip.vector() == {B.session: 3}
    assert one.gossip.counters.oversized == 1
    one.gossip.receive(C, r.Vector(((C.session, 0),), reply=False), NOW)
    (supplied,) = one.sent(r.RouteUpdates)
    assert supplied[1] == r.RouteUpdates(B.session, 0, (r.Entry(0, b"a"), r.Entry(0, b""), r.Entry(0, b"b")))


def test_route_updates_of_one_instant_are_all_received() -> None:
    """T-tie-break (smg#1592): numbers distinguish them, not times."""
    one = One()
    for origin in (B.session, C.session):
        one.gossip.receive(B, batch(1, 5, origin=origin), NOW)
    assert len(one.sync.received) == 10


def test_the_order_of_paths_does_not_matter() -> None:
    """T-relay-order (smg#689): what comes late by another way neither overwrites nor repeats what is known."""
    direct, relayed = One(), One()
    direct.gossip.receive(B, batch(1, 2), NOW)
    direct.gossip.receive(B, batch(3, 4), NOW)
    direct.gossip.receive(C, batch(1, 2), NOW)
    relayed.gossip.receive(C, batch(1, 2), NOW)
    relayed.gossip.receive(C, batch(3, 4), NOW)
    relayed.gossip.receive(B, batch(1, 4), NOW)
    assert direct.route_updates() == relayed.route_updates()
    assert direct.gossip.vector() == relayed.gossip.vector()


def test_one_peer_brings_no_more_than_its_share() -> None:
    """One faulty node must not fill all tables. The part within its share is taken, and nothing is skipped."""
    one = One(B, C, D, intake_per_s=300)
    limit = INTAKE_SHARES * 300 // 3
    now = NOW
    for first in range(1, 1001, 100):
        one.gossip.receive(B, batch(first, first + 99), now)
    assert one.route_updates() == [b"%d" % number for number in range(1, limit + 1)]
    assert one.gossip.counters.limited == 100
    assert one.gossip.counters.gaps == 5
    one.gossip.receive(C, batch(1, 50, origin=C.session), now)
    assert one.gossip.vector()[C.session] == 50, "others are not held up"
    one.gossip.receive(B, batch(limit + 1, limit + 100), now + 1.1)
    assert one.gossip.vector()[B.session] == limit + 100


def test_a_long_message_is_received_in_part() -> None:
    """The loop must not stand still for longer than 2 ms, whatever a peer sends."""
    one = One()
    one.gossip.receive(B, batch(1, 4000), NOW)
    assert len(one.sync.received) == TAKEN_AT_ONCE_MAX
    assert one.gossip.vector() == {B.session: TAKEN_AT_ONCE_MAX}


def test_the_rows_of_an_update_count_each() -> None:
    """One of many rows takes as long as many of one."""
    update = encode_rows([UpdateRow((9, 1), 1, 3, 0, 2 + number) for number in range(ROWS_MAX)])
    one = One(B, C, D, intake_per_s=480)
    assert INTAKE_SHARES * 480 // 3 == 5 * ROWS_MAX
    one.gossip.receive(B, r.RouteUpdates(0, 0, (r.Entry(0, update),) * 9), NOW)
    assert len(one.sync.received) == 5
    assert one.gossip.vector() == {B.session: 5}
    assert one.gossip.counters.limited == 4
    free = One(B)
    free.gossip.receive(B, r.RouteUpdates(0, 0, (r.Entry(0, update),) * 100), NOW)
    assert len(free.sync.received) == ROWS_AT_ONCE_MAX // ROWS_MAX
    assert len(update) * len(free.sync.received) > BATCH_BYTES_MAX, "what a node of ours sends is taken at once"


def test_messages_of_strangers_are_counted_and_ignored() -> None:
    """T-early-data: the session above repeats what came too early; here a stranger's word has no effect."""
    one = One()
    messages: list[Message] = [
        batch(1, 3, origin=D.session),
        r.Digest(1, 0),
        r.Vector(((9, 9),), True),
        r.Reset(9, 9),
        r.TotalSum(1, b"", True, 7),
        r.PartSums(b"", b"", True, 7),
    ]
    taken = {kind.make for kind in RouteGossip.kinds}
    assert {type(message) for message in messages} == taken
    for message in messages:
        one.gossip.receive(D, message, NOW)
    assert (one.sent(), one.sync.received, one.gossip.vector()) == ([], [], {})
    assert one.gossip.counters.strangers == len(messages)


def test_routes_of_another_schema_are_not_asked_for() -> None:
    one = One(schema=1)
    one.gossip.receive(B, r.Digest(5, 2), NOW)
    assert one.sent() == []
    assert one.gossip.counters.foreign == 1


# --- lag --------------------------------------------------------------------------------------------------------------


def test_the_lag_adds_up_over_all_who_held_a_route_update() -> None:
    """Without a common clock: each sender adds how long the newest was held so far, seconds of age give the others."""
    one = One()
    one.gossip.receive(B, batch(1, 3, held_ms=20), NOW)
    assert one.gossip.lag.count == 3
    assert one.gossip.lag.sum == pytest.approx(0.06)
    one.gossip.receive(B, r.RouteUpdates(B.session, 3, (r.Entry(9, b"x"), r.Entry(4, b"y")), 3500), NOW)
    assert one.gossip.lag.sum == pytest.approx(0.06 + 3.5 + 8.5)


def test_half_a_round_trip_belongs_to_the_lag() -> None:
    gossip = RouteGossip(
        ME, NotedSync(), RouteGossipSettings(), [], Random(1), NOW, round_trip_s=lambda session: 0.08 * (session == 2)
    )
    gossip.met(alike((B, C)), NOW)
    gossip.receive(B, batch(1, 1, held_ms=10), NOW)
    gossip.receive(C, batch(1, 1, origin=3, held_ms=10), NOW)
    assert gossip.lag.sum == pytest.approx(0.05 + 0.01)


# --- peers come and go ------------------------------------------------------------------------------------------------


def test_what_a_peer_learned_stays_when_it_is_gone() -> None:
    """Route updates point to backends: a router's death means nothing for them (T-origin-dies-midway)."""
    one = One()
    one.gossip.receive(B, batch(1, 3), NOW)
    one.gossip.forgotten(B.session, NOW + 1)
    assert one.gossip.vector() == {B.session: 3}
    one.gossip.receive(C, r.Vector(((C.session, 0),), reply=False), NOW + 2)
    assert [m.origin for _, m in one.sent(r.RouteUpdates) if isinstance(m, r.RouteUpdates)] == [B.session]


def keys_within(root: object) -> Iterator[set[int]]:
    """The whole numbers that are keys of the dictionaries of an object and of all that it is made of."""
    seen, found = {id(root)}, [root]
    while found:
        each = found.pop()
        if isinstance(each, dict):
            yield {key for key in each if type(key) is int}
        parts = [part for part in gc.get_referents(each) if id(part) not in seen and not isinstance(part, type)]
        seen |= set(map(id, parts))
        found += [part for part in parts if not isinstance(part, ModuleType | FunctionType)]


def test_nothing_is_kept_of_a_thousand_peers_that_came_and_went() -> None:
    """T-1000-restarts-bounded (smg#948): all that is kept for a peer goes with it."""
    one = One(intake_per_s=100_000)
    now = NOW
    sessions = range(10**6, 10**6 + 1000)  # none of them is the number of a question
    for session in sessions:
        peer = Peer(session, ("10.0.0.1", 7000))
        now += 0.5
        one.gossip.met(alike((B, peer)), now)
        one.gossip.receive(peer, batch(1, 2, origin=session), now)
        one.gossip.receive(peer, batch(5, 6, origin=session), now)
        one.gossip.transfer.receive(peer, Wanted(1, 1, 0, b""), now)
        one.gossip.receive(peer, r.TotalSum(1, b"", True, 7), now)
        one.gossip.receive(peer, r.Reset(session, 50), now)
        one.gossip.tick(now)
        one.gossip.transfer.tick(now)
        one.outbox.clear()
    gossip = one.gossip
    gossip.met(alike((B,)), now)
    for _ in range(3):
        now += 110
        gossip.tick(now)
        gossip.tick(now + 1)
    assert gossip.vector() == {}
    assert gossip.counters.logged == 0
    assert {key for keys in keys_within(gossip) for key in keys} & set(sessions) == set()


def test_questions_for_sums_beyond_the_bound_are_counted() -> None:
    peers = [Peer(session, ("10.0.0.1", 7000)) for session in range(10, 10 + SUMS_WAITING_MAX + 3)]
    one = One(*peers)
    for peer in peers:
        one.gossip.receive(peer, r.TotalSum(1, b"", True, 7), NOW)
    assert one.gossip.counters.sums_refused == 3


def test_a_pushed_range_survives_a_trimmed_log() -> None:
    one = One(log_entries_max=10)
    for number in range(30):
        one.gossip.announce(b"%d" % number, NOW)
    one.gossip.tick(NOW + 0.1)
    reported = [m for _, m in one.sent(r.RouteUpdates) if isinstance(m, r.RouteUpdates)]
    assert {(m.after, len(m.entries)) for m in reported} == {(20, 10)}


def test_whoever_was_pushed_first_is_not_always_first() -> None:
    one = One(B, C, D)
    firsts: list[int] = []
    for number in range(6):
        one.gossip.announce(b"x", NOW + number)
        one.gossip.tick(NOW + number + 0.05)
        firsts.append(one.sent(r.RouteUpdates)[0][0])
    assert {firsts.count(peer.session) for peer in (B, C, D)} == {2}


def test_waking_is_asked_for_only_when_something_is_due() -> None:
    """An idle node wakes for digests and to let go of what expired: three times a second.

    And now and then to compare with a peer that never answers.
    """
    one = One()
    wakes, now = 0, NOW
    while now < NOW + 100:
        now = max(one.gossip.wake_at, now)
        one.gossip.tick(now)
        wakes += 1
    assert wakes <= 400
