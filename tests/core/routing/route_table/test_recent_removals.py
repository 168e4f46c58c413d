"""Removals that are remembered for a moment: which rows they refuse, for how long, and how many there may be."""

from __future__ import annotations

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table.recent_removals import (
    KEPT_S,
    REMOVALS_MAX,
    ROUNDING_S,
    RecentRemovals,
)

ENGINE, OTHER = BackendId(0), BackendId(1)


@pytest.fixture
def removals() -> RecentRemovals:
    removals = RecentRemovals()
    removals.note(300, ENGINE, 20.0)
    return removals


@pytest.mark.parametrize(
    ("token", "text", "backend", "evidence", "refused"),
    [
        (300, 400, ENGINE, 15, True),
        (400, 300, ENGINE, 15, True),
        (300, 0, ENGINE, 20 - 2 * ROUNDING_S, True),
        (300, 0, ENGINE, 20, False),
        (300, 0, OTHER, 15, False),
        (301, 0, ENGINE, 15, False),
    ],
)
def test_only_older_rows_of_that_prefix_at_that_backend_are_refused(
    removals: RecentRemovals, token: int, text: int, backend: BackendId, evidence: float, refused: bool
) -> None:
    assert removals.refuse(token, text, backend, evidence, 21.0) == refused
    assert removals.refused == refused


def test_a_removal_is_forgotten_when_all_that_was_in_transit_has_arrived(removals: RecentRemovals) -> None:
    assert not removals.refuse(300, 0, ENGINE, 15, 20.0 + KEPT_S)
    removals.note(301, ENGINE, 20.0 + KEPT_S + 1)
    assert list(removals.at) == [301]


def test_two_backends_that_drop_one_prefix_are_both_remembered(removals: RecentRemovals) -> None:
    removals.note(300, OTHER, 25.0)
    assert [removals.refuse(300, 0, backend, 20, 26.0) for backend in (ENGINE, OTHER)] == [False, True]


def test_of_too_many_removals_the_oldest_is_forgotten_and_counted(removals: RecentRemovals) -> None:
    for number in range(REMOVALS_MAX):
        removals.note(1000 + number, ENGINE, 20.0)
    assert (len(removals.at), removals.forgotten) == (REMOVALS_MAX, 1)
    assert not removals.refuse(300, 0, ENGINE, 15, 20.0)
