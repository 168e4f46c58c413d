"""How much of each limit was taken, as far as this node knows: its own counts, and those of its peers.

A row is what one session counted in one window: reserved, settled (of that), and used instead. All three only grow, so
the greatest of each is the latest, in whatever order rows come and however often; what a session had reserved when it
ended stays taken. A row is booked in the slot of its admission by this node's own clock, as its age says, and never
later than when it came first. It goes when its window is over, or once it had nothing in flight for IDLE_S, and a count
with its last row. Invariant: the sum of a count is that of its rows (test_counts.py). Bound: ROWS_MAX rows; further
ones are dropped and counted, so that what they count is not limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from operator import itemgetter

from ranvier_py.core.access.limits.count import MINUTE_SLOTS, SLOT_S, Count, CountRow, LimitRow, SlotTally
from ranvier_py.core.access.limits.meters import INDEX, Amounts, LimitSpan, Measure, Meter, ends_at, window_at
from ranvier_py.core.bounded import BoundedDict

GRACE_S = 60.0  # for which a calendar window is kept after its end: clocks differ
ROWS_MAX = 1 << 18  # some 150 MB, if each is of another limit
SWEPT_AT_ONCE = 4096  # counts: some 20 ms
IDLE_S = 60.0  # after so long without a request, a session's row of those in flight is dropped
CURRENT = 0  # where all requests in flight are booked
ORIGINS_MAX = 4096
AMOUNT = tuple(map(itemgetter, range(len(Amounts._fields))))
REQUESTS = AMOUNT[INDEX[Measure.REQUESTS]]


class Counters:
    """The counts of one node, whose session is `me`. `changed`: its own rows that peers are to be sent."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.counts: dict[int, Count] = {}
        self.rows = self.dropped = 0
        self.granted = 0  # requests that have ended, by what is booked
        self.late: list[SlotTally] = []  # to be booked
        self.changed: dict[tuple[int, int, int], None] = {}
        self.unsaved: dict[tuple[int, int, int], None] = {}  # rows of budgets since these were saved
        self.wall_offset_s = 0.0  # from our monotonic clock to seconds since 1970
        self._over = BoundedDict[int, int](ORIGINS_MAX)  # by origin, the last of its slots that was over a minute ago
        self._due: dict[int, list[Count]] = {}  # by slot, whose rows may then be over

    def count(self, meter: Meter, now: float) -> Count:
        """Return the count of a limit as of now."""
        count = self.known(meter.id, now) or self._new(meter.id, meter.span, now)
        if count.meter is not meter:  # its amount may have changed
            count.meter = meter
            count.expire()
        return count

    def known(self, limit: int, now: float) -> Count | None:
        """Return the count of a limit as of now; None if nothing of it was counted."""
        count = self.counts.get(limit)
        if count is not None and count.span is LimitSpan.MINUTE:
            self._slide(count, now)
        return count

    def book(self, now: float) -> None:
        """Have the counts have all of ours."""
        late, self.late = self.late, []
        for tally in late:
            reserved, ended = tally.reserved, tally.ended
            settled, used = zip(*ended, strict=True) if ended else ((), ())
            for row, index in tally.rows:
                amount = AMOUNT[index]
                took = sum(map(amount, used)) if row.count.span else 0.0  # what was in flight is over
                numbers = sum(map(amount, reserved)), sum(map(amount, settled)), took
                if any(numbers):
                    self.add(row, *numbers, now)
            self.granted += int(sum(map(REQUESTS, used)))  # a request that was released took none
            tally.is_late = False
            reserved.clear()
            ended.clear()

    def _note(self, row: LimitRow, reserved: float) -> None:
        key = row.count.id, row.origin, row.window
        row.count.unsent += reserved
        self.changed[key] = None
        if row.count.span > LimitSpan.MINUTE:
            self.unsaved[key] = None

    def window(self, span: LimitSpan, now: float) -> int:
        """Return the window in which a request counts that is admitted now."""
        if span is LimitSpan.MINUTE:
            return int(now / SLOT_S)
        return CURRENT if span is LimitSpan.REQUEST else window_at(span, now + self.wall_offset_s)

    def own(self, count: Count, now: float) -> LimitRow:
        """Return our row for what is admitted now."""
        if count.span is LimitSpan.REQUEST:
            if count.current is None:
                count.current = self._open(count, self.me, int(now / SLOT_S), CURRENT)
            return count.current
        window = self.window(count.span, now)
        return count.rows.get((self.me, window)) or self._open(count, self.me, window, window)

    def _open(self, count: Count, origin: int, window: int, place: int) -> LimitRow:
        if self.rows >= ROWS_MAX:
            self.dropped += 1
            row = LimitRow(count, origin, window, -1)
        else:
            self.rows += 1
            if count.span is LimitSpan.MINUTE and place not in count.buckets:
                self._look_at(count, (place + MINUTE_SLOTS) * SLOT_S)
            row = count.open(origin, window, place)
        return row

    def _new(self, limit: int, span: LimitSpan, now: float) -> Count:
        count = self.counts[limit] = Count(limit, span)
        self._look_at(count, now + IDLE_S)
        return count

    def _look_at(self, count: Count, at: float) -> None:
        """Sweep a count then. One of calendar windows or of requests in flight is always due once, another with each
        slot."""
        self._due.setdefault(int(at / SLOT_S) + 1, []).append(count)

    def add(self, row: LimitRow, reserved: float, settled: float, used: float, now: float) -> None:
        """Add to one of our rows."""
        row.count.add(row, reserved, settled, used, now)
        if row.place >= 0 and (reserved or settled or used):
            self._note(row, reserved)

    def merge(self, one: CountRow, now: float) -> bool:
        """Take a row of whatever session from a peer, or from before a restart. Returns whether its window runs."""
        span = LimitSpan(one.span)
        place = self._place(span, one.window, now - one.age_ms / 1000, now)
        count = self.counts.get(one.limit)
        if place is None or (count is not None and count.span is not span):
            return False
        row = count.rows.get((one.origin, one.window)) if count is not None else None
        if row is None and span is LimitSpan.MINUTE and one.window <= self._over.get(one.origin, -1):
            return False  # a stream held it up, and its age does not say for how long
        if count is None:
            count = self._new(one.limit, span, now)
        if row is None:
            row = self._open(count, one.origin, one.window, place)
        elif 0 <= place < row.place and span is LimitSpan.MINUTE:
            count.move(row, place)
        reserved, settled, used = (
            max(0.0, theirs - ours)
            for theirs, ours in zip(one[-3:], (row.reserved, row.settled, row.used), strict=True)
        )
        if reserved or settled or used:
            count.add(row, reserved, settled, used, now)
            count.tell(reserved - settled + used)
            if span > LimitSpan.MINUTE:
                self.unsaved[one.limit, one.origin, one.window] = None
        return True

    def _place(self, span: LimitSpan, window: int, at: float, now: float) -> int | None:
        """Return where a row is booked; None if its window is over, or far ahead of our clock."""
        if span is LimitSpan.MINUTE:
            place = ceil(at / SLOT_S)  # the first of our slots that ends no earlier than the one that began then
            return place if place > now / SLOT_S - MINUTE_SLOTS - 1 else None
        if span is LimitSpan.REQUEST:
            return CURRENT
        wall = now + self.wall_offset_s
        is_near = abs(window - window_at(span, wall)) <= 1
        return window if is_near and ends_at(span, window) + GRACE_S > wall else None

    def _slide(self, count: Count, now: float) -> None:
        last = int(now / SLOT_S) - MINUTE_SLOTS - 1
        while count.buckets:
            first = next(iter(count.buckets))
            if first > last:
                break
            for row in count.drop(first):
                self.rows -= 1
                if row.origin != self.me and row.window > self._over.get(row.origin, -1):
                    self._over[row.origin] = row.window

    def sweep(self, now: float) -> None:
        """Drop what is over, and counts without any row."""
        left = SWEPT_AT_ONCE
        for slot in sorted(slot for slot in self._due if slot <= now / SLOT_S):
            due = self._due[slot]
            while due and left:
                self._sweep(due.pop(), now)
                left -= 1
            if due:
                return
            del self._due[slot]

    def _sweep(self, count: Count, now: float) -> None:
        if count.span is LimitSpan.MINUTE:
            self._slide(count, now)
        elif count.span is LimitSpan.REQUEST:
            self._sweep_idle(count, now)
        else:
            ends = {place: ends_at(count.span, place) + GRACE_S - self.wall_offset_s for place in count.buckets}
            for place in [place for place, end in ends.items() if end <= now]:
                self.rows -= len(count.drop(place))
            if count.buckets:
                self._look_at(count, min(ends[place] for place in count.buckets))
        if not count.rows and self.counts.get(count.id) is count:
            del self.counts[count.id]

    def _sweep_idle(self, count: Count, now: float) -> None:
        for row in list(count.rows.values()):
            may_book = row is count.current and count.loans.slot >= int(now / SLOT_S)
            if may_book or row.reserved > row.settled or row.reserved != row.seen:
                row.seen = row.reserved
            else:
                count.close(row)
                self.rows -= 1
        if count.rows:
            self._look_at(count, now + IDLE_S)

    def free(self, origin: int) -> None:
        """Free what a session has in flight that is gone."""
        for count in self.counts.values():
            if count.span is LimitSpan.REQUEST:
                for row in [row for row in count.rows.values() if row.origin == origin]:
                    count.close(row)
                    self.rows -= 1

    def travelling(self, row: LimitRow, now: float) -> CountRow:
        age_s = now - row.place * SLOT_S if row.count.span is LimitSpan.MINUTE else 0.0
        numbers = row.count.id, row.origin, int(row.count.span), row.window & 0xFFFFFFFF, round(1000 * max(0.0, age_s))
        return CountRow(*numbers, row.reserved, row.settled, row.used)

    def all_rows(self) -> Iterator[LimitRow]:
        for count in self.counts.values():
            yield from count.rows.values()

    def row(self, key: tuple[int, int, int]) -> LimitRow | None:
        count = self.counts.get(key[0])
        return count.rows.get(key[1:]) if count is not None else None
