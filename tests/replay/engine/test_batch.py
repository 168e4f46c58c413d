"""Leaps against single steps: whatever comes, the same happens at the same times; and forecasts come true."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineEvent, EngineEventKind, EngineLimits, EngineModel
from tests.replay.engine.naive import NaiveEngine

BLOCK = 4
TOLD = (EngineEventKind.STARTED, EngineEventKind.FINISHED)

EXACT = st.builds(
    EngineLimits,
    cache_tokens=st.sampled_from([64, 96, 200, 2000]),
    block_size=st.sampled_from([1, BLOCK, 8]),
    prefill_tokens_per_s=st.sampled_from([64.0, 256.0, inf]),
    decode_s=st.sampled_from([0.0, 0.125]),
    decode_s_per_running=st.sampled_from([0.0, 1 / 64]),
    decode_s_per_context_token=st.sampled_from([0.0, 1 / 1024]),
    running_max=st.integers(1, 5),
    step_tokens_max=st.sampled_from([5, 7, 16, 2048]),
)
"""Speeds are powers of two: sums of times are exact in any order."""

PROMPTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),
    st.integers(1, 40).map(lambda tokens: [0] * tokens),
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "submit", "advance", "cancel", "clear"]),
        PROMPTS,
        st.integers(1, 24),
        st.sampled_from([0.0, 0.0, 1 / 64, 0.3125, 2.0]),
    ),
    max_size=30,
)


def job(limits: EngineLimits, prompt: Sequence[int], answer: int) -> Job:
    """Answers of zeros: a prompt of zeros may continue them while they are generated."""
    return Job.of(prompt, [0] * answer, limits.block_size)


def main_events(events: Sequence[EngineEvent]) -> list[EngineEvent]:
    return [event for event in events if event.kind in TOLD or event.tokens == 1]


def to_the_end(model: EngineModel) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while (at := model.next_event_at()) is not None:
        events += model.advance(at)
    return events


def by_request(events: Sequence[EngineEvent]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in main_events(events):
        found.setdefault(event.request_id, []).append((event.kind, event.at, event.cached_tokens))
    return found


def happens_at(model: EngineModel, work: Job, now: float) -> float:
    """What comes of it when it is submitted and nothing else comes."""
    other = deepcopy(model)
    other.advance(now)
    other.submit("probe", work, now)
    return next(event.at for event in to_the_end(other) if event.request_id == "probe" and event.tokens == 1)


@given(EXACT, ACTIONS)
@settings(max_examples=400, deadline=None)
def test_leaps_single_steps_and_the_naive_engine_do_the_same_at_the_same_times(
    limits: EngineLimits, actions: list[tuple[str, list[int], int, float]]
) -> None:
    leaping, stepping, naive = EngineModel(limits), EngineModel(limits, every_token=True), NaiveEngine(limits)
    now, names, leapt, stepped = 0.0, [], [], []
    for number, (what, prompt, answer, wait) in enumerate(actions):
        now += wait
        name, work = f"r{number}", job(limits, prompt, answer)
        leapt += leaping.advance(now)
        if what == "submit" and work.tokens_computed <= limits.cache_tokens // limits.block_size * limits.block_size:
            names.append(name)
            for engine in (leaping, stepping, naive):
                engine.submit(name, work, now)
        elif what == "cancel" and names:
            for engine in (leaping, stepping, naive):
                engine.cancel(names[number % len(names)], now)
        elif what == "clear":
            naive.run_to(now)
            naive.cache.clear()
            leaping.clear_cache(now)
            stepping.clear_cache(now)
        stepped += stepping.advance(now)
        naive.run_to(now)
        assert leaping.cached_tokens(work, now) == naive.cache.hit_blocks(work) * limits.block_size
        assert leaping.statistics() == stepping.statistics()
        leaping.cache.check()
    leapt += to_the_end(leaping)
    stepped += to_the_end(stepping)
    naive.run_to(inf)
    assert by_request(leapt) == by_request(stepped) == by_request(naive.events)
    assert main_events(leapt) == main_events(stepped)
    assert leaping.statistics() == stepping.statistics()


@given(EXACT, ACTIONS)
@settings(max_examples=300, deadline=None)
def test_the_forecast_of_a_first_token_is_what_then_happens(
    limits: EngineLimits, actions: list[tuple[str, list[int], int, float]]
) -> None:
    model = EngineModel(limits)
    now, names = 0.0, []
    for number, (what, prompt, answer, wait) in enumerate(actions):
        now += wait
        work = job(limits, prompt, answer)
        if not model.accepts(work):
            assert model.first_token_at(work, now) == inf
            continue
        bound = model.first_token_not_before(work, now)
        before = model.statistics()
        forecast_at = model.first_token_at(work, now)
        assert model.statistics() == before
        assert forecast_at == happens_at(model, work, now)
        assert bound <= forecast_at
        assert model.first_token_not_before(work, now) <= forecast_at
        if what == "submit":
            names.append(f"r{number}")
            model.submit(f"r{number}", work, now)
        elif what == "cancel" and names:
            model.cancel(names[number % len(names)], now)
        elif what == "clear":
            model.clear_cache(now)
    assert model.probes_cut == 0
