"""A replay whose routers know as much of the engines' caches as a test wants: nothing, what answers teach, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.ids import BackendId
from ranvier_py.replay.engine.block_cache import BlockRemoved
from ranvier_py.replay.engine.model import EngineLimits, EngineModel
from ranvier_py.replay.replay_nodes import Nodes, NodeSettings, Placed, Prepared
from ranvier_py.replay.replay_run import Plan, Run, arrivals_of
from ranvier_py.replay.trace import Trace
from tests.replay.synthetic import BLOCK, conversation

TICK_S = 1.0


def pressed(chats: int, turns: int, *, think_s: float, within_s: float, seed: int = 1) -> Trace:
    """Conversations whose users think for long: caches are full of others' tokens when they come back."""
    rng = Random(seed)
    found = []
    for number in range(chats):
        begins, lengths = rng.uniform(0.0, within_s), rng.choice((2, 8, 24))
        at = begins
        for request in conversation(number, begins, rng.randint(1, turns), systems=8, turn_blocks=lengths):
            found.append(replace(request, at=at))
            at += 1.0 + rng.expovariate(1 / think_s)
    return Trace("pressed", sorted(found, key=lambda request: request.at), BLOCK, timed=True)


class Known(NamedTuple):
    """What came of a run. Shares of prompt tokens."""

    hit_rate: float
    precision: float
    recall: float
    calibrations: Sequence[Calibration]

    @property
    def error(self) -> float:
        """Tokens that were predicted and missing, per token predicted."""
        return 1 - self.precision


class KnowingNodes(Nodes):
    """Nodes with a calibration each, or with the engines' own events."""

    def __init__(self, settings: NodeSettings, engines: Sequence[EngineModel], knowledge: str, now: float) -> None:
        super().__init__(settings, now)
        self._engines = engines
        self._exact = knowledge == "exact"
        self._ticked_at = now
        self.predicted = self.right = self.cached = self.prompt = 0
        self.calibrations: list[Calibration] = []
        for router in self.routers:
            calibration = Calibration(router.routes, block_tokens=settings.block_tokens)
            self.calibrations.append(calibration)
            if knowledge == "calibrated":
                router.observers += (calibration,)

    def place(self, item: Prepared, now: float) -> Placed:
        if now >= self._ticked_at + TICK_S:
            self._ticked_at = now
            for calibration in self.calibrations:
                calibration.tick(now)
        if self._exact:
            for engine, model in enumerate(self._engines):
                for event in model.cache.drain_events():
                    if isinstance(event, BlockRemoved) and event.key not in model.cache._by_key:
                        for router in self.routers:
                            router.routes.withdraw(event.key, BackendId(engine))
        return super().place(item, now)

    def finished(self, placed: Placed, item: Prepared, cached_tokens: int, now: float) -> None:
        block = item.request.block_tokens
        predicted = min(placed.predicted_tokens, item.job.prompt_tokens - 1) // block * block
        self.predicted += predicted
        self.right += min(predicted, cached_tokens)
        self.cached += cached_tokens
        self.prompt += item.job.prompt_tokens
        super().finished(placed, item, cached_tokens, now)


def run_knowing(
    items: Sequence[Prepared],
    block_tokens: int,
    limits: EngineLimits,
    knowledge: str,
    *,
    engines: int = 4,
    nodes: int = 1,
    policy: str = "affinity",
    seed: int = 1,
) -> Known:
    limits = replace(limits, block_size=block_tokens, cache_events_max=1 << 20 if knowledge == "exact" else 0)
    plan = Plan(policy, nodes, (limits,) * engines, regret=False, seed=seed)
    models = [EngineModel(limits) for _ in plan.engines]
    arrivals = arrivals_of(items, plan.speed)
    settings = NodeSettings(policy, nodes, engines, block_tokens, seed, plan.options, gossip_delay_s=0.05)
    placer = KnowingNodes(settings, models, knowledge, 0.0)
    Run(plan, items, arrivals, models, placer).go()
    return Known(
        placer.cached / placer.prompt,
        placer.right / max(1, placer.predicted),
        placer.right / max(1, placer.cached),
        placer.calibrations,
    )
