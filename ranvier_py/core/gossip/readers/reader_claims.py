"""Which members subscribe to which event stream, and how well they know it: each member's own latest report counts.

A node sends its changed reports to its peers together, at most every `REPORT_INTERVAL_S`; all reports that it knows of
live members to a newcomer; and all of these to a random peer from time to time. In a cluster whose members are not all
peers, a node passes on the reports that are new to it. So they reach every node that can be reached, in any order and
however often.

Rules: no node reports about another; a report counts while its member lives, which the user of this table checks. A
member outbids a report in its name that is not its own. A report whose number is far ahead of the last is dropped.
Bounds: CLAIMS_MAX reports. Reports that a member reads a stream no more are kept, so that no older one is believed. For
a new report beyond the bound the oldest of these is dropped, or the new one if there are none; either is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from random import Random

from ranvier_py.core.gossip.gossip_values import Outgoing, Peer, Plane
from ranvier_py.core.gossip.wire.messages import ReaderClaim, ReaderClaims

CLAIMS_MAX = 16_384  # two subscribers and two former ones of each of 4096 engines
CLOCK_MAX = 2**32 - 1  # the wire's limit
CLOCK_STEP_MAX = 2**30  # most that a report may be ahead: ten changes a second for three years
PER_MESSAGE = 2048  # 43 kB: far below a frame
REPORT_INTERVAL_S = 0.25  # the level of an engine whose stream has gaps changes many times a second
REPAIR_INTERVAL_S = 10.0
EVERYONE_MAX = 16  # up to this many peers are sent what is new; further ones get it through others


class ReaderClaimTable:
    """The reports of this node and those that it has received. `new`: those just received; the owner drains it."""

    def __init__(self, session: int, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self.new: list[ReaderClaim] = []
        self.received = self.dropped = 0
        self._session = session
        self._outbox = outbox
        self._rng = rng
        self.known: dict[tuple[int, int], ReaderClaim] = {}  # by member and backend
        self._ended: dict[tuple[int, int], None] = {}  # those of `known` whose member reads the stream no more
        self._clock = 0  # the greatest of our dropped reports: later ones begin above it
        self._changed: dict[tuple[int, int], None] = {}
        self._peers: Sequence[Peer] = ()
        self._passes_on = False
        self._members: dict[int, None] = {session: None}  # those that live, and this node
        self._sent_at = -inf
        self._repair_at = now + rng.uniform(0, REPAIR_INTERVAL_S)

    @property
    def wake_at(self) -> float:
        at = self._repair_at if self._peers and self.known else inf
        return min(at, self._sent_at + REPORT_INTERVAL_S) if self._changed else at

    def report(self, backend: int, state: int) -> None:
        """Report our state of a stream; cheap when nothing changed."""
        place = (self._session, backend)
        known = self.known.get(place)
        if known is None and (not state or not self._has_room(state)):
            self.dropped += bool(state)
        elif known is None or known.state != state:
            clock = self._clock if known is None else known.clock
            self._keep(ReaderClaim(backend, self._session, min(clock + 1, CLOCK_MAX), state))
            self._changed[place] = None

    def peers(self, live: Sequence[Peer], members: Iterable[int], *, passes_on: bool) -> None:
        """Set the live peers and the live members. `passes_on`: there are members that are no peers of ours."""
        before = {peer.session: None for peer in self._peers}
        self._peers = live
        self._members = {self._session: None, **dict.fromkeys(members)}
        self._passes_on = passes_on or len(live) > EVERYONE_MAX
        newcomers = [peer for peer in live if peer.session not in before]
        if newcomers and self.known:
            self._send(self._some(newcomers), self._of_members())

    def forget(self, session: int) -> None:
        """Drop the reports of a member that is gone for good."""
        for place in [place for place in self.known if place[0] == session]:
            self._drop(place)

    def tick(self, now: float) -> None:
        if self._changed and now >= self._sent_at + REPORT_INTERVAL_S:
            self._sent_at = now
            changed, self._changed = [self.known[place] for place in self._changed], {}
            self._send(self._some(self._peers), changed)
        if now >= self._repair_at:
            self._repair_at = now + REPAIR_INTERVAL_S * self._rng.uniform(0.8, 1.2)
            if self._peers and self.known:
                self._send([self._rng.choice(self._peers)], self._of_members())

    def receive(self, message: ReaderClaims) -> None:
        for claim in message.claims:
            place = (claim.member, claim.backend)
            known = self.known.get(place)
            clock = known.clock if known is not None else 0
            if claim.clock <= clock:
                continue
            if claim.clock - clock > CLOCK_STEP_MAX:
                self.dropped += 1
                continue
            if claim.member == self._session:
                self._outbid(claim, known)
                continue
            if known is None and not self._has_room(claim.state):
                self.dropped += bool(claim.state)
                continue
            self.received += 1
            self._keep(claim)
            self.new.append(claim)
            if self._passes_on:
                self._changed[place] = None

    def _outbid(self, claim: ReaderClaim, known: ReaderClaim | None) -> None:
        """Outbid a report in our name. If we know nothing of the stream, deny that we read it, unless it does so."""
        if known is not None or (claim.state and self._has_room(0)):
            clock, state = max(claim.clock, self._clock), 0 if known is None else known.state
            self._keep(claim._replace(clock=min(clock + 1, CLOCK_MAX), state=state))
            self._changed[claim.member, claim.backend] = None

    def _keep(self, claim: ReaderClaim) -> None:
        place = (claim.member, claim.backend)
        self.known[place] = claim
        self._ended.pop(place, None)
        if not claim.state:
            self._ended[place] = None

    def _has_room(self, state: int) -> bool:
        """Whether one more report fits. A report that a stream is read no more replaces no other."""
        if state and len(self.known) >= CLAIMS_MAX and self._ended:
            self._drop(next(iter(self._ended)))
            self.dropped += 1
        return len(self.known) < CLAIMS_MAX

    def _drop(self, place: tuple[int, int]) -> None:
        claim = self.known.pop(place)
        if claim.member == self._session:
            self._clock = max(self._clock, claim.clock)
        self._changed.pop(place, None)
        self._ended.pop(place, None)

    def _of_members(self) -> Sequence[ReaderClaim]:
        """Return the reports of members that live. Peers may have forgotten the others, and would never do so again."""
        return [claim for claim in self.known.values() if claim.member in self._members]

    def _some(self, peers: Sequence[Peer]) -> Sequence[Peer]:
        return peers if len(peers) <= EVERYONE_MAX else self._rng.sample(peers, EVERYONE_MAX)

    def _send(self, peers: Sequence[Peer], claims: Sequence[ReaderClaim]) -> None:
        for start in range(0, len(claims), PER_MESSAGE):
            message = ReaderClaims(tuple(claims[start : start + PER_MESSAGE]))
            for peer in peers:
                self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
