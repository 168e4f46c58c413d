"""A whole simulated cluster: hosts, network, DNS name, engines and clients, made from a scenario and a seed.

Each part draws from its own random stream, named after it, so that one more draw in one part changes nothing in the
others. Rules: no clock, no global random numbers, nothing that depends on the order of a set or on an address in
memory. So two runs of one seed have the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TextIO

from cluster.network.fake_network import Network
from cluster.network.links import DATA_CENTRE
from cluster.network.virtual_time import VirtualTime
from cluster.scenario import Load, Scenario, settle
from cluster.simulation.formed import form
from cluster.simulation.sim_clients import SimClients
from cluster.simulation.sim_dns import SimDns
from cluster.simulation.sim_engine import ChatTokens, SimEngine, SimKv
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_node import Maker, SimNode
from cluster.simulation.sim_router import Birth
from cluster.simulation.sim_streams import SimStreams
from cluster.simulation.trace import Event, Trace
from ranvier_py.core.mesh.mesh_values import Address

PORT = 7946
PROBE_INTERVAL_S = 2.0
PROBE_INTERVAL_MANY_S = 10.0
MANY_NODES = 100
"""From so many nodes on, each node probes less often."""

WALL_MS = 1_790_000_000_000
"""Some moment of 2026: what wall clocks show at the start, more or less."""

CLOCK_ERRORS_S = (0.0, 0.5, -2.0, -3600.0, 3600.0, 315_360_000.0)
"""How wrong wall clocks are, drawn at each start of a process: nothing may depend on it. The last one is ten years."""


class Violation(NamedTuple):
    """An invariant that did not hold."""

    at_s: float
    invariant: str  # S1 … S10, L1 … L10
    nodes: tuple[int, ...]
    text: str


class Violated(Exception):
    """A violation, which ends the run."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.invariant} at {violation.at_s:.3f} s: {violation.text}")
        self.violation = violation


@dataclass(slots=True)
class Result:
    """The result of a run. `measures` is one flat JSON object."""

    scenario: Scenario
    seed: int
    violation: Violation | None
    last: list[Event]
    digest: str
    events: int
    measures: dict[str, Any] = field(default_factory=dict)


def address_of(number: int) -> Address:
    return (f"10.{1 + number // 62_500}.{number // 250 % 250}.{number % 250 + 1}", PORT)


class World:
    """A simulated cluster, see the module. `scenario` may have selectors: the seed settles them."""

    def __init__(self, scenario: Scenario, seed: int, maker: Maker, out: TextIO | None = None) -> None:
        self.scenario = settle(scenario, seed)
        self.seed = seed
        self.maker = maker
        self.time = VirtualTime()
        self.trace = Trace(out)
        cluster = self.scenario.cluster
        self.addresses = [address_of(number) for number in range(cluster.nodes)]
        self.net = Network(self.time, self.rng("net"), DATA_CENTRE)
        self.hosts = [
            SimHost(number, address, self.net, self.trace, self.rng(f"host {number}"))
            for number, address in enumerate(self.addresses)
        ]
        self.dns = SimDns(self.time, self.rng("dns"), self.addresses, cluster.dns)
        self.engines = [SimEngine(number) for number in range(cluster.engines)]
        load = self.scenario.load or Load(chats_per_s=0.0)
        tokens = ChatTokens(self.rng("tokens")) if cluster.events else None
        self.clients = SimClients(self.time, self.rng("clients"), self.hosts, self.engines, load, tokens)
        self.streams = self.publishing(tokens) if tokens is not None else None
        self.labels = ["lab"] * cluster.nodes
        self.keys: list[tuple[int, ...]] = [(1,)] * cluster.nodes
        self.sessions: dict[int, tuple[int, str]] = {}  # every session of the run -> (node, label)
        self.born: dict[int, float] = {}  # when each session began
        self.ended: dict[int, float] = {}  # when each session ended, if it did
        self.probed: dict[tuple[int, int, int], int] = {}  # (host, its generation, engine) -> the engine's generation
        self._clocks = self.rng("clocks")
        self.connect()

    def publishing(self, tokens: ChatTokens) -> SimStreams:
        """Let the engines publish their events."""
        cluster = self.scenario.cluster
        kvs = [SimKv(tokens, cluster.cache_blocks, cluster.replay_messages) for _ in self.engines]
        streams = SimStreams(self.time, self.rng("streams"), kvs)
        for engine, kv in zip(self.engines, kvs, strict=True):
            engine.kv = kv
            engine.published, engine.halted, engine.restarted = streams.publish, streams.halted, streams.restarted
        for host in self.hosts:
            host.requested = streams.carry
        return streams

    def rng(self, name: str) -> Random:
        return Random(f"{self.seed}/{self.scenario.name}/{name}")

    def connect(self) -> None:
        for host in self.hosts:
            host.resolve = self.dns.resolve
        self.dns.running = lambda: [host.index for host in self.hosts if host.node is not None]
        self.dns.foreign = lambda: [number for number, label in enumerate(self.labels) if label != "lab"]
        running = self.scenario.cluster.running
        self.dns.beginning = running if isinstance(running, tuple) else ()

    # --- processes --------------------------------------------------------------------------------------------------

    def name_of(self, number: int) -> str:
        names = self.scenario.cluster.names
        return names[number] if names else f"n{number}"

    def start(self, number: int, *, keep_state: bool = True) -> None:
        """Start a process of a node that has none."""
        host = self.hosts[number]
        if host.running:
            return
        if not keep_state:
            host.state = b""
        error_s = self._clocks.choice(CLOCK_ERRORS_S)
        birth = Birth(
            number=number,
            name=self.name_of(number),
            address=host.address,
            seed=f"{self.seed}/{self.scenario.name}/node {number}/{host.generation}",
            now=self.time.now,
            wall_ms=WALL_MS + int((self.time.now + error_s) * 1000),
            state=host.state,
            keys=self.keys[number],
            label=self.labels[number],
            cluster=self.scenario.cluster,
            engines=tuple(engine.url for engine in self.engines),
        )
        node = self.maker(birth)
        self.sessions[node.session] = (number, self.labels[number])
        self.born[node.session] = self.time.now
        host.start(node)
        if self.streams is not None:
            self.streams.start(host)
        self.time.after(host.rng.random() * 0.5, self.probe, number, host.generation)

    def form(self) -> None:
        """Make one cluster of the nodes that have just been started."""
        form([host.node for host in self.hosts if host.node is not None], self.engines, self.time.now)

    def crash(self, number: int) -> None:
        host = self.hosts[number]
        if host.node is not None:
            self.ended[host.node.session] = self.time.now
        host.crash()

    def stop(self, number: int) -> None:
        host = self.hosts[number]
        if host.node is not None:
            self.ended[host.node.session] = self.time.now
        host.stop()

    def probe(self, number: int, generation: int) -> None:
        """Let a node probe each engine for as long as its process runs."""
        host = self.hosts[number]
        if host.generation != generation or host.node is None:
            return
        if not host.paused:
            for engine in self.engines:
                result = engine.probe()
                host.run(lambda node, now, n=engine.number, r=result: node.probed(n, r, now))  # type: ignore[misc]
                if result.ok:
                    self.probed[number, generation, engine.number] = engine.generation
        many = len(self.hosts) >= MANY_NODES
        pause = PROBE_INTERVAL_MANY_S if many else PROBE_INTERVAL_S
        self.time.after(pause * (0.8 + 0.4 * host.rng.random()), self.probe, number, generation)

    def sent_bytes(self) -> int:
        """Return the bytes that all nodes have sent."""
        return sum(self.net.station(address).sent_bytes for address in self.addresses)

    def live(self) -> dict[int, SimNode]:
        """Return the nodes that run, are not paused and have not left, by number."""
        return {one.index: one.node for one in self.hosts if one.node is not None and not (one.paused or one.leaving)}
