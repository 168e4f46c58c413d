"""Route updates and removals as bytes: what goes in comes out, and what is none is refused."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.gossip.replication.route_updates import (
    MARK_BYTES,
    MARKS_MAX,
    REMOVED_MAX,
    ROUTE_UPDATE_BYTES_MAX,
    ROWS_MAX,
    BadRouteUpdate,
    Owned,
    Removal,
    StateMarks,
    UpdateRow,
    decode_marks,
    decode_owned,
    decode_removal,
    decode_rows,
    encode_marks,
    encode_owned,
    encode_removal,
    encode_rows,
    is_marks,
    is_owned,
    is_removal,
    row_count,
)
from tests.examples import examples

FINGERPRINTS = st.integers(1, 2**64 - 1)
BACKENDS = st.tuples(st.integers(1, 2**64 - 1), st.integers(0, 255))
NAMES = st.one_of(
    st.tuples(FINGERPRINTS, FINGERPRINTS).filter(lambda names: names[0] != names[1]),
    st.tuples(FINGERPRINTS, st.just(0)),
    st.tuples(st.just(0), FINGERPRINTS),
)
ROW = st.builds(
    lambda backend, parent, tokens, names: UpdateRow(backend, parent, tokens, *names),
    BACKENDS,
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**32 - 1),
    NAMES,
).filter(lambda row: not row.parent or row.parent not in row[3:])
ROWS = st.lists(ROW, min_size=1, max_size=ROWS_MAX)
REMOVALS = st.builds(Removal, BACKENDS, st.lists(FINGERPRINTS, min_size=1, max_size=REMOVED_MAX).map(tuple))
ENGINE = (7, 1)
TURN = [UpdateRow(ENGINE, 5, 288, 13, 14), UpdateRow(ENGINE, 13, 320, 11, 12)]


def test_a_path_names_one_parent_and_is_spelled_so() -> None:
    """The protocol: what other nodes read and write."""
    head = pack("<BBQB", 3, 1, 7, 1)
    assert encode_rows(TURN) == head + pack("<Q2I4Q", 5, 288, 320, 13, 11, 14, 12)
    assert encode_rows([row._replace(text=0) for row in TURN]) == pack("<BBQB", 1, 1, 7, 1) + pack(
        "<Q2I2Q", 5, 288, 320, 13, 11
    )


def test_rows_of_several_chats_and_backends_name_their_own() -> None:
    rows = [TURN[0], UpdateRow((8, 2), 6, 64, 0, 9)]
    head = pack("<BBQBQB", 7, 2, 7, 1, 8, 2)
    assert encode_rows(rows) == head + pack("<2Q2I4Q2B", 5, 6, 288, 64, 13, 0, 14, 9, 0, 1)
    assert encode_removal(Removal(ENGINE, (3, 4))) == pack("<BBQB2Q", 0, 1, 7, 1, 3, 4)


@settings(max_examples=examples(100))
@given(ROWS)
def test_rows_come_back_from_their_bytes(rows: Sequence[UpdateRow]) -> None:
    data = encode_rows(rows)
    assert decode_rows(data) == rows
    assert row_count(data) == len(rows)
    assert len(data) <= ROUTE_UPDATE_BYTES_MAX
    assert not is_removal(data)
    with pytest.raises(BadRouteUpdate):
        decode_removal(data)


@settings(max_examples=examples(60))
@given(REMOVALS)
def test_a_removal_comes_back_from_its_bytes(removal: Removal) -> None:
    data = encode_removal(removal)
    assert decode_removal(data) == removal
    assert is_removal(data)
    assert row_count(data) == len(removal.fingerprints)
    assert len(data) <= ROUTE_UPDATE_BYTES_MAX
    with pytest.raises(BadRouteUpdate):
        decode_rows(data)


@settings(max_examples=examples(300))
@given(
    st.one_of(
        st.binary(max_size=120),
        st.tuples(st.integers(0, 8), st.integers(0, 3), st.binary(max_size=120)).map(lambda x: bytes(x[:2]) + x[2]),
        st.tuples(st.one_of(ROWS.map(encode_rows), REMOVALS.map(encode_removal)), st.binary(max_size=8)).map(b"".join),
    )
)
def test_arbitrary_bytes_are_sound_rows_or_a_removal_or_refused(data: bytes) -> None:
    """Anything but BadRouteUpdate would end a receiver."""
    assert row_count(data) >= 1
    try:
        if is_removal(data):
            assert encode_removal(decode_removal(data)) == data
        else:
            rows = decode_rows(data)
            assert decode_rows(encode_rows(rows)) == rows
    except BadRouteUpdate:
        return


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [TURN[0]] * (ROWS_MAX + 1),
        [TURN[0]._replace(tokens=0)],
        [TURN[0]._replace(tokens=2**32)],
        [TURN[0]._replace(token=0, text=0)],
        [TURN[0]._replace(token=14)],
        [TURN[0]._replace(parent=13)],
        [TURN[0]._replace(parent=14)],
        [TURN[0]._replace(parent=2**64)],
        [TURN[0]._replace(token=-1)],
        [TURN[0]._replace(backend=(0, 1))],
        [TURN[0]._replace(backend=(7, 256))],
    ],
)
def test_rows_that_break_a_rule_are_not_written(rows: list[UpdateRow]) -> None:
    """Without a backend, a name, a depth, or hung under itself."""
    with pytest.raises(BadRouteUpdate):
        encode_rows(rows)


@pytest.mark.parametrize(
    "data",
    [
        pack("<BBQBQIQQ", 3, 1, 0, 1, 5, 288, 13, 14),  # no backend
        pack("<BBQBQIQQ", 3, 1, 7, 1, 5, 0, 13, 14),  # of no tokens
        pack("<BBQBQIQQ", 3, 1, 7, 1, 5, 288, 0, 0),  # without a name
        pack("<BBQBQIQQ", 3, 1, 7, 1, 5, 288, 13, 13),  # both fingerprints are one
        pack("<BBQBQIQQ", 3, 1, 7, 1, 13, 288, 13, 14),  # its own parent
        pack("<BBQBQI", 4, 1, 7, 1, 5, 288),  # of neither fingerprint
        pack("<BBQBQIQQ", 11, 1, 7, 1, 5, 288, 13, 14),  # of unknown kinds
        pack("<BBQIQQ", 3, 0, 5, 288, 13, 14),  # of no backend at all
        pack("<BBQBQBQIQB", 5, 2, 7, 1, 8, 1, 5, 288, 13, 2),  # of a backend that is not there
        encode_rows(TURN) + b"\0",
        bytes([3, 1]) + bytes(ROUTE_UPDATE_BYTES_MAX),
    ],
)
def test_what_breaks_one_rule_is_refused(data: bytes) -> None:
    with pytest.raises(BadRouteUpdate):
        decode_rows(data)


@pytest.mark.parametrize(
    "removal",
    [Removal((0, 1), (1,)), Removal(ENGINE, ()), Removal(ENGINE, (1, 0)), Removal(ENGINE, (1,) * (REMOVED_MAX + 1))],
)
def test_what_has_no_place_in_a_removal_is_not_written(removal: Removal) -> None:
    with pytest.raises(BadRouteUpdate):
        encode_removal(removal)


def test_what_an_engine_keeps_comes_back_from_its_bytes_and_is_taken_for_nothing_else() -> None:
    owned = Owned((7, 1), (3, 4))
    data = encode_owned(owned)
    assert data == pack("<BBQB2Q", 8, 1, 7, 1, 3, 4)
    assert decode_owned(data) == owned
    assert row_count(data) == 2
    assert (is_owned(data), is_removal(data)) == (True, False)
    for decode in (decode_removal, decode_rows):
        with pytest.raises(BadRouteUpdate):
            decode(data)
    for wrong in (data[:-1], data + b"x", data[:11], encode_removal(Removal(*owned)), b"\x08"):
        with pytest.raises(BadRouteUpdate):
            decode_owned(wrong)


def test_a_checkpoint_is_a_prefix_a_position_and_one_byte() -> None:
    """R10. Rows of routes have no such thing: what attention's backends hold travels as ever."""
    sent = StateMarks((7, 1), [(3, 528, 0b100111), (4, 1056, 1)])
    data = encode_marks(sent)
    assert data == pack("<BBQB2Q2I2B", 16, 1, 7, 1, 3, 4, 528, 1056, 0b100111, 1)
    assert len(data) == 11 + 2 * MARK_BYTES
    assert decode_marks(data) == sent
    assert (is_marks(data), is_owned(data), is_removal(data)) == (True, False, False)
    for decode in (decode_removal, decode_rows, decode_owned):
        with pytest.raises(BadRouteUpdate):
            decode(data)
    for wrong in (data[:-1], data + b"x", data[:11], b"\x10", encode_owned(Owned((7, 1), (3, 4)))):
        with pytest.raises(BadRouteUpdate):
            decode_marks(wrong)


@pytest.mark.parametrize(
    "marks",
    [
        StateMarks((0, 1), [(3, 1, 1)]),
        StateMarks((7, 1), []),
        StateMarks((7, 1), [(0, 1, 1)]),
        StateMarks((7, 1), [(3, 0, 1)]),
        StateMarks((7, 1), [(3, 1, 256)]),
        StateMarks((7, 1), [(3, 1, 1)] * (MARKS_MAX + 1)),
    ],
)
def test_what_has_no_place_among_checkpoints_is_not_written(marks: StateMarks) -> None:
    with pytest.raises(BadRouteUpdate):
        encode_marks(marks)


@given(st.binary(max_size=80))
def test_no_bytes_of_checkpoints_raise_anything_else(data: bytes) -> None:
    try:
        found = decode_marks(b"\x10\x01" + data)
    except BadRouteUpdate:
        return
    assert encode_marks(found) == b"\x10\x01" + data
