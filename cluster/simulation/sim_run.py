"""Runs one scenario with a seed: the world, its faults, its checkers and its measures. Returns a Result.

The same scenario and seed give the same Result in every process, down to the hash of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from cluster.scenario import Scenario
from cluster.simulation.attacker import Attacker
from cluster.simulation.invariants import Invariants
from cluster.simulation.measures import Measure
from cluster.simulation.outcome_checks import OutcomeChecks
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_node import Maker
from cluster.simulation.sim_steps import SimSteps
from cluster.simulation.world import Result, Violated, World
from ranvier_py.core.mesh.mesh_values import MemberChange
from ranvier_py.core.prompts.prompt import Boundary

SAMPLE_S = 1.0


class Run:
    """The parts of one run, for callers that inspect them afterwards."""

    def __init__(self, scenario: Scenario, seed: int, maker: Maker, out: TextIO | None = None) -> None:
        self.sampled: Callable[[World], object] | None = None  # called each virtual second
        self.world = World(scenario, seed, maker, out)
        self.steps = SimSteps(self.world)
        self.invariants = Invariants(self.world)
        self.measure = Measure(self.world)
        self.checks = OutcomeChecks(self.world, self.steps, self.invariants, self.measure)
        if any(step.do == "attack" for step in self.world.scenario.steps):
            self.steps.attacker = Attacker(
                self.world.net, self.world.addresses, self.world.rng("attacker"), self.invariants
            )
        for host in self.world.hosts:
            host.raised = self.invariants.raised
            host.changed = self._changed
            host.received = self.measure.received
        self.world.clients.served = self._served
        self.world.clients.failed = self.invariants.failed

    def _changed(self, host: SimHost, change: MemberChange) -> None:
        self.measure.changed(host, change)
        self.invariants.changed(host, change)

    def _served(self, host: SimHost, end: Boundary, engine: int) -> None:
        self.invariants.served(host, end, engine)
        self.measure.served(host, end, engine)

    def _sample(self) -> None:
        self.invariants.sample()
        self.measure.sample()
        if self.sampled is not None:
            self.sampled(self.world)
        self.world.time.after(SAMPLE_S, self._sample)

    def result(self) -> Result:
        """Run the scenario to its end or to the first violation."""
        world, violation = self.world, None
        self.steps.plan()
        world.clients.start()
        self.checks.plan()
        world.time.after(SAMPLE_S, self._sample)
        try:
            world.time.run(world.scenario.for_s)
            self.checks.end()
        except Violated as found:
            violation = found.violation
        measures = self.measure.summary() | self.checks.measures()
        return Result(
            scenario=world.scenario,
            seed=world.seed,
            violation=violation,
            last=world.trace.last((-1, *(violation.nodes if violation else ()))),
            digest=world.trace.digest(),
            events=world.time.done,
            measures=measures,
        )


def simulate(
    scenario: Scenario,
    seed: int,
    maker: Maker,
    out: TextIO | None = None,
    sampled: Callable[[World], object] | None = None,
) -> Result:
    """Run a scenario, see the module. `sampled` is called each virtual second."""
    whole = Run(scenario, seed, maker, out)
    whole.sampled = sampled
    return whole.result()
