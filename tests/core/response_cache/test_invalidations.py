"""Which answers are void: by scope and moment, in any order of taking, within bounds."""

from __future__ import annotations

from itertools import permutations
from random import Random

from ranvier_py.core.response_cache.invalidations import (
    EVERYTHING,
    NUMBER_BITS,
    SCOPES_MAX,
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


def test_what_is_given_again_counts_from_then_on() -> None:
    known = Invalidations(TTL_S)
    numbers = [known.give(EVERYTHING, at, at, 9).number for at in (50.0, 50.1, 50.2)]
    assert numbers == [9, 10, 11]
    assert known.void("m", b"t", 50.2)


def test_nothing_is_kept_longer_than_answers_are() -> None:
    known = Invalidations(TTL_S)
    known.give(VoidScope("m"), 50.0, 50.0, 1)
    known.expire(50.0 + TTL_S - 0.1)
    assert len(known) == 1
    known.expire(50.0 + TTL_S)
    assert len(known) == 0
    assert not known.take(VoidMark(7, VoidScope("m"), 50.0), 50.0 + TTL_S)


def test_in_whatever_order_they_are_taken_the_latest_moment_holds() -> None:
    made = [
        VoidMark(5, VoidScope("m"), 50.0),
        VoidMark(9, VoidScope("m"), 20.0),  # of a node that knew nothing of the first
        VoidMark(7, VoidScope("m"), 49.9),
    ]
    for order in permutations(made):
        known = Invalidations(TTL_S)
        for one in order:
            known.take(one, 60.0)
        assert known.void("m", b"", 50.0)
        assert min(one.number for one in known) >= 9
        assert not known.take(next(iter(known)), 60.0)


def test_a_later_moment_under_a_smaller_number_reaches_who_knows_the_greater_one() -> None:
    known, third = Invalidations(TTL_S), Invalidations(TTL_S)
    for each in (known, third):
        each.take(VoidMark(9, VoidScope("m"), 20.0), 60.0)
    known.take(VoidMark(5, VoidScope("m"), 50.0), 60.0)
    for one in known:
        assert third.take(one, 60.0)
    assert third.void("m", b"", 50.0)


def test_one_more_subject_than_there_is_room_for_makes_them_one_of_everything() -> None:
    known = Invalidations(TTL_S)
    for number in range(SCOPES_MAX + 1):
        known.give(VoidScope(f"m{number}"), 50.0 + number / 1000, 60.0, number + 1)
    assert (len(known), known.folded) == (1, 1)
    assert known.void("m3", b"", 50.0)
    assert not known.take(VoidMark(4, VoidScope("m3"), 50.003), 60.0)
    assert not known.void("any", b"", 53.0)


def test_what_two_nodes_give_that_know_the_same_holds_on_both() -> None:
    """Cut off from each other, both called theirs by the next number, and each took the other's for its own."""
    rng = Random(1)
    one, other = Invalidations(TTL_S), Invalidations(TTL_S)
    first = VoidMark((1 << NUMBER_BITS) - 1, EVERYTHING, 10.0)
    for each, at in ((one, 20.0), (other, 60.0)):
        each.take(first, 10.0)
        each.give(EVERYTHING, at, at, rng.getrandbits(NUMBER_BITS))
    for source, target in ((one, other), (other, one)):
        for mark in list(source):
            target.take(mark, 61.0)
    assert one.void("m", b"", 60.0)
    assert other.void("m", b"", 60.0)
    assert one.digest == other.digest
