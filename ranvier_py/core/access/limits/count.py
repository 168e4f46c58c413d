"""What was taken of one limit: the rows of all sessions, in slots of the time of their admission, and their sums.

A minute slides over slots of SLOT_S, so it ends up to that late, and never early. What is rarely asked for, the sums by
session and loans, is made when it is asked for: most limits have a row or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ranvier_py.core.access.limits.meters import Amounts, LimitSpan, Meter

SLOT_S = 0.5  # with 5 s, a minute would end up to 5 s late, and 4 % of the limit would never be served
MINUTE_SLOTS = 120
RATE_S = 5.0  # over which the rate of a count is averaged


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
    """What requests that were admitted in one slot reserved, until all that counts them has it, and of those that
    `ended` what each had reserved, and used instead. `rows`: each with its place in Amounts. Bound: requests of one
    slot, and those that run."""

    __slots__ = ("ended", "is_late", "reserved", "rows", "slot")

    def __init__(self, slot: int, rows: Sequence[tuple[LimitRow, int]]) -> None:
        self.slot, self.rows, self.is_late = slot, rows, False
        self.reserved, self.ended = list[Amounts](), list[tuple[Amounts, Amounts]]()


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

    `taken`: the sum of all that is kept; `unsettled`: of it what runs; `buckets`: by place, in its order;
    `rate`: units a second that were lately added;
    `current`: our row of requests in flight; `meter`: the limit, once a request met it; `allowed`: of sessions that
    vanished; `asked`: for what a home is asked just now; `unsent`: what we reserved since peers were last sent it.
    """

    __slots__ = (
        *("_by_origin", "_loans", "_rated", "allowed", "asked", "buckets", "current", "id"),
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
        self._rated = (0.0, 0.0)  # the rate, and as of when

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
            self._rated = (self.rate(now) + reserved / RATE_S, now)

    def tell(self, change: float) -> None:
        """Tell who may take without a look what others took."""
        for watcher in self._loans.watchers if self._loans is not None else ():
            watcher.took(self, change)

    def expire(self) -> None:
        """Let nobody take more without a look."""
        for watcher in self._loans.watchers if self._loans is not None else ():
            watcher.until = 0.0

    def rate(self, now: float) -> float:
        rate, at = self._rated
        return rate * exp((at - now) / RATE_S) if rate else 0.0

    def open(self, origin: int, window: int, place: int) -> LimitRow:
        """Return a new row."""
        row = self.rows[origin, window] = LimitRow(self, origin, window, place)
        self._book(row, place)
        return row

    def _book(self, row: LimitRow, place: int) -> None:
        bucket = self.buckets.get(place)
        if bucket is None:
            is_late = place < next(reversed(self.buckets), place)  # a peer's row, of a slot before others
            self.buckets[place] = bucket = LimitSlot()
            if is_late:
                self.buckets = dict(sorted(self.buckets.items()))
        bucket.add(row)
        row.place = place

    def move(self, row: LimitRow, place: int) -> None:
        """Book a row in an earlier slot."""
        self.buckets[row.place].remove(row)
        self._book(row, place)

    def drop(self, place: int) -> Sequence[LimitRow]:
        """Drop a bucket. Returns its rows."""
        gone = [*self.buckets.pop(place)]
        for row in gone:
            self._forget(row)
        if not self.rows:  # no error of rounding stays
            self.taken = self.unsettled = 0.0
            self._by_origin = None
        return gone

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
