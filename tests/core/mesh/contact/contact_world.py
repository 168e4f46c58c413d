"""Nodes that are only sessions, and a network that remembers every packet: what first contact is tested in.

Not the fake network: a test looks at each packet, holds it back, forges its source or delivers it once more, and only
it lets time pass. `small_cluster` and `MachineNet` have the fake one below.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from ranvier_py.core.mesh.contact.sessions import Incoming, Sessions
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.mesh.wire.keyring import KeyRing
from ranvier_py.core.mesh.wire.messages import Ack, Message, Ping, Record, State
from ranvier_py.core.mesh.wire.seal import Opened, Sealer
from ranvier_py.core.peer.router_peer import CODEC

RING = KeyRing({5: bytes(range(32))}, 5)
ELSEWHERE = ("192.0.2.66", 666)
"""Where nobody is: for forged sources."""


class Delivery(NamedTuple):
    """A packet on its way. `out` is what was sealed in it."""

    data: bytes
    source: Address
    to: Address
    plane: Plane
    out: Outgoing


def kinds(deliveries: list[Delivery]) -> list[str]:
    """The messages of these packets, by their names."""
    return [type(delivery.out.message).__name__ for delivery in deliveries]


class Node:
    """One run of one node, as the composer drives it. `taken` has what the gate let in, with the packet's counter."""

    def __init__(self, name: str, session: int, address: Address, epoch: int = 1, sessions_max: int = 64) -> None:
        self.record = Record(name, session, epoch, 0, State.ALIVE, *address, 0)
        self.session = session
        self.address = address
        self.outbox: list[Outgoing] = []
        self.sealer = Sealer(session, RING, "test")
        self.sessions = Sessions(self.record, self.outbox, Random(session), CODEC, sessions_max)
        self.taken: list[tuple[Incoming, Opened]] = []
        self.proved_at: list[tuple[int, float]] = []

    def receive(self, data: bytes, source: Address, plane: Plane, now: float) -> Incoming | None:
        try:
            opened = self.sealer.open(data, plane)
        except BadFrame:
            return None
        incoming = self.sessions.accept(opened, source, now)
        if incoming is not None:
            self.taken.append((incoming, opened))
            if incoming.proved is not None:
                self.proved_at.append((opened.session, now))
        return incoming

    def drain(self, now: float) -> list[Delivery]:
        """What goes out now, with what that makes go out."""
        deliveries = []
        while self.outbox:
            out = self.outbox.pop(0)
            version = self.sessions.sent(out, now)
            kind, body = CODEC.encode(out.message, version)
            data = self.sealer.seal(out.plane, out.session, kind, body, version)
            deliveries.append(Delivery(data, self.address, out.to, out.plane, out))
        return deliveries

    def send(self, peer: Peer, message: Message, plane: Plane = Plane.DATAGRAM) -> None:
        self.outbox.append(Outgoing(peer.address, peer.session, plane, message))

    def ping(self, other: Node, seq: int = 1, plane: Plane = Plane.DATAGRAM) -> None:
        self.send(Peer(other.session, other.address), Ping(seq), plane)

    def proofs(self) -> list[int]:
        """Sessions in the order of their proofs."""
        return [incoming.proved.session for incoming, _ in self.taken if incoming.proved is not None]

    def messages(self) -> list[Message]:
        return [incoming.message for incoming, _ in self.taken if incoming.message is not None]

    def knows(self, other: Node) -> bool:
        return self.sessions.address_of(other.session) == other.address

    def count(self, name: str) -> int:
        return int(getattr(self.sessions.statistics(), name))


class World:
    """Who listens at which address, the time, and all packets that were ever sent."""

    def __init__(self, *nodes: Node) -> None:
        self.now = 100.0
        self.nodes: dict[Address, Node] = {node.address: node for node in nodes}
        self.log: list[Delivery] = []

    def put(self, node: Node) -> Node:
        """It listens at its address from now on; whoever did before is gone."""
        self.nodes[node.address] = node
        return node

    def run(self, lost: Callable[[Delivery], bool] = lambda _: False, rounds_max: int = 20) -> list[Delivery]:
        """Deliver until nothing is under way; the packets of this run, lost ones too."""
        sent: list[Delivery] = []
        for _ in range(rounds_max):
            deliveries = [delivery for node in list(self.nodes.values()) for delivery in node.drain(self.now)]
            if not deliveries:
                return sent
            sent.extend(deliveries)
            self.log.extend(deliveries)
            for delivery in deliveries:
                if not lost(delivery) and delivery.to in self.nodes:
                    self.deliver(delivery)
        raise AssertionError(f"they never stop: {[delivery.out.message for delivery in sent[-6:]]}")

    def meet(self, one: Node, other: Node) -> list[Delivery]:
        """One greets the other; the packets of that."""
        one.sessions.greet(other.address, self.now)
        return self.run()

    def deliver(self, delivery: Delivery) -> Incoming | None:
        """Streams come from any port."""
        source = delivery.source if delivery.plane is Plane.DATAGRAM else (delivery.source[0], 50_000)
        return self.nodes[delivery.to].receive(delivery.data, source, delivery.plane, self.now)


def pair() -> tuple[Node, Node, World]:
    """Two nodes that do not know each other yet."""
    one, two = Node("one", 0xA1, ("10.0.0.1", 7946)), Node("two", 0xB2, ("10.0.0.2", 7946))
    return one, two, World(one, two)


def acquainted() -> tuple[Node, Node, World]:
    """Two nodes that know that they know each other, with nothing in their books yet."""
    one, two, world = pair()
    world.meet(one, two)
    two.send(Peer(one.session, one.address), Ack(1))
    world.run()
    assert one.knows(two)
    assert two.knows(one)
    for node in (one, two):
        node.taken.clear()
    world.log.clear()
    world.now += 10
    return one, two, world
