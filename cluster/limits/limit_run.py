"""A limit of tokens a minute over a simulated cluster: clients that ask for more than it, and what they were served.

Clients work in a closed loop: a request that is refused is tried again within a tenth of a second, so that somebody
always waits. Work counts in the minute of its admission, as it ended; `held` counts what runs at its estimate, as the
limit does. A refusal is false if what was held in the last 61 s, as long as a minute may be, is with the request below
FALSE_SHARE of the limit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from cluster.scenario import Cluster, Scenario, Step
from cluster.simulation.sim_host import SimHost
from cluster.simulation.sim_node import SimNode, sim_nodes
from cluster.simulation.sim_run import Run
from ranvier_py.core.access.limit_values import Limits
from ranvier_py.core.access.limits.limiter import Grant, HomeQuestion, Refusal
from ranvier_py.core.access.limits.meter_groups import Excess, MeterGroup
from ranvier_py.core.access.limits.meters import Amounts, meters_of

MINUTE_S, LOOSE_S = 60.0, 61.0
FALSE_SHARE = 0.95
PROMPT_TOKENS, ANSWER_TOKENS = 500, (10, 4000)
MEAN_TOKENS, EXCESS = 2005, Excess(1152.0**2, 1995.0)  # of such answers: what a request reserves beside its prompt
TOKENS_PER_S = 1000.0  # of one answer
CLIENTS = 32
RAMP_S = 60.0  # within which clients begin
SETTLED_S = 120.0  # from when on it is measured
LOOK_S = 0.1
RESERVED = PROMPT_TOKENS + MEAN_TOKENS
NEEDED = PROMPT_TOKENS + 3605  # what nine in ten requests take no more than


@dataclass(frozen=True)
class LimitCase:
    """`skew`: the share of clients at the first node; `cut_s`: when half of the nodes are cut off for 30 s, `kill_s`:
    when the last node is killed; 0: never."""

    nodes: int = 4
    loss: float = 0.2
    per_minute: int = 100_000
    offered: float = 2.0
    skew: float = 0.8
    cut_s: float = 0.0
    kill_s: float = 0.0
    for_s: float = 300.0

    def scenario(self) -> Scenario:
        steps = [Step(at_s=0.0, do="link", nodes="all", loss=self.loss)] if self.loss else []
        if self.cut_s:
            steps.append(Step(at_s=self.cut_s, do="cut", nodes=tuple(range(self.nodes // 2)), for_s=30.0))
        if self.kill_s:
            steps.append(Step(at_s=self.kill_s, do="kill", nodes=(self.nodes - 1,), down_s=0.0))
        cluster = Cluster(nodes=self.nodes, engines=1, formed=True)
        return Scenario("limits", "A limit under load beyond it.", self.for_s, cluster, steps=tuple(steps))


@dataclass(slots=True)
class Served:
    """One request that was let in. `tokens`: what it took in the end; until `ends` it holds RESERVED."""

    at: float
    tokens: int
    ends: float
    node: int


class LimitMeasures(NamedTuple):
    """What was served and held in sliding minutes, as shares of the limit, and at least in LOOSE_S, the longest one;
    of all requests those refused, falsely."""

    served_most: float
    served_least: float
    served_least_61s: float
    served_mean: float
    held_most: float
    held_mean: float
    requests: int
    refused: int
    false: int


@dataclass(slots=True)
class LimitRun:
    """One run. Call `measure` after `go`."""

    case: LimitCase
    seed: int
    run: Run = field(init=False)
    served: list[Served] = field(default_factory=list)
    refusals: list[tuple[float, bool]] = field(default_factory=list)  # when, and whether it was false
    held: list[tuple[float, float]] = field(default_factory=list)
    groups: dict[tuple[int, int], MeterGroup] = field(default_factory=dict)  # by node and its generation

    def __post_init__(self) -> None:
        self.run = Run(self.case.scenario(), self.seed, sim_nodes())

    def go(self) -> LimitMeasures:
        world, rng = self.run.world, self.run.world.rng("limited clients")
        for client in range(CLIENTS):
            world.time.after(1.0 + rng.random() * RAMP_S, self._begin, client)
        world.time.after(SETTLED_S, self._look)
        world.time.after(0.0, self._take_part)
        result = self.run.result()
        assert result.violation is None, result.violation
        return self.measure(SETTLED_S, self.case.for_s)

    def _take_part(self) -> None:
        """Let nodes have limits, also those that were started since."""

        def begin(node: SimNode, _: float) -> None:
            node.peer.features.limits.begin()

        for host in self.run.world.hosts:
            if host.node is not None and host.node.peer.features.limits.limiter is None:
                host.run(begin)
        self.run.world.time.after(0.5, self._take_part)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _begin(self, client: int) -> None:
        rng = self.run.world.rng(f"client {client} {len(self.served)} {len(self.refusals)}")
        nodes = self.case.nodes
        at_first = nodes == 1 or client < self.case.skew * CLIENTS
        self._send(client, 0 if at_first else 1 + client % (nodes - 1), rng.randint(*ANSWER_TOKENS))

    def _send(self, client: int, number: int, answer: int) -> None:
        world = self.run.world
        host, found = world.hosts[number], list[Grant | Refusal | HomeQuestion]()
        group = self.groups.get((number, host.generation))
        if group is None:
            limits = Limits(tokens_per_minute=self.case.per_minute)
            group = self.groups[number, host.generation] = MeterGroup(meters_of("tenant a", limits, "a"))

        def reserve(node: SimNode, now: float) -> None:
            limiter = node.peer.features.limits.begin()
            found.append(limiter.reserve(group, Amounts(RESERVED, RESERVED), now, excess=EXCESS))

        host.run(reserve)
        if not found:  # it does not run
            world.time.after(1.0, self._send, client, number, answer)
        elif isinstance(question := found[0], HomeQuestion) and question.outcome is None:
            question.decided = partial(self._decided, client, host, question, answer)
        else:
            outcome = question.outcome if isinstance(question, HomeQuestion) else question
            self._answered(client, host, outcome, answer)

    def _decided(self, client: int, host: SimHost, question: HomeQuestion, answer: int) -> None:
        self._answered(client, host, question.outcome, answer)

    def _answered(self, client: int, host: SimHost, outcome: Grant | Refusal | None, answer: int) -> None:
        time, rng = self.run.world.time, host.rng
        now = time.now
        if isinstance(outcome, Grant):
            seconds = answer / TOKENS_PER_S
            self.served.append(Served(now, PROMPT_TOKENS + answer, now + seconds, host.index))
            time.after(seconds, self._settle, host, host.generation, outcome, answer)
            think_s = CLIENTS * 60.0 * (PROMPT_TOKENS + 2000) / (self.case.offered * self.case.per_minute)
            time.after(seconds + rng.expovariate(1 / think_s), self._begin, client)
        else:
            is_false = self._held(LOOSE_S) + NEEDED < FALSE_SHARE * self.case.per_minute
            self.refusals.append((now, is_false))
            time.after(rng.uniform(0.05, 0.15), self._send, client, host.index, answer)

    def _settle(self, host: SimHost, generation: int, grant: Grant, answer: int) -> None:
        took = Amounts(PROMPT_TOKENS + answer, PROMPT_TOKENS + answer)
        if host.generation == generation:
            host.run(lambda node, _: node.peer.features.limits.begin().settle(took, grant))

    # --- measures ---------------------------------------------------------------------------------------------------

    def _held(self, seconds: float) -> float:
        now = self.run.world.time.now
        held = 0.0
        for one in reversed(self.served):
            if one.at <= now - seconds:
                break
            held += one.tokens if one.ends <= now else RESERVED
        return held

    def _look(self) -> None:
        self.held.append((self.run.world.time.now, self._held(MINUTE_S) / self.case.per_minute))
        self.run.world.time.after(LOOK_S, self._look)

    def measure(self, begin: float, end: float) -> LimitMeasures:
        """Measure between two moments."""
        minutes = sliding(self.served, begin, end, self.case.per_minute)
        held = [share for at, share in self.held if begin <= at <= end]
        refused = [is_false for at, is_false in self.refusals if begin <= at <= end]
        served = sum(begin <= one.at <= end for one in self.served)
        mean = sum(minutes) / len(minutes)
        loose = sliding(self.served, begin, end, self.case.per_minute, LOOSE_S)
        shares = max(minutes), min(minutes), min(loose), mean, max(held), sum(held) / len(held)
        most, least, loosely, mean, held_most, held_mean = (round(share, 4) for share in shares)
        requests = served + len(refused)
        return LimitMeasures(most, least, loosely, mean, held_most, held_mean, requests, len(refused), sum(refused))


def sliding(
    served: Sequence[Served], begin: float, end: float, per_minute: float, seconds: float = MINUTE_S
) -> list[float]:
    """Return what was served in minutes that end between two moments: each LOOK_S, and after each admission."""
    times = [one.at for one in served]
    sums = [0, *accumulate(one.tokens for one in served)]
    looks = [begin + step * LOOK_S for step in range(int((end - begin) / LOOK_S))]
    ends = [*looks, *[at for at in times if begin <= at <= end]]
    return [(sums[bisect_right(times, at)] - sums[bisect_right(times, at - seconds)]) / per_minute for at in ends]
