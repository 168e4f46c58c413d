"""What becomes of one request after a backend did not serve it: another try elsewhere, or the end.

Rule: an error's body is read before anything is decided, and relayed as it came if the request ends with it. If no
backend that was asked has room, the client gets the last such answer, also if those asked after it can't be reached. A
refusal that may be the backend's own fault is tried elsewhere. A prompt too long for one goes to longer ones. What a
backend declines it has not carried out, so any inference may be sent to another then; after other failures only what
`retries.may_repeat` allows. Bounds: ERROR_WAIT_S, FIRST_BYTE_TOTAL_S, the retry budget.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from ranvier_py.core.answers.answer_events import Failure
from ranvier_py.core.answers.chunked import payload_of
from ranvier_py.core.answers.inflated_reader import Inflater
from ranvier_py.core.errors import (
    ConnectFailed,
    NodeExhausted,
    RanvierError,
    UpstreamEmpty,
    UpstreamError,
    UpstreamHangs,
    UpstreamTimeout,
)
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.prompts.tenants import tokens_in
from ranvier_py.core.routing.attempt import Attempt, PoolMatch
from ranvier_py.core.routing.backends import Backend, Registry, Transition
from ranvier_py.core.routing.blame.context_lengths import not_longer, too_short
from ranvier_py.core.routing.blame.judgements import (
    ERROR_BYTES_MAX,
    SERVED,
    Judgement,
    judgement_of,
    retry_after_of,
    wants_body,
)
from ranvier_py.core.routing.blame.refusals import kind_of, wording_of_blanks
from ranvier_py.core.routing.blame.suspects import Suspects
from ranvier_py.core.routing.health import Outcome
from ranvier_py.core.routing.retries import DECLINED, Next, RetryBudget, RetryLimits, may_repeat
from ranvier_py.core.routing.router import Router
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import HttpRequest, WaitPhase
from ranvier_py.proxy.upstream import Exchange

ERROR_WAIT_S = 2.0
"""For an error's body, after its head. Engines send both at once; one that does not is judged by its status. And for
each piece of an answer that has begun, and whose known length says that all of it is there."""

FIRST_BYTE_TOTAL_S = 600.0
"""Limit of the waits for a first byte of all tries of one request: openai's SDK waits no longer (its DEFAULT_TIMEOUT).
So with a limit of seconds for each try a stuck engine is passed over, while the default of 600 s ends in a 504: another
try would prefill the prompt once more for a client that is gone when the answer comes."""


CAUSE_BYTES = 64 * 1024
"""Of each end of a body: requests that have these, and the length, alike are the same. Longer ones can't be hashed."""

RANK_WORDS = re.compile(rb"data(?:[\W_]|\\[bfnrt])*parallel|\\u00[4-7]", re.IGNORECASE)
"""In each request of which a quotation may read like a refusal of a rank, with letters escaped or not."""


class RefusedTry(NamedTuple):
    """A try that was refused, and what was said of it."""

    attempt: Attempt
    wording: int


class FailedTries:
    """The tries of one request that did not serve it."""

    __slots__ = ("_budget", "_client", "_failed", "_never", "_refused", "_request", "_router", "_suspects", "kept")

    def __init__(self, request: HttpRequest, client: Client, router: Router, limits: RetryLimits) -> None:
        self._request = request
        self._client = client
        self._router = router
        self._budget = RetryBudget(limits)
        self._suspects = Suspects(cause_of(request.path, request.body))
        self._never: Sequence[BackendId] = ()  # too short for the request
        self._refused: list[RefusedTry] = []
        self._failed = 0  # the kind of the request, once a try has failed
        self.kept: tuple[Attempt, Exchange] | None = None  # the last whole answer of a backend without room

    def judge(self, attempt: Attempt, exchange: Exchange, inside: Failure | None) -> Steps[Judgement]:
        """Return what an error answer shows of its backend, and note a pause that it asks for. `inside`: the error
        that is in an answer of status 200."""
        head, body = exchange.head, b""
        if inside is None and head.status < 400 and not attempt.judged:  # a redirect
            return SERVED
        if inside is not None:
            body = inside.body
        elif attempt.judged and wants_body(head.status):
            body = yield from self._read(exchange)
        judgement = judgement_of(attempt.reply.status, body, retry_after_of(head.headers), wall_s=time.time())
        if judgement.outcome is Outcome.OVERLOADED and exchange.complete:
            self.kept = attempt, exchange
        if judgement.pause_s and attempt.judged:
            credential = credential_of(self._router, self._request) if judgement.personal else None
            self._router.registry.pauses.begin(attempt.target.id, time.monotonic() + judgement.pause_s, credential)
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
        head = exchange.head
        body = payload_of(data) if head.framing == "chunked" else data
        return body if head.fields.readable else Inflater(head.headers).inflated(body)

    def finish(
        self, attempt: Attempt, outcome: Outcome, now: float, *, is_last: bool, was_seen: bool = False
    ) -> Sequence[Transition]:
        """Take in how a try ends, and settle who is to blame if it is the last one. `was_seen`: by the client."""
        target, sent_at = attempt.target.id, attempt.sent_at
        if attempt.judged and self._suspects.add(
            target, attempt.generation, outcome, was_seen=was_seen, sent_at=sent_at
        ):
            attempt.judged = False  # it is now
            self._failed = self._kind(attempt)
        return self.settle(outcome, now) if is_last else ()

    def settle(self, outcome: Outcome, now: float) -> Sequence[Transition]:
        """Settle who is to blame for the failures so far, since the request ends so, or is being served."""
        registry, changes = self._router.registry, list[Transition]()
        for fault in self._suspects.settle(outcome):
            changes += registry.changes.blamed(fault, now)
            backend = registry.ids.current(fault.backend) if outcome is Outcome.SUCCESS else None
            if backend is not None and backend.generation == fault.generation:
                changes += registry.refusals.failed(backend, self._failed, fault.outcome, now)
        if outcome is Outcome.SUCCESS:
            refused, self._refused = self._refused, []
            for each, wording in refused:
                changes += registry.refusals.contradicted(each.target, self._kind(each), each.reply.status, now)
                registry.refusals.wordings.contradicted(wording)
        return changes

    def after_answer(self, attempt: Attempt, judgement: Judgement) -> PoolMatch | None:
        """Return whom to ask instead of the backend that gave this answer; None if the client is to have it."""
        if attempt.reply.is_blank:
            return self._after_blank(attempt)
        if judgement.outcome is Outcome.REFUSED:
            return (
                self._after_refusal(attempt, judgement) if attempt.judged and not attempt.prompt.response_key else None
            )
        if not self._budget.limits.retries(attempt.reply.status):
            return None
        return self.elsewhere(attempt, judgement.outcome)

    def _after_refusal(self, attempt: Attempt, judgement: Judgement) -> PoolMatch | None:
        """Ask a longer backend if the prompt is too long for it; else a second one if that is doubtful. What two refuse
        alike, or a proven one, is refused."""
        registry, kind, earlier = self._router.registry, self._kind(attempt), self._refused
        if judgement.names_rank and attempt.target.behind.rank is not None and quotes_no_rank(self._request):
            return self.elsewhere(attempt, judgement.outcome) if registry.rank_refused(attempt.target) else None
        refusals, target, model = registry.refusals, attempt.target, attempt.prompt.model
        if judgement.is_too_long:
            self._never = (*self._never, *not_longer(registry, target, model))
            return self.elsewhere(attempt, judgement.outcome)
        is_repeated = refusals.wordings.refused(target.id, judgement.wording)
        if earlier and refusals.is_proven(target, kind):
            self._shared(earlier, kind)
            return None
        others = self._others(attempt)
        is_doubtful = is_repeated or judgement.is_own or refusals.is_doubtful(target, kind, others)
        is_alike = any(each.reply.status == attempt.reply.status for each, _ in earlier)
        refusals.refused(target, kind, attempt.reply.status, time.monotonic())
        if is_alike or not is_doubtful:
            return None
        earlier.append(RefusedTry(attempt, judgement.wording))
        return self._second_opinion(attempt, others, judgement.wording)

    def _after_blank(self, attempt: Attempt) -> PoolMatch | None:
        """Return whom to ask instead of a backend that answered without a word; None if the client is to have that."""
        refusals, kind, target = self._router.registry.refusals, self._kind(attempt), attempt.target
        if not attempt.judged or attempt.prompt.response_key:
            return None
        blank = [each for each in self._refused if each.attempt.reply.is_blank]
        self._refused = [each for each in self._refused if not each.attempt.reply.is_blank]
        self._shared(blank, kind)
        others = self._others(attempt)
        if blank or not refusals.blank(target, kind, others, time.monotonic()):
            return None
        wording = wording_of_blanks(kind)
        elsewhere = self._second_opinion(attempt, others, wording)
        if elsewhere is not None:
            self._refused.append(RefusedTry(attempt, wording))
        return elsewhere

    def _shared(self, refused: Sequence[RefusedTry], kind: int) -> None:
        """Take these refusals back, since another backend refuses the request alike."""
        refusals = self._router.registry.refusals
        for each, wording in refused:
            refusals.shared(each.target, kind, each.reply.status)
            refusals.wordings.shared(each.target.id, wording)

    def relayed_blank(self, attempt: Attempt) -> None:
        """Take in an answer without a word that the client has."""
        if attempt.judged and not attempt.prompt.response_key:
            kind = self._kind(attempt)
            self._router.registry.refusals.blank(attempt.target, kind, self._others(attempt), time.monotonic())

    def _others(self, attempt: Attempt) -> Sequence[Backend]:
        """Return the backends that may serve a request and were not asked yet."""
        tried, model = (*self._budget.tried, attempt.target.id), attempt.prompt.model
        return [each for each in self._router.registry if each.id not in tried and each.catalog.serves(model)]

    def _second_opinion(self, attempt: Attempt, others: Sequence[Backend], wording: int) -> PoolMatch | None:
        """Ask another backend, of these the ones whose word counts most."""
        registry = self._router.registry
        worse = registry.refusals.worse_opinions(self._kind(attempt), others, wording)
        unfit = registry.pools.names.unfit(self._request.path, attempt.prompt.model)
        attempt.prompt.avoid = tuple(sorted({*worse, *unfit, *known_short(registry, attempt.prompt)}))
        return self.elsewhere(attempt, Outcome.REFUSED)

    def _kind(self, attempt: Attempt) -> int:
        return kind_of(self._request.path, attempt.prompt.model, stream=attempt.prompt.stream)

    @property
    def is_over(self) -> bool:
        """Whether no further try is left."""
        return self._budget.retries >= self._budget.limits.total_retries_max

    def after_error(self, attempt: Attempt, error: UpstreamError, *, is_late: bool) -> PoolMatch | None:
        """Return whom to ask after a try without an answer; None if the request ends here."""
        outcome = outcome_of_error(error)
        if isinstance(error, UpstreamHangs):
            return self.moved(attempt, error.target) or self.elsewhere(attempt, outcome)
        return None if is_late and outcome is Outcome.TIMEOUT else self.elsewhere(attempt, outcome)

    def moved(self, attempt: Attempt, target: int) -> PoolMatch | None:
        """Return the match at the backend that has room for a request whose engine hangs; None if it is gone."""
        budget, outcome = self._budget, Outcome.TIMEOUT
        found = self._found_without(attempt, [each.id for each in self._router.registry if each.id != target])
        budget.failures[attempt.target.id] = budget.limits.worker_retries_max  # it is not asked again
        step = budget.next_attempt(attempt.target.id, outcome, relayed=False, others=found is not None)
        return found if step is Next.ELSEWHERE else None

    def elsewhere(self, attempt: Attempt, outcome: Outcome) -> PoolMatch | None:
        """Return whom to ask after a failed try; None if the request ends here."""
        if not self.may_repeat_after(outcome):
            return None
        budget = self._budget
        others = self._found_without(attempt, (*budget.tried, attempt.target.id))
        step = budget.next_attempt(attempt.target.id, outcome, relayed=False, others=others is not None)
        if step is Next.AGAIN:
            return self._found_without(attempt, budget.tried)
        return others if step is Next.ELSEWHERE else None

    def may_repeat_after(self, outcome: Outcome) -> bool:
        """Whether the request may be sent again, here or elsewhere."""
        request = self._request
        if outcome is Outcome.CONNECT_ERROR or (outcome in DECLINED and request.computes):
            return True
        return may_repeat(request.method, request.path, request.body)

    def _found_without(self, attempt: Attempt, tried: Sequence[BackendId]) -> PoolMatch | None:
        try:
            return self._router.find(attempt.prompt, time.monotonic(), (*tried, *self._never))
        except RanvierError:  # no other backend: the failure before this is the better answer
            return None


def cause_of(path: bytes, body: bytes) -> int:
    """Return what is equal for equal requests."""
    return hash((path, len(body), bytes(body[:CAUSE_BYTES]), bytes(body[-CAUSE_BYTES:])))


def quotes_no_rank(request: HttpRequest) -> bool:
    """Whether an error that names a rank can't quote the request, so that it is of our choice."""
    texts = (request.body, request.target, *chain.from_iterable(request.headers))
    return request.fields.readable and not any(RANK_WORDS.search(text) for text in texts)


def outcome_of_error(error: NodeExhausted | UpstreamError) -> Outcome:
    if isinstance(error, NodeExhausted):
        return Outcome.NOT_SENT
    if isinstance(error, ConnectFailed):
        return Outcome.CONNECT_ERROR
    if isinstance(error, UpstreamEmpty):
        return Outcome.SERVER_ERROR
    return Outcome.TIMEOUT if isinstance(error, UpstreamTimeout) else Outcome.BROKEN


def waited_long(started_at: float, attempt: Attempt, first_event_s: float) -> bool:
    """Whether no client would wait for another try after this one timed out."""
    return attempt.sent_at - started_at + 2 * first_event_s > FIRST_BYTE_TOTAL_S


def credential_of(router: Router, request: HttpRequest) -> bytes:
    """Return a keyed digest of the request's credentials; without any it is the same for all."""
    return router.reader.digest(b"credential" + b"\n".join(sorted(tokens_in(request.headers))))


def passed_over(
    router: Router, request: HttpRequest, prompt: Prompt, now: float, *, dry: bool = False
) -> tuple[BackendId, ...]:
    """Return the backends that this request should avoid: those that pause, those that lack its API, and those that
    refuse what others serve. It may be chosen to find out whether one of the latter still does, unless this is `dry`;
    then it avoids all others."""
    registry = router.registry
    avoid = [*registry.pauses.of(partial(credential_of, router, request), now)]
    avoid += (unfit := registry.pools.names.unfit(request.path, prompt.model))
    if registry.refusals.avoiding and not prompt.response_key:
        kind = kind_of(request.path, prompt.model, stream=prompt.stream)
        able = [each for each in registry.pools.pool(prompt.model, now).ids if each not in unfit]
        probed = None if dry else registry.refusals.probe(kind, able, now)
        if probed is not None:
            return tuple(each for each in able if each != probed)
        avoid += registry.refusals.avoided(kind)
    return tuple(sorted(set(avoid)))


def known_short(registry: Registry, prompt: Prompt) -> Sequence[BackendId]:
    """Return the backends that are known to be too short for the prompt."""
    if prompt.end.length <= registry.pools.shortest:  # known tokens are no more than estimated ones
        return ()
    return too_short(registry, prompt.model, prompt.end.known_tokens())
