"""One request, from its body to the end of its answer.

    read -> text chain -> match (-> tokens first, if that found too little) -> place -> ask -> relay -> learn
         -> the answer, learned off the path

Each step is one synchronous call, which gets the value that the one before returned, and none reaches back; between
them the request waits (`driver`). A request whose backend fails before a byte was relayed goes back to *place* without
that backend, a bounded number of times; after the first byte it only ends. A client that goes away ends the whole: the
backend's connection is closed at once; only what was proved is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import orjson

from ranvier_py.core.answers.answer_stream import has_finished, has_token
from ranvier_py.core.answers.usage_injection import REFUSALS, Terms, UsageAsking
from ranvier_py.core.answers.usage_removal import UsageRemover
from ranvier_py.core.errors import (
    ClientGone,
    ConnectFailed,
    MethodNotAllowed,
    NotFound,
    RanvierError,
    UpstreamError,
    UpstreamTimeout,
)
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backends import Outcome, Transition
from ranvier_py.core.routing.retries import Next, RetryBudget
from ranvier_py.core.routing.router import CHAT_PATH, COMPLETION_PATH, Attempt, PoolMatch, Router
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.connection_pool import BackendAddress
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import Fields, HttpRequest, HttpResponseHead, WaitPhase
from ranvier_py.proxy.pipeline_values import FIRST_BYTE_TOTAL_S, PipelineLimits, PromptTokenizer, ServedRequest
from ranvier_py.proxy.upstream import Exchange, Upstream

CAPTURE_BYTES_MAX = 1 << 20
"""Longer answers are relayed like any other, and not learned: 1 MiB of a stream is some 5,000 tokens."""


class Pipeline:
    """Takes every request of the public port from its first step to its last.

    Args:
        report: called with every finished request; None where nobody listens.
        trouble: called with a backend that could not be asked, so that it is probed at once.
        changed: called with changes of a backend's health that requests brought about.
        address_of: a backend's address by its URL.
        asking: who asks streams for their counts; None asks nobody.
        api_key: sent as bearer key where the client sends no Authorization.
        name: unique among nodes and restarts; the first part of the request ids made here.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        router: Router,
        upstream: Upstream,
        tokenizer: PromptTokenizer,
        limits: PipelineLimits,
        *,
        address_of: Callable[[str], BackendAddress],
        asking: UsageAsking | None = None,
        api_key: str = "",
        report: Callable[[RequestSummary], object] | None = None,
        trouble: Callable[[BackendId], object] = lambda _: None,
        changed: Callable[[Sequence[Transition]], object] = lambda _: None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._tokenizer = tokenizer
        self._limits = limits
        self._address_of = address_of
        self._asking = asking or UsageAsking(enabled=False)
        self._authorization = f"Bearer {api_key}".encode() if api_key else b""
        self._report = report
        self._trouble = trouble
        self._changed = changed
        self._clock = clock
        self._ids = (b"%b-%x" % (name.encode(), number) for number in count(1))

    def handle(self, request: HttpRequest, client: Client) -> Steps[None]:
        """Answer one request. Raises RanvierError while nothing was sent, for the server to answer."""
        client.request_id = request.fields.request_id or next(self._ids)
        served = ServedRequest(request, client, client.request_id, self._clock())
        try:
            own = self._own_answer(request)
            if own is None:
                yield from self._forward(served)
            else:
                served.status = own[0]
                client.respond(*own)
                served.outcome = "success"
        except RanvierError as error:
            served.outcome = Outcome.TIMEOUT.value if isinstance(error, UpstreamTimeout) else error.code
            if not client.started and not isinstance(error, ClientGone):
                served.status = error.status
            raise
        finally:
            if self._report is not None:
                self._report(served.summary(self._clock()))

    def _own_answer(self, request: HttpRequest) -> tuple[int, bytes] | None:
        """Status and body of what the node answers itself; None for what goes to a backend."""
        path, reading = request.path, request.method in (b"GET", b"HEAD")
        if path in (CHAT_PATH, COMPLETION_PATH) and request.method not in (b"POST", b"OPTIONS"):  # OPTIONS: for CORS
            raise MethodNotAllowed(f"{path.decode()} takes POST")
        if path == b"/v1/models" and reading:
            return self._models()
        if path == b"/health" and reading:
            return 200, b'{"status":"ok"}'
        if not path.startswith(b"/v1/") or climbs(path):
            raise NotFound("this port serves /v1/ and /health")
        return None

    def _models(self) -> tuple[int, bytes] | None:
        """The union of the backends' model lists; None while no backend has sent its own."""
        cards: dict[str, Mapping[str, Any]] = {}
        for backend in self._router.registry:
            for card in backend.cards:
                cards.setdefault(str(card.get("id")), card)
        return (200, orjson.dumps({"object": "list", "data": list(cards.values())})) if cards else None

    # --- to one backend after the other -----------------------------------------------------------------------------

    def _forward(self, served: ServedRequest) -> Steps[None]:
        """Ask one backend after the other, until one has answered."""
        router, request = self._router, served.request
        path = request.path if request.method == b"POST" and request.fields.readable else b""
        prompt = router.read(path, request.body)
        found = router.find(prompt, self._clock())
        if router.too_little(prompt, found):
            yield partial(self._tokenizer.tokenize_first, prompt, self._limits.tokenize_deadline_s)
            found = router.find(prompt, self._clock())
        budget = RetryBudget(self._limits.retries)
        elsewhere: PoolMatch | None = found
        while elsewhere is not None:
            decision = router.place(prompt, elsewhere)
            attempt = router.start_attempt(prompt, decision, self._clock(), served.request_id, elsewhere, quiet=True)
            served.attempt = attempt
            served.tries += 1
            elsewhere = yield from self._attempt(served, attempt, budget)

    def _attempt(self, served: ServedRequest, attempt: Attempt, budget: RetryBudget) -> Steps[PoolMatch | None]:
        """Ask, relay, finish. Returns whom to ask instead, or None when the request has ended."""
        client = served.client
        outcome, exchange = Outcome.CANCELLED, None
        is_last = self._clock() - served.started_at + 2 * self._limits.first_byte_s > FIRST_BYTE_TOTAL_S
        try:
            exchange, is_asked = yield from self._ask(served, attempt)
            attempt.status = exchange.head.status
            answered = outcome_of(attempt.status)
            if self._limits.retries.retries(attempt.status):
                elsewhere = self._elsewhere(attempt, answered, budget)
                if elsewhere is not None:
                    outcome = answered
                    return elsewhere
            yield from self._relay(served, attempt, exchange, self._remover(attempt, exchange) if is_asked else None)
            outcome = answered
        except UpstreamError as error:
            outcome = outcome_of_error(error, relayed=client.started)
            self._trouble(attempt.backend)
            if client.started or (is_last and outcome is Outcome.TIMEOUT):
                raise
            elsewhere = self._elsewhere(attempt, outcome, budget)
            if elsewhere is None:
                raise
            return elsewhere
        finally:
            if exchange is not None:
                exchange.release()
            transitions = self._router.finish_attempt(attempt, outcome, self._clock())
            if transitions:
                self._changed(transitions)
        served.outcome = outcome.value
        return None

    def _elsewhere(self, attempt: Attempt, outcome: Outcome, budget: RetryBudget) -> PoolMatch | None:
        """Whom to ask after a failed attempt; None when it is over."""
        others = self._found_without(attempt.prompt, (*budget.tried, attempt.backend))
        step = budget.next_attempt(attempt.backend, outcome, relayed=False, others=others is not None)
        if step is Next.AGAIN:
            return self._found_without(attempt.prompt, budget.tried)
        return others if step is Next.ELSEWHERE else None

    def _found_without(self, prompt: Prompt, tried: Sequence[BackendId]) -> PoolMatch | None:
        try:
            return self._router.find(prompt, self._clock(), tried)
        except RanvierError:  # nobody else: the failure that brought us here is the better answer
            return None

    # --- ask --------------------------------------------------------------------------------------------------------

    def _ask(self, served: ServedRequest, attempt: Attempt) -> Steps[tuple[Exchange, bool]]:
        """Send the request, where it may be with a question for counts. The answer, and whether it is to that.

        Where the question may be what is refused, the request is sent once more, as it came.
        """
        asking, request = self._asking, served.request
        body = asking.body(attempt.prompt, attempt.backend, attempt.generation)
        if body is None:
            return (yield from self._send(served, attempt, request)), False
        exchange = yield from self._send(served, attempt, request.with_body(body))
        status = exchange.head.status
        if status not in REFUSALS or asking.terms(attempt.backend, attempt.generation) is Terms.TAKES:
            if status == 200:
                asking.taken(attempt.backend, attempt.generation)
            return exchange, True
        try:
            exchange.take()  # all of it is here, as a rule
        finally:
            exchange.release()
        exchange = yield from self._send(served, attempt, request)
        asking.refused(attempt.backend, attempt.generation, exchange.head.status)
        return exchange, False

    def _send(self, served: ServedRequest, attempt: Attempt, request: HttpRequest) -> Steps[Exchange]:
        """Send the request, and wait for the head of the answer. Raises UpstreamError."""
        extra = []  # what a backend gets beyond the client's own fields
        if request.fields.request_id is None:
            extra.append((b"x-request-id", served.request_id))
        if self._authorization and not request.fields.authorized:
            extra.append((b"authorization", self._authorization))
        served.client.arm(WaitPhase.FIRST_BYTE, self._limits.first_byte_s)
        return self._upstream.open(self._address_of(attempt.url), request, extra, partial(self._sent, attempt))

    def _sent(self, attempt: Attempt) -> None:
        """What no request needs to wait for: observers, and the tokens of the prompt."""
        if not attempt.announced:
            self._router.announce(attempt)
            self._tokenizer.submit(attempt)

    def _remover(self, attempt: Attempt, exchange: Exchange) -> UsageRemover | None:
        """What takes the counts that only we asked for out of a stream again."""
        fields = exchange.head.fields
        if b"text/event-stream" not in fields.lines:
            return None
        if not fields.readable:
            self._asking.unreadable(attempt.backend, attempt.generation)
            return None
        return UsageRemover(exchange.head.framing, exchange.mark_chunks())

    # --- relay ------------------------------------------------------------------------------------------------------

    def _relay(
        self, served: ServedRequest, attempt: Attempt, exchange: Exchange, remover: UsageRemover | None
    ) -> Steps[None]:
        """Pass the answer on as it comes, but for what only we asked for. What is proved by it is learned beside."""
        client, head = served.client, exchange.head
        served.status = head.status
        is_learned = 200 <= head.status < 300 and attempt.prompt.kind != "opaque" and head.fields.readable
        captured: list[bytes] | None = [] if is_learned else None
        data = exchange.take()
        kept = data if remover is None else remover.feed(data, exchange.complete)
        client.relay_head(head, self._own_fields(served, attempt, head), kept)
        self._passed(served, attempt, captured, data)
        while not exchange.complete:
            if client.unsent is not None:
                yield client.flush
            client.arm(WaitPhase.STALL, self._limits.stall_s)
            yield exchange.readable
            piece = exchange.receive()
            if piece is None:
                continue
            kept = piece if remover is None else remover.feed(piece, exchange.complete)
            if kept:
                client.send(kept)
            self._passed(served, attempt, captured, piece)
        if remover is not None:
            self._asking.answered(remover, attempt.backend, attempt.generation)
        if captured is not None:
            self._learn(attempt, captured, chunked=head.framing == "chunked")

    def _own_fields(self, served: ServedRequest, attempt: Attempt, head: HttpResponseHead) -> Fields:
        """What goes on with the head of an answer."""
        decision = attempt.decision
        fields = [
            (b"x-ranvier-backend", decision.backend_name.encode()),
            (b"x-ranvier-reason", decision.reason.encode()),
            (b"x-ranvier-matched-tokens", b"%d" % decision.matched_tokens),
        ]
        if not head.fields.names_request:  # the backend's own stands
            fields.append((b"x-request-id", served.request_id))
        return fields

    def _passed(self, served: ServedRequest, attempt: Attempt, captured: list[bytes] | None, data: bytes) -> None:
        """A piece of the answer is with the client. `captured` gets it where the answer is to be learned."""
        now = self._clock()
        if not served.first_byte_at:
            served.first_byte_at = now
        if captured is not None and data:
            if attempt.first_at is None and (not attempt.prompt.stream or has_token(data)):
                self._router.first_token(attempt, now)
            if served.sent_bytes <= CAPTURE_BYTES_MAX:
                captured.append(data)
        served.sent_bytes = attempt.sent_bytes = served.sent_bytes + len(data)

    def _learn(self, attempt: Attempt, captured: Sequence[bytes], *, chunked: bool) -> None:
        """The answer is complete. One without output proves a prefill only if the engine says how it finished."""
        raw = b"".join(captured)
        if attempt.first_at is None and has_finished(raw):
            self._router.first_token(attempt, self._clock())
        if attempt.first_at is not None and attempt.sent_bytes <= CAPTURE_BYTES_MAX:
            self._tokenizer.finish(attempt, raw, chunked=chunked)


def climbs(path: bytes) -> bool:
    """Whether a path may mean another one than it begins like: a backend that resolves `..` would serve its own
    administration."""
    return b"/.." in path or b"%2e" in path.lower() or b"\\" in path


def outcome_of(status: int) -> Outcome:
    """What a complete answer says of its backend."""
    if status == 429:
        return Outcome.OVERLOADED
    return Outcome.SERVER_ERROR if status >= 500 else Outcome.SUCCESS


def outcome_of_error(error: UpstreamError, *, relayed: bool) -> Outcome:
    if isinstance(error, ConnectFailed):
        return Outcome.CONNECT_ERROR
    if isinstance(error, UpstreamTimeout):
        return Outcome.TIMEOUT
    return Outcome.BROKEN if relayed else Outcome.CONNECT_ERROR
