"""Relays an answer as it comes, without counts that only this node asked for; or a WebSocket, in both directions. Reads
the answer of a leg that is not the client's, up to READ_BYTES_MAX."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ranvier_py.core.answers.answer_reader import HELD_BYTES_MAX, AnswerReader
from ranvier_py.core.errors import ClientGone, NodeBusy, UpstreamGarbled, UpstreamTimeout
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Registry
from ranvier_py.proxy.answers.locations import Places
from ranvier_py.proxy.call import Call, PipelineLimits
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.error_answers import response_head
from ranvier_py.proxy.failed_tries import payload_of
from ranvier_py.proxy.http_values import WaitPhase
from ranvier_py.proxy.realtime import Realtime, Splice
from ranvier_py.proxy.stages.learn import AnswerProof, LearnStage
from ranvier_py.proxy.upstream import UPGRADE, Exchange

HELD_S = 5.0  # of an answer that has not begun, since its first byte
READ_BYTES_MAX = 1 << 20  # engines that prefill for others answer with one token, and where they keep the blocks


@dataclass(slots=True, eq=False, repr=False)
class RelayStage:
    registry: Registry
    limits: PipelineLimits
    learn: LearnStage
    realtime: Realtime
    may_see: Callable[[bytes | None], bool]  # whether a request with this control key may see how it was routed

    def begin(self, call: Call, exchange: Exchange, reader: AnswerReader, held: bytes) -> Steps[bytes]:
        """Wait until an answer begins, or shows what it is instead: until then the request may be sent elsewhere.
        `held`: what goes on of what came. Returns all of that."""
        until = math.inf
        try:
            while not (reader.begun or reader.failure or exchange.complete):
                now = time.monotonic()
                if until == math.inf and reader.size:
                    until = now + HELD_S
                if len(held) > HELD_BYTES_MAX or now > until:
                    break
                piece = yield from self._next(call, exchange, until - now)
                if piece or exchange.complete:
                    held += reader.feed(piece, exchange.complete)
        except UpstreamTimeout:  # it may last, and clients want to see its head and its comments
            if call.client.phase is not WaitPhase.HELD:
                raise
        return held

    def _next(self, call: Call, exchange: Exchange, hold_s: float) -> Steps[bytes]:
        """Wait for the next piece of an answer that has not begun, for so long if its head may go out then."""
        first_byte_s = self.limits.first_byte_s
        try:
            call.client.arm(
                *((WaitPhase.FIRST_BYTE, first_byte_s) if hold_s > first_byte_s else (WaitPhase.HELD, hold_s))
            )
            yield exchange.readable
        except ClientGone:
            if call.shared is None or not call.shared.leave():
                raise
            return b""
        return exchange.receive() or b""

    def answer(
        self, call: Call, attempt: Attempt, exchange: Exchange, reader: AnswerReader, held: bytes | None
    ) -> Steps[None]:
        """Relay an answer to its end, and have learned what it proves. `held`: what goes on of what was read of it."""
        client, head = call.shared or call.client, exchange.head
        call.status = head.status
        proof = AnswerProof(self.learn, call, attempt, reader)
        if held is None:
            held = reader.feed(exchange.take(), exchange.complete)
            held = yield from self.begin(call, exchange, reader, held)
        if head.fields.locates:
            served = BackendAddress.parse(attempt.target.url)
            head = Places.of(call.request.path, served, (backend.url for backend in self.registry)).shown(head)
        if origin := call.request.fields.origin:
            head = call.client.cors.relayed(head, origin, time.monotonic())
        client.relay_head(head, call.own_fields(attempt, head, self.may_see), held)
        call.first_byte_at = call.first_byte_at or time.monotonic()
        proof.passed()
        is_prefilled, readable = False, exchange.readable
        while not exchange.complete:
            try:
                if client.unsent is not None:
                    yield client.flush
                is_prefilled = is_prefilled or proof.is_prefilled
                if is_prefilled:
                    client.arm(WaitPhase.STALL, self.limits.stall_s)
                else:
                    client.arm(WaitPhase.FIRST_BYTE, self.limits.first_byte_s)
                yield readable if call.shared is None else call.shared.or_client(readable)
            except ClientGone:
                if call.shared is None or not call.shared.leave():
                    raise
                continue
            piece = exchange.receive()
            if piece is None:
                continue
            kept = reader.feed(piece, exchange.complete)
            if kept:
                client.send(kept)
            proof.passed()
        if call.shared is not None:
            call.shared.complete(reader)
        proof.whole(chunked=head.framing == "chunked")

    def whole(self, call: Call, attempt: Attempt, exchange: Exchange, data: bytes) -> Steps[bytes]:
        """Return the body of an answer that begins so, once it is here: its backend holds the prompt then."""
        while not exchange.complete:
            if len(data) > READ_BYTES_MAX:
                raise UpstreamGarbled("the backend's answer is too long for what another backend is to get of it")
            data += yield from self._next(call, exchange, math.inf)
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
        splice = Splice(client.transport, exchange.transport, client.ahead, limits.idle_s)
        try:
            with suppress(NodeBusy):  # the end of a drain: both sides are closed as if they had ended
                yield partial(self.realtime.splice, splice)
        finally:
            call.sent_bytes = len(early) + splice.backend_bytes
