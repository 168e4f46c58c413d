"""What events say of checkpoints: enough to know what an engine will reuse, or nothing where real ones are silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from benchmarks.harness.endless_checkpoints import aligned
from ranvier_py.replay.engine.block_cache import (
    CacheEvent,
    Job,
    KeyRemoved,
    KeysCleared,
    KeysStored,
    StateRemoved,
    StateStored,
)
from ranvier_py.replay.engine.engine_values import CACHES, CacheName, EngineLimits
from ranvier_py.replay.hybrid.cache_models import STATES_UNSEEN, PrefixCache, make_cache, state_groups
from ranvier_py.replay.hybrid.checkpoint_cache import PooledCheckpoints
from tests.replay.engine.naive import served
from tests.replay.hybrid.requests_at_once import Steps, played, steps_of

BLOCK = 16
SPOKEN = [name for name in CACHES if name not in STATES_UNSEEN]
LIMITS = EngineLimits(cache_tokens=12_000, block_size=BLOCK, cache_events_max=100_000)


class Reader:
    """Who knows of a cache what its events say."""

    def __init__(self) -> None:
        self.keys: Counter[int] = Counter()
        self.states: dict[int, None] = {}

    def read(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, KeysStored):
                self.keys.update(event.keys)
            elif isinstance(event, StateStored):
                assert event.keys[-1] not in self.states, "one that was there came again"
                self.states[event.keys[-1]] = None
            elif isinstance(event, KeyRemoved):
                self.keys -= Counter((event.key,))
            elif isinstance(event, StateRemoved):
                del self.states[event.key]
            else:
                assert isinstance(event, KeysCleared)
                self.keys.clear()
                self.states.clear()

    def reusable_blocks(self, job: Job) -> int:
        found = 0
        for depth, key in enumerate(job.keys[: (job.prompt_tokens - 1) // BLOCK], 1):
            if not self.keys[key]:
                break
            found = depth if key in self.states else found
        return found


def job_of(blocks: list[int]) -> Job:
    """Each number stands for five blocks, so that grids of 80 tokens are met."""
    ids = [number for number in blocks for _ in range(5 * BLOCK)]
    return Job.of(ids, [7] * (2 * BLOCK), BLOCK)


@pytest.mark.parametrize("name", SPOKEN)
@given(steps=steps_of(24))
def test_events_that_name_states_are_enough_to_know_what_a_cache_will_reuse(name: CacheName, steps: Steps) -> None:
    """Under want of memory, with requests side by side and cut off, and with the cache cleared."""
    cache, reader = make_cache(replace(LIMITS, cache=name)), Reader()
    for work in played(cache, steps, job_of):
        reader.read(cache.drain_events())
        if cache.has_room(work):
            assert cache.hit_blocks(work) == reader.reusable_blocks(work)


@pytest.mark.parametrize("name", STATES_UNSEEN)
def test_engines_that_are_silent_of_states_have_no_groups_of_them(name: CacheName) -> None:
    """SGLang's states come and go, and of none of that there is an event (its #23678)."""
    limits = replace(LIMITS, cache=name)
    cache = make_cache(limits)
    events = [event for number in range(1, 20) for event in events_of(cache, job_of([number] * 4))]
    assert events or name == "vanilla"
    assert not [event for event in events if isinstance(event, StateStored | StateRemoved)]
    assert state_groups(limits) == 0


@pytest.mark.parametrize(("model", "groups"), [("paper-7b", 6), ("qwen3.5-9b", 3), ("nemotron-nano-9b-v2", 7)])
def test_there_are_as_many_groups_of_states_as_vllm_makes(model: str, groups: int) -> None:
    """Of as many layers each as attention has, the last one filled up."""
    assert state_groups(replace(LIMITS, cache="vllm_align", hybrid_model=model)) == groups


def test_a_state_is_named_by_its_last_block_and_spans_the_tokens_since_the_one_before() -> None:
    """vLLM's events of a run in which it kept no state before the last (its #44451)."""
    cache = PooledCheckpoints(1_000, BLOCK, aligned(2 * BLOCK), 3, 1_000)
    first = Job.of([1] * 70, [2] * 60, BLOCK)
    states = [event for event in events_of(cache, first) if isinstance(event, StateStored)]
    assert [(event.keys, event.parent) for event in states] == [(first.keys[:4], 0), (first.keys[4:8], first.keys[3])]
    assert [event.ids.tolist() for event in states] == [[1] * 64, [1] * 6 + [2] * 58]
    second = Job.of([*[1] * 70, *[2] * 60, *[3] * 40], [4], BLOCK)
    (more,) = [event for event in events_of(cache, second) if isinstance(event, StateStored)]
    assert (more.keys, more.parent) == (second.keys[8:10], first.keys[7])


def events_of(cache: PrefixCache, job: Job) -> list[CacheEvent]:
    served(cache, job)
    return cache.drain_events()
