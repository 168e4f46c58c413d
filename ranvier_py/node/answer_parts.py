"""Shares the response cache among peers: advertises and gives what this node keeps, fetches what it lacks.

It connects the answer store, the cache on the path of requests, and the peer. A request waits for a peer's answer for
at most `response_cache_peer_timeout_s`; without peers, or if none has it, it does not wait at all. What an operator
invalidates on one node is void on all nodes that gossip, wherever they keep answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import trio

from ranvier_py.core.metrics import Sample, values
from ranvier_py.core.response_cache.answer_frames import decoded, encoded
from ranvier_py.core.response_cache.answer_store import ResponseCacheOptions
from ranvier_py.core.response_cache.invalidations import VoidMark, VoidScope
from ranvier_py.core.response_cache.peers.answer_fetches import ENCODING_BYTES, Fetched
from ranvier_py.core.response_cache.peers.answer_values import ANSWER_BYTES_MAX
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.proxy.response_cache import ResponseCache


def share_answers(responses: ResponseCache, clustering: ClusterParts) -> None:
    """Share invalidations with peers from now on, and also answers, if the configuration says so.

    Call this again whenever the cache or its options are replaced.
    """
    answers, store = clustering.peer.answers, responses.store
    invalidations = answers.invalidations
    store.invalidations, invalidations.known.ttl_s = invalidations.known, store.options.ttl_s
    answers.fetches.timeout_s = store.options.peer_timeout_s

    def invalidated(one: VoidMark) -> None:
        store.void(one.scope, one.before)

    def voids(scope: VoidScope, before: float, now: float) -> None:
        invalidations.give(scope, before, now)
        clustering.port.poke()

    invalidations.invalidated, responses.voids = invalidated, voids
    if answers.settings.shares and responses.elsewhere is None:
        responses.elsewhere = ClusterAnswers(responses, clustering)


class _Waiter:
    """One request that waits for a peer's answer."""

    __slots__ = ("answer", "event", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.event = trio.Event()
        self.answer: StoredAnswer | None = None


class ClusterAnswers:
    """The answers of all nodes of the cluster, where each node keeps the answers to its own requests."""

    backend = "cluster"
    uses_memory = True

    def __init__(self, responses: ResponseCache, clustering: ClusterParts) -> None:
        self._store = responses.store
        self._clustering = clustering
        self._answers = answers = clustering.peer.answers
        self._waiting: dict[int, _Waiter] = {}
        answers.fetches.arrived, answers.source.find = self._arrived, self._give
        self._store.kept, self._store.dropped = self._kept, answers.keys.drop

    def set_options(self, responses: ResponseCacheOptions) -> None:
        """Do nothing: the store's options are read at each use."""

    async def run(self) -> None:
        """Do nothing: the gossip port does the work."""
        await trio.sleep_forever()

    async def find(self, key: bytes, max_age_s: float) -> StoredAnswer | None:
        """Fetch a peer's answer, if one has it, it is no older than that, and it comes in time."""
        if max_age_s <= 0:
            return None
        answers = self._answers
        request = answers.ask(key, max_age_s, time.monotonic())
        if request is None:
            return None
        waiting = self._waiting[request] = _Waiter(key)
        try:
            self._clustering.port.poke()
            with trio.move_on_after(answers.fetches.timeout_s):
                await waiting.event.wait()
        finally:
            del self._waiting[request]
        found = waiting.answer
        if found is None or self._is_void(found) or time.monotonic() - found.stored_at > max_age_s:
            return None
        return found

    def keep(self, key: bytes, answer: StoredAnswer, asked_at: float) -> None:
        """Do nothing: whatever memory keeps, its key is sent to peers."""

    async def invalidate(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> int | None:  # noqa: ARG002
        """Return 0: `ResponseCache.voids` has peers drop their answers, and nobody counts those."""
        return 0

    def refuse(self, credential: bytes) -> None:
        """Do nothing: `ResponseCache.voids` has peers drop its answers."""

    def view(self) -> Mapping[str, Any]:
        return {"peers": values(self._answers.counters)}

    def samples(self) -> Iterator[Sample]:
        """Yield nothing: gossip has the metrics."""
        yield from ()

    def _is_void(self, answer: StoredAnswer) -> bool:
        too_old = time.monotonic() - answer.stored_at >= self._store.options.ttl_s
        return too_old or self._store.invalidations.void(answer.model, answer.tenant, answer.stored_at)

    def _kept(self, key: bytes, answer: StoredAnswer) -> None:
        if answer.size <= ANSWER_BYTES_MAX:
            self._answers.keys.add(key, answer.stored_at)
            self._clustering.port.poke()

    def _give(self, name: bytes, age_max_s: float, now: float) -> bytes | None:
        key = self._answers.keys.find(name)
        answer = self._store.find(key, now, age_max_s) if key is not None else None
        return encoded(key, answer, now) if key is not None and answer is not None else None

    def _arrived(self, fetched: Fetched) -> bool:
        """Give an answer to the request that waits for it, if any. Returns False if the peer's data is invalid."""
        waiting = self._waiting.get(fetched.request)
        if waiting is None:
            return True
        if fetched.data is not None:
            waiting.answer = decoded(waiting.key, fetched.data, fetched.asked_at, ANSWER_BYTES_MAX + ENCODING_BYTES)
        waiting.event.set()
        return fetched.data is None or waiting.answer is not None
