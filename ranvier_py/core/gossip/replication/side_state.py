"""Side state for peers that missed updates of it: owners of responses and sessions, checkpoints of hybrid models.

No row of a table has side state. So a node that counts updates as received because it copied the table (`pull`) lacks
the side state in them. A node that was behind a cut, or that adds a backend late, may lack some, too. Such a node asks
one peer for all of its side state, and another peer if the answer does not arrive whole. A while later it asks once
more, because the peer may have missed the same updates.

Rules: a node that has not joined answers nobody. What a node learns from an answer it does not send on. Answers leave
within the budget for rows, one message at a time. Each is encoded just before it leaves, in about 2 ms, with the ages
that its entries have then.
Bounds: a node asks one question at a time, at most TRIES_MAX peers for each cause, and takes MESSAGES_MAX messages of
an answer. It answers ASKERS_MAX peers at a time; others get no answer and ask another peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from random import Random

from ranvier_py.core.gossip.gossip_values import Peer
from ranvier_py.core.gossip.replication.route_outbox import RouteOutbox
from ranvier_py.core.gossip.replication.route_sync import RouteSync, SidePiece
from ranvier_py.core.gossip.wire.messages import Entry, SideState, SideStateWanted

ANSWER_S = 3.0
"""Time without a message after which another peer is asked."""

ROUNDS, ROUND_S = 2, 5.0
"""A node wants ROUNDS whole answers for each cause, ROUND_S apart."""

TRIES_MAX = 8
MESSAGES_MAX = 256
ASKERS_MAX = 4
NO_ROOM_S = 0.05


@dataclass(slots=True)
class PendingState:
    """The part of an answer that one peer has yet to be sent."""

    request: int
    pieces: Iterator[SidePiece]
    piece: SidePiece | None  # the next one to encode
    message: SideState | None = None  # it waits for room


class SideStateSync:
    """Asks for side state and answers peers. Times are seconds of one monotonic clock."""

    def __init__(self, outbox: RouteOutbox, sync: RouteSync, rng: Random) -> None:
        self._outbox = outbox
        self._sync = sync
        self._rng = rng
        self._ask_at = inf
        self._asked: int | None = None  # the session of the peer that is answering
        self._request = rng.getrandbits(32)
        self._deadline = inf
        self._messages = self._tries = self._rounds = 0
        self._last: Peer | None = None  # the peer asked last
        self._answers: dict[int, PendingState] = {}  # by session
        self._send_at = inf

    @property
    def wake_at(self) -> float:
        return min(self._ask_at if self._asked is None else self._deadline, self._send_at)

    def want(self, at: float) -> None:
        """Ask at that time, because this node may lack side state, even if an answer is arriving just now."""
        self._ask_at = min(self._ask_at, at)
        self._tries, self._rounds = 0, ROUNDS

    def meet(self) -> None:
        """Drop all that concerns peers that are gone."""
        peers = self._outbox.peers
        self._answers = {session: answer for session, answer in self._answers.items() if session in peers}
        if self._asked is not None and self._asked not in peers:
            self._deadline = -inf

    def tick(self, now: float) -> None:
        if self._asked is not None and now >= self._deadline:
            self._asked = None
            if self._tries < TRIES_MAX:
                self._ask_at = min(self._ask_at, now)
        if self._asked is None and now >= self._ask_at:
            self._ask(now)
        if now >= self._send_at:
            self._send(now)

    def _ask(self, now: float) -> None:
        self._ask_at = inf
        peers = [peer for peer in self._outbox.order if peer != self._last] or self._outbox.order
        if not peers:
            return  # a peer that comes will be asked
        peer = self._last = self._rng.choice(peers)
        self._request = (self._request + 1) & 0xFFFFFFFF
        self._outbox.send(peer, SideStateWanted(self._request), now)
        self._asked, self._deadline, self._messages = peer.session, now + ANSWER_S, 0
        self._tries += 1

    def receive(self, peer: Peer, message: SideState | SideStateWanted, now: float, *, serving: bool) -> None:
        """Take a part of the answer, or a peer's question, which replaces its question before. `serving`: whether we
        have joined ourselves."""
        if isinstance(message, SideState):
            if peer.session == self._asked and message.request == self._request:
                self._take(message, now)
        elif serving and (peer.session in self._answers or len(self._answers) < ASKERS_MAX):
            pieces = self._sync.side_state()
            self._answers[peer.session] = PendingState(message.request, pieces, next(pieces, SidePiece()))
            self._send_at = now

    def _take(self, message: SideState, now: float) -> None:
        self._sync.take_side_state([update for _, update in message.entries], now)
        self._messages += 1
        self._deadline = now + ANSWER_S
        if message.last or self._messages >= MESSAGES_MAX:
            self._asked, self._tries = None, 0
            self._rounds -= 1
            if self._rounds > 0:
                self._ask_at = min(self._ask_at, now + ROUND_S)

    def _send(self, now: float) -> None:
        """Send one message to one peer; it goes to the end of the queue."""
        session = next(iter(self._answers), None)
        if session is None:
            self._send_at = inf
            return
        answer = self._answers[session]
        if answer.message is None:
            answer.message = self._encoded(answer, now)
        if not self._outbox.send_bulk(self._outbox.peers[session], answer.message, now):
            self._send_at = now + NO_ROOM_S
            return
        answer.message = None
        del self._answers[session]
        if answer.piece is not None:
            self._answers[session] = answer  # behind the other peers

    def _encoded(self, answer: PendingState, now: float) -> SideState:
        piece, answer.piece = answer.piece, next(answer.pieces, None)
        assert piece is not None
        updates = self._sync.side_updates(piece, now)
        return SideState(answer.request, answer.piece is None, tuple([Entry(0, update) for update in updates]))
