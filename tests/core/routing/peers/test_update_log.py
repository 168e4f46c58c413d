"""UpdateLogs of route updates and version vectors: contiguous, bounded, forgotten in time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.peers import update_log as u
from ranvier_py.core.routing.peers.route_settings import RouteGossipCounters, RouteGossipSettings
from ranvier_py.core.routing.peers.route_updates import ROUTE_UPDATE_BYTES_MAX, Entry
from tests.examples import examples

ME, OTHER, THIRD = 1, 2, 3
NOW = 1000.0
TTL_S = 100.0


def logs(entries_max: int = 1000, ttl_s: float = TTL_S) -> u.UpdateLogs:
    chosen = RouteGossipSettings(ttl_s=ttl_s, log_entries_max=entries_max, forget_after_s=60.0)
    return u.UpdateLogs(ME, chosen, RouteGossipCounters())


def kept(number: int, at: float = NOW) -> u.LoggedUpdate:
    return u.LoggedUpdate(b"%d" % number, at, at)


def extend(target: u.UpdateLogs, origin: int, count: int, at: float = NOW) -> None:
    assert target.open(origin, at)
    first = target.vector[origin] + 1
    target.extend(origin, [kept(number, at) for number in range(first, first + count)])


def read(source: u.UpdateLogs, origin: int, after: int, now: float = NOW) -> list[bytes]:
    """Everything after a number, batch by batch."""
    found: list[bytes] = []
    while batch := source.batch(origin, after + len(found), now):
        assert batch.after == after + len(found)
        found += [entry.route_update for entry in batch.entries]
    return found


# --- vectors ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(st.dictionaries(st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1), max_size=8), st.randoms())
def test_the_hash_of_a_vector_does_not_depend_on_the_path_there(numbers: dict[int, int], rng: Random) -> None:
    direct, winding = u.VersionVector(), u.VersionVector()
    for origin, number in numbers.items():
        direct.raise_to(origin, number)
    origins = list(numbers)
    rng.shuffle(origins)
    winding.raise_to(2**64, 5)
    for origin in origins:
        for number in sorted({max(1, numbers[origin] // 3), max(1, numbers[origin] // 2), numbers[origin]}):
            winding.raise_to(origin, number)
    winding.drop(2**64)
    winding.drop(2**65)  # was never there
    assert winding.hash == direct.hash
    assert dict(winding.items()) == numbers


def test_vectors_that_differ_by_little_have_other_hashes() -> None:
    seen = {u.term(origin, number) for origin in (1, 2, 3, 2**64 - 1) for number in range(1000)}
    assert len(seen) == 4000
    assert u.VersionVector().hash == 0


def test_numbers_of_a_session_never_go_back() -> None:
    vector = u.VersionVector()
    vector.raise_to(1, 5)
    for number in (5, 4):
        with pytest.raises(AssertionError):
            vector.raise_to(1, number)


# --- growing and reading ----------------------------------------------------------------------------------------------


def test_what_was_announced_is_read_back_in_order() -> None:
    own = logs()
    for number in range(1, 701):
        own.append(b"%d" % number, NOW)
    assert own.own == 700
    for after in (0, 1, 350, 699, 700):
        assert read(own, ME, after) == [b"%d" % number for number in range(after + 1, 701)]
    assert own.batch(ME, 700, NOW) is None
    assert own.batch(OTHER, 0, NOW) is None


def test_a_batch_keeps_all_bounds() -> None:
    """T-size-limits-both-sides: what just fits goes, one byte more goes with the next batch, nothing waits for ever."""
    own = logs()
    for _ in range(u.BATCH_ENTRIES_MAX + 1):
        own.append(b"x", NOW)
    assert [len(batch.entries) if (batch := own.batch(ME, after, NOW)) else 0 for after in (0, 1, 2)] == [
        u.BATCH_ENTRIES_MAX,
        u.BATCH_ENTRIES_MAX,
        u.BATCH_ENTRIES_MAX - 1,
    ]
    large = logs()
    for size in (ROUTE_UPDATE_BYTES_MAX, ROUTE_UPDATE_BYTES_MAX, ROUTE_UPDATE_BYTES_MAX):
        large.append(bytes(size), NOW)
    for room, count in (
        (3 * (ROUTE_UPDATE_BYTES_MAX + u.ENTRY_BYTES), 3),
        (3 * (ROUTE_UPDATE_BYTES_MAX + u.ENTRY_BYTES) - 1, 2),
        (2 * (ROUTE_UPDATE_BYTES_MAX + u.ENTRY_BYTES), 2),
        (1, 1),  # one at least: else it would be tried for ever
    ):
        batch = large.batch(ME, 0, NOW, room)
        assert batch is not None
        assert len(batch.entries) == count
    assert u.BATCH_BYTES_MAX >= ROUTE_UPDATE_BYTES_MAX + u.ENTRY_BYTES


def test_ages_are_whole_seconds_rounded_up_and_never_negative() -> None:
    own = logs()
    for at in (NOW, NOW + 0.5, NOW + 1.0, NOW + 9.0):
        own.append(b"x", at)
    batch = own.batch(ME, 0, NOW + 1.2)
    assert batch is not None
    assert [entry.age_s for entry in batch.entries] == [2, 1, 1, 0]


def test_a_batch_states_how_long_its_newest_route_update_was_held() -> None:
    own = logs()
    own.append(b"x", NOW)
    own.append(b"y", NOW + 0.02)
    for wait_s, held_ms in ((0.02, 0), (0.05, 30), (2.0, 1980), (90.0, u.HELD_MAX_MS)):
        batch = own.batch(ME, 0, NOW + wait_s)
        assert batch is not None
        assert batch.held_ms == held_ms


def test_of_what_has_expired_only_the_number_is_sent() -> None:
    """The number must arrive, or what follows would not join."""
    source = logs()
    assert source.open(OTHER, NOW)
    source.extend(
        OTHER,
        [u.LoggedUpdate(b"young", NOW, NOW), u.LoggedUpdate(b"old", NOW - 60, NOW), u.LoggedUpdate(b"young", NOW, NOW)],
    )
    batch = source.batch(OTHER, 0, NOW + 50)
    assert batch is not None
    assert batch.entries == (Entry(50, b"young"), Entry(110, b""), Entry(50, b"young"))
    ancient = logs(entries_max=9, ttl_s=1e6)
    assert ancient.batch(ME, 0, NOW) is None
    ancient.append(b"x", 0.0)
    batch = ancient.batch(ME, 0, 100_000.0)
    assert batch is not None
    assert batch.entries == (Entry(u.AGE_MAX_S, b""),), "an update would get younger on its way"


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from((ME, OTHER, THIRD)), st.integers(1, 40)), max_size=30), st.integers(1, 60))
def test_logs_stay_within_their_bound_and_without_gaps(steps: list[tuple[int, int]], entries_max: int) -> None:
    """S3: what is given away is exactly what follows a number, or nothing at all."""
    target = logs(entries_max)
    for origin, count in steps:
        if origin == ME:
            for _ in range(count):
                target.append(b"%d" % (target.own + 1), NOW)
        else:
            extend(target, origin, count)
        assert len(target) <= entries_max
        total = 0
        for each in target.origins():
            base, number = target.base(each), target.vector[each]
            assert read(target, each, base) == [b"%d" % n for n in range(base + 1, number + 1)]
            total += number - base
        assert total == len(target)


def test_each_origin_keeps_a_share_by_its_activity() -> None:
    target = logs(entries_max=100)
    for _ in range(100):
        extend(target, OTHER, 3)
        extend(target, THIRD, 1)
    shares = [target.vector[origin] - target.base(origin) for origin in (OTHER, THIRD)]
    assert shares == [75, 25]
    assert target.counters.trimmed == 300


def calls_of(action: Callable[[], object]) -> int:
    """Python and C calls made by an action: what it costs, without a clock."""
    count = 0

    def tally(*_: object) -> None:
        nonlocal count
        count += 1

    gc.disable()  # its callbacks would count
    sys.setprofile(tally)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_the_cost_of_a_route_update_does_not_grow_with_history() -> None:
    """smg-project/smg#655: each update went through all before it."""
    young, old = logs(entries_max=70_000), logs(entries_max=70_000)
    for number in range(60_000):
        old.append(b"%d" % number, NOW)
    young.append(b"x", NOW)
    assert calls_of(lambda: old.append(b"x", NOW)) == calls_of(lambda: young.append(b"x", NOW))
    assert calls_of(lambda: old.batch(ME, old.own - 1, NOW)) == calls_of(lambda: young.batch(ME, young.own - 1, NOW))


# --- tables instead of route updates
# ----------------------------------------------------------------------------------------


def test_an_adopted_number_never_lowers_one() -> None:
    """T-stale-digest-race (chitchat#178, #180): a reset computed from what was true a while ago changes nothing."""
    target = logs()
    extend(target, OTHER, 10)
    hash_before = target.vector.hash
    for number in (0, 3, 9, 10):
        assert not target.adopt(OTHER, number)
    assert (target.vector[OTHER], target.base(OTHER), target.vector.hash) == (10, 0, hash_before)
    assert target.adopt(OTHER, 11), "the first one beyond"
    assert (target.vector[OTHER], target.base(OTHER)) == (11, 11)
    extend(target, OTHER, 1)
    assert read(target, OTHER, 11) == [b"12"]


def test_nobody_reports_a_node_what_it_learned_itself() -> None:
    own = logs()
    own.append(b"x", NOW)
    assert not own.adopt(ME, 50)
    assert own.own == 1
    assert not own.adopt(OTHER, 50), "an origin that was not opened"


def test_places_of_cleared_logs_are_bounded_too() -> None:
    target = logs(entries_max=50)
    for round_number in range(1, 40):
        extend(target, OTHER, 20)
        assert target.adopt(OTHER, 1000 * round_number)
        assert len(target) <= 50
    extend(target, OTHER, 50)
    assert len(read(target, OTHER, target.base(OTHER))) == 50


# --- forgetting -------------------------------------------------------------------------------------------------------


def test_route_updates_go_when_they_expire() -> None:
    target = logs()
    for second in range(10):
        target.append(b"x", NOW + second)
    target.prune(NOW + TTL_S + 4)
    assert (target.base(ME), target.own, len(target)) == (5, 10, 5)
    assert target.counters.trimmed == 0, "they were not lost"


def test_much_that_expired_at_once_goes_in_steps() -> None:
    """After a long sleep: the loop must not stand still for tens of milliseconds."""
    target = logs(entries_max=3 * u.PRUNED_AT_ONCE_MAX)
    for _ in range(2 * u.PRUNED_AT_ONCE_MAX + 10):
        target.append(b"x", NOW)
    assert [target.prune(NOW + TTL_S) for _ in range(3)] == [False, False, True]
    assert len(target) == 0


def test_what_a_dead_origin_learned_is_kept_until_it_expires() -> None:
    """quickwit#4562: to stop sharing what a dead node taught loses what others never got."""
    target = logs()
    target.present([OTHER], NOW)
    extend(target, OTHER, 3)
    target.present([], NOW + 10)
    target.prune(NOW + TTL_S - 1)
    assert read(target, OTHER, 0, NOW + TTL_S - 1) == [b"1", b"2", b"3"]
    target.prune(NOW + TTL_S)
    assert target.is_spent(OTHER)
    assert target.vector[OTHER] == 3, "others may still be sent later ones that they lack"
    target.prune(NOW + 10 + TTL_S)
    assert dict(target.vector.items()) == {}
    assert target.vector.hash == 0


def test_a_dead_origin_is_not_forgotten_before_its_death_is_settled() -> None:
    """chitchat#155: two nodes disagree for a while on who is dead; a short TTL must not make that a difference."""
    target = logs(entries_max=10, ttl_s=1.0)
    extend(target, OTHER, 1)
    target.prune(NOW + 59)
    assert target.vector[OTHER] == 1
    target.prune(NOW + 60)
    assert target.vector[OTHER] == 0


def test_a_forgotten_origin_does_not_come_back_by_reports() -> None:
    """T-gc-skew: a peer that forgets a second later would bring it back, and be given it in turn, for ever."""
    target = logs()
    extend(target, OTHER, 3)
    target.prune(NOW + TTL_S)
    assert target.is_forgotten(OTHER)
    assert not target.open(OTHER, NOW + TTL_S + 1)
    target.present([OTHER], NOW + TTL_S + 2)
    assert target.open(OTHER, NOW + TTL_S + 2), "it is alive: a long partition healed"


def test_that_an_origin_was_forgotten_is_forgotten_too() -> None:
    target = logs()
    extend(target, OTHER, 1)
    target.prune(NOW + TTL_S)
    target.prune(NOW + TTL_S + u.FORGOTTEN_S)
    assert not target.is_forgotten(OTHER)


def test_a_peer_that_comes_back_in_time_loses_nothing() -> None:
    target = logs()
    target.present([OTHER], NOW)
    extend(target, OTHER, 3)
    target.present([], NOW + 1)
    target.present([OTHER], NOW + 90)
    extend(target, OTHER, 1, NOW + 99)
    target.prune(NOW + TTL_S + 1)
    assert target.vector[OTHER] == 4
    assert not target.is_spent(OTHER)


def test_a_thousand_restarts_leave_nothing_behind() -> None:
    """T-1000-restarts-bounded (akka-core#23318): each run of a node is an origin of its own."""
    target = logs(entries_max=100)
    now = NOW
    for session in range(10, 1010):
        target.present([session], now)
        extend(target, session, 2, now)
        now += 1.0
        target.prune(now)
        assert len(target.vector) <= TTL_S + 2
        assert len(target.origins()) <= TTL_S + 3
    assert len(target) <= 100
    target.present([], now)
    target.prune(now + TTL_S)
    target.prune(now + TTL_S + u.FORGOTTEN_S)
    assert target.origins() == [ME]
    assert not any(target.is_forgotten(session) for session in range(10, 1010))


def test_origins_and_forgotten_ones_are_bounded() -> None:
    target = logs()
    for session in range(2, u.ORIGINS_MAX + 10):
        target.open(session, NOW)
    assert len(target.origins()) == u.ORIGINS_MAX
    for round_number in range(1, 4):
        target.prune(NOW + TTL_S * round_number)
        for session in range(u.ORIGINS_MAX * round_number, u.ORIGINS_MAX * (round_number + 1)):
            target.open(10 * u.ORIGINS_MAX + session, NOW + TTL_S * round_number)
    assert sum(map(target.is_forgotten, range(20 * u.ORIGINS_MAX))) <= u.FORGOTTEN_MAX


def test_what_no_batch_could_carry_leaves_its_number_only() -> None:
    """T-poison-item (smg#808): else it is rebuilt and skipped for ever."""
    assert u.fits(bytes(ROUTE_UPDATE_BYTES_MAX)) == bytes(ROUTE_UPDATE_BYTES_MAX)
    assert u.fits(bytes(ROUTE_UPDATE_BYTES_MAX + 1)) == b""


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=60), st.integers(1, 40), st.integers(0, 70))
@settings(max_examples=examples(60))
def test_room_for_what_follows_is_reported_without_a_walk(
    route_updates: list[bytes], entries_max: int, after: int
) -> None:
    """Repair asks for it with each vector: under load a walk over the log was a fifth of gossip's cost."""
    kept = logs(entries_max=entries_max)
    for route_update in route_updates:
        kept.append(route_update, NOW)
    there = route_updates[max(after, kept.base(ME)) :]
    assert kept.bytes_after(ME, after) == sum(len(route_update) + u.ENTRY_BYTES for route_update in there)


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "extend", "adopt", "prune", "absent"]), st.integers(0, 1400)), max_size=60
    )
)
def test_what_logs_keep_is_bounded_in_bytes(calls: list[tuple[str, int]]) -> None:
    """Or update batches, of which each is as long as twenty turns, would take ten times the memory."""
    target, now = logs(entries_max=40), NOW
    target.present([OTHER], now)
    for call, size in calls:
        now += 1.0
        if call == "append":
            target.append(bytes(min(size, ROUTE_UPDATE_BYTES_MAX)), now)
        elif call == "extend":
            for origin in (OTHER, THIRD):
                if target.open(origin, now):
                    target.extend(origin, [u.LoggedUpdate(bytes(min(size, ROUTE_UPDATE_BYTES_MAX)), now, now)] * 3)
        elif call == "adopt":
            target.adopt(OTHER, target.vector[OTHER] + 5)
        elif call == "prune":
            now += size / 8
            target.prune(now)
        else:
            target.present([], now)
        held = [update for origin in target.origins() for update in read(target, origin, target.base(origin), NOW)]
        assert target.bytes_kept == sum(len(update) + u.ENTRY_BYTES for update in held)
        assert target.bytes_kept <= 40 * (u.ROUTE_UPDATE_BYTES_MEAN + u.ENTRY_BYTES)
        assert len(target) <= 40


def test_turns_alone_reach_the_bound_in_route_updates_first() -> None:
    target = logs(entries_max=40)
    for _ in range(50):
        target.append(bytes(60), NOW)
    assert (target.base(ME), target.counters.trimmed) == (10, 10)
    for _ in range(10):
        target.append(bytes(ROUTE_UPDATE_BYTES_MAX), NOW)
    assert target.own - target.base(ME) == 40 * (u.ROUTE_UPDATE_BYTES_MEAN + u.ENTRY_BYTES) // (
        ROUTE_UPDATE_BYTES_MAX + u.ENTRY_BYTES
    )
