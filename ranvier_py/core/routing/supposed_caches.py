"""What each engine's cache would hold, had it got the requests that one policy sends it: the real one, or a shadow's.

It follows this node's requests alone, and looks every prompt up, whatever the policy reads. So the counts of several
policies differ by their choices and by nothing else. A prompt counts as held once its first token came; before that it
is expected at its engine. Prefixes beyond an engine's capacity, as its metrics or answers show it, are not believed.

Bounds: those of the route table and of Speculation; a clock for each backend that was used.
Cost for each request: one look-up, and one claim on what was not found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.routing.attempt import Attempt
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.capacity import EVERY_SECOND, CapacityEstimate, StackClock
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.table import NO_DEPTHS
from ranvier_py.core.routing.router import Router
from ranvier_py.core.routing.speculation import Speculation, merged

WALKS_MAX = 64
"""Prompts between two ticks whose uses are dated part by part; further ones are dated by their deepest part."""


class Estimated(Protocol):
    """How much a backend's cache keeps, as calibration knows it."""

    estimate: CapacityEstimate


class SupposedCaches:
    """The caches of all backends in one policy's world.

    Args:
        router: how prompts are matched, and the checkpoints of hybrid models' backends.
        routes: that world's own. What it learns is the caller's or `learn`'s.
    """

    def __init__(self, router: Router, routes: RouteTable) -> None:
        self.routes = routes
        self._router = router
        self._speculation = Speculation()
        self._claimed: dict[Attempt, tuple[Sequence[int], BackendId]] = {}  # by attempts without a first token
        self._clocks: dict[BackendId, tuple[int, StackClock]] = {}  # generation, and what that process has used
        self._walked = 0
        routes.on_use = self._used

    def sent(self, attempt: Attempt, backend: Backend, now: float) -> int:
        """Return how many of an attempt's prompt tokens this backend need not compute, and expect the rest there."""
        prompt, unheld = attempt.prompt, list[PrefixKey]()
        if prompt.kind == "opaque" or not prompt.end.messages:
            return 0
        generations = [*[-1] * backend.id, backend.generation]
        chain = self._router.chain(prompt.end)
        found = self.routes.match(chain, generations, now, touch=False, unheld=unheld)
        learned = found[0].tokens if found else 0
        holders = merged(found, self._speculation.match(unheld, generations, deeper_than=learned), 1)
        fingerprints = [fingerprint for _, token, text in unheld for fingerprint in (token, text)]
        self._claimed[attempt] = self._speculation.add(fingerprints, backend.id), backend.id
        if not holders or not backend.reuses:
            return 0
        tokens, checkpoints = holders[0].tokens, self._router.checkpoints
        if checkpoints.known:
            credit = checkpoints.credited(prompt, holders, learned, generations, now)[1].get(backend.id)
            tokens = tokens if credit is None else credit.tokens
        return min(tokens, prompt.tokens)

    def settle(self, attempt: Attempt) -> None:
        """Expect an attempt's prompt no more: its first token came, or it ended without one."""
        claimed, backend = self._claimed.pop(attempt, ((), BackendId(0)))
        self._speculation.remove(claimed, backend)

    def learn(self, attempt: Attempt, end: Boundary, now: float) -> None:
        """Learn that the attempt's own backend holds its chat down to `end`."""
        target = attempt.target
        if attempt.prompt.kind != "opaque" and not target.removed and target.generation == attempt.generation:
            self.routes.learn(self._router.chain(end), attempt.backend, attempt.generation, Trust.LOCAL, now)

    def answered(self, attempt: Attempt, backend: BackendId, end: Boundary, answer: Answer, now: float) -> None:
        """Count the tokens of an answer that was not learned."""
        known = self._clocks.get(backend)
        if known is not None and end is attempt.prompt.end:
            known[1].add(answer.completion_tokens or 0, now)

    def limit(self, backends: Mapping[BackendId, Estimated]) -> None:
        """Hide what is beyond the capacities, once a second or so."""
        self._walked = 0
        for backend, (_, clock) in self._clocks.items():
            known = backends.get(backend)
            limit = inf if known is None else known.estimate.limit
            if known is None or limit == inf:
                self.routes.hide(backend, -1)
                continue
            second = clock.second_before(limit) if limit > 0 else EVERY_SECOND
            learned = known.estimate.learned
            self.routes.hide(backend, second, NO_DEPTHS if learned == inf else clock.left_of(learned))

    def forget(self, backend: BackendId) -> None:
        """Forget the backend that had this id before."""
        self._clocks.pop(backend, None)
        self.routes.hide(backend, -1)

    def _used(
        self,
        prompts: Sequence[Sequence[PrefixKey]],
        backend: BackendId,
        generation: int,
        second: int,
        tokens_below: int = 0,
    ) -> None:
        """Count the tokens of prompts that are about to be learned as just used."""
        known = self._clocks.get(backend)
        if known is None or known[0] != generation:
            known = self._clocks[backend] = generation, StackClock()
        self._walked += len(prompts)
        uses, place, clock = self.routes.uses, (backend, generation, second), known[1]
        walk = uses.used_before(prompts, *place) if self._walked <= WALKS_MAX else None
        new_tokens, before = walk or uses.roughly_used_before(prompts[0], *place)  # one prompt: no peers' are learned
        again = sum([clock.take(tokens, earlier) for earlier, tokens in before.items()])
        clock.add(tokens_below + new_tokens + again, second)
