"""Snapshots of what an engine holds, from a node that knows it exactly to one that does not.

    A -> B  SnapshotWanted      B freezes what it holds while it writes the snapshot, some chunks a tick
    B -> A  SnapshotChunk ...   up to WINDOW_CHUNKS ahead of what A has confirmed by a later cursor
Rules: chunks of another transfer, or out of order, are dropped. After PROGRESS_S of silence A repeats its cursor,
RESUMES_MAX times at most; a busy peer is asked again, of one that refuses or breaks off the next one is asked. Nobody
waits: A applies events meanwhile. Bounds: GIVEN_MAX given and TAKEN_MAX taken at a time; BYTES_PER_S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from struct import Struct
from typing import Any, NamedTuple, cast

from ranvier_py.core.engine_cache.snapshot import BadSnapshot, BlockRows, Snapshot, SnapshotReader, SnapshotWriter
from ranvier_py.core.mesh.budget import Window
from ranvier_py.core.mesh.machine import Machine
from ranvier_py.core.mesh.membership.live_members import LivePeers
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import COLUMN, FLAG, U16, U32, U64, bytes_field
from ranvier_py.core.mesh.wire.frame import OVERHEAD_BYTES
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.fingerprint import TokenHasher

GIVEN_MAX, TAKEN_MAX = 2, 8
WINDOW_CHUNKS = 16
WRITTEN_EACH = 4  # chunks written a tick: events of the engine wait until all are written
PROGRESS_S = 1.0  # without a chunk, after which it is asked for again
RESUMES_MAX = 4
RETRY_S, PATIENCE_S = 1.0, 25.0
"""A busy peer is asked again after about RETRY_S, until PATIENCE_S have passed, which is less than a gap machine waits.
A node that joins may subscribe to many streams at once."""

SILENCE_S = 6.0  # giving a snapshot ends this long after the peer's last message
BYTES_PER_S = 8 * 1024 * 1024  # a snapshot of 200,000 blocks is 5 MB
HEAD = Struct("<QQII")
FIELDS_BYTES = 80  # of a chunk beside its columns, at most
REQUEST_MAX = (1 << 32) - 1


class SnapshotWanted(NamedTuple):
    """Asks for a snapshot of what an engine holds. A later cursor confirms the chunks before it and lets more come."""

    request: int  # u32, chosen by the asker
    backend: int  # key, u64
    rank: int  # u16: of a data-parallel engine; otherwise 0
    cursor: int  # u32: chunks before this one have come


class SnapshotChunk(NamedTuple):
    """One chunk of a snapshot, in columns (engine_cache.snapshot.BlockRows)."""

    request: int
    chunk: int  # u32: chunks count from 0
    last: bool
    head: bytes  # 24: seq u64 and digest u64 of the event message it includes last, group u32, block tokens u32
    names: bytes
    kinds: bytes
    above: bytes
    widths: bytes
    totals: bytes
    copies: bytes
    extras: bytes


class SnapshotRefused(NamedTuple):
    """Refuses a snapshot: the sender does not know it exactly, or it broke; `busy`: others are under way, ask again."""

    request: int
    busy: bool


SnapshotMessage = SnapshotWanted | SnapshotChunk | SnapshotRefused
KINDS = (
    Kind("streams", 64, SnapshotWanted, (U32, U64, U16, U32)),
    Kind("streams", 65, SnapshotChunk, (U32, U32, FLAG, bytes_field(HEAD.size, "head of a copy"), *(COLUMN,) * 7)),
    Kind("streams", 66, SnapshotRefused, (U32, FLAG)),
)


class Subject(NamedTuple):
    """What a snapshot is of: an engine, by its key, and a data-parallel rank of it."""

    backend: int
    rank: int


class Taken(NamedTuple):
    """The outcome of a question. `snapshot` None: nobody gave one."""

    subject: Subject
    ask: int
    snapshot: Snapshot | None


@dataclass(slots=True)
class _Given:
    peer: Peer
    request: int
    subject: Subject
    writer: SnapshotWriter
    until: float
    cursor: int = 0
    sent: int = 0

    @property
    def waits(self) -> bool:
        """Whether there is a chunk that the peer would take."""
        return self.sent < min(len(self.writer.chunks), self.cursor + WINDOW_CHUNKS)

    @property
    def works(self) -> bool:
        return self.waits or not (self.writer.done or self.writer.broken)


@dataclass(slots=True)
class _SnapshotFetch:
    subject: Subject
    ask: int
    request: int
    peers: list[Peer]  # who may be asked next
    peer: Peer
    reader: SnapshotReader
    deadline: float
    give_up_at: float
    waits: bool = False  # for the time to ask a busy peer again, or for room
    cursor: int = 0
    resumes: int = 0


@dataclass(slots=True)
class SnapshotCounters:
    asked: int = counter("Snapshots of engines' caches asked of peers.")
    taken: int = counter("Snapshots of engines' caches that came from peers.")
    failed: int = counter("Snapshots of engines' caches that no peer gave.")
    given: int = counter("Snapshots of engines' caches given to peers.")
    refused: int = counter("Snapshots of engines' caches refused to peers.")
    broken: int = counter("Snapshots of engines' caches not finished: the cache was cleared, or the peer fell silent.")
    blocks_left_out: int = counter("KV cache blocks without a parent, left out of snapshots for peers.")
    stray_chunks: int = counter("Chunks of snapshots that were not asked for.")
    bad_chunks: int = counter("Chunks from peers that were no valid part of a snapshot.")
    sent_bytes: int = counter("Bytes of snapshots of engines' caches sent to peers.")


@dataclass(slots=True)
class SnapshotTransfers(Machine):
    """Both sides, for one node. The owner drains `taken`; `source` begins a snapshot, or returns None."""

    kinds = KINDS

    hasher: TokenHasher
    outbox: list[Outgoing]
    rng: Random
    source: Callable[[Subject], SnapshotWriter | None] = lambda _subject: None
    entries_max: int = 2_000_000
    taken: list[Taken] = field(default_factory=list)
    counters: SnapshotCounters = field(default_factory=SnapshotCounters)
    _peers: dict[int, Peer] = field(default_factory=dict)
    _given: dict[tuple[int, int], _Given] = field(default_factory=dict)  # by (session, request), next first
    _taking: dict[Subject, _SnapshotFetch] = field(default_factory=dict)
    window: Window = field(default_factory=lambda: Window(BYTES_PER_S))
    _no_room_until: float = 0.0

    @property
    def wake_at(self) -> float:
        if not (self._given or self._taking):
            return inf
        if any(given.works for given in self._given.values()):
            return self._no_room_until
        ends = [given.until for given in self._given.values()] + [taking.deadline for taking in self._taking.values()]
        return min(ends)

    def counted(self) -> Mapping[str, Any]:
        return {"snapshots": self.counters}

    def met(self, peers: LivePeers, now: float) -> None:  # noqa: ARG002  # as of all machines
        self._peers = {peer.session: peer for peer in peers.met}
        for place in [place for place in self._given if place[0] not in self._peers]:
            self._end(place)

    def tick(self, now: float) -> None:
        """Repeat questions that are late, end silent transfers, write some chunks and send one."""
        if not (self._given or self._taking):
            return
        for taking in [taking for taking in self._taking.values() if taking.deadline <= now]:
            self._resume(taking, now)
        for place in [place for place, given in self._given.items() if given.until <= now]:
            self._end(place)
        if now >= self._no_room_until:
            self._give(now)

    def receive(self, peer: Peer, message: SnapshotMessage, now: float) -> None:
        if isinstance(message, SnapshotWanted):
            self._wanted(peer, message, now)
            return
        alike = [one for one in self._taking.values() if one.request == message.request]
        taking = next((one for one in alike if one.peer.session == peer.session and not one.waits), None)
        if isinstance(message, SnapshotChunk):
            self._chunk(taking, message, now)
        elif taking is not None:
            self._refused(taking, message.busy, now)

    def ask(self, subject: Subject, ask: int, members: Sequence[int], now: float) -> None:
        """Get a snapshot from the first of these members that gives one: adds a `Taken`, unless it is asked anew."""
        self.counters.asked += 1
        self._taking.pop(subject, None)
        peers = [self._peers[member] for member in members if member in self._peers]
        if not peers:
            self._finish(subject, ask, None)
            return
        reader, request = self._reader(), self.rng.getrandbits(32)
        taking = _SnapshotFetch(subject, ask, request, peers[1:], peers[0], reader, now + PROGRESS_S, now + PATIENCE_S)
        taking.waits = self._is_full
        self._taking[subject] = taking
        if not taking.waits:
            self._want(taking)

    @property
    def _is_full(self) -> bool:
        return sum([not taking.waits for taking in self._taking.values()]) >= TAKEN_MAX

    def _reader(self) -> SnapshotReader:
        return SnapshotReader(self.hasher, entries_max=self.entries_max)

    def _want(self, taking: _SnapshotFetch) -> None:
        self._send(taking.peer, SnapshotWanted(taking.request, *taking.subject, taking.cursor))

    def _chunk(self, taking: _SnapshotFetch | None, message: SnapshotChunk, now: float) -> None:
        if taking is None or message.chunk != taking.cursor:
            self.counters.stray_chunks += 1
            return
        seq, digest, group, block_tokens = HEAD.unpack(message.head)
        try:
            taking.reader.add(BlockRows(group, block_tokens, *message[4:]))
        except BadSnapshot:
            self.counters.bad_chunks += 1
            self._next(taking, now)
            return
        taking.cursor += 1
        taking.deadline, taking.resumes = now + PROGRESS_S, 0
        if message.last:
            self._want(taking)  # confirms the last chunk, so that the peer can drop the snapshot
            self._finish(taking.subject, taking.ask, Snapshot(seq, digest, taking.reader.finish()))
        elif taking.cursor % (WINDOW_CHUNKS // 2) == 0:
            self._want(taking)

    def _refused(self, taking: _SnapshotFetch, busy: bool, now: float) -> None:
        if busy and now + RETRY_S < taking.give_up_at:
            self._begin_anew(taking)
            taking.waits, taking.deadline = True, now + RETRY_S * self.rng.uniform(0.5, 1.5)
        else:
            self._next(taking, now)

    def _begin_anew(self, taking: _SnapshotFetch) -> None:
        taking.request = (taking.request + 1) & REQUEST_MAX
        taking.reader, taking.cursor, taking.resumes = self._reader(), 0, 0

    def _resume(self, taking: _SnapshotFetch, now: float) -> None:
        taking.deadline = now + PROGRESS_S
        if taking.waits and self._is_full:
            if now >= taking.give_up_at:
                self._finish(taking.subject, taking.ask, None)
            return
        taking.resumes += not taking.waits
        taking.waits = False
        if taking.resumes > RESUMES_MAX or taking.peer.session not in self._peers:
            self._next(taking, now)
        else:
            self._want(taking)

    def _next(self, taking: _SnapshotFetch, now: float) -> None:
        """This peer gives none: ask the next one that is still a peer, or finish without a snapshot."""
        while taking.peers:
            taking.peer = taking.peers.pop(0)
            if taking.peer.session in self._peers:
                self._begin_anew(taking)
                taking.deadline = now + PROGRESS_S
                self._want(taking)
                return
        self._finish(taking.subject, taking.ask, None)

    def _finish(self, subject: Subject, ask: int, snapshot: Snapshot | None) -> None:
        self._taking.pop(subject, None)
        self.counters.taken += snapshot is not None
        self.counters.failed += snapshot is None
        self.taken.append(Taken(subject, ask, snapshot))

    def _wanted(self, peer: Peer, message: SnapshotWanted, now: float) -> None:
        place, subject = (peer.session, message.request), Subject(message.backend, message.rank)
        given = self._given.get(place)
        if given is not None:
            self._go_on(given, message.cursor, now)
            return
        if message.cursor or peer.session not in self._peers:
            return  # the last message about a snapshot that is over
        busy = len(self._given) >= GIVEN_MAX or subject in [each.subject for each in self._given.values()]
        writer = None if busy else self.source(subject)
        if writer is None:
            self.counters.refused += 1
            self._send(peer, SnapshotRefused(message.request, busy))
            return
        self._given[place] = _Given(peer, message.request, subject, writer, now + SILENCE_S)

    def _go_on(self, given: _Given, cursor: int, now: float) -> None:
        if not given.cursor <= cursor <= given.sent:
            return
        given.until = now + SILENCE_S
        if cursor == given.cursor:
            given.sent = cursor  # what followed was lost
        given.cursor = cursor
        if given.writer.done and cursor == len(given.writer.chunks):
            self.counters.given += 1
            self.counters.blocks_left_out += given.writer.left_out
            del self._given[given.peer.session, given.request]

    def _give(self, now: float) -> None:
        for place, given in self._given.items():
            if not given.works:
                continue
            for _ in range(WRITTEN_EACH):
                given.writer.step()
            if given.writer.broken:
                self._send(given.peer, SnapshotRefused(given.request, busy=False))
                self._end(place)
            elif given.waits:
                self._send_chunk(given, now)
                self._given[place] = self._given.pop(place)  # the others come first next time
            return

    def _send_chunk(self, given: _Given, now: float) -> None:
        writer = given.writer
        rows = writer.chunks[given.sent]
        columns = cast("Sequence[bytes]", rows[2:])
        size = OVERHEAD_BYTES + FIELDS_BYTES + sum(map(len, columns))
        if size > self.window.room(now):
            self._no_room_until = now + 0.05
            return
        self.window.spend(size, now)
        self.counters.sent_bytes += size
        last = writer.done and given.sent + 1 == len(writer.chunks)
        head = HEAD.pack(writer.seq, writer.digest, rows.group, rows.block_tokens)
        self._send(given.peer, SnapshotChunk(given.request, given.sent, last, head, *rows[2:]))
        given.sent += 1

    def _end(self, place: tuple[int, int]) -> None:
        self.counters.broken += 1
        self._given.pop(place).writer.stop()

    def _send(self, peer: Peer, message: SnapshotMessage) -> None:
        self.outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
