"""WebSockets of /v1/realtime: once an engine has accepted one, bytes pass both ways until both sides have ended.

If one side ends, the other one is notified (FIN) and may still send; if one breaks off, the whole WebSocket ends. A
client that would not be let in any more gets a close frame between two frames of its engine, and sends nothing further;
so does one that names a model which its key may not use.
Invariant: what one side ends or leaves silent ends on the other, and is never read as a request (test_realtime.py).
Bounds: `connections_max` at once, above which a client gets a 503. A WebSocket is closed after `idle_s` without a byte
in either direction, or after CLOSE_S once a side has ended. Each direction has at most RECEIVE_BYTES in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import trio

from ranvier_py.core.answers.websocket_frames import POLICY_VIOLATION, WebSocketFrames, close_frame
from ranvier_py.core.answers.websocket_messages import WebSocketMessages, models_in
from ranvier_py.core.errors import BadRequest, ClientGone, NodeBusy, RanvierError, UpstreamClosed
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.options import Options, option, seconds
from ranvier_py.core.prompts.body_json import NAME_CHARACTERS_MAX
from ranvier_py.core.routing.request_paths import REALTIME_PATH
from ranvier_py.proxy.admission.seen_head import SeenHead
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.transport import PlainTransport, TlsTransport

CLOSE_S = 10.0
"""Silence after which a WebSocket is closed if one side has ended: as long as browsers wait for a close."""

OTHER_MODELS = "the key may not use this model"

QUERY_MODEL = re.compile(rb"[?&]model=([^&#]{1,%d})" % (3 * NAME_CHARACTERS_MAX))


@dataclass(frozen=True, slots=True)
class RealtimeLimits(Options):
    """Bounds of WebSockets."""

    SECTION = "Limits"
    PREFIX = "realtime_"

    connections_max: int = option(  # each has two descriptors, and counts as a request in flight while it is open
        1000, "WebSockets of /v1/realtime at once; 503 above."
    )
    idle_s: float = seconds(  # people who talk with a model pause; vLLM's own server sends pings every 20 s
        600.0,
        "A WebSocket on which nothing came from either side for so long is closed.",
        key="realtime_idle_timeout_s",
    )


@dataclass(slots=True)
class RealtimeCounters:
    """Counters of WebSockets."""

    open: int = gauge("WebSockets open between clients and backends.")
    opened: int = counter("WebSockets of clients that a backend accepted.")
    refused: int = counter("WebSockets of clients refused because too many were open.")
    idle: int = counter("WebSockets closed because nothing came from either side.")
    broken: int = counter("WebSockets that one side broke off.")
    parted: int = counter("WebSockets closed because their client's key is let in no more, or not to a model it named.")
    client_bytes: int = counter("Bytes of WebSockets from clients to backends.")
    backend_bytes: int = counter("Bytes of WebSockets from backends to clients.")


def upgrades(request: HttpRequest) -> bool:
    """Whether a request asks for a WebSocket that engines offer."""
    named = request.path == REALTIME_PATH and request.method == b"GET"
    return named and request.fields.upgrades and request.http_minor == 1 and not request.body


def model_of(target: bytes) -> str:
    """Return the model that the query names; empty if it names none."""
    found = QUERY_MODEL.search(target)
    return unquote_to_bytes(found[1].replace(b"+", b" ")).decode("utf-8", "replace") if found is not None else ""


class Watched:
    """A client with a key, for whom frames are followed in both directions: it may have to be parted from. `models`: by
    which names it asked last. What it sends is held back until it is read where its key is for some models alone."""

    def __init__(self, seen: SeenHead, models: Sequence[str], early: bytes) -> None:
        self.seen, self.models = seen, models
        self.frames = (WebSocketFrames(), WebSocketFrames())  # of the client, and of the backend
        self.frames[1].feed(early)
        self._messages = WebSocketMessages() if self._is_of_some_models else None

    @property
    def _is_of_some_models(self) -> bool:
        return self.seen.identity is not None and self.seen.identity.is_limited_to_models

    @property
    def unread(self) -> str:
        """Why to part from one whose messages are not read, though its key is for some models by now."""
        return OTHER_MODELS if self._messages is None and self._is_of_some_models else ""

    def permitted(self, data: bytes) -> tuple[bytes, str]:
        """Return what the backend may have now of what came, and why to part from the client, if there is a reason."""
        identity, passed = self.seen.identity, list[bytes]()
        if self._messages is None or identity is None:
            return data, ""
        try:
            for raw, text in self._messages.feed(data):
                models = models_in(text)
                if not all(map(identity.may_use, models)):
                    return b"".join(passed), OTHER_MODELS
                self.models = models or self.models
                passed.append(raw)
        except BadRequest as error:
            return b"".join(passed), str(error)
        return b"".join(passed), ""


class Realtime:
    """All WebSockets of a node."""

    def __init__(self) -> None:
        self.counters = RealtimeCounters()
        self._open = dict[Splice, Watched]()

    def check(self, limits: RealtimeLimits) -> None:
        """Raise NodeBusy if no more may be open."""
        if self.counters.open >= limits.connections_max:
            self.counters.refused += 1
            raise NodeBusy("too many WebSockets are open")

    async def splice(self, splice: Splice) -> None:
        """Relay until the end. Raises ClientGone or UpstreamClosed if that side broke off."""
        counters = self.counters
        counters.opened += 1
        counters.open += 1
        if splice.watched is not None:
            self._open[splice] = splice.watched
        try:
            await splice.run()
        finally:
            counters.open -= 1
            self._open.pop(splice, None)
            counters.idle += splice.was_idle
            counters.broken += splice.failure is not None
            counters.client_bytes += splice.client_bytes
            counters.backend_bytes += splice.backend_bytes
        if splice.failure is not None:
            raise splice.failure

    def part(self, refusal: Callable[[SeenHead, Sequence[str]], str]) -> None:
        """Close all whose client would not be let in any more; `refusal`: why not, of one with these names of its
        model."""
        for splice, watched in [*self._open.items()]:
            if reason := refusal(watched.seen, watched.models) or watched.unread:
                del self._open[splice]
                splice.part(reason)


class Splice:
    """Relays between one client and one backend. `ahead` has the bytes that the client sent before it had its answer.
    `client_bytes` came from the client, `backend_bytes` from the backend."""

    def __init__(
        self,
        client: PlainTransport,
        backend: PlainTransport,
        ahead: bytes,
        idle_s: float,
        counters: RealtimeCounters,
        watched: Watched | None,
    ) -> None:
        self._client, self._backend, self._ahead = client, backend, ahead
        self._idle_s, self._counters, self.watched = idle_s, counters, watched
        self._scope, self._receiving = trio.CancelScope(), trio.CancelScope()
        self._farewell = b""  # the client's last frame, once it is parted from
        self.client_bytes = self.backend_bytes = 0
        self.was_idle = False
        self.failure: RanvierError | None = None

    async def run(self) -> None:
        """Relay until both sides have ended, one has broken off, or nothing came for too long."""
        with self._scope:
            self._renew()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._from_client)
                await self._from_backend()
        is_late = self._scope.cancelled_caught and trio.current_time() >= self._scope.deadline
        self.was_idle = is_late and not self._farewell

    def part(self, reason: str) -> None:
        """Have the client get a close frame with this reason as soon as the current frame is over, and its backend
        nothing more. It has CLOSE_S for all of it."""
        if self.watched is None or self._farewell:
            return
        client, backend = self.watched.frames
        if client.has_closed:
            return
        self._counters.parted += 1
        self._idle_s = min(self._idle_s, CLOSE_S)
        self._renew()
        self._farewell = close_frame(POLICY_VIOLATION, reason)
        if backend.is_between:
            self._receiving.cancel()

    async def _from_client(self) -> None:
        data = self._ahead
        while data or (data := await self._received(self._client, ClientGone("the client broke off"))):
            self.client_bytes += len(data)
            passed = data if self.watched is None else self._permitted(self.watched, data)
            if passed and not await self._sent(self._backend, passed):
                return
            data = b""
        self._end(self._backend)

    def _permitted(self, watched: Watched, data: bytes) -> bytes:
        """Return what the backend may have now of what a client sent that may have to be parted from."""
        watched.frames[0].feed(data)
        if self._farewell:
            if watched.frames[0].has_closed:
                self._scope.cancel()
            return b""
        passed, reason = watched.permitted(data)
        if reason:
            self.part(reason)
            if not self._farewell:  # the client has closed it already, behind what the backend does not get
                self._scope.cancel()
        return passed

    async def _from_backend(self) -> None:
        frames = self.watched.frames[1] if self.watched is not None else WebSocketFrames()
        while not (self._farewell and frames.is_between):
            with trio.CancelScope() as self._receiving:
                data = await self._received(self._backend, UpstreamClosed("the backend broke off"))
            if self._receiving.cancelled_caught:
                continue
            if not data:
                self._end(self._client)
                return
            self.backend_bytes += len(data)
            if self.watched is not None:
                data = data[: frames.feed(data, to_the_end=bool(self._farewell))]
            if not await self._sent(self._client, data):
                return
        self._backend.end()
        await self._sent(self._client, self._farewell)

    async def _received(self, source: PlainTransport, failure: RanvierError) -> bytes:
        """Return the next bytes; b"" if this side has ended. If it broke off, end everything."""
        try:
            data = await source.receive()
        except OSError as error:
            failure.__cause__ = error
            self.failure = self.failure or failure
            self._scope.cancel()
            return b""
        self._renew()
        return data

    async def _sent(self, sink: PlainTransport, data: bytes) -> bool:
        """Send, and return whether this side took it. If not, it has ended; what it sent before is still read."""
        try:
            sent = sink.send_now((data,))
            if sent < len(data):
                await sink.send_rest(memoryview(data)[sent:], lambda _: self._renew())
        except OSError:
            return False
        return True

    def _end(self, sink: PlainTransport) -> None:
        """Notify this side that the other one has ended. With TLS this closes both."""
        if self.failure is not None:
            return
        self._idle_s = min(self._idle_s, CLOSE_S)
        self._renew()
        sink.end()
        if isinstance(sink, TlsTransport):
            self._scope.cancel()

    def _renew(self) -> None:
        if not self._farewell:
            self._scope.deadline = trio.current_time() + self._idle_s
