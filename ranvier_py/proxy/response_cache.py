"""Answers requests without a backend: from what equal ones got before, or are getting now.

Continuum's tier 2, in front of routing: a hit is matched, placed and counted nowhere else. Of equal requests at once
one is sent, and all get its answer as it comes; if that fails before it began, one of the others is sent instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from ranvier_py.core.errors import ClientGone, UpstreamClosed
from ranvier_py.core.metrics import increment
from ranvier_py.core.prompts.tenants import Tenants
from ranvier_py.core.response_cache.answer_store import AnswerStore
from ranvier_py.core.response_cache.cache_keys import APIS, Question, question_of
from ranvier_py.core.response_cache.stored_answers import Arrived, StoredAnswer, stored_answer
from ranvier_py.core.routing.health import Outcome
from ranvier_py.proxy.driver import Steps
from ranvier_py.proxy.http_values import HttpRequest
from ranvier_py.proxy.served_request import BYPASS, HIT, MISS, ServedRequest
from ranvier_py.proxy.shared_answer import SharedAnswer

RESULTS = {HIT: "hit", MISS: "miss", BYPASS: "skip"}
"""The document's words: those of the field X-Cache, and those of metrics."""


KINDS = {False: b"application/json", True: b"text/event-stream"}
"""Content types, by whether it is a stream."""

CHUNKING_BYTES = 65_536  # that a whole answer may have beyond its own, for it may come in chunks


class ResponseCache:
    """The response cache of a node. `tenants` tells apart whose answers are whose."""

    def __init__(self, store: AnswerStore, tenants: Tenants) -> None:
        self.store = store
        self.tenants = tenants
        self._shared: dict[bytes, SharedAnswer] = {}  # by key: answers under way

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
            if shared is None:
                self._count(served, MISS)
                yield from self._lead(served, question, tenant, forward)
                return
            if (yield from self._follow(served, question, shared)):
                result = HIT
                break
        self._count(served, result)
        if result != HIT:
            yield from forward(served)

    def _question(self, request: HttpRequest) -> tuple[Question | None, bytes]:
        """What is asked, and by whom; None where the cache has no part in it, and for a stream in HTTP/1.0, which has
        no chunks."""
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
        """Answer with what is stored; BYPASS where it is of the other kind and can't be made into this one."""
        body = stored.reply(question)
        if body is None:
            return BYPASS
        kind = stored.content_type if stored.stream == question.stream else KINDS[question.stream]
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
    ) -> Steps[None]:
        """Have a backend answer, for this client and for those who ask the same meanwhile."""
        options = self.store.options
        bytes_max = options.stream_bytes_max if question.stream else options.answer_bytes_max + CHUNKING_BYTES
        with self._leading(SharedAnswer(question, served.client, bytes_max)) as shared:
            served.shared = shared
            yield from forward(served)
            self._keep(question, tenant, shared)
        if not shared.has_client:
            raise ClientGone("the client closed the connection")

    @contextmanager
    def _leading(self, shared: SharedAnswer) -> Iterator[SharedAnswer]:
        key = shared.question.key
        self._shared.setdefault(key, shared)
        try:
            yield shared
        finally:
            if self._shared.get(key) is shared:
                del self._shared[key]
            shared.end()

    def _keep(self, question: Question, tenant: bytes, shared: SharedAnswer) -> None:
        """Keep a complete answer, where it may be kept."""
        head, body = shared.head, shared.body
        found = None
        if shared.is_complete and head is not None and body is not None and head.fields.readable:
            kinds = [value for name, value in head.headers if name.lower() == b"content-type"]
            arrived = Arrived(kinds[0] if kinds else KINDS[question.stream], head.framing, body, shared.counts)
            if arrived.content_type.startswith(KINDS[question.stream]):
                found = stored_answer(question, tenant, arrived, time.monotonic(), self.store.options.answer_bytes_max)
        if found is None:
            self.store.counters.unkept += 1
        else:
            self.store.keep(question.key, found)

    def _follow(self, served: ServedRequest, question: Question, shared: SharedAnswer) -> Steps[bool]:
        """Give the client what the leader gets, as it comes; False where that is nothing for this client."""
        client = served.client
        with shared.followed() as follower:
            while not shared.over and (shared.head is None or not shared.serves(question)):
                yield shared.change
            head = shared.head
            if head is None or not shared.serves(question):
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
        stored = self.store.find(question.key, time.monotonic(), inf)
        self._served(served, stored.tokens if stored is not None else (0, 0), follower.at)
        return True
