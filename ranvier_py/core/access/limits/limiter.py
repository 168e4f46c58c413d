"""Decides whether a request fits into all its limits, reserves what it may take, and settles what it took.

Far from a limit the sum that this node knows decides. Near it the limit's home decides, the node that rendezvous
hashing of its tenant names: what others may have taken unseen counts twice, and each node may have MARGIN requests on
their way, so limits below that are always near. The home is asked by datagram and has ASK_S; without its answer a node
takes no more than its own share. A home books what it grants, and so does the asker; what it asked for and does not use
it books as reserved and settled, so that both have the same in the end.
Invariant: each grant ends once (test_limiter.py). Bound: QUESTIONS_MAX questions; beyond, a node decides by its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ranvier_py.core.access.limits.counts import SLOT_S, Count, Counters, LimitRow
from ranvier_py.core.access.limits.homes import AskRow, LimitHome, SilentHomes
from ranvier_py.core.access.limits.meters import Amounts, LimitSpan, Measure, Meter, ends_at
from ranvier_py.core.access.limits.shares import LimitPeers
from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.metrics import counter, gauge, increment

MARGIN = 4  # requests of each node
ASK_S = 0.05
SOON = 4  # a node that has reserved more than this part of its share unseen sends it at once
AGAIN_S = 0.008  # after which a question is repeated: with one datagram in five lost, one in a thousand goes unanswered
QUESTIONS_MAX = 1024
QUESTION_ROWS_MAX = 12  # in a datagram
SCOPES_MAX = 4096  # of which the refusals are shown
NOTHING, NOWHERE = Amounts(), Amounts(requests=0.0, places=0.0)
SOON_S = 1.0  # until a request that is one too many at a time may be tried again


class Fit(Enum):
    FITS = auto()
    ASK = auto()
    FULL = auto()


class Refusal(NamedTuple):
    """Why a request is refused, and when it would fit. `never`: it is larger than the whole limit."""

    meter: Meter
    retry_after_s: float = 0.0
    never: bool = False

    def __str__(self) -> str:
        limit = f"{self.meter.amount:g} {self.meter.name} of {self.meter.scope}"
        return f"the request is larger than the limit: {limit}" if self.never else f"the limit is reached: {limit}"


class ReservedRow(NamedTuple):
    meter: Meter
    row: LimitRow
    amount: float


@dataclass(slots=True, eq=False)
class Grant:
    """What one request has reserved. `settle` and `release` of the limiter end it."""

    entries: Sequence[tuple[Meter, LimitRow, float]]
    is_open: bool = True


@dataclass(slots=True, eq=False)
class HomeQuestion:
    """A grant about which a home is asked. `outcome` is set and `decided` called once, by `until` at the latest."""

    number: int
    home: Peer
    grant: Grant
    asked: list[ReservedRow]
    until: float
    again_at: float
    outcome: Grant | Refusal | None = None
    decided: Callable[[], object] = field(default=lambda: None)


@dataclass(slots=True)
class LimitCounters:
    granted: int = counter("Requests of limited keys that were within their limits.")
    refused: dict[str, int] = counter("Requests refused by a limit, by what it counts.", label="limit")
    shadowed: dict[str, int] = counter(
        "Requests beyond a limit that is in the shadow, by what it counts.", label="limit"
    )
    asked: dict[str, int] = counter(
        "Requests near a limit about which another node decided, by outcome.", label="outcome"
    )
    limits: int = gauge("Limits of which something is counted.")
    rows: int = gauge("Counts of limits kept, own and of other nodes.")
    dropped: int = counter("Counts of limits dropped for want of room: what they counted was not limited.")
    vanished: int = gauge("Nodes for which a share of each limit is kept since they vanished.")


class ScopeRefusals(NamedTuple):
    """What is shown of one scope's refusals; `at`: when it was refused last."""

    times: int
    last: str
    at: float


class Limiter:
    """The limits of one node (see the module). `hurry` is called when there is something to send; `unseen`:
    counts, too."""

    def __init__(self, counters: Counters, peers: LimitPeers) -> None:
        self.counts, self.peers = counters, peers
        peers.changed = self._look_again
        self.home, self.silences = LimitHome(counters, self._room), SilentHomes()
        self.counters = LimitCounters()
        self.refusals = BoundedDict[str, ScopeRefusals](SCOPES_MAX)
        self.questions: dict[int, HomeQuestion] = {}
        self.hurry: Callable[[], object] = lambda: None
        self.unseen = False
        self._number = 0

    def _look_again(self) -> None:
        """Trust no earlier look: nodes came, vanished, or are back."""
        for count in self.counts.counts.values():
            count.slot = -1

    def sweep(self, now: float) -> None:
        """Drop what is over, a little at a time."""
        self.counts.book(now)
        self.counts.sweep(now)
        freed, self.peers.freed = self.peers.freed, []
        for session in freed:
            self.counts.free(session)
        counters, counts = self.counters, self.counts
        counters.limits, counters.rows, counters.dropped = len(counts.counts), counts.rows, counts.dropped
        counters.vanished = len(self.peers.vanished)

    # --- a request --------------------------------------------------------------------------------------------------

    def reserve(
        self, meters: Sequence[Meter], need: Amounts, now: float, *, least: Amounts = NOTHING
    ) -> Grant | Refusal | HomeQuestion:
        """Reserve `need`, of which `least` is sure, in all of these limits or in none."""
        by_id, slot, fits = self.counts.counts, int(now / SLOT_S), []
        for meter in meters:
            count = by_id.get(meter.id)
            if count is None or count.slot != slot or count.meter is not meter:
                break
            amount = need[meter.index]
            if amount > count.free:
                break
            fits.append((meter, count.current, amount))
        else:  # far from all
            for _, row, amount in fits:
                row.count.free -= amount  # type: ignore[union-attr]
                row.reserved += amount  # type: ignore[union-attr]
                if not row.is_late:  # type: ignore[union-attr]
                    row.is_late = True  # type: ignore[union-attr]
                    self.counts.late.append(row)  # type: ignore[arg-type]
            self.counters.granted += 1
            return Grant(fits)  # type: ignore[arg-type]
        self.counts.book(now)
        return self._reserve(meters, need, now, least)

    def _reserve(
        self, meters: Sequence[Meter], need: Amounts, now: float, least: Amounts
    ) -> Grant | Refusal | HomeQuestion:
        counts, asked = self.counts, False
        found: list[tuple[Meter, Count, float, bool]] = []
        full: list[Refusal] = []
        for meter in meters:
            amount = need[meter.index]
            if amount > meter.amount:  # what is only feared is no reason to refuse it for ever
                amount = meter.amount
                if least[meter.index] > amount and meter.measure is not Measure.REQUESTS:
                    full.append(Refusal(meter, never=True))
                    continue
            count = counts.count(meter, now)
            fit = self._fit(meter, count, amount, now)
            if fit is Fit.FULL:
                full.append(Refusal(meter, self._wait_s(meter, count, amount, now)))
            elif fit is Fit.ASK and not meter.shadow:
                asked = True
            found.append((meter, count, amount, fit is Fit.ASK))
        if full and (refusal := worst(full, self.counters)) is not None:
            return self._refused(refusal, now)
        entries = [ReservedRow(meter, counts.own(count, now), amount) for meter, count, amount, _ in found]
        grant = Grant(entries)
        if not asked:
            return self._granted(grant, now)
        near = [entry for entry, one in zip(entries, found, strict=True) if one[3] and not entry.meter.shadow]
        return self._ask(grant, near[:QUESTION_ROWS_MAX], now)

    def _granted(self, grant: Grant, now: float) -> Grant:
        self.counters.granted += 1
        for meter, row, amount in grant.entries:
            self.counts.add(row, amount, 0.0, 0.0, now)
            if row.place >= 0:
                self._allow(meter, row, now)
        return grant

    def _allow(self, meter: Meter, row: LimitRow, now: float) -> None:
        """Find out how much may be taken in this slot without a look, if it is far from the limit."""
        count, others = row.count, len(self.peers.live)
        room = self._room(meter.amount, count, now) - 2 * count.rate(now) * self.peers.staleness(now)
        share = (room - others * count.unsent) / (SOON * (1 + others))
        count.slot, count.current = int(now / SLOT_S), row
        count.free = min(share, room / (2 * MARGIN * (1 + others)))

    def settle(self, grant: Grant, took: Amounts) -> None:
        """Count what a request took instead of what it had reserved."""
        late, is_open, grant.is_open = self.counts.late, grant.is_open, False
        for meter, row, amount in grant.entries if is_open else ():
            row.settled += amount
            if meter.span:  # else what was in flight is over
                row.used += (used := took[meter.index])
                if used > amount:
                    row.count.free -= used - amount
            if not row.is_late:
                row.is_late = True
                late.append(row)

    def release(self, grant: Grant) -> None:
        """Take back a reservation, as if there had been no request."""
        self.settle(grant, NOWHERE)

    def full(self, meters: Sequence[Meter], now: float) -> Refusal | None:
        """Return why no request at all fits into these limits, however small; None if one may."""
        self.counts.book(now)
        for meter in meters:
            count = self.counts.counts.get(meter.id)
            if count is not None and not meter.shadow and self._room(meter.amount, count, now) < 1:
                self.counts.count(meter, now)  # as of now
                if self._room(meter.amount, count, now) < 1:
                    return self._refused(Refusal(meter, self._wait_s(meter, count, 1.0, now)), now)
        return None

    # --- whether it fits --------------------------------------------------------------------------------------------

    def left(self, meter: Meter, now: float) -> float:
        """Return what is left of a limit, below 0 if more was taken."""
        count = self.counts.counts.get(meter.id)
        if count is not None and count.slot == int(now / SLOT_S) and not self.peers.vanished:
            row = count.current
            assert row is not None
            return meter.amount - count.taken - (row.reserved - row.settled + row.used - row.booked)
        self.counts.book(now)
        return self._room(meter.amount, self.counts.count(meter, now), now)

    def _room(self, amount: float, count: Count, now: float) -> float:
        return room_of(self.counts, self.peers, amount, count, now)

    def _fit(self, meter: Meter, count: Count, amount: float, now: float) -> Fit:
        room, peers = self._room(meter.amount, count, now), self.peers
        if not peers.live:
            return Fit.FITS if amount <= room else Fit.FULL
        doubt, others = 2 * count.rate(now) * peers.staleness(now), len(peers.live)
        unseen = others * (count.unsent + amount)  # if each of the others has just reserved as much
        if room - amount >= max(doubt, unseen, MARGIN * (1 + others) * amount):
            if SOON * unseen > room:
                self.unseen = True
                self.hurry()
            return Fit.FITS
        if peers.home(meter.home) is None:
            return Fit.FITS if amount <= room else Fit.FULL
        return Fit.ASK if amount <= room + doubt else Fit.FULL

    def _wait_s(self, meter: Meter, count: Count, amount: float, now: float) -> float:
        """Return in how many seconds so much will fit, as far as is known."""
        if meter.span is LimitSpan.REQUEST:
            return SOON_S
        if meter.span is LimitSpan.MINUTE:
            return count.frees_in(amount - self._room(meter.amount, count, now), now)
        return ends_at(meter.span, self.counts.window(meter.span, now)) - now - self.counts.wall_offset_s

    def _refused(self, refusal: Refusal, now: float) -> Refusal:
        increment(self.counters.refused, refusal.meter.name)
        scope = refusal.meter.scope
        times = before.times if (before := self.refusals.get(scope)) else 0
        self.refusals[scope] = ScopeRefusals(times + 1, str(refusal), now)
        return refusal

    # --- asking a home ----------------------------------------------------------------------------------------------

    def _ask(self, grant: Grant, near: list[ReservedRow], now: float) -> Grant | Refusal | HomeQuestion:
        home = self.peers.home(near[0].meter.home)
        assert home is not None
        self._number = (self._number + 1) & 0xFFFFFFFF
        question = HomeQuestion(self._number, home, grant, near, now + ASK_S, now)
        if self.silences.has(home.session, now) or len(self.questions) >= QUESTIONS_MAX:
            return self._by_share(question, now)
        self.questions[question.number] = question
        for entry in near:
            entry.row.count.asked += entry.amount
        self.hurry()
        return question

    def ask_rows(self, question: HomeQuestion, now: float) -> tuple[AskRow, ...]:
        """Return what the home is asked, as of now."""
        rows = []
        for meter, row, amount in question.asked:
            one = self.counts.travelling(row, now)
            numbers = one.limit, one.span, one.window, one.age_ms, one.reserved, one.settled, one.used
            rows.append(AskRow(*numbers, amount, meter.amount))
        return tuple(rows)

    def answered(self, number: int, refused: int, now: float) -> None:
        """Take a home's answer."""
        question = self._closed(number)
        if question is None:
            return
        self.silences.answered(question.home.session)
        full = next((entry for entry in question.asked if entry.meter.id == refused), None)
        increment(self.counters.asked, "refused" if full is not None else "granted")
        self._decide(question, full, now)

    def unanswered(self, question: HomeQuestion, now: float) -> None:
        """Decide without the home."""
        self._closed(question.number)
        self.silences.add(question.home.session, now)
        if isinstance(self._by_share(question, now), Refusal):
            self._void(question, now)

    def abandon(self, question: HomeQuestion, now: float) -> None:
        """Give up a request whose client left."""
        if question.outcome is None:
            self._closed(question.number)
            self._void(question, now)
        elif isinstance(question.outcome, Grant):
            self.release(question.outcome)

    def _closed(self, number: int) -> HomeQuestion | None:
        question = self.questions.pop(number, None)
        for entry in question.asked if question is not None else ():
            entry.row.count.asked -= entry.amount
        return question

    def _void(self, question: HomeQuestion, now: float) -> None:
        """Book as settled what the home may have granted."""
        for _, row, amount in question.asked:
            self.counts.add(row, amount, amount, 0.0, now)

    def _by_share(self, question: HomeQuestion, now: float) -> Grant | Refusal:
        increment(self.counters.asked, "by_share")
        self.counts.book(now)
        full = None
        for entry in question.asked:
            meter, count, amount = entry.meter, entry.row.count, entry.amount
            room = self._room(meter.amount, count, now)
            doubt = 2 * count.rate(now) * self.peers.staleness(now)
            if room < amount or (room < doubt + 2 * amount and not self.peers.in_share(meter, count, amount, room)):
                full = entry
                break
        return self._decide(question, full, now)

    def _decide(self, question: HomeQuestion, full: ReservedRow | None, now: float) -> Grant | Refusal:
        if full is None:
            question.outcome = self._granted(question.grant, now)
        else:
            question.outcome = self._refused(
                Refusal(full.meter, self._wait_s(full.meter, full.row.count, full.amount, now)), now
            )
        question.decided()
        return question.outcome


def room_of(counts: Counters, peers: LimitPeers, amount: float, count: Count, now: float) -> float:
    """Return what is left of a limit of this amount, below 0 if more was taken."""
    taken = count.in_window(counts.window(count.span, now)) + count.asked
    return amount - taken - (peers.held(amount, count, taken) if peers.vanished else 0.0)


def worst(full: Sequence[Refusal], counters: LimitCounters) -> Refusal | None:
    """Return the refusal that holds longest; None if all are in the shadow."""
    for one in full:
        if one.meter.shadow:
            increment(counters.shadowed, one.meter.name)
    found = [one for one in full if not one.meter.shadow]
    return max(found, key=lambda one: (one.never, one.retry_after_s), default=None)
