"""The sources of a node's backends: what follows them, and how they look to an operator."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.routing.wanted.source_set import SourceSet
from ranvier_py.node.part import Handler, Node, Part

LEFT_OUT_MAX = 20  # sentences about entries that can't be used, of one source in one view


class DiscoveryParts(Part):
    """See the module."""

    name = "sources"

    def __init__(self, node: Node) -> None:
        self._sources = node.sources

    def sweep(self, now: float) -> None:
        if not self._sources.reconciler.is_settled:
            self._sources.settle()

    def routes(self) -> Mapping[str, Handler]:
        return {"GET /admin/sources": lambda _: self.view()}

    def view(self) -> Mapping[str, Any]:
        """Return the state of each source, and what of their backends could not be added."""
        reconciler, now = self._sources.reconciler, time.monotonic()
        listed = sorted(reconciler.sources.items(), key=lambda item: item[0].rank)
        removed = [url for url, override in reconciler.overrides.items() if override.spec is None]
        return {
            "sources": {str(name): source_view(source, now) for name, source in listed},
            "not_added": reconciler.failed,
            "removed_by_operators": removed,
        }

    def metrics(self) -> Iterator[Sample]:
        for name, source in self._sources.reconciler.sources.items():
            yield from samples("backend_source", source.counters, {"source": str(name)})


def source_view(source: SourceSet[Any], now: float) -> Mapping[str, Any]:
    good_at = source.good_at
    return {
        "state": source.state.value,
        "since_s": round(now - source.since, 1),
        "why": source.why,
        "backends": len(source.found),
        "good_s_ago": None if good_at is None else round(now - good_at, 1),
        "left_out": source.left_out[:LEFT_OUT_MAX],
    }
