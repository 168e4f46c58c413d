"""Standing by: a copy that is kept up with what its reader says, within bounds, and handed over once."""

from __future__ import annotations

import pytest

from ranvier_py.core.engine_cache.sources.event_values import CacheCleared
from ranvier_py.core.gossip.readers import standby_copies as module
from ranvier_py.core.gossip.readers.snapshot_transfer import Subject
from ranvier_py.core.gossip.readers.standby_copies import (
    FAILED_INTERVAL_S,
    IDLE_INTERVAL_S,
    INTERVAL_S,
    KEEP_S,
    Following,
)
from tests.core.engine_cache.test_residency import TEXT, removed, stored
from tests.core.engine_cache.test_standby import Read, assert_equal, built
from tests.core.gossip.readers.stream_net import StreamNet

ENGINE, OTHER = Subject(11, 0), Subject(12, 0)


class Pair:
    """Node 2 reads, node 1 stands by."""

    def __init__(self) -> None:
        self.net = StreamNet(2)
        self.read = Read()
        self.net.nodes[2].gossip.transfers.source = lambda _subject, since: self.read.original(since)
        self.following: Following = self.net.nodes[1].gossip.following
        self.following.want({ENGINE: [2]}, 0.0)

    def sent(self) -> int:
        return sum(map(len, self.net.wire))


def many(read: Read, blocks: int = 2048) -> None:
    for start in range(0, blocks, 64):
        read.apply(stored(range(start + 1, start + 65), [start] * 1024))


def test_a_copy_follows_what_its_reader_hears_and_only_changes_travel() -> None:
    pair = Pair()
    many(pair.read)
    pair.net.run(2 * INTERVAL_S)
    assert pair.following.rows == 2048
    whole = pair.sent()
    for number in range(6):
        pair.read.apply(stored([5000 + number], TEXT[16 * number : 16 * number + 16], parent=64), removed(number + 1))
        pair.net.run(INTERVAL_S, step_s=0.02)
    pair.net.run(2 * INTERVAL_S)
    assert pair.sent() - whole < whole / 20
    copy = pair.following.take(ENGINE, pair.net.now)
    assert copy is not None
    assert copy.place == pair.read.place()
    assert_equal(built(copy), pair.read.held)
    assert pair.following.take(ENGINE, pair.net.now) is None, "once"


def test_an_engine_that_says_nothing_is_asked_for_less_often() -> None:
    pair = Pair()
    many(pair.read, 64)
    pair.net.run(20.0, step_s=0.05)
    before = pair.following.counts.asked
    pair.net.run(60.0, step_s=0.1)
    assert pair.following.counts.asked - before <= 60.0 / (0.8 * IDLE_INTERVAL_S) + 1


@pytest.mark.parametrize("every", [3, 4, 5])
def test_lost_messages_cost_time_and_nothing_else(every: int) -> None:
    pair = Pair()
    pair.net.lose = every
    for number in range(30):
        pair.read.apply(stored([number + 1], TEXT[16 * number : 16 * number + 16], parent=number or None))
        pair.net.run(1.0, step_s=0.05)
    pair.net.lose = 0
    pair.net.run(IDLE_INTERVAL_S + FAILED_INTERVAL_S * 2, step_s=0.05)
    copy = pair.following.take(ENGINE, pair.net.now)
    assert copy is not None
    assert_equal(built(copy), pair.read.held)


def test_a_cleared_cache_is_copied_anew() -> None:
    pair = Pair()
    many(pair.read, 128)
    pair.net.run(2 * INTERVAL_S)
    pair.read.apply(CacheCleared(), stored([7], TEXT[:16]))
    pair.net.run(2 * INTERVAL_S)
    assert pair.following.rows == 1


def test_a_reader_that_knows_less_than_everything_is_not_asked_and_the_copy_stays_for_a_while() -> None:
    pair = Pair()
    many(pair.read, 64)
    pair.net.run(2 * INTERVAL_S)
    pair.following.want({ENGINE: []}, pair.net.now)
    asked = pair.following.counts.asked
    pair.net.run(5.0, step_s=0.1)
    assert pair.following.counts.asked == asked
    assert pair.following.has(ENGINE)
    assert pair.following.take(ENGINE, pair.net.now + KEEP_S) is None, "stale"


def test_what_is_not_wanted_any_more_is_forgotten_with_its_question() -> None:
    pair = Pair()
    many(pair.read)
    pair.net.run(INTERVAL_S)
    pair.following.want({}, pair.net.now)
    pair.net.run(1.0)
    assert pair.following.rows == 0
    assert not pair.following.has(ENGINE)


def test_copies_have_a_bound_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.following._rows_max = 100
    many(pair.read, 64)
    pair.following.want({ENGINE: [2], OTHER: [2]}, 0.0)
    pair.net.run(20.0, step_s=0.05)
    assert pair.following.rows == 64
    assert pair.following.counts.refused == 1


def test_questions_at_a_time_have_a_bound() -> None:
    pair = Pair()
    pair.following.want({Subject(key, 0): [2] for key in range(20)}, 0.0)
    pair.following.tick(5.0)
    assert pair.following.counts.asked == module.AT_ONCE
    assert pair.following.wake_at > 5.0
