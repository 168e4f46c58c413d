"""Checks what must hold at every moment, however bad the network is: S1 … S10. The first violation ends the run.

    S1  no node takes itself for dead; a session's incarnation does not fall; of one name's sessions the last counts
    S2  an observer's (epoch, incarnation) of a member does not fall; only a higher pair or a meeting revives a member
    S3  version vectors do not fall, and no node has more of an origin's updates than the origin has sent (rest: L3)
    S4  merging in any order gives one table: shown by L2 at the end of each run, and by the laws of `routing.peers`
    S5  no claim is younger than its evidence (but for transit), expired, invented, or of an engine's earlier process
    S6  a client gets an answer while an engine runs, unless all engines that were tried have only just stopped
    S7  every buffer is within its bound; no loop runs idle; bytes about routes stay within the budget of each second
    S8  a node believes only its own cluster; its answer to a stranger is no longer than the question
    S9  nothing is ever raised
    S10 two clusters never know each other's members
S1-S3, S5, S7, S8 and S10 are checked once a second, at all nodes or at LOOKS_MAX by turns; S6, S9, reported changes of
members (S1, S10) and answers to strangers (S8) are checked at every event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NoReturn

from cluster.simulation.sim_clients import TRIES_MAX
from cluster.simulation.sim_engine import SimEngine
from cluster.simulation.sim_host import SPINS_MAX, SimHost
from cluster.simulation.sim_node import Look
from cluster.simulation.world import Violated, Violation, World
from ranvier_py.core.mesh.mesh_values import MemberChange
from ranvier_py.core.mesh.wire.messages import Record, State
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.peers.route_settings import RouteGossipSettings

LOOKS_MAX = 20
SERVED_MAX = 200
AGE_SLACK_S = 1.5
"""Ages are sent and kept in whole seconds."""

HOPS = 3
"""An age does not include the time in transit, since nodes share no clock. So each hop may make an age wrong by the
slowest packet of the run; more than three such hops in a row are very unlikely."""

HELD_BACK_MAX_S = 15.0
"""An attacker may withhold a packet and deliver it late. The packet is accepted while its sender counts as alive: for a
probe and the longest suspicion that no other node confirms. After that nothing from before is accepted."""

DEFAULT_TTL_S = 3600.0
DEFAULT_BUDGET_BYTES_PER_S = RouteGossipSettings().node_bytes_per_s
NO_ENGINE_S = 8.0
"""How long a node may still count an engine that came back as unhealthy (two probes and the circuit's delay), or one
that stopped as healthy (three probes)."""


@dataclass(slots=True)
class Memory:
    """What a checker remembers of one process."""

    incarnation: int = 0
    sessions: dict[int, Record] = field(default_factory=dict)
    vector: dict[int, int] = field(default_factory=dict)
    sent: tuple[float, int] | None = None  # (when, bytes about routes until then) at the last check


class Invariants:
    """The checkers of S1 … S10 for one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memories: dict[tuple[int, int], Memory] = {}
        self.served_at: dict[tuple[int, int], float] = {}  # (fingerprint, engine) -> when it was last served
        self.sent_updates: dict[int, int] = {}  # session -> route updates of its own
        self.looks = 0
        self._known_since: dict[tuple[int, int, int, int], float] = {}  # when a node's process knew an engine's
        self.held_back_s = 0.0  # the longest time for which an attacker withheld a packet that it then delivered
        self._turn = 0
        self._rng = world.rng("invariants")
        self._served: list[int] = []  # fingerprints below which claims are checked, SERVED_MAX of them

    def fail(self, invariant: str, nodes: tuple[int, ...], text: str) -> NoReturn:
        raise Violated(Violation(self.world.time.now, invariant, nodes, text))

    def held_back(self, delay_s: float) -> None:
        """Note that an attacker has delivered a packet that it had withheld for so long."""
        self.held_back_s = max(self.held_back_s, min(delay_s, HELD_BACK_MAX_S))

    # --- at every event ---------------------------------------------------------------------------------------------

    def raised(self, host: SimHost, error: Exception) -> None:
        if isinstance(error, Violated):
            raise error
        self.fail("S9", (host.index,), f"{type(error).__name__}: {error}")

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
        """Check S6: the client got an error. It must not if an engine runs and has not only just started."""
        now = self.world.time.now
        ready = [one.number for one in self.world.engines if one.running and now - one.born_at + 1.0 > NO_ENGINE_S]
        settled = now - host.started_at > NO_ENGINE_S
        stopped = [number for number in tried if now - self.world.engines[number].down_at <= NO_ENGINE_S]
        if ready and settled and len(stopped) < TRIES_MAX:
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
        if look.me.state not in (State.ALIVE, State.LEFT) or (look.me.state is State.LEFT and not host.leaving):
            self.fail("S1", (host.index,), f"holds itself for {look.me.state.name}")
        incarnation = look.me.incarnation
        if incarnation < memory.incarnation:
            self.fail("S1", (host.index,), f"its incarnation fell from {memory.incarnation} to {incarnation}")
        memory.incarnation = incarnation

    def others(self, host: SimHost, look: Look, memory: Memory) -> None:
        for session, seen in look.members.items():
            known = self.world.sessions.get(session)
            if known is None:
                self.fail("S8", (host.index,), f"knows a session {session:x} that never was")
            if known[1] != self.world.labels[host.index]:
                self.fail("S10", (host.index, known[0]), "has a member of another cluster")
            before = memory.sessions.get(session)
            if before is not None:
                self.steps(host, known[0], before, seen)
            memory.sessions[session] = seen

    def steps(self, host: SimHost, subject: int, before: Record, seen: Record) -> None:
        """Check S2 for one observer and one session of a subject."""
        old, new = (before.epoch, before.incarnation), (seen.epoch, seen.incarnation)
        pair = (host.index, subject)
        if new < old:
            self.fail("S2", pair, f"{seen.name}: (epoch, incarnation) fell from {old} to {new}")
        gone = before.state in (State.DEAD, State.LEFT)
        if gone and seen.state in (State.ALIVE, State.SUSPECT) and new == old:
            self.fail("S2", pair, f"{seen.name} is {seen.state.name} after {before.state.name} at the same {new}")

    def vectors(self, host: SimHost, look: Look, memory: Memory) -> None:
        own = look.vector.get(look.me.session)
        if own is not None:
            self.sent_updates[look.me.session] = max(own, self.sent_updates.get(look.me.session, 0))
        for session, number in look.vector.items():
            if number < memory.vector.get(session, 0):
                self.fail("S3", (host.index,), f"vector of {session:x} fell: {memory.vector[session]} to {number}")
            origin = self.world.sessions.get(session)
            if origin is not None and number > self._updates_sent(session, origin[0]):
                text = f"has {number} of {self.sent_updates.get(session)} that were sent"
                self.fail("S3", (host.index, origin[0]), text)
        memory.vector = dict(look.vector)

    def _updates_sent(self, session: int, number: int) -> int:
        """Return how many route updates a session has sent, by the last look at it or one now."""
        node = self.world.hosts[number].node
        if node is not None and node.session == session:
            self.sent_updates[session] = max(self.sent_updates.get(session, 0), node.updates_sent())
            return self.sent_updates[session]
        return 2**63  # its process has ended: it may have sent more since the last look

    def bounds(self, host: SimHost, look: Look) -> None:
        for name, table in look.tables.items():
            if table.size > table.bound:
                self.fail("S7", (host.index,), f"{name} holds {table.size}, bound {table.bound}")
        if host.spins > SPINS_MAX:
            self.fail("S7", (host.index,), f"woke {host.spins} times in a row for nothing")

    def budget(self, host: SimHost, memory: Memory) -> None:
        """Check S7 since the last look: a budget for each second begun. Rows have a budget of their own."""
        assert host.node is not None
        now, sent = self.world.time.now, host.node.route_bytes()
        before, memory.sent = memory.sent, (now, sent)
        if before is None:
            return
        budget = self.world.scenario.cluster.budget_bytes_per_s or DEFAULT_BUDGET_BYTES_PER_S
        most = ceil(now - before[0] - 1e-6) * budget
        if sent - before[1] > most:
            over = f"sent {sent - before[1]} bytes about routes in {now - before[0]:.1f} s, its budget is {most}"
            self.fail("S7", (host.index,), over)

    def claims(self, host: SimHost) -> None:
        """Check S5 for a sample of the table."""
        node, now = host.node, self.world.time.now
        assert node is not None
        ttl_s = self.world.scenario.cluster.route_ttl_s or DEFAULT_TTL_S
        below = self._rng.choice(self._served) if self._served else 0
        slack_s = AGE_SLACK_S + HOPS * (self.world.net.slowest_s + max(one.slowest_s for one in self.world.hosts))
        slack_s += self.held_back_s
        for fingerprint, number, _, age_s in (*node.claims(0, now), *node.claims(below, now)):
            engine = self.world.engines[number]
            seen_at = self.served_at.get((fingerprint, number))
            if engine.kv is not None:  # a claim on what the engine holds is right, whichever prompt brought it
                seen_at = engine.kv.last_held_at(fingerprint, now)
            if seen_at is None:
                self.fail("S5", (host.index,), f"engine {number} never held {fingerprint:x}, and is believed to")
            true_s = now - seen_at
            if age_s < true_s - slack_s and engine.kv is None:  # with events, a node that missed some may be wrong
                self.fail("S5", (host.index,), f"a claim is {true_s:.1f} s old and passes for {age_s:.1f} s")
            if true_s > ttl_s + slack_s + AGE_SLACK_S:
                self.fail("S5", (host.index,), f"a claim lives after {true_s:.1f} s, its life is {ttl_s:g} s")
            if self._knows(host, engine) and seen_at + 1.0 < engine.born_at - 2 * AGE_SLACK_S:
                text = f"a claim on engine {number} is of an earlier process than the known one"
                self.fail("S5", (host.index,), text)

    def _knows(self, host: SimHost, engine: SimEngine) -> bool:
        """Whether a probe had found this process by the last look; what a probe finds counts from the next look on."""
        now = self.world.time.now
        if self.world.probed.get((host.index, host.generation, engine.number)) != engine.generation:
            return False
        return now > self._known_since.setdefault((host.index, host.generation, engine.number, engine.generation), now)
