"""Nodes of a cluster in one trio run under a mock clock: real routers and gossip in real shells on simulated sockets.

`simulate(seed, scenario)` does the same each time for one seed: loss, delays and every generator of random numbers
follow from it, and so does trio's choice of who runs next. A node can be crashed: its process is gone, its tasks are
cancelled. It can be stopped, as by SIGSTOP: none of its tasks runs a step until `go`, and its sockets take what comes.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import trio
import trio._core._run as trio_run
import trio.testing
from trio.lowlevel import Abort, wait_task_rescheduled

from cluster.scenario import Cluster
from cluster.simulation import sim_node
from cluster.simulation.sim_node import SimNode
from cluster.simulation.sim_router import Birth
from ranvier_py.core.gossip.gossip import GossipSettings
from ranvier_py.core.gossip.gossip_values import Address, MemberChange
from ranvier_py.core.gossip.wire.messages import State
from ranvier_py.core.gossip.wire.seal import Subkeys
from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.backend import ProbeResult
from ranvier_py.io.discovery import Discovery, DiscoveryOptions
from ranvier_py.io.gossip.gossip_port import GossipNet
from tests.io.gossip.mock_sockets import Conditions, Network

PORT = 7946
ENGINE = "http://10.1.0.1:8000"
HEALTHY = ProbeResult(ok=True, status=200, latency_s=0.01, models=("m",), started_at=1.0)
WALL_MS = 1_800_000_000_000

OWNER: ContextVar[MockNode] = ContextVar("OWNER")
"""Of the tasks of a node; those it starts inherit it."""


# --- trio -----------------------------------------------------------------------------------------------------------


def seed_trio(seed: str) -> None:
    """Let trio choose the next task by this seed alone. The names are private: see the test that guards them."""
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # as the plugin for hypothesis does
    trio_run._r.seed(seed)


class Stoppable(trio.abc.Instrument):
    """Wraps the coroutine of each task of a node as it is spawned."""

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        node = task.context.get(OWNER)
        if node is not None:
            task.coro = Steps(task, node)  # type: ignore[assignment]


class Steps:
    """A coroutine that takes no step while its node is stopped. What it would have been sent waits."""

    def __init__(self, task: trio.lowlevel.Task, node: MockNode) -> None:
        self.task = task
        self.node = node
        self.coro: Coroutine[Any, Any, Any] = task.coro
        self.stop: Coroutine[Any, Any, Any] | None = None
        self.kept: Any = None

    def send(self, value: Any) -> Any:
        if self.node.stopped is not None:
            self.kept = value
            self.stop = wait_task_rescheduled(lambda _: Abort.FAILED)  # noqa: ASYNC105  # driven here, a step at a time
            self.node.stopped.append(self.task)
            return self.stop.send(None)
        if self.stop is not None:
            self.stop.close()
            self.stop = None
            value, self.kept = self.kept, None
        return self.coro.send(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coro, name)


# --- a node ---------------------------------------------------------------------------------------------------------


@dataclass
class MockNode:
    """One host. `start` makes a process there, `crash` ends it."""

    cluster: MockCluster
    number: int
    join: Sequence[Address]
    starts: int = 0
    changes: list[tuple[float, str, str]] = field(default_factory=list)  # at, what, name
    stopped: list[trio.lowlevel.Task] | None = None  # those with a step to take once it goes on
    release: Callable[[SimNode], object] = lambda sim: None  # makes what starts next another version

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def address(self) -> Address:
        return f"10.0.{self.number // 250}.{self.number % 250 + 1}", PORT

    def start(self, nursery: trio.Nursery) -> None:
        """A new process, until it is crashed."""
        self.starts += 1
        seed = f"{self.cluster.seed}/{self.name}/{self.starts}"
        self.sim = self._make_sim(seed)
        peer = self.sim.peer
        sockets = self.cluster.network.sockets(self.address, udp=self.cluster.udp)
        self.net = GossipNet(peer, sockets, Random(f"{seed}/shell"), changed=self._changed, clock=trio.current_time)
        peer.woken = self.net.poke
        options = DiscoveryOptions(family=socket.AF_INET)
        rng = Random(f"{seed}/discovery")
        self.discovery = Discovery(self.join, self.net.contact, lambda: peer.alone, rng, options, self.address)
        self.scope = trio.CancelScope()
        nursery.start_soon(self._run, name=self.name)

    async def _run(self) -> None:
        OWNER.set(self)
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.net.run)
                await nursery.start(self.discovery.run)

    def _make_sim(self, seed: str) -> SimNode:
        now = trio.current_time()
        birth = Birth(
            number=self.number,
            name=self.name,
            address=self.address,
            seed=seed,
            now=now,
            wall_ms=WALL_MS + int(1000 * now),
            state=b"",
            keys=(1,),
            label="lab",
            cluster=Cluster(),
            engines=(ENGINE,),
        )
        settings = partial(GossipSettings, datagrams=self.cluster.udp)
        with patch.object(sim_node, "GossipSettings", settings):  # all else is as in the simulator
            sim = SimNode(birth, self.cluster.subkeys)
        self.release(sim)
        sim.probed(0, HEALTHY, now)
        return sim

    def _changed(self, changes: Sequence[MemberChange]) -> None:
        now = trio.current_time()
        self.changes += [(now, change.what, change.record.name) for change in changes]

    # --- what happens to it -----------------------------------------------------------------------------------------

    def crash(self) -> None:
        self.cluster.network.kill(self.address[0])
        self.scope.cancel()
        self.go()

    def stop(self) -> None:
        self.stopped = []

    def go(self) -> None:
        tasks, self.stopped = self.stopped or [], None
        for task in tasks:
            trio.lowlevel.reschedule(task)

    def learn(self, end: Boundary) -> None:
        """A chat that ends here was served."""
        now = trio.current_time()
        trip = self.sim.start_attempt(end, (), now)
        assert trip is not None
        self.sim.finish_attempt(trip, True, now)

    def check(self) -> None:
        """What the shell promises of itself."""
        streams = self.net.streams
        assert streams.queued_bytes == sum(stream.queued_bytes for stream in streams.streams.values())
        for stream in streams.streams.values():
            assert bool(stream.queued_bytes) == bool(stream.queue or stream.sending)
            assert stream.queued_bytes <= stream.bytes_max

    # --- what it knows ----------------------------------------------------------------------------------------------

    def holds(self, end: Boundary) -> bool:
        return self.sim.holds(end.text, 0, trio.current_time())

    def live(self) -> list[str]:
        """The others that live, as this node sees it."""
        members = self.sim.gossip.view(trio.current_time())
        return sorted(member.name for member in members if member.state <= State.SUSPECT and member.proved)

    def deaths(self, since_s: float = 0.0) -> list[str]:
        return [name for at, what, name in self.changes if what == "died" and at >= since_s]


@dataclass
class MockCluster:
    """All hosts, and what a scenario waits for. The first node is the only seed of the others."""

    seed: str
    network: Network
    nursery: trio.Nursery
    udp: bool = True
    nodes: list[MockNode] = field(default_factory=list)
    subkeys: Subkeys = field(default_factory=lambda: Subkeys(entries_max=4096))
    chats: Random = field(init=False)

    def __post_init__(self) -> None:
        self.chats = Random(f"{self.seed}/chats")

    def start(self, count: int) -> list[MockNode]:
        seeds = [("10.0.0.1", PORT)]
        for number in range(len(self.nodes), len(self.nodes) + count):
            node = MockNode(self, number, seeds)
            self.nodes.append(node)
            node.start(self.nursery)
        return self.nodes

    async def met(self, count: int, within_s: float = 30.0) -> list[MockNode]:
        """So many nodes, who know each other."""
        nodes = self.start(count)
        await until(lambda: agree(nodes), within_s, 0.1)
        return nodes

    def chat(self) -> Boundary:
        """The end of a new chat's first message, of any words."""
        root = Boundary(None, Fingerprint(0), 0)
        return Boundary(root, Fingerprint(self.chats.getrandbits(63) | 1), 320, 16)


def agree(nodes: Sequence[MockNode]) -> bool:
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


Scenario = Callable[[MockCluster], Awaitable[object]]


def simulate(seed: str, scenario: Scenario, conditions: Conditions | None = None, *, udp: bool = True) -> MockCluster:
    """Run it, and return what is left. An error says the seed. `udp` False is `--no-gossip-udp` of all nodes."""
    seed_trio(seed)
    found: list[MockCluster] = []
    errors: list[Exception] = []

    async def world() -> None:
        network = Network(Random(f"{seed}/network"), conditions)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.run)
            cluster = MockCluster(seed, network, nursery, udp)
            found.append(cluster)
            try:
                await scenario(cluster)
                for node in cluster.nodes:
                    node.check()
            except Exception as error:  # not in a group, for whoever reads it
                errors.append(error)
            for node in cluster.nodes:
                node.go()
            nursery.cancel_scope.cancel()

    gc.disable()  # when it runs depends on what ran before, and so would finalizers
    try:
        trio.run(world, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[Stoppable()])
        for error in errors:
            raise error
    except Exception as error:
        error.add_note(f"seed: {seed}")
        raise
    finally:
        gc.enable()
    return found[0]
