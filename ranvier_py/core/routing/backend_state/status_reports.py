"""What each node shows its peers, so that any of them can show the whole cluster: counts of the engines whose pages it
reads, and what is wrong with itself.

Rules: a node sends all of it when it has changed, but not sooner than SENT_S after the last time, to newcomers, and
every REPEAT_S; a peer keeps the last one of each sender for LIFE_S. Nothing is placed by it. Bounds: BYTES_PER_S on
average, but for one report in REPEAT_S; one report of each near peer, with ENGINES_MAX engines and TROUBLES_MAX
findings, the worst first, of WORDS_BYTES_MAX each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from random import Random
from typing import NamedTuple

from ranvier_py.core.mesh.machine import Machine, Senders
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import parts_field, rows_field
from ranvier_py.core.mesh.wire.frame import bad, text

SENT_S = 3.0  # as often as engines' pages are read
REPEAT_S = 30.0
BYTES_PER_S = 8192  # to all peers: as much as the loads of a busy node of some 20 peers
HEAD_BYTES, ENGINE_BYTES, FINDING_BYTES = 90, 24, 20  # of a packet, an engine and a finding without its words
LIFE_S = 100.0
ENGINES_MAX = 512  # of one sender: an eighth of all that there can be
TROUBLES_MAX = 16
NAME_BYTES_MAX, WORDS_BYTES_MAX = 255, 300  # the length of a name is one byte on the wire
UNKNOWN = 0xFFFF_FFFF


class EngineReport(NamedTuple):
    """Counts of one engine by its own page, UNKNOWN where it does not say.."""

    backend: int  # key, u64
    running: int  # u32
    waiting: int  # u32
    tokens_per_s: int  # u32: generated lately
    hit_permille: int  # u32: of the prompt tokens that it looked up since its start


class Trouble(NamedTuple):
    """One finding of the sender about itself."""

    severity: int  # u8
    since_s: int  # u32
    kind: str
    about: str
    what: str
    remedy: str


class StatusReport(NamedTuple):
    """All that one node shows of itself."""

    engines: tuple[EngineReport, ...]
    troubles: tuple[Trouble, ...]


def count_of(value: float | None) -> int:
    """Return a count as it is sent."""
    return UNKNOWN if value is None else min(UNKNOWN - 1, max(0, round(value)))


def known(count: int) -> int | None:
    """Return a count as it was sent."""
    return None if count == UNKNOWN else count


def words_of(sentence: str, bytes_max: int = WORDS_BYTES_MAX) -> str:
    """Return as much of a sentence, or of a name, as is sent, without what could not be shown."""
    shown = "".join(each if each.isprintable() else "?" for each in sentence)
    return shown.encode()[:bytes_max].decode(errors="ignore")


def read_trouble(severity: int, since_s: int, kind: bytes, about: bytes, what: bytes, remedy: bytes) -> Trouble:
    if not kind:
        bad("a finding without its kind")
    words = (text(each, WORDS_BYTES_MAX) for each in (kind, about, what, remedy))
    return Trouble(severity, since_s, *words)


class Received(NamedTuple):
    """A peer's report, and when it came."""

    report: StatusReport
    at: float


class StatusReports(Machine):
    """Sends this node's report, and keeps those of its peers (see the module)."""

    kinds = (
        Kind(
            "status",
            120,
            StatusReport,
            (
                rows_field("<QIIII", ENGINES_MAX, EngineReport),
                parts_field("finding", "B I *B *B *H *H", TROUBLES_MAX, read_trouble),
            ),
            since=5,
        ),
    )
    senders = Senders.ANY

    def __init__(self, outbox: list[Outgoing], rng: Random, now: float) -> None:
        self._outbox, self._rng = outbox, rng
        self._own = StatusReport((), ())
        self._peers: Mapping[int, Peer] = {}
        self._received: dict[int, Received] = {}
        self._changed = False
        self._sent_at, self._repeat_at = -inf, now + REPEAT_S

    @property
    def wake_at(self) -> float:
        if not self._peers or self._is_silent:
            return inf
        return min(self._repeat_at, self._sent_at + self._gap_s) if self._changed else self._repeat_at

    @property
    def _gap_s(self) -> float:
        """The shortest time between two reports to all peers."""
        words = sum(len(word) for each in self._own.troubles for word in each[2:])
        size = HEAD_BYTES + ENGINE_BYTES * len(self._own.engines) + FINDING_BYTES * len(self._own.troubles) + words
        return max(SENT_S, size * len(self._peers) / BYTES_PER_S)

    @property
    def _is_silent(self) -> bool:
        """Whether peers know of nothing here, and there is nothing."""
        return self._own == ((), ()) and self._sent_at == -inf

    def show(self, engines: Iterable[EngineReport], troubles: Iterable[Trouble]) -> None:
        """Set what this node shows from now on. That a finding has lasted longer is no change."""
        report = StatusReport(tuple(engines)[:ENGINES_MAX], tuple(troubles)[:TROUBLES_MAX])
        lasting = [each._replace(since_s=0) for each in report.troubles]
        before = [each._replace(since_s=0) for each in self._own.troubles]
        self._changed = self._changed or report.engines != self._own.engines or lasting != before
        self._own = report

    def met(self, peers: LivePeers, now: float) -> None:  # noqa: ARG002  # as of all machines
        before, self._peers = self._peers, {peer.session: peer for peer in peers.near}
        self._received = {session: each for session, each in self._received.items() if session in self._peers}
        if not self._is_silent:
            self._send([peer for session, peer in self._peers.items() if session not in before])

    def tick(self, now: float) -> None:
        if now < self.wake_at:
            return
        self._changed, self._sent_at = False, now
        self._repeat_at = now + REPEAT_S * self._rng.uniform(0.8, 1.2)
        self._send(self._peers.values())

    def receive(self, peer: Peer, message: StatusReport, now: float) -> None:
        if peer.session in self._peers:
            self._received[peer.session] = Received(message, now)

    def forgotten(self, session: int, now: float) -> None:  # noqa: ARG002  # as of all machines
        self._received.pop(session, None)

    def of_peers(self, now: float) -> Iterator[tuple[int, StatusReport]]:
        """Yield the report of each peer, by its session, the last one that came first."""
        kept = [(each.at, session, each.report) for session, each in self._received.items() if now - each.at < LIFE_S]
        return ((session, report) for _, session, report in sorted(kept, reverse=True))

    def _send(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self._outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, self._own))
