"""A stream of which the client waits for the first event, whichever engine answers in the end.

Rules: the head and what begins nothing is held for HELD_S; then it goes out, and from then on a comment of ours every
`keepalive_s`, until an answer begins: proxies in front cut lines that are silent. Until then another engine's stream
may follow the same head, without what announces it if that went out for another one. All of it is in frames of ours.
A whole answer, or a compressed stream, goes out as it came after HELD_S, and no other engine can follow.
Bound: HELD_BYTES_MAX; beyond it the same (test_awaited_streams.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ranvier_py.core.answers.answer_events import EVENT_END, AnswerEvent, end_of_events
from ranvier_py.core.answers.answer_reader import HELD_BYTES_MAX, AnswerReader, StreamReader
from ranvier_py.core.answers.chunked import LAST_CHUNK, in_chunk, payload_of
from ranvier_py.core.errors import ClientGone
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import Fields, HttpResponseHead
from ranvier_py.proxy.shared_answer import KEEPALIVE, SharedAnswer
from ranvier_py.proxy.upstream import Exchange

HELD_S = 5.0

COMMENTS = re.compile(rb"(?:(?::[^\r\n]*+)?+(?>\r\n|\r|\n))++")


class AwaitedStream:
    """`client` has the timer, `sink` gets what goes out."""

    __slots__ = (
        *("_announcer", "_client", "_exchange", "_held", "_in_chunks", "_keepalive_s"),
        *("_reader", "_shown", "_sink", "is_open", "is_out"),
    )

    def __init__(self, client: Client, sink: Client | SharedAnswer, keepalive_s: float) -> None:
        self._client, self._sink, self._keepalive_s = client, sink, keepalive_s
        self._exchange: Exchange | None = None  # the stream that is waited for, while there is one
        self._reader: AnswerReader
        self._shown: Callable[[], tuple[HttpResponseHead, Fields]]
        self._held = b""  # what came of it, in its frames until the head is out
        self._announcer: Exchange | None = None  # the stream of which more than head and comments went out
        self._in_chunks = False
        self.is_open = False  # the client has a head, and any engine may still answer
        self.is_out = False  # it has the head of what no other engine could continue

    def wait(
        self,
        exchange: Exchange,
        reader: AnswerReader,
        held: bytes,
        shown: Callable[[], tuple[HttpResponseHead, Fields]],
    ) -> None:
        """Hold what a stream begins with. `shown`: its head as the client gets it, and what is added."""
        self._exchange, self._reader, self._shown, self._held = exchange, reader, shown, held
        if not self.is_open:
            self._call_in(HELD_S, self._go_out)

    def add(self, data: bytes) -> None:
        self._held += data

    def pass_on(self) -> None:
        """Send what is held and begins nothing, if the head is out."""
        if self.is_open and self._held:
            events = self._held[: end_of_events(self._held, 0, len(self._held))]
            end = len(events) - len(without_announcement(events))  # a part without a word waits for its words
            events, self._held = self._held[:end], self._held[end:]
            comments = comments_in(events)
            if comments != events and self._announcer is None:
                self._announcer = self._exchange
            self._try(events if self._announcer is self._exchange else comments)

    @property
    def is_full(self) -> bool:
        return len(self._held) > HELD_BYTES_MAX

    def taken(self) -> bytes:
        """Return what is held, since the wait for this stream is over."""
        held, self._held, self._exchange = self._held, b"", None
        if not self.is_open:
            self.close()
        return held

    def begin(self, exchange: Exchange, payload: bytes) -> None:
        """Let this be the answer. Raises ClientGone."""
        self.close()
        is_second = self._announcer is not None and self._announcer is not exchange
        self.send(without_announcement(payload) if is_second else payload)

    def send(self, data: bytes) -> None:
        """Send more behind a head that went out. Raises ClientGone."""
        if data:
            self._sink.send(in_chunk(data) if self._in_chunks else data)

    def end(self) -> None:
        """End the body. Raises ClientGone."""
        if self._in_chunks:
            self._sink.send(LAST_CHUNK)

    def close(self) -> None:
        """Let nothing go out by itself any more: an answer begins, or none will."""
        self.is_open = False
        self._client.watchdog.call_off(self._client)

    def _go_out(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        head, fields = self._shown()
        if not isinstance(self._reader, StreamReader) or head.framing not in ("chunked", "close"):
            self._commit(head, fields)
            return
        self._in_chunks = exchange.chunks is not None
        if self._in_chunks:
            self._held = payload_of(self._held)
            self._reader.unframe()
            exchange.unframe()
        self.is_open = True
        try:
            self._sink.relay_head(head, fields, b"")
        except ClientGone as error:
            self._client.interrupt(error)
            return
        self.pass_on()
        self._call_in(self._keepalive_s, self._keep_alive)

    def _commit(self, head: HttpResponseHead, fields: Fields) -> None:
        """Send what no other engine could continue, as it came."""
        self.is_out = self._reader.begun = True
        held, self._held = self._held, b""
        try:
            self._sink.relay_head(head, fields, held)
        except ClientGone as error:
            self._client.interrupt(error)

    def _keep_alive(self) -> None:
        if self._sink.unsent is None:  # else the client has not taken what came before
            self._try(KEEPALIVE)
        self._call_in(self._keepalive_s, self._keep_alive)

    def _try(self, data: bytes) -> None:
        try:
            self.send(data)
        except ClientGone as error:
            self._client.interrupt(error)

    def _call_in(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds:
            self._client.watchdog.call_at(self._client, self._client.watchdog.clock() + seconds, call)


def comments_in(events: bytes) -> bytes:
    """Return those of whole events that are comments and nothing else."""
    return b"".join([event for event in events_of(events) if COMMENTS.fullmatch(event)])


def without_announcement(payload: bytes) -> bytes:
    """Return what is left of a payload from the event on that begins an answer, or is an error."""
    at = 0
    for event in events_of(payload):
        found = AnswerEvent.of(event)
        if found.begins or found.failure is not None:
            break
        at += len(event)
    return payload[at:]


def events_of(payload: bytes) -> Iterator[bytes]:
    at = 0
    for end in EVENT_END.finditer(payload):
        yield payload[at : end.end()]
        at = end.end()
