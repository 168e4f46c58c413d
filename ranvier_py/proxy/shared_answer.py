"""The answer of one request, as it comes, for its own client and for all who ask the same meanwhile.

The first who asks is the leader: its steps relay the answer, to its client and in here. The others follow: each takes
what is here at its own pace, but nobody gets it faster than the leader's client takes it, for steps have one wait at a
time. A leader whose client leaves, or takes too little, goes on while anybody follows. The deadlines of the answer are
its connection's all the while, and the last one who leaves ends it.

Bound: `bytes_max` of the answer. Beyond it nobody new may follow and it is not kept; what all followers have taken is
dropped, and who lags by more than that is cut off.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from ranvier_py.core.errors import ClientGone, ClientTooSlow
from ranvier_py.core.response_cache.cache_keys import Question
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import Fields, HttpRequest, HttpResponseHead, WaitPhase


class Follower:
    """How far one of those who follow has come, in bytes of the body."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0


class SharedAnswer:
    """What the leader's steps relay to. Has of a Client what they need.

    Attributes:
        head: of an answer that others may have, once it is here.
        over: nothing more will come.
        is_complete: all of the answer came.
        counts: the event of counts that was taken out of the answer.
        stored: the whole answer, once it was found elsewhere, or is kept.
        asked_at: when it was asked for, by the monotonic clock.
    """

    def __init__(self, question: Question, request: HttpRequest, client: Client, bytes_max: int) -> None:
        self.question = question
        self._codings = codings_of(request)
        self.head: HttpResponseHead | None = None
        self.over = self.is_complete = False
        self.counts = b""
        self.stored: StoredAnswer | None = None
        self.asked_at = time.monotonic()
        self._connection = client  # whose steps relay, and whose deadlines are watched, whoever is still there
        self._client: Client | None = client  # while it is
        client.outlasts = self._outlasts
        self._bytes_max = bytes_max
        self._body = bytearray()
        self._begin = 0  # of what is here, in the body
        self._followers: set[Follower] = set()
        self._changed = trio.Event()

    # --- the leader's side ------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> memoryview | None:
        return None if self._client is None else self._client.unsent

    @property
    def flush(self) -> Callable[[], Awaitable[None]]:
        assert self._client is not None
        return self._client.flush

    def arm(self, phase: WaitPhase, seconds: float) -> None:
        self._connection.arm(phase, seconds)

    def relay_head(self, head: HttpResponseHead, extra: Fields, body: bytes) -> None:
        """Begin the answer. Raises ClientGone where nobody else is there."""
        if head.status == 200:
            self.head = head
            self._add(body)
        self._to_client(lambda client: client.relay_head(head, extra, body))

    def send(self, piece: bytes) -> None:
        """Go on with it. Raises ClientGone as above."""
        if self.head is not None:
            self._add(piece)
        self._to_client(lambda client: client.send(piece))

    def leave(self) -> bool:
        """The leader's client has left. Whether there is anybody else."""
        self._client = None
        return bool(self._followers)

    def _outlasts(self) -> bool:
        """The same; False also where its steps must be woken, for they wait for their client."""
        return self.leave() and self._connection.phase is not WaitPhase.SEND

    @property
    def has_client(self) -> bool:
        return self._client is not None

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for it any more: its steps are about to end, and nobody may follow them."""
        return self._client is None and not self._followers

    def complete(self, counts: bytes) -> None:
        self.is_complete, self.counts = self.head is not None, counts

    def end(self) -> None:
        self.over = True
        self._connection.outlasts = None
        self._changed.set()

    def _to_client(self, send: Callable[[Client], None]) -> None:
        if self._client is None:
            return
        try:
            send(self._client)
        except ClientGone:
            if not self.leave():
                raise

    def _add(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._bytes_max:
            taken = min((each.at for each in self._followers), default=self._begin + len(self._body)) - self._begin
            least = max(taken, len(self._body) - self._bytes_max)
            del self._body[:least]
            self._begin += least
        if self._followers:
            self._changed.set()
            self._changed = trio.Event()

    # --- of the others ----------------------------------------------------------------------------------------------

    @property
    def body(self) -> bytes | None:
        """All of it; None where it was too large."""
        return None if self._begin else bytes(self._body)

    @contextmanager
    def followed(self) -> Iterator[Follower]:
        follower = Follower()
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)
            if self.is_left and not self.over:
                self._connection.interrupt(ClientGone("nobody waits for the answer any more"))

    def serves(self, question: Question, request: HttpRequest) -> bool:
        """Whether an answer is here, from its first byte on, that is what who asks this gets, and can read."""
        own, head = self.question, self.head
        if head is None or self._begin or (own.stream, own.wants_usage) != (question.stream, question.wants_usage):
            return False
        if head.framing == "chunked" and not request.http_minor:  # it has no chunks: the whole is made for it
            return False
        return head.fields.readable or codings_of(request) == self._codings

    def next_piece(self, follower: Follower) -> bytes:
        """What this follower has not taken yet. Raises ClientTooSlow for who was left behind."""
        start = follower.at - self._begin
        if start < 0:
            raise ClientTooSlow("the client takes its answer too slowly")
        piece = bytes(self._body[start:])
        follower.at += len(piece)
        return piece

    def is_at_end(self, follower: Follower) -> bool:
        """Whether this follower has taken all that came."""
        return follower.at == self._begin + len(self._body)

    @property
    def change(self) -> Callable[[], Awaitable[None]]:
        """What waits until there is more than now, or nothing more to come, however late the wait begins."""
        return self._changed.wait


def codings_of(request: HttpRequest) -> list[bytes]:
    """What a client says of compressed answers that it can read."""
    return [value for name, value in request.headers if name.lower() == b"accept-encoding"]
