"""Answers requests without a backend, with the answer that an equal request got before or is getting now.

This is Continuum's tier 2, in front of routing: a hit is matched, placed and counted nowhere else. Of equal requests at
the same time one is sent, and all get its answer as it comes; if it fails before the answer began, another one is
sent. If answers are also kept outside this process, the request that would be sent first looks there, while the others
wait. An answer that was asked for before an operator invalidated it is not kept, nor given to later requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from ranvier_py.core.errors import ClientGone, UpstreamClosed
from ranvier_py.core.metrics import Sample, increment, samples
from ranvier_py.core.prompts.tenants import Tenants
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.cache_keys import APIS, Question, question_of
from ranvier_py.core.response_cache.invalidations import VoidScope
from ranvier_py.core.response_cache.stored_answers import CONTENT_TYPES, Arrived, StoredAnswer, stored_answer
from ranvier_py.core.routing.health import Outcome
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.served_request import BYPASS, HIT, MISS, ServedRequest
from ranvier_py.proxy.shared_answer import SharedAnswer

RESULTS = {HIT: "hit", MISS: "miss", BYPASS: "skip"}
"""Continuum's names of results: in the field X-Cache, and in metrics."""


CHUNKING_BYTES = 65_536  # room for the framing of an answer that comes in chunks


class AnswersElsewhere(Protocol):
    """Answers that are kept outside this process.

    Attributes:
        backend: its name in the configuration.
        uses_memory: answers found or kept there are also kept in this process's memory.
    """

    backend: str
    uses_memory: bool

    def set_options(self, responses: ResponseCacheOptions) -> None:
        """Use these options from now on."""

    async def run(self) -> None:
        """Run for ever."""

    async def find(self, key: bytes, max_age_s: float) -> StoredAnswer | None:
        """Return the answer, if it is no older than that. Raises nothing, and has a deadline of its own."""

    def keep(self, key: bytes, answer: StoredAnswer, asked_at: float) -> None:
        """Have an answer kept that was asked for at that time. Raises nothing and does not wait."""

    async def invalidate(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> int | None:
        """Drop all answers of this model and tenant that are older. Returns how many; None if that is unknown."""

    def view(self) -> Mapping[str, Any]:
        """Return what the control port shows in addition to, or instead of, the memory's figures."""

    def samples(self) -> Iterator[Sample]:
        """Yield its metrics."""


class ResponseCache:
    """The response cache of a node. `tenants` determines which clients share answers.

    `voids` is called with what an operator invalidates: scope, moment and time.
    """

    def __init__(self, store: AnswerStore, tenants: Tenants, elsewhere: AnswersElsewhere | None = None) -> None:
        self.store = store
        self.tenants = tenants
        self.elsewhere = elsewhere
        self._uses_memory = elsewhere is None or elsewhere.uses_memory
        self.voids: Callable[[VoidScope, float, float], object] = partial(store.invalidations.give, giver=1)
        self._shared: dict[bytes, SharedAnswer] = {}  # answers in progress, by key

    def answer(self, served: ServedRequest, forward: Callable[[ServedRequest], Steps[None]]) -> Steps[None]:
        """Answer a request; `forward` sends it to a backend."""
        question, tenant = self._question(served.request)
        result = BYPASS if question is None else MISS
        while question is not None:
            stored = self.store.find(question.key, time.monotonic(), question.max_age_s)
            if stored is not None:
                result = self._replay(served, question, stored)
                break
            shared = self._shared.get(question.key) if question.max_age_s > 0 else None
            if shared is not None and (shared.is_left or self._is_void(question, tenant, shared.asked_at)):
                del self._shared[question.key]  # requests that wait for it get it, later ones do not
                shared = None
            if shared is None:
                result = yield from self._lead(served, question, tenant, forward)
                if result == MISS:
                    return
                break
            if (yield from self._follow(served, question, shared)):
                result = HIT
                break
            stored = shared.stored
            if stored is not None and time.monotonic() - stored.stored_at <= question.max_age_s:
                result = self._replay(served, question, stored)
                break
        self._count(served, result)
        if result != HIT:
            yield from forward(served)

    def _question(self, request: HttpRequest) -> tuple[Question | None, bytes]:
        """Return what is asked, and by which tenant. No question: the cache has no part in this request, or it asks for
        a stream in HTTP/1.0, which has no chunks."""
        fields = request.fields
        if request.method != b"POST" or not fields.readable or request.path not in APIS:
            return None, b""
        tenant = self.tenants.of(request.headers)
        found = question_of(request.path, request.body, tenant, fields.cache_control, self.store.options.eligible)
        if found is not None and found.stream and not request.http_minor:
            return None, tenant
        return found, tenant

    def _count(self, served: ServedRequest, result: bytes) -> None:
        served.cached = result
        increment(self.store.counters.requests, RESULTS[result])

    def _replay(self, served: ServedRequest, question: Question, stored: StoredAnswer) -> bytes:
        """Answer with a stored answer. Returns BYPASS if it can't be converted to the kind that is asked for."""
        body = stored.reply(question)
        if body is None:
            return BYPASS
        kind = stored.content_type if stored.stream == question.stream else CONTENT_TYPES[question.stream]
        age = b"%d" % (time.monotonic() - stored.stored_at)
        served.client.respond(200, body, ((b"x-cache", HIT), (b"age", age)), kind, chunked=question.stream)
        self._served(served, stored.tokens, len(body))
        return HIT

    def _served(self, served: ServedRequest, tokens: tuple[int, int], sent_bytes: int) -> None:
        served.status, served.outcome, served.sent_bytes = 200, Outcome.SUCCESS.value, sent_bytes
        served.first_byte_at = served.first_byte_at or time.monotonic()
        counters = self.store.counters
        counters.saved_prompt_tokens += tokens[0]
        counters.saved_output_tokens += tokens[1]

    def _lead(
        self,
        served: ServedRequest,
        question: Question,
        tenant: bytes,
        forward: Callable[[ServedRequest], Steps[None]],
    ) -> Steps[bytes]:
        """Look outside, or let a backend answer, for this client and for those that ask the same meanwhile."""
        options = self.store.options
        bytes_max = options.stream_bytes_max if question.stream else options.answer_bytes_max + CHUNKING_BYTES
        shared = SharedAnswer(question, served.request, served.client, bytes_max)
        self._shared.setdefault(question.key, shared)
        try:
            if self.elsewhere is not None and question.max_age_s > 0:
                shared.stored = yield partial(self._find_elsewhere, question)
                if shared.stored is not None:
                    return self._replay(served, question, shared.stored)
            self._count(served, MISS)
            served.shared = shared
            yield from forward(served)
            self._keep(question, tenant, shared)
        finally:
            if self._shared.get(question.key) is shared:
                del self._shared[question.key]
            shared.end()
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

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the cache, wherever its answers are."""
        yield from samples("response_cache", self.store.counters)
        words = "Share of hits among hits and misses since the start."
        yield Sample("response_cache_hit_rate", "gauge", words, self.store.counters.hit_rate)
        label = {"backend": self.store.options.backend}
        yield Sample("cache_backend_type", "gauge", "Where the response cache is.", 1, label)
        if self.elsewhere is not None:
            yield from self.elsewhere.samples()

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

    def _keep(self, question: Question, tenant: bytes, shared: SharedAnswer) -> None:
        """Keep the answer, if it is complete and may be kept."""
        head, body = shared.head, shared.body
        found = None
        if shared.is_complete and head is not None and body is not None and head.fields.readable:
            kinds = [value for name, value in head.headers if name.lower() == b"content-type"]
            arrived = Arrived(kinds[0] if kinds else CONTENT_TYPES[question.stream], head.framing, body, shared.counts)
            if arrived.content_type.startswith(CONTENT_TYPES[question.stream]):
                found = stored_answer(question, tenant, arrived, time.monotonic(), self.store.options.answer_bytes_max)
        if found is None or self._is_void(question, tenant, shared.asked_at):
            self.store.counters.unkept += 1
        else:
            shared.stored = found
            if self._uses_memory:
                self.store.keep(question.key, found)
            if self.elsewhere is not None:
                self.elsewhere.keep(question.key, found, shared.asked_at)

    def _is_void(self, question: Question, tenant: bytes, asked_at: float) -> bool:
        """Whether an operator has invalidated what was asked for at that time."""
        return self.store.invalidations.void(question.model, tenant, asked_at)

    def _follow(self, served: ServedRequest, question: Question, shared: SharedAnswer) -> Steps[bool]:
        """Give the client the leader's answer as it comes. Returns False if this client can't use it."""
        client = served.client
        with shared.followed() as follower:
            while not (serves := shared.serves(question, served.request)) and not shared.over:
                yield shared.change
            head = shared.head
            if head is None or not serves:
                return False
            named = () if head.fields.names_request else ((b"x-request-id", served.request_id),)
            client.relay_head(head, ((b"x-cache", HIT), (b"age", b"0"), *named))
            while not (shared.over and shared.is_at_end(follower)):
                piece = shared.next_piece(follower)
                if piece:
                    client.send(piece)
                elif not shared.over:
                    yield shared.change
                if client.unsent is not None:
                    yield client.flush
        if not shared.is_complete:
            raise UpstreamClosed("the answer that was waited for broke off")
        self.store.counters.shared += 1
        self._served(served, shared.stored.tokens if shared.stored is not None else (0, 0), follower.at)
        return True
