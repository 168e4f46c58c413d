"""Bounds: placement by someone who sees into the engines, and what a placement lost against that (`regret`).

`oracle_greedy` takes the engine that truly holds the longest prefix, of those that had at most CAP_FACTOR times their
share of the requests so far, and CAP_SLACK: what "greedy" means in published figures of traces. `oracle_ttft` knows the
future of what is in work as well: it takes the engine whose first token comes soonest.

Neither is the best that could be: both are greedy, and later requests pay for what they choose. The last tie goes to
the engine that was chosen least, else idle engines would fill one cache after the other; then to the least index.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.replay_plan import Placed, Placer, Prepared

NOTHING: Mapping[int, int] = MappingProxyType({})

CAP_FACTOR, CAP_SLACK = 1.5, 4.0
"""Of an engine's share of the requests so far, and added to that."""


class Oracle(Placer):
    """An oracle in the place of the nodes: it has no routes, no gossip, nothing to learn.

    What it predicts is what is cached when a request comes; until the request leaves its queue that may change.
    """

    name: str

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self._engines = engines
        self._chosen: Counter[int] = Counter()

    def place(self, item: Prepared, now: float) -> Placed:
        engine = self.choose(item.job, now)
        return Placed(engine, self.name, self._engines[engine].cached_tokens(item.job, now))

    def choose(self, job: Job, now: float) -> int:
        """The index of an engine. Whoever asks sends the request there."""
        best = self.best(job, now)
        self._chosen[best] += 1
        return best

    @abstractmethod
    def best(self, job: Job, now: float) -> int: ...


class GreedyOracle(Oracle):
    """The longest prefix, then the fewest requests in flight, of the engines below the cap."""

    name = "oracle_greedy"

    def best(self, job: Job, now: float) -> int:
        def rank(index: int) -> tuple[int, int, int, int]:
            engine = self._engines[index]
            return -engine.cached_tokens(job, now), engine.in_flight, self._chosen[index], index

        most = CAP_FACTOR * self._chosen.total() / len(self._engines) + CAP_SLACK
        return min((index for index in range(len(self._engines)) if self._chosen[index] <= most), key=rank)


class FirstTokenOracle(Oracle):
    """The soonest first token, then the longest prefix, then the fewest requests in flight."""

    name = "oracle_ttft"

    def best(self, job: Job, now: float) -> int:
        return soonest(job, self._engines, range(len(self._engines)), now, self._chosen).engine


class Soonest(NamedTuple):
    """Where the first token would come first, and when."""

    engine: int
    at: float


def soonest(
    job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], now: float, chosen: Mapping[int, int] = NOTHING
) -> Soonest:
    """The best engine for this request alone. `at` is inf where nobody would take it; then only the ties count.

    `chosen`: how often each one was chosen, for the last tie.
    """
    bounds = sorted((engines[index].first_token_not_before(job, now), index) for index in eligible)
    best: tuple[float, int, int, int, int] | None = None
    for bound, index in bounds:
        if best is not None and bound > best[0]:
            break
        engine = engines[index]
        at = engine.first_token_at(job, now)
        if best is None or at <= best[0]:
            found = (at, -engine.cached_tokens(job, now), engine.in_flight, chosen.get(index, 0), index)
            best = found if best is None else min(best, found)
    assert best is not None, "somebody is eligible"
    return Soonest(best[4], best[0])


def regret(job: Job, engines: Sequence[EngineModel], chosen: int, now: float) -> float:
    """Seconds that the first token comes later at `chosen` than at the best engine; asked before it is sent.

    The best sees caches, queues and lengths of answers, and nothing that has not come yet: this is what better
    knowledge could have won for this one request, and what that costs later ones is not in it. Never negative. `inf`
    where the chosen engine would refuse it and another one would not.
    """
    at = engines[chosen].first_token_at(job, now)
    others = (index for index in range(len(engines)) if index != chosen)
    sooner = [index for index in others if engines[index].first_token_not_before(job, now) < at]
    best = soonest(job, engines, sooner, now).at if sooner else inf
    return at - best if best < at else 0.0


ORACLES: Mapping[str, type[Oracle]] = MappingProxyType(
    {oracle.name: oracle for oracle in (GreedyOracle, FirstTokenOracle)}
)
