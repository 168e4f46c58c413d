"""Route gossip: what one node learns, all nodes receive. `RouteGossip` composes the parts and takes what peers send.

Rule: updates of an origin are taken in the order of their numbers, each once. A batch that leaves a gap is dropped,
and its sender is asked. One peer may bring new rows up to INTAKE_SHARES fair shares. Routes point to backends: when
the node that served them dies they stay, and still spread.
Invariant: updates in any order, doubled or late, give the same table, and the live peers and `route_settings` bound
everything (test_route_gossip_spread.py, test_route_gossip.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any

from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.machine import Machine, Senders
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.transfer import Transfer
from ranvier_py.core.mesh.wire.messages import Message
from ranvier_py.core.metrics import LATENCY_BUCKETS_S, Histogram
from ranvier_py.core.routing.peers.comparison import SumsSource
from ranvier_py.core.routing.peers.eager_push import EagerPush
from ranvier_py.core.routing.peers.pull import Pull
from ranvier_py.core.routing.peers.repair import Repair
from ranvier_py.core.routing.peers.route_messages import (
    KINDS,
    Digest,
    PartSums,
    Reset,
    RouteUpdates,
    TotalSum,
    Vector,
)
from ranvier_py.core.routing.peers.route_outbox import RouteOutbox
from ranvier_py.core.routing.peers.route_settings import RouteGossipCounters, RouteGossipSettings
from ranvier_py.core.routing.peers.route_sync import RouteSync
from ranvier_py.core.routing.peers.route_updates import ROUTE_UPDATE_BYTES_MAX, Entry, row_count
from ranvier_py.core.routing.peers.update_log import BATCH_ENTRIES_MAX, LoggedUpdate, UpdateLogs, fits

INTAKE_SHARES = 4
"""One peer may bring this many fair shares of new rows: load is uneven, but no peer may fill all tables."""

TAKEN_AT_ONCE_MAX = BATCH_ENTRIES_MAX
"""Updates taken of one message. No node of ours sends more; those beyond it are asked for again."""

ROWS_AT_ONCE_MAX = 1024
"""Rows taken of one message, a few milliseconds' work: more than fit in one message of ours."""

PRUNE_INTERVAL_S = 1.0

ORIGIN_ASK_INTERVAL_S, ORIGIN_ANSWER_S = 5.0, 1.0
"""If a peer can't give an origin's updates, the origin itself is asked, at most once in ORIGIN_ASK_INTERVAL_S; without
an answer within ORIGIN_ANSWER_S tables are compared."""


class RouteGossip(Machine):
    """Replicates routes among nodes. Times are seconds of one monotonic clock.

    `round_trip_s` gives the mean round trip to a session, for the lag; 0 = not known. `lag` is the time from where an
    update was made to its receipt here: how long each of its senders held it, plus half a round trip for the last hop.
    """

    kinds = KINDS
    senders = Senders.SHARING

    def __init__(
        self,
        session: int,
        sync: RouteSync,
        settings: RouteGossipSettings,
        outbox: list[Outgoing],
        rng: Random,
        now: float,
        *,
        round_trip_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self.lag = Histogram(LATENCY_BUCKETS_S)
        self._sync = sync
        self._round_trip_s = round_trip_s
        self._outbox = RouteOutbox(session, settings, outbox)
        self._logs = UpdateLogs(session, settings, self._outbox.counters)
        self._eager = EagerPush(self._logs, self._outbox, settings.tick_s)
        self._repair = Repair(self._logs, self._outbox, self._eager, rng, now)
        self._pull = Pull(self._logs, self._outbox, sync, self._repair.missed, rng, now)
        self._sums = SumsSource(self._outbox, self._pull.own_sums, self._pull.differs)
        self._members: Sequence[int] = ()
        self._met: Mapping[int, None] = {}  # live sessions at the last call of `met`: peers and other members
        self._intake: dict[int, Window] = {}
        self._origin_asked_at: dict[int, float] = {}
        self._prune_at = now + PRUNE_INTERVAL_S

    @property
    def transfer(self) -> Transfer:
        return self._pull.transfer

    # --- what the owner asks ----------------------------------------------------------------------------------------

    def announce(self, route_update: bytes, at: float) -> None:
        """Log a route update of this node, with the time of its evidence. O(1): it is sent with the next tick."""
        if not 0 < len(route_update) <= ROUTE_UPDATE_BYTES_MAX:
            self._outbox.counters.oversized += 1
            return
        self._logs.append(route_update, at)
        self._eager.learned()

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers of our schema. Updates of live members that are no peers come through the peers."""
        self._meet(peers.sharing, peers.sessions, now)

    def _meet(self, live: Sequence[Peer], members: Sequence[int], now: float) -> None:
        """Set the live peers and the sessions of all live members, and drop what is kept for others."""
        others = [peer for peer in live if peer.session != self._logs.session]
        if members is self._members and others == list(self._outbox.order):
            return
        self._outbox.meet(others, len(members))
        sessions = list(self._outbox.peers)
        self._members = members
        everybody = dict.fromkeys((*sessions, *members))
        self._logs.present(list(everybody), now)
        self._eager.meet()
        self._repair.meet()
        self._sums.meet()
        self._pull.meet(len(everybody), now)
        self.transfer.meet(others, now)
        if everybody.keys() != self._met.keys():
            self.compare_soon(now)  # a member that comes may have been behind a cut, with rows of its own
        self._met = everybody
        settings = self._outbox.settings
        share = settings.intake_per_s // max(1, settings.fan_out if self._outbox.relays else len(sessions))
        self._intake = {session: self._intake.get(session) or Window(0) for session in sessions}
        for window in self._intake.values():
            window.per_s = INTAKE_SHARES * max(1, share)
        self._origin_asked_at = {key: at for key, at in self._origin_asked_at.items() if key in self._outbox.peers}

    def compare_soon(self, now: float) -> None:
        """Schedule audits soon: the table may lack routes whose updates the logs count as taken."""
        self._pull.disturbed(now)

    def compare_now(self, now: float) -> None:
        """Compare tables with a random peer now."""
        self._pull.audit(now)

    def room(self, now: float) -> int:
        """Return how many bytes of this node's budget are left beside routes now."""
        return self._outbox.node_room(now)

    def forgotten(self, session: int, now: float) -> None:
        """Drop a member that is gone for good from the peers. What it sent stays until it expires."""
        if session in self._outbox.peers:
            others = [member for member in self._members if member != session]
            self._meet([peer for peer in self._outbox.order if peer.session != session], others, now)

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float:
        """When `tick` must be called next. Any call may bring it nearer."""
        repair_at = self._repair.wake_at if self._pull.synced else inf  # `tick` does not tick it before
        return min(self._eager.wake_at, repair_at, self._pull.wake_at, self._sums.wake_at, self._prune_at)

    def tick(self, now: float) -> None:
        """Do what is due. Long work goes on by one step of about 2 ms."""
        self._eager.tick(now)
        if self._pull.synced:
            self._repair.tick(now)
        self._pull.tick(now)
        self._sums.tick(now)
        if now >= self._prune_at and self._logs.prune(now):
            self._prune_at = now + PRUNE_INTERVAL_S

    # --- what peers send --------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """Take a message about routes or rows, in a few milliseconds at most. Those of strangers are dropped."""
        if peer.session not in self._outbox.peers:
            self._outbox.counters.strangers += 1
        elif isinstance(message, RouteUpdates):
            self._take(peer, message, now)
        elif isinstance(message, Digest):
            if self._pull.synced:
                self._repair.digest(peer, message, now)
        elif isinstance(message, Vector):
            self._pull.vector(peer, message)
            self._repair.vector(peer, message, now)
        elif isinstance(message, Reset):
            self._reset(peer, message, now)
        elif isinstance(message, TotalSum | PartSums):
            self._sums.receive(peer, message, now)
            self._pull.sums(peer, message, now)

    def _take(self, peer: Peer, message: RouteUpdates, now: float) -> None:
        """Learn the unknown updates of a batch that leaves no gap, and log them for peers that miss them."""
        origin, after, entries, held_ms = message
        origin = origin or peer.session
        counters, number = self._outbox.counters, self._logs.vector[origin]
        if after + len(entries) <= number or origin == self._logs.session:
            counters.duplicates += len(entries)
            return
        if not self._logs.open(origin, now):
            counters.unwanted_origins += 1
            return
        if after > number:
            counters.gaps += 1
            if self._pull.synced:
                self._repair.missed(peer.session, now)
            return
        counters.duplicates += number - after
        fresh = entries[number - after :]
        window = self._intake[peer.session]
        taken, rows = within(fresh, min(ROWS_AT_ONCE_MAX, window.room(now)))
        counters.limited += len(fresh) - len(taken)
        if not taken:
            return
        window.spend(rows, now)
        link_s = self._round_trip_s(peer.session) / 2
        newest_s = entries[-1].age_s
        logged: list[LoggedUpdate] = []
        learned: list[Entry] = []
        for age_s, update in taken:
            lag_s = held_ms / 1000 + link_s + max(0, age_s - newest_s)
            logged.append(LoggedUpdate(fits(update), now - age_s, now - lag_s))
            if len(update) > ROUTE_UPDATE_BYTES_MAX:
                counters.oversized += 1
            elif not update or age_s >= self._outbox.settings.ttl_s:
                counters.expired += 1
            else:
                learned.append(Entry(age_s, update))
                self.lag.observe(lag_s)
        counters.received += len(learned)
        counters.new += self._sync.receive(learned, now)
        self._logs.extend(origin, logged)
        if self._outbox.relays:
            self._eager.received(origin, number, peer.session)

    def _reset(self, peer: Peer, message: Reset, now: float) -> None:
        """A peer can't give us updates of an origin: ask the origin if it is a peer, else compare tables."""
        origin, base = message
        self._outbox.counters.resets_received += 1
        if origin == self._logs.session or base <= self._logs.vector[origin] or not self._logs.open(origin, now):
            return
        asked_s = now - self._origin_asked_at.get(origin, -inf)
        if origin == peer.session or origin not in self._outbox.peers:
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
        """Return for each origin the number up to which all its updates are here."""
        return dict(self._logs.vector.items())

    @property
    def counters(self) -> RouteGossipCounters:
        """The counters, with the gauges as they are now."""
        counters, logs = self._outbox.counters, self._logs
        counters.synced = self._pull.synced
        counters.origins, counters.logged, counters.own = len(logs.vector), len(logs), logs.own
        counters.lazy_peers = len(self._eager.lazy)
        return counters

    def counted(self) -> Mapping[str, Any]:
        return {"gossip_routes": self.counters, "gossip_route_sync": self._sync.counters}


def within(entries: Sequence[Entry], rows_max: int) -> tuple[Sequence[Entry], int]:
    """Return the first updates with at most `rows_max` rows, no more than TAKEN_AT_ONCE_MAX, and their row count."""
    rows = 0
    for count, entry in enumerate(entries):
        more = row_count(entry.route_update)
        if rows + more > rows_max or count >= TAKEN_AT_ONCE_MAX:
            return entries[:count], rows
        rows += more
    return entries, rows
