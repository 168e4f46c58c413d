"""How much is left of limits on this node, whether a request fits, and how much may be taken without a look.

What others may have taken unseen counts twice, and each node may have MARGIN requests on their way: beyond that a
limit is far. Of what is left far from a limit each group of limits is lent some for a slot, half of what is free then.
Invariant: what is lent, and what is taken beside it, stays within the limit (test_limit_room.py).
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf

from ranvier_py.core.access.limits.count import SLOT_S, Count, LimitRow, SlotTally
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.meter_groups import MeterGroup
from ranvier_py.core.access.limits.meters import LimitSpan, Measure, Meter, ends_at
from ranvier_py.core.access.limits.shares import LimitPeers

MARGIN = 4  # requests of each node
SOON = 4  # a node that has reserved more than this part of its share unseen sends it at once
SOON_S = 1.0  # until a request that is one too many at a time may be tried again


class Fit(Enum):
    FITS = auto()
    SEND = auto()  # it fits, and others should know soon
    ASK = auto()
    FULL = auto()


class LimitRoom:
    """See the module."""

    def __init__(self, counts: Counters, peers: LimitPeers) -> None:
        self.counts, self.peers = counts, peers

    def of(self, amount: float, count: Count, now: float) -> float:
        """Return what is left of a limit of this amount, below 0 if more was taken."""
        taken = count.in_window(self.counts.window(count.span, now)) + count.asked
        return amount - taken - (self.peers.held(amount, count, taken) if self.peers.vanished else 0.0)

    def left(self, meter: Meter, now: float) -> float:
        """Return what is left of a limit, below 0 if more was taken."""
        self.counts.book(now)
        return self.of(meter.amount, self.counts.count(meter, now), now)

    def fit(self, meter: Meter, count: Count, amount: float, margin: float, now: float) -> Fit:
        """Return whether so much fits, if `margin` must be left."""
        room, peers = self.of(meter.amount, count, now) - margin, self.peers
        if not peers.live:
            return Fit.FITS if amount <= room else Fit.FULL
        doubt, others = 2 * count.rate(now) * peers.staleness(now), len(peers.live)
        unseen = self.unseen(count, amount)
        if room - amount >= max(doubt, unseen, MARGIN * (1 + others) * amount):
            return Fit.SEND if SOON * unseen > room else Fit.FITS
        if peers.home(meter.home) is None:
            return Fit.FITS if amount <= room else Fit.FULL
        return Fit.ASK if amount <= room + doubt else Fit.FULL

    def unseen(self, count: Count, amount: float) -> float:
        """Return what others have reserved unseen if each has just reserved as much as this node."""
        return len(self.peers.live) * (count.unsent + amount)

    def wait_s(self, meter: Meter, count: Count, amount: float, now: float) -> float:
        """Return in how many seconds so much will fit, as far as is known."""
        if meter.span is LimitSpan.REQUEST:
            return SOON_S
        if meter.span is LimitSpan.MINUTE:
            return count.frees_in(amount - self.of(meter.amount, count, now), now)
        return ends_at(meter.span, self.counts.window(meter.span, now)) - now - self.counts.wall_offset_s

    def look(self, group: MeterGroup, now: float) -> None:
        """Find out how much a group may take in this slot without a look, and how much is left of what it shows. Those
        that count the same requests are looked at as well, if how much these vary is known, so that one booking does
        for all."""
        self.counts.book(now)
        self._look(group, now)
        for each in group.together:
            if now >= each.until and each.excess.variance:
                self._look(each, now)

    def _look(self, group: MeterGroup, now: float) -> None:
        counts, slot = self.counts, int(now / SLOT_S)
        found = [counts.count(meter, now) for meter in group.meters]
        group.left, group.back, group.cost_left, free = inf, 0.0, inf, inf
        for meter, count in zip(group.meters, found, strict=True):
            room = self.of(meter.amount, count, now)
            if room < group.left and meter in group.shows:
                group.left = room
                if group.shown is not count or group.amount != meter.amount:
                    group.shown, group.amount, group.line = count, meter.amount, b""
            loans = count.loans
            loans.begin(slot)
            room -= group.excess.margin(count.unsettled)
            may = max(0.0, (self._free(room, count, now) - loans.lent) / 2)
            if meter.measure is Measure.COST:
                group.cost_left = min(group.cost_left, may)
            else:
                free = min(free, may)
        for meter, count in zip(group.meters, found, strict=True):
            count.loans.lend(group, group.cost_left if meter.measure is Measure.COST else free)
        if free > 0:
            self.tally(group, now)
        group.left = group.left if group.shows else 0.0
        group.floor, group.until = group.left - free, (slot + 1) * SLOT_S

    def _free(self, room: float, count: Count, now: float) -> float:
        """Return what may be taken in this slot of so much room, far from a limit, while others may take as much."""
        others = len(self.peers.live)
        if not others:
            return room / (2 * MARGIN)
        room -= 2 * count.rate(now) * self.peers.staleness(now)
        return min((room - others * count.unsent) / SOON, room / (2 * MARGIN)) / (1 + others)

    def tally(self, group: MeterGroup, now: float) -> SlotTally:
        """Return where a group counts what is admitted now, with those of its request's other limits."""
        slot, counts = int(now / SLOT_S), self.counts
        if group.tally.slot != slot:
            groups, rows = group.together or (group,), list[tuple[LimitRow, int]]()
            for meter in [meter for each in groups for meter in each.meters]:
                count = counts.count(meter, now)
                count.loans.begin(slot)  # so that its row is kept
                rows.append((counts.own(count, now), meter.index))
            tally = SlotTally(slot, rows)
            for each in groups:
                each.tally = tally
        return group.tally
