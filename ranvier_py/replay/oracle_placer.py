"""An oracle in the place of the nodes: it sees into the engines, and needs neither routes nor gossip.

It has no nodes, so nothing happens beside the requests, and nothing has to be learned: an oracle is asked anew each
time. What it predicts is what is cached when a request comes; until the request leaves its queue that may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType

from ranvier_py.core.routing.backends import Outcome
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.oracles import FirstTokenOracle, GreedyOracle, Oracle
from ranvier_py.replay.replay_nodes import Placed, Prepared

ORACLES: Mapping[str, Callable[[], Oracle]] = MappingProxyType(
    {"oracle_greedy": GreedyOracle, "oracle_ttft": FirstTokenOracle}
)


class OraclePlacer:
    """A Placer (see `run`) that asks an oracle."""

    def __init__(self, oracle: Oracle, engines: Sequence[EngineModel]) -> None:
        self._oracle = oracle
        self._engines = engines
        self._eligible = range(len(engines))

    def place(self, item: Prepared, now: float) -> Placed:
        engine = self._oracle.choose(item.job, self._engines, self._eligible, now)
        return Placed(engine, self._oracle.name, self._engines[engine].cached_tokens(item.job, now))

    def first_token(self, placed: Placed, now: float) -> None:
        """An oracle has nothing to learn."""

    def finished(self, placed: Placed, item: Prepared, cached_tokens: int, now: float) -> None:
        """As above."""

    def failed(self, placed: Placed, outcome: Outcome, now: float) -> None:
        """As above."""

    def restarted(self, engine: int, now: float) -> None:
        """It sees that for itself."""

    def next_at(self) -> float:
        return inf

    def advance(self, now: float) -> None:
        """Nothing is ever due."""
