"""Regret: what a placement lost against the best engine at that moment, in seconds to the first token.

The best is by foresight: it sees caches, queues and lengths of answers, and nothing that has not come yet. So regret is
what better knowledge could have won for this one request; that it may cost later ones more is not in it.

Rule: `regret` is asked before the request is submitted. Never negative; 0 where the choice was the best.
Cost: one forecast of the chosen engine, a cheap bound of each other one, and a forecast of those it does not rule out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

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
