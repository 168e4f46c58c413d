"""The proved sessions of peers, by session, address and name, and the packets of each that may still come.

Rule: of two sessions with one name the higher epoch displaces the other at once; membership decides about any others.
What a forgotten session sealed before counts no more when it comes back. Bounds: `sessions_max`, of which the one that
was silent longest goes, and RETIRED_MAX forgotten ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier_py.core.bounded import BoundedDict
from ranvier_py.core.mesh.mesh_values import Address, Plane
from ranvier_py.core.mesh.wire.messages import Record
from ranvier_py.core.metrics import counter, gauge

SESSIONS_MAX = 4096  # four times the largest cluster: room for the runs before a storm of restarts
RETIRED_MAX = 1024

WINDOW = 4096  # packets. A node of a large cluster sends 50 a second: a packet later than 80 s is lost.
WINDOW_MASK = (1 << WINDOW) - 1


@dataclass(slots=True)
class SessionCounters:
    """The gate's counters, and how many sessions are proved now."""

    own: int = counter("Gossip packets of this node that came back to it.")
    receiver: int = counter("Gossip packets that were meant for another session.")
    replay: int = counter("Gossip packets that came before, or are older than their sender's proof.")
    stranger: int = counter(
        "Gossip packets of sessions without a proof; their sender is challenged if it was a datagram."
    )
    record: int = counter("Gossip handshakes whose record is not of the node that sealed them.")
    nonce: int = counter("Proofs of gossip sessions that repeat no number that this node asked for.")
    unsolicited: int = counter("Challenges from addresses that this node had sent nothing to.")
    limited: int = counter("Answers to unknown senders that were not sent because too many had been.")
    short: int = counter("Messages of unknown senders left unanswered because the answer would be longer.")
    body: int = counter("Gossip packets that could be decrypted, but hold no message.")
    unknown: int = counter("Gossip messages of kinds that this node does not know, which it skipped.")
    proved: int = counter("Gossip sessions of peers that proved themselves.")
    replaced: int = counter("Gossip sessions replaced by a later one of the same name.")
    evicted: int = counter("Gossip sessions forgotten because their table was full.")
    resent: int = counter("Gossip messages sent again, together with a proof of the session.")
    greetings: int = counter("Greetings sent to nodes without a proved session.")
    sessions: int = gauge("Gossip sessions of peers that are proved now.")


class ReplayWindow:
    """The counters of one sender that may still come: those above `floor`, each once.

    It holds the highest counter so far, and one bit for each of the WINDOW counters up to it, set if that counter has
    not come yet. A sender counts all its packets to all receivers, so gaps are the rule.
    """

    __slots__ = ("highest", "missing")

    def __init__(self, floor: int) -> None:
        self.highest = floor
        self.missing = 0

    def take(self, counter: int) -> bool:
        """Take a counter. Returns False if it has come before, or is too old for the window to know."""
        ahead = counter - self.highest
        if ahead > 0:
            skipped = (1 << ahead) - 2 if ahead < WINDOW else WINDOW_MASK - 1
            self.missing = (self.missing << ahead | skipped) & WINDOW_MASK if ahead < WINDOW else skipped
            self.highest = counter
            return True
        if -ahead >= WINDOW:
            return False
        bit = 1 << -ahead
        if not self.missing & bit:
            return False
        self.missing ^= bit
        return True


class KnownSession:
    """One proved session. `knows_us`: it has shown that we are proved to it as well."""

    __slots__ = ("address", "floor", "knows_us", "received_at", "record", "windows")

    def __init__(self, record: Record, counter: int, now: float) -> None:
        self.record = record
        self.address: Address = (record.host, record.port)
        self.floor = counter
        self.received_at = now
        self.knows_us = False
        self.windows: list[ReplayWindow | None] = [None] * len(Plane)

    def take(self, plane: Plane, counter: int) -> bool:
        window = self.windows[plane]
        if window is None:
            window = self.windows[plane] = ReplayWindow(self.floor)
        return window.take(counter)

    def highest(self) -> int:
        return max([self.floor, *(window.highest for window in self.windows if window is not None)])


class KnownSessions(dict[int, KnownSession]):
    """See the module. `counters` are those of the gate."""

    __slots__ = ("_by_name", "_counters", "_retired", "_sessions_max", "by_address")

    def __init__(self, counters: SessionCounters, sessions_max: int) -> None:
        super().__init__()
        self.by_address: dict[Address, int] = {}
        self._counters = counters
        self._sessions_max = sessions_max
        self._by_name: dict[str, int] = {}
        self._retired: BoundedDict[int, int] = BoundedDict(RETIRED_MAX)

    def retired_at(self, session: int) -> int:
        """Return the highest counter of a session that was forgotten; 0 for others."""
        return self._retired.get(session, 0)

    def prove(self, record: Record, counter: int, now: float) -> KnownSession:
        """Take up a live session. `counter` is that of its proof: packets with lower ones are refused from now on."""
        other = self._by_name.get(record.name, 0)
        if other and self[other].record.epoch < record.epoch:
            self._counters.replaced += 1
            self.forget(other)
        if len(self) >= self._sessions_max:
            self._counters.evicted += 1
            self.forget(min(self, key=lambda session: self[session].received_at))
        self._counters.proved += 1
        self._retired.pop(record.session, None)
        known = self[record.session] = KnownSession(record, counter, now)
        self.bind(known, record)
        return known

    def bind(self, known: KnownSession, record: Record) -> None:
        """Give a session its record, and the place and the name in it."""
        self._unbind(known)
        known.record, known.address = record, (record.host, record.port)
        self.by_address[known.address] = record.session
        self._by_name.setdefault(record.name, record.session)

    def forget(self, session: int) -> None:
        known = self.pop(session, None)
        if known is not None:
            self._unbind(known)
            self._retired[session] = known.highest()

    def _unbind(self, known: KnownSession) -> None:
        session = known.record.session
        if self.by_address.get(known.address) == session:
            del self.by_address[known.address]
        if self._by_name.get(known.record.name) == session:
            del self._by_name[known.record.name]
