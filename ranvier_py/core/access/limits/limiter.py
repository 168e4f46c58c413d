"""Decides whether a request fits into all its limits, reserves what it may take, and settles what it took.

Far from a limit the sum that this node knows decides. Near it the limit's home decides, the node that rendezvous
hashing of its tenant names: what others may have taken unseen counts twice, and each node may have MARGIN requests on
their way, so limits below that are always near. The home has ASK_S, and as many questions as ASKS_LEAST, since a node
that was busy has read no answer; without one a node takes no more than its own share. A home books what it grants, and
so does the asker; what it asked for and does not use it books as reserved and settled, so that both end with the same.
Invariant: each grant ends once (test_limiter.py). Bound: QUESTIONS_MAX questions; beyond, a node decides by its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ranvier_py.core.access.limits.count import Count, LimitRow, SlotTally
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.homes import AskRow, LimitHome, SilentHomes
from ranvier_py.core.access.limits.limit_room import Fit, LimitRoom
from ranvier_py.core.access.limits.meter_groups import NO_EXCESS, Excess, MeterGroup
from ranvier_py.core.access.limits.meters import INDEX, Amounts, Measure, Meter
from ranvier_py.core.access.limits.shares import LimitPeers
from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.metrics import counter, gauge

ASK_S = 0.05
AGAIN_S = 0.008  # after which a question is repeated
ASKS_LEAST = 6  # with one datagram in five lost, each way, two questions in a thousand go unanswered
QUESTIONS_MAX = 1024
QUESTION_ROWS_MAX = 12  # in a datagram
SCOPES_MAX = 4096  # of which the refusals are shown
NOTHING = Amounts()  # beside the request itself
NOWHERE = Amounts(requests=0.0, places=0.0)
COUNTED_BY_HEAD = Amounts(requests=-1.0, places=-1.0)  # beside a need that has the request, too


class Refusal(NamedTuple):
    """Why a request is refused, and when it would fit. `never`: it is larger than the whole limit. `wants`: how much it
    may take, with what those that run may take more; `left`: what there is."""

    meter: Meter
    retry_after_s: float = 0.0
    never: bool = False
    wants: float = 0.0
    left: float = 0.0

    def __str__(self) -> str:
        name = self.meter.name if self.meter.amount != 1 else self.meter.name.replace("requests", "request")
        limit = f"{self.meter.amount:g} {name} of {self.meter.scope}"
        return f"the request is larger than the limit: {limit}" if self.never else f"the limit is reached: {limit}"

    @property
    def sentence(self) -> str:
        """Return the same with its numbers, for the client."""
        if self.never:
            return f"{self}; its prompt alone takes {rounded(self.wants)}"
        if self.meter.measure in (Measure.REQUESTS, Measure.CONCURRENT):
            return str(self)
        needs = f"this request needs {rounded(self.wants)} to be free: a smaller max_tokens needs fewer"
        return f"{self}; {rounded(max(self.left, 0.0))} are left, and {needs}"


class ReservedRow(NamedTuple):
    """So much is to be reserved of a limit, of whose amount `margin` must be left."""

    meter: Meter
    row: LimitRow
    amount: float
    margin: float


class Grant:
    """What one request has reserved, in one tally: by its head, then its tokens. `need` is all of it, and `group` has
    the limits that counted it last. `settle` and `release` of the limiter end it: it has no tally then."""

    __slots__ = ("group", "need", "tally")

    def __init__(self, group: MeterGroup, tally: SlotTally, need: Amounts) -> None:
        self.group, self.need = group, need
        self.tally: SlotTally | None = tally


@dataclass(slots=True, eq=False)
class HomeQuestion:
    """A grant about which a home is asked. `outcome` is set and `decided` called once: by `until`, unless busy."""

    number: int
    home: Peer
    grant: Grant
    asked: list[ReservedRow]
    until: float
    again_at: float
    asks: int = 0
    outcome: Grant | Refusal | None = None
    decided: Callable[[], object] = field(default=lambda: None)


@dataclass(slots=True)
class LimitCounters:
    granted: int = counter("Requests of limited keys that were within their limits, once they have ended.")
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
        self.room = LimitRoom(counters, peers)
        self.home, self.silences = LimitHome(counters, self.room.of), SilentHomes()
        self.counters = LimitCounters()
        self.refusals = BoundedDict[str, ScopeRefusals](SCOPES_MAX)
        self.questions: dict[int, HomeQuestion] = {}
        self.hurry: Callable[[], object] = lambda: None
        self.unseen = False
        self._number = 0

    def _look_again(self) -> None:
        """Trust no earlier look: nodes came, vanished, or are back."""
        for count in self.counts.counts.values():
            count.expire()

    def sweep(self, now: float) -> None:
        """Drop what is over, a little at a time."""
        self.counts.book(now)
        self.counts.sweep(now)
        freed, self.peers.freed = self.peers.freed, []
        for session in freed:
            self.counts.free(session)
        counters, counts = self.counters, self.counts
        counters.limits, counters.rows, counters.dropped = len(counts.counts), counts.rows, counts.dropped
        counters.granted = counts.granted
        counters.vanished = len(self.peers.vanished)

    # --- a request --------------------------------------------------------------------------------------------------

    def begin(self, group: MeterGroup, now: float) -> Grant | None:
        """Reserve a request and a place, all that is known by its head. None if that needs a look, as in `reserve`."""
        left = group.left - 1.0
        if now >= group.until or left < group.floor:
            return None
        group.left = left
        tally = group.tally
        tally.reserved.append(NOTHING)
        if not tally.is_late:
            self._late(tally)
        return Grant(group, tally, NOTHING)

    def grow(self, held: Grant, group: MeterGroup, need: Amounts, now: float, excess: Excess) -> bool:
        """Reserve the tokens of `need` beside the request itself, which is `held`, if one tally counts both and their
        limits are far. Returns whether it did."""
        if now >= group.until:
            group.excess = excess.per(need.tokens)
            self.room.look(group, now)
        tally, left = group.tally, group.left - need.tokens
        if left < group.floor or held.tally is not tally:
            return False
        group.left = left
        tally.reserved += (need, COUNTED_BY_HEAD)
        if not tally.is_late:
            self._late(tally)
        held.group, held.need = group, need
        return True

    def reserve(  # each is one number of the request, and a value for all would cost as much
        self,
        group: MeterGroup,
        need: Amounts,
        now: float,
        sure: float = 0.0,
        excess: Excess = NO_EXCESS,
        held: Grant | None = None,
    ) -> Grant | Refusal | HomeQuestion:
        """Reserve `need` in all limits of a group or in none. So many of its tokens are `sure`. What the request has
        `held` before grows by it, if both are counted in one tally."""
        if now >= group.until:
            if need.tokens:  # what takes none says nothing of those that do
                group.excess = excess.per(need.tokens)
            self.room.look(group, now)
        is_cheap = not need.cost or need.cost <= group.cost_left
        if held is not None:
            if is_cheap and self.grow(held, group, need, now, excess):
                group.cost_left -= need.cost
                return held
            if group.together:
                need = need._replace(requests=0.0, places=0.0)
        left = group.left - need[group.unit]
        if left < group.floor or not is_cheap:
            self.counts.book(now)
            return self._reserve(group, need, now, sure, excess.per(need.tokens))
        group.left = left  # far from all
        group.cost_left -= need.cost
        tally = group.tally
        tally.reserved.append(need)
        if not tally.is_late:
            self._late(tally)
        return Grant(group, tally, need)

    def _reserve(
        self, group: MeterGroup, need: Amounts, now: float, sure: float, excess: Excess
    ) -> Grant | Refusal | HomeQuestion:
        near: list[tuple[int, float, float]] = []
        full: list[Refusal] = []
        for place, meter in enumerate(group.meters):
            if meter.measure is Measure.TOKENS and sure > meter.amount:
                full.append(Refusal(meter, never=True, wants=sure))
                continue
            amount = min(need[meter.index], meter.amount)  # what is only feared is no reason to refuse it for ever
            count = self.counts.count(meter, now)
            margin = min(excess.margin(count.unsettled + amount), meter.amount - amount)
            fit = self.room.fit(meter, count, amount, margin, now)
            if fit is Fit.FULL:
                full.append(lacking(self.room, meter, count, amount + margin, now))
            elif fit is Fit.SEND:
                self.unseen = True
                self.hurry()
            elif fit is Fit.ASK and not meter.shadow:
                near.append((place, amount, margin))
        if full and (refusal := worst(full, self.counters)) is not None:
            return self._refused(refusal, now)
        tally = self.room.tally(group, now)
        grant, rows = Grant(group, tally, need), tally.rows
        if not near:
            return self._granted(grant, now)
        asked = [ReservedRow(group.meters[place], rows[place][0], *amounts) for place, *amounts in near]
        return self._ask(grant, asked[:QUESTION_ROWS_MAX], now)

    def _granted(self, grant: Grant, now: float) -> Grant:
        tally = grant.tally
        assert tally is not None
        tally.reserved.append(grant.need)
        if not tally.is_late:
            self._late(tally)
        self.counts.book(now)
        for row, index in tally.rows:
            row.count.tell(grant.need[index])
        return grant

    def _late(self, tally: SlotTally) -> None:
        tally.is_late = True
        self.counts.late.append(tally)

    def settle_all(self, took: Amounts, *grants: Grant) -> None:
        """Count what a request took instead of what it had reserved by several grants."""
        for grant in grants:
            self.settle(part_of(took, grant), grant)

    def settle(self, took: Amounts, grant: Grant) -> None:
        """Count what a request took instead of what it had reserved by its only grant."""
        tally, group = grant.tally, grant.group
        if tally is None:
            return
        grant.tally = None
        tally.ended.append((grant.need, took))
        if not tally.is_late:
            self._late(tally)
        change = took[group.unit] - grant.need[group.unit]
        if change > 0.0:
            group.left -= change
        else:
            group.back -= change  # is shown, and not taken again
        if took.cost:
            group.cost_left -= took.cost

    def release(self, *grants: Grant) -> None:
        """Take back reservations, as if there had been no request."""
        for grant in grants:
            together = grant.group.together
            if grant.tally is not None and grant.need.requests and grant.group in together[1:]:
                together[0].back += 1.0
            self.settle(NOWHERE, grant)

    def full(self, meters: Sequence[Meter], now: float) -> Refusal | None:
        """Return why no request at all fits into these limits, however small; None if one may."""
        self.counts.book(now)
        for meter in meters:
            count = self.counts.counts.get(meter.id)
            if count is not None and not meter.shadow and self.room.of(meter.amount, count, now) < 1:
                self.counts.count(meter, now)  # as of now
                if self.room.of(meter.amount, count, now) < 1:
                    return self._refused(Refusal(meter, self.room.wait_s(meter, count, 1.0, now)), now)
        return None

    # --- whether it fits --------------------------------------------------------------------------------------------

    def shown(self, group: MeterGroup, now: float) -> float:
        """Return what is left of the limit that a group shows, nearly: as this node knew lately, and of its own."""
        if now >= group.until:
            self.room.look(group, now)
        return group.left + group.back

    def _refused(self, refusal: Refusal, now: float) -> Refusal:
        self.counters.refused[refusal.meter.name] += 1
        scope = refusal.meter.scope
        times = before.times if (before := self.refusals.get(scope)) else 0
        self.refusals[scope] = ScopeRefusals(times + 1, str(refusal), now)
        return refusal

    # --- asking a home ----------------------------------------------------------------------------------------------

    def _ask(self, grant: Grant, near: list[ReservedRow], now: float) -> Grant | Refusal | HomeQuestion:
        home = self.peers.home(near[0].meter.home)
        assert home is not None
        self._number = (self._number + 1) & 0xFFFFFFFF
        question = HomeQuestion(
            number=self._number, home=home, grant=grant, asked=near, until=now + ASK_S, again_at=now
        )
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
        for meter, row, amount, margin in question.asked:
            one = self.counts.travelling(row, now)
            numbers = one.limit, one.span, one.window, one.age_ms, one.reserved, one.settled, one.used
            rows.append(AskRow(*numbers, amount, meter.amount - margin))
        return tuple(rows)

    def answered(self, number: int, refused: int, now: float) -> None:
        """Take a home's answer."""
        question = self._closed(number)
        if question is None:
            return
        self.silences.answered(question.home.session)
        full = next((entry for entry in question.asked if entry.meter.id == refused), None)
        self.counters.asked["refused" if full is not None else "granted"] += 1
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
        for _, row, amount, _ in question.asked:
            self.counts.add(row, amount, amount, 0.0, now)

    def _by_share(self, question: HomeQuestion, now: float) -> Grant | Refusal:
        self.counters.asked["by_share"] += 1
        self.counts.book(now)
        full = None
        for entry in question.asked:
            meter, count, amount = entry.meter, entry.row.count, entry.amount
            room = self.room.of(meter.amount, count, now) - entry.margin
            doubt = max(2 * count.rate(now) * self.peers.staleness(now) + amount, self.room.unseen(count, amount))
            if room < amount or (room < doubt + amount and not self.peers.in_share(meter, count, amount, room)):
                full = entry
                break
        return self._decide(question, full, now)

    def _decide(self, question: HomeQuestion, full: ReservedRow | None, now: float) -> Grant | Refusal:
        if full is None:
            question.outcome = self._granted(question.grant, now)
        else:
            wants = full.amount + full.margin
            question.outcome = self._refused(lacking(self.room, full.meter, full.row.count, wants, now), now)
        question.decided()
        return question.outcome


def lacking(room: LimitRoom, meter: Meter, count: Count, wants: float, now: float) -> Refusal:
    wait_s, left = room.wait_s(meter, count, wants, now), room.of(meter.amount, count, now)
    return Refusal(meter, wait_s, wants=wants, left=left)


def rounded(number: float) -> str:
    """Return tokens as a whole number, and costs to three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def part_of(took: Amounts, grant: Grant) -> Amounts:
    """Return what of all that a request took one of its grants counts, of those that others count in its tally too."""
    if grant.group.unit == INDEX[Measure.REQUESTS]:
        return NOTHING
    return took if grant.need.requests else took._replace(requests=0.0, places=0.0)


def worst(full: Sequence[Refusal], counters: LimitCounters) -> Refusal | None:
    """Return the refusal that holds longest; None if all are in the shadow."""
    for one in full:
        if one.meter.shadow:
            counters.shadowed[one.meter.name] += 1
    found = [one for one in full if not one.meter.shadow]
    return max(found, key=lambda one: (one.never, one.retry_after_s), default=None)
