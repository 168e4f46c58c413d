"""Nodes with machines of gossip, over a wire that encodes everything, takes time, and may lose, double or hold it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Generic, Protocol, TypeVar

from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES, STREAM_HEAD
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.peer.router_peer import CODEC


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

    def look(self, now: float) -> None: ...


Node = TypeVar("Node", bound=NodeOfMachines)


@dataclass
class Link:
    """Conditions of all links. Without jitter messages of a link keep their order."""

    delay_s: float = 0.001
    loss: float = 0.0
    double: float = 0.0
    jitter_s: float = 0.0
    cut: Callable[[int, int], bool] = lambda source, target: False
    drop: Callable[[int, int, Message], bool] = lambda source, target, message: False


class MachineNet(Generic[Node]):
    """`cut`: pairs between which nothing passes; `asleep`: nodes that do nothing, and get what came when they wake.
    `sent` has the time, source, target, message and bytes of each; `wire` the bodies."""

    def __init__(self, make: Callable[[int, float], Node], nodes: int, seed: int = 7, now: float = 100.0) -> None:
        self.now = now
        self.rng = Random(seed)
        self.link = Link()
        self.cut: list[frozenset[int]] = []
        self.asleep: list[int] = []
        self.sent: list[tuple[float, int, int, Message, int]] = []
        self.wire: list[bytes] = []
        self.make = make
        self.nodes: dict[int, Node] = {}
        self.transit: list[tuple[float, int, int, int, int, bytes]] = []
        self._order = count()
        self._last: dict[tuple[int, int], float] = {}
        for session in range(1, nodes + 1):
            self.nodes[session] = make(session, now)
        self.meet()

    def live(self, session: int) -> LivePeers:
        """The peers of this node: all that are there, and not cut off from it."""
        others = [one for one in self.nodes if one != session and frozenset((one, session)) not in self.cut]
        return alike([peer_of(one) for one in others], others)

    def meet(self) -> None:
        for session, node in self.nodes.items():
            for machine in node.machines:
                machine.met(self.live(session), self.now)

    def part(self, *group: int) -> None:
        """These are cut off from the rest, and each side notices."""
        rest = [one for one in self.nodes if one not in group]
        self.cut = [frozenset((one, other)) for one in group for other in rest]
        self.meet()

    def heal(self) -> None:
        self.cut = []
        self.meet()

    def start(self, session: int) -> Node:
        node = self.nodes[session] = self.make(session, self.now)
        self.meet()
        return node

    def kill(self, session: int, *, forgotten: bool = False) -> None:
        del self.nodes[session]
        for node in self.nodes.values() if forgotten else ():
            for machine in node.machines:
                machine.forgotten(session, self.now)
        self.meet()

    def run(self, seconds: float, step_s: float = 0.002) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            self.deliver()
            for session, node in list(self.nodes.items()):
                if session not in self.asleep:
                    node.look(self.now)
                    for machine in node.machines:
                        if machine.wake_at <= self.now:
                            machine.tick(self.now)
                    self.post(session)

    def is_up(self, session: int) -> bool:
        return session in self.nodes

    def passes(self, source: int, target: int, message: Message) -> bool:
        return not (self.rng.random() < self.link.loss or self.link.drop(source, target, message))

    def is_cut(self, source: int, target: int) -> bool:
        return frozenset((source, target)) in self.cut or self.link.cut(source, target)

    def post(self, session: int) -> None:
        """As a shell does it: after a tick, and after something was received."""
        outbox = self.nodes[session].outbox
        messages, outbox[:] = list(outbox), []
        for _, to, _, message in messages if self.is_up(session) else ():
            kind, body = CODEC.encode(message)
            self.sent.append((self.now, session, to, message, len(body) + OVERHEAD_BYTES + STREAM_HEAD.size))
            self.wire.append(body)
            for _ in range(1 + (self.rng.random() < self.link.double)):
                if self.passes(session, to, message):
                    heapq.heappush(self.transit, (self._due(session, to), next(self._order), session, to, kind, body))

    def _due(self, source: int, target: int) -> float:
        at = self.now + self.link.delay_s + self.rng.uniform(0, self.link.jitter_s)
        if not self.link.jitter_s:
            at = self._last[source, target] = max(at, self._last.get((source, target), at))
        return at

    def deliver(self) -> list[int]:
        """Hand over what is due. Returns to whom something came."""
        held, touched = [], []
        while self.transit and self.transit[0][0] <= self.now:
            entry = heapq.heappop(self.transit)
            _, _, source, target, kind, body = entry
            touched.append(target)
            if target in self.asleep:
                held.append(entry)
            elif self.is_up(target) and not self.is_cut(source, target):
                for machine in self.nodes[target].machines:
                    if kind in [one.number for one in machine.kinds]:
                        machine.receive(peer_of(source), CODEC.decode(kind, body), self.now)
                self.answered(target)
        for entry in held:
            heapq.heappush(self.transit, entry)
        return touched

    def answered(self, session: int) -> None:
        self.post(session)
