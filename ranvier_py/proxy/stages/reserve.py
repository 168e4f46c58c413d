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
from ranvier_py.core.access.limits.estimates import Estimates, Took, took_of
from ranvier_py.core.access.limits.limiter import Grant, HomeQuestion, Limiter, Refusal
from ranvier_py.core.access.limits.meter_groups import IdentityMeters, MeterGroup, Meters
from ranvier_py.core.access.limits.meters import INDEX, Amounts, LimitSpan, Measure
from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.errors import BudgetSpent, Forbidden, LargerThanLimit, LimitReached
from ranvier_py.core.routing.request_paths import MESSAGES_PATH, PATHS, RESPONSES_PATH
from ranvier_py.proxy.admission.seen_head import SeenHead
from ranvier_py.proxy.call import Call, Reservation
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import HttpRequest

LATE_S = 0.5  # gossip gives an answer a tenth of it; a node that is so late has no time for its peers
NOTHING = Amounts()
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
        meters = self.meters.of(seen.identity) if seen.identity is not None else None
        seen.meters = meters if meters is not None and not meters.is_unlimited else None
        seen.limit_lines = None
        if meters is not None and meters.shows:
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
        meters = seen.meters if seen is not None else None
        if meters is None or call.client.started:
            return None
        if meters.needs_counts:
            if is_uncounted(call.request):
                raise Forbidden(UNCOUNTED)
            if call.request.path == RESPONSES_PATH and call.request.method == b"POST":
                return self._begin_response(call, meters)
        return self._begin(call, meters)

    def _begin_response(self, call: Call, meters: IdentityMeters) -> Steps[None]:
        if (yield from in_portions(in_background(call.request.body))):
            raise Forbidden(UNCOUNTED)
        yield from self._begin(call, meters) or ()

    def _begin(self, call: Call, meters: IdentityMeters) -> Steps[None] | None:
        found = self.limiter.reserve(meters.first, NOTHING, time.monotonic())
        if type(found) is Grant:  # nearly always
            call.reservation = Reservation(meters, self.end, [found])
            return None
        held = call.reservation = Reservation(meters, self.end, [])
        return self._hold(held, found)

    def __call__(self, call: Call) -> Steps[None] | None:
        """Reserve tokens; where another model is asked instead, of what counts that one alone. Raises LimitReached,
        LargerThanLimit."""
        held = call.reservation
        if held is None:
            return None
        prompt, request = call.read.prompt, call.read.request
        group = held.meters.of(prompt.model)
        if held.meters.counts_cost:
            held.cost = (call.named.served.first("cost") if call.named is not None else None) or ONE
        if held.taken:
            group = MeterGroup([each for each in group.meters if each not in held.taken])
        if not group.meters:
            return None
        held.taken = (*held.taken, *group.meters) if held.taken else group.meters
        api = held.api = APIS.get(request.path, "")
        if api and request.fields.readable and may_ask(request.body, api):
            return self._reserve_asked(call, held, group, api)
        return self._reserve(call, held, group, ONE_ANSWER if api else None)

    def _reserve_asked(self, call: Call, held: Reservation, group: MeterGroup, api: str) -> Steps[None]:
        asked = yield from in_portions(asked_answers(call.read.request.body, api))
        yield from self._reserve(call, held, group, asked) or ()

    def _reserve(
        self, call: Call, held: Reservation, group: MeterGroup, asked: AskedAnswers | None
    ) -> Steps[None] | None:
        prompt, holders = call.read.prompt, call.match.holders
        cached = holders[0].tokens if holders else 0
        held.estimate = estimate = self.estimates.of(
            prompt, call.read.request.body, held.meters.tenant, cached, held.cost, asked
        )
        found = self.limiter.reserve(group, estimate.need, time.monotonic(), estimate.sure, estimate.excess)
        if type(found) is Grant:
            held.grants.append(found)
            return None
        return self._hold(held, found)

    def end(self, call: Call) -> None:
        """Settle what a request has reserved."""
        held, took = call.reservation, NOTHING
        assert held is not None
        if held.estimate is not None and (found := self._found(call, held.ends, held.api)) is not None:
            took = self.estimates.took(held.estimate, found, call.read.prompt.model, held.cost)
        self.limiter.settle(took, *held.grants)

    def _found(self, call: Call, ends: AnswerEnds | None, api: str) -> Took | None:
        """Return what the request took; None if no engine computed anything."""
        attempt = call.attempt
        if attempt is None or attempt.reply.status >= 300:
            return None
        found = None if ends is None else took_of(ends, api)
        if found is None and call.outcome in ("cancelled", "client_gone"):
            return NO_COUNTS
        return found

    # --- asking -----------------------------------------------------------------------------------------------------

    def _hold(self, held: Reservation, found: Grant | Refusal | HomeQuestion) -> Steps[None] | None:
        """Hold what is granted; if not, nothing counts what was before. Raises LimitReached, LargerThanLimit."""
        if isinstance(found, Grant):
            held.grants.append(found)
            return None
        if isinstance(found, HomeQuestion):
            return self._asked(held, found)
        self.limiter.release(*held.grants)
        raise error_of(found)

    def _asked(self, held: Reservation, question: HomeQuestion) -> Steps[None]:
        try:
            if question.outcome is None:
                yield partial(self._decided, question)
        finally:
            if question.outcome is None:
                self.limiter.abandon(question, time.monotonic())
        assert question.outcome is not None
        self._hold(held, question.outcome)

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
        for group in (meters.first, meters.latest):
            if group.shows:
                left = self.limiter.shown(group, now)
                line = group.line or line_of(group)
                lines += line % (max(0, left), AGAIN if left < group.amount else FULL)
        return lines

    def _claudes_lines(self, meters: IdentityMeters) -> bytes:
        now, lines = time.monotonic(), b""
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + WINDOW_S)).encode()
        for group in (meters.first, meters.latest):
            if group.shows:
                left = self.limiter.shown(group, now)
                name = SHOWN[group.unit]
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


def is_uncounted(request: HttpRequest) -> bool:
    """Whether nobody can count the tokens of a request, by its head: those of batches, files, other jobs of an engine
    and WebSockets come later, or elsewhere."""
    if request.fields.upgrades:
        return True
    return request.path not in PATHS and request.method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
