"""Draws schedules of faults from a seed: which kinds, how many, how bad, and when.

Each seed switches each kind on or off, so that some runs have one kind in depth and some have a rare pair. Half of the
seeds are *safety* runs: everything heals, and then all nodes must agree. The other half are *liveness* runs: a core of
nodes is mended for good, and the others stay as broken as they are. A schedule is a scenario, which can be printed,
kept, shrunk, and run again without the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from cluster.scenario import Cluster, Dns, Expect, Load, Scenario, Step
from cluster.simulation.sim_host import RESOLVE_S, RESOLVE_SPREAD
from cluster.simulation.world import Violation

WARM_S = 8.0
"""The time for the cluster to form before most faults begin; some faults begin at the start all the same."""

FAULT_SHARE = 0.45
"""The share of the run, after WARM_S, in which faults happen; the rest is for recovery."""

AGREE_SHARE = 0.9
"""The share of the recovery after which all must agree."""

BY_NAME_S = RESOLVE_S * (1 + RESOLVE_SPREAD) + 4.0
"""The longest time to the next look-up of a node that has peers, and until all know whom it found."""


class Draw:
    """The ranges from which a kind of fault draws."""

    def __init__(self, rng: Random, nodes: int, engines: int, begin: float, end: float) -> None:
        self.rng = rng
        self.nodes = nodes
        self.engines = engines
        self.begin = begin
        self.end = end

    def when(self) -> float:
        return round(self.rng.uniform(self.begin, self.end), 2)

    def long(self, least: float, most: float, at: float) -> float:
        """Draw a duration within these, short ones more often; it ends at the latest when the faults end."""
        drawn = float(least * (most / least) ** self.rng.random())
        return round(max(0.1, min(drawn, self.end - at)), 2)

    def lasting(self, verb: str, least_s: float, most_s: float, early: float = 0.0, **fields: Any) -> Step:
        """Draw a step that is undone; with the chance `early` it begins at the start of the run."""
        at = 0.0 if self.rng.random() < early else self.when()
        return Step(at, verb, for_s=self.long(least_s, most_s, at), **fields)

    def some(self) -> tuple[int, ...]:
        """Draw nodes: most often one, at most all but one."""
        count = min(self.nodes - 1, 1 + int(self.rng.expovariate(0.7))) if self.nodes > 1 else 1
        return tuple(sorted(self.rng.sample(range(self.nodes), max(1, count))))

    def split(self) -> tuple[int, ...]:
        """Draw the nodes of one side of a partition."""
        count = self.rng.randint(1, max(1, self.nodes - 1))
        return tuple(sorted(self.rng.sample(range(self.nodes), count)))

    def share(self, most: float) -> float:
        return round(most * self.rng.random() ** 2, 3)


def restart(draw: Draw) -> Step:
    rng = draw.rng
    down_s, every_s = round(rng.choice((0.1, 0.5, 2.0, 8.0)) * rng.random(), 2), rng.choice((0.0, 0.1, 1.0))
    keep = rng.random() < 0.6
    return Step(draw.when(), "restart", nodes=draw.split(), down_s=down_s, every_s=every_s, keep_state=keep)


def messy(draw: Draw) -> Step:
    """Draw duplicates, disorder and flipped bits from the start on."""
    late_s, shares = draw.rng.choice((0.01, 0.1, 1.0)), [draw.share(most) for most in (0.5, 0.8, 0.1)]
    duplicate, reorder, corrupt = shares
    bad = Step(0.0, "link", nodes="all", duplicate=duplicate, reorder=reorder, reorder_s=late_s, corrupt=corrupt)
    return replace(bad, for_s=round(draw.end, 2))


def far(draw: Draw) -> Step:
    delay_s = draw.rng.choice((0.02, 0.1, 0.3))
    return draw.lasting("link", 5.0, 60.0, early=0.5, nodes=draw.some(), delay_s=delay_s, jitter_s=delay_s / 4)


def cut(draw: Draw) -> Step:
    one_direction, refuse = draw.rng.random() < 0.3, draw.rng.random() < 0.2
    return draw.lasting("cut", 1.0, 40.0, nodes=draw.split(), one_direction=one_direction, refuse=refuse)


def partial(draw: Draw) -> Step:
    """Draw two nodes that do not reach each other; both reach all others."""
    one, other = draw.rng.sample(range(draw.nodes), 2)
    return draw.lasting("cut", 2.0, 40.0, nodes=(one,), others=(other,))


def names(draw: Draw) -> Step:
    word = draw.rng.choice(("subset", "empty", "self", "stale", "failing", "slow", "flapping"))
    return draw.lasting("dns", 5.0, 60.0, early=0.5, dns=word, nodes=draw.split())


def in_time(step: Step, end: float) -> Step:
    """Let a step's nodes follow each other so fast that the last one is mended by the end of the faults."""
    if not isinstance(step.nodes, tuple) or len(step.nodes) < 2:
        return step
    left_s = max(0.0, end - step.at_s - step.for_s - step.down_s)
    return replace(step, every_s=min(step.every_s, round(left_s / (len(step.nodes) - 1), 3)))


Kind = tuple[Callable[[Draw], Step], float]
"""A kind of fault, and the chance that a seed has it."""

KINDS: tuple[Kind, ...] = (
    (lambda draw: Step(draw.when(), "kill", nodes=draw.some()), 0.35),
    (restart, 0.45),
    (lambda draw: Step(draw.begin, "roll", nodes=draw.split(), every_s=0.5 + draw.rng.random(), down_s=0.5), 0.15),
    (lambda draw: draw.lasting("pause", 0.3, 60.0, nodes=draw.some()), 0.4),
    (lambda draw: draw.lasting("slow", 2, 30, nodes=draw.some(), factor=draw.rng.choice((5.0, 20.0, 50.0))), 0.25),
    (cut, 0.45),
    (partial, 0.3),
    # cut off one after the other and reconnected in the same order, with overlaps
    (lambda draw: draw.lasting("cut", 1.0, 10.0, nodes=draw.split(), every_s=draw.rng.uniform(0.2, 2.0)), 0.2),
    (lambda draw: draw.lasting("cut", 3.0, 40.0, nodes=draw.some(), planes=("udp",)), 0.15),
    (lambda draw: draw.lasting("cut", 3.0, 40.0, nodes=draw.some(), planes=("tcp",)), 0.15),
    (lambda draw: draw.lasting("link", 5.0, 60.0, early=0.5, nodes="all", loss=draw.share(0.5)), 0.4),
    (messy, 0.3),
    (far, 0.2),
    (lambda draw: Step(0.0, "disk_full", nodes=draw.split()), 0.15),
    (names, 0.3),
    (lambda draw: draw.lasting("flood", 1.0, 5.0, nodes=(draw.rng.randrange(draw.nodes),), chats_per_s=50.0), 0.1),
    (lambda draw: Step(0.0, "attack", nodes=draw.split(), packets_per_s=4.0, for_s=draw.end), 0.3),
)

ENGINE_KINDS: tuple[Kind, ...] = (
    (lambda draw: Step(draw.when(), "engine_restart", engines=(draw.rng.randrange(draw.engines),)), 0.7),
    (lambda draw: draw.lasting("engine_stop", 2.0, 20.0, engines=(draw.rng.randrange(draw.engines),)), 0.5),
)
"""Separate, because they test something else: whether nodes know which process of an engine holds what."""


def swarm(seed: int, nodes: int, for_s: float, *, engines_fail: bool = False) -> Scenario:
    """Return the schedule of a seed, for so many nodes and virtual seconds, or for more if BY_NAME_S needs them."""
    rng = Random(f"{seed}/swarm")
    engines = rng.randint(2, 4)
    end = WARM_S + FAULT_SHARE * (for_s - WARM_S)
    draw = Draw(rng, nodes, engines, WARM_S, end)
    steps: list[Step] = []
    for kind, chance in (*KINDS, *(ENGINE_KINDS if engines_fail else ())):
        if rng.random() < chance and (nodes > 1 or kind is not partial):
            steps += [in_time(kind(draw), end) for _ in range(1 + int(rng.expovariate(1.0)))]
    steps.sort(key=lambda step: step.at_s)
    liveness = nodes >= 3 and rng.random() < 0.5
    steps += ending(rng, nodes, end + 2.0, liveness=liveness)
    cluster = Cluster(nodes=nodes, engines=engines, spread_s=rng.choice((0.0, 0.5, 3.0)), dns=rng.choice(DNS_MOSTLY))
    left = for_s - end - 2.0
    if by_name(cluster.dns, steps):
        left = max(left, BY_NAME_S / AGREE_SHARE)
    return Scenario(
        name=f"swarm{'-engines' if engines_fail else ''}-{seed}",
        about="liveness: a core heals" if liveness else "safety: everything heals",
        for_s=max(for_s, round(end + 2.0 + left, 2)),
        cluster=cluster,
        load=Load(chats_per_s=round(rng.choice((0.3, 1.0, 3.0)), 1), turns=3, think_s=0.5),
        steps=tuple(steps),
        expect=Expect(
            agree_s=left * AGREE_SHARE,
            same_routes_s=None if liveness else left * 0.4,
        ),
    )


DNS_MOSTLY: tuple[Dns, ...] = ("all", "all", "all", "subset", "flapping")


def by_name(dns: Dns, steps: list[Step]) -> bool:
    """Whether nodes may be left that only the name can tell of each other: new processes that a cut or a wrong answer
    kept from the others. Processes that have met keep each other's addresses."""
    began = any(step.do in ("restart", "roll") for step in steps)
    return began or dns != "all" or any(step.do == "dns" and step.dns != "all" for step in steps)


def ending(rng: Random, nodes: int, at: float, *, liveness: bool) -> list[Step]:
    """Return the steps that end the faults."""
    if liveness:
        core = tuple(sorted(rng.sample(range(nodes), max(2, nodes * 2 // 3))))
        outside = tuple(number for number in range(nodes) if number not in core)
        broken = [Step(at, "cut", nodes=outside, one_direction=True)] if rng.random() < 0.5 else []
        return [*broken, Step(at, "dns", dns="all", nodes=core), Step(at, "core", nodes=core)]
    everyone = tuple(range(nodes))
    return [Step(at, "heal"), Step(at, "dns", dns="all", nodes=everyone), Step(at, "core", nodes=everyone)]


RUNS_MAX = 400

Fails = Callable[[Scenario], Violation | None]


def shrink(scenario: Scenario, invariant: str, run: Fails, enough: Callable[[], bool]) -> tuple[Scenario, int]:
    """Return the smallest failing scenario found, and the number of runs; ends early when `enough` returns True."""
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
    """Yield smaller scenarios, the boldest first."""
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
    """Yield the step with one node less. A core stays: it names the nodes that are checked at the end."""
    if isinstance(step.nodes, tuple) and len(step.nodes) > 1 and step.do != "core":
        for number in step.nodes:
            yield replace(step, nodes=tuple(one for one in step.nodes if one != number))


def shortened(scenario: Scenario, violation: Violation) -> Scenario:
    """Drop the steps after the violation, which had no part in it."""
    return replace(scenario, steps=tuple(step for step in scenario.steps if step.at_s <= violation.at_s))
