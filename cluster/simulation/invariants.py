"""What must hold at every moment, however wrong the network is: S1 … S10. The first that does not ends the run.

    S1  nobody holds itself for dead; incarnations of a session do not fall; of a name the last counts
    S2  what one reports of another does not fall in (epoch, incarnation); only a higher pair or a meeting revives it
    S3  version vectors do not fall, and nobody has more of an origin than it has sent (the rest is L3)
    S4  merging in any order gives one table: shown by L2 at the end of each run, and by the laws in tests/core/gossip
    S5  no claim is younger than its evidence (but for its way here), older than its life, invented, or of an engine's
        earlier process
    S6  a client gets an answer while an engine runs, unless as many as it is tried at have only just stopped
    S7  every buffer within its bound; no loop runs for nothing; no second has more bytes about routes than the budget
    S8  nothing but the node's own cluster is believed; an answer to a stranger is no longer than the question
    S9  nothing is ever raised
    S10 two clusters never know each other's members
S1-S3, S5 and S7 are looked at once a second, at all nodes or at LOOKS_MAX by turns; S6, S8 and S9 at every event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from cluster.simulation.sim_clients import TRIES_MAX
from cluster.simulation.sim_engine import SimEngine
from cluster.simulation.sim_host import SPINS_MAX, SimHost
from cluster.simulation.sim_node import Look, Seen
from cluster.simulation.world import Violated, Violation, World
from ranvier_py.core.gossip.gossip_values import MemberChange
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.wire.messages import State
from ranvier_py.core.prompts.prompt import Boundary

LOOKS_MAX = 20
SERVED_MAX = 200
AGE_SLACK_S = 1.5
"""Ages travel in whole seconds and are kept in whole seconds."""

HOPS = 3
"""The time in which something is on its way is not in its age: nobody's clock is asked. So an age may be wrong by the
slowest way of the run at each hop; three of those in a row are very unlikely."""

HELD_BACK_MAX_S = 15.0
"""Somebody on the wire may keep a packet from its receiver and deliver it late. It is taken as long as its sender
passes for alive: a probe and the longest suspicion, which nobody confirms. After that nothing from before counts."""

DEFAULT_TTL_S = 3600.0
DEFAULT_BUDGET_BYTES_PER_S = RouteGossipSettings().node_bytes_per_s
NO_ENGINE_S = 8.0
"""So long a node may hold an engine that has come back for ill: two probes and the delay of the circuit. And one that
has stopped for well: three probes."""


@dataclass(slots=True)
class Memory:
    """What a checker remembers of one process."""

    incarnation: int = 0
    sessions: dict[int, Seen] = field(default_factory=dict)
    vector: dict[int, int] = field(default_factory=dict)
    sent: tuple[float, int] | None = None  # at, bytes about routes until then


class Invariants:
    """The checkers of S1 … S10 over one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memories: dict[tuple[int, int], Memory] = {}
        self.served_at: dict[tuple[int, int], float] = {}  # (fingerprint, engine) -> when it was last served
        self.sent_updates: dict[int, int] = {}  # session -> route updates of its own
        self.looks = 0
        self._known_since: dict[tuple[int, int, int, int], float] = {}  # of a process of an engine, by one of a node
        self.held_back_s = 0.0  # the longest that an attacker kept what then came from him alone
        self._turn = 0
        self._rng = world.rng("invariants")
        self._served: list[int] = []  # fingerprints to look under, SERVED_MAX of them

    def fail(self, invariant: str, nodes: tuple[int, ...], text: str) -> None:
        raise Violated(Violation(self.world.time.now, invariant, nodes, text))

    def held_back(self, delay_s: float) -> None:
        """What had not arrived has been delivered by somebody who kept it so long."""
        self.held_back_s = max(self.held_back_s, min(delay_s, HELD_BACK_MAX_S))

    # --- at every event ---------------------------------------------------------------------------------------------

    def raised(self, host: SimHost, error: Exception) -> None:
        if isinstance(error, Violated):
            raise error
        raise Violated(
            Violation(self.world.time.now, "S9", (host.index,), f"{type(error).__name__}: {error}")
        ) from error

    def served(self, host: SimHost, end: Boundary, engine: int) -> None:  # noqa: ARG002  # as all listeners
        now = self.world.time.now
        for _, token, text in end.chain():
            for name in (token, text):
                if name:
                    self.served_at[name, engine] = now
        if len(self._served) < SERVED_MAX:
            self._served.append(end.token or end.text)
        else:
            self._served[self._rng.randrange(SERVED_MAX)] = end.token or end.text

    def failed(self, host: SimHost, tried: Sequence[int]) -> None:
        """S6: the client got an error though an engine runs; unless it has only just come back."""
        now = self.world.time.now
        ready = [one.number for one in self.world.engines if one.running and now - one.born_at + 1.0 > NO_ENGINE_S]
        settled = now - host.started_at > NO_ENGINE_S
        stopped = [number for number in tried if now - self.world.engines[number].down_at <= NO_ENGINE_S]
        if len(stopped) >= TRIES_MAX:
            return
        if ready and settled:
            self.fail("S6", (host.index,), f"a request got no answer though engines {ready} run")

    def changed(self, host: SimHost, change: MemberChange) -> None:
        session = change.record.session
        known = self.world.sessions.get(session)
        if known is not None and known[1] != self.world.labels[host.index]:
            self.fail("S10", (host.index, known[0]), f"reports {change.what} of a node of another cluster")
        if host.node is not None and session == host.node.session and change.what in ("died", "suspected"):
            self.fail("S1", (host.index,), f"reports {change.what} of itself")

    # --- once a second ----------------------------------------------------------------------------------------------

    def sample(self) -> None:
        live = [host for host in self.world.hosts if host.node is not None]
        if len(live) > LOOKS_MAX:
            start = self._turn % len(live)
            self._turn += LOOKS_MAX
            live = (live + live)[start : start + LOOKS_MAX]
        for host in live:
            assert host.node is not None
            self.look(host, host.node.look(self.world.time.now))
            self.claims(host)

    def look(self, host: SimHost, look: Look) -> None:
        self.looks += 1
        memory = self.memories.setdefault((host.index, host.generation), Memory())
        self.myself(host, look, memory)
        self.others(host, look, memory)
        self.vectors(host, look, memory)
        self.bounds(host, look)
        self.budget(host, memory)

    def myself(self, host: SimHost, look: Look, memory: Memory) -> None:
        if look.state not in (State.ALIVE, State.LEFT) or (look.state is State.LEFT and not host.leaving):
            self.fail("S1", (host.index,), f"holds itself for {look.state.name}")
        if look.incarnation < memory.incarnation:
            self.fail("S1", (host.index,), f"its incarnation fell from {memory.incarnation} to {look.incarnation}")
        memory.incarnation = look.incarnation

    def others(self, host: SimHost, look: Look, memory: Memory) -> None:
        for session, seen in look.members.items():
            known = self.world.sessions.get(session)
            if known is None:
                self.fail("S8", (host.index,), f"knows a session {session:x} that never was")
            elif known[1] != self.world.labels[host.index]:
                self.fail("S10", (host.index, known[0]), "has a member of another cluster")
            before = memory.sessions.get(session)
            if before is not None and known is not None:
                self.steps(host, known[0], before, seen)
            memory.sessions[session] = seen

    def steps(self, host: SimHost, subject: int, before: Seen, seen: Seen) -> None:
        """S2, for one observer and one session of a subject."""
        old, new = (before.epoch, before.incarnation), (seen.epoch, seen.incarnation)
        pair = (host.index, subject)
        if new < old:
            self.fail("S2", pair, f"{seen.name}: (epoch, incarnation) fell from {old} to {new}")
        gone = before.state in (State.DEAD, State.LEFT)
        if gone and seen.state in (State.ALIVE, State.SUSPECT) and new == old:
            self.fail("S2", pair, f"{seen.name} is {seen.state.name} after {before.state.name} at the same {new}")

    def vectors(self, host: SimHost, look: Look, memory: Memory) -> None:
        own = look.vector.get(look.session)
        if own is not None:
            self.sent_updates[look.session] = max(own, self.sent_updates.get(look.session, 0))
        for session, number in look.vector.items():
            if number < memory.vector.get(session, 0):
                self.fail("S3", (host.index,), f"vector of {session:x} fell: {memory.vector[session]} to {number}")
            origin = self.world.sessions.get(session)
            if origin is not None and number > self._updates_sent(session, origin[0]):
                self.fail(
                    "S3",
                    (host.index, origin[0]),
                    f"has {number} of {self.sent_updates.get(session)} that were sent",
                )
        memory.vector = dict(look.vector)

    def _updates_sent(self, session: int, number: int) -> int:
        """How many route updates a session has sent: the last look at it, or one now."""
        node = self.world.hosts[number].node
        if node is not None and node.session == session:
            self.sent_updates[session] = max(self.sent_updates.get(session, 0), node.updates_sent())
            return self.sent_updates[session]
        return 2**63  # it has died since: between two looks it may have sent more

    def bounds(self, host: SimHost, look: Look) -> None:
        for name, table in look.tables.items():
            if table.size > table.bound:
                self.fail("S7", (host.index,), f"{name} holds {table.size}, bound {table.bound}")
        if host.spins > SPINS_MAX:
            self.fail("S7", (host.index,), f"woke {host.spins} times in a row for nothing")

    def budget(self, host: SimHost, memory: Memory) -> None:
        """S7, between two looks: as many seconds' budgets as have begun. Rows have one of their own."""
        assert host.node is not None
        now, sent = self.world.time.now, host.node.route_bytes()
        before, memory.sent = memory.sent, (now, sent)
        if before is None:
            return
        most = ceil(now - before[0] - 1e-6) * (
            self.world.scenario.cluster.budget_bytes_per_s or DEFAULT_BUDGET_BYTES_PER_S
        )
        if sent - before[1] > most:
            over = f"sent {sent - before[1]} bytes about routes in {now - before[0]:.1f} s, its budget is {most}"
            self.fail("S7", (host.index,), over)

    def claims(self, host: SimHost) -> None:
        """S5, for a sample of the table."""
        node, now = host.node, self.world.time.now
        assert node is not None
        ttl_s = self.world.scenario.cluster.route_ttl_s or DEFAULT_TTL_S
        below = self._rng.choice(self._served) if self._served else 0
        slack_s = AGE_SLACK_S + HOPS * (self.world.net.slowest_s + max(one.slowest_s for one in self.world.hosts))
        slack_s += self.held_back_s
        for fingerprint, number, _, age_s in (*node.claims(0, now), *node.claims(below, now)):
            engine = self.world.engines[number]
            seen_at = self.served_at.get((fingerprint, number))
            if engine.kv is not None:  # what it holds is true, whoever was answered
                seen_at = engine.kv.last_held_at(fingerprint, now)
            if seen_at is None:
                self.fail("S5", (host.index,), f"engine {number} never held {fingerprint:x}, and is believed to")
                return
            true_s = now - seen_at
            if age_s < true_s - slack_s and engine.kv is None:  # who missed some of its events may believe too much
                self.fail("S5", (host.index,), f"a claim is {true_s:.1f} s old and passes for {age_s:.1f} s")
            if true_s > ttl_s + slack_s + AGE_SLACK_S:
                self.fail("S5", (host.index,), f"a claim lives after {true_s:.1f} s, its life is {ttl_s:g} s")
            if self._knows(host, engine) and seen_at + 1.0 < engine.born_at - 2 * AGE_SLACK_S:
                self.fail(
                    "S5", (host.index,), f"a claim on engine {number} is of an earlier process than the known one"
                )

    def _knows(self, host: SimHost, engine: SimEngine) -> bool:
        """Whether its probe found this process by our last look: what a probe finds counts from the next look on."""
        now = self.world.time.now
        if self.world.probed.get((host.index, host.generation, engine.number)) != engine.generation:
            return False
        return now > self._known_since.setdefault((host.index, host.generation, engine.number, engine.generation), now)
