"""PU7 and its neighbours: who holds what, syncs, silence, bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.sources import push_map
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_map import PushMap
from ranvier_py.core.engine_cache.sources.push_messages import read_events, read_eviction, read_sync
from ranvier_py.core.errors import BadRequest
from ranvier_py.core.ids import BackendId
from tests.examples import examples

A, B = BackendId(0), BackendId(1)


def sync(pushed: PushMap, backend: BackendId, keys: Iterable[int], now: float = 0.0) -> dict[Tier, list[int]]:
    """The sync of the report; what went and came."""
    pushed.report(backend, "", now)
    found: dict[Tier, list[int]] = {Tier.ABSENT: [], Tier.GPU: []}
    for some, tier in pushed.sync(backend, dict.fromkeys(keys), now):
        found[tier] += some
    return {tier: sorted(keys) for tier, keys in found.items()}


def evict(pushed: PushMap, backend: BackendId, keys: Iterable[int]) -> None:
    for _ in pushed.evict(backend, list(keys)):
        pass


KEYS = st.lists(st.integers(1, 40), max_size=12)
STEPS = st.lists(st.tuples(st.sampled_from(["evict", "sync", "forget"]), st.sampled_from([A, B]), KEYS), max_size=25)


@given(STEPS)
@settings(max_examples=examples(80))
def test_pu7_who_holds_a_hash_is_who_reported_it_whatever_workers_report(
    steps: list[tuple[str, BackendId, list[int]]],
) -> None:
    pushed, model = PushMap(), {A: set[int](), B: set[int]()}
    for verb, backend, keys in steps:
        if verb == "forget":
            pushed.forget(backend)
            model[backend] = set()
        elif verb == "sync":
            sync(pushed, backend, keys)
            model[backend] = set(keys)
        else:
            pushed.report(backend, "", 0.0)
            evict(pushed, backend, keys)
            model[backend] -= set(keys)
        assert len(pushed) == sum(map(len, model.values()))
        for key in range(1, 41):
            assert set(pushed.holders(key)) == {one for one, held in model.items() if key in held}


def test_pu7_a_sync_is_destructive_for_its_worker_alone() -> None:
    pushed = PushMap()
    sync(pushed, A, range(1, 100))
    sync(pushed, B, range(50, 150))
    assert sync(pushed, A, range(90, 110)) == {Tier.ABSENT: list(range(1, 90)), Tier.GPU: list(range(100, 110))}
    assert sorted(pushed.workers[B].hashes) == list(range(50, 150))


def test_px4_an_eviction_that_comes_while_a_sync_is_taken_in_stands() -> None:
    pushed = PushMap()
    sync(pushed, A, [1, 2])
    steps = pushed.sync(A, dict.fromkeys([1, 3, 4]), 0.0)
    next(steps)  # what went
    evict(pushed, A, [1, 3])
    assert [some for some, _ in steps] == [[4]]
    assert sorted(pushed.workers[A].hashes) == [4]


def test_evictions_that_come_after_a_sync_was_broken_off_are_not_kept() -> None:
    """A reporter may die while its sync is taken in, and with it the task that takes it in."""
    pushed = PushMap()
    sync(pushed, A, [1, 2])
    steps = pushed.sync(A, dict.fromkeys([1, 3]), 5.0)
    next(steps)
    steps.close()
    evict(pushed, A, [1])
    assert (pushed.workers[A].changed, pushed.workers[A].synced_at, pushed.counters.syncs) == (None, 0.0, 1)


def test_many_evictions_are_taken_in_slice_by_slice_until_the_worker_is_another() -> None:
    pushed = PushMap()
    sync(pushed, A, range(1, 1001))
    steps = pushed.evict(A, range(1, 1001))
    next(steps)
    assert len(pushed) == 1000 - push_map.SLICE_HASHES
    sync(pushed, B, [7])
    pushed.forget(A)
    assert list(steps) == []
    assert len(pushed) == 1


def test_a_sync_that_another_one_overtook_changes_nothing_any_more() -> None:
    pushed = PushMap()
    late = pushed.sync(A, {9: None}, 0.0) if pushed.report(A, "", 0.0) else iter(())
    sync(pushed, A, [2, 3])
    first = pushed.sync(A, {5: None}, 0.0)
    next(first)
    sync(pushed, A, [2, 3])
    assert list(first) == []
    list(late)


def test_px7_a_worker_that_is_silent_for_three_syncs_is_not_believed_until_it_reports() -> None:
    pushed = PushMap()
    sync(pushed, A, [1], now=100.0)
    sync(pushed, B, [1], now=110.0)
    pushed.silence(114.9)
    assert pushed.counters.silenced == 0
    pushed.silence(115.0)
    pushed.silence(115.5)
    assert pushed.counters.silenced == 1
    assert pushed.holders(1) == [B]
    sync(pushed, A, [1], now=116.0)
    assert pushed.holders(1) == [A, B]


def test_what_is_beyond_the_bound_is_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_map, "HASHES_MAX", 10)
    pushed = PushMap()
    sync(pushed, A, range(1, 21))
    assert (len(pushed), pushed.counters.refused) == (10, 10)
    evict(pushed, A, range(1, 9))
    sync(pushed, A, range(9, 19))
    assert len(pushed) == 10


def test_px11_a_worker_whose_hashes_are_of_another_model_begins_anew() -> None:
    pushed = PushMap()
    sync(pushed, A, [1])
    pushed.report(A, "other", 0.0)
    assert pushed.holders(1) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["worker_id", "model", "evicted_hashes", "active_hashes", "rank", "ranks", "messages", "ask", "replayed", "ended"]
)
LIKELY: list[Any] = ["w0", 3, [], [0], ["a" * 64], "a" * 64, [[1, "YWJj"]], [[1, "?"]], [["1", "YWJj"]], True]


@given(st.dictionaries(NAMES, st.sampled_from(LIKELY) | JSON, max_size=9))
@settings(max_examples=examples(300))
def test_whatever_a_message_holds_it_is_read_or_refused_with_a_400(body: Mapping[str, Any]) -> None:
    for read in (read_eviction, read_sync, read_events):
        with suppress(BadRequest):
            read({"worker_id": "w0", **body})
