"""Operations of the control port on a node: commands, all metrics, and those views as JSON that no part has itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import orjson
import trio

from ranvier_py.config.config_loader import read_backend
from ranvier_py.control.prefix_admin import prefix_routing_samples
from ranvier_py.core.errors import ConfigError, NotFound
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.prompts.body_json import excess
from ranvier_py.core.routing.backends import Backend, Circuit, Health, Registry
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.request_paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH
from ranvier_py.core.shadows.shadow import Shadow
from ranvier_py.node.cluster_parts import ClusterParts
from ranvier_py.node.node import Node
from ranvier_py.node.reload import Reloads
from ranvier_py.proxy.failed_tries import known_short, passed_over
from ranvier_py.proxy.http_values import HttpRequest

KEYS_SHOWN_MAX = 64
"""Depths of a prompt in an explanation, the deepest first: a screen."""


class Admin:
    """One node's administration. All methods are one synchronous call, but those that are `async`."""

    def __init__(self, node: Node, reloads: Reloads | None = None) -> None:
        self._node = node
        self._reloads = reloads

    def backends(self) -> Sequence[Mapping[str, Any]]:
        registry = self._node.registry
        return [backend_view(backend, registry) for backend in registry]

    def add_backend(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a backend with the configuration's fields. Raises ConfigError with all that is wrong; nothing changes.

        Peers that follow the command ask the engine where its events are: `kv_` fields count for this node only.
        """
        spec = read_backend(fields)
        if spec.hosted is not None and self._node.config.gossip_admin_key is not None:
            raise ConfigError(["hosted: is not spread to peers; set it in the configuration of every node"])
        if spec.kv_index:
            raise ConfigError(["kv_index: is read when a node starts, and can't be set here"])
        with ExitStack() as undo:
            backend = self._node.registry[self._node.add_backend(spec.url, spec.weight, spec.name, spec)]
            undo.callback(self._node.remove_backend, backend.name)
            events = {name: value for name, value in spec.model_dump().items() if name.startswith("kv_")}
            view = {**self._view(backend.name), **events}
            view |= self._order("add", backend.url, spec.weight, spec.name)
            undo.pop_all()
        return view

    def remove_backend(self, url: str) -> Mapping[str, Any]:
        view = self._view(url)
        self._node.remove_backend(url)
        return {**view, **self._order("remove", view["url"], 1.0, "")}

    def _order(self, verb: str, url: str, weight: float, name: str) -> Mapping[str, bool]:
        """Share a command with the peers. `shared`: whether it is sent to them; empty if there is no gossip."""
        clustering = self._node.clustering
        return {} if clustering is None else {"shared": clustering.order(verb, url, weight, name)}

    def drain_backend(self, url: str, draining: bool) -> Mapping[str, Any]:
        return self._view(self._node.drain_backend(url, draining).name)

    def routes(self) -> Mapping[str, Any]:
        router = self._node.router
        counters, recorder = router.counters, self._node.recorder
        return {
            **values(router.routes.counters),
            "memory": values(router.reader.memory.counters),
            "speculation": values(router.speculation.counters),
            "tokenizer_worker": values(self._node.tokenizer_worker.counters),
            **({"recorder": values(recorder.counters)} if recorder is not None else {}),
            **({"shadows": [shadow_view(shadow) for shadow in self._shadows()]} if self._shadows() else {}),
            "decisions": dict(counters.decisions),
            "outcomes": dict(counters.outcomes),
            "prompt_tokens": counters.prompt_tokens,
            "predicted_share": share(counters.predicted_tokens, counters.prompt_tokens),
            "engine_cached_share": share(counters.engine_cached_tokens, counters.engine_prompt_tokens),
        }

    def route_tree(self, fingerprint: int, limit: int) -> Sequence[Mapping[str, Any]]:
        found = self._node.router.routes.subtree(fingerprint, limit=limit)
        names = {backend.id: backend.name for backend in self._node.registry}
        return [
            {
                "level": view.level,
                "tokens": view.tokens,
                "exact": view.exact,
                "token_fingerprint": f"{view.token_fingerprint:016x}" if view.token_fingerprint else None,
                "text_fingerprints": [f"{text:016x}" for text in view.text_fingerprints],
                "children": view.children,
                "idle_s": round(view.idle_s, 1),
                "holders": [
                    {
                        "backend": names.get(claim.backend, f"#{claim.backend}"),
                        "trust": claim.trust.name,
                        "age_s": round(claim.age_s, 1),
                    }
                    for claim in view.holders
                ],
            }
            for view in found
        ]

    async def explain(self, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
        """Dry-run a chat or a completion: tokenize it as placing would, but place, learn and count nothing.

        `headers` name its tenant where tenants are kept apart, and the credential for which a backend may pause.
        """
        router, tenants, path = self._node.router, self._node.pipeline.tenants, path_of(body)
        await trio.lowlevel.checkpoint()  # each step may parse as much as a turn of the event loop has time for
        body = self._node.pipeline.body_as_read(path, body, headers)
        await trio.lowlevel.checkpoint()
        prompt = router.read(path, body, tenants.of(headers) if tenants is not None else b"", dry=True)
        request = HttpRequest(b"POST", path, list(headers), body)
        prompt.avoid = passed_over(router, request, prompt, time.monotonic(), dry=True)
        if router.too_little(prompt, router.find(prompt, time.monotonic(), touch=False)):
            await self._node.tokenizer_worker.tokenize_first(prompt, self._node.config.pipeline.tokenize_deadline_s)
        prompt.avoid = tuple(sorted({*prompt.avoid, *known_short(router.registry, prompt)}))
        chain = islice(router.chain(prompt.end), KEYS_SHOWN_MAX)
        return {**router.explain(prompt, time.monotonic()), "chain": [prefix_key_view(*key) for key in chain]}

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        now = time.monotonic()
        newest = islice(reversed(self._node.router.recent), limit)
        return [decision_view(decision, request_id, now - at) for at, request_id, decision in newest]

    @property
    def clustering(self) -> ClusterParts:
        """Return the parts of gossip. Raises NotFound if the node does not gossip."""
        if self._node.clustering is None:
            raise NotFound("this node does not gossip")
        return self._node.clustering

    def calibration(self) -> Mapping[str, Any]:
        return {**self._node.calibration_parts.view(), "polls": values(self._node.poller.counters)}

    def ready(self) -> tuple[bool, str]:
        if self._node.draining:
            return False, "draining"
        if not self._node.server.is_open:
            return False, "the public port is not open yet"
        if self._node.clustering is not None and not self._node.clustering.synced:
            return False, "waiting for the routes of a peer"
        if not self._node.registry.pool("", time.monotonic()).ids:
            return False, "no backend can be asked"
        return True, ""

    def metrics(self) -> Sequence[Sample]:
        """Return every metric of the node."""
        node = self._node
        router, recorder, responses = node.router, node.recorder, node.pipeline.responses
        found = [
            samples("", router.counters),
            samples("owners", router.owners.counters),
            samples("", node.registry.counters),
            samples("ranks", node.rank_parts.counters),
            samples("hangs", node.hang_watch.hangs.counters),
            samples("pauses", node.registry.pauses.counters),
            samples("refusals", node.registry.refusals.counters),
            samples("engine_names", node.registry.names.counters),
            prefix_routing_samples(router),
            node.clients.samples(),
            samples("", node.faults.counters),
            samples("config", self._reloads.counters) if self._reloads is not None else (),
            samples("resolver", node.resolver.counters),
            *(backend_samples(backend, node.registry) for backend in node.registry),
            samples("routes", router.routes.counters),
            samples("memory", router.reader.memory.counters),
            samples("speculation", router.speculation.counters),
            samples("tokenizer_worker", node.tokenizer_worker.counters),
            samples("tokenizer_process", node.tokenizer.counters),
            samples("server", node.server.counters),
            responses.samples() if responses is not None else (),
            samples("upstream", node.upstream.counters),
            samples("realtime", node.pipeline.realtime.counters),
            samples("router_fields", node.pipeline.router_fields.counters),
            samples("poll", node.poller.counters),
            node.engine_events.samples(),
            node.calibration_parts.samples(),
            samples("logs", node.log_counters()),
            samples("recorder", recorder.counters) if recorder is not None else (),
            node.worker_reports.samples(),
            *(shadow_samples(shadow) for shadow in self._shadows()),
            node.index_parts.samples(),
            node.clustering.samples() if node.clustering is not None else (),
        ]
        return list(chain.from_iterable(found))

    def _shadows(self) -> Sequence[Shadow]:
        return self._node.shadows.shadows if self._node.shadows is not None else ()

    async def reload(self) -> Mapping[str, Any]:
        """Read the configuration again. Raises ConfigError, with nothing changed, and NotFound."""
        if self._reloads is None:
            raise NotFound("this node has no configuration to read again")
        return await self._reloads.ordered()

    def _view(self, name_or_url: str) -> Mapping[str, Any]:
        backend = self._node.registry.find(name_or_url)
        if backend is None:
            raise NotFound(f"no backend {name_or_url!r}")
        return backend_view(backend, self._node.registry)


def path_of(body: bytes) -> bytes:
    """Return the path to which a client would send this body, judged by members that only one API has."""
    if excess(body):
        return CHAT_PATH  # it is too much to parse, for the reader of any API
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return CHAT_PATH  # whose reader reports what is wrong with the body
    members = asked if isinstance(asked, dict) else {}
    if "messages" in members:
        return MESSAGES_PATH if "system" in members else CHAT_PATH
    return COMPLETION_PATH if "prompt" in members else RESPONSES_PATH if "input" in members else CHAT_PATH


def backend_view(backend: Backend, registry: Registry) -> dict[str, Any]:
    probe = backend.last_probe
    return {
        "name": backend.name,
        "url": backend.url,
        "health": backend.health.value,
        "silent": backend.vitals.silent,
        "circuit": backend.circuit.value,
        "refusing_status": registry.refusals.status_of(backend.id) or None,
        "draining": backend.draining,
        "pause_s": round(registry.pauses.left_s(backend.id, time.monotonic()), 1),
        "in_flight": backend.inflight,
        "peer_load": backend.peers.requests,
        "weight": backend.weight,
        "hosted": backend.hosted,
        "generation": backend.generation,
        "processes": backend.processes,
        "ranks": backend.ranks,
        "placed_as": [each.name for each in backend.as_ranks],
        "twins": backend.names.twins,
        "strangers": backend.names.strangers,
        "advice": backend.advice,
        "models": backend.models,
        "key_refused": backend.key_refused,
        "reuses_prefixes": backend.reuses,
        "reuses_nothing_because": backend.reuse.why_not,
        "outcomes": {outcome.value: count for outcome, count in backend.outcomes.items() if count},
        "probe_ms": round(probe.latency_s * 1000, 2) if probe else None,
        "probe_detail": probe.detail if probe else "",
    }


def backend_samples(backend: Backend, registry: Registry) -> Iterator[Sample]:
    label, refusing = {"backend": backend.name}, registry.refusals.status_of(backend.id)
    for name, help_text, value in (
        ("in_flight", "Requests of this node in flight at a backend.", backend.inflight),
        ("healthy", "1 unless probes found the backend unhealthy.", backend.health is not Health.UNHEALTHY),
        ("silent", "1 while the backend is unhealthy by time-outs alone.", backend.vitals.silent),
        (
            "circuit_closed",
            "1 while the backend's circuit breaker lets every request through.",
            backend.circuit is Circuit.CLOSED,
        ),
        ("draining", "1 while the backend is drained: it gets no new requests.", backend.draining),
        ("refusing_status", "Status with which the backend refuses what others serve; 0: none.", refusing),
        ("key_refused", "1 while the backend answers probes of this node with 401 or 403.", bool(backend.key_refused)),
        ("reuses_prefixes", "0 if the backend's engine caches no prefixes, as it says or shows.", backend.reuses),
        (
            "processes",
            "Processes that surely answer behind the backend's URL: more than 1 is a mistake.",
            backend.processes,
        ),
        ("ranks", "Data-parallel ranks behind the backend's URL, placed as backends if possible.", backend.ranks),
        (
            "twins",
            "Backends, here and on peers, that are this backend's engine by another URL.",
            len(backend.names.twins),
        ),
        ("strangers", "Nodes on which the backend's URL leads to another engine.", len(backend.names.strangers)),
    ):
        yield Sample(f"backend_{name}", "gauge", help_text, float(value), label)
    openings = backend.vitals.openings
    yield Sample(
        "backend_circuit_openings", "counter", "Times that the circuit breaker of a backend opened.", openings, label
    )
    for outcome, number in backend.outcomes.items():
        labels = {**label, "outcome": outcome.value}
        yield Sample("backend_attempts", "counter", "Attempts of requests, by backend and outcome.", number, labels)


def shadow_view(shadow: Shadow) -> dict[str, Any]:
    """Return what a policy would have done with the requests so far. Less than 0 saved is a loss."""
    own = shadow.counters
    return {
        "policy": shadow.router.policy.name,
        "placed": own.placed,
        "elsewhere_share": share(own.elsewhere, own.placed),
        "predicted_share": share(own.predicted_tokens, own.prompt_tokens),
        "saved_share": share(own.saved_tokens, own.prompt_tokens),
        "saved_tokens": own.saved_tokens,
        "saved_s": round(own.saved_seconds, 3),
        "saved_ms_per_request": round(1000 * own.saved_seconds / max(1, own.placed), 2),
    }


def shadow_samples(shadow: Shadow) -> Iterator[Sample]:
    label = {"policy": shadow.router.policy.name}
    counters = shadow.router.counters
    yield from samples("shadow", shadow.counters, label)
    for reason, number in counters.decisions.items():
        labels = {**label, "reason": reason}
        yield Sample("shadow_decisions", "counter", "Placements by a shadow policy, by reason.", number, labels)


def prefix_key_view(tokens: int, token: int, text: int) -> dict[str, Any]:
    """Return a depth of a prompt with fingerprints as /admin/routes takes them; None for a missing one."""
    names = {"token_fingerprint": token, "text_fingerprint": text}
    return {"tokens": tokens, **{name: f"{value:016x}" if value else None for name, value in names.items()}}


def decision_view(decision: Decision, request_id: bytes, age_s: float) -> dict[str, Any]:
    return {
        "request_id": request_id.decode("latin-1"),
        "age_s": round(age_s, 3),
        "backend": decision.backend_name,
        "reason": decision.reason,
        "policy": decision.policy,
        "source": decision.source,
        "matched_tokens": decision.matched_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "loads": dict(zip(decision.candidates, decision.loads, strict=True)),
    }


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
