"""How much of each limit was taken, as far as this node knows: its own counts, and those of its peers.

A row is what one session counted in one window: reserved, settled (of that), and used instead. All three only grow, so
the greatest of each is the latest, in whatever order rows come and however often; what a session had reserved when it
ended stays taken. A minute slides over slots of SLOT_S: a row is booked in the slot of its admission by this node's
own clock, as its age says, and never later than when it came first. A row that a peer sends late is taken for younger
than it is, never for older. Each row goes when its window is over, or once nothing of it was in flight for IDLE_S, and
a count with its last row. Invariant: the sum of a count is that of its rows (test_counts.py). Bound: ROWS_MAX rows;
further ones are dropped and counted, so that what they count is not limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ranvier_py.core.access.limits.meters import Amounts, LimitSpan, Meter, ends_at, window_at

SLOT_S = 0.5  # with 5 s, a minute would end up to 5 s late, and 4 % of the limit would never be served
MINUTE_SLOTS = 120
RATE_S = 5.0  # over which the rate of a count is averaged
GRACE_S = 60.0  # for which a calendar window is kept after its end: clocks differ
ROWS_MAX = 1 << 18  # some 150 MB, if each is of another limit
SWEPT_AT_ONCE = 4096  # counts: some 20 ms
IDLE_S = 60.0  # after so long without a request, a session's row of those in flight is dropped
CURRENT = 0  # where all requests in flight are booked
AMOUNT = tuple(map(itemgetter, range(len(Amounts._fields))))


class CountRow(NamedTuple):
    """A row as it travels. `age_ms`: since the slot of its admission began, as far as its sender knows."""

    limit: int  # u64
    origin: int  # u64, not 0: a session
    span: int  # u8
    window: int  # u32: the origin's slot, or a calendar window
    age_ms: int  # u32
    reserved: float
    settled: float
    used: float


class KeptShare(NamedTuple):
    """What a session may take that vanished: its share of the limit, with what it and all had taken then."""

    share: float
    own: float
    all: float


class LimitRow:
    """What one session counted in one window. `place`: where it is booked, -1 once that was dropped; `next`: what is
    booked there, too; `seen`: what it had reserved when it was last looked at whether it is idle."""

    __slots__ = ("count", "next", "origin", "place", "reserved", "seen", "settled", "used", "window")

    def __init__(self, count: Count, origin: int, window: int, place: int) -> None:
        self.count, self.origin, self.window, self.place = count, origin, window, place
        self.next: LimitRow | None = None
        self.reserved = self.settled = self.used = self.seen = 0.0

    @property
    def taken(self) -> float:
        return self.reserved - self.settled + self.used


class SlotTally:
    """What requests that were admitted in one slot reserved, settled and used instead, until all that counts them has
    it. `rows`: each with its place in Amounts. Bound: requests of one slot, and those that run."""

    __slots__ = ("is_late", "reserved", "rows", "settled", "slot", "used")

    def __init__(self, slot: int, rows: Sequence[tuple[LimitRow, int]]) -> None:
        self.slot, self.rows, self.is_late = slot, rows, False
        self.reserved, self.settled, self.used = list[Amounts](), list[Amounts](), list[Amounts]()


class Watcher(Protocol):
    """Takes of limits without a look at their counts, until this time, if it is told what others took."""

    until: float

    def took(self, count: Count, amount: float) -> None: ...


class Loans:
    """What may be taken of a limit in one slot without a look at its count, and by whom."""

    __slots__ = ("lent", "slot", "watchers")

    def __init__(self) -> None:
        self.slot, self.lent = -1, 0.0
        self.watchers: dict[Watcher, float] = {}

    def begin(self, slot: int) -> None:
        """Forget those of another slot."""
        if self.slot != slot:
            self.slot, self.lent = slot, 0.0
            self.watchers.clear()

    def lend(self, watcher: Watcher, amount: float) -> None:
        """Lend so much, instead of what was lent before in this slot."""
        self.lent += amount - self.watchers.get(watcher, 0.0)
        self.watchers[watcher] = amount


class LimitSlot:
    """The rows of one slot or calendar window, the first of which has the next one, and their sum."""

    __slots__ = ("first", "taken")

    def __init__(self) -> None:
        self.taken = 0.0
        self.first: LimitRow | None = None

    def add(self, row: LimitRow) -> None:
        self.taken += row.taken
        row.next, self.first = self.first, row

    def remove(self, row: LimitRow) -> None:
        self.taken -= row.taken
        if self.first is row:
            self.first = row.next
            return
        before = self.first
        while before is not None and before.next is not row:
            before = before.next
        assert before is not None
        before.next = row.next

    def __iter__(self) -> Iterator[LimitRow]:
        row = self.first
        while row is not None:
            found, row = row, row.next
            yield found


NOBODY: Mapping[int, KeptShare] = MappingProxyType({})


class Count:
    """All rows of one limit.

    `taken`: the sum of all that is kept; `unsettled`: of it what runs; `rate`: units a second that were lately added;
    `current`: our row of requests in flight; `meter`: the limit, once a request met it; `allowed`: of sessions that
    vanished; `asked`: for what a home is asked just now; `unsent`: what we reserved since peers were last sent it.
    """

    __slots__ = (
        *("_by_origin", "_loans", "_rate", "_rated_at", "allowed", "asked", "buckets", "current", "id"),
        *("meter", "rows", "span", "taken", "unsent", "unsettled"),
    )

    def __init__(self, limit: int, span: LimitSpan) -> None:
        self.id, self.span = limit, span
        self.taken = self.unsettled = self.asked = self.unsent = 0.0
        self.meter: Meter | None = None
        self.current: LimitRow | None = None
        self.rows: dict[tuple[int, int], LimitRow] = {}
        self.buckets: dict[int, LimitSlot] = {}
        self.allowed = NOBODY
        self._by_origin: dict[int, float] | None = None  # most counts are never asked for it, nor for loans
        self._loans: Loans | None = None
        self._rate = self._rated_at = 0.0

    @property
    def by_origin(self) -> Mapping[int, float]:
        """What of `taken` is each session's."""
        if self._by_origin is None:
            self._by_origin = {}
            for row in self.rows.values():
                self._by_origin[row.origin] = self._by_origin.get(row.origin, 0.0) + row.taken
        return self._by_origin

    @property
    def loans(self) -> Loans:
        if self._loans is None:
            self._loans = Loans()
        return self._loans

    def in_window(self, window: int) -> float:
        """Return what is taken in a calendar window, or of all that is kept."""
        if self.span <= LimitSpan.MINUTE:
            return self.taken
        bucket = self.buckets.get(window)
        return bucket.taken if bucket is not None else 0.0

    def taken_before(self, moment: float) -> Mapping[int, float]:
        """Return what each session took of a minute before a moment, of all that is kept; of other windows all."""
        if self.span is not LimitSpan.MINUTE:
            return self.by_origin
        found: dict[int, float] = {}
        for row in self.rows.values():
            if (row.place - 1) * SLOT_S <= moment:  # those of peers are booked a slot late
                found[row.origin] = found.get(row.origin, 0.0) + row.taken
        return found

    def add(self, row: LimitRow, reserved: float, settled: float, used: float, now: float) -> None:
        """Add to a row; one that was dropped since is history."""
        if row.place < 0:
            return
        row.reserved += reserved
        row.settled += settled
        row.used += used
        change = reserved - settled + used
        self.taken += change
        self.unsettled += reserved - settled
        if self._by_origin is not None:
            self._by_origin[row.origin] = self._by_origin.get(row.origin, 0.0) + change
        self.buckets[row.place].taken += change
        if reserved > 0:
            self._rate, self._rated_at = self.rate(now) + reserved / RATE_S, now

    def tell(self, change: float) -> None:
        """Tell who may take without a look what others took."""
        for watcher in self._loans.watchers if self._loans is not None else ():
            watcher.took(self, change)

    def expire(self) -> None:
        """Let nobody take more without a look."""
        for watcher in self._loans.watchers if self._loans is not None else ():
            watcher.until = 0.0

    def rate(self, now: float) -> float:
        return self._rate * exp((self._rated_at - now) / RATE_S) if self._rate else 0.0

    def open(self, origin: int, window: int, place: int) -> LimitRow:
        """Return a new row."""
        row = self.rows[origin, window] = LimitRow(self, origin, window, place)
        self._book(row, place)
        return row

    def _book(self, row: LimitRow, place: int) -> None:
        bucket = self.buckets.get(place)
        if bucket is None:
            self.buckets[place] = bucket = LimitSlot()
        bucket.add(row)
        row.place = place

    def move(self, row: LimitRow, place: int) -> None:
        """Book a row in an earlier slot."""
        self.buckets[row.place].remove(row)
        self._book(row, place)

    def drop(self, place: int) -> int:
        """Drop a bucket with its rows. Returns how many those are."""
        gone = [*self.buckets.pop(place)]
        for row in gone:
            self._forget(row)
        if not self.rows:  # no error of rounding stays
            self.taken = self.unsettled = 0.0
            self._by_origin = None
        return len(gone)

    def close(self, row: LimitRow) -> None:
        """Drop a row."""
        self.expire()
        self.buckets[row.place].remove(row)
        self._forget(row)

    def _forget(self, row: LimitRow) -> None:
        del self.rows[row.origin, row.window]
        self.taken -= row.taken
        self.unsettled -= row.reserved - row.settled
        if self._by_origin is not None:
            self._by_origin[row.origin] = self._by_origin.get(row.origin, 0.0) - row.taken
        row.place, row.next = -1, None
        if self.current is row:
            self.current = None

    def frees_in(self, excess: float, now: float) -> float:
        """Return in how many seconds so much less will be taken of a minute, if nobody takes more."""
        for place in sorted(self.buckets):
            excess -= self.buckets[place].taken
            if excess <= 0:
                return max(0.0, (place + 1 + MINUTE_SLOTS) * SLOT_S - now)
        return (1 + MINUTE_SLOTS) * SLOT_S


class Counters:
    """The counts of one node, whose session is `me`. `changed`: its own rows that peers are to be sent."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.counts: dict[int, Count] = {}
        self.rows = self.dropped = 0
        self.granted = 0  # requests, by what is booked
        self.late: list[SlotTally] = []  # to be booked
        self.changed: dict[tuple[int, int, int], None] = {}
        self.unsaved: dict[tuple[int, int, int], None] = {}  # rows of budgets since these were saved
        self.wall_offset_s = 0.0  # from our monotonic clock to seconds since 1970
        self._due: dict[int, list[Count]] = {}  # by slot, whose rows may then be over

    def count(self, meter: Meter, now: float) -> Count:
        """Return the count of a limit as of now."""
        count = self.counts.get(meter.id)
        if count is None:
            count = self._new(meter.id, meter.span, now)
        elif count.span is LimitSpan.MINUTE:
            self._slide(count, now)
        if count.meter is not meter:  # its amount may have changed
            count.meter = meter
            count.expire()
        return count

    def book(self, now: float) -> None:
        """Have the counts have all of ours."""
        late, self.late = self.late, []
        for tally in late:
            reserved, settled, used = tally.reserved, tally.settled, tally.used
            for row, index in tally.rows:
                amount = AMOUNT[index]
                took = sum(map(amount, used)) if row.count.span else 0.0  # what was in flight is over
                self.add(row, sum(map(amount, reserved)), sum(map(amount, settled)), took, now)
            self.granted += len(reserved)
            tally.is_late = False
            for done in (reserved, settled, used):
                done.clear()

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

    def merge(self, one: CountRow, now: float) -> None:
        """Take a row of whatever session from a peer, or from before a restart."""
        span = LimitSpan(one.span)
        place = self._place(span, one.window, now - one.age_ms / 1000, now)
        count = self.counts.get(one.limit)
        if place is None or (count is not None and count.span is not span):
            return
        if count is None:
            count = self._new(one.limit, span, now)
        row = count.rows.get((one.origin, one.window))
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
            self.rows -= count.drop(first)

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
                self.rows -= count.drop(place)
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
