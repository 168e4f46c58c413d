"""The backends of a node, as operators, peers and reloads see, add, drain and remove them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ranvier_py.config.config_loader import read_backend
from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.errors import BadRequest, ConfigError
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.routing.backend_state.signed_commands import HOSTED, NO_OPTIONS, CommandOptions
from ranvier_py.core.routing.backends import Backend, Circuit, Health, ProbeResult, Registry
from ranvier_py.node.asked import PLAIN, Asked, ControlAnswer, text_of
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.name_parts import NameParts
from ranvier_py.node.part import Handler, Node, Part, log_transitions
from ranvier_py.node.ranks.rank_parts import RankParts

log = logging.getLogger(__name__)

FIELDS = ("url", "weight", "name", "kv_events", "kv_replay", "kv_ranks", "kv_profile", *CommandOptions._fields)


class BackendParts(Part):
    """See the module."""

    name = "backends"
    keys = ("backend", "health", "reload_allow_empty")

    def __init__(self, node: Node, ranks: RankParts, names: NameParts, clustering: ClusterParts | None) -> None:
        self._node, self._registry = node, node.registry
        self._ranks, self._names, self._clustering = ranks, names, clustering

    def probed(self, backend: BackendId, result: ProbeResult) -> None:
        log_transitions(self._registry.changes.probed(backend, result, time.monotonic()))

    def unready(self) -> str:
        return "" if self._registry.pools.pool("", time.monotonic()).ids else "no backend can be asked"

    def metrics(self) -> Iterator[Sample]:
        registry = self._registry
        yield from samples("", registry.counters)
        yield from samples("pauses", registry.pauses.counters)
        yield from samples("refusals", registry.refusals.counters)
        yield from samples("engine_names", registry.names.counters)
        for backend in registry:
            yield from backend_metrics(backend, registry)

    def routes(self) -> Mapping[str, Handler]:
        """/…_worker answer as SGLang's router does."""
        return {
            "GET /admin/backends": lambda _: {"backends": self.view()},
            "POST /admin/backends": self._add,
            "DELETE /admin/backends": self._remove,
            "POST /admin/backends/drain": self._drain,
            "POST /add_worker": self._add_worker,
            "POST /remove_worker": self._remove_worker,
            "GET /list_workers": lambda _: {"urls": [backend.url for backend in self._registry]},
        }

    def view(self) -> Sequence[Mapping[str, Any]]:
        return [backend_view(backend, self._registry) for backend in self._registry]

    def _view(self, name_or_url: str) -> Mapping[str, Any]:
        return backend_view(self._registry.ids.known(name_or_url), self._registry)

    async def _add(self, asked: Asked) -> Mapping[str, Any]:
        fields = await asked.json(*FIELDS, others=True)
        await self._names.refuse_twin(fields.get("url"))
        return self.add(fields)

    def add(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a backend with the configuration's fields. Raises ConfigError with all that is wrong; nothing changes.

        Peers that follow the command ask the engine where its events are: `kv_` fields count for this node only.
        """
        spec = read_backend(fields)
        if spec.kv_index:
            raise ConfigError(["kv_index: is read when a node starts, and can't be set here"])
        with ExitStack() as undo:
            backend = self._registry[self._node.add_backend(spec.url, spec.weight, spec.name, spec)]
            undo.callback(self._node.remove_backend, backend.name)
            events = {name: value for name, value in spec.model_dump().items() if name.startswith("kv_")}
            view = {**self._view(backend.name), **events}
            options = CommandOptions(HOSTED.index(spec.hosted), spec.any_model, spec.tls_name)
            view |= self._order("add", backend.url, spec.weight, spec.name, options)
            undo.pop_all()
        return view

    async def _remove(self, asked: Asked) -> Mapping[str, Any]:
        return self.remove(asked.query.get("url") or text_of(await asked.json("url"), "url"))

    def remove(self, url: str) -> Mapping[str, Any]:
        view = self._view(url)
        self._node.remove_backend(url)
        return {**view, **self._order("remove", view["url"], 1.0, "")}

    def _order(
        self, verb: str, url: str, weight: float, name: str, options: CommandOptions = NO_OPTIONS
    ) -> Mapping[str, bool]:
        """Share a command with the peers. `shared`: whether it is sent to them; empty if there is no gossip."""
        return {} if self._clustering is None else {"shared": self._clustering.order(verb, url, weight, name, options)}

    async def _drain(self, asked: Asked) -> Mapping[str, Any]:
        """Send a backend no more requests, or some again. Raises NotFound."""
        body = await asked.json("url", "draining")
        url, draining = text_of(body, "url"), body.get("draining", True)
        if not isinstance(draining, bool):
            raise BadRequest("draining must be true or false")
        before = self._registry.ids.known(url).draining
        backend = self._registry.drain(url, draining)
        if before is not draining:
            log.info("backend.draining %s %s -> %s (ordered over the control port)", backend.name, before, draining)
        return backend_view(backend, self._registry)

    async def _add_worker(self, asked: Asked) -> ControlAnswer:
        url = asked.worker_url()
        await self._names.refuse_twin(url)
        self.add({"url": url})
        return ControlAnswer(f"Successfully added worker: {url}", kind=PLAIN)

    def _remove_worker(self, asked: Asked) -> ControlAnswer:
        url = asked.worker_url()
        self.remove(url)
        return ControlAnswer(f"Successfully removed worker: {url}", kind=PLAIN)

    def check(self, before: Config, after: Config) -> bool:
        problems = [*self._taken(before.backend, after.backend)]
        problems += self._emptied(before.backend, after.backend) if not after.reload_allow_empty else ()
        if problems:
            raise ConfigError(problems)
        return False

    def reload(self, before: Config, after: Config) -> None:
        """Add and remove backends as an operator would over the control port; weights change in place."""
        node, registry = self._node, self._registry
        registry.limits = after.health
        for backend in registry:
            backend.vitals.limits = after.health
        old, new = ({spec.url: spec for spec in config.backend} for config in (before, after))
        for url, spec in old.items():
            wanted = new.get(url)
            if (wanted is None or replace_needed(spec, wanted)) and registry.ids.find(url) is not None:
                node.remove_backend(url)
        for url, spec in new.items():
            known = old.get(url)
            if registry.ids.find(url) is None and (known is None or replace_needed(known, spec)):
                node.add_backend(url, spec.weight, spec.name, spec)
            elif known is not None and known.weight != spec.weight and registry.ids.find(url) is not None:
                registry.reweigh(url, spec.weight)

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


def replace_needed(old: BackendSpec, new: BackendSpec) -> bool:
    return old.model_copy(update={"weight": new.weight}) != new


def backend_view(backend: Backend, registry: Registry) -> dict[str, Any]:
    probe = backend.seen.last_probe
    return {
        "name": backend.name,
        "url": backend.url,
        "health": backend.health.value,
        "silent": backend.vitals.silent,
        "circuit": backend.circuit.value,
        "refusing_status": registry.refusals.status_of(backend.id) or None,
        "draining": backend.draining,
        "pause_s": round(registry.pauses.left_s(backend.id, time.monotonic()), 1),
        "in_flight": backend.work.own.inflight,
        "peer_load": backend.work.peers.requests,
        "weight": backend.weight,
        "hosted": backend.catalog.hosted,
        "any_model": backend.catalog.any_model,
        "lacks": sorted(path.decode() for path in backend.seen.lacks),
        "generation": backend.generation,
        "processes": backend.behind.processes,
        "ranks": backend.behind.ranks,
        "placed_as": [each.name for each in backend.behind.as_ranks],
        "twins": backend.behind.names.twins,
        "strangers": backend.behind.names.strangers,
        "advice": backend.advice,
        "models": backend.catalog.models,
        "key_refused": backend.seen.key_refused,
        "reuses_prefixes": backend.reuse.believed,
        "reuses_nothing_because": backend.reuse.why_not,
        "outcomes": {outcome.value: count for outcome, count in backend.seen.outcomes.items() if count},
        "probe_ms": round(probe.latency_s * 1000, 2) if probe else None,
        "probe_detail": probe.detail if probe else "",
    }


def backend_metrics(backend: Backend, registry: Registry) -> Iterator[Sample]:
    label, refusing = {"backend": backend.name}, registry.refusals.status_of(backend.id)
    names, is_closed, processes = backend.behind.names, backend.circuit is Circuit.CLOSED, backend.behind.processes
    for name, help_text, value in (
        ("in_flight", "Requests of this node in flight at a backend.", backend.work.own.inflight),
        ("healthy", "1 unless probes found the backend unhealthy.", backend.health is not Health.UNHEALTHY),
        ("silent", "1 while the backend is unhealthy by time-outs alone.", backend.vitals.silent),
        ("circuit_closed", "1 while the backend's circuit breaker lets every request through.", is_closed),
        ("draining", "1 while the backend is drained: it gets no new requests.", backend.draining),
        ("refusing_status", "Status with which the backend refuses what others serve; 0: none.", refusing),
        (
            "key_refused",
            "1 while the backend answers probes of this node with 401 or 403.",
            bool(backend.seen.key_refused),
        ),
        (
            "reuses_prefixes",
            "0 if the backend's engine caches no prefixes, as it says or shows.",
            backend.reuse.believed,
        ),
        ("processes", "Processes that surely answer behind the backend's URL: more than 1 is a mistake.", processes),
        (
            "ranks",
            "Data-parallel ranks behind the backend's URL, placed as backends if possible.",
            backend.behind.ranks,
        ),
        ("twins", "Backends, here and on peers, that are this backend's engine by another URL.", len(names.twins)),
        ("strangers", "Nodes on which the backend's URL leads to another engine.", len(names.strangers)),
    ):
        yield Sample(f"backend_{name}", "gauge", help_text, float(value), label)
    openings, words = backend.vitals.openings, "Times that the circuit breaker of a backend opened."
    yield Sample("backend_circuit_openings", "counter", words, openings, label)
    for outcome, number in backend.seen.outcomes.items():
        labels = {**label, "outcome": outcome.value}
        yield Sample("backend_attempts", "counter", "Attempts of requests, by backend and outcome.", number, labels)
