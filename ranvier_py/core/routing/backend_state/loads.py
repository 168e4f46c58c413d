"""Load: what each node has in flight at each backend, sent to peers, received from them and summed up.

Each observer reports its own numbers; its latest report counts, and none after LOAD_LIFE_S of silence. Nobody passes
on another's load: in a large cluster each node sends to some peers, other ones each time, and sums up what it received.

Bounds: observers are among the peers; BACKENDS_MAX backends of one observer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple

from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import U32, rows_field
from ranvier_py.core.metrics import counter
from ranvier_py.core.routing.rates.work import NO_LOAD, Load

BACKENDS_MAX = 4096  # as in the registry; facts about more are dropped and counted
LOADS_PER_DATAGRAM = 64  # of 16 bytes each: fits a datagram with its envelope
LOAD_INTERVAL_S = 0.05
"""A change of in-flight counts is sent within this time, and at once after a quiet time. Until peers know of it, all
nodes fill the same gap: a burst that comes within this time is spread by chance only."""

LOAD_REPEAT_S, LOAD_LIFE_S = 1.0, 3.0  # unchanged loads are sent again: three chances before they expire
LOAD_PEERS_MAX = 32  # loads are sent to at most this many peers, other ones each time


class Loads(NamedTuple):
    """What the sender has in flight; nothing at backends that are not listed. An older `seq` is ignored."""

    seq: int  # u32
    loads: tuple[tuple[int, int, int, int], ...]
    """(backend key, requests in flight u16, of these without a first token u16, tokens to be computed before it u32)"""


LOADS_KIND = Kind("backends", 48, Loads, (U32, rows_field("<QHHI", BACKENDS_MAX)))


@dataclass(slots=True)
class FactCounters:
    facts_received: int = counter("Facts about backends received from peers.")
    facts_adopted: int = counter("Facts about backends from peers that were later than what was known.")
    loads_received: int = counter("Reports of backends' load received from peers.")
    loads_old: int = counter("Reports of backends' load that came after a later one.")
    loads_expired: int = counter("Reports of backends' load that expired because they were not renewed.")
    facts_absurd: int = counter("Facts about backends from peers whose generation is impossibly far ahead of ours.")
    dropped: int = counter("Facts and load reports of too many backends.")


@dataclass(slots=True)
class Observed:
    """The last load report of one peer, which counts until `until`."""

    seq: int
    until: float
    loads: dict[int, Load]


class PeerLoads:
    """Sends our own loads, and keeps the loads of the peers with their sums."""

    def __init__(
        self, outbox: list[Outgoing], rng: Random, counters: FactCounters, now: float, plane_of: Callable[[int], Plane]
    ) -> None:
        self.moved: dict[int, None] = {}  # backends where the load of peers changed; drained by the owner
        self._expire_at = inf
        self._plane_of = plane_of
        self._outbox = outbox
        self._rng = rng
        self._counters = counters
        self._observed: dict[int, Observed] = {}
        self._totals: dict[int, Load] = {}
        self._peers: Sequence[Peer] = ()
        self._seq = 0
        self._own: Mapping[int, Load] = {}
        self._own_moved = False
        self._sent_at = now

    def __len__(self) -> int:
        """How many peers have sent their loads."""
        return len(self._observed)

    @property
    def wake_at(self) -> float:
        if self._own_moved:
            return min(self._expire_at, self._sent_at + LOAD_INTERVAL_S)
        if self._own:
            return min(self._expire_at, self._sent_at + LOAD_REPEAT_S)
        return self._expire_at

    def carry(self, loads: Mapping[int, Load]) -> None:
        """Set what we have in flight, by backend, without those that have nothing. A change is sent when due."""
        if loads != self._own:
            self._own = loads
            self._own_moved = True

    def of(self, backend: int) -> Load:
        """Return what all peers together have in flight at a backend."""
        return self._totals.get(backend, NO_LOAD)

    def peers(self, live: Sequence[Peer]) -> None:
        """Set the peers to exchange loads with. The loads of peers that are gone are dropped."""
        self._peers = live
        there = {peer.session for peer in live}
        for session in [session for session in self._observed if session not in there]:
            self.forget(session)

    def newcomers(self) -> None:
        """Send our loads soon, changed or not: there is a newcomer."""
        self._own_moved |= bool(self._own)

    def forget(self, session: int) -> None:
        observed = self._observed.pop(session, None)
        if observed is not None:
            self._replace(observed.loads, {})

    def tick(self, now: float) -> None:
        wait_s = LOAD_INTERVAL_S if self._own_moved else LOAD_REPEAT_S
        if (self._own_moved or self._own) and now >= self._sent_at + wait_s:
            self._send(now)
        if now >= self._expire_at:
            self._expire(now)

    def _send(self, now: float) -> None:
        self._own_moved = False
        self._sent_at = now
        self._seq += 1
        message = loads_message(self._seq, self._own)
        small = len(message.loads) <= LOADS_PER_DATAGRAM
        peers = self._peers
        for peer in peers if len(peers) <= LOAD_PEERS_MAX else self._rng.sample(peers, LOAD_PEERS_MAX):
            plane = self._plane_of(peer.session) if small else Plane.BULK
            self._outbox.append(Outgoing(peer.address, peer.session, plane, message))

    def receive(self, peer: Peer, message: Loads, now: float) -> None:
        self._counters.loads_received += 1
        observed = self._observed.get(peer.session)
        if observed is not None and message.seq <= observed.seq:
            self._counters.loads_old += 1
            return
        if len(message.loads) > BACKENDS_MAX:
            self._counters.dropped += 1
            return
        loads = loads_of(message)
        self._replace(observed.loads if observed else {}, loads)
        until = now + LOAD_LIFE_S * max(1.0, len(self._peers) / LOAD_PEERS_MAX)
        self._observed[peer.session] = Observed(message.seq, until, loads)
        self._expire_at = min(self._expire_at, until)

    def _replace(self, before: Mapping[int, Load], after: Mapping[int, Load]) -> None:
        totals, moved = self._totals, self.moved
        for backend, load in before.items():
            totals[backend] = totals[backend].minus(load)
            moved[backend] = None
        for backend, load in after.items():
            totals[backend] = totals.get(backend, NO_LOAD).plus(load)
            moved[backend] = None
        for backend in before:
            if totals[backend] == NO_LOAD:
                del totals[backend]

    def _expire(self, now: float) -> None:
        for observed in self._observed.values():
            if observed.until <= now and observed.loads:
                self._replace(observed.loads, {})
                observed.loads = {}
                self._counters.loads_expired += 1
        waiting = (each.until for each in self._observed.values() if each.loads)
        self._expire_at = min(waiting, default=inf)


def loads_message(seq: int, loads: Mapping[int, Load]) -> Loads:
    rows = [
        (backend, min(load.requests, 0xFFFF), min(load.waiting, 0xFFFF), min(load.tokens, 0xFFFF_FFFF))
        for backend, load in loads.items()
    ]
    return Loads(seq, tuple(rows))


def loads_of(message: Loads) -> dict[int, Load]:
    """Return a report's loads by backend. Of waiting requests no more count than the peer has in flight."""
    return {
        backend: Load(requests, min(waiting, requests), tokens) for backend, requests, waiting, tokens in message.loads
    }
