"""Windowed transfers between two nodes: what is too long for one message comes in parts, as the asker lets them come.

    A -> B  Wanted, cursor 0    B begins, or refuses: it has none, or is busy
    B -> A  TransferPart ...    each once there is room in B's budget, up to WINDOW_PARTS ahead of A's last cursor
    A -> B  Wanted, a later cursor confirms the parts before it; the same one asks for them again; the last one ends it
Rules: a part out of order, or that nobody asked this peer for, is dropped. Invariant: an inquiry ends once, with all
parts in their order or with why not (test_transfer.py).
Bounds: WINDOW_PARTS kept of what is given; `given_max` given at a time, and as many that only lack their confirmation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Any, NamedTuple, Protocol

from ranvier_py.core.mesh.budget import MESSAGE_BYTES, Window
from ranvier_py.core.mesh.machine import Machine, Senders
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import COLUMN, FLAG, U16, U32
from ranvier_py.core.mesh.wire.frame import BadFrame
from ranvier_py.core.metrics import counter, gauge

WINDOW_PARTS = 16
"""Parts that may be in transit at once. At 17 kB each: 250 MB/s over a millisecond, 5 MB/s over 50 ms."""

PROGRESS_S = 1.0
"""A part that does not come within this is asked for again: ten times what a busy peer needs for the next one."""

RESUMES_MAX = 4  # times in a row that a part is asked for again
SILENCE_S = 6.0  # giving ends this long after the peer's last message: longer than it asks again
NO_ROOM_S = 0.05
REQUEST_MAX = (1 << 32) - 1


class Wanted(NamedTuple):
    """Asks for what `subject` names. A later cursor confirms the parts before it, and has no subject."""

    what: int  # u16: number of the kind of transfer
    request: int  # u32, chosen by the asker
    cursor: int  # u32: the first part wanted
    subject: bytes


class TransferPart(NamedTuple):
    what: int
    request: int
    number: int  # u32: parts count from 0
    last: bool
    data: bytes


class Refused(NamedTuple):
    """Ends what was asked: the sender has none, or lost it; `busy`: it gives too many, ask it again or another peer."""

    what: int
    request: int
    busy: bool


class End(Enum):
    """How an inquiry ended."""

    WHOLE = auto()  # all parts came
    ABSENT = auto()
    BUSY = auto()
    SILENT = auto()
    BAD = auto()  # a part that can't be read
    GONE = auto()  # the peer is none any more


class Piece(NamedTuple):
    data: bytes
    last: bool


class Walk:
    """What is given to one peer, read piece by piece."""

    def take(self, now: float) -> Piece | End | None:
        """Return the next piece after a step of at most 2 ms; None: not yet; an End: it can't be had any more."""
        raise NotImplementedError

    def stop(self) -> None:
        """Note that the transfer is over."""


@dataclass(slots=True)
class Inquiry:
    """Something wanted of one peer; features add what they need. `progress_s`: how long to wait for each part."""

    peer: Peer
    subject: bytes = b""
    progress_s: float = PROGRESS_S
    request: int = 0
    parts: int = 0  # that have come
    asked_at: float = 0.0  # the part that comes next was read at this time or later


@dataclass(slots=True)
class OpenInquiry:
    """How far the parts of an inquiry have come."""

    inquiry: Inquiry
    wanted_at: float  # when more parts were let come last
    deadline: float = 0.0
    cursor: int = 0  # of the last message to the peer
    resumes: int = 0


class Feature(Protocol):
    """What says what is transferred."""

    def begin(self, peer: Peer, subject: bytes, now: float) -> Walk | End:
        """Return what a peer is given, or why it is given nothing. BadFrame: this is no subject."""

    def take(self, inquiry: Any, data: bytes, now: float) -> None:
        """Take the next part. Raises BadFrame for one that is none."""

    def over(self, inquiry: Any, end: End, now: float) -> None:
        """Take note of the end. The inquiry may be asked again at once."""


class TransferTerms(NamedTuple):
    """What distinguishes one kind of transfer from others."""

    what: int  # its number
    name: str  # of its metrics
    plane: Plane = Plane.BULK
    given_max: int = 2
    share: int = 1  # while so many are given, none gets more than the budget divided by this
    steps: int = 1  # parts that are read in one tick
    again: bool = True  # what is lost is asked for again; if not, nothing is kept or confirmed
    one_each: bool = False  # a new inquiry of a peer ends its old one


@dataclass(slots=True)
class TransferCounters:
    running: int = gauge("Things in several messages that are being sent to peers.")
    asked: int = counter("Questions to peers for something that comes in several messages.")
    taken: int = counter("Things in several messages that came whole from a peer.")
    given: int = counter("Things in several messages that went to peers as a whole.")
    refused: int = counter("Questions of peers that were refused: there was nothing to give, or too many asked.")
    broken: int = counter("Things in several messages whose peer left or fell silent, or that changed meanwhile.")
    parts_sent: int = counter("Messages with parts of something sent to peers.")
    parts_resent: int = counter("Messages with parts of something sent to peers again because they were lost.")
    parts_stray: int = counter("Messages with parts of something that were not asked for, or came out of order.")
    parts_bad: int = counter("Messages with parts of something that could not be read.")
    sent_bytes: int = counter("Bytes of things sent to peers in several messages.")


@dataclass(slots=True)
class Delivery:
    """What one peer is given, and how far it has come."""

    peer: Peer
    request: int
    walk: Walk
    share: Window
    until: float  # when it ends, if the peer stays silent
    cursor: int = 0  # the peer has all parts before this one
    sent: int = 0  # parts sent
    count: float = inf  # of all parts, once the last one is read
    kept: deque[bytes] = field(default_factory=deque)  # the parts from `cursor` on that are read

    @property
    def waits(self) -> bool:
        """Whether there is a part that the peer would take."""
        return self.sent < min(self.count, self.cursor + WINDOW_PARTS)

    def confirm(self, cursor: int) -> None:
        while self.cursor < cursor:
            self.kept.popleft()
            self.cursor += 1


class Transfer:
    """One kind of transfer at one node, both sides of it. `window` is the budget of parts."""

    def __init__(self, terms: TransferTerms, feature: Feature, outbox: list[Outgoing], window: Window) -> None:
        self.terms = terms
        self.counters = TransferCounters()
        self.window = window
        self.peers: Mapping[int, Peer] = {}
        self._feature = feature
        self._outbox = outbox
        self._request = 0
        self._asked: dict[int, OpenInquiry] = {}
        self._given: dict[tuple[int, int], Delivery] = {}  # by (session, request), the one whose turn it is first
        self._no_room_until = 0.0

    @property
    def wake_at(self) -> float:
        if not (self._given or self._asked):
            return inf
        at = min([asked.deadline for asked in self._asked.values()], default=inf)
        return min([at, *[self._no_room_until if one.waits else one.until for one in self._given.values()]])

    def meet(self, peers: Iterable[Peer], now: float) -> None:
        """Set the peers to give to and to ask."""
        self.peers = {peer.session: peer for peer in peers}
        for place in [place for place in self._given if place[0] not in self.peers]:
            self._end(place)
        for asked in [one for one in self._asked.values() if one.inquiry.peer.session not in self.peers]:
            self._over(asked.inquiry, End.GONE, now)

    def tick(self, now: float) -> None:
        """Ask again for what is late, end what is silent, and send the next parts."""
        for asked in [one for one in self._asked.values() if one.deadline <= now]:
            asked.resumes += 1
            if self.terms.again and asked.resumes <= RESUMES_MAX:
                self._want(asked, now)
            else:
                self._over(asked.inquiry, End.SILENT, now)
        for place in [place for place, giving in self._given.items() if giving.until <= now]:
            self._end(place)
        for _ in range(self.terms.steps if now >= self._no_room_until else 0):
            self._give(now)

    def receive(self, peer: Peer, message: Any, now: float) -> None:
        if isinstance(message, Wanted):
            self._wanted(peer, message, now)
            return
        asked = self._asked.get(message.request)
        if asked is None or asked.inquiry.peer.session != peer.session:
            self.counters.parts_stray += isinstance(message, TransferPart)
        elif isinstance(message, TransferPart):
            self._part(asked, message, now)
        else:
            self._over(asked.inquiry, End.BUSY if message.busy else End.ABSENT, now)

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """How many inquiries are open."""
        return len(self._asked)

    def ask(self, inquiry: Inquiry, now: float) -> None:
        """Ask the inquiry's peer, from the first part on."""
        self._request = inquiry.request = (self._request + 1) & REQUEST_MAX
        inquiry.parts = 0
        self._asked[self._request] = asked = OpenInquiry(inquiry, wanted_at=now)
        self.counters.asked += 1
        self._want(asked, now)

    def drop(self, inquiry: Inquiry) -> None:
        """End an inquiry without a word: its answer is not wanted any more."""
        self._asked.pop(inquiry.request, None)

    def _want(self, asked: OpenInquiry, now: float) -> None:
        """Let more parts come. If none has come since, this asks for the same again."""
        inquiry = asked.inquiry
        asked.deadline, asked.cursor = now + inquiry.progress_s, inquiry.parts
        if not asked.resumes:  # parts that come until the next time were asked for by the message before this one
            inquiry.asked_at, asked.wanted_at = asked.wanted_at, now
        subject = b"" if inquiry.parts else inquiry.subject
        self._send(inquiry.peer, Wanted(self.terms.what, inquiry.request, inquiry.parts, subject))

    def _part(self, asked: OpenInquiry, message: TransferPart, now: float) -> None:
        inquiry = asked.inquiry
        if message.number != inquiry.parts:
            self.counters.parts_stray += 1
            return
        try:
            self._feature.take(inquiry, message.data, now)
        except BadFrame:
            self.counters.parts_bad += 1
            self._over(inquiry, End.BAD, now)
            return
        inquiry.parts += 1
        if self.terms.again:
            asked.deadline, asked.resumes = now + inquiry.progress_s, 0
            if message.last or inquiry.parts - asked.cursor == WINDOW_PARTS // 2:
                self._want(asked, now)
        if message.last:
            self.counters.taken += 1
            self._over(inquiry, End.WHOLE, now)

    def _over(self, inquiry: Inquiry, end: End, now: float) -> None:
        del self._asked[inquiry.request]
        self._feature.over(inquiry, end, now)

    # --- giving -----------------------------------------------------------------------------------------------------

    def running(self) -> int:
        return sum([giving.sent < giving.count for giving in self._given.values()])

    def _wanted(self, peer: Peer, message: Wanted, now: float) -> None:
        """Go on with what this peer gets, or begin. A cursor of what is not known here was of an earlier run."""
        if peer.session not in self.peers:
            return
        place = (peer.session, message.request)
        giving = self._given.get(place)
        if giving is not None:
            self._go_on(place, giving, message.cursor, now)
            return
        walk = End.ABSENT if message.cursor else self._begun(peer, message.subject, now)
        if isinstance(walk, End):
            self._refuse(peer, message.request, walk)
            return
        if len(self._given) >= 2 * self.terms.given_max:
            self._end(next(place for place, giving in self._given.items() if giving.sent >= giving.count))
        share = Window(self.window.per_s // self.terms.share)
        self._given[place] = Delivery(peer, message.request, walk, share, now + SILENCE_S)

    def _begun(self, peer: Peer, subject: bytes, now: float) -> Walk | End:
        if self.terms.one_each:
            for old in [old for old in self._given if old[0] == peer.session]:
                self._end(old)
        if self.running() >= self.terms.given_max:
            return End.BUSY
        try:
            return self._feature.begin(peer, subject, now)
        except BadFrame:
            return End.ABSENT

    def _go_on(self, place: tuple[int, int], giving: Delivery, cursor: int, now: float) -> None:
        if not giving.cursor <= cursor <= giving.sent:
            return
        giving.until = now + SILENCE_S
        if cursor == giving.cursor:  # what followed was lost
            self.counters.parts_resent += giving.sent - cursor
            giving.sent = cursor
        giving.confirm(cursor)
        if cursor == giving.count:
            self._end(place)

    def _give(self, now: float) -> None:
        """Send the next part of the first one for which there is room. The others come first next time."""
        is_full = self.running() >= self.terms.given_max
        for place, giving in list(self._given.items()):
            if not giving.waits:
                continue
            self._given[place] = self._given.pop(place)
            if giving.sent - giving.cursor == len(giving.kept):
                piece = giving.walk.take(now)
                if isinstance(piece, End):
                    self._refuse(giving.peer, giving.request, piece)
                    self._end(place)
                if not isinstance(piece, Piece):
                    return
                giving.kept.append(piece.data)
                giving.count = giving.sent + 1 if piece.last else inf
            size = MESSAGE_BYTES + len(giving.kept[giving.sent - giving.cursor])
            if size <= self.window.room(now) and (not is_full or size <= giving.share.room(now)):
                self._no_room_until = 0.0
                self._send_part(place, giving, size, now)
                return
            self._no_room_until = now + NO_ROOM_S

    def _send_part(self, place: tuple[int, int], giving: Delivery, size: int, now: float) -> None:
        self.window.spend(size, now)
        giving.share.spend(size, now)
        self.counters.parts_sent += 1
        self.counters.sent_bytes += size
        number, data = giving.sent, giving.kept[giving.sent - giving.cursor]
        giving.sent += 1
        last = giving.sent == giving.count
        self._send(giving.peer, TransferPart(self.terms.what, giving.request, number, last, data))
        if not self.terms.again:
            giving.confirm(giving.sent)
            if last:
                self._end(place)

    def _end(self, place: tuple[int, int]) -> None:
        giving = self._given.pop(place)
        self.counters.given += giving.sent == giving.count
        self.counters.broken += giving.sent != giving.count
        giving.walk.stop()

    def _refuse(self, peer: Peer, request: int, end: End) -> None:
        self.counters.refused += 1
        self._send(peer, Refused(self.terms.what, request, end is End.BUSY))

    def _send(self, peer: Peer, message: Wanted | TransferPart | Refused) -> None:
        self._outbox.append(Outgoing(peer.address, peer.session, self.terms.plane, message))


class Transfers(Machine):
    """All kinds of transfers of one node. Their features set the peers of each."""

    kinds = (
        Kind("transfers", 24, Wanted, (U16, U32, U32, COLUMN)),
        Kind("transfers", 25, TransferPart, (U16, U32, U32, FLAG, COLUMN)),
        Kind("transfers", 26, Refused, (U16, U32, FLAG)),
    )
    senders = Senders.MET_FIRST

    def __init__(self, *transfers: Transfer) -> None:
        self._transfers = {transfer.terms.what: transfer for transfer in transfers}

    @property
    def wake_at(self) -> float:
        return min([transfer.wake_at for transfer in self._transfers.values()])

    def tick(self, now: float) -> None:
        for transfer in self._transfers.values():
            if transfer.wake_at <= now:
                transfer.tick(now)

    def receive(self, peer: Peer, message: Any, now: float) -> None:
        transfer = self._transfers.get(message.what)  # None: a later version gives more
        if transfer is not None:
            transfer.receive(peer, message, now)

    def counted(self) -> Mapping[str, Any]:
        for transfer in self._transfers.values():
            transfer.counters.running = transfer.running()
        return {f"{transfer.terms.name}_transfers": transfer.counters for transfer in self._transfers.values()}
