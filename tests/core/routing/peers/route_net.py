"""Nodes that gossip routes, over a network that loses, doubles and delays: one process, one clock, no waiting.

A `RouteNode` is what a node has of routes and backends, without members; `meet` and `send` hand over what it sends
without a network. In a `Net` nodes gossip.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from random import Random

from ranvier_py.core.ids import BackendId
from ranvier_py.core.mesh.mesh_values import Outgoing
from ranvier_py.core.mesh.transfer import TransferPart, Transfers, Wanted
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.backend_state.facts import BackendFacts, Fact, Facts
from ranvier_py.core.routing.backend_state.registry_sync import RegistrySync
from ranvier_py.core.routing.backends import Backend, BackendLimits, ProbeResult, Registry
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.owners import Owners
from ranvier_py.core.routing.peers.route_gossip import RouteGossip
from ranvier_py.core.routing.peers.route_messages import SIDE_STATE, unpack_rows
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.route_table import Trust
from tests.builders.machine_net import MachineNet, peer_of
from tests.builders.route_tables import route_table

KEY = b"a cluster secret"
FRAME_LENGTH_BYTES = 4
BACKENDS = 4
URLS = [f"http://127.0.0.1:{9001 + number}" for number in range(BACKENDS)]
ENGINE, OTHER = URLS[:2]
CHAT: list[PrefixKey] = [(64, 104, 204), (32, 102, 202), (16, 101, 201)]
NEXT_TURN: list[PrefixKey] = [(96, 106, 206), *CHAT]


class RouteNode:
    """Each node numbers its backends in its own order."""

    def __init__(
        self, session: int, urls: Sequence[str] = URLS, capacity: int = 100_000, ttl_s: float = 3600.0
    ) -> None:
        self.session = session
        self.peer = peer_of(session)
        self.outbox: list[Outgoing] = []
        self.registry = Registry(BackendLimits())
        self.facts = BackendFacts(self.outbox, Random(session), 0.0)
        self.backends = RegistrySync(self.registry, self.facts, KEY)
        self.table = route_table(capacity=capacity, ttl_s=ttl_s)
        self.table.outgoing.collect()
        self.checkpoints = Checkpoints(Boundary.chain)
        self.checkpoints.collect(self.table.rows.index)
        self.owners = Owners(lambda data: sha256(data).digest())
        self.owners.collect(lambda: None)
        self.sync = RouteSync(self.table, self.backends, self.owners, self.checkpoints)
        self.engines = {url: self.registry.add(url) for url in urls}
        self.backends.look(0.0)

    def engine(self, url: str = ENGINE) -> Backend:
        backend = self.engines.get(url) or self.registry.ids.find(url)  # by its URL what a test added later
        assert backend is not None
        return backend

    def id(self, number: int) -> BackendId:
        """Of one of URLS."""
        return self.engine(URLS[number]).id

    def key(self, url: str = ENGINE) -> int:
        key = self.backends.key_of(self.engine(url).id)
        assert key is not None
        return key

    def serve(self, chain: Sequence[PrefixKey], now: float = 10.0, url: str = ENGINE) -> None:
        self.learn(chain, now, Trust.LOCAL, url)

    def learn(self, chain: Sequence[PrefixKey], now: float, trust: Trust, url: str = ENGINE) -> None:
        engine = self.engine(url)
        self.table.learn(chain, engine.id, engine.generation, trust, now)

    def restart(self, now: float, url: str = ENGINE) -> None:
        """This node sees that another process is there."""
        self.registry.changes.restart(self.engine(url), "test", now)
        self.backends.look(now)

    def probe(self, now: float, started_at: float) -> None:
        self.registry.changes.probed(self.engine().id, ProbeResult(ok=True, started_at=started_at), now)

    def meet(self, other: RouteNode, now: float = 0.0) -> None:
        """Each sends the other what it knows of its backends, as peers do at once."""
        for one, two in ((self, other), (other, self)):
            two.facts.receive(one.peer, Facts(tuple(one.facts.known(now))), now)
            two.backends.follow(now)

    def receive(self, other: RouteNode, now: float, **changes: object) -> None:
        """A fact about ENGINE that the other might send."""
        fact = Fact(self.key(), 1, 0.0, 1, False, 0)._replace(**changes)  # type: ignore[arg-type]
        self.facts.receive(other.peer, Facts((fact,)), now)
        self.backends.follow(now)

    def updates(self, now: float = 10.0, *, everything: bool = False) -> list[tuple[bytes, float]]:
        return list(self.sync.updates(now, everything=everything))

    def send(self, *others: RouteNode, now: float = 10.0) -> int:
        """Hand over what may be sent now. Returns its bytes."""
        updates = self.updates(now)
        for update, at in updates:
            for other in others:
                other.sync.receive([(now - at, update)], now)
        return sum(len(update) for update, _ in updates)

    def holders(self, chain: Sequence[PrefixKey], now: float = 10.0) -> list[tuple[str, int, int]]:
        found = self.table.match(chain, self.registry.pools.pool("", now).generations, now, wanted=9)
        return [(self.registry[holder.backend].url, holder.tokens, holder.trust) for holder in found]

    def knows(self, fingerprint: int) -> bool:
        return fingerprint in self.table.rows.index

    def sums(self, now: float) -> bytes:
        scan = self.sync.copy.sums(now)
        return next(filter(None, iter(lambda: scan.step(now), b"")))


class GossipNode(RouteNode):
    """The same with the gossip of routes."""

    def __init__(
        self, session: int, urls: Sequence[str], capacity: int, settings: RouteGossipSettings, now: float
    ) -> None:
        super().__init__(session, urls, capacity, settings.ttl_s)
        self.facts.receive(peer_of(0), Facts(tuple(self.facts.known(now))), now)  # so that they count
        self.backends.follow(now)
        self.gossip = RouteGossip(session, self.sync, settings, self.outbox, Random(session), now)
        self.machines = (self.gossip, Transfers(self.gossip.transfer))
        self.outbox.clear()


class Net(MachineNet[GossipNode]):
    def __init__(self, count: int, seed: int = 1, now: float = 1000.0, **settings: float) -> None:
        self.settings: dict[str, float] = {"ttl_s": 600.0, "audit_interval_s": 1e6, "soon_interval_s": 1e6}
        self.settings |= {"quiet_interval_s": 1e6, "far_interval_s": 1e6, **settings}
        self.capacity = 100_000
        super().__init__(lambda session, _: self.made(session), count, seed, now)

    def made(self, session: int, backends: int = BACKENDS, **settings: float) -> GossipNode:
        urls = self.rng.sample(URLS[:backends], backends)
        chosen = RouteGossipSettings(**{**self.settings, **settings})  # type: ignore[arg-type]
        return GossipNode(session, urls, self.capacity, chosen, self.now)

    def add(self, session: int, *, meet: bool = True, backends: int = BACKENDS, **settings: float) -> GossipNode:
        self.put(session, self.made(session, backends, **settings))
        if meet:
            self.meet()
        return self.nodes[session]

    def learn(self, session: int, chain: Sequence[PrefixKey], backend: int = 0) -> None:
        """A node serves a path and sends it."""
        node = self.nodes[session]
        node.serve(chain, self.now, URLS[backend])
        for update, at in node.updates(self.now, everything=True):
            node.gossip.announce(update, at)

    def equal(self) -> bool:
        """Whether all know the same routes and the same numbers."""
        vectors = [node.gossip.vector() for node in self.nodes.values()]
        return len({node.sums(self.now) for node in self.nodes.values()}) == 1 and vectors == vectors[:1] * len(vectors)


def turn(rng: Random, *, chain: int = 2) -> list[PrefixKey]:
    """A path of its own, with both fingerprints."""
    return [(32 * depth, rng.getrandbits(64) | 1, rng.getrandbits(64) | 1) for depth in range(chain, 0, -1)]


def sent(net: Net, kind: type[Message], source: int = 0, target: int = 0) -> list[Message]:
    return [
        message
        for _, origin, to, message, _ in net.sent
        if isinstance(message, kind) and source in (0, origin) and target in (0, to)
    ]


def wanted(net: Net, source: int = 0, *, side: bool = False) -> list[Wanted]:
    """The first message of each question for rows, or for side state, however often it was sent."""
    asked = [message for message in sent(net, Wanted, source) if isinstance(message, Wanted) and not message.cursor]
    return list({one.request: one for one in asked if (one.subject == SIDE_STATE) is side}.values())


def is_part(net: Net, target: int, message: object, *, side: bool = False) -> bool:
    """Whether a message to this node has rows, or side state."""
    asked = [one.request for one in wanted(net, target, side=side)]
    return isinstance(message, TransferPart) and message.request in asked


def parts(net: Net, source: int = 0, target: int = 0, *, side: bool = False) -> list[tuple[int, TransferPart, int]]:
    """The sender, message and bytes of each part with rows, or with side state."""
    found = [each[1:] for each in net.sent if source in (0, each[1]) and target in (0, each[2])]
    return [(origin, part, size) for origin, to, part, size in found if is_part(net, to, part, side=side)]


def claims(net: Net, source: int = 0, target: int = 0) -> int:
    """How many rows were sent."""
    return sum(len(unpack_rows(part.data).age_s) // 2 for _, part, _ in parts(net, source, target))
