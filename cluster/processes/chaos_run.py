"""Runs a scenario on real processes: `ranvier serve` nodes behind DNS, fake engines, open-loop chats, and faults.

    outcome = await run_scenario(scenario, mode, Options(seed=1), folder, print)

The outcome has every request, the hit rates by the engines' own counts, and a verdict for each bound of the scenario.
Time 0 is when the first nodes are ready. A run is bounded in time; it leaves no process, however it ends.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import trio

from cluster.dns.dns_server import Zone
from cluster.dns.dns_server import serve as serve_dns
from cluster.expectations import Verdict, core_of, judge
from cluster.load.runner import Target
from cluster.network.links import Links
from cluster.processes.chaos_clients import Clients, all_conversations
from cluster.processes.chaos_plan import (
    CLIENTS_NAME,
    PEERS_NAME,
    NodePlace,
    Plan,
    make_plan,
    node_command,
    write_keys,
)
from cluster.processes.children import ROOT
from cluster.processes.commands import EnginePlace, Engines, engine_command
from cluster.processes.engine_watch import EngineWatch
from cluster.processes.fleet import Fleet, Member
from cluster.processes.link_control import LinkControl, LinkMode, NamespaceControl
from cluster.processes.packet_record import Recorder
from cluster.processes.peer_watch import Census, Watch
from cluster.processes.process_steps import LOOK_S, ProcessSteps
from cluster.processes.relay import Relay
from cluster.processes.request_log import RequestLog, hit_report, hits_back_s, points_lost
from cluster.scenario import Scenario, numbers, quiet_at, targets

LAST_ANSWERS_S = 180.0
"""How long clients may wait for their last answers after the run's time; beyond that something hangs."""

START_S = 300.0
"""How long all processes together may take to become ready."""

LOADING_S, LATE_S_MAX = 3.0, 300.0
"""A restarted process is expected to be ready within LOADING_S. While one takes longer, the scenario's time stands
still, for at most LATE_S_MAX in all (five restarts of a minute each, on a machine that has ten times more to do than it
can); else the next ones would be stopped before it is back, and all be down at once."""

FIRST_KEY = 1
"""Number of the key that all nodes have at the beginning, as in the simulator."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a run beside its scenario."""

    seed: int = 1
    gossip: bool = True
    hits_without_faults: float | None = None  # hit rate of a run of the same load in which nothing happens
    engines: Engines = field(default_factory=Engines)
    recorder: Recorder | None = None  # only the relay can record
    first_tree: Path = ROOT  # the checkout whose code nodes run until they are restarted


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run. `as_json` is its stable form."""

    scenario: Scenario
    options: Options
    mode: LinkMode
    log: RequestLog
    hits: dict[str, float | None]
    verdicts: tuple[Verdict, ...]
    took_s: float
    counts: dict[str, dict[str, int]]
    timed_out: bool
    late_s: float  # added to the run for processes that took long to load
    notes: dict[str, str]  # the last disagreement about members, the last difference of route tables

    @property
    def good(self) -> bool:
        """Whether every bound was measured and holds, no process ended by itself, and the run ended in time."""
        return all(one.holds for one in self.verdicts) and not self.log.crashes and not self.timed_out

    def as_json(self) -> dict[str, Any]:
        return {
            "good": self.good,
            "scenario": asdict(self.scenario),
            "seed": self.options.seed,
            "gossip": self.options.gossip,
            "links": asdict(self.mode),
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
            "took_s": round(self.took_s, 1),
            "late_s": self.late_s,
            "timed_out": self.timed_out,
            "requests": self.log.counts(),
            "retries_by_reason": self.log.reasons(),
            "hit_rate": self.hits,
            "notes": self.notes,
            "verdicts": [asdict(one) for one in self.verdicts],
            "failures": self.log.failures(),
            "crashes": self.log.crashes,
            "diary": [asdict(event) for event in self.log.diary],
            **self.counts,
        }


class Run:
    """One run, from its plan to its outcome."""

    def __init__(self, scenario: Scenario, mode: LinkMode, options: Options, folder: Path, report: Report) -> None:
        self.scenario = scenario
        self.mode = mode
        self.options = options
        self.folder = folder
        self.report = report
        self.engine_watch = EngineWatch(self.clock, options.engines.longest_step_s)
        self.log = RequestLog(self.engine_watch.caches)
        moving = {number for step in scenario.steps if step.do == "engine_moves" for number in targets(step)}
        self.plan: Plan = make_plan(mode, scenario.cluster, folder, Random(options.seed), moving)
        named = {place.host: [place.ip] for place in self.plan.engines if place.host}
        self.zone = Zone({CLIENTS_NAME: [place.ip for place in self.plan.nodes], PEERS_NAME: [], **named})
        self.links = Links()
        self.control = LinkControl()
        self.labels: dict[int, str] = {}
        self.nodes = [Member(place.name, place.ip, partial(self.node, place)) for place in self.plan.nodes]
        self.engines = [self.engine(place) for place in self.plan.engines]
        self.relay: Relay | None = None
        self.watch = Watch(self.plan, self.nodes, self.labels, self.clock, Census(core=core_of(scenario.steps)))
        self.quiet_s = quiet_at(scenario)
        self.carried_out = False  # whether all steps were
        self.traffic_until_s = scenario.for_s - (scenario.expect.same_routes_s or 0.0)
        self.began_s = trio.current_time()
        self.acting: list[trio.CancelScope] = []  # these end with the run's time

    def clock(self) -> float:
        return trio.current_time() - self.began_s

    def node(self, place: NodePlace) -> Any:
        label, prefix = self.labels.get(place.number, ""), self.control.prefix(place.number)
        gossip = self.options.gossip
        command = node_command(self.plan, place, self.scenario.cluster, gossip=gossip, label=label, prefix=prefix)
        return replace(command, tree=self.options.first_tree) if self.nodes[place.number].generation == 1 else command

    def engine(self, place: EnginePlace) -> Member:
        return Member(place.name, place.name, partial(engine_command, self.options.engines, place))

    async def run(self) -> Outcome:
        """Run the scenario. Raises ChildNotReady, CannotDo, OSError; leaves no process."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            fleet = Fleet(self.log, logs, self.clock, nursery)
            try:
                with trio.move_on_after(self.scenario.for_s + LATE_S_MAX + START_S + LAST_ANSWERS_S) as patience:
                    await self.begin(nursery, fleet)
                    await self.traffic_and_steps()
                    for engine in self.engines if self.scenario.expect.uneven_share_max is not None else ():
                        await self.engine_watch.take(engine)
                    await self.end(fleet)
            finally:
                await fleet.end()
            nursery.cancel_scope.cancel()
        return self.outcome(trio.current_time() - began_s, patience.cancelled_caught)

    async def begin(self, nursery: trio.Nursery, fleet: Fleet) -> None:
        """Set up names and links, and start the engines and the first nodes."""
        if self.mode.name == "namespaces":
            states = [place.state_dir for place in self.plan.nodes]
            control = NamespaceControl(self.links, len(self.nodes), states, self.folder / "resolv.conf")
            await control.set_up()
            self.control = control
        elif self.mode.name == "relay":
            ends = [place.gossip for place in self.plan.nodes]
            rng = Random(f"{self.options.seed}/relay")
            self.relay = Relay(ends, self.links, rng, self.options.recorder)
            await nursery.start(self.relay.run)
            self.control = LinkControl(self.relay.wake)
        self.server = await nursery.start(serve_dns, self.zone, *self.plan.dns)
        self.steps = self.make_steps(fleet)
        for place in self.plan.nodes:
            write_keys(place, [FIRST_KEY], self.options.seed)
        async with trio.open_nursery() as starting:
            for engine in self.engines:
                starting.start_soon(fleet.start, engine)
        await self.start_nodes(nursery)

    async def start_nodes(self, nursery: trio.Nursery) -> None:
        """Start the first nodes. The run's time begins when all are ready; if they start spread, when the first is."""
        first = numbers(self.scenario.cluster.running)
        spread_s = self.scenario.cluster.spread_s
        if not spread_s:
            async with trio.open_nursery() as starting:
                for number in first:
                    starting.start_soon(self.steps.start_node, number)
        else:
            await self.steps.start_node(first[0])
            nursery.start_soon(self.start_spread, first[1:], spread_s / max(1, len(first)))
        self.report(
            f"{len(first)} nodes and {len(self.engines)} engines run; links: {self.mode.name} ({self.mode.why})"
        )
        self.began_s = trio.current_time()

    async def start_spread(self, numbers: Sequence[int], gap_s: float) -> None:
        async with trio.open_nursery() as starting:
            for number in numbers:
                await trio.sleep(gap_s)
                starting.start_soon(self.steps.start_node, number)

    def make_steps(self, fleet: Fleet) -> ProcessSteps:
        cluster = self.scenario.cluster
        return ProcessSteps(
            self.plan,
            fleet,
            self.nodes,
            self.engines,
            self.engine,
            self.zone,
            self.links,
            self.control,
            beginning=tuple(self.plan.nodes[number].ip for number in numbers(cluster.running)),
            dns=cluster.dns,
            seed=self.options.seed,
            watch=self.watch,
            engine_watch=self.engine_watch,
        )

    async def traffic_and_steps(self) -> None:
        """Run traffic and steps. Where the scenario expects equal tables, traffic ends earlier, as in the simulator."""
        load, seed, until_s = self.scenario.load, self.options.seed, self.traffic_until_s
        async with trio.open_nursery() as acting:
            acting.start_soon(self.watch_peers)
            acting.start_soon(self.carry_out_steps)
            if load is not None:
                settings = self.options.engines
                port = self.plan.nodes[0].port
                target = Target(CLIENTS_NAME, port, model=settings.model, max_tokens=settings.max_tokens)
                clients = Clients(target, self.log, self.server, self.began_s)
                talks = all_conversations(load, self.scenario.steps, until_s, seed)
                acting.start_soon(clients.run_open, talks, until_s)

    def run_time(self) -> trio.CancelScope:
        """Return a scope for the time of the run, which grows with `late_s`."""
        scope = trio.CancelScope(deadline=self.began_s + self.scenario.for_s + self.steps.late_s)
        self.acting.append(scope)
        return scope

    async def wait_for_loading(self) -> None:
        """Prolong the run on a slow machine, so that it does not end while a process is being started."""
        steps = self.steps
        while steps.late_s < LATE_S_MAX:
            await trio.sleep(LOOK_S)
            now_s, since_s = self.clock(), min(steps.loading.values(), default=inf)
            ends_s = self.scenario.for_s + steps.late_s
            if since_s + LOADING_S < now_s or (since_s < now_s and ends_s < now_s + 2 * LOOK_S):
                steps.late_s += LOOK_S
                for scope in self.acting:
                    scope.deadline += LOOK_S

    async def carry_out_steps(self) -> None:
        """Carry out the steps until the run's time ends. On a slow machine they end later than the scenario says."""
        with self.run_time():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.wait_for_loading)
                await self.steps.run(self.scenario.steps)
                nursery.cancel_scope.cancel()
            self.quiet_s = max(self.quiet_s, self.clock())
            self.carried_out = True

    async def watch_peers(self) -> None:
        """Watch the nodes for the run's time, but not while clients wait for their last answers."""
        with self.run_time():
            if self.options.gossip:
                await self.watch.run(max(self.traffic_until_s, self.quiet_s))
            await trio.sleep_forever()

    async def end(self, fleet: Fleet) -> None:
        """Ask all running processes to end. Each must exit with code 0."""
        async with trio.open_nursery() as ending:
            for member in (*self.nodes, *self.engines):
                fleet.wake(member)  # a pause may be longer than the run
                ending.start_soon(fleet.stop, member)

    def outcome(self, took_s: float, timed_out: bool) -> Outcome:
        scenario = self.scenario
        first_step_s = min((step.at_s for step in scenario.steps if step.do != "load"), default=scenario.for_s)
        hits = hit_report(self.log, first_step_s, self.quiet_s, self.traffic_until_s)
        counts = {"dns": dict(self.zone.counts), "relay": dict(self.relay.counts) if self.relay is not None else {}}
        verdicts = tuple(self.verdicts(hits))
        notes = {"membership": self.watch.census.disagreement, "routes": self.watch.census.difference}
        late = hits_back_s(hits, scenario.expect, self.quiet_s, self.traffic_until_s) == {}
        if scenario.expect.hits_back_s is not None and late:
            notes["hits"] = f"steps ended at {self.quiet_s:.0f} s: too late to see hits come back"
        log, late_s = self.log, self.steps.late_s
        if late_s and not self.carried_out:
            notes["steps"] = f"the machine was {late_s:.0f} s late, so that not all were carried out"
        if scenario.expect.uneven_share_max is not None:
            notes["queues"] = self.engine_watch.unevenness(self.traffic_until_s).text
        return Outcome(scenario, self.options, self.mode, log, hits, verdicts, took_s, counts, timed_out, late_s, notes)

    def verdicts(self, hits: dict[str, float | None]) -> list[Verdict]:
        """Judge every bound that the scenario names."""
        scenario, expect, quiet_s = self.scenario, self.scenario.expect, self.quiet_s
        measured: dict[str, float | None] = {"hit_share_min": hits["share"]}
        if expect.hit_points_lost_max is not None:
            measured["hit_points_lost_max"] = points_lost(hits["whole"], self.options.hits_without_faults)
        if expect.uneven_share_max is not None:
            measured["uneven_share_max"] = self.engine_watch.unevenness(self.traffic_until_s).share
        measured |= hits_back_s(hits, expect, quiet_s, self.traffic_until_s)
        if scenario.load is not None:
            measured["failed_requests_max"] = len(self.log.failed)
        if self.options.gossip:
            census, ran_s = self.watch.census, scenario.for_s + self.steps.late_s
            measured |= {
                "agree_s": census.agree_s(quiet_s),
                "same_routes_s": census.same_s(max(quiet_s, self.traffic_until_s)),
                "dead_s": census.dead_s(),
                "false_deaths_max": len(census.false_deaths) if census.rounds else None,
                "bytes_per_node_s_max": census.bytes_per_node_s(scenario.cluster.nodes, ran_s),
                "learned_s": None,
            }
        return judge(expect, measured)


async def run_scenario(scenario: Scenario, mode: LinkMode, options: Options, folder: Path, report: Report) -> Outcome:
    """Run a scenario, which must be settled. `folder` gets logs, keys and state files."""
    return await Run(scenario, mode, options, folder, report).run()
