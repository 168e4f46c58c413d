"""One policy's world: the engines and caches that its choices would have made of this node's requests.

It follows this node's requests alone, and looks every prompt up, whatever the policy reads. So the counts of several
policies differ by their choices and by nothing else. What peers send is the same in every world.

Bounds: PREFIXES_MAX prefixes in all engines together, and the requests in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.capacity import CapacityEstimate
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.placement.ttft import Ttft
from ranvier_py.core.routing.route_table import Trust
from ranvier_py.core.routing.router import Router
from ranvier_py.core.shadows.supposed_cache import CachedPrefix, Hold, SupposedCache
from ranvier_py.core.shadows.supposed_engine import Supposed, SupposedEngine

PREFIXES_MAX = 200_000
"""Of one world: some 50 MB, and with a prefix for each 100 tokens or more, 20 million tokens of cache."""


class Known(Protocol):
    """What the real calibration knows of a backend's cache."""

    @property
    def url(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def estimate(self) -> CapacityEstimate: ...

    @property
    def reported(self) -> EngineMetrics: ...


class World:
    """`router`: how prompts are matched, and the checkpoints of hybrid models' backends. `judge`: how fast engines are,
    as real ones have shown."""

    def __init__(self, router: Router, judge: Ttft) -> None:
        self._router = router
        self._judge = judge
        self._engines: dict[BackendId, SupposedEngine] = {}
        self._learned: dict[BackendId, float] = {}
        self._answering: dict[CachedPrefix, Supposed] = {}  # by the deepest prefix of its prompt, the latest in flight
        self.seconds_per_token = 0.0  # of an answer
        self.error_s = inf  # by which answers differ from what is expected of them

    def limit(self, backends: Mapping[BackendId, Known]) -> None:
        """Believe in no more cache than these backends have shown; what they report of it has precedence."""
        self._learned = {backend: known.estimate.limit for backend, known in backends.items()}

    def forget(self, backend: BackendId) -> None:
        """Forget the backend that had this id before."""
        self._engines.pop(backend, None)

    def sent(self, prompt: Prompt, backend: Backend, prompt_tokens: int, answer_tokens: int, now: float) -> Supposed:
        """Send a request there. It is admitted at once if there is room."""
        engine = self._engine(backend)
        request = Supposed(engine, prompt, backend, prompt_tokens, answer_tokens, computed=engine.computed(now))
        engine.waiting.append(request)
        self.admit(engine, now)
        return request

    def admit(self, engine: SupposedEngine, now: float) -> Sequence[Supposed]:
        """Admit the first of those that wait for room, as many as have it. Returns them."""
        found = []
        while engine.waiting and self._admit(engine.waiting[0], now, force=not engine.running):
            found.append(engine.waiting.popleft())
        return found

    def begin(self, request: Supposed, now: float) -> None:
        """Take the first token of a real request for come: whatever we suppose, it was admitted."""
        if not request.admitted:
            request.engine.waiting.remove(request)
            self._admit(request, now, force=True)
        request.begin(now if request.prompt.stream else min(now, request.ready_at))

    def end(self, request: Supposed, answered: Boundary | None) -> None:
        """End a request that was served. `answered`: the end of its answer, if it is known."""
        self._ended(request)
        if request.hold is not None:
            request.engine.cache.prove(request.hold)
            request.engine.cache.release(
                request.hold, self._router.holders.chain(answered) if answered is not None else ()
            )

    def continued(self, request: Supposed, answered: Boundary) -> None:
        """Learn the answer of a request that was served."""
        if request.hold is not None and request.ended:
            request.engine.cache.continued(request.hold, self._router.holders.chain(answered))

    def fail(self, request: Supposed) -> None:
        """End a request that failed. What it alone had stays only if its first token was seen."""
        self._ended(request)
        if request.hold is not None:
            request.engine.cache.abandon(request.hold)

    def _ended(self, request: Supposed) -> None:
        engine = request.engine
        request.ended = True
        if request.hold is None:
            engine.waiting.remove(request)
        elif request.first_at is None:
            engine.prefilling -= 1
        else:
            engine.decoding -= 1
        if request.hold is not None and self._answering.get(request.hold.end) is request:
            del self._answering[request.hold.end]

    def _engine(self, backend: Backend) -> SupposedEngine:
        known = self._engines.get(backend.id)
        if known is None or known.generation != backend.generation:
            cache = SupposedCache(self._router.hasher.block_tokens, PREFIXES_MAX)
            known = self._engines[backend.id] = SupposedEngine(self._judge, backend.id, backend.generation, cache)
        known.cache.prefixes_max = PREFIXES_MAX // len(self._engines)
        size = backend.work.room.cache_tokens
        known.cache.capacity = self._learned.get(backend.id, inf) if size is None else size
        return known

    def _admit(self, request: Supposed, now: float, *, force: bool) -> bool:
        prompt, engine = request.prompt, request.engine
        matched = prompt.kind != "opaque" and bool(prompt.end.messages) and request.backend.reuse.believed
        end, block = prompt.end, self._router.hasher.block_tokens
        whole = -(-(request.prompt_tokens + request.answer_tokens) // block) * block
        more = max(0, whole - end.tokens) if matched else whole
        hold = engine.cache.hold(self._router.holders.chain(end) if matched else (), more, force=force)
        if hold is None:
            return False
        request.hold = hold
        if hold.held:
            held = hold.held + self._answered_so_far(hold, engine.turn_at(now))
            request.held = self._credited(request, min(held, prompt.tokens), now)
        self._answering[hold.end] = request
        engine.schedule(request, now)
        return True

    def _answered_so_far(self, hold: Hold, at: float) -> int:
        """Return how many tokens of its prompt a request finds besides because another one there is answering them."""
        other = self._answering.get(hold.found)
        if other is None or not self.seconds_per_token:
            return 0
        tokens = min(max(0.0, other.progress(at)) / self.seconds_per_token, other.answer_tokens, hold.new)
        block = self._router.hasher.block_tokens
        return int(tokens) // block * block

    def _credited(self, request: Supposed, held: int, now: float) -> int:
        """Return how many of the held tokens the backend need not compute: of a hybrid model's those before the deepest
        checkpoint."""
        checkpoints, backend = self._router.checkpoints, request.backend
        if not checkpoints.known:
            return held
        generations = [*[-1] * backend.id, backend.generation]
        holders = [Holder(backend.id, held, Trust.LOCAL)]
        credit = checkpoints.credited(request.prompt, holders, held, generations, now)[1].get(backend.id)
        return held if credit is None else min(held, credit.tokens)
