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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import orjson
import trio

from ranvier_py.core.backends import Outcome, Transition
from ranvier_py.core.errors import (
    ConnectFailed,
    MethodNotAllowed,
    NotFound,
    RanvierError,
    UpstreamError,
    UpstreamTimeout,
)
from ranvier_py.core.http import HttpRequest, HttpResponseHead, Phase
from ranvier_py.core.ids import BackendId
from ranvier_py.core.request import Prompt
from ranvier_py.core.retries import Next, RetryBudget, RetryLimits
from ranvier_py.core.router import CHAT_PATH, COMPLETION_PATH, Flight, Found, Router
from ranvier_py.core.stream import has_finished, has_token
from ranvier_py.core.summary import RequestSummary
from ranvier_py.core.usage_asking import REFUSALS, Terms, UsageAsking
from ranvier_py.core.usage_removal import Marks, UsageRemover

Fields = Sequence[tuple[bytes, bytes]]

FIRST_BYTE_TOTAL_S = 600.0
"""All tries of one request together wait so long for a first byte, for openai's SDK waits no longer (its
DEFAULT_TIMEOUT). So whoever sets a deadline of seconds has stuck engines passed over, and the default of 600 s ends in
a 504: another try would prefill the prompt once more for a client that is gone when it answers."""

CAPTURE_BYTES_MAX = 1 << 20
"""Longer answers are relayed like any other, and not learned: 1 MiB of a stream is some 5,000 tokens."""


class Client(Protocol):
    """The connection a request came on. edge/server.py has the real one."""

    peer: str
    started: bool
    must_close: bool
    missed: Phase | None
    request_id: bytes

    def arm(self, phase: Phase, seconds: float) -> None: ...
    async def relay_head(self, head: HttpResponseHead, extra: Fields = ..., body: bytes = ...) -> None: ...
    async def send(self, *parts: bytes) -> None: ...
    async def respond(self, status: int, body: bytes, headers: Fields = ..., content_type: bytes = ...) -> None: ...


class Exchange(Protocol):
    """One request at one backend. edge/upstream.py has the real one."""

    head: HttpResponseHead
    complete: bool

    def take(self) -> bytes: ...
    async def receive(self) -> bytes: ...
    def mark_chunks(self) -> Marks | None: ...
    def release(self) -> None: ...


class Forwarder(Protocol):
    async def open(self, address: Any, request: HttpRequest, extra: Fields = ...) -> Exchange: ...


class Teacher(Protocol):
    """Tokenizes before placement, or off the path. edge/learner.py has the real one."""

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool: ...
    def submit(self, flight: Flight) -> Any: ...
    def finish(self, flight: Flight, lesson: Any, raw: bytes, *, chunked: bool, streamed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Deadlines of one request, in seconds."""

    tokenize_deadline_s: float = 0.15
    first_byte_s: float = 600.0
    stall_s: float = 120.0
    retries: RetryLimits = field(default_factory=RetryLimits)


@dataclass(slots=True)
class Progress:
    """What became of a request so far; turned into its summary at the end."""

    request_id: bytes
    started_at: float
    flight: Flight | None = None
    status: int = 0
    tries: int = 0
    first_byte_at: float = 0.0
    sent_bytes: int = 0
    outcome: str = "cancelled"

    def summary(self, request: HttpRequest, now: float) -> RequestSummary:
        decision = self.flight.decision if self.flight else None
        return RequestSummary(
            request_id=self.request_id.decode("latin-1"),
            method=request.method.decode("latin-1"),
            path=request.path.decode("latin-1"),
            status=self.status,
            outcome=self.outcome,
            backend=decision.backend_name if decision else "",
            policy=decision.policy if decision else "",
            reason=decision.reason if decision else "",
            source=decision.source if decision else "",
            matched_tokens=decision.matched_tokens if decision else 0,
            prompt_tokens=decision.prompt_tokens if decision else 0,
            tries=self.tries,
            first_byte_s=self.first_byte_at - self.started_at if self.first_byte_at else 0.0,
            total_s=now - self.started_at,
            sent_bytes=self.sent_bytes,
        )


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
        progress = Progress(request.fields.request_id or next(self._ids), self._clock())
        client.request_id = progress.request_id
        try:
            own = self._own_answer(request)
            if own is None:
                await self._forward(request, client, progress)
            else:
                progress.status = own[0]
                await client.respond(*own)
                progress.outcome = "success"
        except RanvierError as error:
            progress.outcome = Outcome.TIMEOUT.value if isinstance(error, UpstreamTimeout) else error.code
            if not client.started:
                progress.status = error.status
            raise
        finally:
            if self._report is not None:
                self._report(progress.summary(request, self._clock()))

    def _own_answer(self, request: HttpRequest) -> tuple[int, bytes] | None:
        """Status and body of what the node answers itself; None for what goes to a backend."""
        path, reading = request.path, request.method in (b"GET", b"HEAD")
        if path in (CHAT_PATH, COMPLETION_PATH):
            if request.method != b"POST":
                raise MethodNotAllowed(f"{path.decode()} takes POST")
            return None
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
        prompt = router.read(request.path, request.body)
        found = router.find(prompt, self._clock())
        if router.too_little(prompt, found):
            await self._teacher.tokenize_first(prompt, self._limits.tokenize_deadline_s)
            found = router.find(prompt, self._clock())
        budget = RetryBudget(self._limits.retries)
        candidates: Found | None = found
        while candidates is not None:
            candidates = await self._attempt(request, client, prompt, candidates, budget, progress)

    async def _attempt(
        self,
        request: HttpRequest,
        client: Client,
        prompt: Prompt,
        found: Found,
        budget: RetryBudget,
        progress: Progress,
    ) -> Found | None:
        """Place, forward, relay, land. Returns whom to ask instead, or None when the request has ended."""
        router = self._router
        decision = router.place(prompt, found)
        flight = router.depart(prompt, decision, self._clock(), progress.request_id, found)
        progress.flight = flight
        progress.tries += 1
        outcome, exchange, asked = Outcome.CANCELLED, None, False
        try:
            lesson = self._teacher.submit(flight)
            asking = self._asking.body(prompt, flight.backend, flight.epoch)
            if asking is None:
                exchange = await self._open(request, client, flight, progress)
            else:
                exchange, asked = await self._ask(asking, request, client, flight, progress)
            flight.status = exchange.head.status
            answered = outcome_of(flight.status)
            if self._limits.retries.retries(exchange.head.status):
                elsewhere = self._elsewhere(prompt, flight, budget, answered)
                if elsewhere is not None:
                    outcome = answered
                    return elsewhere
            await self._relay(exchange, client, flight, lesson, progress, counts_remover(exchange) if asked else None)
            outcome = answered
        except UpstreamError as error:
            outcome = outcome_of_error(error, relayed=client.started)
            self._trouble(flight.backend)
            elsewhere = None if client.started else self._elsewhere(prompt, flight, budget, outcome)
            if elsewhere is None:
                raise
            return elsewhere
        finally:
            if exchange is not None:
                exchange.release()
            if outcome is Outcome.CANCELLED and client.missed in (Phase.FIRST_BYTE, Phase.STALL):
                outcome = Outcome.TIMEOUT
                progress.outcome = outcome.value
                progress.status = progress.status or UpstreamTimeout.status  # what the server answers for us
            transitions = router.land(flight, outcome, self._clock())
            if transitions:
                self._changed(transitions)
        progress.outcome = outcome.value
        return None

    async def _ask(
        self, asking: bytes, request: HttpRequest, client: Client, flight: Flight, progress: Progress
    ) -> tuple[Exchange, bool]:
        """`_open` with another body, and as it came where that is refused. Whether the answer is to the first."""
        asked = replace(request, body=asking, fields_read=request.fields)
        exchange = await self._open(asked, client, flight, progress)
        backend, epoch = flight.backend, flight.epoch
        if exchange.head.status not in REFUSALS or self._asking.terms(backend, epoch) is Terms.TAKES:
            if exchange.head.status == 200:
                self._asking.taken(backend, epoch)
            return exchange, True
        exchange.take()  # all of it is here, as a rule
        exchange.release()
        exchange = await self._open(request, client, flight, progress)
        self._asking.refused(backend, epoch, exchange.head.status)
        return exchange, False

    async def _open(self, request: HttpRequest, client: Client, flight: Flight, progress: Progress) -> Exchange:
        """Send the request, and wait for the head of the answer. Raises UpstreamError.

        The client's own deadline costs no timer, but ends the request; where there is time for one more try, a missed
        deadline must end this try alone.
        """
        first_byte_s = self._limits.first_byte_s
        address, extra = self._address_of(flight.url), self._extra_fields(request, progress)
        if self._clock() - progress.started_at + 2 * first_byte_s > FIRST_BYTE_TOTAL_S:
            client.arm(Phase.FIRST_BYTE, first_byte_s)
            return await self._upstream.open(address, request, extra)
        with trio.move_on_after(first_byte_s):
            return await self._upstream.open(address, request, extra)
        raise UpstreamTimeout("the backend did not begin to answer in time")

    def _extra_fields(self, request: HttpRequest, progress: Progress) -> Fields:
        """What a backend is told beyond the client's own fields."""
        extra = []
        if request.fields.request_id is None:
            extra.append((b"x-request-id", progress.request_id))
        if self._authorization and not request.fields.authorized:
            extra.append((b"authorization", self._authorization))
        return extra

    def _elsewhere(self, prompt: Prompt, flight: Flight, budget: RetryBudget, outcome: Outcome) -> Found | None:
        """Whom to ask after a failed attempt; None when it is over."""
        others = self._found_without(prompt, (*budget.tried, flight.backend))
        step = budget.next_attempt(flight.backend, outcome, relayed=False, others=others is not None)
        if step is Next.AGAIN:
            return self._found_without(prompt, budget.tried)
        return others if step is Next.ELSEWHERE else None

    def _found_without(self, prompt: Prompt, tried: Sequence[BackendId]) -> Found | None:
        try:
            return self._router.find(prompt, self._clock(), tried)
        except RanvierError:  # nobody else: the failure that brought us here is the better answer
            return None

    async def _relay(
        self,
        exchange: Exchange,
        client: Client,
        flight: Flight,
        lesson: Any,
        progress: Progress,
        remover: UsageRemover | None,
    ) -> None:
        """Pass the answer on as it comes, but for what only we asked for. What is proved by it is learned beside."""
        head, decision = exchange.head, flight.decision
        extra = [
            (b"x-ranvier-backend", decision.backend_name.encode()),
            (b"x-ranvier-reason", decision.reason.encode()),
            (b"x-ranvier-matched-tokens", b"%d" % decision.matched_tokens),
        ]
        if not head.fields.names_request:  # the backend's own stands
            extra.append((b"x-request-id", progress.request_id))
        progress.status = head.status
        teaches = 200 <= head.status < 300 and flight.prompt.kind != "opaque" and head.fields.readable
        captured: list[bytes] = []
        size = 0
        data = exchange.take()
        await client.relay_head(head, extra, data if remover is None else remover.feed(data, exchange.complete))
        progress.first_byte_at = self._clock()
        while True:
            if teaches and data:
                if flight.first_at is None and (not flight.prompt.stream or has_token(data)):
                    self._router.first_token(flight, self._clock())
                if size <= CAPTURE_BYTES_MAX:
                    captured.append(data)
            progress.sent_bytes = flight.sent_bytes = size = size + len(data)
            if exchange.complete:
                break
            client.arm(Phase.STALL, self._limits.stall_s)
            data = await exchange.receive()
            kept = data if remover is None else remover.feed(data, exchange.complete)
            if kept:
                await client.send(kept)
            if not data:
                break
        if remover is not None:
            self._asking.answered(remover, flight.backend, flight.epoch)
        if teaches:
            self._conclude(flight, lesson, captured, size, chunked=head.framing == "chunked")

    def _conclude(self, flight: Flight, lesson: Any, captured: list[bytes], size: int, *, chunked: bool) -> None:
        """The answer is complete. One without output proves a prefill only if the engine says how it finished."""
        raw = b"".join(captured)
        if flight.first_at is None and has_finished(raw):
            self._router.first_token(flight, self._clock())
        if flight.first_at is not None and size <= CAPTURE_BYTES_MAX:
            self._teacher.finish(flight, lesson, raw, chunked=chunked, streamed=flight.prompt.stream)


def counts_remover(exchange: Exchange) -> UsageRemover | None:
    """What takes the counts out of a stream again; None for an answer that is no stream we can read."""
    fields = exchange.head.fields
    if b"text/event-stream" not in fields.lines or not fields.readable:
        return None
    return UsageRemover(exchange.head.framing, exchange.mark_chunks())


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
