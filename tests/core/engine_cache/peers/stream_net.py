"""Nodes that gossip of streams, over a wire that encodes everything and may lose it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ranvier_py.core.engine_cache.peers.shared_streams import SharedStreams
from ranvier_py.core.engine_cache.peers.snapshot_transfer import Subject
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.peer.router_peer import CODEC
from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backends import BackendLimits, Registry
from tests.builders.peers import alike
from tests.core.engine_cache.model import hasher


def peer_of(session: int) -> Peer:
    return Peer(session, ("10.0.0.1", 7000 + session))


class StreamNode:
    """Numbers its engines in an order of its own."""

    def __init__(self, session: int, now: float = 0.0, urls: Sequence[str] = ()) -> None:
        self.session = session
        self.outbox: list[Outgoing] = []
        rng = Random(session)
        self.registry = Registry(BackendLimits())
        for url in rng.sample(urls, len(urls)):
            self.registry.add(url)
        backends = RegistrySync(self.registry, BackendFacts(self.outbox, rng, now), b"a cluster secret")
        backends.look(now)
        self.gossip = SharedStreams(session, backends, hasher(), self.outbox, rng, now)
        self.machines: Sequence[Machine] = (self.gossip, self.gossip.claims, self.gossip.transfers)
        self.held: dict[Subject, tuple[Residency, int, int]] = {}

    def look(self, now: float) -> None:
        """What whoever receives streams does."""

    def holds(self, subject: Subject, residency: Residency, seq: int = 7, digest: int = 77) -> None:
        self.held[subject] = (residency, seq, digest)
        self.gossip.transfers.source = self._snapshot

    def _snapshot(self, subject: Subject) -> SnapshotWriter | None:
        residency, seq, digest = self.held.get(subject, (None, 0, 0))
        return None if residency is None or residency.frozen else SnapshotWriter(residency, hasher(), seq, digest)


class StreamNet:
    """`lose` drops messages: every how-manieth, 0 for none. `wire` has all bytes that travelled."""

    def __init__(self, count: int, *, mesh: bool = True, make: Callable[[int], StreamNode] = StreamNode) -> None:
        self.now = 0.0
        self.nodes = {session: make(session) for session in range(1, count + 1)}
        self.lose = 0
        self.sent = 0
        self.wire: list[bytes] = []
        self.mesh = mesh
        self.meet()

    def meet(self) -> None:
        sessions = list(self.nodes)
        for place, node in enumerate(self.nodes.values()):
            others = [session for session in sessions if session != node.session]
            near = others if self.mesh else [sessions[(place + step) % len(sessions)] for step in (1, 2)]
            live = alike([peer_of(one) for one in near], others, [peer_of(one) for one in others])
            for machine in node.machines:
                machine.met(live, self.now)

    def die(self, session: int) -> None:
        del self.nodes[session]
        for node in self.nodes.values():
            for machine in node.machines:
                machine.forgotten(session, self.now)
        self.meet()

    def run(self, seconds: float, step_s: float = 0.01) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            for node in list(self.nodes.values()):
                node.look(self.now)
                for machine in node.machines:
                    machine.tick(self.now)
            self._carry()

    def _carry(self) -> None:
        for node in list(self.nodes.values()):
            outgoing_messages = list(node.outbox)
            node.outbox.clear()
            for _, to, _, message in outgoing_messages:
                self.sent += 1
                kind, body = CODEC.encode(message)
                self.wire.append(body)
                if self.lose and self.sent % self.lose == 0:
                    continue
                if to in self.nodes:
                    got = CODEC.decode(kind, body)
                    (taker,) = [
                        each for each in self.nodes[to].machines if type(got) in [kind.make for kind in each.kinds]
                    ]
                    taker.receive(peer_of(node.session), got, self.now)
