"""Route gossip: what one node learns, all nodes hear. Composes the parts, and hears what peers tell.

    log, vector     route updates of every origin, numbered; what is here of each
    eager           what is new goes out within a tick
    repair          digests, vectors, pieces of logs for who missed something
    pull, snapshot source     whole tables, for who joins or missed too much
    route_post      the live peers, and budgets in bytes

Rules: route updates of an origin are heard in the order of their numbers, each once; a batch that does not join is
dropped, and its sender is asked. What one peer may bring of new route updates is limited to INTAKE_SHARES fair shares.
Route updates point to backends, not to the node that taught them: when it dies they stay, and still spread. Nobody
waits for anything here. Invariant: everything is bounded by the live peers and by `route_settings`; `statistics` counts
what was dropped. Cost: 2 us to announce; 2 us for each route update heard, plus 5 us of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from ranvier_py.core.gossip.gossip_values import Outgoing, Peer
from ranvier_py.core.gossip.replication.budget import Window
from ranvier_py.core.gossip.replication.comparison import Comparison
from ranvier_py.core.gossip.replication.eager_push import Eager
from ranvier_py.core.gossip.replication.own_sums import OwnSums
from ranvier_py.core.gossip.replication.pull import Pull
from ranvier_py.core.gossip.replication.repair import Repair
from ranvier_py.core.gossip.replication.route_outbox import RoutePost
from ranvier_py.core.gossip.replication.route_settings import RouteGossipSettings
from ranvier_py.core.gossip.replication.route_store import RouteMemory
from ranvier_py.core.gossip.replication.route_updates import ROUTE_UPDATE_BYTES_MAX
from ranvier_py.core.gossip.replication.snapshot_source import SnapshotSource
from ranvier_py.core.gossip.replication.update_batches import rows_of
from ranvier_py.core.gossip.replication.update_log import BATCH_ENTRIES_MAX, Kept, Logs, fits
from ranvier_py.core.gossip.wire.messages import (
    SHORT_SUMS_VERSION,
    Busy,
    Digest,
    Entry,
    Message,
    PartSums,
    Reset,
    RouteUpdates,
    Rows,
    RowsWanted,
    Sums,
    TotalSum,
    Vector,
)
from ranvier_py.core.histogram import LATENCY_BUCKETS_S, Histogram

ROUTE_MESSAGES = (RouteUpdates, Digest, Vector, Reset, Sums, TotalSum, PartSums, RowsWanted, Rows, Busy)
"""What `RouteGossip.receive` takes."""

INTAKE_SHARES = 4
"""One peer may bring so many times the fair share of new route updates: load is uneven, but nobody may fill all
tables."""

HEARD_AT_ONCE_MAX = BATCH_ENTRIES_MAX
"""Route updates of one message that are heard, 1 ms. Nobody of ours sends more; what is beyond is asked for again."""

ROWS_AT_ONCE_MAX = 1024
"""The same of rows in update batches, 2 ms: more than fit in one message of ours."""

PRUNE_INTERVAL_S = 1.0
GONE_MAX = 1024  # who went before so many others is taken for new if it comes back

ORIGIN_ASK_INTERVAL_S, ORIGIN_ANSWER_S = 5.0, 1.0
"""An origin whose route updates somebody else can't give is asked itself, so often at most; without an answer in this
time tables are compared."""


@dataclass(frozen=True, slots=True)
class RouteGossipStatistics:
    """Gauges (`synced` … `transfers`) and counters since the start (the others)."""

    synced: bool
    origins: int
    logged: int  # route updates in the logs
    own: int  # route updates announced since the start
    lazy_peers: int
    transfers: int  # running
    differing_buckets: int  # of 4096, at the last comparison: how far two nodes are apart
    heard: int  # route updates that were new by their number
    news: int  # of these, route updates that brought new rows
    duplicates: int  # route updates that were known
    gaps: int  # batches that did not join
    limited: int  # route updates beyond what a peer may bring
    expired: int  # route updates that came without life
    poison: int  # route updates too large to be told
    strangers: int  # messages of sessions that are no live peers
    foreign: int  # digests of another schema
    unwanted_origins: int  # batches of origins that are forgotten, or too many
    pushed: int  # batches
    relayed: int  # batches of other origins
    held_back: int  # times that a peer had no room for what is new
    over_budget: int  # letters not sent
    mismatches: int  # digests that found a difference
    resets_sent: int
    resets_heard: int
    resets_deferred: int
    trimmed: int  # route updates that left the log before they expired
    joins: int
    repairs: int  # tables compared after a log was trimmed
    audits: int  # tables compared for no reason
    given_up: int  # pulls that broke off
    stray_chunks: int
    pulled_rows: int
    chunks_sent: int
    chunks_resent: int
    refused: int  # requests answered with Busy
    broken_transfers: int
    sent_bytes: int  # all but rows
    sent_rows_bytes: int


class RouteGossip:
    """The routes' part of gossip. Times are seconds of one monotonic clock.

    `round_trip_s` tells the last known round trip to a session, for the lag; 0 = not known. `version_of` tells which
    version of the protocol can be spoken to a session.
    `lag` is how long route updates took from being learned anywhere to being heard here: the times that all their
    senders held them, and half a round trip for the last hop.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        session: int,
        memory: RouteMemory,
        settings: RouteGossipSettings,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        round_trip_s: Callable[[int], float] | None = None,
        version_of: Callable[[int], int] = lambda _: SHORT_SUMS_VERSION,
    ) -> None:
        self.lag = Histogram(LATENCY_BUCKETS_S)
        self._memory = memory
        self._settings = settings
        self._round_trip_s = round_trip_s
        self._logs = Logs(
            session, entries_max=settings.log_entries_max, ttl_s=settings.ttl_s, forget_after_s=settings.forget_after_s
        )
        self._post = RoutePost(session, settings, outbox)
        self._eager = Eager(self._logs, self._post, settings.tick_s)
        self._repair = Repair(self._logs, self._post, self._eager, settings, rng, now)
        sums = OwnSums(memory)
        comparison = Comparison(self._post, sums, version_of)
        self._pull = Pull(self._logs, self._post, memory, comparison, self._repair.missed, rng, now)
        self._pull.audit_every(settings.audit_interval_s, settings.soon_interval_s, now)
        self._snapshot_source = SnapshotSource(self._post, memory, sums, self._pull.differs)
        self._members: Sequence[int] = ()
        self._gone: dict[int, None] = {}  # peers that went, in that order
        self._intake: dict[int, Window] = {}
        self._origin_asked_at: dict[int, float] = {}
        self._prune_at = now + PRUNE_INTERVAL_S
        self._heard = self._news = self._duplicates = self._gaps = self._limited = 0
        self._expired = self._poison = self._strangers = self._unwanted_origins = self._resets = 0

    # --- what the owner says ----------------------------------------------------------------------------------------

    def announce(self, route_update: bytes, at: float) -> None:
        """Something was learned here, by evidence of that time. O(1): it is told with the next tick."""
        if not 0 < len(route_update) <= ROUTE_UPDATE_BYTES_MAX:
            self._poison += 1
            return
        self._logs.append(route_update, at)
        self._eager.learned()

    def peers(self, live: Sequence[Peer], now: float, members: Sequence[int] = ()) -> None:
        """These are the live peers of our schema now. All that is kept for others goes.

        `members`: sessions of further live members, of whose route updates we hear through the peers.
        """
        others = [peer for peer in live if peer.session != self._logs.session]
        if members is self._members and others == list(self._post.order):
            return
        before = self._post.peers
        self._post.meet(others, len(members))
        sessions = list(self._post.peers)
        self._members = members
        everybody = dict.fromkeys((*sessions, *members))
        self._logs.present(list(everybody), now)
        self._eager.meet()
        self._repair.meet()
        self._snapshot_source.meet()
        self._pull.meet(len(everybody), now)
        if self._has_moved(before, everybody):
            self._pull.disturbed(now)
        share = self._settings.intake_per_s // max(1, self._settings.fan_out if self._post.relays else len(sessions))
        self._intake = {session: self._intake.get(session) or Window(0) for session in sessions}
        for window in self._intake.values():
            window.per_s = INTAKE_SHARES * max(1, share)
        self._origin_asked_at = {key: at for key, at in self._origin_asked_at.items() if key in self._post.peers}

    def _has_moved(self, before: Mapping[int, Peer], now_there: Mapping[int, None]) -> bool:
        """Whether somebody went, or who had gone is back. A newcomer has nothing that others lack."""
        gone = self._gone
        back = [session for session in gone if session in now_there]
        for session in back:
            del gone[session]
        went = [session for session in before if session not in now_there]
        for session in went:
            gone[session] = None
        while len(gone) > GONE_MAX:
            del gone[next(iter(gone))]
        return bool(back or went)

    def compare_soon(self, now: float) -> None:
        """The table may lack what the logs say it has."""
        self._pull.disturbed(now)

    def forget(self, session: int, now: float) -> None:
        """A member is gone for good. What it taught stays until it expires."""
        if session in self._post.peers:
            others = [member for member in self._members if member != session]
            self.peers([peer for peer in self._post.order if peer.session != session], now, others)

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick` is wanted next. Any call may bring it nearer."""
        repair_at = self._repair.wake_at if self._pull.synced else inf  # `tick` leaves it alone until then
        return min(self._eager.wake_at, repair_at, self._pull.wake_at, self._snapshot_source.wake_at, self._prune_at)

    def tick(self, now: float) -> None:
        """Do what is due; of long work one step of about 2 ms."""
        self._eager.tick(now)
        if self._pull.synced:
            self._repair.tick(now)
        self._pull.tick(now)
        self._snapshot_source.tick(now)
        if now >= self._prune_at and self._logs.prune(now):
            self._prune_at = now + PRUNE_INTERVAL_S

    # --- what peers say ---------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """One of ROUTE_MESSAGES, from a live peer. Takes at most about 2 ms."""
        if peer.session not in self._post.peers:
            self._strangers += 1
        elif isinstance(message, RouteUpdates):
            self._hear(peer, message, now)
        elif isinstance(message, Rows):
            self._pull.take(peer, message, now)
        elif isinstance(message, Digest):
            if self._pull.synced:
                self._repair.digest(peer, message, now)
        elif isinstance(message, Vector):
            self._pull.vector(peer, message)
            self._repair.vector(peer, message, now)
        elif isinstance(message, Reset):
            self._reset(peer, message, now)
        elif isinstance(message, Sums | TotalSum | PartSums):
            self._snapshot_source.sums(peer, message, now)
            self._pull.sums(peer, message, now)
        elif isinstance(message, RowsWanted):
            self._snapshot_source.wanted(peer, message, now, serving=self._pull.synced)
        elif isinstance(message, Busy):
            self._pull.busy(peer, message, now)

    def _hear(self, peer: Peer, message: RouteUpdates, now: float) -> None:
        """Hear what joins and was not known; keep it for those who miss it."""
        origin, after, entries, held_ms = message
        origin = origin or peer.session
        number = self._logs.vector[origin]
        if after + len(entries) <= number or origin == self._logs.session:
            self._duplicates += len(entries)
            return
        if not self._logs.open(origin, now):
            self._unwanted_origins += 1
            return
        if after > number:
            self._gaps += 1
            if self._pull.synced:
                self._repair.missed(peer.session, now)
            return
        self._duplicates += number - after
        fresh = entries[number - after :]
        window = self._intake[peer.session]
        taken, rows = within(fresh, min(ROWS_AT_ONCE_MAX, window.room(now)))
        self._limited += len(fresh) - len(taken)
        if not taken:
            return
        window.spend(rows, now)
        link_s = self._round_trip_s(peer.session) / 2 if self._round_trip_s else 0.0
        newest_s = entries[-1].age_s
        kept: list[Kept] = []
        for age_s, route_update in taken:
            lag_s = held_ms / 1000 + link_s + max(0, age_s - newest_s)
            kept.append(Kept(fits(route_update), now - age_s, now - lag_s))
            self._hear_one(route_update, age_s, lag_s, now)
        self._logs.extend(origin, kept)
        self._eager.heard(origin, number, peer.session)

    def _hear_one(self, route_update: bytes, age_s: int, lag_s: float, now: float) -> None:
        if len(route_update) > ROUTE_UPDATE_BYTES_MAX:
            self._poison += 1
        elif not route_update or age_s >= self._settings.ttl_s:
            self._expired += 1
        else:
            self._heard += 1
            self._news += self._memory.hear(route_update, age_s, now)
            self.lag.observe(lag_s)

    def _reset(self, peer: Peer, message: Reset, now: float) -> None:
        """A peer can't give us route updates of an origin. The origin may; else tables tell."""
        origin, base = message
        self._resets += 1
        if origin == self._logs.session or base <= self._logs.vector[origin] or not self._logs.open(origin, now):
            return
        asked_s = now - self._origin_asked_at.get(origin, -inf)
        if origin == peer.session or origin not in self._post.peers:
            self._pull.reset(peer, origin, base, now)
        elif asked_s > ORIGIN_ASK_INTERVAL_S:
            self._origin_asked_at[origin] = now
            self._repair.missed(origin, now)
        elif asked_s > ORIGIN_ANSWER_S:
            self._pull.reset(peer, origin, base, now)

    # --- what it shows ----------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether this node has joined: it has a peer's table, or there was nobody to ask."""
        return self._pull.synced

    def vector(self) -> dict[int, int]:
        """For each origin the number up to which everything is here."""
        return dict(self._logs.vector.items())

    def statistics(self) -> RouteGossipStatistics:
        logs, post, eager, repair = self._logs, self._post, self._eager, self._repair
        pull, snapshot_source = self._pull, self._snapshot_source
        return RouteGossipStatistics(
            synced=pull.synced,
            origins=len(logs.vector),
            logged=len(logs),
            own=logs.own,
            lazy_peers=len(eager.lazy),
            transfers=snapshot_source.running(),
            heard=self._heard,
            news=self._news,
            duplicates=self._duplicates,
            gaps=self._gaps,
            limited=self._limited,
            expired=self._expired,
            poison=self._poison,
            strangers=self._strangers,
            foreign=repair.foreign,
            unwanted_origins=self._unwanted_origins,
            pushed=eager.pushed,
            relayed=eager.relayed,
            held_back=eager.held_back,
            over_budget=post.over_budget,
            mismatches=repair.mismatches,
            resets_sent=repair.resets,
            resets_heard=self._resets,
            resets_deferred=pull.deferred,
            trimmed=logs.trimmed,
            joins=pull.joins,
            repairs=pull.repairs,
            audits=pull.audits,
            differing_buckets=pull.differing,
            given_up=pull.given_up,
            stray_chunks=pull.stray_chunks,
            pulled_rows=pull.rows,
            chunks_sent=snapshot_source.chunks,
            chunks_resent=snapshot_source.resent,
            refused=snapshot_source.refused,
            broken_transfers=snapshot_source.broken,
            sent_bytes=post.sent_bytes,
            sent_rows_bytes=post.sent_rows_bytes,
        )


def within(entries: Sequence[Entry], rows_max: int) -> tuple[Sequence[Entry], int]:
    """The first route updates that tell no more than so many rows, and how many they tell."""
    rows = 0
    for count, entry in enumerate(entries):
        more = rows_of(entry.route_update)
        if rows + more > rows_max or count >= HEARD_AT_ONCE_MAX:
            return entries[:count], rows
        rows += more
    return entries, rows
