"""Holds an answer until it begins, then relays it as it comes, without counts that only this node asked for; or relays
a WebSocket, in both directions. Reads the answer of a leg that is not the client's, up to READ_BYTES_MAX."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ranvier_py.core.answers.answer_reader import AnswerReader, StreamReader
from ranvier_py.core.answers.chunked import payload_of
from ranvier_py.core.errors import ClientGone, NodeBusy, UpstreamClosed, UpstreamGarbled, UpstreamTimeout
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.blame.refusals import kind_of
from ranvier_py.proxy.answers.awaited_stream import AwaitedStream
from ranvier_py.proxy.answers.locations import Places
from ranvier_py.proxy.call import Call, PipelineLimits
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.error_answers import error_event
from ranvier_py.proxy.failed_tries import ERROR_WAIT_S
from ranvier_py.proxy.http_values import Fields, HttpResponseHead, WaitPhase, response_head
from ranvier_py.proxy.realtime import Realtime, Splice, Watched
from ranvier_py.proxy.stages.learn import AnswerProof, LearnStage
from ranvier_py.proxy.upstream import UPGRADE, Exchange

READ_BYTES_MAX = 1 << 20  # engines that prefill for others answer with one token, and where they keep the blocks


@dataclass(slots=True, eq=False, repr=False)
class RelayStage:
    registry: Registry
    limits: PipelineLimits
    learn: LearnStage
    realtime: Realtime
    may_see: Callable[[bytes | None], bool]  # whether a request with this control key may see how it was routed
    address_of: Callable[[str], BackendAddress]  # from a backend's URL

    def begin(
        self, call: Call, attempt: Attempt, exchange: Exchange, reader: AnswerReader, held: bytes
    ) -> Steps[bytes]:
        """Wait until an answer begins, or shows what it is instead: until then the request may be sent elsewhere. The
        end of a stream of a known length is waited for: it is all there. `held`: what goes on of what came. Returns all
        of that but for what the client already has."""
        self._trust(call, attempt, reader)
        is_made = exchange.head.framing == "length" and isinstance(reader, StreamReader)
        if exchange.complete or reader.failure or (reader.begun and not is_made):
            return held
        if call.awaited is None:
            call.awaited = AwaitedStream(call.client, call.shared or call.client, self.limits.sse_keepalive_s)
        awaited = call.awaited
        awaited.wait(exchange, reader, held, partial(self._shown, call, attempt, exchange.head))
        try:
            while not (exchange.complete or reader.failure or awaited.is_full or awaited.is_out):
                if reader.begun and not is_made:
                    break
                awaited.pass_on()
                piece = yield from self._next(
                    call, exchange, is_prefilled=reader.has_output, is_made=is_made and reader.begun
                )
                if piece or exchange.complete:
                    attempt.target.seen.received_at = time.monotonic()
                    awaited.add(reader.feed(piece, exchange.complete))
                self._trust(call, attempt, reader)
        finally:
            held = awaited.taken()
        return held

    def _trust(self, call: Call, attempt: Attempt, reader: AnswerReader) -> None:
        """Let white space begin an answer, unless no word may follow: where this backend, or another one before it, has
        answered such a request without any."""
        if reader.has_output and not reader.begun and reader.failure is None and call.failed_tries is None:
            kind = kind_of(call.read.request.path, attempt.prompt.model, stream=attempt.prompt.stream)
            reader.begun = self.registry.refusals.is_proven(attempt.target, kind)

    def _next(
        self, call: Call, exchange: Exchange, *, is_prefilled: bool = False, is_made: bool = False
    ) -> Steps[bytes]:
        """Wait for the next piece of an answer that has not begun, or is all there (`is_made`)."""
        limits = call.limits or self.limits
        try:
            if is_made:
                call.client.arm(WaitPhase.STALL, min(ERROR_WAIT_S, limits.stall_s))
            elif is_prefilled:
                call.client.arm(WaitPhase.STALL, limits.stall_s)
            else:
                call.client.arm(WaitPhase.FIRST_BYTE, limits.first_event_s)
            yield exchange.readable
        except ClientGone:
            if not call.outlives_client():
                raise
            return b""
        except UpstreamTimeout as error:
            if not is_made:
                raise
            raise UpstreamClosed("the backend does not send all that it has announced") from error
        return exchange.receive() or b""

    def _shown(self, call: Call, attempt: Attempt, head: HttpResponseHead) -> tuple[HttpResponseHead, Fields]:
        """Return a head as the client gets it, and the fields that are added."""
        call.status = head.status
        fields = call.own_fields(attempt, head, self.may_see)
        if head.fields.locates:
            served = self.address_of(attempt.target.url)
            head = Places.of(call.request.path, served, (backend.url for backend in self.registry)).shown(head)
        if origin := call.request.fields.origin:
            head = call.client.cors.relayed(head, origin, time.monotonic())
        return head, fields

    def follow(self, exchange: Exchange) -> None:
        """Prepare an answer to a client that has another one's head. Raises UpstreamGarbled if it can't follow that."""
        exchange.unframe()
        if exchange.head.status < 300 and not may_follow(exchange.head):
            raise UpstreamGarbled("the backend's answer is no stream that could follow another one's head")

    def answer(
        self, call: Call, attempt: Attempt, exchange: Exchange, reader: AnswerReader, held: bytes | None
    ) -> Steps[None]:
        """Relay an answer to its end, and have learned what it proves. `held`: what goes on of what was read of it."""
        client = call.shared or call.client
        proof = AnswerProof(self.learn, call, attempt, reader)
        if held is None:
            held = reader.feed(exchange.take(), exchange.complete)
            held = yield from self.begin(call, attempt, exchange, reader, held)
        send: Callable[[bytes], None] = client.send
        awaited = call.awaited
        if awaited is not None and awaited.is_open:
            held = payload_of(held) if exchange.head.framing == "chunked" else held
            if not may_follow(exchange.head):
                self.fail(call, held)
                return
            awaited.begin(exchange, held)
            send = awaited.send
        elif awaited is not None and awaited.is_out:
            awaited = None
            client.send(held)
        else:
            awaited = None
            client.relay_head(*self._shown(call, attempt, exchange.head), held)
        call.first_byte_at = call.first_byte_at or time.monotonic()
        proof.passed()
        if not exchange.complete:
            yield self._rest(call, exchange, reader, proof, send)
        if awaited is not None:
            awaited.end()
        if call.shared is not None:
            call.shared.complete(reader)
        proof.whole(chunked=exchange.head.framing == "chunked")

    def _rest(
        self, call: Call, exchange: Exchange, reader: AnswerReader, proof: AnswerProof, send: Callable[[bytes], None]
    ) -> Steps[None]:
        """Relay what comes, piece by piece."""
        client, is_prefilled, readable = call.shared or call.client, False, exchange.readable
        limits = call.limits
        while not exchange.complete:
            try:
                if client.unsent is not None:
                    yield client.flush
                is_prefilled = is_prefilled or proof.is_prefilled
                if is_prefilled:
                    client.arm(WaitPhase.STALL, (limits or self.limits).stall_s)
                else:
                    client.arm(WaitPhase.FIRST_BYTE, (limits or self.limits).first_event_s)
                yield readable if call.shared is None else call.shared.or_client(readable)
            except ClientGone:
                if not call.outlives_client():
                    raise
                continue
            piece = exchange.receive()
            if piece is None:
                continue
            kept = reader.feed(piece, exchange.complete)
            if kept:
                send(kept)
            proof.passed()

    def fail(self, call: Call, body: bytes) -> None:
        """End a stream of which the client has only the head, with an event that has the error in this body."""
        assert call.awaited is not None
        call.awaited.close()
        call.awaited.send(error_event(body, call.request.path))
        call.awaited.end()
        if call.shared is not None:
            call.shared.fail()

    def whole(self, call: Call, attempt: Attempt, exchange: Exchange, data: bytes) -> Steps[bytes]:
        """Return the body of an answer that begins so, once it is here: its backend holds the prompt then."""
        while not exchange.complete:
            if len(data) > READ_BYTES_MAX:
                raise UpstreamGarbled("the backend's answer is too long for what another backend is to get of it")
            data += yield from self._next(call, exchange)
        self.learn.router.first_token(attempt, time.monotonic())
        return payload_of(data) if exchange.head.framing == "chunked" else data

    def websocket(self, call: Call, attempt: Attempt, exchange: Exchange) -> Steps[None]:
        """Relay a WebSocket that client and backend have agreed to, until both sides have ended."""
        client, limits = call.client, self.limits.realtime
        self.realtime.check(limits)  # others may have been opened since the first check
        head, early = exchange.head, exchange.take()
        call.status = head.status
        client.send(response_head(head, (*UPGRADE, *call.own_fields(attempt, head, self.may_see)), close=False), early)
        call.first_byte_at = time.monotonic()
        if client.unsent is not None:
            yield client.flush
        client.work()
        client.handling = False  # from now on a client that ends its side may still receive
        sides, counters = (client.transport, exchange.transport), self.realtime.counters
        seen = client.seen_head
        watched = Watched(seen, call.model_names, early) if seen is not None else None
        splice = Splice(*sides, client.ahead, limits.idle_s, counters, watched)
        try:
            with suppress(NodeBusy):  # the end of a drain: both sides are closed as if they had ended
                yield partial(self.realtime.splice, splice)
        finally:
            call.sent_bytes = len(early) + splice.backend_bytes


def may_follow(head: HttpResponseHead) -> bool:
    """Whether an answer may follow the head of another engine's stream: it is one too, and can be read."""
    fields = head.fields
    return head.status == 200 and fields.readable and fields.streams
