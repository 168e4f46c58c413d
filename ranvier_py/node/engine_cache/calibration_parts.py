"""Wires calibration to a node: it measures the node's own predictions, and the engines' counters.

`Calibration` observes attempts; the poller brings the engines' metrics pages. A page's cache size bounds the learned
capacity. Requests in an engine's queue beyond those of this node and its peers count as load. Biases are logged when
they appear and when they go; the control port shows everything. Once a second this also recognises each engine's cache
profile (`routing.checkpoints`) from the configuration, metrics, model cards, events and counts in answers.
Rules: the load of others is the lesser of two looks in a row, since each look meets some requests on their way; it is
forgotten after STALE_INTERVALS without a look. Start-up waits for none of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import trio

from ranvier_py.config.config_model import Config
from ranvier_py.config.config_values import BackendSpec
from ranvier_py.core.answers.usage_injection import UsageAsker
from ranvier_py.core.engine_cache.calibration.bias_findings import bias_finding
from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.engine_cache.calibration.predictions import BackendPredictions, BiasChange, PredictionCounters
from ranvier_py.core.engine_cache.gap_values import Level
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.findings import Finding
from ranvier_py.core.history.joined_panes import of_hits
from ranvier_py.core.ids import BackendId
from ranvier_py.core.log_events import event
from ranvier_py.core.metrics import Sample, declared, samples, values
from ranvier_py.core.peer.router_peer import RouterPeer
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.checkpoints.cache_profile import ATTENTION, AUTO, Signs, recognised
from ranvier_py.core.routing.checkpoints.checkpoint_index import CheckpointCounters
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.router import Router
from ranvier_py.core.splitmix import mix
from ranvier_py.node.asked import Route
from ranvier_py.node.engine_cache.engine_event_parts import EngineEvents
from ranvier_py.node.engine_cache.event_reader import name_of
from ranvier_py.node.part import Handler, Part

log = logging.getLogger(__name__)

TICK_S = 1.0

LOOK_S = 5.0  # longest duration of a look, including its wait for a turn

STALE_INTERVALS = 3
"""Metrics intervals without a look after which the last one does not count any more."""


SHOWN = (
    *("name", "profile", "answers", "predicted_tokens", "cached_tokens", "precision", "recall"),
    *("engine_hit_share", "capacity_tokens", "cache_usage", "biases"),
)
"""What the page of the control port shows of each engine's hits."""

OF_STATUS = ("running", "waiting", "generated_per_s", "engine_hit_share", "predicted_tokens", "cached_tokens")
"""What the status shows of each engine."""


class Look(NamedTuple):
    """The time of the last look at one engine, the requests there that no node sent, those in its queue, the tokens
    that it had generated, and how many it generated a second since the look before; None: it does not say."""

    at: float
    excess: int
    waiting: int
    generated: int | None
    generated_per_s: float | None

    def rate(self, generated: int | None, now: float) -> float | None:
        """Return the tokens a second until now; None if it does not say, or began anew."""
        if self.generated is None or generated is None or generated < self.generated or now <= self.at:
            return None
        return (generated - self.generated) / (now - self.at)


class CalibrationParts(Part):
    """See the module.

    Args:
        metrics_interval_s: between two looks at the metrics of one engine.
        events: knows who reports what engines hold, and learns whose answers contradict that.
        polls: what is shown of the polls beside it.

    `configured` is what the operator wrote about a backend's cache.
    """

    name = "calibration"
    joins = MappingProxyType({"hits": of_hits})
    keys = ("polls",)

    def __init__(  # the places where signs come from
        self,
        router: Router,
        asking: UsageAsker,
        events: EngineEvents | None = None,
        *,
        metrics_interval_s: float,
        polls: Part | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calibration = Calibration(
            router.routes,
            block_tokens=router.hasher.block_tokens,
            estimated=lambda backend: events is None or events.level(backend) is Level.ESTIMATED,
            contradicted=events.contradicted if events is not None else lambda _: None,
            checkpoints=router.checkpoints,
            judged=router.registry.changes.reconsider,
        )
        self.configured: dict[BackendId, str] = {}
        self._polls, self._events, self._asking, self._clock = polls, events, asking, clock
        self._registry, self._checkpoints = router.registry, router.checkpoints
        router.observers += (self.calibration,)
        self.metrics_interval_s = metrics_interval_s
        self._looks: dict[BackendId, Look] = {}
        self._without_reuse: dict[BackendId, None] = {}  # as the log says

    def added(self, backend: Backend, spec: BackendSpec | None) -> None:
        self.configured[backend.id] = spec.kv_profile if spec is not None else AUTO

    def removed(self, backend: Backend) -> None:
        for table in (self._looks, self._without_reuse, self.configured):
            table.pop(backend.id, None)
        self._checkpoints.forget(backend.id)
        self.calibration.forget(backend.id)

    def reload(self, before: Config, after: Config) -> None:
        self.metrics_interval_s = after.polls.metrics_interval_s

    async def loop(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            self.tick(self._clock())

    def tick(self, now: float) -> None:
        for known in self._registry:
            self._recognise(known)
            self._log_reuse(known)
        for change in self.calibration.tick(now):
            log_change(change, name_of(self._registry, change.backend))
        for id_ in [id_ for id_ in self.calibration.backends() if self._registry.ids.current(id_) is None]:
            self.calibration.forget(id_)  # a last answer of a removed backend was counted
        for backend, look in list(self._looks.items()):
            if now - look.at > STALE_INTERVALS * max(self.metrics_interval_s, 1.0) + LOOK_S:
                del self._looks[backend]
                if self._registry.ids.current(backend) is not None:
                    self._registry.set_foreign_load(backend, 0)

    def _recognise(self, backend: Backend) -> None:
        """Recognise the profile of a backend's cache, as far as its signs show it."""
        profile = recognised(self._signs(backend))
        before = self._checkpoints.profile(backend.id)
        if self._checkpoints.set_profile(backend.id, profile):
            log.info(event("calibration.profile", engine=backend.name, before=before.label, after=profile.label))
            known = self.calibration.backends().get(backend.id)
            if known is not None and profile == ATTENTION:
                known.evidence.forget_steps()

    def _log_reuse(self, backend: Backend) -> None:
        """Say once that an engine reuses no prefixes, and once that it does again."""
        why_not = backend.reuse.why_not
        if why_not and backend.id not in self._without_reuse:
            self._without_reuse[backend.id] = None
            log.warning(event("backend.reuses_nothing", engine=backend.name, why=why_not))
        elif not why_not and backend.id in self._without_reuse:
            del self._without_reuse[backend.id]
            log.info(event("backend.reuses_prefixes", engine=backend.name))

    def _signs(self, backend: Backend) -> Signs:
        known, own = self.calibration.backends().get(backend.id), self._checkpoints.known.get(backend.id)
        names = [str(card.get("owned_by")) for card in backend.catalog.cards]
        block = 0 if self._events is None else self._events.state_block(backend.id)
        return replace(
            backend.seen.signs,
            configured=self.configured.get(backend.id, AUTO),
            engine=backend.seen.signs.engine or next((name for name in names if name in ("vllm", "sglang")), ""),
            models=tuple(str(card.get(name) or "") for card in backend.catalog.cards for name in ("id", "root")),
            state_groups=block > 0,
            block_tokens=block or backend.seen.signs.block_tokens,
            step_tokens=(own.step_tokens if own is not None else 0) or (known.evidence.step_tokens if known else 0),
        )

    def measured(self, backend: BackendId, metrics: EngineMetrics) -> None:
        slot = self._registry.ids.current(backend)
        if slot is None:
            return
        before, now, generated = self._looks.get(backend), self._clock(), metrics.generated_tokens
        sent = slot.work.own.inflight + slot.work.peers.requests
        excess = max(0, (metrics.requests or 0) - sent)
        per_s = before.rate(generated, now) if before is not None else None
        self._looks[backend] = Look(now, excess, metrics.waiting or 0, generated, per_s)
        self._registry.set_foreign_load(backend, min(excess, before.excess) if before is not None else 0)
        slot.work.room.cache_tokens = metrics.capacity_tokens
        slot.work.queue_read(metrics.running, metrics.waiting, metrics.usage)
        self.calibration.report(backend, slot.url, slot.generation, metrics)
        slot.reuse.page_read(metrics.caches, metrics.hit_tokens)
        self._registry.changes.reconsider(slot)

    def findings(self, now: float) -> Iterator[Finding]:
        for backend, known in self.calibration.backends().items():
            for bias in known.biases if self._registry.ids.current(backend) is not None else ():
                yield bias_finding(bias, known, name_of(self._registry, backend))

    def waiting(self, backend: BackendId) -> int:
        """Return how many requests wait in an engine's queue by the last look; 0 if there was none lately."""
        look = self._looks.get(backend)
        is_late = look is None or self._clock() > look.at + STALE_INTERVALS * self.metrics_interval_s
        return 0 if look is None or is_late else look.waiting

    def polled(self) -> Iterator[tuple[BackendId, EngineMetrics, float | None]]:
        """Yield what engines' pages that this node reads said last, and the tokens that each generated a second."""
        for backend, look in self._looks.items():
            if (known := self.calibration.backends().get(backend)) is not None:
                yield backend, known.reported, look.generated_per_s

    def panes(self, now: float, *, watched: bool) -> Mapping[str, Any]:
        view = self.view()
        rows = [{name: row[name] for name in SHOWN} for row in view["backends"]]
        return {"hits": {**{name: view[name] for name in ("route_precision", "route_recall")}, "engines": rows}}

    def view(self) -> Mapping[str, Any]:
        """Return the figures for the control port and the status page."""
        return {
            "route_precision": self._share("predicted_tokens"),
            "route_recall": self._share("cached_tokens"),
            "backends": [self._backend_view(id_, known) for id_, known in self.calibration.backends().items()],
            "asking": values(self._asking.counters),
        }

    def of_engines(self, now: float) -> Mapping[str, Mapping[str, Any]]:
        return {row["name"]: {name: row[name] for name in OF_STATUS} for row in self.view()["backends"]}

    def routes(self) -> Mapping[str, Handler]:
        beside = {} if self._polls is None else {"polls": self._polls.view}
        return {
            "GET /admin/calibration": Route(
                lambda _: {**self.view(), **{name: view() for name, view in beside.items()}},
                "Predictions against answers",
            )
        }

    def metrics(self) -> Iterator[Sample]:
        for name, help_text, whole in (
            ("route_precision", "Share of the tokens predicted to be cached that was cached.", "predicted_tokens"),
            ("route_recall", "Share of the cached tokens that was predicted to be cached.", "cached_tokens"),
        ):
            yield Sample(name, "gauge", help_text, self._share(whole))
        for each in self._registry:
            yield from profile_samples(self._checkpoints, each.id, {"backend": each.name})
        for backend, known in self.calibration.backends().items():
            yield from backend_samples(known, {"backend": name_of(self._registry, backend)})
            if backend in self._looks:
                yield from engine_samples(known.reported, {"backend": name_of(self._registry, backend)})
        yield from declared_backends()
        yield from samples("calibration", self.calibration.counters)
        yield from samples("checkpoint_marks", self._checkpoints.counters)
        yield from samples("usage", self._asking.counters)

    def _share(self, whole: str) -> float | None:
        counts = [known.counters for known in self.calibration.backends().values()]
        right, total = sum(each.right_tokens for each in counts), sum(getattr(each, whole) for each in counts)
        return right / total if total else None

    def _backend_view(self, backend: BackendId, known: BackendPredictions) -> dict[str, Any]:
        look, error = self._looks.get(backend), known.counters.error_tokens
        metrics = known.reported if look is not None else EngineMetrics()
        hybrid = self._checkpoints.known.get(backend)
        return {
            "name": name_of(self._registry, backend),
            "profile": self._checkpoints.profile(backend).label,
            "confidence": rounded(hybrid.confidence.value) if hybrid is not None else None,
            "checkpoints": len(hybrid.index) if hybrid is not None else None,
            "precision": rounded(known.precision),
            "recall": rounded(known.recall),
            "answers": known.counters.answers,
            "silent": known.counters.answers_silent,
            "error_tokens_p50": rounded(error.quantile(0.5)) if error.count else None,
            "error_tokens_p10": rounded(error.quantile(0.1)) if error.count else None,
            "block_tokens": known.block_tokens,
            "capacity_tokens": known.estimate.reported,
            "capacity_learned": known.capacity_learned_tokens,
            "lifetime_s": rounded(self.calibration.lifetime_s(backend, self._clock())),
            "refuted": known.counters.refuted,
            "predicted_tokens": known.counters.predicted_tokens,
            "cached_tokens": known.counters.cached_tokens,
            "running": metrics.running,
            "waiting": metrics.waiting,
            "generated_per_s": rounded(look.generated_per_s) if look is not None else None,
            "cache_usage": rounded(metrics.usage),
            "engine_hit_share": rounded(hit_share(metrics)),
            "biases": [bias.value for bias in known.biases],
        }


def looked_at_by(peer: RouterPeer) -> Callable[[BackendId], bool]:
    """Return a predicate: whether this node is to poll a backend's metrics, by rendezvous hashing of its key over all
    live members. While members disagree on who is alive, two nodes poll, or none for some seconds, which is harmless.
    """

    def owns(backend: BackendId) -> bool:
        key = peer.features.backends.key_of(backend)
        if key is None:
            return True  # peers do not know it
        me = peer.me.session
        members = (me, *peer.features.streams.live)
        first: int = max(members, key=lambda member: (mix(mix(member) ^ key), member))
        return first == me

    return owns


LEARNED = "Tokens that the engine computes after a prefix's last use before it has evicted the prefix."
BIAS = "1 while predictions for the backend are wrong in this way."
CONFIDENCE = "Share of the tokens credited for checkpoints that was cached; fades by half in 200 answers."


def declared_backends() -> Iterator[Sample]:
    """Yield the families of backends of which nothing may be known yet."""
    label = {"backend": ""}
    yield from declared("calibration", PredictionCounters, "backend")
    yield from declared("checkpoints", CheckpointCounters, "backend")
    yield from engine_samples(EngineMetrics(), label)
    yield Sample("engine_capacity_learned_tokens", "gauge", LEARNED, None, label)
    yield Sample("calibration_bias", "gauge", BIAS, None, {**label, "bias": ""})
    yield Sample("cache_profile_confidence", "gauge", CONFIDENCE, None, label)


def backend_samples(known: BackendPredictions, label: Mapping[str, str]) -> Iterator[Sample]:
    yield from samples("calibration", known.counters, label)
    yield Sample("engine_capacity_learned_tokens", "gauge", LEARNED, known.capacity_learned_tokens, label)
    for bias in Bias:
        yield Sample("calibration_bias", "gauge", BIAS, float(bias in known.biases), {**label, "bias": bias.value})


def profile_samples(checkpoints: Checkpoints, backend: BackendId, label: Mapping[str, str]) -> Iterator[Sample]:
    """Yield what an engine's cache was recognised as, and how well that holds."""
    help_text = "1 for what the engine's prefix cache is, as it was recognised or configured."
    yield Sample("cache_profile", "gauge", help_text, 1.0, {**label, "profile": checkpoints.profile(backend).label})
    hybrid = checkpoints.known.get(backend)
    if hybrid is None:
        return
    yield Sample("cache_profile_confidence", "gauge", CONFIDENCE, hybrid.confidence.value, label)
    yield from samples("checkpoints", hybrid.index.counters, label)


def engine_samples(metrics: EngineMetrics, label: Mapping[str, str]) -> Iterator[Sample]:
    """Yield what an engine reports of itself, under our names."""
    found = hit_share(metrics)
    gauges: Sequence[tuple[str, str, float | None]] = (
        ("engine_running", "Requests that the engine runs now, as it reports.", metrics.running),
        ("engine_waiting", "Requests that wait in the engine's own queue.", metrics.waiting),
        ("engine_cache_usage", "Share of the engine's cache that running requests hold.", metrics.usage),
        ("engine_capacity_tokens", "Tokens for which the engine's cache has room.", metrics.capacity_tokens),
        ("engine_hit_share", "Share of the prompt tokens looked up in the engine's cache that was found.", found),
    )
    for name, help_text, value in gauges:
        yield Sample(name, "gauge", help_text, value, label)


def hit_share(metrics: EngineMetrics) -> float | None:
    """Return the engine's hit rate since its start; None if it does not report it."""
    if not metrics.queried_tokens or metrics.hit_tokens is None:
        return None
    return min(1.0, metrics.hit_tokens / metrics.queried_tokens)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def log_change(change: BiasChange, name: str) -> None:
    if change.appeared:
        log.warning(event("calibration.bias_appeared", engine=name, bias=change.bias.value, detail=change.detail))
    else:
        log.info(event("calibration.bias_gone", engine=name, bias=change.bias.value))
