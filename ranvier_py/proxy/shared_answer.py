"""The answer of one request, relayed to its own client and to all clients that ask the same meanwhile.

Rule: the first request is the leader: its steps relay the answer to its client and into the SharedAnswer; each client
takes what is here at its own pace. If the leader's client leaves, its steps go on while anybody follows; the last
client to leave ends the request. What fails for the leader, fails for all; but an answer that the engine wants nobody
else to have is the leader's alone. Bound: `bytes_max` of the answer are kept. Beyond it nobody new may follow, it is
not stored, and what all have taken is dropped; one that lags by LAG_BYTES_MAX is cut off, but not a leader whom nobody
follows.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import trio
from trio.lowlevel import wait_writable

from ranvier_py.core.answers.answer_events import BLANK
from ranvier_py.core.answers.answer_reader import AnswerReader, StreamReader
from ranvier_py.core.answers.chunked import in_chunk
from ranvier_py.core.errors import ClientGone, ClientTooSlow, RanvierError
from ranvier_py.core.response_cache.cache_keys import Question
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.driver import Wait, Watch
from ranvier_py.proxy.http_values import PERSONAL, Fields, HttpRequest, HttpResponseHead, WaitPhase

PIECE_BYTES_MAX = 262_144
"""Bytes that a client is given at once: what it has no room for is copied."""

LAG_BYTES_MAX = 16 << 20
"""Of what is kept for a client that takes less than the engine sends, while others take more. An answer of that size
comes within a second from an engine nearby, and a client at 10 Mbit/s takes 13."""

KEEPALIVE = b": keepalive\n\n"
"""The comment that keeps the line to a client who waits for a stream's first event."""

KEEPALIVE_CHUNK = in_chunk(KEEPALIVE)


@dataclass(slots=True, eq=False)
class Follower:
    """How many bytes of the body one client has taken."""

    at: int = 0


class KeptBody:
    """What is kept of an answer's body for its clients, each of which takes it at its own pace."""

    __slots__ = ("_begin", "_bytes_max", "_changed", "_data", "followers", "own")

    def __init__(self, bytes_max: int) -> None:
        self.own: Follower | None = Follower()  # the leader's client; None once it has left
        self.followers: set[Follower] = set()
        self._bytes_max = bytes_max
        self._data = bytearray()
        self._begin = 0  # position in the body where `_data` begins
        self._changed: trio.Event | None = None  # while somebody waits for more

    @property
    def is_outgrown(self) -> bool:
        """Whether the answer is too large to be kept, or to be given to anybody who asks from now on."""
        return bool(self._begin) or len(self._data) > self._bytes_max

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > self._bytes_max:
            self._drop_taken()
        if self._changed is not None:
            self.notify()

    def _drop_taken(self) -> None:
        """Drop what all have taken, and beyond LAG_BYTES_MAX also what they have not."""
        clients = self.followers if self.own is None else [*self.followers, self.own]
        taken = min((each.at for each in clients), default=self._begin + len(self._data)) - self._begin
        most = max(self._bytes_max, LAG_BYTES_MAX)
        least = max(taken, len(self._data) - most) if self.followers else taken
        if least > 0:
            del self._data[:least]
            self._begin += least

    def notify(self) -> None:
        """Wake who waits: more has come, or nothing will."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    @property
    def change(self) -> Callable[[], Awaitable[None]]:
        """What waits for more to come, or for the end, as seen from this moment, however late the wait begins."""
        if self._changed is None:
            self._changed = trio.Event()
        return self._changed.wait

    def next_piece(self, follower: Follower) -> bytes:
        """Return of what this client has not taken yet as much as it may be given at once. Raises ClientTooSlow if some
        of it was dropped."""
        start = follower.at - self._begin
        if start < 0:
            raise ClientTooSlow("the client takes its answer too slowly")
        piece = bytes(self._data[start : start + PIECE_BYTES_MAX])
        follower.at += len(piece)
        return piece

    def is_at_end(self, follower: Follower) -> bool:
        """Whether this client has taken everything so far."""
        return follower.at == self._begin + len(self._data)

    def all(self) -> bytes:
        return bytes(self._data)


class SharedAnswer:
    """Receives the answer from the leader's steps, which use it like a Client."""

    __slots__ = (
        *("_client", "_connection", "_has_failed", "_request", "asked_at", "counts", "failure", "head"),
        *("is_private", "is_whole", "kept", "over", "question", "stored"),
    )

    def __init__(self, question: Question, request: HttpRequest, client: Client, bytes_max: int) -> None:
        self.question = question
        self._request = request
        self.head: HttpResponseHead | None = None  # once it is here, as others get it
        self.over = False  # nothing more will come
        self.is_whole = self.is_private = False  # all of it came; nobody else may have it
        self._has_failed = False  # it says so itself
        self.failure: RanvierError | None = None  # why there is no answer, or only its beginning
        self.counts = b""  # the event with counts that was removed from the answer
        self.stored: StoredAnswer | None = None  # the whole answer, if it was found elsewhere, or once it is kept
        self.asked_at = time.monotonic()
        self._connection = client  # its steps relay and its deadlines are watched, even after its client left
        self._client: Client | None = client  # None once it has left
        client.outlasts = self._outlasts
        self.kept = KeptBody(bytes_max)

    # --- the leader's side ------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> memoryview | None:
        """What the engine has to wait for."""
        if self._client is None or (self.head is not None and (self.kept.followers or not self.kept.is_outgrown)):
            return None
        return self._client.unsent

    @property
    def lags(self) -> bool:
        """Whether the leader's client has not been given all that is here."""
        own = self.kept.own
        return self.head is not None and own is not None and not self.kept.is_at_end(own)

    async def flush(self) -> None:
        """Wait until the leader's client has taken what is here. Raises ClientGone."""
        while (client := self._client) is not None and client.unsent is not None:
            await client.flush()
            if self.head is not None:
                self._to_client(self._pass_on)

    def or_client(self, readable: Wait) -> Wait:
        """Return what waits for the engine, and passes on to the leader's client meanwhile what it lags behind."""
        if self._client is None or self._client.unsent is None:
            return readable
        return partial(self._await_engine, readable, self._client)

    async def _await_engine(self, readable: Wait, client: Client) -> None:
        gone: list[ClientGone] = []  # raised outside of the nursery, which would wrap it

        async def pass_on() -> None:
            while self._client is client and client.unsent is not None:
                await wait_writable(client.fd)
                try:
                    self._to_client(self._pass_on)
                except ClientGone as error:
                    gone.append(error)
                    nursery.cancel_scope.cancel()
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_on)
            await (readable.wait() if isinstance(readable, Watch) else readable())
            nursery.cancel_scope.cancel()
        if gone:
            raise gone[0]

    def arm(self, phase: WaitPhase, seconds: float) -> None:
        self._connection.arm(phase, seconds)

    def relay_head(self, head: HttpResponseHead, extra: Fields, body: bytes) -> None:
        """Begin the answer. Raises ClientGone if the client has left and nobody follows."""
        self._connection.started = True  # also if its client left: nobody may begin another answer
        self.is_private = head.status == 200 and head.fields.private
        self._to_client(Client.relay_head, head, extra, body)
        kept = self.kept
        if self.is_private:
            kept.notify()
            return
        self.head = without_personal(head) if head.fields.personal else head
        if kept.own is not None:
            kept.own.at = len(body)
        kept.add(body)

    def send(self, piece: bytes) -> None:
        """Continue the answer. Raises ClientGone like `relay_head`."""
        if self.head is None:
            self._to_client(Client.send, piece)
            return
        self.kept.add(piece)
        self._to_client(self._pass_on)

    def _pass_on(self, client: Client) -> None:
        """Give the leader's client what it takes now of what is here."""
        own = self.kept.own
        while own is not None and client.send_unsent() and (piece := self.kept.next_piece(own)):
            client.send(piece)

    def leave(self) -> bool:
        """Note that the leader's client has left. Returns whether anybody follows."""
        self._client = self.kept.own = None
        return bool(self.kept.followers)

    def _outlasts(self) -> bool:
        """Note that the client left. Whether the request goes on; False also to wake steps that wait for the client."""
        return self.leave() and self._connection.phase is not WaitPhase.SEND

    @property
    def has_client(self) -> bool:
        return self._client is not None

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for it any more: the leader's steps are about to end, so nobody may follow."""
        return self._client is None and not self.kept.followers

    def fail(self) -> None:
        """Note that all of the answer came, and that it ends with an error."""
        self.is_whole = self._has_failed = True

    def complete(self, reader: AnswerReader) -> None:
        """Note that all of the answer came, and what its reader found in it."""
        self.is_whole, self._has_failed = self.head is not None, reader.failure not in (None, BLANK)
        if isinstance(reader, StreamReader) and reader.removal is not None:
            self.counts = reader.removal.counts

    @property
    def is_complete(self) -> bool:
        """Whether all of it came, and it is no error."""
        return self.is_whole and self.head is not None and self.head.status == 200 and not self._has_failed

    def end(self) -> None:
        self.over = True
        self._connection.outlasts = None
        self.kept.notify()

    def _to_client(self, send: Callable[..., None], *parts: object) -> None:
        """Call this of the leader's client, unless that has left."""
        if self._client is None:
            return
        try:
            send(self._client, *parts)
        except ClientGone:
            if not self.leave():
                raise

    # --- the followers' side ----------------------------------------------------------------------------------------

    @property
    def body(self) -> bytes | None:
        """The whole body without comments of ours; None if it was too large."""
        head, kept = self.head, self.kept
        if head is None or kept.is_outgrown:
            return None
        return kept.all().replace(KEEPALIVE_CHUNK if head.framing == "chunked" else KEEPALIVE, b"")

    @contextmanager
    def followed(self) -> Iterator[Follower]:
        follower = Follower()
        self.kept.followers.add(follower)
        try:
            yield follower
        finally:
            self.kept.followers.discard(follower)
            if self.is_left and not self.over:
                self._connection.interrupt(ClientGone("nobody waits for the answer any more"))

    def serves(self, question: Question, request: HttpRequest) -> bool:
        """Whether the answer is here from its first byte, and is what this client asks for and can read."""
        own, head = self.question, self.head
        if head is None or self.kept.is_outgrown:
            return False
        if head.status == 200 and (own.stream, own.wants_usage) != (question.stream, question.wants_usage):
            return False
        if head.framing == "chunked" and not request.http_minor:  # HTTP/1.0 has no chunks: it gets the stored answer
            return False
        return head.fields.readable or codings_of(request) == codings_of(self._request)

    @property
    def is_decided(self) -> bool:
        """Whether nobody needs to wait any longer whom it does not serve yet."""
        return (
            self.over or self.is_private or self.kept.is_outgrown or (self.head is not None and self.head.status != 200)
        )


def without_personal(head: HttpResponseHead) -> HttpResponseHead:
    """Return the head as clients get it that did not ask for this very answer."""
    kept = [(name, value) for name, value in head.headers if name.lower() not in PERSONAL]
    return HttpResponseHead(head.status, head.reason, kept, head.framing)


def codings_of(request: HttpRequest) -> list[bytes]:
    """Return a client's accept-encoding fields."""
    return [value for name, value in request.headers if name.lower() == b"accept-encoding"]
