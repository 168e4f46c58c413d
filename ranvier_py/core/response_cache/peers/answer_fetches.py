"""Fetching a stored answer that a peer has, and giving one to a peer that asks for it, each as a `transfer`.

Rules: a request waits `timeout_s` for the whole answer, and then goes on without it. Peers with the fewest failures in
a row are tried first, of these the nearest; each but the last gets half of the time that is left. One that failed
TIMEOUTS_MAX times in a row is passed over for a time, which doubles. An answer's age counts from when it was asked for,
so it is taken for older than it is, never for younger. What a peer sends costs only the question that it is about.
Bounds: OPEN_MAX questions at a time, OPEN_PER_PEER_MAX to one peer; questions and bytes a second that a node answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from struct import Struct
from typing import NamedTuple

from ranvier_py.core.mesh.budget import MESSAGE_BYTES, Window
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.transfer import End, Inquiry, Piece, Transfer, TransferTerms, Walk
from ranvier_py.core.mesh.wire.frame import bad
from ranvier_py.core.pauses import doubled
from ranvier_py.core.response_cache.peers.answer_values import ANSWER_BYTES_MAX, PeerAnswerCounters, PeerAnswerSettings

OPEN_MAX, OPEN_PER_PEER_MAX = 256, 64
TIMEOUTS_MAX = 3
PASSED_OVER_S, PASSED_OVER_S_MAX = 1.0, 30.0
PART_BYTES = 192 * 1024  # below a frame
ENCODING_BYTES = 4096  # what an answer may have beside its bodies: names and counts
AGE_MS_MAX = (1 << 32) - 1

ANSWERS = TransferTerms(3, "answer", Plane.ANSWERS, given_max=1024, steps=16, again=False)
"""An answer comes in time at once or not at all. What waits to be given is bounded by the bytes given in a second."""

SUBJECT = Struct("<32sI")
"""Keyed hash of a key, of which AnswerKeys has the first 8 bytes | milliseconds of age from which it is too old."""

RESULTS = {End.ABSENT: "absent", End.BUSY: "busy", End.SILENT: "timeout", End.BAD: "bad", End.GONE: "absent"}


class Fetched(NamedTuple):
    """The outcome of a question: an answer as of `asked_at` or later; `data` None: nobody gave one."""

    request: int
    asked_at: float = 0.0
    data: bytes | None = None


@dataclass(slots=True)
class _Holder:
    """How one peer answers: `timeouts` counts its failures in a row, by silence or by a bad answer: from TIMEOUTS_MAX
    on it is passed over for a time, which doubles. `open` counts its unanswered questions."""

    timeouts: int = 0
    silent_until: float = 0.0
    open: int = 0

    def failed(self, now: float) -> None:
        self.timeouts += 1
        if self.timeouts >= TIMEOUTS_MAX:
            self.silent_until = now + doubled(PASSED_OVER_S, self.timeouts - TIMEOUTS_MAX, PASSED_OVER_S_MAX)


@dataclass(slots=True)
class AnswerFetch(Inquiry):
    """One answer, asked of one peer after another until `until`."""

    number: int = 0
    name: bytes = b""
    peers: Sequence[Peer] = ()  # the one that is asked, and who may be asked next
    until: float = 0.0
    data: bytes = b""


class AnswerWalk(Walk):
    """An encoded answer on its way to a peer."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def take(self, now: float) -> Piece:  # noqa: ARG002  # as of all walks
        data, self._left = self._left[:PART_BYTES], self._left[PART_BYTES:]
        return Piece(data, not self._left)


class AnswerFetches:
    """Both sides, for one node. `arrived` is called once with the outcome of each question, and returns whether it is
    an answer. `lacks` is called when a peer does not have what it advertised. `find` (name, longest age in seconds,
    now) returns an encoded answer of ours, or None. `timeout_s` starts as in the settings."""

    def __init__(
        self,
        settings: PeerAnswerSettings,
        counters: PeerAnswerCounters,
        outbox: list[Outgoing],
        round_trip_s: Callable[[int], float],
        lacks: Callable[[int, bytes], object],
    ) -> None:
        self.arrived: Callable[[Fetched], bool] = lambda _: True
        self.find: Callable[[bytes, float, float], bytes | None] = lambda *_: None
        self.timeout_s = settings.timeout_s
        self.transfer = Transfer(ANSWERS, self, outbox, Window(1 << 40))  # `begin` keeps the budget
        self.hurries = False  # a question waits to be sent
        self._settings = settings
        self._counters = counters
        self._round_trip_s, self._lacks = round_trip_s, lacks
        self._number = 0
        self._holders: dict[int, _Holder] = {}
        self._bytes = Window(settings.given_bytes_per_s)
        self._questions: dict[int, Window] = {}  # of peers, by session

    def ask(self, name: bytes, holders: Iterable[Peer], age_max_s: float, now: float) -> int | None:
        """Ask one of `holders`, which advertise the answer. Returns the question's number, None if none is able."""
        found = list(holders)
        if not found:
            return None
        able = [peer for peer in found if self._is_able(peer.session, now)]
        self._counters.passed_over += len(found) - len(able)
        if not able or self.transfer.open >= OPEN_MAX:
            self._counters.fetches["busy"] += 1
            return None
        able.sort(key=lambda peer: (self._holder(peer).timeouts, self._round_trip_s(peer.session) or inf))
        self._number += 1
        subject = SUBJECT.pack(name, int(min(AGE_MS_MAX, 1000 * age_max_s)))
        until, self.hurries = now + self.timeout_s, True
        self._want(AnswerFetch(able[0], subject, number=self._number, name=name, peers=able, until=until), now)
        return self._number

    def peers(self, live: Sequence[Peer], now: float) -> None:
        """Set the peers."""
        self.transfer.meet(live, now)
        there, per_s = self.transfer.peers, self._settings.given_per_s
        self._holders = {session: holder for session, holder in self._holders.items() if session in there}
        self._questions = {session: self._questions.get(session) or Window(per_s) for session in there}

    # --- as a feature of transfers ----------------------------------------------------------------------------------

    def begin(self, peer: Peer, subject: bytes, now: float) -> Walk | End:
        questions, given = self._questions[peer.session], self._counters.given
        if questions.room(now) < 1 or self._bytes.room(now) < 1 or len(subject) != SUBJECT.size:
            given["busy"] += 1
            return End.BUSY
        questions.spend(1, now)
        name, age_max_ms = SUBJECT.unpack(subject)
        found = self.find(name, age_max_ms / 1000, now)
        if found is None or len(found) > ANSWER_BYTES_MAX + ENCODING_BYTES:
            given["absent"] += 1
            return End.ABSENT
        given["found"] += 1
        self._counters.given_bytes += len(found)
        self._bytes.spend(len(found) + MESSAGE_BYTES, now)
        return AnswerWalk(found)

    def take(self, fetch: AnswerFetch, data: bytes, now: float) -> None:  # noqa: ARG002  # as of all features
        fetch.data += data
        if len(fetch.data) > ANSWER_BYTES_MAX + ENCODING_BYTES:
            bad("an answer too long")

    def over(self, fetch: AnswerFetch, end: End, now: float) -> None:
        """Hand on the answer. Without one ask another peer if there is time, else end the question with this result."""
        holder = self._holder(fetch.peer)
        holder.open -= 1
        if end is End.WHOLE:
            self._counters.fetched_bytes += len(fetch.data)
            is_answer = self.arrived(Fetched(fetch.number, fetch.asked_at, fetch.data))
            self._counters.fetches["found" if is_answer else "bad"] += 1
            fetch.peers, end = (), End.WHOLE if is_answer else End.BAD
        if end in (End.SILENT, End.BAD):
            holder.failed(now)
        elif end is not End.GONE:
            holder.timeouts = 0
        if end is End.ABSENT:
            self._lacks(fetch.peer.session, fetch.name)
        if fetch.peers:
            self._next(fetch, RESULTS[end], now)

    def _is_able(self, session: int, now: float) -> bool:
        holder = self._holders.get(session)
        if holder is None:
            return True
        open_max = 1 if holder.timeouts >= TIMEOUTS_MAX else OPEN_PER_PEER_MAX
        return holder.open < open_max and now >= holder.silent_until

    def _holder(self, peer: Peer) -> _Holder:
        return self._holders.setdefault(peer.session, _Holder())

    def _next(self, fetch: AnswerFetch, result: str, now: float) -> None:
        there = self.transfer.peers
        fetch.peers = [peer for peer in fetch.peers[1:] if peer.session in there and self._is_able(peer.session, now)]
        if fetch.peers and now < fetch.until:
            self._want(fetch, now)
            return
        self._counters.fetches[result] += 1
        self.arrived(Fetched(fetch.number))

    def _want(self, fetch: AnswerFetch, now: float) -> None:
        fetch.peer, fetch.data = fetch.peers[0], b""
        fetch.progress_s = (fetch.until - now) / (2 if len(fetch.peers) > 1 else 1)
        self._holder(fetch.peer).open += 1
        self.transfer.ask(fetch, now)
