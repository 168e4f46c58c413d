"""What of the pipeline may be set, what it needs of a tokenizer, and what a request leaves for its line in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ranvier_py.core.options import Options, option, part, seconds
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.retries import RetryLimits
from ranvier_py.core.routing.router import Attempt
from ranvier_py.core.routing.summary import RequestSummary
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.http_values import HttpRequest

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


class PromptTokenizer(Protocol):
    """Tokenizes before placement, or off the path: io/tokenizer_worker.py, or what asks somebody else meanwhile."""

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool: ...
    def submit(self, attempt: Attempt) -> None: ...
    def finish(self, attempt: Attempt, raw: bytes, *, chunked: bool) -> None: ...


@dataclass(slots=True)
class ServedRequest:
    """One request of a client, and what became of it so far, for its line in the log."""

    request: HttpRequest
    client: Client
    request_id: bytes
    started_at: float
    attempt: Attempt | None = None  # the last one
    status: int = 0
    tries: int = 0
    first_byte_at: float = 0.0
    sent_bytes: int = 0
    outcome: str = "cancelled"

    def summary(self, now: float) -> RequestSummary:
        decision = self.attempt.decision if self.attempt else None
        return RequestSummary(
            request_id=self.request_id.decode("latin-1"),
            method=self.request.method.decode("latin-1"),
            path=self.request.path.decode("latin-1"),
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
