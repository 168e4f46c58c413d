"""Whole gossip ports with real routers and real sockets on loopback, in virtual time.

The clock jumps whenever nothing is readable and nobody runs, so a minute takes a second. What is lost, blocked or cut
is dropped where the port hands it to the core. Times are virtual seconds; what the simulator of the lab can't see is
held here: the timer, the streams and their back-off, as trio schedules them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
import trio.testing

from cluster.scenario import Cluster
from cluster.simulation.sim_node import ring_of
from cluster.simulation.sim_router import KEY, Birth, SimRouter
from ranvier_py.core.gossip.gossip import GossipSettings, RouterPeer
from ranvier_py.core.gossip.gossip_values import Address, MemberChange, Plane
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.wire.seal import Subkeys
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.backend import ProbeResult
from ranvier_py.io.gossip.gossip_port import open_sockets
from tests.io.gossip.gossip_fakes import Shell

ENGINE = "http://10.1.0.1:8000"
HEALTHY = ProbeResult(ok=True, status=200, latency_s=0.01, models=("m",), started_at=1.0)
WALL_MS = 1_800_000_000_000
Clock = trio.testing.MockClock
Drops = Callable[[int, int, Plane], bool]


class Node:
    """One host on loopback. `start` makes a process there, `crash` ends it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"n{number}"
        self.host = f"127.0.7.{number + 1}"
        self.port = 0
        self.starts = 0
        self.changes: list[tuple[float, str, str]] = []  # at, what, name

    async def start(self) -> None:
        self.starts += 1
        seed, now = f"{self.world.seed}/{self.name}/{self.starts}", trio.current_time()
        sockets = await open_sockets(self.host, self.port, udp=self.world.udp)
        self.port = sockets.port
        birth = Birth(
            number=self.number,
            name=self.name,
            address=(self.host, self.port),
            seed=seed,
            now=now,
            wall_ms=WALL_MS + int(1000 * now),
            state=b"",
            keys=(1,),
            label="lab",
            cluster=Cluster(),
            engines=(ENGINE,),
        )
        rng = birth.rng()
        self.parts = SimRouter(birth, rng)
        settings = GossipSettings(
            name=self.name,
            host=self.host,
            port=self.port,
            session=rng.getrandbits(64) | 1,
            fingerprint_key=KEY,
            wall_ms=birth.wall_ms,
            datagrams=self.world.udp,
            routes=RouteGossipSettings(schema=7),
        )
        self.peer = RouterPeer(self.parts.router, settings, ring_of((1,)), rng, now, subkeys=self.world.subkeys)
        self.parts.probed(0, HEALTHY, now)
        self.shell = Shell(self.peer, sockets, Random(seed), changed=self._changed, clock=trio.current_time)
        self.peer.woken = self.shell.poke
        self.receive, self.shell.receive = self.shell.receive, self._receive  # type: ignore[method-assign]
        self.scope = trio.CancelScope()
        self.world.nursery.start_soon(self._run)

    async def _run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.shell.run)
                while True:
                    self.shell.contact([first.address for first in self.world.nodes[:1] if first is not self])
                    await trio.sleep(1.0 if self.peer.alone else 30.0)

    def _receive(self, data: bytes, source: Address, plane: Plane) -> None:
        sender = int(source[0].rpartition(".")[2]) - 1
        lost = plane is Plane.DATAGRAM and self.world.rng.random() < self.world.loss
        if not lost and not self.world.drops(sender, self.number, plane):
            self.receive(data, source, plane)

    def _changed(self, changes: Sequence[MemberChange]) -> None:
        self.changes += [(trio.current_time(), change.what, change.record.name) for change in changes]

    @property
    def address(self) -> Address:
        return self.host, self.port

    def crash(self) -> None:
        self.scope.cancel()

    def learn(self, end: Boundary) -> None:
        """A chat that ends here was served."""
        now = trio.current_time()
        trip = self.parts.start_attempt(end, (), now)
        assert trip is not None
        self.parts.finish_attempt(trip, True, now)

    def holds(self, end: Boundary) -> bool:
        return self.parts.holds(end.text, 0, trio.current_time())

    def live(self) -> list[str]:
        """The others that live, as this node sees it."""
        alive = self.peer.members.alive()
        return sorted(member.record.name for member in alive if member.proved)

    def deaths(self) -> list[str]:
        return [name for _, what, name in self.changes if what == "died"]


class World:
    """All nodes, and what happens to their packets. The first node is the only seed of the others."""

    def __init__(self, seed: str, nursery: trio.Nursery, *, udp: bool) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.nursery = nursery
        self.udp = udp
        self.loss = 0.0  # of datagrams
        self.drops: Drops = lambda source, to, plane: False
        self.nodes: list[Node] = []
        self.subkeys = Subkeys()

    async def start(self, count: int) -> list[Node]:
        for number in range(len(self.nodes), len(self.nodes) + count):
            self.nodes.append(Node(self, number))
            await self.nodes[-1].start()
        return self.nodes

    async def met(self, count: int, within_s: float = 30.0) -> list[Node]:
        """So many nodes, who know each other."""
        nodes = await self.start(count)
        await until(lambda: agree(nodes), within_s, 0.1)
        return nodes

    def chat(self) -> Boundary:
        """The end of a new chat's first message, of any words."""
        return Boundary(Boundary(None, Fingerprint(0), 0), Fingerprint(self.rng.getrandbits(63) | 1), 320, 16)


@asynccontextmanager
async def world(seed: str, *, udp: bool = True) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        found = World(seed, nursery, udp=udp)
        yield found
        for node in found.nodes:
            counters, streams = node.shell.counters, node.shell.outbound.streams.values()
            assert counters.queued_bytes == sum(stream.queued_bytes for stream in streams)
        nursery.cancel_scope.cancel()


def agree(nodes: Sequence[Node]) -> bool:
    """Whether each sees all others of these alive, and nobody else."""
    names = [node.name for node in nodes]
    return all(node.live() == sorted(name for name in names if name != node.name) for node in nodes)


async def until(holds: Callable[[], bool], within_s: float, step_s: float = 0.01) -> float:
    """How long it took, in virtual seconds."""
    began = trio.current_time()
    while not holds():
        assert trio.current_time() - began < within_s, f"not within {within_s} s"
        await trio.sleep(step_s)
    return trio.current_time() - began


@pytest.mark.slow
async def test_twenty_nodes_find_each_other_from_one_address_and_stay_together(autojump_clock: Clock) -> None:
    async with world("twenty") as all_:
        nodes = await all_.met(20, 5.0)
        await trio.sleep(5)
        assert agree(nodes)
        assert not any(node.deaths() for node in nodes)
        assert all(node.shell.faults.counters.unexpected_errors == {} for node in nodes)


async def test_a_route_learned_on_one_is_at_all_others_soon_and_at_a_late_comer_too(autojump_clock: Clock) -> None:
    async with world("routes") as all_:
        nodes = list(await all_.met(8))
        ends = [all_.chat() for _ in range(20)]
        for number, end in enumerate(ends):
            await trio.sleep(all_.rng.random())
            nodes[number % 8].learn(end)
            await until(lambda end=end: all(node.holds(end) for node in nodes), 0.5)  # type: ignore[misc]
        late = (await all_.start(1))[8]
        await until(lambda: late.peer.synced and agree(all_.nodes), 5.0, 0.1)
        assert all(late.holds(end) for end in ends)


BLOCKED: dict[str, Callable[[int, int], bool]] = {
    "everywhere": lambda source, to: True,
    "into one node": lambda source, to: to == 3,
    "out of one node": lambda source, to: source == 3,
    "between two nodes": lambda source, to: {source, to} == {2, 3},
    "between two halves, one way": lambda source, to: source < 4 <= to,
    "between hosts of two": lambda source, to: source // 2 != to // 2,
}
"""Where datagrams are dropped in silence, by numbers of nodes."""


@pytest.mark.parametrize("where", [*BLOCKED, "no socket for them"])
async def test_where_datagrams_are_blocked_nobody_is_called_dead_but_the_dead(
    autojump_clock: Clock, where: str
) -> None:
    """consul#19965. The last one is `--no-gossip-udp`: not one is even tried."""
    async with world(where, udp=where in BLOCKED) as all_:
        blocked = BLOCKED.get(where, lambda source, to: False)
        all_.drops = lambda source, to, plane: plane is Plane.DATAGRAM and blocked(source, to)
        nodes = await all_.met(8, 20.0)
        await trio.sleep(5)
        end = all_.chat()
        nodes[1].learn(end)
        await until(lambda: all(node.holds(end) for node in nodes), 0.5)
        assert not any(node.deaths() for node in nodes)
        nodes[0].crash()
        await until(lambda: agree(nodes[1:]), 6.0)
        assert [node.deaths() for node in nodes[1:]] == [["n0"]] * 7
        if not all_.udp:
            counters = [node.shell.counters for node in nodes]
            assert [(each.packets_sent["datagram"], each.drops["no_udp"]) for each in counters] == [(0, 0)] * 8


async def test_a_partition_heals_and_what_each_side_learned_is_shared(autojump_clock: Clock) -> None:
    async with world("partition") as all_:
        nodes = await all_.met(8)
        left, right = nodes[:4], nodes[4:]
        all_.drops = lambda source, to, plane: (source < 4) != (to < 4)
        await trio.sleep(15)
        ends = [all_.chat(), all_.chat()]
        left[1].learn(ends[0])
        right[1].learn(ends[1])
        await trio.sleep(15)
        assert agree(left)
        assert agree(right)
        assert [left[3].holds(end) for end in ends] == [True, False]
        all_.drops = lambda source, to, plane: False
        await until(lambda: agree(nodes), 15.0)
        await until(lambda: all(node.holds(end) for node in nodes for end in ends), 10.0)


async def test_a_node_that_is_started_again_at_once_is_known_as_the_new_one(autojump_clock: Clock) -> None:
    """Faster than it is missed (weaveworks/weave#2085): its old streams are dead, and it has no route."""
    async with world("again") as all_:
        nodes = await all_.met(5)
        end = all_.chat()
        nodes[0].learn(end)
        await trio.sleep(1)
        nodes[2].crash()
        await trio.testing.wait_all_tasks_blocked()
        await nodes[2].start()
        await until(lambda: agree(nodes) and nodes[2].holds(end), 5.0)


async def test_one_node_whose_core_raises_harms_nobody_else(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with world("sick") as all_:
        nodes = await all_.met(6)
        sick, others = nodes[5], nodes[:5]

        def receive(data: bytes, source: Address, plane: Plane, now: float) -> None:
            raise RuntimeError("a bug")

        sick.peer.receive = receive  # type: ignore[method-assign]
        for _ in range(5):
            await trio.sleep(2)
            end = all_.chat()
            others[0].learn(end)
            await until(lambda end=end: all(node.holds(end) for node in others), 0.5)  # type: ignore[misc]
        assert sick.shell.faults.counters.unexpected_errors["gossip_receive"] > 20
        assert all(node.shell.faults.counters.unexpected_errors == {} for node in others)
        assert {name for node in others for name in node.deaths()} <= {sick.name}
    assert "a bug" in caplog.text


async def test_packets_of_another_version_are_refused_counted_and_logged_once(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """consul#19965: not a line for each packet, for years."""
    async with world("version") as all_:
        nodes = await all_.met(3)
        for _ in range(100):
            await trio.sleep(0.2)
            nodes[0].shell.receive(b"RG\x01" + b"2" * 100, ("127.0.7.9", 7946), Plane.DATAGRAM)
        assert agree(nodes)
        assert nodes[0].peer.counters.refused["version"] == 100
        lines = [record.getMessage() for record in caplog.records if "gossip.version" in record.getMessage()]
        assert len(lines) == 1, "within half a minute"
        assert "packets of protocol 1 from 127.0.7.9:7946" in lines[0]


async def test_timers_neither_drift_nor_spin(autojump_clock: Clock) -> None:
    """As many probes as there are intervals, no wake-up too late, and few for nothing."""
    async with world("timers") as all_:
        nodes = await all_.met(3)
        await trio.sleep(5)
        began = [(node.shell.counters.ticks, node.peer.members.statistics().probes) for node in nodes]
        await trio.sleep(100)
        for node, (ticks, probes) in zip(nodes, began, strict=True):
            assert node.peer.members.statistics().probes - probes == pytest.approx(100 / 0.5, abs=2)
            assert node.shell.lateness_s.count > 400
            assert node.shell.lateness_s.sum < 1e-3 * node.shell.lateness_s.count
            assert node.shell.counters.ticks - ticks < 100 * TICKS_PER_S


TICKS_PER_S = 10
"""Of a node without work: four looks at the registry, two probes and two digests."""
