"""One node's part in reading the streams: the peers' words in, begin and end out, ids and keys between."""

from __future__ import annotations

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.peer_access import SnapshotAnswer, StreamSharer
from ranvier_py.core.engine_cache.peers.ownership import ReaderState
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.machine import Machine
from tests.core.engine_cache.model import hasher
from tests.core.engine_cache.peers.stream_net import StreamNet, StreamNode
from tests.core.engine_cache.test_residency import TEXT, residency, stored

ENGINES = [f"http://127.0.0.1:900{number}" for number in range(6)]


class Reader(StreamNode, Machine):
    """Looks at its streams ten times a second."""

    wake_at = 0.0

    def __init__(self, session: int, now: float) -> None:
        super().__init__(session, now, ENGINES)
        self.streams = self.gossip
        self.known: dict[str, Residency] = {}
        self.deaf = False
        self.machines = (self, *self.machines)

    def id(self, url: str) -> BackendId:
        backend = self.registry.ids.find(url)
        assert backend is not None
        return backend.id

    def tick(self, now: float) -> None:
        self.wake_at = now + 0.1
        self.streams.streams({self.id(url): (0,) for url in ENGINES}, now)
        for url in ENGINES:
            if self.deaf and self.streams.subscribes(self.id(url)):
                self.streams.unable(self.id(url), True, now)
            elif self.streams.subscribes(self.id(url)):
                self.streams.report(self.id(url), Level.EXACT if url in self.known else Level.DEGRADED, now)
        self.streams.follow(now)

    def reads(self) -> list[str]:
        return [url for url in ENGINES if self.streams.reads(self.id(url))]


class Net(StreamNet):
    def __init__(self, count: int) -> None:
        super().__init__(count, make=Reader)

    def readers(self) -> list[int]:
        """How many nodes read each engine."""
        return [sum(url in node.reads() for node in self.nodes.values()) for url in ENGINES]


def test_nodes_that_number_engines_differently_agree_on_who_reads_which() -> None:
    net = Net(3)
    net.run(10.0)
    assert net.readers() == [1] * len(ENGINES)
    assert sum(bool(node.reads()) for node in net.nodes.values()) >= 2


def test_how_well_a_stream_is_known_is_known_to_nodes_that_do_not_read_it() -> None:
    net = Net(3)
    for node in net.nodes.values():
        node.known = dict.fromkeys(ENGINES[:3], residency())
    net.run(10.0)
    for node in net.nodes.values():
        levels = [node.streams.level(node.id(url)) for url in ENGINES]
        assert levels == [Level.EXACT] * 3 + [Level.DEGRADED] * 3
    shown = net.nodes[1].streams.view()["streams"]
    levels = {tuple(one["subscribers"].values()) for one in shown.values()}
    assert levels == {("exact", "exact"), ("degraded", "degraded")}


def test_a_node_that_cannot_read_leaves_it_to_others() -> None:
    net = Net(3)
    net.nodes[2].deaf = True
    net.run(20.0)
    assert net.nodes[2].reads() == []
    assert net.readers() == [1] * len(ENGINES)


def test_a_snapshot_goes_from_who_knows_exactly_to_who_asks() -> None:
    net = Net(2)
    held = residency()
    held.apply(stored([1, 2], TEXT[:32]))
    url = ENGINES[0]
    for node in net.nodes.values():
        node.known = {url: held}
    net.run(10.0)
    reader = next(node for node in net.nodes.values() if url in node.reads())
    other = next(node for node in net.nodes.values() if node is not reader)
    reader.streams.give = lambda backend, rank: (
        SnapshotWriter(held, hasher(), 9, 99) if (backend, rank) == (reader.id(url), 0) else None
    )
    other.streams.ask(other.id(url), 0, 3, net.now)
    other.streams.ask(other.id(url), 1, 4, net.now)
    net.run(1.0)
    came = {one.rank: one for one in other.streams.snapshots()}
    assert came[1] == SnapshotAnswer(other.id(url), 1, 4, None)
    copy = came[0].snapshot
    assert (came[0].backend, copy.seq, copy.digest, len(copy.state.index.blocks)) == (other.id(url), 9, 99, 2)


def test_an_engine_that_is_removed_is_read_by_nobody() -> None:
    net = Net(2)
    net.run(10.0)
    for node in net.nodes.values():
        node.streams.streams({}, net.now)
        assert node.reads() == []
        assert node.streams.level(node.id(ENGINES[0])) is None
    net.nodes[1].streams.ask(net.nodes[1].id(ENGINES[0]), 0, 3, net.now)
    assert [one.snapshot for one in net.nodes[1].streams.snapshots()] == [None]


def test_a_node_that_has_left_a_stream_reports_nothing_of_it() -> None:
    net = Net(3)
    net.run(10.0)
    node = net.nodes[1]
    url = next(url for url in ENGINES if not node.streams.subscribes(node.id(url)))
    node.streams.report(node.id(url), Level.EXACT, net.now)
    assert ReaderState.EXACT not in node.streams.ownership.mine().values()


def test_alone_everything_is_read_here_and_nobody_has_a_snapshot() -> None:
    alone = StreamSharer()
    alone.streams({BackendId(3): (0,)}, 0.0)
    assert alone.subscribes(BackendId(3))
    assert alone.reads(BackendId(3))
    alone.report(BackendId(3), Level.EXACT, 1.0)
    assert alone.level(BackendId(3)) is Level.EXACT
    alone.ask(BackendId(3), 0, 7, 1.0)
    assert alone.snapshots() == [SnapshotAnswer(BackendId(3), 0, 7, None)]
    assert alone.snapshots() == []
    alone.unable(BackendId(3), True, 2.0)
    assert alone.level(BackendId(3)) is None
    assert alone.give(BackendId(3), 0) is None
