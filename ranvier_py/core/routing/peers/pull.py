"""Getting from a peer what route updates did not bring: its table, the buckets that differ from ours, its side state.

    join         Vector () and the whole table wanted of one peer; if it is busy, of another
    repair       compare sums with the peer that sent Reset (`comparison`), then want the buckets that differ
    audit        the same from time to time with any peer: equal vectors need not mean equal tables
    side state   wanted after whatever may have cost us some (`side_state`)
Rules: one pull at a time. After its last part the peer's numbers are adopted. `synced`: the join is over, or nobody was
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from random import Random

from ranvier_py.core.mesh.mesh_values import Peer
from ranvier_py.core.mesh.transfer import End, Inquiry, Transfer, Walk
from ranvier_py.core.routing.peers.comparison import AnySums, Buckets, Comparison
from ranvier_py.core.routing.peers.route_messages import (
    SIDE_STATE,
    TABLES,
    Vector,
    unpack_buckets,
    unpack_rows,
)
from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.route_settings import RouteGossipCounters, RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.peers.route_updates import unpack_entries
from ranvier_py.core.routing.peers.side_state import SideTurns, SideWalk
from ranvier_py.core.routing.peers.table_copy import OwnSums
from ranvier_py.core.routing.peers.update_log import UpdateLogs

ALONE_S = 2.0
"""A node that finds no peer for this long counts as synced: there is nobody to copy from."""

JOIN_LIMIT_S = 30.0
"""A node that is refused for this long stops trying to join: route updates and repair will do."""

ROUND_S = (0.1, 0.3)
"""The pause between two rounds in which all peers were busy is random within these."""

SUMS_S = 5.0  # for the sums of a million rows on both sides, twice, and their turn in the budget

NEW_UPDATES_MAX = 4096
"""A peer with no more route updates than this that has not joined itself is as new as we are: updates will do."""

PULL_BYTES_PER_S = 4 * 1024 * 1024
"""What repair may move on average: a table of a million rows every 8 s."""

AUDIT_BUCKETS_MAX = 256
"""A periodic audit asks for at most this many of the buckets that differ, a sixteenth of a table: among a million
claims some hundred expire a second earlier on one side, at any time."""

QUIET_PER_S = 1.0
"""Route updates a second, of all nodes, up to which a cluster is quiet: more are on their way at any comparison."""

SOON_MORE = 2
"""Audits after a disturbance beyond log2(N): some are wasted on a peer that has nothing new."""

SOON_NODES = 16
"""In clusters larger than this the audits are slower in proportion, so that each node answers as many as before."""

MANY_BUCKETS = 2048
"""If more buckets differ, the whole table is asked for: one pass over it costs the peer the same."""


class Use(Enum):
    """What a pull is for."""

    JOIN = auto()
    REPAIR = auto()
    AUDIT = auto()
    SIDE_STATE = auto()


@dataclass(slots=True)
class RunningPull(Inquiry):
    """What is got from one peer now, and how far it has come."""

    use: Use = Use.REPAIR
    comparison: Comparison | None = None  # what is compared with the peer's sums; None: parts were asked for
    deadline: float = inf  # of the comparison
    numbers: dict[int, int] = field(default_factory=dict)  # of origins: all up to them is here at the end
    bytes: int = 0


class QuietAudits:
    """Audits beside the periodic ones, so that tables that stay different are found within a minute, where that costs
    nothing: while hardly any updates come, and after an audit that found tables far apart.

    It draws from a generator of its own, from which nothing else is drawn.
    """

    def __init__(self, settings: RouteGossipSettings, counters: RouteGossipCounters, rng: Random, now: float) -> None:
        self._settings, self._counters, self.rng = settings, counters, rng
        self._updates = 0
        self._looked_at = now
        self.at = now + settings.quiet_interval_s * rng.uniform(0.2, 1.0)

    @property
    def far(self) -> bool:
        return self._counters.audits_differing > 0

    def is_due(self, now: float) -> bool:
        """Whether to compare now; then again after the next interval."""
        updates, elapsed_s = self._counters.own + self._counters.received, now - self._looked_at
        is_quiet = updates - self._updates <= QUIET_PER_S * elapsed_s
        self._updates, self._looked_at = updates, now
        self.at = now + self._settings.quiet_interval_s * self.rng.uniform(0.8, 1.0)
        self.hurry(now)
        return is_quiet or self.far

    def hurry(self, now: float) -> None:
        if self.far:
            self.at = min(self.at, now + self._settings.far_interval_s * self.rng.uniform(0.8, 1.0))


class Pull:
    """Gets one thing after another of peers, and gives them the same: a `transfer.Feature`."""

    def __init__(
        self,
        logs: UpdateLogs,
        outbox: RouteOutbox,
        sync: RouteSync,
        missed: Callable[[int, float], None],
        rng: Random,
        now: float,
    ) -> None:
        self.synced = False
        self._settings = outbox.settings
        self._counters = outbox.counters
        self._logs = logs
        self._outbox = outbox
        self.transfer = Transfer(TABLES, self, outbox.outbox, outbox.bulk)
        self._sync = sync
        self.own_sums = OwnSums(sync.copy)
        self._missed = missed
        self._rng = rng
        self._running: RunningPull | None = None
        self._request = rng.getrandbits(32)
        self._not_before = now
        self._tried: dict[int, bool] = {}  # peers asked in this round of joining -> whether that peer is new, too
        self._round_at = now
        self._alone_until = now + ALONE_S
        self._give_up_at = inf
        self._audit_at = now + self._settings.audit_interval_s * rng.uniform(0.2, 1.0)
        self._quiet = QuietAudits(self._settings, self._counters, Random(self._request), now)  # noqa: S311  # for times alone
        self._soon = 0  # audits still to come because of a disturbance
        self._side = SideTurns()
        self._others = 0  # live nodes beside us
        self._met_nobody = False  # we count as synced because there was no peer

    @property
    def wake_at(self) -> float:
        running = self._running
        if running is not None:
            return min(running.deadline, running.comparison.wake_at) if running.comparison is not None else inf
        if self.synced:
            return min(self._audit_at, self._quiet.at, self._side.at) if self._outbox.order else inf
        return self._round_at if self._outbox.order else self._alone_until

    def meet(self, others: int, now: float) -> None:
        """React to a change of the live peers. `others`: how many live nodes there are beside us."""
        peers, self._others = self._outbox.peers, others
        if self._running is not None and self._running.comparison and self._running.peer.session not in peers:
            self._break_off(self._running, now)
        if self._met_nobody and peers:
            self._met_nobody = False
            self.disturbed(now)

    def disturbed(self, now: float) -> None:
        """Schedule audits soon, and ask for side state: a node may have what others lack, and no log shows it, such as
        routes of one that died before it sent them to the others. After about log2(N) audits they are everywhere."""
        self._soon = SOON_MORE + self._others.bit_length()
        self._audit_at = min(self._audit_at, now + self._soon_s())
        self._side.want(now + self._settings.soon_interval_s)

    def _soon_s(self) -> float:
        return self._settings.soon_interval_s * self._rng.uniform(0.5, 1.5) * max(1.0, self._others / SOON_NODES)

    def tick(self, now: float) -> None:
        """Do what is due: at most one step of 2 ms."""
        running = self._running
        if running is None:
            if not self.synced:
                self._join(now)
            elif now >= self._side.at and self._outbox.order:
                peer = self._side.next_peer(self._outbox.order, self._rng)
                self._ask(self._begin(Use.SIDE_STATE, peer), SIDE_STATE, now)
            elif now >= self._audit_at:
                self.audit(now)
            elif now >= self._quiet.at and self._quiet.is_due(now) and now >= self._not_before and self._outbox.order:
                self._compare(Use.AUDIT, self._quiet.rng.choice(self._outbox.order), now)
        elif running.comparison is not None and now >= running.deadline:
            self._break_off(running, now)
        elif running.comparison is not None:
            running.comparison.tick(now)

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
            running = self._begin(Use.JOIN, self._rng.choice(candidates))
            self._outbox.send(running.peer, Vector((), reply=True), now)
            self._ask(running, b"", now)
        elif all(self._tried.get(peer.session) for peer in order) or now >= self._give_up_at:
            self.synced = True
            self.disturbed(now)
        else:
            self._tried.clear()
            self._round_at = now + self._rng.uniform(*ROUND_S)

    def vector(self, peer: Peer, message: Vector) -> None:
        """Take the vector of the peer that we join from: after its last chunk all that it lists will be here."""
        running = self._with(peer)
        if running is None or running.use is not Use.JOIN or running.parts or running.numbers:
            return
        if not message.reply:
            running.numbers = dict(message.entries)

    # --- repair -----------------------------------------------------------------------------------------------------

    def reset(self, peer: Peer, origin: int, base: int, now: float) -> None:
        """Compare tables with a peer: it has route updates that we lack, and they can't be had from any log."""
        running = self._with(peer)
        if running is not None and running.comparison is not None and running.comparison.own is None:
            running.use = Use.REPAIR  # an audit may leave out buckets that differ
            running.numbers[origin] = max(base, running.numbers.get(origin, 0))
        elif self._running is not None or not self.synced or now < self._not_before:
            self._counters.resets_deferred += 1
        else:
            self._compare(Use.REPAIR, peer, now).numbers[origin] = base

    def audit(self, now: float) -> None:
        """Compare tables with a random peer, and schedule the next audit."""
        wait_s = self._settings.audit_interval_s * self._rng.uniform(0.8, 1.2)
        if self._soon:
            wait_s = min(wait_s, self._soon_s())
        self._audit_at = max(now + wait_s, self._not_before)
        if self._outbox.order and now >= self._not_before:
            self._compare(Use.AUDIT, self._rng.choice(self._outbox.order), now)

    def _compare(self, use: Use, peer: Peer, now: float) -> RunningPull:
        running = self._begin(use, peer)
        running.deadline = now + SUMS_S
        self._request = (self._request + 1) & 0xFFFFFFFF
        running.comparison = Comparison(self._outbox, self.own_sums, peer, self._request, now)
        return running

    def sums(self, peer: Peer, message: AnySums, now: float) -> None:
        """Take the peer's sums, and ask for the buckets that differ. Sums of an earlier comparison don't count."""
        running = self._with(peer)
        if running is None or running.comparison is None:
            return
        differing = running.comparison.receive(message, now)
        if differing is None:
            return
        self._counters.differing_buckets = len(differing)
        if running.use is Use.AUDIT:
            far = len(differing) > AUDIT_BUCKETS_MAX
            self._counters.audits_differing = self._counters.audits_differing + 1 if far else 0
            self._quiet.hurry(now)
        if len(differing):
            self._ask(running, self._chosen(running.use, differing), now)
        else:
            self._done(running, now)

    def differs(self, peer: Peer, differing: Buckets, now: float) -> None:
        """Ask back: a peer that compares with us was sent our sums, and may have rows that we lack.

        Never for the whole table: if nearly all buckets differ, one of the two is new, or a Reset made it compare.
        """
        if self._running is None and self.synced and now >= self._not_before:
            self._counters.differing_buckets = len(differing)
            buckets = self._chosen(Use.AUDIT, differing)
            if buckets:
                self._ask(self._begin(Use.AUDIT, peer), buckets, now)

    def _chosen(self, use: Use, differing: Buckets) -> bytes:
        """Return the buckets to ask for, u16 each; empty for the whole table, or if no bucket differs."""
        if use is Use.AUDIT and not self._soon and len(differing) > AUDIT_BUCKETS_MAX:
            differing = differing[self._rng.sample(range(len(differing)), AUDIT_BUCKETS_MAX)]
        return differing.astype("<u2").tobytes() if len(differing) <= MANY_BUCKETS else b""

    # --- parts ------------------------------------------------------------------------------------------------------

    def begin(self, peer: Peer, subject: bytes, now: float) -> Walk | End:  # noqa: ARG002  # as of all features
        """Begin what a peer wants: our table, rows of it, or side state. A node that has not joined refuses."""
        if not self.synced:
            return End.BUSY
        return SideWalk(self._sync) if subject == SIDE_STATE else self._sync.copy.rows(unpack_buckets(subject), now)

    def take(self, running: RunningPull, data: bytes, now: float) -> None:
        """Merge a part at once, in at most 2 ms. Its ages count from when it was asked for."""
        running.bytes += len(data)
        if running.use is Use.SIDE_STATE:
            self._sync.take_side_state([update for _, update in unpack_entries(data)], running.asked_at, now)
        else:
            self._counters.pulled_rows += self._sync.copy.merge(unpack_rows(data), running.asked_at, now)

    def over(self, running: RunningPull, end: End, now: float) -> None:
        if end is End.WHOLE:
            self._done(running, now)
        else:
            self._break_off(running, now)

    # --- beginnings and ends ----------------------------------------------------------------------------------------

    def _begin(self, use: Use, peer: Peer) -> RunningPull:
        self._running = RunningPull(peer, use=use)
        return self._running

    def _ask(self, running: RunningPull, subject: bytes, now: float) -> None:
        running.comparison, running.subject = None, subject
        self.transfer.ask(running, now)

    def _with(self, peer: Peer) -> RunningPull | None:
        """Return what is got from this peer now, if anything."""
        running = self._running
        return running if running is not None and running.peer.session == peer.session else None

    def _break_off(self, running: RunningPull, now: float) -> None:
        self._running = None
        if running.use is Use.JOIN:
            numbers = running.numbers
            self._tried[running.peer.session] = bool(numbers) and sum(numbers.values()) <= NEW_UPDATES_MAX
            return
        self._counters.given_up += 1
        if running.use is Use.SIDE_STATE:
            self._side.failed(now)
        else:
            self._not_before = now + self._rng.uniform(*ROUND_S)

    def _done(self, running: RunningPull, now: float) -> None:
        """All parts are merged: adopt the numbers of what the peer had when it began, and go on from there."""
        self._running = None
        if running.use is Use.SIDE_STATE:
            self._side.came(now)
            return
        adopted = [
            self._logs.open(origin, now) and self._logs.adopt(origin, number)
            for origin, number in running.numbers.items()
        ]
        if any(adopted) or running.use is Use.JOIN:
            self._side.want(now)
        if running.use is Use.JOIN:
            self._counters.joins += 1
            self.synced = True
            self.disturbed(now)
        else:
            is_audit = running.use is Use.AUDIT
            self._counters.repairs += not is_audit
            self._counters.audits += is_audit
            self._soon = max(0, self._soon - is_audit)
            self._not_before = now + running.bytes / PULL_BYTES_PER_S
        if running.numbers:  # route updates go on after the numbers that were adopted
            self._missed(running.peer.session, now)
