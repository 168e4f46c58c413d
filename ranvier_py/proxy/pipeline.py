"""One request, ten steps, one screen.

    accept -> parse -> text chain -> match (-> tokens first, if that found too little) -> place -> forward -> relay
           -> learn -> the answer, learned off the path

Each step takes the frozen value of the one before, and none reaches back. A request whose backend fails before a byte
was relayed re-enters at *place* with that backend excluded, a bounded number of times; after the first byte it only
ends. A client that goes away cancels the whole: the backend's connection is closed at once; only what was proved is
learned.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import orjson
import trio

from ranvier_py.core.answers.answer_stream import has_finished, has_token
from ranvier_py.core.answers.usage_injection import REFUSALS, Terms, UsageAsking
from ranvier_py.core.answers.usage_removal import UsageRemover
from ranvier_py.core.errors import (
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
from ranvier_py.core.routing.router import CHAT_PATH, COMPLETION_PATH, Found, Router
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.http_values import HttpRequest, Phase
from ranvier_py.proxy.pipeline_values import (
    FIRST_BYTE_TOTAL_S,
    Client,
    Exchange,
    Fields,
    Forwarder,
    Going,
    PipelineLimits,
    Progress,
    Relay,
    Teacher,
)

CAPTURE_BYTES_MAX = 1 << 20
"""Longer answers are relayed like any other, and not learned: 1 MiB of a stream is some 5,000 tokens."""


class Pipeline:
    """Takes every request of the public port from its first step to its last.

    Args:
        report: told of every finished request; None where nobody listens.
        trouble: told of a backend that could not be asked, so that it is probed at once.
        changed: told of changes of a backend's health that requests brought about.
        address_of: the forwarder's form of a backend's URL.
        asking: who asks streams for their counts; None asks nobody.
        api_key: sent as bearer key where the client sends no Authorization.
        name: unique among nodes and restarts; the first part of the request ids made here.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        router: Router,
        upstream: Forwarder,
        teacher: Teacher,
        limits: PipelineLimits,
        *,
        address_of: Callable[[str], Any],
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
        self._teacher = teacher
        self._limits = limits
        self._address_of = address_of
        self._asking = asking or UsageAsking(enabled=False)
        self._authorization = f"Bearer {api_key}".encode() if api_key else b""
        self._report = report
        self._trouble = trouble
        self._changed = changed
        self._clock = clock
        self._ids = (b"%b-%x" % (name.encode(), number) for number in count(1))

    async def handle(self, request: HttpRequest, client: Client) -> None:
        """Answer one request. Raises RanvierError while nothing was sent, for the server to answer."""
        progress = self._progress(request, client, self._clock())
        await self._see_through(request, client, progress, self._answer(request, client, progress))

    def _progress(self, request: HttpRequest, client: Client, now: float) -> Progress:
        client.request_id = request_id = request.fields.request_id or next(self._ids)
        return Progress(request_id, now)

    async def _see_through(
        self, request: HttpRequest, client: Client, progress: Progress, answering: Awaitable[None]
    ) -> None:
        """Wait for the answer, and report what came of it."""
        try:
            await answering
        except RanvierError as error:
            progress.outcome = Outcome.TIMEOUT.value if isinstance(error, UpstreamTimeout) else error.code
            if not client.started:
                progress.status = error.status
            raise
        finally:
            if self._report is not None:
                self._report(progress.summary(request, self._clock()))

    async def _answer(self, request: HttpRequest, client: Client, progress: Progress) -> None:
        own = self._own_answer(request)
        if own is None:
            await self._forward(request, client, progress)
        else:
            progress.status = own[0]
            await client.respond(*own)
            progress.outcome = "success"

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
        """The union of the backends' model lists; None while no backend has told its own."""
        cards: dict[str, Mapping[str, Any]] = {}
        for backend in self._router.registry:
            for card in backend.cards:
                cards.setdefault(str(card.get("id")), card)
        return (200, orjson.dumps({"object": "list", "data": list(cards.values())})) if cards else None

    async def _forward(self, request: HttpRequest, client: Client, progress: Progress) -> None:
        router = self._router
        path = request.path if request.method == b"POST" and request.fields.readable else b""
        prompt = router.read(path, request.body)
        found = router.find(prompt, self._clock())
        if router.too_little(prompt, found):
            await self._teacher.tokenize_first(prompt, self._limits.tokenize_deadline_s)
            found = router.find(prompt, self._clock())
        budget = RetryBudget(self._limits.retries)
        going = self._start_attempt(request, client, prompt, found, budget, progress, self._clock())
        await self._fly(going)

    async def _fly(self, going: Going) -> None:
        """To one backend after the other, until one has answered."""
        while (elsewhere := await self._attempt(going)) is not None:
            request, client, prompt, budget = going.request, going.client, going.prompt, going.budget
            going = self._start_attempt(request, client, prompt, elsewhere, budget, going.progress, self._clock())

    def _start_attempt(
        self,
        request: HttpRequest,
        client: Client,
        prompt: Prompt,
        found: Found,
        budget: RetryBudget,
        progress: Progress,
        now: float,
    ) -> Going:
        """Place. What departs is to be landed."""
        decision = self._router.place(prompt, found)
        attempt = self._router.start_attempt(prompt, decision, now, progress.request_id, found, quiet=True)
        progress.attempt = attempt
        progress.tries += 1
        return Going(request, client, progress, prompt, budget, attempt)

    def _prepare(self, going: Going) -> None:
        """Ask for its counts."""
        going.asking = self._asking.body(going.prompt, going.attempt.backend, going.attempt.generation)
        going.prepared = True

    def _is_sent(self, going: Going) -> None:
        """What need not be done before: observers are told, and it will be learned."""
        if not going.attempt.announced:
            self._router.announce(going.attempt)
            going.job = self._teacher.submit(going.attempt)

    async def _attempt(self, going: Going) -> Found | None:
        """Forward, relay, land. Returns whom to ask instead, or None when the request has ended."""
        attempt, client = going.attempt, going.client
        outcome, asked = Outcome.CANCELLED, False
        try:
            if going.failure is not None:
                raise going.failure
            if not going.prepared:
                self._prepare(going)
            if going.exchange is None:
                if going.asking is None:
                    going.exchange = await self._open(going.request, going)
                else:
                    going.exchange, asked = await self._ask(going.asking, going)
            exchange = going.exchange
            attempt.status = exchange.head.status
            answered = outcome_of(attempt.status)
            if self._limits.retries.retries(exchange.head.status):
                elsewhere = self._elsewhere(going, answered)
                if elsewhere is not None:
                    outcome = answered
                    return elsewhere
            await self._relay(going, exchange, self._remover(exchange, going, asked))
            outcome = answered
        except UpstreamError as error:
            outcome = outcome_of_error(error, relayed=client.started)
            self._trouble(attempt.backend)
            elsewhere = None if client.started else self._elsewhere(going, outcome)
            if elsewhere is None:
                raise
            return elsewhere
        finally:
            self._finish_attempt(going, outcome)
        going.progress.outcome = outcome.value
        return None

    def _finish_attempt(self, going: Going, outcome: Outcome) -> None:
        """The attempt is over, however it ended."""
        if going.finished:
            return
        going.finished = True
        client, progress = going.client, going.progress
        if going.exchange is not None:
            going.exchange.release()
        elif going.sent is not None:
            going.sent.close()
        if outcome is Outcome.CANCELLED and client.missed in (Phase.FIRST_BYTE, Phase.STALL):
            outcome = Outcome.TIMEOUT
            progress.outcome = outcome.value
            progress.status = progress.status or UpstreamTimeout.status  # what the server answers for us
        transitions = self._router.finish_attempt(going.attempt, outcome, self._clock())
        if transitions:
            self._changed(transitions)

    # --- the short path: the same by calls that never wait ----------------------------------------------------------

    def begin(self, request: HttpRequest, client: Client, tell: Callable[[bool], None]) -> Going | None:
        """Send a chat that goes on to its backend, if that is all there is to do before the answer. See ShortWay."""
        if request.target != CHAT_PATH or request.method != b"POST" or not self._limits.waits_once:
            return None
        router = self._router
        prompt = router.reader.continuing(request.body)
        if prompt is None:
            return None
        now = self._clock()
        try:
            found = router.find(prompt, now)
        except RanvierError:
            return None
        if router.too_little(prompt, found):
            return None
        budget, progress = RetryBudget(self._limits.retries), self._progress(request, client, now)
        going = self._start_attempt(request, client, prompt, found, budget, progress, now)
        going.tell = tell
        try:
            self._send_shortly(going)
        except Exception as error:  # the attempt goes on with it
            going.failure = error
        return going

    def _send_shortly(self, going: Going) -> None:
        self._prepare(going)
        if going.asking is None:
            address, extra = self._address_of(going.attempt.url), self._extra_fields(going.request, going.progress)
            going.client.arm(Phase.FIRST_BYTE, self._limits.first_byte_s)
            going.sent = self._upstream.begin(address, going.request, extra)
            self._is_sent(going)
            going.sent.when_answered(partial(self._go_on, going))  # last: where anything failed, nobody goes on

    def _go_on(self, going: Going) -> bool:
        """The backend says something: its whole answer, mostly."""
        assert going.tell is not None
        try:
            whole = self._conclude_shortly(going)
        except Exception as error:
            going.failure = error
            whole = False
        going.tell(whole)
        return True

    def _conclude_shortly(self, going: Going) -> bool:
        """Relay and land. False: there is more to it, which `resume` does."""
        exchange = self._upstream.answer_of(going.sent)
        if exchange is None:
            return False
        going.exchange = exchange
        going.taken = exchange.take()
        status = exchange.head.status
        if not exchange.complete or self._limits.retries.retries(status):
            return False
        going.attempt.status = status
        relay = self._begin_relay(going, exchange)
        going.client.relay_at_once(exchange.head, relay.extra, going.taken)
        self._passed(going, relay, going.taken)
        self._passed_all(going, relay)
        outcome = outcome_of(status)
        self._finish_attempt(going, outcome)
        going.progress.outcome = outcome.value
        if self._report is not None:
            self._report(going.progress.summary(going.request, self._clock()))
        return True

    async def resume(self, going: Going) -> None:
        """Do the rest of what was begun, as `handle` does."""
        if going.finished and going.failure is None:
            await going.client.flush()
        else:
            await self._see_through(going.request, going.client, going.progress, self._fly(going))

    def abandon(self, going: Going) -> None:
        """Nobody waits for it any more."""
        if going.finished:
            return
        self._finish_attempt(going, Outcome.CANCELLED)
        if self._report is not None:
            self._report(going.progress.summary(going.request, self._clock()))

    async def _ask(self, asking: bytes, going: Going) -> tuple[Exchange, bool]:
        """`_open` with another body, and as it came where that is refused. Whether the answer is to the first."""
        request, attempt = going.request, going.attempt
        head = (request.method, request.target, request.headers)
        asked = HttpRequest(*head, asking, request.http_minor, request.keep_alive, request.fields)
        exchange = await self._open(asked, going)
        backend, generation = attempt.backend, attempt.generation
        if exchange.head.status not in REFUSALS or self._asking.terms(backend, generation) is Terms.TAKES:
            if exchange.head.status == 200:
                self._asking.taken(backend, generation)
            return exchange, True
        exchange.take()  # all of it is here, as a rule
        exchange.release()
        exchange = await self._open(request, going)
        self._asking.refused(backend, generation, exchange.head.status)
        return exchange, False

    async def _open(self, request: HttpRequest, going: Going) -> Exchange:
        """Send the request, and wait for the head of the answer. Raises UpstreamError.

        The client's own deadline costs no timer, but ends the request; where there is time for one more try, a missed
        deadline must end this try alone.
        """
        if going.sent is not None:
            return await self._upstream.finish(going.sent)
        first_byte_s = self._limits.first_byte_s
        address, extra = self._address_of(going.attempt.url), self._extra_fields(request, going.progress)
        if self._clock() - going.progress.started_at + 2 * first_byte_s > FIRST_BYTE_TOTAL_S:
            going.client.arm(Phase.FIRST_BYTE, first_byte_s)
            return await self._send(address, request, extra, going)
        with trio.move_on_after(first_byte_s):
            return await self._send(address, request, extra, going)
        raise UpstreamTimeout("the backend did not begin to answer in time")

    async def _send(self, address: Any, request: HttpRequest, extra: Fields, going: Going) -> Exchange:
        sent = self._upstream.begin(address, request, extra)
        self._is_sent(going)
        return await self._upstream.finish(sent)

    def _extra_fields(self, request: HttpRequest, progress: Progress) -> Fields:
        """What a backend is told beyond the client's own fields."""
        extra = []
        if request.fields.request_id is None:
            extra.append((b"x-request-id", progress.request_id))
        if self._authorization and not request.fields.authorized:
            extra.append((b"authorization", self._authorization))
        return extra

    def _elsewhere(self, going: Going, outcome: Outcome) -> Found | None:
        """Whom to ask after a failed attempt; None when it is over."""
        prompt, budget, backend = going.prompt, going.budget, going.attempt.backend
        others = self._found_without(prompt, (*budget.tried, backend))
        step = budget.next_attempt(backend, outcome, relayed=False, others=others is not None)
        if step is Next.AGAIN:
            return self._found_without(prompt, budget.tried)
        return others if step is Next.ELSEWHERE else None

    def _found_without(self, prompt: Prompt, tried: Sequence[BackendId]) -> Found | None:
        try:
            return self._router.find(prompt, self._clock(), tried)
        except RanvierError:  # nobody else: the failure that brought us here is the better answer
            return None

    def _remover(self, exchange: Exchange, going: Going, asked: bool) -> UsageRemover | None:
        """What takes the counts that only we asked for out of a stream again."""
        fields = exchange.head.fields
        if not asked or b"text/event-stream" not in fields.lines:
            return None
        if not fields.readable:
            self._asking.unreadable(going.attempt.backend, going.attempt.generation)
            return None
        return UsageRemover(exchange.head.framing, exchange.mark_chunks())

    async def _relay(self, going: Going, exchange: Exchange, remover: UsageRemover | None) -> None:
        """Pass the answer on as it comes, but for what only we asked for. What is proved by it is learned beside."""
        client, attempt = going.client, going.attempt
        relay = self._begin_relay(going, exchange)
        data = going.taken or exchange.take()
        kept = data if remover is None else remover.feed(data, exchange.complete)
        await client.relay_head(exchange.head, relay.extra, kept)
        self._passed(going, relay, data)
        while not exchange.complete:
            client.arm(Phase.STALL, self._limits.stall_s)
            data = await exchange.receive()
            kept = data if remover is None else remover.feed(data, exchange.complete)
            if kept:
                await client.send(kept)
            if not data:
                break
            self._passed(going, relay, data)
        if remover is not None:
            self._asking.answered(remover, attempt.backend, attempt.generation)
        self._passed_all(going, relay)

    def _begin_relay(self, going: Going, exchange: Exchange) -> Relay:
        """What goes on with the answer's head, and whether it teaches anything."""
        head, attempt, progress = exchange.head, going.attempt, going.progress
        decision, fields = attempt.decision, head.fields
        extra = [
            (b"x-ranvier-backend", decision.backend_name.encode()),
            (b"x-ranvier-reason", decision.reason.encode()),
            (b"x-ranvier-matched-tokens", b"%d" % decision.matched_tokens),
        ]
        if not fields.names_request:  # the backend's own stands
            extra.append((b"x-request-id", progress.request_id))
        progress.status = head.status
        teaches = 200 <= head.status < 300 and attempt.prompt.kind != "opaque" and fields.readable
        return Relay(extra, teaches, head.framing == "chunked", [])

    def _passed(self, going: Going, relay: Relay, data: bytes) -> None:
        """A piece of the answer is with the client."""
        attempt, progress = going.attempt, going.progress
        now = self._clock()
        if not progress.first_byte_at:
            progress.first_byte_at = now
        if relay.teaches and data:
            if attempt.first_at is None and (not attempt.prompt.stream or has_token(data)):
                self._router.first_token(attempt, now)
            if progress.sent_bytes <= CAPTURE_BYTES_MAX:
                relay.captured.append(data)
        progress.sent_bytes = attempt.sent_bytes = progress.sent_bytes + len(data)

    def _passed_all(self, going: Going, relay: Relay) -> None:
        """The answer is complete. One without output proves a prefill only if the engine says how it finished."""
        if not relay.teaches:
            return
        attempt, raw = going.attempt, b"".join(relay.captured)
        if attempt.first_at is None and has_finished(raw):
            self._router.first_token(attempt, self._clock())
        if attempt.first_at is not None and attempt.sent_bytes <= CAPTURE_BYTES_MAX:
            streamed = attempt.prompt.stream
            self._teacher.finish(attempt, going.job, raw, chunked=relay.chunked, streamed=streamed)


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
