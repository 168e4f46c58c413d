"""Continuum's tier 4 in a node: event sources fill the index, `kv_score` asks it, the control port shows it.

A source whose stream begins anew does not report what happened meanwhile, so all that was known of its backend is
dropped first (CX18). A prefix named by one of our token fingerprints (16 hex digits) is also reported to EngineCaches,
and so reaches every policy; since the stream has no numbers its level never exceeds DEGRADED. Continuum's own keys (64
digits) stay in the index, which `kv_score` asks for the key of a prompt's opening.

Rules: each node has its own index; several nodes may listen to the same sources. With Redis nodes share what they
receive (`share`), besides their own indexes. Source: Continuum Router, «KV cache optimization», tier 4; the JSON of
the control port is Continuum's, plus the members that its document promises but its JSON lacks (CX16).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any

import trio

from ranvier_py.core.engine_cache.engine_caches import EngineCaches, Source
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.prefix_index.prefix_index import IndexEvent, IndexSettings, KvIndex, SourceCounts
from ranvier_py.core.engine_cache.prefix_index.shared_index import SharedIndex
from ranvier_py.core.engine_cache.prefixes import Change
from ranvier_py.core.engine_cache.residency_values import Changes
from ranvier_py.core.engine_cache.sources.event_values import Tier
from ranvier_py.core.ids import BackendId, Fingerprint
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.prompts.request_body import Prompt
from ranvier_py.core.redis_commands import RedisCommands
from ranvier_py.core.routing.placement.kv_score import IndexedPrefix, KvScore, KvScoreOptions
from ranvier_py.io.engine_events.sse_source import EventSource, SourceOptions
from ranvier_py.io.redis_index import PREPARE_S, RedisLink
from ranvier_py.proxy.pipeline import PromptTokenizer
from ranvier_py.supervision import Faults

FINGERPRINT_DIGITS = 16
CHANGED, STATUS = "Events that changed the index.", "State of an event source."
TICK_S = 1.0  # expired entries are never found; a tick only frees their memory


@dataclass(frozen=True, slots=True)
class IndexedBackend:
    """A backend with an event source. `url` is its name on all nodes."""

    id: BackendId
    name: str
    endpoint: str
    url: str = ""


class IndexedStream:
    """One source and its backend. It is the `Held` of EngineCaches for the prefixes that have our names.

    What comes while the node does not have the backend under this id is ignored: another one may have the id.
    """

    def __init__(
        self,
        backend: IndexedBackend,
        index: KvIndex,
        engine_caches: EngineCaches | None,
        find: Callable[[str], BackendId | None] | None = None,
    ) -> None:
        """`find` finds the node's backends by their URL; without it the backend is always there."""
        self.backend = backend
        self.source = Source(backend.id, "index")
        self._index = index
        self._engine_caches = engine_caches
        self._find = find

    @property
    def _is_there(self) -> bool:
        return self._find is None or self._find(self.backend.url) == self.backend.id

    def held_among(self, fingerprints: Sequence[Fingerprint]) -> Mapping[Fingerprint, Tier]:
        entries = ((name, self._index.peek(f"{name:016x}", self.backend.id)) for name in fingerprints)
        return {name: tier_of(entry) for name, entry in entries if entry is not None}

    def forget(self) -> None:
        """Drop what the source reported."""
        self._index.forget((self.backend.id,))
        if self._engine_caches is not None:
            self._engine_caches.close(self.source, time.monotonic())

    def started(self) -> None:
        if not self._is_there:
            return
        now = time.monotonic()
        self._index.forget((self.backend.id,))
        if self._engine_caches is not None:
            self._engine_caches.open(self.source, self, now)
            self._engine_caches.set_level(self.source, Level.DEGRADED, "events without numbers", now)

    def received(self, events: Sequence[IndexEvent]) -> None:
        if not self._is_there:
            return
        now = time.monotonic()
        changes = []
        for event in events:
            changed = self._index.apply(self.backend.id, event, now)
            if not changed or len(event.prefix) != FINGERPRINT_DIGITS:
                continue
            entry = self._index.peek(event.prefix, self.backend.id)
            tokens = entry.tokens if entry is not None else event.tokens or 0
            changes.append(Change(Fingerprint(int(event.prefix, 16)), tokens, tier_of(entry), Fingerprint(0)))
        if changes and self._engine_caches is not None:
            self._engine_caches.changed(self.source, Changes(cleared=False, changes=tuple(changes), complete=True), now)


class Preparing:
    """Asks Redis for a prompt's opening while the prompt is tokenized before its placement.

    A prompt whose routes are well known waits for neither, since they cover more than its opening.
    """

    def __init__(self, tokenizer: PromptTokenizer, indexing: Callable[[], Indexing]) -> None:
        self.submit, self.finish = tokenizer.submit, tokenizer.finish
        self._tokenizer = tokenizer
        self._indexing = indexing

    async def tokenize_first(self, prompt: Prompt, deadline_s: float) -> bool:
        indexing, began = self._indexing(), time.monotonic()
        link = indexing.asked_link
        opening = prompt.opening(*indexing.opening).hex() if link is not None else ""
        if link is not None and opening:
            link.shared.prepare(opening, began)
        is_known = await self._tokenizer.tokenize_first(prompt, deadline_s)
        if link is not None and opening:
            await link.prepare(opening, max(0.0, PREPARE_S - (time.monotonic() - began)))
        return is_known


class Indexing:
    """The index of one node, its sources and its link to Redis."""

    def __init__(  # noqa: PLR0913  # a place where parts meet, each named
        self,
        settings: IndexSettings,
        backends: Sequence[IndexedBackend],
        options: SourceOptions,
        rng: Random,
        *,
        engine_caches: EngineCaches | None = None,
        api_key: str = "",
        faults: Faults | None = None,
        find: Callable[[str], BackendId | None] | None = None,
    ) -> None:
        self._faults = faults or Faults()
        self.index = KvIndex(settings, time.perf_counter)
        self._scoring: KvScoreOptions | None = None  # options of the policy that asks, if one does
        self._sources: list[tuple[IndexedBackend, EventSource]] = []
        self._streams: list[IndexedStream] = []
        self._link: RedisLink | None = None
        self._rng = rng
        for backend in backends:
            stream = IndexedStream(backend, self.index, engine_caches, find)
            self._streams.append(stream)
            made = partial(EventSource, backend.endpoint, options, rng=rng, api_key=api_key)
            self._sources.append((backend, made(received=stream.received, started=stream.started)))

    @property
    def enabled(self) -> bool:
        return bool(self._sources) or self._link is not None

    def share(self, commands: RedisCommands, prefix: str, find: Callable[[str], BackendId | None]) -> RedisLink:
        """Share the index through Redis, in keys with this prefix; `find` finds backends by their URL."""
        states = {backend.id: source.state for backend, source in self._sources}
        shared = SharedIndex(
            self.index,
            prefix,
            {backend.id: backend.url for backend, _ in self._sources},
            find=find,
            stands=lambda backend: states[backend].connected,
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

    def taken(self, backend: BackendId, url: str) -> None:
        """Forget what was reported of the backend that had this id before, unless its URL is the same."""
        for stream in self._streams:
            if stream.backend.id == backend and stream.backend.url != url:
                stream.forget()

    def set_options(self, settings: IndexSettings, options: SourceOptions) -> None:
        """Use these options for what comes from now on."""
        self.index.settings = settings
        for _, source in self._sources:
            source.options = options

    def rekey(self, api_key: str) -> None:
        """Use this key for event streams from their next connection on."""
        for _, source in self._sources:
            source.rekey(api_key)

    async def run(self) -> None:
        """Run for ever."""
        async with trio.open_nursery() as nursery:
            for _, source in self._sources:
                nursery.start_soon(self._faults.keep, "kv_index_source", source.run)
            if self._link is not None:
                nursery.start_soon(self._faults.keep, "kv_index_redis", self._link.run)
            if self.enabled:
                nursery.start_soon(self._faults.keep, "kv_index", self._expire)

    async def _expire(self) -> None:
        while True:
            self.index.expire(time.monotonic())
            await trio.sleep(TICK_S)

    # --- the control port -------------------------------------------------------------------------------------------

    def stats(self) -> Mapping[str, Any]:
        """Return the answer of GET /admin/kv-index/stats, in Continuum's form (CR26)."""
        if not self.enabled:
            return {"enabled": False}
        index, counters, ttl_s = self.index, self.index.counters, self.index.settings.ttl_s
        return {
            "enabled": True,
            "config": {
                "backend": "memory" if self._link is None else "redis",
                "max_entries": index.settings.entries_max,
                "entry_ttl_seconds": int(ttl_s) if ttl_s.is_integer() else ttl_s,
                "event_sources_count": len(self._sources),
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
                    "backend_name": backend.name,
                    "connected": source.state.connected,
                    "events_received": source.state.received,
                    "events_dropped": source.state.dropped,
                    "last_event_at": moment(source.state.last_event_at),
                    "reconnect_count": source.state.reconnects,
                    "last_error": source.state.last_error,
                }
                for backend, source in self._sources
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
                    "backend_name": backend.name,
                    "connection": {
                        "connected": source.state.connected,
                        "reconnect_count": source.state.reconnects,
                        "last_event_at": moment(source.state.last_event_at),
                    },
                    "events": {
                        "received": source.state.received,
                        "processed": source.state.received - source.state.dropped,
                        "dropped": source.state.dropped,
                        "index_created": self._count(backend).created,
                        "index_evicted": self._count(backend).evicted,
                    },
                }
                for backend, source in self._sources
            ],
        }

    def clear(self) -> Mapping[str, Any]:
        """Clear the index, for POST /admin/kv-index/clear (CR28). Returns the answer."""
        before = self.index.clear()
        if self._link is not None:
            self._link.shared.clear(time.monotonic())
        return {"success": True, "entries_before_clear": before, "cleared_entries": before}

    def samples(self) -> Iterator[Sample]:
        """Yield Continuum's metrics under our prefix (CR22), and our own."""
        if not self.enabled:
            return
        for backend, source in self._sources:
            label, state = {"backend": backend.name}, source.state
            for name, kind, help_text, value, more in (
                ("event_received", "counter", "Events of an event source.", state.received, {}),
                ("event_processed", "counter", "Of these, that could be read.", state.received - state.dropped, {}),
                ("event_dropped", "counter", "Of these, that could not.", state.dropped, {}),
                ("consumer_connected", "gauge", "Whether its stream stands.", state.connected, {}),
                ("consumer_reconnects", "counter", "Tries to connect again.", state.reconnects, {}),
                ("index_events", "counter", CHANGED, self._count(backend).created, {"type": "created"}),
                ("index_events", "counter", CHANGED, self._count(backend).evicted, {"type": "evicted"}),
                ("index_event_source_status", "gauge", STATUS, state.connected, {"status": "connected"}),
                ("index_event_source_status", "gauge", STATUS, not state.connected, {"status": "disconnected"}),
            ):
                yield Sample(f"kv_{name}", kind, help_text, int(value), {**label, **more})  # type: ignore[arg-type]
        yield Sample("kv_index_entries", "gauge", "Pairs of prefix and backend.", len(self.index))
        yield from samples("kv_index", self.index.counters)
        if self._link is not None:
            yield from self._link.samples()

    def _count(self, backend: IndexedBackend) -> SourceCounts:
        return self.index.counters.by_backend.get(backend.id) or SourceCounts()


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
