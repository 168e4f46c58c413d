"""Getting a table from a peer: the whole table when a node joins, the buckets that differ when a log was trimmed.

    join    we send Vector () and RowsWanted (all) to one peer; it answers with its Vector and its Rows, or with Busy:
            then we ask another peer
    repair  we compare sums with the peer that sent Reset (`comparison`), then send it RowsWanted (the buckets that
            differ); it answers with its Rows
    audit   the same from time to time with any peer, for some of the buckets: equal vectors need not mean equal tables.
            The peer compares as well and asks back (`differs`), so that afterwards both tables are equal

The peer sends chunks as fast as we merge them. RowsWanted with the next chunk as cursor lets WINDOW_CHUNKS more come;
with the same cursor again it means that the chunks after it were lost. Once the last chunk is merged, everything that
the peer had before its first chunk is here: we adopt its numbers, and route updates go on from there. Route updates
without a gap are taken meanwhile as always: the order does not matter.

Rules: one pull at a time. Chunks of another request or peer, or out of order, are dropped. Ages count from when a chunk
was asked for. `synced` serves readiness: the join is over, or there was no peer to ask. After a repair that moved many
bytes the next one waits until PULL_BYTES_PER_S allows it. An audit heals what no route update can: routes that a node
gave to one that joined and died before it sent them to the others, or that were dropped while their backend was not
known. So each disturbance (a member came or went, or we joined) is followed by a few audits soon after each other, each
with a random peer: what only one node has is everywhere after about log2(N) of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from math import inf
from random import Random

import numpy as np

from ranvier_py.core.gossip.gossip_values import Peer
from ranvier_py.core.gossip.replication.budget import wire_bytes
from ranvier_py.core.gossip.replication.comparison import AnySums, Comparison
from ranvier_py.core.gossip.replication.route_outbox import RouteOutbox
from ranvier_py.core.gossip.replication.table_copy import WINDOW_CHUNKS, TableCopy
from ranvier_py.core.gossip.replication.update_log import UpdateLogs
from ranvier_py.core.gossip.wire.messages import Busy, RowsWanted, TableRows, Vector

ALONE_S = 2.0
"""A node that finds no peer for this long counts as synced: there is nobody to copy from."""

JOIN_LIMIT_S = 30.0
"""A node that is refused for this long stops trying to join: route updates and repair will do."""

ROUND_S = (0.1, 0.3)
"""The pause between two rounds in which all peers were busy is random within these."""

PROGRESS_S = 1.0
"""A chunk that does not come within this is asked for again: ten times what a busy peer needs for the next one."""

SUMS_S = 5.0  # for the sums of a million rows on both sides, twice, and their turn in the budget
RESUMES_MAX = 3

NEW_UPDATES_MAX = 4096
"""A peer with no more route updates than this that has not joined itself is as new as we are: updates will do."""

PULL_BYTES_PER_S = 4 * 1024 * 1024
"""What repair may move on average: a table of a million rows every 8 s."""

AUDIT_BUCKETS_MAX = 256
"""A periodic audit asks for at most this many of the buckets that differ, a sixteenth of a table: among a million
claims some hundred expire a second earlier on one side, at any time."""

SOON_MORE = 2
"""Audits after a disturbance beyond log2(N): some are wasted on a peer that has nothing new."""

SOON_NODES = 16
"""In clusters larger than this the audits are slower in proportion, so that each node answers as many as before."""

MANY_BUCKETS = 2048
"""If more buckets differ, the whole table is asked for: one pass over it costs the peer the same."""


class Phase(Enum):
    IDLE = auto()
    COMPARE = auto()  # our sums are computed and compared with the peer's
    ROWS = auto()


class Pull:
    """The asking side of the transfer of tables; `snapshot_source` is the giving side."""

    def __init__(
        self,
        logs: UpdateLogs,
        outbox: RouteOutbox,
        copy: TableCopy,
        comparison: Comparison,
        missed: Callable[[int, float], None],
        rng: Random,
        now: float,
    ) -> None:
        self.synced = False
        self.adopted: Callable[[float], object] = lambda _: None  # called when updates count as received by their rows
        self._counters = outbox.counters
        self._logs = logs
        self._outbox = outbox
        self._copy = copy
        self._comparison = comparison
        self._missed = missed
        self._rng = rng
        self._phase = Phase.IDLE
        self._peer: Peer | None = None
        self._targets: dict[int, int] = {}
        self._request = rng.getrandbits(32)
        self._buckets = b""
        self._next = 0
        self._allowed: deque[tuple[int, float]] = deque()  # (end, t): chunks below `end` were asked for at `t`
        self._resumes = 0
        self._bytes = 0
        self._deadline = inf
        self._vector_came = False
        self._not_before = now
        self._tried: dict[int, bool] = {}  # peers asked in this round of joining -> whether that peer is new, too
        self._round_at = now
        self._alone_until = now + ALONE_S
        self._give_up_at = inf
        self._audit_interval_s = inf
        self._audit_at = inf
        self._auditing = False
        self._soon_interval_s = inf
        self._soon = 0  # audits still to come because of a disturbance
        self._others = 0  # live nodes beside us
        self._met_nobody = False  # we count as synced because there was no peer

    @property
    def wake_at(self) -> float:
        if self._phase is not Phase.IDLE:
            return min(self._deadline, self._comparison.wake_at)
        if self.synced:
            return self._audit_at if self._outbox.order else inf
        return self._round_at if self._outbox.order else self._alone_until

    def meet(self, others: int, now: float) -> None:
        """React to a change of the live peers. `others`: how many live nodes there are beside us."""
        peers, self._others = self._outbox.peers, others
        if self._peer is not None and self._peer.session not in peers:
            self._break_off(now)
        if self._met_nobody and peers:
            self._met_nobody = False
            self.disturbed(now)

    def disturbed(self, now: float) -> None:
        """Schedule audits soon: a node may have routes that others lack, and no log shows it."""
        self._soon = SOON_MORE + self._others.bit_length()
        self._audit_at = min(self._audit_at, now + self._soon_s())

    def _soon_s(self) -> float:
        return self._soon_interval_s * self._rng.uniform(0.5, 1.5) * max(1.0, self._others / SOON_NODES)

    def tick(self, now: float) -> None:
        """Do what is due: at most one step of 2 ms."""
        if self._phase is Phase.IDLE:
            if not self.synced:
                self._join(now)
            elif now >= self._audit_at:
                self.audit(now)
        elif now >= self._deadline:
            self._late(now)
        else:
            self._comparison.tick(now)

    def audit_every(self, interval_s: float, soon_s: float, now: float) -> None:
        """Set the regular interval and that after a disturbance. Nodes that start together begin at random times."""
        self._audit_interval_s, self._soon_interval_s = interval_s, soon_s
        self._audit_at = now + interval_s * self._rng.uniform(0.2, 1.0)

    # --- joining ----------------------------------------------------------------------------------------------------

    def _join(self, now: float) -> None:
        """Ask a peer that was not asked in this round for its table; end the join if no peer can help."""
        order = self._outbox.order
        if not order:
            self.synced = self._met_nobody = now >= self._alone_until
            return
        self._give_up_at = min(self._give_up_at, now + JOIN_LIMIT_S)
        if now < self._round_at:
            return
        candidates = [peer for peer in order if peer.session not in self._tried]
        if candidates:
            self._ask(self._rng.choice(candidates), b"", now)
        elif all(self._tried.get(peer.session) for peer in order) or now >= self._give_up_at:
            self.synced = True
            self.disturbed(now)
        else:
            self._tried.clear()
            self._round_at = now + self._rng.uniform(*ROUND_S)

    def vector(self, peer: Peer, message: Vector) -> None:
        """Take the vector of the peer that we join from: after its last chunk all that it lists will be here."""
        if self._is_from(peer, Phase.ROWS) and not (self.synced or message.reply or self._next or self._vector_came):
            self._vector_came = True
            self._targets = dict(message.entries)

    def busy(self, peer: Peer, message: Busy, now: float) -> None:
        if self._is_from(peer, Phase.ROWS) and message.request == self._request:
            self._break_off(now)

    # --- repair -----------------------------------------------------------------------------------------------------

    def reset(self, peer: Peer, origin: int, base: int, now: float) -> None:
        """Compare tables with a peer: it has route updates that we lack, and they can't be had from any log."""
        if self._is_from(peer, Phase.COMPARE) and self._comparison.own is None:
            self._targets[origin] = max(base, self._targets.get(origin, 0))
        elif self._phase is not Phase.IDLE or not self.synced or now < self._not_before:
            self._counters.resets_deferred += 1
        else:
            self._compare(peer, now)
            self._targets = {origin: base}

    def audit(self, now: float) -> None:
        """Compare tables with a random peer, and schedule the next audit."""
        wait_s = self._audit_interval_s * self._rng.uniform(0.8, 1.2)
        if self._soon:
            wait_s = min(wait_s, self._soon_s())
        self._audit_at = max(now + wait_s, self._not_before)
        if self._outbox.order and now >= self._not_before:
            self._compare(self._rng.choice(self._outbox.order), now)
            self._auditing = True

    def _compare(self, peer: Peer, now: float) -> None:
        self._begin(Phase.COMPARE, peer, SUMS_S, now)
        self._request = (self._request + 1) & 0xFFFFFFFF
        self._comparison.begin(peer, self._request, now)

    def sums(self, peer: Peer, message: AnySums, now: float) -> None:
        """Take the peer's sums, and ask for the buckets that differ. Sums of an earlier comparison don't count."""
        if not self._is_from(peer, Phase.COMPARE):
            return
        ours, theirs = self._comparison.own, self._comparison.receive(message, now)
        if ours is None or theirs is None:
            return
        buckets = self._differing(ours, theirs)
        if buckets is None:
            self._done(now)
        else:
            self._ask(peer, buckets, now)

    def differs(self, peer: Peer, ours: bytes, theirs: bytes, now: float) -> None:
        """Ask back: a peer that compares with us was sent our sums, and may have rows that we lack.

        Never for the whole table: if nearly all buckets differ, one of the two is new, or a Reset made it compare.
        """
        if self._phase is Phase.IDLE and self.synced and now >= self._not_before:
            self._targets, self._auditing = {}, True
            buckets = self._differing(ours, theirs)
            if buckets:
                self._ask(peer, buckets, now)

    def _differing(self, ours: bytes, theirs: bytes) -> bytes | None:
        """Return the buckets to ask for, u16 each; empty for the whole table, None if no bucket differs."""
        differing = np.flatnonzero(np.frombuffer(ours, "<u8") != np.frombuffer(theirs, "<u8"))
        self._counters.differing_buckets = len(differing)
        if self._auditing and not self._soon and len(differing) > AUDIT_BUCKETS_MAX:
            differing = differing[self._rng.sample(range(len(differing)), AUDIT_BUCKETS_MAX)]
        if not len(differing):
            return None
        return differing.astype("<u2").tobytes() if len(differing) <= MANY_BUCKETS else b""

    # --- rows -------------------------------------------------------------------------------------------------------

    def take(self, peer: Peer, message: TableRows, now: float) -> None:
        """Merge a chunk at once, in at most 2 ms, and let more chunks come."""
        if not self._is_from(peer, Phase.ROWS) or message.request != self._request or message.chunk != self._next:
            self._counters.stray_chunks += 1
            return
        while len(self._allowed) > 1 and self._allowed[0][0] <= message.chunk:
            self._allowed.popleft()
        self._counters.pulled_rows += self._copy.merge(message, self._allowed[0][1], now)
        self._next += 1
        self._bytes += wire_bytes(message)
        self._deadline = now + PROGRESS_S
        self._resumes = 0
        if message.last:
            self._done(now)
        elif self._next % (WINDOW_CHUNKS // 2) == 0:
            self._send_wanted(b"", now)

    def _ask(self, peer: Peer, buckets: bytes, now: float) -> None:
        targets, auditing = self._targets, self._auditing
        self._begin(Phase.ROWS, peer, PROGRESS_S, now)
        self._auditing = auditing
        self._request = (self._request + 1) & 0xFFFFFFFF
        self._buckets = buckets
        if self.synced:
            self._targets = targets
        else:
            self._outbox.send(peer, Vector((), reply=True), now)
        self._send_wanted(buckets, now)

    def _send_wanted(self, buckets: bytes, now: float) -> None:
        """Let more chunks come. The same cursor as last time asks for the chunks after it again."""
        assert self._peer is not None
        self._outbox.send(self._peer, RowsWanted(self._request, self._next, buckets), now)
        if not self._allowed or self._allowed[-1][0] < self._next + WINDOW_CHUNKS:
            self._allowed.append((self._next + WINDOW_CHUNKS, now))

    # --- beginnings and ends ----------------------------------------------------------------------------------------

    def _begin(self, phase: Phase, peer: Peer, limit_s: float, now: float) -> None:
        self._phase, self._peer, self._deadline, self._auditing = phase, peer, now + limit_s, False
        self._targets, self._next, self._resumes, self._bytes = {}, 0, 0, 0
        self._vector_came = False
        self._comparison.end()
        self._allowed.clear()

    def _is_from(self, peer: Peer, phase: Phase) -> bool:
        return self._phase is phase and self._peer is not None and self._peer.session == peer.session

    def _late(self, now: float) -> None:
        """Nothing came in time: ask for the next chunk again, or break off after RESUMES_MAX times."""
        if self._phase is Phase.ROWS and self._resumes < RESUMES_MAX:
            self._resumes += 1
            self._deadline = now + PROGRESS_S
            self._send_wanted(b"" if self._next else self._buckets, now)
        else:
            self._break_off(now)

    def _break_off(self, now: float) -> None:
        peer = self._peer
        assert peer is not None
        if self.synced:
            self._counters.given_up += 1
            self._not_before = now + self._rng.uniform(*ROUND_S)
        else:
            self._tried[peer.session] = self._vector_came and sum(self._targets.values()) <= NEW_UPDATES_MAX
        self._phase, self._peer, self._deadline = Phase.IDLE, None, inf
        self._comparison.end()

    def _done(self, now: float) -> None:
        """All rows are merged: adopt the numbers of what the peer had when it began, and go on from there."""
        peer = self._peer
        assert peer is not None
        adopted = [
            self._logs.open(origin, now) and self._logs.adopt(origin, number)
            for origin, number in self._targets.items()
        ]
        if any(adopted) or not self.synced:
            self.adopted(now)
        if self.synced:
            self._counters.repairs += not self._auditing
            self._counters.audits += self._auditing
            self._soon = max(0, self._soon - self._auditing)
            self._not_before = now + self._bytes / PULL_BYTES_PER_S
        else:
            self._counters.joins += 1
            self.synced = True
            self.disturbed(now)
        self._phase, self._peer, self._deadline = Phase.IDLE, None, inf
        self._comparison.end()
        if self._targets:  # route updates go on after the numbers that were adopted
            self._missed(peer.session, now)
