"""Holds requests to the limits of their key and tenant: reserved before an engine computes, settled when the call ends.

A request counts by its head before the response cache, so that hits and followers are requests, too; its tokens count
once it is known where it goes. One reservation for all tries. It is settled by the engine's counts, else by what of the
answer came; where no answer came, a client that left pays for its prompt, and nobody for what an engine refused.
Invariant: every reservation ends with its call (test_limits_of_requests.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from math import ceil

import trio

from ranvier_py.core.access.identity import Identity
from ranvier_py.core.access.limit_values import ModelCost
from ranvier_py.core.access.limits.background import in_background
from ranvier_py.core.access.limits.estimates import Estimates, Took, took_of
from ranvier_py.core.access.limits.limiter import ASK_S, Grant, HomeQuestion, Limiter, Refusal
from ranvier_py.core.access.limits.meters import SHOWN, Amounts, IdentityMeters, LimitSpan, Measure, Meter, Meters
from ranvier_py.core.errors import BudgetSpent, Forbidden, LargerThanLimit, LimitReached
from ranvier_py.core.routing.request_paths import MESSAGES_PATH, PATHS, RESPONSES_PATH
from ranvier_py.proxy.call import Call, Reservation
from ranvier_py.proxy.client import Client
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import Fields, HttpRequest

NOTHING = Amounts()
NO_COUNTS = Took(None, 0, 0, 0, 0)
GENERATES = frozenset(path for path, rule in PATHS.items() if rule.reader)
ONE = ModelCost()
WINDOW_S = 60  # a minute slides, so what counts now is free a minute from now
UNCOUNTED = "this key has limits of tokens, and nobody counts the tokens of this request"
PARTS = ("limit", "remaining", "reset")
OPENAIS = {one: tuple(f"x-ratelimit-{part}-{one.value}".encode() for part in PARTS) for one in SHOWN}
ANTHROPICS = {one: tuple(f"anthropic-ratelimit-{one.value}-{part}".encode() for part in PARTS) for one in SHOWN}
"""The names of fields that show what is left of a minute."""


class ReserveStage:
    """See the module."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter, self.meters, self.estimates = limiter, Meters(), Estimates()

    def show(self, identity: Identity, client: Client) -> None:
        """Have the answer to the current request show what is left of its limits, if it has some."""
        meters = self.meters.of(identity)
        if meters.shown:
            client.limit_fields = partial(self._fields, meters, client)

    def check(self, identity: Identity) -> None:
        """Raise LimitReached if no request of this identity fits just now, whatever its body."""
        meters = self.meters.of(identity)
        refusal = self.limiter.full((*meters.first, *meters.rest), time.monotonic())
        if refusal is not None:
            raise error_of(refusal)

    def begin(self, call: Call) -> Steps[None] | None:
        """Count a request by its head. Raises LimitReached, Forbidden."""
        if call.identity is None or call.client.started:
            return None
        meters = self.meters.of(call.identity)
        if meters.is_unlimited:
            return None
        if meters.counts_tokens and not meters.uncounted:
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
        call.reservation = Reservation(meters, self.end)
        return self._reserve(call.reservation, meters.first, NOTHING, NOTHING)

    def __call__(self, call: Call) -> Steps[None] | None:
        """Reserve tokens; where another model is asked instead, of what counts that one alone. Raises LimitReached,
        LargerThanLimit."""
        held = call.reservation
        if held is None:
            return None
        prompt, request = call.read.prompt, call.read.request
        meters = held.meters.of(prompt.model)
        if held.meters.counts_cost:
            held.cost = (call.named.served.first("cost") if call.named is not None else None) or ONE
        if held.taken:
            meters = tuple(each for each in meters if each not in held.taken)
        if not meters:
            return None
        held.taken = (*held.taken, *meters) if held.taken else meters
        cached = float(call.match.holders[0].tokens) if call.match.holders else 0.0
        held.estimate = self.estimates.of(
            prompt, request.body, held.tenant, cached, held.cost, answers=request.path in GENERATES
        )
        return self._reserve(held, meters, held.estimate.need, held.estimate.least)

    def end(self, call: Call) -> None:
        """Settle what a request has reserved."""
        held, took = call.reservation, NOTHING
        assert held is not None
        if held.estimate is not None and (found := self._found(call, held)) is not None:
            took = self.estimates.took(held.estimate, found, held.tenant, call.read.prompt.model, held.cost)
        for grant in held.grants:
            self.limiter.settle(grant, took)

    def _found(self, call: Call, held: Reservation) -> Took | None:
        """Return what the request took; None if no engine computed anything."""
        attempt = call.attempt
        if attempt is None or attempt.reply.status >= 300:
            return None
        if held.ends is not None and held.ends.size:
            rule = PATHS.get(call.request.path)  # a body that was not read has no API
            return took_of(held.ends, rule.reader if rule is not None else "")
        return NO_COUNTS if call.outcome in ("cancelled", "client_gone") else None

    # --- asking -----------------------------------------------------------------------------------------------------

    def _reserve(self, held: Reservation, meters: Sequence[Meter], need: Amounts, least: Amounts) -> Steps[None] | None:
        found = self.limiter.reserve(meters, need, time.monotonic(), least=least)
        if isinstance(found, HomeQuestion):
            return self._asked(held, found)
        self._take(held, found)
        return None

    def _asked(self, held: Reservation, question: HomeQuestion) -> Steps[None]:
        try:
            if question.outcome is None:
                yield partial(self._decided, question)
        finally:
            if question.outcome is None:
                self.limiter.abandon(question, time.monotonic())
        assert question.outcome is not None
        self._take(held, question.outcome)

    async def _decided(self, question: HomeQuestion) -> None:
        """Wait for the answer of a limit's home, which has ASK_S, and twice that if gossip is late."""
        event = trio.Event()
        question.decided = event.set
        with trio.move_on_after(2 * ASK_S):
            await event.wait()
        if question.outcome is None:
            self.limiter.unanswered(question, time.monotonic())

    def _take(self, held: Reservation, outcome: Grant | Refusal) -> None:
        """Hold what was granted. Raises LimitReached, LargerThanLimit; then nothing counts what was granted before."""
        if isinstance(outcome, Refusal):
            for grant in held.grants:
                self.limiter.release(grant)
            raise error_of(outcome)
        held.grants.append(outcome)

    # --- what clients see -------------------------------------------------------------------------------------------

    def _fields(self, meters: IdentityMeters, client: Client) -> Fields:
        """Return the fields of an answer: of several limits of a kind the one of which least is left."""
        now, limiter = time.monotonic(), self.limiter
        found: dict[Measure, tuple[float, Meter]] = {}
        for meter in meters.shown:
            left = limiter.left(meter, now)
            before = found.get(meter.measure)
            if before is None or left < before[0]:
                found[meter.measure] = left, meter
        of_anthropic = client.request.fields.is_anthropic or client.request.path.startswith(MESSAGES_PATH)
        fields = list[tuple[bytes, bytes]]()
        for left, meter in found.values():
            fields += fields_of(meter, max(0, int(left)), of_anthropic=of_anthropic)
        return fields


def fields_of(meter: Meter, left: int, *, of_anthropic: bool) -> Fields:
    limit, remaining, reset = (ANTHROPICS if of_anthropic else OPENAIS)[meter.measure]
    if of_anthropic:
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + WINDOW_S)).encode()
    else:
        until = b"%ds" % WINDOW_S if left < meter.amount else b"0s"
    return (limit, b"%d" % meter.amount), (remaining, b"%d" % left), (reset, until)


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
    return request.method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE") and request.path not in PATHS
