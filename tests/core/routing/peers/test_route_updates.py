"""Route updates and removals as bytes: what goes in comes out, and what is none is refused."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.routing.peers import route_updates as u
from tests.examples import examples

FINGERPRINTS = st.integers(1, 2**64 - 1)
BACKENDS = st.tuples(st.integers(1, 2**64 - 1), st.integers(0, 255))
NAMES = st.one_of(
    st.tuples(FINGERPRINTS, FINGERPRINTS).filter(lambda names: names[0] != names[1]),
    st.tuples(FINGERPRINTS, st.just(0)),
    st.tuples(st.just(0), FINGERPRINTS),
)
ROW = st.builds(
    lambda backend, parent, tokens, names: u.UpdateRow(backend, parent, tokens, *names),
    BACKENDS,
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**32 - 1),
    NAMES,
).filter(lambda row: not row.parent or row.parent not in row[3:])
ROWS = st.lists(ROW, min_size=1, max_size=u.ROWS_MAX)
BITS = {"Q": 64, "I": 32, "B": 8}


@st.composite
def process_updates(draw: st.DrawFn) -> u.ProcessUpdate:
    kind = draw(st.sampled_from(sorted(u.COLUMNS_OF)))
    codes, never_zero = u.COLUMNS_OF[kind]
    numbers = [st.integers(at < never_zero, 2 ** BITS[code] - 1) for at, code in enumerate(codes)]
    entries = draw(st.lists(st.tuples(*numbers), min_size=1, max_size=u.ENTRIES_MAX[kind]))
    return u.ProcessUpdate(kind, draw(BACKENDS), list(zip(*entries, strict=True)))


ENGINE = (7, 1)
TURN = [u.UpdateRow(ENGINE, 5, 288, 13, 14), u.UpdateRow(ENGINE, 13, 320, 11, 12)]


def test_a_path_names_one_parent_and_is_spelled_so() -> None:
    """The protocol: what other nodes read and write."""
    head = pack("<BBQB", 3, 1, 7, 1)
    assert u.encode_rows(TURN) == head + pack("<Q2I4Q", 5, 288, 320, 13, 11, 14, 12)
    assert u.encode_rows([row._replace(text=0) for row in TURN]) == pack("<BBQB", 1, 1, 7, 1) + pack(
        "<Q2I2Q", 5, 288, 320, 13, 11
    )


def test_rows_of_several_chats_and_backends_name_their_own() -> None:
    rows = [TURN[0], u.UpdateRow((8, 2), 6, 64, 0, 9)]
    head = pack("<BBQBQB", 7, 2, 7, 1, 8, 2)
    assert u.encode_rows(rows) == head + pack("<2Q2I4Q2B", 5, 6, 288, 64, 13, 0, 14, 9, 0, 1)


@settings(max_examples=examples(100))
@given(ROWS)
def test_rows_come_back_from_their_bytes(rows: Sequence[u.UpdateRow]) -> None:
    data = u.encode_rows(rows)
    assert u.decode_rows(data) == rows
    assert u.row_count(data) == len(rows)
    assert len(data) <= u.ROUTE_UPDATE_BYTES_MAX
    assert u.kind_of(data) is None
    with pytest.raises(u.BadRouteUpdate):
        u.decode_process(data)


@settings(max_examples=examples(100))
@given(process_updates())
def test_an_update_of_one_process_comes_back_from_its_bytes(update: u.ProcessUpdate) -> None:
    data = u.encode_process(update)
    assert u.decode_process(data) == update
    assert u.kind_of(data) == update.kind
    assert u.row_count(data) >= len(update.columns[0]), "what a peer may bring is limited by it"
    assert len(data) <= u.ROUTE_UPDATE_BYTES_MAX
    with pytest.raises(u.BadRouteUpdate):
        u.decode_rows(data)


@settings(max_examples=examples(300))
@given(
    st.one_of(
        st.binary(max_size=120),
        st.tuples(st.integers(0, 17), st.integers(0, 3), st.binary(max_size=120)).map(lambda x: bytes(x[:2]) + x[2]),
        st.tuples(
            st.one_of(ROWS.map(u.encode_rows), process_updates().map(u.encode_process)), st.binary(max_size=8)
        ).map(b"".join),
    )
)
def test_arbitrary_bytes_are_sound_or_refused(data: bytes) -> None:
    """Anything but u.BadRouteUpdate would end a receiver."""
    assert u.row_count(data) >= 1
    try:
        if u.kind_of(data) is not None:
            assert u.encode_process(u.decode_process(data)) == data
        else:
            rows = u.decode_rows(data)
            assert u.decode_rows(u.encode_rows(rows)) == rows
    except u.BadRouteUpdate:
        return


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [TURN[0]] * (u.ROWS_MAX + 1),
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
def test_rows_that_break_a_rule_are_not_written(rows: list[u.UpdateRow]) -> None:
    """Without a backend, a name, a depth, or hung under itself."""
    with pytest.raises(u.BadRouteUpdate):
        u.encode_rows(rows)


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
        u.encode_rows(TURN) + b"\0",
        bytes([3, 1]) + bytes(u.ROUTE_UPDATE_BYTES_MAX),
    ],
)
def test_what_breaks_one_rule_is_refused(data: bytes) -> None:
    with pytest.raises(u.BadRouteUpdate):
        u.decode_rows(data)


@pytest.mark.parametrize(
    ("update", "data"),
    [
        (u.ProcessUpdate(u.REMOVED, ENGINE, [(3, 4)]), pack("<BBQB2Q", 0, 1, 7, 1, 3, 4)),
        (u.ProcessUpdate(u.OWNED, ENGINE, [(3, 4), (0, 3600)]), pack("<BBQB2Q2I", 8, 1, 7, 1, 3, 4, 0, 3600)),
        (
            u.ProcessUpdate(u.CHECKPOINTS, ENGINE, [(3, 4), (528, 1056), (0b100111, 1), (5, 0)]),
            pack("<BBQB2Q2I2B2I", 16, 1, 7, 1, 3, 4, 528, 1056, 0b100111, 1, 5, 0),
        ),
    ],
)
def test_each_kind_has_its_spelling(update: u.ProcessUpdate, data: bytes) -> None:
    """The protocol: what other nodes read and write."""
    assert u.encode_process(update) == data
    for wrong in (data[:-1], data + b"x", data[:11], data[:1], bytes([data[0], 2]) + data[2:], data[:2] + bytes(9)):
        with pytest.raises(u.BadRouteUpdate):
            u.decode_process(wrong)


@pytest.mark.parametrize(
    "update",
    [
        u.ProcessUpdate(u.REMOVED, (0, 1), [(1,)]),
        u.ProcessUpdate(u.REMOVED, ENGINE, [()]),
        u.ProcessUpdate(u.REMOVED, ENGINE, [(1, 0)]),
        u.ProcessUpdate(u.REMOVED, ENGINE, [(1,) * (u.ENTRIES_MAX[u.REMOVED] + 1)]),
        u.ProcessUpdate(u.OWNED, ENGINE, [(1,), (2**32,)]),
        u.ProcessUpdate(u.CHECKPOINTS, ENGINE, [(3,), (0,), (1,), (0,)]),
        u.ProcessUpdate(u.CHECKPOINTS, ENGINE, [(3,), (1,), (256,), (0,)]),
    ],
)
def test_what_has_no_place_in_an_update_of_one_process_is_not_written(update: u.ProcessUpdate) -> None:
    with pytest.raises(u.BadRouteUpdate):
        u.encode_process(update)
