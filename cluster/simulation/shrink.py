"""Make a failing schedule small: leave out what it fails without. In: a scenario that fails. Out: a smaller one.

Halves of the steps go first, then single steps, then nodes out of steps, then the traffic; what still breaks the same
invariant is kept. It works on the expanded list, never on the seed: another draw would be another run. Bound: so many
runs, or so much time on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.scenario import Scenario, Step
from cluster.simulation.world import Violation

RUNS_MAX = 400

Fails = Callable[[Scenario], Violation | None]


def shrink(scenario: Scenario, invariant: str, run: Fails, enough: Callable[[], bool]) -> tuple[Scenario, int]:
    """The smallest that was found, and how many runs it took. `enough` says when to stop."""
    runs = 0
    again = True
    while again:
        again = False
        for smaller in candidates(scenario):
            if runs >= RUNS_MAX or enough():
                return scenario, runs
            runs += 1
            found = run(smaller)
            if found is not None and found.invariant == invariant:
                scenario, again = shortened(smaller, found), True
                break
    return scenario, runs


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller ones, the boldest first."""
    steps = scenario.steps
    size = len(steps) // 2
    while size >= 1:
        for begin in range(0, len(steps), size):
            yield replace(scenario, steps=steps[:begin] + steps[begin + size :])
        size //= 2
    if scenario.load is not None:
        yield replace(scenario, load=None)
    for position, step in enumerate(steps):
        for simpler in simpler_steps(step):
            yield replace(scenario, steps=(*steps[:position], simpler, *steps[position + 1 :]))


def simpler_steps(step: Step) -> Iterator[Step]:
    """The same with one node less. A core must stay as it is: it says who is asked at the end."""
    if isinstance(step.nodes, tuple) and len(step.nodes) > 1 and step.do != "core":
        for number in step.nodes:
            yield replace(step, nodes=tuple(one for one in step.nodes if one != number))


def shortened(scenario: Scenario, violation: Violation) -> Scenario:
    """Steps after the failure had no part in it."""
    return replace(scenario, steps=tuple(step for step in scenario.steps if step.at_s <= violation.at_s))
