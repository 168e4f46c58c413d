"""Policies in the shadow: how other policies would place this traffic, without any effect on it.

Rule: each shadow is a whole router of its own, which places every request in the world that its own earlier choices
have made (`world`). There each engine serves what it got, in order, at the rates that real answers have shown. What is
cached is counted in the same way in every world, the real one too: by what its chosen engine, with a cache of its real
size, would hold when it admits the request. Invariant: nothing of it reaches real traffic, and shares are those of a
replay (test_shadow.py, test_shadow_and_replay.py). Bounds: those of `world` and a route table for each shadow; attempts
are those of the node, and some that have finished (`shadows`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from random import Random
from typing import cast

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backends import Outcome, Registry
from ranvier_py.core.routing.placement import Policy
from ranvier_py.core.routing.placement.ttft import Ttft
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.router import Router
from ranvier_py.core.shadows.mirrors import MirroredRegistry
from ranvier_py.core.shadows.supposed_engine import Supposed
from ranvier_py.core.shadows.world import Known, World

PLACES_MAX = 8  # of one request in the heap of what is due, on average

SAME_S = 1e-6
"""Times and clocks that differ by less are the same: they are sums of the same numbers in another order."""


@dataclass(slots=True)
class ShadowCounters:
    """Counted since the start. A saving below 0 is a cost."""

    placed: int = counter("Requests that a shadow policy placed, too.")
    elsewhere: int = counter("Requests that a shadow policy placed at another backend than the real one.")
    prompt_tokens: int = counter("Prompt tokens of requests that a shadow policy placed, exact or estimated.")
    predicted_tokens: int = counter("Prompt tokens that a shadow policy would have found cached.")
    saved_tokens: int = gauge("Prompt tokens that a shadow policy would have saved.")
    saved_seconds: float = gauge(
        "Seconds to first tokens that a shadow policy would have saved, by learned service rates."
    )
    cut: int = counter("Requests that were ended in the shadow because too many were behind the real ones.")


@dataclass(slots=True, eq=False)
class Twin:
    """A real attempt in the shadow. `real`, `own`: the request in both worlds; `attempt`: the shadow's own."""

    real: Supposed
    own: Supposed
    attempt: Attempt
    end: Boundary | None = None  # of the real answer, once it was read
    answer: Answer = NOTHING
    counted: bool = False


class Shadow:
    """One policy's world, and how it compares to the real one. `router` is its own, over a MirroredRegistry."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.twins: dict[Attempt, Twin] = {}  # by the real attempt
        self.counters = ShadowCounters()
        self.calibration = Calibration(
            router.routes, block_tokens=router.hasher.block_tokens, checkpoints=router.checkpoints
        )
        router.observers = (self.calibration,)
        self._world = World(router, Ttft())
        self._due: list[tuple[float, int, Twin]] = []  # heap of when something may happen to a request
        self._added = 0
        self._waiting: dict[Supposed, Twin] = {}  # for room in the cache of an engine

    def join(self, judge: Ttft) -> None:
        """Take engines for as fast as this judge knows them to be."""
        self._world = World(self.router, judge)

    def sent(self, attempt: Attempt, real: Supposed, tried: Collection[BackendId], now: float) -> None:
        """Place a sent attempt in this world. `tried`: the backends that failed it in the real one, and would have
        failed it here."""
        router, prompt = self.router, attempt.prompt
        try:
            found = router.find(prompt, now, tried)
        except RanvierError:  # no backend may serve the prompt any more, now that the real attempt was sent
            return
        decision = router.place(prompt, found)
        own = router.start_attempt(prompt, decision, now, found=found)
        supposed = self._world.sent(prompt, own.target, decision.prompt_tokens, real.answer_tokens, now)
        twin = self.twins[attempt] = Twin(real, supposed, own)
        self.counters.placed += 1
        self.counters.elsewhere += decision.backend != attempt.target.id
        if supposed.admitted:
            self._admitted(twin, now)
        else:
            self._waiting[supposed] = twin

    def started(self, attempt: Attempt, now: float) -> None:
        """Take in that the real attempt has its first token."""
        twin = self.twins.get(attempt)
        if twin is not None:
            self._count(twin)
            self._expect(twin, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        twin = self.twins.get(attempt)
        if twin is None:
            return
        twin.end, twin.answer = end, answer
        if twin.own.ended and twin.attempt.first_at is not None:
            self._world.continued(twin.own, end)
            self._learn(twin, now)

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Take in the end of the real attempt."""
        twin = self.twins.get(attempt)
        if twin is None:
            return
        self._count(twin)
        if twin.own.ended:
            return
        if outcome is not Outcome.SUCCESS:
            self._fail(twin, outcome, now)
            return
        self._expect(twin, now)
        if twin.own.first_at is not None:
            self._push(twin, now)

    def advance(self, now: float) -> None:
        """Let happen what is due in this world."""
        due = self._due
        while due and due[0][0] <= now + SAME_S:
            at, _, twin = heappop(due)
            if twin.own.ended:
                continue
            if twin.own.first_at is None:
                self._first(twin, at)
            else:
                self._end_if_due(twin, min(at, now), now)

    def drop(self, attempt: Attempt, now: float) -> None:
        """Forget a real attempt that has finished."""
        twin = self.twins.pop(attempt, None)
        if twin is not None and not twin.own.ended:
            self.counters.cut += 1
            self._fail(twin, Outcome.CANCELLED, now)

    def tick(self, backends: Mapping[BackendId, Known], now: float) -> None:
        """Take in what these backends have shown of their caches, once a second or so."""
        self._world.limit(backends)
        for backend, known in backends.items():
            self.calibration.report(backend, known.url, known.generation, known.reported)
        self.calibration.tick(now)

    def forget(self, backend: BackendId) -> None:
        self._world.forget(backend)
        self.calibration.forget(backend)
        self.router.policy.forget(backend)

    def expect(self, seconds_per_token: float, error_s: float) -> None:
        """Expect a token of an answer to take so long, and answers to differ by so much from what is expected."""
        self._world.seconds_per_token, self._world.error_s = seconds_per_token, error_s

    def _admitted(self, twin: Twin, now: float) -> None:
        """Look when the first token of an admitted request comes."""
        own, real = twin.own, twin.real
        self._count(twin)
        if not own.prompt.stream or own.ready_at < real.ready_at:
            self._push(twin, own.ready_at)
        self._expect(twin, now)

    def _expect(self, twin: Twin, now: float) -> None:
        """Once the real first token has come, ours comes as much later or earlier as it would by the schedules."""
        own, real = twin.own, twin.real
        if own.first_at is not None or real.first_at is None or not own.admitted:
            return
        if real.first_at == real.ready_at:
            self._push(twin, own.ready_at)
        else:
            at = real.first_at + (own.ready_at - real.ready_at)
            self._push(twin, at if at > now - SAME_S or not own.prompt.stream else now)

    def _count(self, twin: Twin) -> None:
        own, real, counters = twin.own, twin.real, self.counters
        if twin.counted or not (own.admitted and real.admitted):
            return
        twin.counted = True
        counters.prompt_tokens += own.prompt_tokens
        counters.predicted_tokens += own.held
        counters.saved_tokens += own.held - real.held
        counters.saved_seconds += real.ready_at - own.ready_at

    def _first(self, twin: Twin, at: float) -> None:
        own = twin.own
        own.begin(at)
        if own.prompt.stream and not twin.attempt.target.removed:  # its id may be another's by now
            self.router.first_token(twin.attempt, at)
        self._push(twin, self._over_at(twin))

    def _over_at(self, twin: Twin) -> float:
        """Return when the answer will be over, if nothing more is sent there: it is as long as the real one, or as is
        expected."""
        own, decode_s = twin.own, twin.real.decode_s
        return own.engine.time_at(own.began + (self._expected_s(own) if decode_s is None else decode_s))

    def _expected_s(self, own: Supposed) -> float:
        """Return for how long an answer is expected to decode."""
        return own.answer_tokens * self._world.seconds_per_token

    def _end_if_due(self, twin: Twin, at: float, now: float) -> None:
        """End a request if its answer is over: as long as the real one is not, only if it is ahead of that."""
        own, real = twin.own, twin.real
        due_at = self._over_at(twin)
        if due_at > now + SAME_S:
            self._push(twin, due_at)
            return
        if real.decode_s is None and own.progress(at) - real.progress(at) < self._world.error_s + SAME_S:
            return  # too little ahead: answers vary by as much, and it is looked at again when the real one ends
        self._end(twin, min(max(due_at, at), now))

    def _end(self, twin: Twin, at: float) -> None:
        own, attempt = twin.own, twin.attempt
        self._world.end(own, twin.end)
        if not own.prompt.stream and not attempt.target.removed:
            self.router.first_token(attempt, at)
        self._learn(twin, at)
        self._finish(twin, Outcome.SUCCESS, at)

    def _fail(self, twin: Twin, outcome: Outcome, now: float) -> None:
        self._waiting.pop(twin.own, None)
        self._world.fail(twin.own)
        self._finish(twin, outcome, now)

    def _finish(self, twin: Twin, outcome: Outcome, at: float) -> None:
        attempt = twin.attempt
        if attempt.target.removed:
            self.router.settle(attempt)
            attempt.target.work.end(attempt.work, at)
        else:
            self.router.finish_attempt(attempt, outcome, at)
        for admitted in self._world.admit(twin.own.engine, at):
            self._admitted(self._waiting.pop(admitted), at)

    def _learn(self, twin: Twin, at: float) -> None:
        """Learn what an engine would have counted, as far as the real one counts."""
        if twin.end is None or twin.attempt.target.removed:
            return
        answer = twin.answer
        if answer.cached_tokens is not None:
            answer = replace(answer, cached_tokens=twin.own.held)
        self.router.answered(twin.attempt, twin.end, answer, at)

    def _push(self, twin: Twin, at: float) -> None:
        self._added += 1
        heappush(self._due, (at, self._added, twin))
        if len(self._due) > PLACES_MAX * len(self.twins) + PLACES_MAX:  # most are of requests that were cut
            self._due = [place for place in self._due if not place[2].own.ended]
            heapify(self._due)


def make_shadow(real: Router, policy: Policy, routes: RouteTable, rng: Random) -> Shadow:
    """Make a shadow of `real` with another policy. It shares the real router's prompts, which do not depend on policy,
    and its checkpoints of hybrid models' backends, since a shadow has no answers of its own to learn from.
    """
    router = Router(
        reader=real.reader,
        hasher=real.hasher,
        routes=routes,
        registry=cast("Registry", MirroredRegistry(real.registry)),  # all that this Router asks of one
        policy=policy,
        rng=rng,
        texts_match=real.holders.texts_match,
        recent_max=0,
    )
    router.checkpoints = real.checkpoints
    return Shadow(router)
