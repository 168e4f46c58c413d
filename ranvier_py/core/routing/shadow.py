"""Policies in the shadow: how other policies would place this traffic, without any effect on it.

Each shadow is a whole router of its own, with its own routes, speculation, and requests in flight at each backend. It
places every request that is sent in the world that its own earlier choices have made. It can't know how long a request
would have taken at another backend: the first token and the end come when those of the real request come.

The difference is counted twice: in prompt tokens that would have been cached (or not), and in seconds to the first
token, by service rates learned from the real answers. So the figures rank policies; the replay of a recording
(`ranvier replay`) shows what the policies would really have achieved.

Bounds: a route table of the given capacity for each shadow; its attempts are those of the node.
Cost: about one more placement for each request and shadow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.backends import Outcome, Pool, Registry
from ranvier_py.core.routing.placement import Policy
from ranvier_py.core.routing.rates.service_rate import ServiceRates, ahead_of
from ranvier_py.core.routing.rates.work import InFlight, Unseen, Work
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.router import Router

FINISHED_MAX = 1024  # attempts whose answers may still be read: the tokenizer worker is seconds behind at most
FINISHED_BYTES_MAX = 64 << 20  # of their requests' bodies, which an attempt keeps alive
POOLS_MAX = 64  # mirrored pools that are kept; one more, and all are forgotten


class Mirrored(Work):
    """A real backend with the load that a shadow has put on it. That of peers and others is the same in every world."""

    def __init__(self, real: Backend) -> None:
        super().__init__()
        self.real = real
        self.set_peers(real.peers, real.progress_at)
        real.mirrors.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def load(self) -> int:
        return self.inflight + self.peers.requests + self.real.foreign


class MirroredRegistry:
    """Answers what a Router asks of a Registry: as the real one does, but with the shadow's own loads."""

    def __init__(self, real: Registry) -> None:
        self._real = real
        self._backends: dict[BackendId, Mirrored] = {}
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # real, mirrored
        self.unseen = Unseen()

    def __getitem__(self, id: BackendId) -> Mirrored:  # noqa: A002
        return self.mirrored(self._real[id])

    def mirrored(self, real: Backend) -> Mirrored:
        known = self._backends.get(real.id)
        if known is None or known.real is not real:  # an id is used again once its backend is gone
            known = self._backends[real.id] = Mirrored(real)
        return known

    def pool(
        self, model: str, now: float, exclude: Collection[BackendId] = (), avoid: Sequence[BackendId] = ()
    ) -> Pool:
        self.unseen.settle(now)
        real = self._real.pool(model, now, exclude, avoid)
        known = self._pools.get(id(real))
        if known is None or known[0] is not real:
            if len(self._pools) >= POOLS_MAX:
                self._pools.clear()
            backends = cast("Sequence[Backend]", [self.mirrored(backend) for backend in real.backends])
            pool = Pool(backends, len(real.generations), last_resort=real.last_resort, unknown=real.unknown)
            known = self._pools[id(real)] = real, pool
        return known[1]

    def dispatched(
        self,
        id: BackendId,  # noqa: A002
        now: float,
        request: InFlight,
        expected_at: float = 0.0,
    ) -> Mirrored:
        backend = self[id]
        backend.begin(request, now)
        if not request.seen:
            self.unseen.add(backend, request, expected_at)
        return backend


@dataclass(slots=True)
class ShadowCounters:
    """Counted since the start. A saving below 0 is a cost."""

    placed: int = counter("Requests placed in the shadow.")
    elsewhere: int = counter("Of these, at another backend.")
    saved_tokens: int = gauge("Prompt tokens that it would have saved.")
    saved_seconds: float = gauge("Seconds to first tokens that it would have saved, by learned service rates.")


class Shadow:
    """One policy's world, and how it compares to the real one. `router` is its own, over a MirroredRegistry."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.attempts: dict[Attempt, Attempt] = {}  # the real one -> its shadow
        self.counters = ShadowCounters()

    def attempt_sent(
        self, attempt: Attempt, judge: ServiceRates, real_s: float, now: float, tried: Collection[BackendId] = ()
    ) -> None:
        """Place a sent attempt in this world. `real_s`: the predicted seconds to its first token in the real one.
        `tried`: the backends that failed it there, and would have failed it here.
        """
        router = self.router
        if attempt.prompt.kept:  # no policy chooses the engine that keeps a response
            return
        try:
            found = router.find(attempt.prompt, now, tried)
        except RanvierError:  # no backend may serve the prompt any more, now that the real attempt was sent
            return
        decision = router.place(attempt.prompt, found)
        computed_tokens = max(0, decision.prompt_tokens - decision.matched_tokens)
        ahead = ahead_of(router.registry[decision.backend], now)
        work_tokens = judge.work_of(decision.matched_tokens, decision.prompt_tokens)
        queue_s, prefill_s = judge[decision.backend].predict(work_tokens, ahead)
        self.attempts[attempt] = router.start_attempt(attempt.prompt, decision, now, found=found)
        self.counters.placed += 1
        self.counters.elsewhere += decision.backend != attempt.backend
        self.counters.saved_tokens += attempt.computed_tokens - computed_tokens
        self.counters.saved_seconds += real_s - (queue_s + prefill_s)  # in the same order: equals give 0

    def started(self, attempt: Attempt, now: float) -> None:
        own = self.attempts.get(attempt)
        if own is not None and not own.target.removed:  # its id may be another's by now: only real requests keep an id
            self.router.first_token(own, now)

    def answered(self, attempt: Attempt, end: Boundary, now: float) -> None:
        own = self.attempts.get(attempt)
        if own is not None:
            self.router.answered(own, end, NOTHING, now)

    def finished(self, attempt: Attempt, now: float) -> None:
        """End the shadow's attempt. Health is not touched: the real registry judges it."""
        own = self.attempts.get(attempt)
        if own is not None:
            self.router.settle(own)
            own.target.end(own.work, now)


class Shadows(Observer):
    """Has every shadow place each attempt.

    An answer may be read after its attempt has finished, or not at all: the latest finished attempts are kept, at most
    `FINISHED_MAX` of them, with at most `FINISHED_BYTES_MAX` of bodies.
    """

    def __init__(self, shadows: Sequence[Shadow], registry: Registry) -> None:
        self.shadows = tuple(shadows)
        self.judge = ServiceRates()
        self._registry = registry
        self._finished: OrderedDict[Attempt, None] = OrderedDict()
        self._finished_bytes = 0

    def close(self) -> None:
        """End these shadows: backends need not follow the peers' load for them any more."""
        for backend in self._registry:
            backend.mirrors.clear()

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        ahead = ahead_of(self._registry[attempt.backend], now)  # counts the attempt itself, which is taken out
        if attempt.work.decoding:
            ahead = ahead._replace(decoding=ahead.decoding - 1)
        else:
            ahead = ahead._replace(tokens=ahead.tokens - attempt.work.tokens, waiting=ahead.waiting - 1)
        work_tokens = self.judge.work_of(attempt.decision.matched_tokens, attempt.decision.prompt_tokens)
        queue_s, prefill_s = self.judge[attempt.backend].predict(work_tokens, ahead)
        tried = self._tried(attempt, now)
        for shadow in self.shadows:
            shadow.attempt_sent(attempt, self.judge, queue_s + prefill_s, now, tried)

    def forget(self, backend: BackendId) -> None:
        """Forget what was learned of the backend that had this id before."""
        self.judge.forget(backend)
        for shadow in self.shadows:
            shadow.router.policy.forget(backend)

    def _tried(self, attempt: Attempt, now: float) -> Collection[BackendId]:
        """Return the backends that may be asked now but were no candidates of this attempt: it tried them before."""
        able, asked = self._registry.pool(attempt.prompt.model, now).ids, attempt.decision.candidates
        return () if able is asked or able == asked else [backend for backend in able if backend not in asked]

    def started(self, attempt: Attempt, now: float) -> None:
        if attempt.service is not None:
            self.judge.served(attempt.service)
        for shadow in self.shadows:
            shadow.started(attempt, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        if (correction := attempt.correction(answer)) is not None:
            self.judge.corrected(*correction)
        for shadow in self.shadows:
            shadow.answered(attempt, end, now)

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        for shadow in self.shadows:
            shadow.finished(attempt, now)
        self._finished[attempt] = None
        self._finished_bytes += len(attempt.prompt.body)
        while len(self._finished) > FINISHED_MAX or self._finished_bytes > FINISHED_BYTES_MAX:
            oldest, _ = self._finished.popitem(last=False)
            self._finished_bytes -= len(oldest.prompt.body)
            for shadow in self.shadows:
                shadow.attempts.pop(oldest, None)


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
        texts_match=real.texts_match,
        recent_max=0,
    )
    router.checkpoints = real.checkpoints
    router.lengths = real.lengths
    return Shadow(router)
