"""Regret: what a choice lost against the best one, by submitting to each."""

from __future__ import annotations

from copy import deepcopy
from math import inf

from hypothesis import given, settings

from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.regret import regret
from tests.replay.test_oracles import FAST, LIMITS, REQUESTS, job, numbers


def first_token(engine: EngineModel, work: Job, now: float) -> float:
    """When it really comes."""
    other = deepcopy(engine)
    other.submit("probe", work, now)
    while (at := other.next_event_at()) is not None:
        for event in other.advance(at):
            if event.request_id == "probe" and event.tokens == 1:
                return event.at
    raise AssertionError("every request gets a token")


@given(REQUESTS)
@settings(max_examples=40, deadline=None)
def test_regret_is_the_first_token_there_less_the_soonest_anywhere(
    requests: list[tuple[list[int], int, float, int]],
) -> None:
    engines = [EngineModel(limits) for limits in (LIMITS, LIMITS, FAST, FAST)]
    now = 0.0
    for number, (prompt, answer, wait, where) in enumerate(requests):
        now += wait
        work = job(prompt, answer)
        times = [first_token(engine, work, now) for engine in engines]
        for chosen in range(4):
            assert regret(work, engines, range(4), chosen, now) == times[chosen] - min(times)
            assert regret(work, engines, [chosen], chosen, now) == 0.0
        engines[where].submit(f"r{number}", work, now)


def test_a_refusal_where_another_engine_would_have_served_is_infinite() -> None:
    engines = [EngineModel(LIMITS), EngineModel(FAST)]  # 400 tokens against 200
    assert regret(job(numbers(300)), engines, range(2), 1, 0.0) == inf
    assert regret(job(numbers(300)), engines, [1], 1, 0.0) == 0.0
    assert regret(job(numbers(500)), engines, range(2), 1, 0.0) == 0.0
