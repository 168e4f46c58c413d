"""What counters of many keys and tenants cost one of several nodes, in memory and in bytes to each of its peers.

The node reserves and settles requests of random keys; what its peers send of theirs is made here, as they would send
it. Each key has a limit of tokens a minute, each tenant one and a budget of a month. Time is virtual.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from random import Random

from ranvier_py.core.access.limit_values import Budget, CalendarWindow, Limits
from ranvier_py.core.access.limits.count import SLOT_S, CountRow
from ranvier_py.core.access.limits.limit_gossip import BYTES_PER_S, COUNTED, ROW_BYTES, LimitCounts, LimitGossip
from ranvier_py.core.access.limits.limiter import Grant
from ranvier_py.core.access.limits.meter_groups import MeterGroup
from ranvier_py.core.access.limits.meters import Amounts, LimitSpan, Meter, meters_of, window_at
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer

KEYS, TENANTS, NODES = 50_000, 2_000, 16
STEP_S, RUN_S, SENT_FROM_S = 0.1, 180.0, 120.0
SENT_AT_ONCE = round(BYTES_PER_S * STEP_S / ROW_BYTES)
WALL = 1_795_262_400.0
MONTH = Limits(tokens_per_minute=10_000_000, budget=(Budget(1e12, CalendarWindow.MONTH),))
MINUTE = Limits(tokens_per_minute=1_000_000)


class Scale:
    """One node among NODES, each of which serves so many requests a second."""

    def __init__(self, per_s: float, seed: int) -> None:
        self.per_s, self.rng, self.now = per_s, Random(seed), 1000.0
        self.outbox: list[Outgoing] = []
        self.gossip = LimitGossip(1, self.outbox, self.rng, self.now)
        self.limiter = self.gossip.begin()
        self.gossip.counts.wall_offset_s = WALL - self.now
        self.peers = [Peer(session, ("10.0.0.1", session)) for session in range(2, NODES + 1)]
        self.groups: dict[int, MeterGroup] = {}
        self.tenants = [tuple(meters_of(f"tenant {one}", MONTH, str(one))) for one in range(TENANTS)]
        self.sent_bytes = 0

    def go(self) -> Mapping[str, float]:
        gc.collect()
        before = resident()
        sessions = [peer.session for peer in self.peers]
        self.gossip.met(LivePeers(self.peers, self.peers, self.peers, sessions, sessions), self.now)
        end, sent_from = self.now + RUN_S, self.now + SENT_FROM_S
        while self.now < end:
            self.now += STEP_S
            for peer in self.peers:
                self.gossip.receive(peer, LimitCounts(self.theirs(peer.session)), self.now)
            for _ in range(self.number()):
                self.serve()
            self.gossip.tick(self.now)
            self.send(counted=self.now >= sent_from)
        gc.collect()
        counts = self.gossip.counts
        return {
            "memory_mb": round((resident() - before) / 1e6, 1),
            "rows": counts.rows,
            "limits": len(counts.counts),
            "bytes_per_s_and_peer": round(self.sent_bytes / (RUN_S - SENT_FROM_S)),
            "rows_waiting": len(self.gossip._waiting),
            "rows_dropped": counts.dropped,
        }

    def number(self) -> int:
        return int(self.per_s * STEP_S + self.rng.random())

    def meters(self, key: int) -> tuple[Meter, ...]:
        return (*self.tenants[key % TENANTS], *meters_of(f"key {key}", MINUTE, str(key % TENANTS)))

    def serve(self) -> None:
        """Serve one request at this node."""
        key = self.rng.randrange(KEYS)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = MeterGroup(self.meters(key))
        found = self.limiter.reserve(group, Amounts(2500.0, 2500.0), self.now)
        assert isinstance(found, Grant)
        self.limiter.settle(Amounts(2000.0, 2000.0), found)

    def theirs(self, session: int) -> tuple[CountRow, ...]:
        """Return what a peer sends of the requests that it has just served, at most what it may send."""
        rows, slot = list[CountRow](), int(self.now / SLOT_S)
        for _ in range(self.number()):
            for meter in self.meters(self.rng.randrange(KEYS)):
                window = slot if meter.span is LimitSpan.MINUTE else window_at(meter.span, WALL)
                rows.append(CountRow(meter.id, session, meter.span, window, 100, 2500.0, 2500.0, 2000.0))
        self.rng.shuffle(rows)
        return tuple(rows[:SENT_AT_ONCE])

    def send(self, *, counted: bool) -> None:
        assert COUNTED.pack is not None
        for out in self.outbox:
            if counted and out.session == 2 and isinstance(out.message, LimitCounts):
                self.sent_bytes += len(COUNTED.pack(out.message.rows))  # type: ignore[arg-type]
        self.outbox.clear()


def resident() -> int:
    """Return the memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
