"""The nodes of a replay: real Routers, composed as a node composes its own, driven by the requests of a trace.

A request comes to a node by the draw of the run's seed, as a DNS name with many addresses would send it. A trace has
no text, so there is nothing to read or to tokenize: `prepare` turns its stops into Prompts once, and all runs share
them. Find, place, depart, first token, learn and land are the node's own code. A trace names each prefix once; the
routers match by that name as by a token fingerprint, which is what a node whose tokenizer keeps up has.

Rules: a Prompt and a Job are never changed by a run. The engine's answer is learned in the moment it ends. That an
engine has a new process, each node sees by a probe of its own, up to PROBE_INTERVAL_S later, or hears from a peer.
Cost: about 40 us for a request of 20 stops, without gossip.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple

import numpy as np

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import Segment, TextHasher, TokenHasher, TokenState
from ranvier_py.core.prompts.prompt import Boundary, PromptMemory
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.routing.backends import BackendLimits, Outcome, ProbeResult, Registry
from ranvier_py.core.routing.placement.policies import PlacementOptions, make_policy
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.router import Attempt, Router
from ranvier_py.core.routing.speculation import Speculation
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.model import EngineModel
from ranvier_py.replay.knowledge import KnowledgeName, make_knowledge
from ranvier_py.replay.replay_network import DelayedNet, Net, StillNet, StillPeer, make_peers
from ranvier_py.replay.trace import Depth, Trace, TraceRequest

KEY = b"a replay has no secret to keep.."
"""What fingerprints of a cluster are keyed with. Those of a trace are ready; peers agree by it all the same."""

SCHEMA = 1
"""Of the fingerprints: the same on all nodes of a replay."""

PROBE_INTERVAL_S = 5.0
"""As a node's `probe_interval_s` is by default."""

FIRST_BOOT_S = 1.0
"""Start time that every engine tells at first; restarts come later by more than the tolerance of such times."""

NO_IDS = np.zeros(0, dtype=np.uint32)


# --- a trace, ready -------------------------------------------------------------------------------------------------


class TracePrompt(Prompt):
    """A Prompt whose length is known, though its stops are whole blocks, and whose opening the trace has told."""

    __slots__ = ("request",)

    def __init__(self, request: TraceRequest, end: Boundary, root: Boundary) -> None:
        super().__init__("chat", request.model, stream=True, end=end, base=root, tail=(), body=b"")
        self.request = request

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens

    def opening(self) -> bytes:
        return self.request.opening


class Prepared(NamedTuple):
    """A request as routers and engines take it. `answered` is the end of its chain when the answer is known too."""

    request: TraceRequest
    prompt: Prompt
    answered: Boundary
    job: Job


def prepare(trace: Trace) -> list[Prepared]:
    """The requests of a trace in order of time; equal prefixes share their boundaries."""
    root = Boundary(None, Fingerprint(0), 0)
    known: dict[tuple[int, Fingerprint], Boundary] = {}
    names = names_of_blocks(trace)
    return [prepared(request, root, known, names) for request in trace.requests]


def names_of_blocks(trace: Trace) -> dict[int, int]:
    """Blocks that end where a stop is, and are called otherwise: in a run engines call them as routers do, whom their
    events would tell of other prefixes else."""
    return {
        request.blocks[key.tokens // trace.block_tokens - 1]: key.fingerprint
        for request in trace.requests
        for key in request.chain
        if key.fingerprint != request.blocks[key.tokens // trace.block_tokens - 1]
    }


def prepared(
    request: TraceRequest,
    root: Boundary,
    known: dict[tuple[int, Fingerprint], Boundary],
    names: Mapping[int, int],
) -> Prepared:
    """`known` has the boundaries so far, by the identity of their parent and their name."""
    asked = sum(1 for key in request.chain if key.tokens <= request.prompt_tokens)
    ends = {*request.ends, asked - 1, len(request.chain) - 1}
    end = at = root
    anchors: list[Depth] = []
    for index, key in enumerate(request.chain):
        if index not in ends:
            anchors.append(key)
            continue
        at = boundary_after(at, key, tuple(anchors), known)
        anchors.clear()
        if index == asked - 1:
            end = at
    prompt = TracePrompt(request, end, root)
    keys = tuple([names.get(block, block) for block in request.blocks]) if names else request.blocks
    job = Job(request.prompt_tokens, request.answer_tokens, NO_IDS, keys)
    return Prepared(request, prompt, at, job)


def boundary_after(
    parent: Boundary, key: Depth, anchors: tuple[Depth, ...], known: dict[tuple[int, Fingerprint], Boundary]
) -> Boundary:
    name = (id(parent), key.fingerprint)  # boundaries in `known` live as long as it, so no identity comes twice
    found = known.get(name)
    if found is None:
        found = known[name] = Boundary(parent, key.fingerprint, key.tokens)
        found.tokenized(Segment(anchors, key, TokenState(key.tokens, 0, ())))
    return found


# --- the nodes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all nodes of a run have in common. `gossip_delay_s` None: the real gossip."""

    policy: str
    nodes: int
    engines: int
    block_tokens: int
    seed: int
    options: PlacementOptions
    gossip_delay_s: float | None = None
    explain: bool = False  # note each decision's terms
    knowledge: KnowledgeName = "estimated"  # of the engines' caches


@dataclass(slots=True)
class Placed:
    """Where a request went, and by whom. `predicted_tokens`: what the router believed to be cached there."""

    engine: int
    reason: str
    predicted_tokens: int
    node: int = -1
    attempt: Attempt | None = None
    terms: Sequence[Mapping[str, float]] = ()


class Probe(NamedTuple):
    """A look at an engine that is due. `number` keeps the order of equal times."""

    at: float
    number: int
    node: int
    engine: int
    started_at: float


class Nodes:
    """N routers before the same engines. A backend's id is its engine's index."""

    def __init__(self, settings: NodeSettings, now: float, engines: Sequence[EngineModel] = ()) -> None:
        """`engines` are needed where they are heard."""
        self.routers = [make_router(settings, f"{settings.seed}/{index}") for index in range(settings.nodes)]
        self._explains = settings.explain
        self._draw = Random(f"{settings.seed}/dns")  # noqa: S311  # placement draws no secrets
        self._probing = Random(f"{settings.seed}/probes")  # noqa: S311
        self._probes: list[Probe] = []  # one for each restart and node
        self._probed = 0
        for index in range(settings.nodes):
            for engine in range(settings.engines):
                self._probe(Probe(now, 0, index, engine, FIRST_BOOT_S), now)
        self._net = make_net(self.routers, settings, now)
        self._knowledge = make_knowledge(settings.knowledge, self.routers, engines, settings.block_tokens)

    # --- beside the requests ----------------------------------------------------------------------------------------

    def next_at(self) -> float:
        net_at = self._net.next_at() if self._net else inf
        return min(net_at, self._probes[0].at) if self._probes else net_at

    def advance(self, now: float) -> None:
        while self._probes and self._probes[0].at <= now:
            probe = heapq.heappop(self._probes)
            self._probe(probe, now)
            self._touched(probe.node, now)
        if self._net is not None:
            self._net.advance(now)

    def restarted(self, engine: int, now: float) -> None:
        """An engine is a new process; the nodes will see it."""
        for node in range(len(self.routers)):
            at = now + self._probing.uniform(0.0, PROBE_INTERVAL_S)
            self._probed += 1
            heapq.heappush(self._probes, Probe(at, self._probed, node, engine, FIRST_BOOT_S + now))

    def _probe(self, probe: Probe, now: float) -> None:
        result = ProbeResult(ok=True, started_at=probe.started_at)
        self.routers[probe.node].registry.probed(BackendId(probe.engine), result, now)

    # --- one request ------------------------------------------------------------------------------------------------

    def place(self, item: Prepared, now: float) -> Placed:
        """Raises RequestError when no engine can be asked."""
        self._look(now)
        node = self._draw.randrange(len(self.routers))
        router, prompt = self.routers[node], item.prompt
        found = router.find(prompt, now)
        terms = router.terms(prompt, found) if self._explains else ()
        decision = router.place(prompt, found)
        attempt = router.start_attempt(prompt, decision, now, found=found)
        self._touched(node, now)
        return Placed(decision.backend, decision.reason, decision.matched_tokens, node, attempt, terms)

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
        for node in self._knowledge.look(now):
            self._touched(node, now)

    def _touched(self, node: int, now: float) -> None:
        if self._net is not None:
            self._net.touched(node, now)


def make_net(routers: Sequence[Router], settings: NodeSettings, now: float) -> Net | None:
    """None for a node alone."""
    if len(routers) == 1:
        return None
    if settings.gossip_delay_s is not None:
        return DelayedNet(routers, settings.gossip_delay_s)
    return StillNet(make_peers(StillPeer, routers, key=KEY, schema=SCHEMA, seed=settings.seed, now=now), now)


def make_router(settings: NodeSettings, seed: str) -> Router:
    registry = Registry(BackendLimits())
    for engine in range(settings.engines):
        backend = registry.add(f"http://engine-{engine}:8000")
        assert backend.id == engine, "backends are numbered as they come"
    hasher = TokenHasher(KEY, settings.block_tokens)
    reader = PromptReader(
        TextHasher(KEY), hasher, PromptMemory(), identity="replay", bytes_per_token=1.0, digest_seed=0
    )
    return Router(
        reader=reader,
        hasher=hasher,
        routes=RouteTable(),
        speculation=Speculation(),
        registry=registry,
        policy=make_policy(settings.policy, settings.options),
        rng=Random(seed),  # noqa: S311  # placement draws no secrets
        texts_match=False,  # a trace has one name for each prefix, and it is a token fingerprint's
        recent_max=1,
    )
