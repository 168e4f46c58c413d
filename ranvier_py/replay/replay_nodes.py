"""The nodes of a replay: real Routers, composed as a node composes its own, serve the requests of a trace.

Each request enters at a node drawn from the run's seed, as if by a DNS name with many addresses. Each node notices a
restarted engine by its own probe, up to PROBE_INTERVAL_S later, or learns of it from a peer. It goes on with its probes
until PROBED_S after the restart, and as long as the engine is unhealthy to it because of what peers reported.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf
from random import Random
from typing import NamedTuple

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.routing.backends import BackendLimits, Outcome, Pool, ProbeResult, Registry
from ranvier_py.core.routing.health import Health
from ranvier_py.core.routing.placement import Holder
from ranvier_py.core.routing.placement.policies import make_policy
from ranvier_py.core.routing.prefix_holders import PrefixHolders
from ranvier_py.core.routing.route_table import RouteTable, Trust, Unheld
from ranvier_py.core.routing.router import PoolMatch, Router
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.hybrid.cache_models import profile_of
from ranvier_py.replay.knowledge import make_knowledge
from ranvier_py.replay.replay_network import make_network
from ranvier_py.replay.replay_plan import Placed, Placer, Plan, Prepared

KEY = b"a replay has no secret to keep.."
"""The key of the cluster's fingerprints. A trace brings its fingerprints, but peers must still agree on a key."""

PROBE_INTERVAL_S = 5.0
"""As a node's `probe_interval_s` is by default."""

PROBED_S = 2 * PROBE_INTERVAL_S
"""Seconds after a restart in which a peer may still report the requests that it broke off, and some more."""

FIRST_START_S = 1.0
"""Start time that every engine reports first. That of a restart is later by more than the tolerance for such times."""


class ProbeDue(NamedTuple):
    """A probe that is due at `at`. `number` keeps the order of equal times."""

    at: float
    number: int
    node: int
    engine: int


class Nodes(Placer):
    """N routers before the same engines. A backend's id is its engine's index."""

    def __init__(self, plan: Plan, engines: Sequence[EngineModel], block_tokens: int) -> None:
        self.routers = [make_router(plan, block_tokens, f"{plan.seed}/{index}", engines) for index in range(plan.nodes)]
        self._explains = plan.per_request
        self._draw = Random(f"{plan.seed}/dns")  # noqa: S311  # placement draws no secrets
        self._probing = Random(f"{plan.seed}/probes")  # noqa: S311
        self._probes: list[ProbeDue] = []  # at most one for each restart and node
        self._started_at = [FIRST_START_S] * len(plan.engines)
        self._probed = 0
        for index in range(plan.nodes):
            for engine in range(len(plan.engines)):
                self._probe(index, engine, 0.0)
        self.network = make_network(self.routers, key=KEY, seed=plan.seed, delay_s=plan.gossip_delay_s, now=0.0)
        self.knowledge = make_knowledge(plan.knowledge, self.routers, engines, block_tokens)

    def next_at(self) -> float:
        network_at = self.network.next_at() if self.network else inf
        return min(network_at, self._probes[0].at) if self._probes else network_at

    def advance(self, now: float) -> None:
        while self._probes and self._probes[0].at <= now:
            probe = heapq.heappop(self._probes)
            health = self._probe(probe.node, probe.engine, now)
            self._touched(probe.node, now)
            if health is not Health.HEALTHY or now < self._started_at[probe.engine] - FIRST_START_S + PROBED_S:
                self._schedule(probe.node, probe.engine, now + PROBE_INTERVAL_S)
        if self.network is not None:
            self.network.advance(now)

    def restarted(self, engine: int, now: float) -> None:
        """Schedule the probe by which each node will notice that this engine is a new process."""
        self._started_at[engine] = FIRST_START_S + now
        for node in range(len(self.routers)):
            self._schedule(node, engine, now + self._probing.uniform(0.0, PROBE_INTERVAL_S))

    def _schedule(self, node: int, engine: int, at: float) -> None:
        self._probed += 1
        heapq.heappush(self._probes, ProbeDue(at, self._probed, node, engine))

    def _probe(self, node: int, engine: int, now: float) -> Health:
        registry = self.routers[node].registry
        registry.changes.probed(BackendId(engine), ProbeResult(ok=True, started_at=self._started_at[engine]), now)
        return registry[BackendId(engine)].health

    def place(self, item: Prepared, now: float) -> Placed:
        """Place a request at a drawn node. Raises NoBackend if no engine is eligible."""
        return self.place_at(self._draw.randrange(len(self.routers)), item, now)

    def place_at(self, node: int, item: Prepared, now: float, excluded: Sequence[int] = ()) -> Placed:
        """Place a request at this node, but not on the engines `excluded`. Raises NoBackend as `place` does."""
        self._look(now)
        router, prompt = self.routers[node], item.prompt
        if isinstance(router.holders, SeenHolders):
            router.holders.job = item.job
        found = router.find(prompt, now, [BackendId(engine) for engine in excluded])
        terms = router.terms(prompt, found) if self._explains else ()
        decision = router.place(prompt, found)
        attempt = router.start_attempt(prompt, decision, now, found=found)
        self._touched(node, now)
        return Placed(
            engine=decision.backend,
            reason=decision.reason,
            predicted_tokens=decision.matched_tokens,
            node=node,
            attempt=attempt,
            terms=terms,
        )

    def first_token(self, placed: Placed, now: float) -> None:
        assert placed.attempt is not None
        self.routers[placed.node].first_token(placed.attempt, now)
        self._touched(placed.node, now)

    def finished(self, placed: Placed, item: Prepared, cached_tokens: int, now: float) -> None:
        assert placed.attempt is not None
        self._look(now)
        router, job = self.routers[placed.node], item.job
        answer = Answer(
            prompt_tokens=job.prompt_tokens, cached_tokens=cached_tokens, completion_tokens=job.answer_tokens
        )
        router.answered(placed.attempt, item.answered, answer, now)
        router.finish_attempt(placed.attempt, Outcome.SUCCESS, now)
        self._touched(placed.node, now)

    def failed(self, placed: Placed, outcome: Outcome, now: float) -> None:
        assert placed.attempt is not None
        self.routers[placed.node].finish_attempt(placed.attempt, outcome, now)
        self._touched(placed.node, now)

    def _look(self, now: float) -> None:
        if self.knowledge is not None:
            for node in self.knowledge.look(now):
                self._touched(node, now)

    def _touched(self, node: int, now: float) -> None:
        if self.network is not None:
            self.network.touched(node, now)


class SeenHolders(PrefixHolders):
    """What each engine would reuse of `job`, which must be set to the request to be placed next."""

    job: Job

    def __init__(self, routes: RouteTable, engines: Sequence[EngineModel]) -> None:
        super().__init__(routes, texts_match=False)
        self._engines = engines

    def find(
        self,
        prompt: Prompt,
        pool: Pool,
        now: float,
        wanted: int,
        unheld: Unheld,
        *,
        touch: bool,  # noqa: ARG002  # as that of a router's own
    ) -> tuple[int, Sequence[Holder]]:
        known = [(self._engines[backend].cached_tokens(self.job, now), backend) for backend in pool.ids if wanted]
        holders = [Holder(backend, tokens, Trust.CONFIRMED) for tokens, backend in known if tokens]
        holders.sort(key=lambda holder: -holder.tokens)
        deepest = holders[0].tokens if holders else 0
        for key in self.chain(prompt.end):
            if key[0] <= deepest:
                unheld.end = key
                break
            unheld.append(key)
        unheld.known = True  # the table may have them
        return deepest, holders

    def several(self, prompt: Prompt, found: PoolMatch) -> Sequence[Holder]:  # noqa: ARG002
        return found.holders


def make_router(plan: Plan, block_tokens: int, seed: str, engines: Sequence[EngineModel] = ()) -> Router:
    """Make a router for the plan's engines, as a node does that has recognised their cache profiles. With knowledge
    `attention` it gets no profiles; with `oracle` it gets none and sees into the engines' caches."""
    registry = Registry(BackendLimits())
    for engine in range(len(plan.engines)):
        backend = registry.add(f"http://engine-{engine}:8000")
        assert backend.id == engine, "backends are numbered as they come"
    hasher = TokenHasher(KEY, block_tokens)
    reader = PromptReader(
        TextHasher(KEY), hasher, PromptMemory(), identity="replay", bytes_per_token=1.0, digest_seed=0
    )
    router = Router(
        reader=reader,
        hasher=hasher,
        routes=RouteTable(capacity=plan.routes_max, options=plan.routes),
        registry=registry,
        policy=make_policy(plan.policy, plan.options),
        rng=Random(seed),  # noqa: S311  # placement draws no secrets
        texts_match=False,  # a trace has one name for each prefix, and it is a token fingerprint's
        recent_max=1,
    )
    if plan.knowledge == "oracle":
        router.holders = SeenHolders(router.routes, engines)
    elif plan.knowledge != "attention":
        for engine, limits in enumerate(plan.engines):
            router.checkpoints.set_profile(BackendId(engine), profile_of(limits))
    return router
