"""Route updates as bytes: what goes in comes out, and what is no route update is refused."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.gossip.replication.route_updates import (
    CHAIN_KEYS_MAX,
    ROUTE_UPDATE_BYTES_MAX,
    BadRouteUpdate,
    RouteUpdate,
    decode,
    encode,
    pieces,
)

FINGERPRINTS = st.integers(1, 2**64 - 1)
CHAIN = st.one_of(
    st.tuples(st.integers(1, 2**30 - 1), FINGERPRINTS, FINGERPRINTS).filter(lambda key: key[1] != key[2]),
    st.tuples(st.integers(1, 2**30 - 1), FINGERPRINTS, st.just(0)),
    st.tuples(st.integers(1, 2**30 - 1), st.just(0), FINGERPRINTS),
)
ROUTE_UPDATES = st.builds(
    RouteUpdate,
    FINGERPRINTS,
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.lists(CHAIN, min_size=1, max_size=CHAIN_KEYS_MAX).map(tuple),
)
SHARED_ROWS = st.builds(
    lambda tokens, token, texts: RouteUpdate(7, 1, 5, tuple((tokens, token, text) for text in texts)),
    st.integers(1, 2**30 - 1),
    st.integers(1, 3),
    st.lists(st.integers(4, 9), min_size=1, max_size=4),
)
EITHER = st.one_of(ROUTE_UPDATES, SHARED_ROWS)
TURN = RouteUpdate(7, 1, 5, ((320, 11, 12), (288, 13, 14)))


def spelled(
    key: int = 7, count: int = 0x82, parent: int = 5, number: bytes = b"\x83\x0a", token: int = 11, second: bytes = b""
) -> bytes:
    """TURN, or something wrong."""
    first = pack("<QBBQ", key, 1, count, parent) + number + pack("<QQ", token, 12)
    return first + (second or b"\x83\x02" + pack("<QQ", 13, 14))


def test_a_turn_is_spelled_so() -> None:
    """The protocol: what other versions read and write."""
    assert encode(TURN) == spelled()
    assert decode(spelled(second=pack("<BQ", 0, 14))).chain == ((320, 11, 12), (320, 11, 14))
    assert len(encode(TURN._replace(parent=0))) == len(spelled()) - 8


def test_a_stop_that_seems_deeper_than_the_one_before_is_told_as_it_is() -> None:
    """Depths of texts are estimates until their tokens are known."""
    route_update = TURN._replace(chain=((320, 0, 12), (352, 13, 14), (16, 15, 0)))
    assert decode(encode(route_update)) == route_update


@settings(max_examples=100, deadline=None)
@given(EITHER)
def test_a_route_update_comes_back_from_its_bytes(route_update: RouteUpdate) -> None:
    data = encode(route_update)
    assert decode(data) == route_update
    assert len(data) <= ROUTE_UPDATE_BYTES_MAX


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=120),
        st.tuples(st.one_of(ROUTE_UPDATES, SHARED_ROWS), st.binary(max_size=8)).map(lambda x: encode(x[0]) + x[1]),
    )
)
def test_bytes_are_a_route_update_in_one_spelling_or_none(data: bytes) -> None:
    """Two spellings of one route update would count as two; anything but BadLesson would end a receiver."""
    try:
        route_update = decode(data)
    except BadRouteUpdate:
        return
    assert encode(route_update) == data


def test_a_route_update_cut_short_anywhere_is_none() -> None:
    data = encode(TURN)
    assert len(data) == 54
    for size in range(len(data)):
        with pytest.raises(BadRouteUpdate):
            decode(data[:size])


@pytest.mark.parametrize(
    "wrong",
    [
        TURN._replace(chain=()),
        TURN._replace(chain=((1, 2, 3),) * (CHAIN_KEYS_MAX + 1)),
        TURN._replace(chain=((0, 2, 3),)),
        TURN._replace(chain=((2**30, 2, 3),)),
        TURN._replace(chain=((16, 0, 0),)),
        TURN._replace(chain=((16, 3, 3),)),
        TURN._replace(chain=((16, -1, 3),)),
        TURN._replace(chain=((16, 2**64, 3),)),
        TURN._replace(backend_key=0),
        TURN._replace(boot=256),
        TURN._replace(parent=2**64),
    ],
)
def test_what_has_no_place_in_a_route_update_is_not_encoded(wrong: RouteUpdate) -> None:
    with pytest.raises(BadRouteUpdate):
        encode(wrong)


@pytest.mark.parametrize(
    "data",
    [
        spelled(count=0x80),  # no stops, bytes left over
        spelled(parent=0),  # of a parent without a name
        spelled(number=b"\x80\x0a"),  # a stop of neither kind, and the first
        spelled(number=b"\x03"),  # of no tokens
        spelled(number=b"\x83\x8a\x00"),  # a number with a byte too many
        spelled(number=b"\x83\x8a\x80\x80\x80\x00"),
        spelled(number=b"\xff\xff\xff\xff\x7f"),  # deeper than any
        spelled(token=0),  # its token fingerprint is «not known»
        spelled(token=12),  # both fingerprints are one
        spelled(second=pack("<BQQ", 3, 11, 14)),  # the same token at the same depth, spelled out
        spelled(second=pack("<BQ", 0, 11)),  # another text that is the token
        spelled(second=pack("<BQ", 0, 0)),
        spelled(second=pack("<BQ", 4, 14)),  # another text elsewhere
        spelled(second=b"\x83\x14" + pack("<QQ", 13, 14)),  # as deep as the prompt is long: of no tokens
        spelled(key=0),
        encode(TURN) + b"\0",
        bytes(ROUTE_UPDATE_BYTES_MAX + 1),
    ],
)
def test_what_breaks_one_rule_of_the_form_is_refused(data: bytes) -> None:
    with pytest.raises(BadRouteUpdate):
        decode(data)


@pytest.mark.parametrize("count", [1, CHAIN_KEYS_MAX, CHAIN_KEYS_MAX + 1, 3 * CHAIN_KEYS_MAX + 5])
def test_a_long_path_goes_in_pieces_each_under_the_one_before(count: int) -> None:
    chain = tuple((16 * depth, depth, 0) for depth in range(count, 0, -1))
    found = list(pieces(RouteUpdate(7, 1, 999_999, chain)))
    assert [key for piece in reversed(found) for key in piece.chain] == list(chain)
    assert all(len(piece.chain) <= CHAIN_KEYS_MAX and decode(encode(piece)) == piece for piece in found)
    assert [piece.parent for piece in found] == [999_999, *(piece.chain[0][1] for piece in found[:-1])]
