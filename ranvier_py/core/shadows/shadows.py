"""Has policies in the shadow place each attempt, beside the real one; an Observer of attempts.

The real choices have a world of their own (`world`), as each shadow has, since a router's own routes also have what
peers, events and answers tell, which no shadow can know. Rates of engines and lengths of answers are learned from the
real attempts here, for all worlds.

Bounds: the attempts in flight, FINISHED_MAX that have finished, and FINISHED_BYTES_MAX of their bodies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from math import inf

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.routing.attempt import Attempt, Observer, decoded_by
from ranvier_py.core.routing.backends import Outcome, Registry
from ranvier_py.core.routing.placement import Service
from ranvier_py.core.routing.placement.ttft import Ttft
from ranvier_py.core.routing.rates.decode_rate import AnswerLengths, Decoded
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.shadows.shadow import Shadow
from ranvier_py.core.shadows.supposed_engine import Supposed
from ranvier_py.core.shadows.world import Known, World

FINISHED_MAX = 1024  # attempts whose answers may still be read: the tokenizer worker is seconds behind at most
FINISHED_BYTES_MAX = 64 << 20  # of their requests' bodies, which an attempt keeps alive

DECODED_WINDOW = 200.0  # answers by which the time that a token of an answer takes is known


class Shadows(Observer):
    """Has every shadow place each attempt.

    An answer may be read after its attempt has finished, or not at all: the latest finished attempts are kept, at most
    `FINISHED_MAX` of them, with at most `FINISHED_BYTES_MAX` of bodies.
    """

    def __init__(self, shadows: Sequence[Shadow], registry: Registry) -> None:
        self.shadows = tuple(shadows)
        self.judge = Ttft()
        self._lengths = AnswerLengths()
        self._registry = registry
        self._world: World | None = None
        if self.shadows:
            self._world = World(self.shadows[0].router, self.judge)  # prompts are matched in the same way for all
        for shadow in self.shadows:
            shadow.join(self.judge)
        self._requests: dict[Attempt, Supposed] = {}  # as the real choices' world has them
        self._decoded: dict[Attempt, Decoded] = {}
        self._answers = 0.0
        self._finished: OrderedDict[Attempt, None] = OrderedDict()
        self._finished_bytes = 0

    @property
    def tables(self) -> Sequence[RouteTable]:
        """The route tables of all shadows, which want to be swept as the router's own."""
        return [shadow.router.routes for shadow in self.shadows]

    def tick(self, backends: Mapping[BackendId, Known], now: float) -> None:
        """Let happen what is due, and believe in no more cache than these backends have; once a second or so."""
        if self._world is not None:
            self._world.limit(backends)
        for shadow in self.shadows:
            shadow.advance(now)
            shadow.tick(backends, now)

    def close(self) -> None:
        """End these shadows: backends need not follow the peers' load for them any more."""
        for backend in self._registry:
            backend.work.mirrors.clear()

    def forget(self, backend: BackendId) -> None:
        """Forget what was learned of the backend that had this id before."""
        self.judge.forget(backend)
        if self._world is not None:
            self._world.forget(backend)
        for shadow in self.shadows:
            shadow.forget(backend)

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        if self._world is None or attempt.prompt.response_key:  # no policy chooses the engine that keeps a response
            return
        prompt = attempt.prompt
        answer_tokens = int(self._lengths.expected(prompt.end.first.text))
        real = self._world.sent(prompt, attempt.target, attempt.decision.prompt_tokens, answer_tokens, now)
        self._requests[attempt] = real
        tried = self._tried(attempt, now)
        for shadow in self.shadows:
            shadow.advance(now)
            shadow.sent(attempt, real, tried, now)

    def _tried(self, attempt: Attempt, now: float) -> Collection[BackendId]:
        """Return the backends that may be asked now but were no candidates of this attempt: it tried them before."""
        able, asked = self._registry.pools.pool(attempt.prompt.model, now).ids, attempt.decision.candidates
        return () if able is asked or able == asked else [backend for backend in able if backend not in asked]

    def started(self, attempt: Attempt, now: float) -> None:
        real = self._requests.get(attempt)
        if real is None or self._world is None or not attempt.prompt.stream:
            return
        for shadow in self.shadows:
            shadow.advance(now)
        if attempt.service is not None:
            self.judge.learner.served(counted(real, attempt.service))
        self._world.begin(real, now)
        for shadow in self.shadows:
            shadow.started(attempt, now)
            shadow.advance(now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        real = self._requests.get(attempt)
        if real is None or self._world is None:
            return
        if (correction := attempt.correction(answer)) is not None:
            service, computed_tokens = correction
            self.judge.learner.service_rates.corrected(counted(real, service), computed_tokens)
        real.answered = end
        self._world.continued(real, end)
        self._learn_length(attempt, real)
        for shadow in self.shadows:
            shadow.advance(now)
            shadow.answered(attempt, end, answer, now)

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        real = self._requests.get(attempt)
        if real is None or self._world is None:
            return
        for shadow in self.shadows:
            shadow.advance(now)
        if outcome is Outcome.SUCCESS or real.first_at is not None:
            self._end(attempt, real, outcome, now)
        else:
            self._world.fail(real)
        self._world.admit(real.engine, now)
        for shadow in self.shadows:
            shadow.finished(attempt, outcome, now)
            shadow.advance(now)
        self._keep(attempt, now)

    def _end(self, attempt: Attempt, real: Supposed, outcome: Outcome, now: float) -> None:
        assert self._world is not None
        if real.first_at is None:
            self._world.begin(real, now)
        if outcome is Outcome.SUCCESS:
            real.decode_s = max(0.0, real.engine.clock(now) - real.began)
            if (decoded := decoded_by(attempt, now)) is not None:
                if not attempt.prompt.stream:  # what was computed meanwhile, nobody saw
                    computed = int(real.engine.computed(now) - real.computed)
                    decoded = decoded._replace(computed=computed)
                self._decoded[attempt] = decoded
        self._world.end(real, real.answered)
        self._learn_length(attempt, real)

    def _learn_length(self, attempt: Attempt, real: Supposed) -> None:
        """Once both the end and the length of an answer are known, learn how long it is and how long it took."""
        tokens, world = attempt.reply.completion_tokens, self._world
        if world is None or real.decode_s is None or not tokens:
            return
        decoded = self._decoded.pop(attempt, None)
        if decoded is None:
            return
        self._lengths.observe(attempt.prompt.end.first.text, tokens)
        if attempt.target.generation == attempt.generation:
            self.judge.learner.decoded(decoded._replace(tokens=max(1, tokens - attempt.prompt.stream)))
        self._answers = min(self._answers + 1.0, DECODED_WINDOW)
        error_s = abs(real.decode_s - real.answer_tokens * world.seconds_per_token)
        world.error_s = error_s if world.error_s == inf else world.error_s + (error_s - world.error_s) / self._answers
        world.seconds_per_token += (real.decode_s / tokens - world.seconds_per_token) / self._answers
        for shadow in self.shadows:
            shadow.expect(world.seconds_per_token, world.error_s)

    def _keep(self, attempt: Attempt, now: float) -> None:
        self._finished[attempt] = None
        self._finished_bytes += len(attempt.prompt.body)
        while len(self._finished) > FINISHED_MAX or self._finished_bytes > FINISHED_BYTES_MAX:
            oldest, _ = self._finished.popitem(last=False)
            self._finished_bytes -= len(oldest.prompt.body)
            self._requests.pop(oldest, None)
            self._decoded.pop(oldest, None)
            for shadow in self.shadows:
                shadow.drop(oldest, now)


def counted(real: Supposed, service: Service) -> Service:
    """Return a service with the tokens that this package takes for computed, whatever the policy predicted."""
    return service._replace(computed_tokens=max(0, real.prompt_tokens - real.held))
