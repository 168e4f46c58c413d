"""Lessons as bytes: what goes in comes out, and what is no lesson is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.gossip.routes.lessons import LESSON_BYTES_MAX, STOPS_MAX, BadLesson, Lesson, decode, encode, pieces

FINGERPRINTS = st.integers(1, 2**64 - 1)
STOPS = st.one_of(
    st.tuples(st.integers(1, 2**30 - 1), FINGERPRINTS, FINGERPRINTS).filter(lambda stop: stop[1] != stop[2]),
    st.tuples(st.integers(1, 2**30 - 1), FINGERPRINTS, st.just(0)),
    st.tuples(st.integers(1, 2**30 - 1), st.just(0), FINGERPRINTS),
)
LESSONS = st.builds(
    Lesson,
    FINGERPRINTS,
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.lists(STOPS, min_size=1, max_size=STOPS_MAX).map(tuple),
)
TURN = Lesson(7, 1, 5, ((320, 11, 12), (288, 13, 14)))


@settings(max_examples=100, deadline=None)
@given(LESSONS)
def test_a_lesson_comes_back_from_its_bytes(lesson: Lesson) -> None:
    data = encode(lesson)
    assert decode(data) == lesson
    assert len(data) <= LESSON_BYTES_MAX


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=120), st.tuples(LESSONS, st.binary(max_size=8)).map(lambda x: encode(x[0]) + x[1])))
def test_bytes_are_a_lesson_in_one_spelling_or_none(data: bytes) -> None:
    """Two spellings of one lesson would count as two; anything but BadLesson would end a receiver."""
    try:
        lesson = decode(data)
    except BadLesson:
        return
    assert encode(lesson) == data


def test_a_lesson_cut_short_anywhere_is_none() -> None:
    data = encode(TURN)
    assert len(data) == 58
    for size in range(len(data)):
        with pytest.raises(BadLesson):
            decode(data[:size])


@pytest.mark.parametrize(
    "wrong",
    [
        TURN._replace(stops=()),
        TURN._replace(stops=((1, 2, 3),) * (STOPS_MAX + 1)),
        TURN._replace(stops=((0, 2, 3),)),
        TURN._replace(stops=((2**30, 2, 3),)),
        TURN._replace(stops=((16, 0, 0),)),
        TURN._replace(stops=((16, 3, 3),)),
        TURN._replace(stops=((16, -1, 3),)),
        TURN._replace(stops=((16, 2**64, 3),)),
        TURN._replace(backend_key=0),
        TURN._replace(boot=256),
        TURN._replace(parent=2**64),
    ],
)
def test_what_has_no_place_in_a_lesson_is_not_encoded(wrong: Lesson) -> None:
    with pytest.raises(BadLesson):
        encode(wrong)


@pytest.mark.parametrize(
    "data",
    [
        encode(TURN)[:9] + b"\0" + encode(TURN)[10:],  # no stops, bytes left over
        encode(TURN)[:18] + b"\x04\0\0\0" + encode(TURN)[22:],  # a stop of neither kind
        encode(TURN)[:18] + b"\x03\0\0\0" + encode(TURN)[22:],  # of no tokens
        encode(TURN)[:22] + bytes(8) + encode(TURN)[30:],  # its token fingerprint is «not known»
        encode(TURN)[:22] + encode(TURN)[30:38] + encode(TURN)[30:],  # both fingerprints are one
        bytes(8) + encode(TURN)[8:],  # of no backend
        encode(TURN) + b"\0",
        bytes(LESSON_BYTES_MAX + 1),
    ],
)
def test_what_breaks_one_rule_of_the_form_is_refused(data: bytes) -> None:
    with pytest.raises(BadLesson):
        decode(data)


@pytest.mark.parametrize("count", [1, STOPS_MAX, STOPS_MAX + 1, 3 * STOPS_MAX + 5])
def test_a_long_path_goes_in_pieces_each_under_the_one_before(count: int) -> None:
    stops = tuple((16 * depth, depth, 0) for depth in range(count, 0, -1))
    found = list(pieces(Lesson(7, 1, 999_999, stops)))
    assert [stop for piece in reversed(found) for stop in piece.stops] == list(stops)
    assert all(len(piece.stops) <= STOPS_MAX and decode(encode(piece)) == piece for piece in found)
    assert [piece.parent for piece in found] == [999_999, *(piece.stops[0][1] for piece in found[:-1])]
