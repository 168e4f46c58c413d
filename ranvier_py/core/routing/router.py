"""The Router composes the parts of the routing core and decides nothing itself.

It has two drivers: a node with real sockets and a clock, and the simulator with a seeded event heap. Rule: every
method is one synchronous call, hence atomic: match, place and learn never see each other half done, and there is no
lock.
    prompt = router.read(path, body), found = router.find(prompt, now), decision = router.place(prompt, found)
    attempt = router.start_attempt(prompt, decision, now), router.first_token(attempt, now), then finish_attempt once
    router.learn_tokens(attempt, …)    off the path, later: the same boundaries with tokens, the answer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import partial
from random import Random
from typing import Any

from ranvier_py.core.answers.answer_stream import Answer
from ranvier_py.core.errors import ResponseLost
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.prompts.fingerprint import Segment, TokenHasher
from ranvier_py.core.prompts.prompt import Boundary, PrefixKey
from ranvier_py.core.prompts.request_apis import APIS
from ranvier_py.core.prompts.request_body import Prompt, PromptReader
from ranvier_py.core.routing.attempt import (
    NO_CREDIT,
    Attempt,
    Notices,
    Observer,
    PoolMatch,
    RouterCounters,
    candidate_view,
    decision_of,
    decoded_by,
    explained_length,
    learn_counts,
    learn_length,
    pool_match_of,
    service_of,
    source_of,
    work_of,
)
from ranvier_py.core.routing.backends import Outcome, Pool, Registry, Transition
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.owners import Owners
from ranvier_py.core.routing.placement import (
    SEVERAL_HOLDERS,
    Choice,
    Decision,
    Match,
    Policy,
    match_of,
)
from ranvier_py.core.routing.placement.sticky_least_loaded import prefix_depth
from ranvier_py.core.routing.prefix_holders import PrefixHolders
from ranvier_py.core.routing.rates.decode_rate import AnswerLengths
from ranvier_py.core.routing.recent_decisions import RecentDecisions
from ranvier_py.core.routing.request_paths import PATHS
from ranvier_py.core.routing.route_table import RouteTable, Trust, Unheld
from ranvier_py.core.routing.stored_paths import OF_NONE

__all__ = ["Attempt", "Observer", "PoolMatch", "Router", "RouterCounters"]

CHAT_APIS = {path: APIS[rule.reader] for path, rule in PATHS.items() if rule.reader in APIS}

SESSION_LOAD_FACTOR, SESSION_LOAD_FREE = 2, 2
"""A prompt follows its session to a backend whose load is at most FACTOR x the least load + FREE requests."""

ENOUGH_SHARE = 0.5
"""Below this share of the prompt a text match is too short to place on: tokens may match deeper, in mid-message."""


class Router:
    """Composes reader, route table, registry and policy.

    Args:
        texts_match: whether equal messages become equal tokens at every turn (the template's `keeps_turns`). If not,
            only token fingerprints are matched and learned.
        recent_max: how many of the latest decisions are kept for the control port.
    """

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        *,
        reader: PromptReader,
        hasher: TokenHasher,
        routes: RouteTable,
        registry: Registry,
        policy: Policy,
        rng: Random,
        texts_match: bool = True,
        recent_max: int = 256,
    ) -> None:
        self.reader = reader
        self.hasher = hasher
        self.routes = routes
        self.owners = Owners(reader.digest)
        self.holders = PrefixHolders(routes, texts_match=texts_match)
        self.lengths = AnswerLengths()
        self.registry = registry
        self.policy = policy
        self.counters = RouterCounters()
        self.recent = RecentDecisions(recent_max)
        self._rng = rng
        self._notices = Notices()
        self.checkpoints = Checkpoints(
            lambda end: routes.rows.known_chain(self.holders.chain(end)),
            self._observe,
            block_tokens=hasher.block_tokens,
        )

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self._notices.observers

    @observers.setter
    def observers(self, observers: Sequence[Observer]) -> None:
        self._notices = Notices(observers)

    def _observe(self, observer: Observer) -> None:
        self.observers += (observer,)

    # --- read -------------------------------------------------------------------------------------------------------

    def read(self, path: bytes, body: bytes, tenant: bytes = b"", session: bytes = b"", *, dry: bool = False) -> Prompt:
        """Return the prompt of a request. Raises BadRequest when the body is not JSON.

        `tenant`: the request's tenant (`prompts.tenants`); empty where tenants are not kept apart. `session`: the name
        that the request's header fields give its client session.
        `dry`: for `explain`. The reader remembers nothing of this prompt, and fills in its chain in a private copy.
        """
        reader = self.reader.forgetful(self.hasher) if dry else self.reader
        api = CHAT_APIS.get(path)
        if api is not None:
            prompt = reader.chat(body, tenant, api)
        elif path in PATHS and PATHS[path].reader:
            prompt = reader.completion(body, tenant, PATHS[path].reader)
        else:
            prompt = reader.other(body, tenant, continues=path in OF_NONE)
        if prompt.previous:
            prompt.response_key = self.owners.response_key(prompt.previous, tenant)
        if session or prompt.session_name:
            name = session or prompt.session_name.encode("utf-8", "surrogatepass")
            prompt.session = self.owners.session_key(name, tenant)
        if dry:
            prompt.detach()
        elif prompt.unread:
            self.counters.prompts_unread[prompt.unread] += 1
        return prompt

    # --- match and place --------------------------------------------------------------------------------------------

    def find(self, prompt: Prompt, now: float, tried: Collection[BackendId] = (), *, touch: bool = True) -> PoolMatch:
        """Return the backends that may serve this prompt, without those in `tried`, and how much of it each holds.

        With `touch` False this is a dry run for a request that tried no backend: no use of a route is noted.
        Raises NotFound for a model that no backend serves, NoBackend when none of those that serve it can be asked now,
        and ResponseLost for a stored response whose engine is gone.
        """
        if prompt.response_key:
            return self._found_keeper(prompt, now, tried, touch=touch)
        if touch:
            pool = self.registry.pools.pool(prompt.model, now, tried, prompt.avoid)
        else:
            pool = self.registry.pools.make_pool(prompt.model, (), prompt.avoid, now)
        if not pool.ids:
            raise self.registry.pools.names.error(pool, prompt.model)
        unheld = Unheld()
        wanted, credit, hybrids = self.policy.depths_wanted, NO_CREDIT, self.checkpoints.known
        if hybrids and wanted:  # the deepest holder may have no checkpoint to go on from
            wanted = max(wanted, SEVERAL_HOLDERS)
        learned, holders = self.holders.find(prompt, pool, now, wanted, unheld, touch=touch)
        if hybrids and holders:
            holders, credit = self.checkpoints.credited(prompt, holders, learned, pool.generations, now)
        return pool_match_of((pool, holders, source_of(prompt, holders), learned, unheld, now, credit))

    def _found_keeper(self, prompt: Prompt, now: float, tried: Collection[BackendId], *, touch: bool) -> PoolMatch:
        """Return a pool of one: the engine that keeps the response that the prompt names. No other may be asked."""
        owner = self.owners.find(prompt.response_key, now)
        backend = self.registry.ids.current(owner.backend) if owner is not None else None
        gone = backend is None or owner is None or backend.generation != owner.generation
        if owner is None and not self.owners.isolated and len(self.registry) == 1:  # it may be older than this node
            backend, gone = next(iter(self.registry)), False
        if backend is None or gone or backend.vitals.dead or backend.id in tried:
            self.owners.counters.lost += touch
            raise ResponseLost("no engine keeps this response: it was never stored, or its engine has ended since")
        pool = Pool([backend], len(self.registry.ids.slots), last_resort=False, unknown=False)
        return PoolMatch(pool=pool, holders=(), source="none", learned_tokens=0, unheld=Unheld(), at=now)

    def too_little(self, prompt: Prompt, found: PoolMatch) -> bool:
        """Whether the text chain found so little that tokenizing before placement may pay."""
        if prompt.kind == "opaque" or prompt.end.state is not None or self.policy.depths_wanted == 0:
            return False
        tokens = prompt.end.tokens
        if tokens < self.hasher.block_tokens:
            return False
        if found.credit:  # hybrid backends reuse less than they hold: tokenizing changes nothing about that
            return found.learned_tokens < ENOUGH_SHARE * tokens
        return not found.holders or found.holders[0].tokens < ENOUGH_SHARE * tokens

    def place(self, prompt: Prompt, found: PoolMatch) -> Decision:
        """Choose a backend: that of the prompt's session if nobody holds any of it (`_hinted`), else the policy's."""
        if (hinted := self._hinted(prompt, found)) is not None:
            self.owners.counters.hinted += 1
            return self._decision(prompt, found, hinted)
        match, candidates = self._match(prompt, found), found.pool.backends
        decision = self._decision(prompt, found, self.policy.choose(match, candidates, self._rng), match.shared)
        if self.recent.weighed_until > found.at:
            self.recent.weigh(decision, lambda: copy(self.policy).terms(match, candidates), found.at)
        return decision

    def _hinted(self, prompt: Prompt, found: PoolMatch) -> Choice | None:
        """Choose the backend that served the prompt's session last, unless the least loaded one has much less to do."""
        if not prompt.session or found.holders or not (prompt.sub_agent or prompt.end.messages < 2):
            return None  # longer prompts go where prompts like them go
        owner, backends = self.owners.find(prompt.session, found.at), found.pool.backends
        backend = next((each for each in backends if owner is not None and each.id == owner.backend), None)
        if owner is None or backend is None or backend.generation != owner.generation or not backend.reuse.believed:
            return None
        if backend.load > SESSION_LOAD_FACTOR * min(each.load for each in backends) + SESSION_LOAD_FREE:
            return None
        return Choice(backend.id, "session", 0)

    def _match(self, prompt: Prompt, found: PoolMatch) -> Match:
        """Return what the policy reads, and no more than it says that it reads."""
        holders, tokens = found.holders, prompt.tokens
        if not (prompt.end.messages and (holders or found.pool.reuses or not self.policy.depths_wanted)):
            return Match((), tokens, UNKNOWN, at=found.at, answer_tokens=self.lengths.expected(UNKNOWN))
        policy, first, end = self.policy, prompt.end.first, prompt.end
        opening = prompt.opening(size, policy.opening_source) if (size := policy.opening_bytes) else b""
        prefix_tokens = prefix_depth(prompt.prefix_len, self.hasher.block_tokens) if policy.wants_prefix else 0
        key: PrefixKey = (0, UNKNOWN, UNKNOWN)
        several, shared, wants_shared = None, False, policy.wants_shared
        if holders and (wants_shared or policy.depths_wanted > 1):
            held_tokens = found.held_tokens
            key = self.holders.key_at(end, found, held_tokens)
            if wants_shared:
                several = partial(self.holders.several, prompt, found)
                shared = self.holders.is_shared(end, tokens, found, key, held_tokens)
        evicted = found.evicted(self.routes.rows) if wants_shared else None
        deepest = Fingerprint(key[1] or key[2])
        answer_tokens = self.lengths.expected(first.text)
        of_prompt = (holders, tokens, first.text, first.tokens, end.text, found.at, deepest)
        return match_of((*of_prompt, opening, prefix_tokens, shared, several, answer_tokens, evicted))

    def _decision(self, prompt: Prompt, found: PoolMatch, choice: Choice, shared: bool = False) -> Decision:
        names = (self.registry[choice.backend].name, self.policy.name)
        return decision_of(prompt, found, choice, names, shared=shared)

    # --- one attempt -------------------------------------------------------------------------------------------------

    def start_attempt(
        self,
        prompt: Prompt,
        decision: Decision,
        now: float,
        request_id: bytes = b"",
        found: PoolMatch | None = None,
        *,
        quiet: bool = False,
    ) -> Attempt:
        """Count the request as in flight at the decided backend. Exactly one `finish_attempt` must follow.

        `found`: the match that the decision was made from; without it the prompt's chain is walked again. `quiet`: the
        caller itself calls `announce` once the request is on its way.
        """
        prompt_tokens, matched_tokens = decision.prompt_tokens, decision.matched_tokens
        weighed_tokens = self.policy.learner.work_of(matched_tokens, prompt_tokens)
        work = work_of(prompt, decision, weighed_tokens, int(self.lengths.expected(prompt.end.first.text)))
        target = self.registry[decision.backend]
        expected_at = now if work.seen else self.policy.learner.expected_at(target, work.tokens, now)
        self.registry.dispatched(target, now, work, expected_at)
        claimed: Sequence[int] = ()
        if self.policy.depths_wanted and prompt.kind != "opaque" and matched_tokens < prompt_tokens:
            unmatched = self.holders.unmatched(prompt, decision, found)
            computed_tokens = prompt_tokens - matched_tokens
            claimed = self.holders.speculation.add(unmatched, target.id, target.generation, computed_tokens)
        self.recent.made.append((now, request_id, decision))
        counters = self.counters
        counters.decisions[decision.reason] += 1
        counters.matches[decision.source] += 1
        counters.predicted_tokens += matched_tokens
        counters.prompt_tokens += prompt_tokens
        attempt = Attempt(
            prompt=prompt,
            decision=decision,
            target=target,
            generation=target.generation,
            work=work,
            speculation=claimed,
            sent_at=now,
        )
        if not quiet:
            self.announce(attempt)
        return attempt

    def announce(self, attempt: Attempt) -> None:
        """Notify the observers once that it was sent. They may walk a long prompt: no request should wait for that."""
        if attempt.announced:
            return
        attempt.announced = True
        for notify in self._notices.sent:
            notify(attempt, attempt.sent_at)

    def first_token(self, attempt: Attempt, now: float) -> None:
        """Learn that the backend holds the prompt: output came, so the prefill is done. Only the first call counts."""
        if attempt.first_at is not None:
            return
        attempt.first_at = now
        if attempt.prompt.stream:
            gap_s = attempt.target.work.prefilled(attempt.work, now)
            attempt.service = service_of(attempt, gap_s, now)
            self.policy.learner.served(attempt.service)
        self.settle(attempt)
        self._learn(attempt, attempt.prompt.end, now)
        for notify in self._notices.started:
            notify(attempt, now)

    def finish_attempt(self, attempt: Attempt, outcome: Outcome, now: float) -> Sequence[Transition]:
        """End the attempt, whatever its outcome. Returns the transitions of the backend's health, for the log."""
        assert not attempt.work.ended, "an attempt ends once"
        if not attempt.announced:
            self.announce(attempt)
        if attempt.speculation:
            self.settle(attempt)
        self.counters.outcomes[outcome.value] += 1
        attempt.reply.ended_at = now
        for notify in self._notices.finished:
            notify(attempt, outcome, now)
        if outcome is Outcome.SUCCESS and not (attempt.work.seen or attempt.work.decoding):  # sooner than expected
            attempt.target.work.prefilled(attempt.work, now)
        transitions = self.registry.finished(attempt.target, outcome, now, attempt.work, judged=attempt.judged)
        if outcome is Outcome.SUCCESS:
            attempt.reply.decoded = decoded_by(attempt, now)
            learn_length(attempt, self.lengths, self.policy)
        return transitions

    def stored(self, attempt: Attempt, name: str, tenant: bytes, now: float) -> None:
        """Remember that this backend keeps the response `name`: later requests may name it by that id."""
        if not attempt.target.removed and attempt.target.generation == attempt.generation:
            self.owners.learn(self.owners.response_key(name, tenant), attempt.target.id, attempt.generation, now)

    # --- learning off the path --------------------------------------------------------------------------------------

    def absorb(self, prompt: Prompt, ancestor: Boundary, segments: Sequence[Segment | None]) -> None:
        """Fill in the tokens of the messages after `ancestor`, which is on the chain; None: no clean cut at its end."""
        boundary = prompt.end
        for segment in reversed(segments[: boundary.messages - ancestor.messages]):
            if segment is not None and boundary.state is None:
                boundary.tokenized(segment)
            assert boundary.parent is not None
            boundary = boundary.parent

    def learn_tokens(
        self, attempt: Attempt, ancestor: Boundary, segments: Sequence[Segment | None], answer: Answer, now: float
    ) -> None:
        """Fill in an attempt's tokens, extend its chain by the answer, and learn what the prefill has proved.

        `segments` are those of the messages after `ancestor`, then that of the answer if it could be tokenized.
        """
        prompt = attempt.prompt
        self.absorb(prompt, ancestor, segments)
        end = prompt.end
        if answer.message is not None and prompt.kind == "chat":
            end = self.reader.extend(end, answer.message)
            last = segments[-1] if len(segments) > prompt.end.messages - ancestor.messages else None
            if last is not None and end.state is None:
                end.tokenized(last)
            self.reader.memory.keep(end)
            self.counters.answers_learned += 1
        self.answered(attempt, end, answer, now)

    def answered(self, attempt: Attempt, end: Boundary, answer: Answer, now: float) -> None:
        """Add up the engine's counts, and learn the chat down to `end`: the prompt's end, or one that continues it."""
        if answer.prompt_tokens is not None:
            self.counters.engine_prompt_tokens += answer.prompt_tokens
            self.counters.engine_cached_tokens += answer.cached_tokens or 0
            if answer.cached_tokens:
                self.registry.reported_hit(attempt.target, attempt.generation, attempt.prompt.api)
            if (computed_tokens := attempt.computed_by(answer)) is not None and attempt.reports_hits:
                learn_counts(attempt, computed_tokens, self.policy)
        if answer.completion_tokens:
            attempt.reply.completion_tokens = answer.completion_tokens
            learn_length(attempt, self.lengths, self.policy)
        if attempt.first_at is not None:
            self._learn(attempt, end, now)
        for notify in self._notices.answered:
            notify(attempt, end, answer, now)

    # --- seeing -----------------------------------------------------------------------------------------------------

    def explain(self, prompt: Prompt, now: float) -> Mapping[str, Any]:
        """Return how the policy would place this prompt, which was read `dry`, and why. Changes nothing."""
        policy = copy(self.policy)
        found = self.find(prompt, now, touch=False)
        match = self._match(prompt, found)
        choice = self._hinted(prompt, found) or policy.choose(match, found.pool.backends, copy(self._rng))
        decision = self._decision(prompt, found, choice)
        _, everyone = self.holders.find(prompt, found.pool, now, len(found.pool.ids), Unheld(), touch=False)
        depth = {holder.backend: holder for holder in everyone}
        credit = self.checkpoints.credited(prompt, everyone, found.learned_tokens, found.pool.generations, now)[1]
        views = [candidate_view(each, depth.get(each.id), credit.get(each.id)) for each in found.pool.backends]
        for view, terms in zip(views, policy.terms(match, found.pool.backends), strict=False):
            view["terms"] = dict(terms)
        return {
            "policy": decision.policy,
            "chosen": decision.backend_name,
            "reason": decision.reason,
            "source": decision.source,
            **explained_length(prompt),
            "matched_tokens": decision.matched_tokens,
            "boundaries": prompt.end.messages,
            "candidates": views,
        }

    def terms(self, prompt: Prompt, found: PoolMatch) -> Sequence[Mapping[str, float]]:
        """Return what the policy weighs for each candidate, in their order; empty for a policy that weighs nothing."""
        return self.policy.terms(self._match(prompt, found), found.pool.backends)

    # --- inside -----------------------------------------------------------------------------------------------------

    def settle(self, attempt: Attempt) -> None:
        """Withdraw the attempt's speculative claims: its routes have been learned for real, or it failed."""
        claimed, attempt.speculation = attempt.speculation, ()
        self.holders.speculation.remove(claimed, attempt.target.id)

    def _learn(self, attempt: Attempt, end: Boundary, now: float) -> None:
        target, prompt = attempt.target, attempt.prompt
        is_there = not target.removed and target.generation == attempt.generation  # else what it held is gone
        if prompt.session and is_there:
            self.owners.learn(prompt.session, target.id, attempt.generation, now)
        if prompt.kind != "opaque":
            self.reader.remember(prompt)
        if prompt.kind == "opaque" or not is_there:
            return
        learned = self.routes.learn(self.holders.chain(end), target.id, attempt.generation, Trust.LOCAL, now)
        self.counters.learned_rows += learned
