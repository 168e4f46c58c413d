"""Which answers are void: by scope and moment, in any order of taking, within bounds."""

from __future__ import annotations

from itertools import permutations

from ranvier_py.core.response_cache.invalidations import (
    COUNT_BITS,
    EVERYTHING,
    MARKS_MAX,
    Invalidations,
    VoidMark,
    VoidScope,
)

TTL_S = 300.0


def test_an_answer_is_void_that_was_asked_for_by_then() -> None:
    known = Invalidations(TTL_S)
    known.give(VoidScope("m"), 50.0, 50.0, 1)
    assert known.void("m", b"t", 50.0)
    assert not known.void("m", b"t", 50.1)
    assert not known.void("other", b"t", 10.0)


def test_what_is_given_again_counts_from_then_on_and_never_from_before() -> None:
    known = Invalidations(TTL_S)
    given = [known.give(EVERYTHING, at, 60.0, 9) for at in (50.0, 50.1, 50.2, 40.0)]
    assert [one.number - (9 << COUNT_BITS) for one in given if one is not None] == [1, 2, 3, 4]
    assert known.void("m", b"t", 50.2)
    assert len(known) == 1


def test_nothing_is_kept_longer_than_answers_are() -> None:
    known = Invalidations(TTL_S)
    known.give(VoidScope("m"), 50.0, 50.0, 1)
    known.expire(50.0 + TTL_S - 0.1)
    assert len(known) == 1
    known.expire(50.0 + TTL_S)
    assert len(known) == len(list(known)) == 0
    assert not known.take(VoidMark(7, VoidScope("m"), 50.0), 50.0 + TTL_S)


def test_in_whatever_order_they_are_taken_all_know_the_same_and_nothing_is_lost() -> None:
    made = [
        VoidMark(one << COUNT_BITS | count, scope, before)
        for one, count, scope, before in (
            (1, 1, VoidScope("m"), 20.0),
            (1, 2, VoidScope("m"), 30.0),
            (2, 1, VoidScope("m"), 29.9),  # of a node that knew nothing of the others
            (2, 2, EVERYTHING, 25.0),
            (1, 3, EVERYTHING, 24.0),
        )
    ]
    found = set()
    for order in permutations(made):
        known = Invalidations(TTL_S)
        for one in order:
            known.take(one, 60.0)
        assert not any(known.take(one, 60.0) for one in made)
        assert known.void("m", b"", 30.0)
        assert known.void("other", b"", 25.0)
        found.add((known.digest, frozenset(known)))
    assert found == {(made[1].number ^ made[2].number ^ made[3].number ^ made[4].number, frozenset(made[1:]))}


def test_a_number_used_in_a_node_s_name_keeps_none_of_its_own_from_the_others() -> None:
    one, other = Invalidations(TTL_S), Invalidations(TTL_S)
    for count in (500, (1 << COUNT_BITS) - 1):
        for each in (one, other):
            each.take(VoidMark(7 << COUNT_BITS | count, EVERYTHING, 10.0), 20.0)
        given = one.give(EVERYTHING, 20.0 + count, 30.0, 7)
        assert given is not None
        assert other.take(given, 30.0)


def test_one_more_subject_than_there_is_room_for_makes_them_one_of_everything() -> None:
    known = Invalidations(TTL_S)
    for number in range(MARKS_MAX + 1):
        known.give(VoidScope(f"m{number}"), 50.0 + number / 10_000, 60.0, number + 1)
    assert (len(known), known.folded) == (1, 1)
    assert known.void("m3", b"", 50.0)
    assert not known.take(VoidMark(4 << COUNT_BITS | 4, VoidScope("m3"), 50.003), 60.0)
    assert not known.void("any", b"", 53.0)


def test_what_two_nodes_give_that_know_the_same_holds_on_both() -> None:
    """Cut off from each other, both called theirs by the next number, and each took the other's for its own."""
    one, other = Invalidations(TTL_S), Invalidations(TTL_S)
    for each, at, giver in ((one, 20.0, 8), (other, 60.0, 9)):
        each.take(VoidMark(7 << COUNT_BITS | 1, EVERYTHING, 10.0), 10.0)
        each.give(EVERYTHING, at, at, giver)
    for source, target in ((one, other), (other, one)):
        for mark in list(source):
            target.take(mark, 61.0)
    assert one.void("m", b"", 60.0)
    assert other.void("m", b"", 60.0)
    assert one.digest == other.digest
