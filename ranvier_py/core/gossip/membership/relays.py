"""Pings in the name of others: the relay's half of an indirect probe.

The relay pings the target under a sequence number of its own. An answer goes back to the asker under the asker's; when
none came in time a nack goes back, so that the asker knows that the relay at least is well (Lifeguard), and a ping that
went by datagram is repeated on the stream. An answer that comes after the nack still goes back, while the asker may
wait for it. What goes back takes the way the question came, or the stream where datagrams do not reach the asker.

Bound: RELAYS_MAX pings under way; more are not relayed, and counted. Cost: O(log pings) for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ranvier_py.core.gossip.gossip_values import Address, Peer, Plane
from ranvier_py.core.gossip.membership.membership_counters import Counts
from ranvier_py.core.gossip.membership.membership_outbox import Post
from ranvier_py.core.gossip.membership.profile import Profile
from ranvier_py.core.gossip.membership.roster import Roster
from ranvier_py.core.gossip.wire.messages import PingRequest, Update

RELAYS_MAX = 1024
"""Every member of the largest cluster may ask once at the same time."""


class Relayed(NamedTuple):
    """A ping under way for somebody else."""

    asker: Peer
    seq: int  # the asker's
    target: Peer
    plane: Plane  # on which the asker asked
    first: Sequence[Update]  # what the target must hear
    out: Plane  # on which the target was pinged
    ends_at: float


class Relays:
    """All pings under way for others, by their sequence number."""

    __slots__ = ("_counts", "_due", "_pings", "_post", "_roster", "wake_at")

    def __init__(self, roster: Roster, post: Post, counts: Counts) -> None:
        self.wake_at = inf
        self._roster = roster
        self._post = post
        self._counts = counts
        self._pings: dict[int, Relayed] = {}
        self._due: list[tuple[float, int]] = []  # nacks first, then ends, by time

    def __len__(self) -> int:
        return len(self._pings)

    def ask(
        self, asker: Peer, request: PingRequest, plane: Plane, first: Sequence[Update], profile: Profile, now: float
    ) -> None:
        """Ping the target of this request. `first` is what the target must hear with it."""
        if len(self._pings) >= RELAYS_MAX:
            self._counts.relays_dropped += 1
            return
        self._counts.relayed += 1
        seq = self._post.next_seq()
        ends_at = now + profile.probe_interval_s
        member = self._roster.get(request.session)
        out = self._post.best_plane(member) if member is not None else Plane.DATAGRAM
        target = Peer(request.session, (request.host, request.port))
        self._pings[seq] = Relayed(asker, request.seq, target, self._way_back(asker, plane), first, out, ends_at)
        heappush(self._due, (now + profile.nack_after_s, seq))
        self.wake_at = self._due[0][0]
        self._post.ping(target.address, target.session, seq, out, first)

    def pinging(self, address: Address) -> bool:
        """Whether a ping to this address is under way."""
        return any(ping.target.address == address for ping in self._pings.values())

    def acked(self, session: int, seq: int) -> None:
        """An answer that may be to one of these."""
        ping = self._pings.get(seq)
        if ping is not None and ping.target.session == session:
            del self._pings[seq]
            self._post.ack(ping.asker, ping.seq, ping.plane)

    def tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            at, seq = heappop(self._due)
            ping = self._pings.get(seq)
            if ping is None:
                continue
            if at >= ping.ends_at:
                del self._pings[seq]
            else:
                self._post.nack(ping.asker, ping.seq, ping.plane)
                self._counts.nacks += 1
                if ping.out is Plane.DATAGRAM and self._post.datagrams:
                    self._post.ping(ping.target.address, ping.target.session, seq, Plane.PROBE, ping.first)
                heappush(self._due, (ping.ends_at, seq))
        self.wake_at = self._due[0][0] if self._due else inf

    def _way_back(self, asker: Peer, plane: Plane) -> Plane:
        member = self._roster.get(asker.session)
        return Plane.PROBE if member is not None and not member.datagrams else plane

    def clear(self) -> None:
        """After a pause: the askers have long given up."""
        self._pings.clear()
        self._due.clear()
        self.wake_at = inf
