"""Makes the parts of a node from the configuration: which option reaches which part, and in which unit.

Each function makes one part, or the limits of one, and starts nothing. To find what an option does, look here; to add
one, add a line here. node.py wires the parts together.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from random import Random
from urllib.parse import urlsplit

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.addresses import OFF
from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.engine_cache.engine_caches import EngineCaches
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.sources.publishers import Publisher, of_operator
from ranvier_py.core.errors import ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.prompts.fingerprint import UNCOMPUTED_TOKENS, TextHasher, TokenHasher
from ranvier_py.core.prompts.prompt import PromptMemory
from ranvier_py.core.prompts.request_body import PromptReader
from ranvier_py.core.prompts.tenants import CREDENTIAL, Tenants
from ranvier_py.core.response_cache.answer_store import AnswerStore
from ranvier_py.core.routing.backends import Registry
from ranvier_py.core.routing.placement.policies import PlacementOptions, make_policy
from ranvier_py.core.routing.placement.sticky_least_loaded import StickyLeastLoadedOptions
from ranvier_py.core.routing.request_record import Header, scheme_mark
from ranvier_py.core.routing.route_table import RouteTable
from ranvier_py.core.routing.router import Router
from ranvier_py.core.shadows.shadow import make_shadow
from ranvier_py.core.shadows.shadows import Shadows
from ranvier_py.core.tokenize.tokenize_frames import Setup
from ranvier_py.core.tokenize.tokenize_job import TokenizerFacts
from ranvier_py.io.engine_events.sse_source import SourceOptions
from ranvier_py.io.recorder import Recorder
from ranvier_py.io.redis_answers import RedisAnswers
from ranvier_py.io.redis_pool import RedisPool
from ranvier_py.io.tokenizer_process import TokenizerProcess
from ranvier_py.node.calibration_parts import CalibrationParts
from ranvier_py.node.cluster_parts import FingerprintScheme
from ranvier_py.node.engine_event_parts import EngineEvents
from ranvier_py.node.index_parts import IndexedBackend, IndexParts
from ranvier_py.node.push_parts import KeyInbox
from ranvier_py.proxy.hangs.hang_watch import HangWatch
from ranvier_py.proxy.pipeline import Pipeline
from ranvier_py.proxy.response_cache import ResponseCache
from ranvier_py.supervision import Faults

log = logging.getLogger(__name__)


INDEX_REDIS, RESPONSES_REDIS = "kv_redis_url", "response_cache_redis_url"

INDEX_CONNECTIONS = 2  # in a pool of its own: one job at a time, and one that is being cut off

COMMON_KEY = bytes(32)
"""Names tenants on nodes that share answers but no secret. Whoever reads Redis can read the answers anyway."""

RESERVED_DESCRIPTORS = 512
"""For all but clients and their requests to backends: 256 for the control port, 64 probes at once, 64 refusals at once,
the streams of peers, sockets of the node itself, files."""

RESERVED_PER_BACKEND = 8
"""Sockets for a backend's events and replays, with those that ZeroMQ needs for them, and for polls of its pages."""


def within_descriptors(config: Config, descriptors: int) -> Config:
    """Return the configuration with so few clients that each can have one descriptor, and each request one more.

    At most half of the descriptors stay in reserve; if there are many, as many as the rest of a node may need.
    """
    server = config.server
    reserved = RESERVED_DESCRIPTORS + RESERVED_PER_BACKEND * len(config.backend)
    free = descriptors - min(reserved, descriptors // 2)
    clients = max(free - server.in_flight_max, free // 2, 1)
    if clients < server.connections_max:
        log.warning(
            "node.connections_cut connections_max %d -> %d: this process may have %d files open",
            server.connections_max,
            clients,
            descriptors,
        )
        server = replace(server, connections_max=clients)
    upstream = replace(config.upstream, open_max=min(server.in_flight_max, server.connections_max))
    return replace(config, server=server, upstream=upstream)


def fingerprint_key(config: Config, shared: bytes | None) -> bytes:
    """Return the key of fingerprints: from the operator's secret, else from the peers', else from a random one."""
    given = config.cluster_secret.get_secret_value().encode() if config.cluster_secret else None
    secret = given or shared or secrets.token_bytes(32)
    return blake2b(secret, digest_size=32, person=b"fingerprint").digest()  # secrets have any length, keys have one


def tokenizer_process(config: Config, key: bytes) -> TokenizerProcess:
    template = str(config.chat_template or "")
    return TokenizerProcess(Setup(config.tokenizer, template, key, config.block_size_tokens, UNCOMPUTED_TOKENS))


def scheme_of(config: Config, facts: TokenizerFacts, key: bytes) -> FingerprintScheme:
    """Return how this node makes fingerprints."""
    return FingerprintScheme(f"{facts.identity}/{config.block_size_tokens}", key, facts.keeps_turns)


def make_router(
    config: Config,
    facts: TokenizerFacts,
    scheme: FingerprintScheme,
    registry: Registry,
    rng: Random,
    prompt_hasher: TokenHasher | None = None,
) -> Router:
    hasher = TokenHasher(scheme.key, config.block_size_tokens, short=UNCOMPUTED_TOKENS)
    reader = PromptReader(
        TextHasher(scheme.key),
        prompt_hasher or hasher,
        PromptMemory(config.prompt_memory_entries),
        identity=scheme.identity,
        bytes_per_token=facts.chars_per_token,
        digest_seed=secrets.randbits(64),
        hoists_system=facts.hoists_system,
        reasoning_moves=facts.reasoning_moves,
        results=facts.results,
    )
    router = Router(
        reader=reader,
        hasher=hasher,
        routes=make_routes(config),
        registry=registry,
        policy=make_policy(config.policy, placement_options(config)),
        rng=rng,
        texts_match=scheme.texts_match,
        recent_max=config.recent_decisions,
    )
    router.checkpoints.ttl_s = config.checkpoint_ttl_s
    router.owners.isolated = config.tenant_isolation != OFF
    return router


def tenants_of(config: Config, scheme: FingerprintScheme) -> Tenants | None:
    """Return what identifies tenants, if the operator wants them kept apart."""
    return Tenants(config.tenant_isolation, TextHasher(scheme.key)) if config.tenant_isolation != OFF else None


def redis_pools_of(config: Config) -> Mapping[str, RedisPool]:
    """Make the connections to each Redis, by the option that names it: one pool if two options name the same (CR14)."""
    pools: dict[str, RedisPool] = {}
    own, other = config.response_cache_redis_url, config.kv_redis_url
    answers, index = own or other, other or own
    if config.responses.enabled and config.responses.backend == "redis" and answers is not None:
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
    config: Config,
    scheme: FingerprintScheme,
    pools: Mapping[str, RedisPool],
    rng: Random,
    tenants: Tenants | None = None,
) -> ResponseCache | None:
    """Make the cache that answers without an engine, if the operator wants one. No client gets another credential's
    answers. `tenants` is reused if tenants are identified for each request anyway.
    """
    if not config.responses.enabled:
        return None
    pool = pools.get(RESPONSES_REDIS)
    if pool is None:
        tenants = tenants or Tenants(CREDENTIAL, TextHasher(scheme.key))
        return ResponseCache(AnswerStore(config.responses), tenants)
    answers = RedisAnswers(pool, config.redis_answers, config.responses, Random(rng.getrandbits(64)))  # noqa: S311
    if tenants is None or not has_shared_key(config):
        isolation = config.tenant_isolation if config.tenant_isolation != OFF else CREDENTIAL
        tenants = Tenants(isolation, TextHasher(scheme.key if has_shared_key(config) else COMMON_KEY))
    return ResponseCache(AnswerStore(config.responses), tenants, answers)


def has_shared_key(config: Config) -> bool:
    """Whether nodes on several machines make fingerprints with the same key."""
    return bool(config.cluster_secret or config.cluster_key_file or config.insecure_gossip)


def publishers_of(spec: BackendSpec) -> tuple[Publisher, ...]:
    """Return where the configuration says that an engine publishes KV events; () if the engine is to be asked."""
    host = urlsplit(spec.url).hostname or ""
    return of_operator(spec.kv_events, spec.kv_replay, spec.kv_ranks, host) if spec.kv_events else ()


def key_inbox(config: Config, scheme: FingerprintScheme) -> KeyInbox:
    """Make what hashes prompts, and notes the prefix hashes that workers which push them would use."""
    options = placement_options(config).build(StickyLeastLoadedOptions)
    return KeyInbox(scheme.key, config.block_size_tokens, config.policy, options.prefix_tokens)


def make_routes(config: Config) -> RouteTable:
    return RouteTable(capacity=config.route_capacity, ttl_s=config.route_ttl_s, options=config.routes)


def placement_options(config: Config) -> PlacementOptions:
    """Return the options of policies; those in `policy_option` override the keys of their own."""
    keys = {"divert_factor": config.load_factor, "divert_floor": config.load_floor}
    named = PlacementOptions.parse(config.policy_option).named
    return PlacementOptions(**{**keys, "placement_compatibility": config.placement_compatibility, **named})


def shadows_of(config: Config, router: Router, rng: Random) -> Shadows | None:
    """Make the policies that place without effect, if the operator wants any."""
    if not config.shadow:
        return None
    options = placement_options(config)
    made = [
        make_shadow(router, make_policy(name, options), make_routes(config), Random(rng.getrandbits(64)))  # noqa: S311
        for name in dict.fromkeys(config.shadow)
    ]
    return Shadows(made, router.registry)


def index_parts_of(  # the parts that it joins
    config: Config,
    registry: Registry,
    engine_caches: EngineCaches,
    rng: Random,
    faults: Faults,
    pool: RedisPool | None = None,
) -> IndexParts:
    """Make the index that event streams of Continuum's form fill. `pool` connects it with other nodes' indexes."""
    found = [(registry.find(spec.url), spec.kv_index) for spec in config.backend if spec.kv_index]
    backends = [IndexedBackend(one.id, one.name, url, one.url) for one, url in found if one is not None]
    own_rng = Random(rng.getrandbits(64))  # noqa: S311
    find = partial(backend_at, registry)
    options = source_options(config)
    index_parts = IndexParts(
        config.index, backends, options, own_rng, engine_caches, find, api_key=config.api_key, faults=faults
    )
    if pool is not None:
        index_parts.share(pool, config.redis.prefix)
    return index_parts


def request_ids() -> Iterator[bytes]:
    """Return ids that are unique among nodes and restarts."""
    name = secrets.token_hex(4).encode()
    return (b"%b-%x" % (name, number) for number in count(1))


def source_options(config: Config) -> SourceOptions:
    return replace(config.events, idle_s=config.index.ttl_s)


def authorization_of(config: Config) -> bytes:
    """Return the authorization for backends if the client sends none; may be empty."""
    return f"Bearer {config.api_key}".encode() if config.api_key else b""


def backend_at(registry: Registry, url: str) -> BackendId | None:
    """Return the backend with this URL, by which peers name it."""
    found = registry.find(url)
    return found.id if found is not None else None


def calibration_parts_of(
    config: Config, router: Router, asking: UsageAsker, engine_events: EngineEvents
) -> CalibrationParts:
    """Make what measures predictions, and corrects those of engines whose events are not read."""
    return CalibrationParts(
        router,
        asking,
        metrics_interval_s=config.polls.metrics_interval_s,
        estimated=lambda backend: engine_events.level(backend) is Level.ESTIMATED,
        contradicted=engine_events.contradicted,
        state_block=engine_events.state_block,
    )


def hang_watch_of(
    config: Config, pipeline: Pipeline, calibration_parts: CalibrationParts, events: EngineEvents
) -> HangWatch:
    """Make what watches for engines that hang."""
    return HangWatch(
        *(pipeline.router, pipeline.serving, config.polls.hang_s),
        probe=pipeline.trouble,
        changed=pipeline.changed,
        reported_waiting=calibration_parts.waiting,
        sent_event_at=events.received_at,
    )


def recorder_of(config: Config, scheme: FingerprintScheme) -> Recorder | None:
    """Make what records attempts, if the operator wants that."""
    if config.record_file is None:
        return None
    return Recorder(
        config.record_file,
        Header(time.time(), config.block_size_tokens, scheme_mark(scheme.identity, scheme.key)),
        started_at=time.monotonic(),
        clock=time.monotonic,
        bytes_max=config.record_bytes_max,
        files_max=config.record_files_max,
    )


def debugger_of(config: Config) -> Callable[[bytes | None], bool]:
    """Return a predicate: may a request with this key see its routing, which reveals hosts and what others sent?"""
    key = config.control_key.get_secret_value().encode() if config.control_key else b""
    if config.debug_headers:
        return lambda _: True
    return lambda given: given is not None and key != b"" and hmac.compare_digest(given, key)


def tls_context(config: Config) -> ssl.SSLContext | None:
    """Make the TLS context of the public port, if it has files. Raises ConfigError if these can't be used."""
    if config.tls_certificate_file is None or config.tls_key_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_certificate_file, config.tls_key_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError([f"tls_certificate_file, tls_key_file: can't be used: {error}"]) from error
    return context
