"""Snapshots of what an engine holds, from a node that knows it exactly to one that does not, each as a `transfer`.

The giver freezes what it holds while it writes the snapshot, some parts a tick. Nobody waits: the asker applies events
meanwhile. Rules: a busy peer is asked again, of one that refuses or breaks off the next one is asked. An engine is
given to one peer at a time. Bounds: TAKEN_MAX taken at a time; BYTES_PER_S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from struct import Struct
from typing import Any, NamedTuple

from ranvier_py.core.engine_cache.snapshot import BadSnapshot, BlockRows, Snapshot, SnapshotReader, SnapshotWriter
from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer
from ranvier_py.core.mesh.transfer import End, Inquiry, Piece, Transfer, TransferTerms, Walk
from ranvier_py.core.mesh.wire.columns import COLUMN, U32, U64, packed, unpacked
from ranvier_py.core.mesh.wire.frame import bad
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.fingerprint import TokenHasher

SNAPSHOTS = TransferTerms(2, "snapshot")
SUBJECT = Struct("<QH")
PART_FIELDS = (U64, U64, U32, U32, *(COLUMN,) * 7)
"""Number and digest of the event message that it includes last | one chunk, as `BlockRows`."""

TAKEN_MAX = 8
WRITTEN_EACH = 4  # chunks written a tick: events of the engine wait until all are written
RETRY_S, PATIENCE_S = 1.0, 25.0
"""A busy peer is asked again after about RETRY_S, until PATIENCE_S have passed, which is less than a gap machine waits.
A node that joins may subscribe to many streams at once."""

BYTES_PER_S = 8 * 1024 * 1024  # a snapshot of 200,000 blocks is 5 MB


class Subject(NamedTuple):
    """What a snapshot is of: an engine, by its key (u64), and a data-parallel rank of it (u16), otherwise 0."""

    backend: int
    rank: int


class Taken(NamedTuple):
    """The outcome of a question. `snapshot` None: nobody gave one."""

    subject: Subject
    ask: int
    snapshot: Snapshot | None


@dataclass(slots=True)
class SnapshotCounters:
    failed: int = counter("Snapshots of engines' caches that no peer gave.")
    blocks_left_out: int = counter("KV cache blocks without a parent, left out of snapshots for peers.")


class SnapshotWalk(Walk):
    """A snapshot on its way to a peer. The owner calls `write` at each tick, however slowly the peer takes it."""

    def __init__(self, writer: SnapshotWriter, stopped: Callable[[], object]) -> None:
        self.writer = writer
        self._stopped = stopped
        self._read = 0

    @property
    def writes(self) -> bool:
        return not (self.writer.done or self.writer.broken)

    def write(self) -> None:
        for _ in range(WRITTEN_EACH):
            self.writer.step()

    def take(self, now: float) -> Piece | End | None:  # noqa: ARG002  # as of all walks
        writer = self.writer
        if writer.broken:  # the engine's cache was cleared
            return End.ABSENT
        if self._read == len(writer.chunks):
            return None
        rows = writer.chunks[self._read]
        self._read += 1
        last = writer.done and self._read == len(writer.chunks)
        return Piece(packed(PART_FIELDS, (writer.seq, writer.digest, *rows)), last)

    def stop(self) -> None:
        self.writer.stop()
        self._stopped()


@dataclass(slots=True)
class SnapshotFetch(Inquiry):
    """A snapshot that this node asks of one peer after another."""

    what: Subject = field(kw_only=True)
    ask: int = field(kw_only=True)
    peers: Sequence[Peer] = ()  # the one that is asked, and who may be asked next
    ask_at: float = inf  # while it waits to be asked
    give_up_at: float = 0.0
    reader: SnapshotReader = field(kw_only=True)
    head: tuple[int, int] = (0, 0)  # number and digest of the event message that it includes last


class SnapshotTransfers(Machine):
    """Both sides, for one node. The owner drains `taken`; `source` begins a snapshot, or returns None."""

    def __init__(
        self,
        hasher: TokenHasher,
        outbox: list[Outgoing],
        rng: Random,
        source: Callable[[Subject], SnapshotWriter | None] = lambda _subject: None,
    ) -> None:
        self.source = source
        self.entries_max = 2_000_000
        self.taken: list[Taken] = []
        self.counters = SnapshotCounters()
        self.transfer = Transfer(SNAPSHOTS, self, outbox, Window(BYTES_PER_S))
        self._hasher = hasher
        self._rng = rng
        self._walks: dict[Subject, SnapshotWalk] = {}
        self._fetches: dict[Subject, SnapshotFetch] = {}

    @property
    def wake_at(self) -> float:
        if any(walk.writes for walk in self._walks.values()):
            return 0.0
        return min([fetch.ask_at for fetch in self._fetches.values()], default=inf)

    def counted(self) -> Mapping[str, Any]:
        return {"snapshots": self.counters}

    def met(self, peers: LivePeers, now: float) -> None:
        self.transfer.meet(peers.met, now)

    def tick(self, now: float) -> None:
        for walk in self._walks.values():
            walk.write()
        for fetch in [fetch for fetch in self._fetches.values() if fetch.ask_at <= now]:
            self._want(fetch, now)

    def ask(self, subject: Subject, ask: int, members: Sequence[int], now: float) -> None:
        """Get a snapshot from the first of these members that gives one: adds a `Taken`, unless it is asked anew."""
        before = self._fetches.pop(subject, None)
        if before is not None:
            self.transfer.drop(before)
        peers = [self.transfer.peers[member] for member in members if member in self.transfer.peers]
        if not peers:
            self._finish(subject, ask, None)
            return
        packed_subject = SUBJECT.pack(*subject)
        fetch = SnapshotFetch(peers[0], packed_subject, what=subject, ask=ask, peers=peers, reader=self._reader())
        fetch.give_up_at = now + PATIENCE_S
        self._fetches[subject] = fetch
        self._want(fetch, now)

    # --- as a feature of transfers ----------------------------------------------------------------------------------

    def begin(self, peer: Peer, subject: bytes, now: float) -> Walk | End:  # noqa: ARG002  # as of all features
        """Begin a snapshot. A second one of the engine would freeze it after the first."""
        if len(subject) != SUBJECT.size:
            return End.ABSENT
        what = Subject(*SUBJECT.unpack(subject))
        writer = None if what in self._walks else self.source(what)
        if writer is None:
            return End.BUSY if what in self._walks else End.ABSENT
        self._walks[what] = walk = SnapshotWalk(writer, lambda: self._stopped(what))
        return walk

    def take(self, fetch: SnapshotFetch, data: bytes, now: float) -> None:  # noqa: ARG002  # as of all features
        seq, digest, *rows = unpacked(PART_FIELDS, data)
        fetch.head = (seq, digest)
        try:
            fetch.reader.add(BlockRows(*rows))
        except BadSnapshot as error:
            bad(str(error))

    def over(self, fetch: SnapshotFetch, end: End, now: float) -> None:
        if end is End.WHOLE:
            self._finish(fetch.what, fetch.ask, Snapshot(*fetch.head, fetch.reader.finish()))
        elif end is End.BUSY and now + RETRY_S < fetch.give_up_at:
            fetch.ask_at = now + RETRY_S * self._rng.uniform(0.5, 1.5)
        else:
            fetch.peers = fetch.peers[1:]
            self._want(fetch, now)

    def _want(self, fetch: SnapshotFetch, now: float) -> None:
        """Ask the first one that is still a peer, once there is room; without one finish without a snapshot."""
        fetch.peers = [peer for peer in fetch.peers if peer.session in self.transfer.peers]
        is_full = self.transfer.open >= TAKEN_MAX
        if not fetch.peers or (is_full and now >= fetch.give_up_at):
            self._finish(fetch.what, fetch.ask, None)
        elif is_full:
            fetch.ask_at = now + RETRY_S
        else:
            fetch.ask_at, fetch.peer, fetch.reader = inf, fetch.peers[0], self._reader()
            self.transfer.ask(fetch, now)

    def _reader(self) -> SnapshotReader:
        return SnapshotReader(self._hasher, entries_max=self.entries_max)

    def _finish(self, subject: Subject, ask: int, snapshot: Snapshot | None) -> None:
        self._fetches.pop(subject, None)
        self.counters.failed += snapshot is None
        self.taken.append(Taken(subject, ask, snapshot))

    def _stopped(self, subject: Subject) -> None:
        self.counters.blocks_left_out += self._walks.pop(subject).writer.left_out
