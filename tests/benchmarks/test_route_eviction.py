"""What the benchmark of route eviction asks of its figures."""

from __future__ import annotations

import pytest

from benchmarks.harness.report_replays import route_eviction
from benchmarks.route_eviction import Row, goals, rows_of, workloads_of


def cell(share: float, eviction: str, hit_rate: float) -> Row:
    return {"workload": "chats", "share": share, "rows": 10, "eviction": eviction, "hit_rate": hit_rate}


ROWS = [cell(1.0, "lru", 0.8), cell(0.1, "lru", 0.2), cell(0.1, "utility", 0.195), cell(0.4, "lru", 0.3)]


def test_a_cell_may_lose_a_point_and_no_more() -> None:
    found = goals([*ROWS, cell(0.4, "utility", 0.7)])
    assert (found["reached"], found["cells"], found["better"]) == (True, 2, 1)
    assert found["gained"] == {"chats 0.1": -0.005, "chats 0.4": 0.4}
    assert not goals([*ROWS, cell(0.4, "utility", 0.28)])["reached"]


def test_the_page_shows_each_trace_and_what_misses() -> None:
    measured = [*ROWS, cell(0.4, "utility", 0.28)]
    result = {"rows": measured, "goals": goals(measured), "costs": []}
    total, chats = route_eviction(result)
    assert total.met is False
    assert "20.0% / 19.5% and 30.0% / 28.0%" in chats.figure


def test_small_tables_are_run_by_both_rules() -> None:
    (workload,) = workloads_of(["chat_threads"])
    found = list(rows_of(workload, 60, 1))
    runs = [(1.0, "lru"), (0.15, "lru"), (0.15, "utility"), (0.4, "lru"), (0.4, "utility")]
    assert [(row["share"], row["eviction"]) for row in found] == [*runs, *runs]
    assert [row["streamed"] for row in found] == [True] * 5 + [False] * 5
    assert goals(found)["cells"] == 4
    assert all(row["rows"] <= found[0]["rows"] * max(row["share"], 0.15) + 16 for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lmsys", "sharegpt", "swebench", "rag"])
def test_on_the_traces_of_the_paper_it_is_never_a_point_below_lru(name: str) -> None:
    (workload,) = workloads_of([name])
    found = goals(list(rows_of(workload, 600, 1)))
    assert found["worst"] >= -0.01
    assert found["cells"] == 4
