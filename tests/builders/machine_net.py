"""Nodes with machines of gossip on the fake network: every message is encoded, takes its time, may be lost or doubled.

All that is sent goes as datagrams, so also what streams would carry may be lost. A node is awake when one of its
machines wants to be, after it received something, and when a run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from cluster.network.fake_network import Network
from cluster.network.links import CUT, Link, Rule
from cluster.network.virtual_time import VirtualTime
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES, STREAM_HEAD
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.peer.router_peer import CODEC

STEP_MIN_S = 1e-4
"""What a node needs for a step of work that is due at once."""


def peer_of(session: int) -> Peer:
    return Peer(session, (f"10.0.{session >> 8}.{session & 255}", 7946))


def alike(near: Sequence[Peer], members: Sequence[int] = ()) -> LivePeers:
    """These peers, all of which share routes; `members` are the sessions of all live members."""
    return LivePeers(near, near, near, members, members)


class NodeOfMachines(Protocol):
    """What the network needs of a node."""

    outbox: list[Outgoing]

    @property
    def machines(self) -> Sequence[Machine]: ...


Node = TypeVar("Node", bound=NodeOfMachines)
Kind = TypeVar("Kind", bound=Machine)


class LoneMachine(Generic[Kind]):
    """A node of one machine."""

    def __init__(self, make: Callable[..., Kind], *more: Any) -> None:
        self.outbox: list[Outgoing] = []
        self.machine = make(self.outbox, *more)
        self.machines = (self.machine,)


class MachineNet(Generic[Node]):
    """`drop` (source, target, message) tells what is lost; `asleep`: nodes that do nothing, and get what came when they
    wake. `sent` has the time, source, target, message and bytes of each; `wire` the bodies."""

    def __init__(self, make: Callable[[int, float], Node], nodes: int, seed: int = 7, now: float = 100.0) -> None:
        self.rng = Random(seed)
        self.time = VirtualTime(now)
        self.network = Network(self.time, self.rng, Link(delay_s=0.001, mtu=1 << 30))
        self.drop: Callable[[int, int, Message], bool] = lambda *_: False
        self.asleep: list[int] = []
        self.sent: list[tuple[float, int, int, Message, int]] = []
        self.wire: list[bytes] = []
        self.make = make
        self.nodes: dict[int, Node] = {}
        self._held: list[tuple[int, bytes, int, Plane]] = []  # for nodes that are asleep
        self._wakes: dict[int, float] = {}
        for session in range(1, nodes + 1):
            self.put(session, make(session, now))
        self.meet()

    @property
    def now(self) -> float:
        return self.time.now

    # --- who is there, and who reaches whom

    def put(self, session: int, node: Node) -> None:
        """A node that has not met anybody yet."""
        self.nodes[session] = node
        self.network.attach(session, partial(self._arrive, session))

    def start(self, session: int) -> Node:
        self.put(session, self.make(session, self.now))
        self.meet()
        return self.nodes[session]

    def kill(self, session: int, *, forgotten: bool = False) -> None:
        del self.nodes[session]
        self.network.detach(session)
        for node in self.nodes.values() if forgotten else ():
            for machine in node.machines:
                machine.forgotten(session, self.now)
        self.meet()

    def live(self, session: int) -> LivePeers:
        """The peers of this node: all that are there, and not cut off from it."""
        link = self.network.links.link
        others = [one for one in self.nodes if one != session and not link(one, session, Plane.DATAGRAM).cut]
        return alike([peer_of(one) for one in others], others)

    def meet(self) -> None:
        for session, node in self.nodes.items():
            for machine in node.machines:
                machine.met(self.live(session), self.now)

    def link(self, **conditions: float) -> None:
        """Change conditions of all links."""
        self.network.links.base = self.network.links.base._replace(**conditions)  # type: ignore[arg-type]

    def cut(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Nothing passes between these, and nobody notices before the next `meet`."""
        self.network.links.add(Rule([*some], [*others], CUT))

    def part(self, *group: int) -> None:
        """These are cut off from the rest, and each side notices."""
        self.network.links.heal()
        self.cut(group, [one for one in self.nodes if one not in group])
        self.meet()

    def heal(self) -> None:
        self.network.links.heal()
        self.meet()

    # --- time

    def run(self, seconds: float) -> None:
        held, self._held = self._held, []
        for waiting in held:
            self._arrive(*waiting)
        for session in self.nodes:
            self._work(session)
        self.time.run(self.now + seconds)

    def run_until(self, done: Callable[[], bool], limit_s: float = 60.0, step_s: float = 0.01) -> float:
        """Let time pass until something is so; returns how long that took."""
        self.run(0.0)
        return self.time.run_until(done, limit_s, step_s)

    def _arrive(self, session: int, data: bytes, source: int, plane: Plane) -> None:
        if session in self.asleep:
            self._held.append((session, data, source, plane))
        elif session in self.nodes:
            self.take(session, source, CODEC.decode(data[0], data[1:]))

    def take(self, session: int, source: int, message: Any) -> None:
        """Let a node have a message, and do what follows."""
        for machine in self.nodes[session].machines:
            if type(message) in [one.make for one in machine.kinds]:
                machine.receive(peer_of(source), message, self.now)
        self._work(session)

    def _work(self, session: int) -> None:
        """As a shell does it: tick what is due, send all that is to be sent, and wake in time."""
        if session in self.asleep or session not in self.nodes:
            return
        machines = self.nodes[session].machines
        for machine in machines:
            if machine.wake_at <= self.now:
                machine.tick(self.now)
        self._post(session)
        at = max(min([machine.wake_at for machine in machines]), self.now + STEP_MIN_S)
        if at < self._wakes.get(session, inf):
            self._wakes[session] = at
            self.time.at(at, self._wake, session, at)

    def _wake(self, session: int, at: float) -> None:
        if self._wakes.get(session) == at:
            del self._wakes[session]
            self._work(session)

    def _post(self, session: int) -> None:
        outbox = self.nodes[session].outbox
        messages, outbox[:] = list(outbox), []
        for _, to, _, message in messages:
            kind, body = CODEC.encode(message)
            self.sent.append((self.now, session, to, message, len(body) + OVERHEAD_BYTES + STREAM_HEAD.size))
            self.wire.append(body)
            if not self.drop(session, to, message):
                self.network.send(session, to, Plane.DATAGRAM, bytes((kind,)) + body)
