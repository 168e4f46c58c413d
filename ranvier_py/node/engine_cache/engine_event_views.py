"""Shows what is read of engines' events: metrics, and a page of the control port."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ranvier_py.core.engine_cache.engine_caches import Source, SourceState
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.findings import Finding, Severity
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.routing.backends import Backend, Health
from ranvier_py.node.asked import Route
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.engine_cache.event_reader import KnownEngine, declared_streams, name_of
from ranvier_py.node.part import Handler, Part

NAMES_SHOWN = 4  # of engines in one finding
OF_RANKS, PEERS = "its ranks are backends of their own, which have its events", "a peer's to read"
ELSEWHERE = (OF_RANKS, PEERS)
"""Why an engine's events are not read here although nothing is wrong."""


class EngineEventViews(Part):
    """See the module."""

    def __init__(self, events: EngineEvents) -> None:
        self._events, self._router, self._registry = events, events.router, events.router.registry

    def _engine(self, backend: Backend) -> KnownEngine:
        return self._events.engines.get(backend.id) or KnownEngine()

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/engine-cache": Route(lambda _: self.view(), "How well each engine's cache is known")}

    def view(self) -> dict[str, Any]:
        """Return a line for each engine, and all of each source, for the control port."""
        now = time.monotonic()
        standby = [one for ranks in self._events.streams.values() for one in ranks.values() if not one.stream.is_open]
        return {
            "trouble": self._events.subscriptions.trouble,
            "counts": asdict(self._events.engine_caches.counters),
            "engines": [self._line(backend) for backend in self._registry],
            "sources": [self._source_view(state, now) for state in self._events.engine_caches.sources()],
            "standby": [{**self._names_of(one.stream.source), **one.view(now)} for one in standby],
        }

    def of_engines(self, now: float) -> Mapping[str, Mapping[str, Any]]:
        return {
            backend.name: {"level": self._events.level(backend.id).value, "why": self._why(backend)}
            for backend in self._registry
        }

    def findings(self, now: float) -> Iterator[Finding]:
        """Yield one finding for all engines whose caches are known less than exactly for the same reason."""
        engines: dict[tuple[Level, str, bool], list[str]] = {}
        for backend in self._registry:
            level, publishes = self._events.level(backend.id), bool(self._engine(backend).publishers)
            is_here = not backend.behind.as_ranks and backend.health is not Health.UNHEALTHY
            if level is not Level.EXACT and is_here and self._note(backend) not in ELSEWHERE:
                engines.setdefault((level, self._why(backend), publishes), []).append(backend.name)
        for (level, why, publishes), names in engines.items():
            listed = ", ".join(names[:NAMES_SHOWN]) + (
                f" and {len(names) - NAMES_SHOWN} more" * (len(names) > NAMES_SHOWN)
            )
            what = f"the cache of {listed} is known as {level.value}, not exactly: {why}"
            remedy = "Let the engine publish KV events (vLLM: --kv-events-config, SGLang: the same)."
            if publishes:
                remedy = "See whether its event and replay ports are open from here; it is repaired by itself."
            severity = Severity.DEGRADED if publishes else Severity.NOTICE  # estimates serve nearly as well
            command = f"ranvier status --engine {names[0]}"
            yield Finding(
                "cache_level",
                severity,
                what,
                about=f"{level.value}: {why}",
                whom="hits",
                remedy=remedy,
                command=command,
            )
        if trouble := self._events.subscriptions.trouble:
            what, remedy = f"no KV events can be read: {trouble}", "Mend that; until then caches are estimated."
            yield Finding("events_unread", Severity.DEGRADED, what, whom="hits", remedy=remedy)

    def _line(self, backend: Backend) -> dict[str, Any]:
        totals = Counter(applied=0, gaps=0, restarts=0, blocks=0, prefixes=0)
        streams = self._events.streams.get(backend.id, {}).values()
        for one in streams:
            totals.update(one.line())
        role = "" if not streams else "reader" if any(one.stream.is_open for one in streams) else "standby"
        return {
            "name": backend.name,
            "level": self._events.level(backend.id).value,
            "profile": self._router.checkpoints.profile(backend.id).label,
            "streams": len(self._engine(backend).publishers),
            "role": role,
            **totals,
            "why": self._why(backend),
        }

    def _why(self, backend: Backend) -> str:
        return "; ".join([each for each in (self._reason(backend), self._note(backend)) if each])

    def _reason(self, backend: Backend) -> str:
        """Return why an engine has its level."""
        for one in self._events.streams.get(backend.id, {}).values():
            if not one.subscriber.state.is_connected:
                return f"not connected: {one.subscriber.state.why or 'not yet'}"
        reason = self._events.engine_caches.reason(backend.id)
        return reason or ("" if self._engine(backend).publishers else "no events are published")

    def _note(self, backend: Backend) -> str:
        """Return why an engine that publishes events is not read here, or is of less use than it could be."""
        if not self._engine(backend).publishers:
            return ""
        if backend.behind.as_ranks:
            return OF_RANKS
        if backend.behind.processes > 1:
            return "several processes answer there, and the events are those of one"
        for one in self._events.streams.get(backend.id, {}).values():
            size = one.stream.residency.block_tokens
            return f"block_size_tokens should be {size}, as it has" if size > self._router.hasher.block_tokens else ""
        if self._engine(backend).unnamed is not None or backend.catalog.models is None:
            return "not one base model: " + (
                ", ".join(backend.catalog.models) if backend.catalog.models else "none is known"
            )
        if self._engine(backend).lost_until:
            return "not to be reached from here"
        return self._events.subscriptions.trouble or PEERS

    def _names_of(self, source: Source) -> dict[str, str]:
        return {"backend": name_of(self._registry, source.backend), "source": source.name}

    def _source_view(self, state: SourceState, now: float) -> dict[str, Any]:
        shown = {
            **self._names_of(state.source),
            "level": state.level.value,
            "reason": state.reason,
            "since_s": round(now - state.since, 1),
            "changed_s": None if state.changed_at is None else round(now - state.changed_at, 1),
            "changes": state.changes,
            "cleared": state.cleared,
        }
        streams = self._events.streams.get(state.source.backend, {}).values()
        one = next((one for one in streams if one.stream.source == state.source), None)
        return {**shown, **one.view(now)} if one is not None else shown

    def metrics(self) -> Iterator[Sample]:
        yield from samples("engine_cache", self._events.engine_caches.counters, {})
        help_text = "Engines whose KV events do not say which of several base models each is of."
        yield Sample(
            "engine_events_ambiguous",
            "gauge",
            help_text,
            sum(each.unnamed is not None for each in self._events.engines.values()),
        )
        help_text = "Restarts that events showed more often than engines can restart."
        yield Sample("engine_events_restarts_unbelieved", "counter", help_text, self._events.restarts_unbelieved)
        for backend in self._registry:
            label = {"backend": backend.name}
            level = self._events.level(backend.id).value
            help_text = "1 for the level at which the engine's cache is known."
            yield Sample("engine_cache_level", "gauge", help_text, 1, {**label, "level": level})
            for one in self._events.streams.get(backend.id, {}).values():
                yield from one.metrics(label)
        yield from declared_streams()
