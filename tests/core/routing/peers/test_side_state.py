"""Side state, which no row of a table has: whoever missed updates of it asks a peer for all."""

from __future__ import annotations

from random import Random

from ranvier_py.core.routing.peers.pull import ALONE_S, PROGRESS_S, RESUMES_MAX
from ranvier_py.core.routing.peers.route_messages import Busy, Entry, RowsWanted, SideState
from ranvier_py.core.routing.peers.route_sync import PIECE_MAX
from ranvier_py.core.routing.peers.route_updates import decode_process
from ranvier_py.core.routing.peers.side_state import FAILED_MAX_S, FAILED_S, SIDE_CHUNKS_MAX
from ranvier_py.core.routing.peers.snapshot_source import TRANSFERS_MAX
from tests.core.routing.peers.route_net import GossipNode, Net, sent, turn, wanted

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

    def drop(source: int, _: int, message: object) -> bool:
        """All answers of the peer that is asked first."""
        if isinstance(message, SideState) and not deaf:
            deaf.append(source)
        return isinstance(message, SideState) and source in deaf

    net.drop = drop
    newcomer = net.add(4)
    took_s = net.run_until(lambda: known(newcomer, digests, net.now) == 3, limit_s=9 * TRY_S)
    assert took_s > TRY_S


def test_a_node_that_gets_no_answer_asks_ever_more_rarely_until_one_comes() -> None:
    net = cluster(2)
    digests = keep(net, 1, 3)
    net.run(1.0)
    net.drop = lambda source, target, message: isinstance(message, SideState)
    newcomer = net.add(3)
    net.run(HOUR_S / 4)
    asked = len(wanted(net, 3, side=True))
    rare_s = FAILED_MAX_S + TRY_S
    assert asked <= 8 + HOUR_S / 4 / FAILED_MAX_S
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
    parts = [message for message in sent(net, SideState, target=3) if isinstance(message, SideState)]
    assert len(parts) > 3
    assert [part.last for part in parts].count(True) == 1
    assert max(size for _, _, _, message, size in net.sent if isinstance(message, SideState)) < 24_000


def test_what_nobody_asked_for_is_not_learned_and_an_answer_has_an_end() -> None:
    net = cluster(2, soon_interval_s=0.5)
    first, second = net.nodes[1], net.nodes[2]
    [digest] = keep(net, 1, 1)
    [update] = first.sync.side_updates(next(first.sync.side_state()), net.now)
    part = SideState(7, 0, False, (Entry(0, update),))
    second.gossip.receive(first.peer, part, net.now)
    assert known(second, [digest], net.now) == 0
    second.gossip.compare_soon(net.now)
    net.drop = lambda source, target, message: isinstance(message, SideState)
    net.run_until(lambda: bool(wanted(net, 2, side=True)), limit_s=5.0)
    [question, *_] = wanted(net, 2, side=True)
    before = second.sync.counters.entries_received["owned"]
    for chunk in range(2 * SIDE_CHUNKS_MAX):
        second.gossip.receive(first.peer, part._replace(request=question.request, chunk=chunk), net.now)
    assert second.sync.counters.entries_received["owned"] == before + SIDE_CHUNKS_MAX


def test_a_node_answers_few_peers_at_a_time_and_those_that_are_gone_not_at_all() -> None:
    net = cluster(TRANSFERS_MAX + 3)
    keep(net, 1, 10)
    net.run(1.0)
    net.sent.clear()
    for session in range(2, TRANSFERS_MAX + 4):
        net.nodes[1].gossip.receive(net.nodes[session].peer, RowsWanted(session, 0, b"", side=True), net.now)
    net.kill(2)
    net.run(1.0)
    answered = [target for _, source, target, message, _ in net.sent if isinstance(message, SideState) and source == 1]
    assert answered == list(range(3, TRANSFERS_MAX + 2))
    assert len(sent(net, Busy, 1)) == 2, "they ask another peer"


def test_an_answer_is_encoded_piece_by_piece_as_it_leaves_with_the_ages_of_that_moment() -> None:
    """Much of it would hold up the event loop, and what waits for room would get younger on its way."""
    net = cluster(2)
    keep(net, 1, PIECE_MAX + 1)
    node, peer, sent_before = net.nodes[1], net.nodes[2], net.nodes[1].sync.counters.entries_sent["owned"]
    node.outbox.clear()
    node.gossip.receive(peer.peer, RowsWanted(7, 0, b"", side=True), net.now)
    assert node.sync.counters.entries_sent["owned"] == sent_before
    for late_s in (2, 4):
        node.gossip.tick(net.now + late_s)
    messages = [each.message for each in node.outbox if isinstance(each.message, SideState)]
    assert [message.last for message in messages] == [False, True]
    for message, late_s, count in zip(messages, (2, 4), (PIECE_MAX, 1), strict=True):
        ages = [age for _, update in message.entries for age in decode_process(update).columns[1]]
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


def test_lost_chunks_of_side_state_are_sent_again() -> None:
    net = cluster(2)
    digests = list[int]()
    for first in range(0, 6000, 1000):
        digests += keep(net, 1, 1000, first)
        net.run(1.0)
    lost = {1, 2, 5}

    def drop(_source: int, _target: int, message: object) -> bool:
        is_lost = isinstance(message, SideState) and message.chunk in lost
        lost.discard(message.chunk if isinstance(message, SideState) else -1)
        return is_lost

    net.drop = drop
    newcomer = net.add(3)
    net.run_until(lambda: known(newcomer, digests, net.now) == 6000, limit_s=TRY_S)
    assert len(wanted(net, 3, side=True)) == 1
