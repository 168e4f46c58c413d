"""What makes a node measure itself: the calibration of its predictions, and the engines' own counters.

Wires `Calibration` (an observer of attempts) and the engines' metrics pages to a node: the size of a cache bounds the
learned capacity, what is in their queues beyond what this node and its peers sent counts as load, biases go to the log
when they appear and when they go, and all of it to the control port. It also recognises each engine's cache profile
(`routing.checkpoints`) by what the operator wrote, metrics, model cards, events and counts in answers, once a second.

Rules: a load of others is the lesser of two looks in a row, since requests are on their way at any one of them, and is
forgotten with the third interval without a look. Start-up waits for none of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import trio

from ranvier_py.core.answers.usage_injection import UsageAsking
from ranvier_py.core.engine_cache.calibration.biases import Bias
from ranvier_py.core.engine_cache.calibration.calibration import Calibration
from ranvier_py.core.engine_cache.calibration.predictions import BackendPredictions, BiasChange
from ranvier_py.core.engine_cache.sources.engine_metrics import EngineMetrics
from ranvier_py.core.gossip.gossip import RouterPeer
from ranvier_py.core.ids import BackendId
from ranvier_py.core.metrics import Sample, samples, values
from ranvier_py.core.prompts.fingerprint import mix
from ranvier_py.core.routing.backend import Backend
from ranvier_py.core.routing.checkpoints.cache_profile import AUTO, Signs, recognised
from ranvier_py.core.routing.checkpoints.checkpoints import Checkpoints
from ranvier_py.core.routing.router import Router

log = logging.getLogger(__name__)

TICK_S = 1.0

LOOK_S = 5.0  # that a look may take, its turn included

STALE_INTERVALS = 3
"""Looks that may fail before what the last one said counts no more."""


class Look(NamedTuple):
    """The last look at one engine, and the requests there that no node sent."""

    at: float
    excess: int


class Calibrating:
    """See the module.

    Args:
        metrics_interval_s: between two looks at the metrics of one engine.
        estimated: whether nobody reports what this backend holds.
        contradicted: called for an engine whose answers do not fit what it is known to hold.
        state_block: tokens of the blocks of recurrent states that an engine's events name; 0: they name none.

    `configured` has what the operator wrote of a backend's cache.
    """

    def __init__(
        self,
        router: Router,
        asking: UsageAsking,
        *,
        metrics_interval_s: float,
        estimated: Callable[[BackendId], bool] = lambda _: True,
        contradicted: Callable[[BackendId], object] = lambda _: None,
        state_block: Callable[[BackendId], int] = lambda _: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calibration = Calibration(
            router.routes,
            block_tokens=router.hasher.block_tokens,
            estimated=estimated,
            contradicted=contradicted,
            checkpoints=router.checkpoints,
        )
        self.configured: dict[BackendId, str] = {}
        self._checkpoints = router.checkpoints
        self._state_block = state_block
        router.observers += (self.calibration,)
        self._registry = router.registry
        self._asking = asking
        self.metrics_interval_s = metrics_interval_s
        self._clock = clock
        self._looks: dict[BackendId, Look] = {}

    def forget(self, backend: BackendId) -> None:
        """It was removed."""
        self._looks.pop(backend, None)
        self.configured.pop(backend, None)
        self._checkpoints.forget(backend)
        self.calibration.forget(backend)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(TICK_S)
            self.tick(self._clock())

    def tick(self, now: float) -> None:
        for known in self._registry:
            self._recognise(known)
        for change in self.calibration.tick(now):
            log_change(change, self._name(change.backend))
        for backend, look in list(self._looks.items()):
            if now - look.at > STALE_INTERVALS * max(self.metrics_interval_s, 1.0) + LOOK_S:
                del self._looks[backend]
                if self._slot(backend) is not None:
                    self._registry.set_foreign_load(backend, 0)

    def _recognise(self, backend: Backend) -> None:
        """What its cache is, as far as it shows."""
        profile = recognised(self._signs(backend))
        before = self._checkpoints.profile(backend.id)
        if self._checkpoints.set_profile(backend.id, profile):
            log.info("calibration.profile %s %s -> %s", backend.name, before.label, profile.label)

    def _signs(self, backend: Backend) -> Signs:
        known, own = self.calibration.backends().get(backend.id), self._checkpoints.known.get(backend.id)
        owners = [str(card.get("owned_by")) for card in backend.cards]
        block = self._state_block(backend.id)
        return replace(
            backend.signs,
            configured=self.configured.get(backend.id, AUTO),
            engine=backend.signs.engine or next((owner for owner in owners if owner in ("vllm", "sglang")), ""),
            models=tuple(str(card.get(name) or "") for card in backend.cards for name in ("id", "root")),
            state_groups=block > 0,
            block_tokens=block or backend.signs.block_tokens,
            step_tokens=own.step_tokens if own is not None else known.evidence.step_tokens if known is not None else 0,
        )

    def looked(self, backend: BackendId, metrics: EngineMetrics) -> None:
        """An engine's page came in."""
        slot = self._slot(backend)
        if slot is None or slot.removed:
            return
        before = self._looks.get(backend)
        sent = slot.inflight + slot.peers.requests
        excess = max(0, (metrics.requests or 0) - sent)
        self._looks[backend] = Look(self._clock(), excess)
        self._registry.set_foreign_load(backend, min(excess, before.excess) if before is not None else 0)
        self.calibration.report(backend, slot.url, slot.generation, metrics)

    # --- what is seen of it -----------------------------------------------------------------------------------------

    def view(self) -> Mapping[str, Any]:
        """For the control port and the status page."""
        return {
            "route_precision": self._share("predicted_tokens"),
            "route_recall": self._share("cached_tokens"),
            "backends": [self._backend_view(id_, known) for id_, known in self.calibration.backends().items()],
            "asking": values(self._asking.counters),
        }

    def samples(self) -> Iterator[Sample]:
        for name, help_text, whole in (
            ("route_precision", "Of the tokens predicted to be cached, the share that was.", "predicted_tokens"),
            ("route_recall", "Of the cached tokens, the share that was predicted.", "cached_tokens"),
        ):
            share = self._share(whole)
            if share is not None:
                yield Sample(name, "gauge", help_text, share)
        for each in self._registry:
            yield from profile_samples(self._checkpoints, each.id, {"backend": each.name})
        for backend, known in self.calibration.backends().items():
            yield from backend_samples(known, {"backend": self._name(backend)})
            if backend in self._looks:
                yield from engine_samples(known.reported, {"backend": self._name(backend)})
        yield from samples("calibration", self.calibration.counters)
        yield from samples("checkpoint_marks", self._checkpoints.counters)
        yield from samples("usage", self._asking.counters)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _share(self, whole: str) -> float | None:
        backends = self.calibration.backends().values()
        right, total = sum(one.right_tokens for one in backends), sum(getattr(one, whole) for one in backends)
        return right / total if total else None

    def _backend_view(self, backend: BackendId, known: BackendPredictions) -> dict[str, Any]:
        metrics, error = known.reported if backend in self._looks else EngineMetrics(), known.error_tokens
        hybrid = self._checkpoints.known.get(backend)
        return {
            "name": self._name(backend),
            "profile": self._checkpoints.profile(backend).label,
            "confidence": rounded(hybrid.confidence.value) if hybrid is not None else None,
            "checkpoints": len(hybrid.index) if hybrid is not None else None,
            "precision": rounded(known.precision),
            "recall": rounded(known.recall),
            "answers": known.answers,
            "silent": known.answers_silent,
            "error_tokens_p50": rounded(error.quantile(0.5)) if error.count else None,
            "error_tokens_p10": rounded(error.quantile(0.1)) if error.count else None,
            "block_tokens": known.block_tokens,
            "capacity_tokens": known.estimate.reported,
            "capacity_learned": known.capacity_learned_tokens,
            "lifetime_s": rounded(self.calibration.lifetime_s(backend, self._clock())),
            "refuted": known.refuted,
            "running": metrics.running,
            "waiting": metrics.waiting,
            "cache_usage": rounded(metrics.usage),
            "engine_hit_share": rounded(hit_share(metrics)),
            "biases": [bias.value for bias in known.biases],
        }

    def _slot(self, backend: BackendId) -> Backend | None:
        return self._registry.slots[backend] if backend < len(self._registry.slots) else None

    def _name(self, backend: BackendId) -> str:
        slot = self._slot(backend)
        return slot.name if slot is not None else f"#{backend}"


def looked_at_by(peer: RouterPeer) -> Callable[[BackendId], bool]:
    """Whether a backend is this node's to look at: the first of all live members by rendezvous hashing of its key.

    While members disagree on who lives, two look, or none for some seconds; that harms nobody.
    """

    def owns(backend: BackendId) -> bool:
        key = peer.backends.key_of(backend)
        if key is None:
            return True  # peers do not know it
        me = peer.me.session
        members = (me, *peer.streams.live)
        first: int = max(members, key=lambda member: (mix(mix(member) ^ key), member))
        return first == me

    return owns


def backend_samples(known: BackendPredictions, label: Mapping[str, str]) -> Iterator[Sample]:
    yield from samples("calibration", known, label)
    if known.capacity_learned_tokens is not None:
        help_text = "Tokens computed since its last use beyond which a prefix answers cold."
        yield Sample("engine_capacity_learned_tokens", "gauge", help_text, known.capacity_learned_tokens, label)
    help_text = "1 while predictions of this backend are wrong in this way."
    for bias in Bias:
        yield Sample("calibration_bias", "gauge", help_text, float(bias in known.biases), {**label, "bias": bias.value})


def profile_samples(checkpoints: Checkpoints, backend: BackendId, label: Mapping[str, str]) -> Iterator[Sample]:
    """What an engine's cache was recognised as, and how that proves."""
    help_text = "1 for what the engine's prefix cache is, as it was recognised or configured."
    yield Sample("cache_profile", "gauge", help_text, 1.0, {**label, "profile": checkpoints.profile(backend).label})
    hybrid = checkpoints.known.get(backend)
    if hybrid is None:
        return
    help_text = "Of the tokens credited for checkpoints, the share that was cached; fades by half in 200 answers."
    yield Sample("cache_profile_confidence", "gauge", help_text, hybrid.confidence.value, label)
    yield from samples("checkpoints", hybrid.index.counters, label)


def engine_samples(metrics: EngineMetrics, label: Mapping[str, str]) -> Iterator[Sample]:
    """What an engine reports of itself, under our names."""
    gauges: Sequence[tuple[str, str, float | None]] = (
        ("engine_running", "Requests that the engine works at.", metrics.running),
        ("engine_waiting", "Requests in the engine's own queue.", metrics.waiting),
        ("engine_cache_usage", "Share of its cache that running requests hold.", metrics.usage),
        ("engine_capacity_tokens", "Tokens that its cache holds.", metrics.capacity_tokens),
        ("engine_hit_share", "Of the prompt tokens looked up in its cache, the share found.", hit_share(metrics)),
    )
    for name, help_text, value in gauges:
        if value is not None:
            yield Sample(name, "gauge", help_text, value, label)


def hit_share(metrics: EngineMetrics) -> float | None:
    """Since the engine's start."""
    if not metrics.queried_tokens or metrics.hit_tokens is None:
        return None
    return min(1.0, metrics.hit_tokens / metrics.queried_tokens)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def log_change(change: BiasChange, name: str) -> None:
    detail = f" ({change.detail})" if change.detail else ""
    if change.appeared:
        log.warning("calibration.bias_appeared %s %s%s", name, change.bias.value, detail)
    else:
        log.info("calibration.bias_gone %s %s", name, change.bias.value)
