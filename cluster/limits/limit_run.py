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
CUT_S = 30.0
RESERVED = PROMPT_TOKENS + MEAN_TOKENS
NEEDED = PROMPT_TOKENS + 3605  # what nine in ten requests take no more than


@dataclass(frozen=True)
class LimitCase:
    """`skew`: the share of clients at the first node; `cut_s`: when half of the nodes are cut off for CUT_S, `kill_s`:
    when the last node is killed; 0: never."""

    nodes: int = 4
    loss: float = 0.2
    per_minute: int = 100_000
    offered: float = 2.0
    skew: float = 0.8
    cut_s: float = 0.0
    kill_s: float = 0.0
    for_s: float = 300.0

    @property
    def first_half(self) -> tuple[int, ...]:
        """The nodes that are cut off from the others."""
        return tuple(range(self.nodes // 2))

    @property
    def think_s(self) -> float:
        """How long a client waits on average from an answer to its next request."""
        return CLIENTS * 60.0 * (PROMPT_TOKENS + 2000) / (self.offered * self.per_minute)

    def node_of(self, client: int) -> int:
        """Return which node a client asks."""
        at_first = self.nodes == 1 or client < self.skew * CLIENTS
        return 0 if at_first else 1 + client % (self.nodes - 1)

    def scenario(self) -> Scenario:
        steps = [Step(at_s=0.0, do="link", nodes="all", loss=self.loss)] if self.loss else []
        if self.cut_s:
            steps.append(Step(at_s=self.cut_s, do="cut", nodes=self.first_half, for_s=CUT_S))
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
    """One run, of which `go` returns the measures."""

    case: LimitCase
    seed: int
    run: Run = field(init=False)
    served: list[Served] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)  # when
    groups: dict[tuple[int, int], MeterGroup] = field(default_factory=dict)  # by node and its generation

    def __post_init__(self) -> None:
        self.run = Run(self.case.scenario(), self.seed, sim_nodes())

    def go(self) -> LimitMeasures:
        world, rng = self.run.world, self.run.world.rng("limited clients")
        for client in range(CLIENTS):
            world.time.after(1.0 + rng.random() * RAMP_S, self._begin, client)
        world.time.after(0.0, self._take_part)
        result = self.run.result()
        assert result.violation is None, result.violation
        return measured(self.served, self.refusals, SETTLED_S, self.case.for_s, self.case.per_minute)

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
        self._send(client, self.case.node_of(client), rng.randint(*ANSWER_TOKENS))

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
            time.after(seconds + rng.expovariate(1 / self.case.think_s), self._begin, client)
        else:
            self.refusals.append(now)
            time.after(rng.uniform(0.05, 0.15), self._send, client, host.index, answer)

    def _settle(self, host: SimHost, generation: int, grant: Grant, answer: int) -> None:
        took = Amounts(PROMPT_TOKENS + answer, PROMPT_TOKENS + answer)
        if host.generation == generation:
            host.run(lambda node, _: node.peer.features.limits.begin().settle(took, grant))


# --- measures ---------------------------------------------------------------------------------------------------------


def measured(
    served: Sequence[Served], refusals: Sequence[float], begin: float, end: float, per_minute: float
) -> LimitMeasures:
    """Measure between two moments what was served, by admission, and when the others were refused."""
    minutes = sliding(served, begin, end, per_minute)
    loose = sliding(served, begin, end, per_minute, LOOSE_S)
    held = [held_at(served, at, MINUTE_S) / per_minute for at in looks(begin, end)]
    refused = [at for at in refusals if begin <= at <= end]
    false = sum(held_at(served, at, LOOSE_S) + NEEDED < FALSE_SHARE * per_minute for at in refused)
    mean, held_mean = sum(minutes) / len(minutes), sum(held) / len(held)
    shares = max(minutes), min(minutes), min(loose), mean, max(held), held_mean
    most, least, loosely, mean, held_most, held_mean = (round(share, 4) for share in shares)
    requests = sum(begin <= one.at <= end for one in served) + len(refused)
    return LimitMeasures(most, least, loosely, mean, held_most, held_mean, requests, len(refused), false)


def held_at(served: Sequence[Served], at: float, seconds: float) -> float:
    """Return what a limit held at a moment of what was admitted in so many seconds before."""
    held = 0.0
    for one in reversed(served):
        if one.at <= at - seconds:
            break
        if one.at <= at:
            held += one.tokens if one.ends <= at else RESERVED
    return held


def looks(begin: float, end: float) -> list[float]:
    return [begin + step * LOOK_S for step in range(int((end - begin) / LOOK_S))]


def sliding(
    served: Sequence[Served], begin: float, end: float, per_minute: float, seconds: float = MINUTE_S
) -> list[float]:
    """Return what was served in minutes that end between two moments: each LOOK_S, and after each admission."""
    times = [one.at for one in served]
    sums = [0, *accumulate(one.tokens for one in served)]
    ends = [*looks(begin, end), *[at for at in times if begin <= at <= end]]
    return [(sums[bisect_right(times, at)] - sums[bisect_right(times, at - seconds)]) / per_minute for at in ends]
