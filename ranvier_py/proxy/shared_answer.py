"""The answer of one request, relayed to its own client and to all clients that ask the same meanwhile.

The first request is the leader: its steps relay the answer to its client and into the SharedAnswer. The others follow:
each takes what is here as fast as it can, but never faster than the leader's client takes it, since steps wait for one
thing at a time. If the leader's client leaves, or is too slow, the leader's steps go on while anybody follows. The
answer's deadlines remain those of the leader's connection, and the last client to leave ends the request.

Bound: `bytes_max` of the answer are kept. Beyond it nobody new may follow, and the answer is not stored; what all
followers have taken is dropped, and a follower that lags by more than that is cut off.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from ranvier_py.core.errors import ClientGone, ClientTooSlow
from ranvier_py.core.response_cache.cache_keys import Question
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import Fields, HttpRequest, HttpResponseHead, WaitPhase


@dataclass(slots=True, eq=False)
class Follower:
    """How many bytes of the body one follower has taken."""

    at: int = 0


class SharedAnswer:
    """Receives the answer from the leader's steps, which use it like a Client.

    Attributes:
        head: of the answer, once it is here, if others may have it.
        over: nothing more will come.
        is_complete: all of the answer came.
        counts: the event with counts that was removed from the answer.
        stored: the whole answer, if it was found elsewhere, or once it is kept.
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
        self._connection = client  # its steps relay and its deadlines are watched, even after its client left
        self._client: Client | None = client  # None once it has left
        client.outlasts = self._outlasts
        self._bytes_max = bytes_max
        self._body = bytearray()
        self._begin = 0  # position in the body where `_body` begins
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
        """Begin the answer. Raises ClientGone if the client has left and nobody follows."""
        if head.status == 200:
            self.head = head
            self._add(body)
        self._to_client(lambda client: client.relay_head(head, extra, body))

    def send(self, piece: bytes) -> None:
        """Continue the answer. Raises ClientGone like `relay_head`."""
        if self.head is not None:
            self._add(piece)
        self._to_client(lambda client: client.send(piece))

    def leave(self) -> bool:
        """Note that the leader's client has left. Returns whether anybody follows."""
        self._client = None
        return bool(self._followers)

    def _outlasts(self) -> bool:
        """Note that the client left. Whether the request goes on; False also to wake steps that wait for the client."""
        return self.leave() and self._connection.phase is not WaitPhase.SEND

    @property
    def has_client(self) -> bool:
        return self._client is not None

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for it any more: the leader's steps are about to end, so nobody may follow."""
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

    # --- the followers' side ----------------------------------------------------------------------------------------

    @property
    def body(self) -> bytes | None:
        """The whole body; None if it was too large."""
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
        """Whether the answer is here from its first byte, and is what this client asks for and can read."""
        own, head = self.question, self.head
        if head is None or self._begin or (own.stream, own.wants_usage) != (question.stream, question.wants_usage):
            return False
        if head.framing == "chunked" and not request.http_minor:  # HTTP/1.0 has no chunks: it gets the stored answer
            return False
        return head.fields.readable or codings_of(request) == self._codings

    def next_piece(self, follower: Follower) -> bytes:
        """Return what this follower has not taken yet. Raises ClientTooSlow if some of it was dropped."""
        start = follower.at - self._begin
        if start < 0:
            raise ClientTooSlow("the client takes its answer too slowly")
        piece = bytes(self._body[start:])
        follower.at += len(piece)
        return piece

    def is_at_end(self, follower: Follower) -> bool:
        """Whether this follower has taken everything so far."""
        return follower.at == self._begin + len(self._body)

    @property
    def change(self) -> Callable[[], Awaitable[None]]:
        """What waits for more to come, or for the end, as seen from this moment, however late the wait begins."""
        return self._changed.wait


def codings_of(request: HttpRequest) -> list[bytes]:
    """Return a client's accept-encoding fields."""
    return [value for name, value in request.headers if name.lower() == b"accept-encoding"]
