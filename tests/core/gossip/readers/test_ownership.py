"""One reader for each stream: who begins, who hands over, who moves up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.gossip.readers import ownership
from ranvier_py.core.gossip.readers.ownership import (
    STATE_OF,
    Ownership,
    OwnershipSettings,
    ReaderState,
    Subscribe,
    Unsubscribe,
)

TIMES = OwnershipSettings()
LONG_S = 2 * (TIMES.handover_s + 20 * TIMES.turn_s)


class Cluster:
    """Nodes that hear each other at once, engines that are known exactly `learn_s` after somebody subscribed."""

    def __init__(self, count: int, engines: tuple[int, ...] = (11, 12, 13), learn_s: float = 1.0) -> None:
        self.now = 0.0
        self.engines = engines
        self.learn_s = learn_s
        self.nodes: dict[int, Ownership] = {}
        self.exact_at: dict[tuple[int, int], float] = {}
        self.unable: set[int] = set()
        self.most_readers = 0
        self.least_readers = 99
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
            for effect in node.tick(self.now) if node.wake_at <= self.now else ():
                if isinstance(effect, Subscribe):
                    self.exact_at[number, effect.backend] = self.now + self.learn_s
                else:
                    del self.exact_at[number, effect.backend]
        for (number, key), at in self.exact_at.items():
            self.nodes[number].reached(key, ReaderState.EXACT if at <= self.now else ReaderState.ESTIMATED, self.now)
        for number, node in self.nodes.items():
            for key, standing in node.mine().items():
                for other in self.nodes.values():
                    other.said(number, key, standing, self.now)
        counts = [len(self.readers(key)) for key in self.engines]
        self.most_readers = max(self.most_readers, *counts)
        self.least_readers = min(self.least_readers, *counts)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def readers(self, key: int) -> list[int]:
        return [number for number, node in self.nodes.items() if node.reads(key)]

    def owner(self, key: int) -> int:
        found = next(iter(self.nodes.values())).owners(key)
        assert found is not None
        return found.owner


def settled(count: int, **options: object) -> Cluster:
    cluster = Cluster(count, **options)  # type: ignore[arg-type]
    cluster.run(15.0)
    cluster.most_readers, cluster.least_readers = 0, 99
    return cluster


def test_a_node_without_a_cluster_reads_all_at_once() -> None:
    node = Ownership(7, 5.0, alone=True)
    node.backends([1, 2], 5.0)
    assert node.tick(5.0) == [Subscribe(1), Subscribe(2)]
    assert node.tick(6.0) == []


def test_a_node_that_may_have_peers_waits_until_it_has_met_them() -> None:
    node = Ownership(7, 5.0)
    node.backends([1], 5.0)
    assert node.tick(5.0) == []
    assert node.tick(node.wake_at) == [Subscribe(1)]
    other = Ownership(8, 5.0)
    other.backends([1], 5.0)
    other.met(5.5)
    assert other.tick(5.5) == [Subscribe(1)]


def test_each_stream_has_one_reader_and_all_nodes_know_who() -> None:
    cluster = settled(5, engines=tuple(range(100, 160)))
    assert [cluster.readers(key) for key in cluster.engines] == [[cluster.owner(key)] for key in cluster.engines]
    shares = [sum(cluster.owner(key) == number for key in cluster.engines) for number in cluster.nodes]
    assert min(shares) >= 4, "12 each, by chance"


def test_a_death_moves_the_standby_up_within_a_second() -> None:
    cluster = settled(4)
    key = cluster.engines[0]
    found = next(iter(cluster.nodes.values())).owners(key)
    assert found is not None
    cluster.die(found.owner)
    cluster.run(1.0)
    assert cluster.readers(key) == [found.standby]


def test_a_newcomer_takes_over_without_a_moment_in_which_nobody_reads() -> None:
    cluster = settled(3, engines=tuple(range(20)))
    cluster.join(99)
    cluster.run(15.0)
    assert 0 < sum(cluster.readers(key) == [99] for key in cluster.engines) < 20
    assert all(len(cluster.readers(key)) == 1 for key in cluster.engines)
    assert (cluster.least_readers, cluster.most_readers) == (1, 2)


def test_the_old_reader_stays_until_the_new_one_knows_as_much() -> None:
    cluster = settled(3, engines=tuple(range(20)), learn_s=20.0)
    cluster.run(20.0)
    cluster.join(99)
    moved = [key for key in cluster.engines if cluster.owner(key) == 99]
    cluster.run(15.0)
    assert all(len(cluster.readers(key)) == 2 for key in moved)
    cluster.run(10.0)
    assert all(cluster.readers(key) == [99] for key in moved)


def test_a_handover_ends_even_if_the_new_reader_never_knows_as_much() -> None:
    cluster = settled(2, engines=tuple(range(20)))
    cluster.learn_s = 1e9
    cluster.join(99)
    cluster.run(TIMES.handover_s + 10.0)
    assert all(len(cluster.readers(key)) == 1 for key in cluster.engines)


def test_members_that_come_one_after_the_other_cause_one_handover() -> None:
    cluster = settled(1)
    for number in (20, 30, 40):
        cluster.join(number)
        cluster.run(1.0)
    assert cluster.most_readers == 1
    cluster.run(15.0)
    assert cluster.most_readers == 2
    assert sum(node.handovers for node in cluster.nodes.values()) <= 2 * len(cluster.engines)


def test_who_cannot_says_so_and_others_move_up() -> None:
    cluster = settled(3)
    key = cluster.engines[0]
    owner = cluster.owner(key)
    del cluster.exact_at[owner, key]
    cluster.nodes[owner].reached(key, ReaderState.UNABLE, cluster.now)
    cluster.run(3.0)
    (reader,) = cluster.readers(key)
    assert reader != owner
    cluster.nodes[owner].reached(key, ReaderState.NONE, cluster.now)
    cluster.run(15.0)
    assert cluster.readers(key) == [owner]


def test_one_ahead_that_never_begins_is_passed_over() -> None:
    """An older version, say, which tells nothing of streams."""
    cluster = settled(3)
    key = cluster.engines[0]
    owner = cluster.owner(key)
    others = [node for number, node in cluster.nodes.items() if number != owner]
    for node in others:
        node.said(owner, key, ReaderState.NONE, cluster.now)
    begun: list[float] = []
    for at in range(60):
        begun += [at / 4 for node in others if Subscribe(key) in node.tick(cluster.now + at / 4)]
    assert begun
    assert begun[0] >= TIMES.turn_s


def test_a_stream_that_is_gone_is_left() -> None:
    node = Ownership(7, 0.0, alone=True)
    node.backends([1, 2], 0.0)
    node.tick(0.0)
    assert node.backends([2], 1.0) == [Unsubscribe(1, "no such stream")]
    assert (node.reads(1), node.reads(2)) == (False, True)


def test_the_number_of_streams_is_bounded(monkeypatch: object) -> None:
    monkeypatch.setattr(ownership, "STREAMS_MAX", 3)  # type: ignore[attr-defined]
    node = Ownership(7, 0.0, alone=True)
    node.backends(range(5), 0.0)
    assert (len(node.tick(0.0)), node.dropped) == (3, 2)


def test_copies_are_asked_of_those_who_know_exactly() -> None:
    node = Ownership(1, 0.0)
    node.backends([5], 0.0)
    node.members([1, 2, 3, 4], 0.0)
    node.said(2, 5, ReaderState.EXACT, 0.0)
    node.said(3, 5, ReaderState.DEGRADED, 0.0)
    assert node.snapshot_sources(5) == [2]
    node.members([1, 3, 4], 1.0)
    assert node.snapshot_sources(5) == []
    assert {STATE_OF[level].reads for level in Level} == {True}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["join", "die", "unable", "able", "wait"]), st.integers(0, 30)), max_size=12),
)
def test_whatever_happened_in_the_end_each_stream_has_one_reader_that_can(
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
            for key in cluster.engines:
                cluster.exact_at.pop((chosen, key), None)
                standing = ReaderState.UNABLE if what == "unable" else ReaderState.NONE
                cluster.nodes[chosen].reached(key, standing, cluster.now)
        cluster.run(number / 4)
    cluster.run(LONG_S)
    can = [number for number in cluster.nodes if number not in cluster.unable]
    for key in cluster.engines:
        assert cluster.readers(key) == ([cluster.owner(key)] if can else [])


def test_one_node_stands_by_for_each_stream_and_reads_it_next() -> None:
    cluster = Cluster(4)
    for _ in range(200):
        cluster.step()
    for key in cluster.engines:
        (reader,) = [number for number, node in cluster.nodes.items() if node.reads(key)]
        (standby,) = [number for number, node in cluster.nodes.items() if node.stands_by(key)]
        assert standby != reader
        cluster.die(reader)
        assert cluster.nodes[standby].stands_by(key), "until it begins"
        for _ in range(20):
            cluster.step()
        assert cluster.nodes[standby].reads(key)
        assert not cluster.nodes[standby].stands_by(key)
        if len(cluster.nodes) > 1:
            assert sum(node.stands_by(key) for node in cluster.nodes.values()) == 1


def test_who_cannot_read_does_not_stand_by() -> None:
    cluster = Cluster(2)
    for _ in range(200):
        cluster.step()
    for key in cluster.engines:
        (standby,) = [node for node in cluster.nodes.values() if node.stands_by(key)]
        standby.reached(key, ReaderState.UNABLE, cluster.now)
        assert not standby.stands_by(key)
        assert not standby.stands_by(99)
