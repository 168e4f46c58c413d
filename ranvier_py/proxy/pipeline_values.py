"""What the steps of the pipeline hand to each other, and what they need of the world.

The world is two edges, which the pipeline knows by what it asks of them: the connection that a request came on, and
the connections to backends. A request that departs is a `Going` until it has landed; a request whose first backend
fails is another one at the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ranvier_py.core.answers.usage_removal import Marks
from ranvier_py.core.options import Options, option, part, seconds
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.retries import RetryBudget, RetryLimits
from ranvier_py.core.routing.router import Attempt
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.http_values import HttpRequest, HttpResponseHead, Phase

Fields = Sequence[tuple[bytes, bytes]]


class Client(Protocol):
    """The connection a request came on. proxy/server.py has the real one."""

    peer: str
    started: bool
    must_close: bool
    missed: Phase | None
    request_id: bytes

    def arm(self, phase: Phase, seconds: float) -> None: ...
    def relay_at_once(self, head: HttpResponseHead, extra: Fields = ..., body: bytes = ...) -> bool: ...
    async def flush(self) -> None: ...
    async def relay_head(self, head: HttpResponseHead, extra: Fields = ..., body: bytes = ...) -> None: ...
    async def send(self, *parts: bytes) -> None: ...
    async def respond(self, status: int, body: bytes, headers: Fields = ..., content_type: bytes = ...) -> None: ...


class Exchange(Protocol):
    """One request at one backend. proxy/upstream.py has the real one."""

    head: HttpResponseHead
    complete: bool

    def take(self) -> bytes: ...
    async def receive(self) -> bytes: ...
    def mark_chunks(self) -> Marks | None: ...
    def release(self) -> None: ...


class Sent(Protocol):
    """A request on its way to a backend. proxy/upstream.py has the real one."""

    @property
    def waits(self) -> bool: ...
    def when_answered(self, call: Callable[[], bool] | None) -> None: ...
    def close(self) -> None: ...


class Forwarder(Protocol):
    """`open` is `begin`, then `finish`; between the two `answer_of` may find that nothing is left to wait for."""

    async def open(self, address: Any, request: HttpRequest, extra: Fields = ...) -> Exchange: ...
    def begin(self, address: Any, request: HttpRequest, extra: Fields = ...) -> Any: ...
    def answer_of(self, sent: Any) -> Exchange | None: ...
    async def finish(self, sent: Any) -> Exchange: ...


class Teacher(Protocol):
    """Tokenizes before placement, or off the path. io/tokenizer_worker.py has the real one."""

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool: ...
    def submit(self, attempt: Attempt) -> Any: ...
    def finish(self, attempt: Attempt, job: Any, raw: bytes, *, chunked: bool, streamed: bool) -> None: ...


@dataclass(slots=True)
class Progress:
    """What became of a request so far; turned into its summary at the end."""

    request_id: bytes
    started_at: float
    attempt: Attempt | None = None
    status: int = 0
    tries: int = 0
    first_byte_at: float = 0.0
    sent_bytes: int = 0
    outcome: str = "cancelled"

    def summary(self, request: HttpRequest, now: float) -> RequestSummary:
        decision = self.attempt.decision if self.attempt else None
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


class Relay(NamedTuple):
    """An answer on its way to the client: the fields we add, whether it teaches, and what of it will be learned."""

    extra: Fields
    teaches: bool
    chunked: bool
    captured: list[bytes]


@dataclass(slots=True)
class Going:
    """One request at one backend: what the steps of an attempt share.

    `tell` is there on the short path, `sent` while its answer is awaited there; `taken` is what came of an answer that
    the short path has opened.
    """

    request: HttpRequest
    client: Client
    progress: Progress
    prompt: Prompt
    budget: RetryBudget
    attempt: Attempt
    prepared: bool = False
    job: Any = None
    asking: bytes | None = None
    tell: Callable[[bool], None] | None = None
    sent: Sent | None = None
    exchange: Exchange | None = None
    taken: bytes = b""
    failure: BaseException | None = None
    finished: bool = False

    @property
    def waits(self) -> bool:
        """Whether there is nothing to do but to wait for the backend."""
        return self.failure is None and self.sent is not None and self.sent.waits


FIRST_BYTE_TOTAL_S = 600.0
"""All tries of one request together wait so long for a first byte, for openai's SDK waits no longer (its
DEFAULT_TIMEOUT). So whoever sets a deadline of seconds has stuck engines passed over, and the default of 600 s ends in
a 504: another try would prefill the prompt once more for a client that is gone when it answers."""


@dataclass(frozen=True, slots=True)
class PipelineLimits(Options):
    """Deadlines of one request, in seconds."""

    tokenize_deadline_s: float = option(
        0.15,
        "Longest wait for tokens before placing by load. 0 never waits.",
        most=60.0,
        key="tokenize_deadline_s",
        section="Tokens",
    )
    first_byte_s: float = seconds(
        600.0, "Longest wait for a backend to begin its answer.", key="first_byte_timeout_s", section="Limits"
    )
    stall_s: float = seconds(120.0, "Longest silence within an answer.", key="stall_timeout_s", section="Limits")
    retries: RetryLimits = part(RetryLimits)

    @property
    def waits_once(self) -> bool:
        """Whether no second try could follow a missed first byte."""
        return 2 * self.first_byte_s > FIRST_BYTE_TOTAL_S
