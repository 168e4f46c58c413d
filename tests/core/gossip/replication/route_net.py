"""A few nodes that gossip routes, over a network that loses, doubles and delays: one process, one clock, no waiting.

Every message is encoded and decoded on its way. Frames between two nodes stay in order unless `jitter_s` is given.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from ranvier_py.core.gossip.gossip import VERSION
from ranvier_py.core.gossip.gossip_values import Outgoing, Peer
from ranvier_py.core.gossip.replication.route_gossip import RouteGossip
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.replication.route_updates import RouteUpdate, decode, encode
from ranvier_py.core.gossip.replication.table_copy import TableCopy
from ranvier_py.core.gossip.wire.codec import Kind
from ranvier_py.core.gossip.wire.codec import decode as unwire
from ranvier_py.core.gossip.wire.codec import encode as wire
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES
from ranvier_py.core.gossip.wire.messages import Message, Rows
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import mix
from ranvier_py.core.prompts.prompt import PrefixKey
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.orphans import Orphans
from ranvier_py.core.routing.route_table.scan import U64, Names

FRAME_LENGTH_BYTES = 4
KINDS_OF_2 = (Kind.TOTAL_SUM, Kind.PART_SUMS)
BACKENDS = 4


def key_of(backend: int) -> int:
    return mix(5000 + backend)


def peer_of(session: int) -> Peer:
    return Peer(session, (f"10.0.{session >> 8}.{session & 255}", 7946))


class Backends:
    """Each node numbers the backends in its own order."""

    def __init__(self, order: Sequence[int], boots: dict[int, int]) -> None:
        self.order = list(order)
        self.boots = boots

    def names(self) -> Names:
        return BackendNames(
            np.array([key_of(backend) for backend in self.order], U64),
            np.array([self.boots[backend] for backend in self.order], U64),
            np.array([self.boots[backend] for backend in self.order], np.int32),
        )

    def holder(self, key: int, boot: int, now: float) -> tuple[int, int] | None:
        for local, backend in enumerate(self.order):
            if key_of(backend) == key and boot >= self.boots[backend]:
                self.boots[backend] = boot
                return local, boot
        return None


class Memory(TableCopy):
    """A route table bound to gossip, as a node does it."""

    def __init__(self, table: RouteTable, backends: Backends) -> None:
        super().__init__(table, backends)
        self.table = table
        self.orphans = Orphans(table)
        self.names = backends
        self.heard: list[bytes] = []

    def hear(self, route_update: bytes, age_s: float, now: float) -> bool:
        self.heard.append(route_update)
        key, boot, parent, chain = decode(route_update)
        holder = self.names.holder(key, boot, now)
        if holder is None:
            return False
        return self.orphans.learn(chain, parent, BackendId(holder[0]), holder[1], now - age_s) > 0


@dataclass
class Node:
    session: int
    table: RouteTable
    memory: Memory
    gossip: RouteGossip
    outbox: list[Outgoing]
    up: bool = True

    def sums(self, now: float) -> bytes:
        return next(sums for sums in self.memory.sums(now) if sums is not None)


@dataclass
class Link:
    """Conditions of all links."""

    delay_s: float = 0.001
    loss: float = 0.0
    double: float = 0.0
    jitter_s: float = 0.0
    cut: Callable[[int, int], bool] = lambda source, target: False
    drop: Callable[[int, int, Message], bool] = lambda source, target, message: False


@dataclass(order=True)
class Event:
    at: float
    turn: int
    source: int = field(compare=False)
    target: int = field(compare=False)
    kind: int = field(compare=False)
    body: bytes = field(compare=False)


class Net:
    def __init__(self, count: int, seed: int = 1, now: float = 1000.0, **settings: float) -> None:
        self.rng = Random(seed)
        self.now = now
        self.link = Link()
        self.nodes: dict[int, Node] = {}
        self.settings: dict[str, float] = {"ttl_s": 600.0, "audit_interval_s": 1e6, "soon_interval_s": 1e6, **settings}
        self.sent: list[tuple[float, int, int, Message, int]] = []  # at, source, target, message, bytes
        self.capacity = 100_000
        self._events: list[Event] = []
        self.versions: dict[int, int] = {}  # of the protocol, of nodes that do not speak the latest; set before `add`
        self._turn = 0
        self._last: dict[tuple[int, int], float] = defaultdict(float)
        for session in range(1, count + 1):
            self.add(session, meet=False)
        self.meet()

    def add(self, session: int, *, meet: bool = True, backends: int = BACKENDS, **settings: float) -> Node:
        order = list(range(backends))
        self.rng.shuffle(order)
        chosen = RouteGossipSettings(**{**self.settings, **settings})  # type: ignore[arg-type]
        table = RouteTable(capacity=self.capacity, ttl_s=chosen.ttl_s)
        memory = Memory(table, Backends(order, dict.fromkeys(range(BACKENDS), 1)))
        outbox: list[Outgoing] = []
        gossip = RouteGossip(
            session, memory, chosen, outbox, Random(session), self.now, version_of=partial(self.version, session)
        )
        node = self.nodes[session] = Node(session, table, memory, gossip, outbox)
        if meet:
            self.meet()
        return node

    def version(self, *sessions: int) -> int:
        """What all of these speak."""
        return min(self.versions.get(session, VERSION) for session in sessions)

    def meet(self) -> None:
        """Everybody who is up sees everybody who is up and not cut off, at once."""
        up = [session for session, node in self.nodes.items() if node.up]
        for session in up:
            others = [peer_of(other) for other in up if other != session and not self.link.cut(session, other)]
            self.nodes[session].gossip.peers(others, self.now)

    def kill(self, session: int) -> None:
        self.nodes[session].up = False
        self.meet()

    def learn(self, session: int, chain: Sequence[PrefixKey], backend: int = 0, parent: int = 0) -> None:
        """A node serves a path and tells of it."""
        node = self.nodes[session]
        boot = node.memory.names.boots[backend]
        node.table.learn(chain, BackendId(node.memory.names.order.index(backend)), boot, Trust.LOCAL, self.now)
        node.gossip.announce(encode(RouteUpdate(key_of(backend), boot, parent, tuple(chain))), self.now)

    def run(self, seconds: float) -> None:
        """Let time pass. Steps that are due at once take a tenth of a millisecond."""
        end = self.now + seconds
        wakes: dict[int, float] = {}
        touched = list(self.nodes)
        while True:
            for session in touched:
                node = self.nodes[session]
                self._post(node)
                wakes[session] = node.gossip.wake_at if node.up else end
            if self.now >= end:
                return
            wake = max(min(wakes.values(), default=end), self.now + 1e-4)
            self.now = min(wake, self._events[0].at if self._events else end, end)
            touched = []
            while self._events and self._events[0].at <= self.now:
                event = heapq.heappop(self._events)
                touched.append(event.target)
                self._deliver(event)
            for session, at in wakes.items():
                if self.nodes[session].up and (at <= self.now or session in touched):
                    self.nodes[session].gossip.tick(self.now)
                    touched.append(session)
            touched = [session for session in dict.fromkeys(touched) if session in self.nodes]

    def run_until(self, done: Callable[[], bool], limit_s: float = 60.0, step_s: float = 0.01) -> float:
        """Let time pass until something is so; returns how long that took."""
        start = self.now
        while not done():
            assert self.now - start < limit_s, f"not within {limit_s} s"
            self.run(step_s)
        return self.now - start

    def equal(self) -> bool:
        """Whether all who are up know the same routes and the same numbers."""
        up = [node for node in self.nodes.values() if node.up]
        return len({node.sums(self.now) for node in up}) == 1 and all(
            node.gossip.vector() == up[0].gossip.vector() for node in up
        )

    def _post(self, node: Node) -> None:
        letters = list(node.outbox)
        node.outbox.clear()
        for letter in letters if node.up else ():
            kind, body = wire(letter.message)
            size = len(body) + OVERHEAD_BYTES + FRAME_LENGTH_BYTES
            self.sent.append((self.now, node.session, letter.session, letter.message, size))
            for _ in range(1 + (self.rng.random() < self.link.double)):
                dropped = self.link.drop(node.session, letter.session, letter.message)
                if self.rng.random() >= self.link.loss and not dropped:
                    self._send(node.session, letter.session, kind, body)

    def _send(self, source: int, target: int, kind: int, body: bytes) -> None:
        at = self.now + self.link.delay_s + self.rng.uniform(0, self.link.jitter_s)
        if not self.link.jitter_s:
            at = self._last[source, target] = max(at, self._last[source, target])
        self._turn += 1
        heapq.heappush(self._events, Event(at, self._turn, source, target, kind, body))

    def _deliver(self, event: Event) -> None:
        node = self.nodes.get(event.target)
        assert self.version(event.target) > 1 or event.kind not in KINDS_OF_2, "it would not understand"
        if node is not None and node.up and not self.link.cut(event.source, event.target):
            node.gossip.receive(peer_of(event.source), unwire(event.kind, event.body), self.now)


def turn(rng: Random, *, chain: int = 2) -> list[PrefixKey]:
    """A path of its own, with both fingerprints."""
    return [(32 * depth, rng.getrandbits(64) | 1, rng.getrandbits(64) | 1) for depth in range(chain, 0, -1)]


def sent(net: Net, kind: type[Message], source: int = 0, target: int = 0) -> list[Message]:
    return [
        message
        for _, origin, to, message, _ in net.sent
        if isinstance(message, kind) and source in (0, origin) and target in (0, to)
    ]


def claims(messages: Iterable[Message]) -> int:
    return sum(len(message.age_s) // 2 for message in messages if isinstance(message, Rows))
