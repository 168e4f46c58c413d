"""Policies in the shadow: how other policies would place this traffic, without any effect on it.

Each shadow is a whole router of its own, with its own routes, speculation, and requests in flight at each backend. It
places every request that is sent in the world that its own earlier choices have made. It can't know how long a request
would have taken at another backend: the first token and the end come when those of the real request come.

The difference is counted twice: in prompt tokens that would have been cached (or not), and in seconds to the first
token, by service rates learned from the real answers. So the figures rank policies; the replay of a recording
(`ranvier replay`) shows what the policies would really have achieved.

What is cached is counted in the same way in every world, the real one too, whatever a policy looks up or believes: by
what its chosen backend would hold there (`supposed_caches`). For that the real policy's choices have routes of their
own, since the router's also have what peers, events and answers tell, which no shadow can know.

Bounds: a route table of the given capacity for each shadow and for the real choices; attempts are those of the node.
Cost: about one more placement and look-up for each request and shadow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, cast

from ranvier_py.core.answers.answer_stream import NOTHING, Answer
from ranvier_py.core.errors import RanvierError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, gauge
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.backends import Outcome, Pool, Registry
from ranvier_py.core.routing.placement import Policy, Service
from ranvier_py.core.routing.rates.service_rate import Ahead, ServiceRates, ahead_of
from ranvier_py.core.routing.rates.work import InFlight, Unseen, Work
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.router import Router
from ranvier_py.core.routing.supposed_caches import Estimated, SupposedCaches

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
    prompt_tokens: int = counter("Prompt tokens of these, exact or estimated.")
    predicted_tokens: int = counter("Prompt tokens that it would have found cached.")
    saved_tokens: int = gauge("Prompt tokens that it would have saved.")
    saved_seconds: float = gauge("Seconds to first tokens that it would have saved, by learned service rates.")


class Expected(NamedTuple):
    """What is expected of a request at the backend that one world's policy chose."""

    computed_tokens: int  # of its prompt
    seconds: float  # until its first token


def expected_of(judge: ServiceRates, backend: Backend, held: int, prompt_tokens: int, ahead: Ahead) -> Expected:
    """Return what to expect of a request behind `ahead`, where the backend has `held` tokens of it."""
    queue_s, prefill_s = judge[backend.id].predict(judge.work_of(held, prompt_tokens), ahead)
    return Expected(max(0, prompt_tokens - held), queue_s + prefill_s)


class Shadow:
    """One policy's world, and how it compares to the real one. `router` is its own, over a MirroredRegistry."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.caches = SupposedCaches(router, router.routes)
        self.attempts: dict[Attempt, Attempt] = {}  # the real one -> its shadow
        self.counters = ShadowCounters()

    def attempt_sent(
        self, attempt: Attempt, judge: ServiceRates, real: Expected, now: float, tried: Collection[BackendId] = ()
    ) -> None:
        """Place a sent attempt in this world. `real`: what is expected of it in the real one. `tried`: the backends
        that failed it there, and would have failed it here.
        """
        router = self.router
        try:
            found = router.find(attempt.prompt, now, tried)
        except RanvierError:  # no backend may serve the prompt any more, now that the real attempt was sent
            return
        decision = router.place(attempt.prompt, found)
        backend = router.registry[decision.backend]
        held = self.caches.sent(attempt, backend, now)
        if not router.policy.depths_wanted:  # it has no belief of its own, by which it counts its work
            decision = decision._replace(matched_tokens=held)
        expected = expected_of(judge, backend, held, decision.prompt_tokens, ahead_of(backend, now))
        self.attempts[attempt] = router.start_attempt(attempt.prompt, decision, now, found=found)
        self.counters.placed += 1
        self.counters.elsewhere += decision.backend != attempt.backend
        self.counters.prompt_tokens += decision.prompt_tokens
        self.counters.predicted_tokens += held
        self.counters.saved_tokens += real.computed_tokens - expected.computed_tokens
        self.counters.saved_seconds += real.seconds - expected.seconds

    def started(self, attempt: Attempt, now: float) -> None:
        own = self.attempts.get(attempt)
        if own is not None and not own.target.removed:  # its id may be another's by now: only real requests keep an id
            self.router.first_token(own, now)
        self.caches.settle(attempt)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        own = self.attempts.get(attempt)
        if own is not None:
            self.router.answered(own, end, NOTHING, now)
            self.caches.answered(own, own.backend, end, answer, now)

    def finished(self, attempt: Attempt, now: float) -> None:
        """End the shadow's attempt. Health is not touched: the real registry judges it."""
        own = self.attempts.get(attempt)
        if own is not None:
            self.router.settle(own)
            own.target.end(own.work, now)
        self.caches.settle(attempt)


class Shadows(Observer):
    """Has every shadow place each attempt.

    An answer may be read after its attempt has finished, or not at all: the latest finished attempts are kept, at most
    `FINISHED_MAX` of them, with at most `FINISHED_BYTES_MAX` of bodies.
    """

    def __init__(self, shadows: Sequence[Shadow], registry: Registry, routes: RouteTable | None = None) -> None:
        """`routes`: for what the real choices would hold, as large as the shadows' own."""
        self.shadows = tuple(shadows)
        self.judge = ServiceRates()
        self._registry = registry
        self._real: SupposedCaches | None = None
        if self.shadows:
            router = self.shadows[0].router  # prompts are matched in the same way for all
            self._real = SupposedCaches(router, routes or RouteTable(capacity=router.routes.capacity))
        self._computed: dict[Attempt, int] = {}  # prompt tokens of attempts that are in flight
        self._finished: OrderedDict[Attempt, None] = OrderedDict()
        self._finished_bytes = 0

    @property
    def tables(self) -> Sequence[RouteTable]:
        """The route tables of all worlds, which want to be swept as the router's own."""
        return [caches.routes for caches in self._worlds()]

    def _worlds(self) -> Sequence[SupposedCaches]:
        real = () if self._real is None else (self._real,)
        return (*real, *(shadow.caches for shadow in self.shadows))

    def limit(self, backends: Mapping[BackendId, Estimated]) -> None:
        """Believe in no more cache than these backends show to have, in every world; once a second or so."""
        for caches in self._worlds():
            caches.limit(backends)

    def close(self) -> None:
        """End these shadows: backends need not follow the peers' load for them any more."""
        for backend in self._registry:
            backend.mirrors.clear()

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        if self._real is None or attempt.prompt.kept:  # no policy chooses the engine that keeps a response
            return
        ahead = ahead_of(self._registry[attempt.backend], now)  # counts the attempt itself, which is taken out
        if attempt.work.decoding:
            ahead = ahead._replace(decoding=ahead.decoding - 1)
        else:
            ahead = ahead._replace(tokens=ahead.tokens - attempt.work.tokens, waiting=ahead.waiting - 1)
        held = self._real.sent(attempt, attempt.target, now)
        real = expected_of(self.judge, attempt.target, held, attempt.decision.prompt_tokens, ahead)
        self._computed[attempt] = real.computed_tokens
        tried = self._tried(attempt, now)
        for shadow in self.shadows:
            shadow.attempt_sent(attempt, self.judge, real, now, tried)

    def forget(self, backend: BackendId) -> None:
        """Forget what was learned of the backend that had this id before."""
        self.judge.forget(backend)
        for caches in self._worlds():
            caches.forget(backend)
        for shadow in self.shadows:
            shadow.router.policy.forget(backend)

    def _tried(self, attempt: Attempt, now: float) -> Collection[BackendId]:
        """Return the backends that may be asked now but were no candidates of this attempt: it tried them before."""
        able, asked = self._registry.pool(attempt.prompt.model, now).ids, attempt.decision.candidates
        return () if able is asked or able == asked else [backend for backend in able if backend not in asked]

    def started(self, attempt: Attempt, now: float) -> None:
        if self._real is None:
            return
        if attempt.service is not None:
            self.judge.served(self._counted(attempt, attempt.service))
        self._real.learn(attempt, attempt.prompt.end, now)
        self._real.settle(attempt)
        for shadow in self.shadows:
            shadow.started(attempt, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        if self._real is None:
            return
        if (correction := attempt.correction(answer)) is not None:
            service, computed_tokens = correction
            self.judge.corrected(self._counted(attempt, service), computed_tokens)
        if attempt.first_at is not None:
            self._real.learn(attempt, end, now)
        self._real.answered(attempt, attempt.backend, end, answer, now)
        for shadow in self.shadows:
            shadow.answered(attempt, end, answer, now)

    def _counted(self, attempt: Attempt, service: Service) -> Service:
        """Return a service with the tokens that this module takes for computed, whatever the policy predicted."""
        return service._replace(computed_tokens=self._computed.get(attempt, service.computed_tokens))

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:  # noqa: ARG002
        if self._real is None:
            return
        self._real.settle(attempt)
        for shadow in self.shadows:
            shadow.finished(attempt, now)
        self._finished[attempt] = None
        self._finished_bytes += len(attempt.prompt.body)
        while len(self._finished) > FINISHED_MAX or self._finished_bytes > FINISHED_BYTES_MAX:
            oldest, _ = self._finished.popitem(last=False)
            self._finished_bytes -= len(oldest.prompt.body)
            self._computed.pop(oldest, None)
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
