"""Which members subscribe to which event stream, and how well they know it: each member's own latest report counts.

Rule: no node reports about another; a report counts while its member lives, which the user of this table checks. A
member outbids a report in its name that is not its own; one whose number is far ahead of the last is dropped. Where
not all are peers, reports of others are passed on. How they spread: `join_table`.
Bounds: CLAIMS_MAX reports. That a member reads a stream no more is kept, so that no older one is believed; for a new
report the oldest of these is dropped, or the new one if there are none; either is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from ranvier_py.core.mesh.join_table import JoinTable
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import rows_field
from ranvier_py.core.mesh.wire.frame import bad

CLAIMS_MAX = 16_384  # two subscribers and two former ones of each of 4096 engines
CLOCK_MAX = 2**32 - 1  # the wire's limit
CLOCK_STEP_MAX = 2**30  # most that a report may be ahead: ten changes a second for three years
REPORT_INTERVAL_S = 0.25  # the level of an engine whose stream has gaps changes many times a second
REPAIR_INTERVAL_S = 10.0
EVERYONE_MAX = 16  # further peers get reports through others

READER_STATE_MAX = 5
READER_CLAIMS_MAX = 2048  # in a message, 43 kB

Place = tuple[int, int]  # a member and a backend


class ReaderClaim(NamedTuple):
    """One member's own report of whether it subscribes to the events of one engine, and how well it knows them."""

    backend: int  # key, u64
    member: int  # session of the reporter: u64, not 0
    clock: int  # u32: of two reports of a member about one backend the greater is the later
    state: int  # u8: readers.ownership.ReaderState


class ReaderClaims(NamedTuple):
    """Reports of any members, as they are passed on."""

    claims: tuple[ReaderClaim, ...]


def read_reader_claim(backend: int, member: int, clock: int, state: int) -> ReaderClaim:
    if state > READER_STATE_MAX or not member:
        bad("reader claim")
    return ReaderClaim(backend, member, clock, state)


class ReaderClaimTable(JoinTable[Place, ReaderClaim]):
    """The reports of this node and those that it has received. `new`: those just received, of which
    `arrived` is called; the owner drains it."""

    kinds = (Kind("streams", 51, ReaderClaims, (rows_field("<QQIB", READER_CLAIMS_MAX, read_reader_claim),)),)
    ROWS_MAX = READER_CLAIMS_MAX
    REPEAT_S = REPAIR_INTERVAL_S
    GATHER_S = REPORT_INTERVAL_S
    EVERYONE_MAX = EVERYONE_MAX

    def __init__(
        self, session: int, outbox: list[Outgoing], rng: Random, now: float, arrived: Callable[[float], object]
    ) -> None:
        super().__init__(outbox, rng, now)
        self.new: list[ReaderClaim] = []
        self.dropped = 0
        self._session, self._arrived = session, arrived
        self.known: dict[Place, ReaderClaim] = {}
        self._ended: dict[Place, None] = {}  # those of `known` whose member reads the stream no more
        self._clock = 0  # the greatest of our dropped reports: later ones begin above it
        self._passes_on = False
        self._members: dict[int, None] = {session: None}  # those that live, and this node

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

    def met(self, peers: LivePeers, now: float) -> None:
        """Take the peers to report to, and the live members. If some of these are no peers of ours, we pass on."""
        self._members = {self._session: None, **dict.fromkeys(peers.able)}
        self._passes_on = len(peers.able) > len(peers.sharing) or len(peers.sharing) > EVERYONE_MAX
        self._meet(peers.sharing, now)

    def forgotten(self, session: int, now: float) -> None:  # noqa: ARG002  # as of all machines
        for place in [place for place in self.known if place[0] == session]:
            self._drop(place)

    def receive(self, _peer: Peer, message: ReaderClaims, now: float) -> None:
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
            self._keep(claim)
            self.new.append(claim)
            if self._passes_on:
                self._changed[place] = None
        if self.new:
            self._arrived(now)

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

    def _drop(self, place: Place) -> None:
        claim = self.known.pop(place)
        if claim.member == self._session:
            self._clock = max(self._clock, claim.clock)
        self._changed.pop(place, None)
        self._ended.pop(place, None)

    def _rows(self, keys: dict[Place, None] | None, _now: float) -> Sequence[ReaderClaim]:
        """Of all only those of members that live. Peers may have forgotten the others, and would never do so again."""
        if keys is not None:
            return [self.known[place] for place in keys]
        return [claim for claim in self.known.values() if claim.member in self._members]

    def _message(self, rows: Sequence[ReaderClaim]) -> ReaderClaims:
        return ReaderClaims(tuple(rows))
