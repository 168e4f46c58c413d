"""Stored answers among peers: who has which, and one of them to whoever lacks it, on any wire."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ranvier_py.core.mesh.transfer import TransferPart, Wanted
from ranvier_py.core.response_cache.peers import answer_keys
from ranvier_py.core.response_cache.peers.answer_fetches import (
    ANSWERS,
    ENCODING_BYTES,
    OPEN_PER_PEER_MAX,
    PASSED_OVER_S,
    SUBJECT,
    TIMEOUTS_MAX,
)
from ranvier_py.core.response_cache.peers.answer_keys import ADVERTISED_MAX, AnswerKeys
from ranvier_py.core.response_cache.peers.answer_values import ANSWER_BYTES_MAX
from tests.builders.machine_net import peer_of
from tests.core.response_cache.peers.answer_net import TTL_S, AnswerNet, AnswerNode, key_of

TIMEOUT_S = 0.02


def test_an_answer_of_one_node_is_had_by_all_others_within_the_deadline() -> None:
    net = AnswerNet(4)
    net.nodes[1].keep(5, net.now)
    net.run(0.2)
    for session in (2, 3, 4):
        found, took_s = net.fetch(session, 5)
        assert found == key_of(5) * 10
        assert took_s <= TIMEOUT_S
    assert net.nodes[1].gave == [key_of(5)] * 3


def test_nobody_is_asked_for_what_nobody_has() -> None:
    net = AnswerNet(2)
    net.nodes[1].keep(5, net.now)
    net.run(0.2)
    net.sent.clear()
    assert net.fetch(2, 6) == (None, 0.0)
    assert not [message for *_, message, _ in net.sent if isinstance(message, Wanted)]


def test_no_key_is_on_the_wire_and_who_lacks_the_secret_finds_nothing() -> None:
    net = AnswerNet(2)
    stranger = AnswerNode(3, net.now, secret=b"another secret")
    net.put(3, stranger)
    net.meet()
    net.nodes[1].keep(5, net.now)
    net.run(0.2)
    wire = b"".join(message.added for *_, message, _ in net.sent if isinstance(message, AnswerKeys))
    assert len(wire) == 8 * len(wire[::8])
    assert key_of(5)[-8:] not in wire
    assert net.knows(3) == 1
    assert stranger.answers.ask(key_of(5), 1e9, net.now) is None


@pytest.mark.parametrize("seed", range(4))
def test_all_nodes_know_what_all_have_however_much_is_lost(seed: int) -> None:
    net = AnswerNet(5, seed)
    net.link(loss=0.3)
    for number in range(300):
        node = net.nodes[number % 5 + 1]
        node.keep(number, net.now)
        if number % 7 == 0:
            node.drop(number)
        if number % 20 == 0:
            net.run(0.05)
    net.link(loss=0.0)
    net.run(6.0)
    held = {session: len(node.held) for session, node in net.nodes.items()}
    for session in net.nodes:
        assert net.knows(session) == sum(held.values()) - held[session]


def test_who_joins_or_was_cut_off_learns_what_the_others_have() -> None:
    net = AnswerNet(3)
    net.part(3)
    for number in range(50):
        net.nodes[1 + number % 3].keep(number, net.now)
    net.run(1.0)
    assert (net.knows(1), net.knows(3)) == (17, 0)
    net.heal()
    net.start(4)
    net.run(1.0)
    assert (net.knows(1), net.knows(3), net.knows(4)) == (33, 34, 50)
    net.kill(1)
    assert net.knows(3) == 17


def test_what_was_dropped_or_has_expired_is_not_asked_for() -> None:
    net = AnswerNet(2)
    for number in (1, 2):
        net.nodes[1].keep(number, net.now)
    net.run(0.2)
    net.nodes[1].drop(1)
    net.run(0.2)
    assert net.fetch(2, 1) == (None, 0.0)
    assert net.knows(2) == 1
    net.run(TTL_S + 3)
    assert (net.knows(2), net.nodes[1].answers.counters.advertised) == (0, 0)


def test_an_answer_older_than_a_client_takes_is_not_fetched() -> None:
    net = AnswerNet(2)
    net.nodes[1].keep(1, net.now)
    net.run(5.0)
    net.sent.clear()
    assert net.fetch(2, 1, age_max_s=4.0) == (None, 0.0)
    assert net.fetch(2, 1, age_max_s=30.0)[0] is not None


def test_a_holder_that_has_it_no_more_is_not_asked_again_but_the_next_one_is() -> None:
    net = AnswerNet(3)
    for session in (1, 2):
        net.nodes[session].keep(1, net.now)
    net.run(0.2)
    for session in (1, 2):
        net.nodes[session].held.clear()  # without a word to the others
    net.nodes[2].held[key_of(1)] = net.now
    found, took_s = net.fetch(3, 1)
    assert found is not None
    assert took_s <= TIMEOUT_S
    asked = [to for *_, to, message, _ in net.sent if isinstance(message, Wanted)]
    net.fetch(3, 1)
    assert [to for *_, to, message, _ in net.sent if isinstance(message, Wanted)] == [*asked, 2]


def test_a_peer_that_hangs_costs_a_deadline_each_for_a_few_and_then_nothing_until_it_is_back() -> None:
    net = AnswerNet(2)
    for number in range(20):
        net.nodes[1].keep(number, net.now)
    net.run(0.2)
    net.asleep.append(1)
    waits = [net.fetch(2, number)[1] for number in range(10)]
    assert all(TIMEOUT_S <= wait <= TIMEOUT_S + 0.005 for wait in waits[:TIMEOUTS_MAX])
    assert waits[TIMEOUTS_MAX:] == [0.0] * (10 - TIMEOUTS_MAX)
    net.run(PASSED_OVER_S)
    assert net.fetch(2, 1)[1] >= TIMEOUT_S  # one looks whether it is back
    assert net.fetch(2, 2) == (None, 0.0)
    net.asleep.clear()
    net.run(3 * PASSED_OVER_S)
    assert net.fetch(2, 3)[0] is not None
    assert net.fetch(2, 4)[0] is not None


def test_while_one_holder_hangs_the_other_gives_within_one_deadline() -> None:
    net = AnswerNet(3)
    for session in (1, 2):
        net.nodes[session].keep(1, net.now)
    net.run(0.2)
    net.asleep.append(1)
    for _ in range(2):
        found, took_s = net.fetch(3, 1)
        assert found is not None
        assert took_s <= TIMEOUT_S


def test_a_member_that_is_gone_is_not_asked_in_place_of_one_that_hangs() -> None:
    net = AnswerNet(3)
    for session in (1, 2):
        net.nodes[session].keep(1, net.now)
    net.run(0.2)
    request = net.nodes[3].answers.ask(key_of(1), 1e9, net.now)
    net.run(0.002)
    [asked] = [to for *_, to, message, _ in net.sent if isinstance(message, Wanted)]
    net.asleep.append(asked)
    net.kill(3 - asked)
    net.run(TIMEOUT_S)
    assert request in net.nodes[3].results
    assert [to for *_, to, message, _ in net.sent if isinstance(message, Wanted)] == [asked]


def test_so_many_questions_at_once_are_asked_of_one_peer_and_no_more() -> None:
    net = AnswerNet(2)
    for number in range(OPEN_PER_PEER_MAX + 10):
        net.nodes[1].keep(number, net.now)
    net.run(0.2)
    answers = net.nodes[2].answers
    asked = [answers.ask(key_of(number), 1e9, net.now) for number in range(OPEN_PER_PEER_MAX + 10)]
    assert asked.count(None) == 10
    assert answers.counters.fetches["busy"] == 10
    net.run(0.1)
    assert answers.counters.fetches["found"] == OPEN_PER_PEER_MAX
    assert answers.fetches.transfer.open == 0


def test_large_answers_come_in_parts_and_larger_ones_do_not() -> None:
    net = AnswerNet(2)
    net.nodes[1].keep(1, net.now)
    net.run(0.2)
    net.nodes[1].size = ANSWER_BYTES_MAX // 32
    assert len(net.fetch(2, 1)[0] or b"") == ANSWER_BYTES_MAX
    net.nodes[1].size *= 4
    assert net.fetch(2, 1)[0] is None


def test_garbage_of_a_peer_costs_the_question_it_answers_and_then_the_peer_is_passed_over() -> None:
    net = AnswerNet(2)
    net.nodes[1].keep(1, net.now)
    net.run(0.2)
    answers = net.nodes[2].answers
    for data in (b"garbage", bytes(ANSWER_BYTES_MAX + ENCODING_BYTES + 1), b"garbage"):
        request = answers.ask(key_of(1), 1e9, net.now)
        assert request is not None
        answers.fetches.transfer.receive(peer_of(1), TransferPart(ANSWERS.what, request, 0, True, data), net.now)
        assert request in net.nodes[2].results
    assert answers.counters.fetches["bad"] == 3
    assert answers.ask(key_of(1), 1e9, net.now) is None


def test_a_peer_asks_no_more_than_so_often_a_second_and_a_stranger_not_at_all() -> None:
    net = AnswerNet(2)
    net.nodes[1].keep(1, net.now)
    answers = net.nodes[1].answers
    name = answers.keys.name_of(key_of(1))
    for number in range(3000):
        net.take(1, 2, Wanted(ANSWERS.what, number, 0, SUBJECT.pack(name, 10**6)))
    assert answers.counters.given["found"] == 2000
    assert answers.counters.given["busy"] == 1000
    net.take(1, 9, Wanted(ANSWERS.what, 1, 0, SUBJECT.pack(name, 10**6)))
    assert sum(answers.counters.given.values()) == 3000


def test_keys_wait_while_routes_need_the_room_and_come_later() -> None:
    net = AnswerNet(3)
    net.nodes[1].room = 0
    for number in range(100):
        net.nodes[1].keep(number, net.now)
    net.run(3.0)
    assert net.knows(2) == 0
    assert net.nodes[1].answers.counters.keys_held_back > 0
    net.nodes[1].room = 1 << 20
    net.run(0.5)
    assert (net.knows(2), net.knows(3)) == (100, 100)


def test_keys_take_no_more_than_their_budget_of_any_second() -> None:
    net = AnswerNet(4)
    sizes: list[tuple[float, int]] = []
    for number in range(6000):
        net.nodes[1].keep(number, net.now)
        if number % 30 == 0:
            net.run(0.01)
            new, net.sent = net.sent, []
            sizes += [
                (net.now, 1.25 * len(one.added) + len(one.removed)) for *_, one, _ in new if type(one) is AnswerKeys
            ]
    for at, _ in sizes:
        assert sum(size for when, size in sizes if at <= when < at + 1) <= 66_000


def test_of_more_than_may_be_advertised_the_oldest_go_and_of_too_many_peers_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_keys, "KNOWN_MAX", ADVERTISED_MAX + 10)
    net = AnswerNet(3)
    for number in range(ADVERTISED_MAX + 5):
        net.nodes[1].keep(number, net.now)
    for number in range(20):
        net.nodes[2].keep(10**6 + number, net.now)
    net.run(8.0)
    assert net.nodes[1].answers.counters.advertised == ADVERTISED_MAX
    assert net.nodes[1].answers.counters.keys_dropped == 5
    assert net.knows(3) == ADVERTISED_MAX + 10
    assert net.fetch(3, 100)[0] is not None


def test_numbers_of_messages_that_do_not_follow_each_other_have_the_whole_list_sent() -> None:
    net = AnswerNet(2)
    net.nodes[1].keep(1, net.now)
    net.run(0.1)
    lists = net.nodes[1].answers.counters.key_lists
    net.link(loss=1.0)
    net.nodes[1].keep(2, net.now)
    net.run(0.1)
    net.link(loss=0.0)
    net.nodes[1].keep(3, net.now)
    net.run(0.2)
    assert net.knows(2) == 3
    assert net.nodes[1].answers.counters.key_lists == lists + 1
    versions = [one.version for *_, one, _ in net.sent if isinstance(one, AnswerKeys) and not one.whole]
    assert all(later == before + 1 for before, later in pairwise(versions))
