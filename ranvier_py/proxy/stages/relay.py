"""Relays an answer as it comes, without counts that only this node asked for; or a WebSocket, in both directions. Reads
the answer of a leg that is not the client's, up to READ_BYTES_MAX."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ranvier_py.core.answers.usage_removal import UsageRemover
from ranvier_py.core.errors import ClientGone, NodeBusy, UpstreamGarbled
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

READ_BYTES_MAX = 1 << 20  # engines that prefill for others answer with one token, and where they keep the blocks


@dataclass(slots=True, eq=False, repr=False)
class RelayStage:
    registry: Registry
    limits: PipelineLimits
    learn: LearnStage
    realtime: Realtime
    may_see: Callable[[bytes | None], bool]  # whether a request with this control key may see how it was routed

    def answer(self, call: Call, attempt: Attempt, exchange: Exchange, remover: UsageRemover | None) -> Steps[None]:
        """Relay an answer to its end, and have learned what it proves."""
        client, head = call.shared or call.client, exchange.head
        call.status = head.status
        proof = AnswerProof(self.learn, call, attempt, head)
        data = exchange.take()
        while not data and not exchange.complete and attempt.prompt.stream:  # a head that came before the prefill
            data = yield from self.first_data(call, exchange)
        kept = data if remover is None else remover.feed(data, exchange.complete)
        if head.fields.locates:
            served = BackendAddress.parse(attempt.target.url)
            head = Places.of(call.request.path, served, (backend.url for backend in self.registry)).shown(head)
        if origin := call.request.fields.origin:
            head = call.client.cors.relayed(head, origin, time.monotonic())
        client.relay_head(head, call.own_fields(attempt, head, self.may_see), kept)
        proof.passed(data)
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
            kept = piece if remover is None else remover.feed(piece, exchange.complete)
            if kept:
                client.send(kept)
            proof.passed(piece)
        if call.shared is not None:
            call.shared.complete(b"" if remover is None else remover.counts)
        proof.whole(chunked=head.framing == "chunked")

    def first_data(self, call: Call, exchange: Exchange) -> Steps[bytes]:
        """Wait for the body of an answer whose head is here. Until then the request may still be sent elsewhere."""
        try:
            call.client.arm(WaitPhase.FIRST_BYTE, self.limits.first_byte_s)
            yield exchange.readable
        except ClientGone:
            if call.shared is None or not call.shared.leave():
                raise
            return b""
        return exchange.receive() or b""

    def whole(self, call: Call, attempt: Attempt, exchange: Exchange) -> Steps[bytes]:
        """Return the body of an answer once it is here: its backend holds the prompt then."""
        data = exchange.take()
        while not exchange.complete:
            if len(data) > READ_BYTES_MAX:
                raise UpstreamGarbled("the backend's answer is too long for what another backend is to get of it")
            data += yield from self.first_data(call, exchange)
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
