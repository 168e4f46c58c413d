"""What a node shows of its backends: to operators, and as metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from ranvier_py.config.config_model import KEYS, SECRETS, Config
from ranvier_py.config.config_values import jsonable
from ranvier_py.core.metrics import Sample
from ranvier_py.core.routing.backends import Backend, Circuit, Health, Registry
from ranvier_py.node.part import Node

GIVEN = ("hosted", "any_model", "tls_name", "base_path")
"""Options of a backend that all nodes should have alike: those of a signed command."""


def reaches_engine(registry: Registry) -> bool:
    """Whether any engine answers this node, drained ones included."""
    return any(backend.vitals.admits or backend.vitals.silent for backend in registry)


def shown_backend(node: Node, backend: Backend) -> dict[str, Any]:
    """Return what a backend is, with the options that few have, where they are given."""
    spec = node.sources.spec_of(backend.url)
    given = {} if spec is None else spec.model_dump()
    shown = {name: value for name, value in given.items() if name.startswith(("kv_", "tls_name", "base_path"))}
    key = node.sources.key_of(backend.url)
    shown |= {"api_key_file": key.file} if key is not None else {}
    return {**backend_view(backend, node.registry), **shown}


def options_digest(node: Node, backend: Backend) -> int:
    """Return 32 bits of what a backend was given that nodes share but its weight; alike where they agree."""
    spec = node.sources.spec_of(backend.url)
    given = () if spec is None else (*[getattr(spec, name) for name in GIVEN],)
    return crc32(repr(given).encode())


PLACING = ("Models", "Routing", "Clients", "Retries")
"""Sections of the configuration that decide where requests go, and how."""

OWN = frozenset(("shadow", "recent_decisions", "route_capacity", "prompt_memory_entries", *SECRETS))
"""Keys of these sections in which nodes may well differ, and secrets, which fingerprints show."""

OF_KEYS = ("api_key", "api_key_file")
"""Members of a table of models in which they may differ, too."""


def settings_digest(config: Config) -> int:
    """Return 32 bits of what decides where requests go, never 0; alike where nodes are to agree. Files and keys count
    for nothing, also those of models: their places differ."""
    names = [name for name, key in KEYS.items() if key.option.section in PLACING and not name.endswith("_file")]
    values = {name: jsonable(KEYS[name].value_in(config)) for name in names if name not in OWN}
    values["model"] = [{name: each[name] for name in each if name not in OF_KEYS} for each in values["model"]]
    return crc32(json.dumps(values, sort_keys=True).encode()) or 1


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
        "leaving": backend.origin.leaving,
        "wanted_by": backend.origin.wanted_by,
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
        (
            "refusing_status",
            "Status with which the backend refuses or fails what others serve; 200: its answers are blank; 0: none.",
            refusing,
        ),
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
