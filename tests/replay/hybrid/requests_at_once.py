"""What requests side by side do to a cache of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import strategies as st

from ranvier_py.replay.engine.block_cache import Job, Lease
from ranvier_py.replay.hybrid.cache_models import PrefixCache

Steps = list[tuple[int, list[int]]]


def steps_of(names_max: int) -> st.SearchStrategy[Steps]:
    """Each has what happens, and the names of a prompt's blocks."""
    names = st.lists(st.integers(1, 3), min_size=1, max_size=names_max)
    return st.lists(st.tuples(st.integers(0, 9), names), max_size=40)


def played(cache: PrefixCache, steps: Steps, job_of: Callable[[list[int]], Job]) -> Iterator[Job]:
    """Requests begin, end and are cut off, and the cache is cleared; yields each step's job after it. All end."""
    running: list[Lease] = []
    for action, names in steps:
        work = job_of(names)
        if action < 5:
            room, hits = cache.has_room(work), cache.hit_blocks(work)
            lease = cache.lease(work)
            assert (lease is not None) == room
            if lease is not None:
                assert lease.hits == hits
                running.append(lease)
        elif action == 9 and len(names) == 6:
            cache.clear()
        elif running:
            lease = running.pop(action % len(running))
            for tokens in (1, lease.job.prompt_tokens, lease.job.tokens_computed)[: action - 4]:
                cache.grow(lease, max(tokens, lease.hits * cache.block_size))
            cache.release(lease)
        yield work
    for lease in running:
        cache.release(lease)
    assert cache.used_blocks == 0
