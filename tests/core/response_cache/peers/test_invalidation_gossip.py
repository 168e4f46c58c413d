"""What is void on one node is void on all, and comes back from none: cut off, restarted, or at work meanwhile."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from ranvier_py.core.response_cache import invalidations
from ranvier_py.core.response_cache.invalidations import EVERYTHING, VoidScope
from ranvier_py.core.response_cache.peers.invalidation_gossip import Voided, VoidedAnswers
from tests.builders.machine_net import peer_of
from tests.core.response_cache.peers.answer_net import TENANT, AnswerNet, AnswerNode, key_of


def void(net: AnswerNet, session: int, scope: VoidScope = EVERYTHING, older_s: float = 0.0) -> None:
    net.nodes[session].answers.invalidations.give(scope, net.now - older_s, net.now)


def holders(net: AnswerNet, number: int) -> list[int]:
    return [session for session, node in net.nodes.items() if key_of(number) in node.held]


def spread(net: AnswerNet, number: int = 1) -> None:
    """An answer that all nodes have."""
    for node in net.nodes.values():
        node.keep(number, net.now)
    net.run(0.2)


@pytest.mark.parametrize("scope", [EVERYTHING, VoidScope("m"), VoidScope("", TENANT), VoidScope("m", TENANT)])
def test_what_is_void_on_one_node_is_void_on_all_at_once(scope: VoidScope) -> None:
    net = AnswerNet(4)
    void(net, 2, scope)
    at = net.now
    net.run(0.02)
    for node in net.nodes.values():
        known = node.answers.invalidations.known
        assert known.void("m", TENANT, at)
        assert not known.void("m", TENANT, net.now)
        assert known.void("other", b"o" * 16, at) == (scope == EVERYTHING)


def test_a_number_at_its_end_keeps_no_invalidation_from_the_others() -> None:
    net = AnswerNet(2)
    last = VoidedAnswers(2**64 - 1, 0, "m", b"", b"")
    net.nodes[1].answers.receive(peer_of(2), Voided((last, last._replace(model="other", number=5))), net.now)
    assert net.nodes[1].answers.invalidations.known.void("other", TENANT, net.now)
    net.run(1.0)
    void(net, 1, VoidScope("m"))
    at = net.now
    net.run(0.1)
    assert net.nodes[2].answers.invalidations.known.void("m", TENANT, at)


def test_younger_answers_than_was_meant_stay() -> None:
    net = AnswerNet(3)
    spread(net, 1)
    net.run(10.0)
    spread(net, 2)
    void(net, 1, older_s=5.0)
    net.run(0.1)
    assert (holders(net, 1), holders(net, 2)) == ([], [1, 2, 3])


def test_a_node_that_was_cut_off_brings_nothing_back() -> None:
    net = AnswerNet(4)
    spread(net)
    net.part(4)
    void(net, 1)
    net.run(1.0)
    assert holders(net, 1) == [4]
    net.heal()
    net.run(0.1)
    assert holders(net, 1) == []


def test_nodes_that_share_no_answers_learn_by_digests_what_they_missed() -> None:
    """One that knew of no invalidation at all said nothing, so its peers never saw that it lacked theirs."""
    net = AnswerNet(2)
    for node in net.nodes.values():
        node.answers.settings = replace(node.answers.settings, shares=False)
    net.cut([1], [2])  # nobody notices
    void(net, 1)
    at = net.now
    net.run(1.0)
    net.network.links.heal()
    net.run(5.0)
    assert net.nodes[2].answers.invalidations.known.void("m", TENANT, at)
    sent = len(net.sent)
    net.run(20.0)
    assert len(net.sent) - sent < 25, "digests alone"


def test_a_restarted_node_learns_what_is_void_before_it_takes_anything() -> None:
    net = AnswerNet(3)
    spread(net)
    net.part(3)
    void(net, 1)
    net.run(0.5)
    net.kill(2)
    node = net.start(2)
    net.run(0.1)
    net.heal()
    asked_at = net.now - 0.7
    assert node.answers.invalidations.known.void("m", TENANT, asked_at)
    net.run(0.1)
    assert holders(net, 1) == []


def test_what_was_asked_for_before_it_was_made_void_is_kept_nowhere() -> None:
    net = AnswerNet(3)
    asked_at = net.now
    net.run(0.1)
    void(net, 1)
    net.run(0.1)
    for node in net.nodes.values():
        node.keep(1, asked_at)
        node.keep(2, net.now)
    assert holders(net, 1) == []
    assert holders(net, 2) == [1, 2, 3]


@pytest.mark.parametrize("seed", [*range(5), 8, 13])
def test_all_nodes_agree_on_what_is_void_however_it_was_given_and_lost(seed: int) -> None:
    net, rng = AnswerNet(5, seed), Random(seed)
    net.link(loss=0.3)
    given: list[tuple[VoidScope, float]] = []
    for _ in range(30):
        scope = rng.choice([EVERYTHING, VoidScope("a"), VoidScope("b"), VoidScope("", TENANT), VoidScope("a", TENANT)])
        if rng.random() < 0.2:
            net.part(*rng.sample(range(1, 6), 2))
        elif rng.random() < 0.3:
            net.heal()
        void(net, rng.randint(1, 5), scope)
        given.append((scope, net.now))
        net.run(rng.random())
    net.link(loss=0.0)
    net.heal()
    net.run(8.0)
    for node in net.nodes.values():
        known = node.answers.invalidations.known
        assert known.digest == net.nodes[1].answers.invalidations.known.digest
        for scope, before in given:
            assert known.void(scope.model or "x", scope.tenant or b"x", before - 1.0)
    net.run(70.0)
    assert [len(node.answers.invalidations.known) for node in net.nodes.values()] == [0] * 5


def test_a_node_that_merged_all_into_one_is_sent_ever_more_seldom_what_it_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invalidations, "MARKS_MAX", 50)
    net = AnswerNet(2)
    for count in (45, 10):  # ten at once, of which the peer gets the merged one alone
        for number in range(count):
            void(net, 1, VoidScope(f"{count}/{number}"))
        net.run(0.5)
    known = {session: len(node.answers.invalidations.known) for session, node in net.nodes.items()}
    assert known == {1: 1, 2: 46}
    net.run(40.0)
    lists = [to for *_, to, message, _ in net.sent if isinstance(message, Voided) and len(message.invalidations) > 40]
    assert 1 < lists.count(1) < 7


def test_with_an_admin_key_only_what_it_signed_is_followed() -> None:
    net = AnswerNet(2, admin_key=b"k" * 32)
    net.put(3, AnswerNode(3, net.now, admin_key=b"other"))
    net.meet()
    spread(net)
    void(net, 3)
    net.run(0.1)
    assert holders(net, 1) == [1, 2]
    assert net.nodes[1].answers.counters.invalidations_refused >= 1
    void(net, 1)
    net.run(0.1)
    assert holders(net, 1) == []
    forged = VoidedAnswers(5, 0, "m", b"", bytes(32))
    net.nodes[1].answers.invalidations.receive(peer_of(2), Voided((forged,)), net.now)
    assert not net.nodes[1].answers.invalidations.known.void("m", b"", net.now)


def test_a_node_that_was_asleep_makes_more_void_and_never_less() -> None:
    net = AnswerNet(2)
    spread(net)
    net.asleep.append(2)
    void(net, 1)
    at = net.now
    net.run(3.0)
    net.asleep.clear()
    net.run(0.1)
    assert holders(net, 1) == []
    assert net.nodes[2].answers.invalidations.known.void("m", TENANT, at)
    net.run(8.0)
    digests = [node.answers.invalidations.known.digest for node in net.nodes.values()]
    assert digests[0] == digests[1]
