"""Each state of an engine that an operator should act on is one finding, with whom it touches and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ranvier_py.core.findings import Severity
from ranvier_py.core.routing.backends import Backend, Outcome, ProbeResult, Registry
from ranvier_py.core.routing.blame.refusals import BLANK_STATUS, kind_of
from ranvier_py.core.routing.engine_findings import engine_findings
from ranvier_py.core.routing.processes.engine_marks import OtherNames
from tests.core.routing.test_backends import REFUSED, UP, cluster, serving

SILENT = ProbeResult(False, detail="no answer", timed_out=True, latency_s=1.0)


def probe(registry: Registry, backend: Backend, result: ProbeResult, times: int = 3, since: float = 10.0) -> None:
    for number in range(times):
        registry.changes.probed(backend.id, result, since + 10.0 * number)


def finish(registry: Registry, backend: Backend, outcome: Outcome, times: int = 1) -> None:
    for _ in range(times):
        registry.dispatched(backend, 0.0)
        registry.finished(backend, outcome, 0.0)


def refuse(registry: Registry, backend: Backend, status: int = 404) -> None:
    kind = kind_of(b"/v1/chat/completions", "m", stream=True)
    for _ in range(8):
        registry.refusals.refused(backend, kind, status, 0.0)
        registry.refusals.contradicted(backend, kind, status, 0.0)


def without_caching(registry: Registry, backend: Backend) -> None:
    backend.reuse.page_read(caches=False, hit_tokens=None)


def let_go(registry: Registry, backend: Backend) -> None:
    backend.origin.leaving = "it ends, as kubernetes service/vllm has it"
    registry.drain(backend.name, True)


def with_a_twin(registry: Registry, backend: Backend) -> None:
    backend.behind.names = OtherNames(twins=["e7"])


STATES: dict[str, Callable[[Registry, Backend], object]] = {
    "engine_draining": lambda registry, backend: registry.drain(backend.name, True),
    "engine_leaving": let_go,
    "engine_url": with_a_twin,
    "engine_down": lambda registry, backend: probe(registry, backend, REFUSED),
    "engine_hangs": lambda registry, backend: probe(registry, backend, SILENT, since=50.0),
    "engine_key_refused": lambda registry, backend: probe(
        registry, backend, replace(UP, key_refused="401 of /v1/models"), times=1
    ),
    "engine_fails": lambda registry, backend: finish(registry, backend, Outcome.SERVER_ERROR, 5),
    "engine_refuses": refuse,
    "engine_answers_nothing": lambda registry, backend: refuse(registry, backend, BLANK_STATUS),
    "engine_busy": lambda registry, backend: registry.pauses.begin(backend.id, 200.0),
    "engine_reuses_nothing": without_caching,
}


@pytest.mark.parametrize("kind", STATES)
def test_each_state_of_an_engine_is_one_finding_of_that_engine(kind: str) -> None:
    registry = cluster(3)
    for backend in registry:
        probe(registry, backend, UP)
    assert not [*engine_findings(registry, 100.0)]
    chosen = next(iter(registry))
    STATES[kind](registry, chosen)
    (found,) = engine_findings(registry, 100.0)
    assert (found.kind, found.about) == (kind, chosen.name)
    assert found.severity is (Severity.NOTICE if kind in ("engine_draining", "engine_leaving") else Severity.DEGRADED)
    assert chosen.name in found.what
    assert found.remedy


def test_an_engine_that_fails_now_and_then_is_named_with_its_last_reason() -> None:
    registry = cluster(1)
    (backend,) = registry
    backend.seen.complaint = "it answered 500, within a 200"
    for _ in range(15):
        finish(registry, backend, Outcome.BROKEN)
        finish(registry, backend, Outcome.SUCCESS)
    (found,) = engine_findings(registry, 0.0)
    assert found.kind == "engine_fails"
    assert "15 broken" in found.what
    assert "within a 200" in found.what
    finish(registry, backend, Outcome.SUCCESS, 100)
    assert not [*engine_findings(registry, 0.0)]


def test_few_failures_are_enough_where_others_serve_and_an_engine_is_asked_no_more() -> None:
    registry = cluster(2)
    fresh, proven = registry
    finish(registry, fresh, Outcome.SERVER_ERROR)
    finish(registry, proven, Outcome.SUCCESS)
    finish(registry, proven, Outcome.SERVER_ERROR)
    assert [each.about for each in engine_findings(registry, 0.0)] == [fresh.name]
    finish(registry, proven, Outcome.SERVER_ERROR)
    assert [each.about for each in engine_findings(registry, 0.0)] == [fresh.name, proven.name]
    for backend in registry:
        finish(registry, backend, Outcome.SUCCESS)
    assert not [*engine_findings(registry, 0.0)]


def test_who_does_not_answer_is_not_blamed_for_its_circuit() -> None:
    registry = cluster(2)
    first, _ = registry
    finish(registry, first, Outcome.CONNECT_ERROR, 5)
    probe(registry, first, REFUSED)
    assert [each.kind for each in engine_findings(registry, 100.0)] == ["engine_down"]


@pytest.mark.parametrize("kind", ["engine_down", "engine_hangs", "engine_fails", "engine_draining"])
def test_a_fleet_of_which_nobody_serves_is_down(kind: str) -> None:
    registry = cluster(2)
    for backend in registry:
        STATES[kind](registry, backend)
    fleet, *each = engine_findings(registry, 0.0)
    assert (fleet.kind, fleet.severity) == ("no_engine", Severity.DOWN)
    assert kind in fleet.what
    assert [one.kind for one in each] == [kind, kind]


def test_a_model_that_no_engine_serves_any_more_is_named() -> None:
    registry = cluster(3)
    for backend, model in zip(registry, ("big", "big", "small"), strict=True):
        probe(registry, backend, serving(model), times=2)
    first, second, _ = registry
    probe(registry, first, REFUSED)
    assert [each.kind for each in engine_findings(registry, 100.0)] == ["engine_down"]
    probe(registry, second, REFUSED)
    lost = next(each for each in engine_findings(registry, 100.0) if each.kind == "model_down")
    assert "big" in lost.what
    assert "small" not in lost.what


def test_what_is_wrong_with_a_drained_engine_is_a_notice_beside_that() -> None:
    registry = cluster(2)
    first, _ = registry
    registry.drain(first.name, True)
    probe(registry, first, REFUSED)
    found = [*engine_findings(registry, 100.0)]
    assert [(each.kind, each.severity) for each in found] == [
        ("engine_draining", Severity.NOTICE),
        ("engine_down", Severity.NOTICE),
    ]
