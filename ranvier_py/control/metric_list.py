"""Statistics -> samples: every metric of a node, its name and its help, in one place. Pure.

Tokens predicted are the router's belief; tokens cached are the engines' own count. Their distance is the router's
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from ranvier_py.core.histogram import Histogram
from ranvier_py.core.metrics import Sample, samples
from ranvier_py.core.routing.backends import BackendStatistics, RegistryStatistics
from ranvier_py.core.routing.router import Router
from ranvier_py.core.routing.shadow import ShadowStatistics


def samples_of(
    router: Router, registry: RegistryStatistics, server: Any, upstream: Any, tokenizer_worker: Any
) -> Iterator[Sample]:
    """All samples of one node. `server`, `upstream` and `tokenizer worker` are their counters."""
    yield from router_samples(router)
    for backend in registry.backends:
        yield from backend_samples(backend)
    yield Sample("backend_restarts", "counter", "Engines that came back as another process.", registry.restarts)
    yield Sample("last_resorts", "counter", "Pools that failed open, all circuits being open.", registry.last_resorts)
    yield from plain_samples("routes", router.routes.statistics(), ROUTE_GAUGES)
    yield from samples("memory", router.reader.memory.counters)
    yield from plain_samples("speculation", router.speculation.statistics(), ("capacity", "attempts", "fingerprints"))
    yield from samples("tokenizer_worker", tokenizer_worker)
    yield from samples("server", server)
    yield from samples("upstream", upstream)


def shadow_samples(shadows: Iterable[ShadowStatistics]) -> Iterator[Sample]:
    """What policies in the shadow would have done. What they would have saved may be less than 0, hence gauges."""
    for each in shadows:
        label = {"policy": each.policy}
        yield Sample("shadow_placed", "counter", "Requests placed in the shadow.", each.placed, label)
        yield Sample("shadow_elsewhere", "counter", "Of these, at another backend.", each.elsewhere, label)
        help_text = "Prompt tokens it believed to find."
        yield Sample("shadow_predicted_tokens", "counter", help_text, each.predicted_tokens, label)
        help_text = "Prompt tokens that it would have saved."
        yield Sample("shadow_saved_tokens", "gauge", help_text, each.saved_tokens, label)
        help_text = "Seconds to first tokens that it would have saved, by learned paces."
        yield Sample("shadow_saved_seconds", "gauge", help_text, each.saved_s, label)
        for reason, number in each.reasons.items():
            labels = {**label, "reason": reason}
            yield Sample("shadow_decisions", "counter", "Placements in the shadow by reason.", number, labels)


ROUTE_GAUGES = ("rows", "fingerprints", "claims", "capacity")


def router_samples(router: Router) -> Iterator[Sample]:
    counters = router.counters
    for reason, number in counters.decisions.items():
        yield Sample("decisions", "counter", "Placements by reason.", number, {"reason": reason})
    for source, number in counters.matched_by.items():
        yield Sample("matches", "counter", "Placements by the chain that matched.", number, {"source": source})
    for outcome, number in counters.outcomes.items():
        yield Sample("outcomes", "counter", "Attempts by how they ended.", number, {"outcome": outcome})
    tokens = (
        ("prompt_tokens", "Tokens of placed prompts, exact or estimated.", counters.prompt_tokens),
        ("predicted_tokens", "Tokens believed to be cached where they were placed.", counters.predicted_tokens),
        ("engine_prompt_tokens", "Prompt tokens as the engines counted.", counters.answered_prompt_tokens),
        ("engine_cached_tokens", "Cached tokens as the engines counted.", counters.answered_cached_tokens),
        ("learned_rows", "Route rows created by learning.", counters.learned_rows),
        ("answers_learned", "Answers learned as part of the next prompt.", counters.answers_learned),
    )
    for name, help_text, number in tokens:
        yield Sample(name, "counter", help_text, number)
    yield Sample("first_token_seconds", "histogram", "From departure to the first token.", counters.first_token_s)
    yield Sample("attempt_seconds", "histogram", "From departure to the end of an attempt.", counters.duration_s)


def backend_samples(backend: BackendStatistics) -> Iterator[Sample]:
    label = {"backend": backend.name}
    gauges = (
        ("backend_in_flight", "Requests of this node in flight.", backend.inflight),
        ("backend_healthy", "1 unless the probes call it unhealthy.", backend.health != "unhealthy"),
        ("backend_circuit_closed", "1 while the circuit lets every request through.", backend.circuit == "closed"),
        ("backend_draining", "1 while it is sent nothing new.", backend.draining),
    )
    for name, help_text, value in gauges:
        yield Sample(name, "gauge", help_text, float(value), label)
    yield Sample("backend_circuit_openings", "counter", "Times its circuit opened.", backend.circuit_openings, label)
    for outcome, number in backend.outcomes.items():
        labels = {**label, "outcome": outcome}
        yield Sample("backend_attempts", "counter", "Attempts by backend and outcome.", number, labels)


def plain_samples(part: str, statistics: Any, gauges: tuple[str, ...]) -> Iterator[Sample]:
    """One sample for each number of a frozen statistics value; what is counted by a key gets the key as label."""
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        kind: Literal["gauge", "counter"] = "gauge" if field.name in gauges else "counter"
        name = f"{part}_{field.name}"
        help_text = f"{field.name.replace('_', ' ')} of the {part}."
        if is_dataclass(value) and not isinstance(value, type):
            value = {inner.name: getattr(value, inner.name) for inner in fields(value)}
        if isinstance(value, Mapping):
            for key, number in value.items():
                yield Sample(name, kind, help_text, number, {"kind": str(key)})
        elif isinstance(value, Histogram):
            yield Sample(name, "histogram", help_text, value)
        elif isinstance(value, int | float):
            yield Sample(name, kind, help_text, value)
