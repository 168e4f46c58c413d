"""What the control port may ask of a node, and do to it. Satisfies control/control_port.py's ControlPort by shape."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import orjson

from ranvier_py.config.config_loader import read_backend
from ranvier_py.control.metric_list import plain_samples, samples_of, shadow_samples
from ranvier_py.core.errors import ConfigError, NotFound
from ranvier_py.core.metrics import Sample, values
from ranvier_py.core.routing.backends import BackendStatistics
from ranvier_py.core.routing.placement import Decision
from ranvier_py.core.routing.router import CHAT_PATH, COMPLETION_PATH
from ranvier_py.core.routing.shadow import Shadows
from ranvier_py.node.cluster_parts import Clustering
from ranvier_py.node.index_parts import Indexing

if TYPE_CHECKING:  # node.py imports this
    from ranvier_py.node.node import Node

KEYS_SHOWN_MAX = 64
"""Depths of a prompt in an explanation, the deepest first: a screen."""


class Admin:
    """One node's administration. Every method but `explain` is one synchronous call."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.draining = False

    def backends(self) -> Sequence[Mapping[str, Any]]:
        return [backend_view(backend) for backend in self._node.registry.statistics().backends]

    def add_backend(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of a backend as in the configuration. Raises ConfigError with all that is wrong, with nothing changed.

        Peers that follow the order ask the engine where its events are: what is said of them here is for this node.
        """
        spec = read_backend(fields)
        if spec.kv_index:
            raise ConfigError(["kv_index: is read when a node starts, and can't be set here"])
        backend = self._node.registry[self._node.add_backend(spec.url, spec.weight, spec.name, spec)]
        if self._node.clustering is not None:
            self._node.clustering.order("add", backend.url, spec.weight, spec.name)
        told = {name: value for name, value in spec.model_dump().items() if name.startswith("kv_")}
        return {**self._view(backend.name), **told}

    def remove_backend(self, url: str) -> Mapping[str, Any]:
        view = self._view(url)
        self._node.remove_backend(url)
        if self._node.clustering is not None:
            self._node.clustering.order("remove", view["url"], 1.0, "")
        return view

    def drain_backend(self, url: str, draining: bool) -> Mapping[str, Any]:
        return self._view(self._node.registry.drain(url, draining).name)

    def routes(self) -> Mapping[str, Any]:
        router = self._node.router
        counters, recorder = router.counters, self._node.recorder
        return {
            **asdict(router.routes.statistics()),
            "memory": values(router.reader.memory.counters),
            "speculation": asdict(router.speculation.statistics()),
            "tokenizer_worker": values(self._node.tokenizer_worker.counters),
            **({"recorder": asdict(recorder.statistics())} if recorder is not None else {}),
            **({"shadows": shadow_view(self._node.shadows)} if self._node.shadows is not None else {}),
            "decisions": dict(counters.decisions),
            "outcomes": dict(counters.outcomes),
            "prompt_tokens": counters.prompt_tokens,
            "predicted_share": share(counters.predicted_tokens, counters.prompt_tokens),
            "engine_cached_share": share(counters.answered_cached_tokens, counters.answered_prompt_tokens),
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

    async def explain(self, body: bytes) -> Mapping[str, Any]:
        """A dry run of a chat or a completion. Tokenizes it as placing would; places, learns and counts nothing."""
        router = self._node.router
        prompt = router.read(path_of(body), body)
        if router.too_little(prompt, router.find(prompt, time.monotonic(), touch=False)):
            await self._node.tokenizer_worker.tokenize_first(prompt, self._node.config.pipeline.tokenize_deadline_s)
        chain = islice(router.chain(prompt.end), KEYS_SHOWN_MAX)
        return {**router.explain(prompt, time.monotonic()), "chain": [prefix_key_view(*key) for key in chain]}

    def decisions(self, limit: int) -> Sequence[Mapping[str, Any]]:
        now = time.monotonic()
        newest = islice(reversed(self._node.router.recent), limit)
        return [decision_view(decision, request_id, now - at) for at, request_id, decision in newest]

    @property
    def kv_index(self) -> Indexing:
        return self._node.indexing

    def cluster(self) -> Mapping[str, Any]:
        return self._clustering().view()

    async def route_sums(self) -> bytes:
        return await self._clustering().route_sums()

    def _clustering(self) -> Clustering:
        """Raises NotFound."""
        if self._node.clustering is None:
            raise NotFound("this node does not gossip")
        return self._node.clustering

    def engine_caches(self) -> Mapping[str, Any]:
        return self._node.engine_events.view()

    def calibration(self) -> Mapping[str, Any]:
        return {**self._node.calibrating.view(), "polls": values(self._node.poller.counters)}

    def ready(self) -> tuple[bool, str]:
        if self.draining:
            return False, "draining"
        if self._node.clustering is not None and not self._node.clustering.synced:
            return False, "waiting for the routes of a peer"
        if not self._node.registry.pool("", time.monotonic()).ids:
            return False, "no backend can be asked"
        return True, ""

    def metrics(self) -> Sequence[Sample]:
        node = self._node
        samples = samples_of(
            node.router,
            node.registry.statistics(),
            node.server.counters,
            node.upstream.counters,
            node.tokenizer_worker.counters,
        )
        shadowed = shadow_samples(node.shadows.statistics()) if node.shadows is not None else ()
        recorder = node.recorder
        samples = chain(samples, node.engine_events.samples(), node.calibrating.samples())
        recorded = plain_samples("recorder", recorder.statistics(), ("waiting",)) if recorder is not None else ()
        indexed = node.indexing.samples()
        return [
            *samples,
            *recorded,
            *node.worker_reports.samples(),
            *shadowed,
            *indexed,
            *(node.clustering.samples() if node.clustering is not None else ()),
        ]

    def config(self) -> Mapping[str, Any]:
        return self._node.config.masked()

    def _view(self, name_or_url: str) -> Mapping[str, Any]:
        backend = self._node.registry.find(name_or_url)
        if backend is None:
            raise NotFound(f"no backend {name_or_url!r}")
        statistics = self._node.registry.statistics().backends
        return next(backend_view(each) for each in statistics if each.id == backend.id)


def path_of(body: bytes) -> bytes:
    """Where a client would send this body: a completion has a prompt and no messages."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return CHAT_PATH  # reading it there says what is wrong with it
    return COMPLETION_PATH if isinstance(asked, dict) and "prompt" in asked and "messages" not in asked else CHAT_PATH


def backend_view(backend: BackendStatistics) -> dict[str, Any]:
    return {
        "name": backend.name,
        "url": backend.url,
        "health": backend.health,
        "circuit": backend.circuit,
        "draining": backend.draining,
        "in_flight": backend.inflight,
        "peer_load": backend.peer_load,
        "weight": backend.weight,
        "generation": backend.generation,
        "models": backend.models,
        "outcomes": {name: count for name, count in backend.outcomes.items() if count},
        "probe_ms": None if backend.probe_latency_s is None else round(backend.probe_latency_s * 1000, 2),
        "probe_detail": backend.probe_detail,
    }


def shadow_view(shadows: Shadows) -> list[dict[str, Any]]:
    """What each policy would have done with the requests so far. Less than 0 saved is a loss."""
    return [
        {
            "policy": each.policy,
            "placed": each.placed,
            "elsewhere_share": share(each.elsewhere, each.placed),
            "predicted_share": share(each.predicted_tokens, each.prompt_tokens),
            "saved_tokens": each.saved_tokens,
            "saved_s": round(each.saved_s, 3),
            "saved_ms_per_request": round(1000 * each.saved_s / max(1, each.placed), 2),
        }
        for each in shadows.statistics()
    ]


def prefix_key_view(tokens: int, token: int, text: int) -> dict[str, Any]:
    """A depth of a prompt by the names that /admin/routes takes; None for what it has none of."""
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
