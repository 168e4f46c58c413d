"""What must come about once the faults are over: L1 … L8, and the other bounds of a scenario's `expect`.

    L1  all who run agree on who runs, `agree_s` after the last fault
    L2  no bucket of two tables differs, `same_routes_s` after the traffic
    L3  each route that was served, and has not aged, is at every node
    L4  who was killed is dead to all, `dead_s` after
    L5  once all agree, nobody who lives is held for dead
    L6  the wire is as quiet as it should be
    L7  a late joiner knows the routes too: it is asked by L2
    L8  each way of healing works alone: the scenarios heal_*
Traffic stops `same_routes_s` before the end, if the scenario asks for equal routes. With a `core` only the nodes of the
core are asked, and only about each other: the others may be anything.
"""

from __future__ import annotations

from cluster.scenario import quiet_at
from cluster.simulation.invariants import Invariants
from cluster.simulation.measures import Measure, percentiles
from cluster.simulation.node_values import SimNode
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_steps import Faults, numbers
from cluster.simulation.world import World
from ranvier_py.core.gossip.wire.messages import State

POLL_S = 0.5
POLL_MANY_S = 1.0
CROWD, POLL_CROWD_S = 500, 4.0
QUIET_PACKETS_PER_NODE_S = 100.0
"""Idle traffic of a node (probes 2/s with acks, repair 2/s, loads, gossip ticks) stays below; a storm is far above."""

QUIET_WINDOW_S = 3.0
ROUTES_ASKED_MAX = 500
YOUNG_S = 600.0
"""Routes served so lately are asked for at the end, where their life is longer."""


class Expectations:
    """Watches the end of a run."""

    def __init__(self, world: World, faults: Faults, invariants: Invariants, measure: Measure) -> None:
        self.world = world
        self.faults = faults
        self.invariants = invariants
        self.measure = measure
        scenario = world.scenario
        self.expect = scenario.expect
        self.quiet_s = quiet_at(scenario)
        self.traffic_until = scenario.for_s - (self.expect.same_routes_s or 0.0)
        self.agreed_at: float | None = None
        self.same_at: float | None = None
        self.hits_before: float | None = None
        self.hits_mark: tuple[int, int] | None = None
        self.hits_during: float | None = None  # from the first step to the end of the last
        self._during_mark: tuple[int, int] | None = None
        self._packets_mark = 0

    def plan(self) -> None:
        world, heap = self.world, self.world.heap
        world.clients.until = self.traffic_until
        heap.at(self.quiet_s, self.poll)
        heap.at(self.traffic_until, self.poll_routes)
        heap.at(max(0.0, world.scenario.for_s - QUIET_WINDOW_S), self._mark_packets)
        first = world.scenario.steps[0].at_s if world.scenario.steps else self.traffic_until / 3
        heap.at(first, self._mark_hits_before)
        heap.at(self.traffic_until * 2 / 3, self._mark_hits)
        heap.at(max(first, min(self.quiet_s, self.traffic_until)), self._mark_hits_during)
        if self.expect.dead_s is not None:
            for step in world.scenario.steps:
                if step.do == "kill":
                    for position, number in enumerate(numbers(step.nodes)):
                        heap.at(step.at_s + position * step.every_s - 1e-6, self._victim, number)

    # --- membership -------------------------------------------------------------------------------------------------

    def groups(self) -> list[list[SimHost]]:
        """Those who must agree with each other: one group for each cluster."""
        found: dict[str, list[SimHost]] = {}
        for host in self.world.live():
            if not self.faults.some_stay_broken or host.index in self.faults.core:
                found.setdefault(self.world.labels[host.index], []).append(host)
        return list(found.values())

    def disagreement(self) -> tuple[tuple[int, ...], str] | None:
        """The first node that is wrong about who runs, and how; None: all are right."""
        for group in self.groups():
            running = {host.node.session: host for host in group if host.node is not None}
            for host in group:
                assert host.node is not None
                wrong = self._wrong(host, host.node, running)
                if wrong is not None:
                    return wrong
        return None

    def _wrong(self, host: SimHost, node: SimNode, running: dict[int, SimHost]) -> tuple[tuple[int, ...], str] | None:
        now = self.world.heap.now
        living = node.living(now)
        for session, other in running.items():
            if session != node.session and living.get(session) is not State.ALIVE:
                seen = node.look(now).members.get(session)
                word = "does not know" if seen is None else f"holds for {seen.state.name}"
                return (host.index, other.index), f"node {host.index} {word} node {other.index}, which runs"
        if not self.faults.some_stay_broken:
            for session, state in living.items():
                if session not in running:
                    number = self.world.sessions.get(session, (-1, ""))[0]
                    ghost = f"node {host.index} holds a past session of node {number} for {state.name}"
                    return (host.index, number), ghost
        return None

    def poll(self) -> None:
        """From the end of the faults: who agrees when, and does it last?"""
        now, bound = self.world.heap.now, self.expect.agree_s
        wrong = self.disagreement()
        if wrong is None and self.agreed_at is None:
            self.agreed_at = now
        if wrong is not None and bound is not None and now >= self.quiet_s + bound:
            self.invariants.fail("L5" if self.agreed_at is not None else "L1", *wrong)
        if wrong is not None:
            self.agreed_at = None
        self.world.heap.after(pause_s(len(self.world.hosts), POLL_S, 100), self.poll)

    def _victim(self, number: int) -> None:
        node = self.world.hosts[number].node
        if node is not None:
            assert self.expect.dead_s is not None
            self.world.heap.after(self.expect.dead_s, self._must_be_dead, node.session, self.world.heap.now)

    def _must_be_dead(self, session: int, since: float) -> None:
        """L4."""
        if session not in self.world.ended:
            return  # it was not killed after all
        number = self.world.sessions[session][0]
        for host in self.world.live():
            if host.started_at < since and host.node is not None:
                state = host.node.living(self.world.heap.now).get(session)
                if state is not None:
                    late = self.world.heap.now - since
                    text = f"node {host.index} holds node {number} for {state.name}, {late:.1f} s after its end"
                    self.invariants.fail("L4", (host.index, number), text)

    # --- routes -----------------------------------------------------------------------------------------------------

    def poll_routes(self) -> None:
        """From the end of the traffic: since when are the tables equal?"""
        if self.expect.same_routes_s is None:
            return
        if self.different() is not None:
            self.same_at = None
        elif self.same_at is None:
            self.same_at = self.world.heap.now
        self.world.heap.after(2 * pause_s(len(self.world.hosts), POLL_S, 20), self.poll_routes)

    def different(self) -> tuple[tuple[int, ...], str] | None:
        """Two nodes whose tables differ."""
        now = self.world.heap.now
        for group in self.groups():
            first, *others = group
            assert first.node is not None
            sums = list(first.node.sums(now))
            for host in others:
                assert host.node is not None
                theirs = list(host.node.sums(now))
                count = sum(one != other for one, other in zip(sums, theirs, strict=True)) if theirs != sums else 0
                if count:
                    text = (
                        f"the tables of nodes {first.index} and {host.index} differ in {count} of {len(sums)} buckets"
                    )
                    return (first.index, host.index), text
        return None

    def _lacking(self) -> tuple[tuple[int, ...], str] | None:
        """L3: a node that lacks a route somebody was served by."""
        now, engine_caches = self.world.heap.now, self.invariants.engine_caches
        life_s = min(YOUNG_S, (self.world.scenario.cluster.route_ttl_s or YOUNG_S) / 2)
        young = [key for key, at in engine_caches.items() if now - at < life_s and self._held(*key)][-ROUTES_ASKED_MAX:]
        for group in self.groups():
            if len(group) < len(self.world.live()):
                continue  # served by others too, who need not have told these
            for host in group:
                for name, engine in young:
                    if host.node is not None and not host.node.holds(name, engine, now):
                        age = now - engine_caches[name, engine]
                        text = f"node {host.index} lacks route {name:x} to engine {engine}, served {age:.1f} s ago"
                        return (host.index,), text
        return None

    def _held(self, name: int, engine: int) -> bool:
        """By the engine's own word, and still by one node at least: who learned it may have died with it."""
        if not self.world.engines[engine].holds(name):
            return False
        now = self.world.heap.now
        return any(host.node is not None and host.node.holds(name, engine, now) for host in self.world.live())

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """All that is asked of the end. Raises Violated."""
        expect, fail = self.expect, self.invariants.fail
        if expect.agree_s is not None and (wrong := self.disagreement()) is not None:
            fail("L1", *wrong)
        if expect.same_routes_s is not None:
            for invariant, found in (("L2", self.different()), ("L3", self._lacking())):
                if found is not None:
                    fail(invariant, *found)
        self._check_quiet()
        deaths = self.measure.false_deaths
        if expect.false_deaths_max is not None and len(deaths) > expect.false_deaths_max:
            at_s, observer, subject = deaths[0]
            text = f"{len(deaths)} false deaths, bound {expect.false_deaths_max}; the first at {at_s:.3f} s"
            fail("L5", (observer, subject), text)
        failed = self.world.clients.statistics.failed
        if expect.failed_requests_max is not None and failed > expect.failed_requests_max:
            fail("S6", (), f"{failed} requests failed, bound {expect.failed_requests_max}")
        self._check_figures()

    def _check_figures(self) -> None:
        expect, fail = self.expect, self.invariants.fail
        learned = percentiles(self.measure.learned_s)["t99"]
        if expect.learned_s is not None and learned is not None and learned > expect.learned_s:
            fail("L3", (), f"a lesson took {learned} s (p99), bound {expect.learned_s:g} s")
        world = self.world
        rate = sum(world.net.sent_by) / len(world.hosts) / world.heap.now
        if expect.bytes_per_node_s_max is not None and rate > expect.bytes_per_node_s_max:
            fail("L6", (), f"{rate:.0f} bytes per node and second, bound {expect.bytes_per_node_s_max:.0f}")
        after = self.hits_since(self.hits_mark)
        least, before = expect.hit_share_min, self.hits_before
        if least is not None and after is not None and before and after < least * before:
            fail("L3", (), f"hit rate {after:.3f} after {before:.3f} before: below the bound")

    def _check_quiet(self) -> None:
        """L6, where there was no traffic for long enough."""
        world = self.world
        if self.traffic_until > world.scenario.for_s - 2 * QUIET_WINDOW_S or self.faults.some_stay_broken:
            return
        rate = (world.net.statistics.sent - self._packets_mark) / QUIET_WINDOW_S / max(1, len(world.live()))
        if rate > QUIET_PACKETS_PER_NODE_S:
            self.invariants.fail("L6", (), f"{rate:.0f} packets per node and second with nothing to say")

    def _mark_packets(self) -> None:
        self._packets_mark = self.world.net.statistics.sent

    def _mark_hits_before(self) -> None:
        self.hits_before = self.hits_since((0, 0))
        self._during_mark = self._hits()

    def _mark_hits_during(self) -> None:
        self.hits_during = self.hits_since(self._during_mark)

    def _mark_hits(self) -> None:
        self.hits_mark = self._hits()

    def _hits(self) -> tuple[int, int]:
        engines = self.world.engines
        return sum(one.cached_tokens for one in engines), sum(one.prompt_tokens for one in engines)

    def hits_since(self, mark: tuple[int, int] | None) -> float | None:
        if mark is None:
            return None
        cached, asked = self._hits()
        return (cached - mark[0]) / (asked - mark[1]) if asked > mark[1] else None

    def measures(self) -> dict[str, float | None]:
        """What came out, beside `Measure.summary`."""
        agreed = None if self.agreed_at is None else round(self.agreed_at - self.quiet_s, 3)
        same = None if self.same_at is None else round(max(0.0, self.same_at - self.traffic_until), 3)
        return {
            "agreed_s": agreed,
            "same_routes_s": same,
            "hit_share_before": rounded(self.hits_before),
            "hit_share_during": rounded(self.hits_during),
            "hit_share_after": rounded(self.hits_since(self.hits_mark)),
        }


def pause_s(nodes: int, few_s: float, many: int) -> float:
    """How long until all nodes are looked at again: what a look costs grows with their number squared."""
    if nodes < many:
        return few_s
    return POLL_MANY_S if nodes < CROWD else POLL_CROWD_S


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
