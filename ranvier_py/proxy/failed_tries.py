"""What becomes of one request after a backend did not serve it: another try elsewhere, or the end.

Rules: an error's body is read before anything is decided, up to a bound and a deadline, and is relayed as it came if
the request ends with it. If no backend that was asked has room, the client gets the last such answer, also if those
asked after it can't be reached or break off. What a backend declines it has not carried out, so any inference may be
sent to another one then; after other failures only what `retries.may_repeat` allows.
One object for each request, made at its first failure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from ranvier_py.core.answers.chunked import ChunkedReader, ChunkError
from ranvier_py.core.errors import RanvierError, UpstreamTimeout
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.tenants import tokens_in
from ranvier_py.core.routing.attempt import Attempt, PoolMatch
from ranvier_py.core.routing.backends import Transition
from ranvier_py.core.routing.blame.judgements import ERROR_BYTES_MAX, Judgement, judgement_of, wants_body
from ranvier_py.core.routing.blame.suspects import Suspects
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.retries import Next, RetryBudget, RetryLimits, is_inference, may_repeat
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import HttpRequest, WaitPhase
from ranvier_py.proxy.upstream import Exchange

ERROR_WAIT_S = 2.0
"""For an error's body, after its head. Engines send both at once; one that does not is judged by its status."""

DECLINED = (Outcome.OVERLOADED, Outcome.REFUSED)
"""The backend has answered that it does not carry the request out."""


class FailedTries:
    """The tries of one request that did not serve it."""

    __slots__ = ("_budget", "_client", "_request", "_router", "_suspects", "kept")

    def __init__(self, request: HttpRequest, client: Client, router: Router, limits: RetryLimits) -> None:
        self._request = request
        self._client = client
        self._router = router
        self._budget = RetryBudget(limits)
        self._suspects = Suspects(hash((request.path, request.body)))
        self.kept: tuple[Attempt, Exchange] | None = None  # the last whole answer of a backend without room

    def judge(self, attempt: Attempt, exchange: Exchange) -> Steps[Judgement]:
        """Return what an error answer shows of its backend, and note a pause that it asks for."""
        head, body = exchange.head, b""
        if attempt.judged and wants_body(head.status):
            body = yield from self._read(exchange)
        retry_after = next((value for name, value in head.headers if name.lower() == b"retry-after"), None)
        judgement = judgement_of(head.status, body, retry_after, wall_s=time.time())
        if judgement.outcome is Outcome.OVERLOADED and exchange.complete:
            self.kept = attempt, exchange
        if judgement.pause_s and attempt.judged:
            credential = credential_of(self._router, self._request) if judgement.personal else None
            self._router.registry.pauses.begin(attempt.backend, time.monotonic() + judgement.pause_s, credential)
        return judgement

    def _read(self, exchange: Exchange) -> Steps[bytes]:
        """Return the body of an error, as far as it comes in time and may be long. It can be taken again."""
        data = exchange.take()
        self._client.arm(WaitPhase.STALL, ERROR_WAIT_S)
        try:
            while not exchange.complete and len(data) < ERROR_BYTES_MAX:
                yield exchange.readable
                data += exchange.receive() or b""
        except UpstreamTimeout:  # it may be a long page, and is relayed as it comes
            pass
        exchange.put_back(data)
        if not exchange.head.fields.readable:
            return b""
        return unchunked(data) if exchange.head.framing == "chunked" else data

    def finish(self, attempt: Attempt, outcome: Outcome, now: float, *, is_last: bool) -> Sequence[Transition]:
        """End a try, and settle who is to blame if it is the last one."""
        if attempt.judged and self._suspects.add(attempt.backend, attempt.generation, outcome):
            attempt.judged = False  # it is now
        settled = self.settle(outcome, now) if is_last else ()
        return [*settled, *self._router.finish_attempt(attempt, outcome, now)]

    def settle(self, outcome: Outcome, now: float) -> Sequence[Transition]:
        """Settle who is to blame for the failures so far, since the request ends so, or is being served."""
        faults = self._suspects.settle(outcome)
        return [change for fault in faults for change in self._router.registry.blamed(fault, now)]

    def after_answer(self, attempt: Attempt, judgement: Judgement) -> PoolMatch | None:
        """Return whom to ask instead of the backend that gave this answer; None if the client is to have it."""
        if not self._budget.limits.retries(attempt.status):
            return None
        return self.elsewhere(attempt, judgement.outcome)

    def elsewhere(self, attempt: Attempt, outcome: Outcome) -> PoolMatch | None:
        """Return whom to ask after a failed try; None if the request ends here."""
        if not self._may_repeat(outcome):
            return None
        budget = self._budget
        others = self._found_without(attempt, (*budget.tried, attempt.backend))
        step = budget.next_attempt(attempt.backend, outcome, relayed=False, others=others is not None)
        if step is Next.AGAIN:
            return self._found_without(attempt, budget.tried)
        return others if step is Next.ELSEWHERE else None

    def _may_repeat(self, outcome: Outcome) -> bool:
        request = self._request
        if outcome is Outcome.CONNECT_ERROR or (outcome in DECLINED and is_inference(request.method, request.path)):
            return True
        return may_repeat(request.method, request.path, request.body)

    def _found_without(self, attempt: Attempt, tried: Sequence[BackendId]) -> PoolMatch | None:
        try:
            return self._router.find(attempt.prompt, time.monotonic(), tried)
        except RanvierError:  # no other backend: the failure before this is the better answer
            return None


def unchunked(data: bytes) -> bytes:
    """Return the payload of a chunked body, of which the end may be missing; empty if it is malformed."""
    reader = ChunkedReader(keep=True)
    try:
        reader.feed(data)
    except ChunkError:
        return b""
    return b"".join(reader.payload or ())


def credential_of(router: Router, request: HttpRequest) -> bytes:
    """Return a keyed digest of the request's credentials; without any it is the same for all."""
    return router.reader.digest(b"credential" + b"\n".join(sorted(tokens_in(request.headers))))


def paused_for(router: Router, request: HttpRequest, now: float) -> tuple[BackendId, ...]:
    """Return the backends that pause for this request."""
    return router.registry.pauses.of(partial(credential_of, router, request), now)
