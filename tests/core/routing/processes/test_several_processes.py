"""How many processes answer behind one backend's URL, by what probes read."""

from __future__ import annotations

import pytest

from ranvier_py.core.routing.processes.several_processes import LIFE_S, STARTS_MAX, SeveralProcesses, advice
from tests.core.routing.test_backends import lone, started


@pytest.mark.parametrize(
    ("starts", "count"),
    [
        ([], 1),
        ([10.0, 10.2, 10.0], 1),
        ([10.0, 20.0, 30.0], 1),  # restarts
        ([10.0, 20.0, 10.0], 2),
        ([10.0, 20.0, 30.0, 20.0], 3),
    ],
)
def test_a_start_time_that_comes_back_proves_several(starts: list[float], count: int) -> None:
    several = SeveralProcesses()
    for now, start in enumerate(starts):
        several.take(start, now)
    assert several.count(len(starts)) == count


def test_a_proof_ends_some_time_after_the_last_return_and_memory_is_bounded() -> None:
    several = SeveralProcesses()
    for start in (10.0, 20.0, 10.0):
        several.take(start, 0)
    assert several.count(LIFE_S - 1) == 2
    assert several.count(LIFE_S) == 1
    for number in range(100):
        several.take(100.0 + number, number)
    assert len(several.starts) == STARTS_MAX


def test_addresses_are_a_proof_and_advice_names_the_remedy() -> None:
    assert SeveralProcesses(hosts=3).count(0) == 3
    assert advice(1, 1, "http://h:1") == ""
    assert "a backend of its own" in advice(3, 1, "http://h:1")
    assert "http://h:1#rank=0 to http://h:1#rank=3" in advice(1, 4, "http://h:1")


def test_alternating_start_times_begin_no_generations_once_they_are_understood() -> None:
    registry, backend = lone()
    changes = [
        change
        for now in range(40)
        for change in registry.changes.probed(backend.id, started(1000.0 * (1 + now % 3)), now)
        if change.what in ("generation", "processes")
    ]
    assert [change.what for change in changes] == ["generation", "generation", "processes"]
    assert backend.behind.processes == 3
    assert registry.changes.restart_reported(backend, 5000.0, 41.0) == []


def test_a_restart_is_seen_again_when_only_one_process_is_left() -> None:
    registry, backend = lone()
    for now, start in enumerate([1000.0, 2000.0, 1000.0]):
        registry.changes.probed(backend.id, started(start), now)
    registry.changes.probed(backend.id, started(1000.0), LIFE_S + 10)
    before = backend.generation
    registry.changes.probed(backend.id, started(9000.0), LIFE_S + 20)
    assert (backend.behind.processes, backend.generation) == (1, before + 1)
