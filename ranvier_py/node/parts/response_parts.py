"""The response cache of a node: in memory, in Redis, or shared among peers; and its administration, in the JSON of
Continuum Router's document plus our own members.

A request waits for a peer's answer for at most `response_cache_peer_timeout_s`; without peers, or if none has it, it
does not wait at all. What an operator invalidates on one node is void on all nodes that gossip, wherever they keep it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.core.addresses import OFF
from ranvier_py.core.clients.body_mender import MODEL_BYTES_MAX
from ranvier_py.core.errors import BadRequest, NotFound
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, values
from ranvier_py.core.prompts.fingerprint import TextHasher
from ranvier_py.core.prompts.tenants import CREDENTIAL, Tenants
from ranvier_py.core.response_cache.answer_frames import decoded, encoded
from ranvier_py.core.response_cache.answer_store import AnswerStore, ResponseCacheOptions
from ranvier_py.core.response_cache.invalidations import VoidMark, VoidScope
from ranvier_py.core.response_cache.peers.answer_fetches import ENCODING_BYTES, Fetched
from ranvier_py.core.response_cache.peers.answer_values import ANSWER_BYTES_MAX
from ranvier_py.core.response_cache.stored_answers import StoredAnswer
from ranvier_py.io.redis_answers import RedisAnswers
from ranvier_py.node.asked import Asked, Route
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.fingerprints import COMMON_KEY, FingerprintScheme, has_shared_key
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.proxy.stages.response_cache import ResponseCache

if TYPE_CHECKING:
    from ranvier_py.io.redis_pool import RedisPool

log = logging.getLogger(__name__)


def share_answers(responses: ResponseCache, clustering: ClusterParts) -> None:
    """Share invalidations with peers from now on, and also answers, if the configuration says so.

    Call this again whenever the cache or its options are replaced.
    """
    answers, store = clustering.peer.features.answers, responses.store
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


@dataclass(slots=True, eq=False)
class _Waiter:
    """One request that waits for a peer's answer."""

    key: bytes
    event: trio.Event = field(default_factory=trio.Event)
    answer: StoredAnswer | None = None


class ClusterAnswers:
    """The answers of all nodes of the cluster, where each node keeps the answers to its own requests."""

    backend = "cluster"
    uses_memory = True

    def __init__(self, responses: ResponseCache, clustering: ClusterParts) -> None:
        self._store = responses.store
        self._clustering = clustering
        self._answers = answers = clustering.peer.features.answers
        self._waiting: dict[int, _Waiter] = {}
        answers.fetches.arrived, answers.fetches.find = self._arrived, self._give
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

    async def invalidate(self, model: str | None, tenant: bytes | None, older_than_s: float | None) -> int | None:
        """Return 0: `ResponseCache.voids` has peers drop their answers, and nobody counts those."""
        return 0

    def refuse(self, credential: bytes) -> None:
        """Do nothing: `ResponseCache.voids` has peers drop its answers."""

    def view(self) -> Mapping[str, Any]:
        return {"peers": values(self._answers.counters)}

    def metrics(self) -> Iterator[Sample]:
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


INDEX_REDIS, RESPONSES_REDIS = "kv_redis_url", "response_cache_redis_url"

INDEX_CONNECTIONS = 2  # in a pool of its own: one job at a time, and one that is being cut off

CHOICES = ("model", "tenant", "older_than_s")


class Responses(Part):
    """See the module. `tenants` identifies tenants, if they are kept apart; `cache` is None while it is off."""

    name = "response_cache"
    keys = ("responses",)

    def __init__(self, node: Node, pool: RedisPool | None, clustering: ClusterParts | None) -> None:
        self._node, self._clustering = node, clustering
        self.tenants = tenants_of(node.config, node.scheme)
        self.cache = response_cache_of(node.config, node.scheme, pool, node.rng, self.tenants)
        self._share()

    def _share(self) -> None:
        if self.cache is not None and self._clustering is not None:
            share_answers(self.cache, self._clustering)

    async def loop(self) -> None:
        if self.cache is not None and self.cache.elsewhere is not None:
            await self.cache.elsewhere.run()

    def held(self, before: Config, after: Config) -> Iterable[str]:
        if before.responses.backend != "memory":
            yield "response_cache"  # stores outside this process are made at the start
        if before.responses.backend == "cluster":
            yield "response_cache_ttl_s"  # invalidations are kept for so long

    def reload(self, before: Config, after: Config) -> None:
        """Answers stay as long as allowed; a cache that is turned off is dropped."""
        node = self._node
        if self.cache is None or not after.responses.enabled:
            self.cache = response_cache_of(after, node.scheme, None, node.rng, self.tenants)
        else:
            self.cache.set_options(after.responses)
        self._share()

    def metrics(self) -> Iterable[Sample]:
        return self.cache.metrics() if self.cache is not None else ()

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/response-cache/stats": Route(lambda _: self.view(), "Counts of the response cache"),
            "POST /admin/response-cache/invalidate": Route(
                self.invalidate,
                "Drop stored answers",
                {name: {} for name in ("clear_all", "model", "tenant", "older_than_s")},
            ),
        }

    def view(self) -> Mapping[str, Any]:
        """The hit rate is hits of hits and misses, a string of 4 decimals."""
        if self.cache is None:
            return {"enabled": False}
        counters, options, elsewhere = self.cache.store.counters, self.cache.store.options, self.cache.elsewhere
        requests = counters.requests
        return {
            "enabled": True,
            "backend_type": options.backend,
            "entries": counters.entries,
            "capacity": options.capacity,
            "requests": {**requests, "total": sum(requests.values())},
            "hit_rate": f"{counters.hit_rate:.4f}",
            "evictions": counters.evictions,
            "size_bytes": counters.size_bytes,
            "shared": counters.shared,
            "unkept": counters.unkept,
            "saved_prompt_tokens": counters.saved_prompt_tokens,
            "saved_output_tokens": counters.saved_output_tokens,
            "config": config_view(options),
            **(elsewhere.view() if elsewhere is not None else {}),
        }

    async def invalidate(self, asked: Asked) -> Mapping[str, Any]:
        """Drop all answers, or those of a model, of a tenant, of an age; all nodes that gossip do it.

        `cleared_entries` counts those of this node; null if nobody can count them.
        """
        wanted, responses = await asked.json("clear_all", *CHOICES), self.cache
        if responses is None:
            raise NotFound("the response cache is off: response_cache turns it on")
        if wanted.get("clear_all") is True and len(wanted) == 1:
            return invalidated("clear_all", await responses.invalidate())
        model, tenant, older_s = (wanted.get(name) for name in CHOICES)
        texts = all(each is None or type(each) is str for each in (model, tenant))
        if not wanted or "clear_all" in wanted or not texts or not (older_s is None or type(older_s) in (int, float)):
            raise BadRequest(
                'expected {"clear_all": true}, or some of model, tenant (texts) and older_than_s (a number)'
            )
        if model is not None and not is_model(model):
            raise BadRequest(f"model must be a printable name of at most {MODEL_BYTES_MAX} bytes")
        digest = None if tenant is None else responses.tenants.named(tenant.encode("utf-8", "replace"))
        return invalidated("invalidate", await responses.invalidate(model, digest, older_s))


def is_model(name: str) -> bool:
    return 0 < len(name.encode("utf-8", "replace")) <= MODEL_BYTES_MAX and name.isprintable()


def config_view(options: ResponseCacheOptions) -> Mapping[str, Any]:
    minutes, seconds = divmod(options.ttl_s, 60)
    return {
        "backend": options.backend,
        "ttl": f"{minutes:.0f}m" if minutes and not seconds else f"{options.ttl_s:g}s",
        "capacity": options.capacity,
        "max_response_size": options.answer_bytes_max,
        "max_stream_buffer_size": options.stream_bytes_max,
    }


def invalidated(action: str, cleared: int | None) -> Mapping[str, Any]:
    log.info(event("response_cache.invalidated", action=action, entries=cleared))
    return {"success": True, "action": action, "cleared_entries": cleared}


def tenants_of(config: Config, scheme: FingerprintScheme) -> Tenants | None:
    """Return what identifies tenants, if the operator wants them kept apart."""
    return Tenants(named_by(config), TextHasher(scheme.key)) if config.tenant_isolation != OFF else None


def named_by(config: Config) -> str:
    """Return by what tenants are told apart; where there are keys, their tenant stands as the credential."""
    return config.tenant_isolation if config.tenant_isolation != OFF and config.keys_file is None else CREDENTIAL


def redis_pools_of(config: Config) -> Mapping[str, RedisPool]:
    """Make the connections to each Redis, by the option that names it: one pool if two options name the same (CR14)."""
    own, other = config.response_cache_redis_url, config.kv_redis_url
    answers, index = own or other, other or own
    if answers is None:
        return {}
    from ranvier_py.io.redis_pool import RedisPool  # noqa: PLC0415  # redis-py is a hundred modules that few nodes need

    pools: dict[str, RedisPool] = {}
    if config.responses.enabled and config.responses.backend == "redis":
        limits = config.redis_answers
        pools[RESPONSES_REDIS] = RedisPool(
            answers.get_secret_value(),
            RESPONSES_REDIS,
            size=limits.connections_max,
            timeout_s=limits.timeout_s,
            connect_s=limits.connect_s,
        )
    if config.kv_index_backend == "redis" and index is not None:
        shared = pools.get(RESPONSES_REDIS) if index == answers else None
        pools[INDEX_REDIS] = shared or RedisPool(
            index.get_secret_value(),
            INDEX_REDIS,
            size=INDEX_CONNECTIONS,
            timeout_s=config.redis.timeout_s,
            connect_s=config.redis.connect_s,
        )
    return pools


def response_cache_of(
    config: Config, scheme: FingerprintScheme, pool: RedisPool | None, rng: Random, tenants: Tenants | None = None
) -> ResponseCache | None:
    """Make the cache that answers without an engine, if the operator wants one. No client gets another credential's
    answers. `tenants` is reused if tenants are identified for each request anyway.
    """
    if not config.responses.enabled:
        return None
    if pool is None:
        tenants = tenants or Tenants(CREDENTIAL, TextHasher(scheme.key))
        return ResponseCache(AnswerStore(config.responses), tenants)
    answers = RedisAnswers(pool, config.redis_answers, config.responses, Random(rng.getrandbits(64)))  # noqa: S311
    if tenants is None or not has_shared_key(config):
        tenants = Tenants(named_by(config), TextHasher(scheme.key if has_shared_key(config) else COMMON_KEY))
    return ResponseCache(AnswerStore(config.responses), tenants, answers)
