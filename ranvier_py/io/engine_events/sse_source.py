"""Continuum's event streams: server-sent events over HTTP, or the same JSON in WebSocket frames.

Rule: one task connects, passes on events, and connects again when the stream ends or fails, has an event that is too
long, or is silent for `idle_s`. A stream has no replay: `started` tells that one begins, and the index forgets what it
knew of the source (CX18). Nothing that arrives ends the task; an endless sender gets a third of the event loop (REST).
Addresses come from the operator; redirects are not followed, and nothing is read from the environment. Bounds: the size
of an event (`server_events`) and of a read. Source: CR15, CX17, CX29.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from urllib.parse import urlsplit

import httpx
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, RejectConnection, Request, TextMessage
from wsproto.utilities import ProtocolError

from ranvier_py.core.addresses import without_secrets
from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent
from ranvier_py.core.engine_cache.quota import Quota
from ranvier_py.core.engine_cache.sources.server_events import (
    EVENT_BYTES_MAX,
    EventReader,
    SourceOptions,
    TooLong,
    event_of,
)
from ranvier_py.core.log_events import LogEvent, event

log = logging.getLogger(__name__)

RECONNECT_MAX_S = 60.0
SLICE_BYTES = 4096  # some 30 events, or 2,048 empty frames
REST = 2.0  # rest after each slice, as a multiple of the time that it took
REST_S_MAX = 0.1
MEDIA_TYPE = "text/event-stream"
LOG_LINES_MAX, LOG_LINE_S = 20, 30.0
"""Log lines about one stream that comes and goes: so many at once, then one in so many seconds."""

REASON_CHARACTERS_MAX = 300  # why a stream ended, in which libraries quote what came
CONNECT_S = 5.0
CLOSE_S = 1.0


class StreamFailed(Exception):
    """The stream ended or never began; the text says why."""


@dataclass(slots=True)
class StreamState:
    """What one source has done, to be shown. `last_event_at` is on the monotonic clock, None before any event."""

    connected: bool = False
    received: int = 0  # events
    dropped: int = 0  # received events that could not be read
    reconnects: int = 0
    last_event_at: float | None = None
    last_error: str = ""

    @property
    def processed(self) -> int:
        """Events that could be read."""
        return self.received - self.dropped


class EventSource:
    """Reads one stream.

    Args:
        url: http, https, ws or wss.
        received: takes the events in order. Must not wait.
        started: called whenever a stream begins, before its first event.
        key: returns the key for the next connection; "" for none.
    """

    def __init__(
        self,
        url: str,
        options: SourceOptions,
        *,
        received: Callable[[Sequence[IndexEvent]], object],
        started: Callable[[], object],
        rng: Random,
        key: Callable[[], str] = str,
    ) -> None:
        self.url = url
        self.state = StreamState()
        self.options, self._received, self._started = options, received, started
        self._rng = rng
        self._log_quota = Quota(LOG_LINES_MAX, LOG_LINE_S)
        self._context: ssl.SSLContext | None = None
        self._key = key

    @property
    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"user-agent": "ranvier-kv-events"} | ({"authorization": f"Bearer {key}"} if key else {})

    def trust(self, context: ssl.SSLContext | None) -> None:
        """Use this TLS context from the next connection on; None: the system's authorities."""
        self._context = context

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await self._listen()
        finally:
            self.state.connected = False

    async def _listen(self) -> None:
        wait_s, state = self.options.reconnect_s, self.state
        while True:
            before = state.received
            reason = (await self._listen_once())[:REASON_CHARACTERS_MAX]
            if state.connected or reason != state.last_error:
                self._log(event("kv_index.stream_lost", url=without_secrets(self.url), why=reason))
            state.connected, state.last_error = False, reason
            if state.received > before:
                wait_s = self.options.reconnect_s
            await trio.sleep(wait_s * self._rng.random())
            wait_s = min(2 * wait_s, RECONNECT_MAX_S)
            state.reconnects += 1

    async def _listen_once(self) -> str:
        """Serve one connection from beginning to end. Returns why it ended."""
        try:
            await (self._websocket() if self.url.startswith("ws") else self._server_sent())
        except (StreamFailed, TooLong) as error:
            return str(error)
        except (httpx.HTTPError, OSError, ProtocolError, UnicodeError, trio.BrokenResourceError) as error:
            return f"{type(error).__name__}: {error}"  # UnicodeError: httpx decodes a name that begins with xn--
        except (trio.TooSlowError, trio.ClosedResourceError):
            return "nothing came in time"
        return "the stream ended"

    def _start(self) -> None:
        self.state.connected = True
        self._log(event("kv_index.stream_begun", url=without_secrets(self.url)))
        self._started()

    def _log(self, found: LogEvent) -> None:
        if self._log_quota.allows(time.monotonic()):
            log.info(found)

    def _take(self, found: Sequence[IndexEvent | None]) -> None:
        events = [event for event in found if event is not None]
        self.state.received += len(found)
        self.state.dropped += len(found) - len(events)
        if events:
            self.state.last_event_at = time.monotonic()
            self._received(events)

    async def _server_sent(self) -> None:
        timeout = httpx.Timeout(CONNECT_S, read=self.options.idle_s)
        headers = {**self._headers, "accept": "text/event-stream", "accept-encoding": "identity"}
        tls = await self._tls() if self.url.startswith("https") else False
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False, follow_redirects=False, verify=tls) as client,
            client.stream("GET", self.url, headers=headers) as response,
        ):
            if response.status_code != 200:
                raise StreamFailed(f"status {response.status_code}")
            media_type = response.headers.get("content-type", "")
            if media_type.partition(";")[0].strip().lower() != MEDIA_TYPE:
                raise StreamFailed(f"{media_type[:40]!r} is no {MEDIA_TYPE}")
            self._start()
            reader, too_long = EventReader(), None
            try:
                async for piece in response.aiter_raw():  # given a size, it would wait for that many bytes
                    try:
                        await self._feed(reader, piece)
                    except TooLong as error:
                        too_long = error
                        await response.aclose()  # the next read fails, which ends httpx's chain of generators in order
            except httpx.ReadError:
                raise too_long or StreamFailed("the connection broke") from None

    async def _feed(self, reader: EventReader, piece: bytes) -> None:
        for start in range(0, len(piece), SLICE_BYTES):
            began = time.monotonic()
            self._take(list(reader.feed(piece[start : start + SLICE_BYTES])))
            with trio.CancelScope(shield=True):  # httpx's generators need a cancellation to come during a read
                await trio.sleep(min(REST_S_MAX, REST * (time.monotonic() - began)))

    async def _websocket(self) -> None:
        with trio.fail_after(CONNECT_S):
            stream = await self._dial()
        try:
            place = urlsplit(self.url)
            target = (place.path or "/") + (f"?{place.query}" if place.query else "")
            extra = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            frames = Frames()
            await stream.send_all(frames.open(Request(host=place.netloc, target=target, extra_headers=extra)))
            while True:
                with trio.fail_after(self.options.idle_s if frames.accepted else CONNECT_S):
                    received = bytes(await stream.receive_some(SLICE_BYTES))
                began = time.monotonic()
                messages, reply = frames.feed(received)
                if frames.accepted and not self.state.connected:
                    self._start()
                self._take([event_of(b"", message) for message in messages])
                await trio.sleep(min(REST_S_MAX, REST * (time.monotonic() - began)))
                if reply:
                    with trio.fail_after(CONNECT_S):
                        await stream.send_all(reply)
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await stream.aclose()

    async def _tls(self) -> ssl.SSLContext:
        """Return a context with the machine's certificates. They are read once and in a thread, since that is slow."""
        if self._context is None:
            self._context = await trio.to_thread.run_sync(ssl.create_default_context)
        return self._context

    async def _dial(self) -> trio.abc.Stream:
        place = urlsplit(self.url)
        secure = place.scheme == "wss"
        host = place.hostname or ""
        stream = await trio.open_tcp_stream(host, place.port or (443 if secure else 80))
        if not secure:
            return stream
        try:
            wrapped = trio.SSLStream(stream, await self._tls(), server_hostname=host, https_compatible=True)
            await wrapped.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return wrapped


class Frames:
    """The client's side of one WebSocket: takes bytes, returns complete messages and bytes to send as reply."""

    def __init__(self) -> None:
        self.accepted = False
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._message = bytearray()

    def open(self, request: Request) -> bytes:
        return self._connection.send(request)

    def feed(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Raises StreamFailed at the end of the stream, TooLong for a message of more than EVENT_BYTES_MAX."""
        self._connection.receive_data(data or None)
        messages: list[bytes] = []
        reply = b""
        for found in self._connection.events():
            if isinstance(found, AcceptConnection):
                self.accepted = True
            elif isinstance(found, TextMessage | BytesMessage):
                self._message += found.data.encode() if isinstance(found.data, str) else found.data
                if len(self._message) > EVENT_BYTES_MAX:
                    raise TooLong(f"a message of more than {EVENT_BYTES_MAX} bytes")
                if found.message_finished:
                    messages.append(bytes(self._message))
                    self._message.clear()
            elif isinstance(found, Ping):
                reply += self._connection.send(found.response())
            elif isinstance(found, RejectConnection):
                raise StreamFailed(f"status {found.status_code}")
            elif isinstance(found, CloseConnection):
                raise StreamFailed(f"closed with {int(found.code)}")
        return messages, reply
