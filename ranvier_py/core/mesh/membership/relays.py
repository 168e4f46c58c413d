"""Relays: pings on behalf of other nodes, the relay's half of an indirect probe.

The relay pings the target under a sequence number of its own, and sends an ack back under the asker's number when the
target answers. If there is no answer in time it sends a nack, so that the asker knows that at least the relay is well
(Lifeguard), and repeats a ping that went by datagram on the stream. An ack that comes after the nack is still sent back
while the asker may wait for it. Answers take the plane of the question, or the stream if datagrams miss the asker.

Bound: RELAYS_MAX pings under way; further ones are not relayed, and counted. Cost: O(log pings) for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ranvier_py.core.mesh.membership.broadcasts import MembershipOutbox, best_plane
from ranvier_py.core.mesh.membership.member_table import MemberTable
from ranvier_py.core.mesh.mesh_values import Address, Peer, Plane
from ranvier_py.core.mesh.wire.messages import PingRequest, Update

RELAYS_MAX = 1024  # every member of the largest cluster may ask once at the same time


class Relayed(NamedTuple):
    """A ping under way for another node."""

    asker: Peer
    seq: int  # the asker's
    target: Peer
    plane: Plane  # for the ack or nack
    first: Sequence[Update]  # updates that the target must be sent
    out: Plane  # on which the target was pinged
    ends_at: float


class Relays:
    """All pings under way for others, by their sequence number."""

    def __init__(self, table: MemberTable, outbox: MembershipOutbox) -> None:
        self.wake_at = inf
        self._table = table
        self._outbox = outbox
        self._counters = table.counters
        self._pings: dict[int, Relayed] = {}
        self._due: list[tuple[float, int]] = []  # nacks first, then ends, by time

    def __len__(self) -> int:
        return len(self._pings)

    def relay(self, asker: Peer, request: PingRequest, plane: Plane, first: Sequence[Update], now: float) -> None:
        """Ping the target of this request. `first` are the updates that the target must be sent with it."""
        if len(self._pings) >= RELAYS_MAX:
            self._counters.relays_dropped += 1
            return
        self._counters.relayed += 1
        roster, profile = self._table.roster, self._table.health.profile
        seq = self._outbox.next_seq()
        ends_at = now + profile.probe_interval_s
        member, known_asker = roster.get(request.session), roster.get(asker.session)
        out = best_plane(member) if member is not None else Plane.DATAGRAM
        back = Plane.PROBE if known_asker is not None and not known_asker.datagrams else plane
        target = Peer(request.session, (request.host, request.port))
        self._pings[seq] = Relayed(
            asker=asker, seq=request.seq, target=target, plane=back, first=first, out=out, ends_at=ends_at
        )
        heappush(self._due, (now + profile.nack_after_s, seq))
        self.wake_at = self._due[0][0]
        self._outbox.ping(target.address, target.session, seq, out, first)

    def pinging(self, address: Address) -> bool:
        """Whether a ping to this address is under way."""
        return any(ping.target.address == address for ping in self._pings.values())

    def acked(self, session: int, seq: int) -> None:
        """Take an ack: if it answers one of these pings, send it on to the asker."""
        ping = self._pings.get(seq)
        if ping is not None and ping.target.session == session:
            del self._pings[seq]
            self._outbox.ack(ping.asker, ping.seq, ping.plane)

    def tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            at, seq = heappop(self._due)
            ping = self._pings.get(seq)
            if ping is None:
                continue
            if at >= ping.ends_at:
                del self._pings[seq]
            else:
                self._outbox.nack(ping.asker, ping.seq, ping.plane)
                self._counters.nacks += 1
                if ping.out is Plane.DATAGRAM and self._outbox.datagrams:
                    self._outbox.ping(ping.target.address, ping.target.session, seq, Plane.PROBE, ping.first)
                heappush(self._due, (ping.ends_at, seq))
        self.wake_at = self._due[0][0] if self._due else inf

    def clear(self) -> None:
        """Drop all pings after this node was not awake: the askers have long given up."""
        self._pings.clear()
        self._due.clear()
        self.wake_at = inf
