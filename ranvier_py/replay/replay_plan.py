"""The inputs of a run: its plan, and the requests of a trace in the form that routers and engines take.

A trace has no text: `prepare` turns its chains into Prompts once, and all runs share them. A trace has one name for
each prefix. The routers match by it as by a token fingerprint, as a node does whose tokenizer keeps up.

Rule: no run changes a Prompt or a Job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ranvier_py.core.ids import Fingerprint
from ranvier_py.core.prompts.fingerprint import Segment, TokenState
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backends import Outcome
from ranvier_py.core.routing.placement.policies import PlacementOptions
from ranvier_py.core.routing.route_table import RouteTableOptions
from ranvier_py.core.routing.router import Attempt
from ranvier_py.replay.engine.block_cache import Job
from ranvier_py.replay.engine.engine_values import EngineLimits
from ranvier_py.replay.knowledge import KnowledgeName
from ranvier_py.replay.replay_network import PeerNetwork
from ranvier_py.replay.traces.trace import Depth, Trace, TraceRequest


class Restart(NamedTuple):
    """An engine restarts as a new process `at` seconds after the first arrival."""

    at: float
    engine: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything except the trace that determines a run.

    `nodes` 0: an oracle places. `speed` divides the gaps between arrivals. `gossip_delay_s`: how long a packet between
    nodes takes; None: DELAY_S; inf: nodes send each other nothing. `per_request`: keep a row for each request, with
    each decision's terms. `routes_max`, `routes`: capacity and options of each node's route table. `think_s`: each turn
    of a session comes so long after the answer before it, whatever the trace says; None: when the trace says.
    """

    policy: str
    nodes: int
    engines: tuple[EngineLimits, ...]
    speed: float = 1.0
    seed: int = 1
    options: PlacementOptions = field(default_factory=PlacementOptions)
    gossip_delay_s: float | None = None
    restarts: tuple[Restart, ...] = ()
    regret: bool = True
    per_request: bool = False
    knowledge: KnowledgeName = "calibrated"
    routes_max: int = 1_000_000  # as a node has by default
    routes: RouteTableOptions = field(default_factory=RouteTableOptions)
    think_s: float | None = None


@dataclass(slots=True)
class Placed:
    """Where a request went; `node` placed it (-1: an oracle) and expected `predicted_tokens` to be cached there."""

    engine: int
    reason: str
    predicted_tokens: int
    node: int = -1
    attempt: Attempt | None = None
    terms: Sequence[Mapping[str, float]] = ()


class TracePrompt(Prompt):
    """A Prompt that takes its length and its opening from the trace: its chain has only whole blocks and no text."""

    __slots__ = ("request",)

    def __init__(self, request: TraceRequest, end: Boundary, root: Boundary, *, stream: bool) -> None:
        super().__init__("chat", request.model, stream=stream, end=end, base=root, tail=(), body=b"")
        self.request = request

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens

    def opening(self, bytes_max: int, source: str) -> bytes:  # noqa: ARG002  # the trace has cut it
        return self.request.opening


class Prepared(NamedTuple):
    """A request as routers and engines take it. `answered`: the last boundary of its chain with the answer."""

    request: TraceRequest
    prompt: Prompt
    answered: Boundary
    job: Job


def prepare(trace: Trace, *, stream: bool = True) -> list[Prepared]:
    """Return the requests of a trace in order of time. Equal prefixes share their boundaries. `stream`: whether their
    answers are streams, of which routers see the first token."""
    root = Boundary(None, Fingerprint(0), 0)
    known: dict[tuple[int, Fingerprint], Boundary] = {}
    names = names_of_blocks(trace)
    return [prepared(request, root, known, names, stream=stream) for request in trace.requests]


def names_of_blocks(trace: Trace) -> dict[int, int]:
    """Return, by block name, the fingerprint of the prefix key at the block's end, where the two differ. In a run the
    engines name these blocks by the fingerprint, as the routers do: their events must match the routes."""
    return {
        block: key.fingerprint
        for request in trace.requests
        for key in request.chain
        if key.fingerprint != (block := request.blocks[key.tokens // trace.block_tokens - 1])
    }


def prepared(
    request: TraceRequest,
    root: Boundary,
    known: dict[tuple[int, Fingerprint], Boundary],
    names: Mapping[int, int],
    *,
    stream: bool,
) -> Prepared:
    """Prepare one request. `known` has the boundaries so far, by their parent's identity and their fingerprint."""
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
    keys = tuple([names.get(block, block) for block in request.blocks]) if names else request.blocks
    job = Job.named(request.prompt_tokens, request.answer_tokens, keys)
    return Prepared(request, TracePrompt(request, end, root, stream=stream), at, job)


def boundary_after(
    parent: Boundary, key: Depth, anchors: tuple[Depth, ...], known: dict[tuple[int, Fingerprint], Boundary]
) -> Boundary:
    name = (id(parent), key.fingerprint)  # `known` keeps the boundaries alive, so ids are unique
    found = known.get(name)
    if found is None:
        found = known[name] = Boundary(parent, key.fingerprint, key.tokens)
        found.tokenized(Segment(anchors, key, TokenState(key.tokens, 0, ())))
    return found


class Placer(ABC):
    """Places the requests of a run: `Nodes`, or an oracle, which does nothing else."""

    network: PeerNetwork | None = None

    @abstractmethod
    def place(self, item: Prepared, now: float) -> Placed: ...

    def first_token(self, placed: Placed, now: float) -> None: ...  # noqa: B027  # an oracle need not know

    def finished(self, placed: Placed, item: Prepared, cached_tokens: int, now: float) -> None: ...  # noqa: B027

    def failed(self, placed: Placed, outcome: Outcome, now: float) -> None: ...  # noqa: B027

    def restarted(self, engine: int, now: float) -> None: ...  # noqa: B027

    def next_at(self) -> float:
        return inf

    def advance(self, now: float) -> None: ...  # noqa: B027
