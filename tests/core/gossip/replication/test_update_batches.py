"""Update batches as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier_py.core.gossip.replication.removals import Removal, decode_removal, encode_removal, is_removal
from ranvier_py.core.gossip.replication.route_updates import (
    ROUTE_UPDATE_BYTES_MAX,
    TOKENS_MAX,
    BadRouteUpdate,
    RouteUpdate,
    decode,
    encode,
)
from ranvier_py.core.gossip.replication.update_batches import ROWS_MAX, decode_batch, encode_batch, is_batch, rows_of

NAMES = st.integers(1, 2**64 - 1)
ROW = st.tuples(NAMES, NAMES, st.integers(1, TOKENS_MAX)).filter(lambda row: row[0] != row[1])
ROWS = st.lists(ROW, min_size=1, max_size=ROWS_MAX)


def batch_of(key: int, boot: int, rows: Sequence[tuple[int, int, int]]) -> bytes:
    """Of (parent, text, depth) each."""
    parents, texts, tokens = zip(*rows, strict=True) if rows else ((), (), ())
    return encode_batch(key, boot, np.array(parents, "u8"), np.array(texts, "u8"), np.array(tokens, "u4"))


@settings(max_examples=60, deadline=None)
@given(NAMES, st.integers(0, 255), ROWS)
def test_a_update_batch_comes_back_as_it_was_and_is_no_other_route_update(
    key: int, boot: int, rows: list[tuple[int, int, int]]
) -> None:
    data = batch_of(key, boot, rows)
    batch = decode_batch(data)
    assert (batch.backend_key, batch.boot) == (key, boot)
    assert list(zip(batch.parents.tolist(), batch.texts.tolist(), batch.tokens.tolist(), strict=True)) == rows
    assert is_batch(data)
    assert not is_removal(data)
    assert rows_of(data) == len(rows)
    assert len(data) <= ROUTE_UPDATE_BYTES_MAX
    for other in (decode, decode_removal):
        with pytest.raises(BadRouteUpdate):
            other(data)


@settings(max_examples=60, deadline=None)
@given(NAMES, st.integers(0, 255), NAMES, st.integers(1, 64))
def test_other_route_updates_are_no_update_batches(key: int, boot: int, parent: int, count: int) -> None:
    chain = tuple((16 * depth, depth, 0) for depth in range(count, 0, -1))
    removal = encode_removal(Removal(key, boot, range(1, count + 1)))
    for data in (encode(RouteUpdate(key, boot, parent, chain)), encode(RouteUpdate(key, boot, 0, chain)), removal):
        assert not is_batch(data)
        assert rows_of(data) == 1
        with pytest.raises(BadRouteUpdate):
            decode_batch(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120))
def test_arbitrary_bytes_raise_nothing_but_bad_route_update(data: bytes) -> None:
    assert rows_of(data) >= 1
    try:
        batch = decode_batch(data)
    except BadRouteUpdate:
        return
    rows = list(zip(batch.parents.tolist(), batch.texts.tolist(), batch.tokens.tolist(), strict=True))
    assert batch_of(batch.backend_key, batch.boot, rows) == data


@pytest.mark.parametrize("row", [(0, 5, 9), (5, 0, 9), (5, 5, 9), (5, 6, 0), (5, 6, TOKENS_MAX + 1)])
def test_a_row_without_a_name_a_place_or_a_depth_is_refused(row: tuple[int, int, int]) -> None:
    """It would hang under itself, or nowhere, or at no depth."""
    with pytest.raises(BadRouteUpdate):
        decode_batch(batch_of(7, 0, [(1, 2, 3), row]))


def test_what_has_no_place_in_a_update_batch_is_refused() -> None:
    for key, rows in ((0, [(1, 2, 3)]), (1, []), (1, [(1, 2, 3)] * (ROWS_MAX + 1))):
        with pytest.raises(BadRouteUpdate):
            batch_of(key, 0, rows)
