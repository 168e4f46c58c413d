"""Checkpoints beside blocks, as engines keep them: against the rule on tokens, and under want of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.endless_checkpoints import EndlessCheckpoints
from benchmarks.harness.trace_caches import run
from ranvier_py.core.routing.checkpoints.cache_profile import (
    EXTRA_BUFFER,
    NO_BUFFER,
    CheckpointProfile,
    aligned,
    on_grid,
)
from ranvier_py.replay.engine.block_cache import Job, KeyRemoved, KeysStored
from ranvier_py.replay.hybrid.alpha_search import TokenRequest
from ranvier_py.replay.hybrid.checkpoint_cache import CheckpointCache, PooledCheckpoints, SlottedCheckpoints
from tests.replay.engine.naive import served
from tests.replay.hybrid.requests_at_once import Steps, played, steps_of

BLOCK = 4
PROFILES = {
    "align": aligned(8),
    "align without junctions": aligned(8, junction=False),
    "all": CheckpointProfile(8, every=True),
    "buffered": CheckpointProfile(4, prompt_end=True, junction=True, decode_grid=8),
}
CHATS = st.lists(
    st.tuples(st.lists(st.sampled_from([1, 2]), min_size=0, max_size=7), st.integers(1, 3)), min_size=1, max_size=25
)


def pooled(blocks: int, profile: CheckpointProfile = PROFILES["align"], events_max: int = 0) -> PooledCheckpoints:
    return PooledCheckpoints(blocks, BLOCK, profile, 3, events_max)


def slotted(
    blocks: int, profile: CheckpointProfile = PROFILES["align"], slots: int = 3, events_max: int = 0
) -> SlottedCheckpoints:
    return SlottedCheckpoints(blocks, BLOCK, profile, slots, events_max)


Make = Callable[..., CheckpointCache]


def ids_of(blocks: list[int]) -> list[int]:
    """Four tokens a block, and one more, so that the last block of an answer is computed whole."""
    return [name * 10 + index for name in blocks for index in range(BLOCK)] + [99]


def served_tokens(cache: CheckpointCache, work: Job) -> int:
    return served(cache, work) * BLOCK


@pytest.mark.parametrize("name", PROFILES)
@given(chats=CHATS)
def test_with_memory_enough_an_engine_reuses_what_the_rule_on_tokens_does(
    name: str, chats: list[tuple[list[int], int]]
) -> None:
    endless = EndlessCheckpoints(PROFILES[name])
    caches = (pooled(10_000, PROFILES[name]), slotted(10_000, PROFILES[name], slots=10_000))
    for blocks, answer_blocks in chats:
        tokens = ids_of([*blocks, *([1, 2, 1][:answer_blocks])])
        prompt = len(blocks) * BLOCK + 2
        request = TokenRequest(*(np.array(part, dtype="<u4").tobytes() for part in (tokens[:prompt], tokens)))
        (expected,) = run(endless, [request]).reused
        work = Job.of(tokens[:prompt], tokens[prompt:], BLOCK)
        assert [served_tokens(cache, work) for cache in caches] == [expected, expected]


def test_positions_are_those_of_the_rule() -> None:
    assert list(aligned(528).kept(1_100, 1_700, 600, 0)) == [1_056, 528, 1_584]
    assert list(aligned(528).kept(500, 520, 0, 0)) == []
    assert list(NO_BUFFER.kept(10, 20, 5, 0)) == [10, 19]
    assert list(EXTRA_BUFFER.kept(200, 300, 100, 64)) == [192, 256]
    assert list(CheckpointProfile(8, every=True).kept(10, 26, 0, 0)) == [8, 16, 24]
    assert on_grid(EXTRA_BUFFER, 48) == replace(EXTRA_BUFFER, grid=96, decode_grid=288)


@pytest.mark.parametrize("make", [pooled, slotted])
def test_a_shared_document_pays_at_its_third_request_where_junctions_are_kept(make: Make) -> None:
    """The first request computes it, the second keeps the junction, the third goes on from there."""
    for junction, reused in ((True, [0, 0, 16]), (False, [0, 0, 0])):
        cache = make(1_000, aligned(8, junction=junction))
        jobs = [Job.of(ids_of([1, 2, 3, 4, name, name, name]), [5], BLOCK) for name in (6, 7, 8)]
        assert [served_tokens(cache, work) for work in jobs] == reused


def test_a_state_that_is_given_up_takes_the_reuse_with_it_and_no_block() -> None:
    cache = slotted(1_000, slots=3, events_max=1_000)
    first, *others = (Job.of(ids_of([name] * 4), [5], BLOCK) for name in range(1, 6))
    assert (served_tokens(cache, first), served_tokens(cache, first)) == (0, 16)
    for work in others:
        served_tokens(cache, work)
    assert served_tokens(cache, first) == 0
    assert not [event for event in cache.drain_events() if isinstance(event, KeyRemoved)]


def test_a_checkpoint_goes_with_the_blocks_that_it_stands_on() -> None:
    for cache in (pooled(20), slotted(8)):
        first, *others = (Job.of(ids_of([name] * 4), [5], BLOCK) for name in range(1, 6))
        served_tokens(cache, first)
        assert cache.hit_blocks(first) == 4
        for work in others:
            served_tokens(cache, work)
        assert cache.hit_blocks(first) == 0


def test_a_checkpoint_does_not_outlive_its_block_in_wait_for_another_copy_of_it() -> None:
    """Nothing was kept there when the block was computed again."""
    profile = aligned(8, junction=False)
    for cache in (pooled(16, profile), slotted(12, profile, slots=100)):
        served_tokens(cache, Job.of(ids_of([1, 1])[:-1], [5], BLOCK))
        assert cache.hit_blocks(Job.of(ids_of([1, 1, 3, 3]), [5], BLOCK)) == 2
        for name in range(4, 9):
            served_tokens(cache, Job.of(ids_of([name] * 6), [5], BLOCK))
        assert served_tokens(cache, Job.of(ids_of([1, 1, 2, 2, 2]), [5], BLOCK)) == 0
        assert cache.hit_blocks(Job.of(ids_of([1, 1, 3, 3]), [5], BLOCK)) == 0


def test_a_running_request_has_memory_for_its_state() -> None:
    work, other = (Job.of(ids_of([name] * 4), [5], BLOCK) for name in (1, 2))
    for cache in (pooled(15), slotted(100, slots=1)):
        held = cache.lease(work)
        assert held is not None
        assert not cache.has_room(other)
        assert cache.lease(other) is None
        cache.release(held)
        assert cache.has_room(other)
    assert not pooled(7).fits(work)
    assert pooled(8).fits(work)
    assert not slotted(100, slots=0).fits(work)


@pytest.mark.parametrize("make", [pooled, slotted])
@pytest.mark.parametrize("name", PROFILES)
@given(steps=steps_of(6))
def test_whatever_requests_do_blocks_are_conserved_and_events_are_of_keys_and_values(
    make: Make, name: str, steps: Steps
) -> None:
    cache = make(30, PROFILES[name], events_max=10_000)
    known: set[int] = set()
    for work in played(cache, steps, lambda blocks: Job.of(ids_of(blocks), [5] * 6, BLOCK)):
        known.update(work.keys)
        twin = cache.copy()
        assert twin.hit_blocks(work) == cache.hit_blocks(work)
        twin.check()
        cache.check()
    for event in cache.drain_events():
        if isinstance(event, KeysStored):
            assert known.issuperset(event.keys)
        elif isinstance(event, KeyRemoved):
            assert event.key in known
