"""Holds requests to the limits of their key and tenant: reserved before an engine computes, settled when the call ends.

A request counts by its head before the response cache, so that hits and followers are requests, too; its tokens count
once it is known where it goes. One reservation for all tries. It is settled by the engine's counts, else by what of the
answer came; where no answer came, a client that left pays for its prompt, and nobody for what an engine refused.
Invariant: every reservation ends with its call (test_limits_of_requests.py).
"""

from __future__ import annotations

import time
from functools import partial
from itertools import chain
from math import ceil

import trio

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.asked_answers import ONE_ANSWER, PROMPTS, AskedAnswers, asked_answers, may_ask
from ranvier_py.core.access.limits.background import in_background
from ranvier_py.core.access.limits.estimates import Estimates, Took, price_of_stored, took_of, usual_need
from ranvier_py.core.access.limits.limiter import NOTHING, Grant, HomeQuestion, Limiter, Refusal
from ranvier_py.core.access.limits.meter_groups import IdentityMeters, MeterGroup, Meters
from ranvier_py.core.access.limits.meters import INDEX, Amounts, LimitSpan, Measure, amounts_of
from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.errors import BudgetSpent, Forbidden, LargerThanLimit, LimitReached
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.request_paths import COUNTING_PATHS, MESSAGES_PATH, PATHS, RESPONSES_PATH
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
    """See the module. `dearest`: what a token costs where the model is not known; it may be replaced."""

    def __init__(self, limiter: Limiter, dearest: ModelCost) -> None:
        self.limiter, self.meters, self.estimates, self.dearest = limiter, Meters(), Estimates(), dearest

    def known(self, seen: SeenHead, request: HttpRequest) -> None:
        """Find what counts the requests of a head, and how their answers show what is left."""
        seen.limits = seen.limit_lines = None
        meters = self.meters.of(seen.identity) if seen.identity is not None else None
        if meters is None or meters.is_unlimited:
            return
        creates = request.path == RESPONSES_PATH and request.method == b"POST"
        may_be_uncounted = meters.needs_counts and (creates or has_no_counts(request))
        lengths, api = self.estimates.tenant(meters.tenant), APIS.get(request.path, "")
        tokens = meters.tokens if api and api not in PROMPTS and request.fields.readable else None
        seen.limits = HeadLimits(meters, tokens, lengths, api, may_be_uncounted)
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
        if seen is None or (limits := seen.limits) is None or call.client.started:
            return None
        if limits.may_be_uncounted:
            return self._begin_counted(call, limits)
        first, now = limits.meters.first, time.monotonic()
        grant = self.limiter.begin(first, now)
        if grant is None:
            return self._hold(call, limits, self.limiter.reserve(first, NOTHING, now))
        call.reservation = Reservation(self, limits, grant)  # nearly always
        return None

    def _begin_counted(self, call: Call, limits: HeadLimits) -> Steps[None]:
        """Count a request if somebody counts its tokens. Raises Forbidden if not."""
        if has_no_counts(call.request) or (yield from in_portions(in_background(call.request.body))):
            raise Forbidden(UNCOUNTED)
        yield from self._hold(call, limits, self.limiter.reserve(limits.meters.first, NOTHING, time.monotonic())) or ()

    def __call__(self, call: Call) -> Steps[None] | None:
        """Reserve tokens. Raises LimitReached, LargerThanLimit."""
        held = call.reservation
        if held is None:
            return None
        limits, read = held.limits, call.read
        prompt, body, group = read.prompt, read.request.body, limits.tokens
        if group is not None and not may_ask(body):  # nearly always
            need, now = usual_need(prompt, body, limits.lengths), time.monotonic()
            if need is not None and self.limiter.grow(held.grant, group, need, now, limits.lengths.answers.excess):
                return None
        return self._reserve(call, held, meters_of(call, limits.meters))

    def again(self, call: Call) -> Steps[None] | None:
        """Reserve tokens where another model is asked instead, in what counts that one alone."""
        held = call.reservation
        if held is None:
            return None
        if held.estimate is not None and held.estimate.cost is not None:
            held.estimate = held.estimate._replace(cost=self._cost(call))
        taken = [meter for grant in held.grants for meter in grant.group.meters]
        group = meters_of(call, held.limits.meters)
        return self._reserve(call, held, MeterGroup([each for each in group.meters if each not in taken]))

    def _reserve(self, call: Call, held: Reservation, group: MeterGroup) -> Steps[None] | None:
        """Reserve tokens in limits of any kind, of a body that may ask for anything."""
        if not group.meters:
            return None
        request, api = call.read.request, held.limits.api
        if api and request.fields.readable and (api in PROMPTS or may_ask(request.body)):
            return self._reserve_asked(call, held, group)
        return self._reserve_for(call, held, group, ONE_ANSWER if api else None)

    def _reserve_asked(self, call: Call, held: Reservation, group: MeterGroup) -> Steps[None]:
        asked = yield from in_portions(asked_answers(call.read.request.body, held.limits.api))
        yield from self._reserve_for(call, held, group, asked) or ()

    def _reserve_for(
        self, call: Call, held: Reservation, group: MeterGroup, asked: AskedAnswers | None
    ) -> Steps[None] | None:
        if call.request.path in COUNTING_PATHS:
            found = self.limiter.reserve(group, NOTHING, time.monotonic(), held=held.grant)
            return None if found is held.grant else self._hold(call, held.limits, found)
        read, limits, holders = call.read, held.limits, call.match.holders
        cached = holders[0].tokens if holders else 0
        cost = self._cost(call) if limits.meters.counts_cost else None
        is_text = call.request.fields.readable and not call.request.fields.multipart
        body = read.request.body
        estimate = self.estimates.of(read.prompt, body, limits.lengths, cached, cost, asked, is_text=is_text)
        held.estimate, grant = estimate, held.grant
        found = self.limiter.reserve(group, estimate.need, time.monotonic(), estimate.sure, estimate.excess, held=grant)
        return None if found is grant else self._hold(call, limits, found)

    def reserve_stored(self, call: Call, held: Reservation, model: str, ends: AnswerEnds) -> Steps[None] | None:
        """Reserve what an answer takes that no engine computes for this request: what it costs, and a request of the
        limits of its model. Raises LimitReached."""
        group = held.limits.meters.of(model)
        price = self.price_stored(call, held, ends)
        if not price and group is held.limits.meters.rest:
            return None
        held.stored = NOTHING._replace(cost=price)
        found = self.limiter.reserve(group, held.stored, time.monotonic(), held=held.grant)
        return None if found is held.grant else self._hold(call, held.limits, found)

    def price_stored(self, call: Call, held: Reservation, ends: AnswerEnds) -> float:
        """Return what an answer costs that no engine computes for this request, as far as it is here."""
        cost = cost_of_named(call) or ONE
        if not (cost.cached_answers and held.limits.meters.counts_cost):
            return 0.0
        return price_of_stored(cost, ends, held.limits.api, call.request.body, held.limits.lengths)

    def _cost(self, call: Call) -> ModelCost:
        """Return what a token costs of the model that is asked; of the dearest, if the client has named none."""
        if call.named is not None or is_listed(call.read.prompt.model, call):
            return cost_of_named(call) or ONE
        return self.dearest

    def settle(self, call: Call, held: Reservation) -> None:
        """Settle what a request has reserved."""
        attempt = call.attempt
        if attempt is None or attempt.reply.status >= 300:
            took = held.stored
        else:
            prompt, _, answer, _ = attempt.reply.counts
            if prompt is None or answer is None or held.estimate is not None or held.ends is not None:
                took = self._took(call, held, attempt)
            else:  # nearly always
                if answer:
                    held.limits.lengths.answers.add(answer)
                tokens = prompt + answer
                took = amounts_of((tokens, tokens, 0.0, 1.0, 1.0))
        if held.more:
            self.limiter.settle_all(took, *held.grants)
        else:
            self.limiter.settle(took, held.grant)

    def _took(self, call: Call, held: Reservation, attempt: Attempt) -> Amounts:
        """Return what a request took; nothing if no tokens count, or no engine computed any. The ends of an answer that
        the engine has not counted count."""
        limits, read, model = held.limits, call.read, attempt.prompt.model
        estimate = held.estimate
        if estimate is None:
            if limits.tokens is None:
                return NOTHING
            estimate = self.estimates.of(read.prompt, read.request.body, limits.lengths, 0, None, ONE_ANSWER)
        prompt, cached, answer, _ = attempt.reply.counts
        if prompt is not None and answer is not None and estimate.cost is None and held.ends is None:
            return self.estimates.counted(estimate, prompt, cached or 0, answer, model)
        found = took_of(held.ends or AnswerEnds(held.captured), limits.api)
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
            call.reservation = Reservation(self, limits, found)
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
        return LargerThanLimit(refusal.sentence)
    wait_s = max(refusal.retry_after_s, 0.001)
    fields = [(b"retry-after", b"%d" % ceil(wait_s)), (b"retry-after-ms", b"%d" % ceil(1000 * wait_s))]
    if refusal.meter.span > LimitSpan.MINUTE:
        return BudgetSpent(refusal.sentence, [*fields, (b"x-should-retry", b"false")])
    return LimitReached(refusal.sentence, fields)


def cost_of_named(call: Call) -> ModelCost | None:
    return call.named.served.first("cost") if call.named is not None else None


def meters_of(call: Call, meters: IdentityMeters) -> MeterGroup:
    """Return what counts a request. If it names no model that an engine lists, that is any of those which the engines
    list that it may go to: SGLang calls its own `default`, and all serve a request that names none."""
    model = call.read.prompt.model
    if not meters.has_model_limits or is_listed(model, call):
        return meters.of(model)
    base, lists = model.partition(":")[0], [each.catalog.models or () for each in call.match.pool.backends]
    return meters.of(model, *([base] if is_listed(base, call) else sorted({*chain(*lists)})))


def is_listed(model: str, call: Call) -> bool:
    return any(model in (each.catalog.models or ()) for each in call.match.pool.backends)


def has_no_counts(request: HttpRequest) -> bool:
    """Whether nobody can count the tokens of a request, by its head: those of batches, files, other jobs of an engine
    and WebSockets come later, or elsewhere."""
    if request.fields.upgrades:
        return True
    return request.path not in PATHS and request.method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE")
