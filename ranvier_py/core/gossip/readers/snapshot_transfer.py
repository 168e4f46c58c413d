"""Copies of what an engine holds, from a node that knows it exactly to one that has lost its place in the stream.

    A -> B  HoldingsWanted      B freezes what it holds, for as long as it takes to write it down, some chunks a tick
    B -> A  Holdings …          WINDOW_CHUNKS ahead of what A says has come; A builds them into a copy
    A -> B  HoldingsWanted (cursor)
    A       hands the copy to the gap machine, which takes it when it has all that followed

    A -> B  HoldingsSince       A stands by for B (following.py): B sends what changed after the copy that A has, or all

Rules: a transfer is one request of one peer; chunks of another, or out of turn, are dropped; silence is answered by the
same cursor once more, and ends it at last. Who is busy is asked again; where a copy breaks, or is refused, the next who
may have one is asked.
Nobody waits for it: events are applied as ever meanwhile.
Bounds: GIVEN_MAX copies given (FOLLOWED_MAX to who stands by) and TAKEN_MAX taken at a time, others are refused and
counted; bytes by `bytes_per_s`.
Cost: 2 ms a tick, at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from struct import Struct
from typing import NamedTuple, cast

from ranvier_py.core.engine_cache.snapshot import BadSnapshot, BlockRows, Copy, Original, Place, Reader
from ranvier_py.core.engine_cache.standby import Incoming, StandbyCopy
from ranvier_py.core.gossip.gossip_values import Outgoing, Peer, Plane
from ranvier_py.core.gossip.replication.budget import Window
from ranvier_py.core.gossip.wire.frame import OVERHEAD_BYTES
from ranvier_py.core.gossip.wire.messages import Holdings, HoldingsRefused, HoldingsSince, HoldingsWanted
from ranvier_py.core.prompts.fingerprint import TokenHasher

GIVEN_MAX, TAKEN_MAX = 2, 8
FOLLOWED_MAX = 32
"""Mostly what changed within a second: one chunk."""

WINDOW_CHUNKS = 16
WRITTEN_EACH = 4
"""Chunks written a tick, 2 ms: what the engine says waits until all are."""

PROGRESS_S = 1.0  # without a chunk, after which it is asked for again
RESUMES_MAX = 4
RETRY_S, PATIENCE_S = 1.0, 25.0
"""Who is busy is asked again so soon, and for so long: less than a gap machine waits. A node that joins may take over
several streams from one."""

SILENCE_S = 6.0  # a copy that is given ends so long after its peer's last word
BYTES_PER_S = 8 * 1024 * 1024
"""A copy of 200,000 blocks is 5 MB."""

HEAD = Struct("<QQII")
FIELDS_BYTES = 80
"""Of a chunk beside its columns, at most."""

U32 = (1 << 32) - 1


class Subject(NamedTuple):
    """What a copy is of: an engine, by its key, and a data-parallel rank of it."""

    backend: int
    rank: int


class Taken(NamedTuple):
    """What became of a question. `copy` None: nobody gave one."""

    subject: Subject
    ask: int
    copy: Copy | None


class Followed(NamedTuple):
    """What became of a question of who stands by. `copy` None: nobody gave anything."""

    subject: Subject
    copy: StandbyCopy | None


@dataclass(slots=True)
class _Given:
    peer: Peer
    subject: Subject
    request: int
    source: Original
    until: float
    follows: bool = False
    cursor: int = 0
    sent: int = 0

    @property
    def waits(self) -> bool:
        """Whether there is a chunk that the peer would take."""
        return self.sent < min(len(self.source.writer.chunks), self.cursor + WINDOW_CHUNKS)

    @property
    def works(self) -> bool:
        return self.waits or not (self.source.writer.done or self.source.writer.broken)


@dataclass(slots=True)
class _Taking:
    subject: Subject
    ask: int
    request: int
    peers: list[Peer]  # who may be asked next
    peer: Peer
    deadline: float
    make_reader: Callable[[], Reader | Incoming]
    reader: Reader | Incoming
    give_up_at: float
    waits: bool = False  # to ask again who was busy
    cursor: int = 0
    resumes: int = 0


@dataclass(slots=True)
class HoldingsCounts:
    """Counters since start."""

    asked: int = 0
    taken: int = 0
    failed: int = 0
    given: int = 0
    refused: int = 0
    broken: int = 0  # that we gave: cleared or too busy meanwhile, or the peer fell silent
    blocks_left_out: int = 0
    followed: int = 0  # times that changes, or all, were given to who stands by
    stray_chunks: int = 0
    bad_chunks: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Transfers:
    """Both sides, for one node. `taken` and `followed` are drained by their owners; `source` begins a copy, of what
    changed after a place where one is given, or says that there is none."""

    hasher: TokenHasher
    outbox: list[Outgoing]
    rng: Random
    source: Callable[[Subject, Place | None], Original | None] = lambda _subject, _since: None
    entries_max: int = 2_000_000
    bytes_per_s: int = BYTES_PER_S
    taken: list[Taken] = field(default_factory=list)
    followed: list[Followed] = field(default_factory=list)
    counts: HoldingsCounts = field(default_factory=HoldingsCounts)
    _peers: dict[int, Peer] = field(default_factory=dict)
    _given: dict[tuple[int, int], _Given] = field(default_factory=dict)  # by session and request; the next one first
    _taking: dict[Subject, _Taking] = field(default_factory=dict)
    _window: Window = field(init=False)
    _no_room_until: float = 0.0

    def __post_init__(self) -> None:
        self._window = Window(self.bytes_per_s)

    @property
    def wake_at(self) -> float:
        if not (self._given or self._taking):
            return inf
        if any(given.works for given in self._given.values()):
            return self._no_room_until
        ends = [given.until for given in self._given.values()] + [taking.deadline for taking in self._taking.values()]
        return min(ends)

    def peers(self, live: Sequence[Peer]) -> None:
        self._peers = {peer.session: peer for peer in live}
        for place in [place for place in self._given if place[0] not in self._peers]:
            self._end(place)

    def tick(self, now: float) -> None:
        """Some chunks written, one sent."""
        if not (self._given or self._taking):
            return
        for taking in [taking for taking in self._taking.values() if taking.deadline <= now]:
            self._resume(taking, now)
        for place in [place for place, given in self._given.items() if given.until <= now]:
            self._end(place)
        if now >= self._no_room_until:
            self._give(now)

    def receive(
        self, peer: Peer, message: Holdings | HoldingsWanted | HoldingsSince | HoldingsRefused, now: float
    ) -> None:
        if isinstance(message, HoldingsWanted):
            self._wanted(peer, message, message.cursor, None, now)
        elif isinstance(message, HoldingsSince):
            self._wanted(peer, message, 0, Place(message.after - 1, message.digest), now)
        elif isinstance(message, Holdings):
            self._chunk(peer, message, now)
        else:
            taking = self._of(peer, message.request)
            if taking is not None:
                self._refused(taking, message.busy, now)

    # --- taking -----------------------------------------------------------------------------------------------------

    def ask(self, subject: Subject, ask: int, members: Sequence[int], now: float) -> None:
        """Get a copy from one of these, the first that gives one. Ends with a `Taken`; another question ends this."""
        self.counts.asked += 1
        self._begin(subject, ask, members, lambda: Reader(self.hasher, entries_max=self.entries_max), now)

    def follow(self, subject: Subject, copy: StandbyCopy, members: Sequence[int], now: float) -> None:
        """Get what changed after a copy, or another one. Ends with a `Followed`; it is not to be used before."""
        self._begin(subject, 0, members, lambda: Incoming(copy), now)

    def forget(self, subject: Subject) -> None:
        """Its answer is not wanted any more."""
        self._taking.pop(subject, None)

    def _begin(
        self,
        subject: Subject,
        ask: int,
        members: Sequence[int],
        make_reader: Callable[[], Reader | Incoming],
        now: float,
    ) -> None:
        self._taking.pop(subject, None)
        peers = [self._peers[member] for member in members if member in self._peers]
        reader, request = make_reader(), self.rng.getrandbits(32)
        if not peers or len(self._taking) >= TAKEN_MAX:
            self._finish(subject, ask, reader, None)
            return
        deadline, give_up_at = now + PROGRESS_S, now + PATIENCE_S
        taking = _Taking(subject, ask, request, peers[1:], peers[0], deadline, make_reader, reader, give_up_at)
        self._taking[subject] = taking
        self._want(taking)

    def _of(self, peer: Peer, request: int) -> _Taking | None:
        for taking in self._taking.values():
            if taking.request == request and taking.peer.session == peer.session:
                return taking
        return None

    def _want(self, taking: _Taking) -> None:
        backend, rank = taking.subject
        if taking.cursor == 0 and isinstance(taking.reader, Incoming):
            seq, digest = taking.reader.after
            self._send(taking.peer, HoldingsSince(taking.request, backend, rank, seq + 1, digest))
        else:
            self._send(taking.peer, HoldingsWanted(taking.request, backend, rank, taking.cursor))

    def _chunk(self, peer: Peer, message: Holdings, now: float) -> None:
        taking = self._of(peer, message.request)
        if taking is None or message.chunk != taking.cursor:
            self.counts.stray_chunks += 1
            return
        seq, digest, group, block_tokens = HEAD.unpack(message.head)
        try:
            taking.reader.add(BlockRows(group, block_tokens, *message[4:]))
        except BadSnapshot:
            self.counts.bad_chunks += 1
            self._next(taking, now)
            return
        taking.cursor += 1
        taking.deadline, taking.resumes = now + PROGRESS_S, 0
        if message.last:
            del self._taking[taking.subject]
            self._want(taking)  # so that it is let go of
            self._finish(taking.subject, taking.ask, taking.reader, Place(seq, digest))
        elif taking.cursor % (WINDOW_CHUNKS // 2) == 0:
            self._want(taking)

    def _refused(self, taking: _Taking, busy: bool, now: float) -> None:
        if busy and now + RETRY_S < taking.give_up_at:
            self._begin_anew(taking)
            taking.waits, taking.deadline = True, now + RETRY_S * self.rng.uniform(0.5, 1.5)
        else:
            self._next(taking, now)

    def _begin_anew(self, taking: _Taking) -> None:
        taking.request = (taking.request + 1) & U32
        taking.reader, taking.cursor, taking.resumes = taking.make_reader(), 0, 0

    def _resume(self, taking: _Taking, now: float) -> None:
        taking.resumes += not taking.waits
        taking.waits = False
        if taking.resumes > RESUMES_MAX or taking.peer.session not in self._peers:
            self._next(taking, now)
        else:
            taking.deadline = now + PROGRESS_S
            self._want(taking)

    def _next(self, taking: _Taking, now: float) -> None:
        """This peer gives none: another?"""
        while taking.peers:
            taking.peer = taking.peers.pop(0)
            if taking.peer.session in self._peers:
                self._begin_anew(taking)
                taking.deadline = now + PROGRESS_S
                self._want(taking)
                return
        del self._taking[taking.subject]
        self._finish(taking.subject, taking.ask, taking.reader, None)

    def _finish(self, subject: Subject, ask: int, reader: Reader | Incoming, place: Place | None) -> None:
        """It ends; with all that there is, up to a place, or with nothing."""
        if isinstance(reader, Incoming):
            self.followed.append(Followed(subject, reader.finish(place) if place is not None else None))
            return
        self.counts.taken += place is not None
        self.counts.failed += place is None
        self.taken.append(Taken(subject, ask, Copy(*place, reader.finish()) if place is not None else None))

    # --- giving -----------------------------------------------------------------------------------------------------

    def _wanted(
        self, peer: Peer, message: HoldingsWanted | HoldingsSince, cursor: int, since: Place | None, now: float
    ) -> None:
        place, subject = (peer.session, message.request), Subject(message.backend, message.rank)
        given = self._given.get(place)
        if given is not None:
            self._go_on(given, cursor, now)
            return
        if cursor or peer.session not in self._peers:
            return  # the last word about a copy that is over
        others, follows = self._given.values(), since is not None
        alike = sum([each.follows is follows for each in others])
        writing = [each.subject for each in others if not (follows and each.source.writer.done)]
        busy = alike >= (FOLLOWED_MAX if follows else GIVEN_MAX) or subject in writing
        source = None if busy else self.source(subject, since)
        if source is None:
            self.counts.refused += 1
            self._send(peer, HoldingsRefused(message.request, busy))
            return
        self._given[place] = _Given(peer, subject, message.request, source, now + SILENCE_S, follows=follows)

    def _go_on(self, given: _Given, cursor: int, now: float) -> None:
        if not given.cursor <= cursor <= given.sent:
            return
        given.until = now + SILENCE_S
        if cursor == given.cursor:
            given.sent = cursor  # what followed was lost
        given.cursor = cursor
        if given.source.writer.done and cursor == len(given.source.writer.chunks):
            self.counts.given += not given.follows
            self.counts.followed += given.follows
            self.counts.blocks_left_out += given.source.writer.left_out
            del self._given[given.peer.session, given.request]

    def _give(self, now: float) -> None:
        for place, given in self._given.items():
            if not given.works:
                continue
            writer = given.source.writer
            for _ in range(WRITTEN_EACH):
                writer.step()
            if writer.broken:
                self._send(given.peer, HoldingsRefused(given.request, busy=False))
                self._end(place)
            elif given.waits:
                self._send_chunk(given, now)
                self._given[place] = self._given.pop(place)  # the others come first next time
            return

    def _send_chunk(self, given: _Given, now: float) -> None:
        seq, digest, writer = given.source
        rows = writer.chunks[given.sent]
        columns = cast("Sequence[bytes]", rows[2:])
        size = OVERHEAD_BYTES + FIELDS_BYTES + sum(map(len, columns))
        if size > self._window.room(now):
            self._no_room_until = now + 0.05
            return
        self._window.spend(size, now)
        self.counts.sent_bytes += size
        last = writer.done and given.sent + 1 == len(writer.chunks)
        head = HEAD.pack(seq, digest, rows.group, rows.block_tokens)
        self._send(given.peer, Holdings(given.request, given.sent, last, head, *rows[2:]))
        given.sent += 1

    def _end(self, place: tuple[int, int]) -> None:
        self.counts.broken += 1
        self._given.pop(place).source.writer.stop()

    def _send(self, peer: Peer, message: Holdings | HoldingsWanted | HoldingsSince | HoldingsRefused) -> None:
        self.outbox.append(Outgoing(peer.address, peer.session, Plane.BULK, message))
