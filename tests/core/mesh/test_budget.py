"""Budgets in bytes: no second holds more, whichever one looks at; what a message takes is never more than reckoned."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.budget import SLOTS_PER_S, Window
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX, Outgoing, Peer
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers.route_outbox import Rings, RouteOutbox
from ranvier_py.core.routing.peers.route_settings import MIN_BYTES_PER_S, RouteGossipSettings
from ranvier_py.core.routing.peers.route_updates import ROUTE_UPDATE_BYTES_MAX
from ranvier_py.core.routing.peers.update_log import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, ORIGINS_MAX
from ranvier_py.core.routing.route_table.scan import SUMS_BYTES
from tests.examples import examples

TOP = 2**64 - 1
PEERS = [Peer(session, ("10.0.0.1", 7000 + session)) for session in range(2, 30)]


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 60)), max_size=60))
def test_no_second_holds_more_than_the_window_allows(steps: list[tuple[float, int]]) -> None:
    window, now = Window(100), 50.0
    spent: list[tuple[float, int]] = []
    for wait_s, units in steps:
        now += wait_s
        if window.room(now) >= units:
            window.spend(units, now)
            spent.append((now, units))
    for start, _ in spent:
        assert sum(units for at, units in spent if start <= at < start + 1.0) <= 100


def test_a_window_frees_what_is_a_second_ago() -> None:
    window = Window(100)
    window.spend(100, 7.01)
    assert window.room(7.99) == 0
    assert window.room(7.0 + 1 + 1 / SLOTS_PER_S) == 100


MESSAGES: list[Message] = [
    r.RouteUpdates(TOP, TOP, (r.Entry(9, bytes(58)),), 65535),
    r.RouteUpdates(TOP, TOP, tuple(r.Entry(65535, bytes(60)) for _ in range(BATCH_ENTRIES_MAX)), 65535),
    r.RouteUpdates(
        TOP,
        TOP,
        tuple(r.Entry(1, bytes(ROUTE_UPDATE_BYTES_MAX)) for _ in range(BATCH_BYTES_MAX // ROUTE_UPDATE_BYTES_MAX)),
        9,
    ),
    r.Digest(TOP, TOP),
    r.Vector(((TOP, TOP),), True),
    r.Vector(tuple((TOP - number, TOP) for number in range(ORIGINS_MAX)), True),
    r.Reset(TOP, TOP),
    r.TotalSum(TOP, b"", True, 2**32 - 1),
    r.TotalSum(TOP, bytes(8 * r.GROUPS), False, 2**32 - 1),
    r.PartSums(b"\0", bytes(r.GROUP_BYTES), True, 2**32 - 1),
    r.PartSums(bytes(range(r.GROUPS)), bytes(SUMS_BYTES), True, 2**32 - 1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_takes_no_more_than_is_reckoned(message: Message) -> None:
    """T-frame-limit: and the largest of each kind fits a frame."""
    size = len(CODEC.encode(message)[1]) + OVERHEAD_BYTES + 4
    assert size <= r.wire_bytes(message) <= size + 48
    assert size <= FRAME_BYTES_MAX


def post_of(**changes: int) -> tuple[RouteOutbox, list[Outgoing]]:
    outbox: list[Outgoing] = []
    return RouteOutbox(1, RouteGossipSettings(**changes), outbox), outbox


def test_messages_keep_both_budgets() -> None:
    post, outbox = post_of(node_bytes_per_s=150_000, peer_bytes_per_s=MIN_BYTES_PER_S)
    post.meet(PEERS[:4])
    message = r.RouteUpdates(5, 0, tuple(r.Entry(0, bytes(100)) for _ in range(100)))
    size = r.wire_bytes(message)
    accepted = {peer.session: sum(post.send(peer, message, 10.0) for _ in range(20)) for peer in PEERS[:4]}
    assert accepted == {2: 6, 3: 6, 4: 150_000 // size - 12, 5: 0}
    assert post.counters.over_budget == 80 - len(outbox) == 80 - 150_000 // size
    assert post.room(PEERS[0], 10.0) == min(MIN_BYTES_PER_S - 6 * size, 150_000 - len(outbox) * size)
    assert post.send(PEERS[3], message, 11.1)
    assert not post.send(PEERS[5], message, 11.1), "no live peer"


def test_what_was_spent_on_a_peer_stays_spent_when_others_come() -> None:
    post, _ = post_of(peer_bytes_per_s=MIN_BYTES_PER_S)
    post.meet(PEERS[:1])
    post.send(PEERS[0], r.PartSums(bytes(range(r.GROUPS)), bytes(SUMS_BYTES), True, 7), 10.0)
    left = post.room(PEERS[0], 10.0)
    post.meet(PEERS[:3])
    assert post.room(PEERS[0], 10.0) == left < MIN_BYTES_PER_S / 2 + 1


def test_few_nodes_report_everybody_and_many_report_some() -> None:
    post, _ = post_of()
    post.meet(PEERS[:15])
    assert (list(post.targets), post.relays) == (PEERS[:15], False)
    post.meet(PEERS[:16])
    assert (len(post.targets), post.relays) == (3, True)


@pytest.mark.parametrize("count", [17, 40, 100])
def test_what_everybody_passes_on_once_reaches_all_in_few_hops(count: int) -> None:
    rng = Random(count)
    peers = [Peer(rng.getrandbits(64), ("10.0.0.1", 1 + number)) for number in range(count)]
    reported = {
        peer.session: [other.session for other in Rings(peer.session, 3).successors([p for p in peers if p != peer])]
        for peer in peers
    }
    for start in (peers[0].session, peers[count // 2].session):
        reached, newest, hops = {start}, {start}, 0
        while newest:
            newest = {other for session in newest for other in reported[session]} - reached
            reached |= newest
            hops += bool(newest)
        assert len(reached) == count
        assert hops <= 8
    assert all(len(set(listeners)) == 3 for listeners in reported.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"node_bytes_per_s": MIN_BYTES_PER_S - 1},
        {"peer_bytes_per_s": MIN_BYTES_PER_S - 1},
        {"bulk_bytes_per_s": 4 * MIN_BYTES_PER_S - 1},
        {"ttl_s": 0},
        {"tick_s": 0},
        {"audit_interval_s": 0},
        {"log_entries_max": 0},
        {"fan_out": 0},
    ],
)
def test_settings_that_can_t_work_are_refused(wrong: dict[str, int]) -> None:
    """With less than this the bucket sums, or a chunk, would be over budget for ever (cortex#4327)."""
    with pytest.raises(ValueError, match=r"budget|positive"):
        RouteGossipSettings(**wrong)
    whole = r.PartSums(bytes(range(r.GROUPS)), bytes(SUMS_BYTES), True, 7)
    assert 2 * r.wire_bytes(whole) <= MIN_BYTES_PER_S + 400


def test_rings_change_only_where_somebody_came_or_went() -> None:
    """Else the way between two nodes changed with every restart, and what is sent arrived out of order."""
    rng = Random(7)
    peers = [Peer(rng.getrandbits(64), ("10.0.0.1", 1 + number)) for number in range(60)]
    rings = {peer.session: Rings(peer.session, 3) for peer in peers}

    def reported(live: list[Peer]) -> dict[int, list[int]]:
        return {
            peer.session: [other.session for other in rings[peer.session].successors([p for p in live if p != peer])]
            for peer in live
        }

    before, gone = reported(peers), peers[17].session
    after = reported([peer for peer in peers if peer.session != gone])
    changed = [session for session, listeners in after.items() if listeners != before[session]]
    assert 1 <= len(changed) <= 4
    assert all(gone in before[session] for session in changed)
    assert reported(peers) == before
