"""Holds requests to the limits of their key and tenant: reserved before an engine computes, settled when the call ends.

A request counts by its head before the response cache, so that hits and followers are requests, too; its tokens count
once it is known where it goes. One reservation for all tries. It is settled by the engine's counts, else by what of the
answer came; where no answer came, a client that left pays for its prompt, and nobody for what an engine refused.
Invariant: every reservation ends with its call (test_limits_of_requests.py).
"""

from __future__ import annotations

import time
from functools import partial
from math import ceil

import trio

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.asked_answers import ONE_ANSWER, AskedAnswers, asked_answers, may_ask
from ranvier_py.core.access.limits.background import in_background
from ranvier_py.core.access.limits.estimates import Estimate, Estimates, Took, took_of
from ranvier_py.core.access.limits.limiter import NOTHING, Grant, HomeQuestion, Limiter, Refusal
from ranvier_py.core.access.limits.meter_groups import IdentityMeters, MeterGroup, Meters
from ranvier_py.core.access.limits.meters import INDEX, Amounts, LimitSpan, Measure
from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.errors import BudgetSpent, Forbidden, LargerThanLimit, LimitReached
from ranvier_py.core.routing.request_paths import MESSAGES_PATH, PATHS, RESPONSES_PATH
from ranvier_py.proxy.admission.seen_head import HeadLimits, SeenHead
from ranvier_py.proxy.call import Call, Reservation
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import HttpRequest

LATE_S = 0.5  # gossip gives an answer a tenth of it; a node that is so late has no time for its peers
NO_COUNTS = Took(None, 0, 0, 0, 0)
APIS = {path: rule.reader for path, rule in PATHS.items() if rule.reader}
"""How the bodies are read of what generates."""
ONE = ModelCost()
WINDOW_S = 60  # a minute slides, so what counts now is free a minute from now
UNCOUNTED = "this key has limits of tokens, and nobody counts the tokens of this request"
AGAIN, FULL = b"%ds" % WINDOW_S, b"0s"
LINES = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
CLAUDES_LINES = (
    b"anthropic-ratelimit-%b-limit: %d\r\nanthropic-ratelimit-%b-remaining: %d\r\nanthropic-ratelimit-%b-reset: %b\r\n"
)
"""What is left of a minute, and when all of it is free again."""
SHOWN = {INDEX[one]: one.value.encode() for one in (Measure.REQUESTS, Measure.TOKENS)}


class ReserveStage:
    """See the module."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter, self.meters, self.estimates = limiter, Meters(), Estimates()

    def known(self, seen: SeenHead, request: HttpRequest) -> None:
        """Find what counts the requests of a head, and how their answers show what is left."""
        seen.limits = seen.limit_lines = None
        meters = self.meters.of(seen.identity) if seen.identity is not None else None
        if meters is None or meters.is_unlimited:
            return
        creates = request.path == RESPONSES_PATH and request.method == b"POST"
        may_be_uncounted = meters.needs_counts and (creates or has_no_counts(request))
        lengths, api = self.estimates.tenant(meters.tenant), APIS.get(request.path, "")
        seen.limits = HeadLimits(meters, lengths, api, may_be_uncounted, self.end)
        if meters.shown:
            of_anthropic = request.fields.is_anthropic or request.path.startswith(MESSAGES_PATH)
            seen.limit_lines = partial(self._claudes_lines if of_anthropic else self._lines, meters)

    def check(self, identity: Identity) -> None:
        """Raise LimitReached if no request of this identity fits just now, whatever its body."""
        meters = self.meters.of(identity)
        refusal = self.limiter.full((*meters.first.meters, *meters.rest.meters), time.monotonic())
        if refusal is not None:
            raise error_of(refusal)

    def needs_counts(self, identity: Identity) -> bool:
        """Whether requests whose tokens nobody counts may not pass the limits of this identity."""
        meters = self.meters.of(identity)
        return meters.needs_counts and not meters.is_unlimited

    def begin(self, call: Call) -> Steps[None] | None:
        """Count a request by its head. Raises LimitReached, Forbidden."""
        seen = call.client.seen_head
        limits = seen.limits if seen is not None else None
        if limits is None or call.client.started:
            return None
        if limits.may_be_uncounted:
            return self._begin_counted(call, limits)
        found = self.limiter.begin(limits.meters.first, time.monotonic())
        if type(found) is not Grant:
            return self._hold(call, limits, found)
        call.reservation = Reservation(limits, found)  # nearly always
        return None

    def _begin_counted(self, call: Call, limits: HeadLimits) -> Steps[None]:
        """Count a request if somebody counts its tokens. Raises Forbidden if not."""
        if has_no_counts(call.request) or (yield from in_portions(in_background(call.request.body))):
            raise Forbidden(UNCOUNTED)
        yield from self._hold(call, limits, self.limiter.begin(limits.meters.first, time.monotonic())) or ()

    def __call__(self, call: Call, asked: AskedAnswers | None = None) -> Steps[None] | None:
        """Reserve tokens; where another model is asked instead, of what counts that one alone. `asked`: the answers
        that the body asks for, once they are known. Raises LimitReached, LargerThanLimit."""
        held = call.reservation
        if held is None:
            return None
        limits, read = held.limits, call.read
        prompt, request = read.prompt, read.request
        group = limits.meters.of(prompt.model)
        if held.estimate is not None:
            group = self._of_next_model(call, held, held.estimate, group)
        if not group.meters:
            return None
        if asked is None and limits.api:
            if request.fields.readable and may_ask(request.body, limits.api):
                return self._reserve_asked(call, limits.api)
            asked = ONE_ANSWER
        holders, grant = call.match.holders, held.grant
        cached = holders[0].tokens if holders else 0
        cost = cost_of_model(call) if limits.meters.counts_cost else None
        requests = 0.0 if group.together else 1.0  # else it is counted as one by its head
        held.estimate = estimate = self.estimates.of(
            prompt, request.body, limits.lengths, cached, cost, asked, requests
        )
        now = time.monotonic()
        found = self.limiter.reserve(group, estimate.need, now, estimate.sure, estimate.excess, grant)
        return None if found is grant else self._hold(call, limits, found)

    def _reserve_asked(self, call: Call, api: str) -> Steps[None]:
        asked = yield from in_portions(asked_answers(call.read.request.body, api))
        yield from self(call, asked) or ()

    def _of_next_model(self, call: Call, held: Reservation, estimate: Estimate, group: MeterGroup) -> MeterGroup:
        """Return what counts the model that is asked instead, of whose limits none counts the request yet."""
        if estimate.cost is not None:
            held.estimate = estimate._replace(cost=cost_of_model(call))
        taken = [meter for grant in held.grants for meter in grant.group.meters]
        return MeterGroup([each for each in group.meters if each not in taken])

    def end(self, call: Call) -> None:
        """Settle what a request has reserved."""
        held, attempt, took = call.reservation, call.attempt, NOTHING
        assert held is not None
        estimate = held.estimate
        if estimate is not None and attempt is not None and attempt.reply.status < 300:
            prompt, cached, answer, _ = attempt.reply.counts
            if prompt is None or answer is None or estimate.cost is not None or held.ends is not None:
                took = self._took(call, held, estimate, attempt.prompt.model)
            else:  # nearly always
                took = self.estimates.counted(estimate, prompt, cached or 0, answer, attempt.prompt.model)
        if held.more:
            self.limiter.settle_all(took, *held.grants)
        else:
            self.limiter.settle(took, held.grant)

    def _took(self, call: Call, held: Reservation, estimate: Estimate, model: str) -> Amounts:
        """Return what a request took by the ends of its answer; nothing if no engine computed anything."""
        found = took_of(held.ends or AnswerEnds(held.captured), held.limits.api)
        if found is None:
            if call.outcome not in ("cancelled", "client_gone"):
                return NOTHING
            found = NO_COUNTS
        return self.estimates.took(estimate, found, model)

    # --- asking -----------------------------------------------------------------------------------------------------

    def _hold(self, call: Call, limits: HeadLimits, found: Grant | Refusal | HomeQuestion) -> Steps[None] | None:
        """Hold what is granted; if not, nothing counts what was before. Raises LimitReached, LargerThanLimit."""
        held = call.reservation
        if isinstance(found, HomeQuestion):
            return self._asked(call, limits, found)
        if isinstance(found, Refusal):
            self.limiter.release(*(held.grants if held is not None else ()))
            raise error_of(found)
        if held is None:
            call.reservation = Reservation(limits, found)
        else:
            held.more = (*held.more, found)
        return None

    def _asked(self, call: Call, limits: HeadLimits, question: HomeQuestion) -> Steps[None]:
        try:
            if question.outcome is None:
                yield partial(self._decided, question)
        finally:
            if question.outcome is None:
                self.limiter.abandon(question, time.monotonic())
        assert question.outcome is not None
        self._hold(call, limits, question.outcome)

    async def _decided(self, question: HomeQuestion) -> None:
        """Wait until a limit's home has answered, or the time is over in which it should have."""
        event = trio.Event()
        question.decided = event.set
        with trio.move_on_after(LATE_S):
            await event.wait()
        if question.outcome is None:
            self.limiter.unanswered(question, time.monotonic())

    # --- what clients see -------------------------------------------------------------------------------------------

    def _lines(self, meters: IdentityMeters) -> bytes:
        """Return the fields of an answer: of several limits of a kind the one of which least is left."""
        now, lines = time.monotonic(), b""
        for group in meters.shown:
            left = self.limiter.shown(group, now) if now >= group.until else group.left + group.back
            lines += (group.line or line_of(group)) % (max(0, left), AGAIN if left < group.amount else FULL)
        return lines

    def _claudes_lines(self, meters: IdentityMeters) -> bytes:
        now, lines = time.monotonic(), b""
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + WINDOW_S)).encode()
        for group in meters.shown:
            left, name = self.limiter.shown(group, now), SHOWN[group.unit]
            lines += CLAUDES_LINES % (name, group.amount, name, max(0, left), name, until)
        return lines


def line_of(group: MeterGroup) -> bytes:
    """Return the fields of a group, but for what is left and until when."""
    name = SHOWN[group.unit]
    group.line = LINES % (name, group.amount, name, name)
    return group.line


def error_of(refusal: Refusal) -> LimitReached | LargerThanLimit:
    if refusal.never:
        return LargerThanLimit(str(refusal))
    wait_s = max(refusal.retry_after_s, 0.001)
    fields = [(b"retry-after", b"%d" % ceil(wait_s)), (b"retry-after-ms", b"%d" % ceil(1000 * wait_s))]
    if refusal.meter.span > LimitSpan.MINUTE:
        return BudgetSpent(str(refusal), [*fields, (b"x-should-retry", b"false")])
    return LimitReached(str(refusal), fields)


def cost_of_model(call: Call) -> ModelCost:
    """Return what a token costs of the model that is asked."""
    return (call.named.served.first("cost") if call.named is not None else None) or ONE


def has_no_counts(request: HttpRequest) -> bool:
    """Whether nobody can count the tokens of a request, by its head: those of batches, files, other jobs of an engine
    and WebSockets come later, or elsewhere."""
    if request.fields.upgrades:
        return True
    return request.path not in PATHS and request.method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
