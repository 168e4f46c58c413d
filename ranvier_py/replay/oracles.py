"""Bounds: placement by someone who sees into the engines, and what a placement lost against that (`regret`).

`oracle_greedy` knows what is cached: it takes the engine that truly holds the longest prefix. With the cap it is what
"greedy" means in published figures of traces: an engine is eligible while it had at most 1.5 times its share of the
requests so far, and 4. `oracle_ttft` knows the future of what is in work as well: it takes the engine whose first token
comes soonest, which no router can know and no order of arrival makes worse for this request.

Neither is the best that could be: both are greedy, and later requests pay for what they choose. The last tie goes to
the engine that was chosen least, else idle engines would fill one cache after the other; then to the least index, so
runs replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ranvier_py.core.routing.backends import Outcome
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.replay_plan import Placed, Prepared

NOTHING: Mapping[int, int] = MappingProxyType({})


class Oracle(Protocol):
    """One rule. `engines` are all of the run, in the same order at each call; `eligible` are indices into them."""

    name: str

    def choose(self, job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], now: float) -> int:
        """An index out of `eligible`, which is never empty. Whoever asks sends the request there."""
        ...


@dataclass(frozen=True, slots=True)
class RequestCap:
    """An engine may have `factor` times its share of the requests so far, and `slack` more."""

    factor: float = 1.5
    slack: float = 4.0


class GreedyOracle:
    """The longest prefix, then the fewest requests in flight. With `cap` None nobody is ever too busy."""

    name = "oracle_greedy"

    def __init__(self, cap: RequestCap | None = RequestCap()) -> None:
        self._cap = cap
        self._chosen: Counter[int] = Counter()

    def choose(self, job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], now: float) -> int:
        def rank(index: int) -> tuple[int, int, int, int]:
            engine = engines[index]
            return -engine.cached_tokens(job, now), engine.in_flight, self._chosen[index], index

        best = min(self._capped(eligible, len(engines)), key=rank)
        self._chosen[best] += 1
        return best

    def _capped(self, eligible: Sequence[int], engines: int) -> Sequence[int]:
        """Those below the cap; all, where none is."""
        if self._cap is None:
            return eligible
        most = self._cap.factor * self._chosen.total() / engines + self._cap.slack
        return [index for index in eligible if self._chosen[index] <= most] or eligible


class FirstTokenOracle:
    """The soonest first token, then the longest prefix, then the fewest requests in flight."""

    name = "oracle_ttft"

    def __init__(self) -> None:
        self._chosen: Counter[int] = Counter()

    def choose(self, job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], now: float) -> int:
        best = soonest(job, engines, eligible, now, self._chosen).engine
        self._chosen[best] += 1
        return best


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


def regret(job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], chosen: int, now: float) -> float:
    """Seconds that the first token comes later at `chosen` than at the best eligible engine; asked before it is sent.

    The best sees caches, queues and lengths of answers, and nothing that has not come yet: this is what better
    knowledge could have won for this one request, and what that costs later ones is not in it. Never negative. `inf`
    where the chosen engine would refuse it and another one would not.
    """
    at = engines[chosen].first_token_at(job, now)
    sooner = [index for index in eligible if index != chosen and engines[index].first_token_not_before(job, now) < at]
    best = soonest(job, engines, sooner, now).at if sooner else inf
    return at - best if best < at else 0.0


ORACLES: Mapping[str, Callable[[], Oracle]] = MappingProxyType(
    {oracle.name: oracle for oracle in (GreedyOracle, FirstTokenOracle)}
)


class OraclePlacer:
    """An oracle in the place of the nodes (a Placer, see `replay_run`): it has no routes, no gossip, nothing to learn.

    What it predicts is what is cached when a request comes; until the request leaves its queue that may change.
    """

    network = None

    def __init__(self, oracle: Oracle, engines: Sequence[EngineModel]) -> None:
        self._oracle = oracle
        self._engines = engines

    def place(self, item: Prepared, now: float) -> Placed:
        engine = self._oracle.choose(item.job, self._engines, range(len(self._engines)), now)
        return Placed(engine, self._oracle.name, self._engines[engine].cached_tokens(item.job, now))

    def first_token(self, placed: Placed, now: float) -> None: ...

    def finished(self, placed: Placed, item: Prepared, cached_tokens: int, now: float) -> None: ...

    def failed(self, placed: Placed, outcome: Outcome, now: float) -> None: ...

    def restarted(self, engine: int, now: float) -> None: ...

    def next_at(self) -> float:
        return inf

    def advance(self, now: float) -> None: ...
