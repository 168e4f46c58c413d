"""PU7 and its neighbours: the forward and the reverse map, numbers, snapshots, silence, bounds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.push_state import PushMap, PushSettings, Word, by_bucket
from ranvier_py.core.engine_cache.sources.push_table import BUCKETS, Entry, HashTable
from ranvier_py.core.ids import BackendId

A, B = BackendId(0), BackendId(1)
PLAIN = Word("prefix_hash")
EVERY = range(BUCKETS)


def numbered(seq: int, incarnation: str = "i1") -> Word:
    return Word("prefix_hash", incarnation, seq)


def entries(keys: Iterable[int]) -> list[Entry]:
    return [Entry(key) for key in keys]


def snapshot(pushed: PushMap, backend: BackendId, keys: Iterable[int], now: float = 0.0) -> list[Change]:
    """The plain sync of the report."""
    pushed.hear(backend, PLAIN, now)
    filling = pushed.begin(backend)
    changes = []
    for place, found in by_bucket(entries(keys), EVERY).items():
        changes += pushed.replace(backend, filling, place, found)
    pushed.finish(backend, filling, now, whole=True)
    return changes


def names(changes: Sequence[Change], tier: Tier) -> list[int]:
    return sorted(change.fingerprint for change in changes if change.tier is tier)


def check(pushed: PushMap) -> None:
    """Forward and reverse say the same, and nothing empty is left."""
    reverse = {(key, backend) for backend, worker in pushed.workers.items() for key in worker.table}
    forward = {(key, backend) for key, holders in pushed.forward().items() for backend in holders}
    assert forward == reverse
    assert all(pushed.forward().values())
    assert len(pushed) == len(reverse)
    for worker in pushed.workers.values():
        again = HashTable()
        for key in worker.table:
            again.put(key, worker.table.get(key) or 0)
        assert (again.sums, again.total, again.count) == (
            worker.table.sums,
            worker.table.total,
            worker.table.count,
        )


KEYS = st.lists(st.integers(1, 40), max_size=12)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "snapshot", "forget"]), st.sampled_from([A, B]), KEYS), max_size=25
)


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_pu7_forward_and_reverse_map_agree_whatever_workers_say(steps: list[tuple[str, BackendId, list[int]]]) -> None:
    pushed, model = PushMap(), {A: set[int](), B: set[int]()}
    for verb, backend, keys in steps:
        if verb == "forget":
            pushed.forget(backend)
            model[backend] = set()
            continue
        other = model[B if backend is A else A].copy()
        if verb == "snapshot":
            snapshot(pushed, backend, keys)
            model[backend] = set(keys)
        else:
            pushed.hear(backend, PLAIN, 0.0)
            (pushed.store(backend, entries(keys)) if verb == "store" else pushed.evict(backend, keys))
            model[backend] = model[backend] | set(keys) if verb == "store" else model[backend] - set(keys)
        check(pushed)
        assert model[B if backend is A else A] == other
        for key in range(1, 41):
            assert set(pushed.holders(key)) == {one for one, held in model.items() if key in held}


def test_pu7_a_sync_is_destructive_for_its_worker_alone() -> None:
    pushed = PushMap()
    snapshot(pushed, A, range(1, 100))
    snapshot(pushed, B, range(50, 150))
    changes = snapshot(pushed, A, range(90, 110))
    assert names(changes, Tier.ABSENT) == list(range(1, 90))
    assert names(changes, Tier.GPU) == list(range(100, 110))
    assert sorted(pushed.workers[B].table) == list(range(50, 150))
    assert 20 not in pushed.forward(), "no empty sets are left"
    check(pushed)


def test_pu7_a_sync_costs_what_its_worker_holds_however_much_others_hold() -> None:
    pushed = PushMap()
    for other in range(2, 6):
        snapshot(pushed, BackendId(other), range(1_000_000 * other, 1_000_000 * other + 25_000))
    held = list(range(1, 2001))
    snapshot(pushed, A, held)
    alone = PushMap()
    snapshot(alone, A, held)

    def seconds(one: PushMap) -> float:
        began = time.process_time()
        snapshot(one, A, held)
        return time.process_time() - began

    assert min(seconds(pushed) for _ in range(3)) < 3 * min(seconds(alone) for _ in range(3)) + 0.02


def test_pu7_a_hundred_thousand_hashes_are_compared_without_being_sent() -> None:
    """PX8: what travels every 5 s are a count and a sum."""
    pushed, own = PushMap(), HashTable()
    for key in range(1, 100_001):
        own.put(key << 64 | key, 0)
    pushed.hear(A, numbered(1), 0.0)
    pushed.store(A, entries(own))
    assert pushed.compare(A, own.count, own.total, 0.0)
    pushed.evict(A, [77 << 64 | 77])  # as if its store had been lost
    assert not pushed.compare(A, own.count, own.total, 0.0)
    [place] = pushed.workers[A].table.differing(own.sums)
    filling = pushed.begin(A)
    [change] = pushed.replace(A, filling, place, by_bucket(entries(own.bucket(place)), [place])[place])
    assert (change.fingerprint, change.tier) == (77 << 64 | 77, Tier.GPU)
    assert pushed.finish(A, filling, 0.0, whole=False)
    assert pushed.compare(A, own.count, own.total, 0.0)


def test_px5_a_late_message_is_dropped_and_a_missing_one_noticed() -> None:
    pushed = PushMap()
    assert pushed.hear(A, numbered(1), 0.0)
    assert pushed.compare(A, 0, 0, 0.0)
    assert pushed.workers[A].level is Level.EXACT
    assert pushed.hear(A, numbered(3), 0.0)
    assert pushed.workers[A].level is Level.REPAIRING
    assert not pushed.hear(A, numbered(2), 0.0)
    assert not pushed.hear(A, numbered(3), 0.0)
    assert (pushed.counts.gaps, pushed.counts.old) == (1, 2)


def test_px5_a_process_that_was_replaced_is_not_heard_any_more() -> None:
    pushed = PushMap()
    for word in (numbered(7), numbered(1, "i2")):
        assert pushed.hear(A, word, 0.0)
    assert not pushed.hear(A, numbered(8), 0.0)
    assert pushed.hear(A, numbered(2, "i2"), 0.0)


def test_px4_what_is_said_while_a_snapshot_is_taken_in_stands() -> None:
    pushed = PushMap()
    snapshot(pushed, A, [1, 2])
    filling = pushed.begin(A)
    pushed.store(A, entries([3]))
    pushed.evict(A, [1])
    for place in (1, 2, 3):
        pushed.replace(A, filling, place, {key: Entry(key) for key in (1,) if key == place})
    pushed.finish(A, filling, 0.0, whole=True)
    assert sorted(pushed.workers[A].table) == [3]
    check(pushed)


def test_a_snapshot_that_another_one_overtook_changes_nothing_any_more() -> None:
    pushed = PushMap()
    snapshot(pushed, A, [1, 2])
    late = pushed.begin(A)
    snapshot(pushed, A, [2, 3])
    assert pushed.replace(A, late, 3, {}) == []
    assert not pushed.finish(A, late, 0.0, whole=True)
    assert sorted(pushed.workers[A].table) == [2, 3]


def test_px7_a_worker_that_is_silent_for_three_syncs_is_not_believed_until_it_speaks() -> None:
    pushed = PushMap()
    snapshot(pushed, A, [1], now=100.0)
    snapshot(pushed, B, [1], now=110.0)
    assert pushed.silence(114.9) == []
    assert pushed.silence(115.0) == [A]
    assert pushed.silence(115.5) == [], "told once"
    assert pushed.holders(1) == [B]
    assert pushed.workers[A].level is Level.ESTIMATED
    snapshot(pushed, A, [1], now=116.0)
    assert pushed.holders(1) == [A, B]


def test_a_reporter_that_missed_something_of_its_engine_is_not_taken_for_exact() -> None:
    pushed = PushMap()
    pushed.hear(A, numbered(1), 0.0)
    assert pushed.compare(A, 0, 0, 0.0, certain=False)
    assert pushed.workers[A].level is Level.DEGRADED
    assert pushed.compare(A, 0, 0, 0.0)
    assert pushed.workers[A].level is Level.EXACT


def test_what_is_beyond_the_bound_is_refused_counted_and_not_asked_for_again() -> None:
    pushed = PushMap(PushSettings(hashes_max=10))
    pushed.hear(A, numbered(1), 0.0)
    pushed.store(A, entries(range(1, 21)))
    assert (len(pushed), pushed.counts.refused) == (10, 10)
    assert pushed.compare(A, 20, 12345, 0.0), "else 20 hashes would be sent every 5 s for ever"
    assert pushed.workers[A].level is Level.DEGRADED
    pushed.evict(A, range(1, 9))
    assert not pushed.compare(A, 12, 12345, 0.0), "there is room again"
    check(pushed)


def test_an_eviction_of_an_unknown_hash_is_passed_on() -> None:
    """Traffic may have claimed it."""
    pushed = PushMap()
    pushed.hear(A, PLAIN, 0.0)
    [change] = pushed.evict(A, [9])
    assert (change.fingerprint, change.tier) == (9, Tier.ABSENT)
    assert pushed.counts.evicted_unknown == 1


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.DISK])
def test_a_hash_that_moves_to_another_tier_changes_the_sum(tier: Tier) -> None:
    one, other = HashTable(), HashTable()
    one.put(5, Entry(5, 64, Tier.GPU).packed)
    other.put(5, Entry(5, 64, tier).packed)
    assert one.differing(other.sums) == [5]
    other.put(5, Entry(5, 64, Tier.GPU).packed)
    assert (one.total, one.sums) == (other.total, other.sums)
