"""What follows a failed attempt: another try at the same backend, one at another backend, or an error.

Rule: `worker_retries_max` failed tries at one backend move a request on to the next backend (the circuit, not this
module, takes a failing one out for all), and after `total_retries_max` retries the client gets an error. Nothing is
retried once a byte of an answer was relayed, nor for a client that is gone. Once a byte of the request was sent, only
what `may_repeat` allows. Where no connection was made, any request is. Source: SGLang's slides, bounded twice. A
budget is made for one request at its first failure, so requests that succeed pay nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import orjson

from ranvier_py.core.ids import BackendId
from ranvier_py.core.options import Options, option
from ranvier_py.core.routing.health import ILL_STATUSES, Outcome
from ranvier_py.core.routing.request_paths import ALWAYS, PATHS, REALTIME_PATH, UNSTORED

REREAD_BYTES_MAX = 1 << 20
REREAD_BRACKETS_MAX = 20_000
"""Bodies for /v1/responses beyond either limit are not read for their `store` and never repeated: a million tokens of
text are 4 MB, but a failure must not occupy the event loop."""

DECLINED = (Outcome.OVERLOADED, Outcome.REFUSED)
"""The backend has answered that it does not carry the request out."""


def is_inference(method: bytes, path: bytes) -> bool:
    """Whether a request makes an engine compute; `path` is without its query."""
    return method == b"POST" and path in PATHS and path != REALTIME_PATH


def may_repeat(method: bytes, path: bytes, body: bytes) -> bool:
    """Whether a request may be sent again after some of it was sent, because nothing of it stays at an engine.

    A response is stored unless its body says otherwise, and one in the background goes on without a connection.
    """
    rule = PATHS.get(path) if method == b"POST" else None
    if rule is None:
        return False
    return rule.repeated == ALWAYS or (rule.repeated == UNSTORED and not is_stored(body))


def is_stored(body: bytes) -> bool:
    """Whether something may stay at the engine of the response that this body asks for."""
    if len(body) > REREAD_BYTES_MAX or body.count(b"{") + body.count(b"[") > REREAD_BRACKETS_MAX:
        return True
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True
    return not isinstance(fields, dict) or fields.get("store") is not False or bool(fields.get("background"))


class Next(Enum):
    """What to do after a failed attempt."""

    AGAIN = "again here"
    ELSEWHERE = "elsewhere"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class RetryLimits(Options):
    """How often a request is tried again, and after which statuses."""

    SECTION = "Retries"

    worker_retries_max: int = option(  # a second try at once, at the same engine, mostly meets the same failure
        1, "Failed tries at one backend, before the first byte, that move a request on to the next backend.", least=1
    )
    total_retries_max: int = option(  # Ranvier's; a prompt that kills engines then meets at most four of them
        3, "Further tries of one request altogether, after the first.", most=100
    )
    statuses: tuple[int, ...] = option(
        (429, *sorted(ILL_STATUSES), 529), "Answers that are worth another try.", key="retry_statuses"
    )

    def contradictions(self) -> list[str]:
        return ["statuses: must be 400 to 599"] if any(not 400 <= each <= 599 for each in self.statuses) else []

    def retries(self, status: int) -> bool:
        """Whether a complete answer with this status may be dropped for another try."""
        return status in self.statuses


class RetryBudget:
    """The attempts of one request. `tried`: the backends to exclude from the next placement, in order of failure."""

    __slots__ = ("failures", "limits", "retries", "tried")

    def __init__(self, limits: RetryLimits) -> None:
        self.limits = limits
        self.retries = 0
        self.failures: dict[BackendId, int] = {}
        self.tried: list[BackendId] = []

    def next_attempt(self, backend: BackendId, outcome: Outcome, *, relayed: bool, others: bool) -> Next:
        """Count a failed attempt at `backend`, and return what follows.

        `relayed`: a byte of this answer was sent to the client. `others`: a backend could be asked that is not in
        `tried` and not this one. A backend that declines the request is not asked again by it.
        """
        self.failures[backend] = self.failures.get(backend, 0) + 1
        if relayed or outcome is Outcome.CANCELLED or self.retries >= self.limits.total_retries_max:
            return Next.GIVE_UP
        if outcome not in DECLINED and self.failures[backend] < self.limits.worker_retries_max:
            self.retries += 1
            return Next.AGAIN
        if backend not in self.tried:
            self.tried.append(backend)
        if not others:
            return Next.GIVE_UP
        self.retries += 1
        return Next.ELSEWHERE
