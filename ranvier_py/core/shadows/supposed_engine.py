"""What one engine would do, had it got the requests that one world sends there: when, and from which cache.

It computes prompts in the order in which they come, at the rate that real engines have shown, and admits one only if
its cache has room for it (`supposed_cache`). What is computed delays the answers that decode meanwhile: they advance by
a clock of their own, which stands still while a prompt is computed.

Bounds: those of the cache, and the requests in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.placement.ttft import Ttft
from ranvier_py.core.shadows.supposed_cache import Hold, SupposedCache

COMPUTING_MAX = 4096
"""Prompts of which an engine knows when it will compute them: more than a shadow may be behind."""


@dataclass(slots=True, eq=False)
class Supposed:
    """One request in one world.

    `ready_at`: when its first token would come by the engine's schedule; `first_at`: when it is taken for come.
    `began`: the engine's clock of decoding then; `decode_s`: how far that goes until the answer's end, once known.
    """

    engine: SupposedEngine
    prompt: Prompt
    backend: Backend
    prompt_tokens: int
    answer_tokens: int  # as expected
    held: int = 0
    hold: Hold | None = None  # None: it waits for room, or is not in flight any more
    ready: tuple[float, float] = (inf, inf)  # `ready_at`, and the engine's clock of decoding then
    first_at: float | None = None
    began: float = inf
    decode_s: float | None = None
    computed: float = 0.0  # prompt tokens that the engine had computed when it was sent
    answered: Boundary | None = None  # the end of its answer, once that was read
    ended: bool = False

    @property
    def ready_at(self) -> float:
        return self.ready[0]

    @property
    def admitted(self) -> bool:
        return self.ready_at < inf

    def progress(self, at: float) -> float:
        """Return for how long it has decoded, by the engine's clock; nothing, or less, before its first token."""
        began = self.ready[1] if self.first_at is None and not self.prompt.stream else self.began
        return self.engine.clock(at) - began

    def begin(self, at: float) -> None:
        """Take its first token for come."""
        self.first_at = at
        self.began = self.ready[1] if at == self.ready_at else self.engine.clock(at)
        self.engine.prefilling -= 1
        self.engine.decoding += 1
        if self.hold is not None and self.prompt.stream:  # else nobody sees it
            self.engine.cache.prove(self.hold)


class SupposedEngine:
    """One process of one engine in one world. Times given to it never go back."""

    def __init__(self, judge: Ttft, backend: BackendId, generation: int, cache: SupposedCache) -> None:
        self.backend = backend
        self.generation = generation
        self.cache = cache
        self.decoding = 0
        self.prefilling = 0  # admitted, without a first token
        self.waiting: deque[Supposed] = deque()  # for room in the cache
        self._judge = judge
        self._free_at = 0.0  # when all admitted prompts are computed
        self._computing: deque[tuple[float, float, int]] = deque()  # from when to when so many tokens are computed
        self._computed_s = 0.0  # by those that are over
        self._computed_tokens = 0  # likewise
        self._scheduled_s = 0.0  # by all

    @property
    def running(self) -> int:
        """Admitted requests that have not ended."""
        return self.prefilling + self.decoding

    def turn_at(self, now: float) -> float:
        """Return when all that was admitted until now is computed."""
        return max(now, self._free_at)

    def schedule(self, request: Supposed, now: float) -> None:
        """Note when an admitted request would get its first token, behind those before it."""
        rates = self._judge.learner.service_rates
        line, factor = rates.fleet.line(), rates[self.backend].factor
        queued = self._free_at > now
        beside_s = line.per_decoding * (self.decoding + self.prefilling) + (line.queued if queued else line.alone)
        compute_s = factor * line.per_token * rates.work_of(request.held, request.prompt_tokens)
        start = self.turn_at(now) + factor * beside_s
        self._compute(start, compute_s, max(0, request.prompt_tokens - request.held), now)
        self._scheduled_s += compute_s
        self.prefilling += 1
        self._free_at = start + compute_s
        request.ready = self._free_at, self._free_at - self._scheduled_s

    def _compute(self, start: float, compute_s: float, tokens: int, now: float) -> None:
        computing = self._computing
        while computing and computing[0][1] <= now:
            before, after, done = computing.popleft()
            self._computed_s += after - before
            self._computed_tokens += done
        if len(computing) >= COMPUTING_MAX:  # such an engine is hopelessly behind: two become one
            before, after, more = computing.pop()
            computing.append((start - (after - before), start + compute_s, tokens + more))
        else:
            computing.append((start, start + compute_s, tokens))

    def computed(self, at: float) -> float:
        """Return how many prompt tokens have been computed."""
        found = float(self._computed_tokens)
        for start, end, tokens in self._computing:
            if at < end:
                return found + (tokens * (at - start) / (end - start) if at > start else 0.0)
            found += tokens
        return found

    def clock(self, at: float) -> float:
        """Return the clock by which answers advance: it stands still while a prompt is computed."""
        clock = at - self._computed_s
        for start, end, _ in self._computing:
            if at <= start:
                break
            clock -= min(at, end) - start
        return clock

    def time_at(self, clock: float) -> float:
        """Return when that clock will be at `clock`, if nothing is sent any more."""
        at = clock + self._computed_s
        for start, end, _ in self._computing:
            if at <= start:
                break
            at += end - start
        return at
