"""Oracles place requests with knowledge of the engines' state, as bounds; `regret` is what a placement lost.

`oracle_greedy` chooses the engine whose cache holds the longest prefix, among those that got at most CAP_FACTOR times
their share of the requests so far plus CAP_SLACK: that is what "greedy" means in published figures of traces.
`oracle_ttft` also knows how long the requests in flight will take: it chooses the engine with the soonest first token.

Neither is optimal: both decide for one request at a time, and later requests pay for it. The last tie goes to the
engine that was chosen least often (else idle engines would be filled one after the other), then to the least index.
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
"""The cap of `oracle_greedy`: so many times an engine's share of the requests so far, plus so many requests."""


class Oracle(Placer):
    """An oracle places requests instead of the nodes. It has no routes and no gossip, and learns nothing.

    It predicts the tokens that are cached when a request arrives; that may change before the request leaves the queue.
    """

    name: str

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self._engines = engines
        self._chosen: Counter[int] = Counter()

    def place(self, item: Prepared, now: float) -> Placed:
        engine = self.choose(item.job, now)
        return Placed(engine, self.name, self._engines[engine].cached_tokens(item.job, now))

    def choose(self, job: Job, now: float) -> int:
        """Return the index of the best engine and count it as chosen: the caller must send the request there."""
        best = self.best(job, now)
        self._chosen[best] += 1
        return best

    @abstractmethod
    def best(self, job: Job, now: float) -> int: ...


class GreedyOracle(Oracle):
    """Chooses, among the engines within the cap, by longest held prefix, then by fewest requests in flight."""

    name = "oracle_greedy"

    def best(self, job: Job, now: float) -> int:
        def rank(index: int) -> tuple[int, int, int, int]:
            engine = self._engines[index]
            return -engine.cached_tokens(job, now), engine.in_flight, self._chosen[index], index

        most = CAP_FACTOR * self._chosen.total() / len(self._engines) + CAP_SLACK
        return min((index for index in range(len(self._engines)) if self._chosen[index] <= most), key=rank)


class FirstTokenOracle(Oracle):
    """Chooses by soonest first token, then by longest held prefix, then by fewest requests in flight."""

    name = "oracle_ttft"

    def best(self, job: Job, now: float) -> int:
        return soonest(job, self._engines, range(len(self._engines)), now, self._chosen).engine


class Soonest(NamedTuple):
    """The engine with the soonest first token, and when that comes."""

    engine: int
    at: float


def soonest(
    job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], now: float, chosen: Mapping[int, int] = NOTHING
) -> Soonest:
    """Return the engine with the soonest first token for this request alone. `chosen`: how often each was chosen.

    If no eligible engine would accept the request, `at` is inf and only the tie-breaks decide.
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
    """Return how many seconds later the first token comes at `chosen` than at the best engine. Call before submitting.

    The best engine is found with knowledge of caches, queues and answer lengths, but not of requests to come. So this
    is what better knowledge could have gained for this request, without what it would cost later ones. Never negative;
    `inf` if the chosen engine would refuse the request and another would not.
    """
    at = engines[chosen].first_token_at(job, now)
    others = (index for index in range(len(engines)) if index != chosen)
    sooner = [index for index in others if engines[index].first_token_not_before(job, now) < at]
    best = soonest(job, engines, sooner, now).at if sooner else inf
    return at - best if best < at else 0.0


ORACLES: Mapping[str, type[Oracle]] = MappingProxyType(
    {oracle.name: oracle for oracle in (GreedyOracle, FirstTokenOracle)}
)
