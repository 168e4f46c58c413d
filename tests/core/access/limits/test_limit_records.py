"""Counts of budgets in a file: whatever is cut off or damaged, what was written before it is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.limit_values import Budget, CalendarWindow
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.limit_records import SavedRows, all_rows, read, unsaved_rows, written
from tests.core.access.limits.limit_net import MAY_2026, meters

BUDGETS = meters(budget=(Budget(1e6, CalendarWindow.MONTH), Budget(1e6, CalendarWindow.DAY)))
MINUTE = meters(tokens_per_minute=100)


def counters(session: int = 1) -> Counters:
    made = Counters(session)
    made.wall_offset_s = MAY_2026
    return made


def spend(node: Counters, amount: float, now: float) -> None:
    for meter in (*BUDGETS, *MINUTE):
        row = node.own(node.count(meter, now), now)
        node.add(row, amount, 0.0, 0.0, now)
        node.add(row, 0.0, amount, amount, now)


def loaded(data: bytes) -> Counters:
    node = counters(2)
    for rows, _ in read(data):
        for row in rows:
            node.merge(row, 500.0)
    return node


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(0, 2000))
def test_a_file_cut_anywhere_has_all_that_was_saved_before(amounts: list[int], cut: int) -> None:
    node, data, sums = counters(), b"", [(0, 0)]
    for amount in amounts:
        spend(node, amount, 100.0)
        data += written(unsaved_rows(node, 100.0))
        sums.append((len(data), sums[-1][1] + amount))
    kept = data[: min(cut, len(data))]
    expected = max(total for size, total in sums if size <= len(kept))
    found = loaded(kept)
    assert {count.taken for count in found.counts.values()} in ({expected}, set() if not expected else {expected})
    assert len(loaded(data).counts) == len(BUDGETS), "minutes are not kept"


def test_damage_ends_what_is_read() -> None:
    node = counters()
    spend(node, 5, 100.0)
    first = written(unsaved_rows(node, 100.0))
    spend(node, 7, 100.0)
    second = bytearray(written(unsaved_rows(node, 100.0)))
    second[30] ^= 1
    assert {count.taken for count in loaded(first + bytes(second)).counts.values()} == {5}


def test_what_was_appended_and_what_is_written_anew_is_the_same() -> None:
    node, data = counters(), b""
    for amount in range(1, 6):
        spend(node, amount, 100.0)
        data += written(unsaved_rows(node, 100.0))
    assert not unsaved_rows(node, 100.0)
    whole = written(all_rows(node, 100.0))
    assert len(whole) < len(data)
    taken = [{key: count.taken for key, count in loaded(each).counts.items()} for each in (data, whole)]
    assert taken[0] == taken[1] == {meter.id: 15 for meter in BUDGETS}


HOUR_S, DAY_S = 3600.0, 86_400.0


@pytest.mark.parametrize("wrong_s", [HOUR_S, 14 * HOUR_S, -MAY_2026 + 500.0])
def test_what_was_saved_outlives_a_start_with_a_wrong_clock_that_is_set_later(wrong_s: float) -> None:
    budgets = meters(budget=(Budget(1e6, CalendarWindow.HOUR), Budget(1e6, CalendarWindow.MONTH)))
    node = counters()
    for meter in budgets:
        node.add(node.own(node.count(meter, 100.0), 100.0), 5.0, 5.0, 5.0, 100.0)
    data = written(all_rows(node, 100.0))
    again, then = counters(2), counters(3)
    again.wall_offset_s += wrong_s
    saved, later = SavedRows(again, 101.0), SavedRows(then, 103.0)
    for rows, _ in read(data):
        for row in rows:
            saved.take(row, 101.0)
    for rows, _ in read(written(saved.all(102.0))):
        for row in rows:
            later.take(row, 103.0)
    assert [then.counts[meter.id].taken for meter in budgets] == [5.0, 5.0], "they are in the file that it wrote"
    again.wall_offset_s = MAY_2026
    saved.sweep(104.0)
    assert [again.counts[meter.id].taken for meter in budgets] == [5.0, 5.0]


def test_rows_of_windows_that_are_over_leave_the_file_an_hour_after_the_start() -> None:
    node = counters()
    spend(node, 5, 100.0)
    then = counters(2)
    then.wall_offset_s += 100 * DAY_S
    saved = SavedRows(then, 0.0)
    for row in all_rows(node, 100.0):
        saved.take(row, 101.0)
    assert len(saved.all(HOUR_S)) == len(BUDGETS)
    saved.sweep(HOUR_S)
    assert not saved.all(HOUR_S)
