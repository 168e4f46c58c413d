"""Copies between nodes: whole or not at all, within bounds, without a token id."""

from __future__ import annotations

import pytest

from ranvier_py.core.engine_cache.peers import snapshot_transfer
from ranvier_py.core.engine_cache.peers.snapshot_transfer import (
    SNAPSHOTS,
    Subject,
    Taken,
)
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.snapshot import CHUNK_BLOCKS
from ranvier_py.core.engine_cache.sources.event_values import CacheCleared, Tier
from ranvier_py.core.mesh.mesh_values import Plane
from ranvier_py.core.mesh.transfer import PROGRESS_S, RESUMES_MAX, Refused, Wanted
from ranvier_py.core.mesh.wire.seal import BODY_BYTES_MAX
from tests.builders.machine_net import peer_of
from tests.core.engine_cache.peers.stream_net import StreamNet
from tests.core.engine_cache.test_residency import TEXT, residency, stored

ENGINE = Subject(11, 0)
MANY = 12 * CHUNK_BLOCKS


def filled(blocks: int = MANY) -> Residency:
    held = residency()
    for start in range(0, blocks, 64):
        held.apply(stored(range(start + 1, start + 65), [start] * 1024))
    while not held.settle(100_000).complete:
        pass
    return held


def taken(net: StreamNet, session: int = 1) -> list[Taken]:
    found, net.nodes[session].gossip.transfers.taken = net.nodes[session].gossip.transfers.taken, []
    return found


def ask(net: StreamNet, members: list[int], number: int = 5, session: int = 1) -> None:
    net.nodes[session].gossip.transfers.ask(ENGINE, number, members, net.now)


def equal(one: Taken, held: Residency) -> bool:
    assert one.snapshot is not None
    other = residency()
    other.install(one.snapshot.state)
    while not other.settle(100_000).complete:
        pass
    return other.copies(Tier.GPU) == held.copies(Tier.GPU) and other.tiers() == held.tiers()


def test_a_snapshot_arrives_whole_with_the_place_where_it_stands() -> None:
    net, held = StreamNet(2), filled()
    net.nodes[2].holds(ENGINE, held, seq=41, digest=4242)
    ask(net, [2])
    net.run(2.0)
    (one,) = taken(net)
    assert (one.subject, one.ask) == (ENGINE, 5)
    assert one.snapshot is not None
    assert (one.snapshot.seq, one.snapshot.digest) == (41, 4242)
    assert equal(one, held)
    assert net.nodes[2].gossip.transfers.transfer.counters.given == 1
    assert held.frozen == 0


def test_who_cannot_give_one_is_passed_over() -> None:
    net, held = StreamNet(4), filled(64)
    net.nodes[4].holds(ENGINE, held)
    ask(net, [2, 3, 4])
    net.run(1.0)
    assert equal(taken(net)[0], held)


def test_nobody_has_one() -> None:
    net = StreamNet(3)
    ask(net, [2, 3])
    ask(net, [], number=6, session=2)
    net.run(1.0)
    assert taken(net) == [Taken(ENGINE, 5, None)]
    assert taken(net, 2) == [Taken(ENGINE, 6, None)]


def test_a_source_that_dies_is_replaced() -> None:
    net, held = StreamNet(3), filled()
    for session in (2, 3):
        net.nodes[session].holds(ENGINE, filled())
    ask(net, [2, 3])
    net.run(0.002)
    net.kill(2, forgotten=True)
    net.run(PROGRESS_S * (RESUMES_MAX + 3))
    assert equal(taken(net)[0], held)


def test_an_engine_that_restarts_breaks_the_copy() -> None:
    net, held = StreamNet(2), filled()
    net.nodes[2].holds(ENGINE, held)
    ask(net, [2])
    net.run(0.0011)
    held.apply(CacheCleared())
    net.run(1.0)
    assert taken(net) == [Taken(ENGINE, 5, None)]


def test_no_chunk_is_larger_than_a_frame_whatever_the_size_of_the_engines_blocks() -> None:
    """Hybrid models have blocks of thousands of tokens: each travels with the fingerprints inside it."""
    width, count = 4096, 300
    held = residency()
    for number in range(count):
        held.apply(stored([b"%032d" % number], [number] * width, width=width))
    while not held.settle(100_000).complete:
        pass
    net = StreamNet(2)
    net.nodes[2].holds(ENGINE, held)
    ask(net, [2])
    net.run(5.0)
    (one,) = taken(net)
    assert equal(one, held)
    assert max(map(len, net.wire)) <= BODY_BYTES_MAX[Plane.BULK]


def test_what_the_engine_sends_meanwhile_is_not_in_the_copy_and_not_lost() -> None:
    net, held = StreamNet(2), filled()
    before = held.copies(Tier.GPU)
    net.nodes[2].holds(ENGINE, held)
    ask(net, [2])
    net.run(0.02)
    held.apply(stored([b"new"], TEXT[:16]))
    net.run(2.0)
    (one,) = taken(net)
    assert one.snapshot is not None
    assert one.snapshot.state.index.blocks.keys() == before.keys()
    while not held.settle(100_000).complete:
        pass
    assert b"new" in held.copies(Tier.GPU)


def test_copies_at_a_time_are_bounded_and_others_wait_for_their_turn() -> None:
    """A node that joins takes over several streams from one."""
    net = StreamNet(2)
    for rank in range(SNAPSHOTS.given_max + 3):
        net.nodes[1].holds(Subject(11, rank), filled())
        net.nodes[2].gossip.transfers.ask(Subject(11, rank), rank, [1], net.now)
    for _ in range(60):
        net.run(0.05)
        assert sum(bool(held.frozen) for held, _, _ in net.nodes[1].held.values()) <= SNAPSHOTS.given_max
    results = taken(net, 2)
    assert sorted(one.ask for one in results) == list(range(SNAPSHOTS.given_max + 3))
    assert all(one.snapshot is not None for one in results)
    assert net.nodes[1].gossip.transfers.transfer.counters.refused >= 3


def test_one_engine_is_copied_to_one_at_a_time() -> None:
    """Two would freeze it one after the other."""
    net = StreamNet(3)
    net.nodes[1].holds(ENGINE, filled())
    ask(net, [1], session=2)
    ask(net, [1], session=3)
    net.run(4.0)
    assert [len([one for one in taken(net, session) if one.snapshot]) for session in (2, 3)] == [1, 1]


def test_who_is_always_busy_is_given_up() -> None:
    net = StreamNet(2)
    ask(net, [2])
    transfers = net.nodes[1].gossip.transfers
    for _ in range(300):
        net.time.run(net.now + 0.2)
        transfers.tick(net.now)
        for outgoing in net.nodes[1].outbox:
            assert isinstance(outgoing.message, Wanted)
            refused = Refused(outgoing.message.what, outgoing.message.request, busy=True)
            transfers.transfer.receive(peer_of(2), refused, net.now)
        net.nodes[1].outbox.clear()
    assert taken(net) == [Taken(ENGINE, 5, None)]


def test_bad_chunks_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net = StreamNet(2)
    net.nodes[2].holds(ENGINE, filled(64))
    net.nodes[1].gossip.transfers.entries_max = 10
    ask(net, [2])
    net.run(1.0)
    assert taken(net) == [Taken(ENGINE, 5, None)]
    assert net.nodes[1].gossip.transfers.transfer.counters.parts_bad == 1


def test_no_token_id_travels() -> None:
    """What is on the wire, before it is sealed, for engines whose blocks end inside ours, too."""
    marks = [0x5A000001 + 0x10301 * number for number in range(96)]
    for width in (1, 16, 24):
        net, held = StreamNet(2), residency()
        held.apply(stored(list(range(1, 96 // width + 1)), marks, width=width, salt="of-somebody"))
        net.nodes[2].holds(ENGINE, held)
        ask(net, [2])
        net.run(0.5)
        assert taken(net)[0].snapshot is not None
        wire = b"".join(net.wire)
        assert len(wire) > 20 * 96 // width
        assert b"of-somebody" not in wire
        assert not [mark for mark in marks if mark.to_bytes(4, "little") in wire or mark.to_bytes(4, "big") in wire]


def test_a_large_engine_is_copied_in_seconds_and_its_events_wait_less() -> None:
    """200,000 blocks are 33 times as many."""
    net, held = StreamNet(2), filled(24 * CHUNK_BLOCKS)
    net.nodes[2].holds(ENGINE, held)
    ask(net, [2])
    frozen = ticks = 0
    while not net.nodes[1].gossip.transfers.taken:
        net.run(0.001)
        frozen += bool(held.frozen)
        ticks += 1
    assert frozen <= 24 // snapshot_transfer.WRITTEN_EACH + 2
    assert ticks < 60
    assert net.nodes[2].gossip.transfers.transfer.counters.sent_bytes / (24 * CHUNK_BLOCKS) < 26
