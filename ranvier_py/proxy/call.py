"""One request of a client from head to end: what each stage found, in a slot of its own, and how it ends.

Stages (`proxy/stages/`) read the slots before theirs and fill their own. The log's line is made from these names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.limits.estimates import Estimate
from ranvier_py.core.access.limits.limiter import NOTHING, Grant
from ranvier_py.core.access.limits.meters import Amounts
from ranvier_py.core.answers.answer_counts import UNCOUNTED
from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.errors import RanvierError, UpstreamTimeout, words_of
from ranvier_py.core.ids import BackendId
from ranvier_py.core.options import SECONDS_MAX, Options, option, part, seconds
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.attempt import Attempt, PoolMatch
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.models.model_rules import Served
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.retries import RetryLimits
from ranvier_py.core.routing.summary import FailedTry, RequestSummary
from ranvier_py.core.routing.wanted.found_backend import authorization_of
from ranvier_py.core.tracing.trace_context import RequestTrace
from ranvier_py.proxy.admission.seen_head import HeadLimits
from ranvier_py.proxy.answers.awaited_stream import AwaitedStream
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.failed_tries import FailedTries
from ranvier_py.proxy.http_values import Fields, HttpRequest, HttpResponseHead
from ranvier_py.proxy.realtime import RealtimeLimits
from ranvier_py.proxy.shared_answer import SharedAnswer
from ranvier_py.proxy.stages.strip import RouterFieldOptions
from ranvier_py.proxy.upstream import Exchange

ERROR_CHARACTERS_MAX = 500  # of the reasons of failed attempts in one line; then the last one alone

HIT, MISS, BYPASS = b"HIT", b"MISS", b"BYPASS"
"""What the response cache did with a request, as the field X-Cache names it."""

UNDECIDED = Decision(
    backend=BackendId(-1),
    backend_name="",
    reason="",
    policy="",
    matched_tokens=0,
    prompt_tokens=0,
    source="",
    holders=(),
    candidates=(),
    loads=(),
)
"""Of a request that went to no backend."""


@dataclass(frozen=True, slots=True)
class PipelineLimits(Options):
    """Deadlines of one request, in seconds."""

    SECTION = "Limits"

    tokenize_deadline_s: float = option(
        0.15, "Longest wait for tokens before placing by load. 0 never waits.", most=60.0, section="Tokens"
    )
    first_event_s: float = seconds(
        600.0,
        "Longest wait for a backend to begin its answer; of a stream, whose head may come before the prefill, longest "
        "silence until its first event that has output. Also read as first_byte_timeout_s.",
        key="first_event_timeout_s",
    )
    stall_s: float = seconds(  # OpenAI's SDK waits as long; engines are silent while they buffer calls of tools
        600.0, "Longest silence within an answer that has begun.", key="stall_timeout_s"
    )
    sse_keepalive_s: float = option(
        15.0,
        "Seconds between comments to a client that has had the head of a stream for longer than 5 s, and no event. "
        "0 sends none.",
        most=SECONDS_MAX,
    )
    retries: RetryLimits = part(RetryLimits)
    realtime: RealtimeLimits = part(RealtimeLimits)
    router_fields: RouterFieldOptions = part(RouterFieldOptions)


class PromptTokenizer(Protocol):
    """Tokenizes before placement, or off the path: io/tokenizer_worker.py; `IndexedTokenizer` also asks Redis."""

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool: ...
    def submit(self, attempt: Attempt) -> None: ...
    def finish(self, attempt: Attempt, raw: bytes, *, chunked: bool) -> None: ...


class Tracer(Protocol):
    """Traces requests (node/tracing/)."""

    def begin(self, call: Call) -> None: ...
    def end(self, call: Call, now: float) -> None: ...
    def refused(self, request: HttpRequest, client: Client, error: RanvierError) -> RequestTrace: ...


CallObserver: TypeAlias = "Callable[[Call, float], object]"
"""Called once with each call that is over, and when. It raises nothing."""


class ReadRequest(NamedTuple):
    """What a request is, once its body is as engines get it."""

    request: HttpRequest  # without members that only routers may set, and as the operator's rules made it
    unmended: HttpRequest | None  # without such members, as it came; None if no rule changed it
    prompt: Prompt
    tenant: bytes  # in the prompt's chain; empty where tenants are not kept apart
    upgrades: bool  # it asks for a WebSocket
    is_kept: bool  # an engine may keep its answer, under an id that the answer names


Edited: TypeAlias = Generator[None, None, HttpRequest]  # yields after each portion of work
Editing: TypeAlias = Callable[[Served], Edited]


@dataclass(slots=True, eq=False, repr=False)
class NamedModel:
    """The model that a request asks for, where a table is for it; the models that may serve it, in the order in which
    they are asked; what makes the request for one of them; which one it is now, and which one is to be asked next."""

    asked: str
    chain: Sequence[Served]
    edited: Editing
    at: int = 0
    following: int = 0  # 0: none, and the answer that came, or the error, is the client's
    kept: tuple[Attempt, Exchange] | None = None  # the last whole answer of the model before, of a backend without room
    fell_back: bool = False  # so that the answer is not the one that is looked for under the first model's name

    @property
    def served(self) -> Served:
        return self.chain[self.at]

    @property
    def authorization(self) -> bytes:
        """What its engines get where the client sends none; empty: what all get."""
        return authorization_of(self.served.api_key)


class Reserver(Protocol):
    """Settles what it has reserved (stages/reserve.py), and reserves what an answer takes that no engine computes."""

    def settle(self, call: Call, held: Reservation) -> None: ...
    def reserve_stored(self, call: Call, held: Reservation, model: str, ends: AnswerEnds) -> Steps[None] | None: ...
    def price_stored(self, call: Call, held: Reservation, ends: AnswerEnds) -> float: ...


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request holds of limits."""

    by: Reserver
    limits: HeadLimits
    grant: Grant  # by its head; of its tokens, too, unless those are among `more`
    more: Sequence[Grant] = ()
    estimate: Estimate | None = None  # of its tokens, once they are reserved
    captured: bytearray | None = None  # the first part of the latest answer, if others keep it …
    ends: AnswerEnds | None = None  # … once there is more
    stored: Amounts = NOTHING  # what it takes if no engine computes its answer

    @property
    def grants(self) -> Sequence[Grant]:
        return self.grant, *self.more

    def follow(self, captured: bytearray | None) -> Callable[[bytes], None]:
        """Count an answer of which others keep the first part. Returns what is to be called with the rest."""
        self.captured, self.ends = captured, None
        return self._beyond

    def _beyond(self, data: bytes) -> None:
        if self.ends is None:
            self.ends = AnswerEnds(self.captured)
        self.ends.add(data)


@dataclass(slots=True, eq=False, repr=False)  # no repr, since it would show keys
class Call:
    """One request of a client. Each slot names the stage that fills it.

    What a stage has found is frozen. The attempt, the reservation and the named model go on while the call does: what
    holds work or limits must be one object, which ends once, and not a copy of it.
    """

    request: HttpRequest  # identify: as it came, but for what only routers may set in its head
    client: Client
    started_at: float
    id: bytes = b""  # identify
    trace: RequestTrace | None = None  # if the node traces
    identity: Identity | None = None  # identify, by the head: who asks, where keys or trusted proxies say so
    named: NamedModel | None = None  # resolve: if a table is for the model
    limits: PipelineLimits | None = None  # resolve: those of the model, where they are not everybody's
    cached: bytes = b""  # response cache: HIT, MISS or BYPASS; empty without one
    shared: SharedAnswer | None = None  # response cache: set if others may get its answer, too
    read: ReadRequest = field(init=False)  # read
    match: PoolMatch = field(init=False)  # match
    attempt: Attempt | None = None  # plan: the latest leg
    earlier: Sequence[Attempt] = ()  # plan: those before it, the first one first
    reservation: Reservation | None = None  # reserve: of limits, until the call ends
    tries: int = 0  # plan
    failed_tries: FailedTries | None = None  # forward: once a leg has failed
    error: str = ""  # forward: of the legs that failed
    awaited: AwaitedStream | None = None  # relay: once a stream's first event is waited for
    outcome: str = "cancelled"
    status: int = 0  # relay
    first_byte_at: float = 0.0  # relay
    sent_bytes: int = 0  # relay
    moved: bool = False  # it was placed again because its engine hung
    stays: bool = False  # that is not allowed

    def may_use(self, model: str) -> bool:
        """Whether the client may use a model that is to serve; by the name of an alias, too, by which it asked."""
        identity = self.identity
        by_alias = identity is not None and self.named is not None and identity.may_use(self.named.asked)
        return identity is None or by_alias or identity.may_use(model)

    @property
    def model_names(self) -> Sequence[str]:
        """The names for its model of which the client must be allowed one; none where it named no model."""
        asked = self.named.asked if self.named is not None else ""
        return tuple(filter(None, (asked, self.read.prompt.model)))

    @property
    def is_open(self) -> bool:
        """Whether the client has the head of a stream that has not begun, so that any engine may still answer."""
        return self.awaited is not None and self.awaited.is_open

    @property
    def is_decided(self) -> bool:
        """Whether no other engine may answer."""
        return self.client.started and not self.is_open

    @property
    def falls_back(self) -> bool:
        """Whether another model is to be asked."""
        return self.named is not None and self.named.following > 0

    def failed(self, error: RanvierError) -> None:
        """Note why the latest leg failed, with the cause, which clients do not see."""
        words, cause = str(error), words_of(error)
        self.note(words + (f": {cause}" if cause not in words else ""))

    def end(self, error: RanvierError) -> None:
        """Note what the request ends with."""
        self.outcome = Outcome.TIMEOUT.value if isinstance(error, UpstreamTimeout) else error.code

    def note(self, reason: str) -> None:
        assert self.attempt is not None
        self.attempt.target.seen.complaint = self.attempt.reply.complaint = reason[:ERROR_CHARACTERS_MAX]
        before = f"{self.error}; " if 0 < len(self.error) < ERROR_CHARACTERS_MAX else ""
        self.error = f"{before}{self.attempt.decision.backend_name}: {reason}"

    def outlives_client(self) -> bool:
        """Note that the client left. Returns whether others follow the answer, so that it goes on."""
        return self.shared is not None and self.shared.leave()

    def own_fields(self, attempt: Attempt, head: HttpResponseHead, may_see: Callable[[bytes | None], bool]) -> Fields:
        """Return the fields that are added to the head of an answer."""
        fields = []
        if may_see(self.request.fields.control_key):
            decision = attempt.decision
            fields = [
                (b"x-ranvier-backend", decision.backend_name.encode()),
                (b"x-ranvier-reason", decision.reason.encode()),
                (b"x-ranvier-matched-tokens", b"%d" % decision.matched_tokens),
            ]
            if self.named is not None:
                fields.append((b"x-ranvier-model", quote(self.named.served.model).encode()))
        if self.cached:
            fields.append((b"x-cache", self.cached))
        if not head.fields.names_request:  # else the backend's own id stays
            fields.append((b"x-request-id", self.id))
        return fields

    def summary(self, now: float) -> RequestSummary:
        """Return its line in the log."""
        request, attempt, client, trace = self.request, self.attempt, self.client, self.trace
        decision, counts = (attempt.decision, attempt.reply.counts) if attempt is not None else (UNDECIDED, UNCOUNTED)
        return RequestSummary(
            id=self.id.decode("latin-1"),
            method=request.method.decode("latin-1"),
            path=request.path.decode("latin-1"),
            status=self.status,
            outcome=self.outcome,
            backend=decision.backend_name,
            policy=decision.policy,
            reason=decision.reason or ("cache" if self.cached == HIT else ""),
            source=decision.source,
            matched_tokens=decision.matched_tokens,
            prompt_tokens=attempt.prompt_tokens if attempt is not None else 0,
            tries=self.tries,
            first_byte_ms=round(1000 * (self.first_byte_at - self.started_at), 3) if self.first_byte_at else 0.0,
            total_ms=round(1000 * (now - self.started_at), 3),
            sent_bytes=self.sent_bytes,
            key_id=self.identity.key_id if self.identity is not None else "",
            tenant=self.identity.tenant.name if self.identity is not None else "",
            asked=self.named.asked if self.named is not None else "",
            model=self._model,
            error=self.error,
            client=client.peer if client.seen_head is None else client.seen_head.client or client.peer,
            stream=attempt is not None and attempt.prompt.stream,
            cached_tokens=counts.cached,
            answer_tokens=counts.answer,
            failed_tries=self._failed if self.error else (),
            trace_id=trace.trace_id if trace is not None else "",
            span_id=trace.span_id if trace is not None else "",
        )

    @property
    def _model(self) -> str:
        if self.named is not None:
            return self.named.served.model
        return self.attempt.prompt.model if self.attempt is not None else ""

    @property
    def _failed(self) -> Sequence[FailedTry]:
        """The tries that failed, one of which may be the last."""
        attempts = self.earlier if self.attempt is None else (*self.earlier, self.attempt)
        return [
            FailedTry(
                each.decision.backend_name,
                reply.complaint or (reply.outcome.value if reply.outcome is not None else ""),
                round(1000 * (reply.ended_at - each.sent_at), 3),
            )
            for each in attempts
            if (reply := each.reply).complaint or reply.outcome not in (Outcome.SUCCESS, None)
        ]
