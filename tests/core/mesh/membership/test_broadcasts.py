"""What is spread: how often, in which order, within which bounds."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.membership import broadcasts as broadcasts_module
from ranvier_py.core.mesh.membership.broadcasts import MISFITS_MAX, SLOTS_MIN, STORM, Broadcasts
from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.wire.messages import State, Update
from tests.core.mesh.membership.small_cluster import record_of
from tests.examples import examples


def update(session: int, incarnation: int = 0, state: State = State.ALIVE, name: str = "") -> Update:
    return Update(record_of(name or f"n{session}", session, incarnation=incarnation, state=state))


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred bytes and the name for each update."""
    monkeypatch.setattr(broadcasts_module, "size_of", lambda update: 100 + len(update.record.name))


def queue(members: int = 10, room_bytes: int = 1000) -> tuple[Broadcasts, MembershipCounters]:
    counts = MembershipCounters()
    broadcasts = Broadcasts(4, 0.2, room_bytes, counts)
    broadcasts.members = members
    return broadcasts, counts


def test_an_update_is_sent_as_often_as_the_cluster_has_digits() -> None:
    """mult * ceil(log10(members + 1)), as memberlist."""
    for members, times in ((1, 4), (9, 4), (10, 8), (99, 8), (100, 12), (1000, 16)):
        broadcasts, _ = queue(members)
        broadcasts.push(update(1), 0.0)
        sent = 0
        while broadcasts.take(1000):
            sent += 1
        assert (sent, len(broadcasts)) == (times, 0)


def test_a_newer_update_replaces_the_older_one_and_starts_again() -> None:
    broadcasts, _ = queue()
    broadcasts.push(update(1, 3, State.SUSPECT), 0.0)
    for _ in range(7):
        broadcasts.take(1000)
    broadcasts.push(update(1, 4), 0.0)
    taken = [broadcasts.take(1000) for _ in range(9)]
    assert taken == [(update(1, 4),)] * 8 + [()]


def test_the_latest_update_leaves_first_and_what_was_sent_often_last() -> None:
    """A refutation must not wait behind a thousand joins."""
    broadcasts, _ = queue(members=100)
    for session in range(1, 40):
        broadcasts.push(update(session), 0.0)
    assert [entry.record.session for entry in broadcasts.take(320)] == [39, 38, 37]
    broadcasts.push(update(40), 0.0)
    assert [entry.record.session for entry in broadcasts.take(320)] == [40, 36, 35]


def test_an_update_that_fits_no_datagram_is_counted_and_never_queued() -> None:
    """cortex#4327, smg#808: one that is too large must not be retried for ever, nor block the others."""
    broadcasts, counts = queue(room_bytes=120)
    broadcasts.push(update(1, name="n" * 20), 0.0)
    assert (len(broadcasts), counts.updates_oversized) == (1, 0)
    broadcasts.push(update(2, name="n" * 21), 0.0)
    assert (len(broadcasts), counts.updates_oversized) == (1, 1)


def test_large_updates_do_not_keep_small_ones_out() -> None:
    broadcasts, _ = queue()
    broadcasts.push(update(1, name="x"), 0.0)
    for session in range(2, 2 + MISFITS_MAX - 1):
        broadcasts.push(update(session, name="n" * 40), 0.0)
    assert [entry.record.session for entry in broadcasts.take(101)] == [1]


def test_a_full_queue_drops_what_was_sent_most() -> None:
    broadcasts, counts = queue(members=10)
    broadcasts.push(update(999), 0.0)
    broadcasts.take(1000)
    for session in range(1, SLOTS_MIN + 1):
        broadcasts.push(update(session), 0.0)
    assert (len(broadcasts), counts.updates_dropped) == (SLOTS_MIN, 1)
    sessions = {entry.record.session for _ in range(200) for entry in broadcasts.take(1000)}
    assert sessions == set(range(1, SLOTS_MIN + 1))


def test_a_tick_is_wanted_at_once_and_then_not_before_an_interval() -> None:
    broadcasts, _ = queue()
    assert broadcasts.wake_at == inf
    broadcasts.push(update(1), 5.0)
    assert broadcasts.wake_at == 5.0
    broadcasts.ticked(5.0)
    assert broadcasts.wake_at == 5.2
    broadcasts.push(update(2), 5.1)
    assert broadcasts.wake_at == 5.2
    while broadcasts.take(1000):
        pass
    broadcasts.ticked(5.2)
    assert broadcasts.wake_at == inf
    broadcasts.push(update(3), 5.3)
    assert broadcasts.wake_at == 5.4
    broadcasts.ticked(9.0)
    broadcasts.take(1000)
    broadcasts.push(update(4), 20.0)
    assert broadcasts.wake_at == 9.2, "a tick that is due stays due"


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(0, 600)), max_size=60),
    st.integers(1, 200),
)
def test_a_packet_holds_each_subject_once_and_no_more_than_its_room(
    steps: list[tuple[int, int, int]], members: int
) -> None:
    broadcasts, _ = queue(members)
    latest: dict[int, Update] = {}
    for session, incarnation, room_bytes in steps:
        latest[session] = update(session, incarnation)
        broadcasts.push(latest[session], 0.0)
        taken = broadcasts.take(room_bytes)
        assert sum(100 + len(entry.record.name) for entry in taken) <= room_bytes
        assert len({entry.record.session for entry in taken}) == len(taken)
        assert all(latest[entry.record.session] == entry for entry in taken), "an old update after a newer one"
        assert len(broadcasts) <= max(SLOTS_MIN, 2 * members)


def test_in_a_storm_what_others_spread_too_is_soon_sent_no_more() -> None:
    """A thousand nodes that start at once would repeat themselves for a minute."""
    broadcasts, _ = queue(members=1000)
    for session in range(1, STORM + 2):
        broadcasts.push(update(session), 0.0)
    assert broadcasts.storming
    for _ in range(3):
        broadcasts.echoed(1)
    assert len(broadcasts) == STORM + 1
    broadcasts.echoed(1)
    assert len(broadcasts) == STORM
    for _ in range(99):
        broadcasts.echoed(2)
    assert len(broadcasts) == STORM


def test_without_a_storm_each_update_is_sent_as_often_as_it_should() -> None:
    """Feedback leaves gaps, and lists that fill them are rare then."""
    broadcasts, _ = queue(members=100)
    broadcasts.push(update(1), 0.0)
    sent = 0
    while broadcasts.take(1000):
        broadcasts.echoed(1)
        sent += 1
    assert sent == 12
