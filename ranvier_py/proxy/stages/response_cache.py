"""Answers requests without a backend, with the answer that an equal request got before or is getting now.

This is Continuum's tier 2, in front of routing: a hit is matched, placed and counted nowhere else. Of equal requests at
the same time one is sent, and all get its answer as it comes, or its error: none waits twice for one that fails. The
request that would be sent first looks at stores beyond this process.
Invariant: a client gets what an engine answered to an equal body of its own, or nothing (test_cached_responses.py).

Answers belong to a credential (`askers`), and are void once an engine refuses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, Protocol

from ranvier_py.core.answers.answer_ends import AnswerEnds
from ranvier_py.core.errors import ClientGone, RanvierError, UpstreamClosed
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.prompts.tenants import Tenants
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.arrived_answers import Arrived, stored_answer, stored_at_once
from ranvier_py.core.response_cache.askers import Asker, Askers
from ranvier_py.core.response_cache.cache_keys import APIS, Question, question_of
from ranvier_py.core.response_cache.invalidations import VoidScope
from ranvier_py.core.response_cache.refused_credentials import RefusedCredentials
from ranvier_py.core.response_cache.stored_answers import CONTENT_TYPES, StoredAnswer
from ranvier_py.core.routing.health import outcome_of
from ranvier_py.proxy.call import BYPASS, HIT, MISS, Call
from ranvier_py.proxy.driver import Steps, in_portions
from ranvier_py.proxy.http_values import Fields, HttpRequest
from ranvier_py.proxy.shared_answer import SharedAnswer

RESULTS = {HIT: "hit", MISS: "miss", BYPASS: "skip"}
"""Continuum's names of results: in the field X-Cache, and in metrics."""


REFUSALS = (401, 403)

WAITS_MAX = 2
"""A request waits for so many others. The first may turn out to be of another kind, and not to be convertible."""

Forward = Callable[[Call], Steps[None]]

CHUNKING_BYTES = 65_536  # room for the framing of an answer that comes in chunks


class AnswersElsewhere(Protocol):
    """Answers that are kept outside this process. Nothing here raises, or waits but `find`, which has a deadline."""

    backend: str  # its name in the configuration
    uses_memory: bool  # answers found or kept there are also kept in this process's memory

    def refuse(self, credential: bytes) -> None: ...  # drops all answers of this credential
    def set_options(self, responses: ResponseCacheOptions) -> None: ...
    async def run(self) -> None: ...
    async def find(self, key: bytes, max_age_s: float) -> StoredAnswer | None: ...
    def keep(self, key: bytes, answer: StoredAnswer, asked_at: float) -> None: ...
    async def invalidate(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> int | None: ...
    def view(self) -> Mapping[str, Any]: ...  # in addition to, or instead of, the memory's figures
    def metrics(self) -> Iterator[Sample]: ...


class ResponseCache:
    """The response cache of a node. `tenants` determines which clients share answers. `voids` is called with what an
    operator invalidates: scope, moment and time."""

    def __init__(self, store: AnswerStore, tenants: Tenants, elsewhere: AnswersElsewhere | None = None) -> None:
        self.store = store
        self.tenants = tenants
        self.elsewhere = elsewhere
        self._askers = Askers(tenants)
        self._refused = RefusedCredentials()
        self._uses_memory = elsewhere is None or elsewhere.uses_memory
        self.voids: Callable[[VoidScope, float, float], object] = partial(store.invalidations.give, giver=1)
        self._shared: dict[bytes, SharedAnswer] = {}  # answers in progress, by key

    def answer(self, call: Call, forward: Forward) -> Steps[None]:
        """Answer a request; `forward` sends it to a backend."""
        asker = self._askers.of(call.request.headers)
        try:
            question = self._question(call.request, asker)
            if question is not None and call.identity is not None and not call.may_use(question.model):
                question = None  # another key of this tenant may have asked: what follows refuses this one
            result = BYPASS if question is None else (yield from self._answer(call, question, asker, forward))
            if result == BYPASS:
                self._count(call, result)
                yield from forward(call)
        finally:
            if call.status in REFUSALS:
                self._refuse(asker.credential)

    def _answer(self, call: Call, question: Question, asker: Asker, forward: Forward) -> Steps[bytes]:
        """Answer a question. Returns BYPASS if the cache could not."""
        store = self.store
        for _ in range(WAITS_MAX + 1):
            stored = store.find(question.key, time.monotonic(), question.max_age_s)
            if stored is not None:
                self._refused.answered(asker.credential)
                return (yield from self._replay(call, question, stored))
            shared = self._shared.get(question.key) if question.max_age_s > 0 else None
            if shared is not None and (
                shared.is_left or store.invalidations.void(question.model, asker.owner, shared.asked_at)
            ):
                del self._shared[question.key]  # requests that wait for it get it, later ones do not
                shared = None
            if shared is None:
                return (yield from self._lead(call, question, asker, forward))
            if (yield from self._follow(call, question, shared)):
                return call.cached
            stored = shared.stored
            if stored is not None and time.monotonic() - stored.stored_at <= question.max_age_s:
                return (yield from self._replay(call, question, stored))
            if not (shared.is_complete or shared.stored):
                break
        return BYPASS

    def _question(self, request: HttpRequest, asker: Asker) -> Question | None:
        """Return what is asked. None: the cache has no part in this request, or it asks for a stream in HTTP/1.0, which
        has no chunks."""
        fields = request.fields
        if request.method != b"POST" or not fields.readable or request.path not in APIS or not asker.may_share:
            return None
        options = self.store.options.eligible
        found = question_of(request.target, request.body, asker.owner, fields.cache_control, options)
        return None if found is not None and found.stream and not request.http_minor else found

    def _refuse(self, credential: bytes) -> None:
        """Drop the answers of a credential that an engine refused."""
        store, now = self.store, time.monotonic()
        scope, is_known = VoidScope("", credential), store.has_any(credential)
        if is_known:
            store.void(scope)
        store.counters.refused += 1
        if self._refused.spreads(credential, now, store.options.ttl_s, is_known=is_known):
            store.invalidations.expire(now)
            self.voids(scope, now, now)
            if self.elsewhere is not None:
                self.elsewhere.refuse(credential)
        else:
            store.counters.refused_unspread += 1

    def _count(self, call: Call, result: bytes) -> None:
        call.cached = result
        self.store.counters.requests[RESULTS[result]] += 1

    def _replay(self, call: Call, question: Question, stored: StoredAnswer) -> Steps[bytes]:
        """Answer with a stored answer. Returns BYPASS if it can't be converted to the kind that is asked for."""
        body = yield from in_portions(stored.reply(question))
        if body is None:
            return BYPASS
        kind = stored.content_type if stored.stream == question.stream else CONTENT_TYPES[question.stream]
        age = b"%d" % (time.monotonic() - stored.stored_at)
        if (held := call.reservation) is not None:
            yield from held.by.reserve_stored(call, held, question.model, stored.ends) or ()
        self._count(call, HIT)
        if call.client.renamed is not None:
            body = call.client.renamed.stored(body, in_chunks=question.stream)
        call.client.respond(200, body, ((b"x-cache", HIT), (b"age", age)), kind, chunked=question.stream)
        self._served(call, 200, stored.tokens, len(body))
        return HIT

    def _served(self, call: Call, status: int, tokens: tuple[int, int], sent_bytes: int) -> None:
        call.status, call.outcome, call.sent_bytes = status, outcome_of(status).value, sent_bytes
        call.first_byte_at = call.first_byte_at or time.monotonic()
        counters = self.store.counters
        counters.saved_prompt_tokens += tokens[0]
        counters.saved_output_tokens += tokens[1]

    def _lead(self, call: Call, question: Question, asker: Asker, forward: Forward) -> Steps[bytes]:
        """Look outside, or let a backend answer, for this client and for those that ask the same meanwhile."""
        options, key = self.store.options, question.key
        bytes_max = options.stream_bytes_max if question.stream else options.answer_bytes_max + CHUNKING_BYTES
        shared = SharedAnswer(question, call.request, call.client, bytes_max)
        self._shared.setdefault(key, shared)
        try:
            if self.elsewhere is not None and question.max_age_s > 0:
                shared.stored = yield partial(self._find_elsewhere, question)
            if shared.stored is None:
                self._count(call, MISS)
                call.shared = shared
                yield from forward(call)
                if call.named is None or not call.named.fell_back:
                    yield from self._keep(question, asker, shared)
        except RanvierError as error:
            if not isinstance(error, ClientGone):
                shared.failure = error
            raise
        finally:
            if self._shared.get(key) is shared:
                del self._shared[key]
            shared.end()
        if call.shared is None:
            assert shared.stored is not None
            self._refused.answered(asker.credential)
            return (yield from self._replay(call, question, shared.stored))
        while shared.lags:
            yield shared.flush
        if not shared.has_client:
            raise ClientGone("the client closed the connection")
        return MISS

    async def _find_elsewhere(self, question: Question) -> StoredAnswer | None:
        assert self.elsewhere is not None
        found = await self.elsewhere.find(question.key, question.max_age_s)
        if found is not None and self._uses_memory:
            self.store.keep(question.key, found)
        return found

    def set_options(self, options: ResponseCacheOptions) -> None:
        """Use these options from now on, and drop what they don't allow."""
        self.store.options = options
        self.store.trim()
        if self.elsewhere is not None:
            self.elsewhere.set_options(options)

    def metrics(self) -> Iterator[Sample]:
        """Yield the metrics of the cache, wherever its answers are."""
        yield from samples("response_cache", self.store.counters)
        words = "Share of hits among hits and misses since the start."
        yield Sample("response_cache_hit_rate", "gauge", words, self.store.counters.hit_rate)
        label = {"backend": self.store.options.backend}
        yield Sample("cache_backend_type", "gauge", "1 for where the response cache is kept.", 1, label)
        if self.elsewhere is not None:
            yield from self.elsewhere.metrics()

    async def invalidate(
        self, model: str | None = None, tenant: bytes | None = None, older_than_s: float | None = None
    ) -> int | None:
        """Drop the answers of this model and tenant that are older, here and elsewhere. How many; None: unknown."""
        now = time.monotonic()
        scope, before = VoidScope(model or "", tenant or b""), now - (older_than_s or 0.0)
        cleared: int | None = self.store.void(scope, before)
        self.store.invalidations.expire(now)
        self.voids(scope, before, now)
        if self.elsewhere is not None:
            more = await self.elsewhere.invalidate(model, tenant, older_than_s)
            cleared = None if cleared is None or more is None else cleared + more
        return cleared

    def _keep(self, question: Question, asker: Asker, shared: SharedAnswer) -> Steps[None]:
        """Keep the answer, if it is complete and may be kept."""
        head, store, found = shared.head, self.store, None
        if shared.is_complete and head is not None and head.fields.readable and (body := shared.body) is not None:
            usual = CONTENT_TYPES[question.stream]
            kind = head.fields.kind or usual
            if kind.startswith(usual):
                arrived = Arrived(kind, head.framing, body, shared.counts)
                given = question, asker.owner, arrived, time.monotonic(), store.options.answer_bytes_max
                if question.stream or head.framing == "chunked":
                    found = yield from in_portions(stored_answer(*given))
                else:
                    found = stored_at_once(*given)
        if found is None or store.invalidations.void(question.model, asker.owner, shared.asked_at):
            store.counters.unkept += 1
        else:
            shared.stored = found
            self._refused.answered(asker.credential)
            if self._uses_memory:
                store.keep(question.key, found)
            if self.elsewhere is not None:
                self.elsewhere.keep(question.key, found, shared.asked_at)

    def _follow(self, call: Call, question: Question, shared: SharedAnswer) -> Steps[bool]:
        """Give the client the leader's answer as it comes. Returns False if this client can't use it. Raises the error
        that the leader met before it had one."""
        client = call.client
        with shared.followed() as follower:
            while not (serves := shared.serves(question, call.request)) and not shared.is_decided:
                yield shared.kept.change
            head = shared.head
            if head is None or not serves:
                if shared.failure is not None:
                    raise copy(shared.failure)  # without its traceback
                return False
            held = call.reservation if head.status == 200 else None
            if held is not None:
                yield from held.by.reserve_stored(call, held, question.model, AnswerEnds()) or ()
            self._count(call, HIT if head.status == 200 else MISS)
            named = () if head.fields.names_request else ((b"x-request-id", call.id),)
            age: Fields = ((b"age", b"0"),) if head.status == 200 else ()
            own = client.cors.replaced(head, call.request.fields.origin)  # the leader's page may be another one
            client.relay_head(own, ((b"x-cache", call.cached), *age, *named))
            while not (shared.over and shared.kept.is_at_end(follower)):
                piece = shared.kept.next_piece(follower)
                if piece:
                    client.send(piece)
                elif not shared.over:
                    yield shared.kept.change
                if client.unsent is not None:
                    yield client.flush
        if not shared.is_whole:
            raise UpstreamClosed("the answer that was waited for broke off")
        self.store.counters.shared += head.status == 200
        tokens = (0, 0)
        if shared.stored is not None:
            tokens = shared.stored.tokens
            if held is not None:
                held.stored = held.stored._replace(cost=held.by.price_stored(call, held, shared.stored.ends))
        self._served(call, head.status, tokens, follower.at)
        return True
