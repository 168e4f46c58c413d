"""One request, from its body to the end of its answer.

    read -> text chain -> match (-> tokens first, if that found too little) -> place -> ask -> relay -> learn
         -> the answer, learned off the path

Each step is one synchronous call that gets the value of the step before; between steps the request waits (`driver`). If
a backend fails before a byte was relayed, the request returns to *place* without that backend, a bounded number of
times, if it may be sent again; after the first byte it only ends. If the client leaves, everything ends: the connection
to the backend is closed at once, and only what was proved is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from ranvier_py.core.answers.answer_stream import ResponseName, counted_prompt, has_finished, has_token
from ranvier_py.core.answers.usage_injection import REFUSALS, Terms, UsageAsker
from ranvier_py.core.answers.usage_removal import UsageRemover
from ranvier_py.core.clients.body_mender import BodyMender
from ranvier_py.core.errors import (
    ClientGone,
    NodeBusy,
    NodeExhausted,
    RanvierError,
    ResponseLost,
    UpstreamError,
    UpstreamTimeout,
)
from ranvier_py.core.ids import BackendId
from ranvier_py.core.options import Options, option, part, seconds
from ranvier_py.core.prompts.body_json import form_model
from ranvier_py.core.prompts.cache_control import marked_body
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.prompts.reserved_members import NOTHING
from ranvier_py.core.prompts.tenants import Tenants, salted_body
from ranvier_py.core.routing.backends import Outcome, Transition
from ranvier_py.core.routing.blame.judgements import SERVED
from ranvier_py.core.routing.health import FAULTS
from ranvier_py.core.routing.processes.ranks import RANK_FIELD
from ranvier_py.core.routing.request_paths import MESSAGES_PATH, RESPONSES_PATH
from ranvier_py.core.routing.retries import RetryLimits, is_inference
from ranvier_py.core.routing.router import Attempt, PoolMatch, Router
from ranvier_py.core.routing.stored_paths import response_of
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.admission.router_fields import RouterFieldOptions, RouterFields
from ranvier_py.proxy.admission.tenant_rules import check_names, tenant_of
from ranvier_py.proxy.answers.locations import without_hosts
from ranvier_py.proxy.answers.own_answers import own_answer
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.error_answers import response_head
from ranvier_py.proxy.failed_tries import (
    FailedTries,
    begun,
    failure_inside,
    finished,
    known_short,
    outcome_of_error,
    passed_over,
    waited_long,
)
from ranvier_py.proxy.http_values import HttpRequest, WaitPhase
from ranvier_py.proxy.realtime import Realtime, RealtimeLimits, Splice, model_of, upgrades
from ranvier_py.proxy.response_cache import ResponseCache
from ranvier_py.proxy.served_request import ServedRequest, mended_by
from ranvier_py.proxy.shared_answer import SharedAnswer
from ranvier_py.proxy.upstream import UPGRADE, Exchange, Upstream

CAPTURE_BYTES_MAX = 1 << 20
"""Longer answers are relayed but not learned: 1 MiB of a stream is some 5,000 tokens."""

OWNER_WAIT_S, OWNER_PAUSE_S = 0.5, 0.01
"""If no node here knows the owner of a response, the request waits so long and looks so often: a peer's report of it
may be on its way. Without peers it does not wait."""


@dataclass(frozen=True, slots=True)
class PipelineLimits(Options):
    """Deadlines of one request, in seconds."""

    SECTION = "Limits"

    tokenize_deadline_s: float = option(
        0.15, "Longest wait for tokens before placing by load. 0 never waits.", most=60.0, section="Tokens"
    )
    first_byte_s: float = seconds(
        600.0,
        "Longest wait for a backend to begin its answer; of a stream, whose head may come before the prefill, longest "
        "silence until its first token.",
        key="first_byte_timeout_s",
    )
    stall_s: float = seconds(  # OpenAI's SDK waits as long; engines are silent while they buffer calls of tools
        600.0, "Longest silence within an answer that has begun.", key="stall_timeout_s"
    )
    retries: RetryLimits = part(RetryLimits)
    realtime: RealtimeLimits = part(RealtimeLimits)
    router_fields: RouterFieldOptions = part(RouterFieldOptions)


class PromptTokenizer(Protocol):
    """Tokenizes before placement, or off the path: io/tokenizer_worker.py; `IndexedTokenizer` also asks Redis."""

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool: ...
    def submit(self, attempt: Attempt) -> None: ...
    def finish(self, attempt: Attempt, raw: bytes, *, chunked: bool) -> None: ...


@dataclass(slots=True, eq=False, repr=False)  # no repr, since it would show keys
class Pipeline:
    """Handles every request of the public port, from its first step to its last."""

    router: Router
    upstream: Upstream
    tokenizer: PromptTokenizer
    limits: PipelineLimits
    address_of: Callable[[str], BackendAddress]  # from a backend's URL
    asking: UsageAsker  # has streams asked for their counts
    report: Callable[[RequestSummary], object] | None  # called with every finished request
    trouble: Callable[[BackendId], object]  # called with a backend that failed, to have it probed at once
    changed: Callable[[Sequence[Transition]], object]  # called with changes of health that requests caused
    authorization: bytes  # sent if the client sends none; may be empty
    ids: Iterator[bytes]  # for requests without an id: unique among nodes and restarts
    tenants: Tenants | None  # identifies tenants, if they are kept apart
    may_see: Callable[[bytes | None], bool]  # whether a request with this control key may see how it was routed
    cache_control: bool  # bodies of Anthropic's API get a marker on their system prompt
    responses: ResponseCache | None  # answers without a backend, if the operator wants that
    mender: BodyMender | None  # changes bodies, if the operator turned a rule on
    realtime: Realtime = field(default_factory=Realtime)
    router_fields: RouterFields = field(default_factory=RouterFields)
    serving: dict[int, ServedRequest] = field(default_factory=dict)  # in flight, by descriptor, oldest first

    def handle(self, request: HttpRequest, client: Client) -> Steps[None]:
        """Answer one request. Raises RanvierError, which the server answers if nothing was sent yet."""
        if request.fields.reserved:
            request = self.router_fields.admitted(request, self.limits.router_fields)
        client.request_id = request.fields.request_id or next(self.ids)
        served = self.serving[client.fd] = ServedRequest(request, client, client.request_id, time.monotonic())
        try:
            own = own_answer(self.router.registry, request, client)
            if own is None:
                yield from (
                    self._forward(served) if self.responses is None else self.responses.answer(served, self._forward)
                )
            else:
                served.status = own[0]
                client.respond(*own)
                served.outcome = "success"
        except RanvierError as error:
            served.outcome = Outcome.TIMEOUT.value if isinstance(error, UpstreamTimeout) else error.code
            if not client.started and not isinstance(error, ClientGone):
                served.status = error.status
            raise
        except Exception:  # a bug of ours, which the server answers and logs
            served.outcome, served.status = RanvierError.code, served.status or RanvierError.status
            raise
        finally:
            self.serving.pop(client.fd, None)
            if self.report is not None:
                self.report(served.summary(time.monotonic()))

    # --- to one backend after the other -----------------------------------------------------------------------------

    def _forward(self, served: ServedRequest) -> Steps[None]:
        """Ask one backend after another, until one has answered."""
        router, request = self.router, served.request
        prompt = self._read(served)
        if prompt.reserved is not NOTHING and request.body:
            prompt = yield from self._checked(served, prompt)
        judged = is_inference(request.method, request.path)
        if judged and (router.registry.pauses or router.registry.refusals):
            prompt.avoid = passed_over(router, request, prompt, time.monotonic())
        key, owners = prompt.response_key, router.owners
        if key and owners.collecting and owners.find(key, time.monotonic()) is None:
            yield partial(self._await_owner, key)
        found = router.find(prompt, time.monotonic())
        if router.too_little(prompt, found):
            yield partial(self.tokenizer.tokenize_first, prompt, self.limits.tokenize_deadline_s)
            found = router.find(prompt, time.monotonic())
        if judged and (short := known_short(router.registry, prompt)):
            prompt.avoid = tuple(sorted({*prompt.avoid, *short}))
            found = router.find(prompt, time.monotonic())
        elsewhere: PoolMatch | None = found
        while elsewhere is not None:
            decision = router.place(prompt, elsewhere)
            attempt = router.start_attempt(prompt, decision, elsewhere.at, served.request_id, elsewhere, quiet=True)
            attempt.judged = judged
            served.attempt = attempt
            served.tries += 1
            elsewhere = yield from self._attempt(served, attempt)

    def _checked(self, served: ServedRequest, prompt: Prompt) -> Steps[Prompt]:
        """Return the prompt without what only routers may set; refuse what may name another tenant's response."""
        yield from check_names(self.tenants, served.request, prompt)
        names = yield from self.router_fields.found(served.request, prompt, self.limits.router_fields)
        if names:
            served.request, served.unmended = self.router_fields.without(served.unmended or served.request, names), None
            prompt = self._read(served)
        return prompt

    def _read(self, served: ServedRequest) -> Prompt:
        """Read the prompt of the request, and note whether an engine may keep its answer."""
        router, request, fields = self.router, served.request, served.request.fields
        path = request.path if request.method == b"POST" and fields.readable else b""
        tenant = tenant_of(self.tenants, request) if self.tenants is not None else b""
        mended = served.mend(self.mender, path, router.registry) if self.mender is not None else None
        body = request.body if mended is None else mended.body
        prompt = router.read(path, body, tenant, fields.session)
        if mended is not None:
            prompt.rules = [use._replace(tenant=tenant) for use in mended.uses]
        if fields.multipart and not prompt.model:
            prompt.model = form_model(request.body)
        prompt.client, prompt.sub_agent = fields.client, fields.sub_agent
        if fields.upgrades and upgrades(request):
            self.realtime.check(self.limits.realtime)
            served.upgrades = served.client.must_close = True
            prompt.model = model_of(request.target)
        if path == RESPONSES_PATH and prompt.stores:
            served.naming, served.tenant = ResponseName(), tenant
        elif named := response_of(request.method, request.path):
            owner = self.tenants.of(request.headers) if self.tenants is not None else b""
            prompt.response_key = router.owners.response_key(named, owner)
        return prompt

    def body_as_read(self, path: bytes, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the body of which fingerprints would be made: the one that the rules make of this."""
        if self.mender is None:
            return body
        request = HttpRequest(b"POST", path, list(headers), body)
        mended = mended_by(self.mender.forgetful(), path, request, self.router.registry)
        return body if mended is None else mended.body

    async def _await_owner(self, digest: int) -> None:
        """Wait for a peer's report of who owns this response: it may be on its way."""
        with trio.move_on_after(OWNER_WAIT_S):
            while self.router.owners.find(digest, time.monotonic()) is None:  # noqa: ASYNC110  # the core has no events
                await trio.sleep(OWNER_PAUSE_S)

    def _attempt(self, served: ServedRequest, attempt: Attempt) -> Steps[PoolMatch | None]:
        """Ask one backend, relay its answer and finish the attempt. Returns whom to ask instead; None at the end."""
        outcome, exchange, elsewhere = Outcome.CANCELLED, None, None
        try:
            exchange, is_asked = yield from self._ask(served, attempt)
            attempt.status = exchange.head.status
            judgement, inside = SERVED, None
            if attempt.status == 200 and attempt.judged:
                inside = yield from failure_inside(exchange, attempt, partial(self._first_data, served, exchange))
                attempt.status = 200 if inside is None else inside.status
            if attempt.status >= 300:
                failed = self._failed_tries(served)
                judgement = yield from failed.judge(attempt, exchange, inside)
                if judgement.outcome is not Outcome.SUCCESS:
                    served.note(f"it answered {attempt.status}{'' if inside is None else ', within a 200'}")
                elsewhere = failed.after_answer(attempt, judgement)
                if elsewhere is not None:
                    outcome = judgement.outcome
                    return elsewhere
            if attempt.status == 101:
                yield from self._splice(served, attempt, exchange)
            else:
                remover = self._remover(attempt, exchange) if is_asked else None
                yield from self._relay(served, attempt, exchange, remover)
            outcome = judgement.outcome
        except NodeExhausted as error:
            outcome = Outcome.NOT_SENT
            served.failed(error)
            raise
        except UpstreamError as error:
            outcome = outcome_of_error(error)
            served.failed(error)
            self.trouble(attempt.backend)
            elsewhere = yield from self._after_error(served, attempt, outcome, error)
            return elsewhere
        finally:
            if exchange is not None:
                exchange.release()
            self._finish(served, attempt, outcome, is_last=elsewhere is None)
        served.outcome = outcome.value
        return None

    def _after_error(
        self, served: ServedRequest, attempt: Attempt, outcome: Outcome, error: UpstreamError
    ) -> Steps[PoolMatch | None]:
        """Return whom to ask after a try without an answer; None if the client got one after all. Raises `error`."""
        if served.client.started:
            raise error
        failed = self._failed_tries(served)
        is_late = waited_long(served.started_at, attempt, self.limits.first_byte_s)
        elsewhere = failed.after_error(attempt, error, is_late=is_late)
        if elsewhere is not None:
            return elsewhere
        if failed.kept is None:
            if attempt.prompt.response_key and outcome is Outcome.CONNECT_ERROR:
                raise ResponseLost("the engine that keeps this response is not there") from error
            raise error
        yield from self._relay(served, *failed.kept, None)
        served.outcome = Outcome.OVERLOADED.value
        return None

    def _finish(self, served: ServedRequest, attempt: Attempt, outcome: Outcome, *, is_last: bool) -> None:
        failed = self._failed_tries(served) if outcome in FAULTS else served.failed_tries
        transitions = finished(self.router, served.request, failed, attempt, outcome, is_last=is_last)
        if transitions:
            self.changed(transitions)

    def _failed_tries(self, served: ServedRequest) -> FailedTries:
        failed = served.failed_tries
        if failed is None:
            request, client = served.request, served.client
            failed = served.failed_tries = FailedTries(request, client, self.router, self.limits.retries)
        return failed

    # --- ask --------------------------------------------------------------------------------------------------------

    def _ask(self, served: ServedRequest, attempt: Attempt) -> Steps[tuple[Exchange, bool]]:
        """Send the request, if possible with a question for counts. Returns the answer, and whether that was asked.

        If the backend refuses, perhaps because of the question, the request is sent once more without it.
        """
        asking, request = self.asking, served.request
        if served.unmended is not None and attempt.target.hosted:  # a hosted backend added since the body was read
            request = served.unmended
        body = asking.body(attempt.prompt, attempt.backend, attempt.generation, request.body)
        if body is None:
            return (yield from self._send(served, attempt, request)), False
        exchange = yield from self._send(served, attempt, request.with_body(body))
        status = exchange.head.status
        if status not in REFUSALS or asking.terms(attempt.backend, attempt.generation) is Terms.TAKES:
            if status == 200:
                asking.taken(attempt.backend, attempt.generation)
            return exchange, True
        try:
            exchange.take()  # to release a connection that can be used again: a refusal is mostly complete here
        finally:
            exchange.release()
        exchange = yield from self._send(served, attempt, request)
        asking.refused(attempt.backend, attempt.generation, exchange.head.status)
        return exchange, False

    def _send(self, served: ServedRequest, attempt: Attempt, request: HttpRequest) -> Steps[Exchange]:
        """Send the request, and wait for the head of the answer. Raises UpstreamError."""
        if attempt.prompt.salt:
            request = self._salted(attempt, request)
        if self.cache_control and request.path == MESSAGES_PATH and (marked := marked_body(request.body)) is not None:
            request = request.with_body(marked)
        extra = []  # fields that a backend gets in addition to the client's own
        fields = request.fields
        if fields.request_id is None:
            extra.append((b"x-request-id", served.request_id))
        if self.authorization and not fields.authorized:
            extra.append((b"authorization", self.authorization))
        if attempt.target.rank is not None:
            extra.append((RANK_FIELD, b"%d" % attempt.target.rank))
        served.client.arm(WaitPhase.FIRST_BYTE, self.limits.first_byte_s)
        if served.upgrades:
            return self.upstream.upgrade(self.address_of(attempt.url), request, extra)
        return self.upstream.open(self.address_of(attempt.url), request, extra, partial(self._sent, attempt))

    def _salted(self, attempt: Attempt, request: HttpRequest) -> HttpRequest:
        """Add the tenant's salt, if the engine keeps prompts apart by it; count a request without."""
        if attempt.target.takes_salt(request.path):
            return request.with_body(salted_body(request.body, attempt.prompt.salt))
        self.router.counters.unsalted += 1
        return request

    def _sent(self, attempt: Attempt) -> None:
        """Do what no request needs to wait for: notify observers, and have the prompt tokenized."""
        if not attempt.announced:
            self.router.announce(attempt)
            self.tokenizer.submit(attempt)

    def _remover(self, attempt: Attempt, exchange: Exchange) -> UsageRemover | None:
        """Return what removes the counts from a stream again, since only we asked for them; None if it is no stream."""
        fields = exchange.head.fields
        if b"text/event-stream" not in fields.lines:
            return None
        if not fields.readable:
            self.asking.unreadable(attempt.backend, attempt.generation)
            return None
        return UsageRemover(exchange.head.framing, exchange.marks)

    # --- relay ------------------------------------------------------------------------------------------------------

    def _relay(
        self, served: ServedRequest, attempt: Attempt, exchange: Exchange, remover: UsageRemover | None
    ) -> Steps[None]:
        """Relay the answer as it comes, without the counts that only we asked for, and learn what it proves."""
        client, head = served.shared or served.client, exchange.head
        served.status = head.status
        is_learned = 200 <= attempt.status < 300 and attempt.prompt.kind != "opaque" and head.fields.readable
        captured = bytearray() if is_learned else None  # not a list: an engine may send two bytes at a time
        data = exchange.take()
        while not data and not exchange.complete and attempt.prompt.stream:  # a head that came before the prefill
            data = yield from self._first_data(served, exchange)
        kept = data if remover is None else remover.feed(data, exchange.complete)
        if head.status != 200:
            head = without_hosts(head, served.request.path, (backend.url for backend in self.router.registry))
        client.relay_head(head, served.own_fields(attempt, head, self.may_see), kept)
        self._passed(served, attempt, captured, data)
        while not exchange.complete:
            try:
                if client.unsent is not None:
                    yield client.flush
                self._arm(
                    client, is_prefilled=captured is None or attempt.first_at is not None or not attempt.prompt.stream
                )
                yield exchange.readable if served.shared is None else served.shared.or_client(exchange.readable)
            except ClientGone:
                if served.shared is None or not served.shared.leave():
                    raise
                continue
            piece = exchange.receive()
            if piece is None:
                continue
            kept = piece if remover is None else remover.feed(piece, exchange.complete)
            if kept:
                client.send(kept)
            self._passed(served, attempt, captured, piece)
        if remover is not None:
            self.asking.answered(remover, attempt.backend, attempt.generation)
        if served.shared is not None:
            served.shared.complete(b"" if remover is None else remover.counts)
        if captured is not None:
            self._learn(attempt, captured, chunked=head.framing == "chunked")

    def _arm(self, client: Client | SharedAnswer, *, is_prefilled: bool) -> None:
        """Wait for more of an answer, as long as an engine may be silent."""
        if is_prefilled:
            client.arm(WaitPhase.STALL, self.limits.stall_s)
        else:
            client.arm(WaitPhase.FIRST_BYTE, self.limits.first_byte_s)

    def _first_data(self, served: ServedRequest, exchange: Exchange) -> Steps[bytes]:
        """Wait for the body of an answer whose head is here. Until then the request may still be sent elsewhere."""
        try:
            served.client.arm(WaitPhase.FIRST_BYTE, self.limits.first_byte_s)
            yield exchange.readable
        except ClientGone:
            if served.shared is None or not served.shared.leave():
                raise
            return b""
        return exchange.receive() or b""

    def _splice(self, served: ServedRequest, attempt: Attempt, exchange: Exchange) -> Steps[None]:
        """Relay a WebSocket that client and backend have agreed to, in both directions, until both sides have ended."""
        client, limits = served.client, self.limits.realtime
        self.realtime.check(limits)  # others may have been opened since the first check
        head, early = exchange.head, exchange.take()
        served.status = head.status
        client.send(
            response_head(head, (*UPGRADE, *served.own_fields(attempt, head, self.may_see)), close=False), early
        )
        served.first_byte_at = time.monotonic()
        if client.unsent is not None:
            yield client.flush
        client.work()
        client.handling = False  # from now on a client that ends its side may still receive
        splice = Splice(client.transport, exchange.transport, client.ahead, limits.idle_s)
        try:
            with suppress(NodeBusy):  # the end of a drain: both sides are closed as if they had ended
                yield partial(self.realtime.splice, splice)
        finally:
            served.sent_bytes = attempt.sent_bytes = len(early) + splice.backend_bytes

    def _passed(self, served: ServedRequest, attempt: Attempt, captured: bytearray | None, data: bytes) -> None:
        """Account for a piece of the answer that was relayed. `captured` collects an answer that is to be learned."""
        now = time.monotonic()
        if not served.first_byte_at:
            served.first_byte_at = now
        if attempt.generation == attempt.target.generation:
            attempt.target.received_at = now
        if captured is not None and data:
            if attempt.first_at is None and (not attempt.prompt.stream or has_token(data, attempt.prompt.api)):
                self.router.first_token(attempt, now)
                transitions = begun(self.router, served.request, served.failed_tries, attempt, now)
                if transitions:
                    self.changed(transitions)
            if served.sent_bytes <= CAPTURE_BYTES_MAX:
                captured += data
        if served.naming is not None and data and 200 <= attempt.status < 300 and (name := served.naming.feed(data)):
            self.router.stored(attempt, name, served.tenant, now)
        served.sent_bytes = attempt.sent_bytes = served.sent_bytes + len(data)

    def _learn(self, attempt: Attempt, captured: bytearray, *, chunked: bool) -> None:
        """Have a whole answer learned. One without output proves a prefill only if the engine says how it finished."""
        raw = bytes(captured)
        attempt.counted_tokens = counted_prompt(raw, attempt.prompt.api)
        if attempt.first_at is None and has_finished(raw, attempt.prompt.api):
            self.router.first_token(attempt, time.monotonic())
        if attempt.first_at is not None and attempt.sent_bytes <= CAPTURE_BYTES_MAX:
            self.tokenizer.finish(attempt, raw, chunked=chunked)
