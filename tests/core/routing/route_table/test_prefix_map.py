"""The map of the prefixes that were used last: what is in it, how it hangs together, and its bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from ranvier_py.core.ids import BackendId
from ranvier_py.core.routing.route_table import RouteTable, Trust
from ranvier_py.core.routing.route_table.prefix_map import HALF_S, ROUTES_MAX, STEP_ROWS, prefix_map
from tests.builders.route_tables import route_table
from tests.node.turns import OCCUPIED_S_MAX, least_s, longest_step_s


def made(table: RouteTable, now: float, routes_max: int = ROUTES_MAX) -> dict[str, Any]:
    steps = prefix_map(table, now, routes_max)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: dict[str, Any] = end.value
            return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}


def learned(table: RouteTable, names: list[int], now: float, backend: int = 0) -> None:
    chain = [(16 * (depth + 1), name, 0) for depth, name in enumerate(names)]
    table.learn(chain[::-1], BackendId(backend), 0, Trust.LOCAL, now)


def test_each_prefix_has_its_depth_its_parent_its_holders_and_its_heat() -> None:
    table = route_table(capacity=100)
    learned(table, [1, 2], 10.0)
    learned(table, [1, 3], 10.0 + HALF_S, backend=1)
    found = made(table, 10.0 + HALF_S)
    rows = {
        name: (tokens, found["name"][parent] if parent >= 0 else "", holders, heat)
        for name, tokens, parent, holders, heat in zip(
            *(found[column] for column in ("name", "tokens", "parent", "holders", "heat")), strict=True
        )
    }
    one, two, three = (f"{number:016x}" for number in (1, 2, 3))
    assert rows == {one: (16, "", 2, 1.0), two: (32, one, 1, 0.5), three: (32, one, 1, 1.0)}
    assert found["routes"] == 3


@pytest.mark.parametrize("seed", range(5))
def test_of_too_many_those_used_last_stay_with_all_that_stands_above_them(seed: int) -> None:
    rng, table = Random(seed), route_table(capacity=5000)
    for second in range(400):
        names = [rng.randrange(3) + 1]
        while len(names) < 6:
            names.append(names[-1] * 10 + rng.randrange(4))
        learned(table, names, float(second))
    found = made(table, 400.0, 60)
    assert 30 <= len(found["name"]) <= 60
    assert len(set(found["name"])) == len(found["name"])
    for place, parent in enumerate(found["parent"]):
        assert (parent == -1) is (found["tokens"][place] == 16)
        assert parent < 0 or found["tokens"][parent] < found["tokens"][place]
    kept = {idle for place, idle in enumerate(found["idle_s"]) if place not in found["parent"]}
    assert max(kept) < 100


def test_the_table_may_change_between_the_steps() -> None:
    table, rng = route_table(capacity=2 * STEP_ROWS), Random(1)
    for number in range(1, STEP_ROWS + 10):
        learned(table, [number], 1.0)
    steps = prefix_map(table, 2.0)
    next(steps)
    for number in range(STEP_ROWS + 10, 2 * STEP_ROWS + 10):  # evicts some that were found
        learned(table, [number, number + 10**9], 2.0 + rng.random())
    for _ in steps:
        learned(table, [rng.getrandbits(60) + 1], 3.0)


@pytest.mark.slow
def test_no_step_through_a_million_routes_takes_long() -> None:
    table = route_table(capacity=1_000_000)
    for number in range(1, 1_000_000, 4):
        learned(table, [number, number + 1, number + 2, number + 3], number / 1000)
    assert least_s(lambda: longest_step_s(prefix_map(table, 1000.0))) <= OCCUPIED_S_MAX
