"""Removals as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.gossip.replication.removals import REMOVED_MAX, Removal, decode_removal, encode_removal, is_removal
from ranvier_py.core.gossip.replication.route_updates import (
    ROUTE_UPDATE_BYTES_MAX,
    BadRouteUpdate,
    RouteUpdate,
    decode,
    encode,
)

FINGERPRINTS = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=REMOVED_MAX)


@given(st.integers(1, 2**64 - 1), st.integers(0, 255), FINGERPRINTS)
def test_a_removal_comes_back_as_it_was_and_is_no_other_route_update(
    key: int, boot: int, fingerprints: list[int]
) -> None:
    data = encode_removal(Removal(key, boot, fingerprints))
    assert decode_removal(data) == Removal(key, boot, tuple(fingerprints))
    assert is_removal(data)
    assert len(data) <= ROUTE_UPDATE_BYTES_MAX
    with pytest.raises(BadRouteUpdate):
        decode(data)


@given(st.integers(1, 2**64 - 1), st.integers(0, 255), st.integers(1, 64))
def test_a_route_update_is_no_removal(key: int, boot: int, count: int) -> None:
    chain = tuple((16 * depth, depth, 0) for depth in range(count, 0, -1))
    data = encode(RouteUpdate(key, boot, 0, chain))
    assert not is_removal(data)
    with pytest.raises(BadRouteUpdate):
        decode_removal(data)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_nothing_but_bad_route_update(data: bytes) -> None:
    is_removal(data)
    try:
        removal = decode_removal(data)
    except BadRouteUpdate:
        return
    assert encode_removal(removal) == data


@pytest.mark.parametrize(
    "removal",
    [
        Removal(0, 1, (1,)),
        Removal(1, 1, ()),
        Removal(1, 1, (1, 0)),
        Removal(1, 1, (1,) * (REMOVED_MAX + 1)),
    ],
)
def test_what_has_no_place_in_a_removal_is_not_written(removal: Removal) -> None:
    with pytest.raises(BadRouteUpdate):
        encode_removal(removal)
