"""Nodes that gossip of streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from ranvier_py.core.engine_cache.peers.shared_streams import SharedStreams
from ranvier_py.core.engine_cache.peers.snapshot_transfer import Subject
from ranvier_py.core.engine_cache.residency import Residency
from ranvier_py.core.engine_cache.snapshot import SnapshotWriter
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.mesh.transfer import Transfers
from ranvier_py.core.routing.backend_state.facts import BackendFacts
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backends import BackendLimits, Registry
from tests.builders.machine_net import MachineNet, peer_of
from tests.core.engine_cache.model import hasher


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
        self.machines: Sequence[Machine] = (
            self.gossip,
            self.gossip.claims,
            self.gossip.transfers,
            Transfers(self.gossip.transfers.transfer),
        )
        self.held: dict[Subject, tuple[Residency, int, int]] = {}

    def holds(self, subject: Subject, residency: Residency, seq: int = 7, digest: int = 77) -> None:
        self.held[subject] = (residency, seq, digest)
        self.gossip.transfers.source = self._snapshot

    def _snapshot(self, subject: Subject) -> SnapshotWriter | None:
        residency, seq, digest = self.held.get(subject, (None, 0, 0))
        return None if residency is None or residency.frozen else SnapshotWriter(residency, hasher(), seq, digest)


class StreamNet(MachineNet[StreamNode]):
    """`lose` drops messages: every how-manieth, 0 for none. Without `mesh` each node has the next two as peers."""

    def __init__(self, count: int, *, mesh: bool = True, make: Callable[[int, float], StreamNode] = StreamNode) -> None:
        self.mesh, self.lose = mesh, 0
        super().__init__(make, count, now=0.0)
        self.drop = lambda *_: bool(self.lose) and len(self.sent) % self.lose == 0

    def live(self, session: int) -> LivePeers:
        found, sessions = super().live(session), list(self.nodes)
        place = sessions.index(session)
        following = [peer_of(sessions[(place + step) % len(sessions)]) for step in (1, 2)]
        return found if self.mesh else found._replace(near=following, sharing=following)
