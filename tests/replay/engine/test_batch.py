"""Leaps against single steps: whatever comes, the same happens at the same times; and forecasts come true."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.replay.engine import forecast
from ranvier_py.replay.engine.batch import EngineBatch
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.engine_values import EngineEvent, EngineEventKind, EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from tests.examples import examples
from tests.replay.engine.naive import NaiveEngine, happens_at, to_the_end

BLOCK = 4
REPORTED = (EngineEventKind.STARTED, EngineEventKind.FINISHED)


def options_of(prefill_tokens_per_s: Any, decode_s: Any, running_s: Any, context_s: Any, depth_s: Any) -> Any:
    return st.builds(
        EngineLimits,
        cache_tokens=st.sampled_from([64, 96, 200, 2000]),
        block_size=st.sampled_from([1, BLOCK, 8]),
        prefill_tokens_per_s=st.sampled_from(prefill_tokens_per_s),
        prefill_s_per_depth=st.sampled_from(depth_s),
        decode_s=st.sampled_from(decode_s),
        decode_s_per_running=st.sampled_from(running_s),
        decode_s_per_context_token=st.sampled_from(context_s),
        running_max=st.integers(1, 5),
        step_tokens_max=st.sampled_from([5, 7, 16, 2048]),
    )


EXACT = options_of([64.0, 256.0, inf], [0.0, 0.125], [0.0, 1 / 64], [0.0, 1 / 1024], [0.0, 1 / 4096])
"""Speeds are powers of two: sums of times are exact in any order."""

ANY = st.one_of(EXACT, options_of([70.3, 333.3], [0.01, 0.1], [0.0, 0.0037], [0.0, 0.00013], [0.0, 0.000071]))

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
    return [event for event in events if event.kind in REPORTED or event.tokens == 1]


def by_request(events: Sequence[EngineEvent]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for event in main_events(events):
        found.setdefault(event.request_id, []).append((event.kind, event.at, event.cached_tokens))
    return found


@given(EXACT, ACTIONS)
@settings(max_examples=examples(150))
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


@given(ANY, ACTIONS)
@settings(max_examples=examples(120))
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


@given(ANY, ACTIONS)
@settings(max_examples=examples(50))
def test_times_do_not_depend_on_when_the_engine_is_asked(
    limits: EngineLimits, actions: list[tuple[str, list[int], int, float]]
) -> None:
    """Not even in their last bit: a leap that is looked at in between ends when it would have."""
    models = [EngineModel(limits), EngineModel(limits, every_token=True), EngineModel(limits)]
    events: list[list[EngineEvent]] = [[], [], []]
    now = 0.0
    for number, (_, prompt, answer, wait) in enumerate(actions):
        for part in range(1, 4):
            events[2] += models[2].advance(now + wait * part / 4)
        now += wait
        work = job(limits, prompt, answer)
        for model in models if models[0].accepts(work) else ():
            model.submit(f"r{number}", work, now)
    reported = [by_request([*found, *to_the_end(model)]) for model, found in zip(models, events, strict=True)]
    assert reported[0] == reported[1] == reported[2]


def test_sums_of_awkward_times_are_those_of_single_steps() -> None:
    limits = EngineLimits(decode_s=0.0101, decode_s_per_running=0.0003, decode_s_per_context_token=1e-7)
    model, naive = EngineModel(limits), NaiveEngine(limits)
    for number in range(40):
        work = Job.of(range(number * 7, number * 7 + 900), [0] * (150 + number), limits.block_size)
        for engine in (model, naive):
            engine.submit(f"r{number}", work, number * 0.037)
    naive.run_to(inf)
    leapt, stepped = by_request(to_the_end(model)), by_request(naive.events)
    assert leapt.keys() == stepped.keys()
    for name, reported in leapt.items():
        assert [at for _, at, _ in reported] == pytest.approx([at for _, at, _ in stepped[name]], rel=1e-12)


def both(limits: EngineLimits) -> tuple[EngineModel, NaiveEngine]:
    return EngineModel(limits), NaiveEngine(limits)


def test_who_lacks_blocks_enters_as_soon_as_an_answer_has_made_enough_of_its_prompt() -> None:
    """A leap to the end of that answer would let it in too late."""
    limits = EngineLimits(cache_tokens=40, block_size=BLOCK, prefill_tokens_per_s=64.0, decode_s=0.125, running_max=4)
    model, naive = both(limits)
    for engine in (model, naive):
        engine.submit("answer", Job.of([0] * 4, [0] * 26, BLOCK), 0.0)
        engine.submit("follows", Job.of([0] * 20, [0] * 4, BLOCK), 0.5)
    naive.run_to(inf)
    leapt = by_request(to_the_end(model))
    assert leapt == by_request(naive.events)
    assert leapt["answer"][1][1] < leapt["follows"][0][1] < leapt["answer"][2][1]
    assert leapt["follows"][0][2] >= 3 * BLOCK


def test_when_the_head_of_the_queue_leaves_the_next_one_enters_with_the_next_step() -> None:
    limits = EngineLimits(cache_tokens=640, block_size=64, prefill_tokens_per_s=64.0, decode_s=0.125, running_max=4)
    model, naive = both(limits)
    for engine in (model, naive):
        engine.submit("long", Job.named(64, 400, ()), 0.0)
        engine.submit("large", Job.named(300, 1, ()), 0.0)
        engine.submit("small", Job.named(10, 1, ()), 0.0)
        engine.cancel("large", 2.0)
    naive.run_to(inf)
    leapt = by_request(to_the_end(model))
    assert leapt == by_request(naive.events)
    assert leapt["small"][0][1] == 2.125


def test_decoding_alone_is_one_leap() -> None:
    """Else a replay of four million answer tokens takes minutes."""
    model = EngineModel(EngineLimits(block_size=512))
    for number in range(4):
        model.submit(f"r{number}", Job.named(2000, 30_000, tuple(range(number * 99 + 1, number * 99 + 60))), 0.0)
    calls = 0
    while (at := model.next_event_at()) is not None:
        model.advance(at)
        calls += 1
    assert calls < 20
    assert model.statistics().generated_tokens == 120_000
    assert model.cache.found_blocks == 4 * 59  # what decoding fills is named although nobody stopped for it


def test_one_copy_serves_all_forecasts_of_a_full_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tenth request in a queue costs ten times the first."""
    copies = []
    fork = EngineBatch.fork
    monkeypatch.setattr(EngineBatch, "fork", lambda batch: copies.append(batch) or fork(batch))
    model = EngineModel(EngineLimits(running_max=2))
    for number in range(50):
        now = number * 0.001
        work = Job.named(3000, 100, tuple(range(number * 999 + 1, number * 999 + 190)))
        expected = model.first_token_at(work, now)
        assert model.first_token_at(work, now) == expected
        model.submit(f"r{number}", work, now)
    assert len(copies) == 1
    assert [at for _, at, _ in by_request(to_the_end(model))["r49"]][1] == expected


def test_a_forecast_sees_that_what_is_cached_now_will_be_evicted_before_it_can_be_used() -> None:
    """The answer of another request needs the last block of this prefix in the step before."""
    limits = EngineLimits(
        cache_tokens=48, block_size=BLOCK, prefill_tokens_per_s=64.0, decode_s=0.125, running_max=2, step_tokens_max=16
    )
    model = EngineModel(limits)
    for now in (0.0, 10.0, 20.0):
        first = int(now * 10)
        model.submit(f"{now}", Job.of(range(first, first + 16), [0], BLOCK), now)
        to_the_end(model)
    now = 30.0
    model.submit("decodes", Job.of(range(300, 308), [0] * 16, BLOCK), now)
    work = Job.of(range(17), [0], BLOCK)
    lost = 0
    for _ in range(120):
        now += 1 / 64
        at = model.first_token_at(work, now)
        assert at == happens_at(model, work, now)
        lost += at - now > 0.125 + (17 - model.cached_tokens(work, now)) / 64 + 0.125
    assert lost


def test_a_request_that_comes_as_a_place_is_free_misses_the_step_that_begins_there() -> None:
    """A copy that was kept must not serve it one step too soon."""
    model = EngineModel(EngineLimits(prefill_tokens_per_s=64.0, decode_s=0.125, running_max=2))
    model.submit("long", Job.named(16, 400, ()), 0.0)
    model.submit("short", Job.named(16, 40, ()), 0.0)
    work = Job.named(16, 4, ())
    freed_at = model.first_token_at(work, 0.0) - 0.25 - 0.125
    assert by_request(deepcopy(model).advance(freed_at))["short"][2][1] == freed_at
    assert model.first_token_at(work, freed_at) == happens_at(model, work, freed_at) == freed_at + 0.125 + 0.375


def test_a_forecast_gives_up_with_a_lower_bound_and_states_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EngineModel(EngineLimits(running_max=1))
    work = Job.named(3000, 100, ())
    for number in range(10):
        model.submit(f"r{number}", work, 0.0)
    expected = happens_at(model, work, 0.0)
    monkeypatch.setattr(forecast, "STEPS_MAX", 5)
    at = model.first_token_at(work, 0.0)
    assert 0.0 < at < expected
    assert model.probes_cut == 1
    for _ in range(20):  # each asks the same copy to go on
        model.first_token_at(work, 0.0)
    assert model.first_token_at(work, 0.0) == expected


def test_engines_of_different_speed_differ_in_nothing_else() -> None:
    """A replay may mix them: nothing is shared between two models but jobs."""
    slow, fast = EngineModel(EngineLimits(prefill_tokens_per_s=1000.0)), EngineModel(EngineLimits())
    work = Job.named(2000, 1, tuple(range(1, 126)))
    for model in (slow, fast):
        model.submit("a", work, 0.0)
    assert by_request(to_the_end(slow))["a"][1][1] == pytest.approx(2.0)
    assert by_request(to_the_end(fast))["a"][1][1] == pytest.approx(0.1)
