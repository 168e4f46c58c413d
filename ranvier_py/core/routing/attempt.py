"""The values of a request's placement: its match, the legs of its plan, and an attempt, which observers may follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from ranvier_py.core.answers.answer_counts import UNCOUNTED, AnswerCounts
from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import counter
from ranvier_py.core.prompts.body_json import Splice
from ranvier_py.core.prompts.prompt import Boundary
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.routing.backends import Backend, Outcome, Pool
from ranvier_py.core.routing.placement import Choice, Credit, Decision, Holder, Policy, Service, decided
from ranvier_py.core.routing.rates.decode_rate import AnswerLengths, Decoded
from ranvier_py.core.routing.rates.work import REQUEST_TOKENS, InFlight
from ranvier_py.core.routing.route_table import Trust, Unheld
from ranvier_py.core.routing.route_table.rows import Rows

NO_CREDIT: Mapping[BackendId, Credit] = MappingProxyType({})

UNSEEN_TOKENS_MAX = 1 << 20  # of what a body only names, a history or media: as long as the longest contexts
MEDIA_URL = b'url"'  # ends the name of the member that has an image's, video's or sound's URL, in every API


class PoolMatch(NamedTuple):
    """What matching found: which backends may serve a prompt, and which hold how much of it.

    The route table has the first `learned_tokens` of the prompt; `unheld` has the prefix keys beyond, which the one
    walk of the prompt has read, and which its attempt is about to make warm. `credit` has the hybrid models' backends
    that hold some of the prompt.
    """

    pool: Pool
    holders: Sequence[Holder]
    source: str  # "text", "tokens" or "none"
    learned_tokens: int
    unheld: Unheld
    at: float  # when the match was made
    credit: Mapping[BackendId, Credit] = NO_CREDIT

    @property
    def held_tokens(self) -> int:
        """The tokens that the first holder has, also where their worth is less (`Credit`)."""
        first = self.holders[0]
        credit = self.credit.get(first.backend) if self.credit else None
        return first.tokens if credit is None else credit.held

    def evicted(self, rows: Rows) -> tuple[BackendId, int] | None:
        """Return which backend computed more of the prompt than any holds now, and how many tokens more."""
        if not self.unheld.known:
            return None
        generations, held = self.pool.generations, self.holders[0].tokens if self.holders else 0
        for depth, token, text in self.unheld:
            if depth <= held:  # it will soon be held by whom such a prompt was sent to
                break
            row = rows.index.get(token) or rows.index.get(text)
            if row is None or not 0 <= (backend := rows.backend[row]) < len(generations):
                continue
            if generations[backend] == rows.generation[row]:
                return BackendId(backend), depth - held
        return None


PoolMatchFields = tuple[Pool, Sequence[Holder], str, int, Unheld, float, Mapping[BackendId, Credit]]
pool_match_of: Callable[[PoolMatchFields], PoolMatch] = partial(tuple.__new__, PoolMatch)
"""As `placement.match_of`."""

Edit: TypeAlias = Callable[[bytes], Sequence[Splice]]
"""What one feature changes of a body, found without a look at what others change."""


class Leg(NamedTuple):
    """One request to one backend. `edits`: those of this leg alone, in order. `read` marks a leg whose answer the node
    reads itself: it is given the body of that answer, and returns edits of the legs after it."""

    decision: Decision
    edits: Sequence[Edit] = ()
    read: Callable[[bytes], Sequence[Edit]] | None = None


Plan: TypeAlias = Sequence[Leg]
"""Legs in the order in which they are carried out. The client gets the answer of the last one, which alone is not
`read`; of the others the whole answer proves that their backends hold the prompt."""


class Observer:
    """Is notified of each event of every attempt, in order: a recorder, policies in the shadow. It raises nothing.

    Not an observer of calls: a shadow places in the same moment as the policy does, an answer may be read only after
    its call is over, and the replay has attempts and no calls.
    """

    def attempt_sent(self, attempt: Attempt, now: float) -> None:
        """The attempt was sent. No request waits for its own notice."""

    def started(self, attempt: Attempt, now: float) -> None:
        """The attempt's first token came."""

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        """The attempt's answer was read, before or after it finished; not every attempt has one. `end` is the prompt's
        end, or continues its chain."""

    def finished(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """The attempt ended."""


class Notices:
    """What each event of an attempt calls: the methods of those observers that do something then."""

    __slots__ = ("answered", "finished", "observers", "sent", "started")

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        def calls(nothing: Callable[..., None]) -> Sequence[Callable[..., None]]:
            found = [getattr(each, nothing.__name__) for each in observers]
            return [call for call in found if call.__func__ is not nothing]

        self.observers = tuple(observers)
        self.sent, self.started = calls(Observer.attempt_sent), calls(Observer.started)
        self.answered, self.finished = calls(Observer.answered), calls(Observer.finished)


UsedPrefix: TypeAlias = tuple[int, int, float]
"""(depth in tokens, second of that route's evidence, tokens that its engine has used since that second)."""


@dataclass(slots=True, eq=False)
class BackendReply:
    """What is known so far of a backend's answer to one attempt."""

    status: int = 0  # 0 = none came
    sent_bytes: int = 0  # to the client
    counts: AnswerCounts = UNCOUNTED  # the engine's, of an answer that ended well
    completion_tokens: int = 0  # by the engine's count; 0: not known
    outcome: Outcome | None = None  # set at the attempt's end
    complaint: str = ""  # why it failed, for the operator
    is_blank: bool = False  # it finished without a word
    decoded: Decoded | None = None  # set at the attempt's end: how long it took; its tokens once they are known
    ended_at: float = 0.0  # 0: not yet


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one backend, from its sending to its end."""

    prompt: Prompt
    decision: Decision
    target: Backend
    generation: int  # of the target, when it was sent
    work: InFlight  # as its backend's work counts it, in tokens as the policy weighs them
    speculation: Sequence[int]  # the fingerprints that it claims, see `Speculation.add`
    sent_at: float
    reply: BackendReply = field(default_factory=BackendReply)
    service: Service | None = None  # set at its first token, if the answer is a stream
    uses: Sequence[UsedPrefix] | None = None  # of what its backend held then, deepest first; None: not looked up
    checkpoint: tuple[int, float] | None = None  # deepest one it should find: position, others used since (Checkpoints)
    first_at: float | None = None  # when the first token came; until then the prefill is not proved
    announced: bool = False  # observers were notified that it was sent
    judged: bool = True  # it asks for inference, so its outcome shows how well its engine is, and is not settled later

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt's tokens: by the engine's count, else as far as the node knows them now."""
        counted = self.reply.counts.prompt
        return self.prompt.end.length if counted is None else counted

    @property
    def reports_hits(self) -> bool:
        """Whether a count of 0 cached tokens, or none, means that nothing was cached, see `Reuse.apis`."""
        return self.prompt.api in self.target.reuse.apis

    def computed_by(self, answer: Answer) -> int | None:
        """Return the prompt tokens that the engine computed, by its count; None if it counted none. Bounded by the
        body's bytes, or the tokens expected: a wrong count would be learned as a rate, for all engines. A body that
        names a stored response, or media by their URLs, has only a part of the prompt: its bound is UNSEEN_TOKENS_MAX.
        """
        if self.prompt.counts_differ or answer.prompt_tokens is None or answer.cached_tokens is None:
            return None
        computed_tokens = max(0, answer.prompt_tokens - answer.cached_tokens)
        most = max(self.decision.prompt_tokens, self.prompt.end.length, len(self.prompt.body))
        if computed_tokens > most and (self.prompt.response_key or MEDIA_URL in self.prompt.body):
            most = UNSEEN_TOKENS_MAX
        return min(computed_tokens, most)

    def correction(self, answer: Answer) -> tuple[Service, int] | None:
        """Return the service of the attempt and the tokens that it really computed; None if the engine does not say."""
        computed_tokens = self.computed_by(answer) if self.reports_hits else None
        return None if self.service is None or computed_tokens is None else (self.service, computed_tokens)


@dataclass(slots=True)
class RouterCounters:
    """What happened since the start.

    Predicted tokens are what the router believes to be cached, cached tokens what the engines count as cached; the
    difference is the router's error."""

    prompts_unread: dict[str, int] = counter(
        "Request bodies that were not understood, and were routed by load.", label="reason"
    )
    decisions: dict[str, int] = counter("Placements of requests on backends, by reason.", label="reason")
    matches: dict[str, int] = counter(
        "Placements of requests, by the fingerprints (text, tokens) that matched.", label="source"
    )
    outcomes: dict[str, int] = counter("Attempts of requests at backends, by how they ended.", label="outcome")
    prompt_tokens: int = 0  # placed on backends, exact or estimated; metrics have these four by model and by backend
    predicted_tokens: int = 0  # to be cached at the chosen backend
    engine_prompt_tokens: int = 0  # as the engines counted
    engine_cached_tokens: int = 0
    learned_rows: int = counter("Rows of the route table created by learning from requests.")
    answers_learned: int = counter("Answers learned as part of the next prompt.")
    unsalted: int = counter("Requests of tenants to engines that, by their model cards, know no cache_salt there.")


def explained_length(prompt: Prompt) -> dict[str, Any]:
    """Return how long a prompt is, for `explain`. Of a body that is not read nobody knows; `unread` is why."""
    if prompt.kind == "opaque":
        return {"prompt_tokens": None, "prompt_tokens_exact": False, "unread": prompt.unread or "path"}
    return {"prompt_tokens": prompt.end.length, "prompt_tokens_exact": prompt.end.state is not None}


def candidate_view(backend: Backend, holder: Holder | None, credit: Credit | None) -> dict[str, Any]:
    """Return a candidate for `explain`. `credit_tokens`: those that a hybrid model's backend need not compute."""
    view = {
        "backend": backend.name,
        "load": backend.load,
        "weight": backend.weight,
        "reuses_prefixes": backend.reuse.believed,
        "matched_tokens": holder.tokens if holder else 0,
        "trust": Trust(holder.trust).name if holder else None,
    }
    return {**view, "credit_tokens": credit.tokens} if credit is not None else view


def source_of(prompt: Prompt, holders: Sequence[Holder]) -> str:
    if not holders:
        return "none"
    return "tokens" if prompt.end.token else "text"


def work_of(prompt: Prompt, decision: Decision, tokens: int, answer_tokens: int) -> InFlight:
    """Return a request as its backend's work counts it. `tokens`: to be computed, weighed by the policy.
    `answer_tokens`: as expected."""
    held = decision.matched_tokens
    shared = held if decision.shared else min(held, prompt.end.first.tokens)
    context = REQUEST_TOKENS + decision.prompt_tokens + answer_tokens // 2
    return InFlight(tokens, context, decision.prompt_tokens - shared + answer_tokens, prompt.stream)


def decoded_by(attempt: Attempt, now: float) -> Decoded | None:
    """Return how long the answer of an attempt that ended now took, as its backend's work has counted; without its
    tokens; None if it shows nothing."""
    work, own = attempt.work, attempt.target.work.own
    seconds = now - work.since
    if seconds <= 0.0 or (work.seen and not work.decoding):
        return None
    contexts = (own.area - work.area) / seconds
    return Decoded(attempt.target.id, 0, seconds, contexts, own.computed - work.computed)


def service_of(attempt: Attempt, gap_s: float, now: float) -> Service:
    """Return what the first token of a streamed answer shows; `gap_s`: since its backend's last progress."""
    work, decision = attempt.work, attempt.decision
    return Service(
        backend=decision.backend,
        computed_tokens=decision.computed_tokens,
        gap_s=gap_s,
        queued=work.queued,
        decoding=work.others,
        peer_tokens=work.peer_tokens,
        prompt_tokens=decision.prompt_tokens,
        since_end_s=now - attempt.target.work.own.ended_at,
    )


def learn_counts(attempt: Attempt, computed_tokens: int, policy: Policy) -> None:
    """Learn from an engine's count how many prompt tokens it computed."""
    policy.learner.counted(attempt.target.id, attempt.decision.computed_tokens, computed_tokens, attempt.service)
    if (
        attempt.service is None and not attempt.prompt.stream
    ):  # its time is that of what was computed, not of what was believed
        more = computed_tokens - attempt.decision.computed_tokens
        attempt.target.work.own.computed += more
        if (decoded := attempt.reply.decoded) is not None:
            attempt.reply.decoded = decoded._replace(computed=max(0, decoded.computed + more))


def learn_length(attempt: Attempt, lengths: AnswerLengths, policy: Policy) -> None:
    """Once both the end and the length of an answer are known, learn how long it is and how long it took."""
    reply = attempt.reply
    decoded, tokens = reply.decoded, reply.completion_tokens
    if decoded is None or not tokens:
        return
    reply.decoded = None
    lengths.observe(attempt.prompt.end.first.text, tokens)
    if attempt.target.generation == attempt.generation:
        policy.learner.decoded(decoded._replace(tokens=max(1, tokens - attempt.prompt.stream)))


def decision_of(prompt: Prompt, found: PoolMatch, choice: Choice, names: tuple[str, str], *, shared: bool) -> Decision:
    """Return the decision that a choice is. `names`: of the chosen backend, and of the policy."""
    pool, (backend, reason, tokens) = found.pool, choice
    credit = found.credit.get(backend)
    prompt_tokens = prompt.tokens
    tokens = min(credit.tokens if credit is not None else tokens, prompt_tokens)
    return decided(
        (
            backend,
            names[0],
            "silent"
            if pool.silent
            else "last_resort"
            if pool.last_resort
            else "owner"
            if prompt.response_key
            else reason,
            names[1],
            tokens,
            prompt_tokens,
            found.source,
            found.holders,
            pool.ids,
            [each.load for each in pool.backends],
            credit,
            shared,
        )
    )
