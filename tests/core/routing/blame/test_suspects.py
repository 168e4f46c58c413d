"""Whom the failures of a request blame, and what that does to circuits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.backends import BackendLimits, Circuit, Health, Outcome, ProbeResult, Registry
from ranvier_py.core.routing.blame.suspects import Fault, Suspects
from ranvier_py.core.routing.health import FAULTS, Vitals

A, B, C = BackendId(0), BackendId(1), BackendId(2)
LATER = sorted(FAULTS - {Outcome.CONNECT_ERROR}, key=lambda outcome: outcome.value)


def blamed(ended: Outcome, *failed: BackendId) -> Sequence[tuple[BackendId, int | None]]:
    suspects = Suspects(cause=7)
    for backend in failed:
        assert suspects.add(backend, 1, Outcome.SERVER_ERROR)
    faults = suspects.settle(ended)
    assert suspects.settle(Outcome.SUCCESS) == []  # each once
    return [(fault.backend, fault.cause) for fault in faults]


def test_all_that_failed_a_request_which_another_served_are_blamed() -> None:
    assert blamed(Outcome.SUCCESS, A, B) == [(A, None), (B, None)]


@pytest.mark.parametrize("ended", [Outcome.SERVER_ERROR, Outcome.OVERLOADED, Outcome.CONNECT_ERROR, Outcome.REFUSED])
def test_nobody_is_blamed_for_a_request_that_several_failed_and_none_served(ended: Outcome) -> None:
    assert blamed(ended, A, B) == []


def test_nobody_is_blamed_for_a_request_that_another_refused() -> None:
    assert blamed(Outcome.REFUSED, A) == []


@pytest.mark.parametrize("ended", [*LATER, Outcome.OVERLOADED, Outcome.CONNECT_ERROR, Outcome.CANCELLED])
def test_a_single_one_is_blamed_once_for_equal_requests(ended: Outcome) -> None:
    assert blamed(ended, A) == [(A, 7)]
    assert blamed(ended, A, A) == [(A, 7), (A, 7)]


def test_only_faults_other_than_failed_connects_are_settled_later() -> None:
    assert [outcome for outcome in Outcome if Suspects(0).add(A, 1, outcome)] == [
        outcome for outcome in Outcome if outcome in LATER
    ]


def test_the_row_of_faults_counts_each_cause_once_until_a_request_is_served() -> None:
    vitals = Vitals(BackendLimits())
    for _ in range(50):
        for cause in (1, 2, 3, 4):
            vitals.end(Outcome.TIMEOUT, 0.0, cause=cause)
    assert vitals.circuit is Circuit.CLOSED
    vitals.end(Outcome.SUCCESS, 0.0)
    for cause in (1, 2, 3, 4, 5):
        assert vitals.circuit is Circuit.CLOSED
        vitals.end(Outcome.TIMEOUT, 0.0, cause=cause)
    assert vitals.circuit is Circuit.OPEN


def test_a_trial_that_fails_opens_the_circuit_again_whatever_its_cause() -> None:
    vitals = Vitals(BackendLimits(circuit_open_s=30.0))
    for cause in range(5):
        vitals.end(Outcome.BROKEN, 0.0, cause=cause)
    vitals.tick(30.0)
    assert vitals.circuit is Circuit.HALF_OPEN
    vitals.end(Outcome.BROKEN, 30.0, cause=0)
    assert vitals.circuit is Circuit.OPEN


def cluster(count: int) -> Registry:
    registry = Registry(BackendLimits())
    for number in range(count):
        registry.add(f"http://10.0.0.{number + 1}:8000", name=f"e{number}")
    return registry


def open_circuit(registry: Registry, backend: BackendId, now: float) -> None:
    for _ in range(5):
        registry.changes.blamed(Fault(backend, registry[backend].generation, Outcome.SERVER_ERROR), now)
    assert registry[backend].circuit is Circuit.OPEN


def test_a_process_that_has_been_replaced_is_not_blamed() -> None:
    registry = cluster(2)
    old = registry[A].generation
    registry.changes.restart(registry[A], "seen", 0.0)
    registry.remove("e1")
    for backend in (A, B):
        for _ in range(9):
            assert registry.changes.blamed(Fault(backend, old, Outcome.SERVER_ERROR), 0.0) == ()
    assert (registry[A].circuit, registry[A].seen.success_rate) == (Circuit.CLOSED, 1.0)


@pytest.mark.parametrize("count", range(1, 9))
def test_circuits_take_out_at_most_half_of_a_pool(count: int) -> None:
    registry = cluster(count)
    for number in range(count):
        open_circuit(registry, BackendId(number), float(number))
        pool = registry.pools.pool("", float(number))
        out = number + 1 if number + 1 <= count / 2 else count // 2
        assert len(pool.ids) == (count - out if number + 1 < count else count)
        assert pool.last_resort is (number + 1 == count)
        assert pool.ids == tuple(sorted(pool.ids))


@pytest.mark.parametrize("count", range(3, 9))
def test_who_goes_on_failing_behind_an_open_circuit_is_out_until_it_may_try(count: int) -> None:
    registry, opened, sent = cluster(count), 1.0, 2.0
    well = BackendId(count - 1)
    for number in range(count - 1):
        open_circuit(registry, BackendId(number), opened)
    while (pool := registry.pools.pool("", sent)).ids != (well,):
        others = [each for each in pool.ids if each != well]
        assert len(pool.ids) <= (count + 1) // 2
        fault = Fault(others[0], registry[well].generation, Outcome.BROKEN, sent_at=0.0)
        for _ in range(9):  # of requests that were under way already
            registry.changes.blamed(fault, sent)
        assert registry.pools.pool("", sent).ids == pool.ids
        for _ in range(4):
            registry.changes.blamed(fault._replace(sent_at=sent), sent)
        assert registry.pools.pool("", sent).ids == pool.ids
        registry.changes.blamed(fault._replace(sent_at=sent), sent)
        assert others[0] not in registry.pools.pool("", sent).ids
    assert not pool.last_resort
    assert len(registry.pools.pool("", opened + 30.0).ids) == count


def test_one_request_that_is_repeated_takes_nobody_out_behind_an_open_circuit() -> None:
    registry = cluster(3)
    for backend in (A, B):
        for cause in range(5):
            registry.changes.blamed(Fault(backend, 1, Outcome.BROKEN, cause=cause), 1.0)
        for _ in range(20):
            registry.changes.blamed(Fault(backend, 1, Outcome.BROKEN, cause=4, sent_at=2.0), 2.0)
    assert len(registry.pools.pool("", 2.0).ids) == 2


def test_beyond_half_those_are_asked_that_would_be_tried_first() -> None:
    registry = cluster(4)
    for number in (2, 0, 1):
        open_circuit(registry, BackendId(number), float(number))
    assert registry.pools.pool("", 2.0).ids == (A, BackendId(3))
    assert registry.pools.pool("", 2.0, [BackendId(3)]).ids == (A,)  # a request that tried one of them asks the other


def test_backends_that_are_not_there_are_no_part_of_the_half() -> None:
    registry = cluster(4)
    for number in (2, 3):
        for _ in range(3):
            registry.changes.probed(BackendId(number), ProbeResult(False), 0.0)
        assert registry[BackendId(number)].health is Health.UNHEALTHY
    open_circuit(registry, A, 0.0)
    assert registry.pools.pool("", 0.0).ids == (B,)


def test_the_half_is_of_those_that_serve_the_model() -> None:
    registry = cluster(4)
    for number, model in enumerate("mmxx"):
        registry.changes.probed(BackendId(number), ProbeResult(True, models=(model,), cards=({"id": model},)), 0.0)
    for number in (0, 2, 3):
        open_circuit(registry, BackendId(number), 0.0)
    assert registry.pools.pool("m", 0.0).ids == (B,)
    assert registry.pools.pool("x", 0.0).ids == (C, BackendId(3))
