"""Side state, which no row of a table has: whoever missed updates of it asks a peer for all."""

from __future__ import annotations

from random import Random

from ranvier_py.core.mesh.transfer import PROGRESS_S, RESUMES_MAX, TransferPart, Wanted
from ranvier_py.core.routing.peers.pull import ALONE_S
from ranvier_py.core.routing.peers.route_messages import SIDE_STATE, TABLES
from ranvier_py.core.routing.peers.route_sync import PIECE_MAX
from ranvier_py.core.routing.peers.route_updates import decode_process, unpack_entries
from ranvier_py.core.routing.peers.side_state import FAILED_MAX_S, FAILED_S
from tests.core.routing.peers.route_net import GossipNode, Net, is_part, parts, turn, wanted

HOUR_S = 3600.0
TRY_S = PROGRESS_S * (RESUMES_MAX + 1) + FAILED_S  # at a peer that does not answer


def keep(net: Net, session: int, count: int, first: int = 0) -> list[int]:
    """Responses that this node learns of now, by their digests."""
    node, engine = net.nodes[session], net.nodes[session].engine()
    digests = [node.owners.response_key(f"{session}/{number}", b"") for number in range(first, first + count)]
    for digest in digests:
        node.owners.learn(digest, engine.id, engine.generation, net.now)
    for update, at in node.updates(net.now):
        node.gossip.announce(update, at)
    return digests


def known(node: GossipNode, digests: list[int], now: float) -> int:
    """How many of these it would send to the engine that keeps them."""
    found = [node.owners.find(digest, now) for digest in digests]
    return sum(owner is not None and owner.backend == node.engine().id for owner in found)


def cluster(count: int, **settings: float) -> Net:
    net = Net(count, **settings)
    net.run(ALONE_S + 5.0)
    assert all(node.gossip.synced for node in net.nodes.values())
    net.sent.clear()
    return net


def test_a_newcomer_learns_what_is_older_than_any_route_and_what_is_fresh() -> None:
    net = cluster(2)
    old = keep(net, 1, 1)
    net.run(2 * HOUR_S)
    fresh = keep(net, 1, 10, first=1)
    net.run(1.0)
    newcomer = net.add(3)
    net.run_until(lambda: known(newcomer, [*old, *fresh], net.now) == 11, limit_s=5.0)
    assert newcomer.owners.find(old[0], net.now + 22 * HOUR_S) is None, "an entry has its own age"
    assert newcomer.owners.find(fresh[0], net.now + 22 * HOUR_S) is not None


def test_a_node_whose_missed_updates_are_in_no_log_any_more_asks_for_what_tables_do_not_have() -> None:
    net = cluster(3, log_entries_max=50)
    net.cut([3], [1, 2])  # nobody notices: streams stall for a moment
    digests = keep(net, 1, 5)
    rng = Random(1)
    for _ in range(100):
        net.learn(1, turn(rng))
    net.run(1.0)
    net.heal()
    net.run_until(lambda: known(net.nodes[3], digests, net.now) == 5, limit_s=30.0)
    assert net.nodes[3].gossip.counters.repairs == 1
    net.run_until(net.equal, limit_s=5.0)


def test_an_answer_that_is_lost_is_asked_of_another_peer() -> None:
    net = cluster(3)
    digests = keep(net, 1, 3)
    net.run(1.0)
    deaf: list[int] = []

    def drop(source: int, target: int, message: object) -> bool:
        """All answers of the peer that is asked first."""
        if is_part(net, target, message, side=True) and not deaf:
            deaf.append(source)
        return is_part(net, target, message, side=True) and source in deaf

    net.drop = drop
    newcomer = net.add(4)
    took_s = net.run_until(lambda: known(newcomer, digests, net.now) == 3, limit_s=9 * TRY_S)
    assert took_s > TRY_S


def test_a_node_that_gets_no_answer_asks_ever_more_rarely_until_one_comes() -> None:
    net = cluster(2)
    digests = keep(net, 1, 3)
    net.run(1.0)
    net.drop = lambda source, target, message: is_part(net, target, message, side=True)
    newcomer = net.add(3)
    net.run(HOUR_S / 9)
    asked = len(wanted(net, 3, side=True))
    rare_s = FAILED_MAX_S + TRY_S
    assert asked <= 8 + HOUR_S / 9 / FAILED_MAX_S
    net.run(4 * rare_s)
    assert 3 <= len(wanted(net, 3, side=True)) - asked <= 5
    net.drop = lambda *_: False
    net.run_until(lambda: known(newcomer, digests, net.now) == 3, limit_s=rare_s)


def test_much_of_it_comes_in_pieces_within_the_budget_for_rows() -> None:
    net = cluster(2)
    digests = list[int]()
    for first in range(0, 12_000, 1000):
        digests += keep(net, 1, 1000, first)
        net.run(1.0)  # what was learned reaches the peer within its budget
    newcomer = net.add(3)
    net.run_until(lambda: known(newcomer, digests, net.now) == 12_000, limit_s=10.0)
    found = parts(net, target=3, side=True)
    assert len(found) > 3
    assert [part.last for *_, part, _ in found].count(True) == 1
    assert max(size for *_, size in found) < 24_000


def test_an_answer_is_encoded_piece_by_piece_as_it_leaves_with_the_ages_of_that_moment() -> None:
    """Much of it would hold up the event loop, and what waits for room would get younger on its way."""
    net = cluster(2)
    keep(net, 1, PIECE_MAX + 1)
    node, peer, sent_before = net.nodes[1], net.nodes[2], net.nodes[1].sync.counters.entries_sent["owned"]
    node.outbox.clear()
    node.gossip.transfer.receive(peer.peer, Wanted(TABLES.what, 7, 0, SIDE_STATE), net.now)
    assert node.sync.counters.entries_sent["owned"] == sent_before
    for late_s in (2, 4):
        node.gossip.transfer.tick(net.now + late_s)
    messages = [each.message for each in node.outbox if isinstance(each.message, TransferPart)]
    assert [message.last for message in messages] == [False, True]
    for message, late_s, count in zip(messages, (2, 4), (PIECE_MAX, 1), strict=True):
        ages = [age for _, update in unpack_entries(message.data) for age in decode_process(update).columns[1]]
        assert ages == [late_s] * count


def test_a_newcomer_has_owners_in_the_order_in_which_its_peer_drops_them() -> None:
    net, digests = cluster(2), list[int]()
    for first in range(3):
        digests += keep(net, 1, 1, first)
        net.run(2.0)
    newcomer = net.add(3)
    net.run_until(lambda: known(newcomer, digests, net.now) == 3, limit_s=5.0)
    for node in (net.nodes[1], newcomer):
        assert [owner.digest for owner in node.owners.latest()] == digests
