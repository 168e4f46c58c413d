"""Checks what must hold once the faults are over: L1 … L10, and the other bounds of a scenario's `expect`.

    L1  all nodes that run agree on which nodes run, `agree_s` after the last fault
    L2  no bucket of two route tables differs, `same_routes_s` after the traffic
    L3  each route that was served, and has not expired, is at every node
    L4  a killed node is dead to all, `dead_s` after the kill
    L5  once all agree, no node that runs is taken for dead
    L6  the network is as quiet as it should be
    L7  a late joiner has the routes too, which L2 checks
    L8  each mechanism of repair works alone, which the scenarios heal_* check
    L9  where engines publish events, each is read by one node, and its cache is known exactly
    L10 no greater share of the nodes' routes is wrong, or of what engines hold unknown, than is allowed
Traffic ends `same_routes_s` before the run, if the scenario expects equal routes. With a `core` only the nodes of the
core are checked, and only about each other; the others may be in any state. L10 counts routes at depths that have
tokens, and what engines hold at the depths of prompts.
"""

from __future__ import annotations

from cluster.expectations import Difference, Knowledge, difference, disagreement, groups, judge
from cluster.scenario import numbers, quiet_at
from cluster.simulation.invariants import Invariants
from cluster.simulation.measures import Measure, percentiles
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_node import SimNode
from cluster.simulation.sim_steps import SimSteps
from cluster.simulation.world import World
from ranvier_py.core.engine_cache.gap_values import Level

POLL_S = 0.5
POLL_MANY_S = 1.0
CROWD, POLL_CROWD_S = 500, 4.0
QUIET_PACKETS_PER_NODE_S = 100.0
"""An idle node sends less (probes 2/s with acks, repair 2/s, loads, gossip ticks); a storm sends far more."""

QUIET_WINDOW_S = 3.0
ROUTES_ASKED_MAX = 500
YOUNG_S = 600.0
"""At the end, routes that were served within this time are checked, or within half their time to live if less."""


class OutcomeChecks:
    """Checks the end of a run, and polls it once the faults are over."""

    def __init__(self, world: World, steps: SimSteps, invariants: Invariants, measure: Measure) -> None:
        self.world = world
        self.steps = steps
        self.invariants = invariants
        self.measure = measure
        scenario = world.scenario
        self.expect = scenario.expect
        self.quiet_s = quiet_at(scenario)
        self.traffic_until = scenario.for_s - (self.expect.same_routes_s or 0.0)
        self.agreed_at: float | None = None
        self.same_at: float | None = None
        self._hits: dict[str, tuple[int, int]] = {}  # by moment: the engines' cached and prompt tokens until then
        self._packets_mark = 0

    def plan(self) -> None:
        world, heap = self.world, self.world.time
        world.clients.until = self.traffic_until
        heap.at(self.quiet_s, self.poll)
        heap.at(self.traffic_until, self.poll_routes)
        heap.at(max(0.0, world.scenario.for_s - QUIET_WINDOW_S), self._mark_packets)
        first = world.scenario.steps[0].at_s if world.scenario.steps else self.traffic_until / 3
        heap.at(0.0, self._mark_hits, "begin")
        heap.at(first, self._mark_hits, "first step")
        heap.at(self.traffic_until * 2 / 3, self._mark_hits, "last third")
        heap.at(max(first, min(self.quiet_s, self.traffic_until)), self._mark_hits, "quiet")
        if self.expect.dead_s is not None:
            for step in world.scenario.steps:
                if step.do == "kill":
                    for position, number in enumerate(numbers(step.nodes)):
                        heap.at(step.at_s + position * step.every_s - 1e-6, self._victim, number)

    # --- membership -------------------------------------------------------------------------------------------------

    def groups(self) -> list[dict[int, SimNode]]:
        """Return the nodes that must agree with each other: one group for each cluster."""
        live, some = self.world.live(), self.steps.some_stay_broken
        asked = [number for number in live if not some or number in self.steps.core]
        labels = dict(enumerate(self.world.labels))
        return [{number: live[number] for number in group} for group in groups(asked, labels)]

    def disagreement(self) -> Difference | None:
        """Return the first node that is wrong about which nodes run, and how; None: all are right."""
        now = self.world.time.now
        for group in self.groups():
            known = {number: Knowledge(node.session, node.living(now)) for number, node in group.items()}
            wrong = disagreement(known, ghosts=not self.steps.some_stay_broken)
            if wrong is not None:
                return wrong
        return None

    def poll(self) -> None:
        """Note since when all agree, and whether it lasts; from the end of the faults on."""
        now, bound = self.world.time.now, self.expect.agree_s
        wrong = self.disagreement()
        if wrong is None and self.agreed_at is None:
            self.agreed_at = now
        if wrong is not None and bound is not None and now >= self.quiet_s + bound:
            self.invariants.fail("L5" if self.agreed_at is not None else "L1", *wrong)
        if wrong is not None:
            self.agreed_at = None
        self.world.time.after(pause_s(len(self.world.hosts), POLL_S, 100), self.poll)

    def _victim(self, number: int) -> None:
        node = self.world.hosts[number].node
        if node is not None:
            assert self.expect.dead_s is not None
            self.world.time.after(self.expect.dead_s, self._must_be_dead, node.session, self.world.time.now)

    def _must_be_dead(self, session: int, since: float) -> None:
        """Check L4."""
        if session not in self.world.ended:
            return  # the step did not kill it
        number = self.world.sessions[session][0]
        for other, node in self.world.live().items():
            state = node.living(self.world.time.now).get(session)
            if state is not None and self.world.hosts[other].started_at < since:
                late = self.world.time.now - since
                text = f"node {other} holds node {number} for {state.name}, {late:.1f} s after its end"
                self.invariants.fail("L4", (other, number), text)

    # --- routes -----------------------------------------------------------------------------------------------------

    def poll_routes(self) -> None:
        """Note since when the tables are equal; from the end of the traffic on."""
        if self.expect.same_routes_s is None:
            return
        if self.different() is not None:
            self.same_at = None
        elif self.same_at is None:
            self.same_at = self.world.time.now
        self.world.time.after(2 * pause_s(len(self.world.hosts), POLL_S, 20), self.poll_routes)

    def different(self) -> Difference | None:
        """Return two nodes whose tables differ; None: all are equal."""
        now = self.world.time.now
        for group in self.groups():
            found = difference({number: node.sums(now) for number, node in group.items()})
            if found is not None:
                return found
        return None

    def _lacking(self) -> tuple[tuple[int, ...], str] | None:
        """Check L3: return a node that lacks a route by which a prompt was served."""
        now, served_at = self.world.time.now, self.invariants.served_at
        life_s = min(YOUNG_S, (self.world.scenario.cluster.route_ttl_s or YOUNG_S) / 2)
        young = [key for key, at in served_at.items() if now - at < life_s and self._held(*key)][-ROUTES_ASKED_MAX:]
        for group in self.groups():
            if len(group) < len(self.world.live()):
                continue  # nodes outside the group served prompts, too, and need not have sent their routes
            for number, node in group.items():
                for name, engine in young:
                    if not node.holds(name, engine, now):
                        age = now - served_at[name, engine]
                        return (
                            number,
                        ), f"node {number} lacks route {name:x} to engine {engine}, served {age:.1f} s ago"
        return None

    def _held(self, name: int, engine: int) -> bool:
        """Whether the engine holds it by its own account, and some node has the route: its learner may be dead."""
        now, nodes = self.world.time.now, self.world.live().values()
        return self.world.engines[engine].holds(name) and any(node.holds(name, engine, now) for node in nodes)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Check all that must hold at the end. Raises Violated."""
        expect, fail = self.expect, self.invariants.fail
        if expect.agree_s is not None and (wrong := self.disagreement()) is not None:
            fail("L1", *wrong)
        if expect.same_routes_s is not None:
            for invariant, found in (("L2", self.different()), ("L3", self._lacking())):
                if found is not None:
                    fail(invariant, *found)
        self._check_quiet()
        self._check_readers()
        deaths = self.measure.false_deaths
        for verdict in judge(expect, self.measured()):
            if verdict.holds is False:
                fail(verdict.invariant, deaths[0][1:] if verdict.invariant == "L5" else (), str(verdict))

    def measured(self) -> dict[str, float | None]:
        """Return the measured values of bounds, but for those that are checked during the run."""
        world, before, after = self.world, self.hits("begin", "first step"), self.hits("last third")
        found: dict[str, float | None] = {
            "failed_requests_max": world.clients.counters.failed,
            "false_deaths_max": len(self.measure.false_deaths),
            "learned_s": percentiles(self.measure.learned_s)["t99"],
            "bytes_per_node_s_max": world.sent_bytes() / len(world.hosts) / world.time.now,
            "hit_share_min": after / before if after is not None and before else None,
        }
        if world.streams is not None:
            found |= {"wrong_share_max": self.wrong(), "unknown_share_max": self.unknown()}
        return found

    def _check_quiet(self) -> None:
        """Check L6, if there was no traffic for long enough."""
        world = self.world
        if self.traffic_until > world.scenario.for_s - 2 * QUIET_WINDOW_S or self.steps.some_stay_broken:
            return
        rate = (world.net.counters.sent - self._packets_mark) / QUIET_WINDOW_S / max(1, len(world.live()))
        if rate > QUIET_PACKETS_PER_NODE_S:
            self.invariants.fail("L6", (), f"{rate:.0f} packets per node and second with nothing to send")

    # --- what engines hold ------------------------------------------------------------------------------------------

    def _check_readers(self) -> None:
        """Check L9."""
        streams, expect, fail = self.world.streams, self.expect, self.invariants.fail
        for engine in range(len(self.world.engines) if streams is not None else 0):
            assert streams is not None
            readers = streams.readers(engine)
            nodes = tuple(host.index for host in readers)
            if expect.one_reader and len(readers) != 1:
                fail("L9", nodes, f"the events of engine {engine} are read by {len(readers)} nodes")
            levels = [level_of(host, engine) for host in readers]
            if expect.exact and Level.EXACT not in levels:
                fail("L9", nodes, f"nobody knows the cache of engine {engine} exactly: {levels}")

    def wrong(self) -> float:
        """Return the share of all nodes' routes whose engines do not hold the prefix."""
        now, streams = self.world.time.now, [node.streams for node in self.world.live().values()]
        routes = [route for known in streams if known is not None for route in known.claims(now)]
        false = sum(not self.world.engines[engine].holds(name) for engine, name in routes)
        return round(false / len(routes), 4) if routes else 0.0

    def unknown(self) -> float:
        """Return the share of what engines hold, at the depths of prompts, that nodes do not know of."""
        tokens, now = self.world.clients.tokens, self.world.time.now
        names = list(tokens.keys) if tokens is not None else []
        held = [(engine.number, name) for engine in self.world.engines for name in names if engine.holds(name)]
        known = [node.holds(name, engine, now) for node in self.world.live().values() for engine, name in held]
        return round(known.count(False) / len(known), 4) if known else 0.0

    def event_measures(self) -> dict[str, float | None]:
        """Return measures for engines that publish events."""
        streams = self.world.streams
        if streams is None:
            return {}
        levels = [level_of(host, one.number) for one in self.world.engines for host in streams.readers(one.number)]
        return {
            "kv_messages": sum(kv.published for kv in streams.kvs),
            "kv_readers": len(levels),
            "kv_subscribers_most": streams.most_subscribers,
            "kv_exact": levels.count(Level.EXACT),
            "kv_wrong_share": self.wrong(),
            "kv_unknown_share": self.unknown(),
        }

    # --- hits and packets over time ---------------------------------------------------------------------------------

    def _mark_packets(self) -> None:
        self._packets_mark = self.world.net.counters.sent

    def _mark_hits(self, moment: str) -> None:
        engines = self.world.engines
        self._hits[moment] = sum(one.cached_tokens for one in engines), sum(one.prompt_tokens for one in engines)

    def hits(self, since: str, until: str = "now") -> float | None:
        """Return the hit rate between two moments; None without traffic, or if the run ended before them."""
        self._mark_hits("now")
        if not {since, until} <= self._hits.keys():
            return None
        (cached_before, asked_before), (cached, asked) = self._hits[since], self._hits[until]
        return (cached - cached_before) / (asked - asked_before) if asked > asked_before else None

    def measures(self) -> dict[str, float | None]:
        """Return the measures beside `Measure.summary`."""
        agreed = None if self.agreed_at is None else round(self.agreed_at - self.quiet_s, 3)
        same = None if self.same_at is None else round(max(0.0, self.same_at - self.traffic_until), 3)
        return {
            "agreed_s": agreed,
            "same_routes_s": same,
            "hit_share_before": rounded(self.hits("begin", "first step")),
            "hit_share_during": rounded(self.hits("first step", "quiet")),
            "hit_share_after": rounded(self.hits("last third")),
            **self.event_measures(),
        }


def pause_s(nodes: int, few_s: float, many: int) -> float:
    """Return the seconds until all nodes are checked again: the cost of a check grows with their number squared."""
    if nodes < many:
        return few_s
    return POLL_MANY_S if nodes < CROWD else POLL_CROWD_S


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def level_of(host: SimHost, engine: int) -> Level | None:
    streams = host.node.streams if host.node is not None else None
    return streams.level(engine) if streams is not None else None
