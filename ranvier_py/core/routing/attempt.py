"""One request at one backend, and who observes it: what the Router hands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.histogram import LATENCY_BUCKETS_S, Histogram
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter, histogram
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backends import Backend, Outcome, Pool
from ranvier_py.core.routing.placement import Credit, Decision, Holder, Service
from ranvier_py.core.routing.route_table import Trust

NO_CREDIT: Mapping[BackendId, Credit] = MappingProxyType({})


class PoolMatch(NamedTuple):
    """What matching found: who may serve, and who holds what.

    `unheld` has the prefix keys of the prompt beyond its first `learned_tokens`, which is what the route table has of
    it: found in the one walk that every prompt gets, and what its attempt is about to make warm. `credit` is that
    of hybrid models' backends that have some of it.
    """

    pool: Pool
    holders: Sequence[Holder]
    source: str  # "text", "tokens" or "none"
    learned_tokens: int
    unheld: Sequence[PrefixKey]
    at: float  # when it was asked
    credit: Mapping[BackendId, Credit] = NO_CREDIT

    @property
    def held_tokens(self) -> int:
        """What the first holder has, whatever of it is worth."""
        first = self.holders[0]
        credit = self.credit.get(first.backend) if self.credit else None
        return first.tokens if credit is None else credit.held


class Observer(Protocol):
    """Who is notified of every attempt, in the order of what happens to it: a recorder, policies in the shadow.

    No request waits for its own `attempt_sent`. They raise nothing.
    """

    def attempt_sent(self, attempt: Attempt, now: float) -> None: ...
    def started(self, attempt: Attempt, now: float) -> None:
        """Its first token came."""
        ...

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        """Its answer was read, before or after it finished. Not every attempt has one. `end` is the prompt's or
        continues it."""
        ...

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None: ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one backend, from its sending to its end."""

    prompt: Prompt
    decision: Decision
    target: Backend
    computed_tokens: int  # as predicted
    work_tokens: int  # of these, as the policy weighs them: what waits at the backend until the first token
    speculation: Sequence[int]  # what it claims, see `Speculation.add`
    sent_at: float
    backend: BackendId = field(init=False)
    url: str = field(init=False)
    generation: int = field(init=False)
    queued: bool = field(init=False)  # others of ours came before it
    decoding: int = field(init=False)  # others that had their first token then
    peer_tokens: int = field(init=False)  # that peers' requests before it had to compute
    service: Service | None = None  # once it has its first token
    first_at: float | None = None  # when the first token came; until then the prefill is not proved
    status: int = 0  # of the backend's answer; 0 = none came
    sent_bytes: int = 0  # of it, to the client
    announced: bool = False  # observers know of it
    judged: bool = True  # it asks for inference: how it ends tells how well its engine is
    finished: bool = False

    def __post_init__(self) -> None:
        target = self.target
        self.backend = target.id
        self.url = target.url
        self.generation = target.generation
        self.queued = target.own_waiting > 1
        self.decoding = target.decoding
        self.peer_tokens = target.peers.tokens


@dataclass(slots=True)
class RouterCounters:
    """What happened since the start.

    Tokens predicted are the router's belief, tokens cached the engines' own count; the distance is the router's error.
    """

    prompts_unread: dict[str, int] = counter("Bodies that were not understood, routed by load.", label="reason")
    decisions: dict[str, int] = counter("Placements by reason.", label="reason")
    matches: dict[str, int] = counter("Placements by the chain that matched.", label="source")
    outcomes: dict[str, int] = counter("Attempts by how they ended.", label="outcome")
    prompt_tokens: int = counter("Tokens of placed prompts, exact or estimated.")
    predicted_tokens: int = counter("Tokens believed to be cached where they were placed.")
    engine_prompt_tokens: int = counter("Prompt tokens as the engines counted.")
    engine_cached_tokens: int = counter("Cached tokens as the engines counted.")
    learned_rows: int = counter("Route rows created by learning.")
    answers_learned: int = counter("Answers learned as part of the next prompt.")
    unsalted: int = counter("Requests of tenants to engines whose model cards name none that knows a cache_salt.")
    first_token_seconds: Histogram = histogram("From sending an attempt to its first token.", LATENCY_BUCKETS_S)
    attempt_seconds: Histogram = histogram("From sending an attempt to its end.", LATENCY_BUCKETS_S)


def candidate_view(backend: Backend, holder: Holder | None, credit: Credit | None) -> dict[str, Any]:
    """Of a hybrid model's backend `credit_tokens` are those of the matched ones that it need not compute."""
    view = {
        "backend": backend.name,
        "load": backend.load,
        "weight": backend.weight,
        "matched_tokens": holder.tokens if holder else 0,
        "trust": Trust(holder.trust).name if holder else None,
    }
    return {**view, "credit_tokens": credit.tokens} if credit is not None else view


def source_of(prompt: Prompt, holders: Sequence[Holder]) -> str:
    if not holders:
        return "none"
    return "tokens" if prompt.end.token else "text"
