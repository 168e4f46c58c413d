"""Counts of limits: what holds in whatever order rows come, however often, and whoever dies."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits
from ranvier_py.core.access.limits import counts
from ranvier_py.core.access.limits.count import SLOT_S, CountRow, LimitRow
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.meters import LimitSpan, Meter, ends_at, meters_of, window_at

MAY_2026 = 1_778_000_000.0
ME, PEER = 1, 2


def meter(**limits: object) -> Meter:
    (one,) = meters_of("tenant a", Limits(**limits), "a")  # type: ignore[arg-type]
    return one


MINUTE = meter(tokens_per_minute=1000)
MONTH = meter(budget=(Budget(1e6, CalendarWindow.MONTH),))
CONCURRENT = meter(concurrent=4)


def counters(session: int = ME) -> Counters:
    made = Counters(session)
    made.wall_offset_s = MAY_2026
    return made


def admit(node: Counters, limit: Meter, amount: float, now: float) -> LimitRow:
    row = node.own(node.count(limit, now), now)
    node.add(row, amount, 0.0, 0.0, now)
    return row


steps = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500), st.integers(0, 600)), min_size=1, max_size=12)


@given(steps, st.data(), st.sampled_from((MINUTE, MONTH)))
def test_lost_doubled_and_reordered_rows_leave_the_same_sum_once_the_last_of_each_has_come(
    work: list[tuple[float, int, int]], data: st.DataObject, limit: Meter
) -> None:
    origin, now = counters(PEER), 100.0
    sent: list[CountRow] = []
    for wait_s, reserved, used in work:
        now += wait_s
        row = admit(origin, limit, reserved, now)
        sent.append(origin.travelling(row, now))
        origin.add(row, 0.0, reserved, used, now)
        sent.append(origin.travelling(row, now))
    last = [origin.travelling(row, now) for row in origin.all_rows()]
    some = data.draw(st.lists(st.sampled_from(sent), max_size=20))
    order = data.draw(st.permutations([*some, *last, *last[:1]]))
    receiver = counters()
    for one in order:
        receiver.merge(one, now)
    assert receiver.counts[limit.id].taken == origin.counts[limit.id].taken
    assert receiver.counts[limit.id].taken == sum(used for _, _, used in work)


@given(steps, st.floats(-1e6, 1e6), st.floats(0, 0.4))
def test_a_minute_is_never_shorter_and_at_most_a_second_longer_for_whoever_counts_by_whatever_clock(
    work: list[tuple[float, int, int]], skew_s: float, late_s: float
) -> None:
    start = 2e6  # so that no clock is below 0
    origin, receiver, now = counters(PEER), counters(), start
    admitted = []
    for wait_s, amount, _ in work:
        now += wait_s
        row = admit(origin, MINUTE, amount, now)
        admitted.append((now, amount))
        receiver.merge(origin.travelling(row, now), now + late_s + skew_s)
    offsets = (57.0, 59.9, 60.0, 60.5, 61.1, 62.0)
    for look in sorted(max(at + offset, now) for at, _ in admitted for offset in offsets):
        least = sum(amount for at, amount in admitted if at > look - 60.0)
        most = sum(amount for at, amount in admitted if at > look - 61.0 - late_s - 1e-3)
        assert least <= receiver.count(MINUTE, look + skew_s).taken <= most
        assert least <= origin.count(MINUTE, look).taken <= most


sent_late = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500), st.floats(0, 20)), min_size=1, max_size=12)


@given(sent_late)
def test_rows_that_are_sent_late_and_in_any_order_are_counted_no_longer_than_others(
    work: list[tuple[float, int, float]],
) -> None:
    origin, receiver, now = counters(PEER), counters(), 100.0
    admitted, sent = [], []
    for wait_s, amount, late_s in work:
        now += wait_s
        admitted.append((now, amount))
        sent.append((now + late_s, admit(origin, MINUTE, amount, now)))
    sent.sort(key=lambda each: each[0])
    for at, row in sent:
        receiver.merge(origin.travelling(row, at), at)
    for look in sorted(max(sent[-1][0], at + 61.1) for at, _ in admitted):
        most = sum(amount for at, amount in admitted if at > look - 61.1)
        assert receiver.count(MINUTE, look).taken <= most


@given(st.floats(0, 59), st.floats(0, 40))
def test_what_is_over_is_not_counted_again_where_a_stream_held_up_a_row_that_was_repeated(
    repeated_s: float, held_up_s: float
) -> None:
    """Whatever it says of its age: a network that was cut for half a minute delivers all that was written meanwhile."""
    origin, receiver = counters(PEER), counters()
    row = admit(origin, MINUTE, 5.0, 100.0)
    receiver.merge(origin.travelling(row, 100.0), 100.0)
    repeated = origin.travelling(row, 100.0 + repeated_s)
    later = admit(origin, MINUTE, 7.0, 150.0)
    receiver.merge(origin.travelling(later, 150.0), 150.0)
    arrives = max(161.0, 100.0 + repeated_s + held_up_s)
    receiver.count(MINUTE, arrives)
    receiver.merge(repeated, arrives)
    assert receiver.count(MINUTE, arrives).taken == 7.0


operations = st.lists(
    st.tuples(
        st.sampled_from(("admit", "settle", "merge", "sweep", "wait")),
        st.integers(1, 3),
        st.integers(0, 9),
        st.floats(0, 30),
    ),
    max_size=60,
)


@given(operations)
def test_the_sum_of_a_count_is_that_of_its_rows(done: list[tuple[str, int, int, float]]) -> None:
    node, now, rows = counters(), 100.0, []
    for what, session, number, seconds in done:
        limit = (MINUTE, MONTH, CONCURRENT)[number % 3]
        if what == "admit":
            rows.append(admit(node, limit, float(number), now))
        elif what == "settle" and rows:
            row = rows[number % len(rows)]
            if row.reserved > row.settled:
                node.add(row, 0.0, row.reserved - row.settled, float(session), now)
        elif what == "merge":
            age_ms = int(1000 * seconds)
            window = window_at(limit.span, MAY_2026 + now) if limit.span > LimitSpan.MINUTE else number
            node.merge(CountRow(limit.id, session + 1, limit.span, window, age_ms, number, 0.0, session), now)
        elif what == "sweep":
            node.sweep(now)
        else:
            now += seconds
        for count in node.counts.values():
            assert abs(count.taken - sum(row.taken for row in count.rows.values())) < 1e-6
            assert abs(count.taken - sum(count.by_origin.values())) < 1e-6
            for bucket in count.buckets.values():
                assert abs(bucket.taken - sum(row.taken for row in bucket)) < 1e-6
        assert node.rows == sum(len(count.rows) for count in node.counts.values())


def test_what_a_session_had_reserved_when_it_ended_stays_taken_and_what_it_had_in_flight_does_not() -> None:
    node, gone = counters(), counters(PEER)
    for limit in (MINUTE, MONTH, CONCURRENT):
        node.merge(gone.travelling(admit(gone, limit, 3.0, 100.0), 100.0), 100.0)
    node.free(PEER)
    assert [node.count(limit, 101.0).taken for limit in (MINUTE, MONTH, CONCURRENT)] == [3.0, 3.0, 0.0]
    node.sweep(170.0)
    assert [node.count(limit, 170.0).taken for limit in (MINUTE, MONTH)] == [0.0, 3.0]


def test_a_restarted_node_counts_beside_what_its_last_session_counted() -> None:
    before, after, node = counters(PEER), counters(3), counters()
    for session in (before, after):
        node.merge(session.travelling(admit(session, MONTH, 5.0, 100.0), 100.0), 100.0)
    assert node.count(MONTH, 100.0).taken == 10.0


def test_work_belongs_to_its_admission_however_late_it_is_settled() -> None:
    origin, node = counters(PEER), counters()
    row = admit(origin, MINUTE, 500.0, 100.0)
    node.merge(origin.travelling(row, 100.0), 100.0)
    admit(origin, MINUTE, 100.0, 150.0)
    origin.add(row, 0.0, 500.0, 50.0, 155.0)
    for each in origin.all_rows():
        node.merge(origin.travelling(each, 155.0), 155.0)
    assert [each.count(MINUTE, 155.0).taken for each in (origin, node)] == [150.0, 150.0]
    assert [each.count(MINUTE, 161.5).taken for each in (origin, node)] == [100.0, 100.0]
    origin.add(row, 0.0, 0.0, 9.0, 162.0)  # its minute is over
    assert origin.count(MINUTE, 162.0).taken == 100.0


def test_rows_beyond_the_bound_are_dropped_and_counted() -> None:
    node = counters()
    node.rows = counts.ROWS_MAX
    admit(node, MINUTE, 5.0, 100.0)
    assert (node.count(MINUTE, 100.0).taken, node.dropped) == (0.0, 1)


def test_rows_that_are_over_and_counts_without_any_go_within_seconds_however_many_there_are() -> None:
    node, now, limits = counters(), 100.0, [meter_of(number) for number in range(6000)]
    for limit in limits:
        admit(node, limit, 5.0, now)
        node.count(meter_of(10_000 + limit.id), now)  # nothing was let in
    node.sweep(now + 60.0)
    assert node.rows == 6000
    for seconds in range(61, 66):
        node.sweep(now + seconds)
    assert (len(node.counts), node.rows) == (0, 0)


def meter_of(number: int) -> Meter:
    return replace(MINUTE, id=number + 1)


def test_requests_in_flight_are_kept_until_they_end_and_then_go_unless_one_may_just_begin() -> None:
    node, now = counters(), 100.0
    row = admit(node, CONCURRENT, 1.0, now)
    for _ in range(5):
        now += 61.0
        node.sweep(now)
    node.add(row, 0.0, 1.0, 0.0, now)
    now += 61.0
    node.count(CONCURRENT, now).loans.begin(int(now / SLOT_S))  # a group of limits was looked at
    node.sweep(now)
    assert row.place >= 0
    node.sweep(now + 61.0)
    assert (row.place, node.rows, len(node.counts)) == (-1, 0, 0)


def test_a_budget_outlives_a_clock_that_is_set_back_and_goes_when_it_is_over_after_all() -> None:
    node = counters()
    hour = meter(budget=(Budget(1e6, CalendarWindow.HOUR),))
    admit(node, hour, 5.0, 100.0)
    ends = ends_at(LimitSpan.HOUR, node.window(LimitSpan.HOUR, 100.0)) - MAY_2026
    node.sweep(161.0)  # a count that is new
    node.wall_offset_s -= 300.0
    node.sweep(ends + 100.0)
    assert node.rows == 1
    node.sweep(ends + 361.0)
    assert node.rows == 0


def test_rows_of_windows_that_are_over_or_far_ahead_of_our_clock_are_not_taken() -> None:
    node = counters()
    month = window_at(LimitSpan.MONTH, MAY_2026)
    for window in (month - 2, month - 1, month + 2):
        node.merge(CountRow(MONTH.id, PEER, LimitSpan.MONTH, window, 0, 5.0, 0.0, 0.0), 100.0)
    node.merge(CountRow(MINUTE.id, PEER, LimitSpan.MINUTE, 7, 61_000, 5.0, 0.0, 0.0), 100.0)
    assert not node.counts


@given(st.integers(1_500_000_000, 4_000_000_000), st.sampled_from(list(LimitSpan)[2:]))
def test_calendar_windows_follow_each_other_and_begin_at_utc_hours_days_mondays_and_months(
    wall: int, span: LimitSpan
) -> None:
    window = window_at(span, wall)
    end = ends_at(span, window)
    assert wall < end
    assert (window_at(span, end - 1), window_at(span, end)) == (window, window + 1)
    assert end % (86_400 if span > LimitSpan.HOUR else 3600) == 0
    assert span is not LimitSpan.WEEK or (end // 86_400 + 3) % 7 == 0  # a Monday


spent = st.lists(st.tuples(st.floats(-30, 30), st.booleans(), st.integers(1, 100)), min_size=1, max_size=12)


@given(spent, st.floats(-5, 5), st.sampled_from(CalendarWindow))
def test_clocks_that_differ_by_five_seconds_count_each_request_once_about_the_end_of_a_budgets_window(
    work: list[tuple[float, bool, int]], skew_s: float, calendar: CalendarWindow
) -> None:
    nodes, limit = (counters(ME), counters(PEER)), meter(budget=(Budget(1e6, calendar),))
    nodes[1].wall_offset_s += skew_s
    before = window_at(limit.span, MAY_2026)
    ends = ends_at(limit.span, before) - MAY_2026
    for at_s, is_first, amount in sorted(work):
        node, now = nodes[not is_first], ends + at_s
        row = admit(node, limit, amount, now)
        other = nodes[is_first]
        other.merge(node.travelling(row, now), now)
        other.sweep(now)
    for now in (ends + 35.0, ends + 50.0):
        for node in nodes:
            node.sweep(now)
            found = [node.count(limit, now).in_window(window) for window in (before, before + 1)]
            assert found == [nodes[0].count(limit, now).in_window(window) for window in (before, before + 1)]
            assert sum(found) == sum(amount for *_, amount in work)
            assert found[0] >= sum(amount for at_s, _, amount in work if at_s < -5)
            assert found[1] >= sum(amount for at_s, _, amount in work if at_s > 5)


def test_the_time_until_something_fits_is_when_enough_of_the_minute_is_over() -> None:
    node = counters()
    for at in (100.0, 110.0, 120.0):
        admit(node, MINUTE, 300.0, at)
    count = node.count(MINUTE, 130.0)
    waits = [count.frees_in(excess, 130.0) for excess in (1.0, 300.0, 301.0, 900.0, 901.0)]
    assert waits == [30.5, 30.5, 40.5, 50.5, 60.5]
    for wait, left in ((30.5, 600.0), (40.5, 300.0), (50.5, 0.0)):
        assert node.count(MINUTE, 130.0 + wait).taken == left
    assert all(later >= sooner for sooner, later in pairwise(waits))
