"""One reader and one standby for each stream: who begins, who hands over, who moves up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.peers import ownership
from ranvier_py.core.engine_cache.peers.ownership import STATE_OF, Ownership, ReaderState, Subscribers
from tests.examples import examples

LONG_S = 2 * (ownership.HANDOVER_S + 20 * ownership.TURN_S)


class Cluster:
    """Nodes that know of each other at once, engines that are known exactly `learn_s` after somebody subscribed."""

    def __init__(self, count: int, engines: tuple[int, ...] = (11, 12, 13), learn_s: float = 1.0) -> None:
        self.now = 0.0
        self.engines = engines
        self.learn_s = learn_s
        self.nodes: dict[int, Ownership] = {}
        self.exact_at: dict[tuple[int, int], float] = {}
        self.unable: set[int] = set()
        self.most = 0
        self.least = 99
        for number in range(1, count + 1):
            self.join(number)

    def join(self, number: int) -> None:
        self.nodes[number] = node = Ownership(number, self.now)
        node.backends(self.engines, self.now)
        for key in self.engines:
            if number in self.unable:
                node.reached(key, ReaderState.UNABLE, self.now)
        self.meet()

    def die(self, number: int) -> None:
        del self.nodes[number]
        self.exact_at = {pair: at for pair, at in self.exact_at.items() if pair[0] != number}
        self.meet()

    def meet(self) -> None:
        for node in self.nodes.values():
            node.members(self.nodes, self.now)

    def step(self, seconds: float = 0.25) -> None:
        self.now += seconds
        for number, node in self.nodes.items():
            if node.wake_at <= self.now:
                node.tick(self.now)
            for key in self.engines:
                if node.subscribes(key):
                    at = self.exact_at.setdefault((number, key), self.now + self.learn_s)
                    state = ReaderState.EXACT if at <= self.now else ReaderState.ESTIMATED
                    node.reached(key, state, self.now)
                else:
                    self.exact_at.pop((number, key), None)
        for number, node in self.nodes.items():
            for key, state in node.mine().items():
                for other in self.nodes.values():
                    other.reported(number, key, state, self.now)
        counts = [len(self.subscribed(key)) for key in self.engines]
        self.most, self.least = max(self.most, *counts), min(self.least, *counts)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def subscribed(self, key: int) -> list[int]:
        return [number for number, node in self.nodes.items() if node.subscribes(key)]

    def readers(self, key: int) -> list[int]:
        return [number for number, node in self.nodes.items() if node.reads(key)]

    def first(self, key: int) -> Subscribers:
        found = next(iter(self.nodes.values())).subscribers(key)
        assert found is not None
        return found

    def is_settled(self, key: int) -> bool:
        """One reads and one stands by, where there are two, and all nodes say so."""
        seen = [node.subscribers(key) for node in self.nodes.values()]
        count = min(ownership.SUBSCRIBERS, len(self.nodes))
        return (
            seen == [seen[0]] * len(seen)
            and self.readers(key) == [self.first(key).reader]
            and len(self.subscribed(key)) == count
        )


def settled(count: int, engines: tuple[int, ...] = (11, 12, 13), learn_s: float = 1.0) -> Cluster:
    cluster = Cluster(count, engines, learn_s)
    cluster.run(15.0 + learn_s)
    assert all(map(cluster.is_settled, engines))
    cluster.most, cluster.least = 0, 99
    return cluster


def test_a_node_that_may_have_peers_waits_until_it_has_met_them() -> None:
    node = Ownership(7, 5.0)
    node.backends([1, 2], 5.0)
    assert not node.tick(5.0)
    assert node.tick(node.wake_at)
    assert [node.reads(1), node.reads(2), node.tick(99.0)] == [True, True, False]
    other = Ownership(8, 5.0)
    other.backends([1], 5.0)
    other.met(5.5)
    assert other.tick(5.5)


def test_each_stream_has_one_reader_and_one_standby_and_all_nodes_know_who() -> None:
    cluster = settled(5, engines=tuple(range(100, 160)))
    shares = [sum(cluster.first(key).reader == number for key in cluster.engines) for number in cluster.nodes]
    assert min(shares) >= 4, "12 each, by chance"


def test_a_death_moves_the_standby_up_within_a_second_and_gives_it_one_in_seconds() -> None:
    cluster = settled(4)
    key = cluster.engines[0]
    reader, standby, _ = cluster.first(key)
    cluster.die(reader)
    cluster.run(1.0)
    assert cluster.readers(key) == [standby]
    assert cluster.nodes[standby].mine()[key] is ReaderState.EXACT
    cluster.run(10.0)
    assert cluster.is_settled(key)


def test_a_newcomer_takes_over_without_a_moment_in_which_less_than_two_subscribe() -> None:
    cluster = settled(3, engines=tuple(range(20)))
    cluster.join(99)
    cluster.run(15.0)
    assert 0 < sum(cluster.readers(key) == [99] for key in cluster.engines) < 20
    assert all(map(cluster.is_settled, cluster.engines))
    assert (cluster.least, cluster.most) == (2, 3)


def test_the_old_reader_goes_on_until_the_new_one_knows_as_much() -> None:
    cluster = settled(3, engines=tuple(range(20)), learn_s=20.0)
    before = {key: cluster.readers(key) for key in cluster.engines}
    cluster.join(99)
    cluster.run(15.0)
    moved = [key for key in cluster.engines if 99 in cluster.subscribed(key)]
    assert moved
    assert all(len(cluster.subscribed(key)) == 3 for key in moved)
    assert {key: cluster.readers(key) for key in cluster.engines} == before
    cluster.run(10.0)
    assert all(map(cluster.is_settled, cluster.engines))


def test_a_handover_ends_even_if_the_new_one_never_knows_as_much() -> None:
    cluster = settled(3, engines=tuple(range(20)))
    cluster.learn_s = 1e9
    cluster.join(99)
    cluster.run(ownership.HANDOVER_S + 10.0)
    assert all(len(cluster.subscribed(key)) == 2 for key in cluster.engines)


def test_members_that_come_one_after_the_other_cause_one_handover() -> None:
    cluster = settled(1)
    for number in (20, 30, 40):
        cluster.join(number)
        cluster.run(1.0)
    assert cluster.most == 1
    cluster.run(15.0)
    assert cluster.most <= 3
    assert sum(node.handovers for node in cluster.nodes.values()) <= 3 * len(cluster.engines)


def test_who_knows_a_stream_better_reads_it_while_that_lasts() -> None:
    cluster = settled(3)
    key = cluster.engines[0]
    reader, standby, _ = cluster.first(key)
    cluster.exact_at[reader, key] = cluster.now + 10.0
    cluster.run(2.0)
    assert cluster.readers(key) == [standby]
    cluster.run(10.0)
    assert cluster.readers(key) == [reader]


def test_a_moment_of_less_knowledge_does_not_leave_a_stream_without_a_reader() -> None:
    """Both lose the same message: each hears of the other's loss when its own is over."""
    cluster = settled(2)
    key = cluster.engines[0]
    for _ in range(20):
        for number in cluster.nodes:
            cluster.exact_at[number, key] = cluster.now + 0.3 * (number % 2)
        cluster.step(0.1)
        assert cluster.readers(key)


def test_those_ahead_that_never_begin_are_passed_over() -> None:
    """At their limit of descriptors, say."""
    node = Ownership(3, 0.0)
    node.backends(range(50), 0.0)
    node.members([1, 2, 3], 0.0)
    begun = {}
    for at in range(60):
        node.tick(at / 4)
        begun.update({key: at / 4 for key in range(50) if node.reads(key) and key not in begun})
    assert set(begun.values()) == {ownership.MEET_S, ownership.SETTLE_S + ownership.TURN_S}


def test_a_stream_that_is_gone_is_left() -> None:
    cluster = settled(1, engines=(1, 2))
    node = cluster.nodes[1]
    assert node.backends([2], cluster.now)
    assert (node.reads(1), node.reads(2)) == (False, True)


def test_the_number_of_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "STREAMS_MAX", 3)
    node = Ownership(7, 0.0)
    node.backends(range(5), 0.0)
    assert (len(node.mine()), node.dropped) == (3, 2)


def test_snapshots_are_asked_of_those_who_know_exactly_the_reader_last() -> None:
    node = Ownership(1, 0.0)
    node.backends([5], 0.0)
    node.members([1, 2, 3, 4], 0.0)
    for member, state in ((2, ReaderState.EXACT), (3, ReaderState.DEGRADED), (4, ReaderState.EXACT)):
        node.reported(member, 5, state, 0.0)
    sources, found = node.snapshot_sources(5), node.subscribers(5)
    assert sorted(sources) == [2, 4]
    assert sources[-1] == found.reader
    node.members([1, 3], 1.0)
    assert node.snapshot_sources(5) == []
    assert {STATE_OF[level].subscribes for level in Level} == {True}


@settings(max_examples=examples(60))
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["join", "die", "unable", "able", "wait"]), st.integers(0, 30)), max_size=12),
)
def test_whatever_happened_in_the_end_each_stream_has_one_reader_and_one_standby_that_can(
    count: int, events: list[tuple[str, int]]
) -> None:
    cluster = Cluster(count)
    for what, number in events:
        chosen = 1 + number % 9
        if what == "join" and chosen not in cluster.nodes:
            cluster.join(chosen)
        elif what == "die" and chosen in cluster.nodes and len(cluster.nodes) > 1:
            cluster.die(chosen)
        elif what in ("unable", "able") and chosen in cluster.nodes:
            (cluster.unable.add if what == "unable" else cluster.unable.discard)(chosen)
            state = ReaderState.UNABLE if what == "unable" else ReaderState.NONE
            for key in cluster.engines:
                cluster.nodes[chosen].reached(key, state, cluster.now)
        cluster.run(number / 4)
    cluster.run(LONG_S)
    can = [number for number in cluster.nodes if number not in cluster.unable]
    for key in cluster.engines:
        assert len(cluster.subscribed(key)) == min(2, len(can))
        assert cluster.readers(key) == [cluster.first(key).reader][: len(can)]
        assert set(cluster.readers(key)) <= set(can)
