"""Words about streams reach everybody, in any order, and only their own say counts."""

from __future__ import annotations

import pytest

from ranvier_py.core.gossip.readers import reader_claims as standings
from ranvier_py.core.gossip.readers.reader_claims import REPAIR_INTERVAL_S, SAY_INTERVAL_S
from ranvier_py.core.gossip.wire.messages import ReaderClaim, ReaderClaims
from tests.core.gossip.readers.stream_net import StreamNet, StreamNode


def said(net: StreamNet, member: int, backend: int) -> list[int]:
    return [node.gossip.standings.standing(member, backend) for node in net.nodes.values()]


@pytest.mark.parametrize(("count", "mesh"), [(3, True), (40, True), (40, False)])
def test_what_a_node_says_is_known_to_all_within_seconds(count: int, mesh: bool) -> None:
    net = StreamNet(count, mesh=mesh)
    net.nodes[2].gossip.standings.say(11, 5)
    net.run(SAY_INTERVAL_S * 25)
    assert said(net, 2, 11) == [5] * count


def test_a_lost_word_is_told_again() -> None:
    net = StreamNet(3)
    net.lose = 1
    net.nodes[2].gossip.standings.say(11, 5)
    net.run(1.0)
    assert said(net, 2, 11) == [0, 5, 0]
    net.lose = 0
    net.run(4 * REPAIR_INTERVAL_S)
    assert said(net, 2, 11) == [5, 5, 5]


def test_a_newcomer_is_told_all() -> None:
    net = StreamNet(2)
    net.nodes[1].gossip.standings.say(11, 5)
    net.nodes[2].gossip.standings.say(12, 1)
    net.run(1.0)
    net.nodes[3] = joined = StreamNode(3, net.now)
    net.meet()
    net.run(0.1)
    assert [joined.gossip.standings.standing(1, 11), joined.gossip.standings.standing(2, 12)] == [5, 1]


def test_an_older_word_that_comes_late_changes_nothing() -> None:
    book = StreamNet(2).nodes[1].gossip.standings
    book.receive(ReaderClaims((ReaderClaim(11, 2, 7, 5),)))
    book.receive(ReaderClaims((ReaderClaim(11, 2, 6, 2), ReaderClaim(11, 2, 7, 3))))
    assert book.standing(2, 11) == 5
    assert [stand.clock for stand in book.news] == [7]


def test_nobody_is_told_what_he_says_himself() -> None:
    book = StreamNet(2).nodes[1].gossip.standings
    book.say(11, 2)
    book.receive(ReaderClaims((ReaderClaim(11, 1, 900, 5),)))
    assert book.standing(1, 11) == 2


def test_levels_that_change_all_the_time_are_told_four_times_a_second() -> None:
    net = StreamNet(2)
    for step in range(200):
        net.nodes[1].gossip.standings.say(11, 2 + step % 4)
        net.run(0.01)
    assert net.sent <= 2.0 / SAY_INTERVAL_S + 3


def test_the_words_of_a_member_that_is_gone_go_with_it() -> None:
    net = StreamNet(3)
    net.nodes[2].gossip.standings.say(11, 5)
    net.run(1.0)
    net.die(2)
    assert said(net, 2, 11) == [0, 0]


def test_the_number_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standings, "STANDINGS_KEPT_MAX", 3)
    book = StreamNet(2).nodes[1].gossip.standings
    book.receive(ReaderClaims(tuple(ReaderClaim(backend, 2, 1, 5) for backend in range(1, 6))))
    book.say(99, 5)
    assert (len(book.all()), book.dropped) == (3, 3)


def test_nothing_is_said_of_streams_that_were_never_read() -> None:
    net = StreamNet(2)
    net.nodes[1].gossip.standings.say(11, 0)
    net.run(1.0)
    assert net.sent == 0
