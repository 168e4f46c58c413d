"""Updates on their way through the cluster, and the membership messages that carry them.

One slot for each subject: a newer update replaces the older one and starts again. An update is sent up to
`mult * ceil(log10(members + 1))` times (SWIM; the number is memberlist's), the least often sent first, of new ones the
latest: a refutation leaves with the very next packet. While more than STORM wait, one that is received again counts as
sent `mult` times more (Demers and others, PODC 1987). Bounds: `2 * members` updates, at least SLOTS_MIN, of which the
most often sent is dropped; one that no datagram could hold is not queued (cortex#4327, smg#808). Both are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf

from ranvier_py.core.mesh.membership.membership_counters import MembershipCounters
from ranvier_py.core.mesh.membership.roster import Member
from ranvier_py.core.mesh.mesh_values import Address, Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.messages import Ack, Message, Nack, Ping, PingRequest, Push, Update
from ranvier_py.core.mesh.wire.records import size_of

STORM = 256  # updates: what a node sends in about a second, in packets of 17
SLOTS_MIN = 64  # so that a node that knows hardly anybody relays what it receives while it joins
MISFITS_MAX = 4  # updates too large for the room left, after which a packet is closed
FIELDS_BYTES = 96  # the other fields of the longest message with updates, PingRequest
SEQ_MAX = 2**32 - 1  # what the wire holds


class Broadcasts:
    """The queue. `members` is the number of live members, this node included; the owner keeps it up to date."""

    def __init__(self, mult: int, interval_s: float, room_bytes: int, counters: MembershipCounters) -> None:
        self.members = 1
        self.wake_at = inf  # time of the next gossip tick; inf while nothing waits
        self._tick_after = -inf  # the next tick comes no earlier than this
        self._mult = mult
        self._interval_s = interval_s
        self._room_bytes = room_bytes
        self._counters = counters
        self._tiers: list[dict[int, tuple[Update, int]]] = []  # by times sent: subject -> update and its size
        self._tier_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tier_of)

    @property
    def times(self) -> int:
        """How often each update is sent."""
        return self._mult * len(str(self.members))  # digits of n = ceil(log10(n + 1))

    def push(self, update: Update, now: float) -> None:
        """Queue an update, in place of an older one about the same member."""
        subject = update.record.session
        self.drop(subject)
        size = size_of(update)
        if size > self._room_bytes:
            self._counters.updates_oversized += 1
            return
        if len(self) >= max(SLOTS_MIN, 2 * self.members):
            self._drop_most_sent()
        self._put(0, subject, (update, size))
        self.wake_at = min(self.wake_at, max(now, self._tick_after))

    @property
    def storming(self) -> bool:
        """Whether so many updates wait that sending all of them would take long."""
        return len(self._tier_of) > STORM

    def echoed(self, subject: int) -> None:
        """In a storm, count the queued update about this member as sent `mult` times. `member_lists` fills the gaps."""
        tier = self._tier_of.get(subject)
        if tier is None or not self.storming:
            return
        entry = self._tiers[tier].pop(subject)
        del self._tier_of[subject]
        if tier + self._mult < self.times:
            self._put(tier + self._mult, subject, entry)

    def drop(self, subject: int) -> None:
        """Drop the update about a member."""
        tier = self._tier_of.pop(subject, None)
        if tier is not None:
            del self._tiers[tier][subject]

    def take(self, room_bytes: int) -> tuple[Update, ...]:
        """Take the updates that fit into this many bytes. Each counts as sent once more."""
        if not self._tier_of:
            return ()
        chosen = self._choose(room_bytes)
        for subject, update, size in chosen:
            tier = self._tier_of.pop(subject)
            del self._tiers[tier][subject]
            if tier + 1 < self.times:
                self._put(tier + 1, subject, (update, size))
        return tuple(update for _, update, _ in chosen)

    def ticked(self, now: float) -> None:
        """Set the next gossip tick, an interval after this one, if anything waits."""
        self._tick_after = now + self._interval_s
        self.wake_at = self._tick_after if self._tier_of else inf

    def _choose(self, room_bytes: int) -> list[tuple[int, Update, int]]:
        chosen = []
        misfits = 0
        latest_first = reversed(self._tiers[0].items())
        for subject, (update, size) in chain(latest_first, *(tier.items() for tier in self._tiers[1:])):
            if size <= room_bytes:
                chosen.append((subject, update, size))
                room_bytes -= size
            else:
                misfits += 1
                if misfits >= MISFITS_MAX:
                    break
        return chosen

    def _put(self, tier: int, subject: int, entry: tuple[Update, int]) -> None:
        while len(self._tiers) <= tier:
            self._tiers.append({})
        self._tiers[tier][subject] = entry
        self._tier_of[subject] = tier

    def _drop_most_sent(self) -> None:
        tier = next(tier for tier in reversed(self._tiers) if tier)
        self.drop(next(iter(tier)))
        self._counters.updates_dropped += 1


class MembershipOutbox:
    """Appends messages to `sends`: what the receiver must know first, then updates. `room_bytes` is the room for these
    in a datagram. With datagrams off all go on the PROBE stream, so that bulk never delays a probe. Own pings and those
    on behalf of others share one series of sequence numbers."""

    def __init__(self, sends: list[Outgoing], broadcasts: Broadcasts, room_bytes: int, *, datagrams: bool) -> None:
        self.datagrams = datagrams
        self._sends = sends
        self._broadcasts = broadcasts
        self._room_bytes = room_bytes
        self._seq = 0

    def next_seq(self) -> int:
        self._seq = self._seq % SEQ_MAX + 1
        return self._seq

    def ping(self, address: Address, session: int, seq: int, plane: Plane, first: Sequence[Update] = ()) -> None:
        self._send(address, session, plane, Ping(seq, self._fill(first)))

    def ack(self, peer: Peer, seq: int, plane: Plane) -> None:
        self._send(peer.address, peer.session, plane, Ack(seq, self._fill(())))

    def nack(self, peer: Peer, seq: int, plane: Plane) -> None:
        self._send(peer.address, peer.session, plane, Nack(seq))

    def request_ping(self, relay: Member, seq: int, target: Member, first: Sequence[Update]) -> None:
        """Ask `relay` to ping `target`."""
        host, port = target.address
        request = PingRequest(seq, target.session, host, port, self._fill(first))
        self._send(relay.address, relay.session, best_plane(relay), request)

    def push(self, address: Address, session: int, updates: Sequence[Update], plane: Plane = Plane.DATAGRAM) -> None:
        """Send just these updates, as far as they fit."""
        fitting = self._fitting(updates)
        if fitting:
            self._send(address, session, plane, Push(tuple(fitting)))

    def gossip(self, member: Member) -> bool:
        """Send a member the updates that wait. Returns whether there were any."""
        updates = self._fill(())
        if updates:
            self._send(member.address, member.session, best_plane(member), Push(updates))
        return bool(updates)

    def _fill(self, first: Sequence[Update]) -> tuple[Update, ...]:
        if not first:
            return self._broadcasts.take(self._room_bytes)
        fitting = self._fitting(first)
        room_bytes = self._room_bytes - sum(map(size_of, fitting))
        return (*fitting, *self._broadcasts.take(room_bytes))

    def _fitting(self, updates: Sequence[Update]) -> list[Update]:
        fitting, room_bytes = [], self._room_bytes
        for update in updates:
            room_bytes -= size_of(update)
            if room_bytes < 0:
                break
            fitting.append(update)
        return fitting

    def _send(self, address: Address, session: int, plane: Plane, message: Message) -> None:
        if plane is Plane.DATAGRAM and not self.datagrams:
            plane = Plane.PROBE
        self._sends.append(Outgoing(address, session, plane, message))


def best_plane(member: Member) -> Plane:
    return Plane.DATAGRAM if member.datagrams else Plane.PROBE
