"""Where messages end in token space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.prompts.boundaries import ends_by_estimate, ends_by_markers, ends_by_offsets, ends_by_pieces

MARKER = 9


@pytest.mark.parametrize(
    ("offsets", "ends", "depths"),
    [
        pytest.param([(0, 2), (2, 5), (5, 6)], [2, 5, 6], [1, 2, 3], id="between tokens: the count before it"),
        pytest.param([(0, 2), (2, 5), (5, 6)], [1, 3, 6], [-1, -1, 3], id="inside a token: no cut"),
        pytest.param([(0, 2), (2, 5)], [-1, 5], [-1, 2], id="an unknown end stays unknown"),
        pytest.param([(0, 1), (0, 1), (0, 1), (1, 2)], [1, 2], [3, 4], id="byte-level tokens of one emoji"),
        pytest.param([], [], [], id="nothing"),
        pytest.param([], [0], [0], id="no tokens"),
    ],
)
def test_an_end_is_a_cut_where_a_token_ends(offsets: list[tuple[int, int]], ends: list[int], depths: list[int]) -> None:
    """A prefix that ends inside a token is tokenized otherwise alone, so no other prompt can share it."""
    assert ends_by_offsets(offsets, ends) == depths


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.data())
def test_every_token_end_is_found(lengths: list[int], data: st.DataObject) -> None:
    chain = np.cumsum(lengths).tolist()
    offsets = list(zip([0, *chain], chain, strict=False))
    chosen = sorted(data.draw(st.lists(st.sampled_from(range(len(chain))), min_size=1)))
    assert ends_by_offsets(offsets, [chain[index] for index in chosen]) == [index + 1 for index in chosen]


def test_each_marker_ends_the_message_before_it() -> None:
    ids = np.array([MARKER, 1, 2, MARKER, 3, MARKER, 4], dtype=np.uint32)
    assert ends_by_markers(ids, MARKER, 3) == [3, 5, 7]


def test_one_marker_more_is_a_default_system_text() -> None:
    ids = np.array([MARKER, 1, 2, MARKER, 3, MARKER, 4], dtype=np.uint32)
    assert ends_by_markers(ids, MARKER, 2) == [5, 7]


@pytest.mark.parametrize("messages", [0, 1, 4])
def test_markers_that_the_messages_do_not_explain_are_not_trusted(messages: int) -> None:
    """A message that quotes the marker would shift every boundary after it."""
    ids = np.array([MARKER, 1, 2, MARKER, 3, MARKER, 4], dtype=np.uint32)
    assert ends_by_markers(ids, MARKER, messages) is None


def test_an_estimate_is_the_share_of_characters() -> None:
    assert ends_by_estimate([100, 300, 100], 50) == [10, 40, 50]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.integers(0, 10_000))
def test_an_estimate_ascends_and_ends_with_all_tokens(sizes: list[int], tokens: int) -> None:
    ends = ends_by_estimate(sizes, tokens)
    assert len(ends) == len(sizes)
    assert ends[-1] == tokens
    known = [end for end in ends if end >= 0]
    assert known == sorted(known)


def test_pieces_add_up_and_one_that_goes_into_the_next_has_no_end() -> None:
    assert ends_by_pieces([3, 0, 2]) == [3, 3, 5]
    assert ends_by_pieces([3, -1, 4]) == [3, -1, 7]
