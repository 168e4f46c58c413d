"""Counts of limits among peers, and what the home of a limit is asked (`limiter`).

A node sends what it counted to all peers every GATHER_S, those first of which a greater part of their limit is taken;
at least nothing every FRESH_S, so that peers know how fresh its counts are, and a datagram every BEAT_S. Newcomers get
all of its rows; those of sessions that are gone come from the peer with the lowest session. Requests in flight are only
their own session's to send. Bound: BYTES_PER_S of rows to each peer; what exceeds it waits, and is compared once in
JUDGE_S; a part of all rows is repeated in turn.
Rule: a node that has no limits sends nothing, and none waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from math import inf, isfinite
from random import Random
from typing import Any, NamedTuple

from ranvier_py.core.access.limits.count import CountRow, LimitRow
from ranvier_py.core.access.limits.counts import Counters
from ranvier_py.core.access.limits.homes import AskRow
from ranvier_py.core.access.limits.limiter import AGAIN_S, ASKS_LEAST, HomeQuestion, Limiter
from ranvier_py.core.access.limits.meters import LimitSpan
from ranvier_py.core.access.limits.shares import BEAT_S, LimitPeers
from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.join_table import JoinTable
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import U32, U64, rows_field
from ranvier_py.core.mesh.wire.frame import bad

FRESH_S = 0.5
BYTES_PER_S = 5000
ROW_BYTES = 49
COUNT_ROWS_MAX = 1024  # in a message
JUDGED_ROWS = 32  # of those that wait, each time
REPEATED_MAX = 512  # rows, every REPEAT_S: 1 kB/s
SWEEP_S = 1.0
JUDGE_S = 1.0  # comparing all that waits takes 3 us a row

RowKey = tuple[int, int, int]  # limit, origin, window


class LimitCounts(NamedTuple):
    """Counts; without any those before are fresh."""

    rows: tuple[CountRow, ...]


class LimitQuestion(NamedTuple):
    """Asks the home of these limits whether what the sender has just reserved fits."""

    number: int  # u32
    rows: tuple[AskRow, ...]


class LimitAnswer(NamedTuple):
    """Of a home; to no question, of a node that is there."""

    number: int  # u32, 0: of no question
    refused: int  # u64: the limit that is reached; 0: all fits


THERE = LimitAnswer(0, 0)


@dataclass(slots=True)
class DueTimes:
    """When a node sends counts even if there are none, and that it is there; drops what is over; judges what waits."""

    fresh_at: float
    beat_at: float
    sweep_at: float
    judge_at: float


def read_count(*values: Any) -> CountRow:
    row = CountRow(*values)
    if not row.limit or not row.origin or row.span > LimitSpan.MONTH:
        bad("count of a limit")
    check_amounts(*values[5:])
    return row


def read_ask(*values: Any) -> AskRow:
    row = AskRow(*values)
    if not row.limit or row.span > LimitSpan.MONTH:
        bad("question about a limit")
    check_amounts(*values[4:])
    return row


def check_amounts(*amounts: float) -> None:
    if not all(isfinite(amount) and amount >= 0 for amount in amounts):
        bad("amount of a limit")


ASKED = rows_field("<QBIIddddd", 12, read_ask)
COUNTED = rows_field("<QQBIIddd", COUNT_ROWS_MAX, read_count)


class LimitGossip(JoinTable[RowKey, CountRow]):
    """Shares the counts of one node. `limiter`: None without limits."""

    kinds = (
        Kind("limits", 100, LimitCounts, (COUNTED,), since=5),
        Kind("limits", 101, LimitQuestion, (U32, ASKED), since=5),
        Kind("limits", 102, LimitAnswer, (U32, U64), since=5),
    )
    ROWS_MAX = COUNT_ROWS_MAX
    REPEAT_S = 30.0
    GATHER_S = 0.1

    def __init__(
        self,
        me: int,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        left: Callable[[int], bool] = lambda _: False,
        name_of: Callable[[int], str] = str,
    ) -> None:
        super().__init__(outbox, rng, now)
        self.counts = Counters(me)
        self.members = LimitPeers(me, left, name_of)
        self.limiter: Limiter | None = None
        self._due = DueTimes(now, now, now, now)
        self._bytes = Window(BYTES_PER_S)
        self._waiting: dict[RowKey, None] = {}  # rows for which there was no room
        self._repeated = 0

    def begin(self) -> Limiter:
        """Return the limiter of this node, from now on with limits."""
        if self.limiter is None:
            self.limiter = Limiter(self.counts, self.members)
            self._due.fresh_at = self._due.beat_at = 0.0
        return self.limiter

    @property
    def wake_at(self) -> float:
        limiter = self.limiter
        if limiter is None:
            return inf
        if self.counts.late:
            return min(self._rounds.sent_at + self.GATHER_S, self._due.beat_at, self._due.fresh_at)
        if self.counts.changed:
            self._changed.update(self.counts.changed)
            self.counts.changed.clear()
        asked = min((one.again_at for one in limiter.questions.values()), default=inf)
        waiting = self._rounds.sent_at + self.GATHER_S if self._waiting else inf
        own = min(asked, waiting, self._due.beat_at, self._due.fresh_at, self._due.sweep_at)
        return 0.0 if limiter.unseen else min(own, super().wake_at)

    def tick(self, now: float) -> None:
        """Send what is due."""
        limiter = self.limiter
        if limiter is None:
            return
        self.counts.book(now)
        for question in list(limiter.questions.values()):
            if now >= question.again_at:
                self._ask(limiter, question, now)
        self._changed.update(self.counts.changed)
        self.counts.changed.clear()
        if limiter.unseen:
            limiter.unseen, self._rounds.sent_at = False, -inf
        if self._waiting and now >= self._rounds.sent_at + self.GATHER_S:
            self._let_go_on(now)
        if now >= self._due.beat_at:
            self._due.beat_at = now + BEAT_S
            self.members.look(now)
            self._to_all(THERE, Plane.DATAGRAM)
        if now >= self._due.fresh_at or (self._changed and now >= self._rounds.sent_at + self.GATHER_S):
            self._due.fresh_at = now + FRESH_S
            self.members.look(now)
            if not self._changed:
                self._to_all(LimitCounts(()), Plane.BULK)
        super().tick(now)
        if now >= self._due.sweep_at:
            self._due.sweep_at = now + SWEEP_S
            limiter.sweep(now)

    def receive(self, peer: Peer, message: LimitCounts | LimitQuestion | LimitAnswer, now: float) -> None:
        limiter = self.limiter
        if limiter is None:
            return
        note = self.members.fresh if isinstance(message, LimitCounts) else self.members.seen
        if note(peer.session, now):
            self._welcome([peer], now)
        if isinstance(message, LimitCounts):
            for row in message.rows:
                if row.origin != self.counts.me and (row.span != LimitSpan.REQUEST or row.origin == peer.session):
                    self.counts.merge(row, now)
        elif isinstance(message, LimitQuestion):
            answer = LimitAnswer(message.number, limiter.home.decide(peer.session, message.number, message.rows, now))
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.DATAGRAM, answer))
        else:
            limiter.answered(message.number, message.refused, now)

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers, all that this node may write to: each counts for itself."""
        before = {peer.session: None for peer in self._peers}
        self._peers = peers.met
        self.members.met(peers.met, now)
        if self.limiter is not None:
            self._welcome([peer for peer in peers.met if peer.session not in before], now)

    def counted(self) -> Mapping[str, Any]:
        return {} if self.limiter is None else {"limits": self.limiter.counters}

    # --- sending ----------------------------------------------------------------------------------------------------

    def _welcome(self, newcomers: Sequence[Peer], now: float) -> None:
        """Send newcomers what they lack: our rows, and from one of us those of sessions that are gone."""
        if not newcomers:
            return
        new = {peer.session: None for peer in newcomers}
        me, live = self.counts.me, self.members.live
        is_first = all(session > me for session in live if session not in new)
        rows = [
            self.counts.travelling(row, now)
            for row in self.counts.all_rows()
            if row.origin == me or (is_first and row.origin not in live and row.count.span is not LimitSpan.REQUEST)
        ]
        self._send(newcomers, rows or [])
        if not rows:
            self._outbox.extend(Outgoing(one.address, one.session, Plane.BULK, LimitCounts(())) for one in newcomers)

    def _to_all(self, message: LimitCounts | LimitAnswer, plane: Plane) -> None:
        for peer in self._peers:
            self._outbox.append(Outgoing(peer.address, peer.session, plane, message))

    def _ask(self, limiter: Limiter, question: HomeQuestion, now: float) -> None:
        is_late = now >= question.until
        if is_late and question.asks >= ASKS_LEAST:
            limiter.unanswered(question, now)
            return
        question.asks += 1
        question.again_at = now + AGAIN_S if is_late else min(question.until, now + AGAIN_S)
        home, message = question.home, LimitQuestion(question.number, limiter.ask_rows(question, now))
        self._outbox.append(Outgoing(home.address, home.session, Plane.DATAGRAM, message))

    def _let_go_on(self, now: float) -> None:
        """Have some that wait be compared with what is new: those that wait longest, now and then all."""
        number = JUDGED_ROWS
        if now >= self._due.judge_at:
            self._due.judge_at, number = now + JUDGE_S, len(self._waiting)
        for key in [*islice(self._waiting, number)]:
            del self._waiting[key]
            self._changed[key] = None

    def _rows(self, keys: dict[RowKey, None] | None, now: float) -> Sequence[CountRow]:
        if keys is None:
            return self._next_rows(now)
        room = max(1, self._bytes.room(now) // ROW_BYTES)
        found = [row for key in keys if (row := self.counts.row(key)) is not None and row.place >= 0]
        if len(found) > room:
            sent = nlargest(room, found, key=urgency)
            sent_keys = {key_of(row) for row in sent}
            self._waiting.update((key_of(row), None) for row in found if key_of(row) not in sent_keys)
            found = sent
        self._bytes.spend(ROW_BYTES * len(found), now)
        for row in found:
            row.count.unsent = 0.0
        return [self.counts.travelling(row, now) for row in found]

    def _next_rows(self, now: float) -> Sequence[CountRow]:
        """Return the next of all rows, in turn."""
        every = [
            row
            for row in self.counts.all_rows()
            if row.count.span is not LimitSpan.REQUEST or row.origin == self.counts.me
        ]
        start = self._repeated if self._repeated < len(every) else 0
        self._repeated = start + REPEATED_MAX
        return [self.counts.travelling(row, now) for row in islice(every, start, start + REPEATED_MAX)]

    def _message(self, rows: Sequence[CountRow]) -> LimitCounts:
        return LimitCounts(tuple(rows))


def key_of(row: LimitRow) -> RowKey:
    return row.count.id, row.origin, row.window


def urgency(row: LimitRow) -> float:
    """Return how much of its limit is taken, as far as that is known."""
    return row.count.taken / row.count.meter.amount if row.count.meter is not None else 0.0
