"""The backends of a node, as operators and reloads see them; `backend_orders` changes them at run time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.errors import BadRequest, ConfigError
from ranvier_py.core.findings import Finding
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.routing.backends import ProbeResult
from ranvier_py.core.routing.engine_findings import engine_findings
from ranvier_py.core.routing.wanted.source_set import Belief
from ranvier_py.node.asked import SCOPE, Asked, Route
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.part import Handler, Node, Part, log_transitions
from ranvier_py.node.parts.backend_views import (
    backend_metrics,
    options_digest,
    reaches_engine,
    settings_digest,
    shown_backend,
)
from ranvier_py.node.ranks.rank_parts import RankParts
from ranvier_py.node.shared_orders import without_gossip

NOT_ASKED = -1.0
"""The load of an engine, in its history, while it gets no requests because it fails."""


class BackendParts(Part):
    """See the module."""

    name = "backends"
    keys = ("backend", "health", "reload_allow_empty")

    def __init__(self, node: Node, ranks: RankParts, clustering: ClusterParts | None) -> None:
        self._node, self._registry, self._ranks, self._clustering = node, node.registry, ranks, clustering
        if clustering is not None:
            clustering.peer.features.backend_lists.options_of = partial(options_digest, node)
            clustering.peer.features.backend_sets.settings_of = lambda: settings_digest(node.config)

    def probed(self, backend: BackendId, result: ProbeResult) -> None:
        log_transitions(self._registry.changes.probed(backend, result, time.monotonic()))

    def unready(self) -> str:
        """No engine may be there: then a 503 with Retry-After helps clients more than a node that is gone."""
        sources = self._node.sources.reconciler.sources
        waiting = [str(name) for name, source in sources.items() if source.state is Belief.STARTING]
        if not self._registry.ids.by_url and waiting:
            return f"waiting for the first backends of {', '.join(waiting)}"
        if reaches_engine(self._registry) or self._clustering is None:
            return ""
        peer = self._clustering.peer
        session = peer.features.facts.doubts.well_at(time.monotonic())
        return "" if session is None else f"it reaches no engine, and {peer.name_of(session)} calls one healthy"

    def findings(self, now: float) -> Iterator[Finding]:
        return engine_findings(self._registry, now)

    def series(self, now: float) -> Iterator[tuple[str, float]]:
        for each in self._registry:
            yield f"load/{each.name}", each.load if each.vitals.admits else NOT_ASKED

    def metrics(self) -> Iterator[Sample]:
        registry = self._registry
        yield from samples("", registry.counters)
        yield from samples("pauses", registry.pauses.counters)
        yield from samples("refusals", registry.refusals.counters)
        yield from samples("engine_names", registry.names.counters)
        for backend in registry:
            yield from backend_metrics(backend, registry)

    def routes(self) -> Mapping[str, Handler]:
        """/list_workers answers as SGLang's router does."""
        return {
            "GET /admin/backends": Route(self._listed, "All backends; those of all nodes as well", query=SCOPE),
            "GET /list_workers": Route(lambda _: {"urls": [backend.url for backend in self._registry]}, "All URLs"),
        }

    async def _listed(self, asked: Asked) -> Mapping[str, Any]:
        """List the backends. With `cluster=true` also what each other worker and node has, and how that differs."""
        wanted = asked.query.get("cluster", "false")
        if wanted not in ("true", "false"):
            raise BadRequest("cluster must be true or false")
        if wanted == "false":
            return {"backends": self.view()}
        if self._clustering is not None:
            return {"backends": self.view(), "places": await self._clustering.orders.lists()}
        unknown = [{**each, "backends": [], "differences": []} for each in without_gossip(self._node.config)]
        return {"backends": self.view(), "places": unknown}

    def view(self) -> Sequence[Mapping[str, Any]]:
        return [shown_backend(self._node, backend) for backend in self._registry]

    def check(self, before: Config, after: Config) -> bool:
        problems = [*self._taken(before.backend, after.backend)]
        problems += self._emptied(before.backend, after.backend) if not after.reload_allow_empty else ()
        if problems:
            raise ConfigError(problems)
        return False

    def reload(self, before: Config, after: Config) -> None:
        """The backends of the configuration are what the source `static` wants; weights change in place."""
        self._registry.limits = after.health
        for backend in self._registry:
            backend.vitals.limits = after.health
        self._node.sources.configure(after.backend)

    def _taken(self, before: Sequence[BackendSpec], after: Sequence[BackendSpec]) -> Iterator[str]:
        """Yield a problem for each new backend whose name an added backend has that is not in the configuration."""
        urls = {spec.url for spec in before} | {spec.url for spec in after}
        others = {backend.name for backend in self._registry if backend.url not in urls}
        for index, spec in enumerate(after):
            if spec.label in others:
                yield f"backend[{index}]: {spec.label} is the name of a backend that was added while the node ran"

    def _emptied(self, before: Sequence[BackendSpec], after: Sequence[BackendSpec]) -> Iterator[str]:
        """Yield a problem if the node has backends now and would have none."""
        urls = {backend.url for backend in self._registry if not self._ranks.is_placed(backend)}
        if urls and not after and urls <= {spec.url for spec in before}:
            yield "backend: none would be left; if that is meant, set reload_allow_empty"
