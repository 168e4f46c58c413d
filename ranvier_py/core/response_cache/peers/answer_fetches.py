"""Fetching a stored answer that a peer has, and giving one to a peer that asks for it.

Rules: a request waits `timeout_s` for the whole answer, and then goes on without it. Peers with the fewest failures in
a row are tried first, of these the nearest; each but the last gets half of the time that is left. One that failed
TIMEOUTS_MAX times in a row is passed over for a time, which doubles. An answer's age counts from when it was asked for,
so it is taken for older than it is, never for younger. What a peer sends costs only the question that it is about.
Bounds: OPEN_MAX questions at a time, OPEN_PER_PEER_MAX to one peer; questions and bytes a second that a node answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ranvier_py.core.mesh.budget import MESSAGE_BYTES, Window
from ranvier_py.core.mesh.mesh_values import Outgoing, Peer, Plane
from ranvier_py.core.mesh.wire.codec import Kind
from ranvier_py.core.mesh.wire.columns import COLUMN, FLAG, U16, U32, bytes_field
from ranvier_py.core.metrics import increment
from ranvier_py.core.pauses import doubled
from ranvier_py.core.response_cache.peers.answer_values import ANSWER_BYTES_MAX, PeerAnswerCounters, PeerAnswerSettings

OPEN_MAX, OPEN_PER_PEER_MAX = 256, 64
TIMEOUTS_MAX = 3
PASSED_OVER_S, PASSED_OVER_S_MAX = 1.0, 30.0
ANSWER_PARTS_MAX = 8
PART_BYTES = 192 * 1024  # below a frame
ENCODING_BYTES = 4096  # what an answer may have beside its bodies: names and counts
AGE_MS_MAX = (1 << 32) - 1


class AnswerWanted(NamedTuple):
    """Asks for the answer of this name, if it is not older than `age_max_ms`."""

    request: int  # u32, chosen by the asker
    name: bytes  # 32: keyed hash of a key, of which AnswerKeys has the first 8 bytes
    age_max_ms: int  # u32


class AnswerPart(NamedTuple):
    """A part of an answer, as `answer_frames` writes it."""

    request: int
    part: int  # u16: parts count from 0
    parts: int  # u16
    data: bytes


class AnswerRefused(NamedTuple):
    """Refuses AnswerWanted: the answer is not here, or too old; `busy`: too many were asked for."""

    request: int
    busy: bool


FETCH_KINDS = (
    Kind("answers", 82, AnswerWanted, (U32, bytes_field(32, "name of an answer"), U32)),
    Kind("answers", 83, AnswerPart, (U32, U16, U16, COLUMN)),
    Kind("answers", 84, AnswerRefused, (U32, FLAG)),
)


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


@dataclass(slots=True)
class _Fetch:
    request: int
    name: bytes
    age_max_s: float
    asked_at: float
    until: float  # deadline of the whole fetch
    others: list[Peer]  # peers that may be asked next
    peer: Peer
    deadline: float
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class AnswerFetches:
    """The questions of one node. `arrived` is called once with the outcome of each, and returns whether its data is an
    answer. `lacks` is called when a peer does not have what it advertised. `timeout_s` starts as in the settings."""

    def __init__(
        self,
        settings: PeerAnswerSettings,
        counters: PeerAnswerCounters,
        outbox: list[Outgoing],
        round_trip_s: Callable[[int], float],
    ) -> None:
        self.arrived: Callable[[Fetched], bool] = lambda _: True
        self.lacks: Callable[[int, bytes], object] = lambda *_: None
        self.timeout_s = settings.timeout_s
        self._counters = counters
        self._outbox = outbox
        self._round_trip_s = round_trip_s
        self._request = 0
        self._hurries = False  # a question waits to be sent
        self._open: dict[int, _Fetch] = {}
        self._holders: dict[int, _Holder] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, name: bytes, holders: Iterable[Peer], age_max_s: float, now: float) -> int | None:
        """Ask one of `holders`, which advertise the answer. Returns the question's number, None if none is able."""
        found = list(holders)
        if not found:
            return None
        able = [peer for peer in found if self._is_able(peer.session, now)]
        self._counters.passed_over += len(found) - len(able)
        if not able or len(self._open) >= OPEN_MAX:
            increment(self._counters.fetches, "busy")
            return None
        able.sort(key=lambda peer: (self._holder(peer).timeouts, self._round_trip_s(peer.session) or inf))
        self._request = (self._request + 1) & AGE_MS_MAX
        until = now + self.timeout_s
        fetch = _Fetch(self._request, name, age_max_s, now, until, able[1:], able[0], until)
        self._open[fetch.request] = fetch
        self._want(fetch, now)
        self._hurries = True
        return fetch.request

    def receive(self, peer: Peer, message: AnswerPart | AnswerRefused, now: float) -> None:
        fetch = self._open.get(message.request)
        if fetch is None or fetch.peer.session != peer.session:
            self._counters.stray_parts += 1
        elif isinstance(message, AnswerRefused):
            self._holder(peer).timeouts = 0
            if not message.busy:
                self.lacks(peer.session, fetch.name)
            self._next(fetch, "busy" if message.busy else "absent", now)
        else:
            self._part(fetch, message, now)

    def forget(self, session: int, now: float) -> None:
        """Drop a member that is gone, and ask others in its place."""
        for fetch in list(self._open.values()):
            fetch.others = [peer for peer in fetch.others if peer.session != session]
            if fetch.peer.session == session:
                self._next(fetch, "absent", now)
        self._holders.pop(session, None)

    @property
    def wake_at(self) -> float:
        return 0.0 if self._hurries else min([fetch.deadline for fetch in self._open.values()], default=inf)

    def tick(self, now: float) -> None:
        self._hurries = False
        for fetch in [fetch for fetch in self._open.values() if fetch.deadline <= now]:
            self._failed(self._holder(fetch.peer), now)
            self._next(fetch, "timeout", now)

    def _is_able(self, session: int, now: float) -> bool:
        holder = self._holders.get(session)
        if holder is None:
            return True
        open_max = 1 if holder.timeouts >= TIMEOUTS_MAX else OPEN_PER_PEER_MAX
        return holder.open < open_max and now >= holder.silent_until

    def _holder(self, peer: Peer) -> _Holder:
        return self._holders.setdefault(peer.session, _Holder())

    def _want(self, fetch: _Fetch, now: float) -> None:
        fetch.deadline = now + (fetch.until - now) / (2 if fetch.others else 1)
        fetch.asked_at, fetch.parts, fetch.size = now, [], 0
        self._holder(fetch.peer).open += 1
        age_max_ms = int(min(AGE_MS_MAX, 1000 * fetch.age_max_s))
        question = AnswerWanted(fetch.request, fetch.name, age_max_ms)
        self._outbox.append(Outgoing(fetch.peer.address, fetch.peer.session, Plane.ANSWERS, question))

    def _part(self, fetch: _Fetch, message: AnswerPart, now: float) -> None:
        fetch.size += len(message.data)
        is_bad = message.part != len(fetch.parts) or message.parts > ANSWER_PARTS_MAX
        if is_bad or fetch.size > ANSWER_BYTES_MAX + ENCODING_BYTES:
            self._failed(self._holder(fetch.peer), now)
            self._next(fetch, "bad", now)
            return
        fetch.parts.append(message.data)
        if len(fetch.parts) >= message.parts:
            self._close(fetch)
            del self._open[fetch.request]
            self._counters.fetched_bytes += fetch.size
            is_answer = self.arrived(Fetched(fetch.request, fetch.asked_at, b"".join(fetch.parts)))
            increment(self._counters.fetches, "found" if is_answer else "bad")
            if is_answer:
                self._holder(fetch.peer).timeouts = 0
            else:
                self._failed(self._holder(fetch.peer), now)

    def _failed(self, holder: _Holder, now: float) -> None:
        holder.timeouts += 1
        if holder.timeouts >= TIMEOUTS_MAX:
            holder.silent_until = now + doubled(PASSED_OVER_S, holder.timeouts - TIMEOUTS_MAX, PASSED_OVER_S_MAX)

    def _next(self, fetch: _Fetch, result: str, now: float) -> None:
        """This peer gives none: ask another if there is time, else end the question with this result."""
        self._close(fetch)
        while fetch.others and now < fetch.until:
            fetch.peer = fetch.others.pop(0)
            if self._is_able(fetch.peer.session, now):
                self._want(fetch, now)
                return
        del self._open[fetch.request]
        increment(self._counters.fetches, result)
        self.arrived(Fetched(fetch.request))

    def _close(self, fetch: _Fetch) -> None:
        holder = self._holders.get(fetch.peer.session)
        if holder is not None:
            holder.open -= 1


class AnswerSource:
    """Gives peers what they ask for. `find` (name, longest age in seconds, now) returns an encoded answer, or None."""

    def __init__(self, settings: PeerAnswerSettings, counters: PeerAnswerCounters, outbox: list[Outgoing]) -> None:
        self.find: Callable[[bytes, float, float], bytes | None] = lambda *_: None
        self._settings = settings
        self._counters = counters
        self._outbox = outbox
        self._bytes = Window(settings.given_bytes_per_s)
        self._questions: dict[int, Window] = {}

    def peers(self, sessions: Iterable[int]) -> None:
        """Set the sessions that may ask."""
        per_s = self._settings.given_per_s
        self._questions = {session: self._questions.get(session) or Window(per_s) for session in sessions}

    def receive(self, peer: Peer, message: AnswerWanted, now: float) -> None:
        questions = self._questions.get(peer.session)
        if questions is None:
            return
        if questions.room(now) < 1 or self._bytes.room(now) < 1:
            increment(self._counters.given, "busy")
            self._send(peer, AnswerRefused(message.request, busy=True))
            return
        questions.spend(1, now)
        given = self.find(message.name, message.age_max_ms / 1000, now)
        if given is None or len(given) > ANSWER_BYTES_MAX + ENCODING_BYTES:
            increment(self._counters.given, "absent")
            self._send(peer, AnswerRefused(message.request, busy=False))
            return
        increment(self._counters.given, "found")
        self._counters.given_bytes += len(given)
        self._bytes.spend(len(given) + MESSAGE_BYTES, now)
        pieces = [given[at : at + PART_BYTES] for at in range(0, len(given), PART_BYTES)]
        for number, piece in enumerate(pieces):
            self._send(peer, AnswerPart(message.request, number, len(pieces), piece))

    def _send(self, peer: Peer, message: AnswerPart | AnswerRefused) -> None:
        self._outbox.append(Outgoing(peer.address, peer.session, Plane.ANSWERS, message))
