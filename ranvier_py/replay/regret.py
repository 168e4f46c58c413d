"""Regret: what a placement lost against the best engine at that moment, in seconds to the first token.

The best is by foresight: it sees caches, queues and lengths of answers, and nothing that has not come yet. So regret is
what better knowledge could have won for this one request; that it may cost later ones more is not in it.

Rule: `regret` is asked before the request is submitted. Never negative; 0 where the choice was the best.
Cost: one forecast of the chosen engine, a cheap bound of each other one, and a forecast of those it does not rule out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite

from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.oracles import soonest


def regret(job: Job, engines: Sequence[EngineModel], eligible: Sequence[int], chosen: int, now: float) -> float:
    """Seconds that the first token comes later at `chosen` than at the best eligible engine.

    `inf` where the chosen engine would refuse it and another one would not.
    """
    at = engines[chosen].first_token_at(job, now)
    sooner = [index for index in eligible if index != chosen and engines[index].first_token_not_before(job, now) < at]
    best = soonest(job, engines, sooner, now).at if sooner else inf
    return at - best if best < at else 0.0


@dataclass(slots=True)
class RegretBook:
    """What a run lost, request by request. One number for each request: 8 bytes."""

    lost_s: list[float] = field(default_factory=list)
    refused: int = 0  # requests sent to an engine that refused them while another one would not have

    def note(self, lost_s: float) -> None:
        """Enter the regret of one request."""
        if isfinite(lost_s):
            self.lost_s.append(lost_s)
        else:
            self.refused += 1

    @property
    def sum_s(self) -> float:
        return sum(self.lost_s)

    @property
    def mean_s(self) -> float:
        return self.sum_s / max(1, len(self.lost_s))

    @property
    def best_share(self) -> float:
        """Share of requests that went to the best engine, or to one as good."""
        return sum(not lost for lost in self.lost_s) / max(1, len(self.lost_s))

    def quantiles_s(self, *shares: float) -> list[float]:
        """The smallest loss that at least this share of the requests did not exceed; zeros for an empty book."""
        ordered = sorted(self.lost_s) or [0.0]
        last = len(ordered) - 1
        return [ordered[min(last, max(0, ceil(share * len(ordered)) - 1))] for share in shares]
