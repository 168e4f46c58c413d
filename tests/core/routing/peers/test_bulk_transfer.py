"""Whole tables between nodes: joining, what rows may contain, and all that can go wrong on the way."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ranvier_py.core.mesh.budget import MESSAGE_BYTES
from ranvier_py.core.mesh.mesh_values import FRAME_BYTES_MAX
from ranvier_py.core.mesh.transfer import PROGRESS_S, RESUMES_MAX, Refused, TransferPart, Wanted
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers.pull import ALONE_S, JOIN_LIMIT_S, NEW_UPDATES_MAX, Use
from ranvier_py.core.routing.peers.route_messages import TABLES
from ranvier_py.core.routing.peers.table_copy import MARGIN_S
from ranvier_py.core.routing.route_table.scan import BUCKETS, CHUNK_CLAIMS, ROW_CLAIMS_MAX
from tests.builders.machine_net import peer_of
from tests.core.routing.peers.route_net import URLS, Net, claims, is_part, parts, sent, turn, wanted


def filled(count: int, turns: int, seed: int = 1, log_entries_max: int = 10, **settings: float) -> Net:
    """Nodes of which the first has served turns before, so many that its log no longer has all."""
    net = Net(0, seed, **settings)
    rng = Random(seed)
    net.add(1, log_entries_max=log_entries_max)
    net.run(ALONE_S + 0.1)
    assert net.nodes[1].gossip.synced
    for _ in range(turns):
        net.learn(1, turn(rng), rng.randrange(4))
    net.run(0.1)
    for session in range(2, count + 1):
        net.add(session, meet=False)
    net.meet()
    return net


# --- joining ----------------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_the_whole_table_from_one_peer() -> None:
    net = filled(2, 3000)
    took_s = net.run_until(lambda: net.nodes[2].gossip.synced)
    assert took_s < 0.2
    assert net.equal()
    assert claims(net) == 6000
    assert net.nodes[2].gossip.counters.joins == 1
    net.run(5.0)
    assert sent(net, r.Reset) == sent(net, r.TotalSum) == [], "the numbers came with the rows"
    assert sent(net, r.RouteUpdates) == []


def test_route_updates_go_on_where_the_table_ended() -> None:
    net = filled(3, 3000, log_entries_max=200)
    rng = Random(5)
    for _ in range(100):
        net.learn(1, turn(rng), 1)
        net.run(0.003)
    net.run_until(net.equal, limit_s=3.0)
    assert all(node.gossip.synced for node in net.nodes.values())
    assert sent(net, r.TotalSum) == []
    assert (
        sum(len(message.entries) for message in sent(net, r.RouteUpdates) if isinstance(message, r.RouteUpdates)) <= 250
    )


def test_rows_hang_where_they_hung_at_the_source() -> None:
    net = filled(1, 0)
    rng = Random(6)
    for _ in range(200):
        net.learn(1, turn(rng, chain=8), 1)
    net.add(2)
    net.run(1.0)
    views = [node.table.subtree(0, limit=10_000) for node in net.nodes.values()]
    places = [sorted((view.level, view.token_fingerprint, view.parent) for view in each) for each in views]
    assert places[0] == places[1]
    assert max(level for level, _, _ in places[1]) == 7


def test_a_lone_node_is_ready_after_a_while() -> None:
    net = Net(1)
    net.run(ALONE_S - 0.1)
    assert not net.nodes[1].gossip.synced
    net.run(0.2)
    assert net.nodes[1].gossip.synced


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_new_cluster_is_ready_at_once(count: int) -> None:
    """Everybody refuses everybody, and reports that it has nothing: there is nothing to wait for."""
    net = Net(count)
    net.run_until(lambda: all(node.gossip.synced for node in net.nodes.values()), limit_s=0.1)


def test_nodes_that_restart_together_find_the_one_that_did_not() -> None:
    net = filled(6, 3000)
    assert NEW_UPDATES_MAX > 3000
    net.run_until(net.equal, limit_s=3.0)
    full = filled(4, NEW_UPDATES_MAX + 500)
    full.run_until(lambda: all(node.gossip.synced for node in full.nodes.values()), limit_s=3.0)
    assert full.equal(), "nobody was ready without the table of the first"


def test_a_busy_peer_is_left_for_another() -> None:
    net = filled(2, 3000)
    net.run_until(lambda: net.nodes[2].gossip.synced)
    net.run(1.0)
    for session in range(3, 9):
        net.add(session, meet=False)
    net.meet()
    net.run_until(lambda: all(node.gossip.synced for node in net.nodes.values()), limit_s=3.0)
    net.run_until(net.equal, limit_s=3.0)
    assert sum(node.gossip.transfer.counters.refused for node in net.nodes.values()) > 0
    assert len({source for source, *_ in parts(net)}) > 1


@pytest.mark.slow
def test_twenty_newcomers_do_not_hold_up_the_one_that_has_the_table() -> None:
    """T-20-joiners-one-snapshot source (near#2512: five syncing peers stalled the snapshot source)."""
    net = filled(21, NEW_UPDATES_MAX + 200, mesh_nodes_max=32, bulk_bytes_per_s=600_000)
    most = 0
    snapshot_source = net.nodes[1].gossip
    while not all(node.gossip.synced for node in net.nodes.values()):
        net.run(0.005)
        most = max(most, snapshot_source.transfer.running())
        assert net.now < 1000.0 + JOIN_LIMIT_S
    assert most == TABLES.given_max
    assert net.equal()
    assert {source for source, *_ in parts(net)} > {1}, "who has joined helps"


def test_a_peer_that_falls_silent_is_left_for_another() -> None:
    net = filled(2, 3000)
    net.run_until(net.equal)
    net.run(1.0)
    net.sent.clear()
    silent: list[int] = []

    def drop(source: int, target: int, message: Message) -> bool:
        """Whoever is asked first does not answer."""
        if is_part(net, target, message) and not silent:
            silent.append(source)
        return isinstance(message, TransferPart | Refused) and source in silent

    net.drop = drop
    net.add(3)
    took_s = net.run_until(lambda: net.nodes[3].gossip.synced, limit_s=10.0)
    assert PROGRESS_S * (RESUMES_MAX + 1) <= took_s <= PROGRESS_S * (RESUMES_MAX + 1) + 1.0
    assert len(wanted(net, 3)) == 2
    assert net.equal()


def test_a_source_that_dies_is_left_for_another() -> None:
    net = filled(2, 3000)
    net.run_until(net.equal)
    net.run(1.0)
    net.add(3)
    net.run_until(lambda: claims(net, target=3) > 0, step_s=0.0005)
    net.kill(parts(net, target=3)[0][0])
    net.run_until(lambda: net.nodes[3].gossip.synced, limit_s=1.0)
    net.run_until(net.equal, limit_s=3.0)


def test_who_is_refused_by_all_for_long_goes_on_without() -> None:
    net = filled(2, NEW_UPDATES_MAX + 10)
    net.drop = lambda source, target, message: isinstance(message, TransferPart | Wanted)
    took_s = net.run_until(lambda: net.nodes[2].gossip.synced, limit_s=2 * JOIN_LIMIT_S, step_s=0.2)
    assert took_s == pytest.approx(JOIN_LIMIT_S, abs=5.0)
    net.drop = lambda *_: False
    net.run_until(net.equal, limit_s=5.0)
    assert net.nodes[2].gossip.counters.repairs == 1, "repair brought what joining did not"


# --- what rows may contain --------------------------------------------------------------------------------------------


def evidence(net: Net, session: int, fingerprint: int) -> float:
    """When a node believes that its first holder last served this prefix."""
    table = net.nodes[session].table
    (view,) = table.subtree(fingerprint, limit=1)
    claim = table.claim(fingerprint, view.holders[0].backend)
    assert claim is not None
    return claim.evidence


def test_tables_compared_for_ever_make_nothing_younger() -> None:
    """S5: over slow links, each copy of a copy would otherwise live longer than the last, without end."""
    net = Net(2, ttl_s=600.0)
    chain = turn(Random(2))
    net.run(1.0)
    learned = net.now
    net.learn(1, chain, 0)
    net.run(1.0)
    net.link(delay_s=0.7)
    for _ in range(12):
        for session, other in ((1, 2), (2, 1)):
            gossip = net.nodes[session].gossip
            buckets = np.array([name >> 52 for name in chain[0][1:]], "<u2").tobytes()
            gossip._pull._ask(gossip._pull._begin(Use.REPAIR, peer_of(other)), buckets, net.now)
            net.run(4.0)
            assert gossip.counters.repairs > 0
    for session in (1, 2):
        for _, token, _ in chain:
            assert evidence(net, session, token) <= learned


def test_rows_about_to_expire_are_not_sent() -> None:
    net = filled(1, 10, ttl_s=30.0)
    net.run(30.0 - MARGIN_S + 1.0)
    net.learn(1, turn(Random(77)), 0)
    net.add(2)
    net.run(1.0)
    assert claims(net) == 2


def test_rows_of_unknown_backends_are_left_out() -> None:
    net = filled(1, 100)
    node = net.add(2, backends=2)
    net.run(1.0)
    assert node.gossip.synced
    holders = {holder.backend for view in node.table.subtree(0, limit=1000) for holder in view.holders}
    assert len(holders) == 2
    assert node.sync.copy.unknown_backends > 0


def test_rows_of_an_earlier_generation_are_left_out_and_a_later_one_is_adopted() -> None:
    """T-epoch-bump (bitcask#82): what a restart voided does not come back with an old table."""
    net = Net(0)
    source = net.add(1)
    source.restart(net.now, URLS[1])
    net.run(ALONE_S + 0.1)
    for backend in (0, 1):
        net.learn(1, turn(net.rng), backend)
    earlier, later = net.add(2, meet=False), net.add(3, meet=False)
    earlier.restart(net.now, URLS[0])
    net.meet()
    net.run(1.0)
    assert {holder.backend for view in earlier.table.subtree(0) for holder in view.holders} == {earlier.id(1)}
    assert later.facts.of(later.key(URLS[1])).generation == 2
    assert {holder.backend for view in later.table.subtree(0) for holder in view.holders} == {later.id(0), later.id(1)}


def test_a_large_table_is_there_within_its_time() -> None:
    """L7: half a second for 20,000 routes would be a second for 500,000 with the network as it is."""
    net = filled(2, 10_000)
    assert net.run_until(lambda: net.nodes[2].gossip.synced, step_s=0.001) < 0.1
    assert len(net.nodes[2].table) == 20_000
    assert BUCKETS == 4096


def test_vectors_of_a_joining_node_s_source_count_only_before_the_first_chunk() -> None:
    """A later one names route updates whose rows may have been behind the reader already."""
    net = filled(2, 3000)
    net.link(delay_s=0.02)
    net.run_until(lambda: claims(net) > 0, step_s=0.001)
    newcomer = net.nodes[2].gossip
    newcomer.receive(peer_of(1), r.Vector(((1, 3000), (99, 7)), reply=False), net.now)
    newcomer.receive(peer_of(1), r.Vector(((1, 9_000_000),), reply=False), net.now)
    net.run_until(lambda: newcomer.synced)
    assert newcomer.vector()[1] == 3000


def rows_of(count: int, backends: int = 2) -> r.TableRows:
    """A part of that many claims."""
    word = b"\x01\x02\x03\x04\x05\x06\x07\x08" * count
    indices = b"".join((claim % backends).to_bytes(2, "little") for claim in range(count))
    held = tuple((2**64 - 1 - index, 2**32 - 1) for index in range(backends))
    return r.TableRows(held, word, word[: 4 * count], word, word, indices, word[: 2 * count])


@pytest.mark.parametrize("count", [0, 3, CHUNK_CLAIMS + ROW_CLAIMS_MAX])
def test_the_largest_part_fits_a_frame_and_is_read_as_it_was_written(count: int) -> None:
    data = r.pack_rows(rows_of(count, r.BACKENDS_MAX))
    assert len(data) + MESSAGE_BYTES <= FRAME_BYTES_MAX
    assert r.unpack_rows(data) == rows_of(count, r.BACKENDS_MAX)


SPOILT: dict[str, dict[str, object]] = {
    "a claim of a backend that is not listed": {"backend": b"\x02\x00" * 3},
    "no backends": {"backends": ()},
    **{f"more {name}": {name: bytes(8 * 4)} for name in r.TableRows._fields[1:]},
    **{f"no {name}": {name: b""} for name in r.TableRows._fields[1:]},
}


@pytest.mark.parametrize("changes", SPOILT.values(), ids=SPOILT)
def test_a_part_whose_columns_do_not_fit_together_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadFrame):
        r.unpack_rows(r.pack_rows(rows_of(3)._replace(**changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("subject", [r.BUCKETS.to_bytes(2, "little"), b"\0", bytes(2 * r.BUCKETS + 2)])
def test_buckets_that_are_not_there_are_refused(subject: bytes) -> None:
    """One that does not exist, half a one, and more than there are."""
    net = Net(2)
    net.run(ALONE_S)
    net.take(1, 2, Wanted(r.TABLES.what, 7, 0, subject))
    assert sent(net, Refused, 1)[-1] == Refused(r.TABLES.what, 7, busy=False)
