"""Comparing two tables: after a log was trimmed, now and then, and soon after somebody went or came back."""

from __future__ import annotations

from random import Random

import pytest

from ranvier_py.core.mesh.transfer import TransferPart
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.peer.peer_findings import AUDITS_DIFFERING
from ranvier_py.core.routing.peers import route_messages as r
from ranvier_py.core.routing.peers.eager_push import IN_TRANSIT_S
from ranvier_py.core.routing.peers.pull import ALONE_S, AUDIT_BUCKETS_MAX
from ranvier_py.core.routing.peers.route_updates import UpdateRow, encode_rows
from ranvier_py.core.routing.route_table import Trust
from tests.builders.machine_net import peer_of
from tests.core.routing.peers.route_net import Net, claims, is_part, parts, sent, turn, wanted

# --- comparing --------------------------------------------------------------------------------------------------------


def parted(turns: int) -> Net:
    """Two nodes that knew the same and did not reach each other while the first learned more than its log holds."""
    net = Net(0, log_entries_max=50)
    for session in (1, 2):
        net.add(session, meet=session == 2)
    rng = Random(3)
    net.run(1.0)
    for number in range(1500):
        net.learn(1, turn(rng), number % 4)
        if number % 40 == 39:
            net.run(0.06)
    net.run_until(net.equal)
    net.part(1)
    for number in range(turns):
        net.learn(1, turn(rng), number % 4)
    net.sent.clear()
    net.heal()
    return net


def test_an_audit_asks_for_no_vector() -> None:
    """Nothing was adopted that route updates could follow; some 200 bytes among ten nodes, as often as they compare."""
    net = differing(80, audit_interval_s=1e6)
    net.drop = lambda source, target, message: isinstance(message, r.Digest)
    net.nodes[2].gossip.compare_now(net.now)
    net.run_until(net.equal, limit_s=2.0)
    net.run(1.0)
    assert sent(net, r.Vector) == []


def test_after_a_trimmed_log_only_what_differs_is_sent() -> None:
    net = parted(100)
    net.run_until(net.equal, limit_s=3.0)
    assert len(sent(net, r.TotalSum)) == len(sent(net, r.PartSums)) == 2
    (question,) = wanted(net, 2)
    assert 300 <= len(question.subject) // 2 <= 400
    assert claims(net, 1, 2) < 3200 / 3
    assert net.nodes[2].gossip.counters.repairs == 1
    net.sent.clear()
    net.run(5.0)
    assert sent(net, r.TotalSum) == sent(net, r.Reset) == [], "once is enough"


def test_when_nearly_everything_differs_the_whole_table_is_sent() -> None:
    net = parted(2500)
    net.run_until(net.equal, limit_s=3.0)
    assert [question.subject for question in wanted(net, 2)] == [b""]


def test_both_sides_of_a_partition_get_what_the_other_learned() -> None:
    net = parted(100)
    rng = Random(9)
    net.part(1)
    for number in range(100):
        net.learn(2, turn(rng), number % 4)
    net.heal()
    net.run_until(net.equal, limit_s=5.0)
    assert all(1 <= node.gossip.counters.repairs <= 3 for node in net.nodes.values())


def test_equal_tables_end_the_comparison_without_rows() -> None:
    """What was received by another path needs no rows, but the numbers."""
    net = parted(0)
    node = net.nodes[1]
    chain = turn(Random(4))
    for each in net.nodes.values():
        each.learn(chain, net.now, Trust.REMOTE)
    update = encode_rows([UpdateRow((node.key(), 1), 0, *key) for key in chain])
    for _ in range(60):
        node.gossip.announce(update, net.now)
    net.drop = lambda source, target, message: isinstance(message, r.RouteUpdates)
    net.run_until(lambda: net.nodes[2].gossip.counters.repairs == 1, limit_s=3.0)
    assert parts(net) == []
    assert net.nodes[2].gossip.vector()[1] == node.gossip.vector()[1] - 50, "the rest is to be had as route updates"


def test_the_origin_is_asked_before_tables_are_compared() -> None:
    """A node that has just joined has no old route updates: a reset of its means little."""
    net = Net(0)
    rng = Random(3)
    net.add(1)
    net.run(ALONE_S + 0.1)
    net.add(3)
    net.run(1.0)

    def apart(source: int, target: int, message: Message) -> bool:
        return {source, target} == {1, 3} and isinstance(message, r.Digest)

    net.drop = lambda *sent: isinstance(sent[-1], r.RouteUpdates) or apart(*sent)
    for _ in range(5):
        net.learn(1, turn(rng), 0)
    net.run(2 * IN_TRANSIT_S)  # no node takes them for still on their way
    net.cut([2], [3])
    net.add(2)
    net.run_until(lambda: net.nodes[2].gossip.synced)
    net.drop = apart
    net.heal()
    net.run_until(net.equal, limit_s=5.0)
    assert len(sent(net, r.Reset, 2, 3)) >= 1
    assert sent(net, r.TotalSum) == []


@pytest.mark.parametrize("kind", [r.TotalSum, r.PartSums])
def test_sums_never_answer_an_earlier_question(kind: type[Message]) -> None:
    """Else a number would be adopted whose route updates were learned after the sums: a hole that nobody ever sees."""
    net = parted(100)
    asker = net.nodes[2].gossip
    net.drop = lambda source, target, message: isinstance(message, kind) and source == 1
    net.run_until(lambda: len(sent(net, kind, 2)) == 2, limit_s=15.0)
    late, *_ = sent(net, kind, 1)
    asker.receive(peer_of(1), late, net.now)
    assert net.nodes[2].outbox == [], "no rows are asked for"
    net.drop = lambda *_: False
    net.run_until(net.equal, limit_s=15.0)


def test_sums_of_no_groups_are_a_question_like_any() -> None:
    """No node of ours asks it, but whoever has the cluster's key can, and then each tick raised."""
    net = Net(2)
    net.run(1.0)
    net.nodes[2].gossip.receive(peer_of(1), r.PartSums(b"", b"", True, 7), net.now)
    net.run(1.0)
    assert sent(net, r.PartSums, 2) == [r.PartSums(b"", b"", False, 7)]


@pytest.mark.parametrize("log_entries_max", [10, 30, 100])
def test_comparing_while_more_is_learned_leaves_no_hole(log_entries_max: int) -> None:
    """S3: whatever a number covers is in the table, though route updates, resets and sums were all under way at
    once."""
    net = Net(3, log_entries_max=log_entries_max)
    rng = Random(5)
    net.run(1.0)
    net.link(delay_s=0.004)
    receive = net.drop

    def drop(source: int, target: int, message: Message) -> bool:
        return isinstance(message, r.RouteUpdates)

    for number in range(1200):
        if number % 200 == 0:
            net.drop = drop if net.drop is not drop else receive
        net.learn(1 + number % 3, turn(rng), number % 4)
        net.run(0.003)
    net.drop = receive
    net.run_until(net.equal, limit_s=10.0)
    assert sum(node.gossip.counters.repairs for node in net.nodes.values()) > 3


def test_a_reset_that_states_nothing_new_starts_nothing() -> None:
    """T-stale-digest-race: what was repaired meanwhile."""
    net = Net(2)
    net.run(1.0)
    net.learn(1, turn(Random(1)), 0)
    net.run(0.5)
    net.nodes[2].gossip.receive(peer_of(1), r.Reset(1, 1), net.now)
    net.nodes[2].gossip.receive(peer_of(1), r.Reset(2, 9), net.now)
    net.run(0.5)
    assert sent(net, r.TotalSum) == []


def test_comparing_again_and_again_is_limited() -> None:
    """A node that can't keep up must not ask for the whole table twice a second."""
    net = parted(2500)
    rng = Random(8)
    net.run_until(net.equal, limit_s=3.0)
    gossip = net.nodes[1].gossip
    moved = gossip.transfer.counters.sent_bytes + gossip.counters.sent_sums_bytes
    net.drop = lambda source, target, message: isinstance(message, r.RouteUpdates)
    for _ in range(60):
        for _ in range(60):
            net.learn(1, turn(rng), 1)
        net.run(0.1)
    pulls = net.nodes[2].gossip.counters.repairs
    assert 2 <= pulls <= 40
    moved = gossip.transfer.counters.sent_bytes + gossip.counters.sent_sums_bytes - moved
    assert moved < 7 * 4 * 1024 * 1024
    assert net.nodes[2].gossip.counters.resets_deferred >= 0


def test_a_comparison_that_breaks_off_is_tried_again() -> None:
    """T-reset-truncated (chitchat#110): nothing is taken for known before its rows have arrived."""
    net = parted(100)
    net.drop = lambda source, target, message: is_part(net, target, message)
    before = net.nodes[2].gossip.vector()
    net.run_until(lambda: net.nodes[2].gossip.counters.given_up >= 1, limit_s=10.0)
    assert net.nodes[2].gossip.vector() == before
    net.drop = lambda *_: False
    net.run_until(net.equal, limit_s=10.0)


def test_equal_tables_are_seen_to_be_equal_by_a_few_bytes() -> None:
    net = differing(0, audit_interval_s=1e6)
    for asker in (1, 2):
        net.sent.clear()
        before = net.nodes[asker].gossip.counters.audits
        net.nodes[asker].gossip.compare_now(net.now)
        net.run(0.2)
        compared = [(source, size) for _, source, _, message, size in net.sent if isinstance(message, r.TotalSum)]
        assert [source for source, _ in compared] == [asker, 3 - asker]
        assert sum(size for _, size in compared) < 150
        assert sent(net, r.PartSums) == []
        assert net.nodes[asker].gossip.counters.audits == before + 1


@pytest.mark.parametrize("turns", [4, 40, 400, 4000])
def test_sums_are_reported_of_groups_that_differ(turns: int) -> None:
    """One turn that one node lacks, then ten, a hundred, a thousand."""
    net = differing(turns, audit_interval_s=1e6)
    differ = len({fingerprint >> 58 for fingerprint in lacking(net)})
    net.nodes[2].gossip.compare_now(net.now)
    net.run(0.2)
    parts = [message for message in sent(net, r.PartSums) if isinstance(message, r.PartSums)]
    assert [len(part.groups) for part in parts] == [differ, differ]
    assert sum(len(part.sums) for part in parts) == 2 * 512 * differ


def test_a_question_for_which_there_was_no_room_is_asked_later() -> None:
    """Rows of a transfer may have taken all of the budget when the groups are known."""
    net = differing(80, audit_interval_s=1e6)
    bulk = net.nodes[2].gossip._outbox.bulk
    net.nodes[2].gossip.compare_now(net.now)
    bulk.spend(bulk.per_s, net.now)
    net.run(0.5)
    assert sent(net, r.TotalSum) == []
    net.run(1.0)
    assert net.equal()
    net = differing(80, audit_interval_s=1e6)
    bulk = net.nodes[2].gossip._outbox.bulk
    net.nodes[2].gossip.compare_now(net.now)
    net.run_until(lambda: sent(net, r.TotalSum) != [], step_s=0.0005)
    bulk.spend(bulk.per_s, net.now)
    net.run(0.5)
    assert sent(net, r.PartSums) == []
    net.run(1.0)
    assert net.equal()


def test_an_answer_that_states_nothing_of_what_differs_ends_nothing() -> None:
    """Else the numbers of a reset would be adopted without its route updates."""
    net = differing(80, audit_interval_s=1e6)
    gossip = net.nodes[2].gossip
    before = gossip.counters.audits
    net.drop = lambda source, target, message: source == 1
    gossip.compare_now(net.now)
    net.run(0.1)
    (question,) = (message for message in sent(net, r.TotalSum, 2) if isinstance(message, r.TotalSum))
    for wrong in (question, question._replace(reply=False, request=question.request - 1)):
        gossip.receive(peer_of(1), wrong, net.now)
    gossip.receive(peer_of(1), question._replace(reply=False, total=question.total ^ 1), net.now)
    assert gossip.counters.audits == before
    gossip.receive(peer_of(1), question._replace(reply=False), net.now)
    assert gossip.counters.audits == before + 1, "it is equal, and ours"


def test_a_reset_during_an_audit_adopts_no_number_whose_rows_the_audit_left_out() -> None:
    """Nobody would ever ask for those updates again: an audit takes some of the buckets that differ."""
    net = Net(2, log_entries_max=50)
    net.run(1.0)
    rng, second = Random(1), net.nodes[2].gossip
    for _ in range(5):  # those that follow a disturbance leave out nothing
        second.compare_now(net.now)
        net.run(0.2)
    net.drop = lambda source, target, message: isinstance(message, r.Vector | r.Digest | r.RouteUpdates)
    for number in range(600):
        net.learn(1, turn(rng), number % 4)
    net.run(0.1)
    second.compare_now(net.now)
    second.receive(peer_of(1), r.Reset(1, 600), net.now)
    net.run_until(lambda: second.vector().get(1) == 600, limit_s=5.0)
    assert net.equal()
    assert second.counters.repairs == 1


# --- auditing ---------------------------------------------------------------------------------------------------------


def differing(turns: int, seed: int = 1, **intervals: float) -> Net:
    """Two nodes with the same numbers, one of which knows more: whoever sent it died before it sent it to the other."""
    net = Net(2, seed=seed, soon_interval_s=0.05, **intervals)
    net.run(1.0)
    net.sent.clear()
    rng = Random(1)
    for number in range(turns):
        chain = turn(rng)
        for session, node in net.nodes.items():
            if session == 1 or number % 4:
                node.learn(chain, net.now, Trust.REMOTE)
    assert net.equal() is (turns == 0)
    return net


def lacking(net: Net) -> list[int]:
    """The fingerprints of all rows that the second node of `differing` has not."""
    first, second = net.nodes.values()
    views = first.table.subtree(0, limit=len(first.table))
    names = [name for view in views for name in (view.token_fingerprint, *view.text_fingerprints)]
    return [name for name in names if not second.knows(name)]


def test_an_audit_finds_what_no_number_reports() -> None:
    net = differing(80, audit_interval_s=20.0)
    net.run_until(net.equal, limit_s=25.0)
    assert len(sent(net, r.TotalSum)) == len(sent(net, r.PartSums)) == 2
    assert claims(net) < 80
    assert 70 < net.nodes[2].gossip.counters.differing_buckets <= 80
    assert sent(net, r.Reset) == []


def test_an_audit_asks_for_a_part_of_what_differs() -> None:
    net = differing(4000, audit_interval_s=5.0)
    net.run_until(lambda: wanted(net, 2) != [], limit_s=10.0)
    (question,) = wanted(net, 2)
    assert len(question.subject) == 2 * AUDIT_BUCKETS_MAX
    net.run_until(net.equal, limit_s=120.0, step_s=1.0)


QUIET = {"audit_interval_s": 300.0, "quiet_interval_s": 20.0, "far_interval_s": 8.0}


@pytest.mark.parametrize("seed", range(3))
def test_tables_that_stay_far_apart_are_found_within_a_minute_while_it_is_quiet(seed: int) -> None:
    net = differing(4000, seed=seed, **QUIET)
    net.drop = lambda _, __, message: isinstance(message, TransferPart)  # what is asked for never comes
    net.run_until(lambda: net.nodes[2].gossip.counters.audits_differing >= AUDITS_DIFFERING, limit_s=60.0, step_s=0.1)


def test_a_quiet_audit_waits_while_updates_come_and_costs_next_to_nothing_while_none_do() -> None:
    net = Net(8, **{**QUIET, "audit_interval_s": 1e6})
    net.run(120.0)
    question = sum(size for *_, message, size in net.sent if isinstance(message, r.TotalSum))
    assert 0 < question / 8 / 120.0 < 20.0, "bytes a second and node"
    net.sent.clear()
    rng = Random(1)
    for _ in range(600):
        net.learn(1, turn(rng))
        net.run(0.2)
    assert len(sent(net, r.TotalSum)) <= 16, "one question and answer of each node, before it noticed"


@pytest.mark.slow
def test_audits_are_rare_and_cheap() -> None:
    net = Net(5, audit_interval_s=60.0)
    net.run(600.0)
    audits = sum(node.gossip.counters.audits for node in net.nodes.values())
    assert 40 <= audits <= 65
    assert sum(size for *_, size in net.sent) / 5 / 600.0 < 1500
    assert parts(net) == []


@pytest.mark.parametrize("asker", [1, 2])
def test_one_comparison_makes_both_equal(asker: int) -> None:
    """Whoever asks: who is asked compares as well."""
    net = differing(80, audit_interval_s=1e6)
    net.nodes[asker].gossip.compare_now(net.now)
    net.run(1.0)
    assert net.equal()
    assert len(sent(net, r.TotalSum)) == len(sent(net, r.PartSums)) == 2


@pytest.mark.parametrize("count", [2, 3, 5, 10, 16])
@pytest.mark.parametrize("came_back", [False, True])
def test_after_a_disturbance_all_have_what_one_alone_had_within_seconds(count: int, came_back: bool) -> None:
    """Whoever sent it to one node died before it sent it to the others: no log has it, and an audit is far off."""
    net = Net(count + 1, soon_interval_s=0.6, audit_interval_s=300.0)
    net.run(10.0)
    last = net.nodes[count + 1]
    net.kill(count + 1)
    net.run(10.0 if came_back else 0.0)
    for number in range(40):
        node = net.nodes[1 + number % min(2, count)]
        node.learn(turn(Random(number)), net.now, Trust.REMOTE)
    if came_back:
        net.put(count + 1, last)
        net.meet()
    assert net.run_until(net.equal, limit_s=10.0) < 5.0


def test_comparisons_after_a_disturbance_come_to_an_end() -> None:
    net = Net(10, soon_interval_s=0.6, audit_interval_s=1e6)
    net.run(10.0)
    net.kill(10)
    net.sent.clear()
    net.run(10.0)
    assert 9 * 2 * 5 <= len(sent(net, r.TotalSum)) <= 9 * 2 * 7
    net.sent.clear()
    net.run(60.0)
    assert sent(net, r.TotalSum) == []


def test_a_newcomer_compares_and_so_do_the_others_a_few_times() -> None:
    """It may have been behind a cut, with rows that no log holds."""
    net = Net(5, soon_interval_s=0.6)
    net.run(10.0)
    net.sent.clear()
    net.add(6)
    net.run(10.0)
    asked = [source for _, source, _, message, _ in net.sent if isinstance(message, r.TotalSum) and message.reply]
    assert set(asked) == set(net.nodes)
    assert len(asked) <= 6 * len(net.nodes)


def test_rows_of_a_node_that_nobody_met_before_reach_all_who_are_synced() -> None:
    """It restarted behind a cut, got rows there from a node that died before it sent them, and then the cut healed."""
    net = Net(0, soon_interval_s=0.6)
    net.cut(range(1, 6), range(6, 8))
    for session in range(1, 8):
        net.add(session)
    net.run(20.0)
    net.nodes[6].serve(turn(Random(3)), net.now)  # in its table and in no log
    assert all(node.gossip.synced for node in net.nodes.values())
    net.heal()
    net.run_until(net.equal, limit_s=5.0)
