"""Caches of hybrid models before a modelled engine: what concurrent requests find, hold and leave behind."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given

from ranvier_py.replay.engine.block_cache import (
    Job,
    KeyRemoved,
    KeysCleared,
    KeysStored,
    Lease,
    StateRemoved,
    StateStored,
)
from ranvier_py.replay.engine.engine_values import CACHES, CacheName, EngineEventKind, EngineLimits
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.hybrid.cache_models import make_cache
from ranvier_py.replay.hybrid.hybrid_model import PAPER_7B
from ranvier_py.replay.hybrid.state_tree import EvictionRule, StateTree
from ranvier_py.replay.hybrid.tree_cache import TreeCache
from tests.replay.engine.naive import served, to_the_end
from tests.replay.hybrid.requests_at_once import Steps, played, steps_of

BLOCK = 16
STATE_BLOCKS = -(-PAPER_7B.state_bytes // (BLOCK * PAPER_7B.token_bytes))
TREES: tuple[EvictionRule, ...] = ("lru", "utility")
LIMITS = EngineLimits(cache_tokens=BLOCK * 300, block_size=BLOCK, prefill_tokens_per_s=100.0, running_max=4)


def keys_of(names: list[int]) -> tuple[int, ...]:
    """Chained names of blocks that are called so."""
    return tuple(hash((0, *names[: end + 1])) & (2**63 - 1) or 1 for end in range(len(names)))


def job(names: list[int], answer_blocks: int = 1) -> Job:
    """The last so many blocks are the answer's."""
    tokens = len(names) * BLOCK
    return Job.named(tokens - answer_blocks * BLOCK + 1, answer_blocks * BLOCK, keys_of(names))


def cache_of(rule: EvictionRule, blocks: int, events_max: int = 0) -> TreeCache:
    capacity = blocks * BLOCK * PAPER_7B.token_bytes
    return TreeCache(StateTree(PAPER_7B, capacity, rule, width=8, unit_tokens=BLOCK), events_max=events_max)


def leased(cache: TreeCache, work: Job) -> Lease:
    found = cache.hit_blocks(work)
    lease = cache.lease(work)
    assert lease is not None
    assert lease.hits == found
    return lease


def finish(cache: TreeCache, lease: Lease) -> None:
    cache.grow(lease, lease.job.tokens_computed + 1)
    cache.release(lease)
    cache.check()


def test_every_name_of_a_cache_makes_one() -> None:
    for name in CACHES:
        cache = make_cache(replace(LIMITS, cache=name))
        work = job([1, 2, 3])
        assert cache.fits(work)
        assert cache.has_room(work)
        assert cache.hit_blocks(work) == 0
        assert cache.copy().hit_blocks(work) == 0


@pytest.mark.parametrize("name", ["attention", "vanilla", "vllm_plus", "sglang_plus", "marconi"])
def test_what_is_reused_at_the_third_request_of_a_document_differs_by_cache(name: CacheName) -> None:
    """Blocks are found at the second one; a junction is kept by the second and found by the third; two blocks of 16
    tokens have a checkpoint of vLLM+."""
    cache = make_cache(replace(LIMITS, cache=name))
    hits = [served(cache, job([1, 2, 3, question, 99])) for question in (11, 12, 13)]
    expected = {"attention": [0, 3, 3], "vanilla": [0, 0, 0], "vllm_plus": [0, 2, 2]}
    assert hits == expected.get(name, [0, 0, 3])


@pytest.mark.parametrize("rule", TREES)
def test_nothing_is_found_before_the_request_that_computes_it_has_ended(rule: EvictionRule) -> None:
    cache = cache_of(rule, 500)
    first = leased(cache, job([1, 2, 3]))
    cache.grow(first, 33)
    assert cache.hit_blocks(job([1, 2, 3, 4, 5])) == 0
    finish(cache, first)
    assert cache.hit_blocks(job([1, 2, 3, 4, 5])) == 3


@pytest.mark.parametrize("rule", TREES)
def test_the_block_of_the_last_prompt_token_is_always_computed(rule: EvictionRule) -> None:
    cache = cache_of(rule, 500)
    finish(cache, leased(cache, job([1, 2, 3])))
    assert cache.hit_blocks(Job.named(3 * BLOCK, 5, keys_of([1, 2, 3]))) == 0
    assert cache.hit_blocks(Job.named(3 * BLOCK + 1, 5, keys_of([1, 2, 3]))) == 3


@pytest.mark.parametrize("rule", TREES)
def test_a_path_that_is_read_may_be_parted_and_stays_until_all_readers_are_done(rule: EvictionRule) -> None:
    cache = cache_of(rule, 12 * STATE_BLOCKS + 40)
    finish(cache, leased(cache, job([1, 2, 3, 4])))
    readers = [leased(cache, job([1, 2, 3, 4, last, 9])) for last in (5, 6)]
    assert [lease.hits for lease in readers] == [4, 4]
    finish(cache, leased(cache, job([1, 2, 7, 8])))
    for first in range(20, 40):
        finish(cache, leased(cache, job([first] * 4)))
    assert cache.hit_blocks(job([1, 2, 3, 4, 9, 9])) == 4
    for lease in readers:
        finish(cache, lease)
    for first in range(40, 70):
        finish(cache, leased(cache, job([first] * 4)))
    assert cache.hit_blocks(job([1, 2, 3, 4, 9, 9])) == 0


@pytest.mark.parametrize("rule", TREES)
def test_a_request_waits_until_another_one_has_left_it_memory(rule: EvictionRule) -> None:
    cache = cache_of(rule, 4 * STATE_BLOCKS + 6)
    first, second = leased(cache, job([1, 2, 3])), leased(cache, job([4, 5, 6]))
    third = job([7, 8, 9])
    assert not cache.has_room(third)
    assert cache.lease(third) is None
    finish(cache, first)
    assert cache.has_room(third)
    finish(cache, leased(cache, third))
    finish(cache, second)


@pytest.mark.parametrize("rule", TREES)
def test_a_path_with_more_checkpoints_than_there_is_room_for_is_reused_in_part(rule: EvictionRule) -> None:
    cache = cache_of(rule, 3 * STATE_BLOCKS + 8)
    for length in (2, 3, 4, 5, 6, 7):
        lease = leased(cache, job([1, 2, 3, 4, 5, 6, 7][:length]))
        assert lease.hits > 0 or length == 2 or rule == "lru"
        finish(cache, lease)
    assert not cache.fits(job(list(range(1, 3 * STATE_BLOCKS))))


@pytest.mark.parametrize("rule", TREES)
@given(steps=steps_of(6))
def test_whatever_requests_do_the_capacity_is_kept_and_events_are_of_what_is_there(
    rule: EvictionRule, steps: Steps
) -> None:
    cache = cache_of(rule, 6 * STATE_BLOCKS + 20, events_max=10_000)
    for _ in played(cache, steps, lambda names: job([*names, *names[:2]])):
        cache.check()
    known: list[int] = []
    for event in cache.drain_events():
        if isinstance(event, KeysStored):
            assert not event.parent or event.parent in known
            known.extend(event.keys)
        elif isinstance(event, KeyRemoved):
            known.remove(event.key)
        elif not isinstance(event, StateStored | StateRemoved):  # see test_state_events
            assert isinstance(event, KeysCleared)
            known.clear()
    assert len(known) == len(set(known)) == cache.found_blocks


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(4))
def test_the_first_token_comes_when_it_was_forecast(name: CacheName, seed: int) -> None:
    """Of each request in turn, as if nothing came after it. No window of tuning ends in so few of them."""
    rng = Random(f"{seed}")
    limits = replace(LIMITS, cache=name, step_tokens_max=40, waiting_max=100, decode_s=0.1)
    arrivals = []
    at = 0.0
    for _ in range(14):
        at += rng.choice((0.0, 0.3, 2.0))
        arrivals.append((at, job([rng.randint(1, 2) for _ in range(rng.randint(2, 9))])))
    for count in range(1, len(arrivals) + 1):
        model = EngineModel(limits)
        forecast = 0.0
        for number, (now, work) in enumerate(arrivals[:count]):
            forecast = model.first_token_at(work, now)
            assert model.first_token_not_before(work, now) <= forecast
            model.submit(str(number), work, now)
        (first,) = [
            event.at
            for event in to_the_end(model)
            if (event.request_id, event.kind, event.tokens) == (str(count - 1), EngineEventKind.TOKEN, 1)
        ]
        assert first == forecast
