"""What a node says about itself: it outbids, overtakes, and in the end makes way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.mesh.membership.own_record import (
    EPOCH_AHEAD_MAX,
    EPOCH_MAX,
    INCARNATION_MAX,
    INCARNATION_STEP_MAX,
    NAME_BYTES_MAX,
    NAMESAKES_MAX,
    OwnRecord,
    first_epoch,
)
from ranvier_py.core.mesh.wire.messages import Record, State
from tests.core.mesh.membership.small_cluster import record_of
from tests.examples import examples

ME = record_of("me", 0xABCDEF0123456789, epoch=10, incarnation=3)


def accused(incarnation: int) -> Record:
    return ME._replace(incarnation=incarnation, epoch=10, state=State.DEAD)


def other(epoch: int, session: int = 5, state: State = State.ALIVE) -> Record:
    return ME._replace(session=session, epoch=epoch, state=state)


def test_an_absurd_incarnation_is_answered_with_a_new_epoch() -> None:
    """memberlist#358: one message with the last incarnation there is evicted a member for good."""
    for claimed in (INCARNATION_MAX, 3 + INCARNATION_STEP_MAX + 1):
        me = OwnRecord(ME)
        me.outbid(accused(claimed))
        assert (me.record.epoch, me.record.incarnation) == (11, 3)
        assert (me.record.epoch, me.record.incarnation) > (10, claimed)


def test_the_last_incarnation_of_ones_own_is_followed_by_a_new_epoch() -> None:
    me = OwnRecord(ME._replace(incarnation=INCARNATION_MAX))
    me.outbid(accused(INCARNATION_MAX))
    assert (me.record.epoch, me.record.incarnation) == (11, 0)


def test_another_address_comes_by_the_next_incarnation_with_a_name_of_its_own() -> None:
    me = OwnRecord(ME)
    for epoch in (20, 22, 24):
        me.overtake(other(epoch))
    me.move("10.0.0.9:7946", "10.0.0.9", "10.0.0.9:80")
    record = me.record
    assert (record.name, record.host, record.port, record.public) == (
        "10.0.0.9:7946",
        "10.0.0.9",
        ME.port,
        "10.0.0.9:80",
    )
    assert (record.epoch, record.incarnation) > (ME.epoch, ME.incarnation)
    me.overtake(other(record.epoch + 1))
    me.overtake(other(record.epoch + 3))
    assert me.record.name == "10.0.0.9:7946-abcdef01", "the digits it has begun with are taken"


def test_a_dead_earlier_run_never_costs_the_name() -> None:
    me = OwnRecord(ME)
    for epoch in (20, 40, 60):
        assert not me.overtake(other(epoch, state=State.DEAD))
    assert (me.record.name, me.record.epoch) == ("me", 61)


def test_a_namesake_that_comes_back_gets_the_name() -> None:
    me = OwnRecord(ME)
    assert not me.overtake(other(20))
    assert not me.overtake(other(22))
    assert me.overtake(other(24))
    assert me.record.name == "me-abcd"
    assert (me.record.epoch, me.record.incarnation) == (23, 4)


def test_of_two_with_one_name_the_newcomer_is_renamed_and_gets_it_back_above_whoever_had_it() -> None:
    elder, newcomer = OwnRecord(ME), OwnRecord(ME._replace(session=0x5555, epoch=500))
    while not (elder.is_renamed or newcomer.is_renamed):
        for one, two in ((elder, newcomer), (newcomer, elder)):
            if not one.outranks(two.record):
                one.overtake(two.record)
    assert (elder.record.name, newcomer.record.name) == ("me", "me-0000")
    assert elder.is_namesake(0x5555)
    newcomer.regain(elder.record.epoch)
    assert (newcomer.record.name, newcomer.record.epoch > elder.record.epoch) == ("me", True)


def test_several_epochs_of_one_earlier_run_are_no_namesake() -> None:
    """Peers that were apart hold different ones."""
    me = OwnRecord(ME)
    for epoch in (20, 30, 40):
        assert not me.overtake(other(epoch))
    assert (me.record.name, me.record.epoch) == ("me", 41)


def test_two_others_that_overtake_once_each_are_no_namesake() -> None:
    me = OwnRecord(ME)
    assert not me.overtake(other(20, session=5))
    assert not me.overtake(other(30, session=6))
    assert me.record.name == "me"


def test_a_name_taken_in_turn_gets_longer() -> None:
    me = OwnRecord(ME)
    for session, name in ((5, "me-abcd"), (6, "me-abcdef01"), (7, "me-abcdef012345"), (8, "me-abcdef0123456789")):
        me.overtake(other(me.record.epoch + 1, session))
        me.overtake(other(me.record.epoch + 1, session))
        assert me.record.name == name


def test_a_long_name_stays_within_its_bytes_and_whole_messages() -> None:
    me = OwnRecord(ME._replace(name="é" * 32))
    for epoch in (20, 22, 24):
        me.overtake(other(epoch))
    assert me.record.name == "é" * 29 + "-abcd"
    assert len(me.record.name.encode()) <= NAME_BYTES_MAX


def test_an_epoch_that_cannot_be_overtaken_costs_the_name_at_once() -> None:
    me = OwnRecord(ME)
    assert me.overtake(other(EPOCH_MAX))
    assert me.record.name == "me-abcd"
    assert me.record.epoch == 10


@pytest.mark.parametrize(
    ("remembered", "wall_ms", "expected"),
    [
        (0, 1_795_000_000_000, 1_795_000_000_000),
        (1_795_000_000_000, 0, 1_795_000_000_001),  # a clock that begins in 1970
        (1_795_000_000_500, 1_795_000_000_000, 1_795_000_000_501),
        (EPOCH_MAX, 1_795_000_000_000, 1_795_000_000_000),  # what a peer made of it
        (2**64 - 1, 0, 0),
        (0, 2**70, EPOCH_AHEAD_MAX),  # a clock beyond its end
    ],
)
def test_a_run_begins_above_the_last_one_unless_that_is_beyond_belief(
    remembered: int, wall_ms: int, expected: int
) -> None:
    assert first_epoch(remembered, wall_ms) == expected


def test_only_so_many_namesakes_are_remembered() -> None:
    me = OwnRecord(ME)
    for session in range(1, 3 * NAMESAKES_MAX):
        me.overtake(other(me.record.epoch + 1, session))
    assert not me.overtake(other(me.record.epoch + 1, 1)), "forgotten, so it counts as the first time"
    assert me.overtake(other(me.record.epoch + 1, 3 * NAMESAKES_MAX - 1))


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, EPOCH_MAX),
            st.integers(0, INCARNATION_MAX),
            st.sampled_from(State),
            st.integers(1, 3),
        ),
        max_size=20,
    )
)
def test_epoch_and_incarnation_only_rise_and_stay_in_their_bounds(
    claims: list[tuple[bool, int, int, State, int]],
) -> None:
    me = OwnRecord(ME)
    for mine, epoch, incarnation, state, session in claims:
        before = (me.record.epoch, me.record.incarnation)
        claim = ME._replace(epoch=epoch, incarnation=incarnation, state=state)
        if mine and (epoch, incarnation) >= before:
            me.outbid(claim)
            at_the_end = me.record.epoch == EPOCH_MAX and me.record.incarnation == INCARNATION_MAX
            assert at_the_end or (me.record.epoch, me.record.incarnation) > before
        elif not mine and not me.outranks(claim._replace(session=session)):
            me.overtake(claim._replace(session=session))
        assert (me.record.epoch, me.record.incarnation) >= before
        assert me.record.epoch <= EPOCH_MAX
        assert me.record.incarnation <= INCARNATION_MAX
        assert me.record.state is State.ALIVE
