"""Continuum's tier 4 in a node: event sources fill the index, `kv_score` asks it, the control port shows it.

A source whose stream begins anew does not report what happened meanwhile, so all that was known of its backend is
dropped first (CX18). A prefix named by one of our token fingerprints (16 hex digits) also reaches EngineCaches, and so
every policy, at DEGRADED at best, since the stream has no numbers; Continuum's own keys (64 digits) stay in the index.
Each node has its own index; with Redis nodes share what they receive. Source: Continuum Router, «KV cache
optimization», tier 4; the JSON is Continuum's, plus the members that its document promises but its JSON lacks (CX16).
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, IndexSettings, KvIndex, SourceCounts
from ranvier_py.core.engine_cache.prefix_index.shared_index import SharedIndex
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.engine_cache.sources.server_events import SourceOptions
from ranvier_py.core.ids import UNKNOWN, BackendId, Fingerprint
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.redis_commands import RedisCommands
from ranvier_py.core.routing.backends import Backend, Registry
from ranvier_py.core.routing.placement.kv_score import IndexedPrefix, KvScore, KvScoreOptions
from ranvier_py.io.redis_index import PREPARE_S, RedisLink
from ranvier_py.node.asked import Route
from ranvier_py.node.part import Handler, Node, Part
from ranvier_py.node.parts.router_parts import POLICY_OPTIONS
from ranvier_py.proxy.call import PromptTokenizer
from ranvier_py.supervision import Faults

if TYPE_CHECKING:
    from ranvier_py.io.engine_events.sse_source import EventSource
    from ranvier_py.io.redis_pool import RedisPool

log = logging.getLogger(__name__)

FINGERPRINT_DIGITS = 16
RECEIVED = "Events that an event source of the prefix index sent."
CONNECTED = "Whether the stream of an event source is connected."
CHANGED = "Events of event sources that changed the prefix index."
STATUS = "1 for the state that an event source is in."
TICK_S = 1.0  # expired entries are never found; a tick only frees their memory


@dataclass(frozen=True, slots=True)
class IndexedBackend:
    """A backend with an event source. `url` is its name on all nodes."""

    id: BackendId
    name: str
    endpoint: str
    url: str


class IndexedStream:
    """One backend's event source, and what it reported. It is the `Held` of EngineCaches for the prefixes that have our
    names.

    What comes while the node does not have the backend under this id is ignored: another one may have the id.
    """

    def __init__(
        self,
        backend: IndexedBackend,
        index: KvIndex,
        engine_caches: EngineCaches,
        find: Callable[[str], BackendId | None],
        make: Callable[..., EventSource],
        key_for: Callable[[str], str],
    ) -> None:
        """`find` finds the node's backends by their URL, `key_for` their keys; `make` makes an endpoint's reader."""
        self.backend = backend
        key = partial(key_for, backend.url)
        self.events = make(backend.endpoint, received=self.received, started=self.started, key=key)
        self._source = Source(backend.id, "index")
        self._index, self._engine_caches, self._find = index, engine_caches, find

    @property
    def counts(self) -> SourceCounts:
        """How many of its events changed the index."""
        return self._index.counters.by_backend.get(self.backend.id) or SourceCounts()

    def connection(self) -> dict[str, Any]:
        """Return how its connection does, in Continuum's form."""
        state = self.events.state
        return {
            "connected": state.connected,
            "reconnect_count": state.reconnects,
            "last_event_at": moment(state.last_event_at),
        }

    @property
    def _is_there(self) -> bool:
        return self._find(self.backend.url) == self.backend.id

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        entries = ((name, self._index.peek(f"{name:016x}", self.backend.id)) for name in fingerprints)
        return {name: tier_of(entry) for name, entry in entries if entry is not None}

    def forget(self) -> None:
        """Drop what the source reported."""
        self._index.forget((self.backend.id,))
        self._engine_caches.close(self._source, time.monotonic())

    def started(self) -> None:
        if self._is_there:
            now = time.monotonic()
            self._index.forget((self.backend.id,))
            self._engine_caches.open(self._source, self, now)
            self._engine_caches.set_level(self._source, Level.DEGRADED, "events without numbers", now)

    def received(self, events: Sequence[IndexEvent]) -> None:
        if not self._is_there:
            return
        now = time.monotonic()
        changes: dict[Fingerprint, Change] = {}  # of several events about one prefix, what the last one left
        for each in events:
            if not self._index.apply(self.backend.id, each, now) or len(each.prefix) != FINGERPRINT_DIGITS:
                continue
            entry, fingerprint = self._index.peek(each.prefix, self.backend.id), Fingerprint(int(each.prefix, 16))
            tokens = entry.tokens if entry is not None else each.tokens or 0
            changes[fingerprint] = Change(fingerprint, tokens, tier_of(entry), UNKNOWN)
        if changes:
            found = Changes(cleared=False, changes=tuple(changes.values()), complete=True)
            self._engine_caches.changed(self._source, found, now)


class IndexedTokenizer:
    """Asks Redis for a prompt's opening while the prompt is tokenized before its placement.

    A prompt whose routes are well known waits for neither, since they cover more than its opening.
    """

    def __init__(self, tokenizer: PromptTokenizer, index_parts: IndexParts) -> None:
        self.submit, self.finish = tokenizer.submit, tokenizer.finish
        self._tokenizer, self._index_parts = tokenizer, index_parts

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool:
        index_parts, began = self._index_parts, time.monotonic()
        link = index_parts.asked_link
        opening = prompt.opening(*index_parts.opening).hex() if link is not None else ""
        if link is not None and opening:
            link.shared.prepare(opening, began)
        is_known = await self._tokenizer.tokenize_first(prompt, deadline_s)
        if link is not None and opening:
            await link.prepare(opening, max(0.0, PREPARE_S - (time.monotonic() - began)))
        return is_known


class IndexParts(Part):
    """The index of one node, its sources and its link to Redis.

    `find` finds the node's backends by their URL; `policy` is the one that may ask the index.
    """

    name = "kv_index"
    keys = ("index", "events", "policy", *POLICY_OPTIONS)

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        settings: IndexSettings,
        options: SourceOptions,
        rng: Random,
        engine_caches: EngineCaches,
        find: Callable[[str], BackendId | None],
        *,
        policy: Callable[[], object] = lambda: None,
        key_for: Callable[[str], str] = lambda _: "",
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults or Faults()
        self.index = KvIndex(settings, time.perf_counter)
        self._scoring: KvScoreOptions | None = None  # options of the policy that asks, if one does
        made = partial(event_source, options=options, rng=rng)
        self._stream = partial(
            IndexedStream, index=self.index, engine_caches=engine_caches, find=find, make=made, key_for=key_for
        )
        self.streams: dict[BackendId, IndexedStream] = {}
        self._urls: dict[BackendId, str] = {}
        self._link: RedisLink | None = None
        self._context: ssl.SSLContext | None = None
        self._rng, self._find, self._policy, self._runs = rng, find, policy, False

    @property
    def enabled(self) -> bool:
        return bool(self.streams) or self._link is not None

    def share(self, commands: RedisCommands, prefix: str) -> RedisLink:
        """Share the index through Redis, in keys with this prefix."""
        shared = SharedIndex(
            self.index,
            prefix,
            self._urls,
            find=self._find,
            stands=lambda backend: self.streams[backend].events.state.connected,
            rng=self._rng,
        )
        self._link = RedisLink(shared, commands)
        return self._link

    @property
    def asked_link(self) -> RedisLink | None:
        """The link to Redis, if a policy asks for what other nodes share."""
        return self._link if self._scoring is not None else None

    @property
    def opening(self) -> tuple[int, str]:
        """What the key of a prompt is made of: how many bytes, and of which part of it."""
        options = self._scoring or KvScoreOptions()
        return options.max_prefix_length, options.prefix_source

    def join(self, policy: object) -> None:
        """Let this policy ask the index, if it can."""
        self._scoring = None
        if isinstance(policy, KvScore) and self.enabled:
            policy.index = self.index
            self._scoring = policy.options

    def read(self, backend: IndexedBackend) -> None:
        """Read this backend's events once this runs."""
        self.streams[backend.id], self._urls[backend.id] = self._stream(backend), backend.url
        self.trust(self._context)

    def trust(self, context: ssl.SSLContext | None) -> None:
        """Use this TLS context for streams over https."""
        self._context = context
        for stream in self.streams.values():
            stream.events.trust(context)

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        """Forget what was reported of the backend that had this id before, unless its URL is the same."""
        stream = self.streams.get(backend.id)
        if stream is not None and stream.backend.url != backend.url:
            stream.forget()
        if spec is not None and spec.kv_index and not self._runs:
            self.read(IndexedBackend(backend.id, backend.name, spec.kv_index, backend.url))

    def reload(self, before: Config, after: Config) -> None:
        self.index.settings = after.index
        for stream in self.streams.values():
            stream.events.options = source_options(after)
        self.join(self._policy())

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        self._runs = True
        self.join(self._policy())
        task_status.started()
        async with trio.open_nursery() as nursery:
            for stream in self.streams.values():
                nursery.start_soon(self._faults.keep, "kv_index_source", stream.events.run)
            if self._link is not None:
                nursery.start_soon(self._faults.keep, "kv_index_redis", self._link.run)
            if self.enabled:
                nursery.start_soon(self._faults.keep, "kv_index", self._expire)

    async def _expire(self) -> None:
        while True:
            self.index.expire(time.monotonic())
            await trio.sleep(TICK_S)

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/kv-index/stats": Route(lambda _: self.view(), "The index of prefixes, as Continuum has it"),
            "GET /admin/kv-index/backends": Route(lambda _: self.backends(), "Backends of the index"),
            "POST /admin/kv-index/clear": Route(lambda _: self.clear(), "Empty the index"),
        }

    def view(self) -> Mapping[str, Any]:
        """Return its statistics, in Continuum's form (CR26)."""
        if not self.enabled:
            return {"enabled": False}
        index, counters, ttl_s = self.index, self.index.counters, self.index.settings.ttl_s
        return {
            "enabled": True,
            "config": {
                "backend": "memory" if self._link is None else "redis",
                "max_entries": index.settings.entries_max,
                "entry_ttl_seconds": int(ttl_s) if ttl_s.is_integer() else ttl_s,
                "event_sources_count": len(self.streams),
                "scoring": asdict(self._scoring or KvScoreOptions()),
                "storage_offloading": {
                    "enabled": index.settings.offloading,
                    "treat_eviction_as_offload": index.settings.eviction_is_offload,
                },
            },
            "index": {
                "prefix_count": index.prefixes,
                "entry_count": len(index),
                "total_hits": counters.hits,
                "total_evictions": counters.evictions,
            },
            "event_sources": [
                {
                    "backend_name": stream.backend.name,
                    **stream.connection(),
                    "events_received": stream.events.state.received,
                    "events_dropped": stream.events.state.dropped,
                    "last_error": stream.events.state.last_error,
                }
                for stream in self.streams.values()
            ],
            "routing_decisions": {**counters.routing_decisions, "total": sum(counters.routing_decisions.values())},
            "query_latency_count": counters.query_latency_seconds.count,
            "overlap_score_count": counters.overlap_score.count,
            **({"shared": self._link.view()} if self._link is not None else {}),
        }

    def backends(self) -> Mapping[str, Any]:
        """Return the answer of GET /admin/kv-index/backends (CR27)."""
        return {
            "enabled": self.enabled,
            "backends": [
                {
                    "backend_name": stream.backend.name,
                    "connection": stream.connection(),
                    "events": {
                        "received": stream.events.state.received,
                        "processed": stream.events.state.processed,
                        "dropped": stream.events.state.dropped,
                        "index_created": stream.counts.created,
                        "index_evicted": stream.counts.evicted,
                    },
                }
                for stream in self.streams.values()
            ],
        }

    def clear(self) -> Mapping[str, Any]:
        """Clear the index, for POST /admin/kv-index/clear (CR28). Returns the answer."""
        before = self.index.clear()
        if self._link is not None:
            self._link.shared.clear(time.monotonic())
        log.info(event("kv_index.cleared", entries=before))
        return {"success": True, "entries_before_clear": before, "cleared_entries": before}

    def metrics(self) -> Iterator[Sample]:
        """Yield Continuum's metrics under our prefix (CR22), and our own."""
        if not self.enabled:
            return
        for stream in self.streams.values():
            label, state, counts = {"backend": stream.backend.name}, stream.events.state, stream.counts
            for name, kind, help_text, value, more in (
                ("event_received", "counter", RECEIVED, state.received, {}),
                ("event_processed", "counter", "Events of an event source that could be read.", state.processed, {}),
                ("event_dropped", "counter", "Events of an event source that could not be read.", state.dropped, {}),
                ("consumer_connected", "gauge", CONNECTED, state.connected, {}),
                ("consumer_reconnects", "counter", "Tries to connect to an event source again.", state.reconnects, {}),
                ("index_events", "counter", CHANGED, counts.created, {"type": "created"}),
                ("index_events", "counter", CHANGED, counts.evicted, {"type": "evicted"}),
                ("index_event_source_status", "gauge", STATUS, state.connected, {"status": "connected"}),
                ("index_event_source_status", "gauge", STATUS, not state.connected, {"status": "disconnected"}),
            ):
                yield Sample(f"kv_{name}", kind, help_text, int(value), {**label, **more})  # type: ignore[arg-type]
        yield Sample("kv_index_entries", "gauge", "Pairs of prefix and backend in the index.", len(self.index))
        yield from samples("kv_index", self.index.counters)
        if self._link is not None:
            yield from self._link.metrics()


def index_parts_of(node: Node, engine_caches: EngineCaches, pool: RedisPool | None) -> IndexParts:
    """Make the index that event streams of Continuum's form fill. `pool` connects it with other nodes' indexes."""
    config = node.config
    made = IndexParts(
        config.index,
        source_options(config),
        Random(node.rng.getrandbits(64)),  # noqa: S311
        engine_caches,
        partial(backend_at, node.registry),
        policy=lambda: node.router.policy,
        key_for=node.key_for,
        faults=node.faults,
    )
    if pool is not None:
        made.share(pool, config.redis.prefix)
    return made


def event_source(url: str, **given: Any) -> EventSource:
    from ranvier_py.io.engine_events.sse_source import EventSource  # noqa: PLC0415  # where a backend publishes one

    return EventSource(url, **given)


def source_options(config: Config) -> SourceOptions:
    return replace(config.events, idle_s=config.index.ttl_s)


def backend_at(registry: Registry, url: str) -> BackendId | None:
    """Return the backend with this URL, by which peers name it."""
    found = registry.ids.find(url)
    return found.id if found is not None else None


def tier_of(entry: IndexedPrefix | None) -> Tier:
    if entry is None:
        return Tier.ABSENT
    return Tier.EXTERNAL if entry.reload else Tier.GPU


def moment(at: float | None) -> str | None:
    """Return a time of the monotonic clock as UTC in ISO 8601."""
    if at is None:
        return None
    seconds = time.time() - (time.monotonic() - at)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
