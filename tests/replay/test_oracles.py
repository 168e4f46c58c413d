"""Oracles choose what they say they choose, against looking at every engine; and what others lose against them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.oracles import FirstTokenOracle, GreedyOracle, regret, soonest
from tests.examples import examples
from tests.replay.engine.naive import happens_at, to_the_end

BLOCK = 4
LIMITS = EngineLimits(cache_tokens=400, block_size=BLOCK, prefill_tokens_per_s=64.0, decode_s=0.125, running_max=2)
FAST = EngineLimits(cache_tokens=200, block_size=BLOCK, prefill_tokens_per_s=1024.0, decode_s=0.125, running_max=2)


def job(prompt: Sequence[int], answer: int = 3) -> Job:
    return Job.of(prompt, [9] * answer, BLOCK)


def numbers(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def warm(engine: EngineModel, prompt: Sequence[int]) -> None:
    """The engine has served this prompt."""
    engine.submit("warm", job(prompt, 1), 0.0)
    to_the_end(engine)


def test_greedy_takes_the_longest_prefix_then_the_fewest_in_flight_then_the_first() -> None:
    engines = [EngineModel(LIMITS) for _ in range(4)]
    warm(engines[1], numbers(20))
    warm(engines[2], numbers(40))
    warm(engines[3], numbers(40))
    oracle = GreedyOracle(engines)
    assert oracle.choose(job(numbers(48)), 10.0) == 2
    engines[2].submit("a", job(numbers(8, 500)), 10.0)
    assert oracle.choose(job(numbers(48)), 10.0) == 3
    assert oracle.choose(job(numbers(48, 900)), 10.0) == 0


def test_the_cap_bounds_what_one_engine_gets() -> None:
    """Without it, one shared block would send everything to one engine."""
    engines = [EngineModel(LIMITS) for _ in range(4)]
    warm(engines[0], numbers(20))
    oracle = GreedyOracle(engines)
    chosen = [oracle.choose(job(numbers(24)), 10.0) for _ in range(40)]
    assert chosen.count(0) == max(count for count in range(40) if count - 1 <= 1.5 * 39 / 4 + 4)


def test_the_first_token_oracle_prefers_a_fast_engine_to_a_warm_one_when_that_is_sooner() -> None:
    engines = [EngineModel(LIMITS), EngineModel(FAST)]
    warm(engines[0], numbers(40))
    oracle = FirstTokenOracle(engines)
    assert oracle.choose(job(numbers(190)), 10.0) == 1  # 150/64 against 190/1024
    assert oracle.choose(job(numbers(42)), 10.0) == 0  # 2/64 against 42/1024


def test_equal_times_go_to_the_longer_prefix() -> None:
    instant = EngineLimits(cache_tokens=400, block_size=BLOCK, prefill_tokens_per_s=inf, decode_s=0.0)
    engines = [EngineModel(instant) for _ in range(3)]
    warm(engines[1], numbers(40))
    assert FirstTokenOracle(engines).choose(job(numbers(48)), 10.0) == 1


def test_a_request_that_nobody_takes_goes_to_the_least_busy_at_infinity() -> None:
    engines = [EngineModel(LIMITS), EngineModel(LIMITS)]
    engines[0].submit("a", job(numbers(8, 600)), 0.0)
    assert soonest(job(numbers(500)), engines, range(2), 0.0) == (1, inf)


@pytest.mark.parametrize("make", [GreedyOracle, FirstTokenOracle])
def test_cold_requests_at_idle_engines_go_to_each_in_turn(make: type[GreedyOracle | FirstTokenOracle]) -> None:
    """Else one cache evicts while the others stay empty."""
    engines = [EngineModel(LIMITS) for _ in range(4)]
    oracle = make(engines)
    chosen = []
    for number in range(8):
        now, work = 100.0 * number, job(numbers(40, 1000 * number))
        chosen.append(oracle.choose(work, now))
        engines[chosen[-1]].submit(f"r{number}", work, now)
        for engine in engines:
            engine.advance(now + 50.0)
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=60),
        st.integers(1, 20),
        st.sampled_from([0.0, 1 / 64, 0.3125, 2.0]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=25,
)


@given(REQUESTS)
@settings(max_examples=examples(60))
def test_pruning_by_bounds_never_changes_the_choice(requests: list[tuple[list[int], int, float, int]]) -> None:
    engines = [EngineModel(limits) for limits in (LIMITS, LIMITS, FAST, FAST)]
    now = 0.0
    for number, (prompt, answer, wait, where) in enumerate(requests):
        now += wait
        work = job(prompt, answer)
        best = min(
            range(4),
            key=lambda index: (
                engines[index].first_token_at(work, now),
                -engines[index].cached_tokens(work, now),
                engines[index].in_flight,
                index,
            ),
        )
        assert soonest(work, engines, range(4), now) == (best, engines[best].first_token_at(work, now))
        engines[where].submit(f"r{number}", work, now)


# --- regret -----------------------------------------------------------------------------------------------------------


@given(REQUESTS)
@settings(max_examples=examples(40))
def test_regret_is_the_first_token_there_less_the_soonest_anywhere(
    requests: list[tuple[list[int], int, float, int]],
) -> None:
    engines = [EngineModel(limits) for limits in (LIMITS, LIMITS, FAST, FAST)]
    now = 0.0
    for number, (prompt, answer, wait, where) in enumerate(requests):
        now += wait
        work = job(prompt, answer)
        times = [happens_at(engine, work, now) for engine in engines]
        for chosen in range(4):
            assert regret(work, engines, chosen, now) == times[chosen] - min(times)
        engines[where].submit(f"r{number}", work, now)


def test_a_refusal_where_another_engine_would_have_served_is_infinite() -> None:
    engines = [EngineModel(LIMITS), EngineModel(FAST)]  # 400 tokens against 200
    assert regret(job(numbers(300)), engines, 1, 0.0) == inf
    assert regret(job(numbers(500)), engines, 1, 0.0) == 0.0
